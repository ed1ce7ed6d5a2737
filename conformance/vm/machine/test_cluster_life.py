"""CTAs of a cluster live while another may use their memory; public 2-CTA kernels crash on silicon otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from backends.vm.faults import Fault
from backends.vm.machine.machine import Machine
from conformance.vm.kernel import LATE, Kernel, assert_clean, init, wait

SCHEDULES = ("eager", "lazy", *LATE, *(f"random:{seed}" for seed in range(4)))
BODY = f""".shared .align 16 .b8 buf[16]; .shared .align 8 .b64 mbar; {init("mbar")}
st.shared.b32 [buf+4], 0;
barrier.cluster.arrive; barrier.cluster.wait;
xor.b32 %r1, %cta, 1; mov.u32 %r2, buf; mapa.shared::cluster.u32 %r2, %r2, %r1;
mov.u32 %r3, mbar; mapa.shared::cluster.u32 %r3, %r3, %r1;
setp.ne.u32 %p1, %cta, 0; setp.ne.u32 %p2, %lane, 0;
@%p1 bra SECOND;
@%p2 bra END;
USE
bra END;
SECOND:
OTHER
END: LEAVE ret;"""
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"
MEET_RELAXED = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
USES = {
    "a store": "st.shared::cluster.b32 [%r2], 7;",
    "a load": "ld.shared::cluster.b32 %r4, [%r2+4];",
    "an atomic": "red.relaxed.cluster.shared::cluster.add.u32 [%r2+4], 1;",
    "an arrival": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];",
}


def kernel(use: str, other: str = "", leave: str = "") -> Kernel:
    """CTA 0 does `use` to the memory of CTA 1 (%r2, %r3), which does `other`; both do `leave` before they end."""
    body = BODY.replace("USE", use).replace("OTHER", other).replace("LEAVE", leave)
    return Kernel(body, {"out": np.zeros(1, np.uint32)}, grid=(2, 1, 1), cluster=(2, 1, 1))


@pytest.mark.parametrize("name", USES)
def test_a_cta_that_ends_while_the_other_uses_its_memory(name: str) -> None:
    """Found in either order: the access meets an ended CTA, or the exit meets an unordered access."""
    for schedule in SCHEDULES:
        with pytest.raises(Fault) as found:
            kernel(USES[name]).run(schedule)
        assert found.value.rule == "ended-cta", f"{schedule}, {name}: {found.value}"
        assert "barrier of the cluster" in str(found.value), f"{schedule}, {name}: the cure is not named: {found.value}"


@pytest.mark.parametrize("leave", [MEET, MEET_RELAXED], ids=["a barrier", "a relaxed barrier"])
@pytest.mark.parametrize("name", USES)
def test_a_barrier_of_the_cluster_keeps_it_alive(name: str, leave: str) -> None:
    assert_clean(kernel(USES[name], leave=leave), {})


def test_a_wait_for_the_last_arrival_keeps_it_alive() -> None:
    """CUTLASS's producer tail: the CTA that owns the mbarrier waits for every arrival at it before it ends."""
    assert_clean(kernel(USES["an arrival"], wait("mbar", 0)), {})
    assert_clean(kernel(f"{USES['a store']}\n{USES['an arrival']}", wait("mbar", 0)), {})


def test_a_wait_of_cta_scope_shows_that_an_arrival_is_over() -> None:
    """It makes no data of the other CTA visible, but the phase still ends after the arrival."""
    for way in ("acquire.cta", "relaxed.cta"):
        narrow = wait("mbar", 0).replace("try_wait.parity.", f"try_wait.parity.{way}.")
        assert way in narrow, "the wait has a scope"
        assert_clean(kernel(f"{USES['a load']}\n{USES['an arrival']}", narrow), {})
    unsaid = USES["an arrival"].replace("release.cluster", "release.cta")
    with pytest.raises(Fault, match=r"\[ended-cta\]"):
        kernel(unsaid, wait("mbar", 0)).run()


def test_an_access_behind_the_awaited_arrival() -> None:
    late = kernel(f"{USES['an arrival']}\n{USES['a store']}", wait("mbar", 0))
    for schedule in SCHEDULES:
        with pytest.raises(Fault, match=r"\[ended-cta\]"):
            late.run(schedule)


def test_a_copy_into_the_other_cta() -> None:
    """The bulk copy of CTA 0 lands in CTA 1, which must wait for it at its mbarrier before it ends."""
    copy = """mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r3], 16; mov.u32 %r5, buf;
st.shared.v4.b32 [%r5], {%r5, %r5, %r5, %r5}; fence.proxy.async;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r2], [%r5], 16, [%r3];"""
    assert_clean(kernel(copy, wait("mbar", 0), MEET), {})
    for schedule in SCHEDULES:
        with pytest.raises(Fault) as found:
            kernel(copy).run(schedule)
        assert found.value.rule in ("ended-cta", "exit-with-pending-operation"), f"{schedule}: {found.value}"


EXPECTED = """setp.eq.u32 %p3, %cta, 1; setp.eq.u32 %p4, %lane, 0; and.pred %p3, %p3, %p4;
@%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 16;
barrier.cluster.arrive; barrier.cluster.wait;"""
COPIES_OUT = {
    "a copy": "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r2], [%r5], 16, [%r3];",
    "a reduction": "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 "
    "[%r2], [%r5], 16, [%r3];",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", COPIES_OUT)
def test_a_copy_out_of_a_cta_that_ends(name: str, schedule: str) -> None:
    """CTA 1 waits for the copy, but CTA 0, whose memory it reads, does not."""
    copy = f"""mov.u32 %r5, buf; st.shared.v4.b32 [%r5], {{%r5, %r5, %r5, %r5}}; fence.proxy.async;
{COPIES_OUT[name]}"""
    filled = "st.shared.v4.b32 [buf], {%cta, %cta, %cta, %cta}; fence.proxy.async;"
    body = BODY.replace("st.shared.b32 [buf+4], 0;", filled).replace(MEET, EXPECTED)
    body = body.replace("USE", copy).replace("OTHER", wait("mbar", 0))
    planted, kept = (
        Kernel(body.replace("LEAVE", leave), {"out": np.zeros(1, np.uint32)}, grid=(2, 1, 1), cluster=(2, 1, 1))
        for leave in ("", MEET)
    )
    kept.run(schedule)
    with pytest.raises(Fault, match=r"nothing orders that after a copy used its memory") as found:
        planted.run(schedule)
    assert found.value.rule == "exit-with-pending-operation", f"{schedule}: {found.value}"


@pytest.mark.parametrize("schedule", ["late_cta:0", "late_cta:1", "late_warp:0", "late_warp:3"])
def test_who_comes_late(schedule: str) -> None:
    """Each CTA, or each warp, draws a ticket. The late one must draw the last."""
    by_cta = "cta" in schedule
    who, block, grid = ("%cta", 32, 2) if by_cta else ("%warp", 128, 1)
    body = f"""setp.ne.u32 %p1, %lane, 0; @%p1 ret;
mov.b32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 200; @%p2 bra LOOP;
atom.global.add.u32 %r1, [%ticket], 1; mul.wide.u32 %rd1, {who}, 4; add.u64 %rd1, %rd1, %out;
st.global.b32 [%rd1], %r1; ret;"""
    buffers = {"ticket": np.zeros(1, np.uint32), "out": np.zeros(4, np.uint32)}
    tickets = Kernel(body, buffers, grid=(grid, 1, 1), block=(block, 1, 1), cluster=(grid, 1, 1))
    drawn = tickets.launch(Machine(schedule))["out"][: 2 if by_cta else 4].tolist()
    place = int(schedule[-1])
    assert drawn[place] == max(drawn), f"{schedule}: the tickets are {drawn}; that of number {place} must be the last"
