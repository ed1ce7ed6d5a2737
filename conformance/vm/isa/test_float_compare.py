"""setp, set and slct on floats: tables of ordered and unordered comparisons (PTX ISA 9.3.1.2, 9.7.6, 9.7.7)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import product

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import UnknownInstructionError
from conformance.vm.kernel import run_ptx

NAN = float("nan")
SAMPLE = [-float("inf"), -1.5, -0.0, 0.0, 1.5, float("inf"), NAN]
LEFT, RIGHT = (list(column) for column in zip(*product(SAMPLE, SAMPLE), strict=True))
ORDERED: dict[str, Callable[[float, float], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
STORED = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "f16": np.dtype(np.float16),
          "bf16": np.dtype(ml_dtypes.bfloat16)}  # fmt: skip
BITS = {"f32": np.uint32, "f64": np.uint64, "f16": np.uint16, "bf16": np.uint16}
COMPARISONS = [*ORDERED, *(f"{name}u" for name in ORDERED), "num", "nan"]


def holds(op: str, a: float, b: float) -> bool:
    unordered = a != a or b != b
    if op in ("num", "nan"):
        return unordered == (op == "nan")
    return ORDERED[op[:2]](a, b) if not unordered else op.endswith("u")


def stored(values: list[float], kind: str) -> npt.NDArray[np.unsignedinteger]:
    return np.array(values, STORED[kind]).view(BITS[kind])


@pytest.mark.parametrize("kind", STORED)
def test_every_comparison_of_every_pair(kind: str) -> None:
    inputs = {"a": stored(LEFT, kind), "b": stored(RIGHT, kind)}
    body = "".join(f"setp.{op}.{kind} %{op}, %a, %b;" for op in COMPARISONS)
    found = run_ptx(body, inputs, dict.fromkeys(COMPARISONS, np.bool_))
    for op in COMPARISONS:
        for a, b, truth in zip(LEFT, RIGHT, found[op], strict=True):
            assert truth == holds(op, a, b), f"setp.{op}.{kind} says {truth} of {a}, {b}"


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("op", ["lt", "geu", "nan"])
def test_the_second_predicate_is_the_complement(op: str, kind: str) -> None:
    inputs = {"a": stored(LEFT, kind), "b": stored(RIGHT, kind)}
    body = f"setp.{op}.{kind} %p|%q, %a, %b; setp.{op}.{kind} _|%sunk, %a, %b;"
    found = run_ptx(body, inputs, dict.fromkeys(("p", "q", "sunk"), np.bool_))
    assert np.array_equal(found["q"], ~found["p"]), f"setp.{op}.{kind}: q is not !p"
    assert np.array_equal(found["sunk"], found["q"]), f"setp.{op}.{kind}: a sink for p changes q"


COMBINE: dict[str, Callable[[bool, bool], bool]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


@pytest.mark.parametrize("bang", ["", "!"])
@pytest.mark.parametrize("name", COMBINE)
def test_boolean_operators_combine_with_a_predicate(name: str, bang: str) -> None:
    """PTX ISA 9.7.6.2: p = BoolOp(t, c), q = BoolOp(!t, c)."""
    a, b = np.array([1, 1, 2, 2], np.float32), np.float32(2)
    c = np.array([False, True, False, True])
    found = run_ptx(
        f"setp.lt.{name}.f32 %p|%q, %a, %b, {bang}%c;", {"a": a, "b": b, "c": c}, {"p": np.bool_, "q": np.bool_}
    )
    for i in range(4):
        t, other = bool(a[i] < b), bool(c[i]) != bool(bang)
        assert found["p"][i] == COMBINE[name](t, other), f"p of {t} {name} {other}"
        assert found["q"][i] == COMBINE[name](not t, other), f"q of {t} {name} {other}"


def test_flushing_makes_subnormals_equal_to_zero() -> None:
    a = np.array([1, 0x8000_0001], np.uint32)
    for op, wanted in (("eq", [True, True]), ("gt", [False, False]), ("ltu", [False, False])):
        found = run_ptx(f"setp.{op}.ftz.f32 %p, %a, 0f00000000;", {"a": a}, {"p": np.bool_})["p"]
        assert found.tolist() == wanted, f"setp.{op}.ftz.f32 gives {found}"
    assert not run_ptx("setp.eq.f32 %p, %a, 0f00000000;", {"a": a}, {"p": np.bool_})["p"].any()
    half = np.array([1], np.uint16)
    assert run_ptx("setp.eq.ftz.f16 %p, %a, 0;", {"a": half}, {"p": np.bool_})["p"].all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_halves_give_two_predicates(kind: str) -> None:
    """PTX ISA 9.7.7.2: p from the lower halves, q from the upper halves."""
    a, b = stored([1.0, 3.0, NAN, 0.0], kind).view(np.uint32), stored([2.0, 2.0, 1.0, -0.0], kind).view(np.uint32)
    found = run_ptx(f"setp.lt.{kind}x2 %p|%q, %a, %b;", {"a": a, "b": b}, {"p": np.bool_, "q": np.bool_})
    assert (found["p"].tolist(), found["q"].tolist()) == ([True, False], [False, False])
    found = run_ptx(f"setp.equ.xor.{kind}x2 %p|%q, %a, %b, %c;", {"a": a, "b": b, "c": np.array([True, False])},
                    {"p": np.bool_, "q": np.bool_})  # fmt: skip
    assert (found["p"].tolist(), found["q"].tolist()) == ([True, True], [True, True])


@pytest.mark.parametrize(
    ("spelling", "dtype", "true"),
    [
        ("set.lt.u32.f32", np.uint32, 0xFFFF_FFFF),
        ("set.lt.f32.f32", np.uint32, 0x3F80_0000),
        ("set.ltu.f32.f32", np.uint32, 0x3F80_0000),
        ("set.lt.ftz.s32.f32", np.uint32, 0xFFFF_FFFF),
        ("set.lt.f16.f32", np.uint16, 0x3C00),
        ("set.lt.bf16.f32", np.uint16, 0x3F80),
    ],
)
def test_set_writes_ones_or_one(spelling: str, dtype: type[np.unsignedinteger], true: int) -> None:
    inputs = {"a": stored(LEFT, "f32"), "b": stored(RIGHT, "f32")}
    found = run_ptx(f"{spelling} %d, %a, %b;", inputs, {"d": dtype})["d"]
    op = spelling.split(".")[1]
    wanted = [true if holds(op, a, b) else 0 for a, b in zip(LEFT, RIGHT, strict=True)]
    assert found.tolist() == wanted, spelling


def test_set_on_integers_halves_and_packed_halves() -> None:
    a, b = np.array([-1, 1], np.int32), np.array([0, 0], np.int32)
    assert run_ptx("set.lt.u32.s32 %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint32})["d"].tolist() == [0xFFFF_FFFF, 0]
    assert run_ptx("set.lo.f32.u32 %d, %b, %a;", {"a": a, "b": b}, {"d": np.float32})["d"].tolist() == [1.0, 1.0]
    x, y = stored([1.0, 3.0], "f16"), stored([2.0, 2.0], "f16")
    assert run_ptx("set.gt.u16.f16 %d, %a, %b;", {"a": x, "b": y}, {"d": np.uint16})["d"].tolist() == [0, 0xFFFF]
    assert run_ptx("set.gt.u32.f16 %d, %a, %b;", {"a": x, "b": y}, {"d": np.uint32})["d"].tolist() == [0, 0xFFFF_FFFF]
    pair = {"a": x.view(np.uint32), "b": y.view(np.uint32)}
    assert run_ptx("set.gt.u32.f16x2 %d, %a, %b;", pair, {"d": np.uint32})["d"].tolist() == [0xFFFF_0000]
    assert run_ptx("set.le.f16x2.f16x2 %d, %a, %b;", pair, {"d": np.uint32})["d"].tolist() == [0x0000_3C00]
    combined = {**pair, "c": np.array([True])}
    assert run_ptx("set.le.xor.f16x2.f16x2 %d, %a, %b, %c;", combined, {"d": np.uint32})["d"].tolist() == [0x3C00_0000]


def test_slct_chooses_by_sign() -> None:
    """PTX ISA 9.7.6.4: d = c >= 0 ? a : b; NaN selects b, -0 and (with .ftz) a subnormal select a."""
    a, b = np.uint32(0x7FC0_1234), np.uint32(22)
    c = np.array([0, 0x8000_0000, 0xBF80_0000, 0x7FFF_FFFF, 0x8000_0001], np.uint32)
    first, other = int(a), int(b)
    found = run_ptx("slct.b32.f32 %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": np.uint32})["d"]
    assert found.tolist() == [first, first, other, other, other]
    found = run_ptx("slct.ftz.f32.f32 %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": np.uint32})["d"]
    assert found.tolist() == [first, first, other, other, first]
    found = run_ptx("slct.u64.s32 %d, %a, 7, %c;", {"a": np.uint64(2**40), "c": c}, {"d": np.uint64})["d"]
    assert found.tolist() == [2**40, 7, 7, 2**40, 7]


def test_selp_moves_the_very_bits_of_a_float() -> None:
    a, b = np.uint32(0x7FA0_0001), np.uint32(0xFFC0_0002)
    found = run_ptx("selp.f32 %d, %a, %b, %p;", {"a": a, "b": b, "p": np.array([True, False])}, {"d": np.uint32})["d"]
    assert found.tolist() == [int(a), int(b)], "selp.f32 changed a NaN"


@pytest.mark.parametrize(
    "instruction",
    [
        "setp.lo.f32 %p, %a, %a;",
        "setp.eq.b32.f32 %p, %a, %a;",
        "setp.lt.and.f32 %p, %a, %a;",
        "setp.lt.f32 %p, %a, %a, %p;",
        "setp.lt.f16x2 %p, %a, %a;",
        "set.ltu.u32.s32 %a, %a, %a;",
        "set.lo.u32.s32 %a, %a, %a;",
        "set.lt.ftz.u32.f64 %a, %a, %a;",
        "setp.ltu.s32 %p, %a, %a;",
    ],
)
def test_comparisons_that_the_isa_does_not_have_are_refused(instruction: str) -> None:
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        run_ptx(instruction, {"a": np.ones(1, np.uint32), "p": np.ones(1, np.bool_)}, {"a": np.uint32})
