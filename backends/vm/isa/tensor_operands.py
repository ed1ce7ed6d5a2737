"""Shared by tcgen05.mma, cp and commit: who issues, for which CTAs, and where operands and D are.

Operands are checked at issue, against what the issuing warp has seen. Data is read and written when the schedule lets
the operation end. The tensor core of a CTA works in order; a pair uses the even CTA's. With cta_group::2 the same
descriptors and tensor-memory addresses apply in both CTAs (facts.md 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault
from backends.vm.isa.bulk_copy import granules_of
from backends.vm.machine.access import active
from backends.vm.machine.cta import Cta
from backends.vm.machine.undefined import spread
from backends.vm.machine.warp import Warp
from backends.vm.memory.clocks import Clock, stamp
from backends.vm.memory.definedness import Lost, Origin
from backends.vm.memory.shared import SharedMemory
from backends.vm.memory.tmem import LANES, Index, Words
from backends.vm.numpy_calls import count_nonzero
from backends.vm.tensor.instruction_descriptor import InstructionDescriptor, check_operand_swizzle
from backends.vm.tensor.matrix_descriptor import (
    Major,
    decode_matrix_descriptor,
    gather_units,
    operand_elements,
    unit_addresses,
)
from backends.vm.tensor.sparsity import (
    codes_in_tensor_memory,
    hidden_in_tensor_memory,
    known_codes,
    metadata_columns,
)
from backends.vm.tensor.swizzle import IntArray
from backends.vm.tensor.tmem_layout import (
    CtaGroup,
    Patch,
    accumulator_patches,
    decompressed,
    load_matrix,
    operand_a_patches,
    split_address,
    store_matrix,
)

Float32 = npt.NDArray[np.float32]
_Element = TypeVar("_Element", bound=np.generic)
Raw = npt.NDArray[np.unsignedinteger]
Fetch = Callable[[], Raw]
GROUPS = "cta_group::1 cta_group::2"
COLLECTOR = "collector::a::fill collector::a::use collector::a::lastuse collector::a::discard"
COLLECTOR_B = " ".join(f"collector::b{i}::{use}" for i in range(4) for use in ("fill", "use", "lastuse", "discard"))


def tensor_issue(warp: Warp, *accumulator: int) -> tuple[Clock, int, int]:
    """The tensor core's clock for this issue, and the stamps of its reads and of its writes.

    The clock has seen everything that the issuing warp has, but not what other warps had seen at their issues.
    `accumulator`: (address, m, n) of an mma. The ISA orders an mma after copies and after MMAs with the same
    accumulator (9.7.16.6.2), so the clock has seen those writes of the tensor core and no others. It has seen all
    earlier reads: FlashAttention-4 overwrites S where the previous MMA read P, and block-scaled GEMMs copy new scale
    factors after the MMAs that read the old ones (counted when the copy is issued).
    """
    cta = warp.cta
    cta.tensor_serial += 1
    clock = warp.clock.copy()
    writer = cta.accumulator_agent(*accumulator) if accumulator else cta.tensor_agent
    for agent in (cta.tensor_agent, writer):
        clock.seen[agent] = clock.fenced[agent] = cta.tensor_serial
    return clock, stamp(cta.tensor_agent, cta.tensor_serial), stamp(writer, cta.tensor_serial)


def group_of(words: str) -> CtaGroup:
    """1 or 2, from `cta_group::1` or `cta_group::2`."""
    return 2 if words.endswith("2") else 1


def elected_lane(warp: Warp, what: str) -> int:
    """The single active lane. Fault if there are more."""
    lanes = active(warp)
    if lanes.size != 1:
        raise Fault("issued-by-many", f"{what} is issued by {lanes.size} lanes at once; one elected lane issues it")
    return int(lanes[0])


def pair(warp: Warp, what: str) -> tuple[Cta, Cta]:
    """The even and odd CTA of the pair of `warp`. Their ranks in the cluster differ only in the last bit."""
    cluster, rank = warp.cta.cluster, warp.cta.place.cta_rank
    if rank | 1 >= cluster.size:
        raise Fault("cta-pair", f"{what} with .cta_group::2 by CTA rank {rank} of a cluster of {cluster.size}, where "
                    "it has no peer")  # fmt: skip
    return cluster.ctas[rank & ~1], cluster.ctas[rank | 1]


def same_group(warp: Warp, group: CtaGroup, what: str) -> None:
    """Fault if an earlier tcgen05 instruction of this CTA had the other .cta_group (PTX ISA 9.7.16.7.1)."""
    tmem = warp.cta.tmem
    if tmem.cta_group not in (0, group):
        raise Fault("cta-group", f"{what} has .cta_group::{group} where earlier tcgen05 instructions of this kernel "
                    f"have .cta_group::{tmem.cta_group}; all must have the same")  # fmt: skip
    tmem.cta_group = group


def issuing_ctas(warp: Warp, group: CtaGroup, what: str) -> tuple[Cta, ...]:
    """The CTAs that an mma or cp works for, the even one first.

    With cta_group::2 the even CTA must issue. The ISA says "a single thread from the CTA pair" but not what happens
    when the odd CTA issues. Every kernel known to us issues from the even one.
    """
    same_group(warp, group, what)
    if group == 1:
        return (warp.cta,)
    both = pair(warp, what)
    if both[0] is not warp.cta:
        raise Fault("cta-pair", f"{what} with .cta_group::2 issued by CTA rank {warp.cta.place.cta_rank}; the even CTA "
                    "of the pair issues it")  # fmt: skip
    both[1].check_running(warp, f"{what} with .cta_group::2 on the memory")
    both[1].visit(warp.cta.tensor_agent, warp.cta.tensor_serial + 1, warp.line)
    return both


@dataclass(frozen=True, slots=True)
class Issue:
    """One mma as issued by one lane, for one CTA or both of a pair. `reads` and `writes` are stamps.

    `ended`: the last serial number of tensor-core work that the issuing warp knows to have ended. `operands`: what it
    reads in the tensor memory of each CTA, apart from D.
    """

    ctas: tuple[Cta, ...]
    ended: int
    clock: Clock
    reads: int
    writes: int
    line: int
    descriptor: InstructionDescriptor
    operands: list[tuple[Cta, str, Index]] = field(default_factory=list["tuple[Cta, str, Index]"])

    def read(self, cta: Cta, cells: Index, what: str, verb: str = "reads") -> bool:
        """Check that `cells` may be read as the operand `what`. Returns whether all of them are defined."""
        self.operands.append((cta, what, cells))
        return cta.tmem.read(cells, self.clock, self.reads, f"{what} of tcgen05.mma {verb}")

    @property
    def group(self) -> CtaGroup:
        """1 or 2."""
        return 2 if len(self.ctas) == 2 else 1


_CONTAINERS = {"e2m1": ("b4x16_p64", 8), "e2m3": ("b6x16_p32", 12), "e3m2": ("b6x16_p32", 12)}
"""Types below 8 bits: the padded container of 16 elements, and its number of data bytes."""


@dataclass(frozen=True, slots=True)
class MatrixOperand:
    """`fetch` reads the raw elements [rows, k] when the operation ends. `lost`: rows that were undefined at issue, None
    if there are none."""

    fetch: Fetch
    lost: Lost | None = None


def hidden_units(smem: SharedMemory, units: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """0xFF for each undefined byte of the 16-byte units at `units`, else 0: uint8 [*units.shape, 16]."""
    return gather_units(smem.defined.view(np.uint8), units) - np.uint8(1)


@lru_cache(maxsize=256)
def places_of(raw: int, rows: int, k: int, bits: int, major: Major, unit_bytes: int) -> tuple[IntArray, IntArray]:
    """The addresses of the units that a matrix descriptor locates, and the granules of their first `unit_bytes`.

    Cached, because loops reuse few descriptors.
    """
    units = unit_addresses(decode_matrix_descriptor(raw, "sm_100a"), rows, k, bits, major, "sm_100a")
    granules = granules_of(units.ravel(), unit_bytes)
    units.setflags(write=False)
    granules.setflags(write=False)
    return units, granules


def smem_operand(issue: Issue, raw: int, rows: int, which: str) -> MatrixOperand:
    """Check an operand in shared memory with `rows` rows in each CTA. The result has raw elements [all rows, k].

    4-bit elements are fetched in pairs, uint8 [all rows, k / 2]. The kinds f8f6f4 and mxf8f6f4 keep 16 elements of 4 or
    6 bits in 16 bytes (facts.md 1.2). The first 8 or 12 bytes are data and are unpacked as in tcgen05.cp. The others
    may be anything.
    """
    d = issue.descriptor
    container = _CONTAINERS.get(d.a_type if which == "A" else d.b_type) if d.stored_bits == 8 else None
    descriptor = decode_matrix_descriptor(raw, "sm_100a")
    check_operand_swizzle(d, "a" if which == "A" else "b", descriptor.swizzle)
    major: Major = "mn" if (d.transpose_a if which == "A" else d.transpose_b) else "k"
    k = d.stored_k if which == "A" else d.k
    if major == "k" and 0 < descriptor.swizzle.span < k * d.stored_bits // 8:
        raise Fault("matrix-descriptor", f"operand {which} has rows of {k * d.stored_bits // 8} bytes, more than its "
                    f"swizzle {descriptor.swizzle.value} spans (PTX ISA 9.7.16.10.6)")  # fmt: skip
    units, granules = places_of(raw, rows, k, d.stored_bits, major, container[1] if container else 16)
    what = f"operand {which} of tcgen05.mma"
    whole = [cta.smem.async_read(granules, issue.clock, issue.reads, what) for cta in issue.ctas]

    def elements(found: npt.NDArray[np.uint8]) -> Raw:
        return operand_elements(decompressed(found, container[0]) if container else found, rows, d.stored_bits, major)

    def fetch() -> Raw:
        return _stacked([elements(gather_units(cta.smem.data, units)) for cta in issue.ctas])

    if all(whole):
        return MatrixOperand(fetch)
    lost = [(elements(hidden_units(cta.smem, units)) != 0).any(axis=1) for cta in issue.ctas]
    smem = next(cta.smem for cta, defined in zip(issue.ctas, whole, strict=True) if not defined)
    return MatrixOperand(fetch, Lost(np.concatenate(lost), smem.first_origin(granules, issue.line)))


def _shares(matrix: npt.NDArray[_Element], count: int) -> list[npt.NDArray[_Element]]:
    """The rows of each CTA."""
    return [matrix] if count == 1 else np.split(matrix, count)


def _stacked(parts: list[Raw]) -> Raw:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def tmem_operand_a(issue: Issue, taddr: int) -> tuple[MatrixOperand, ...]:
    """Check operand A in tensor memory. Each result has raw elements [m, k], 4-bit ones in pairs.

    There is one result per replica of A. Each multiplies its share of B's rows, the first one the lowest.
    """
    d = issue.descriptor
    lane, column = split_address(taddr)
    dtype = np.dtype(f"u{max(d.stored_bits // 8, 1)}")
    operands: list[MatrixOperand] = []
    for patches in operand_a_patches(d.m, d.stored_k, d.stored_bits, issue.group, d.weight_stationary, d.sparse):
        origin: Origin | None = None
        for cta in issue.ctas:
            for block in blocks(patches, lane, column):
                if not issue.read(cta, block, "operand A"):
                    origin = cta.tmem.origin_of(block, issue.line)

        def fetch(patches: tuple[Patch, ...] = patches) -> Raw:
            parts = [load_matrix(cta.tmem.data, lane, column, patches) for cta in issue.ctas]
            return _stacked([np.ascontiguousarray(words).view(dtype) for words in parts])

        lost = None
        if origin is not None:
            hidden = [load_matrix(cta.tmem.undefined_bits(), lane, column, patches) for cta in issue.ctas]
            lost = Lost((np.concatenate(hidden) != 0).any(axis=1), origin)
        operands.append(MatrixOperand(fetch, lost))
    return tuple(operands)


@dataclass(frozen=True, slots=True)
class Metadata:
    """Tells which elements of a row of a sparse A are stored. `fetch` reads the codes uint8 [m, chunks] when the
    operation ends. `lost`: rows with undefined codes."""

    fetch: Callable[[], npt.NDArray[np.uint8]]
    lost: Lost | None = None


def sparsity_metadata(issue: Issue, taddr: int) -> tuple[Metadata, ...]:
    """Check the metadata of A in tensor memory: one for all columns of D, or one per share of them as for A."""
    d = issue.descriptor
    lane, column = split_address(taddr)
    rows, bits = d.m // issue.group, d.stored_bits
    if rows < LANES and not d.weight_stationary:
        raise Fault("tmem-shape", f"how the sparsity metadata of {rows} rows a CTA lies is shown in a figure only, and "
                    "this machine does not know it; those of 128 rows are known (PTX ISA 9.7.16.10.8.4)")  # fmt: skip
    if d.sparsity_selector > 1:
        raise Fault("tmem-shape", f"which columns sparsity selector {d.sparsity_selector} takes is shown in a figure "
                    "only, and this machine does not know it; 0 and 1 are known (PTX ISA 9.7.16.10.8.4)")  # fmt: skip
    if lane >= LANES:
        raise Fault("tmem-out-of-bounds", f"the sparsity metadata of tcgen05.mma lies at lane {lane} of tensor memory, "
                    f"which has {LANES}", address=taddr)  # fmt: skip
    column += d.sparsity_selector
    span = slice(column, column + metadata_columns(bits))
    found: list[Metadata] = []
    for first in range(lane, LANES, rows):
        origin: Origin | None = None
        for cta in issue.ctas:
            cells = slice(first, first + rows), span
            if not issue.read(cta, cells, "the sparsity metadata"):
                origin = cta.tmem.origin_of(cells, issue.line)
        lost = None
        if origin is not None:
            hidden = [
                hidden_in_tensor_memory(cta.tmem.undefined_bits(), first, column, rows, bits) for cta in issue.ctas
            ]
            lost = Lost(np.concatenate(hidden), origin)

        def fetch(first: int = first, lost: Lost | None = lost) -> npt.NDArray[np.uint8]:
            codes = np.concatenate(
                [codes_in_tensor_memory(cta.tmem.data, first, column, rows, bits) for cta in issue.ctas]
            )
            return codes if lost is None else known_codes(codes, lost.rows)

        found.append(Metadata(fetch, lost))
    return tuple(found)


def blocks(patches: tuple[Patch, ...], lane: int, column: int) -> list[Index]:
    """The blocks of tensor memory that `patches` cover at an address."""
    return [
        (
            slice(lane + p.lane, lane + p.lane + p.rows),
            slice(column + p.tmem_column, column + p.tmem_column + p.columns),
        )
        for p in patches
    ]


class Accumulator:
    """D [m, n] as 32-bit words in the tensor memory of an issue's CTAs. Construction checks the accesses.

    `disabled` bool [CTAs, 128]: lanes that are not written.
    """

    def __init__(self, issue: Issue, taddr: int, disabled: npt.NDArray[np.bool_] | None, *, added_to: bool) -> None:
        d = issue.descriptor
        self._ctas, self._shape = issue.ctas, (d.m, d.n)
        self._lane, self._column = split_address(taddr)
        rows = d.m // issue.group
        halves = rows == 64 and not d.weight_stationary and (issue.group == 1 or d.sparse)
        if self._lane not in ((0, 16) if halves else (0,)):
            raise Fault("tmem-lane", f"the accumulator of M = {d.m} lies at lane {self._lane}; it begins at lane "
                        f"{'0 or 16' if halves else '0'}", address=taddr)  # fmt: skip
        self._patches = accumulator_patches(d.m, d.n, issue.group, d.weight_stationary, d.sparse)
        self._hidden: list[Words] | None = None
        self._origin: Origin | None = None
        self._kept = [np.flatnonzero(disabled[i]) if disabled is not None else None for i in range(len(issue.ctas))]
        covered = blocks(self._patches, self._lane, self._column)
        written = [covered if disabled is None else _enabled(covered, disabled[i]) for i in range(len(issue.ctas))]
        for cta, cells in zip(issue.ctas, written, strict=True):
            operands = [(what, read) for owner, what, read in issue.operands if owner is cta]
            for block in cells:
                cta.tmem.check_pipelined(block, issue.reads, issue.writes, issue.ended, operands)
        if added_to:
            for cta, cells in zip(issue.ctas, written, strict=True):
                for block in cells:
                    if not cta.tmem.read(block, issue.clock, issue.reads, "accumulator of tcgen05.mma reads"):
                        self._origin = cta.tmem.origin_of(block, issue.line)
        if self._origin is not None:
            self._hidden = [cta.tmem.undefined_bits() for cta in issue.ctas]
        for cta, cells in zip(issue.ctas, written, strict=True):
            for block in cells:
                cta.tmem.begin_write(block, issue.clock, issue.writes, issue.line, "tcgen05.mma writes")

    def undefine(
        self, left: Sequence[Lost | None], right: Lost | None, *, scales: tuple[Lost | None, Lost | None] = (None, None)
    ) -> None:
        """Mark the elements of D that become undefined.

        These are rows for undefined rows of A or their scales, columns for undefined rows of B or their scales, and
        undefined elements that are added to. Each entry of `left` serves its share of the columns.
        """
        found = [one for one in (*left, right, *scales) if one is not None]
        origin = found[0].origin if found else self._origin
        if origin is None:
            return
        lost = np.zeros(self._shape, np.bool_)
        for i, one in enumerate(left):
            columns = slice(i * lost.shape[1] // len(left), (i + 1) * lost.shape[1] // len(left))
            for rows in (one, scales[0]):
                if rows is not None:
                    lost[:, columns] |= rows.rows[:, None]
        for one in (right, scales[1]):
            if one is not None:
                lost |= one.rows[None, :]
        for i, (cta, part) in enumerate(zip(self._ctas, _shares(lost, len(self._ctas)), strict=True)):
            words = spread(part, 32)
            if self._hidden is not None:
                words = words | load_matrix(self._hidden[i], self._lane, self._column, self._patches)
            bits, kept = cta.tmem.undefined_bits(), self._kept[i]
            before = bits[kept] if kept is not None else None
            store_matrix(bits, self._lane, self._column, self._patches, words)
            if before is not None:
                bits[kept] = before
            cta.tmem.undefine(bits, origin)

    def load(self) -> Words:
        """D as uint32 [m, n]."""
        parts = [load_matrix(cta.tmem.data, self._lane, self._column, self._patches) for cta in self._ctas]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def store(self, words: Words) -> None:
        """Write uint32 [m, n]. Disabled lanes keep their words."""
        for cta, kept, part in zip(self._ctas, self._kept, _shares(words, len(self._ctas)), strict=True):
            before = cta.tmem.data[kept] if kept is not None else None
            store_matrix(cta.tmem.data, self._lane, self._column, self._patches, part)
            if before is not None:
                cta.tmem.data[kept] = before


def _enabled(covered: list[Index], disabled: npt.NDArray[np.bool_]) -> list[Index]:
    """The cells of `covered` blocks that are not in disabled lanes."""
    if not count_nonzero(disabled):
        return covered
    cells: list[Index] = []
    for lanes, columns in covered:
        if isinstance(lanes, slice) and isinstance(columns, slice):
            left = np.arange(lanes.start, lanes.stop)
            left = left[~disabled[np.minimum(left, LANES - 1)]]
            if left.size:
                cells.append((left[:, None], np.arange(columns.start, columns.stop)[None, :]))
    return cells
