"""What an mbarrier orders: semantics and scope of both sides, a single phase, and what came before a copy's issue."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.vm.kernel import (
    EXPECT,
    FENCE,
    LOAD,
    Kernel,
    X,
    assert_blamed,
    assert_clean,
    collected,
    copy_kernel,
    init,
    slugs,
    wait,
)

OUT = np.zeros(64, np.uint32)
DECLARED = ".shared .align 16 .b8 buf[16]; .shared .align 8 .b64 mbar;"
SEVENS = {"out": np.full(32, 7)}
RESULT = "mul.wide.u32 %rd1, %lane, 4; add.u64 %rd1, %rd1, %out; st.global.b32 [%rd1], %r1;"
READ = "ld.shared.b32 %r1, [buf]; //!"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [mbar];"


def waits(words: str, parity: int = 0) -> str:
    """Like `wait` on mbar, with semantics and scope."""
    return wait("mbar", parity).replace("try_wait.parity", f"try_wait.parity{words}")


def passed_on(arrive: str, wait_and_fence: str) -> Kernel:
    """Lane 0 of warp 0 stores 7 and arrives; warp 1 waits and reads."""
    body = f"""{DECLARED} {init("mbar")}
setp.ne.u32 %p1, %warp, 0; @%p1 bra READER;
setp.ne.u32 %p2, %lane, 0; @%p2 ret;
st.shared.b32 [buf], 7;
{arrive}
ret;
READER: {wait_and_fence}
{READ}
{RESULT}
ret;"""
    return Kernel(body, {"out": OUT[:32]}, block=(64, 1, 1))


RELAXED_ARRIVE = ARRIVE.replace("arrive.", "arrive.relaxed.cta.")
ORDERED = {
    "the default of both sides": (ARRIVE, waits("")),
    "an acquire": (ARRIVE, waits(".acquire.cta")),
    "a relaxed wait and a fence": (ARRIVE, waits(".relaxed.cta") + "\nfence.acq_rel.cta;"),
    "a fence and a relaxed arrival": (f"fence.acq_rel.cta;\n{RELAXED_ARRIVE}", waits("")),
}
UNORDERED = {
    "a relaxed wait": (ARRIVE, waits(".relaxed.cta")),
    "a relaxed wait and a fence that only releases": (ARRIVE, waits(".relaxed.cta") + "\nfence.release.cluster;"),
    "a relaxed arrival": (RELAXED_ARRIVE, waits("")),
    "a relaxed arrival behind a fence that only acquires": (f"fence.acquire.cluster;\n{RELAXED_ARRIVE}", waits("")),
}


@pytest.mark.parametrize("name", ORDERED)
def test_what_an_arrival_and_a_wait_order(name: str) -> None:
    assert_clean(passed_on(*ORDERED[name]), SEVENS)


@pytest.mark.parametrize("name", UNORDERED)
def test_a_side_that_is_relaxed_orders_nothing(name: str) -> None:
    """PTX ISA 9.7.13.15.16: only .release publishes what came before the arrivals, only .acquire makes it visible."""
    assert_blamed(passed_on(*UNORDERED[name]), "race", "after warp 0 wrote it")


def over_the_cluster(arrive: str, wait_and_fence: str) -> Kernel:
    """CTA 0 stores 7 into the shared memory of CTA 1 and arrives there; CTA 1 waits and reads."""
    body = f"""{DECLARED} {init("mbar")}
barrier.cluster.arrive; barrier.cluster.wait;
mov.u32 %r2, buf; mapa.shared::cluster.u32 %r2, %r2, 1; mov.u32 %r3, mbar; mapa.shared::cluster.u32 %r3, %r3, 1;
setp.ne.u32 %p1, %cta, 0; @%p1 bra READER;
setp.ne.u32 %p2, %lane, 0; @%p2 bra END;
st.shared::cluster.b32 [%r2], 7;
{arrive}
bra END;
READER: {wait_and_fence}
{READ}
{RESULT}
END: barrier.cluster.arrive; barrier.cluster.wait; ret;"""
    return Kernel(body, {"out": OUT[:32]}, grid=(2, 1, 1), cluster=(2, 1, 1))


REMOTE = "mbarrier.arrive.WORDSshared::cluster.b64 _, [%r3];"
WIDE, NARROW, PLAIN = (REMOTE.replace("WORDS", words) for words in ("release.cluster.", "release.cta.", ""))
LOOSE = REMOTE.replace("WORDS", "relaxed.cluster.")
CLUSTER_ORDERED = {
    "scopes of the cluster": (WIDE, waits(".acquire.cluster")),
    "no scope, as CUTLASS writes it": (PLAIN, waits("")),
    "a fence of the cluster and a relaxed arrival": (f"fence.acq_rel.cluster;\n{LOOSE}", waits("")),
    "a relaxed wait and a fence of the cluster": (WIDE, waits(".relaxed.cluster") + "\nfence.acq_rel.cluster;"),
}
CLUSTER_UNORDERED = {
    "a release to the own CTA": (NARROW, waits(".acquire.cluster")),
    "an acquire of the own CTA": (WIDE, waits(".acquire.cta")),
    "a fence of the CTA and a relaxed arrival": (f"fence.acq_rel.cta;\n{LOOSE}", waits("")),
    "a relaxed wait and a fence of the CTA": (WIDE, waits(".relaxed.cluster") + "\nfence.acq_rel.cta;"),
}


@pytest.mark.parametrize("name", CLUSTER_ORDERED)
def test_what_orders_two_ctas_of_a_cluster(name: str) -> None:
    assert_clean(over_the_cluster(*CLUSTER_ORDERED[name]), SEVENS)


@pytest.mark.parametrize("name", CLUSTER_UNORDERED)
def test_a_scope_that_leaves_the_other_cta_out(name: str) -> None:
    """PTX ISA 8.7.1: two operations synchronise only if the scope of each includes the other's thread."""
    assert_blamed(over_the_cluster(*CLUSTER_UNORDERED[name]), "race", "after warp 0 of CTA rank 0 wrote it")


def flag_over_the_cluster(scope: str) -> Kernel:
    """The same through a flag in shared memory."""
    poll = f"READER_: ld.acquire.{scope}.shared::cta.b32 %r4, [flag]; setp.eq.u32 %p3, %r4, 0; @%p3 bra READER_;"
    kernel = over_the_cluster(f"st.release.{scope}.shared::cluster.b32 [%r3+8], 1;", poll)
    body = kernel.body.replace("mbar;", "mbar; .shared .align 8 .b32 flag;", 1)
    body = body.replace("barrier.cluster.arrive;", "st.shared.b32 [flag], 0; barrier.cluster.arrive;", 1)
    return Kernel(body, kernel.buffers, grid=(2, 1, 1), cluster=(2, 1, 1))


def test_a_flag_orders_within_its_scope() -> None:
    assert_clean(flag_over_the_cluster("cluster"), SEVENS)
    found, _ = collected(flag_over_the_cluster("cta"), "eager")
    assert slugs(found) == ["race", "scope-too-narrow"], "the flag, and what it should have ordered"


SHARED_FLAG, GLOBAL_FLAG = "shared::cta.b32 [%r8]", "global.b32 [%flag]"


def flagged(publish: str, poll: str, fence: str) -> Kernel:
    """As `passed_on`, through a flag that the CTA has cleared: `publish` sets it, and `poll` reads it until it is
    set."""
    polling = f"POLL: {poll} setp.eq.u32 %p3, %r4, 0; @%p3 bra POLL; {fence}"
    kernel = passed_on(publish, polling)
    cleared = f".shared .align 8 .b32 here; mov.u32 %r8, here; st.shared.b32 [%r8], 0; {init('mbar')}"
    body = kernel.body.replace(init("mbar"), cleared)
    return Kernel(body, {**kernel.buffers, "flag": np.zeros(1, np.uint32)}, block=(64, 1, 1))


FLAGS_ORDERED = {
    "a release and an acquire": ("st.release.cta", "ld.acquire.cta", "", ""),
    "fences around relaxed ones": ("st.relaxed.cta", "ld.relaxed.cta", "fence.acq_rel.cta;", "fence.acq_rel.cta;"),
    "fences around volatile ones": ("st.volatile", "ld.volatile", "membar.cta;", "membar.cta;"),
    "a relaxed one behind a fence, and an acquire": ("st.relaxed.cta", "ld.acquire.cta", "fence.release.cta;", ""),
}
FLAGS_UNORDERED = {
    "relaxed ones": ("st.relaxed.cta", "ld.relaxed.cta", "", ""),
    "volatile ones": ("st.volatile", "ld.volatile", "", ""),
    "a release and a relaxed one": ("st.release.cta", "ld.relaxed.cta", "", ""),
    "a relaxed one and an acquire": ("st.relaxed.cta", "ld.acquire.cta", "", ""),
}


def with_flag(words: tuple[str, str, str, str], flag: str) -> Kernel:
    """`flagged` with a store, a load and the fences before and behind them."""
    store, load, before, behind = words
    place = flag.replace("b32 [", "b32 %r4, [")
    return flagged(f"{before} {store}.{flag}, 1;", f"{load}.{place};", behind)


@pytest.mark.parametrize("flag", [SHARED_FLAG, GLOBAL_FLAG])
@pytest.mark.parametrize("name", FLAGS_ORDERED)
def test_what_a_flag_orders(name: str, flag: str) -> None:
    assert_clean(with_flag(FLAGS_ORDERED[name], flag), SEVENS)


@pytest.mark.parametrize("flag", [SHARED_FLAG, GLOBAL_FLAG])
@pytest.mark.parametrize("name", FLAGS_UNORDERED)
def test_a_relaxed_side_of_a_flag_orders_nothing(name: str, flag: str) -> None:
    """PTX ISA 8.9.2, 8.9.3: a relaxed write releases, and a relaxed read acquires, only with a fence."""
    assert_blamed(with_flag(FLAGS_UNORDERED[name], flag), "race", "after warp 0 wrote it")


def published_by_two(publish: str, between: str, space: str, scope: str) -> Kernel:
    """Lane 0 of warp 0 stores 7 and does `publish` with a flag; then that of warp 1 does `between` with it; then warp 2
    loads it by an acquire, and reads. Relaxed words, which order nothing, tell warps 1 and 2 when it is their turn.

    In both texts FLAG is the flag's address, and SPACE and SCOPE are those of its accesses.
    """

    def turn(label: str, word: int) -> str:
        return f"{label}: ld.relaxed.SCOPE.SPACE.b32 %r4, [FLAG+{word}]; setp.eq.u32 %p3, %r4, 0; @%p3 bra {label};"

    body = f"""{DECLARED} .shared .align 16 .b8 here[12]; mov.u32 %r8, here; setp.ne.u32 %p2, %lane, 0;
@!%p2 st.shared.b32 [%r8], 0; @!%p2 st.shared.b32 [%r8+4], 0; @!%p2 st.shared.b32 [%r8+8], 0; bar.sync 0;
setp.eq.u32 %p4, %warp, 1; setp.eq.u32 %p5, %warp, 2;
@%p5 bra READER;
@%p2 ret;
@%p4 bra SECOND;
st.shared.b32 [buf], 7;
{publish} st.relaxed.SCOPE.SPACE.b32 [FLAG+4], 1;
ret;
SECOND: {turn("FIRST_DONE", 4)}
{between} st.relaxed.SCOPE.SPACE.b32 [FLAG+8], 1;
ret;
READER: {turn("SECOND_DONE", 8)}
ld.acquire.SCOPE.SPACE.b32 %r4, [FLAG];
{READ}
{RESULT}
ret;"""
    body = body.replace("FLAG", "%r8" if space.startswith("shared") else "%flag")
    body = body.replace("SPACE", space).replace("SCOPE", scope)
    return Kernel(body, {"out": OUT[:32], "flag": np.zeros(3, np.uint32)}, block=(96, 1, 1))


RELEASED = "st.release.SCOPE.SPACE.b32 [FLAG], 1;"
STORED = "st.relaxed.SCOPE.SPACE.b32 [FLAG], 2;"
FENCED = "fence.acq_rel.SCOPE;"
CONTINUED = {
    "an exchange": (RELEASED, "atom.relaxed.SCOPE.SPACE.exch.b32 %r5, [FLAG], 2;"),
    "a reduction": (RELEASED, "red.relaxed.SCOPE.SPACE.add.u32 [FLAG], 1;"),
    "a store behind a relaxed load and a fence": (
        RELEASED,
        f"ld.relaxed.SCOPE.SPACE.b32 %r5, [FLAG]; {FENCED} {STORED}",
    ),
    "a store behind an atomic and a fence": (
        RELEASED,
        f"atom.relaxed.SCOPE.SPACE.or.b32 %r5, [FLAG], 1; {FENCED} {STORED}",
    ),
    "a release behind an acquire": (
        RELEASED,
        "ld.acquire.SCOPE.SPACE.b32 %r5, [FLAG]; st.release.SCOPE.SPACE.b32 [FLAG], 2;",
    ),
    "a store by the thread that has released": (f"{RELEASED} {STORED}", ""),
}
ENDED = {
    "a relaxed store": (RELEASED, STORED),
    "a volatile store": (RELEASED, "st.volatile.SPACE.b32 [FLAG], 2;"),
    "a release that has acquired nothing": (RELEASED, "st.release.SCOPE.SPACE.b32 [FLAG], 2;"),
    "a store behind a relaxed load": (RELEASED, f"ld.relaxed.SCOPE.SPACE.b32 %r5, [FLAG]; {STORED}"),
    "a store behind a reduction and a fence": (
        RELEASED,
        f"red.relaxed.SCOPE.SPACE.or.b32 [FLAG], 1; {FENCED} {STORED}",
    ),
}
PLACES = [("shared", "cta"), ("global", "cta"), ("global", "gpu")]


@pytest.mark.parametrize(("space", "scope"), PLACES)
@pytest.mark.parametrize("name", CONTINUED)
def test_what_continues_a_release(name: str, space: str, scope: str) -> None:
    assert_clean(published_by_two(*CONTINUED[name], space, scope), SEVENS)


@pytest.mark.parametrize(("space", "scope"), PLACES)
@pytest.mark.parametrize("name", ENDED)
def test_a_store_of_another_thread_ends_a_release(name: str, space: str, scope: str) -> None:
    """PTX ISA 8.9.2: only atomics pass on what a write releases. 8.11.1: a reduction acquires nothing."""
    assert_blamed(published_by_two(*ENDED[name], space, scope), "race", "after warp 0 wrote it")


def handed_through(words: str) -> Kernel:
    """Warp 0 completes phase 0; warp 1 waits for it and completes phase 1; warp 2 waits for that and reads 0's
    store."""
    body = f"""{DECLARED} .shared .align 8 .b64 other; {init("mbar", "other")}
setp.ne.u32 %p2, %lane, 0; setp.eq.u32 %p3, %warp, 1; setp.eq.u32 %p4, %warp, 2;
@%p4 bra READER;
@%p2 ret;
@%p3 bra SECOND;
st.shared.b32 [buf], 7;
{ARRIVE}
ret;
SECOND: {waits(words)}
{ARRIVE}
{RELAXED_ARRIVE.replace("[mbar]", "[other]")}
ret;
READER: {waits(".relaxed.cta").replace("[mbar]", "[other]")}
{waits("", 1)}
{READ}
{RESULT}
ret;"""
    return Kernel(body, {"out": OUT[:32]}, block=(96, 1, 1))


def test_a_wait_acquires_its_own_phase_only() -> None:
    """Phase 1 publishes of phase 0 only what its own arrivals have acquired."""
    assert_clean(handed_through(""), SEVENS)
    assert_blamed(handed_through(".relaxed.cta"), "race", "after warp 0 wrote it")


STORE_WORD = "st.shared.b32 [word], 7;"
READ_WORD = "ld.shared.b32 %r5, [word];"


def beside_the_copy(before: str, behind: str, read: str = READ_WORD) -> Kernel:
    """Thread 0 stores a word before or after issuing a TMA load; all threads wait for the load and read the word."""
    changes = {
        "load": f"{before}\n{EXPECT}\n{LOAD}\n{behind}",
        "compute": f"{read}\nld.shared.u32 %r1, [%r42];\nadd.u32 %r1, %r1, %r5;\nst.shared.u32 [%r42], %r1;",
    }
    kernel = copy_kernel(changes)
    return copy_kernel({**changes, "declare": ".shared .align 4 .b32 word;" + kernel.body.splitlines()[0]})


def test_a_completion_orders_what_came_before_the_issue() -> None:
    """Causality is transitive (PTX ISA 8.9.4): store, issue, completion of the copy, wait."""
    assert_clean(beside_the_copy(STORE_WORD, ""), {"out": X + 7})


def test_a_completion_orders_nothing_behind_the_issue() -> None:
    assert_blamed(beside_the_copy("", STORE_WORD, READ_WORD + " //!"), "race", "after warp 0 wrote it",
                  schedules=("eager",))  # fmt: skip


@pytest.mark.parametrize("fence", ["", FENCE])
def test_a_copy_over_what_threads_have_read_is_counted(fence: str) -> None:
    """Generic reads, a barrier, a TMA load into the same bytes: the ISA requires a proxy fence, CUTLASS has none."""
    refill = f"""ld.shared.u32 %r1, [%r42];
{fence}
bar.sync 1;
@%p3 bra REFILLED;
{EXPECT.replace("[mbar]", "[other]")}
{LOAD.replace("[mbar]", "[other]")}
REFILLED: {wait("other", 0)}"""
    for schedule in ("eager", "lazy"):
        found, counters = copy_kernel({"wait": f"{wait('mbar', 0)}\n{refill}"}).run(schedule)
        assert np.array_equal(found["out"], X + 1), f"{schedule}: the second load brings the same values"
        counted = counters.get("smem_unfenced_overwrites", 0)
        assert counted == (0 if fence else 1), f"{schedule}, fence {fence!r}: {counted} overwrites were counted"


COUNTER = """.shared .align 4 .b32 counter; setp.eq.u32 %p1, %tx, 0;
@%p1 st.shared.b32 [counter], 0;
bar.sync 0;
{weak}
{between}
@%p1 red.shared.add.u32 [counter], 1; //!
bar.sync 0; ld.shared.b32 %r2, [counter]; st.global.b32 [%out], %r2; ret;"""


def test_an_atomic_races_with_a_weak_read_before_it() -> None:
    """Only strong accesses may be unordered: this reader may see the value before or after the sum."""
    out = {"out": np.zeros(1, np.uint32)}
    weak, strong = "ld.shared.b32 %r1, [counter];", "ld.relaxed.cta.shared.b32 %r1, [counter];"
    late = Kernel(COUNTER.format(weak=weak, between=""), out, block=(64, 1, 1))
    assert_blamed(late, "race", "warp 1 read it", schedules=("eager",))
    for kept in (COUNTER.format(weak=weak, between="bar.sync 0;"), COUNTER.format(weak=strong, between="")):
        assert_clean(Kernel(kept, out, block=(64, 1, 1)), {"out": [1]}, ("eager", "lazy"))
