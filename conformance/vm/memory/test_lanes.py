"""What lanes of one warp must meet for: waits, acquires and copies of one lane, each with and without bar.warp.sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from conformance.vm.kernel import FENCE, Kernel, collected, init, slugs, wait

SCHEDULES = ("eager", "lazy", "late_cta:0", "late_warp:0", "random:1")
MEET = "bar.warp.sync 0xffffffff;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [mbar];"
OUT = {"out": np.zeros(32, np.uint32)}
X = {"x": np.arange(32, dtype=np.uint32), **OUT}
CELLS = f""".shared .align 16 .b8 cells[256]; .shared .align 8 .b64 mbar; .shared .align 4 .b32 flag;
setp.eq.u32 %p1, %tx, 0; @%p1 st.shared.u32 [flag], 0; {init("mbar")}
mov.u32 %r3, cells; mad.lo.u32 %r4, %lane, 4, %r3; setp.eq.u32 %p3, %lane, 0; mov.u32 %r6, mbar;
mul.wide.u32 %rd1, %lane, 4; add.u64 %rd2, %rd1, %x; add.u64 %rd1, %rd1, %out; setp.eq.u32 %p2, %warp, 1;
xor.b32 %r5, %lane, 4; mad.lo.u32 %r5, %r5, 4, %r3;"""
READ = "ld.shared.u32 %r1, [%r4]; st.global.u32 [%rd1], %r1; ret;"
LOAD = """mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%x], 128, [%r6];"""
STORE = """cp.async.bulk.global.shared::cta.bulk_group [%out], [%r3], 128; cp.async.bulk.commit_group;"""
STORED = f"st.shared.u32 [%r4], %lane; {FENCE} {MEET}"
POLL = "POLL: ld.acquire.cta.shared.u32 %r1, [flag]; setp.eq.u32 %p1, %r1, 0; @%p1 bra POLL;"
RAISE = "st.release.cta.shared.u32 [flag], 1;"
COPY = "cp.async.ca.shared.global [%r4], [%rd2], 4;"
FILLED = "st.shared.u32 [%r4], 5; bar.sync 0;"
READ_CELL = "ld.shared.u32 %r1, [%r4]; st.global.u32 [%rd1], %r1;"
LDMATRIX = """and.b32 %r2, %lane, 7; mad.lo.u32 %r2, %r2, 16, %r3;
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2]; st.global.u32 [%rd1], %r1;"""
OVERWRITE = f"{wait('mbar', 0)} st.shared.u32 [%r4], 9; ret;"
COPY_OVER = f"""{wait("mbar", 0)} @!%p3 bra END; {LOAD} {wait("mbar", 1)}
END: ret;"""


def one_warp(body: str) -> Kernel:
    """`body` behind the declarations, with an output and an input."""
    return Kernel(f"{CELLS}\n{body}", X, inputs=("x",))


def two_warps(body: str, other: str) -> Kernel:
    """`body` in warp 0 and `other` in warp 1."""
    return Kernel(f"{CELLS}\n@%p2 bra OTHER;\n{body}\nOTHER: {other}", X, block=(64, 1, 1), inputs=("x",))


def awaited_by_one(meet: str) -> Kernel:
    """Lane 0 waits for a bulk load; the other lanes go past the wait and read."""
    return one_warp(f"@!%p3 bra JOIN; {LOAD} {wait('mbar', 0)}\nJOIN: {meet} {READ}")


def overwritten_behind(meet: str) -> Kernel:
    """As above, but the other lanes overwrite what was loaded."""
    return one_warp(f"@!%p3 bra JOIN; {LOAD} {wait('mbar', 0)}\nJOIN: {meet} st.shared.u32 [%r4], 7; ret;")


def copied_over(meet: str) -> Kernel:
    """Lane 0 waits until a bulk load has ended, and lane 1 issues another one into the same place."""
    return one_warp(f"""@!%p3 bra JOIN; {LOAD} {wait("mbar", 0)}
JOIN: {meet} setp.eq.u32 %p1, %lane, 1; @!%p1 bra END; {LOAD}
{wait("mbar", 1)}
END: ret;""")


def stored_under(meet: str) -> Kernel:
    """Lane 0 waits until its bulk store has read; the other lanes go past the wait and write its source."""
    return one_warp(f"""{STORED} @!%p3 bra JOIN; {STORE} cp.async.bulk.wait_group.read 0;
JOIN: {meet} st.shared.u32 [%r4], 7; @%p3 cp.async.bulk.wait_group 0; ret;""")


def stored_under_by_all(meet: str) -> Kernel:
    """All lanes wait, but only lane 0 has a bulk store to wait for."""
    return one_warp(f"""{STORED} @!%p3 bra JOIN; {STORE}
JOIN: cp.async.bulk.wait_group 0; {meet} st.shared.u32 [%r4], 7; ret;""")


def read_back(meet: str) -> Kernel:
    """Lane 0 waits until its bulk store has written global memory, which the other lanes read."""
    return one_warp(f"""{STORED} @!%p3 bra JOIN; {STORE} cp.async.bulk.wait_group 0;
JOIN: {meet} ld.global.u32 %r1, [%rd1]; ret;""")


def copied_by_each(meet: str) -> Kernel:
    """Each lane waits for its own cp.async, and reads what another lane has copied."""
    return one_warp(f"{COPY} cp.async.wait_all; {meet} ld.shared.u32 %r1, [%r5]; st.global.u32 [%rd1], %r1; ret;")


def arrived_for_all(meet: str) -> Kernel:
    """Each lane copies its word and waits; one lane arrives for all. Warp 1 reads."""
    copied = f"{COPY} cp.async.commit_group; cp.async.wait_group 0; {meet} @%p3 {ARRIVE} ret;"
    return two_warps(copied, f"{wait('mbar', 0)} {READ}")


def acquired_by_one(meet: str) -> Kernel:
    """Warp 1 stores and arrives; lane 0 of warp 0 waits, and all its lanes read."""
    return two_warps(
        f"@!%p3 bra JOIN; {wait('mbar', 0)}\nJOIN: {meet} {READ}",
        f"st.shared.u32 [%r4], %lane; {MEET} @%p3 {ARRIVE} ret;",
    )


def polled_by_one(meet: str) -> Kernel:
    """As above, with a test_wait."""
    kernel = acquired_by_one(meet)
    return replace(kernel, body=kernel.body.replace("try_wait", "test_wait"))


def noticed_by_one(meet: str) -> Kernel:
    """As above, with a relaxed wait and a fence."""
    kernel = acquired_by_one(f"@%p3 fence.acq_rel.cta; {meet}")
    return replace(kernel, body=kernel.body.replace("try_wait.parity", "try_wait.parity.relaxed.cta"))


def flagged_to_one(meet: str) -> Kernel:
    """As above, through a flag in shared memory."""
    return two_warps(
        f"@!%p3 bra JOIN; {POLL}\nJOIN: {meet} {READ}", f"st.shared.u32 [%r4], %lane; {MEET} @%p3 {RAISE} ret;"
    )


def given_back_by_one(meet: str) -> Kernel:
    """All lanes of warp 0 read, lane 0 arrives, and warp 1 overwrites."""
    return two_warps(f"{FILLED} {READ_CELL} {meet} @%p3 {ARRIVE} ret;", f"bar.sync 0; {OVERWRITE}")


def given_back_by_flag(meet: str) -> Kernel:
    """As above, through a flag in shared memory."""
    body = f"{FILLED} {READ_CELL} {meet} @%p3 {RAISE} ret;"
    return two_warps(body, f"bar.sync 0; {POLL} st.shared.u32 [%r4], 9; ret;")


def given_back_to_a_copy(meet: str) -> Kernel:
    """As above, but a bulk copy overwrites."""
    return two_warps(f"{FILLED} {READ_CELL} {FENCE} {meet} @%p3 {ARRIVE} ret;", f"bar.sync 0; {COPY_OVER}")


def matrix_given_back_by_one(meet: str) -> Kernel:
    """All lanes of warp 0 read with ldmatrix, lane 0 arrives, and warp 1 overwrites."""
    return two_warps(f"{FILLED} {LDMATRIX} {meet} @%p3 {ARRIVE} ret;", f"bar.sync 0; {OVERWRITE}")


MULTIPLY = """mov.f32 %f0, 0f00000000;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r1, %r1, %r1, %r1}, {%r1, %r1},
{%f0, %f0, %f0, %f0};"""
"""A product of what has been read. Its lanes wait for each other, which orders no memory."""


def given_back_past_an_mma(meet: str) -> Kernel:
    """As given_back_by_one, with an mma.sync that uses what was read ahead of the arrival."""
    body = f"{FILLED} {READ_CELL} {MULTIPLY} {meet} @%p3 {ARRIVE} ret;"
    return two_warps(body, f"bar.sync 0; {OVERWRITE}")


def loaded_past_a_matrix(meet: str) -> Kernel:
    """Each lane reads what another one stored ahead of an ldmatrix of other cells."""
    matrix = LDMATRIX.replace("[%r2]", "[%r2 + 128]")
    filled = "st.shared.u32 [%r4 + 128], 5; bar.sync 0;"
    body = f"{filled} st.shared.u32 [%r4], %lane; {matrix} {meet} ld.shared.u32 %r1, [%r5];"
    return one_warp(f"{body} st.global.u32 [%rd1], %r1; ret;")


LANES: dict[str, Callable[[str], Kernel]] = {
    one.__name__: one
    for one in (
        awaited_by_one, overwritten_behind, copied_over, stored_under, stored_under_by_all, read_back, copied_by_each,
        arrived_for_all, acquired_by_one, polled_by_one, noticed_by_one, flagged_to_one, given_back_by_one,
        given_back_by_flag, given_back_to_a_copy, matrix_given_back_by_one, given_back_past_an_mma,
        loaded_past_a_matrix,
    )
}  # fmt: skip


def found(kernel: Kernel, schedule: str) -> list[str]:
    """The rules of the findings."""
    return sorted(set(slugs(collected(kernel, schedule)[0])))


@pytest.mark.parametrize("name", LANES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_that_have_not_met(name: str, schedule: str) -> None:
    assert not found(LANES[name](MEET), schedule), "the twin is blamed"
    assert found(LANES[name](""), schedule) == ["lanes-unordered"], "nothing is found"


EACH_WAITS = f"setp.lt.u32 %p1, %lane, 9; @%p1 bra LOW; {wait('mbar', 0)} bra JOIN;\nLOW: {wait('mbar', 0)}\nJOIN:"
EACH_ARRIVES = two_warps(f"{COPY} cp.async.wait_all; {ARRIVE} ret;", f"{wait('mbar', 0)} {READ}")
GIVEN_BACK = given_back_by_one("")
TWICE = [f"@!%p3 bra {name}; {told}\n{name}:" for name, told in (("ONCE", wait("mbar", 0)), ("AGAIN", POLL))]
ORDERED = {
    "lanes wait apart": two_warps(f"{EACH_WAITS} {READ}", f"st.shared.u32 [%r4], %lane; {MEET} @%p3 {ARRIVE} ret;"),
    "the waiting lane alone reads": two_warps(
        f"@!%p3 bra END; {wait('mbar', 0)} {READ} END: ret;", f"st.shared.u32 [%r4], %lane; {MEET} @%p3 {ARRIVE} ret;"
    ),
    "the other lanes read what they stored themselves": two_warps(
        f"""@!%p3 bra JOIN; {wait("mbar", 0)} st.shared.u32 [%r4], 1; {ARRIVE} {wait("mbar", 1)}
JOIN: st.shared.u32 [%r4], 5; {READ}""",
        f"@%p3 {ARRIVE} ret;",
    ),
    "the other lanes have learned it at a barrier": two_warps(
        f"@!%p3 bra JOIN; {wait('mbar', 0)}\nJOIN: bar.sync 0; {READ}",
        f"st.shared.u32 [%r4], %lane; {MEET} @%p3 {ARRIVE} bar.sync 0; ret;",
    ),
    "each lane reads what it has copied": one_warp(f"{COPY} cp.async.wait_all; {READ}"),
    "each lane arrives for what it has copied": replace(
        EACH_ARRIVES, body=EACH_ARRIVES.body.replace("[mbar], 1;", "[mbar], 32;")
    ),
    "each waits for its own copy while one lane knows more": two_warps(
        f"""{STORED} {STORE} add.u32 %r7, %r4, 128; {COPY.replace("%r4", "%r7")} {TWICE[0]} cp.async.wait_all;
        cp.async.bulk.wait_group 0; {TWICE[1]} st.shared.u32 [%r4], 7; st.global.u32 [%rd2], 7; ret;""",
        f"@%p3 {ARRIVE} @%p3 {RAISE} ret;",
    ),
    "each lane gives back what it has read": replace(
        GIVEN_BACK, body=GIVEN_BACK.body.replace("[mbar], 1;", "[mbar], 32;").replace(f"@%p3 {ARRIVE}", ARRIVE)
    ),
    "the lanes give back apart what they have read": replace(
        GIVEN_BACK,
        body=GIVEN_BACK.body.replace("[mbar], 1;", "[mbar], 32;").replace(
            f"@%p3 {ARRIVE}", f"@%p3 bra FIRST; {ARRIVE} ret;\nFIRST: {ARRIVE}"
        ),
    ),
    "the arriving lane alone has read": replace(
        GIVEN_BACK,
        body=GIVEN_BACK.body.replace("ld.shared.u32 %r1, [%r4]", "mov.u32 %r1, 0; @%p3 ld.shared.u32 %r1, [%r4]"),
    ),
    "the other lanes have read before the lanes met": replace(
        GIVEN_BACK, body=GIVEN_BACK.body.replace(READ_CELL, f"{READ_CELL} {MEET} @%p3 ld.shared.u32 %r1, [%r3];")
    ),
    "the other lanes read what is not overwritten": replace(
        GIVEN_BACK, body=GIVEN_BACK.body.replace("st.shared.u32 [%r4], 9", "st.shared.u32 [%r4 + 128], 9")
    ),
    "a store of all lanes": one_warp(f"{STORED} {STORE} cp.async.bulk.wait_group 0; st.shared.u32 [%r4], 7; ret;"),
}


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_that_need_not_meet(name: str, schedule: str) -> None:
    kernel = ORDERED[name]
    assert not found(replace(kernel, inputs=() if "[%rd2], 7" in kernel.body else ("x",)), schedule)
