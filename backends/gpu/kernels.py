"""A Program on the device: its module loaded, its parameters packed, its launches ready to be enqueued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from backends.gpu.arguments import Parameters, parameters_of
from backends.gpu.binary import device_code
from backends.gpu.driver import call, driver

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Launch, Program

SMEM_WITHOUT_ASKING: Final = 48 * 1024
"""Dynamic shared memory a CTA, in bytes, that needs no opt-in (CUDA programming guide, shared memory)."""
PORTABLE_CLUSTER: Final = 8


class KernelCall:
    """The launches of a Program on torch's current stream, in order."""

    def __init__(self, program: Program, addresses: Mapping[str, int], module: Any) -> None:
        self._launches = [_ReadyLaunch(launch, addresses, module) for launch in program.launches]

    def enqueue(self) -> None:
        """Launches every kernel; DeviceError if the driver refuses one."""
        stream = current_stream()
        for launch in self._launches:
            launch.enqueue(stream)

    def collect(self) -> None:
        """The kernels write to the case's tensors themselves."""


class _ReadyLaunch:
    def __init__(self, launch: Launch, addresses: Mapping[str, int], module: Any) -> None:
        self._said = (
            f"launching {launch.entry} with grid {launch.grid}, block {launch.block}, cluster {launch.cluster} and "
            f"{launch.dynamic_smem} bytes of dynamic shared memory"
        )
        self._kernel = call(
            "cuModuleGetFunction", module, launch.entry.encode(), doing=f"looking up the kernel {launch.entry}"
        )
        self._parameters: Parameters = parameters_of(launch, addresses)
        self._config = _configuration(launch)
        _opt_in(self._kernel, launch)

    def enqueue(self, stream: int) -> None:
        self._config.hStream = stream
        call("cuLaunchKernelEx", self._config, self._kernel, self._parameters.address, 0, doing=self._said)


def _configuration(launch: Launch) -> Any:
    cu = driver()
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.dynamic_smem
    if launch.cluster != (1, 1, 1):
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = attribute.value.clusterDim
        dims.x, dims.y, dims.z = launch.cluster
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def _opt_in(kernel: Any, launch: Launch) -> None:
    """Allows `kernel` what a launch must ask for: much shared memory, or a cluster that not every device can hold."""
    attributes = driver().CUfunction_attribute
    x, y, z = launch.cluster
    if launch.dynamic_smem > SMEM_WITHOUT_ASKING:
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        doing = f"allowing {launch.entry} {launch.dynamic_smem} bytes of dynamic shared memory"
        call("cuFuncSetAttribute", kernel, attribute, launch.dynamic_smem, doing=doing)
    if x * y * z > PORTABLE_CLUSTER:
        attribute = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        call("cuFuncSetAttribute", kernel, attribute, 1, doing=f"allowing {launch.entry} clusters of {x * y * z} CTAs")


@contextmanager
def bound_program(program: Program, tensors: Mapping[str, torch.Tensor]) -> Iterator[KernelCall]:
    """`program` loaded, on `tensors` of the current device. Workspaces hold 0xFF bytes, as on the VM.

    DeviceError for what the assembler or the driver refuses.
    """
    scratch = scratch_memory(program.scratch)
    addresses = {name: tensor.data_ptr() for name, tensor in {**tensors, **scratch}.items()}
    code = device_code(program.ptx, program.target)
    module = call("cuModuleLoadData", code, doing=f"loading {len(code)} bytes of code for {program.target}")
    try:
        yield KernelCall(program, addresses, module)
    finally:
        # Unloading waits for the kernels; on a device that is lost it can only fail, and nothing is left to free.
        driver().cuModuleUnload(module)


def scratch_memory(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Workspaces of `sizes` bytes by name, every byte 0xFF: as on the VM, a kernel must not count on their contents."""
    import torch

    return {name: torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for name, size in sizes.items()}


def current_stream() -> int:
    """The handle of torch's current stream."""
    import torch

    return torch.cuda.current_stream().cuda_stream
