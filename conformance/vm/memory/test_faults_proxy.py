"""Bulk copies of global memory that threads wrote in the same launch: a proxy fence must lie in between."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.vm.kernel import Kernel, Map, assert_blamed, assert_clean, init, wait

THREADS = 64
FENCE, GLOBAL_FENCE = "fence.proxy.async;", "fence.proxy.async.global;"
SHARED_FENCE = "fence.proxy.async.shared::cta;"
HEAD = f""".shared .align 128 .b8 buf[256]; .shared .align 8 .b64 bar;
{init("bar")}
mov.u32 %r20, bar; mov.u32 %r21, buf; setp.eq.u32 %p1, %tx, 32; mul.wide.u32 %rd1, %tx, 4; cvt.u32.u64 %r1, %rd1;
add.u64 %rd2, %a, %rd1; add.u64 %rd3, %out, %rd1; add.u32 %r2, %r21, %r1;"""
STORE = "st.global.b32 [%rd2], %tx;"
LINEAR = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%a], 256, [%r20];"
TENSOR = "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r21], [%m, {%r3}], [%r20];"
"""Thread 32 copies all of `a`."""
TAIL = f"""{wait("bar", 0)}
ld.shared.b32 %r4, [%r2]; st.global.b32 [%rd3], %r4; ret;"""
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %rd9, [%r20], 256;"


def kernel(body: str, **options: object) -> Kernel:
    """One CTA of two warps on `a`, with a tensor map `m` over all of it, and `out`."""
    buffers = {name: np.zeros(THREADS, np.uint32) for name in ("a", "out")}
    maps = {"m": Map("a", "u32", (THREADS,), (), (THREADS,))}
    return Kernel(f"{HEAD}\n{body}", buffers, maps, block=(THREADS, 1, 1), **options)  # type: ignore[arg-type]


def loaded(before: str, after: str, copy: str = LINEAR) -> Kernel:
    """Every thread writes `a`; `before` and `after` surround a barrier; thread 32 copies."""
    return kernel(f"mov.b32 %r3, 0;\n{before}\nbar.sync 0;\n{after}\n{EXPECT}\n@%p1 {copy} //!\n{TAIL}")


CLEAN = {
    "writers fence": (f"{STORE} {FENCE}", ""),
    "writers fence global memory": (f"{STORE} {GLOBAL_FENCE}", ""),
    "the issuer fences": (STORE, FENCE),
    "the issuer fences global memory": (STORE, f"@%p1 {GLOBAL_FENCE}"),
}


@pytest.mark.parametrize("copy", [LINEAR, TENSOR], ids=["linear", "tensor"])
@pytest.mark.parametrize("name", CLEAN)
def test_a_fence_on_either_side_will_do(name: str, copy: str) -> None:
    assert_clean(loaded(*CLEAN[name], copy), {"out": np.arange(THREADS)})


PLANTED = {
    "no fence": (STORE, ""),
    "a fence of shared memory": (f"{STORE} {SHARED_FENCE}", SHARED_FENCE),
    "a fence of the alias proxy": (f"{STORE} fence.proxy.alias;", ""),
    "a fence of memory only": (f"{STORE} fence.acq_rel.gpu;", "fence.acq_rel.gpu;"),
    "a fence before the store": (f"{FENCE} {STORE}", ""),
    "one of two warps fences": (f"{STORE} setp.eq.u32 %p2, %warp, 1; @%p2 {FENCE}", ""),
    "the other warp fences after the barrier": (STORE, f"setp.eq.u32 %p2, %warp, 0; @%p2 {FENCE}"),
    "an atomic": ("atom.global.exch.b32 %r5, [%rd2], %tx;", ""),
}


@pytest.mark.parametrize("copy", [LINEAR, TENSOR], ids=["linear", "tensor"])
@pytest.mark.parametrize("name", PLANTED)
def test_a_copy_of_what_no_fence_covers(name: str, copy: str) -> None:
    said = ("a bulk copy reads byte", "of `a`, which warp", "wrote at PTX line", "generic proxy", "global memory")
    assert_blamed(loaded(*PLANTED[name], copy), "missing-proxy-fence", *said)


def test_an_end_of_a_launch_will_do() -> None:
    body = f"mov.b32 %r3, 0; {EXPECT}\n@%p1 {LINEAR}\n{TAIL}"
    writer = "mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %a, %rd1; st.global.b32 [%rd2], %tx; ret;"
    for dependent in (False, True):
        waited = f"griddepcontrol.wait;\n{body}"
        whole = kernel(waited, others={"writer": writer}, sequence=(("writer", False), ("kernel", dependent)))
        assert_clean(whole, {"out": np.arange(THREADS)})


LINEAR_STORE = "cp.async.bulk.global.shared::cta.bulk_group [%a], [%r21], 256;"
STORED = f"""st.shared.b32 [%r2], %tx; fence.proxy.async.shared::cta; bar.sync 0;
@%p1 {LINEAR_STORE}{{mark}}
@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"""


@pytest.mark.parametrize(("fence", "clean"), [(FENCE, True), ("", False)])
def test_a_copy_over_what_threads_wrote(fence: str, clean: bool) -> None:
    body = f"{STORE} {fence}\n{STORED.format(mark=' //!')}\nret;"
    if clean:
        assert_clean(kernel(body), {"a": np.arange(THREADS)})
    else:
        assert_blamed(kernel(body), "missing-proxy-fence", "a bulk copy overwrites byte", "of `a`")


RELEASE_ONE_WAY = "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;"
ACQUIRE_ONE_WAY = "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;"


@pytest.mark.parametrize(
    ("writer", "issuer"), [(RELEASE_ONE_WAY, ""), ("", ACQUIRE_ONE_WAY), (RELEASE_ONE_WAY, ACQUIRE_ONE_WAY), ("", "")]
)
def test_one_way_fences_cover_shared_memory(writer: str, issuer: str) -> None:
    """The writers release, the issuer acquires. Neither covers what was written to global memory."""
    stored = STORED.replace(f"{SHARED_FENCE} bar.sync 0;", f"{writer} bar.sync 0; {issuer}")
    assert stored != STORED
    of_shared = kernel(f"{stored.format(mark=' //!')}\nret;")
    if writer or issuer:
        assert_clean(of_shared, {"a": np.arange(THREADS)})
    else:
        assert_blamed(of_shared, "missing-proxy-fence", "reads what warp")
    of_global = loaded(f"{STORE} {writer}", issuer)
    assert_blamed(of_global, "missing-proxy-fence", "a bulk copy reads byte", "of `a`, which warp")


@pytest.mark.parametrize(("fence", "clean"), [(FENCE, True), ("", False)])
def test_what_a_warp_writes_first_needs_a_fence_too(fence: str, clean: bool) -> None:
    body = f""".shared .align 16 .b8 cells[512]; mov.u32 %r30, 0; setp.ne.u32 %p3, %tx, 0; @%p3 bra END;
    st.shared.u32 [cells], 5; st.shared.v4.u32 [cells], {{%r30, %r30, %r30, %r30}}; {fence}
    cp.async.bulk.global.shared::cta.bulk_group [%out], [cells], 16; //!
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END: ret;"""
    twice = Kernel(body, {"out": np.ones(4, np.uint32)})
    if clean:
        assert_clean(twice, {"out": np.zeros(4, np.uint32)})
    else:
        assert_blamed(twice, "missing-proxy-fence")


REDUCTIONS = {
    "linear": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%a], [%r21], 256;",
    "tensor": "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%m, {%r3}], [%r21];",
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_of_and_into_what_threads_wrote(name: str) -> None:
    """The source needs a fence of shared memory, the target one of global memory; atomics need none."""
    stored = STORED.replace(LINEAR_STORE, REDUCTIONS[name].replace("{%r3}", "{{%r3}}"))

    def reduced(target: str, source: str, write: str = STORE) -> Kernel:
        text = stored.replace(SHARED_FENCE, source).format(mark=" //!")
        return kernel(f"mov.b32 %r3, 0; {write} {target}\n{text}\nret;")

    twice = {"a": 2 * np.arange(THREADS)}
    assert_clean(reduced(GLOBAL_FENCE, SHARED_FENCE), twice)
    assert_clean(reduced("", SHARED_FENCE, "red.relaxed.gpu.global.add.u32 [%rd2], %tx;"), twice)
    assert_blamed(reduced("", SHARED_FENCE), "missing-proxy-fence", "a bulk copy reduces into byte", "of `a`")
    assert_blamed(reduced(GLOBAL_FENCE, ""), "missing-proxy-fence", "reads what warp")


def test_the_end_of_a_copy_is_a_fence_itself() -> None:
    """Threads that have waited for a copy see what it wrote, and so do later copies."""
    body = f"""{STORED.format(mark="")}
    bar.sync 0; ld.global.b32 %r4, [%rd2]; st.global.b32 [%rd3], %r4; bar.sync 0;
    {EXPECT}\n@%p1 {LINEAR}\n{wait("bar", 0)}\nret;"""
    assert_clean(kernel(body), {"a": np.arange(THREADS), "out": np.arange(THREADS)})


def test_non_bulk_copies_are_of_the_generic_proxy() -> None:
    body = f"""{STORE} bar.sync 0;
    cp.async.ca.shared.global [%r2], [%rd2], 4; cp.async.wait_all;
    ld.shared.b32 %r4, [%r2]; st.global.b32 [%rd3], %r4; ret;"""
    assert_clean(kernel(body), {"out": np.arange(THREADS)})


FLAGGED = """.shared .align 16 .b8 buf[16]; .shared .align 8 .b64 bar;
{init}
mov.u32 %r20, bar; mov.u32 %r21, buf; setp.ne.u32 %p1, %tx, 0; @%p1 ret;
setp.eq.u32 %p2, %cta, 1; @%p2 bra READER;
st.global.v4.b32 [%a], {{7, 7, 7, 7}}; {before} st.release.gpu.global.b32 [%flag], 1; ret;
READER: ld.acquire.gpu.global.b32 %r4, [%flag]; setp.eq.u32 %p3, %r4, 0; @%p3 bra READER;
{after}
mbarrier.arrive.expect_tx.shared::cta.b64 %rd9, [%r20], 16;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%a], 16, [%r20]; //!
{wait}
ld.shared.b32 %r4, [%r21]; st.global.b32 [%out], %r4; ret;"""


@pytest.mark.parametrize(
    ("before", "after", "clean"),
    [(FENCE, "", True), ("", FENCE, True), ("", GLOBAL_FENCE, True), ("", "", False), ("", SHARED_FENCE, False)],
)
def test_what_another_cta_wrote(before: str, after: str, clean: bool) -> None:
    """A flag in global memory publishes what the writer's fence covers; a fence after the flag covers the rest."""
    body = FLAGGED.format(init=init("bar"), wait=wait("bar", 0), before=before, after=after)
    buffers = {"a": np.zeros(4, np.uint32), "flag": np.zeros(1, np.uint32), "out": np.zeros(1, np.uint32)}
    flagged = Kernel(body, buffers, grid=(2, 1, 1))
    if clean:
        assert_clean(flagged, {"out": [7]})
    else:
        assert_blamed(flagged, "missing-proxy-fence", "byte 0 of `a`, which warp 0 of CTA (0, 0, 0) wrote")
