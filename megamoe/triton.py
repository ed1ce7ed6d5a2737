# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false
# Triton types its base classes loosely.
"""The door for Triton and Gluon: `install("sm_100a")`, then `kernel[grid](cpu_tensors)` as usual, with no GPU.

    import megamoe.triton

    megamoe.triton.install("sm_100a")
    kernel[(8,)](x, y, n, BLOCK=128)

Triton compiles as for the GPU and stops at PTX; the machine runs the PTX on the memory of CPU tensors. Triton 3.7 to
3.9.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megamoe.contract.backend import UnsupportedError
from megamoe.contract.machine import KernelMachine, LaunchRefusedError, PixelBox
from megamoe.given.host_memory import Reached
from megamoe.vm import Device, sentences, submit

try:
    import triton  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "megamoe.triton needs Triton; the extra `triton` of megamoe has it", name="triton"
    ) from None

import torch
import triton.backends.nvidia.driver as nvidia
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.autotuner import Autotuner, OutOfResources
from triton.runtime.driver import driver as active_driver
from triton.runtime.jit import JITCallable

Chosen = Mapping[str, Mapping[str, object]] | Callable[[Sequence[Any]], Any]
"""Configurations for autotuned kernels: some meta-parameters by kernel name, or a function that picks one."""

MAX_DYNAMIC_SMEM = 232_448
"""Bytes of shared memory that a CTA of sm_90 or sm_100 can opt in to (CUDA programming guide, compute capabilities)."""

# fill_tma_descriptor_tiled gets numbers: CUtensorMapDataType and CUtensorMapSwizzle, in this order.
_MAP_DTYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz", "b4x16",
    "b4x16_p64", "b6x16_p32",
)  # fmt: skip
_SWIZZLES = ("none", "32B", "64B", "128B")
_SCALARS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


_LOG = logging.getLogger("megamoe")


def install(
    target: str | Device = "sm_100a", *, sm_count: int = 4, autotune: Chosen | None = None, schedule: str = "eager",
    accumulate: str = "fast", step_budget: int = 200_000_000, profile: str = "default",
    suppress: str | Path | None = None,
) -> MachineDriver:  # fmt: skip
    """Make the machine Triton's active driver in this process, until `uninstall`. `target`: a target name or a Device.

    `sm_count`: the SM count that persistent kernels see. `autotune`: the configuration that an autotuned kernel runs,
    as {"kernel": {"BLOCK_M": 64}} or as a function of the configurations. By default the first one that fits runs,
    because the machine has no clock to choose by. The other options are those of megamoe.vm.Device. UnsupportedError
    for a target without a machine, ValueError for invalid options.
    """
    _check_options(sm_count, autotune)
    if isinstance(target, Device):
        device = target
    else:
        options = {"schedule": schedule, "accumulate": accumulate, "profile": profile, "suppress": suppress}
        device = Device(target, step_budget=step_budget, **options)
    number = _NUMBERS.setdefault(device.machine.target, len(_NUMBERS))
    driver = MachineDriver(device, sm_count, number)
    if not _REPLACED:
        own: Any = JITCallable.cache_key
        _REPLACED.append(
            (backends["nvidia"], active_driver._default, active_driver._active, Autotuner.prune_configs, own)
        )
        # Line information names the kernel's file, so a copy in another file is compiled anew.
        _set_cache_key(property(lambda self: f"{own.fget(self)}-{self.fn.__code__.co_filename}"))
    backends["nvidia"] = Backend(PtxCompiler, MachineDriver)
    active_driver._default = driver
    active_driver.set_active(driver)
    Autotuner.prune_configs = _one_config(_REPLACED[0][3], driver, autotune)
    return driver


def _check_options(sm_count: int, autotune: Chosen | None) -> None:
    if not isinstance(sm_count, int) or sm_count < 1:
        raise ValueError(f"sm_count is {sm_count!r}; it must be a whole number of SMs, at least 1")
    if autotune is None or callable(autotune):
        return
    if not isinstance(autotune, Mapping) or not all(isinstance(wanted, Mapping) for wanted in autotune.values()):
        raise ValueError(
            f"autotune is {autotune!r}; it must be a function of configurations, or meta-parameters by kernel name, "
            'as {"kernel": {"BLOCK_M": 64}}'
        )


def uninstall() -> None:
    """Give Triton its own driver back."""
    if _REPLACED:
        backends["nvidia"], active_driver._default, active_driver._active, prune, key = _REPLACED.pop()
        Autotuner.prune_configs = prune
        _set_cache_key(key)


def _set_cache_key(key: Any) -> None:
    callable_class: Any = JITCallable
    callable_class.cache_key = key


_REPLACED: list[tuple[Any, Any, Any, Any, Any]] = []
"""Triton's own objects from before the first install."""
_NUMBERS: dict[str, int] = {}
"""One device number per target, because Triton caches compiled kernels by device number."""


class PtxCompiler(CUDABackend):
    """Triton's own compiler without the last stage: the driver loads PTX."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        # Triton keeps the stage with this name as bytes, and its own PTX stage as text.
        self.binary_ext = "machine"

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
        """Keeps all stages but the assembler's. In its place, the PTX is passed on unchanged."""
        super().add_stages(stages, options, language)
        stages.pop("cubin", None)
        stages[self.binary_ext] = lambda ptx, metadata: ptx.encode()

    def hash(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Part of the key of Triton's disk cache, so that an entry is never mistaken for a GPU's."""
        return f"megamoe-{self.binary_ext}-{self.target.arch}"


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A loaded kernel, ready to launch. Triton calls it a function."""

    ptx: str
    entry: str


_REGISTERS = 64
"""The register count per thread that Triton sees. No assembler counted; kernels divide by it for occupancy."""


class MachineUtils:
    """Stands in for the CUDA driver utilities that Triton uses."""

    def __init__(self, machine: KernelMachine, sm_count: int) -> None:
        self._machine, self._sm_count = machine, sm_count

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Sizes of sm_90 and sm_100; the clock rates and the bus width are placeholders."""
        return {
            "max_shared_mem": MAX_DYNAMIC_SMEM,
            "multiprocessor_count": self._sm_count,
            "max_num_regs": 65536,
            "warpSize": 32,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }

    def load_binary(self, name: str, kernel: bytes | str, shared: int, device: int) -> tuple[object, ...]:
        """Returns module, function, registers, spills and the maximum number of threads."""
        ptx = kernel.decode() if isinstance(kernel, bytes) else kernel
        with sentences(self._machine):
            self._machine.entries(ptx)
        return ptx, LoadedKernel(ptx, name), _REGISTERS, 0, 1024

    def unload_module(self, module: object) -> None:
        """Does nothing: no module is held."""

    def set_printf_fifo_size(self, size: int) -> None:
        """Does nothing: there is no printf FIFO."""

    def cuOccupancyMaxActiveClusters(self, *asked: object) -> int:  # noqa: N802 (the driver's name)
        """One cluster per SM."""
        return self._sm_count

    def fill_tma_descriptor_tiled(
        self, address: int, swizzle: int, size: int, dtype: int, box: Sequence[int], shape: Sequence[int],
        strides: Sequence[int], padding: int,
    ) -> bytes:  # fmt: skip
        """The map's 128 bytes. `box`, `shape`, `strides`: in elements of `size` bytes, last dimension contiguous."""
        return self._map(address, swizzle, size, dtype, list(box)[::-1], shape, strides, padding)

    def fill_tma_descriptor_im2col(
        self, address: int, swizzle: int, size: int, dtype: int, block: Sequence[int], shape: Sequence[int],
        strides: Sequence[int], padding: int, *corners: Sequence[int],
    ) -> bytes:  # fmt: skip
        """The 128 bytes of the map. `block` is (pixels, channels); `corners` are the two corners of the bounding box
        and the traversal strides. All follow the order of the tensor's dimensions."""
        lower, upper, steps = corners
        pixels, channels = block
        return self._map(
            address, swizzle, size, dtype, [channels], shape, strides, padding, element_strides=list(steps)[::-1],
            im2col=PixelBox(list(lower)[::-1], list(upper)[::-1], pixels),
        )  # fmt: skip

    def _map(
        self, address: int, swizzle: int, size: int, dtype: int, box: list[int], shape: Sequence[int],
        strides: Sequence[int], padding: int, **more: Any,
    ) -> bytes:  # fmt: skip
        with sentences(self._machine):
            return self._machine.tensor_map(
                address,
                _MAP_DTYPES[dtype],
                list(shape)[::-1],
                [size * stride for stride in strides[:-1]][::-1],
                box,
                swizzle=_SWIZZLES[swizzle],
                oob_fill="nan" if padding == 1 else "zero",
                **more,
            )


class MachineLauncher:
    """A compiled kernel with its signature. Triton makes one per kernel and calls it at each launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._metadata = metadata
        maps = getattr(metadata, "tensordesc_meta", None)
        signature = dict(source.signature)
        self._types = _expanded(signature.values(), maps)
        self._run = nvidia.wrap_handle_tensordesc(self._launch, signature, maps)

    def __call__(
        self, grid_x: int, grid_y: int, grid_z: int, stream: object, function: LoadedKernel, packed: object,
        launch_metadata: object, enter: Callable[[object], object] | None, leave: Callable[[object], object] | None,
        *args: object,
    ) -> None:  # fmt: skip
        """Run the kernel to its end, between Triton's launch hooks."""
        if enter is not None:
            enter(launch_metadata)
        self._run((grid_x, grid_y, grid_z), function, list(_bases(args)), args)
        if leave is not None:
            leave(launch_metadata)

    def _launch(self, grid: tuple[int, int, int], function: LoadedKernel, bases: list[object], args: Any) -> None:
        driver: Any = active_driver.active
        machine: KernelMachine = driver.machine.machine
        metadata = self._metadata
        if not all(grid) or driver.compiling_only:
            return
        flat = list(_flat(self._types, args))
        numbers = [arg for kind, arg in flat if kind[0] == "*" and isinstance(arg, int) and arg]
        clusters = metadata.num_ctas
        with sentences(machine):
            declared = machine.entries(function.ptx)[function.entry]
            scratch = [
                torch.full((size * grid[0] * grid[1] * grid[2] * clusters + _SCRATCH_ALIGN,), 0xFF, dtype=torch.uint8)
                for size in (metadata.global_scratch_size, metadata.profile_scratch_size)
            ]
            params = [_packed(kind, arg) for kind, arg in flat]
            params += [struct.pack("<Q", -(-one.data_ptr() // _SCRATCH_ALIGN) * _SCRATCH_ALIGN) for one in scratch]
            arrays = [*(arg for _, arg in flat), *bases]
            reached = Reached(machine, arrays, addresses=numbers, in_place=True, scratch=scratch)

        def work() -> None:
            with driver.machine.watched(function.ptx):
                machine.launch(
                    function.ptx,
                    function.entry,
                    (grid[0] * clusters, grid[1], grid[2]),
                    (32 * metadata.num_warps, 1, 1),
                    params[: len(declared)],
                    cluster=(clusters, 1, 1),
                    dynamic_smem=metadata.shared,
                    memory=reached.memory(),
                    dependent=bool(metadata.launch_pdl),
                )
            driver.scratch_of_launches.append(scratch)

        submit(work)


_SCRATCH_ALIGN = 128
"""Alignment of tensor maps of 128 bytes, which a kernel makes in the workspace."""
_KEPT = 32
"""Launches whose workspaces are kept, so that a dependent launch gets no workspace that an earlier one may still use.
"""


class MachineDriver(GPUDriver):
    """Triton's driver for a machine without a GPU. `machine` is the megamoe.vm.Device, with its counters."""

    def __init__(self, device: Device, sm_count: int, number: int) -> None:
        self.machine = device
        self.compiling_only = False
        self.scratch_of_launches: deque[list[torch.Tensor]] = deque(maxlen=_KEPT)
        self.utils = MachineUtils(device.machine, sm_count)
        self.launcher_cls = MachineLauncher
        self._arch = int(device.machine.target.strip("sm_a"))
        self.get_device_capability = lambda device=0: divmod(self._arch, 10)
        self.get_current_stream = lambda device=0: 0
        self.get_current_device = lambda: number
        self.set_current_device = lambda device: None

    @staticmethod
    def is_active() -> bool:
        """Returns True."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Returns the type unchanged, because no C is generated."""
        return ty

    def get_current_target(self) -> Any:
        """The target for which Triton compiles."""
        return GPUTarget("cuda", self._arch, 32)

    def get_active_torch_device(self) -> torch.device:
        """The CPU: tensors lie on the host."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """torch.cuda, either the real one or megamoe.torch_cuda's."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Without a clock, all configurations take the same time."""
        return lambda call, **options: [1.0, 1.0, 1.0]

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Returns a dummy: there is no cache to clear."""
        return torch.empty(1)

    def clear_cache(self, cache: object) -> None:
        """Does nothing: there is no cache to clear."""


# Arguments


def _expanded(signature: Any, maps: Any) -> list[Any]:
    """The types of the kernel's parameters, with each tensor descriptor replaced by the parameters that carry it."""
    expand: Any = nvidia.expand_signature
    # Triton 3.7 defines the function in this module; later versions share one among all drivers.
    return expand(signature, maps, *(() if expand.__module__ == nvidia.__name__ else ("nvTmaDesc",)))


def _flat(types: Any, args: Any) -> Any:
    for kind, arg in zip(types, args, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, arg)
        elif kind != "constexpr":
            yield kind, arg


def _bases(args: Any) -> Any:
    """The tensors behind tensor descriptors among the arguments."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from _bases(arg)
        elif hasattr(arg, "base") and hasattr(arg, "block_shape"):
            yield arg.base


def _packed(kind: str, arg: Any) -> bytes:
    if kind == "nvTmaDesc":
        return arg if isinstance(arg, bytes) else bytes(arg.tma_desc_cpu_ptr())
    if kind[0] == "*":
        return struct.pack("<Q", arg.data_ptr() if hasattr(arg, "data_ptr") else arg or 0)
    if kind == "bf16":
        # Triton's own launcher truncates, it does not round.
        return struct.pack("<f", arg)[2:]
    if kind not in _SCALARS:
        raise LaunchRefusedError(
            f"an argument has Triton's type {kind!r}, unknown to megamoe.triton {metadata.version('triton')}"
        )
    return struct.pack(f"<{_SCALARS[kind]}", arg)


# Autotuning


def _one_config(prune: Any, driver: MachineDriver, chosen: Chosen | None) -> Any:
    """Stands in for Autotuner.prune_configs: returns only the configuration to run."""

    def prune_configs(self: Any, kwargs: dict[str, Any], *rest: Any) -> list[Any]:
        left = prune(self, kwargs, *rest)
        name = self.base_fn.__name__
        if callable(chosen):
            return [chosen(left)]
        if chosen is not None and name in chosen:
            wanted = chosen[name]
            for config in left:
                if wanted.items() <= config.all_kwargs().items():
                    return [config]
            raise UnsupportedError(
                f"no configuration of {name} has {dict(wanted)}; there are: {'; '.join(map(str, left))}"
            )
        if chosen:
            _LOG.warning("autotune= names %s; %s is not among them: its first configuration runs", [*chosen], name)
        return [_first_that_fits(self, left, kwargs, driver)]

    return prune_configs


def _first_that_fits(tuner: Any, configs: Sequence[Any], kwargs: dict[str, Any], driver: MachineDriver) -> Any:
    """The first configuration that compiles within the limits of a CTA, which timing on a device would find out."""
    args = [tuner.nargs[name] for name in tuner.arg_names if name in tuner.nargs]
    driver.compiling_only = True
    try:
        for config in configs[:-1]:
            if config.pre_hook is not None:
                config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
            try:
                tuner.fn.run(*args, **{**kwargs, **config.all_kwargs()})
            except OutOfResources:
                continue
            return config
    finally:
        driver.compiling_only = False
    return configs[-1]
