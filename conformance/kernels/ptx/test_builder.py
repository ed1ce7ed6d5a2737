"""The PTX builder writes what it was told, and refuses a slip with a sentence as soon as its line is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from backends.ptx.builder import TID_X, Builder
from backends.ptx.emitter import module_text
from backends.ptx.operands import SINK, Address, BuilderError, Elected, Register, at
from backends.ptx.parameters import F32, U32, Map, Parameters, Pointer, Value
from megamoe.contract import BufferArg, ScalarArg, TensorMapArg


def fresh() -> Builder:
    return Builder("planted", target="sm_100a", version=(8, 6), block=32)


def u32(x: Builder) -> Register:
    return x.let("word", "mov.u32", TID_X)


def wide_operand(x: Builder) -> None:
    x.let("sum", "add.u64", u32(x), 1)


def predicate_as_value(x: Builder) -> None:
    x.let("sum", "add.u32", x.let("is_zero", "setp.eq.u32", u32(x), 0), 1)


def integer_as_float(x: Builder) -> None:
    x.let("sum", "add.f32", u32(x), 1.0)


def float_immediate_for_integer(x: Builder) -> None:
    x.let("sum", "add.u32", u32(x), 1.0)


def missing_operand(x: Builder) -> None:
    x.emit("add.u32", u32(x), u32(x))


def unknown_opcode(x: Builder) -> None:
    x.emit("frobnicate.u32", u32(x))


def no_result(x: Builder) -> None:
    x.let("nothing", "bar.sync", 0)


def narrow_global_address(x: Builder) -> None:
    x.let("value", "ld.global.u32", at(u32(x)))


def short_vector(x: Builder) -> None:
    x.emit("tcgen05.ld.sync.aligned.32x32b.x16.b32", x.regs("s", "b32", 8), at(u32(x)))


def lost_coordinate(x: Builder) -> None:
    source = Address(x.tensor_map("a_map"), 0, (0, 0))
    x.emit("cp.async.bulk.tensor.3d.shared::cta.global.tile.bulk_group", at(u32(x)), source, at(u32(x)))


def tensor_memory_address_as_u32(x: Builder) -> None:
    word, wide = u32(x), x.let("wide", "mov.b64", 0)
    enable = x.let("enable", "setp.eq.u32", word, 0)
    x.emit("tcgen05.mma.cta_group::1.kind::f16", at(word), wide, wide, word, enable)


def kept_arrival_state(x: Builder) -> None:
    x.emit("mbarrier.arrive.shared::cta.b64", u32(x), at(u32(x)))


def hidden_special_register(x: Builder) -> None:
    x.let("tid", "mov.u32", TID_X)


def negated_word(x: Builder) -> None:
    x.emit("bra", x.label("somewhere"), guard=~u32(x))


def label_placed_twice(x: Builder) -> None:
    label = x.label("here")
    x.place(label)
    x.place(label)


def forgotten_label(x: Builder) -> None:
    x.emit("bra", x.label("nowhere"))
    x.text()


def register_nobody_writes(x: Builder) -> None:
    x.let("sum", "add.u32", x.reg("ghost", "u32"), 1)
    x.text()


REFUSED: tuple[tuple[Callable[[Builder], None], str], ...] = (
    (wide_operand, "64 bits"),
    (predicate_as_value, "is .pred"),
    (integer_as_float, "wants .f32"),
    (float_immediate_for_integer, "immediate 1.0"),
    (missing_operand, "takes 3"),
    (unknown_opcode, "signature table"),
    (no_result, "writes no register"),
    (narrow_global_address, "64-bit address"),
    (short_vector, "moves 16 registers"),
    (lost_coordinate, "wants 3 coordinates"),
    (tensor_memory_address_as_u32, r"\.b32 registers"),
    (kept_arrival_state, "takes `_`"),
    (hidden_special_register, "special register"),
    (negated_word, "only a predicate"),
    (label_placed_twice, "placed twice"),
    (forgotten_label, "never placed: nowhere"),
    (register_nobody_writes, "%ghost is read"),
)


@pytest.mark.parametrize(("slip", "reason"), REFUSED, ids=[slip.__name__ for slip, _ in REFUSED])
def test_slip_is_refused(slip: Callable[[Builder], None], reason: str) -> None:
    with pytest.raises(BuilderError, match=reason):
        slip(fresh())


def test_text_reads_like_ptx() -> None:
    x = fresh()
    x.section("every thread")
    leader = x.reg("leader", "pred")
    x.emit("elect.sync", Elected(leader), 0xFFFFFFFF)
    barrier = at(x.dynamic_smem("buffer", 16), 8)
    with x.when(leader, "lead"):
        x.emit("mbarrier.arrive.shared::cta.b64", SINK, barrier, note="one of 32")
    x.emit("ret")
    lines = [line.strip() for line in x.text().splitlines()]
    expected = [
        ".version 8.6",
        ".target sm_100a",
        ".extern .shared .align 16 .b8 buffer[];",
        ".reqntid 32, 1, 1",
        ".reg .pred %leader;",
        "elect.sync _|%leader, 0xFFFFFFFF;",
        "mov.u32 %smem, buffer;",
        "@!%leader bra $lead_done;",
        "mbarrier.arrive.shared::cta.b64 _, [%smem + 8];  // one of 32",
        "$lead_done:",
        "ret;",
    ]
    positions = [lines.index(line) for line in expected if line in lines]
    assert len(positions) == len(expected), f"missing: {[line for line in expected if line not in lines]}"
    assert positions == sorted(positions), f"out of order: {positions}"


def test_two_registers_of_one_name_are_two_registers() -> None:
    x = fresh()
    first, second = x.reg("value", "u32"), x.reg("value", "f32")
    assert first.name != second.name, f"both are {first}"


@pytest.mark.parametrize(
    ("value", "spelling"), [(1.0, "0f3F800000"), (float("-inf"), "0fFF800000"), (0.1, "0f3DCCCCCD")]
)
def test_float_immediates_are_exact_bit_patterns(value: float, spelling: str) -> None:
    x = fresh()
    x.let("constant", "mov.f32", value)
    assert f"mov.f32 %constant, {spelling};" in x.text(), f"{value} is not spelled {spelling}"


def test_a_named_place_is_named_where_it_is_used() -> None:
    x = fresh()
    smem = x.dynamic_smem("buffer", 16)
    x.name_place(at(smem, 8), "s_full")
    x.emit("mbarrier.arrive.shared::cta.b64", SINK, at(smem, 8))
    x.emit("mbarrier.arrive.shared::cta.b64", SINK, at(smem, 16))
    lines = [line.strip() for line in x.text().splitlines() if "arrive" in line]
    assert lines[0].endswith("[%smem + 8];  // s_full"), f"the named place is not named: {lines[0]}"
    assert lines[1].endswith("[%smem + 16];"), f"another place got a name: {lines[1]}"


@dataclass(frozen=True, slots=True)
class InnerParams(Parameters):
    """Nested in PlantedParams."""

    t: U32


@dataclass(frozen=True, slots=True)
class PlantedParams(Parameters):
    """One field of each kind."""

    q: Map
    o: Pointer
    inner: InnerParams
    scale: F32


TENSOR_MAP = TensorMapArg("q", "bf16", (64, 8), (128,), (64, 8))


def test_parameters_are_declared_and_passed_in_one_order() -> None:
    x = fresh()
    params = PlantedParams.declare(x)
    x.emit("ret")
    declared = [line.split()[-1].rstrip(",") for line in x.text().splitlines() if line.startswith("    .param")]
    assert declared == ["q_map[128]", "o", "t", "scale"]
    assert params.inner.t.type == "u32"
    inner = InnerParams.arguments(t=7)
    passed = PlantedParams.arguments(q=TENSOR_MAP, inner=inner, scale=0.5)
    assert passed == (TENSOR_MAP, BufferArg("o"), ScalarArg("u32", 7), ScalarArg("f32", 0.5))
    assert PlantedParams.arguments(q=TENSOR_MAP, o="rows", inner=inner, scale=0.5)[1] == BufferArg("rows")
    assert PlantedParams.arguments(q=TENSOR_MAP, o=None, inner=inner, scale=0.5)[1] == ScalarArg("u64", 0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"scale": 0.5, "sclae": 0.5}, "a launch gives sclae"),
        ({}, "PlantedParams.scale is f32; a launch gives None"),
        ({"scale": 0.5, "q": "q"}, "PlantedParams.q is map; a launch gives 'q'"),
        ({"scale": TENSOR_MAP}, "PlantedParams.scale is f32"),
        ({"scale": 0.5, "inner": 7}, "PlantedParams.inner is .*InnerParams"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(values: dict[str, Value], reason: str) -> None:
    with pytest.raises(BuilderError, match=reason):
        PlantedParams.arguments(**{"q": TENSOR_MAP, "inner": InnerParams.arguments(t=7), **values})


def test_a_module_is_for_one_target() -> None:
    entries = [Builder(target, target=target, version=(8, 6), block=32) for target in ("sm_90a", "sm_100a")]
    with pytest.raises(BuilderError, match="one target"):
        module_text(entries)


def test_packing_is_checked() -> None:
    x = Builder("packing", target="sm_100a", version=(8, 6), block=32)
    three = x.regs("byte", "b8", 3)
    with pytest.raises(BuilderError, match="24 bits"):
        x.emit("mov.b32", x.reg("word", "b32"), three)


def test_gather4_takes_a_column_and_four_rows() -> None:
    x = Builder("gather", target="sm_100a", version=(8, 6), block=32)
    tensor_map, smem = x.tensor_map("a"), x.let("smem", "mov.u32", 0)
    gather = "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    with pytest.raises(BuilderError, match="wants 5 coordinates"):
        x.emit(gather, at(smem), Address(tensor_map, 0, (0, 1)), at(smem))
    x.emit(gather, at(smem), Address(tensor_map, 0, (0, 1, 2, 3, 4)), at(smem))


@pytest.mark.parametrize(
    ("registers", "a", "what"), [(31, 4, "moves 32 registers; 31 are named"), (32, 3, "moves 4 registers; 3 are named")]
)
def test_the_builder_counts_the_registers_of_a_wgmma(registers: int, a: int, what: str) -> None:
    x = Builder("planted", target="sm_90a", version=(8, 0), block=128)
    descriptor = x.let("descriptor", "mov.b64", 0)
    on = x.let("on", "setp.eq.u64", descriptor, 0)
    d, p = x.regs("d", "f32", registers), x.regs("p", "b32", a)
    with pytest.raises(BuilderError, match=what):
        x.emit("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", d, p, descriptor, on, 1, 1, 1)
