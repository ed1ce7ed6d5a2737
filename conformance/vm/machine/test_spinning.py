"""Planted faults of warps that spin for ever, and correct kernels that spin for long."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest

from backends.vm.faults import Fault
from backends.vm.rules import RULES
from conformance.vm.kernel import SYNC, Kernel, assert_clean, init, wait

OUT = np.zeros(64, np.uint32)
ONE = ".shared .align 8 .b64 mbar; .shared .align 8 .b64 second; setp.eq.u32 %p1, %tx, 0;\n"
INIT = "@%p1 mbarrier.init.shared::cta.b64 [mbar], 1;"
SCHEDULES = ("eager", "lazy", "late_warp:0", "random:0")
SHORT_TURN = 8


def shorten_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps are looked at after so many turns, so the looks are the same and come sooner if a turn has fewer blocks."""
    monkeypatch.setattr("backends.vm.machine.scheduler.LONG_TURN", SHORT_TURN)


@pytest.fixture
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_turns(monkeypatch)


ENDLESS = {
    "a loop that counts": "mov.u32 %r1, 0;\nLOOP: add.u32 %r1, %r1, 1; red.global.add.u32 [%out], 1; bra LOOP;",
    "a loop that counts in a register up to a bound": "mov.u32 %r1, 0;\nLOOP: add.u32 %r1, %r1, 1; "
    "setp.ne.u32 %p1, %r1, 0x40000000; @%p1 bra LOOP; ret;",
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
    "a flag that nobody sets": (POLL, "`ld.relaxed.gpu.global.u32 %r1, [%out];`", "%r1 = 0, byte 0 of `out`)"),
    "a word behind an address": (
        "add.u64 %rd1, %out, 96;\n" + POLL.replace("[%out]", "[%rd1+-88]"),
        "%r1 = 0, byte 8 of `out`)",
    ),
    "a flag in shared memory": (
        ".shared .align 4 .b32 flag; mov.u32 %r5, flag; st.shared.u32 [%r5], 0; bar.sync 0;\n"
        + POLL.replace("global", "shared").replace("gpu", "cta").replace("[%out]", "[%r5]"),
        "%r1 = 0, %r5 = 0x400)",
    ),
    "an address that is loaded over": (
        "mov.u64 %rd1, %out; st.global.u64 [%out], %out; bar.sync 0;\nLOOP: ld.relaxed.gpu.global.u64 %rd1, [%rd1];\n"
        "bra LOOP;",
        "%rd1 = 0x7f4000000000)",
    ),
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
        "warp 0 and 1 more spin at PTX lines",
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
barrier.cluster.arrive; barrier.cluster.wait; @%p6 bra SETTER;
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
def test_warps_that_tell_each_other_that_nothing_has_happened(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their barriers change, and change back. If another warp sets the flag in the end, they end."""
    if schedule != "eager":  # which has the turns of a real launch
        shorten_turns(monkeypatch)
    with pytest.raises(Fault) as found:
        TOLD_THROUGH[name]("").run(schedule)
    assert found.value.rule == "deadlock", f"{schedule}: {found.value}"
    assert re.search(r"spins? at PTX lines", str(found.value)), f"{schedule}: {found.value}"
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


@pytest.mark.usefixtures("_short_turns")
def test_who_can_tell_the_order_of_others_is_found_only_in_a_given_order() -> None:
    """Under a random schedule, mbarrier.test_wait may come out otherwise from the same state."""
    asking = Kernel(TOLD.replace("try_wait", "test_wait").replace("SET ", ""), {"out": OUT}, block=(96, 1, 1))
    for schedule, rule in (("eager", "deadlock"), ("late_warp:1", "deadlock"), ("random:0", "runaway")):
        with pytest.raises(Fault) as found:
            replace(asking, step_budget=20_000).run(schedule)
        assert found.value.rule == rule, f"{schedule}: {found.value}"


@pytest.mark.usefixtures("_short_turns")
@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_kernel_that_changes_something_ends_with_its_budget(name: str) -> None:
    kernel = Kernel(ENDLESS[name], {"out": OUT}, step_budget=1_000)
    for schedule in ("eager", "lazy", "random:0"):
        with pytest.raises(Fault, match=r"\[runaway\].*1000 basic blocks.*warp 0 is at PTX line \d+"):
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
        shorten_turns(monkeypatch)  # eager had those of a real launch
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


UNTIL = "ld.relaxed.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p1, %r1, 0; @%p1 bra LOOP;"
ALONE = "mov.u32 %r2, 0; setp.ne.u32 %p2, %lane, 0; @%p2 ret;"
CELL = f".shared .align 4 .b32 got; {ALONE} st.volatile.shared.u32 [got], 1;"


def round_(each: str, before: str = "mov.u32 %r2, 0;", until: str = UNTIL) -> str:
    """A loop that does `each` until somebody sets the flag, and then stores what it has counted."""
    return f"{before}\nLOOP: {each}\n{until}\nred.global.max.u32 [%out+128], %r2; ret;"


IDLE = {
    "it counts": round_("add.u32 %r2, %r2, 1;"),
    "it counts in 64 bits": round_("add.cc.u32 %r2, %r2, 1; addc.u32 %r3, %r3, 0;", "mov.u32 %r2, 0; mov.u32 %r3, 0;"),
    "it counts in floats": round_(
        "add.f32 %f1, %f1, 0f3F800000; cvt.rzi.u32.f32 %r2, %f1;", "mov.f32 %f1, 0f00000000; mov.u32 %r2, 0;"
    ),
    "it counts under a guard": round_("setp.eq.u32 %p3, %lane, 3; @%p3 add.u32 %r2, %r2, 1;"),
    "it sleeps longer and longer": round_("nanosleep.u32 %r2; add.u32 %r2, %r2, 8;"),
    "it backs off up to a limit": round_(
        "nanosleep.u32 %r2; setp.ge.u32 %p3, %r2, 4096; @%p3 bra FULL; shl.b32 %r2, %r2, 1; FULL:", "mov.u32 %r2, 1;"
    ),
    "it looks at a clock": round_("mov.u32 %r2, %clock;"),
    "it stores zeros over zeros": round_("st.global.u32 [%out+4], 0;"),
    "it stores zeros over zeros, volatile": round_("st.volatile.global.u32 [%out+4], 0; add.u32 %r2, %r2, 1;"),
    "it stores the same to shared memory": round_("st.shared.u32 [got], 3;", ".shared .b32 got; mov.u32 %r2, 0;"),
    "it stores the same to shared memory, volatile": round_("st.volatile.shared.u32 [got], 1;", CELL),
    "it stores the same to local memory": round_("st.local.u32 [here], 3;", ".local .b32 here; mov.u32 %r2, 0;"),
    "it adds nothing": round_("", ALONE, UNTIL.replace("ld.relaxed.gpu.global.u32 %r1, [%out]",
                                                        "atom.global.add.u32 %r1, [%out], 0")),
    "it sets no bit": round_("red.shared.or.b32 [got], 0;", CELL),
    "its maximum is there": round_("red.global.max.u32 [%out+4], 0;", ALONE),
    "its lock is taken": round_(
        "add.u32 %r2, %r2, 1;", CELL + "mov.u32 %r2, 0;",
        "atom.acquire.cta.shared.cas.b32 %r1, [got], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra LOOP;"
    ),
    "its lock is taken, and it exchanges": round_(
        "", ALONE + "atom.global.exch.b32 %r1, [%out], 1; mov.u32 %r2, 0;",
        "atom.acquire.gpu.global.exch.b32 %r1, [%out], 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra LOOP;"
    ),
}  # fmt: skip
"""By what a warp does in each round: it changes no memory, and nobody sets the flag."""


def assert_found(kernel: Kernel, schedules: tuple[str, ...], blocks: int, *clauses: str) -> None:
    """Each schedule finds a deadlock within `blocks` blocks and some seconds of this process."""
    for schedule in schedules:
        began = time.process_time()
        with pytest.raises(Fault) as found:
            replace(kernel, step_budget=blocks).run(schedule)
        said, took = str(found.value), time.process_time() - began
        assert found.value.rule == "deadlock", f"{schedule}: {said}"
        missing = [clause for clause in ("nothing changes any more", *clauses) if clause not in said]
        assert not missing, f"{schedule}: {missing} not in: {said}"
        assert took < 20, f"{schedule}: found after {took:.0f} seconds of CPU; some seconds would be right"


@pytest.mark.parametrize("name", IDLE)
def test_a_warp_that_changes_nothing_but_its_counters(name: str) -> None:
    schedule = ("eager", "random:0")[list(IDLE).index(name) % 2]
    assert_found(Kernel(IDLE[name], {"out": OUT}), (schedule,), 20_000, "spins at PTX line")


OWN = f"""mov.u32 %r2, 0; setp.eq.u32 %p2, %warp, 1; @%p2 bra ONE; setp.eq.u32 %p2, %warp, 2; @%p2 bra TWO;
LOOP: {UNTIL} ret;
ONE: add.u32 %r2, %r2, 1; bra ONEB; ONEB: bra ONEC; ONEC: {UNTIL.replace("LOOP", "ONE")} ret;
TWO: add.u32 %r2, %r2, 3; bra T1; T1: bra T2; T2: bra T3; T3: bra T4; T4: {UNTIL.replace("LOOP", "TWO")} ret;"""
BEHIND_BARRIERS = f""".shared .align 4 .b32 got; mov.u32 %r3, 0; setp.eq.u32 %p2, %tx, 0;
LOOP: {SYNC} @%p2 ld.acquire.gpu.global.u32 %r1, [%out]; @%p2 st.shared.u32 [got], %r1;
@%p2 st.global.u32 [%out+4], 0; add.u32 %r3, %r3, 1;
{SYNC} ld.shared.u32 %r2, [got]; setp.eq.u32 %p1, %r2, 0; @%p1 bra LOOP; ret;"""
ACROSS = """.shared .align 4 .b32 got; st.volatile.shared.u32 [got], 0; mov.u32 %r5, got;
mapa.shared::cluster.u32 %r5, %r5, 1; mov.u32 %r2, 0; barrier.cluster.arrive; barrier.cluster.wait;
LOOP: add.u32 %r2, %r2, 1; ld.acquire.cluster.shared::cluster.u32 %r1, [%r5]; setp.eq.u32 %p1, %r1, 0; @%p1 bra LOOP;
barrier.cluster.arrive; barrier.cluster.wait; ret;"""
TOGETHER_IDLE = {
    "warps with loops of their own": (Kernel(OWN, {"out": OUT}, block=(96, 1, 1)), SCHEDULES),
    "a CTA with barriers": (Kernel(BEHIND_BARRIERS, {"out": OUT}, block=(64, 1, 1)), SCHEDULES),
    "CTAs with barriers": (
        Kernel(BEHIND_BARRIERS, {"out": OUT}, grid=(6, 1, 1), block=(64, 1, 1)), ("eager", "random:0")
    ),
    "clusters": (Kernel(ACROSS, grid=(4, 1, 1), cluster=(2, 1, 1)), ("eager",)),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER_IDLE)
def test_warps_that_count_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They spin in several warps, CTAs and clusters, each at its own pace; some CTAs begin only when all others
    spin."""
    kernel, (first, *others) = TOGETHER_IDLE[name]
    assert_found(kernel, (first,), 200_000, " spin")
    shorten_turns(monkeypatch)  # the first schedule had those of a real launch
    assert_found(kernel, tuple(others), 200_000, " spin")


def test_a_grid_that_fills_a_gpu_and_counts() -> None:
    """The last CTAs begin when there are many warps."""
    body = round_("add.u32 %r2, %r2, 1;", f"{ALONE} mov.u32 %r2, 0;")
    assert_found(Kernel(body, {"out": OUT}, grid=(24, 1, 1)), ("eager", "random:0"), 100_000, "warp 0 and 23 more")


LATER = """mov.u32 %r9, 0; COUNT: add.u32 %r9, %r9, 1; setp.lt.u32 %p7, %r9, BLOCKS; @%p7 bra COUNT;
st.release.gpu.global.u32 [%out], 1; ret;"""
"""Sets the flag after some blocks in which nothing changes but a register that decides."""
LONG = {"eager": 4000, "lazy": 4000, "late_warp:1": 300, "random:0": 1000}
"""By schedule: such blocks, more than it takes to find that the others spin."""


def ended_under(name: str) -> tuple[str, ...]:
    """Schedules of LONG for a loop of IDLE. In order a spin is found late, so only the loop that counts runs so."""
    others = ("late_warp:1", "random:0")
    return ("eager", *others) if name == "it counts" else (others[list(IDLE).index(name) % len(others)],)


def with_setter(body: str) -> str:
    """Warp 1 sets the flag in the end."""
    return f"setp.eq.u32 %p9, %warp, 1; @%p9 bra SETTER;\n{body}\nSETTER: {LATER}"


COUNTERS_THAT_DECIDE = {
    "a branch, through a carry": """mov.u32 %r2, 0; mov.u32 %r3, 0;
    LOOP: add.cc.u32 %r2, %r2, 0x100000; addc.u32 %r3, %r3, 0; setp.lt.u32 %p1, %r3, 2; @%p1 bra LOOP;""",
    "a branch, through floats and a selection": """mov.f32 %f1, 0f00000000;
    LOOP: add.f32 %f1, %f1, 0f3F800000; cvt.rzi.u32.f32 %r3, %f1; setp.lt.u32 %p1, %r3, 6000; selp.u32 %r4, 1, 0, %p1;
    setp.ne.u32 %p2, %r4, 0; @%p2 bra LOOP;""",
    "a branch, through another lane": """mov.u32 %r2, 0; LOOP: add.u32 %r2, %r2, 1;
    shfl.sync.idx.b32 %r3, %r2, 5, 31, 0xffffffff; setp.lt.u32 %p1, %r3, 6000; @%p1 bra LOOP;""",
    "a branch, through a vote": """mov.u32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 6000;
    vote.sync.any.pred %p1, %p2, 0xffffffff; @%p1 bra LOOP;""",
    "a branch, through shared memory": """.shared .align 4 .b32 n; setp.eq.u32 %p3, %lane, 0; @!%p3 bra OUT;
    st.shared.u32 [n], 0;
    LOOP: ld.shared.u32 %r2, [n]; add.u32 %r2, %r2, 1; st.shared.u32 [n], %r2; setp.lt.u32 %p1, %r2, 6000;
    mov.u32 %r2, 0; @%p1 bra LOOP; OUT:""",
    "a branch, through local memory": """.local .align 4 .b32 n; st.local.u32 [n], 0;
    LOOP: ld.local.u32 %r2, [n]; add.u32 %r2, %r2, 1; st.local.u32 [n], %r2; setp.lt.u32 %p1, %r2, 6000;
    mov.u32 %r2, 0; @%p1 bra LOOP;""",
    "a table of branches": """mov.u32 %r2, 0; TABLE: .branchtargets LOOP, OUT;
    LOOP: add.u32 %r2, %r2, 1; shr.u32 %r3, %r2, 12; brx.idx %r3, TABLE; OUT:""",
    "an address": """mov.u64 %rd1, %x; LOOP: ld.global.u32 %r1, [%rd1]; add.u64 %rd1, %rd1, 4; setp.eq.u32 %p1, %r1, 0;
    @%p1 bra LOOP;""",
    "a guard": """mov.u32 %r2, 0; mov.u32 %r3, 0; LOOP: add.u32 %r2, %r2, 1; setp.eq.u32 %p2, %r2, 6000;
    @%p2 st.volatile.global.u32 [%out+64], 1; ld.volatile.global.u32 %r1, [%out+64]; setp.eq.u32 %p1, %r1, 0;
    @%p1 bra LOOP;""",
    "a value that is stored": """mov.u32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; shr.u32 %r3, %r2, 12;
    st.volatile.global.u32 [%out+64], %r3; ld.volatile.global.u32 %r1, [%out+64]; setp.eq.u32 %p1, %r1, 0;
    @%p1 bra LOOP;""",
    "an operand of an atomic": """mov.u32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; shr.u32 %r3, %r2, 12;
    atom.global.max.u32 %r1, [%out+64], %r3; setp.eq.u32 %p1, %r1, 0; @%p1 bra LOOP;""",
}
"""By what the counter decides in the end."""


@pytest.mark.usefixtures("_short_turns")
@pytest.mark.parametrize("name", COUNTERS_THAT_DECIDE)
def test_a_counter_that_decides_in_the_end(name: str) -> None:
    body = f"setp.ne.u32 %p12, %warp, 0; @%p12 ret; {COUNTERS_THAT_DECIDE[name]}\nst.global.u32 [%out], 7; ret;"
    ramp = np.zeros(6000, np.uint32)
    ramp[-1] = 1
    kernel = Kernel(body, {"out": OUT, "x": ramp}, inputs=("x",), block=(64, 1, 1))
    for schedule in ("eager", "random:0"):
        assert kernel.run(schedule)[0]["out"][0] == 7, f"{schedule}: the loop does not end with its store"


@pytest.mark.usefixtures("_short_turns")
@pytest.mark.parametrize("name", IDLE)
def test_another_warp_ends_it(name: str) -> None:
    """The kernels above are right if a warp sets the flag, or gives the lock back once the other has asked for it."""
    body = with_setter(IDLE[name])
    if "its lock" in name:
        lock = "gpu.global.u32 [%out]" if "exchanges" in name else "cta.shared.u32 [got]"
        asked = "WAITING: ld.acquire.gpu.global.u32 %r8, [%out+8]; setp.eq.u32 %p8, %r8, 0; @%p8 bra WAITING;"
        body = body.replace("st.release.gpu.global.u32 [%out], 1;", f"st.release.{lock}, 0;")
        body = body.replace("SETTER:", f"SETTER: {asked}").replace(
            "LOOP:", "st.release.gpu.global.u32 [%out+8], 1; LOOP:"
        )
        body = ".shared .align 4 .b32 got;\n" + body.replace(".shared .align 4 .b32 got;", "")
    for schedule in ended_under(name):
        Kernel(body.replace("BLOCKS", str(LONG[schedule])), {"out": OUT}, block=(64, 1, 1)).run(schedule)


@pytest.mark.usefixtures("_short_turns")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("it counts", "eager"), ("it stores zeros over zeros", "lazy"), ("it sets no bit", "random:0")],
)
def test_a_later_cta_ends_it(name: str, schedule: str) -> None:
    """The last of four CTAs sets the flag, long after the others have begun to spin."""
    body = f"setp.eq.u32 %p9, %cta, 3; @%p9 bra SETTER;\n{IDLE[name]}\nSETTER: {LATER}"
    Kernel(body.replace("BLOCKS", str(LONG[schedule])), {"out": OUT}, grid=(4, 1, 1)).run(schedule)


def test_a_copy_ends_it() -> None:
    """A warp counts until a bulk copy has brought a flag, which only its mbarrier tells."""
    body = f"""{ONE}{INIT} .shared .align 16 .b8 cells[16]; mov.u32 %r3, cells; mov.u32 %r6, mbar;
    mov.u32 %r2, 0; {SYNC}
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 16;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%x], 16, [%r6];
    LOOP: add.u32 %r2, %r2, 1; st.volatile.global.u32 [%out], 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p4, [mbar], 0; @!%p4 bra LOOP;
    ld.shared.u32 %r1, [cells]; st.global.u32 [%out], %r1; ret;"""
    kernel = Kernel(body, {"out": OUT, "x": np.full(4, 9, np.uint32)}, inputs=("x",), step_budget=100_000)
    assert_clean(kernel, {"out": np.r_[9, OUT[1:]]}, SCHEDULES)


def test_a_clock_that_ends_what_recurs() -> None:
    """A warp polls until a clock says stop, and then counts for long: neither is for ever."""
    body = f"""mov.u64 %rd1, %clock64; mov.u32 %r2, 0;
    LOOP: mov.u64 %rd2, %clock64; sub.u64 %rd2, %rd2, %rd1; setp.gt.u64 %p2, %rd2, 9000; @%p2 bra STOP; {UNTIL}
    STOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 6000; @%p3 bra STOP; st.global.u32 [%out], 7; ret;"""
    assert_clean(Kernel(body, {"out": OUT}), {"out": np.r_[7, OUT[1:]]}, SCHEDULES)


def test_the_remedy_of_a_deadlock_is_about_each_kind_of_wait() -> None:
    """One text serves them all, so it may not be about mbarriers alone, nor send the reader to their page."""
    rule = RULES["deadlock"]
    assert rule.page == "docs/rules/README.md"
    for one in ("mbarrier", "barrier needs all its threads", "flag", "tensor memory"):
        assert one in rule.mend, rule.mend
