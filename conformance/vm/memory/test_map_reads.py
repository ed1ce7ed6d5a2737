"""Tensor maps in global memory that are overwritten while a copy may still read them, or used before they are made."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.vm.kernel import (
    EVERY_SCHEDULE,
    Kernel,
    Map,
    assert_blamed,
    assert_clean,
    collected,
    fault_of,
    init,
    slugs,
    wait,
)

WORDS = 32
HEAD = f""".shared .align 128 .b8 box[256]; .shared .align 128 .b8 copied[128];
.shared .align 8 .b64 mbar; .shared .align 8 .b64 last;
{init("mbar", "last")}
mov.u32 %r30, 0; setp.eq.u32 %p1, %tx, 0; setp.eq.u32 %p4, %warp, 0;
shl.b32 %r1, %lane, 2; cvt.u64.u32 %rd1, %r1; add.u64 %rd2, %m, %rd1; add.u64 %rd3, %place, %rd1;
mov.u32 %r2, copied; add.u32 %r2, %r2, %r1; mov.u32 %r3, box; add.u32 %r3, %r3, %r1; ld.u32 %r4, [%rd2];"""
"""Lane i has word i of a map of `x` in %r4, and the places of it at %place and in `copied`."""
MAKE = "@%p4 st.global.u32 [%rd3], %r4; fence.proxy.tensormap::generic.release.gpu;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%place], 128;"
MEET = "bar.sync 0;"
BOX = "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%place, {%r30}], "
FIRST = f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 128; @%p1 {BOX}[mbar];"
SECOND = FIRST.replace("[mbar]", "[last]").replace("[box]", "[box+128]")
STORE = "@%p1 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%place, {%r30}], [box];"
REDUCE = "@%p1 cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%place, {%r30}], [box];"
COMMIT, READ, DONE, ALL_BUT_ONE = (
    f"@%p1 cp.async.bulk.{what};" for what in ("commit_group", "wait_group.read 0", "wait_group 0", "wait_group.read 1")
)
LANDED, LAST_LANDED = wait("mbar", 0), wait("last", 0)
ALONE = f"@!%p1 bra ALONE; {wait('mbar', 0)} ALONE:"
PREFETCH = "@%p1 prefetch.tensormap [%place]; @%p1 cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%place, {%r30}];"
REPLACE = "@%p2 tensormap.replace.tile.global_address.global.b1024.b64 [%place], %y;"
CHANGES = {
    "tensormap.replace": f"{REPLACE} //!",
    "a store": "@%p2 st.global.b64 [%place], %y; //!",
    "a store to its last field": "@%p2 st.global.b64 [%place+56], %y; //!",
    "an atomic": "@%p2 atom.global.exch.b64 %rd9, [%place], %y; //!",
    "tensormap.cp_fenceproxy": "@!%p3 bra KEPT;\ntensormap.cp_fenceproxy.global.shared::cta.tensormap::generic."
    "release.gpu.sync.aligned [%place], [copied], 128; //!\nKEPT:",
    "a bulk copy": "@%p2 cp.async.bulk.global.shared::cta.bulk_group [%place], [copied], 64; //!\n"
    "@%p2 cp.async.bulk.commit_group; @%p2 cp.async.bulk.wait_group 0;",
}
"""By the warp that %p3 names; %p2 is true in one thread of it. `copied` holds the map with the address of `y`."""


def launched(body: str, **options: object) -> Kernel:
    buffers = {name: np.zeros(WORDS, np.uint32) for name in ("x", "y", "place", "flag")}
    maps = {"m": Map("x", "u32", [WORDS], [], [WORDS])}
    return Kernel(f"{HEAD}\n{body}", buffers, maps, block=(64, 1, 1), **options)  # type: ignore[arg-type]


def changed(before: str, change: str = CHANGES["tensormap.replace"], *, by: int = 0, behind: str = "") -> Kernel:
    """A CTA makes a map of `x`. Thread 0 copies through it (`before`), and warp `by` makes it a map of `y`."""
    return launched(f"""setp.eq.u32 %p2, %tx, {32 * by}; setp.eq.u32 %p3, %warp, {by};
    {MAKE} @%p4 st.shared.u32 [%r2], %r4; @%p4 st.shared.u32 [%r3], %lane;
    {MEET} @%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [copied], %y; fence.proxy.async;
    {MEET} fence.proxy.async; {ACQUIRE}
    {before}
    {change}
    {behind}
    ret;""")


ENDED = {
    "a load that all threads have awaited": f"{FIRST} {LANDED}",
    "a load that its thread has awaited": f"{FIRST} {ALONE} {MEET}",
    "two loads": f"{FIRST} {SECOND} {LANDED} {LAST_LANDED}",
    "a store that is read": f"{STORE} {COMMIT} {READ} {MEET}",
    "a store that is complete": f"{STORE} {COMMIT} {DONE} {MEET}",
    "a reduction that is read": f"{REDUCE} {COMMIT} {READ} {MEET}",
    "a load that is in flight through another map": f"{FIRST.replace('%place', '%m')}",
    "a load in a group, as CUTLASS waits": f"{FIRST} {COMMIT} {READ} {MEET}",
    "a load in a group, and a later wait that covers nothing": f"{FIRST} {COMMIT} {READ} {READ} {MEET}",
    "a load before the last but one group": f"{FIRST} {COMMIT} {COMMIT} {ALL_BUT_ONE} {MEET}",
    "a prefetch": PREFETCH,
}


@pytest.mark.parametrize("by", [0, 1], ids=["same_warp", "other_warp"])
@pytest.mark.parametrize("name", ENDED)
def test_a_known_end_gives_the_map_back(name: str, by: int) -> None:
    behind = wait("mbar", 0) if "expect_tx" in ENDED[name] else ""
    for way, change in CHANGES.items():
        kernel = changed(ENDED[name], change, by=by, behind=behind)
        for schedule in EVERY_SCHEDULE:
            fault = fault_of(kernel, schedule)
            assert fault is None, f"{schedule}: {way} after {name} is in order, and is blamed: {fault}"


PENDING = {
    "a load": FIRST,
    "a load beside one that is awaited": f"{FIRST} {SECOND} {LANDED}",
    "a load, and a later one is awaited": f"{FIRST} {SECOND} {LAST_LANDED}",
    "a store": STORE,
    "a store in a group": f"{STORE} {COMMIT}",
    "a reduction": f"{REDUCE} {COMMIT}",
    "a reduction of the latest group": f"{REDUCE} {COMMIT} {REDUCE} {COMMIT} {ALL_BUT_ONE} {MEET}",
    "a load behind the commit": f"{COMMIT} {FIRST} {READ} {MEET}",
    "a load of the latest group": f"{COMMIT} {FIRST} {COMMIT} {ALL_BUT_ONE} {MEET}",
    "a load, and other threads wait": f"{FIRST} {COMMIT} {READ.replace('@%p1', '@!%p1')} {MEET}",
    "a load, and other threads commit and wait": f"{FIRST} {f'{COMMIT} {READ}'.replace('@%p1', '@!%p1')} {MEET}",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PENDING)
def test_a_copy_that_may_still_read_the_map(name: str, change: str) -> None:
    said = ("of `place` is overwritten", "the tensor map at", "warp 0 issued at PTX line", "may still read the map")
    assert_blamed(changed(PENDING[name], CHANGES[change]), "tensor-map-in-use", *said)


@pytest.mark.parametrize(
    "copy", [f"{FIRST} {MEET} {ALONE}", *(f"{one} {MEET} {COMMIT} {READ}" for one in (FIRST, STORE))]
)
def test_another_warp_does_not_know_the_end_without_a_barrier(copy: str) -> None:
    assert_blamed(changed(copy, by=1), "tensor-map-in-use", "warp 0 issued", schedules=("eager", "lazy", "random:0"))


def test_a_finding_does_not_end_the_run() -> None:
    found, _ = collected(changed(FIRST, behind=wait("mbar", 0)))
    assert slugs(found) == ["tensor-map-in-use"], f"found {list(map(str, found))}"
    assert not found[0].ends, "the machine goes on as if the copy had read its map"
    assert found[0].other is not None
    assert found[0].other.did == "copied through", "reports say that warp 0 `did` it"
    assert 0 < found[0].other.line < found[0].line, "the finding names the copy, which stands above the change"


KEPT = {
    "the same words": "@%p4 st.global.u32 [%rd3], %r4;",
    "the same field": "@%p2 tensormap.replace.tile.global_address.global.b1024.b64 [%place], %x;",
    "words behind its fields": "add.u64 %rd4, %place, 64; @%p2 st.global.b64 [%rd4], %y;",
    "both": "setp.lt.u32 %p5, %lane, 16; selp.b32 %r5, %r4, 7, %p5; @%p4 st.global.u32 [%rd3], %r5;",
}


@pytest.mark.parametrize("name", KEPT)
def test_a_write_that_changes_no_field_is_no_change(name: str) -> None:
    assert_clean(changed(FIRST, KEPT[name], behind=wait("mbar", 0)), {}, EVERY_SCHEDULE)


def test_a_store_in_machine_code_is_seen() -> None:
    """A loop of a warp stores behind the map, so often that it is compiled, and at last to the map."""
    loop = """@!%p3 bra AWAY; mov.u32 %r6, 0; add.u64 %rd4, %place, 64;
    AGAIN: setp.eq.u32 %p5, %r6, 2999; selp.b64 %rd5, %place, %rd4, %p5;
    st.global.b64 [%rd5], %y; //!
    add.u32 %r6, %r6, 1; setp.ne.u32 %p5, %r6, 3000; @%p5 bra AGAIN;
    AWAY:"""
    later = f"""@!%p3 bra AWAY; mov.u32 %r6, 0; add.u64 %rd4, %place, 64; setp.eq.u32 %p6, %tx, 64;
    AGAIN: @!%p6 bra ON;
    bar.warp.sync 0xffffffff; {FIRST}
    mov.u64 %rd4, %place;
    ON: st.global.b64 [%rd4], %y; //!
    add.u32 %r6, %r6, 1; setp.eq.u32 %p6, %r6, 2999; setp.ne.u32 %p5, %r6, 3000; @%p5 bra AGAIN;
    AWAY:"""
    for before, change in ((FIRST, loop), ("", later)):
        assert_blamed(changed(before, change), "tensor-map-in-use", schedules=("eager", "lazy"))


# Between CTAs, and between launches.

MADE = f"{MAKE} ret;"
"""A launch that makes the map."""
FILL = f"@%p4 st.shared.u32 [%r3], %lane; fence.proxy.async; {MEET}"
FLAGGED = """{fill} setp.eq.u32 %p2, %tx, 32; setp.eq.u32 %p5, %cta, 1; @%p5 bra OTHER;
{copy} @%p1 st.release.gpu.global.u32 [%flag], 1; {behind} ret;
OTHER: @!%p2 ret;
POLL: ld.acquire.gpu.global.u32 %r5, [%flag]; setp.eq.u32 %p6, %r5, 0; @%p6 bra POLL;
{change} //!
ret;"""


def flagged(copy: str, behind: str = "") -> Kernel:
    """CTA 0 copies and sets a flag; a thread of CTA 1 finds the flag and changes the map, which a launch has made."""
    body = FLAGGED.format(fill=FILL, copy=copy, behind=behind, change=REPLACE)
    return launched(body, grid=(2, 1, 1), others={"made": f"{HEAD}{MADE}"},
                    sequence=(("made", False), ("kernel", False)))  # fmt: skip


def test_a_flag_hands_the_map_to_another_cta() -> None:
    for copy in (f"{FIRST} {ALONE}", f"{STORE} {COMMIT} {READ}", f"{FIRST} {COMMIT} {READ}"):
        behind = wait("mbar", 0) if copy.startswith(FIRST) else ""
        assert_clean(flagged(copy, behind), {}, EVERY_SCHEDULE)
    for copy, behind in ((FIRST, ALONE), (f"{STORE} {COMMIT}", DONE), (f"{FIRST} {COMMIT}", f"{READ} {ALONE}")):
        assert_blamed(flagged(copy, behind), "tensor-map-in-use", "CTA (0, 0, 0) issued")


MULTICAST = BOX.replace("complete_tx::bytes", "complete_tx::bytes.multicast::cluster")
CTAS = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


@pytest.mark.parametrize("by", [0, 1])
def test_each_cta_of_a_multicast_must_have_its_part(by: int) -> None:
    """CTA 0 copies for both. CTA `by` changes the map, behind its own part or behind both."""

    def kernel(before: str, behind: str) -> Kernel:
        body = f"""@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 128; mov.u16 %h1, 3;
        setp.eq.and.u32 %p7, %cta, 0, %p1; setp.eq.and.u32 %p2, %cta, {by}, %p1;
        {CTAS} @%p7 {MULTICAST}[mbar], %h1;
        {LANDED} {before}
        {REPLACE} //!
        {behind} ret;"""
        return launched(body, grid=(2, 1, 1), cluster=(2, 1, 1), others={"made": f"{HEAD}{MADE}"},
                        sequence=(("made", False), ("kernel", False)))  # fmt: skip

    assert_clean(kernel(CTAS, ""), {}, EVERY_SCHEDULE)
    assert_blamed(kernel("", CTAS), "tensor-map-in-use", "may still read the map")


WAITED = "griddepcontrol.wait;"


@pytest.mark.parametrize("copy", [FIRST, STORE, REDUCE])
def test_a_dependent_launch_uses_a_map_that_an_earlier_one_makes(copy: str) -> None:
    def used(waited: str, *, dependent: bool = True) -> Kernel:
        end = wait("mbar", 0) if copy == FIRST else f"{COMMIT} {DONE}"
        body = f"{FILL} {waited}\n{copy} //!\n{end} ret;"
        return launched(body, others={"made": f"{HEAD}{MADE}"}, sequence=(("made", False), ("kernel", dependent)))

    assert_blamed(used(""), "dependent-launch-not-awaited", "of `place` is read", "made, which wrote it")
    assert_clean(used(WAITED), {}, EVERY_SCHEDULE)
    assert_clean(used("", dependent=False), {}, EVERY_SCHEDULE)


@pytest.mark.parametrize("copy", [f"{FIRST} {wait('mbar', 0)}", f"{STORE} {COMMIT} {DONE}"], ids=["load", "store"])
def test_a_dependent_launch_changes_a_map_that_an_earlier_one_uses(copy: str) -> None:
    def replaced(waited: str, *, dependent: bool = True) -> Kernel:
        using = f"{HEAD} {FILL} {copy} ret;"
        body = f"setp.eq.u32 %p2, %tx, 0; {waited}\n{REPLACE} //!\nret;"
        return launched(body, others={"made": f"{HEAD}{MADE}", "using": using},
                        sequence=(("made", False), ("using", False), ("kernel", dependent)))  # fmt: skip

    assert_blamed(replaced(""), "dependent-launch-not-awaited", "of `place` is overwritten", "using, which read it")
    assert_clean(replaced(WAITED), {}, EVERY_SCHEDULE)
    assert_clean(replaced("", dependent=False), {}, EVERY_SCHEDULE)
