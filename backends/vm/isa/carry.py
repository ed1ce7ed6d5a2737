"""Arithmetic with a carry: add.cc to madc (PTX ISA 9.7.2). The condition code is a predicate private to these."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.machine.warp import Warp
from backends.vm.ptx.ast import Register

_TYPES = "u32 s32 u64 s64"
_FLAG = Register("CC.CF")
"""No declared register can have this name, because it contains a dot."""


def _flag(b: Binder) -> Register:
    """The condition code. Reserves a register row in functions that use it."""
    if _FLAG.name not in b.rows.rows:
        b.rows.rows[_FLAG.name] = b.rows.reserve(1)
    return _FLAG


def _carried(b: Binder, count: int, exact: Callable[[list[int], int], int]) -> Step:
    """`exact` computes the result from the operands, as unsigned integers, and the carry. Bits above it carry out."""
    bits, parts = int(b.words["type"][1:]), b.instruction.parts
    view, mask = f"u{bits}", (1 << bits) - 1
    d, *sources = b.expect(count + 1)
    rows = [b.source(one, view) for one in sources]
    carry_in = b.source(_flag(b), "pred") if parts[0].endswith("c") else None
    rd = b.destination(d, view)
    carry_out = b.destination(_flag(b), "pred") if "cc" in parts else None

    def step(warp: Warp) -> None:
        registers = getattr(warp, view)
        columns = zip(*(registers[row].tolist() for row in rows), strict=True)
        carries = warp.pred[carry_in].tolist() if carry_in is not None else [False] * warp.mask.size
        exactly = [exact(list(column), int(carry)) for column, carry in zip(columns, carries, strict=True)]
        np.copyto(registers[rd], np.array([one & mask for one in exactly], registers[rd].dtype), where=warp.where)
        if carry_out is not None:
            np.copyto(warp.pred[carry_out], np.array([one not in range(mask + 1) for one in exactly]), where=warp.where)

    return step


@opcode("add.cc.<type>", section="9.7.2.1", type=_TYPES)
@opcode("addc{.cc}.<type>", section="9.7.2.2", type=_TYPES)
def add_with_carry(b: Binder) -> Step:
    """d = a + c, plus the carry for addc; `.cc` carries out."""
    return _carried(b, 2, lambda x, carry: x[0] + x[1] + carry)


@opcode("sub.cc.<type>", section="9.7.2.3", type=_TYPES)
@opcode("subc{.cc}.<type>", section="9.7.2.4", type=_TYPES)
def subtract_with_borrow(b: Binder) -> Step:
    """d = a - c, minus the borrow for subc; `.cc` borrows.

    The ISA puts the borrow in CC.CF. An H200 adds the complement of c, so a borrow is a carry of zero. Only code that
    mixes additions and subtractions can tell the difference.
    """
    mask = (1 << int(b.words["type"][1:])) - 1
    borrows = b.instruction.parts[0] == "subc"
    return _carried(b, 2, lambda x, carry: x[0] + (mask ^ x[1]) + (carry if borrows else 1))


@opcode("mad.lo.cc.<type>", "mad.hi.cc.<type>", section="9.7.2.5", type=_TYPES)
@opcode("madc.<half>{.cc}.<type>", section="9.7.2.6", half="lo hi", type=_TYPES)
def multiply_add_with_carry(b: Binder) -> Step:
    """d = half of a * c, plus e, plus the carry for madc; `.cc` carries the addition out."""
    bits, signed, high = int(b.words["type"][1:]), b.words["type"][0] == "s", "hi" in b.instruction.parts
    top = 1 << (bits - 1)

    def exact(x: list[int], carry: int) -> int:
        a, c = ((one ^ top) - top if signed else one for one in x[:2])
        product = a * c >> bits if high else a * c
        return (product & ((1 << bits) - 1)) + x[2] + carry

    return _carried(b, 3, exact)
