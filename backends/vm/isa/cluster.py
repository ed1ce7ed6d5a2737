"""Shared memory of the other CTAs of a cluster: mapa, getctarank, st.async (PTX ISA 9.7.9.12, 9.7.9.23, 9.7.9.24)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.machine.access import resolve
from backends.vm.machine.cta import Cta
from backends.vm.machine.engine import submit
from backends.vm.machine.warp import Warp
from backends.vm.memory.clocks import stamp
from backends.vm.memory.shared import OFFSET_MASK, RANK_SHIFT
from backends.vm.ptx.ast import Operand


@opcode("mapa.shared::cluster.<type>", "mapa.<type>", section="9.7.9.23", counter="move", type="u32 u64")  # fmt: skip
def mapa(b: Binder) -> Step:
    """The same variable in the CTA of another rank: bits 31..24 of a shared address hold the rank.

    A rank that the cluster does not have is found by whoever uses the address: CuTeDSL lets all lanes compute it.
    """
    d, a, rank = b.expect(3)
    view = b.words["type"]
    rd, ra, rc = b.destination(d, view), b.source(a, view), b.source(rank, "u32")
    keep = np.array(~(0xFF << RANK_SHIFT) & (2 ** int(view[1:]) - 1), view.replace("u", "uint"))

    def step(warp: Warp) -> None:
        ranks = warp.u32[rc]
        registers = getattr(warp, view)
        mapped = registers[ra] & keep | ranks.astype(keep.dtype) << keep.dtype.type(RANK_SHIFT)
        np.copyto(registers[rd], mapped, where=warp.where)

    return step


@opcode("getctarank.shared::cluster.<type>", "getctarank.<type>", section="9.7.9.24", counter="move", type="u32 u64")
def getctarank(b: Binder) -> Step:
    """The rank of the CTA that a shared address belongs to."""
    d, a = b.expect(2)
    view = b.words["type"]
    rd, ra = b.destination(d, "u32"), b.source(a, view)

    def step(warp: Warp) -> None:
        ranks = getattr(warp, view)[ra].astype(np.uint32) >> np.uint32(RANK_SHIFT)
        np.copyto(warp.u32[rd], ranks, where=warp.where)

    return step


def _remote(b: Binder, operand: Operand) -> Callable[[Warp, int], tuple[Cta, int]]:
    address = b.address(operand)
    wide = b.width(getattr(operand, "base", operand)) == 64

    def at(warp: Warp, lane: int) -> tuple[Cta, int]:
        value = address(warp)[lane : lane + 1]
        shared = int((resolve("", value)[1] if wide else value)[0])
        return warp.cta.cluster.cta_of(shared, "st.async"), shared & OFFSET_MASK

    return at


@opcode("st.async{.weak}{.shared::cluster}.mbarrier::complete_tx::bytes{.<vec>}.<type>", section="9.7.9.12",
        counter="memory", vec="v2 v4", type="b32 u32 s32 f32 b64 u64 s64 f64")  # fmt: skip
def st_async(b: Binder) -> Step:
    """Store into the shared memory of a CTA of the cluster; its end is a complete_tx on an mbarrier of that CTA."""
    destination, source, barrier = b.expect(3)
    view = "u" + b.words["type"][1:]
    items = b.vector(source, int(b.words["vec"][1:]) if b.words["vec"] else 1)
    rows = [b.source(item, view) for item in items]
    to, signal = _remote(b, destination), _remote(b, barrier)
    line, text = b.instruction.line, b.instruction.text
    size = len(rows) * int(view[1:]) // 8

    def step(warp: Warp) -> None:
        for lane in np.flatnonzero(warp.mask).tolist():
            (cta, offset), (at, place) = to(warp, lane), signal(warp, lane)
            if at is not cta:
                raise Fault(
                    "remote-shared", "the mbarrier of st.async lies in another CTA than its destination", lane=lane
                )
            data = np.array([getattr(warp, view)[row][lane] for row in rows]).view(np.uint8)
            _begin(warp, lane, cta, offset, place, data)

    def _begin(warp: Warp, lane: int, cta: Cta, offset: int, place: int, data: npt.NDArray[np.uint8]) -> None:
        cta.smem.check_region(offset, size, "st.async")
        signalled = cta.mbarrier(place, warp.clock)
        granules = np.arange(offset >> 2, (offset + size) >> 2, dtype=np.int64)
        serial = warp.cta.cluster.next_copy()
        cta.smem.async_write_begins(granules, warp.clock, line, "st.async", generic=True)
        landed = warp.clock.of_copy()
        landed.seen[signalled.copy_agent] = serial

        def perform() -> None:
            cta.smem.data[offset : offset + size] = data
            cta.smem.async_write_ends(granules, stamp(signalled.copy_agent, serial), line)
            signalled.complete_transactions(size, landed, f"the st.async of PTX line {line}")

        signalled.last_copy = submit(warp, "an st.async", line, text, perform, signals=(signalled,))
        signalled.last_copy_serial = serial

    return step
