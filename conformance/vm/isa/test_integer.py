"""Integer, bit, move and selection instructions against Python's integers (PTX ISA 9.7.1, 9.7.6, 9.7.8, 9.7.9)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import UnknownInstructionError
from backends.vm.machine.machine import Machine
from conformance.vm.kernel import run_ptx

TYPES = ["u16", "s16", "u32", "s32", "u64", "s64"]
BITS = ["b16", "b32", "b64"]
Values = list[int]


def bits_of(kind: str) -> int:
    return int(kind[1:])


def wrap(value: int, kind: str) -> int:
    bits = bits_of(kind)
    low = value & (2**bits - 1)
    return low - 2**bits if kind[0] == "s" and low >> (bits - 1) else low


def edges(kind: str) -> Values:
    bits = bits_of(kind)
    patterns = [0, 1, 2, 7, 0x55, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 2, 2**bits - 1]
    return [wrap(pattern, kind) for pattern in patterns]


def array(values: Values, kind: str) -> npt.NDArray[np.generic]:
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits_of(kind) // 8}")
    return np.array(values, dtype)


def pairs(kind: str) -> tuple[Values, Values]:
    left, right = zip(*product(edges(kind), edges(kind)), strict=True)
    return list(left), list(right)


def check(instruction: str, kind: str, left: Values, right: Values, wanted: Values, out: str = "") -> None:
    inputs = {"a": array(left, kind), "b": array(right, kind)}
    found = run_ptx(f"{instruction} %d, %a, %b;", inputs, {"d": array([0], out or kind).dtype})["d"].tolist()
    wrong = [case for case in zip(left, right, found, wanted, strict=True) if case[2] != case[3]]
    assert not wrong, f"{instruction}: (a, b, found, wanted) {wrong[:5]}"


def truncated_quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("op", BINARY)
def test_arithmetic_wraps(op: str, kind: str) -> None:
    left, right = pairs(kind)
    wanted = [wrap(BINARY[op](a, b), kind) for a, b in zip(left, right, strict=True)]
    check(f"{op}.{kind}", kind, left, right, wanted)


@pytest.mark.parametrize("kind", TYPES)
def test_products_have_two_halves(kind: str) -> None:
    left, right = pairs(kind)
    products = [a * b for a, b in zip(left, right, strict=True)]
    check(f"mul.hi.{kind}", kind, left, right, [wrap(p >> bits_of(kind), kind) for p in products])
    if bits_of(kind) < 64:
        check(f"mul.wide.{kind}", kind, left, right, products, f"{kind[0]}{2 * bits_of(kind)}")


@pytest.mark.parametrize("kind", TYPES)
def test_multiply_and_add(kind: str) -> None:
    left, right = pairs(kind)
    third = edges(kind)[-2]
    inputs = {"a": array(left, kind), "b": array(right, kind), "c": array([third], kind)[0]}
    dtype = inputs["a"].dtype
    found = run_ptx(f"mad.lo.{kind} %d, %a, %b, %c; mad.hi.{kind} %e, %a, %b, %c;", inputs, {"d": dtype, "e": dtype})
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert int(found["d"][i]) == wrap(a * b + third, kind), f"mad.lo.{kind} of {a}, {b}, {third}"
        assert int(found["e"][i]) == wrap((a * b >> bits_of(kind)) + third, kind), f"mad.hi.{kind} of {a}, {b}, {third}"


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_multiply_and_add(kind: str) -> None:
    left, right = pairs(kind)
    wide = f"{kind[0]}{2 * bits_of(kind)}"
    third = array([edges(wide)[-1]], wide)
    inputs = {"a": array(left, kind), "b": array(right, kind), "c": third[0]}
    found = run_ptx(f"mad.wide.{kind} %d, %a, %b, %c;", inputs, {"d": third.dtype})["d"].tolist()
    wanted = [wrap(a * b + int(third[0]), wide) for a, b in zip(left, right, strict=True)]
    assert found == wanted, f"mad.wide.{kind}"


@pytest.mark.parametrize("kind", TYPES)
def test_division_truncates_and_the_remainder_has_the_sign_of_the_dividend(kind: str) -> None:
    """PTX ISA 9.7.1.8: division by zero yields an unspecified value, but must not end the run."""
    left, right = zip(*[(a, b) for a, b in zip(*pairs(kind), strict=True) if b], strict=True)
    quotients = [truncated_quotient(a, b) for a, b in zip(left, right, strict=True)]
    check(f"div.{kind}", kind, list(left), list(right), [wrap(q, kind) for q in quotients])
    remainders = [a - b * q for a, b, q in zip(left, right, quotients, strict=True)]
    check(f"rem.{kind}", kind, list(left), list(right), remainders)
    run_ptx(
        f"div.{kind} %d, %a, 0; rem.{kind} %d, %a, 0;", {"a": array(edges(kind), kind)}, {"d": array([0], kind).dtype}
    )


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_signs(kind: str) -> None:
    values = edges(kind)
    dtype = array([0], kind).dtype
    found = run_ptx(f"neg.{kind} %d, %a; abs.{kind} %e, %a;", {"a": array(values, kind)}, {"d": dtype, "e": dtype})
    assert found["d"].tolist() == [wrap(-a, kind) for a in values], f"neg.{kind}"
    assert found["e"].tolist() == [wrap(abs(a), kind) for a in values], f"abs.{kind}"


def test_saturation_and_relu() -> None:
    left, right = pairs("s32")
    low, high = -(2**31), 2**31 - 1
    both = list(zip(left, right, strict=True))
    check("add.sat.s32", "s32", left, right, [min(max(a + b, low), high) for a, b in both])
    check("sub.sat.s32", "s32", left, right, [min(max(a - b, low), high) for a, b in both])
    check("min.relu.s32", "s32", left, right, [max(min(a, b), 0) for a, b in both])
    check("max.relu.s32", "s32", left, right, [max(a, b, 0) for a, b in both])


@pytest.mark.parametrize("kind", BITS)
def test_bitwise_logic(kind: str) -> None:
    left, right = pairs(kind)
    for op, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        check(f"{op}.{kind}", kind, left, right, [function(a, b) for a, b in zip(left, right, strict=True)])
    dtype = array([0], kind).dtype
    found = run_ptx(f"not.{kind} %d, %a; cnot.{kind} %e, %a;", {"a": array(left, kind)}, {"d": dtype, "e": dtype})
    assert found["d"].tolist() == [wrap(~a, kind) for a in left], f"not.{kind}"
    assert found["e"].tolist() == [int(a == 0) for a in left], f"cnot.{kind}"


def test_predicate_logic() -> None:
    p, q = np.array([False, False, True, True]), np.array([False, True, False, True])
    inputs = {"p": p, "q": q}
    for op, function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        found = run_ptx(f"{op}.pred %r, %p, %q; {op}.pred %s, !%p, %q;", inputs, {"r": np.bool_, "s": np.bool_})
        assert np.array_equal(found["r"], function(p, q)), f"{op}.pred"
        assert np.array_equal(found["s"], function(~p, q)), f"{op}.pred of a negated source"
    found = run_ptx("not.pred %r, %p; mov.pred %s, %p;", inputs, {"r": np.bool_, "s": np.bool_})
    assert (found["r"].tolist(), found["s"].tolist()) == ((~p).tolist(), p.tolist())


SHIFTS = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 2**32 - 1]


@pytest.mark.parametrize("kind", BITS + TYPES)
def test_shifts_clamp_at_the_width(kind: str) -> None:
    """PTX ISA 9.7.8.8, 9.7.8.9: amounts above the width are clamped to it; signed types fill with the sign."""
    left, amounts = zip(*product(edges(kind), SHIFTS), strict=True)
    inputs = {"a": array(list(left), kind), "n": np.array(amounts, np.uint32)}
    dtype = inputs["a"].dtype
    right = run_ptx(f"shr.{kind} %d, %a, %n;", inputs, {"d": dtype})["d"].tolist()
    assert right == [a >> min(n, bits_of(kind)) for a, n in zip(left, amounts, strict=True)], f"shr.{kind}"
    if kind[0] == "b":
        shifted = run_ptx(f"shl.{kind} %d, %a, %n;", inputs, {"d": dtype})["d"].tolist()
        assert shifted == [wrap(a << min(n, 64), kind) for a, n in zip(left, amounts, strict=True)], f"shl.{kind}"


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shifts(mode: str) -> None:
    """PTX ISA 9.7.8.7: the low word comes first; .l keeps the upper half, .r the lower."""
    low, high = 0x1234_5678, 0x9ABC_DEF0
    whole = high << 32 | low
    inputs = {"a": np.uint32(low), "b": np.uint32(high), "n": np.array(SHIFTS, np.uint32)}
    found = run_ptx(
        f"shf.l.{mode}.b32 %d, %a, %b, %n; shf.r.{mode}.b32 %e, %a, %b, %n;", inputs, {"d": np.uint32, "e": np.uint32}
    )
    for i, amount in enumerate(SHIFTS):
        n = min(amount, 32) if mode == "clamp" else amount & 31
        assert found["d"][i] == (whole << n >> 32) & 0xFFFF_FFFF, f"shf.l.{mode} by {amount}"
        assert found["e"][i] == (whole >> n) & 0xFFFF_FFFF, f"shf.r.{mode} by {amount}"


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_bits(bits: int) -> None:
    values = edges(f"u{bits}")
    inputs = {"a": array(values, f"u{bits}")}
    found = run_ptx(
        f"popc.b{bits} %p, %a; clz.b{bits} %c, %a; brev.b{bits} %r, %a; bfind.u{bits} %f, %a; "
        f"bfind.shiftamt.u{bits} %s, %a;",
        inputs, {"p": np.uint32, "c": np.uint32, "r": inputs["a"].dtype, "f": np.uint32, "s": np.uint32},
    )  # fmt: skip
    for i, a in enumerate(values):
        assert found["p"][i] == a.bit_count(), f"popc.b{bits} of {a:#x}"
        assert found["c"][i] == bits - a.bit_length(), f"clz.b{bits} of {a:#x}"
        assert found["r"][i] == int(f"{a:0{bits}b}"[::-1], 2), f"brev.b{bits} of {a:#x}"
        assert found["f"][i] == (a.bit_length() - 1) % 2**32, f"bfind.u{bits} of {a:#x}"
        assert found["s"][i] == (bits - a.bit_length() if a else 2**32 - 1), f"bfind.shiftamt.u{bits} of {a:#x}"


def test_bfind_of_signed_values_ignores_copies_of_the_sign() -> None:
    """PTX ISA 9.7.1.16: for negative inputs, the most significant 0."""
    found = run_ptx("bfind.s32 %d, %a;", {"a": np.array([-1, 0, -2, 5], np.int32)}, {"d": np.uint32})["d"].tolist()
    assert found == [2**32 - 1, 2**32 - 1, 0, 2]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    """PTX ISA 9.7.1.19 and 9.7.1.20, bit by bit; only 8 bits of position and length count."""
    bits = bits_of(kind)
    pattern, into = 0x9ABC_DEF0_1234_5678 & (2**bits - 1), 0x0F0F_F0F0_3C3C_C3C3 & (2**bits - 1)
    positions, lengths = zip(*product([0, 3, 31, 40, 255, 256], [0, 1, 5, 32, 64, 255, 257]), strict=True)
    inputs = {"a": array([wrap(pattern, kind)], kind)[0], "c": array([wrap(into, kind)], kind)[0],
              "p": np.array(positions, np.uint32), "l": np.array(lengths, np.uint32)}  # fmt: skip
    unsigned = np.dtype(f"u{bits // 8}")
    found = run_ptx(
        f"bfe.{kind} %d, %a, %p, %l; bfi.b{bits} %e, %a, %c, %p, %l;", inputs, {"d": unsigned, "e": unsigned}
    )
    for i, (position, length) in enumerate(zip(positions, lengths, strict=True)):
        start, count = position & 255, length & 255
        sign = pattern >> min(start + count - 1, bits - 1) & 1 if kind[0] == "s" and count else 0
        taken = [pattern >> start + j & 1 if j < count and start + j < bits else sign for j in range(bits)]
        assert int(found["d"][i]) == sum(bit << j for j, bit in enumerate(taken)), f"bfe.{kind} {position}, {length}"
        put = [pattern >> j - start & 1 if start <= j < start + count else into >> j & 1 for j in range(bits)]
        assert int(found["e"][i]) == sum(bit << j for j, bit in enumerate(put)), f"bfi.b{bits} {position}, {length}"


def test_every_truth_table_of_lop3() -> None:
    """PTX ISA 9.7.8.6: the table is the function of 0xF0, 0xCC and 0xAA."""
    inputs = {"a": np.uint32(0xF0), "b": np.uint32(0xCC), "c": np.array([0xAA], np.uint32)}
    body = "".join(f"lop3.b32 %d{table}, %a, %b, %c, {table};" for table in range(256))
    found = run_ptx(body, inputs, {f"d{table}": np.uint32 for table in range(256)})
    for table in range(256):
        result = int(found[f"d{table}"][0]) & 0xFF
        assert result == table, f"lop3 of table {table:#x} gives {result:#x}"


INTEGER_COMPARISONS = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
                       "ge": operator.ge}  # fmt: skip
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@pytest.mark.parametrize("kind", TYPES + BITS)
def test_comparisons(kind: str) -> None:
    left, right = pairs(kind)
    inputs = {"a": array(left, kind), "b": array(right, kind)}
    names = {name: name for name in INTEGER_COMPARISONS if kind[0] != "b" or name in ("eq", "ne")}
    if kind[0] == "u":
        names |= UNSIGNED_NAMES
    body = "".join(f"setp.{name}.{kind} %p_{name}|%q_{name}, %a, %b;" for name in names)
    body += f"setp.eq.and.{kind} %p|%q, %a, %b, !%c;"
    results = ["p", "q", *(f"{predicate}_{name}" for name in names for predicate in "pq")]
    found = run_ptx(body, {**inputs, "c": np.bool_(True)}, dict.fromkeys(results, np.bool_))
    for name, meaning in names.items():
        wanted = [INTEGER_COMPARISONS[meaning](a, b) for a, b in zip(left, right, strict=True)]
        assert found[f"p_{name}"].tolist() == wanted, f"setp.{name}.{kind}"
        assert np.array_equal(found[f"q_{name}"], ~found[f"p_{name}"]), f"setp.{name}.{kind}: q is not !p"
    assert not (found["p"] | found["q"]).any(), f"setp.eq.and.{kind}: p = t and !c, q = !t and !c, with c true"


PRMT = {
    "": (0x3210, lambda pool, c: [pool[c >> 4 * i & 7] for i in range(4)]),
    ".f4e": (0, lambda pool, c: [pool[(c & 3) + i] for i in range(4)]),
    ".b4e": (0, lambda pool, c: [pool[((c & 3) - i) % 8] for i in range(4)]),
    ".rc8": (0, lambda pool, c: [pool[c & 3]] * 4),
    ".ecl": (0, lambda pool, c: [pool[max(i, c & 3)] for i in range(4)]),
    ".ecr": (0, lambda pool, c: [pool[min(i, c & 3)] for i in range(4)]),
    ".rc16": (0, lambda pool, c: [pool[2 * (c & 1)], pool[2 * (c & 1) + 1]] * 2),
}


@pytest.mark.parametrize("mode", PRMT)
def test_prmt_picks_bytes(mode: str) -> None:
    """PTX ISA 9.7.9.7: the tables of the modes, as functions of the byte pool and the control."""
    a, b = 0x1312_1110, 0x1716_1514
    pool = list((b << 32 | a).to_bytes(8, "little"))
    first, pick = PRMT[mode]
    controls = np.array([first, first + 1, first + 2, first + 3, 0x7531, 0x0246], np.uint32)
    found = run_ptx(
        f"prmt.b32{mode} %d, %a, %b, %c;", {"a": np.uint32(a), "b": np.uint32(b), "c": controls}, {"d": np.uint32}
    )
    for control, value in zip(controls.tolist(), found["d"].tolist(), strict=True):
        wanted = int.from_bytes(bytes(pick(pool, control)), "little")
        assert value == wanted, f"prmt.b32{mode} with {control:#x} gives {value:08x}, not {wanted:08x}"


def test_prmt_replicates_signs() -> None:
    inputs = {"a": np.array([0x0000_80FF], np.uint32), "b": np.uint32(0x7F00_0000)}
    assert run_ptx("prmt.b32 %d, %a, %b, 0xF98A;", inputs, {"d": np.uint32})["d"].tolist() == [0x00FF_FF00]


def test_packing_and_unpacking() -> None:
    word = np.array([0x1122_3344_5566_7788], np.uint64)
    found = run_ptx(
        "mov.b64 {%lo, %hi}, %w; mov.b32 {%q0, %q1}, %lo; mov.b64 %r, {%hi, %lo}; mov.b32 %s, {%q1, %q0}; "
        "mov.b64 {_, %t}, %w; mov.b64 %u, {%q0, %q1, %q1, %q0};",
        {"w": word},
        {"lo": np.uint32, "hi": np.uint32, "q0": np.uint16, "q1": np.uint16, "r": np.uint64, "s": np.uint32,
         "t": np.uint32, "u": np.uint64},
    )  # fmt: skip
    assert {name: int(values[0]) for name, values in found.items()} == {
        "lo": 0x5566_7788, "hi": 0x1122_3344, "q0": 0x7788, "q1": 0x5566, "r": 0x5566_7788_1122_3344,
        "s": 0x7788_5566, "t": 0x1122_3344, "u": 0x7788_5566_5566_7788,
    }  # fmt: skip


@pytest.mark.parametrize("kind", [*BITS, *TYPES])
def test_selection(kind: str) -> None:
    inputs = {
        "a": array([edges(kind)[3]], kind)[0],
        "b": array([edges(kind)[-1]], kind)[0],
        "p": np.array([True, False]),
    }
    dtype = array([0], kind).dtype
    found = run_ptx(f"selp.{kind} %d, %a, %b, %p; selp.{kind} %e, %a, 9, !%p;", inputs, {"d": dtype, "e": dtype})
    assert found["d"].tolist() == [edges(kind)[3], edges(kind)[-1]], f"selp.{kind}"
    assert found["e"].tolist() == [9, edges(kind)[3]], f"selp.{kind} with a negated predicate"


@pytest.mark.parametrize(
    "instruction",
    [
        "add.b32 %a, %a, %a;",
        "mul.u32 %a, %a, %a;",
        "setp.lo.s32 %p, %a, %a;",
        "setp.lt.b32 %p, %a, %a;",
        "and.u32 %a, %a, %a;",
        "shl.u32 %a, %a, 1;",
        "add.u64 %a, %a, %a;",
        "add.s32 %a, %a;",
        "add.s32 3, %a, %a;",
        "lop3.b32 %a, %a, %a, %a, %a;",
        "mov.b64 {%a, %a, %a}, %a;",
    ],
)
def test_forms_that_the_isa_does_not_list_are_refused(instruction: str) -> None:
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        run_ptx(instruction, {"a": np.ones(1, np.uint32), "p": np.ones(1, np.bool_)}, {"a": np.uint32})


UNDEFINED = {
    "a remainder by zero": ("rem.u32 %d, %a, %c;", "remainders_by_zero", (7, 0)),
    "a remainder": ("rem.u32 %d, %a, %c;", "", (7, 3)),
    "a wide position": ("bfe.u64 %e, %w, %a, 4;", "bit_fields_beyond_255", (256, 0)),
    "a wide length": ("bfi.b64 %e, %w, %w, 4, %a;", "bit_fields_beyond_255", (256, 0)),
    "a field of a byte": ("bfe.u64 %e, %w, %a, 255;", "", (255, 0)),
    "a wide position of 32 bits": ("bfe.u32 %d, %a, %a, 4;", "", (256, 0)),
    "a lane that is not there": ("setp.ne.u32 %p, %c, 0; @%p rem.u32 %d, %a, %c;", "", (7, 0)),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_operands_without_a_result_are_counted(name: str) -> None:
    """The ISA specifies none, and an H200's differs from its pseudo-code: a kernel that uses it is not portable."""
    text, counter, (a, c) = UNDEFINED[name]
    machine = Machine()
    body = f"mov.b64 %w, 0x123456789abcdef0; mov.b32 %d, 0; {text}"
    inputs = {"a": np.full(32, a, np.uint32), "c": np.full(32, c, np.uint32)}
    run_ptx(body, inputs, {"d": np.uint32}, declare=".reg .b64 %w, %e; .reg .pred %p;", machine=machine)
    counted = {key for key in machine.counters if key in ("remainders_by_zero", "bit_fields_beyond_255")}
    assert counted == ({counter} if counter else set()), f"{name}: counted {counted or 'nothing'}"
