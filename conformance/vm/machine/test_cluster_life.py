"""CTAs of a cluster live while another may use their memory; public 2-CTA kernels crash on silicon otherwise."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from backends.vm.faults import Fault, Findings
from backends.vm.machine.machine import Machine
from conformance.vm.kernel import LATE, Kernel, assert_clean, collected, init, slugs, wait

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


EARLY = f""".shared .align 16 .b8 buf[16]; .shared .align 8 .b64 mbar; .shared .align 16 .b8 got[16];
.shared .align 4 .b32 said;
{init("mbar")}
st.shared.b32 [said], 0; st.shared.v4.b32 [got], {{%cta, %cta, %cta, %cta}}; fence.proxy.async; bar.sync 0;
xor.b32 %r1, %cta, 1; mov.u32 %r2, buf; mapa.shared::cluster.u32 %r2, %r2, %r1; mov.u32 %r6, got;
mov.u64 %rd2, buf; cvta.shared.u64 %rd2, %rd2; mapa.u64 %rd2, %rd2, %r1; mov.b16 %h1, 2; mov.u32 %r7, mbar;
mov.u32 %r3, mbar; mapa.shared::cluster.u32 %r3, %r3, %r1; mov.u32 %r5, said;
mapa.shared::cluster.u32 %r5, %r5, %r1; setp.ne.u32 %p1, %cta, 0; setp.ne.u32 %p2, %tx, 0;
KNOW
@%p1 bra END; @%p2 bra END;
USE
END: LEAVE ret;"""
SIGNALLING = ".mbarrier::complete_tx::bytes"
EARLY_USES = {
    "a store": "st.shared::cluster.b32 [%r2], 7;",
    "a generic store": "st.b32 [%rd2], 7;",
    "a load": "ld.relaxed.cluster.shared::cluster.b32 %r4, [%r5];",
    "a reduction": "red.relaxed.cluster.shared::cluster.add.u32 [%r5], 1;",
    "an atomic": "atom.relaxed.cluster.shared::cluster.add.u32 %r4, [%r5], 1;",
    "st.async": f"st.async.shared::cluster{SIGNALLING}.b32 [%r2], 7, [%r3];",
    "red.async": f"red.async.relaxed.cluster.shared::cluster{SIGNALLING}.add.u32 [%r2], 7, [%r3];",
    "a bulk copy": f"cp.async.bulk.shared::cluster.shared::cta{SIGNALLING} [%r2], [%r6], 16, [%r3];",
    "a bulk reduction": f"cp.reduce.async.bulk.shared::cluster.shared::cta{SIGNALLING}.add.u32 [%r2], [%r6], 16, "
    "[%r3];",
    "a multicast": f"cp.async.bulk.shared::cluster.global{SIGNALLING}.multicast::cluster [buf], [%x], 16, [mbar], %h1;",
    "a response": f"clusterlaunchcontrol.try_cancel.async.shared::cta{SIGNALLING}.multicast::cluster::all.b128 [buf], "
    "[mbar];",
    "the tensor core": "tcgen05.cp.cta_group::2.128x256b [%r0], %rd1;",
}
WORDS = {name: np.zeros(4, np.uint32) for name in ("x", "flag")}


def early(use: str, know: str = "", leave: str = MEET, block: int = 32) -> Kernel:
    """Thread 0 of CTA 0 does `use` to the memory of CTA 1. `know`: what all threads do before; `leave`: at the end."""
    body = EARLY.replace("KNOW", know).replace("USE", use).replace("LEAVE", leave)
    return Kernel(body, WORDS, inputs=("x",), grid=(2, 1, 1), cluster=(2, 1, 1), block=(block, 1, 1))


def all_found(kernel: Kernel, schedule: str) -> list[Fault]:
    """The findings of a run, also if the last one ends it."""
    machine = Machine(schedule)
    machine.findings = Findings()
    with suppress(Fault):
        kernel.launch(machine)
    return list(machine.findings.by_site.values())


def flagged(store: str, load: str) -> str:
    """CTA 1 sets a flag in global memory, and CTA 0 polls it."""
    return f"""@%p1 {store} @%p1 bra TOLD; POLL: {load} setp.eq.u32 %p3, %r8, 0; @%p3 bra POLL;
TOLD:"""


POLLS = {
    "a release and an acquire": ("st.release.gpu.global.u32 [%flag], 1;", "ld.acquire.gpu.global.u32 %r8, [%flag];"),
    "relaxed": ("st.relaxed.gpu.global.u32 [%flag], 1;", "ld.relaxed.gpu.global.u32 %r8, [%flag];"),
    "volatile": ("st.volatile.global.u32 [%flag], 1;", "ld.volatile.global.u32 %r8, [%flag];"),
    "an atomic": ("red.global.add.u32 [%flag], 1;", "ld.acquire.gpu.global.u32 %r8, [%flag];"),
    "the scope of the cluster": (
        "st.relaxed.cluster.global.u32 [%flag], 1;", "ld.relaxed.cluster.global.u32 %r8, [%flag];"
    ),
}  # fmt: skip
KNOWN = {
    "a barrier": (MEET, 32),
    "a relaxed barrier": (MEET_RELAXED, 32),
    **{f"a flag, {name}": (flagged(*poll), 32) for name, poll in POLLS.items()},
    "a flag that another warp polled": (
        f"setp.lt.u32 %p4, %tx, 32; @%p4 bra MET; {flagged(*POLLS['relaxed'])} MET: bar.sync 0;", 64
    ),
    "an allocation of both": (
        """tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [got], 32; ld.shared.u32 %r9, [got];
        tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r9, 32;""", 32
    ),
}  # fmt: skip
"""What tells CTA 0 that CTA 1 has started, and the size of the CTAs."""


@pytest.mark.parametrize("name", EARLY_USES)
def test_an_access_before_the_other_cta_is_known_to_have_started(name: str) -> None:
    """In either order; an arrival of one's own is not enough, a barrier is."""
    for schedule in ("eager", "late_cta:0", "late_cta:1"):
        for know, leave in (("", MEET), ("barrier.cluster.arrive;", f"barrier.cluster.wait; {MEET}")):
            found = all_found(early(EARLY_USES[name], know, leave), schedule)
            told = [str(one) for one in found if one.rule == "peer-not-started"]
            assert told, f"{schedule}, {name} after {know!r}: found {list(map(str, found))}"
            assert "of CTA rank 1, and nothing orders" in told[0], f"{schedule}, {name}: {told[0]}"
        found = all_found(early(EARLY_USES[name], MEET), schedule)
        assert "peer-not-started" not in slugs(found), f"{schedule}, {name}: blamed after a barrier of the cluster"


@pytest.mark.parametrize("name", KNOWN)
def test_whatever_tells_of_the_other_cta_tells_that_it_has_started(name: str) -> None:
    know, block = KNOWN[name]
    for schedule in SCHEDULES:
        found, _ = collected(early(EARLY_USES["a reduction"], know, block=block), schedule)
        assert not found, f"{schedule}, {name}: {list(map(str, found))}"


def test_who_has_been_told_by_an_access_knows_too() -> None:
    """CTA 0 knows of CTA 1 by a flag and adds to a word of it; CTA 1 polls that word, and may add to one of CTA 0."""
    poll = """ld.relaxed.cluster.shared::cta.u32 %r8, [said]; setp.eq.u32 %p4, %r8, 0; @%p4 bra WAIT;"""
    for waits in (poll, ""):
        back = f"@!%p1 bra TELL; WAIT: {waits} red.relaxed.cluster.shared::cluster.add.u32 [%r5], 1; TELL:"
        for schedule in SCHEDULES:
            found, _ = collected(early(EARLY_USES["a reduction"], f"{flagged(*POLLS['relaxed'])} {back}"), schedule)
            told = "peer-not-started" in slugs(found) if not waits else not found
            assert told, f"{schedule}, {'with' if waits else 'without'} the wait: {list(map(str, found))}"
