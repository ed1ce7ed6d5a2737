"""Planted faults of synchronisation: mbarriers, named and cluster barriers, divergence, deadlocks."""

from __future__ import annotations

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
    "initialised with count 0": (f"mov.b32 %r1, 0;\n{INIT.replace('1;', '%r1; //!')}", "count 0", "1..1048575"),
    "initialised with count 2^20": (f"mov.b32 %r1, 1048576;\n{INIT.replace('1;', '%r1; //!')}", "count 1048576"),
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
    "number 16": ("mov.b32 %r1, 16;\nbar.sync %r1; //!", "barrier 16 does not exist; there are 0..15"),
    "a count that is no multiple of 32": ("mov.b32 %r1, 33;\nbar.sync 1, %r1; //!", "thread count of 33"),
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
    "the same with a relaxed flag": (
        ".shared .align 4 .b32 flag;\n@%p4 st.shared.b32 [flag], 0;\nbar.sync 0;\n@%p2 bar.arrive 1, 64;\n"
        "@%p3 bar.sync 1, 64;\n@%p5 st.relaxed.cta.shared.b32 [flag], 1;\n"
        "POLL: ld.relaxed.cta.shared.b32 %r4, [flag];\nsetp.eq.u32 %p6, %r4, 0;\n@%p6 bra POLL;\n"
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
        HALF + "@!%p1 bra JOIN;\nshfl.sync.idx.b32 %r1, %tx, 0, 31, 0xffffffff; //!\nJOIN: bar.sync 0;",
        "names lanes [16, 17",
    ),
    "shfl of all lanes in the other side of a branch": (
        HALF + "@%p1 bra JOIN;\nshfl.sync.bfly.b32 %r1, %tx, 1, 31, 0xffffffff; //!\nbra.uni JOIN;\nJOIN: bar.sync 0;",
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
        HALF + "@%p1 bra LOW;\nbra JOIN;\nLOW: bar.sync 0; //!\nJOIN: bar.sync 1;\nret;",
        "barrier 0",
        "wait at PTX line",
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
        "and 1 more wait at PTX line",
    ),
    "more bytes than expected": (
        f"{ONE}{INIT}\n{SYNC}\n@%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [mbar], 64;\n"
        f"@%p1 {ARRIVE.strip().removeprefix('@%p1 ')}\n{wait('mbar', 0)}\nret;",
        "0 of 1 arrivals missing, 64 bytes more than expected, last arrival",
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
    "a barrier of all threads at which one warp waits for something else": (
        f"""{ONE}{INIT}\n{SYNC}\nsetp.eq.u32 %p2, %warp, 0; @%p2 bra FIRST;
        {wait("mbar", 0)}
        FIRST: bar.sync 0;\nret;""",
        "barrier 0, where 32 of 64 threads have arrived",
        "mbarrier 0x400",
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
