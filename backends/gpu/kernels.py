"""Programs of raw PTX on the device: modules, kernel parameters as the bytes that the driver copies, launches.

The driver itself encodes tensor maps: cuTensorMapEncodeTiled (CUDA driver API, tensor map object management)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from backends.gpu.driver import call, described, driver, driver_library
from megamoe.contract import BufferArg, DeviceError, KernelArg, Launch, ScalarArg, TensorMapArg, UnsupportedError
from megamoe.contract.assembly import assemblers

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Launch, Program, Target

SCALAR_FORMATS: Final[Mapping[str, str]] = {
    "bool": "<?", "u8": "<B", "s8": "<b", "u16": "<H", "s16": "<h", "u32": "<I", "s32": "<i", "b32": "<I", "f16": "<e",
    "f32": "<f", "u64": "<Q", "s64": "<q", "b64": "<Q", "f64": "<d",
}  # fmt: skip
MAP_BYTES: Final = 128
ALIGNMENT: Final = 64
# dtype of the spec -> CUtensorMapDataType. b4x16 and its like are the packed types of PTX ISA, section 5.5.1.
_TYPES: Final[Mapping[str, str]] = {
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "u64": "UINT64", "s64": "INT64",
    "f16": "FLOAT16", "f32": "FLOAT32", "f32_ftz": "FLOAT32_FTZ", "f64": "FLOAT64", "bf16": "BFLOAT16",
    "tf32": "TFLOAT32", "tf32_ftz": "TFLOAT32_FTZ", "b4x16": "16U4_ALIGN8B", "b4x16_p64": "16U4_ALIGN16B",
    "b6x16_p32": "16U6_ALIGN16B",
}  # fmt: skip
_SWIZZLES: Final = ("none", "32B", "64B", "128B")
_FILLS: Final[Mapping[str, str]] = {"zero": "NONE", "nan": "NAN_REQUEST_ZERO_FMA"}


class PackedParameters:
    """The parameters of one call, in host memory. `address` is the void** that points to each of them."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.held = [ctypes.create_string_buffer(content, max(len(content), 1)) for content in contents]
        self._pointers = (ctypes.c_void_p * max(len(contents), 1))(*(ctypes.addressof(one) for one in self.held))
        self.address = ctypes.addressof(self._pointers)


def parameters_of(launch: Launch, addresses: Mapping[str, int]) -> PackedParameters:
    """The parameters of `launch`. `addresses`: of tensors and scratch, by name. DeviceError for a value that does not
    fit or a tensor that was not given."""
    return PackedParameters([_encoded(arg, addresses) for arg in launch.args])


def _encoded(arg: KernelArg, addresses: Mapping[str, int]) -> bytes:
    if isinstance(arg, ScalarArg):
        return scalar_bytes(arg)
    address = address_of(arg.tensor, arg.offset, addresses)
    return struct.pack("<Q", address) if isinstance(arg, BufferArg) else encoded_map(arg, address)


def address_of(tensor: str, offset: int, addresses: Mapping[str, int]) -> int:
    """The address of byte `offset` of a tensor or scratch buffer. DeviceError for an unknown name."""
    if tensor not in addresses:
        known = ", ".join(addresses) or "none"
        raise DeviceError(f"the program passes the tensor {tensor!r}, which was not given; there are: {known}")
    return addresses[tensor] + offset


def scalar_bytes(arg: ScalarArg) -> bytes:
    """The bytes of a scalar. DeviceError for an unknown type or a value that the type does not hold."""
    if arg.dtype not in SCALAR_FORMATS:
        raise DeviceError(f"a scalar argument of dtype {arg.dtype!r}; known are: {', '.join(SCALAR_FORMATS)}")
    try:
        return struct.pack(SCALAR_FORMATS[arg.dtype], arg.value)
    except (struct.error, OverflowError) as error:
        raise DeviceError(f"the value {arg.value!r} does not fit a scalar argument of {arg.dtype}: {error}") from None


def encoded_map(arg: TensorMapArg, address: int) -> bytes:
    """The 128-byte tensor map of `arg` at `address`. DeviceError, with all that was asked, if the driver refuses."""
    types, swizzle, promotion, fill, interleave = _codes(arg)
    rank = len(arg.dims)
    if len(arg.strides) != rank - 1 or len(arg.box) != rank:
        raise DeviceError(f"{_asked(arg, address)}: dims and box need one entry a dimension, strides one fewer")
    # cuda.bindings aligns its CUtensorMap to 16 bytes; the driver wants 64.
    room = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
    place = -(-ctypes.addressof(room) // ALIGNMENT) * ALIGNMENT
    code = driver_library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(types),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*arg.dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*arg.strides),
        (ctypes.c_uint32 * rank)(*arg.box),
        (ctypes.c_uint32 * rank)(*(arg.element_strides or (1,) * rank)),
        ctypes.c_int(interleave),
        ctypes.c_int(swizzle),
        ctypes.c_int(promotion),
        ctypes.c_int(fill),
    )
    if code:
        returned = described(driver().CUresult(code))
        raise DeviceError(f"cuTensorMapEncodeTiled returned {returned} while encoding {_asked(arg, address)}")
    return ctypes.string_at(place, MAP_BYTES)


def _codes(arg: TensorMapArg) -> tuple[int, int, int, int, int]:
    if arg.dtype not in _TYPES:
        raise DeviceError(f"a tensor map of {arg.tensor!r} with dtype {arg.dtype!r}; known are: {', '.join(_TYPES)}")
    if arg.swizzle not in _SWIZZLES:
        raise DeviceError(f"a tensor map of {arg.tensor!r} with swizzle {arg.swizzle!r}; known are: {_SWIZZLES}")
    cu = driver()
    return (
        int(getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[arg.dtype]}")),
        int(getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{arg.swizzle.upper()}")),
        int(cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
        int(getattr(cu.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{_FILLS[arg.oob_fill]}")),
        int(cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
    )


def _asked(arg: TensorMapArg, address: int) -> str:
    return (
        f"the tensor map of {arg.tensor!r} at {address:#x}: {arg.dtype}, dims {arg.dims}, strides {arg.strides} bytes, "
        f"box {arg.box}, element strides {arg.element_strides or 'of one'}, swizzle {arg.swizzle}"
    )


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
        self._prepare = [_ReadyLaunch(launch, addresses, module) for launch in program.prepare]
        self._launches = [_ReadyLaunch(launch, addresses, module) for launch in program.launches]

    def prepare(self) -> None:
        """Performs what the program does once, and waits for its end. DeviceLostError for a kernel's fault."""
        if self._prepare:
            stream = current_stream()
            for launch in self._prepare:
                launch.enqueue(stream)
            call("cuStreamSynchronize", stream, doing="waiting for the preparation of the weights")

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
        ready = KernelCall(program, addresses, module)
        ready.prepare()
        yield ready
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
