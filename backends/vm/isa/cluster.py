"""Clusters: shared memory of other CTAs, and clusterlaunchcontrol (PTX ISA 9.7.9.12, .23, .24, 9.7.13.17, .18)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import ByLanes, Fault, OtherAccess, report
from backends.vm.isa.bulk_copy import shared_address
from backends.vm.machine.access import active
from backends.vm.machine.cta import Cta
from backends.vm.machine.engine import submit
from backends.vm.machine.undefined import BecameUndefined, all_bits
from backends.vm.machine.warp import Warp
from backends.vm.memory.clocks import stamp
from backends.vm.memory.definedness import Origin, lost_in_reduction
from backends.vm.memory.mbarrier import MBarrier
from backends.vm.memory.shared import OFFSET_MASK, RANK_SHIFT
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Operand, Sink
from backends.vm.tensor.tma_box import reduced, reduced_bytes


@opcode("mapa.shared::cluster.<type>", "mapa.<type>", section="9.7.9.23", counter="move", type="u32 u64")  # fmt: skip
def mapa(b: Binder) -> Step:
    """Map a shared address to the CTA of another rank: bits 31..24 of a shared address hold the rank.

    An access checks the rank, not this, because CuTeDSL computes the address in all lanes.
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
    """The rank of the CTA that owns a shared address."""
    d, a = b.expect(2)
    view = b.words["type"]
    rd, ra = b.destination(d, "u32"), b.source(a, view)

    def step(warp: Warp) -> None:
        ranks = getattr(warp, view)[ra].astype(np.uint32) >> np.uint32(RANK_SHIFT)
        np.copyto(warp.u32[rd], ranks, where=warp.where)

    return step


def _remote(b: Binder, operand: Operand) -> Callable[[Warp, int], tuple[Cta, int]]:
    address = shared_address(b, operand)

    def at(warp: Warp, lane: int) -> tuple[Cta, int]:
        shared = address(warp, lane)
        return warp.cta.cluster.cta_of(shared, "st.async"), shared & OFFSET_MASK

    return at


@opcode("st.async{.weak}{.shared::cluster}.mbarrier::complete_tx::bytes{.<vec>}.<type>", section="9.7.9.12",
        counter="memory", vec="v2 v4", type="b32 u32 s32 f32 b64 u64 s64 f64")  # fmt: skip
@opcode("st.async{.weak}{.shared::cluster}.mbarrier::complete_tx::bytes.<type>", section="9.7.9.12", counter="memory",
        type="b128")  # fmt: skip
@opcode("red.async.relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes.<op>.<type>", section="9.7.13.7",
        counter="memory", op="inc dec", type="u32")  # fmt: skip
@opcode("red.async.relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes.<op>.<type>", section="9.7.13.7",
        counter="memory", op="min max", type="u32 s32")  # fmt: skip
@opcode("red.async.relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes.<op>.<type>", section="9.7.13.7",
        counter="memory", op="and or xor", type="b32")  # fmt: skip
@opcode("red.async.relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes.<op>.<type>", section="9.7.13.7",
        counter="memory", op="add", type="u32 s32 u64")  # fmt: skip
def st_async(b: Binder) -> Step:
    """Store into, or reduce into, the shared memory of a CTA of the cluster. Completion is a complete_tx on an mbarrier
    of that CTA. Reductions are atomic, so several may be in flight to one address. In a launch without clusters an
    H200 has neither (facts.md 0.1)."""
    destination, source, barrier = b.expect(3)
    operation, kind = b.words.get("op", ""), b.words["type"]
    view = "u64x2" if kind == "b128" else "u" + kind[1:]
    items = b.vector(source, int((b.words.get("vec") or "v1")[1:]))
    rows = [b.source(item, view) for item in items]
    to, signal = _remote(b, destination), _remote(b, barrier)
    line, text = b.instruction.line, b.instruction.text
    size, work = len(rows) * int(kind[1:]) // 8, "a red.async" if operation else "an st.async"
    what = work.partition(" ")[2]

    def step(warp: Warp) -> None:
        told = False
        warp.agents.works[line] = work
        for lane in active(warp).tolist():
            (cta, offset), (at, place) = to(warp, lane), signal(warp, lane)
            if at is not cta:
                said = f"the mbarrier of {what} lies in another CTA than its destination"
                raise Fault("remote-shared", said, lane=lane)
            if not warp.cta.place.explicit_cluster:
                raise Fault("async-without-cluster", f"this {what} is executed in a launch without clusters; the "
                            "launch must give the size of a cluster", lane=lane)  # fmt: skip
            if cta is warp.cta and not told and (operation or cta.cluster.size == 1):
                told = True
                report(Fault("async-to-own-cta", f"the destination of this {what} lies in the executing CTA; it must "
                             "lie in another one", lane=lane))  # fmt: skip
            data = np.array([getattr(warp, view)[row][lane] for row in rows]).view(np.uint8)
            _begin(warp, lane, cta, offset, place, data)
        warp.next_epoch()

    def _begin(warp: Warp, lane: int, cta: Cta, offset: int, place: int, data: npt.NDArray[np.uint8]) -> None:
        cta.check_started(warp, f"{what} into shared memory")
        with ByLanes([lane]):
            cta.smem.check_region(offset, size, what)
        signalled = cta.mbarrier(place, warp.clock)
        granules = np.arange(offset >> 2, (offset + size) >> 2, dtype=np.int64)
        serial = warp.cta.cluster.next_copy()
        if not operation:
            cta.smem.async_write_begins(granules, warp.clock, line, what, generic=True)
        if cta is not warp.cta:
            cta.visit(signalled.copy_agent, serial, line)
        landed = warp.clock.of_copy()
        landed.seen[signalled.copy_agent] = serial

        def perform() -> None:
            into, at = cta.smem.data[offset : offset + size], np.array([offset])
            missing = None
            if operation:
                missing = lost_in_reduction(None, cta.smem.missing(at, size), reduced_bytes(kind))
            into[...] = reduced(into.copy(), data, operation, kind) if operation else data
            cta.smem.async_write_ends(granules, stamp(signalled.copy_agent, serial), line)
            if missing is not None:
                cta.smem.undefine(at, missing.bytes_, missing.origin.read_at(line).stored_at(line, warp.name))
            signalled.complete_transactions(size, landed, f"the {what} of PTX line {line}")

        signalled.last_copy = submit(warp, work, line, text, perform, signals=(signalled,))
        signalled.last_copy_serial = serial

    return step


# clusterlaunchcontrol: a running cluster takes over the work of one that has not begun (PTX ISA 9.7.13.17, 9.7.13.18).
# The 16 bytes of a response are opaque to kernels. Here they hold the three coordinates and a flag for success.


RESPONSE_BYTES = 16
_FAILED = np.array([2**32 - 1, 2**32 - 1, 2**32 - 1, 0], "<u4")
"""The response to a request that failed: no coordinates, and no memory that nobody has written yet."""
_AXES = {"": 0, "get_first_ctaid::x": 0, "get_first_ctaid::y": 1, "get_first_ctaid::z": 2}


def _own_offset(b: Binder, operand: Operand) -> Callable[[Warp, int], int]:
    """Resolves a shared or generic address to an offset in this CTA's shared memory."""
    address = shared_address(b, operand)
    return lambda warp, lane: warp.cta.own_offset(address(warp, lane), "clusterlaunchcontrol.try_cancel")


@opcode("clusterlaunchcontrol.try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes{.multicast::cluster::all}.b128",
        section="9.7.13.17", counter="cluster")  # fmt: skip
def try_cancel(b: Binder) -> Step:
    """Take over a cluster that has not begun, if there is one. The response goes to this CTA or all of the cluster."""
    destination, barrier = b.expect(2)
    to, signal = _own_offset(b, destination), _own_offset(b, barrier)
    everybody = bool(b.words["multicast::cluster::all"])
    said = "a response of clusterlaunchcontrol.try_cancel in shared memory"
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        if (failed := warp.cta.cancel_failed) is not None:
            report(Fault("cancel-after-failure", f"another try_cancel after {failed.who} of this CTA has observed at "
                         f"PTX line {failed.line} that one failed", other=failed))  # fmt: skip
        warp.agents.works[line] = "a try_cancel"
        for lane in active(warp).tolist():
            offset, place = to(warp, lane), signal(warp, lane)
            granules = np.arange(offset >> 2, (offset + RESPONSE_BYTES) >> 2, dtype=np.int64)
            told = [(cta, cta.mbarrier(place, warp.clock)) for cta in _told(warp, everybody, said)]
            for cta, _ in told:
                with ByLanes([lane]):
                    cta.smem.check_region(offset, RESPONSE_BYTES, "clusterlaunchcontrol.try_cancel")
                cta.smem.async_write_begins(granules, warp.clock, line, "clusterlaunchcontrol.try_cancel")
            serial = warp.cta.cluster.next_copy()
            perform = _performer(warp, offset, granules, told, serial, line)
            for cta, signalled in told:
                if cta is not warp.cta:
                    cta.visit(signalled.copy_agent, serial, line)
            operation = submit(warp, "a try_cancel", line, text, perform, signals=tuple(m for _, m in told))
            for _, signalled in told:
                signalled.last_copy, signalled.last_copy_serial = operation, serial
        warp.next_epoch()

    return step


def _told(warp: Warp, everybody: bool, what: str) -> Iterator[Cta]:
    for cta in warp.cta.cluster.ctas if everybody else [warp.cta]:
        if cta is not warp.cta:
            cta.check_running(warp, what)
        yield cta


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
        words = np.array([*waiting.pop(0), 1], "<u4") if waiting else _FAILED
        for cta, signalled in told:
            cta.smem.data[offset : offset + RESPONSE_BYTES] = words.view(np.uint8)
            cta.smem.async_write_ends(granules, stamp(signalled.copy_agent, serial), line)
            landed = issued.copy()
            landed.seen[signalled.copy_agent] = landed.fenced[signalled.copy_agent] = serial
            signalled.complete_transactions(RESPONSE_BYTES, landed, f"the try_cancel of PTX line {line}")

    return perform


@opcode("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", section="9.7.13.18", counter="cluster")
def is_canceled(b: Binder) -> Step:
    """Whether the response names a cluster. The CTA that has observed a failure may not ask again."""
    d, response = b.expect(2)
    rd, rr, line = b.destination(d, "pred"), b.source(response, "u64x2"), b.instruction.line

    def step(warp: Warp) -> None:
        words = _words(warp, rr)
        np.copyto(warp.pred[rd], words[:, 3] != 0, where=warp.where)
        if warp.cta.cancel_failed is None and ((words == _FAILED).all(axis=1) & warp.mask).any():
            warp.cta.cancel_failed = OtherAccess(f"warp {warp.index}", "observed", line)

    return step


def _words(warp: Warp, row: int) -> npt.NDArray[np.uint32]:
    """The responses of the lanes: [32, 4]."""
    return np.ascontiguousarray(warp.u64x2[row]).view(np.uint32).reshape(-1, 4)


@opcode("clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128",
        "clusterlaunchcontrol.query_cancel.<axis>.b32.b128", section="9.7.13.18", counter="cluster",
        axis="get_first_ctaid::x get_first_ctaid::y get_first_ctaid::z")  # fmt: skip
def first_ctaid(b: Binder) -> Step:
    """%ctaid of the first CTA of the cluster in a response. Undefined if it names none."""
    d, response = b.expect(2)
    first = _AXES[b.words.get("axis", "")]
    items = b.vector(d, 1 if "axis" in b.words else 4)[:3]
    rows = [(first + i, b.destination(item, "u32")) for i, item in enumerate(items) if not isinstance(item, Sink)]
    rr, used, line = b.source(response, "u64x2"), b.rows.used, b.instruction.line
    said = f"the coordinates that PTX line {line} takes from a response that names no cluster: its try_cancel failed"
    origin = Origin("uninitialised-register", said)

    def step(warp: Warp) -> None:
        words = _words(warp, rr)
        for axis, row in rows:
            np.copyto(warp.u32[row], words[:, axis], where=warp.where)
        failed = (words[:, 3] == 0) & warp.mask
        if count_nonzero(failed):
            for _, row in rows:
                if (32, row) in used:
                    warp.undefined.put((32, row), all_bits(32, failed), warp.mask, origin)
            raise BecameUndefined

    return step
