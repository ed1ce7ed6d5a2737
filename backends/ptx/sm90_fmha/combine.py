"""The second kernel where the keys are split: a CTA makes one row of all its parts, a thread one column.

A part is O and a row sum in fp32, both relative to the part's own reference. They are brought to the greatest reference
and added in the order of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.ptx.attention import MINUS_INFINITY, shift_of
from backends.ptx.builder import CTAID_X, NCTAID_X, TID_X, Builder
from backends.ptx.operands import Address, Register, at
from backends.ptx.parameters import U32, Parameters, Pointer
from backends.ptx.sm90_fmha.softmax import inverse_of

STATISTICS_BYTES = 8
AT_ONCE = 8
"""Loads in flight a thread: one after the other, each would wait for the memory's whole latency."""


@dataclass(frozen=True, slots=True)
class CombineParams(Parameters):
    """`lse` is null when it is not wanted."""

    partial_o: Pointer
    partial_statistics: Pointer
    o: Pointer
    lse: Pointer
    splits: U32


def combine_name(hd: int) -> str:
    """The entry of the kernel for one hd."""
    return f"fmha_combine_hd{hd}"


def combine_kernel(hd: int, version: tuple[int, int]) -> Builder:
    """Grid: one CTA of hd threads a row."""
    x = Builder(combine_name(hd), target="sm_90a", version=version, block=hd)
    x.header([f"Combines the parts of a row of O, hd = {hd}: one CTA a row, one thread a column."])
    params = CombineParams.declare(x)
    x.section("the parts of this row")
    column = x.let("column", "mov.u32", TID_X)
    row = x.let("row", "mov.u32", CTAID_X)
    rows = x.let("rows", "mov.u32", NCTAID_X)
    element = x.let("element", "mul.wide.u32", row, hd)
    x.emit("add.s64", element, element, x.let("column_wide", "cvt.u64.u32", column))
    o, statistics = params.partial_o, params.partial_statistics
    x.emit("add.s64", o, o, x.let("element_bytes", "shl.b64", element, 2))
    x.emit("add.s64", statistics, statistics, x.let("row_bytes", "mul.wide.u32", row, STATISTICS_BYTES))
    o_step = x.let("part_step", "mul.wide.u32", rows, 4 * hd)
    statistics_step = x.let("statistics_step", "mul.wide.u32", rows, STATISTICS_BYTES)
    parts = _Parts(x, params.splits, _Strided(o, o_step), _Strided(statistics, statistics_step))
    _store(x, params, _Element(row, column, element), _sums(parts, _shift(parts)))
    x.emit("ret")
    return x


@dataclass(frozen=True, slots=True)
class _Element:
    """This thread's element of O: `index` = row * hd + column."""

    row: Register
    column: Register
    index: Register


@dataclass(frozen=True, slots=True)
class _Strided:
    """An address, and the bytes from one part to the next."""

    base: Register
    step: Register


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a part says of this thread's element; `there`: whether there is such a part."""

    reference: Register
    row_sum: Register
    value: Register
    there: Register


@dataclass(frozen=True, slots=True)
class _Sums:
    """The row sum and this thread's element of O, relative to -`shift`, the greatest reference."""

    total: Register
    value: Register
    shift: Register


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of this thread's element. AT_ONCE of them are asked for before the first is used."""

    x: Builder
    splits: Register
    o: _Strided
    statistics: _Strided

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

    def place(self, part: Register, table: _Strided) -> Address:
        """The address of `part`."""
        return at(self.x.let("place", "mad.lo.u64", part, table.step, table.base))

    def load(self, part: Register, there: Register) -> _Loaded:
        """Asks for a part."""
        x = self.x
        reference, row_sum = x.reg("part_reference", "f32"), x.reg("part_sum", "f32")
        x.emit("ld.global.v2.f32", (reference, row_sum), self.place(part, self.statistics))
        return _Loaded(reference, row_sum, x.let("part_value", "ld.global.f32", self.place(part, self.o)), there)


def _shift(parts: _Parts) -> Register:
    """What to add to a reference: minus the greatest one, or 0 where no part has seen a key."""
    x = parts.x
    x.section("the greatest reference")
    most = x.let("most", "mov.f32", MINUS_INFINITY)
    with parts.loop("references") as numbers:
        places = [parts.place(number, parts.statistics) for number, _ in numbers]
        for reference in [x.let("reference", "ld.global.f32", place) for place in places]:
            x.emit("max.f32", most, most, reference)
    return shift_of(x, most)


def _sums(parts: _Parts, shift: Register) -> _Sums:
    x = parts.x
    x.section("the sums")
    total, value = x.let("total", "mov.f32", 0.0), x.let("value", "mov.f32", 0.0)
    with parts.loop("sums") as numbers:
        for part in [parts.load(number, there) for number, there in numbers]:
            below = x.let("below", "add.rn.f32", part.reference, shift)
            weight = x.let("weight", "ex2.approx.ftz.f32", below)
            x.emit("fma.rn.f32", total, part.row_sum, weight, total, guard=part.there)
            x.emit("fma.rn.f32", value, part.value, weight, value, guard=part.there)
    return _Sums(total, value, shift)


def _store(x: Builder, params: CombineParams, element: _Element, sums: _Sums) -> None:
    """O / sum as bf16, and in one thread of the row its lse."""
    x.section("O / sum, and lse")
    o, lse = params.o, params.lse
    x.emit("mul.rn.f32", sums.value, sums.value, inverse_of(x, sums.total))
    rounded = x.let("rounded", "cvt.rn.bf16.f32", sums.value)
    x.emit("add.s64", o, o, x.let("o_bytes", "shl.b64", element.index, 1))
    x.emit("st.global.b16", at(o), rounded)
    wanted = x.let("lse_wanted", "setp.ne.u64", lse, 0)
    x.emit("setp.eq.and.u32", wanted, element.column, 0, wanted)
    x.comment("lse = ln 2 (reference + log2 sum); log2 0 is -inf")
    log2_sum = x.let("log2_sum", "lg2.approx.ftz.f32", sums.total)
    logarithm = x.let("lse_value", "sub.rn.f32", log2_sum, sums.shift)
    x.emit("mul.rn.f32", logarithm, logarithm, math.log(2.0))
    x.emit("add.s64", lse, lse, x.let("lse_bytes", "mul.wide.u32", element.row, 4))
    x.emit("st.global.f32", at(lse), logarithm, guard=wanted)
