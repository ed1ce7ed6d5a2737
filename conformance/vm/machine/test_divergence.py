"""Lanes that diverge and reconverge compute what one thread at a time would (PTX ISA 3.2, 9.5, 9.7.12)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.vm.faults import Fault
from backends.vm.machine.code import WIDTH_OF_TYPE, RegisterRows, give_registers_back, take_registers
from conformance.vm.kernel import EVERY_SCHEDULE, TWENTY, Kernel, assert_clean

STORE = "mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %out; st.global.u32 [%rd1], %r1;"
LANES = np.arange(64)


def kernel(body: str, block: int = 64) -> Kernel:
    return Kernel(f"mov.u32 %r1, 0;\n{body}\n{STORE}\nret;", {"out": np.full(64, 77, np.uint32)}, block=(block, 1, 1))


def triangle(lane: int) -> int:
    return sum(range(lane % 7 + 1))


def nested(lane: int) -> int:
    odd, low = lane & 1, lane & 2 == 0
    return 5 + (1 + (100 if low else 10) if odd else 20002 + (1000 if low else 0))


CASES = {
    "both sides of a branch": (
        "and.b32 %r2, %tx, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;"
        "mov.u32 %r1, 10; bra JOIN; EVEN: mov.u32 %r1, 20; JOIN:",
        np.where(LANES % 2 == 0, 20, 10),
    ),
    "nested branches": (
        """and.b32 %r2, %tx, 1; setp.eq.u32 %p1, %r2, 0; and.b32 %r3, %tx, 2; setp.eq.u32 %p2, %r3, 0;
        @%p1 bra A; add.u32 %r1, %r1, 1; @%p2 bra B; add.u32 %r1, %r1, 10; bra C;
        B: add.u32 %r1, %r1, 100; C: bra JOIN;
        A: add.u32 %r1, %r1, 2; @!%p2 bra D; add.u32 %r1, %r1, 1000;
        D: add.u32 %r1, %r1, 20000;
        JOIN: add.u32 %r1, %r1, 5;""",
        np.array([nested(lane) for lane in LANES.tolist()]),
    ),
    "loops with a trip count for each lane": (
        """rem.u32 %r2, %tx, 7; mov.u32 %r3, 0;
        LOOP: add.u32 %r1, %r1, %r3; add.u32 %r3, %r3, 1; setp.le.u32 %p1, %r3, %r2; @%p1 bra LOOP;""",
        np.array([triangle(lane) for lane in LANES.tolist()]),
    ),
    "loops in loops": (
        """rem.u32 %r2, %tx, 5; mov.u32 %r3, 0;
        OUTER: mov.u32 %r4, 0;
        INNER: add.u32 %r1, %r1, 1; add.u32 %r4, %r4, 1; setp.le.u32 %p1, %r4, %r3; @%p1 bra INNER;
        add.u32 %r3, %r3, 1; setp.le.u32 %p2, %r3, %r2; @%p2 bra OUTER;""",
        np.array([sum(range(1, lane % 5 + 2)) for lane in LANES]),
    ),
    "a loop left in its middle": (
        """mov.u32 %r3, 0;
        LOOP: setp.eq.u32 %p1, %r3, %lane; @%p1 bra OUT; add.u32 %r1, %r1, 2; add.u32 %r3, %r3, 1;
        setp.lt.u32 %p2, %r3, 20; @%p2 bra LOOP; add.u32 %r1, %r1, 1000;
        OUT: shfl.sync.idx.b32 %r5, %r1, 3, 31, 0xffffffff; add.u32 %r1, %r1, %r5;""",
        np.array([(2 * lane if lane < 20 else 1040) + 6 for lane in LANES % 32]),
    ),
    "an early exit of some lanes, then a vote of the rest": (
        """setp.lt.u32 %p1, %lane, 9; @%p1 ret;
        vote.sync.ballot.b32 %r1, 1, 0xffffffff; bar.sync 0;""",
        np.where(LANES % 32 < 9, 77, 0xFFFFFE00),
    ),
    "an early exit of a whole warp before a barrier of all threads": (
        "mov.u32 %r1, 1; setp.eq.u32 %p1, %warp, 1; @%p1 ret; bar.sync 0; bar.sync 0;",
        np.where(LANES < 32, 1, 77),
    ),
    "halves of a warp that gather at different instructions": (
        """.shared .align 16 .b8 cells[256]; mov.u32 %r2, cells; mad.lo.u32 %r2, %tx, 4, %r2; st.shared.u32 [%r2], %tx;
        xor.b32 %r3, %r2, 64; setp.lt.u32 %p1, %lane, 16; @%p1 bra LOW;
        add.u32 %r1, %r1, 100; bar.warp.sync 0xffffffff; ld.shared.u32 %r5, [%r3]; bra JOIN;
        LOW: bar.warp.sync 0xffffffff; ld.shared.u32 %r5, [%r3];
        JOIN: mov.u32 %r1, %r5; bar.warp.sync 0xffffffff;""",
        LANES ^ 16,
    ),
    "named lanes gather one by one": (
        """mov.u32 %r3, 0;
        LOOP: add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %lane; @%p1 bra LOOP;
        bar.warp.sync 0xffffffff; vote.sync.ballot.b32 %r1, 1, 0xffffffff;""",
        np.full(64, 0xFFFFFFFF),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_lane_computes_what_a_thread_alone_would(name: str) -> None:
    body, expected = CASES[name]
    assert_clean(kernel(body), {"out": expected.astype(np.uint32)}, schedules=TWENTY)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "xor", "mul"]), st.integers(1, 9), st.integers(0, 63)), min_size=1, max_size=6
    ),
    exits=st.integers(0, 31),
)
def test_any_ladder_of_branches(steps: list[tuple[str, int, int]], exits: int) -> None:
    """Each step is taken by the lanes in its bit pattern; lane `exits` exits in the middle."""
    text, model = [], np.zeros(64, np.uint64)
    alive = np.ones(64, np.bool_)
    for number, (operation, value, pattern) in enumerate(steps):
        spelt = {"add": "add.u32", "xor": "xor.b32", "mul": "mad.lo.u32"}[operation]
        last = f"{value}, 1" if operation == "mul" else str(value)
        text.append(
            f"and.b32 %r2, %tx, {pattern}; setp.eq.u32 %p1, %r2, 0; @%p1 bra SKIP{number}; {spelt} %r1, %r1, {last};"
        )
        text.append(f"SKIP{number}:")
        taken = (LANES & pattern != 0) & alive
        stepped = {"add": model + value, "xor": model ^ np.uint64(value), "mul": model * value + 1}[operation]
        model = np.where(taken, stepped & 0xFFFFFFFF, model)
        if number == len(steps) // 2:
            text.append(f"setp.eq.u32 %p2, %lane, {exits}; @%p2 ret;")
            alive = exits != LANES % 32
    assert_clean(
        kernel("\n".join(text)), {"out": np.where(alive, model, 77).astype(np.uint32)}, schedules=EVERY_SCHEDULE
    )


FLAG = """.shared .align 4 .b32 flag; setp.eq.u32 %p1, %lane, 0; @%p1 st.shared.b32 [flag], 0; bar.warp.sync -1;
setp.lt.u32 %p2, %lane, 16; mul.wide.u32 %rd1, %lane, 4; add.u64 %rd1, %rd1, %out;"""
POLL = "SPIN: ld.relaxed.cta.shared.b32 %r1, [flag]; setp.lt.u32 %p3, %r1, {}; @%p3 bra SPIN;"
ADD = "atom.relaxed.cta.shared.add.u32 %r2, [flag], 1;"
FEW = ("eager", "lazy", "random:0")
INTRA_WARP = {
    "the lower half spins until the upper half has set a flag": (
        f"@!%p2 bra SET; {POLL.format(16)} bra JOIN; SET: {ADD} JOIN:",
        np.zeros(32),
    ),
    "each lane spins until the lane above has passed": (
        """sub.u32 %r3, 31, %lane; SPIN: ld.relaxed.cta.shared.b32 %r1, [flag]; setp.ne.u32 %p3, %r1, %r3;
        @%p3 bra SPIN; add.u32 %r2, %r1, 1; st.relaxed.cta.shared.b32 [flag], %r2;""",
        np.zeros(32),
    ),
    "a spin lock of every lane": (
        """SPIN: atom.acquire.cta.shared.cas.b32 %r1, [flag], 0, 1; setp.ne.u32 %p3, %r1, 0; @%p3 bra SPIN;
        ld.relaxed.gpu.global.b32 %r4, [%out]; add.u32 %r4, %r4, 1; bra INSIDE; INSIDE:
        st.relaxed.gpu.global.b32 [%out], %r4; st.release.cta.shared.b32 [flag], 0; bra DONE; DONE:""",
        np.array([32] + [0] * 31),
    ),
}


@pytest.mark.parametrize("name", INTRA_WARP)
def test_lanes_of_one_warp_wait_for_each_other(name: str) -> None:
    """Threads of a warp are concurrent (PTX ISA 3.2)."""
    body, expected = INTRA_WARP[name]
    kernel = Kernel(f"{FLAG}\n{body}\nret;", {"out": np.zeros(32, np.uint32)})
    assert_clean(kernel, {"out": expected.astype(np.uint32)}, schedules=FEW)


def test_lanes_that_poll_soon_let_others_go() -> None:
    """A lock that every lane takes needs no more than 4,000 blocks: the holder has its turn after a few polls."""
    body, expected = INTRA_WARP["a spin lock of every lane"]
    kernel = Kernel(f"{FLAG}\n{body}\nret;", {"out": np.zeros(32, np.uint32)}, step_budget=4_000)
    assert_clean(kernel, {"out": expected.astype(np.uint32)}, schedules=FEW)


@pytest.mark.parametrize("first", [1, 8, 31])
def test_lanes_come_back_to_a_meeting_at_which_others_wait(first: int) -> None:
    """Some come from code that stands behind it, in two groups, and find parked lanes. The warp goes on as one."""
    body = f"""setp.lt.u32 %p1, %lane, {first}; setp.lt.u32 %p2, %lane, 20; @!%p1 bra FAR;
    MEET: bar.warp.sync -1; shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1; bra STORE;
    FAR: mov.u32 %r1, 1; @%p2 bra MEET;
    mov.u32 %r1, 2; bra MEET;
    STORE:"""
    held = np.where(first > LANES % 32, 0, np.where(LANES % 32 < 20, 1, 2))
    assert_clean(kernel(body), {"out": held[LANES ^ 1].astype(np.uint32)}, schedules=EVERY_SCHEDULE)


def test_lanes_that_wait_for_what_no_lane_does() -> None:
    kernel = Kernel(f"{FLAG}\n@!%p2 ret; {POLL.format(1)} ret;", {"out": np.zeros(32, np.uint32)}, step_budget=60_000)
    for schedule in FEW:
        with pytest.raises(Fault, match=r"\[deadlock\].*warp 0 spins at PTX line \d+.*%r1 = 0"):
            kernel.run(schedule)


def test_a_long_computation_of_some_lanes_is_no_spin() -> None:
    """While one lane keeps issuing, the others wait to reconverge: the next instruction needs all of them."""
    body = """setp.ne.u32 %p1, %lane, 0; @%p1 bra MEET; mov.u32 %r1, 0;
    LOOP: st.global.b32 [%out], %r1; add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 6000; @%p2 bra LOOP;
    MEET: bar.sync 0; ret;"""
    expected = np.zeros(32, np.uint32)
    expected[0] = 5999
    assert_clean(Kernel(body, {"out": np.zeros(32, np.uint32)}), {"out": expected}, schedules=("eager", "lazy"))


ENDED = {
    "before a barrier": "bar.sync 0;",
    "before a barrier with a vote": "bar.red.popc.u32 %r2, 0, %p1;",
    "before a barrier in a loop": "LOOP: bar.sync 0; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 3; @%p2 bra LOOP;",
    "before an exchange": "shfl.sync.bfly.b32 %r2, %tx, 1, 31, -1;",
    "before a vote": "vote.sync.ballot.b32 %r2, %p1, -1;",
}


@pytest.mark.parametrize("leave", ["@%p1 bra END;", "@%p1 ret;", "@%p1 exit;"])
@pytest.mark.parametrize("name", ENDED)
def test_lanes_that_end_are_not_waited_for(name: str, leave: str) -> None:
    """A bounds check in front of a barrier: it waits for "all non-exited threads" (PTX ISA 9.7.13.1)."""
    body = f"""mov.u32 %r1, 0; mov.u32 %r3, 0; setp.ge.u32 %p1, %tx, 48; {leave}
    mov.u32 %r1, 1; {ENDED[name]} {STORE}
    END: ret;"""
    expected = np.where(LANES < 48, 1, 77).astype(np.uint32)
    kernel = Kernel(body, {"out": np.full(64, 77, np.uint32)}, block=(64, 1, 1))
    assert_clean(kernel, {"out": expected}, schedules=EVERY_SCHEDULE)


@pytest.mark.parametrize("meeting", ["bar.sync 0;", "bar.warp.sync -1; bar.sync 0;", "elect.sync _|%p3, -1;"])
def test_lanes_that_spin_for_long_are_waited_for(meeting: str) -> None:
    """Lane 0 of the second CTA polls a flag that the first CTA sets late. The others are long at the meeting."""
    body = f"""setp.ne.u32 %p1, %cta, 0; setp.ne.u32 %p2, %tx, 0; mov.u32 %r1, 0; @%p1 bra SECOND;
    LONG: add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 20000; @%p3 bra LONG;
    @!%p2 st.release.gpu.global.b32 [%out], 1; ret;
    SECOND: @%p2 bra MEET;
    POLL: ld.acquire.gpu.global.b32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra POLL;
    MEET: {meeting} ret;"""
    kernel = Kernel(body, {"out": np.zeros(1, np.uint32)}, grid=(2, 1, 1), block=(64, 1, 1))
    assert_clean(kernel, {"out": np.ones(1, np.uint32)}, schedules=("eager", "lazy", "late_cta:0"))


def test_lanes_that_never_come_are_told_with_what_they_wait_for() -> None:
    """The wait is the defect, not the barrier at which the other lanes of its warp stand."""
    body = """.shared .align 8 .b64 mbar; setp.eq.u32 %p1, %tx, 0; setp.ne.u32 %p2, %tx, 32;
    @%p1 mbarrier.init.shared::cta.b64 [mbar], 1; bar.sync 0; @%p2 bra MEET;
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [mbar], 0; @!%p3 bra WAIT;
    MEET: bar.sync 0; ret;"""
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Fault) as caught:
            Kernel(body, {"out": np.zeros(1, np.uint32)}, block=(64, 1, 1)).run(schedule)
        assert caught.value.rule == "deadlock", f"under {schedule}: {caught.value}"
        for clause in ("for the phase of parity 0 of mbarrier", "for lanes [0] of its warp to come there"):
            assert clause in str(caught.value), f"under {schedule} it does not say `{clause}`: {caught.value}"


# Register files that are used by one warp after another.


TYPES = {"p": "pred", "h": "b16", "r": "b32", "l": "b64", "q": "b128"}


def test_a_file_that_comes_back_is_zero_and_keeps_its_literals() -> None:
    rows = RegisterRows.of(TYPES, {})
    literal = rows.literal(32, 0x1234_5678)
    (first,) = take_registers(rows, 1)
    for name, kind in TYPES.items():
        width, row = rows.rows[name]
        assert width == WIDTH_OF_TYPE[kind]
        first._storage[width][row] = 1
    give_registers_back(first)
    other = RegisterRows.of({"a": "b128"}, {})
    other.literal(32, 1)
    for file in take_registers(other, 2):
        give_registers_back(file)
    (again,) = take_registers(rows, 1)
    again.begin()
    assert again is first, "a file of a warp that has ended serves the next"
    for name in TYPES:
        width, row = rows.rows[name]
        assert not np.any(again._storage[width][row]), f"%{name} still holds what the last warp wrote"
    assert np.all(again._storage[32][literal] == 0x1234_5678), "a literal must outlive the warp"
    later = rows.literal(32, 7)
    give_registers_back(again)
    (wider,) = take_registers(rows, 1)
    wider.begin()
    assert np.all(wider._storage[32][later] == 7), "a file of fewer literals must not serve"
