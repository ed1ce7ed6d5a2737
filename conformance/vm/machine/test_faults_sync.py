"""Planted faults of synchronisation: mbarriers, named and cluster barriers, divergence, deadlocks, endless loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.vm.faults import Fault
from conformance.vm.kernel import EVERY_SCHEDULE, SYNC, Kernel, assert_blamed, assert_clean, fault_of, init, wait

OUT = np.zeros(64, np.uint32)
ONE = ".shared .align 8 .b64 mbar; .shared .align 8 .b64 second; setp.eq.u32 %p1, %tx, 0;\n"
INIT = "@%p1 mbarrier.init.shared::cta.b64 [mbar], 1;"
ARRIVE = "@%p1 mbarrier.arrive.shared::cta.b64 _, [mbar];"

MBARRIERS = {
    "used before its init": (f"{ARRIVE} //!", "no mbarrier has been initialised here", "live ones of this CTA: none"),
    "waited for before its init": (
        f"{INIT}\nmbarrier.test_wait.parity.shared::cta.b64 %p2, [second], 0; //!",
        "live ones of this CTA: 0x400",
    ),
    "initialised twice": (f"{INIT}\n{INIT.replace('1;', '2; //!')}", "an mbarrier already lies", "0x400"),
    "initialised with count 0": (INIT.replace("1;", "0; //!"), "count 0", "1..1048575"),
    "initialised with count 2^20": (INIT.replace("1;", "1048576; //!"), "count 1048576"),
    "arrived at too often": (
        "@%p1 mbarrier.init.shared::cta.b64 [mbar], 2;\n@%p1 mbarrier.arrive.shared::cta.b64 _, [mbar], 3; //!",
        "3 arrivals where phase 0",
        "expects only 2 more of 2",
    ),
    "arrived at while bytes are outstanding": (
        f"{INIT}\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 16;\n{ARRIVE} //!",
        "expects only 0 more of 1",
        "last arrival: CTA (0, 0, 0), warp 0 at PTX line",
    ),
    "arrived at by every lane": (
        f"{INIT}\nmbarrier.arrive.shared::cta.b64 _, [mbar]; //!",
        "32 arrivals",
        "1 more of 1",
    ),
    "used after its inval": (f"{INIT}\n@%p1 mbarrier.inval.shared::cta.b64 [mbar];\n{ARRIVE} //!", "initialised here"),
    "read by an ordinary load": (f"{INIT}\nld.shared.u64 %rd1, [mbar]; //!", "only mbarrier operations"),
    "written by an ordinary store": (f"{INIT}\n@%p1 st.shared.u32 [mbar+4], 0; //!", "only mbarrier operations"),
    "overwritten by an atomic": (f"{INIT}\n@%p1 red.shared.add.u32 [mbar], 1; //!", "only mbarrier operations"),
    "with too many bytes": (
        f"{INIT}\n@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [mbar], 0x100000; //!",
        "transaction count 1048576",
    ),
}


@pytest.mark.parametrize("name", MBARRIERS)
def test_an_mbarrier(name: str) -> None:
    body, *clauses = MBARRIERS[name]
    assert_blamed(Kernel(ONE + body + "\nret;"), "mbarrier-misuse", "warp 0", *clauses)


def test_an_mbarrier_askew() -> None:
    body = ONE + "mov.u32 %r1, mbar;\n@%p1 mbarrier.init.shared::cta.b64 [%r1+4], 1; //!"
    assert_blamed(Kernel(body), "misaligned", "mbarrier.init", "0x404", "multiple of 8")


def test_an_init_that_nothing_orders_before_its_use() -> None:
    """Warp 1 certainly arrives after warp 0 has initialised, but the memory model does not order the two."""
    body = f"""{ONE}{INIT}
    setp.eq.u32 %p2, %warp, 0; @%p2 st.relaxed.gpu.global.u32 [%out], 1;
    @%p2 bra END;
    SPIN: ld.relaxed.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra SPIN;
    setp.eq.u32 %p4, %lane, 0;
    @%p4 mbarrier.arrive.shared::cta.b64 _, [mbar]; //!
    END: ret;"""
    kernel = Kernel(body, {"out": OUT}, block=(64, 1, 1))
    assert_blamed(kernel, "mbarrier-misuse", "nothing orders this after the mbarrier.init by warp 0")


BARRIERS = {
    "number 16": ("bar.sync 16; //!", "barrier 16 does not exist; there are 0..15"),
    "a count that is no multiple of 32": ("bar.sync 1, 33; //!", "thread count of 33"),
    "two counts": (
        "setp.eq.u32 %p1, %warp, 0;\n@%p1 bar.arrive 1, 64;\n@!%p1 bar.sync 1, 96; //!",
        "96 threads here",
        "64",
    ),
    "more threads than it waits for": (
        "setp.lt.u32 %p1, %lane, 16; setp.eq.u32 %p2, %warp, 1; @%p2 ret;\n@%p1 barrier.arrive 4, 32;\n"
        "barrier.arrive 4, 32; //!",
        "48 threads arrive at barrier 4, which waits for 32",
    ),
    "the wait of a cluster barrier without an arrival": ("barrier.cluster.wait.aligned; //!", "has not arrived"),
    "two arrivals at the cluster barrier": (
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.arrive.aligned; //!",
        "has not waited since its last arrival",
    ),
    "bar.warp.sync by a lane that it does not name": (
        "bar.warp.sync 0x7fffffff; //!",
        "by lanes that it does not name",
        "lane 31",
    ),
}


@pytest.mark.parametrize("name", [name for name in BARRIERS if name != "two counts"])
def test_a_barrier(name: str) -> None:
    body, *clauses = BARRIERS[name]
    assert_blamed(Kernel(body + "\nret;", block=(64, 1, 1)), "barrier-misuse", *clauses)


def test_a_barrier_awaited_with_two_counts() -> None:
    kernel = Kernel(BARRIERS["two counts"][0].replace(" //!", ""), block=(64, 1, 1))
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(
            Fault, match=r"\[barrier-misuse\].*barrier 1 is awaited with (64|96) threads here and with (96|64)"
        ):
            kernel.run(schedule)


GROUPS = "shr.u32 %r1, %warp, 1; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %warp, 0; setp.eq.u32 %p3, %warp, 1;\n"
"""%p1: the first two warps; %p2: the first; %p3: the second."""
COUNT_ONE = "mbarrier.init.shared::cta.b64 [mbar], 1;"
RELAXED = "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [mbar];"
RELAXED_WAIT = """WAIT: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p7, [mbar], 0;
@!%p7 bra WAIT;"""
SHARED_BARRIERS = {
    "two pairs of warps": ("bar.sync 1, 64;", 128),
    "pairs of warps, one with a barrier of its own first": ("@%p1 bar.sync 2, 64;\nbar.sync 1, 64;", 128),
    "arrivals that wait for nothing": (
        "@%p2 bar.arrive 1, 64;\n@%p2 bar.arrive 1, 64;\n@%p3 bar.sync 1, 64;\n@%p3 bar.sync 1, 64;", 64,
    ),
    "an arrival that follows another barrier, which the waiting warp passes first": (
        "@%p2 bar.arrive 1, 64;\nbar.sync 0;\n@%p3 bar.sync 1, 64;\n@%p2 bar.arrive 1, 64;\n@%p3 bar.sync 1, 64;", 64,
    ),
    "an arrival after a relaxed arrival at an mbarrier, which the waiting warp makes too early": (
        f"@%p4 {COUNT_ONE}\nbar.sync 0;\n@%p2 bar.arrive 1, 64;\n@%p5 {RELAXED}\n@%p3 bar.sync 1, 64;\n"
        f"@%p3 bra END;\n{wait('mbar', 0)}\nbar.arrive 1, 64;\nbra END2;\nEND: bar.sync 1, 64;\nEND2:", 64,
    ),
}  # fmt: skip
ORDERED_BARRIERS = {
    "two pairs of warps, one after the other": (
        "@%p1 bar.sync 1, 64;\nbar.sync 0;\n@!%p1 bar.sync 1, 64;", 128,
    ),
    "two pairs of warps, with a relaxed barrier of the cluster in between": (
        "@%p1 bar.sync 1, 64;\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n"
        "@!%p1 bar.sync 1, 64;", 128,
    ),
    "one pair of warps, twice": ("bar.sync 1, 64;\nbar.sync 1, 64;", 64),
    "two pairs of warps with a barrier each": ("add.u32 %r2, %r1, 1;\nbar.sync %r2, 64;\nbar.sync %r2, 64;", 128),
    "warps that take turns": (
        "@%p2 bar.arrive 1, 64;\n"
        + 3 * "@%p3 bar.sync 1, 64;\n@%p3 bar.arrive 2, 64;\n@%p2 bar.sync 2, 64;\n@%p2 bar.arrive 1, 64;\n"
        + "@%p3 bar.sync 1, 64;", 64,
    ),
    "an arrival after an mbarrier at which the waiting warp has arrived": (
        f"{INIT.replace('%p1', '%p4')}\nbar.sync 0;\n@%p2 bar.arrive 1, 64;\n@%p3 bar.sync 1, 64;\n"
        f"{ARRIVE.replace('%p1', '%p5')}\n{wait('mbar', 0)}\n@%p2 bar.arrive 1, 64;\n@%p3 bar.sync 1, 64;", 64,
    ),
    "the same with a relaxed arrival": (
        f"@%p4 {COUNT_ONE}\nbar.sync 0;\n@%p2 bar.arrive 1, 64;\n@%p3 bar.sync 1, 64;\n"
        f"@%p5 {RELAXED}\n{wait('mbar', 0)}\n@%p2 bar.arrive 1, 64;\n@%p3 bar.sync 1, 64;", 64,
    ),
    "the same with a relaxed wait": (
        f"@%p4 {COUNT_ONE}\nbar.sync 0;\n@%p2 bar.arrive 1, 64;\n@%p3 bar.sync 1, 64;\n"
        f"@%p5 {RELAXED.replace('relaxed', 'release')}\n{RELAXED_WAIT}\n"
        "@%p2 bar.arrive 1, 64;\n@%p3 bar.sync 1, 64;", 64,
    ),
    "pairs of warps, the second after a barrier of its own that follows a relaxed arrival": (
        f"@%p4 {COUNT_ONE}\nbar.sync 0;\n@%p1 bar.sync 1, 64;\n@%p5 {RELAXED}\n"
        f"setp.eq.u32 %p6, %warp, 2;\n@!%p6 bra PASS;\n{wait('mbar', 0)}\nPASS:\n"
        "@!%p1 bar.sync 2, 64;\n@!%p1 bar.sync 1, 64;", 128,
    ),
}  # fmt: skip
MBAR = ".shared .align 8 .b64 mbar;\n"
THREADS = "setp.eq.u32 %p4, %tx, 0; setp.eq.u32 %p5, %tx, 32;\n"


@pytest.mark.parametrize("name", SHARED_BARRIERS)
def test_an_arrival_that_may_count_for_the_phase_before(name: str) -> None:
    body, threads = SHARED_BARRIERS[name]
    for schedule in EVERY_SCHEDULE:
        fault = fault_of(Kernel(MBAR + GROUPS + THREADS + body + "\nret;", block=(threads, 1, 1)), schedule)
        assert fault is not None, f"{schedule}: no fault was found"
        assert fault.rule == "barrier-phase-unordered", f"{schedule}: {fault}"
        assert "nothing orders this arrival at barrier 1 after" in str(fault), f"{schedule}: {fault}"


@pytest.mark.parametrize("name", ORDERED_BARRIERS)
def test_arrivals_that_follow_the_phase_before_are_fine(name: str) -> None:
    body, threads = ORDERED_BARRIERS[name]
    assert_clean(Kernel(MBAR + GROUPS + THREADS + body + "\nret;", block=(threads, 1, 1)), {})


ROUND_TRIP = """
@%p4 mbarrier.init.shared::cta.b64 [mbar], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p6, %r3, 0;
xor.b32 %r4, %r3, 1; mov.u32 %r5, mbar; mapa.shared::cluster.u32 %r5, %r5, %r4;
@%p6 bra WAIT;
@%p1 bar.sync 1, 64;
@%p5 mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r5];
@%p1 bra END;
WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p7, [mbar], 0;
@!%p7 bra WAIT;
@!%p6 bar.sync 1, 64;
@!%p6 bra END;
@%p4 mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r5];
END: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ret;"""


def test_arrivals_that_follow_by_way_of_another_cta_are_fine() -> None:
    """The arrivals of scope .cta order no memory between CTAs, and what waits for them comes later all the same."""
    kernel = Kernel(MBAR + GROUPS + THREADS + ROUND_TRIP, grid=(2, 1, 1), block=(128, 1, 1), cluster=(2, 1, 1))
    assert_clean(kernel, {})


HALF = "setp.lt.u32 %p1, %lane, 16;\n"
DIVERGED = {
    "bar.sync": (HALF + "@%p1 bar.sync 0; //!", "barrier 0", "lane 16"),
    "shfl": (HALF + "@%p1 shfl.sync.idx.b32 %r1, %tx, 0, 31, 0xffffffff; //!", "names lanes [16, 17"),
    "shfl from a lane that is not active": (
        HALF + "@%p1 shfl.sync.idx.b32 %r1, %tx, 20, 31, 0xffff; //!",
        "reads lane 20",
    ),
    "shfl of all lanes in one side of a branch": (
        HALF + "@!%p1 bra JOIN;\nshfl.sync.idx.b32 %r1, %tx, 0, 31, 0xffffffff; //!\nJOIN:",
        "names lanes [16, 17",
    ),
    "shfl of all lanes in the other side of a branch": (
        HALF + "@%p1 bra JOIN;\nshfl.sync.bfly.b32 %r1, %tx, 1, 31, 0xffffffff; //!\nbra.uni JOIN;\nJOIN:",
        "names lanes [0, 1,",
    ),
    "shfl of all lanes once on each side of a branch": (
        HALF + "@%p1 bra LOW;\nshfl.sync.idx.b32 %r1, %tx, 0, 31, 0xffffffff; //!\nbra.uni JOIN;\n"
        "LOW: shfl.sync.idx.b32 %r1, %tx, 0, 31, 0xffffffff;\nJOIN:",
        "names lanes [0, 1,",
    ),
    "vote": (HALF + "@%p1 vote.sync.ballot.b32 %r1, %p1, 0xffffffff; //!", "names lanes [16, 17"),
    "elect": (HALF + "@%p1 elect.sync _|%p2, 0xffffffff; //!", "names lanes [16, 17"),
    "setmaxnreg": (HALF + "@%p1 setmaxnreg.dec.sync.aligned.u32 40; //!", "setmaxnreg", "lane 16"),
    "in one side of a branch": (
        HALF + "@%p1 bra LOW;\nbra JOIN;\nLOW: bar.sync 0; //!\nJOIN: ret;",
        "barrier 0",
    ),
}


@pytest.mark.parametrize("name", DIVERGED)
def test_a_diverged_warp_at(name: str) -> None:
    body, *clauses = DIVERGED[name]
    assert_blamed(Kernel(body + "\nret;"), "diverged", "warp 0", *clauses)


DEADLOCKS = {
    "the wrong parity": (
        f"{ONE}{INIT}\n{SYNC}\n{wait('mbar', 0)}\nret;",
        "phase of parity 0 of mbarrier 0x400",
        "phase 0, 1 of 1 arrivals missing",
        "last arrival: nobody yet",
    ),
    "a missing arrival": (
        f"{ONE}@%p1 mbarrier.init.shared::cta.b64 [mbar], 2;\n{SYNC}\n{ARRIVE}\n{wait('mbar', 0)}\nret;",
        "1 of 2 arrivals missing",
        "last arrival: CTA (0, 0, 0), warp 0 at PTX line",
        "and 1 more waits at PTX line",
    ),
    "two warps that wait for each other": (
        f"""{ONE}{init("mbar", "second")}
        setp.eq.u32 %p2, %warp, 0; setp.eq.u32 %p3, %lane, 0;
        @%p2 bra FIRST;
        {wait("second", 0)}
        @%p3 mbarrier.arrive.shared::cta.b64 _, [mbar];
        ret;
        FIRST: {wait("mbar", 0)}
        @%p3 mbarrier.arrive.shared::cta.b64 _, [second];
        ret;""",
        "warp 0 waits at PTX line",
        "mbarrier 0x400",
        "warp 1 waits at PTX line",
        "mbarrier 0x408",
    ),
    "a named barrier that half of the threads pass by": (
        "setp.eq.u32 %p1, %warp, 1; @%p1 ret;\nbar.sync 1, 64;\nret;",
        "barrier 1, where 32 of 64 threads have arrived",
    ),
    "a cluster barrier that a warp waits for in vain": (
        f"""{ONE}{INIT}\n{SYNC}\nsetp.eq.u32 %p2, %warp, 0; @%p2 bra FIRST;
        {wait("mbar", 0)}
        FIRST: barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\nret;""",
        "the barrier of the cluster, where 32 of 64 threads have arrived",
        "mbarrier 0x400",
    ),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_report_says_who_waits_for_what(name: str) -> None:
    body, *clauses = DEADLOCKS[name]
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Fault) as caught:
            Kernel(body, block=(64, 1, 1)).run(schedule)
        said = str(caught.value)
        assert caught.value.rule == "deadlock", f"{schedule}: {said}"
        missing = [clause for clause in clauses if clause not in said]
        assert not missing, f"{schedule}: {missing} not in: {said}"


def test_trap() -> None:
    assert_blamed(Kernel("setp.gt.u32 %p1, %tx, 40;\n@%p1 trap; //!\nret;", block=(64, 1, 1)), "trap", "warp 1", "trap")
    missed = "setp.lt.u32 %p1, %tx, 16;\n@!%p1 bra STOP;\nbar.sync 0;\nret;\nSTOP: trap; //!"
    assert_blamed(Kernel(missed), "trap", "warp 0", "trap")


ENDLESS = {
    "a loop that counts": "mov.u32 %r1, 0;\nLOOP: add.u32 %r1, %r1, 1; red.global.add.u32 [%out], 1; bra LOOP;",
    "a loop that counts in a register": "mov.u32 %r1, 0;\nLOOP: add.u32 %r1, %r1, 1; bra LOOP;",
}
POLL = "LOOP: ld.relaxed.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p1, %r1, 0;\n@%p1 bra LOOP;"
TOGETHER = """.shared .align 4 .b32 got; setp.eq.u32 %p1, %tx, 0; mov.u32 %r1, 0;
LOOP: bar.sync 0;
@%p1 atom.acq_rel.gpu.global.cas.b32 %r1, [%out], 7, 1;
@%p1 st.shared.u32 [got], %r1;
bar.sync 0;
ld.shared.u32 %r2, [got]; setp.ne.u32 %p2, %r2, 7;
@%p2 bra LOOP;"""
"""One thread tries for a lock, and the whole CTA learns through shared memory whether it got it. 7 means free."""
SPINS = {
    "an empty loop": ("LOOP: bra LOOP;", "spins at PTX line"),
    "a flag that nobody sets": (POLL, "`ld.relaxed.gpu.global.u32 %r1, [%out];`", "%r1 = 0", "%out = 0x7f4000000000"),
    "a test_wait that is never true": (
        f"{ONE}{INIT}\nLOOP: mbarrier.test_wait.parity.shared::cta.b64 %p2, [mbar], 0;\n@!%p2 bra LOOP;",
        "`mbarrier.test_wait.parity.shared::cta.b64 %p2, [mbar], 0;`",
        "%p2 = 0",
    ),
    "a lock that nobody frees": (
        "LOOP: atom.global.cas.b32 %r1, [%out], 7, 1; setp.ne.u32 %p1, %r1, 7;\n@%p1 bra LOOP;",
        "%r1 = 0",
    ),
    "a lock that two warps wait for together": (
        TOGETHER,
        "warp 0 and 1 more spins at PTX lines",
        "cas.b32 %r1, [%out]",
    ),
    "a warp that spins and one that waits": (
        f"{ONE}{INIT}\n{SYNC}\nsetp.eq.u32 %p4, %warp, 1; @%p4 bra WAITING;\n{POLL}\nret;\n"
        f"WAITING: {wait('mbar', 0)}\nret;",
        "warp 0 spins at PTX lines",
        "warp 1 waits at PTX line",
    ),
    "a poll that looks at the clock": (
        "LOOP: mov.u64 %rd1, %clock64; sub.u64 %rd2, %rd1, 1; nanosleep.u32 20;\n"
        + POLL.replace("LOOP:", "POLL:")
        + "\nbra LOOP;",
        "%r1 = 0",
    ),
    "half of a warp": (
        "setp.lt.u32 %p2, %lane, 16; @%p2 bra END;\n" + POLL + "\nEND: bar.warp.sync 0xffffffff; ret;",
        "%r1 = 0",
    ),
}

TOLD = f""".shared .align 8 .b64 full; .shared .align 8 .b64 empty; .shared .align 4 .b32 got; {init("full")}
@%p13 mbarrier.init.shared::cta.b64 [empty], 32; bar.sync 0;
mov.u32 %r9, 0; setp.eq.u32 %p2, %warp, 1; setp.ne.u32 %p4, %lane, 0; setp.eq.u32 %p6, %warp, 2;
@%p2 bra TOLD; @%p4 ret; @%p6 bra SETTER;
POLL: xor.b32 %r8, %r9, 1; {wait("empty", "%r8")}
ld.acquire.gpu.global.u32 %r1, [%out]; st.shared.u32 [got], %r1; mbarrier.arrive.shared::cta.b64 _, [full];
xor.b32 %r9, %r9, 1; setp.eq.u32 %p5, %r1, 0; @%p5 bra POLL; ret;
TOLD: {wait("full", "%r9")} ld.shared.u32 %r2, [got]; mbarrier.arrive.shared::cta.b64 _, [empty];
xor.b32 %r9, %r9, 1; setp.eq.u32 %p6, %r2, 0; @%p6 bra TOLD; ret;
SETTER: SET ret;"""
"""Warp 0 polls a flag in global memory, and tells warp 1 what it has seen."""
IN_CLUSTER = """.shared .align 4 .b32 got; setp.eq.u32 %p1, %cta, 0; mov.u32 %r5, got;
mapa.shared::cluster.u32 %r5, %r5, 1; setp.ge.u32 %p6, %cta, 2; setp.eq.u32 %p2, %lane, 0; and.pred %p1, %p1, %p2;
@%p6 bra SETTER;
LOOP: @%p1 ld.acquire.gpu.global.u32 %r1, [%out]; @%p1 st.shared.u32 [got], %r1;
@%p1 st.shared::cluster.u32 [%r5], %r1;
barrier.cluster.arrive; barrier.cluster.wait;
ld.shared.u32 %r2, [got]; barrier.cluster.arrive; barrier.cluster.wait;
setp.eq.u32 %p3, %r2, 0; @%p3 bra LOOP; ret;
SETTER: setp.ne.u32 %p7, %cta, 2; @%p7 ret; SET ret;"""
"""CTA 0 does, and tells CTA 1. The next cluster, if there is one, sets the flag."""
SET = """mov.u32 %r9, 0; COUNT: add.u32 %r9, %r9, 1; setp.lt.u32 %p7, %r9, 3000; @%p7 bra COUNT;
st.release.gpu.global.u32 [%out], 1;"""
TOLD_THROUGH = {
    "mbarriers": lambda setter: Kernel(TOLD.replace("SET ", setter), {"out": OUT}, block=(96, 1, 1)),
    "a cluster": lambda setter: Kernel(IN_CLUSTER.replace("SET ", setter), {"out": OUT}, cluster=(2, 1, 1),
                                       grid=(4 if setter else 2, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:0", "late_cta:0", *(f"late_warp:{i}" for i in range(3))])
@pytest.mark.parametrize("name", TOLD_THROUGH)
def test_warps_that_tell_each_other_that_nothing_has_happened(name: str, schedule: str) -> None:
    """Their barriers change, and change back. If another warp sets the flag in the end, they end."""
    with pytest.raises(Fault) as found:
        TOLD_THROUGH[name]("").run(schedule)
    assert found.value.rule == "deadlock", f"{schedule}: {found.value}"
    assert "spins at PTX lines" in str(found.value), f"{schedule}: {found.value}"
    TOLD_THROUGH[name](SET).run(schedule)


def test_warps_that_ask_together_for_the_end_of_a_copy_get_it() -> None:
    """One thread asks, and tells all behind a barrier, so that there is something new in each round."""
    body = f"""{ONE}{INIT} .shared .align 16 .b8 cells[128]; .shared .align 4 .b32 got;
    mov.u32 %r3, cells; mov.u32 %r6, mbar;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 128;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%x], 128, [%r6];
    LOOP: bar.sync 0;
    @%p1 mbarrier.test_wait.parity.shared::cta.b64 %p4, [mbar], 0;
    @%p1 selp.u32 %r1, 1, 0, %p4; @%p1 st.shared.u32 [got], %r1;
    bar.sync 0; ld.shared.u32 %r2, [got]; setp.eq.u32 %p5, %r2, 0; @%p5 bra LOOP; ret;"""
    asking = Kernel(body, {"x": OUT}, block=(64, 1, 1), inputs=("x",), step_budget=100_000)
    for schedule in ("eager", "lazy", "late_warp:0", "random:0"):
        asking.run(schedule)


def test_who_can_tell_the_order_of_others_is_found_only_in_a_given_order() -> None:
    """Under a random schedule, mbarrier.test_wait may come out otherwise from the same state."""
    asking = Kernel(TOLD.replace("try_wait", "test_wait").replace("SET ", ""), {"out": OUT}, block=(96, 1, 1))
    for schedule, rule in (("eager", "deadlock"), ("late_warp:1", "deadlock"), ("random:0", "runaway")):
        with pytest.raises(Fault) as found:
            replace(asking, step_budget=60_000).run(schedule)
        assert found.value.rule == rule, f"{schedule}: {found.value}"


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_kernel_that_changes_something_ends_with_its_budget(name: str) -> None:
    kernel = Kernel(ENDLESS[name], {"out": OUT}, step_budget=3_000)
    for schedule in ("eager", "lazy", "random:0"):
        with pytest.raises(Fault, match=r"\[runaway\].*3000 basic blocks.*warp 0 is at PTX line \d+"):
            kernel.run(schedule)


@pytest.mark.parametrize("name", SPINS)
def test_a_spin_that_nothing_ends_is_found_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found after thousands of blocks, not by a budget of millions. The report names the warp, its PTX lines and the
    values it reads."""
    # A tenth of the default: the next test has a kernel wait for a clock for less than the patience of a real launch.
    monkeypatch.setattr("backends.vm.machine.spinning.CLOCK_PATIENCE", 20_000)
    body, *clauses = SPINS[name]
    kernel = Kernel(
        body, {"out": OUT}, block=(64 if "waits" in name or "two warps" in name else 32, 1, 1), step_budget=3_000_000
    )
    for schedule in ("eager",) if "clock" in name else ("eager", "lazy", "late_warp:0", "random:0"):
        with pytest.raises(Fault) as found:
            kernel.run(schedule)
        said = str(found.value)
        assert found.value.rule == "deadlock", f"{schedule}: {said}"
        missing = [clause for clause in ("nothing changes any more", *clauses) if clause not in said]
        assert not missing, f"{schedule}: {missing} not in: {said}"


def test_warps_that_go_round_together_and_get_somewhere_do_not_spin() -> None:
    """They count in shared memory or in a register, or another CTA opens the lock that they wait for."""
    in_shared = """.shared .align 4 .b32 got; setp.eq.u32 %p1, %tx, 0; @%p1 st.shared.u32 [got], 0;
LOOP: bar.sync 0;
@%p1 ld.shared.u32 %r1, [got]; @%p1 add.u32 %r1, %r1, 1; @%p1 st.shared.u32 [got], %r1; mov.u32 %r1, 0;
bar.sync 0;
ld.shared.u32 %r2, [got]; setp.lt.u32 %p2, %r2, 500;
@%p2 bra LOOP;"""
    in_register = "mov.u32 %r1, 0;\nLOOP: bar.sync 0; add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 500;\n@%p2 bra LOOP;"
    opened = (
        "setp.eq.u32 %p3, %cta, 0; @%p3 bra WAITING; setp.eq.u32 %p4, %tx, 0;\n"
        f"@%p4 atom.acq_rel.gpu.global.exch.b32 %r1, [%out], 7; ret;\nWAITING: {TOGETHER}"
    )
    for body, grid in ((in_shared, 1), (in_register, 1), (opened, 2)):
        for schedule in ("eager", "lazy", "late_warp:0", "random:0"):
            Kernel(body, {"out": OUT}, grid=(grid, 1, 1), block=(64, 1, 1)).run(schedule)


def test_a_long_computation_is_no_spin() -> None:
    """For tens of thousands of blocks no memory changes, but a register counts, or the kernel waits for a clock."""
    count = "mov.u32 %r1, 0;\nLOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 20000;\n@%p1 bra LOOP;"
    clock = (
        "mov.u64 %rd1, %clock64;\nLOOP: mov.u64 %rd2, %clock64; sub.u64 %rd2, %rd2, %rd1;\n"
        "setp.lt.u64 %p1, %rd2, 20000;\n@%p1 bra LOOP;"
    )
    for body in (count, clock):
        assert_clean(Kernel(f"{body}\nst.global.u32 [%out], 7; ret;", {"out": OUT}), {"out": np.append(7, OUT[1:])},
                     ("eager", "lazy", "late_warp:0", "random:0"))  # fmt: skip
