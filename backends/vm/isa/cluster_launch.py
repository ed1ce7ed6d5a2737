"""clusterlaunchcontrol: a running cluster takes over the work of one that has not begun (PTX ISA 9.7.13.17, 9.7.13.18).

The 16 bytes of a response are opaque to kernels; here they are the three coordinates and whether there is a cluster.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.machine.access import resolve
from backends.vm.machine.cta import Cta
from backends.vm.machine.engine import submit
from backends.vm.machine.warp import Warp
from backends.vm.memory.clocks import stamp
from backends.vm.memory.mbarrier import MBarrier
from backends.vm.ptx.ast import Operand, Sink

RESPONSE_BYTES = 16
_AXES = {"": 0, "get_first_ctaid::x": 0, "get_first_ctaid::y": 1, "get_first_ctaid::z": 2}


def _own_offset(b: Binder, operand: Operand) -> Callable[[Warp, int], int]:
    """Offset in this CTA's shared memory from a shared or generic address."""
    address = b.address(operand)
    wide = b.width(getattr(operand, "base", operand)) == 64

    def at(warp: Warp, lane: int) -> int:
        value = address(warp)[lane : lane + 1]
        shared = int((resolve("", value)[1] if wide else value)[0])
        return warp.cta.own_offset(shared, "clusterlaunchcontrol.try_cancel")

    return at


@opcode("clusterlaunchcontrol.try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes{.multicast::cluster::all}.b128",
        section="9.7.13.17", counter="cluster")  # fmt: skip
def try_cancel(b: Binder) -> Step:
    """Take over a cluster that has not begun, if there is one; tell every CTA of this cluster, or only this CTA."""
    destination, barrier = b.expect(2)
    to, signal = _own_offset(b, destination), _own_offset(b, barrier)
    everybody = bool(b.words["multicast::cluster::all"])
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        for lane in np.flatnonzero(warp.mask).tolist():
            offset, place = to(warp, lane), signal(warp, lane)
            granules = np.arange(offset >> 2, (offset + RESPONSE_BYTES) >> 2, dtype=np.int64)
            told = [(cta, cta.mbarrier(place, warp.clock)) for cta in _told(warp, everybody)]
            for cta, _ in told:
                cta.smem.check_region(offset, RESPONSE_BYTES, "clusterlaunchcontrol.try_cancel")
                cta.smem.async_write_begins(granules, warp.clock, line, "clusterlaunchcontrol.try_cancel")
            serial = warp.cta.cluster.next_copy()
            perform = _performer(warp, offset, granules, told, serial, line)
            operation = submit(warp, "a try_cancel", line, text, perform, signals=tuple(m for _, m in told))
            for _, signalled in told:
                signalled.last_copy, signalled.last_copy_serial = operation, serial

    return step


def _told(warp: Warp, everybody: bool) -> list[Cta]:
    return warp.cta.cluster.ctas if everybody else [warp.cta]


def _performer(
    warp: Warp,
    offset: int,
    granules: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    told: list[tuple[Cta, MBarrier]],
    serial: int,
    line: int,
) -> Callable[[], None]:
    issued = warp.clock.of_copy()

    def perform() -> None:
        waiting = warp.cta.machine.unstarted
        words = np.array([*waiting.pop(0), 1] if waiting else [0, 0, 0, 0], "<u4")
        for cta, signalled in told:
            cta.smem.data[offset : offset + RESPONSE_BYTES] = words.view(np.uint8)
            cta.smem.async_write_ends(granules, stamp(signalled.copy_agent, serial), line)
            landed = issued.copy()
            landed.seen[signalled.copy_agent] = landed.fenced[signalled.copy_agent] = serial
            signalled.complete_transactions(RESPONSE_BYTES, landed, f"the try_cancel of PTX line {line}")

    return perform


@opcode("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", section="9.7.13.18", counter="cluster")
def is_canceled(b: Binder) -> Step:
    """Whether the response names a cluster."""
    d, response = b.expect(2)
    rd, rr = b.destination(d, "pred"), b.source(response, "u64x2")

    def step(warp: Warp) -> None:
        np.copyto(warp.pred[rd], warp.u64x2[rr][:, 1] >> np.uint64(32) != 0, where=warp.where)

    return step


@opcode("clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128",
        "clusterlaunchcontrol.query_cancel.<axis>.b32.b128", section="9.7.13.18", counter="cluster",
        axis="get_first_ctaid::x get_first_ctaid::y get_first_ctaid::z")  # fmt: skip
def first_ctaid(b: Binder) -> Step:
    """%ctaid of the first CTA of the cluster in a response; zeros if it names none (undefined by the ISA)."""
    d, response = b.expect(2)
    first = _AXES[b.words.get("axis", "")]
    items = b.vector(d, 1 if "axis" in b.words else 4)[:3]
    rows = [(first + i, b.destination(item, "u32")) for i, item in enumerate(items) if not isinstance(item, Sink)]
    rr = b.source(response, "u64x2")

    def step(warp: Warp) -> None:
        words = np.ascontiguousarray(warp.u64x2[rr]).view(np.uint32).reshape(-1, 4)
        for axis, row in rows:
            np.copyto(warp.u32[row], words[:, axis], where=warp.where)

    return step
