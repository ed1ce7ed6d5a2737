"""A Program on the device: device code made and loaded, parameters packed, launches ready to be enqueued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from backends.gpu.arguments import PackedParameters, parameters_of
from backends.gpu.driver import call, driver
from megamoe.contract import DeviceError, UnsupportedError
from megamoe.contract.assembly import assemblers

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Launch, Program, Target

MAX_PLAIN_SMEM: Final = 48 * 1024
"""Dynamic shared memory a CTA, in bytes, that needs no opt-in (CUDA programming guide, shared memory)."""
MAX_PORTABLE_CLUSTER: Final = 8
"""CTAs a cluster that every device can hold (CUDA programming guide, thread block clusters)."""


@lru_cache(maxsize=8)
def device_code(ptx: str, target: Target) -> bytes:
    """A cubin for `target`; without an assembler the PTX, ended by a zero, for the driver's own compiler.

    The assembler comes first because the driver's compiler refuses PTX newer than the driver (9.0 for CUDA 13.0).
    DeviceError if an assembler refuses the text.
    """
    for name, load in assemblers().items():
        try:
            return load()(ptx, target).cubin
        except UnsupportedError:
            continue
        except Exception as error:
            raise DeviceError(f"the assembler {name} refuses the program for {target}: {error}") from error
    return ptx.encode() + b"\0"


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
        self._parameters: PackedParameters = parameters_of(launch, addresses)
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
    """Asks for what a launch needs leave for: much shared memory, or a cluster that not every device can hold."""
    attributes = driver().CUfunction_attribute
    x, y, z = launch.cluster
    if launch.dynamic_smem > MAX_PLAIN_SMEM:
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        doing = f"allowing {launch.entry} {launch.dynamic_smem} bytes of dynamic shared memory"
        call("cuFuncSetAttribute", kernel, attribute, launch.dynamic_smem, doing=doing)
    if x * y * z > MAX_PORTABLE_CLUSTER:
        attribute = attributes.CU_FUNC_ATTRIBUTE_NON_MAX_PORTABLE_CLUSTER_SIZE_ALLOWED
        call("cuFuncSetAttribute", kernel, attribute, 1, doing=f"allowing {launch.entry} clusters of {x * y * z} CTAs")


@contextmanager
def bound_program(program: Program, tensors: Mapping[str, torch.Tensor]) -> Iterator[KernelCall]:
    """`program`, loaded, on `tensors` of the current device. Workspaces hold 0xFF bytes, as on the VM.

    DeviceError if the assembler or the driver refuses.
    """
    scratch = scratch_memory(program.scratch)
    addresses = {name: tensor.data_ptr() for name, tensor in {**tensors, **scratch}.items()}
    code = device_code(program.ptx, program.target)
    module = call("cuModuleLoadData", code, doing=f"loading {len(code)} bytes of code for {program.target}")
    try:
        yield KernelCall(program, addresses, module)
    finally:
        # Unloading waits for the kernels. On a lost device it fails; nothing is left to free then.
        driver().cuModuleUnload(module)


def scratch_memory(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Workspaces of `sizes` bytes by name. Every byte is 0xFF, as on the VM: no kernel may count on zeros."""
    import torch

    return {name: torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for name, size in sizes.items()}


def current_stream() -> int:
    """The handle of torch's current stream."""
    import torch

    return torch.cuda.current_stream().cuda_stream
