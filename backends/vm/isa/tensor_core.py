"""tcgen05 operations of the tensor core: mma, cp, commit (PTX ISA 9.7.16.9, 9.7.16.10, 9.7.16.12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import AddressOf, Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault, report
from backends.vm.isa.mbarrier_ops import places
from backends.vm.isa.ring_ops import check_multiplied
from backends.vm.isa.tensor_operands import (
    COLLECTOR,
    COLLECTOR_B,
    GROUPS,
    Accumulator,
    CtaGroup,
    Float32,
    Issue,
    MatrixOperand,
    Metadata,
    Raw,
    elected_lane,
    group_of,
    hidden_units,
    issuing_ctas,
    places_of,
    same_group,
    smem_operand,
    sparsity_metadata,
    tensor_issue,
    tmem_operand_a,
)
from backends.vm.machine.engine import submit
from backends.vm.machine.warp import Warp
from backends.vm.memory.clocks import ANYONE
from backends.vm.memory.definedness import Lost, Origin
from backends.vm.memory.mbarrier import MBarrier
from backends.vm.memory.tmem import LANES, Index, Words
from backends.vm.numerics import accumulate
from backends.vm.numerics.f32 import canonical
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Address, Operand, Vector
from backends.vm.tensor.instruction_descriptor import (
    IGNORED_BITS,
    InstructionDescriptor,
    ZeroColumns,
    decode_instruction_descriptor,
    decode_zero_columns,
)
from backends.vm.tensor.matrix_descriptor import gather_units
from backends.vm.tensor.operand_types import packed_to_float32, scale_factors, to_float32
from backends.vm.tensor.sparsity import Granularity, dense
from backends.vm.tensor.tmem_layout import (
    Bytes,
    copy_map,
    decompressed,
    load_scale_factors,
    load_split_scale_factors,
    scale_factors_hidden,
    split_address,
    split_scale_address,
    store_copied_rows,
)


@dataclass(frozen=True, slots=True)
class _Operands:
    """Register rows of the operands of every tcgen05.mma: D, A, B, the instruction descriptor and enable-input-d.

    `a` is set if A is in tensor memory, else `a_descriptor`. `kind` and `size` are arguments of
    decode_instruction_descriptor. `metadata` belongs to a sparse A. `weight_stationary`: .ws.
    """

    group: CtaGroup
    kind: str
    size: str
    d: AddressOf
    a: AddressOf | None
    a_descriptor: int
    b_descriptor: int
    idesc: int
    enable: tuple[int, bool]
    metadata: AddressOf | None
    weight_stationary: bool
    line: int

    @classmethod
    def of(cls, b: Binder, first: Sequence[Operand], enable: Operand) -> _Operands:
        """Reads the modifiers and the operands of the instruction that `b` binds.

        `first`: D, A, B, the metadata of a sparse A, and the instruction descriptor.
        """
        d, a, right, *metadata, idesc = first
        from_tmem = isinstance(a, Address)
        return cls(
            group=group_of(b.words.get("group", "cta_group::1")),
            kind=b.words["mma_kind"].removeprefix("kind::"),
            size=b.words.get("size", ""),
            d=b.address(d),
            a=b.address(a) if from_tmem else None,
            a_descriptor=0 if from_tmem else b.source(a, "u64"),
            b_descriptor=b.source(right, "u64"),
            idesc=b.source(idesc, "u32"),
            enable=b.predicate(enable),
            metadata=b.address(metadata[0]) if metadata else None,
            weight_stationary="ws" in b.instruction.parts,
            line=b.instruction.line,
        )

    def issued(self, warp: Warp, zero_columns: int | None = None) -> _Issued:
        """Reads the registers of the elected lane and checks the operands that they describe.

        `zero_columns`: the row of the zero-column mask, if there is one.
        """
        lane = elected_lane(warp, "tcgen05.mma")
        ctas = issuing_ctas(warp, self.group, "tcgen05.mma")
        raw = int(warp.u32[self.idesc][lane])
        sparse = self.metadata is not None
        if raw & IGNORED_BITS.get(self.kind, 0):
            report(Fault("descriptor-bit-ignored", f"the instruction descriptor {raw:#010x} of kind::{self.kind} sets "
                         "bit 12, which is reserved"))  # fmt: skip
        d = decode_instruction_descriptor(raw, self.kind, self.group, self.weight_stationary, sparse, self.size)
        to = int(self.d(warp)[lane]) & 0xFFFFFFFF
        ended = int(warp.clock.seen[warp.cta.tensor_agent])
        issue = Issue(ctas, ended, *tensor_issue(warp, to, d.m, d.n), self.line, d)
        if self.a is not None:
            left = tmem_operand_a(issue, int(self.a(warp)[lane]) & 0xFFFFFFFF)
        else:
            left = (smem_operand(issue, int(warp.u64[self.a_descriptor][lane]), d.m // self.group, "A"),)
        metadata = sparsity_metadata(issue, int(self.metadata(warp)[lane]) & 0xFFFFFFFF) if self.metadata else ()
        columns = d.n // self.group
        zeros = None
        if zero_columns is not None:
            zeros = decode_zero_columns(int(warp.u64[zero_columns][lane]), d.m, d.n, d.max_shift)
            columns += zeros.shift
        right = smem_operand(issue, int(warp.u64[self.b_descriptor][lane]), columns, "B")
        row, negated = self.enable
        return _Issued(lane, to, issue, left, right, bool(warp.pred[row][lane]) != negated, metadata, zeros)


@dataclass(frozen=True, slots=True)
class _Issued:
    """One mma as issued by its elected `lane`: D at `to`, A, B, and whether the product is added to D.

    `left` and `metadata` (of a sparse A) each have one entry for all columns of D, or one per equal share of them.
    `zeros`: the columns of B to treat as zeros.
    """

    lane: int
    to: int
    issue: Issue
    left: tuple[MatrixOperand, ...]
    right: MatrixOperand
    enabled: bool
    metadata: tuple[Metadata, ...]
    zeros: ZeroColumns | None

    def lost(self) -> tuple[list[Lost | None], Lost | None]:
        """The undefined rows of A for each share of D's columns, and the undefined rows of B."""
        count = max(len(self.left), len(self.metadata))
        left = [self.left[i % len(self.left)].lost for i in range(count)]
        for i in range(count if self.metadata else 0):
            left[i] = _either(left[i], self.metadata[i % len(self.metadata)].lost)
        right = self.right.lost
        if right is not None and self.zeros is not None:
            right = Lost(right.rows[self.zeros.shift :] & ~self.zeros.zero, right.origin)
        return left, right

    def rows_of_b(self, b: Float32) -> Float32:
        """B [n, k] with the zeros of the zero-column mask."""
        if self.zeros is None:
            return b
        return np.where(self.zeros.zero[:, None], np.float32(0), b[self.zeros.shift :])

    def with_zeros(self, a: Float32, share: int) -> Float32:
        """A [m, k] for a share of the columns, expanded from its stored elements if it is sparse."""
        if not self.metadata:
            return a
        codes = self.metadata[share % len(self.metadata)].fetch()
        return dense(a, codes, Granularity.of(self.issue.descriptor.stored_bits), ordered=False)


def _either(one: Lost | None, other: Lost | None) -> Lost | None:
    if one is None or other is None:
        return one or other
    return Lost(one.rows | other.rows, one.origin)


_KINDS = "kind::f16 kind::tf32 kind::f8f6f4 kind::i8"


@opcode("tcgen05.mma{.sp}.<group>.<mma_kind>{.<collector>}", section="9.7.16.10.9.1", counter="mma", group=GROUPS,
        mma_kind=_KINDS, collector=COLLECTOR)  # fmt: skip
def mma(b: Binder) -> Step:
    """D [m, n] = A [m, k] B [n, k]^T (+ D 2^-scale). A is in shared or tensor memory, B in shared memory.

    With cta_group::2 each CTA holds half of the rows of A, B and D. With .sp half of each row of A is zero and is not
    stored (9.7.16.10.9.2).
    """
    sparse = bool(b.words["sp"])
    operands = b.expect(*(count + sparse for count in (5, 6, 7)))
    first, rest = operands[: 4 + sparse], list(operands[4 + sparse :])
    disabled_lanes = _disabled_lanes(b, rest.pop(0)) if rest and isinstance(rest[0], Vector) else None
    if not rest:
        raise b.error("enable-input-d is missing")
    operands = _Operands.of(b, first, rest[0])
    scale = b.immediate(rest[1]) if len(rest) > 1 else 0
    if len(rest) > 1 and (operands.kind not in ("f16", "tf32") or not 0 <= scale <= 15):
        raise b.error("scale-input-d is an integer in 0..15, and only kind::f16 and kind::tf32 have it")
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        one = operands.issued(warp)
        disabled = disabled_lanes(warp, one.lane) if disabled_lanes else None
        _submit(warp, one, Accumulator(one.issue, one.to, disabled, added_to=one.enabled), scale, line, text)

    return step


@opcode("tcgen05.mma.ws{.sp}.cta_group::1.<mma_kind>{.<collector>}", section="9.7.16.10.9.3", counter="mma",
        mma_kind=_KINDS, collector=COLLECTOR_B)  # fmt: skip
def mma_weight_stationary(b: Binder) -> Step:
    """As mma, but B may stay in a collector buffer. B must not change meanwhile, so rereading it gives the same.

    The last operand, if any, selects columns of B to treat as zeros.
    """
    sparse = bool(b.words["sp"])
    operands = b.expect(*(count + sparse for count in (5, 6)))
    first, (enable, *mask) = operands[: 4 + sparse], operands[4 + sparse :]
    zero_columns = b.source(mask[0], "u64") if mask else None
    named = _Operands.of(b, first, enable)
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        one = named.issued(warp, zero_columns)
        _submit(warp, one, Accumulator(one.issue, one.to, None, added_to=one.enabled), 0, line, text)

    return step


def _submit(warp: Warp, one: _Issued, target: Accumulator, scale: int, line: int, text: str) -> None:
    target.undefine(*one.lost())
    count_mma(warp, one.issue.descriptor)
    perform = _performer(one, target, warp.cta.machine.accumulate, scale)
    submit(warp, "an mma", line, text, perform, queue=warp.cta.tmem)


def count_mma(warp: Warp, descriptor: InstructionDescriptor) -> None:
    """Count one instruction and its multiply and add operations."""
    counters = warp.cta.machine.counters
    counters["mma_instructions"] += 1
    counters["mma_flops"] += 2 * descriptor.m * descriptor.n * descriptor.k


def _performer(one: _Issued, target: Accumulator, policy: accumulate.Policy, scale: int) -> Callable[[], None]:
    d, left = one.issue.descriptor, one.left
    product = _integer_product if d.kind == "i8" else _product
    shares = max(len(left), len(one.metadata))
    check_multiplied(policy, d.a_type, plain=not (d.negate_a or d.negate_b or scale))

    def perform() -> None:
        old = target.load() if one.enabled else None
        b = one.rows_of_b(to_float32(one.right.fetch(), d.b_type))
        b = -b if d.negate_b else b
        parts: list[Words] = []
        for i in range(shares):
            a = one.with_zeros(to_float32(left[i % len(left)].fetch(), d.a_type), i)
            columns = slice(i * d.n // shares, (i + 1) * d.n // shares)
            before = None if old is None else np.ascontiguousarray(old[:, columns])
            parts.append(product(-a if d.negate_a else a, b[columns], before, d, policy, scale))
        target.store(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))

    return perform


def _product(
    a: Float32, b: Float32, old: Words | None, d: InstructionDescriptor, policy: accumulate.Policy, scale: int
) -> Words:  # fmt: skip
    """Words of A B^T + D 2^-scale. f16 results are in the low halves."""
    half = d.d_type == "f16"
    c: Float32 | None = None
    if old is not None:
        c = (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32) if half else old.view("f4")
        c = c * np.float32(2.0**-scale) if scale else c
    result = accumulate.mma(a, b, c, k_per_instruction=d.k, kind=d.a_type, policy=policy)
    if not half:
        return result.view(np.uint32)
    codes = np.where(np.isnan(result), np.uint16(0x7FFF), result.astype(np.float16).view(np.uint16))
    return codes.astype(np.uint32)


def _integer_product(
    a: Float32, b: Float32, old: Words | None, d: InstructionDescriptor, policy: accumulate.Policy, scale: int
) -> Words:  # fmt: skip
    return accumulate.integer_mma(a, b, None if old is None else old.view(np.int32), saturate=d.saturate)


def _disabled_lanes(b: Binder, mask: Operand) -> Callable[[Warp, int], npt.NDArray[np.bool_]]:
    group = group_of(b.words["group"])
    rows = [b.source(item, "u32") for item in b.vector(mask, 4 * group)]

    def lanes(warp: Warp, lane: int) -> npt.NDArray[np.bool_]:
        words = np.array([warp.u32[row][lane] for row in rows], "<u4")
        return np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_).reshape(group, LANES)

    return lanes


@opcode("tcgen05.commit.<group>.mbarrier::arrive::one{.<space>}{.multicast::cluster}.b64", section="9.7.16.12.1",
        counter="mma", group=GROUPS, space="shared::cluster")  # fmt: skip
def commit(b: Binder) -> Step:
    """Arrive once on an mbarrier when all earlier tensor-core work that this CTA issued has ended."""
    address, *rest = b.expect(2 if b.words["multicast::cluster"] else 1)
    find = places(b, address, remote=True)
    mask_row = b.source(rest[0], "u16") if rest else None
    group = group_of(b.words["group"])
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        lane = elected_lane(warp, "tcgen05.commit")
        same_group(warp, group, "tcgen05.commit")
        cluster = warp.cta.cluster
        targets: list[MBarrier] = []
        for (cta, offset), _ in find(warp):
            ranks = [cta.place.cta_rank]
            if mask_row is not None:
                mask = int(warp.u16[mask_row][lane])
                ranks = [rank for rank in range(cluster.size) if mask >> rank & 1]
            for told in (cluster.ctas[rank] for rank in ranks):
                told.check_present("a tcgen05.commit to an mbarrier")
                if told is not warp.cta:
                    told.visit(warp.cta.tensor_agent, warp.cta.tensor_serial + 1, line)
                targets.append(told.mbarrier(offset, warp.clock))
        carried, _, _ = tensor_issue(warp)
        done = warp.cta.tensor_agents
        carried.seen[done] = carried.fenced[done] = warp.cta.tensor_serial
        warp.next_epoch()

        def perform() -> None:
            for barrier in targets:
                barrier.arrive(1, f"the commit of PTX line {line}", (carried, ANYONE, False))

        submit(warp, "a commit", line, text, perform, queue=warp.cta.tmem, signals=tuple(targets))

    return step


# Data bytes of a 16-byte unit. The padding after them may be unwritten.
_DATA_BYTES = {"b4x16_p64": 8, "b6x16_p32": 12}
_CP_SHAPES = "128x256b 128x128b 64x128b 32x128b"


@opcode("tcgen05.cp.<group>.<shape>{.<multicast>}{.<dst>.<src>}", section="9.7.16.9.2", counter="mma",
        group=GROUPS, shape=_CP_SHAPES, multicast="warpx2::02_13 warpx2::01_23 warpx4", dst="b8x16",
        src="b4x16_p64 b6x16_p32")  # fmt: skip
@opcode("tcgen05.cp.<group>.<shape>{.<multicast>}", section="9.7.16.9.2", counter="mma", group=GROUPS,
        shape=_CP_SHAPES, multicast="warpx2::02_13 warpx2::01_23 warpx4")  # fmt: skip
def copy(b: Binder) -> Step:
    """Copy rows of shared memory, located by a matrix descriptor, to tensor memory. Some forms replicate them.

    With cta_group::2 each CTA copies from its own shared memory (facts.md 1.2). The ISA orders a copy before a later
    mma but not an mma before a later copy (9.7.16.6.2). The block-scaled GEMMs of quack-kernels rely on the latter
    order too. The machine keeps it, and `tmem_unordered_copies` counts copies that overwrite what a pending mma reads.
    """
    destination, source = b.expect(2)
    try:
        layout = copy_map(b.words["shape"], b.words["multicast"])
    except Fault as fault:
        raise b.error(fault.detail) from None
    address, row = b.address(destination), b.source(source, "u64")
    group = group_of(b.words["group"])
    source_format = b.words.get("src", "")
    data_bytes = _DATA_BYTES.get(source_format, 16)
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        lane = elected_lane(warp, "tcgen05.cp")
        ctas = issuing_ctas(warp, group, "tcgen05.cp")
        to_lane, to_column = split_address(int(address(warp)[lane]) & 0xFFFFFFFF)
        units, granules = places_of(int(warp.u64[row][lane]), layout.rows, 16 * layout.units, 8, "k", data_bytes)
        clock, mark, _ = tensor_issue(warp)
        columns = slice(to_column, to_column + 4 * layout.units)
        apart = np.arange(columns.start, columns.stop)[None, :]
        unordered = False
        for cta in ctas:
            whole = cta.smem.async_read(granules, clock, mark, "tcgen05.cp")
            for lanes in layout.lanes:
                first, last = int(lanes[0]) + to_lane, int(lanes[-1]) + to_lane
                # Index a contiguous block by slices: that gives a view, not a copy.
                together = last - first == len(lanes) - 1
                cells = (slice(first, last + 1), columns) if together else ((lanes + to_lane)[:, None], apart)
                cta.tmem.begin_write(cells, clock, mark, line, "tcgen05.cp writes")
                unordered |= cta.tmem.read_by_tensor_core(cells, warp.clock, warp.cta.tensor_agent)
            if not whole:
                bits, hidden = cta.tmem.undefined_bits(), hidden_units(cta.smem, units)
                hidden = decompressed(hidden, source_format) if source_format else hidden
                store_copied_rows(bits, to_lane, to_column, layout, hidden)
                cta.tmem.undefine(bits, cta.smem.first_origin(granules, line))
        if unordered:
            warp.cta.machine.counters["tmem_unordered_copies"] += 1
            report(Fault("tmem-copy-unordered", "tcgen05.cp overwrites what an earlier mma reads, and nothing has "
                         "shown the end of that"))  # fmt: skip

        def perform() -> None:
            for cta in ctas:
                data = gather_units(cta.smem.data, units)
                if source_format:
                    data = decompressed(data, source_format)
                store_copied_rows(cta.tmem.data, to_lane, to_column, layout, data)

        submit(warp, "a copy to tensor memory", line, text, perform, queue=warp.cta.tmem)

    return step


# Block-scaled tcgen05.mma: D += sum over K blocks of SFA SFB (A B^T), scale factors in tensor memory.
# PTX ISA 9.7.16.10.7; layouts in facts.md 2.4. The hardware's precision of scaling and order of addition are not
# documented. Here policy `fast` scales the operands in float32 where that is exact, and adds in float32. Every other
# policy computes in float64 and rounds once.


@dataclass(frozen=True, slots=True)
class ScaleFactors:
    """`load` returns raw scale factors uint8 [rows, blocks], one array per CTA. `lost`: as in MatrixOperand."""

    load: Callable[[], list[Bytes]]
    lost: Lost | None


_QUARTER = 32
_SAFE = np.float32(2.0**50)
"""With scale factors between 1 / this and this, a product of two of them and two elements is exact in float32."""


def _elements(raw: Raw, type_name: str, k: int, *, negated: bool) -> Float32:
    """float32 [rows, k]. A row of packed 4-bit elements has k / 2 bytes."""
    values = to_float32(raw, type_name) if raw.shape[1] == k else packed_to_float32(raw)
    return -values if negated else values


@opcode("tcgen05.mma{.sp}.<group>.<mma_kind>.block_scale{.<size>}{.<collector>}", section="9.7.16.10.9.1",
        counter="mma", group=GROUPS, mma_kind="kind::mxf8f6f4 kind::mxf4 kind::mxf4nvf4", collector=COLLECTOR,
        size="scale_vec::1X scale_vec::2X scale_vec::4X block16 block32")  # fmt: skip
def mma_scaled(b: Binder) -> Step:
    """`[d], a-desc | [a], b-desc, idesc, [sfa], [sfb], enable-input-d`: scales A and B block by block along K."""
    *first, sfa, sfb, enable = b.expect(8 if b.words["sp"] else 7)
    operands = _Operands.of(b, first, enable)
    rsa, rsb = b.address(sfa), b.address(sfb)
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        one = operands.issued(warp)
        scales_a = _scales_of_a(one.issue, int(rsa(warp)[one.lane]) & 0xFFFFFFFF)
        scales_b = _scales_of_b(one.issue, int(rsb(warp)[one.lane]) & 0xFFFFFFFF)
        target = Accumulator(one.issue, one.to, None, added_to=one.enabled)
        target.undefine(*one.lost(), scales=(scales_a.lost, scales_b.lost))
        count_mma(warp, one.issue.descriptor)
        perform = _scaled_performer(one, (scales_a, scales_b), target, warp.cta.machine.accumulate)
        submit(warp, "an mma", line, text, perform, queue=warp.cta.tmem)

    return step


def _scales_of_a(issue: Issue, taddr: int) -> ScaleFactors:
    d, rows = issue.descriptor, issue.descriptor.m // issue.group
    column, origin = _check_scales(issue, taddr, rows, "A")
    lost = None
    if origin is not None:
        hidden = [
            scale_factors_hidden(cta.tmem.undefined_bits(), column, rows, d.sf_blocks, d.sfa_id, split=False)
            for cta in issue.ctas
        ]
        lost = Lost((np.concatenate(hidden) != 0).any(axis=1), origin)
    return ScaleFactors(
        lambda: [load_scale_factors(cta.tmem.data, column, rows, d.sf_blocks, d.sfa_id) for cta in issue.ctas], lost
    )


def _scales_of_b(issue: Issue, taddr: int) -> ScaleFactors:
    d = issue.descriptor
    split = issue.group == 2 and d.m == 128
    column, origin = _check_scales(issue, taddr, d.n // 2 if split else d.n, "B")
    lost = None
    if origin is not None:
        hidden = [
            scale_factors_hidden(cta.tmem.undefined_bits(), column, d.n, d.sf_blocks, d.sfb_id, split=split)
            for cta in issue.ctas
        ]
        lost = Lost((np.bitwise_or.reduce(hidden) != 0).any(axis=1), origin)
    load = load_split_scale_factors if split else load_scale_factors
    return ScaleFactors(lambda: [load(cta.tmem.data, column, d.n, d.sf_blocks, d.sfb_id) for cta in issue.ctas], lost)


def _check_scales(issue: Issue, taddr: int, rows: int, which: str) -> tuple[int, Origin | None]:
    """Check the cells of `rows` scale factors in all four quarters of each CTA.

    Returns their first column, and the origin of an undefined one if there is any.
    """
    lane, column = split_scale_address(taddr)
    if lane:
        raise Fault("tmem-lane", f"the scale factors of {which} are given at lane {lane}; they begin at lane 0",
                    address=taddr)  # fmt: skip
    whole, rest = divmod(rows, _QUARTER)
    cells: list[Index] = [(slice(0, LANES), slice(column, column + whole))] if whole else []
    if rest:
        lanes = (_QUARTER * np.arange(4)[:, None] + np.arange(rest)).reshape(-1, 1)
        cells.append((lanes, np.array([[column + whole]])))
    origin = None
    for cta in issue.ctas:
        for index in cells:
            if not issue.read(cta, index, f"scale factors of {which}", "read"):
                origin = cta.tmem.origin_of(index, issue.line)
    return column, origin


def _scaled_performer(
    one: _Issued, scales: tuple[ScaleFactors, ScaleFactors], target: Accumulator, policy: accumulate.Policy
) -> Callable[[], None]:
    """Makes the function that performs a block-scaled mma. `scales`: the scale factors of A and of B."""
    d, (scales_a, scales_b) = one.issue.descriptor, scales
    check_multiplied(policy, d.a_type, plain=True)
    wide = d.sf_type == "ue8m0"

    def perform() -> None:
        b = _elements(one.right.fetch(), d.b_type, d.k, negated=d.negate_b)
        stored = [_elements(part.fetch(), d.a_type, d.stored_k, negated=d.negate_a) for part in one.left]
        a = [one.with_zeros(part, i) for i, part in enumerate(stored)]
        old = target.load().view(np.float32) if one.enabled else None
        factors = [
            (scale_factors(sfa, d.sf_type), scale_factors(sfb, d.sf_type))
            for sfa, sfb in zip(scales_a.load(), scales_b.load(), strict=True)
        ]
        rows = d.m // len(factors)
        out = np.empty((d.m, d.n), np.float32)
        for i, (sfa, sfb) in enumerate(factors):
            mine = slice(i * rows, (i + 1) * rows)
            for j, operand in enumerate(a):
                columns = slice(j * d.n // len(a), (j + 1) * d.n // len(a))
                c = None if old is None else old[mine, columns]
                in_f32 = policy == "fast" and not (wide and _extreme(sfa, sfb))
                out[mine, columns] = _scaled(operand[mine], b[columns], sfa, sfb[columns], c, in_f32=in_f32)
        target.store(canonical(out).view(np.uint32))

    return perform


def _scaled(
    a: Float32, b: Float32, sfa: Float32, sfb: Float32, c: Float32 | None, *, in_f32: bool
) -> npt.NDArray[np.floating]:
    """(A SFA) (B SFB)^T + C for scale factors [rows, blocks]."""
    if not in_f32:
        a, b, sfa, sfb = (np.asarray(x, np.float64) for x in (a, b, sfa, sfb))  # type: ignore[assignment]
    product = _blocks_scaled(a, sfa) @ _blocks_scaled(b, sfb).T
    return product if c is None else product + c


def _extreme(*factors: Float32) -> bool:
    return any(count_nonzero((scales > _SAFE) | (scales < 1 / _SAFE)) for scales in factors)


def _blocks_scaled(x: Float32, scales: Float32) -> Float32:
    rows, blocks = scales.shape
    return (x.reshape(rows, blocks, -1) * scales[:, :, None]).reshape(rows, -1)
