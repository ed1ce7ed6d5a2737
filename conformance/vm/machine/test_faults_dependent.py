"""Programmatic dependent launch: bytes that no launch may touch before griddepcontrol.wait, and the warps it covers."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.vm.kernel import Kernel, assert_blamed, assert_clean

PAIR = "mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %a, %rd1; add.u64 %rd3, %b, %rd1;\n"
FIRST = PAIR + "ld.global.b32 %r2, [%rd3]; st.global.b32 [%rd2], 7; griddepcontrol.launch_dependents; ret;"
"""Reads `b`, then writes `a`."""
WAIT = "griddepcontrol.wait;"
READ, WRITE, COUNT = "ld.global.b32 %r1, [%rd2];", "st.global.b32 [%rd3], 9;", "red.global.add.u32 [%rd2], 1;"
DEPENDENT = (("first", False), ("kernel", True))
THREADS = 64


def second(body: str, sequence: tuple[tuple[str, bool], ...] = DEPENDENT, middle: str = "ret;") -> Kernel:
    """`body` as the launch after FIRST, in one CTA of two warps; `c` is its own."""
    buffers = {name: np.zeros(THREADS, np.uint32) for name in "abc"}
    body = f"{PAIR}add.u64 %rd4, %c, %rd1;\n{body}\nret;"
    others = {"first": FIRST, "middle": PAIR + middle}
    return Kernel(body, buffers, block=(THREADS, 1, 1), others=others, sequence=sequence)


PLANTED = {
    "a read of what it wrote": (READ, " of `a` is read, but first, which wrote it at PTX line"),
    "an overwrite of what it wrote": ("st.global.b32 [%rd2], 9;", "`a` is overwritten, but first, which wrote it"),
    "an overwrite of what it read": (WRITE, "`b` is overwritten, but first, which read it"),
    "an addition to what it wrote": (COUNT, "`a` is overwritten, but first, which wrote it"),
    "a byte of what it wrote": ("ld.global.b8 %h1, [%rd2+3];", " of `a` is read"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_before_the_wait(name: str) -> None:
    early, sentence = PLANTED[name]
    assert_blamed(second(f"{early} //!\n{WAIT}"), "dependent-launch-not-awaited", sentence, "nothing orders")


@pytest.mark.parametrize("name", PLANTED)
def test_after_the_wait(name: str) -> None:
    assert_clean(second(f"{WAIT}\n{PLANTED[name][0]}"), {})


@pytest.mark.parametrize("name", PLANTED)
def test_a_launch_without_the_attribute_starts_after_everything(name: str) -> None:
    assert_clean(second(PLANTED[name][0], (("first", False), ("kernel", False))), {})


def test_what_the_launch_before_does_not_touch_is_free() -> None:
    """A launch may read what the one before only read, and write its own buffers, without a wait."""
    body = "ld.global.b32 %r1, [%rd3]; add.u32 %r1, %r1, 5; st.global.b32 [%rd4], %r1;"
    assert_clean(second(body), {"c": np.full(THREADS, 5, np.uint32)})


ONE_WAITS = "setp.eq.u32 %p1, %warp, 0; @%p1 griddepcontrol.wait;\n"


def test_a_barrier_carries_the_wait_of_one_warp() -> None:
    body = f"{ONE_WAITS}bar.sync 0; {READ} st.global.b32 [%rd4], %r1;"
    assert_clean(second(body), {"c": np.full(THREADS, 7, np.uint32)})


def test_the_wait_of_one_warp_is_not_the_other_s() -> None:
    assert_blamed(second(f"{ONE_WAITS}{READ} //!"), "dependent-launch-not-awaited", "nothing orders the access after")


def test_a_barrier_before_the_wait_carries_nothing() -> None:
    body = f"bar.sync 0; {ONE_WAITS}{READ} //!"
    assert_blamed(second(body), "dependent-launch-not-awaited", "`a` is read")


MBARRIER = """.shared .align 8 .b64 bar; .shared .align 16 .b8 buf[16]; mov.u32 %r20, bar; mov.u32 %r21, buf;
setp.eq.u32 %p1, %warp, 0; setp.eq.u32 %p2, %tx, 32;
@%p2 mbarrier.init.shared::cta.b64 [%r20], 1; @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 %rd9, [%r20], 16;
bar.sync 0; @%p1 bra SLEEPER;
"""
LOADED = """SLEEPER: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r20], 0; @!%p4 bra SLEEPER;
"""


def copied(before: str) -> Kernel:
    """Warp 1 copies to shared memory, after it has waited or not; warp 0 waits for the copy and then reads `a`."""
    copy = "@%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r21], [%c], 16, [%r20];"
    return second(f"{MBARRIER}{before}{copy}\n{LOADED}@%p1 {READ} //!")


def test_a_copy_carries_the_wait_before_its_issue() -> None:
    """Only the load warp of a kernel waits: a warp that has seen the data comes after the wait."""
    assert_clean(copied("griddepcontrol.wait; "), {})


def test_a_copy_without_a_wait_carries_none() -> None:
    assert_blamed(copied(""), "dependent-launch-not-awaited", "`a` is read")


def test_the_bulk_copy_of_what_it_wrote() -> None:
    copy = "@%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r21], [%a], 16, [%r20]; //!"
    kernel = second(f"{MBARRIER}{copy}\n{LOADED}")
    assert_blamed(kernel, "dependent-launch-not-awaited", "byte 0 of `a` is read")


CHAIN = (("first", False), ("middle", True), ("kernel", True))


def test_a_wait_covers_the_launches_before_if_the_middle_one_waits() -> None:
    assert_clean(second(f"{WAIT}\n{READ}", CHAIN, middle="griddepcontrol.wait; ret;"), {})


def test_a_middle_launch_that_never_waits_breaks_the_chain() -> None:
    kernel = second(f"{WAIT}\n{READ} //!", CHAIN)
    clauses = ("first, which wrote it", "and middle, launched after first, has ended without a griddepcontrol.wait")
    assert_blamed(kernel, "dependent-launch-not-awaited", *clauses)


def test_launches_further_back_count_too() -> None:
    kernel = second(f"{READ} //!", CHAIN, middle="griddepcontrol.wait; ret;")
    assert_blamed(kernel, "dependent-launch-not-awaited", "first, which wrote it", "nothing orders the access after")


def test_a_launch_without_the_attribute_ends_the_chain() -> None:
    chain = (("first", False), ("middle", True), ("middle", False), ("kernel", True))
    assert_clean(second(READ, chain), {})
