"""The second kernel where the keys are split: a CTA makes one row of all its parts, a thread one column.

A part is O and a row sum in fp32, both relative to the part's own reference; they are brought to the greatest of the
references and added in the order of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Address, Register, Special, at

MINUS_INFINITY = -math.inf
STATISTICS_BYTES = 8
AT_ONCE = 8
"""Loads in flight a thread: one after the other, each would wait for the memory's whole latency."""


def combine_name(hd: int) -> str:
    """The entry of the kernel for one hd."""
    return f"fmha_combine_hd{hd}"


def combine_kernel(hd: int, version: tuple[int, int]) -> Builder:
    """Parameters: partial o, partial statistics, o, lse (0 when it is not wanted), splits. A CTA has hd threads."""
    x = Builder(combine_name(hd), target="sm_90a", version=version, block=hd)
    x.header([f"Combines the parts of a row of O, hd = {hd}: one CTA a row, one thread a column."])
    parts, statistics = x.param("partial_o", "u64"), x.param("partial_statistics", "u64")
    o, lse, splits = x.param("o", "u64"), x.param("lse", "u64"), x.param("splits", "u32")
    x.section("the parts of this row")
    column = x.let("column", "mov.u32", TID_X)
    row = x.let("row", "mov.u32", Special("%ctaid.x", "u32"))
    rows = x.let("rows", "mov.u32", Special("%nctaid.x", "u32"))
    element = x.let("element", "mul.wide.u32", row, hd)
    x.emit("add.s64", element, element, x.let("column_wide", "cvt.u64.u32", column))
    x.emit("add.s64", parts, parts, x.let("element_bytes", "shl.b64", element, 2))
    x.emit("add.s64", statistics, statistics, x.let("row_bytes", "mul.wide.u32", row, STATISTICS_BYTES))
    part_step = x.let("part_step", "mul.wide.u32", rows, 4 * hd)
    statistics_step = x.let("statistics_step", "mul.wide.u32", rows, STATISTICS_BYTES)
    parts_of_row = _Parts(x, splits, parts, part_step, statistics, statistics_step)
    shift = _shift(parts_of_row)
    total, value = _sums(parts_of_row, shift)
    _store(x, column, row, element, o, lse, total, value, shift)
    x.emit("ret")
    return x


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of this thread's element: AT_ONCE of them are asked for before the first is used."""

    x: Builder
    splits: Register
    o: Register
    o_step: Register
    statistics: Register
    statistics_step: Register

    @contextmanager
    def loop(self, name: str) -> Iterator[list[tuple[Register, Register]]]:
        """The body runs for AT_ONCE parts at a time: the number of each, and whether there is one of that number.

        Where there is none, the number is that of the last part.
        """
        x = self.x
        first = x.let(f"{name}_first", "mov.b32", 0)
        finished = x.reg(f"{name}_finished", "pred")
        last = x.let(f"{name}_last", "sub.u32", self.splits, 1)
        with x.loop(name) as loop:
            parts: list[tuple[Register, Register]] = []
            for index in range(AT_ONCE):
                part = x.let("part", "add.u32", first, index)
                there = x.let("there", "setp.lt.u32", part, self.splits)
                x.emit("min.u32", part, part, last)
                parts.append((x.let("part_wide", "cvt.u64.u32", part), there))
            yield parts
            x.emit("add.u32", first, first, AT_ONCE)
            x.emit("setp.ge.u32", finished, first, self.splits)
            x.emit("bra", loop.done, guard=finished)

    def place(self, part: Register, base: Register, step: Register) -> Address:
        """The address of `part`."""
        return at(self.x.let("place", "mad.lo.u64", part, step, base))


def _shift(parts: _Parts) -> Register:
    """What to add to a reference: minus the greatest one, or 0 where no part has seen a key."""
    x = parts.x
    x.section("the greatest reference")
    most = x.let("most", "mov.f32", MINUS_INFINITY)
    with parts.loop("references") as numbers:
        places = [parts.place(number, parts.statistics, parts.statistics_step) for number, _ in numbers]
        for reference in [x.let("reference", "ld.global.f32", place) for place in places]:
            x.emit("max.f32", most, most, reference)
    unseen = x.let("unseen", "setp.eq.f32", most, MINUS_INFINITY)
    shift = x.let("shift", "neg.f32", most)
    x.emit("selp.f32", shift, 0.0, shift, unseen, note="-inf - -inf would be NaN")
    return shift


def _sums(parts: _Parts, shift: Register) -> tuple[Register, Register]:
    """The row sum and this thread's element of O, both relative to the greatest reference."""
    x = parts.x
    x.section("the sums")
    total, value = x.let("total", "mov.f32", 0.0), x.let("value", "mov.f32", 0.0)
    with parts.loop("sums") as numbers:
        loaded: list[tuple[Register, Register, Register, Register]] = []
        for number, there in numbers:
            reference, partial_sum = x.reg("part_reference", "f32"), x.reg("part_sum", "f32")
            place = parts.place(number, parts.statistics, parts.statistics_step)
            x.emit("ld.global.v2.f32", (reference, partial_sum), place)
            partial = x.let("part_value", "ld.global.f32", parts.place(number, parts.o, parts.o_step))
            loaded.append((reference, partial_sum, partial, there))
        for reference, partial_sum, partial, there in loaded:
            below = x.let("below", "add.rn.f32", reference, shift)
            weight = x.let("weight", "ex2.approx.ftz.f32", below)
            x.emit("fma.rn.f32", total, partial_sum, weight, total, guard=there)
            x.emit("fma.rn.f32", value, partial, weight, value, guard=there)
    return total, value


def _store(
    x: Builder,
    column: Register,
    row: Register,
    element: Register,
    o: Register,
    lse: Register,
    total: Register,
    value: Register,
    shift: Register,
) -> None:
    x.section("O / sum, and lse")
    inverse = x.let("inverse", "rcp.approx.ftz.f32", total)
    empty = x.let("empty", "setp.eq.f32", total, 0.0)
    x.emit("selp.f32", inverse, 0.0, inverse, empty, note="a row that sees no key is 0")
    x.emit("mul.rn.f32", value, value, inverse)
    rounded = x.let("rounded", "cvt.rn.bf16.f32", value)
    x.emit("add.s64", o, o, x.let("o_bytes", "shl.b64", element, 1))
    x.emit("st.global.b16", at(o), rounded)
    wanted = x.let("lse_wanted", "setp.ne.u64", lse, 0)
    x.emit("setp.eq.and.u32", wanted, column, 0, wanted)
    x.comment("lse = ln 2 (reference + log2 sum); log2 0 is -inf")
    log2_sum = x.let("log2_sum", "lg2.approx.ftz.f32", total)
    logarithm = x.let("lse_value", "sub.rn.f32", log2_sum, shift)
    x.emit("mul.rn.f32", logarithm, logarithm, math.log(2.0))
    x.emit("add.s64", lse, lse, x.let("lse_bytes", "mul.wide.u32", row, 4))
    x.emit("st.global.f32", at(lse), logarithm, guard=wanted)
