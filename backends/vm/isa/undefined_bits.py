"""How undefined bits pass through the instructions that only compute, where that is known bit by bit.

For the others see bind.definedness: a lane with an undefined operand has an undefined result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.vm.bind.definedness import Computing, carries, moved
from backends.vm.machine.code import LANES
from backends.vm.machine.undefined import Bits, all_bits, lanes_of, no_bits
from backends.vm.numerics.convert import WIDTH
from backends.vm.ptx.ast import Sink, Vector

Found = Sequence[Bits] | None
_INTEGERS = ("b16", "b32", "b64", "u16", "s16", "u32", "s32", "u64", "s64")


@carries("mov")
def move(seen: Computing) -> Found:
    """A copy carries its bits; packing and unpacking put them side by side and take them apart."""
    written, read = seen.item.instruction.operands
    if isinstance(written, Vector):
        return _taken_apart(seen.bits(0), written)
    if isinstance(read, Vector):
        return _side_by_side([seen.bits(i) for i in range(len(read.items))], seen.item.defines[0][0])
    return [seen.bits(0)]


def _taken_apart(bits: Bits, written: Vector) -> Found:
    """The bits of each part, but for those that go nowhere."""
    count = len(written.items)
    size = 8 * bits.nbytes // LANES // count
    parts = np.ascontiguousarray(bits).view(f"u{size // 8}").reshape(LANES, count)
    dtype = no_bits(max(size, 16)).dtype
    kept = [i for i, item in enumerate(written.items) if not isinstance(item, Sink)]
    return [parts[:, i].astype(dtype) for i in kept]


def _side_by_side(parts: Sequence[Bits], width: int) -> Found:
    """The bits of parts of one register; a part of 8 bits is the low half of its own."""
    dtype = np.dtype(f"u{width // 8 // len(parts)}")
    packed = np.empty((LANES, len(parts)), dtype)
    for i, part in enumerate(parts):
        packed[:, i] = part
    whole = packed.view(no_bits(width).dtype)
    return [whole if whole.shape[1] > 1 else whole[:, 0]]


@carries("brev", "movmatrix")
def rearrange(seen: Computing) -> Found:
    """The bits go where the values go."""
    return moved(seen)


@carries("shl", "shr", "szext")
def shift(seen: Computing) -> Found:
    """By an amount that is defined, the bits go with the values; a copied sign is undefined where the sign is."""
    return moved(seen, 1)


@carries("shf", "prmt")
def select_bits(seen: Computing) -> Found:
    """Two words by a third that is defined."""
    return moved(seen, 2)


@carries("bfe")
def extract(seen: Computing) -> Found:
    """A field whose place is defined."""
    return moved(seen, 1, 2)


@carries("bfi")
def insert(seen: Computing) -> Found:
    """As `extract`."""
    return moved(seen, 2, 3)


@carries("cvta")
def convert_address(seen: Computing) -> Found:
    """The window of a state space is put on or taken off; all else stays."""
    return [seen.bits(0)]


@carries("and", "or")
def conjunction(seen: Computing) -> Found:
    """A defined 0 decides an `and`, a defined 1 an `or`."""
    (a, c), (x, y) = (seen.bits(0), seen.bits(1)), (seen.values(0), seen.values(1))
    if seen.parts[0] == "or":
        x, y = ~x, ~y
    return [(a & c) | (a & y) | (c & x)]


@carries("xor", "not")
def bitwise(seen: Computing) -> Found:
    """Each bit by itself."""
    return [seen.bits(0) | seen.bits(1)] if seen.parts[0] == "xor" else [seen.bits(0)]


@carries("lop3")
def any_logic(seen: Computing) -> Found:
    """As `bitwise`; that the truth table may ignore an operand is not looked at."""
    if seen.parts[1:] != ("b32",) or len(seen.item.reads) != 3:
        return None
    return [seen.bits(0) | seen.bits(1) | seen.bits(2)]


@carries("add", "sub", "mul", "mad")
def low_bits_first(seen: Computing) -> Found:
    """Of wrapping integers, the bits of a result below the lowest undefined bit of the operands are defined."""
    kind, words = seen.parts[-1], seen.parts[1:-1]
    if kind not in _INTEGERS or (words != ("lo",) if seen.parts[0] in ("mul", "mad") else words):
        return None
    found = seen.bits(0) | seen.bits(1)
    if seen.parts[0] == "mad":
        found = found | seen.bits(2)
    return [found | (~found + found.dtype.type(1))]


@carries("selp")
def choose(seen: Computing) -> Found:
    """What is not chosen does not matter. Where the predicate is undefined, the bits that both have in common do not
    depend on it."""
    a, c, doubt = seen.bits(0), seen.bits(1), seen.bits(2)
    chosen = np.where(seen.values(2), a, c)
    either = a | c | (seen.values(0) ^ seen.values(1))
    return [np.where(doubt, either, chosen)]


@carries("setp")
def compare(seen: Computing) -> Found:
    """Integers that differ in a defined bit are not equal. A defined operand may decide `.and` and `.or`."""
    item = seen.item
    if len(item.reads) not in (2, 3) or seen.parts[-1].endswith("x2"):
        return None
    hidden = seen.bits(0) | seen.bits(1)
    doubt = lanes_of(hidden)
    if seen.parts[1] in ("eq", "ne") and seen.parts[-1] in _INTEGERS:
        doubt &= ((seen.values(0) ^ seen.values(1)) & ~hidden) == 0
    if len(item.reads) == 3:
        known = ~seen.bits(2)
        value = seen.values(2)
        decided = known & (~value if "and" in seen.parts else value if "or" in seen.parts else np.False_)
        doubt = (doubt | ~known) & ~decided
    return [doubt for _ in item.defines]


@carries("cvt")
def convert(seen: Computing) -> Found:
    """Integers keep their bits in place. The halves of a pair are converted one by one. Of a wider register, only the
    bits of the source's type count."""
    *between, dst, src = seen.parts[1:]
    if dst in WIDTH and src in WIDTH and dst[0] in "us" and src[0] in "us" and "sat" not in between:
        return moved(seen)
    if src not in WIDTH or dst not in WIDTH:
        return None
    if dst.endswith("x2"):
        return _convert_pair(seen, dst, src)
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
