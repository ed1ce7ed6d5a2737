"""ldmatrix, stmatrix, movmatrix and mma.sync as instructions, against an H200; faults of shared memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import Fault, UnknownInstructionError
from backends.vm.machine.machine import Machine
from conformance import SILICON
from conformance.vm.kernel import run_ptx

GOLDEN = np.load(SILICON / "movement" / "fragments.npz")
LOADED = GOLDEN["ldm_o"][:512].reshape(4, 32, 4)
REGISTERS = GOLDEN["ldm_sr"].reshape(32, 4)
STORED = GOLDEN["ldm_st"].view(np.uint32).reshape(2, 1024)
DECLARE = ".shared .align 128 .b8 tile[4096]; .reg .b32 %base, %at, %word, %i; .reg .pred %more;"
# Every lane writes 32 words of the image: 16-bit elements 0, 1, 2, ... A warp barrier ends the fill.
FILL = """
    mov.u32 %base, tile; mov.u32 %i, 0;
FILL:
    mad.lo.s32 %word, %i, 32, %lane; mad.lo.s32 %at, %word, 4, %base;
    shl.b32 %word, %word, 1; mad.lo.s32 %word, %word, 65537, 65536;
    st.shared.b32 [%at], %word; add.s32 %i, %i, 1; setp.lt.s32 %more, %i, 32; @%more bra FILL;
    bar.warp.sync -1;
    add.s32 %at, %base, %offset;
"""
Words = npt.NDArray[np.uint32]

LANE = np.arange(32, dtype=np.uint32)
INPUTS: dict[str, npt.NDArray[np.generic]] = {"lane": LANE, "offset": GOLDEN["ldm_off"].astype(np.uint32)}
VECTORS = {1: "{%d0}", 2: "{%d0, %d1}", 4: "{%d0, %d1, %d2, %d3}"}


@pytest.mark.parametrize("space", [".shared", ".shared::cta"])
@pytest.mark.parametrize(("run", "count", "trans"), [(0, 4, ""), (1, 4, ".trans"), (2, 2, ""), (3, 1, "")])
def test_ldmatrix_loads_as_an_h200_does(run: int, count: int, trans: str, space: str) -> None:
    body = f"{FILL} ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 {VECTORS[count]}, [%at];"
    found = run_ptx(body, INPUTS, {f"d{i}": np.uint32 for i in range(count)}, declare=DECLARE)
    for register in range(count):
        measured = LOADED[run][:, register]
        assert np.array_equal(found[f"d{register}"], measured), f"ldmatrix.x{count}{trans}: register {register}"


def test_ldmatrix_takes_a_generic_address() -> None:
    body = (
        FILL + "cvt.u64.u32 %wide, %at; cvta.shared.u64 %wide, %wide; ldmatrix.sync.aligned.m8n8.x1.b16 {%d0}, [%wide];"
    )
    found = run_ptx(body, INPUTS, {"d0": np.uint32}, declare=DECLARE + ".reg .b64 %wide;")["d0"]
    assert np.array_equal(found, LOADED[3][:, 0])


@pytest.mark.parametrize(("run", "trans"), [(0, ""), (1, ".trans")])
def test_stmatrix_stores_as_an_h200_does(run: int, trans: str) -> None:
    outputs = {f"w{i}": np.uint32 for i in range(32)}
    store = f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%at], {{%r0, %r1, %r2, %r3}}; bar.warp.sync -1;"
    read = "mad.lo.s32 %at, %lane, 4, %base;" + "".join(f"ld.shared.b32 %w{i}, [%at+{128 * i}];" for i in range(32))
    inputs = {**INPUTS, **{f"r{i}": REGISTERS[:, i].copy() for i in range(4)}}
    found = run_ptx(f"{FILL} bar.warp.sync -1; {store} {read}", inputs, outputs, declare=DECLARE)
    memory = np.stack([found[name] for name in outputs]).ravel()
    assert np.array_equal(memory, STORED[run]), (
        f"stmatrix.x4{trans}: other bytes at {np.flatnonzero(memory != STORED[run])}"
    )


def test_movmatrix_transposes_as_an_h200_does() -> None:
    found = run_ptx("movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;", {"a": REGISTERS[:, 0].copy()}, {"d": np.uint32})[
        "d"
    ]
    assert np.array_equal(found, GOLDEN["ldm_o"][512:])


def mma(spelling: str, a: Words, b: Words, c: Words, machine: Machine | None = None) -> Words:
    """D [32, registers] of one mma.sync on registers [32, registers]."""
    inputs = {f"{name}{i}": x[:, i].copy() for name, x in (("a", a), ("b", b), ("c", c)) for i in range(x.shape[1])}
    names = {name: "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"
             for name, count in zip("abcd", (a.shape[1], b.shape[1], c.shape[1], c.shape[1]), strict=True)}  # fmt: skip
    body = f"mma.sync.aligned.{spelling} {names['d']}, {names['a']}, {names['b']}, {names['c']};"
    found = run_ptx(body, inputs, {f"d{i}": np.uint32 for i in range(c.shape[1])}, machine=machine)
    return np.stack(list(found.values()), axis=1)


MEASURED = [
    (16, "m16n8k16.row.col.f32.f16.f16.f32"),
    (16, "m16n8k16.row.col.f32.bf16.bf16.f32"),
    (32, "m16n8k32.row.col.f32.e4m3.e4m3.f32"),
]


@pytest.mark.parametrize("policy", ["fast", "exact", "hopper"])
@pytest.mark.parametrize("run", range(3))
def test_mma_computes_as_an_h200_does(run: int, policy: str) -> None:
    k, spelling = MEASURED[run]
    machine = Machine(accumulate=policy)
    a, b, c = (GOLDEN[f"mma{run}_{name}"] for name in "abc")
    found = mma(spelling, a, b, c, machine)
    assert np.array_equal(found, GOLDEN[f"mma{run}_o"]), f"mma.sync {spelling} under {policy}: other registers"
    assert machine.counters["mma_flops"] == 2 * 16 * 8 * k, f"mma.sync {spelling}: operations counted"


def registers_of(matrix: npt.NDArray[np.unsignedinteger], operand: str, count: int) -> npt.NDArray[np.uint32]:
    """Registers [32, count] by the tables of PTX ISA 9.7.14.5.7, .9 and .10, element by element."""
    per = 4 // matrix.dtype.itemsize
    out = np.zeros((32, count * per), matrix.dtype)
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(count * per):
            register, within = divmod(i, per)
            if operand == "a":
                row, column = group + 8 * (register % 2), thread * per + within + 4 * per * (register // 2)
            elif operand == "b":
                row, column = thread * per + within + 4 * per * register, group
            else:
                row, column = group + 8 * (i // 2), 2 * thread + i % 2
            out[lane, i] = matrix[row, column]
    return out.view(np.uint32)


SMALL = [
    ("m16n8k8.row.col.f32.f16.f16.f32", np.float16, 8, 2, 1),
    ("m16n8k8.row.col.f32.bf16.bf16.f32", ml_dtypes.bfloat16, 8, 2, 1),
    ("m16n8k8.row.col.f32.tf32.tf32.f32", np.float32, 8, 4, 2),
    ("m16n8k4.row.col.f32.tf32.tf32.f32", np.float32, 4, 2, 1),
    ("m16n8k16.row.col.f32.e5m2.e5m2.f32", ml_dtypes.float8_e5m2, 16, 2, 1),
]


@pytest.mark.parametrize(("spelling", "dtype", "k", "a_registers", "b_registers"), SMALL)
def test_shapes_with_small_integers_are_exact(
    spelling: str, dtype: type, k: int, a_registers: int, b_registers: int
) -> None:
    generator = np.random.default_rng(k)
    a, b, c = (generator.integers(-3, 4, shape).astype(dtype) for shape in ((16, k), (k, 8), (16, 8)))
    code = np.dtype(f"u{np.dtype(dtype).itemsize}")
    wide = [x.astype(np.float32) for x in (a, b, c)]
    wanted = registers_of((wide[0] @ wide[1] + wide[2]).view(np.uint32), "c", 4)
    found = mma(spelling, registers_of(a.view(code), "a", a_registers), registers_of(b.view(code), "b", b_registers),
                registers_of(wide[2].view(np.uint32), "c", 4))  # fmt: skip
    assert np.array_equal(found, wanted), f"mma.sync {spelling}: other registers"


def test_f16_accumulators_are_two_to_a_register() -> None:
    generator = np.random.default_rng(4)
    a, b, c = (generator.integers(-3, 4, shape).astype(np.float16) for shape in ((16, 16), (16, 8), (16, 8)))
    wanted = registers_of((a @ b + c).view(np.uint16), "c", 2)
    found = mma("m16n8k16.row.col.f16.f16.f16.f16", registers_of(a.view(np.uint16), "a", 4),
                registers_of(b.view(np.uint16), "b", 2), registers_of(c.view(np.uint16), "c", 2))  # fmt: skip
    assert np.array_equal(found, wanted), "mma.sync with f16 accumulators: other registers"


@pytest.mark.parametrize(("a_type", "b_type"), [("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8")])
def test_integers_are_exact_and_saturate_when_asked(a_type: str, b_type: str) -> None:
    generator = np.random.default_rng(6)
    a, b = (generator.integers(0, 256, shape, dtype=np.uint8) for shape in ((16, 32), (32, 8)))
    c = np.full((16, 8), 2**31 - 1, np.int32)
    c[::2] = 5
    values = [x.view(np.int8 if kind == "s8" else np.uint8).astype(np.int64) for x, kind in ((a, a_type), (b, b_type))]
    exact = values[0] @ values[1] + c
    operands = registers_of(a, "a", 4), registers_of(b, "b", 2), registers_of(c.view(np.uint32), "c", 4)
    clamped = registers_of(np.clip(exact, -(2**31), 2**31 - 1).astype(np.int32).view(np.uint32), "c", 4)
    wrapped = registers_of(exact.astype(np.uint32), "c", 4)
    spelling = f"s32.{a_type}.{b_type}.s32"
    assert np.array_equal(mma(f"m16n8k32.row.col.{spelling}", *operands), wrapped), f"mma.sync {spelling}"
    assert np.array_equal(mma(f"m16n8k32.row.col.satfinite.{spelling}", *operands), clamped), (
        f"mma.sync satfinite {spelling}"
    )


LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%d0, %d1, %d2, %d3}, [%at];"
OUTPUTS = {f"d{i}": np.uint32 for i in range(4)}


def fault_of(body: str, block: int = 32) -> Fault:
    lanes = np.arange(block, dtype=np.uint32)
    with pytest.raises(Fault) as caught:
        run_ptx(f"mov.u32 %base, tile; mad.lo.s32 %at, %lane, 16, %base; {body}", {"lane": lanes}, OUTPUTS,
                declare=DECLARE, block=block)  # fmt: skip
    assert caught.value.line > 0, "the report has no PTX line"
    return caught.value


def test_unwritten_rows_are_found() -> None:
    assert fault_of(LOAD).rule == "uninitialised-shared"


def test_rows_off_their_alignment_are_found() -> None:
    fault = fault_of("add.s32 %at, %at, 8; " + LOAD)
    assert fault.rule == "misaligned", str(fault)


def test_rows_outside_of_shared_memory_are_found() -> None:
    assert fault_of("add.s32 %at, %at, 65536; " + LOAD).rule == "out-of-bounds"


def test_half_a_warp_is_found() -> None:
    assert fault_of("setp.lt.u32 %more, %lane, 16; @%more " + LOAD).rule == "diverged"
    assert (
        fault_of("mov.u32 %d0, 0; mov.u32 %d1, 0; mov.u32 %d2, 0; mov.u32 %d3, 0;" + LOAD, block=16).rule == "diverged"
    )


def test_global_addresses_are_found() -> None:
    generic = ".reg .b64 %wide;"
    body = f"{{ {generic} mov.u64 %wide, 4096; ldmatrix.sync.aligned.m8n8.x1.b16 {{%d0}}, [%wide]; }}"
    assert fault_of(body).rule == "wrong-space"


def test_another_warps_store_without_a_barrier_is_a_race() -> None:
    store = "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%at], {%lane};"
    read = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d0}, [%at];"
    lanes = np.arange(64, dtype=np.uint32)
    body = """mov.u32 %base, tile; and.b32 %word, %lane, 31; mad.lo.s32 %at, %word, 16, %base; mov.u32 %d0, 0;
              setp.lt.u32 %more, %lane, 32; @!%more bra READ; STORE bra.uni DONE; READ: LOAD DONE:"""
    body = body.replace("STORE", store).replace("LOAD", read)
    with pytest.raises(Fault) as caught:
        run_ptx(body, {"lane": lanes}, {"d0": np.uint32}, declare=DECLARE, block=64)
    assert caught.value.rule in ("race", "uninitialised-shared"), str(caught.value)


FOUR, TWO = VECTORS[4], VECTORS[2]


@pytest.mark.parametrize(
    "instruction",
    [
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%d0, %d1, %d2}, [%at];",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%d0}, [%at];",
        "ldmatrix.sync.aligned.m8n8.x1.global.b16 {%d0}, [%at];",
        "ldmatrix.aligned.m8n8.x1.shared.b16 {%d0}, [%at];",
        "movmatrix.sync.aligned.m8n8.b16 %d0, %d1;",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 {%d0}, [%at];",
        f"mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32 {FOUR}, {FOUR}, {TWO}, {FOUR};",
        f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16 {FOUR}, {FOUR}, {TWO}, {TWO};",
        f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {FOUR}, {TWO}, {TWO}, {FOUR};",
    ],
)
def test_forms_that_the_isa_does_not_list_are_refused(instruction: str) -> None:
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        run_ptx(instruction, {"lane": LANE}, OUTPUTS, declare=DECLARE)
