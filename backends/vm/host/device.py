"""The device that a host function asks about: attributes of a B200 (sm_100a) and an H200 (sm_90a).

Numbers are those of cudaDeviceAttr (CUDA runtime API). Values common to both are in facts.md 0.1 and the CUDA
programming guide's table of compute capabilities 9.0 and 10.0; the number of SMs is that of the full product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from backends.vm.host.host_error import HostError
from backends.vm.memory.shared import MAX_DYNAMIC

SMEM_PER_SM: Final = 233_472
SMEM_RESERVED: Final = 1024
THREADS_PER_SM: Final = 2048
CTAS_PER_SM: Final = 32

_COMMON: Final[Mapping[int, int]] = {
    1: 1024,  # MaxThreadsPerBlock
    2: 1024,  # MaxBlockDimX
    3: 1024,  # MaxBlockDimY
    4: 64,  # MaxBlockDimZ
    5: 2**31 - 1,  # MaxGridDimX
    6: 65535,  # MaxGridDimY
    7: 65535,  # MaxGridDimZ
    8: 49152,  # MaxSharedMemoryPerBlock
    9: 65536,  # TotalConstantMemory
    10: 32,  # WarpSize
    12: 65536,  # MaxRegistersPerBlock
    19: 0,  # CanMapHostMemory of an integrated device: Integrated
    31: 1,  # ConcurrentKernels
    39: THREADS_PER_SM,  # MaxThreadsPerMultiProcessor
    41: 1,  # UnifiedAddressing
    81: SMEM_PER_SM,  # MaxSharedMemoryPerMultiprocessor
    82: 65536,  # MaxRegistersPerMultiprocessor
    83: 1,  # ManagedMemory
    95: 1,  # CooperativeLaunch
    97: MAX_DYNAMIC,  # MaxSharedMemoryPerBlockOptin
    106: CTAS_PER_SM,  # MaxBlocksPerMultiprocessor
    111: SMEM_RESERVED,  # ReservedSharedMemoryPerBlock
    115: 1,  # MemoryPoolsSupported
    120: 1,  # ClusterLaunch
}
_BY_TARGET: Final[Mapping[str, Mapping[int, int]]] = {
    "sm_90a": {16: 132, 38: 62_914_560, 75: 9, 76: 0},  # MultiProcessorCount, L2CacheSize, ComputeCapability
    "sm_100a": {16: 148, 38: 132_644_864, 75: 10, 76: 0},
}


class Device:
    """One GPU of `target`."""

    def __init__(self, target: str) -> None:
        if target not in _BY_TARGET:
            raise HostError(f"there is no device of target {target!r}; known are {', '.join(_BY_TARGET)}")
        self.target = target
        self._attributes = {**_COMMON, **_BY_TARGET[target]}

    def attribute(self, number: int) -> int:
        """The value of cudaDeviceAttr `number`; HostError for one that this device does not have."""
        if number not in self._attributes:
            raise HostError(f"the host function asks for device attribute {number} (cudaDeviceAttr), unknown to the VM")
        return self._attributes[number]

    def resident_ctas(self, threads: int, smem: int) -> int:
        """CTAs of `threads` threads and `smem` bytes that one SM holds at once; registers are not counted."""
        by_smem = SMEM_PER_SM // (smem + SMEM_RESERVED)
        return min(CTAS_PER_SM, THREADS_PER_SM // max(1, -(-threads // 32) * 32), by_smem)
