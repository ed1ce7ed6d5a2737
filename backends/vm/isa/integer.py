"""Integer and bit arithmetic (PTX ISA 9.7.1, 9.7.8). Results wrap; division by zero gives all ones, as on the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault, report
from backends.vm.machine.warp import Mask, Warp
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Immediate

Result = npt.NDArray[np.generic]
# Rows have any integer type. The type checker needs one of them.
Row = npt.NDArray[np.int64]
Ufunc = Callable[..., object]

_INTEGERS = "u16 s16 u32 s32 u64 s64"
_BITS = "b16 b32 b64"


def _view(type_name: str) -> str:
    return "u" + type_name[1:] if type_name[0] == "b" else type_name


def _dtype(type_name: str) -> np.dtype[np.generic]:
    kind = "i" if type_name[0] == "s" else "u"
    return np.dtype(f"{kind}{int(type_name[1:]) // 8}")


def _binary(b: Binder, view: str, operation: Ufunc) -> Step:
    d, a, c = b.expect(3)
    rd, ra, rc = b.destination(d, view), b.source(a, view), b.source(c, view)
    if view == "s32":
        return lambda warp: operation(warp.s32[ra], warp.s32[rc], out=warp.s32[rd], where=warp.where)
    if view == "u32":
        return lambda warp: operation(warp.u32[ra], warp.u32[rc], out=warp.u32[rd], where=warp.where)
    if view == "u64":
        return lambda warp: operation(warp.u64[ra], warp.u64[rc], out=warp.u64[rd], where=warp.where)

    def step(warp: Warp) -> None:
        rows = getattr(warp, view)
        operation(rows[ra], rows[rc], out=rows[rd], where=warp.where)

    return step


def _computed(b: Binder, view: str, compute: Callable[..., Result], count: int, destination: str | None = None) -> Step:
    d, *sources = b.expect(count + 1)
    out = destination or view
    rd = b.destination(d, out)
    rows_of = [b.source(source, view) for source in sources]

    def step(warp: Warp) -> None:
        rows = getattr(warp, view)
        np.copyto(getattr(warp, out)[rd], compute(*(rows[row] for row in rows_of)), where=warp.where, casting="unsafe")

    return step


@opcode("add.<type>", section="9.7.1.1", type=_INTEGERS)
def add(b: Binder) -> Step:
    """d = a + c, wrapping."""
    return _binary(b, _view(b.words["type"]), np.add)


@opcode("sub.<type>", section="9.7.1.2", type=_INTEGERS)
def sub(b: Binder) -> Step:
    """d = a - c, wrapping."""
    return _binary(b, _view(b.words["type"]), np.subtract)


@opcode("add.sat.s32", section="9.7.1.1")
@opcode("sub.sat.s32", section="9.7.1.2")
def saturating(b: Binder) -> Step:
    """Addition or subtraction clamped to the range of s32."""
    sign = 1 if b.instruction.parts[0] == "add" else -1

    def compute(a: Row, c: Row) -> Row:
        return np.clip(a.astype(np.int64) + sign * c.astype(np.int64), -(2**31), 2**31 - 1)

    return _computed(b, "s32", compute, 2)


@opcode("mul.lo.<type>", section="9.7.1.3", type=_INTEGERS)
def mul_lo(b: Binder) -> Step:
    """Low half of the product."""
    return _binary(b, _view(b.words["type"]), np.multiply)


def _high(a: Row, c: Row, type_name: str) -> Result:
    bits = int(type_name[1:])
    if bits < 64:
        wide = np.int64 if type_name[0] == "s" else np.uint64
        return (a.astype(wide) * c.astype(wide)) >> wide(bits)
    products = [int(x) * int(y) >> 64 for x, y in zip(a.tolist(), c.tolist(), strict=True)]
    return np.array(products, _dtype(type_name))


@opcode("mul.hi.<type>", section="9.7.1.3", type=_INTEGERS)
def mul_hi(b: Binder) -> Step:
    """High half of the product."""
    kind = b.words["type"]
    return _computed(b, _view(kind), lambda a, c: _high(a, c, kind), 2)


_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


@opcode("mul.wide.<type>", section="9.7.1.3", type=" ".join(_WIDER))
def mul_wide(b: Binder) -> Step:
    """The full product, in a register of twice the width."""
    kind = b.words["type"]
    wide = _dtype(_WIDER[kind])
    return _computed(b, kind, lambda a, c: a.astype(wide) * c.astype(wide), 2, _WIDER[kind])


@opcode("mad.lo.<type>", section="9.7.1.4", type=_INTEGERS)
def mad_lo(b: Binder) -> Step:
    """d = low half of a * c, plus e."""
    return _computed(b, b.words["type"], lambda a, c, e: a * c + e, 3)


@opcode("mad.hi.<type>", section="9.7.1.4", type=_INTEGERS)
def mad_hi(b: Binder) -> Step:
    """d = high half of a * c, plus e."""
    kind = b.words["type"]
    return _computed(b, kind, lambda a, c, e: _high(a, c, kind).astype(a.dtype) + e, 3)


@opcode("mad.wide.<type>", section="9.7.1.4", type=" ".join(_WIDER))
def mad_wide(b: Binder) -> Step:
    """d = a * c + e with d and e of twice the width."""
    kind = b.words["type"]
    wide, wide_view = _dtype(_WIDER[kind]), _WIDER[kind]
    d, a, c, e = b.expect(4)
    rd, ra, rc, re = b.destination(d, wide_view), b.source(a, kind), b.source(c, kind), b.source(e, wide_view)

    def step(warp: Warp) -> None:
        rows, wides = getattr(warp, kind), getattr(warp, wide_view)
        product = rows[ra].astype(wide) * rows[rc].astype(wide) + wides[re]
        np.copyto(wides[rd], product, where=warp.where)

    return step


def _counted(step: Step, counter: str, rule: str, outside: Callable[[Warp], Mask]) -> Step:
    """`step` that also counts instructions with an active lane whose operands have no result in the ISA: a `rule`.

    Results here follow the ISA's pseudo-code or an H200; another GPU may differ. For a remainder the report is only a
    note, because compilers compute some in lanes that do not use them.
    """

    def run(warp: Warp) -> object:
        found = outside(warp) & warp.mask
        if count_nonzero(found):
            warp.cta.machine.counters[counter] += 1
            report(Fault(rule, f"this counts among {counter.replace('_', ' ')}, for which the ISA "
                         "gives no result", lane=int(found.argmax())))  # fmt: skip
        return step(warp)

    return run


def _divide(a: Row, c: Row, *, remainder: bool) -> Result:
    safe = np.where(c == 0, 1, c).astype(a.dtype)
    rest = np.fmod(a, safe)
    if remainder:
        return np.where(c == 0, np.invert(np.zeros_like(a)), rest)
    # The division is exact. The most negative value divided by -1 wraps to itself.
    quotient = (a - rest) // safe
    return np.where(c == 0, np.invert(np.zeros_like(a)), quotient)


@opcode("div.<type>", section="9.7.1.8", type=_INTEGERS)
def div(b: Binder) -> Step:
    """Truncating division. The ISA leaves division by zero undefined; an H200 gives all ones."""
    return _computed(b, b.words["type"], lambda a, c: _divide(a, c, remainder=False), 2)


@opcode("rem.<type>", section="9.7.1.9", type=_INTEGERS)
def rem(b: Binder) -> Step:
    """Remainder with the sign of the dividend. The ISA leaves a zero divisor undefined; an H200 gives all ones."""
    view = b.words["type"]
    step, row = _computed(b, view, lambda a, c: _divide(a, c, remainder=True), 2), b.source(b.operands[2], view)
    return _counted(step, "remainders_by_zero", "unspecified-result", lambda warp: getattr(warp, view)[row] == 0)


@opcode("abs.<type>", section="9.7.1.10", type="s16 s32 s64")
def absolute(b: Binder) -> Step:
    """|a|. The most negative value stays the same."""
    return _computed(b, b.words["type"], np.abs, 1)


@opcode("neg.<type>", section="9.7.1.11", type="s16 s32 s64")
def negate(b: Binder) -> Step:
    """-a, wrapping."""
    return _computed(b, b.words["type"], np.negative, 1)


@opcode("min.<type>", section="9.7.1.12", type=_INTEGERS)
@opcode("max.<type>", section="9.7.1.13", type=_INTEGERS)
def extremum(b: Binder) -> Step:
    """Minimum or maximum of two."""
    return _binary(b, _view(b.words["type"]), np.minimum if b.instruction.parts[0] == "min" else np.maximum)


@opcode("min.relu.s32", section="9.7.1.12")
@opcode("max.relu.s32", section="9.7.1.13")
def extremum_relu(b: Binder) -> Step:
    """Minimum or maximum of two, with negative results replaced by zero."""
    choose = np.minimum if b.instruction.parts[0] == "min" else np.maximum
    return _computed(b, "s32", lambda a, c: np.maximum(choose(a, c), 0), 2)


_LOGIC: dict[str, Ufunc] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@opcode("and.<type>", section="9.7.8.1", type=_BITS)
@opcode("or.<type>", section="9.7.8.2", type=_BITS)
@opcode("xor.<type>", section="9.7.8.3", type=_BITS)
def logic(b: Binder) -> Step:
    """Bitwise and, or, exclusive or."""
    return _binary(b, _view(b.words["type"]), _LOGIC[b.instruction.parts[0]])


@opcode("and.pred", section="9.7.8.1")
@opcode("or.pred", section="9.7.8.2")
@opcode("xor.pred", section="9.7.8.3")
def logic_pred(b: Binder) -> Step:
    """As logic, on predicates."""
    d, a, c = b.expect(3)
    rd = b.destination(d, "pred")
    (ra, na), (rc, nc) = b.predicate(a), b.predicate(c)
    operation = _LOGIC[b.instruction.parts[0]]

    def step(warp: Warp) -> None:
        pred = warp.pred
        operation(pred[ra] ^ na, pred[rc] ^ nc, pred[rd], where=warp.where)

    return step


@opcode("not.<type>", section="9.7.8.4", type=_BITS)
def invert(b: Binder) -> Step:
    """Bitwise complement."""
    return _computed(b, _view(b.words["type"]), np.invert, 1)


@opcode("not.pred", section="9.7.8.4")
def invert_pred(b: Binder) -> Step:
    """Complement of a predicate."""
    return _computed(b, "pred", np.logical_not, 1)


@opcode("cnot.<type>", section="9.7.8.5", type=_BITS)
def cnot(b: Binder) -> Step:
    """1 where a is zero, else 0."""
    return _computed(b, _view(b.words["type"]), lambda a: a == 0, 1)


def _shift(b: Binder, operation: np.ufunc, beyond: Callable[[Row], Result]) -> Step:
    """Shift by a literal or, lane by lane, a register. `beyond` gives the result for amounts of the width or more."""
    kind = b.words["type"]
    view, bits = _view(kind), int(kind[1:])
    d, a, amount = b.expect(3)
    rd, ra, rn = b.destination(d, view), b.source(a, view), b.source(amount, "u32")
    dtype = _dtype(view)
    fixed = amount.value & 0xFFFF_FFFF if isinstance(amount, Immediate) else bits
    if fixed < bits:
        by = dtype.type(fixed)
        if view == "u32":
            return lambda warp: operation(warp.u32[ra], by, out=warp.u32[rd], where=warp.where)

        def shift(warp: Warp) -> None:
            rows = getattr(warp, view)
            operation(rows[ra], by, out=rows[rd], where=warp.where)

        return shift

    def step(warp: Warp) -> None:
        rows, counts = getattr(warp, view), warp.u32[rn]
        shifted = operation(rows[ra], np.minimum(counts, bits - 1).astype(dtype))
        np.copyto(rows[rd], np.where(counts >= bits, beyond(rows[ra]), shifted), where=warp.where, casting="unsafe")

    return step


@opcode("shl.<type>", section="9.7.8.8", type=_BITS)
def shl(b: Binder) -> Step:
    """Shift left. An amount of the width or more gives zero."""
    return _shift(b, np.left_shift, np.zeros_like)


@opcode("shr.<type>", section="9.7.8.9", type=_BITS + " " + _INTEGERS)
def shr(b: Binder) -> Step:
    """Shift right. Signed types shift in the sign; an amount of the width or more leaves only sign bits, or zero."""
    if b.words["type"][0] == "s":
        return _shift(b, np.right_shift, lambda a: np.where(a < 0, -1, 0))
    return _shift(b, np.right_shift, np.zeros_like)


@opcode("shf.<way>.<mode>.b32", section="9.7.8.7", way="l r", mode="clamp wrap")
def funnel(b: Binder) -> Step:
    """Shift the 64 bits {high c, low a} and keep the upper (left) or lower (right) half."""
    left, clamp = b.words["way"] == "l", b.words["mode"] == "clamp"

    def compute(low: Row, high: Row, amount: Row) -> Result:
        n = (np.minimum(amount, 32) if clamp else amount & 31).astype(np.uint64)
        whole = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        return (whole << n) >> np.uint64(32) if left else (whole >> n) & np.uint64(0xFFFFFFFF)

    return _computed(b, "u32", compute, 3)


@opcode("popc.<type>", section="9.7.1.14", type="b32 b64")
def popc(b: Binder) -> Step:
    """Number of ones, in a 32-bit register."""
    return _computed(b, _view(b.words["type"]), np.bitwise_count, 1, "u32")


def _top_bit(a: Row) -> Row:
    return np.array([int(value).bit_length() - 1 for value in a.tolist()], np.int64)


@opcode("clz.<type>", section="9.7.1.15", type="b32 b64")
def clz(b: Binder) -> Step:
    """Number of leading zeros."""
    bits = int(b.words["type"][1:])
    return _computed(b, _view(b.words["type"]), lambda a: bits - 1 - _top_bit(a), 1, "u32")


@opcode("bfind{.shiftamt}.<type>", section="9.7.1.16", type="u32 u64 s32 s64")
def bfind(b: Binder) -> Step:
    """Position of the highest bit that differs from the sign. All ones if there is none."""
    kind = b.words["type"]
    bits = int(kind[1:])

    def compute(a: Row) -> Row:
        top = _top_bit(np.where(a < 0, ~a, a) if kind[0] == "s" else a)
        return np.where(top < 0, 0xFFFFFFFF, bits - 1 - top if b.words["shiftamt"] else top)

    return _computed(b, kind, compute, 1, "u32")


@opcode("brev.<type>", section="9.7.1.18", type="b32 b64")
def brev(b: Binder) -> Step:
    """Bits in reverse order."""
    bits = int(b.words["type"][1:])

    def compute(a: Row) -> Row:
        return np.array([int(f"{int(value):0{bits}b}"[::-1], 2) for value in a.tolist()], a.dtype)

    return _computed(b, _view(b.words["type"]), compute, 1)


@opcode("bfe.<type>", section="9.7.1.19", type="u32 s32 u64 s64")
def bfe(b: Binder) -> Step:
    """Bit field of length c (8 bits) from position p (8 bits), zero- or sign-extended."""
    kind = b.words["type"]
    signed, bits, view = kind[0] == "s", int(kind[1:]), "u" + kind[1:]
    d, a, position, length = b.expect(4)
    rd, ra, rp, rl = b.destination(d, view), b.source(a, view), b.source(position, "u32"), b.source(length, "u32")

    def one(value: int, start: int, count: int) -> int:
        start, count = start & 0xFF, count & 0xFF
        sign = value >> min(start + count - 1, bits - 1) & 1 if signed and count else 0
        kept = max(0, min(count, bits - start))
        field = value >> start & ((1 << kept) - 1)
        return (field | (-1 << kept if sign else 0)) & ((1 << bits) - 1)

    def step(warp: Warp) -> None:
        rows = getattr(warp, view)
        columns = zip(rows[ra].tolist(), warp.u32[rp].tolist(), warp.u32[rl].tolist(), strict=True)
        np.copyto(rows[rd], np.array([one(*column) for column in columns], rows[rd].dtype), where=warp.where)

    return step if bits == 32 else _counted(step, *_WIDE_FIELDS, _beyond_a_byte(rp, rl))


_WIDE_FIELDS = "bit_fields_beyond_255", "wide-bit-field"


def _beyond_a_byte(position: int, length: int) -> Callable[[Warp], Mask]:
    """Lanes whose position or length exceeds 255: the ISA restricts both to 0..255 (9.7.1.19, 9.7.1.20).

    The pseudo-code takes the low byte. An H200 does so for 32-bit fields but not for 64-bit ones.
    """
    return lambda warp: (warp.u32[position] > 255) | (warp.u32[length] > 255)


@opcode("bfi.<type>", section="9.7.1.20", type="b32 b64")
def bfi(b: Binder) -> Step:
    """Insert the low bits of a into c at a position, for a length."""
    view, bits = _view(b.words["type"]), int(b.words["type"][1:])
    d, *operands = b.expect(5)
    rd = b.destination(d, view)
    sources = [(kind, b.source(item, kind)) for kind, item in zip((view, view, "u32", "u32"), operands, strict=True)]

    def one(field: int, into: int, position: int, length: int) -> int:
        mask = ((1 << (length & 0xFF)) - 1) << (position & 0xFF) & ((1 << bits) - 1)
        return (into & ~mask) | (field << (position & 0xFF) & mask)

    def step(warp: Warp) -> None:
        columns = zip(*(getattr(warp, kind)[row].tolist() for kind, row in sources), strict=True)
        out = getattr(warp, view)[rd]
        np.copyto(out, np.array([one(*column) for column in columns], out.dtype), where=warp.where)

    return step if bits == 32 else _counted(step, *_WIDE_FIELDS, _beyond_a_byte(sources[2][1], sources[3][1]))


@opcode("lop3.b32", "lop3.<bool>.b32", section="9.7.8.6", bool="and or")
def lop3(b: Binder) -> Step:
    """Any bitwise function of three inputs, given by its truth table.

    `d|p` with `.and` or `.or`: p is whether d is nonzero, combined with a last source.
    """
    combine = _LOGIC.get(b.words.get("bool", ""))
    d, a, c, e, table, *rest = b.expect(5 if combine is None else 6)
    lut = b.immediate(table)
    first, second = b.pair(d)
    if (second is None) != (combine is None):
        raise b.error("a predicate destination goes with .and or .or")
    rd = b.destination(first, "u32")
    rp = b.destination(second, "pred") if second is not None else 0
    rq, negated = b.predicate(rest[0]) if rest else (0, False)
    ra, rc, re = (b.source(item, "u32") for item in (a, c, e))

    def step(warp: Warp) -> None:
        u32 = warp.u32
        x, y, z = u32[ra], u32[rc], u32[re]
        out = np.zeros_like(x)
        for minterm in range(8):
            if lut >> minterm & 1:
                out |= (x if minterm & 4 else ~x) & (y if minterm & 2 else ~y) & (z if minterm & 1 else ~z)
        if combine is not None:
            combine(out != 0, warp.pred[rq] ^ negated, out=warp.pred[rp], where=warp.where)
        np.copyto(u32[rd], out, where=warp.where)

    return step


_WORD_TYPES = "u32 s32"
_HALVES = "u16x2 s16x2"


def _fields(word: Row, bits: int, type_name: str) -> Row:
    """int64 [32, 32 / bits]: the fields of a 32-bit row, lowest first, extended by `type_name`."""
    dtype = np.dtype(f"{'i' if type_name[0] == 's' else 'u'}{bits // 8}")
    return np.ascontiguousarray(word).view(dtype).reshape(-1, 32 // bits).astype(np.int64)


@opcode("dp4a.<a>.<b>", section="9.7.1.23", a=_WORD_TYPES, b=_WORD_TYPES)
@opcode("dp2a.<half>.<a>.<b>", section="9.7.1.24", half="lo hi", a=_WORD_TYPES, b=_WORD_TYPES)
def dot(b: Binder) -> Step:
    """e plus the products of four bytes of a and c, or of two halves of a and two bytes of c, wrapping."""
    left, right = b.words["a"], b.words["b"]
    half = b.words.get("half")
    chosen = slice(None) if half is None else slice(0, 2) if half == "lo" else slice(2, 4)

    def compute(a: Row, c: Row, e: Row) -> Result:
        products = _fields(a, 8 if half is None else 16, left) * _fields(c, 8, right)[:, chosen]
        return (e.astype(np.int64) + products.sum(axis=1)).astype(np.uint32)

    return _computed(b, "u32", compute, 3)


@opcode("sad.<type>", section="9.7.1.7", type=_INTEGERS)
def sum_of_differences(b: Binder) -> Step:
    """d = |a - c| + e, wrapping."""
    return _computed(b, b.words["type"], lambda a, c, e: np.where(a < c, c - a, a - c) + e, 3)


@opcode("mul24.<half>.<type>", section="9.7.1.5", half="lo hi", type=_WORD_TYPES)
@opcode("mad24.<half>.<type>", section="9.7.1.6", half="lo hi", type=_WORD_TYPES)
@opcode("mad24.hi.sat.s32", section="9.7.1.6")
def multiply_24(b: Binder) -> Step:
    """Bits 31..0 or 47..16 of the product of the low 24 bits of a and c. mad24 adds e."""
    parts = b.instruction.parts
    signed, shift, saturates = parts[-1] == "s32", 16 if "hi" in parts else 0, "sat" in parts

    def compute(a: Row, c: Row, e: Row | None = None) -> Result:
        left, right = (one.astype(np.int64) << 40 for one in (a, c))
        if signed:
            product = (left >> 40) * (right >> 40)
        else:
            product = ((left.view(np.uint64) >> 40) * (right.view(np.uint64) >> 40)).view(np.int64)
        result = (product >> shift).astype(np.uint32)
        if e is None:
            return result
        if saturates:
            return np.clip(result.view(np.int32).astype(np.int64) + e, -(1 << 31), (1 << 31) - 1).astype(np.int32)
        return result + e.astype(np.uint32)

    return _computed(b, parts[-1], compute, 2 if parts[0] == "mul24" else 3)


@opcode("bmsk.<mode>.b32", section="9.7.1.22", mode="clamp wrap")
def bit_mask(b: Binder) -> Step:
    """c ones from bit a on. `.wrap` takes both modulo 32. `.clamp` ends the mask at bit 31."""
    clamps = b.words["mode"] == "clamp"

    def compute(a: Row, c: Row) -> Result:
        first, width = (a & 31).astype(np.uint64), (c & 31).astype(np.uint64)
        past = first + width >= 32
        whole = np.uint64(0xFFFF_FFFF)
        below, above = (whole << first) & whole, (whole << (first + width)) & whole
        if clamps:
            below = np.where(a >= 32, np.uint64(0), below)
            past |= (a >= 32) | (c >= 32)
        return (below & ~np.where(past, np.uint64(0), np.where(width == 0, whole, above))).astype(np.uint32)

    return _computed(b, "u32", compute, 2)


@opcode("szext.<mode>.<type>", section="9.7.1.21", mode="clamp wrap", type=_WORD_TYPES)
def extend(b: Binder) -> Step:
    """The low c bits of a, extended. For c from 32 on `.clamp` gives a itself and `.wrap` takes c modulo 32."""
    clamps, signed = b.words["mode"] == "clamp", b.words["type"] == "s32"

    def compute(a: Row, c: Row) -> Result:
        width = (c & 31).astype(np.int64)
        unused = np.where(width == 0, 0, 64 - width)
        wide = a.astype(np.int64) << unused
        cut = (wide >> unused) if signed else (wide.view(np.uint64) >> unused.astype(np.uint64)).view(np.int64)
        cut = np.where(width == 0, 0, cut)
        return np.where(c >= 32, a, cut).astype(np.uint32) if clamps else cut.astype(np.uint32)

    return _computed(b, "u32", compute, 2)


_BYTES = "u8x4 s8x4"


@opcode("add{.sat}.<type>", section="9.7.1.1", type=f"{_HALVES} {_BYTES}")
@opcode("sub{.sat}.<type>", section="9.7.1.2", type=_BYTES)
@opcode("min.<type>", section="9.7.1.12", type=_BYTES)
@opcode("max.<type>", section="9.7.1.13", type=_BYTES)
@opcode("min.relu.s8x4", section="9.7.1.12")
@opcode("max.relu.s8x4", section="9.7.1.13")
@opcode("min.<type>", section="9.7.1.12", type=_HALVES)
@opcode("max.<type>", section="9.7.1.13", type=_HALVES)
@opcode("min.relu.s16x2", section="9.7.1.12")
@opcode("max.relu.s16x2", section="9.7.1.13")
def halves(b: Binder) -> Step:
    """Sum, difference, minimum or maximum of each 16-bit half or byte. `.relu` makes negative results zero."""
    parts = b.instruction.parts
    operation = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[parts[0]]
    bits, low = int(re.sub(r"x\d|\D", "", parts[-1])), 0
    high = (1 << bits) - 1
    if parts[-1][0] == "s":
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    saturates, relu = "sat" in parts, "relu" in parts

    def compute(a: Row, c: Row) -> Result:
        result = operation(*(_fields(one, bits, parts[-1]) for one in (a, c)))
        if saturates or relu:
            result = np.clip(result, 0 if relu else low, high)
        return np.ascontiguousarray(result.astype(f"u{bits // 8}")).view(np.uint32)[:, 0]

    return _computed(b, "u32", compute, 2)


@opcode("neg.s8x4", section="9.7.1.11")
def negate_bytes(b: Binder) -> Step:
    """Each byte negated, wrapping."""
    return _computed(b, "u32", lambda a: (-_fields(a, 8, "s8")).astype(np.uint8).view(np.uint32)[:, 0], 1)


@opcode("fns.b32", section="9.7.1.17")
def nth_set(b: Binder) -> Step:
    """Position of the e-th set bit of a from bit c on, upwards or downwards. All ones if there is none."""

    def found(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFF_FFFF
        ones = [at for at in (range(base, 32) if offset > 0 else range(base, -1, -1)) if mask >> at & 1]
        return ones[abs(offset) - 1] if abs(offset) <= len(ones) else 0xFFFF_FFFF

    def compute(a: Row, c: Row, e: Row) -> Result:
        columns = zip(a.tolist(), c.tolist(), e.view(np.int32).tolist(), strict=True)
        return np.array([found(mask, base & 31, offset) for mask, base, offset in columns], np.uint32)

    return _computed(b, "u32", compute, 3)
