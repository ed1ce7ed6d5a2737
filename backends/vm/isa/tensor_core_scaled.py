"""Block-scaled tcgen05.mma: D += sum over K blocks of SFA SFB (A B^T), scale factors in tensor memory.

PTX ISA 9.7.16.10.7; layouts in facts.md 2.4. The precision in which hardware scales and the order in which it adds
are not documented. Here policy `fast` scales the operands in float32, where that is exact, and adds in float32; every
other policy computes in float64 and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.isa.tensor_core import count_mma
from backends.vm.isa.tensor_operands import (
    COLLECTOR,
    GROUPS,
    Accumulator,
    Fetch,
    Float32,
    Issue,
    Raw,
    elected_lane,
    group_of,
    issuing_ctas,
    smem_operand,
    tensor_issue,
    tmem_operand_a,
)
from backends.vm.machine.engine import submit
from backends.vm.machine.warp import Warp
from backends.vm.memory.tmem import LANES, Index
from backends.vm.numerics.f32 import canonical
from backends.vm.numerics.formats import FORMATS, decode
from backends.vm.ptx.ast import Address
from backends.vm.tensor.instruction_descriptor import InstructionDescriptor, decode_instruction_descriptor
from backends.vm.tensor.operand_types import to_float32
from backends.vm.tensor.tmem_layout import Bytes, load_scale_factors, load_split_scale_factors, split_address

ScaleFactors = Callable[[], list[Bytes]]
"""Raw scale factors uint8 [rows, blocks], one array a CTA."""

_QUARTER = 32
_SAFE = np.float32(2.0**50)
"""Scale factors within 1 / this and this cannot make a product of two of them and two elements inexact in float32."""


@cache
def _nibble_pairs() -> Float32:
    """The two e2m1 elements of every byte, the low nibble first: float32 [256, 2]."""
    codes = np.arange(256, dtype=np.uint8)
    return decode(np.stack([codes & 15, codes >> 4], axis=-1).astype(np.uint8), FORMATS["e2m1"]).astype(np.float32)


@cache
def _scale_table(sf_type: str) -> Float32:
    """float32 [256]; NaN for ue8m0 0xFF and ue4m3 0x7F. Of ue4m3 the top bit, which has no meaning, is dropped."""
    codes = np.arange(256, dtype=np.uint8)
    if sf_type == "ue8m0":
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127)).astype(np.float32)
    return decode((codes & 0x7F).astype(np.uint8), FORMATS["e4m3"]).astype(np.float32)


def _elements(raw: Raw, type_name: str, k: int, *, negated: bool) -> Float32:
    """float32 [rows, k]; a row of packed 4-bit elements has k / 2 bytes."""
    packed = raw.shape[1] != k
    values = _nibble_pairs().take(raw, axis=0).reshape(len(raw), k) if packed else to_float32(raw, type_name)
    return -values if negated else values


@opcode("tcgen05.mma.<group>.<mma_kind>.block_scale{.<size>}{.<collector>}", section="9.7.16.10.9.1", counter="mma",
        group=GROUPS, mma_kind="kind::mxf8f6f4 kind::mxf4 kind::mxf4nvf4", collector=COLLECTOR,
        size="scale_vec::1X scale_vec::2X scale_vec::4X block16 block32")  # fmt: skip
def mma_scaled(b: Binder) -> Step:
    """`[d], a-desc | [a], b-desc, idesc, [sfa], [sfb], enable-input-d`: A and B scaled block by block along K."""
    d, a, right, idesc, sfa, sfb, enable = b.expect(7)
    group, kind, size = group_of(b.words["group"]), b.words["mma_kind"].removeprefix("kind::"), b.words["size"]
    rd, rsa, rsb = b.address(d), b.address(sfa), b.address(sfb)
    ra = b.address(a) if isinstance(a, Address) else None
    rda = b.source(a, "u64") if ra is None else 0
    rb, ri = b.source(right, "u64"), b.source(idesc, "u32")
    rp, negated = b.predicate(enable)
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        lane = elected_lane(warp, "tcgen05.mma")
        ctas = issuing_ctas(warp, group, "tcgen05.mma")
        descriptor = decode_instruction_descriptor(int(warp.u32[ri][lane]), kind, group, scale_vectorsize=size)
        to = int(rd(warp)[lane]) & 0xFFFFFFFF
        issue = Issue(ctas, *tensor_issue(warp, to, descriptor.m, descriptor.n), line, descriptor)
        if ra is not None:
            left = tmem_operand_a(issue, int(ra(warp)[lane]) & 0xFFFFFFFF)
        else:
            left = (smem_operand(issue, int(warp.u64[rda][lane]), descriptor.m // group, "A"),)
        operand_b = smem_operand(issue, int(warp.u64[rb][lane]), descriptor.n // group, "B")
        scales_a = _scales_of_a(issue, int(rsa(warp)[lane]) & 0xFFFFFFFF)
        scales_b = _scales_of_b(issue, int(rsb(warp)[lane]) & 0xFFFFFFFF)
        enabled = bool(warp.pred[rp][lane]) != negated
        target = Accumulator(issue, to, None, added_to=enabled)
        count_mma(warp, descriptor)
        fast = warp.cta.machine.accumulate == "fast"
        perform = _performer(descriptor, left, operand_b, scales_a, scales_b, target, added_to=enabled, fast=fast)
        submit(warp, "an mma", line, text, perform, queue=warp.cta.tmem)

    return step


def _scales_of_a(issue: Issue, taddr: int) -> ScaleFactors:
    d, rows = issue.descriptor, issue.descriptor.m // issue.group
    column = _check_scales(issue, taddr, rows, "A")
    return lambda: [load_scale_factors(cta.tmem.data, column, rows, d.sf_blocks, d.sfa_id) for cta in issue.ctas]


def _scales_of_b(issue: Issue, taddr: int) -> ScaleFactors:
    d = issue.descriptor
    split = issue.group == 2 and d.m == 128
    column = _check_scales(issue, taddr, d.n // 2 if split else d.n, "B")
    load = load_split_scale_factors if split else load_scale_factors
    return lambda: [load(cta.tmem.data, column, d.n, d.sf_blocks, d.sfb_id) for cta in issue.ctas]


def _check_scales(issue: Issue, taddr: int, rows: int, which: str) -> int:
    """Check the cells of `rows` scale factors in all four quarters of each CTA; returns their first column."""
    lane, column = split_address(taddr)
    if lane:
        raise Fault("tmem-lane", f"the scale factors of {which} are given at lane {lane}; they begin at lane 0",
                    address=taddr)  # fmt: skip
    whole, rest = divmod(rows, _QUARTER)
    cells: list[Index] = [(slice(0, LANES), slice(column, column + whole))] if whole else []
    if rest:
        lanes = (_QUARTER * np.arange(4)[:, None] + np.arange(rest)).reshape(-1, 1)
        cells.append((lanes, np.array([[column + whole]])))
    for cta in issue.ctas:
        for index in cells:
            cta.tmem.read(index, issue.clock, issue.reads, f"scale factors of {which} of tcgen05.mma read")
    return column


def _performer(
    d: InstructionDescriptor,
    left: tuple[Fetch, ...],
    right: Fetch,
    scales_a: ScaleFactors,
    scales_b: ScaleFactors,
    target: Accumulator,
    *,
    added_to: bool,
    fast: bool,
) -> Callable[[], None]:
    table, wide = _scale_table(d.sf_type), d.sf_type == "ue8m0"

    def perform() -> None:
        b = _elements(right(), d.b_type, d.k, negated=d.negate_b)
        a = [_elements(fetch(), d.a_type, d.k, negated=d.negate_a) for fetch in left]
        old = target.load().view(np.float32) if added_to else None
        factors = [(table[sfa], table[sfb]) for sfa, sfb in zip(scales_a(), scales_b(), strict=True)]
        rows = d.m // len(factors)
        out = np.empty((d.m, d.n), np.float32)
        for i, (sfa, sfb) in enumerate(factors):
            mine = slice(i * rows, (i + 1) * rows)
            for j, operand in enumerate(a):
                columns = slice(j * d.n // len(a), (j + 1) * d.n // len(a))
                c = None if old is None else old[mine, columns]
                in_f32 = fast and not (wide and _extreme(sfa, sfb))
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
    return any(bool(((scales > _SAFE) | (scales < 1 / _SAFE)).any()) for scales in factors)


def _blocks_scaled(x: Float32, scales: Float32) -> Float32:
    rows, blocks = scales.shape
    return (x.reshape(rows, blocks, -1) * scales[:, :, None]).reshape(rows, -1)
