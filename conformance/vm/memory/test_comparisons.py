"""A compare-and-swap that fails is a strong read and no write; all other atomics write (PTX ISA 8.4, 9.7.13.5)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.vm.kernel import EVERY_SCHEDULE, Kernel, assert_blamed, assert_clean, collected, slugs
from conformance.vm.memory.test_strong_writes import WEAK_LOAD, one_after_another

SWAP = "atom.relaxed.{}.global.cas.b32 %r4, [%word], {}, 7;"
FAILS, SUCCEEDS = 5, 0
"""What a swap compares the word with, which is 0."""


def swap(scope: str, expected: int) -> str:
    return SWAP.format(scope, expected)


def poll(scope: str) -> str:
    return f"ld.relaxed.{scope}.global.b32 %r3, [%word]; //!\nst.global.b32 [%out], %r3;"


@pytest.mark.parametrize("scopes", [("cta", "gpu"), ("gpu", "cta"), ("cta", "cta"), ("cluster", "gpu")])
def test_no_load_can_miss_a_swap_that_fails(scopes: tuple[str, str]) -> None:
    failed = one_after_another(swap(scopes[0], FAILS), poll(scopes[1]), "relaxed")
    assert_clean(failed, {"word": np.zeros(4), "out": np.zeros(1)}, EVERY_SCHEDULE)
    done = one_after_another(swap(scopes[0], SUCCEEDS), poll(scopes[1]), "relaxed")
    assert_blamed(done, "scope-too-narrow", f"is read by a load of scope .{scopes[1]}")


@pytest.mark.parametrize("expected", [FAILS, SUCCEEDS])
def test_a_weak_load_after_a_swap(expected: int) -> None:
    kernel = one_after_another(swap("gpu", expected), WEAK_LOAD.replace(" st.", " //!\nst."), "relaxed")
    if expected == FAILS:
        assert_clean(kernel, {"out": np.zeros(1)}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "global-race", "is read", "wrote it")


@pytest.mark.parametrize("scope", ["cta", "gpu"])
def test_a_swap_that_fails_hides_no_store_of_too_narrow_a_scope(scope: str) -> None:
    first = f"st.relaxed.{scope}.global.b32 [%word], 3; {swap('gpu', FAILS)}"
    kernel = one_after_another(first, poll("gpu"), "relaxed")
    if scope == "gpu":
        assert_clean(kernel, {"out": np.array([3])}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "scope-too-narrow", "by a strong access of scope .cta")


@pytest.mark.parametrize("scope", ["cta", "gpu"])
def test_a_swap_that_fails_for_what_it_may_not_see(scope: str) -> None:
    kernel = one_after_another("st.relaxed.gpu.global.b32 [%word], 3;", f"{swap(scope, FAILS)} //!", "relaxed")
    if scope == "gpu":
        assert_clean(kernel, {"word": np.array([3, 0, 0, 0])}, EVERY_SCHEDULE)
    else:
        clauses = ("is read by a failed compare-and-swap of scope .cta", ".gpu or wider", "an older value")
        assert_blamed(kernel, "scope-too-narrow", *clauses)


COPY = """mov.u32 %r5, buf; st.shared.v4.b32 [%r5], {3, 3, 3, 3}; fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%word], [%r5], 16; //!
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
WRITES = {"weak": "st.global.b32 [%word], 3; //!", "bulk": COPY, "strong": "st.relaxed.gpu.global.b32 [%word], 3;"}


@pytest.mark.parametrize("told", ["relaxed", "released"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_after_a_swap_that_fails(name: str, told: str) -> None:
    kernel = one_after_another(swap("gpu", FAILS), WRITES[name], told, before=".shared .align 16 .b8 buf[16];")
    if name == "strong" or told == "released":
        assert_clean(kernel, {"word": np.array([3] + [3 * (name == "bulk")] * 3)}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "global-race", "byte 0 of `word` is overwritten", "read it at PTX line")


@pytest.mark.parametrize("expected", [FAILS, SUCCEEDS])
def test_a_release_that_fails_tells_nothing(expected: int) -> None:
    """A release pattern synchronises by its write (8.8, 8.9.4). The second thread acquires the word."""
    release = f"st.global.b32 [%out], 9; atom.release.gpu.global.cas.b32 %r4, [%word], {expected}, 7;"
    look = "ld.acquire.gpu.global.b32 %r3, [%word];\nld.global.b32 %r4, [%out]; //!"
    kernel = one_after_another(release, look, "relaxed")
    if expected == SUCCEEDS:
        assert_clean(kernel, {"out": np.array([9])}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "global-race", "byte 0 of `out` is read")


KEPT = {
    "an addition of 0": "red.global.add.u32 [%word], 0; //!",
    "a maximum": "red.global.max.u32 [%word], 0; //!",
    "an exchange": "atom.global.exch.b32 %r4, [%word], 0; //!",
    "a swap of 0 by 0": "atom.global.cas.b32 %r4, [%word], 0, 0; //!",
}


@pytest.mark.parametrize("name", KEPT)
def test_an_atomic_that_keeps_the_value_is_a_write(name: str) -> None:
    """It stores its result, "overwriting the original value" (9.7.13.5)."""
    assert_blamed(one_after_another(WEAK_LOAD, KEPT[name], "relaxed"), "global-race", "is overwritten", "read it")
    last = one_after_another(KEPT[name][:-4], WEAK_LOAD.replace(" st.", " //!\nst."), "relaxed")
    assert_blamed(last, "global-race", "is read", "wrote it")
    assert_clean(one_after_another(WEAK_LOAD, KEPT[name], "released"), {"word": np.zeros(4)}, EVERY_SCHEDULE)


@pytest.mark.parametrize("at", [0, 2])
def test_a_weak_store_beside_the_half_word_that_was_compared(at: int) -> None:
    half = "mov.b16 %h1, 5; atom.relaxed.gpu.global.cas.b16 %h2, [%word], %h1, %h1;"
    kernel = one_after_another(half, f"mov.b16 %h1, 3;\nst.global.b16 [%word+{at}], %h1; //!", "relaxed")
    if at:
        assert_clean(kernel, {"word": np.array([3 << 16, 0, 0, 0])}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "global-race", "is overwritten", "read it")


def test_an_input_may_not_be_swapped() -> None:
    kernel = replace(one_after_another(swap("gpu", FAILS) + " //!", "", "relaxed"), inputs=("word",))
    assert_blamed(kernel, "read-only", "`word`")


def test_lanes_of_one_swap_succeed_and_fail() -> None:
    """Word i holds i, and lane i expects an even number: odd words are read only."""
    body = """mul.wide.u32 %rd1, %lane, 4; add.u64 %rd2, %rd1, %out; add.u64 %rd1, %rd1, %words; and.b32 %r1, %lane, 30;
    setp.eq.u32 %p1, %cta, 0; @%p1 bra FIRST;
    POLL: ld.relaxed.gpu.global.b32 %r2, [%flag]; setp.eq.u32 %p2, %r2, 0; @%p2 bra POLL;
    ld.global.b32 %r3, [%rd1]; st.global.b32 [%rd2], %r3; bra END;
    FIRST: atom.relaxed.gpu.global.cas.b32 %r2, [%rd1], %r1, 99; bar.warp.sync -1;
    setp.eq.u32 %p2, %lane, 0; @%p2 st.relaxed.gpu.global.b32 [%flag], 1;
    END: ret;"""
    words = np.arange(32, dtype=np.uint32)
    buffers = {"words": words, "flag": np.zeros(1, np.uint32), "out": np.zeros(32, np.uint32)}
    kernel = Kernel(body, buffers, grid=(2, 1, 1))
    for schedule in EVERY_SCHEDULE:
        found, after = collected(kernel, schedule)
        assert [(one.rule, one.lane) for one in found] == [("global-race", 0)], [str(one) for one in found]
        assert (after["words"] == np.where(words % 2, words, 99)).all()
    guarded = "and.b32 %r1, %lane, 1; setp.eq.u32 %p3, %r1, 1; mov.b32 %r3, 0;\n@%p3 ld.global"
    odd = replace(kernel, body=body.replace("ld.global", guarded))
    assert_clean(odd, {"words": np.where(words % 2, words, 99)}, EVERY_SCHEDULE)


SHARED = """.shared .align 4 .b32 word; setp.ne.u32 %p1, %tx, 0; @!%p1 st.shared.b32 [word], 0;
{meet}
mov.u32 %r1, word; {place} setp.eq.u32 %p2, {number}, 0; setp.ne.u32 %p3, %lane, 0; @%p3 bra END; @%p2 bra FIRST;
POLL: ld.{poll}.gpu.global.b32 %r2, [%flag]; setp.eq.u32 %p2, %r2, 0; @%p2 bra POLL;
{second} //!
bra END;
FIRST: {first} st.{told}.gpu.global.b32 [%flag], 1;
END: {meet} ret;"""


def in_shared(first: str, second: str, told: str = "relaxed", *, cluster: int) -> Kernel:
    """As one_after_another, in shared memory: of CTA 1, through CTA 0 at first, or of the only CTA."""
    if cluster == 2:
        meet = "barrier.cluster.arrive; barrier.cluster.wait;"
        place, number = "mapa.shared::cluster.u32 %r1, %r1, 1;", "%cta"
    else:
        meet, place, number = "bar.sync 0;", "", "%warp"
    poll = {"relaxed": "relaxed", "release": "acquire"}[told]
    body = SHARED.format(meet=meet, place=place, number=number, first=first, second=second, told=told, poll=poll)
    return Kernel(body, {"flag": np.zeros(1, np.uint32), "spare": np.zeros(4, np.uint32)}, grid=(cluster, 1, 1),
                  cluster=(cluster, 1, 1), block=(32 if cluster == 2 else 64, 1, 1))  # fmt: skip


SHARED_SWAP = "atom.relaxed.{}.shared::cluster.cas.b32 %r4, [%r1], {}, 7;"


@pytest.mark.parametrize("scopes", [("cta", "cluster"), ("cluster", "cta")])
def test_no_load_can_miss_a_swap_that_fails_in_another_cta(scopes: tuple[str, str]) -> None:
    load = f"ld.relaxed.{scopes[1]}.shared::cluster.b32 %r3, [%r1];"
    assert_clean(in_shared(SHARED_SWAP.format(scopes[0], FAILS), load, cluster=2), {}, EVERY_SCHEDULE)
    done = in_shared(SHARED_SWAP.format(scopes[0], SUCCEEDS), load, cluster=2)
    assert_blamed(done, "scope-too-narrow", f"is read by a load of scope .{scopes[1]}")


@pytest.mark.parametrize("scope", ["cta", "cluster"])
def test_a_swap_that_fails_in_another_cta_hides_no_store(scope: str) -> None:
    store = f"st.relaxed.{scope}.shared::cluster.b32 [%r1], 3; {SHARED_SWAP.format('cluster', FAILS)}"
    kernel = in_shared(store, "ld.relaxed.cluster.shared::cluster.b32 %r3, [%r1];", cluster=2)
    if scope == "cluster":
        assert_clean(kernel, {}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "scope-too-narrow", "by a strong access of scope .cta")


AFTER = {
    "a weak load": ("ld.shared::cluster.b32 %r3, [%r1];", False),
    "a strong store": ("st.relaxed.cluster.shared::cluster.b32 [%r1], 3;", False),
    "a weak store": ("st.shared::cluster.b32 [%r1], 3;", True),
    "a store of the other half": ("mov.b16 %h1, 3; st.shared::cluster.b16 [%r1+2], %h1;", False),
    "a store of the half": ("mov.b16 %h1, 3; st.shared::cluster.b16 [%r1], %h1;", True),
    "a copy": ("cp.async.ca.shared.global [%r1], [%spare], 4; cp.async.wait_all;", True),
}


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", AFTER)
def test_what_follows_a_swap_that_fails_in_shared_memory(name: str, cluster: int) -> None:
    second, races = AFTER[name]
    first = "mov.b16 %h1, 5; atom.relaxed.cluster.shared::cluster.cas.b16 %h2, [%r1], %h1, %h1;"
    kernel = in_shared(first, second, cluster=cluster)
    if races:
        assert_blamed(kernel, "race", "is overwritten", "read it")
        kernel = in_shared(first, second, "release", cluster=cluster)
    assert_clean(kernel, {}, EVERY_SCHEDULE)


MEETS = """.shared .align 4 .b32 word; setp.ne.u32 %p1, %tx, 0; @!%p1 st.shared.b32 [word], 0;
bar.sync 0;
mov.u32 %r1, word; setp.eq.u32 %p2, %warp, 0; setp.eq.u32 %p3, %warp, 1; setp.ne.u32 %p4, %lane, 0; @%p4 bra MEET;
@%p2 bra FIRST; @%p3 bra SECOND; bra MEET;
FIRST: {look} st.relaxed.gpu.global.b32 [%flag], 1; bra MEET;
SECOND: ld.relaxed.gpu.global.b32 %r2, [%flag]; setp.eq.u32 %p1, %r2, 0; @%p1 bra SECOND; {look}
MEET: @%p2 bra {out};
bar.sync 1, {met};
@%p3 bra END; @%p4 bra END;
st.shared.b32 [%r1], 3; //!
END: bar.sync 0; ret;
LATE: bar.sync 1, 96; bra END;"""


@pytest.mark.parametrize(
    "look", ["atom.shared.cas.b32 %r4, [%r1], 5, 7;", "ld.shared.b32 %r4, [%r1];"], ids=["cas", "load"]
)
@pytest.mark.parametrize("all_meet", [False, True])
def test_a_later_swap_that_fails_hides_no_earlier_one(look: str, all_meet: bool) -> None:
    """Warps 0 and 1 look, in this order, and warp 2 meets warp 1, or both, before it overwrites what they saw."""
    out, met = ("LATE", 96) if all_meet else ("END", 64)
    body = MEETS.format(look=look, out=out, met=met)
    kernel = Kernel(body, {"flag": np.zeros(1, np.uint32)}, block=(96, 1, 1))
    if all_meet:
        assert_clean(kernel, {}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "race", "is overwritten", "after warp 0 read it")


@pytest.mark.parametrize("expected", [FAILS, SUCCEEDS])
def test_an_overlapping_launch_overwrites_what_was_compared(expected: int) -> None:
    first, second = f"{swap('gpu', expected)} ret;", "st.global.b32 [%word], 3; ret;"
    kernel = Kernel(first, {"word": np.zeros(1, np.uint32)}, others={"second": second},
                    sequence=[("kernel", False), ("second", True)])  # fmt: skip
    (one,) = collected(kernel)[0]
    did = "read" if expected == FAILS else "wrote"
    assert one.rule == "dependent-launch-not-awaited", str(one)
    assert f"is overwritten, but kernel, which {did} it" in one.detail, one.detail
    awaited = replace(kernel, others={"second": f"griddepcontrol.wait; {second}"})
    assert slugs(collected(awaited)[0]) == []
