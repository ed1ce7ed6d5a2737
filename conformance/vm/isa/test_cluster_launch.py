"""clusterlaunchcontrol: the work of each cluster is done once, by that cluster or by one that took it over."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import Fault
from conformance.vm.kernel import Kernel

GRID = (4, 3, 2)
SCHEDULES = ("eager", "lazy", "random:1", "random:2")

BODY = """.shared .align 16 .b8 response[16]; .shared .align 8 .b64 mbar;
.reg .b32 %rank, %x, %y, %z, %w, %nx, %ny, %phase, %at, %i; .reg .b64 %p, %o, %token; .reg .b128 %r;
.reg .pred %one, %first, %ok, %more;
mov.u32 %rank, %cluster_ctarank; setp.eq.s32 %one, %tx, 0; setp.eq.s32 %first, %rank, 0;
and.pred %first, %first, %one;
mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z; mov.u32 %nx, %nctaid.x; mov.u32 %ny, %nctaid.y;
mov.b32 %phase, 0; mov.u32 %at, response;
@%one mbarrier.init.shared.b64 [mbar], 1;
barrier.cluster.arrive; barrier.cluster.wait;
@%one atom.global.add.u32 %i, [%workers], 1;
WORK: mad.lo.s32 %i, %z, %ny, %y; mad.lo.s32 %i, %i, %nx, %x; mul.wide.u32 %o, %i, 4;
add.s64 %p, %done, %o;
@%one atom.global.add.u32 %i, [%p], 1;
@%one mbarrier.arrive.expect_tx.shared.b64 %token, [mbar], 16;
MEET
@%first clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytesALL.b128 [%at], [mbar];
WAIT
ld.shared.b128 %r, [%at];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %more, %r;
@!%more bra OUT;
DECODE
add.s32 %x, %x, %rank; xor.b32 %phase, %phase, 1;
fence.proxy.async.shared::cta; barrier.cluster.arrive; barrier.cluster.wait;
bra WORK;
OUT: ret;"""
WAIT = "WAITING: mbarrier.try_wait.parity.shared.b64 %ok, [mbar], %phase; @!%ok bra WAITING;"
SCALARS = "".join(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}.b32.b128 %{axis}, %r;" for axis in "xyz")
VECTOR = "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%x, %y, %z, %w}, %r;"


def run(
    schedule: str, cluster: int, decode: str = SCALARS, wait: str = WAIT, everybody: str = ".multicast::cluster::all"
) -> tuple[npt.NDArray[np.uint32], int]:
    """How often the work of each CTA was done, uint32 [z, y, x], and how many CTAs ran."""
    meet = "barrier.cluster.arrive; barrier.cluster.wait;" if cluster > 1 else ""
    body = (
        BODY.replace("DECODE", decode)
        .replace("MEET", meet)
        .replace("WAIT\n", wait + "\n")
        .replace("ALL.", everybody + ".")
    )
    buffers = {"done": np.zeros(GRID[::-1], np.uint32), "workers": np.zeros(1, np.uint32)}
    found, _ = Kernel(body, buffers, grid=GRID, cluster=(cluster, 1, 1)).run(schedule)
    return found["done"], int(found["workers"][0])


@pytest.mark.parametrize("decode", [SCALARS, VECTOR], ids=["scalars", "vector"])
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_work_is_done_once(schedule: str, cluster: int, decode: str) -> None:
    done, workers = run(schedule, cluster, decode)
    assert np.all(done == 1), f"some work was not done exactly once: {done.tolist()}"
    assert workers < done.size, f"{workers} CTAs ran for {done.size} pieces of work: nothing was taken over"


def test_without_multicast_only_the_asking_cta_is_told() -> None:
    done, _ = run("eager", 1, everybody="")
    assert np.all(done == 1), f"some work was not done exactly once: {done.tolist()}"
    with pytest.raises(Fault) as caught:
        run("eager", 2, everybody="")
    assert caught.value.rule == "deadlock", "the other CTA of the cluster waits for a response that never comes"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_response_that_is_not_awaited(schedule: str) -> None:
    with pytest.raises(Fault) as caught:
        run(schedule, 1, wait="")
    assert caught.value.rule in ("copy-not-awaited", "uninitialised-shared"), f"found {caught.value}"
