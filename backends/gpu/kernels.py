"""Raw PTX programs on the device: modules, launches, and kernel parameters as the bytes that the driver copies.

The driver itself encodes tensor maps: cuTensorMapEncodeTiled (CUDA driver API, tensor map object management).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from backends.gpu.driver import call, described, driver, driver_library, failure
from megamoe.contract import BufferArg, DeviceError, ScalarArg, TensorMapArg, UnsupportedError
from megamoe.contract.assembly import assemblers
from megamoe.contract.poison import SAMPLE, poison_seeds

if TYPE_CHECKING:
    import torch

    from megamoe.contract import HostProgram, Launch, Program, Target

SCALAR_FORMATS: Final[Mapping[str, str]] = {
    "bool": "<?", "u8": "<B", "s8": "<b", "u16": "<H", "s16": "<h", "u32": "<I", "s32": "<i", "b32": "<I", "f16": "<e",
    "f32": "<f", "u64": "<Q", "s64": "<q", "b64": "<Q", "f64": "<d",
}  # fmt: skip
MAP_BYTES: Final = 128
ALIGNMENT: Final = 64
NO_CONTEXT: Final = 201
"""CUDA_ERROR_INVALID_CONTEXT"""
STREAM_OFFSET: Final = 32
"""Offset of hStream in CUlaunchConfig, after seven 32-bit fields and 4 bytes of padding (cuda.h)."""
# dtype of the spec -> CUtensorMapDataType. b4x16 and the like are the packed types of PTX ISA, section 5.5.1.
_TYPES: Final[Mapping[str, str]] = {
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "u64": "UINT64", "s64": "INT64",
    "f16": "FLOAT16", "f32": "FLOAT32", "f32_ftz": "FLOAT32_FTZ", "f64": "FLOAT64", "bf16": "BFLOAT16",
    "tf32": "TFLOAT32", "tf32_ftz": "TFLOAT32_FTZ", "b4x16": "16U4_ALIGN8B", "b4x16_p64": "16U4_ALIGN16B",
    "b6x16_p32": "16U6_ALIGN16B",
}  # fmt: skip
_SWIZZLES: Final = ("none", "32B", "64B", "128B")
_FILLS: Final[Mapping[str, str]] = {"zero": "NONE", "nan": "NAN_REQUEST_ZERO_FMA"}


def address_of(tensor: str, offset: int, addresses: Mapping[str, int]) -> int:
    """The address of byte `offset` of a tensor or scratch buffer. Raises DeviceError for an unknown name."""
    if tensor not in addresses:
        known = ", ".join(addresses) or "none"
        raise DeviceError(f"the program passes the tensor {tensor!r}, which was not given; there are: {known}")
    return addresses[tensor] + offset


def scalar_bytes(arg: ScalarArg) -> bytes:
    """The bytes of a scalar. Raises DeviceError for an unknown type or a value that does not fit the type."""
    if arg.dtype not in SCALAR_FORMATS:
        raise DeviceError(f"a scalar argument of dtype {arg.dtype!r}; known are: {', '.join(SCALAR_FORMATS)}")
    try:
        return struct.pack(SCALAR_FORMATS[arg.dtype], arg.value)
    except (struct.error, OverflowError) as error:
        raise DeviceError(f"the value {arg.value!r} does not fit a scalar argument of {arg.dtype}: {error}") from None


def encoded_map(arg: TensorMapArg, address: int) -> bytes:
    """The 128-byte tensor map of `arg` at `address`. Raises DeviceError, quoting the request, if the driver refuses."""
    types, swizzle, promotion, fill, interleave = _codes(arg)
    rank = len(arg.dims)
    if len(arg.strides) != rank - 1 or len(arg.box) != rank:
        raise DeviceError(f"{_asked(arg, address)}: dims and box need one entry a dimension, strides one fewer")
    # cuda.bindings aligns its CUtensorMap to 16 bytes, but the driver requires 64.
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
"""Dynamic shared memory in bytes per CTA that needs no opt-in (CUDA programming guide, shared memory)."""
MAX_PORTABLE_CLUSTER: Final = 8
"""CTAs per cluster that every device supports (CUDA programming guide, thread block clusters)."""


@lru_cache(maxsize=8)
def device_code(ptx: str, target: Target) -> bytes:
    """A cubin for `target`. Without an assembler, the zero-terminated PTX for the driver's own compiler.

    The assembler comes first because the driver's compiler refuses PTX newer than the driver (9.0 for CUDA 13.0).
    Raises DeviceError if an assembler refuses the text.
    """
    for name, load in assemblers().items():
        try:
            return load()(ptx, target).cubin
        except UnsupportedError:
            continue
        except Exception as error:
            raise DeviceError(f"the assembler {name} refuses the program for {target}: {error}") from error
    return ptx.encode() + b"\0"


class LoadedKernels:
    """A Program in a module on the device, launched on the addresses that each call gives.

    `names` are the tensors and workspaces whose addresses a call gives, in this order. Raises DeviceError if the module
    lacks an entry, or if an argument names a tensor that is not in `names`.
    """

    def __init__(self, program: Program, names: Sequence[str], module: Any) -> None:
        self.prepare = _Launches(program.prepare, names, module).enqueue
        self.launch = _Launches(program.launches, names, module).enqueue


class KernelCall:
    """The launches of a Program on torch's current stream, in order, on tensors with fixed addresses."""

    def __init__(self, program: Program, addresses: Mapping[str, int], module: Any) -> None:
        self._loaded = LoadedKernels(program, tuple(addresses), module)
        self._addresses = tuple(addresses.values())
        self._prepares = bool(program.prepare)

    def prepare(self) -> None:
        """Runs the launches needed only once and waits for them. Raises DeviceLostError if a kernel faults."""
        if self._prepares:
            stream = current_stream()
            self._loaded.prepare(self._addresses, stream)
            call("cuStreamSynchronize", stream, doing="waiting for the preparation of the weights")

    def enqueue(self) -> None:
        """Launches every kernel. Raises DeviceError if the driver refuses one."""
        self._loaded.launch(self._addresses, current_stream())

    def collect(self) -> None:
        """Does nothing: the kernels write to the case's tensors themselves."""


class _Launches:
    """Launches in order. Their parameters stay in host memory; a call only stores addresses there.

    The driver reads parameters during the launch call, so the next call may overwrite them as soon as it returns.
    """

    def __init__(self, launches: Sequence[Launch], names: Sequence[str], module: Any) -> None:
        self._lock = Lock()
        self._context = call("cuCtxGetCurrent", doing="looking up the device's context")
        # Not through cuda.bindings: it wraps each argument, and that would be most of the cost of a call.
        self._launch = driver_library().cuLaunchKernelEx
        self._stream: int | None = None
        self._held: list[ctypes.c_uint64 | ctypes.Array[ctypes.c_char]] = []
        self._cells: list[tuple[int, int, ctypes.c_uint64]] = []
        self._maps: list[tuple[int, int, _Map]] = []
        places = {name: index for index, name in enumerate(names)}
        self._steps = [_Step(launch, self._parameters(launch, places), module) for launch in launches]
        self._given = [(step.given, step) for step in self._steps]

    def enqueue(self, addresses: Sequence[int], stream: int) -> None:
        """Enqueues every launch. Raises DeviceError if the driver refuses one."""
        with self._lock:
            for place, offset, cell in self._cells:
                cell.value = addresses[place] + offset
            for place, offset, one in self._maps:
                if one.address != addresses[place] + offset:
                    one.point_at(addresses[place] + offset)
            if stream != self._stream:
                for step in self._steps:
                    step.stream.value = stream
                self._stream = stream
            for given, step in self._given:
                code = self._launch(*given)
                if code == NO_CONTEXT:
                    # This thread has not called the CUDA runtime yet.
                    call("cuCtxSetCurrent", self._context, doing="entering the device's context")
                    code = self._launch(*given)
                if code:
                    raise failure("cuLaunchKernelEx", driver().CUresult(code), step.said)

    def _parameters(self, launch: Launch, places: Mapping[str, int]) -> list[int]:
        """The address of each parameter of `launch`."""
        found: list[int] = []
        for arg in launch.args:
            if isinstance(arg, ScalarArg):
                self._held.append(ctypes.create_string_buffer(scalar_bytes(arg)))
                found.append(ctypes.addressof(self._held[-1]))
                continue
            place = address_of(arg.tensor, 0, places)
            if isinstance(arg, BufferArg):
                self._cells.append((place, arg.offset, ctypes.c_uint64()))
                found.append(ctypes.addressof(self._cells[-1][-1]))
            else:
                self._maps.append((place, arg.offset, _Map(arg)))
                found.append(self._maps[-1][-1].at)
        return found


class _Step:
    """A launch whose parameters are at `parameters`.

    `given` holds the arguments of the driver call, `stream` the stream field of the driver's launch configuration.
    """

    def __init__(self, launch: Launch, parameters: Sequence[int], module: Any) -> None:
        self.said = (
            f"launching {launch.entry} with grid {launch.grid}, block {launch.block}, cluster {launch.cluster} and "
            f"{launch.dynamic_smem} bytes of dynamic shared memory"
        )
        kernel = call(
            "cuModuleGetFunction", module, launch.entry.encode(), doing=f"looking up the kernel {launch.entry}"
        )
        _opt_in(kernel, launch)
        self._config = _configuration(launch)
        config = int(self._config.getPtr())
        self.stream = ctypes.c_void_p.from_address(config + STREAM_OFFSET)
        self._pointers = (ctypes.c_void_p * max(len(parameters), 1))(*parameters)
        # Built once. Without argument types ctypes passes references twice as fast as addresses.
        references = (ctypes.byref(ctypes.c_char.from_address(at)) for at in (config, int(kernel)))
        self.given = (*references, ctypes.byref(self._pointers), None)


class _Map:
    """A tensor map in host memory, aligned for the driver. `address` is its tensor's, None before the first call."""

    def __init__(self, arg: TensorMapArg) -> None:
        self._arg = arg
        self.address: int | None = None
        self._room = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
        self.at = -(-ctypes.addressof(self._room) // ALIGNMENT) * ALIGNMENT
        self._cell = ctypes.c_void_p()
        self._replace = driver_library().cuTensorMapReplaceAddress
        self._given = (ctypes.byref(ctypes.c_char.from_address(self.at)), self._cell)

    def point_at(self, address: int) -> None:
        """Points the map at the tensor at `address`. Raises DeviceError, quoting the request, if the driver refuses."""
        self._cell.value = address
        if self.address is None:
            ctypes.memmove(self.at, encoded_map(self._arg, address), MAP_BYTES)
        elif code := self._replace(*self._given):
            returned = described(driver().CUresult(code))
            said = _asked(self._arg, address)
            raise DeviceError(f"cuTensorMapReplaceAddress returned {returned} while moving {said}")
        self.address = address


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
    """Opts in to what a launch needs: much shared memory, or a cluster size that not every device supports."""
    attributes = driver().CUfunction_attribute
    x, y, z = launch.cluster
    if launch.dynamic_smem > MAX_PLAIN_SMEM:
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        doing = f"allowing {launch.entry} {launch.dynamic_smem} bytes of dynamic shared memory"
        call("cuFuncSetAttribute", kernel, attribute, launch.dynamic_smem, doing=doing)
    if x * y * z > MAX_PORTABLE_CLUSTER:
        attribute = attributes.CU_FUNC_ATTRIBUTE_NON_MAX_PORTABLE_CLUSTER_SIZE_ALLOWED
        call("cuFuncSetAttribute", kernel, attribute, 1, doing=f"allowing {launch.entry} clusters of {x * y * z} CTAs")


@cache
def loaded_module(ptx: str, target: Target, device: int) -> Any:
    """The module of `ptx` on torch's current device, number `device`. It stays loaded until the process ends."""
    code = device_code(ptx, target)
    return call("cuModuleLoadData", code, doing=f"loading {len(code)} bytes of code for {target}")


@contextmanager
def bound_program(program: Program, tensors: Mapping[str, torch.Tensor]) -> Iterator[KernelCall]:
    """`program`, loaded, on `tensors` of the current device. Workspaces hold noise, as on the VM.

    Raises DeviceError if the assembler or the driver refuses.
    """
    scratch = scratch_memory(program, tensors)
    addresses = {name: tensor.data_ptr() for name, tensor in {**tensors, **scratch}.items()}
    code = device_code(program.ptx, program.target)
    module = call("cuModuleLoadData", code, doing=f"loading {len(code)} bytes of code for {program.target}")
    try:
        ready = KernelCall(program, addresses, module)
        ready.prepare()
        yield ready
    finally:
        # Unloading waits for the kernels. It fails on a lost device, where nothing is left to free.
        driver().cuModuleUnload(module)


def scratch_memory(program: Program | HostProgram, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The workspaces of `program` by name, filled with noise that differs by row (see megamoe.contract.poison)."""
    import torch

    if not program.scratch:
        return {}
    heads = {name: tensor.detach().reshape(-1).view(torch.uint8)[:SAMPLE] for name, tensor in tensors.items()}
    known = {name: (tensors[name].nbytes, head.cpu().numpy().tobytes()) for name, head in heads.items()}
    made: dict[str, torch.Tensor] = {}
    for name, seed in poison_seeds(program, known).items():
        noise = torch.Generator("cuda").manual_seed(seed)
        made[name] = torch.randint(
            256, (program.scratch[name],), generator=noise, dtype=torch.uint8, device=noise.device
        )
    return made


def current_stream() -> int:
    """The handle of torch's current stream."""
    import torch

    return torch.cuda.current_stream().cuda_stream
