"""Atomics and other strong writes: beside weak loads, and beside strong writes that their scope leaves out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.vm.kernel import EVERY_SCHEDULE, Kernel, assert_blamed, assert_clean, collected, slugs
from megamoe.cli.check import SCHEDULES

POLL = "POLL: ld.{poll}.gpu.global.b32 %r2, [%flag]; setp.eq.u32 %p2, %r2, 0; @%p2 bra POLL;"
TOLD = {"relaxed": ("relaxed", "relaxed"), "released": ("release", "acquire")}
"""How the first thread sets the flag and the second one polls it. Only a release and an acquire order the two."""


def one_after_another(first: str, second: str, told: str, *, apart: bool = True, before: str = "") -> Kernel:
    """A warp does `first`, then a warp in another CTA, or in the same one unless `apart`, does `second`."""
    set_, poll = TOLD[told]
    body = f"""mov.u32 %r1, {"%ctaid.x" if apart else "%warp"}; setp.ne.u32 %p1, %lane, 0; @%p1 bra END; {before}
    setp.eq.u32 %p1, %r1, 0; @%p1 bra FIRST;
    {POLL.format(poll=poll)}
    {second}
    bra END;
    FIRST: {first}
    st.{set_}.gpu.global.b32 [%flag], 1;
    END: ret;"""
    buffers = {"word": np.zeros(4, np.uint32), "flag": np.zeros(1, np.uint32), "out": np.zeros(1, np.uint32)}
    return Kernel(body, buffers, grid=(2 if apart else 1, 1, 1), block=(32 if apart else 64, 1, 1))


WEAK_LOAD = "ld.global.b32 %r3, [%word]; st.global.b32 [%out], %r3;"
REDUCE_BULK = """mov.u32 %r5, buf; st.shared.v4.b32 [%r5], {7, 0, 0, 0}; fence.proxy.async.shared::cta;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%word], [%r5], 16; //!
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
WRITES = {
    "a reduction": "red.global.add.u32 [%word], 7; //!",
    "an exchange": "atom.global.exch.b32 %r4, [%word], 7; //!",
    "a compare-and-swap": "atom.acq_rel.gpu.global.cas.b32 %r4, [%word], 0, 7; //!",
    "a volatile store": "st.volatile.global.b32 [%word], 7; //!",
    "a relaxed store": "st.relaxed.gpu.global.b32 [%word], 7; //!",
    "a release": "st.release.gpu.global.b32 [%word], 7; //!",
    "a bulk reduction": REDUCE_BULK,
}
STAGED = ".shared .align 16 .b8 buf[16];"


@pytest.mark.parametrize("apart", [True, False], ids=["CTAs", "warps"])
@pytest.mark.parametrize("name", WRITES)
def test_a_strong_write_after_a_weak_load(name: str, *, apart: bool) -> None:
    """Both must be strong to be unordered (PTX ISA 8.7.1), whichever comes first."""
    first = one_after_another(WEAK_LOAD, WRITES[name], "relaxed", apart=apart, before=STAGED)
    assert_blamed(first, "global-race", "byte 0 of `word` is overwritten", "warp 0", "read it at PTX line")
    ordered = one_after_another(WEAK_LOAD, WRITES[name], "released", apart=apart, before=STAGED)
    assert_clean(ordered, {"word": np.array([7, 0, 0, 0]), "out": np.zeros(1)}, EVERY_SCHEDULE)


@pytest.mark.parametrize("name", WRITES)
def test_a_weak_load_after_a_strong_write(name: str) -> None:
    write, load = WRITES[name].replace("//!", ""), "ld.global.b32 %r3, [%word]; //!\nst.global.b32 [%out], %r3;"
    last = one_after_another(write, load, "relaxed", before=STAGED)
    assert_blamed(last, "global-race", "byte 0 of `word` is read", "wrote it at PTX line")
    assert_clean(one_after_another(write, load, "released", before=STAGED), {"out": np.array([7])}, EVERY_SCHEDULE)


@pytest.mark.parametrize("load", ["ld.volatile.global.b32", "ld.relaxed.gpu.global.b32", "ld.acquire.gpu.global.b32"])
@pytest.mark.parametrize("name", WRITES)
def test_a_strong_load_races_with_no_strong_write_that_reaches_it(name: str, load: str) -> None:
    strong = WEAK_LOAD.replace("ld.global.b32", load)
    assert_clean(one_after_another(strong, WRITES[name], "relaxed", before=STAGED), {"out": np.zeros(1)})


@pytest.mark.parametrize("held", [0, 5])
def test_an_atomic_that_changes_nothing_is_no_write(held: int) -> None:
    """PTX ISA 8.4: atomics are writes if they result in a write. This swap compares with 0, so it fails beside 5."""
    kernel = one_after_another(WEAK_LOAD, WRITES["a compare-and-swap"], "relaxed")
    kernel = replace(kernel, buffers={**kernel.buffers, "word": np.full(4, held, np.uint32)})
    if held:
        assert_clean(kernel, {"word": np.full(4, held)}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "global-race", "is overwritten")


@pytest.mark.parametrize("between", ["bar.sync 0;", ""])
def test_a_barrier_orders_a_weak_load_before_an_atomic(between: str) -> None:
    """The loads of the other warps may come after the atomic of warp 0, or before it."""
    body = f"""ld.global.b32 %r3, [%word]; setp.ne.u32 %p1, %tx, 0;
    {between}
    @!%p1 red.global.add.u32 [%word], 7;
    ret;"""
    kernel = Kernel(body, {"word": np.zeros(1, np.uint32)}, block=(96, 1, 1))
    found = {rule for schedule in SCHEDULES for rule in slugs(collected(kernel, schedule)[0])}
    assert found == (set() if between else {"global-race"}), found


def test_a_thread_loads_and_swaps_its_own_word() -> None:
    body = """mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %word;
    AGAIN: ld.global.b32 %r3, [%rd1]; add.u32 %r4, %r3, 1; atom.global.cas.b32 %r5, [%rd1], %r3, %r4;
    setp.ne.u32 %p1, %r5, %r3; @%p1 bra AGAIN; ret;"""
    kernel = Kernel(body, {"word": np.zeros(64, np.uint32)}, block=(64, 1, 1))
    assert_clean(kernel, {"word": np.ones(64)}, EVERY_SCHEDULE)


# Scopes.


def two_scopes(first: str, second: str, *, cluster: int) -> Kernel:
    """Two CTAs, of one cluster or of two, add to one word, each with an atomic of its own scope."""
    body = f"""setp.eq.u32 %p1, %cta, 0; setp.ne.u32 %p2, %lane, 0; @%p2 bra END;
    @%p1 red.relaxed.{first}.global.add.u32 [%word], 1;
    @!%p1 red.relaxed.{second}.global.add.u32 [%word], 1;
    END: ret;"""
    return Kernel(body, {"word": np.zeros(4, np.uint32)}, grid=(2, 1, 1), cluster=(cluster, 1, 1))


SCOPES = ("cta", "cluster", "gpu", "sys")


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("second", SCOPES)
@pytest.mark.parametrize("first", SCOPES)
def test_the_scope_of_each_atomic_includes_the_other_thread(first: str, second: str, cluster: int) -> None:
    """One of the two that leaves the other out is enough to lose an update (PTX ISA 8.10.3, litmus test 2)."""
    kernel, least = two_scopes(first, second, cluster=cluster), "cluster" if cluster == 2 else "gpu"
    enough = min(SCOPES.index(first), SCOPES.index(second)) >= SCOPES.index(least)
    for schedule in EVERY_SCHEDULE:
        found = collected(kernel, schedule)[0]
        assert slugs(found) == ([] if enough else ["scope-too-narrow"]), f"{schedule}: {[str(one) for one in found]}"
        assert enough or f"include the other's thread, .{least} or wider" in found[0].detail, found[0].detail


def test_a_finding_names_both_accesses_and_both_scopes() -> None:
    kernel = two_scopes("cluster", "cta", cluster=1)
    one, *more = collected(kernel, "eager")[0]
    assert not more
    said = str(one)
    clauses = (
        "CTA (1, 0, 0), warp 0",
        "byte 0 of `word` is written by an atomic of scope .cta",
        "warp 0 of CTA (0, 0, 0) wrote it by a strong access of scope .cluster",
        f"at PTX line {one.line - 1}, ",
        ".gpu or wider",
    )
    for clause in clauses:
        assert clause in said, f"{clause!r} not in: {said}"


NARROW = "red.relaxed.cta.global.add.u32 [%word], 1;"


@pytest.mark.parametrize("told", TOLD)
def test_an_order_makes_up_for_a_narrow_scope(told: str) -> None:
    kernel = one_after_another(NARROW, f"{NARROW} //!", told)
    if told == "released":
        assert_clean(kernel, {"word": np.array([2, 0, 0, 0])}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "scope-too-narrow", "warp 0 of CTA (0, 0, 0) wrote it by a strong access of scope .cta")


def test_atomics_of_one_cta_need_no_more_than_its_scope() -> None:
    """Each CTA counts its own threads. The words of the CTAs lie side by side."""
    body = """mul.wide.u32 %rd1, %cta, 4; add.u64 %rd1, %rd1, %word;
    red.relaxed.cta.global.add.u32 [%rd1], 1; bar.sync 0; ld.global.b32 %r1, [%rd1]; ret;"""
    kernel = Kernel(body, {"word": np.zeros(4, np.uint32)}, grid=(4, 1, 1), block=(64, 1, 1), launches=2)
    assert_clean(kernel, {"word": np.full(4, 128)}, EVERY_SCHEDULE)


@pytest.mark.parametrize("scope", ["cta", "gpu"])
def test_a_bulk_reduction_after_an_atomic_of_its_own_cta_only(scope: str) -> None:
    """Its scope is the GPU (PTX ISA 9.7.9.25.4.2); that of the atomic leaves it out."""
    kernel = one_after_another(NARROW.replace("cta", scope), REDUCE_BULK, "relaxed", before=STAGED)
    if scope == "gpu":
        assert_clean(kernel, {"word": np.array([8, 0, 0, 0])}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "scope-too-narrow", "is written by an atomic of scope .gpu", "of scope .cta")


@pytest.mark.parametrize("second", [7, 8])
def test_stores_of_one_value_lose_nothing(second: int) -> None:
    """Two stores of one value do not race, whatever their scope (PTX ISA 8.7.2)."""
    store = "st.relaxed.cta.global.b32 [%word], {};"
    kernel = one_after_another(store.format(7), store.format(second) + " //!", "relaxed")
    if second == 7:
        assert_clean(kernel, {"word": np.array([7, 0, 0, 0])}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "scope-too-narrow", "is written by a store of scope .cta")


def test_the_scope_of_an_atomic_is_forgotten_with_it() -> None:
    """A weak store of the same thread comes last. Strong writes after weak ones are not judged."""
    kernel = one_after_another(f"{NARROW} st.global.b32 [%word], 3;", "red.global.add.u32 [%word], 1;", "relaxed")
    assert_clean(kernel, {"word": np.array([4, 0, 0, 0])}, EVERY_SCHEDULE)


STRONG_WRITES = {
    "a store": "st.relaxed.{}.global.b32 [%word], 7;",
    "a release": "st.release.{}.global.b32 [%word], 7;",
    "an atomic": "red.relaxed.{}.global.add.u32 [%word], 7;",
}


@pytest.mark.parametrize("load", ["relaxed", "acquire"])
@pytest.mark.parametrize("scopes", [("cta", "cta"), ("cta", "gpu"), ("gpu", "cta"), ("gpu", "cluster"), ("gpu", "gpu")])
@pytest.mark.parametrize("name", STRONG_WRITES)
def test_the_scopes_of_a_load_and_of_the_write_that_it_sees(name: str, scopes: tuple[str, str], load: str) -> None:
    """A load that does not reach the other CTA may be served from a cache that never learns of the write."""
    write, load = STRONG_WRITES[name].format(scopes[0]), f"ld.{load}.{scopes[1]}.global.b32 %r3, [%word];"
    use = "st.global.b32 [%out], %r3;"
    kernel = one_after_another(write, f"{load} //!\n{use}", "relaxed")
    if scopes == ("gpu", "gpu"):
        assert_clean(kernel, {"out": np.array([7])}, EVERY_SCHEDULE)
    else:
        clauses = (f"byte 0 of `word` is read by a load of scope .{scopes[1]}", ".gpu or wider", "may not see it")
        assert_blamed(kernel, "scope-too-narrow", *clauses)
    for other in (one_after_another(write, f"{load}\n{use}", "released"),
                  one_after_another(write, f"{load}\n{use}", "relaxed", apart=False)):  # fmt: skip
        assert_clean(other, {"out": np.array([7])}, EVERY_SCHEDULE)


def test_a_poll_of_too_narrow_a_scope_is_told_once() -> None:
    """The write may come while the other CTA polls; then a later poll sees it."""
    body = """setp.ne.u32 %p1, %lane, 0; @%p1 bra END; setp.eq.u32 %p1, %cta, 1; @%p1 bra FIRST;
    POLL: ld.relaxed.cta.global.b32 %r2, [%word]; setp.eq.u32 %p2, %r2, 0; @%p2 bra POLL;
    bra END;
    FIRST: st.relaxed.gpu.global.b32 [%word], 1;
    END: ret;"""
    kernel = Kernel(body, {"word": np.zeros(1, np.uint32)}, grid=(2, 1, 1))
    for schedule in EVERY_SCHEDULE:
        assert slugs(collected(kernel, schedule)[0]) == ["scope-too-narrow"], schedule


DISTRIBUTED = """.shared .align 4 .b32 count; setp.ne.u32 %p1, %tx, 0; @!%p1 st.shared.b32 [count], 0;
barrier.cluster.arrive; barrier.cluster.wait;
mov.u32 %r1, count; mapa.shared::cluster.u32 %r1, %r1, 0; mov.b16 %h1, 0; cvt.u16.u32 %h2, %cta;
@%p1 bra MET;
ADD //!
MET: barrier.cluster.arrive; barrier.cluster.wait;
@%p1 bra END; ld.shared.b32 %r2, [count]; setp.eq.u32 %p2, %cta, 0; @%p2 st.global.b32 [%word], %r2;
END: ret;"""
ADDS = {
    "a word": "red.relaxed.{}.shared::cluster.add.u32 [%r1], 1;",
    "half a word": "atom.relaxed.{}.shared::cluster.cas.b16 %h3, [%r1+2], %h1, %h2;",
}


@pytest.mark.parametrize("scope", ["cta", "cluster"])
@pytest.mark.parametrize("name", ADDS)
def test_atomics_in_shared_memory_of_another_cta(name: str, scope: str) -> None:
    body = DISTRIBUTED.replace("ADD", ADDS[name].format(scope))
    kernel = Kernel(body, {"word": np.zeros(1, np.uint32)}, grid=(2, 1, 1), cluster=(2, 1, 1))
    if scope == "cluster":
        assert_clean(kernel, {"word": np.array([2 if name == "a word" else 1 << 16])}, EVERY_SCHEDULE)
    else:
        # The swap of CTA 0 fails where that of CTA 1 came first.
        unit = "this 4-byte word is written by an atomic" if name == "a word" else "this byte is "
        assert_blamed(kernel, "scope-too-narrow", unit, "of scope .cta", "CTA rank", ".cluster or wider")


@pytest.mark.parametrize("scopes", [("cta", "cta"), ("cluster", "cta"), ("cta", "cluster"), ("cluster", "cluster")])
def test_a_load_of_what_another_cta_stores_in_shared_memory(scopes: tuple[str, str]) -> None:
    """The second CTA sets a word in the memory of the first one, which polls it."""
    body = f""".shared .align 4 .b32 told; setp.ne.u32 %p1, %tx, 0; @%p1 bra MET; st.shared.b32 [told], 0;
    MET: barrier.cluster.arrive; barrier.cluster.wait;
    @%p1 bra END; mov.u32 %r1, told; mapa.shared::cluster.u32 %r1, %r1, 0; setp.eq.u32 %p2, %cta, 1; @%p2 bra SECOND;
    POLL: ld.relaxed.{scopes[1]}.shared.b32 %r2, [told]; //!
    setp.eq.u32 %p2, %r2, 0; @%p2 bra POLL;
    bra END;
    SECOND: st.relaxed.{scopes[0]}.shared::cluster.b32 [%r1], 1;
    END: barrier.cluster.arrive; barrier.cluster.wait; ret;"""
    kernel = Kernel(body, {}, grid=(2, 1, 1), cluster=(2, 1, 1))
    if scopes == ("cluster", "cluster"):
        assert_clean(kernel, {}, EVERY_SCHEDULE)
    else:
        assert_blamed(kernel, "scope-too-narrow", f"is read by a load of scope .{scopes[1]}", ".cluster or wider")


def test_atomics_in_shared_memory_of_one_cta() -> None:
    """Two warps of each CTA of a cluster count in their own memory; the other CTA looks behind a barrier."""
    body = DISTRIBUTED.replace("mapa.shared::cluster.u32 %r1, %r1, 0;", "").replace("@%p1 bra MET;", "bar.sync 0;")
    body = body.replace("ADD", "red.relaxed.cta.shared.add.u32 [%r1], 1;")
    kernel = Kernel(body, {"word": np.zeros(1, np.uint32)}, grid=(2, 1, 1), cluster=(2, 1, 1), block=(64, 1, 1))
    assert_clean(kernel, {"word": np.array([64])}, EVERY_SCHEDULE)
