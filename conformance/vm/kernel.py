"""Small kernels in the VM: `run_ptx` for a few instructions per thread, `Kernel` for whole kernels.

    run_ptx("add.f32 %d, %a, %b;", {"a": x, "b": y}, {"d": np.float32})["d"]
    Kernel("... ret;", {"x": x, "out": zeros}, block=(128, 1, 1)).run("lazy")

`assert_clean` runs a correct kernel under every schedule; `assert_blamed` expects a planted fault on the line that ends
in `//!`. The pieces below (`wait`, `init`, `tmem_alloc`, ...) are PTX that many kernels share. `copy_kernel` and
tensor_kernel.py provide TMA and tcgen05 kernels whose stages a test can replace.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault, Findings
from backends.vm.load import load
from backends.vm.machine.machine import Machine
from backends.vm.tensor.tensor_map import Im2col, encode_tensor_map

LATE = ("late_cta:0", "late_cta:1", "late_warp:0", "late_warp:1")
EVERY_SCHEDULE = ("eager", "lazy", "late_cta:1", "late_warp:0", *(f"random:{seed}" for seed in range(4)))
TWENTY = ("eager", "lazy", *LATE, *(f"random:{seed}" for seed in range(14)))
Array = npt.NDArray[Any]
_Scalar = TypeVar("_Scalar", bound=np.generic)

REGISTERS = """.reg .b32 %r<48>; .reg .b64 %rd<24>; .reg .f32 %f<16>; .reg .b16 %h<8>; .reg .pred %p<16>;
.reg .b32 %tx, %warp, %lane, %cta;
mov.u32 %tx, %tid.x; shr.u32 %warp, %tx, 5; and.b32 %lane, %tx, 31; mov.u32 %cta, %ctaid.x;"""


@dataclass(frozen=True)
class Map:
    """A tensor map over a buffer: dimensions and box innermost first, strides in bytes from dimension 1 on."""

    buffer: str
    dtype: str
    dims: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: str = "none"
    offset: int = 0
    element_strides: Sequence[int] | None = None
    fill: str = "zero"
    im2col: Im2col | None = None


@dataclass(frozen=True)
class Kernel:
    """The body of an entry and the memory it is launched on.

    Buffer `x` has its address in the 64-bit register `%x`, tensor map `m` its generic address in `%m`. `registers`
    declares %r0..%r47, %rd0..%rd23, %f0..%f15, %h0..%h7 and %p0..%p15; %tx, %warp, %lane and %cta hold %tid.x, the
    warp's number, the lane and %ctaid.x. `module` is text before the entries. Each run copies `buffers`. Those in
    `inputs` are read-only. Those in `unwritten` are workspaces: a byte that the kernel has not stored is undefined.
    Those in `outputs` start undefined too, and their final content is the result.

    `kernel` is launched `launches` times. `others` holds the bodies of further entries with the same parameters.
    `sequence`, if given, lists the entries to launch, each with whether it is a dependent launch. `directives`, such as
    `.maxnreg 64`, follow the parameters of each entry.
    """

    body: str
    buffers: Mapping[str, Array] = field(default_factory=dict)
    maps: Mapping[str, Map] = field(default_factory=dict)
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_smem: int = 0
    inputs: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    step_budget: int = 2_000_000
    module: str = ""
    launches: int = 1
    others: Mapping[str, str] = field(default_factory=dict)
    sequence: Sequence[tuple[str, bool]] = ()
    target: str = "sm_100a"
    registers: str = REGISTERS
    directives: str = ""

    @property
    def ptx(self) -> str:
        """The module's text. The body begins on a new line, so that the marked line can be found."""
        params = [f".param .u64 p_{name}" for name in self.buffers]
        params += [f".param .align 64 .b8 p_{name}[128]" for name in self.maps]
        names = [*self.buffers, *self.maps]
        head = [f".visible .entry ENTRY({', '.join(params)}) {self.directives}".rstrip(), "{", self.registers]
        head += [f".reg .b64 %{name};" for name in names]
        head += [f"ld.param.u64 %{name}, [p_{name}];" for name in self.buffers]
        head += [f"mov.b64 %{name}, p_{name}; cvta.param.u64 %{name}, %{name};" for name in self.maps]
        entries = [
            "\n".join([*head, body, "}"]).replace("ENTRY", name, 1)
            for name, body in {"kernel": self.body, **self.others}.items()
        ]
        return "\n".join([f".version 9.2\n.target {self.target}\n.address_size 64\n{self.module}", *entries])

    @property
    def blamed_line(self) -> int:
        """The line that ends in `//!`."""
        marked = [number for number, line in enumerate(self.ptx.splitlines(), 1) if line.rstrip().endswith("//!")]
        assert len(marked) == 1, f"{len(marked)} lines end in //!; one should"
        return marked[0]

    def run(self, schedule: str = "eager", accumulate: str = "fast") -> tuple[dict[str, Array], Counter[str]]:
        """The buffers after the launches, and the machine's counters."""
        machine = Machine(schedule, accumulate, self.step_budget)
        return self.launch(machine), machine.counters

    def launch(self, machine: Machine) -> dict[str, Array]:
        """The buffers after the launches on `machine`."""
        data = {name: np.ascontiguousarray(array).copy() for name, array in self.buffers.items()}
        addresses: dict[str, int] = {}
        for name, array in data.items():
            buffer = machine.memory.add(name, array.reshape(-1).view(np.uint8), writable=name not in self.inputs)
            addresses[name] = buffer.base
            if name in self.unwritten or name in self.outputs:
                buffer.forget(scratch=name in self.unwritten)
        params = [struct.pack("<Q", addresses[name]) for name in data]
        for item in self.maps.values():
            params.append(
                encode_tensor_map(
                    addresses[item.buffer] + item.offset,
                    item.dtype,
                    item.dims,
                    item.strides,
                    item.box,
                    swizzle=item.swizzle,
                    element_strides=item.element_strides,
                    oob_fill="nan" if item.fill == "nan" else "zero",
                    im2col=item.im2col,
                )
            )
        module = load(self.ptx, ring=machine.ring)
        for entry, dependent in self.sequence or [("kernel", False)] * self.launches:
            machine.launch(
                module.entry(entry), self.grid, self.block, params, self.cluster, self.dynamic_smem, dependent=dependent
            )
        return data


def assert_blamed(kernel: Kernel, rule: str, *clauses: str, schedules: Sequence[str] = EVERY_SCHEDULE) -> None:
    """Every schedule blames the marked line for breaking `rule`, in a sentence that contains every clause."""
    for schedule in schedules:
        fault = fault_of(kernel, schedule)
        assert fault is not None, f"{schedule}: no fault was found; [{rule}] was planted"
        said = str(fault)
        assert fault.rule == rule, f"{schedule}: [{fault.rule}] instead of [{rule}]: {said}"
        assert fault.line == kernel.blamed_line, f"{schedule}: line {fault.line}, not {kernel.blamed_line}: {said}"
        missing = [clause for clause in clauses if clause not in said]
        assert not missing, f"{schedule}: {missing} not in: {said}"


def collected(kernel: Kernel, schedule: str = "eager") -> tuple[list[Fault], dict[str, Array]]:
    """The findings of a run, and the buffers after it."""
    machine = Machine(schedule, step_budget=kernel.step_budget)
    machine.findings = Findings()
    data = kernel.launch(machine)
    return list(machine.findings.by_site.values()), data


def slugs(found: Sequence[Fault]) -> list[str]:
    """The rules of findings, sorted."""
    return sorted(one.rule for one in found)


def fault_of(kernel: Kernel, schedule: str) -> Fault | None:
    """The fault that ends a run, None if none does."""
    try:
        kernel.run(schedule)
    except Fault as fault:
        return fault
    return None


def assert_clean(kernel: Kernel, expected: Mapping[str, npt.ArrayLike], schedules: Sequence[str] = TWENTY) -> None:
    """No schedule finds a fault in a correct kernel, and each leaves exactly the expected values."""
    for schedule in schedules:
        found, _ = kernel.run(schedule)
        for name, values in expected.items():
            wanted = np.asarray(values)
            wrong = np.flatnonzero((found[name] != wanted).reshape(-1))
            assert not wrong.size, (
                f"{schedule}: {wrong.size} elements of `{name}` are wrong, first at {wrong[0]}: "
                f"{found[name].reshape(-1)[wrong[0]]} instead of {wanted.reshape(-1)[wrong[0]]}"
            )


_labels = itertools.count()

ELECT = "elect.sync _|%p15, 0xffffffff;"
"""%p15 is true in the lane that leads its warp."""
FENCE = "fence.proxy.async.shared::cta;"
SYNC = "bar.sync 0;"


def wait(mbarrier: str, parity: str | int) -> str:
    """Loops on try_wait.parity until the phase of `parity` has completed."""
    label = f"WAIT_{next(_labels)}"
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %p14, [{mbarrier}], {parity};\n@!%p14 bra {label};"


def init(*mbarriers: str, count: int = 1) -> str:
    """Thread 0 initialises the mbarriers; a barrier publishes them to the CTA."""
    lines = [f"@%p13 mbarrier.init.shared::cta.b64 [{name}], {count};" for name in mbarriers]
    return "\n".join(["setp.eq.u32 %p13, %tx, 0;", *lines, "fence.mbarrier_init.release.cluster;", SYNC])


def tmem_alloc(columns: int = 32) -> str:
    """Warp 0 allocates; every thread gets the address in %r40. Needs `.shared .align 4 .b32 taddr`."""
    return f"""setp.eq.u32 %p12, %warp, 0;
@%p12 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [taddr], {columns};
{SYNC}
ld.shared.u32 %r40, [taddr];"""


def tmem_free(columns: int = 32) -> str:
    """After a barrier, warp 0 frees the columns."""
    return f"""{SYNC}
@%p12 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r40, {columns};"""


def f16_idesc(m: int, n: int, *, d_f32: bool = True, bf16: bool = False, extra: int = 0) -> int:
    """An instruction descriptor of kind::f16 (PTX ISA 9.7.16.4.2)."""
    return int(d_f32) << 4 | (int(bf16) << 7) | (int(bf16) << 10) | (n >> 3) << 17 | (m >> 4) << 24 | extra


def replaced(stages: Mapping[str, str], changes: Mapping[str, str] | None) -> dict[str, str]:
    """The stages, with some of them replaced by `changes`."""
    unknown = set(changes or {}) - set(stages)
    assert not unknown, f"the kernel has no stages {sorted(unknown)}; it has {', '.join(stages)}"
    return {**stages, **(changes or {})}


def run_ptx(
    body: str,
    inputs: Mapping[str, npt.ArrayLike],
    outputs: Mapping[str, type[_Scalar] | np.dtype[_Scalar]],
    *,
    declare: str = "",
    block: int = 128,
    threads: int | None = None,
    machine: Machine | None = None,
) -> dict[str, npt.NDArray[_Scalar]]:
    """Runs `body` in every thread, one value of each array per thread; returns one array [threads] per output.

    Register `%name` holds the thread's element of input `name` when the body begins; output `name` is read from `%name`
    when the body ends. Registers are as wide as the array's dtype (bool: a predicate; 8-bit: a 16-bit register). A name
    in both starts with the input; this shows that inactive lanes keep their value. A name only in `outputs` begins
    unwritten, and the machine checks that the body writes it.

    A scalar input goes to every thread. `declare` holds further declarations (`.reg`, `.shared`). Fewer values than a
    warp make one block with as many threads. More make blocks of up to `block` threads, in whole warps; the last value
    pads the last block. Pass `threads` if no input is an array. Raises what the machine raises, and ValueError for
    arrays of different sizes.
    """
    values = {name: np.asarray(value) for name, value in inputs.items()}
    count = _thread_count(values, threads)
    block = count if count < 32 else min(block, -(-count // 32) * 32)
    filled = -(-count // block) * block
    given = {name: _filled(value, count, filled) for name, value in values.items()}
    results = {name: np.zeros(filled, dtype) for name, dtype in outputs.items()}
    buffers = {**{f"in_{name}": array for name, array in given.items()},
               **{f"out_{name}": array for name, array in results.items()}}  # fmt: skip
    text = _one_value_a_thread(body, given, results, declare, one_block=filled == block)
    kernel = Kernel(text, buffers, grid=(filled // block, 1, 1), block=(block, 1, 1), registers="")
    found = kernel.launch(machine or Machine())
    return {name: found[f"out_{name}"][:count] for name in outputs}


def lanes_of(mask: int) -> npt.NDArray[np.bool_]:
    """The 32 bits of `mask` as one predicate per lane: bool [32]."""
    return (mask >> np.arange(32) & 1).astype(np.bool_)


def _thread_count(values: Mapping[str, Array], threads: int | None) -> int:
    sizes = {value.size for value in values.values() if value.ndim}
    if threads is not None:
        sizes.add(threads)
    if len(sizes) != 1:
        raise ValueError(f"the arrays hold {sorted(sizes)} values; each thread takes one value of each")
    return sizes.pop()


def _filled(value: Array, count: int, size: int) -> Array:
    array = np.broadcast_to(value, count)
    return np.concatenate([array, np.repeat(array[-1:], size - count)])


def _one_value_a_thread(
    body: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array], declare: str, *, one_block: bool
) -> str:
    registers = {name: array.dtype for name, array in (*inputs.items(), *outputs.items())}
    lines = [
        *(f".reg {_register_type(dtype)} %{name};" for name, dtype in registers.items()),
        ".reg .b64 %harness_address, %harness_index; .reg .b32 %harness_thread; .reg .b16 %harness_bool;",
        declare,
        "mov.u32 %harness_thread, %tid.x;",
    ]
    if not one_block:
        lines.append("""{ .reg .b32 %size, %cta; mov.u32 %size, %ntid.x; mov.u32 %cta, %ctaid.x;
        mad.lo.s32 %harness_thread, %cta, %size, %harness_thread; }""")
    for name, array in inputs.items():
        lines += _address(f"%in_{name}", array.dtype)
        if array.dtype == np.bool_:
            lines += ["ld.global.u8 %harness_bool, [%harness_address];", f"setp.ne.u16 %{name}, %harness_bool, 0;"]
        else:
            lines.append(f"ld.global.b{8 * array.dtype.itemsize} %{name}, [%harness_address];")
    lines += ["{", body, "}"]
    for name, array in outputs.items():
        lines += _address(f"%out_{name}", array.dtype)
        if array.dtype == np.bool_:
            lines += [f"selp.b16 %harness_bool, 1, 0, %{name};", "st.global.b8 [%harness_address], %harness_bool;"]
        else:
            lines.append(f"st.global.b{8 * array.dtype.itemsize} [%harness_address], %{name};")
    return "\n".join([*lines, "ret;"])


def _address(base: str, dtype: np.dtype[np.generic]) -> list[str]:
    return [
        f"mul.wide.u32 %harness_index, %harness_thread, {dtype.itemsize};",
        f"add.s64 %harness_address, {base}, %harness_index;",
    ]


def _register_type(dtype: np.dtype[np.generic]) -> str:
    return ".pred" if dtype == np.bool_ else f".b{max(8 * dtype.itemsize, 16)}"


# A small TMA kernel in stages: load a box, wait, add 1, publish, store the box. A test replaces stages.
# 64 threads. `x` and `out` are u32 [4, 16] (256 bytes), the box is all of it, without swizzle. Thread t has word t.


X = np.arange(64, dtype=np.uint32) * 3
MAPS = {
    "from": Map("x", "u32", (16, 4), (64,), (16, 4)),
    "to": Map("out", "u32", (16, 4), (64,), (16, 4)),
}
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r41], [%from, {%r30, %r30}], "
    "[mbar];"
)
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%to, {%r30, %r30}], [%r41];"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 256;"

STAGES: dict[str, str] = {
    "declare": ".shared .align 1024 .b8 buf[256]; .shared .align 8 .b64 mbar; .shared .align 8 .b64 other;",
    "setup": init("mbar", "other"),
    "addresses": """mov.u32 %r41, buf; shl.b32 %r42, %tx, 2; add.u32 %r42, %r42, %r41; mov.u32 %r30, 0;
setp.ne.u32 %p3, %tx, 0;""",
    "before load": "@%p3 bra LOADED;",
    "load": f"{EXPECT}\n{LOAD}",
    "after load": "LOADED:",
    "wait": wait("mbar", 0),
    "compute": "ld.shared.u32 %r1, [%r42];\nadd.u32 %r1, %r1, 1;\nst.shared.u32 [%r42], %r1;",
    "publish": f"{FENCE}\n{SYNC}",
    "before store": "@%p3 bra END;",
    "store": STORE,
    "commit": "cp.async.bulk.commit_group;",
    "drain": "cp.async.bulk.wait_group.read 0;",
    "end": "END: ret;",
}


def copy_kernel(
    changes: Mapping[str, str] | None = None, buffers: Mapping[str, Array] | None = None, **options: object
) -> Kernel:
    """The kernel with some stages replaced."""
    options = {"block": (64, 1, 1), "maps": MAPS, "inputs": ("x",), **options}
    body = "\n".join(replaced(STAGES, changes).values())
    return Kernel(body, {"x": X, "out": np.zeros(64, np.uint32), **(buffers or {})}, **options)  # type: ignore[arg-type]
