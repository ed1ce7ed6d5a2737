"""The recorder: its trace of a kernel whose every step is known, and that it changes nothing."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.load import load
from backends.vm.machine.machine import Machine
from backends.vm.trace.recorder import Recorder
from megamoe.contract.trace import CtaTrace

SCHEDULES = ["eager", "lazy", "random:1", "random:2"]
COPIED_BYTES = 256

KERNEL = """.version 9.2
.target sm_100a
.address_size 64
.visible .entry known(.param .u64 source, .param .u64 result)
{
  .reg .pred %p, %done; .reg .b32 %t, %warp, %s, %v, %taddr, %lanes, %bar; .reg .b64 %src, %dst, %o;
  .shared .align 128 .b8 data[256];
  .shared .align 8 .b64 full;
  .shared .align 4 .b32 base;
  mov.u32 %t, %tid.x;
  shr.u32 %warp, %t, 5;
  mov.u32 %s, data;
  mov.u32 %bar, full;
  ld.param.u64 %src, [source];
  ld.param.u64 %dst, [result];
  setp.ne.u32 %p, %t, 0;
  @%p bra READY;
  mbarrier.init.shared::cta.b64 [%bar], 1;
READY:
  setp.ne.u32 %p, %warp, 0;
  @%p bra SET;
  bar.warp.sync -1;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [base], 64;
SET:
  bar.sync 0;
  ld.shared.b32 %taddr, [base];
  setp.eq.u32 %p, %t, 32;
  @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 256;
  @%p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%s], [%src], 256, [%bar];
COPIED:
  mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
  @!%done bra COPIED;
  and.b32 %v, %t, 63;
  shl.b32 %v, %v, 2;
  add.u32 %v, %v, %s;
  ld.shared.b32 %v, [%v];
  shl.b32 %lanes, %warp, 21;
  add.u32 %taddr, %taddr, %lanes;
  tcgen05.st.sync.aligned.32x32b.x1.b32 [%taddr + 16], {%v};
  tcgen05.wait::st.sync.aligned;
  tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v}, [%taddr + 16];
  tcgen05.wait::ld.sync.aligned;
  mul.wide.u32 %o, %t, 4;
  add.u64 %dst, %dst, %o;
  st.relaxed.gpu.global.b32 [%dst], %v;
  bar.sync 0;
  setp.ne.u32 %p, %warp, 0;
  @%p bra DONE;
  ld.shared.b32 %taddr, [base];
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %taddr, 64;
DONE:
  ret;
}
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results int32 [64], counters, and the trace if there was a recorder."""

    result: npt.NDArray[np.int32]
    counters: Counter[str]
    recorder: Recorder | None

    @property
    def cta(self) -> CtaTrace:
        assert self.recorder is not None
        return self.recorder.trace.launches[0].ctas[0]


def _run(schedule: str, recorder: Recorder | None, ctas: int = 1) -> Outcome:
    machine = Machine(schedule, observer=recorder)
    source = np.arange(100, 164, dtype=np.int32)
    result = np.zeros(64, np.int32)
    addresses = [machine.memory.add(name, array.view(np.uint8)).base
                 for name, array in (("source", source), ("result", result))]  # fmt: skip
    params = [struct.pack("<Q", address) for address in addresses]
    machine.launch(load(KERNEL).entry("known"), (ctas, 1, 1), (64, 1, 1), params)
    return Outcome(result, machine.counters, recorder)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recording_changes_nothing(schedule: str) -> None:
    plain, recorded = _run(schedule, None), _run(schedule, Recorder())
    assert plain.result.tolist() == list(range(100, 164))
    assert recorded.result.tolist() == plain.result.tolist(), "the recorder changed a result"
    assert recorded.counters == plain.counters, "the recorder changed what was executed"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slices_are_in_order_and_apart(schedule: str) -> None:
    outcome = _run(schedule, Recorder())
    for warp in outcome.cta.warps:
        pieces = sorted((one.begins, one.ends) for one in (*warp.runs, *warp.waits))
        assert pieces, f"warp {warp.index} left no trace"
        assert all(begins <= ends for begins, ends in pieces), (
            f"warp {warp.index} has a slice that ends before it begins"
        )
        overlaps = [(a, b) for a, b in pairwise(pieces) if a[1] > b[0]]
        assert not overlaps, f"warp {warp.index} is in two slices at once: {overlaps}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_copy_and_whom_it_releases(schedule: str) -> None:
    cta = _run(schedule, Recorder()).cta
    (copy,) = cta.operations
    assert (copy.agent, copy.warp) == ("copy", 1), "warp 1 issued the copy"
    assert copy.ended is not None
    assert copy.ended > copy.issued
    (barrier,) = cta.mbarriers
    assert barrier.expected == 1
    assert len(barrier.phases) == 1, "one phase ends, once"
    assert sorted(party.agent for party in barrier.arrivals) == ["copy", "warp"], (
        "the expect_tx and the copy, no others"
    )
    assert {party.warp for party in barrier.waits} == {0, 1}, "both warps wait"
    waits = [wait for warp in cta.warps for wait in warp.waits if wait.target.startswith("mbarrier")]
    released = [wait.release for wait in waits if wait.release is not None]
    assert all(release.operation == copy.number for release in released), "another operation ended a wait"
    if schedule == "lazy":
        assert len(released) == 2, "a lazy copy lets both warps wait"
    assert len(released) == len(waits), "nothing is said to have ended a wait"


def test_tensor_memory_and_shared_memory_are_mapped() -> None:
    cta = _run("lazy", Recorder()).cta
    (span,) = cta.tmem_spans
    assert (span.first, span.columns) == (0, 64)
    assert span.ends is not None
    touched = {(one.verb, one.by, one.warp, one.lanes, one.columns) for one in cta.tmem}
    assert touched == {
        (verb, f"tcgen05.{name}", warp, (32 * warp, 32 * warp + 31), (16, 16))
        for warp in (0, 1)
        for verb, name in (("write", "st"), ("read", "ld"))
    }
    copied = [use for use in cta.smem if use.by == "copy"]
    assert [(use.verb, use.warps) for use in copied] == [("write", [1])]
    ((first, behind),) = copied[0].ranges
    assert behind - first == COPIED_BYTES
    reads = [use for use in cta.smem if use.verb == "read" and use.ranges == copied[0].ranges]
    assert [use.warps for use in reads] == [[0, 1]], "both warps read all of what was copied"


def test_guarded_off_instructions_do_not_count() -> None:
    cta = _run("eager", Recorder()).cta
    assert cta.warps[0].opcodes.get("cp.async.bulk.shared.global", 0) == 0
    assert cta.warps[1].opcodes["cp.async.bulk.shared.global"] == 1


def test_limits_hold_and_are_said() -> None:
    outcome = _run("lazy", Recorder(event_limit=3, cta_limit=2), ctas=5)
    assert outcome.recorder is not None
    trace = outcome.recorder.trace
    assert trace.left_out > 0, "events beyond the limit are counted"
    kept = [one for cta in trace.launches[0].ctas for warp in cta.warps for one in (*warp.runs, *warp.waits)]
    assert len(kept) <= 3
    assert len(trace.launches[0].ctas) == 2
    assert trace.launches[0].total_ctas == 5
