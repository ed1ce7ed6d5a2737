"""Tracks undefined bits through pure computations for which the result is known bit by bit.

bind.definedness handles the others: there a lane with an undefined operand has an undefined result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import numpy as np

from backends.vm.bind.definedness import Computing, Watches, carries, moved
from backends.vm.bind.flow import Bound
from backends.vm.machine.code import LANES
from backends.vm.machine.undefined import Bits, all_bits, lanes_of, no_bits
from backends.vm.memory.definedness import Mask
from backends.vm.numerics.convert import WIDTH
from backends.vm.ptx.ast import Immediate, Sink, Vector

Found = Sequence[Bits] | None
_INTEGERS = ("b16", "b32", "b64", "u16", "s16", "u32", "s32", "u64", "s64")


def _never(item: Bound) -> bool:
    return False


def _steered(*sources: int) -> Watches:
    """The value counts of a register that steers where bits go."""
    return lambda item: any(not isinstance(item.instruction.operands[i + 1], Immediate) for i in sources)


def _registers(item: Bound) -> bool:
    """Literals alone decide about the undefined bits of a single register, and values only if there are more."""
    return sum(not isinstance(one, Immediate) for one in item.instruction.operands[1 : 1 + len(item.reads)]) > 1


def _integers(item: Bound) -> bool:
    return item.instruction.parts[-1] in _INTEGERS


def _products(item: Bound) -> bool:
    return _integers(item) and item.instruction.parts[0] in ("mul", "mad")


def _comparisons(item: Bound) -> bool:
    return _integers(item) or len(item.reads) > 2


@carries("mov", sources=(1, 2, 4, 8), watches=_never)
def move(seen: Computing) -> Found:
    """A copy keeps its bits. Packing joins them, unpacking splits them."""
    written, read = seen.item.instruction.operands
    if isinstance(written, Vector):
        return _taken_apart(seen.bits(0), written)
    if isinstance(read, Vector):
        return _side_by_side([seen.bits(i) for i in range(len(read.items))], seen.item.defines[0][0])
    return [seen.bits(0)]


def _taken_apart(bits: Bits, written: Vector) -> Found:
    """The bits of each part whose destination is a register."""
    count = len(written.items)
    size = 8 * bits.nbytes // LANES // count
    parts = np.ascontiguousarray(bits).view(f"u{size // 8}").reshape(LANES, count)
    dtype = no_bits(max(size, 16)).dtype
    kept = [i for i, item in enumerate(written.items) if not isinstance(item, Sink)]
    return [parts[:, i].astype(dtype) for i in kept]


def _side_by_side(parts: Sequence[Bits], width: int) -> Found:
    """The bits of parts joined in one register. An 8-bit part is the low half of its own register."""
    dtype = np.dtype(f"u{width // 8 // len(parts)}")
    packed = np.empty((LANES, len(parts)), dtype)
    for i, part in enumerate(parts):
        packed[:, i] = part
    whole = packed.view(no_bits(width).dtype)
    return [whole if whole.shape[1] > 1 else whole[:, 0]]


@carries("brev", "movmatrix", sources=(1,), watches=_never)
def rearrange(seen: Computing) -> Found:
    """The bits move like the values."""
    return moved(seen)


@carries("shl", "shr", "szext", sources=(2,), watches=_steered(1))
def shift(seen: Computing) -> Found:
    """With a defined amount the bits shift like the values. Copies of an undefined sign are undefined."""
    return moved(seen, 1)


@carries("shf", "prmt", sources=(3,), watches=_steered(2))
def select_bits(seen: Computing) -> Found:
    """A selection from two words by a defined third."""
    return moved(seen, 2)


@carries("bfe", sources=(3,), watches=_steered(1, 2))
def extract(seen: Computing) -> Found:
    """A bit field with a defined place."""
    return moved(seen, 1, 2)


@carries("bfi", sources=(4,), watches=_steered(2, 3))
def insert(seen: Computing) -> Found:
    """As `extract`."""
    return moved(seen, 2, 3)


@carries("cvta", sources=(1,), watches=_never)
def convert_address(seen: Computing) -> Found:
    """Adding or removing the window of a state space keeps the other bits."""
    return [seen.bits(0)]


@carries("and", "or", "xor", sources=(2,), watches=_registers)
def two_bits(seen: Computing) -> Found:
    """Bit by bit: a defined 0 decides an `and`, a defined 1 an `or`, and `xor r, r` is 0."""
    a, c = seen.bits(0), seen.bits(1)
    hidden = a | c
    if seen.parts[0] == "xor":
        return [np.zeros_like(hidden) if seen.same(0, 1) else hidden]
    left, right = seen.values(0), seen.values(1)
    if seen.parts[0] == "or":
        left, right = ~left, ~right
    return [hidden & (left | a) & (right | c)]


@carries("not", sources=(1,), watches=_never)
def bitwise(seen: Computing) -> Found:
    """Bit by bit."""
    return [seen.bits(0)]


@carries("lop3", sources=(3,), watches=_registers)
def three_bits(seen: Computing) -> Found:
    """Bit by bit, by the truth table."""
    table = seen.item.instruction.operands[4]
    if seen.parts[1:] != ("b32",) or not isinstance(table, Immediate):
        return None
    return [_by_table(seen, table.value)]


def _by_table(seen: Computing, table: int) -> Bits:
    """The bits of a result that may be 0 or 1 given the defined bits of the sources.

    Bit i of `table` is the result for sources that are the binary digits of i, the first source highest.
    """
    count = len(seen.item.reads)
    may_be = [(~seen.values(i) | seen.bits(i), seen.values(i) | seen.bits(i)) for i in range(count)]
    found = [np.zeros_like(may_be[0][0]) for _ in range(2)]
    for minterm in range(2**count):
        digits = [minterm >> (count - 1 - i) & 1 for i in range(count)]
        if any(digits[i] != digits[k] and seen.same(i, k) for i in range(count) for k in range(i)):
            continue
        possible = reduce(and_, [may_be[i][digit] for i, digit in enumerate(digits)])
        found[table >> minterm & 1] |= possible
    return found[0] & found[1]


@carries("add", "sub", "mul", "mad", sources=(2, 3), watches=_products)
def low_bits_first(seen: Computing) -> Found:
    """With wrapping integers, result bits below the lowest one that an undefined bit reaches are defined."""
    opcode, kind, words = seen.parts[0], seen.parts[-1], seen.parts[1:-1]
    multiplies = opcode in ("mul", "mad")
    if kind not in _INTEGERS or (words not in (("lo",), ("wide",)) if multiplies else words):
        return None
    if opcode == "sub" and seen.same(0, 1):
        return [np.zeros_like(seen.bits(0))]
    dtype = no_bits(seen.item.defines[0][0]).dtype
    a, c = seen.bits(0).astype(dtype), seen.bits(1).astype(dtype)
    if multiplies:
        x, y = (_lowest((seen.values(i) | seen.bits(i)).astype(dtype)) for i in range(2))
        a, c = _lowest(a) * y, _lowest(c) * x
    found = a | c | seen.bits(2).astype(dtype) if opcode == "mad" else a | c
    return [found | _negative(found)]


def _negative(bits: Bits) -> Bits:
    return ~bits + bits.dtype.type(1)


def _lowest(bits: Bits) -> Bits:
    """The lowest set bit, 0 for 0."""
    return bits & _negative(bits)


@carries("selp", sources=(3,))
def choose(seen: Computing) -> Found:
    """The operand that is not chosen does not matter. With an undefined predicate, bits that both operands have in
    common are defined."""
    a, c, doubt = seen.bits(0), seen.bits(1), seen.bits(2)
    chosen = np.where(seen.values(2), a, c)
    either = a | c | (seen.values(0) ^ seen.values(1))
    return [np.where(doubt, either, chosen)]


@carries("slct", sources=(3,))
def choose_by_sign(seen: Computing) -> Found:
    """As choose, by the sign of an integer."""
    if seen.parts[-1] != "s32":
        return None
    a, c, sign = seen.bits(0), seen.bits(1), np.uint32(1 << 31)
    chosen = np.where(seen.values(2) & sign, c, a)
    either = a | c | (seen.values(0) ^ seen.values(1))
    return [np.where(seen.bits(2) & sign, either, chosen)]


@carries("setp", sources=(2, 3), watches=_comparisons)
def compare(seen: Computing) -> Found:
    """Integers that differ in a defined bit are not equal, and their order is known if their ranges are disjoint.

    A defined predicate operand may decide `.and` and `.or`.
    """
    item = seen.item
    if seen.parts[-1].endswith("x2"):
        return None
    hidden = seen.bits(0) | seen.bits(1)
    doubt = lanes_of(hidden)
    if seen.parts[-1] in _INTEGERS:
        doubt &= _undecided(seen, hidden)
    if len(item.reads) == 3:
        known = ~seen.bits(2)
        value = seen.values(2)
        decided = known & (~value if "and" in seen.parts else value if "or" in seen.parts else np.False_)
        doubt = (doubt | ~known) & ~decided
    return [doubt for _ in item.defines]


def _undecided(seen: Computing, hidden: Bits) -> Mask:
    """The lanes where two integers with undefined bits `hidden` may compare either way."""
    how = seen.parts[1]
    if seen.same(0, 1):
        return np.zeros(LANES, np.bool_)
    if how in ("eq", "ne"):
        return ((seen.values(0) ^ seen.values(1)) & ~hidden) == 0
    (least, most), (from_, to) = (_range(seen, i) for i in range(2))
    if how in ("lt", "lo", "ge", "hs"):
        return (most >= from_) & (least < to)
    return (most > from_) & (least <= to)


def _range(seen: Computing, source: int) -> tuple[Bits, Bits]:
    """The least and greatest value of a source given its defined bits."""
    bits, values = seen.bits(source), seen.values(source)
    if seen.parts[-1][0] != "s":
        return values & ~bits, values | bits
    sign = bits & bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    signed = f"i{bits.dtype.itemsize}"
    return (values & ~bits | sign).view(signed), ((values | bits) & ~sign).view(signed)


@carries("min", "max", sources=(2,), watches=_integers)
def least_or_greatest(seen: Computing) -> Found:
    """Uses the ranges of integers: an operand that is certain to lose does not matter."""
    if seen.parts[-1] not in _INTEGERS or len(seen.parts) != 2:
        return None
    pick = np.minimum if seen.parts[0] == "min" else np.maximum
    (least, most), (from_, to) = (_range(seen, i) for i in range(2))
    low, high = pick(least, from_), pick(most, to)
    a, c = seen.bits(0), seen.bits(1)
    below, above = (most <= from_, to <= least) if seen.parts[0] == "min" else (least >= to, from_ >= most)
    either = a | c | (seen.values(0) ^ seen.values(1))
    found = np.where(below, a, np.where(above, c, either)).astype(a.dtype)
    return [found & _from_highest(low.view(a.dtype) ^ high.view(a.dtype))]


def _from_highest(bits: Bits) -> Bits:
    """The highest set bit and all bits below it."""
    filled = bits.copy()
    step = 1
    while step < 8 * bits.dtype.itemsize:
        filled |= filled >> bits.dtype.type(step)
        step *= 2
    return filled


@carries("cvt", sources=(1, 2), watches=_never)
def convert(seen: Computing) -> Found:
    """Integers keep their bits in place. The halves of a pair are converted one by one. Only the bits of the source's
    type count in a wider register."""
    *between, dst, src = seen.parts[1:]
    one = len(seen.item.reads) == 1
    if one and dst in WIDTH and src in WIDTH and dst[0] in "us" and src[0] in "us" and "sat" not in between:
        return moved(seen)
    if src not in WIDTH or dst not in WIDTH:
        return None
    if dst.endswith("x2"):
        return _convert_pair(seen, dst, src)
    if not one:
        return None
    lost = lanes_of(seen.bits(0) & np.uint64((1 << WIDTH[src]) - 1).astype(seen.bits(0).dtype))
    return [all_bits(seen.item.defines[0][0], lost)]


def _convert_pair(seen: Computing, dst: str, src: str) -> Found:
    if len(seen.item.reads) != (1 if src.endswith("x2") else 2):
        return None
    if src.endswith("x2"):
        size = WIDTH[src] // 2
        low, high = (_part_lost(seen.bits(0), i * size, size) for i in range(2))
    else:
        high, low = lanes_of(seen.bits(0)), lanes_of(seen.bits(1))
    size = WIDTH[dst] // 2
    row = no_bits(seen.item.defines[0][0])
    ones = (1 << size) - 1
    row |= np.where(low, ones, 0).astype(row.dtype)
    row |= np.where(high, ones << size, 0).astype(row.dtype)
    return [row]


def _part_lost(bits: Bits, first: int, size: int) -> Bits:
    return (bits >> bits.dtype.type(first)) & bits.dtype.type((1 << size) - 1) != 0
