"""mbarriers: an H200's answers to a sequence of operations, and the laws of PTX ISA 9.7.13.15."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import SILICON
from conformance.vm.kernel import (
    EVERY_SCHEDULE,
    SYNC,
    Kernel,
    assert_blamed,
    assert_clean,
    collected,
    init,
    slugs,
    wait,
)

EXPECT = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [mbar], {};"
COMPLETE = "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [mbar], {};"
ARRIVE = "mbarrier.arrive.shared::cta.b64 %state, [mbar];"
INIT = "mbarrier.init.shared::cta.b64 [mbar], {};"
FILE = SILICON / "movement" / "warp_and_barrier.json"
MEASURED = [tuple(row.values()) for row in json.loads(FILE.read_text())["mbarrier"]]
"""Operation, test_wait.parity of 0 and of 1 afterwards, and the upper 21 bits of the returned state (phase, minus the
pending count) if there is one. An H200 accepts init after init; the ISA and this machine require mbarrier.inval
first."""
PROBE = """mbarrier.test_wait.parity.shared::cta.b64 %p1, [mbar], 0; selp.u64 %rd1, 1, 0, %p1;
st.global.u64 [%out+{0}], %rd1;
mbarrier.test_wait.parity.shared::cta.b64 %p1, [mbar], 1; selp.u64 %rd1, 1, 0, %p1;
st.global.u64 [%out+{1}], %rd1;
shr.u64 %rd1, %state, 43; st.global.u64 [%out+{2}], %rd1;"""


def test_an_h200s_answers() -> None:
    lines = [".reg .b64 %state; mov.u64 %state, 0; .shared .align 8 .b64 mbar;"]
    for number, (operation, *_) in enumerate(MEASURED):
        lines += [operation, PROBE.format(*(24 * number + 8 * column for column in range(3)))]
    kernel = Kernel("\n".join([*lines, "ret;"]), {"out": np.zeros((len(MEASURED), 3), np.uint64)}, block=(1, 1, 1))
    found = kernel.run()[0]["out"].tolist()
    for (operation, even, odd, state), row in zip(MEASURED, found, strict=True):
        assert row[:2] == [even, odd], f"{operation}: test_wait.parity answers {row[:2]}, an H200 [{even}, {odd}]"
        if state is not None:
            assert row[2] == state, f"{operation}: state {row[2]:#x}, an H200 {state:#x}"


def simulate(count: int, steps: list[tuple[str, int]]) -> list[int] | None:
    """Parity after each step by the rules of PTX ISA 9.7.13.15.5 and .6; None where the ISA leaves it undefined."""
    expected = pending = count
    outstanding = phase = 0
    parities: list[int] = []
    for what, amount in steps:
        if what == "complete":
            outstanding -= amount
        else:
            arrivals = amount if what == "arrive" else int(what != "expect")
            outstanding += amount if what in ("expect", "arrive_expect") else 0
            if arrivals > pending or (what == "drop" and expected == 1):
                return None
            pending -= arrivals
            expected -= what == "drop"
        if pending == 0 and outstanding == 0:
            phase, pending = phase ^ 1, expected
        parities.append(phase)
    return parities


SPELT = {
    "arrive": "mbarrier.arrive.shared::cta.b64 _, [mbar], {};",
    "drop": "mbarrier.arrive_drop.shared::cta.b64 _, [mbar];",
    "expect": EXPECT,
    "complete": COMPLETE,
    "arrive_expect": "mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], {};",
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(list(SPELT)), st.integers(1, 2)), min_size=1, max_size=10),
)
def test_phases_end_when_arrivals_and_bytes_do(count: int, steps: list[tuple[str, int]]) -> None:
    while (parities := simulate(count, steps)) is None:
        steps = steps[:-1]
    lines = [".shared .align 8 .b64 mbar;", INIT.format(count)]
    for number, (what, amount) in enumerate(steps):
        lines += [
            SPELT[what].format(amount),
            "mbarrier.test_wait.parity.shared::cta.b64 %p1, [mbar], 0;",
            f"selp.u32 %r1, 1, 0, %p1; st.global.u32 [%out+{4 * number}], %r1;",
        ]
    out = np.zeros(max(len(steps), 1), np.uint32)
    found = Kernel("\n".join([*lines, "ret;"]), {"out": out}, block=(1, 1, 1)).run()[0]["out"]
    assert found[: len(steps)].tolist() == parities, (
        f"count {count}, {steps}: parities {found.tolist()}, not {parities}"
    )


def test_waits_by_state_and_by_parity_agree() -> None:
    body = f""".shared .align 8 .b64 mbar; setp.eq.u32 %p1, %tx, 0;
    @%p1 mbarrier.init.shared::cta.b64 [mbar], 64;
    {SYNC}
    mbarrier.arrive.shared::cta.b64 %rd1, [mbar];
    STATE: mbarrier.try_wait.acquire.cta.shared::cta.b64 %p2, [mbar], %rd1; @!%p2 bra STATE;
    {wait("mbar", 0)}
    mbarrier.pending_count.b64 %r1, %rd1;
    mbarrier.test_wait.shared::cta.b64 %p3, [mbar], %rd1; selp.u32 %r2, 1, 0, %p3;
    @%p1 st.global.v2.u32 [%out], {{%r1, %r2}};
    ret;"""
    kernel = Kernel(body, {"out": np.zeros(2, np.uint32)}, block=(64, 1, 1))
    for schedule in EVERY_SCHEDULE:
        pending, passed = kernel.run(schedule)[0]["out"].tolist()
        assert passed == 1, f"{schedule}: the state of a completed phase is not passed"
        assert pending in (32, 64), f"{schedule}: pending count {pending} of 64 threads that arrive 32 at a time"


@pytest.mark.parametrize("noinc", ["", ".noinc"])
def test_an_arrival_waits_for_the_threads_cp_async(noinc: str) -> None:
    """Without .noinc the count is raised first, so the phase also waits for another thread's arrival."""
    body = f""".shared .align 8 .b64 mbar; .shared .align 16 .b8 buf[512];
    setp.eq.u32 %p1, %tx, 0; setp.ge.u32 %p3, %tx, 32;
    @%p1 mbarrier.init.shared::cta.b64 [mbar], {32 if noinc else 1};
    {SYNC}
    mov.u32 %r2, buf; shl.b32 %r1, %lane, 4; add.u32 %r1, %r1, %r2; mul.wide.u32 %rd1, %lane, 16;
    add.u64 %rd2, %rd1, %x;
    @%p3 bra WAITING;
    cp.async.cg.shared.global [%r1], [%rd2], 16;
    cp.async.mbarrier.arrive{noinc}.shared.b64 [mbar];
    {"" if noinc else "bar.warp.sync 0xffffffff; @%p1 mbarrier.arrive.shared::cta.b64 _, [mbar];"}
    WAITING: {wait("mbar", 0)}
    ld.shared.v4.u32 {{%r3, %r4, %r5, %r6}}, [%r1];
    add.u64 %rd1, %rd1, %out; @%p3 st.global.v4.u32 [%rd1], {{%r3, %r4, %r5, %r6}};
    ret;"""
    x = np.arange(128, dtype=np.uint32)
    assert_clean(Kernel(body, {"x": x, "out": np.zeros(128, np.uint32)}, block=(64, 1, 1), inputs=("x",)), {"out": x})


def test_lanes_that_initialise_an_mbarrier_with_unlike_counts() -> None:
    """Every lane may execute the same mbarrier.init. With different counts it is unknown which one stays."""
    declared = ".shared .align 8 .b64 mbar; add.u32 %r1, %lane, 1; mov.b32 %r2, 7;"
    init = "mbarrier.init.shared::cta.b64 [mbar], {};"
    assert_blamed(Kernel(f"{declared}\n{init.format('%r1')} //!\nret;"), "mbarrier-misuse", "counts 1, 2, 3, 4")
    assert_clean(Kernel(f"{declared}\n{init.format('%r2')}\nret;"), {})


def waited_once(again: str) -> Kernel:
    """All threads wait for their own arrivals, which a barrier orders too."""
    body = f""".shared .align 8 .b64 mbar; {init("mbar", count=64)}
    mbarrier.arrive.shared::cta.b64 _, [mbar]; bar.sync 0;
    AGAIN: mbarrier.test_wait.parity.shared::cta.b64 %p1, [mbar], 0; {again} ret;"""
    return Kernel(body, block=(64, 1, 1))


def test_a_wait_that_a_barrier_makes_needless_is_only_noted() -> None:
    """Nothing reads its result, and nothing relies on it."""
    found, _ = collected(waited_once(""))
    assert slugs(found) == ["wait-result-unread"], f"found {list(map(str, found))}"
