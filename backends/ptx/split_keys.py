"""Split-KV for any target: how many CTAs share the keys, the part of each CTA, and the kernel that combines the parts.

With few queries there are few row tiles: one sequence that decodes 64 heads over 8 KV heads has eight. So the keys of a
row tile are spread over CTAs. A part is O in fp32 and, for each row, a reference and a sum; O and sum are relative to
that reference. A second kernel rescales the parts to the greatest reference and adds them in the order of the keys.
There a CTA handles one row and a thread one column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from backends.ptx.attention import MINUS_INFINITY, FmhaFrame, FmhaParams, FmhaShape, inverse_of, shift_of
from backends.ptx.builder import CTAID_X, CTAID_Y, FULL_WARP, NCTAID_X, NCTAID_Z, TID_X, Builder
from backends.ptx.emitter import Predicate
from backends.ptx.operands import Address, Register, Vector, at
from backends.ptx.parameters import U32, Parameters, Pointer
from backends.ptx.shared_memory import Smem, SmemLayout
from megamoe.contract import KernelArg, Launch, Program, Target, TensorMapArg

SPLIT_KEYS = 512
"""Keys that one CTA visits if the keys are split; a multiple of every tile. Splits begin at fixed keys, so the bits of
a row do not depend on batch, heads or window."""
MAX_SPLIT_QUERIES = 16
"""Keys are split for up to this many queries per sequence. With more, the row tiles fill the machine, and partial
outputs would cost more than they gain."""
F32_BYTES = 4
STATISTICS_BYTES = 2 * F32_BYTES
WARP = 32
COMBINED_COLUMNS = 128
"""Columns of a row that a CTA combines, or all columns if there are fewer."""
REFERENCES = 4
"""References that a lane loads at once."""
AT_ONCE = 8
"""Loads in flight per thread: one after the other, each would wait for the full memory latency."""


def splits_of(t: int, s_k: int) -> int:
    """The default rule: CTAs that share a row tile's keys. 1, with nothing to combine, for few keys or many queries."""
    return -(-s_k // SPLIT_KEYS) if t <= MAX_SPLIT_QUERIES else 1


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """How the keys of a row tile are split: `parts` CTAs share them. Each has `part_keys`, the last one possibly fewer.

    `part_keys` is None if there is one part and nothing to combine. The bits of a row depend only on it, hd and s_k.
    """

    part_keys: int | None
    parts: int

    @classmethod
    def of(cls, shape: FmhaShape, tile_n: int, part_keys: int | None) -> KeyPlan:
        """The plan of a case: parts of `part_keys` keys, or the default rule.

        Raises ValueError unless parts of that size begin at tiles of `tile_n` keys.
        """
        if part_keys is not None and (part_keys < 1 or part_keys % tile_n):
            raise ValueError(f"a part has {part_keys} keys; it must have a multiple of {tile_n}, the keys of a tile")
        parts = splits_of(shape.t, shape.s_k) if part_keys is None else -(-shape.s_k // part_keys)
        return cls(part_keys or SPLIT_KEYS if parts > 1 else None, parts)


@dataclass(frozen=True, slots=True)
class SplitFmhaParams(FmhaParams):
    """The parameters of an attention kernel where `splits` CTAs share the keys. `o` points to the partial outputs (f32
    [splits][batch * kv_heads * rows][hd]), `lse` to the partial statistics (f32 [splits][batch * kv_heads * rows][2]:
    reference and sum)."""

    splits: U32


@dataclass(frozen=True, slots=True)
class KeyPart:
    """This CTA's part of the keys. `index`: which part. `keys`: the number of keys per part. `first_row`: the first row
    of its partial results, index * batch * kv_heads * rows (u64)."""

    params: SplitFmhaParams
    index: Register
    keys: int
    first_row: Register

    @classmethod
    def read(cls, x: Builder, params: SplitFmhaParams, batch: Register, keys: int) -> KeyPart:
        """Reads the part from the CTA's third index, passed in as `batch`. That register becomes the batch."""
        x.comment("The third index of the grid: batch * splits + split.")
        index = x.let("split", "rem.u32", batch, params.splits)
        x.emit("div.u32", batch, batch, params.splits)
        layers = x.let("layers", "mov.u32", NCTAID_Z)
        x.emit("div.u32", layers, layers, params.splits)
        x.emit("mul.lo.u32", layers, layers, params.axes.kv_heads)
        x.emit("mul.lo.u32", layers, layers, index)
        return cls(params, index, keys, x.let("part", "mul.wide.u32", layers, params.axes.rows))

    def head_row(self, x: Builder, frame: FmhaFrame) -> Register:
        """The index of this batch and head's first row among all partial rows (u64)."""
        first_row = x.let("first_row", "mul.wide.u32", frame.batch_head, frame.axes.rows)
        x.emit("add.s64", first_row, first_row, self.first_row)
        return first_row

    def row(self, x: Builder, frame: FmhaFrame, row: Register) -> Register:
        """The index of the folded row `row` of this CTA's batch and head among all partial rows (u64)."""
        first_row = self.head_row(x, frame)
        number = x.let("row_wide", "cvt.u64.u32", row)
        x.emit("add.s64", number, number, first_row)
        return number

    def clip(self, x: Builder, first: Register, end: Register) -> None:
        """Clips the visible keys [first, end) to this part."""
        split_first = x.let("split_first", "mul.lo.u32", self.index, self.keys)
        split_end = x.let("split_end", "add.u32", split_first, self.keys)
        x.emit("max.s32", first, first, split_first)
        x.emit("min.s32", end, end, split_end)

    def store_statistics(
        self, x: Builder, number: Register, reference: Register, total: Register, guard: Predicate
    ) -> None:
        """Stores reference and sum of the partial row `number`."""
        place = x.let("statistics_at", "shl.b64", number, STATISTICS_BYTES.bit_length() - 1)
        x.emit("add.s64", place, place, self.params.lse)
        x.emit("st.global.v2.f32", at(place), (reference, total), guard=guard)


def partial_arguments(shape: FmhaShape, maps: Mapping[str, TensorMapArg], splits: int) -> tuple[KernelArg, ...]:
    """The launch arguments for SplitFmhaParams. `maps`: q, k and v."""
    return SplitFmhaParams.arguments(**maps, o="partial_o", lse="partial_statistics", axes=shape.axes(), splits=splits)


def split_program(target: Target, ptx: str, attention: Launch, shape: FmhaShape, splits: int) -> Program:
    """The program of `attention`, which writes `splits` parts, and the kernel that combines them. `ptx` has both."""
    rows = shape.batch * shape.kv_heads * shape.rows
    combine = Launch(
        entry=combine_name(shape.hd),
        grid=(rows, shape.hd // combine_columns(shape.hd), 1),
        block=(combine_columns(shape.hd), 1, 1),
        args=CombineParams.arguments(lse="lse" if shape.lse else None, splits=splits),
        dynamic_smem=COMBINE_SMEM.size,
    )
    scratch = {
        "partial_o": splits * rows * shape.hd * F32_BYTES,
        "partial_statistics": splits * rows * STATISTICS_BYTES,
    }
    return Program(target, ptx, (attention, combine), scratch)


@dataclass(frozen=True, slots=True)
class CombineParams(Parameters):
    """Parameters of the combining kernel. `lse` is null when it is not wanted."""

    partial_o: Pointer
    partial_statistics: Pointer
    o: Pointer
    lse: Pointer
    splits: U32


def combine_name(hd: int) -> str:
    """The entry name of the kernel for one hd."""
    return f"fmha_combine_hd{hd}"


def combine_columns(hd: int) -> int:
    """Columns of a row that a CTA of the kernel for one hd combines, and also its number of threads."""
    return min(hd, COMBINED_COLUMNS)


WEIGHTS_BYTES = WARP * STATISTICS_BYTES
COMBINE_SMEM = SmemLayout().with_place("weights", 2 * WEIGHTS_BYTES, 2 * WEIGHTS_BYTES)
"""Weight and row sum of WARP parts, double-buffered: some warps may still read the previous WARP parts."""


def combine_kernel(hd: int, target: Target, version: tuple[int, int]) -> Builder:
    """The combining kernel. Grid: (rows, column blocks of up to COMBINED_COLUMNS). Each thread has one column."""
    block = combine_columns(hd)
    x = Builder(combine_name(hd), target=target, version=version, block=block)
    x.header([f"Combines the parts of a row of O, hd = {hd}: a CTA has {block} columns of it, a thread one."])
    params = CombineParams.declare(x)
    smem = Smem.declare(x, "dynamic_smem", COMBINE_SMEM)
    x.section("the parts of this row")
    thread = x.let("thread", "mov.u32", TID_X)
    row = x.let("row", "mov.u32", CTAID_X)
    rows = x.let("rows", "mov.u32", NCTAID_X)
    column = x.let("column", "mad.lo.u32", x.let("piece", "mov.u32", CTAID_Y), block, thread)
    element = x.let("element", "mul.wide.u32", row, hd)
    x.emit("add.s64", element, element, x.let("column_wide", "cvt.u64.u32", column))
    o, statistics = params.partial_o, params.partial_statistics
    x.emit("add.s64", o, o, x.let("element_bytes", "shl.b64", element, 2))
    x.emit("add.s64", statistics, statistics, x.let("row_bytes", "mul.wide.u32", row, STATISTICS_BYTES))
    parts = _Parts(
        x=x,
        thread=thread,
        lane=x.let("lane", "and.b32", thread, WARP - 1),
        weights=x.let("weights", "add.u32", smem.base, COMBINE_SMEM["weights"]),
        splits=params.splits,
        last=x.let("last", "sub.u32", params.splits, 1),
        o=_Strided(o, x.let("part_step", "mul.wide.u32", rows, 4 * hd)),
        statistics=_Strided(statistics, x.let("statistics_step", "mul.wide.u32", rows, STATISTICS_BYTES)),
    )
    first = x.let("first", "mov.b32", 0)
    values = x.regs("part_value", "f32", WARP)
    parts.ask(values, first)
    _store(x, params, _Element(row, column, element), _sums(parts, first, values, _shift(parts)))
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

    def place(self, x: Builder, part: Register) -> Address:
        """The address of `part` (u32)."""
        wide = x.let("part_wide", "cvt.u64.u32", part)
        return at(x.let("place", "mad.lo.u64", wide, self.step, self.base))


@dataclass(frozen=True, slots=True)
class _Sums:
    """The row sum and this thread's element of O, relative to the greatest reference, which is -`shift`."""

    total: Register
    value: Register
    shift: Register


@dataclass(frozen=True, slots=True)
class _Parts:
    """The `splits` parts of this thread's element; `last` is the index of the last one."""

    x: Builder
    thread: Register
    lane: Register
    weights: Register
    splits: Register
    last: Register
    o: _Strided
    statistics: _Strided

    def clipped(self, first: Register, offset: int) -> Register:
        """Part `first` + `offset`, clamped to the last one."""
        x = self.x
        part = x.let("part", "add.u32", first, offset)
        x.emit("min.u32", part, part, self.last)
        return part

    @contextmanager
    def some(self, name: str, first: Register, offset: int) -> Iterator[None]:
        """Runs the body if part `first` + `offset` exists."""
        x = self.x
        there = x.let("some", "setp.lt.u32", x.let("some_part", "add.u32", first, offset), self.splits)
        with x.when(there, name):
            yield

    def ask(self, values: Vector, first: Register) -> None:
        """Loads this thread's element of the WARP parts from `first` on, AT_ONCE at a time, as far as they exist."""
        for start in range(0, WARP, AT_ONCE):
            with self.some("ask", first, start):
                for k in range(start, start + AT_ONCE):
                    self.x.emit("ld.global.f32", values[k], self.o.place(self.x, self.clipped(first, k)))


def _shift(parts: _Parts) -> Register:
    """What to add to a reference: minus the greatest one, or 0 if no part has seen a key."""
    x = parts.x
    x.section("the greatest reference")
    most = x.let("most", "mov.f32", MINUS_INFINITY)
    own = x.let("own_part", "mov.b32", parts.lane)
    finished = x.reg("references_finished", "pred")
    with x.loop("references") as loop:
        places = [parts.statistics.place(x, parts.clipped(own, k * WARP)) for k in range(REFERENCES)]
        for reference in [x.let("reference", "ld.global.f32", place) for place in places]:
            x.emit("max.f32", most, most, reference)
        x.emit("add.u32", own, own, REFERENCES * WARP)
        x.emit("setp.ge.u32", finished, own, parts.splits)
        x.emit("bra", loop.done, guard=finished)
    for step in range(WARP.bit_length() - 1):
        other = x.let("other", "shfl.sync.bfly.b32", most, 1 << step, WARP - 1, FULL_WARP)
        x.emit("max.f32", most, most, other)
    return shift_of(x, most)


def _sums(parts: _Parts, first: Register, values: Vector, shift: Register) -> _Sums:
    """Sums in the order of the keys. Lanes of warp 0 weigh one of WARP parts each. `values`: the first WARP parts."""
    x = parts.x
    x.section("the sums")
    total, value = x.let("total", "mov.f32", 0.0), x.let("value", "mov.f32", 0.0)
    finished = x.reg("sums_finished", "pred")
    part = x.let("weighed", "mov.b32", parts.lane)
    weighs = x.let("weighs", "setp.lt.u32", parts.thread, WARP)
    own = x.indexed("own_weight", parts.weights, parts.thread, STATISTICS_BYTES)
    with x.loop("sums") as loop:
        reference, row_sum = x.reg("part_reference", "f32"), x.reg("part_sum", "f32")
        place = parts.statistics.place(x, parts.clipped(part, 0))
        x.emit("ld.global.v2.f32", (reference, row_sum), place)
        below = x.let("below", "add.rn.f32", reference, shift)
        weight = x.let("weight", "ex2.approx.ftz.f32", below)
        x.emit("st.shared.v2.f32", at(own), (weight, row_sum), guard=weighs)
        x.sync_cta(note="the weights are there")
        for start in range(0, WARP, AT_ONCE):
            with parts.some("add", first, start):
                for k in range(start, start + AT_ONCE, 2):
                    pair = x.regs("weight_and_sum", "f32", 4)
                    x.emit("ld.shared.v4.f32", pair, at(parts.weights, k * STATISTICS_BYTES))
                    for half in range(2):
                        number = x.let("number", "add.u32", first, k + half)
                        there = x.let("there", "setp.lt.u32", number, parts.splits)
                        weight, row_sum = pair[2 * half : 2 * half + 2]
                        x.emit("fma.rn.f32", total, row_sum, weight, total, guard=there)
                        x.emit("fma.rn.f32", value, values[k + half], weight, value, guard=there)
        for register in (part, first):
            x.emit("add.u32", register, register, WARP)
        x.emit("setp.ge.u32", finished, first, parts.splits)
        x.emit("bra", loop.done, guard=finished)
        for register in (own, parts.weights):
            x.emit("xor.b32", register, register, WEIGHTS_BYTES)
        parts.ask(values, first)
    return _Sums(total, value, shift)


def _store(x: Builder, params: CombineParams, element: _Element, sums: _Sums) -> None:
    """Stores O / sum as bf16; one thread of the row also stores its lse."""
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
