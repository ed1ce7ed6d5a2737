"""Runs that collect findings: their grades, what is no finding, and that the run continues as if in order."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.vm.faults import Fault, Findings
from backends.vm.machine.machine import Machine
from backends.vm.ptx.source_lines import source_of
from backends.vm.rules import COLLECTED_ONLY, COUNTERS, LEADS_TO, RULES, as_markdown
from conformance import ROOT
from conformance.vm.isa.test_reductions import reduced_into
from conformance.vm.kernel import (
    EXPECT,
    FENCE,
    LOAD,
    STORE,
    SYNC,
    Kernel,
    Map,
    X,
    assert_blamed,
    collected,
    copy_kernel,
    init,
    slugs,
    tmem_alloc,
    wait,
)
from conformance.vm.kernel import STAGES as COPY_STAGES
from conformance.vm.machine.test_setmaxnreg import again as resized
from conformance.vm.memory.test_faults_tensor import holding
from conformance.vm.memory.test_mbarrier import waited_once
from conformance.vm.tensor_kernel import COMMIT, MMA, STAGES, mma_kernel
from conformance.vm.tensor_kernel import LOAD as TMEM_LOAD
from megamoe.diff.directions import NOT_FAILED_ON, direction

SCHEDULES = ("eager", "lazy", "random:1")
AFTER, BEFORE = "tcgen05.fence::after_thread_sync;", "tcgen05.fence::before_thread_sync;"
OTHER_EXPECT, OTHER_LOAD = EXPECT.replace("[mbar]", "[other]"), LOAD.replace("[mbar]", "[other]")
ZEROS = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r44], {{{', '.join(16 * ['%r18'])}}};"


def refilled(fence: str) -> Kernel:
    """Threads read a stage, meet at a barrier, and a TMA load refills it."""
    again = f"""ld.shared.u32 %r1, [%r42];
{fence}
bar.sync 1;
@%p3 bra REFILLED;
{OTHER_EXPECT}
{OTHER_LOAD}
REFILLED: {wait("other", 0)}"""
    return copy_kernel({"wait": f"{wait('mbar', 0)}\n{again}"})


def landed_on_the_address(fence: str) -> Kernel:
    """A TMA load overwrites the word where tcgen05.alloc wrote its address."""
    held = f"""{COPY_STAGES["addresses"]}
setp.ge.u32 %p1, %tx, 32;
@%p1 bra FREED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r41], 32;
ld.shared.u32 %r1, [%r41];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;
{fence}
FREED: bar.sync 1;"""
    return copy_kernel({"addresses": held})


def copied_to_smem(fence: str) -> Kernel:
    """The operands of an MMA arrive by cp.async."""
    fill = """mul.wide.u32 %rd2, %tx, 16; add.u64 %rd2, %rd2, %ones;
add.u32 %r17, %r41, %r45; cp.async.ca.shared.global [%r17], [%rd2], 16;
cp.async.ca.shared.global [%r17+2048], [%rd2], 16;
setp.lt.u32 %p2, %tx, 32; add.u32 %r17, %r42, %r45;
@%p2 cp.async.ca.shared.global [%r17], [%rd2], 16;"""
    ones = np.full(1024, 0x3C00, np.uint16)
    publish = f"cp.async.wait_all;\n{fence}\n{SYNC}"
    return mma_kernel({"fill": fill, "publish": publish, "wait": f"{wait('mbar', 0)}\n{AFTER}"}, {"ones": ones})


def initialised_by_all(counts: str) -> Kernel:
    each = f"setp.eq.u32 %p13, %lane, 0;\n@%p13 mbarrier.init.shared::cta.b64 [mbar], {counts};"
    return copy_kernel({"setup": f"{init('mbar', 'other')}\n{each}\nfence.mbarrier_init.release.cluster;\n{SYNC}"})


def accumulating(before: str, after: str) -> Kernel:
    """Threads clear an accumulator, meet at a barrier, and an MMA adds to it."""
    clear = f"mov.b32 %r18, 0;\n{ZEROS}\ntcgen05.wait::st.sync.aligned;\n{before}\n{FENCE}\n{SYNC}"
    issue = {"before": f"{after}\nsetp.ne.u32 %p3, %tx, 0; setp.eq.u32 %p1, 0, 0;\n@%p3 bra ISSUED;"}
    return mma_kernel({"publish": clear, "wait": f"{wait('mbar', 0)}\n{AFTER}", **issue})


COPY = "tcgen05.cp.cta_group::1.128x256b [%r47], %rd10;"
FROM_TMEM = MMA.replace("%rd10", "[%r47]")


def copied_over(between: str) -> Kernel:
    """tcgen05.cp into operands that an earlier MMA reads."""
    setup = f"{init('mbar', 'other')}\n{tmem_alloc(32)}\nadd.u32 %r47, %r40, 16;"
    issue = f"{COPY}\n{FROM_TMEM}\n{between}\n{COPY}\n{FROM_TMEM}\n{COMMIT}"
    return mma_kernel({"setup": setup, "issue": issue, "wait": f"{wait('mbar', 0)}\n{AFTER}"})


def loaded(between: str) -> Kernel:
    read = f"mov.b32 %r18, 0;\n{TMEM_LOAD}\n{between}\n{ZEROS}\ntcgen05.wait::st.sync.aligned;"
    return mma_kernel({"wait": f"{wait('mbar', 0)}\n{AFTER}", "read": read})


def lanes(address: str) -> Kernel:
    read = f"{TMEM_LOAD.replace('%r44', address)}\ntcgen05.wait::ld.sync.aligned;"
    return mma_kernel({"wait": f"{wait('mbar', 0)}\n{AFTER}", "read": read})


def block_scaled(idesc: int) -> Kernel:
    """A product of fp4 whose scale factors, all ones, are stored by threads."""
    scales = "mov.b32 %r18, 0x7f7f7f7f; add.u32 %r47, %r44, 16;\n" + ZEROS.replace("[%r44]", "[%r47]")
    fill = f"{STAGES['fill']}\n{scales}\ntcgen05.wait::st.sync.aligned;\n{BEFORE}"
    mma = f"tcgen05.mma.cta_group::1.kind::mxf4.block_scale [%r40], %rd10, %rd11, {idesc}, [%r47], [%r47], %p1;"
    issue = {"before": f"{AFTER}\n{STAGES['before']}", "issue": f"{mma}\n{COMMIT}"}
    return mma_kernel({"fill": fill, "wait": f"{wait('mbar', 0)}\n{AFTER}", **issue})


FP4 = 1 << 7 | 1 << 10 | 16 >> 3 << 17 | 1 << 23 | 128 >> 7 << 27


def accumulated_over(between: str) -> Kernel:
    """An MMA into the operand A of an earlier MMA."""
    kernel = copied_over(between)
    over = MMA.replace("[%r40]", "[%r47]")
    return replace(kernel, body=kernel.body.replace(f"{between}\n{COPY}\n{FROM_TMEM}", f"{between}\n{over}"))


def multiplied(before: str, behind: str) -> Kernel:
    """A wgmma whose accumulator is cleared by threads. The wgmma.fence comes before the clearing or after it."""
    ones = " ".join(f"mov.b32 %r{i}, 0x3c003c00;" for i in range(5))
    clear = " ".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(4))
    body = f""".shared .align 1024 .b8 b[512]; mov.u32 %r41, b; mad.lo.u32 %r17, %tx, 4, %r41; {ones}
st.shared.u32 [%r17], %r4; setp.eq.u32 %p1, 0, 0; {FENCE}
{SYNC}
shr.u32 %r41, %r41, 4; cvt.u64.u32 %rd10, %r41; or.b64 %rd10, %rd10, 0x1000080000;
{before} {clear} {behind}
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f0,%f1,%f2,%f3}}, {{%r0,%r1,%r2,%r3}}, %rd10, %p1, 1, 1, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %out; st.global.f32 [%rd1], %f0; ret;"""
    return Kernel(body, {"out": np.zeros(128, np.float32)}, block=(128, 1, 1), target="sm_90a")


def exchanged(between: str) -> Kernel:
    """Each lane reads what its neighbour stored, and lane 0 copies everything to global memory."""
    body = f""".shared .align 16 .b8 cells[128]; mov.u32 %r41, cells; mad.lo.u32 %r17, %lane, 4, %r41;
st.shared.u32 [%r17], %lane; {FENCE}
{between}
xor.b32 %r17, %r17, 4; ld.shared.u32 %r1, [%r17]; mul.wide.u32 %rd1, %lane, 4; add.u64 %rd1, %rd1, %out;
st.global.u32 [%rd1], %r1; setp.ne.u32 %p3, %lane, 0; @%p3 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%copy], [cells], 128;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END: ret;"""
    return Kernel(body, {"out": np.zeros(32, np.uint32), "copy": np.zeros(32, np.uint32)})


ALL_ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [mbar];"
ONE_ARRIVES = f"setp.eq.u32 %p3, %lane, 0; @%p3 {ALL_ARRIVE}"


ST, STMATRIX = "st.shared.u32 [%r17], %lane;", "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r18], {%lane};"


def handed_over(
    arrival: str, *, count: int = 1, store: str = ST, until: str = "", take: str = "ld.shared.u32 %r1, [%r17];",
    behind: str = "",
) -> Kernel:  # fmt: skip
    """Lanes of warp 0 store and arrive at an mbarrier. Warp 1 waits for it, or runs `until`, and reads the values."""
    body = f""".shared .align 16 .b8 cells[128]; .shared .align 8 .b64 mbar; mov.u32 %r41, cells;
{init("mbar", count=count)}
mad.lo.u32 %r17, %lane, 4, %r41; and.b32 %r18, %lane, 7; mad.lo.u32 %r18, %r18, 16, %r41;
setp.ne.u32 %p2, %warp, 0; @%p2 bra READER;
{store} {FENCE}
{arrival}
{behind}
bra END;
READER: {until or wait("mbar", 0)}
{take}
mul.wide.u32 %rd1, %lane, 4; add.u64 %rd1, %rd1, %out; st.global.u32 [%rd1], %r1;
END: ret;"""
    return Kernel(body, {"out": np.zeros(32, np.uint32)}, block=(64, 1, 1))


ALL_RELEASE = "st.release.gpu.global.u32 [%flag], 1;"
ONE_RELEASES = f"setp.eq.u32 %p3, %lane, 0; @%p3 {ALL_RELEASE}"
ALL_ACQUIRE = "POLL: ld.acquire.gpu.global.u32 %r1, [%flag]; setp.eq.u32 %p4, %r1, 0; @%p4 bra POLL;"
ONE_ACQUIRES = f"setp.ne.u32 %p3, %lane, 0; @%p3 bra TOLD; {ALL_ACQUIRE} TOLD:"


def told(release: str, acquire: str, *, take: str = "ld.global.u32 %r1, [%rd1];", apart: bool = True) -> Kernel:
    """Lanes of one warp store to global memory and release a flag. Another warp, in another CTA if `apart`, acquires
    the flag and reads the stored values."""
    body = f"""mov.u32 %r2, {"%ctaid.x" if apart else "%warp"}; mul.wide.u32 %rd1, %lane, 4; add.u64 %rd1, %rd1, %cells;
setp.ne.u32 %p2, %r2, 0; @%p2 bra READER;
st.global.u32 [%rd1], %lane;
{release}
bra END;
READER: {acquire}
{take}
mul.wide.u32 %rd1, %lane, 4; add.u64 %rd1, %rd1, %out; st.global.u32 [%rd1], %r1;
END: ret;"""
    buffers = {name: np.zeros(32, np.uint32) for name in ("cells", "flag", "out")}
    return Kernel(body, buffers, grid=(2 if apart else 1, 1, 1), block=(32 if apart else 64, 1, 1))


LANES_MEET, WGMMA_FENCE = "bar.warp.sync 0xffffffff;", "wgmma.fence.sync.aligned;"
SIGNAL = COMMIT.replace("[mbar]", "[other]")
UNFENCED_INIT = init("mbar", "other").replace("fence.mbarrier_init.release.cluster;\n", "")


def constant_load(of: str) -> Kernel:
    """Each lane stores a word to `out`, and loads a constant word."""
    body = f"""mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %out, %rd1; add.u64 %rd3, {of}, %rd1;
    st.global.u32 [%rd2], %tx; ld.global.nc.u32 %r1, [%rd3]; ret;"""
    return Kernel(body, {"x": np.zeros(32, np.uint32), "out": np.zeros(32, np.uint32)})


def wide_field(position: int) -> Kernel:
    return Kernel(f"mov.b32 %r1, {position}; cvt.u64.u32 %rd1, %tx; bfe.u64 %rd2, %rd1, %r1, 4; ret;")


def remapped(release: str) -> Kernel:
    """Each lane copies a word of a tensor map to global memory; lane 0 acquires the map and copies a box through it."""
    body = f""".shared .align 128 .b8 box[128]; .shared .align 8 .b64 mbar; {init("mbar")}
    shl.b32 %r1, %lane, 2; cvt.u64.u32 %rd1, %r1; add.u64 %rd2, %m, %rd1; add.u64 %rd3, %place, %rd1;
    ld.u32 %r2, [%rd2]; st.global.u32 [%rd3], %r2; {LANES_MEET} {release}
    fence.proxy.tensormap::generic.acquire.gpu [%place], 128;
    setp.ne.u32 %p1, %tx, 0; mov.u32 %r4, 0; @%p1 bra END;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 128;
    cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%place, {{%r4}}], [mbar];
    {wait("mbar", 0)}
    END: ret;"""
    buffers = {"x": np.zeros(32, np.uint32), "place": np.zeros(128, np.uint8)}
    return Kernel(body, buffers, {"m": Map("x", "u32", [32], [], [32])}, inputs=("x",))


GRADED = {
    "exit-with-pending-store": (copy_kernel({"drain": ""}), copy_kernel()),
    "copy-missing-proxy-fence": (copied_to_smem(""), copied_to_smem(FENCE)),
    "unfenced-overwrite": (refilled(""), refilled(FENCE)),
    "mbarrier-reinitialised": (initialised_by_all("1"), copy_kernel()),
    "mbarrier-init-unfenced": (copy_kernel({"setup": UNFENCED_INIT}), copy_kernel()),
    "tmem-lane-ignored": (lanes("%r40"), lanes("%r44")),
    "descriptor-bit-ignored": (block_scaled(FP4 | 1 << 12), block_scaled(FP4)),
    "missing-tcgen05-fence": (accumulating("", AFTER), accumulating(BEFORE, AFTER)),
    "tmem-copy-unordered": (copied_over(SIGNAL), copied_over(f"{SIGNAL}\n{wait('other', 0)}\n{AFTER}")),
    "tmem-load-used-unwaited": (loaded("add.u32 %r17, %r0, %r0;"), loaded("tcgen05.wait::ld.sync.aligned;")),
    "tmem-mma-unordered": (accumulated_over(SIGNAL), accumulated_over(f"{SIGNAL}\n{wait('other', 0)}\n{AFTER}")),
    "wgmma-fence-early": (multiplied(WGMMA_FENCE, ""), multiplied("", WGMMA_FENCE)),
    "lanes-unordered": (exchanged(""), exchanged(LANES_MEET)),
    "constant-load-of-written": (constant_load("%out"), constant_load("%x")),
    "tensor-map-not-released": (remapped(""), remapped("fence.proxy.tensormap::generic.release.gpu;")),
    "tmem-hold-and-wait": (holding(256, 256), holding(256, 256, smem=113 << 10)),
    "wide-bit-field": (wide_field(256), wide_field(255)),
    "setmaxnreg-unsynchronised": (resized("", ""), resized("", "bar.sync 0;")),
    "async-to-own-cta": (reduced_into(0), reduced_into(1)),
    "wait-result-unread": (waited_once(""), waited_once("@!%p1 bra AGAIN;")),
    "unspecified-result": (
        Kernel("mov.b32 %r1, 0; rem.u32 %r2, %tx, %r1; ret;"),
        Kernel("mov.b32 %r1, 3; rem.u32 %r2, %tx, %r1; ret;"),
    ),
}
"""For each rule that is no error: a kernel that breaks it, and a fixed one. Both compute the right result."""


def test_the_word_that_an_allocation_wrote_is_overwritten_as_what_was_read_is() -> None:
    """Triton's kernels load over it after only a barrier."""
    for fence, rules in (("", {"unfenced-overwrite"}), (FENCE, set[str]())):
        found, _ = collected(landed_on_the_address(fence), SCHEDULES[0])
        assert set(slugs(found)) == rules, f"with {fence or 'no fence'}: {list(map(str, found))}"


@pytest.mark.parametrize("rule", GRADED)
def test_a_rule_that_kernels_live_without_is_found_and_the_result_stays(rule: str) -> None:
    broken, mended = GRADED[rule]
    for schedule in SCHEDULES[:2]:
        found, data = collected(broken, schedule)
        assert set(slugs(found)) == {rule}, f"{schedule}: planted [{rule}], found {list(map(str, found))}"
        assert not found[0].ends, "the run goes on"
        clean, right = collected(mended, schedule)
        assert not clean, f"{schedule}: the mended kernel is blamed: {list(map(str, clean))}"
        assert all(np.array_equal(data[name], right[name]) for name in data), f"{schedule}: the results differ"


LATER = "ld.global.u32 %r2, [%rd2];"
CONSTANT = {
    "a plain load later": ("st.global.u32 [%rd2], %tx;", LATER),
    "a plain load and a store later": ("", f"{LATER} st.global.u32 [%rd2], %tx;"),
    "an atomic later": ("", f"{LATER} red.global.add.u32 [%rd2], %tx;"),
    "loads of parts": ("st.global.u32 [%rd2], %tx;", "ld.global.u8 %r2, [%rd2]; ld.global.u16 %r2, [%rd2+2];"),
}
"""What stands before and after a load with .nc: the byte is written, and another load is the last to read it."""


@pytest.mark.parametrize("name", CONSTANT)
def test_a_constant_load_is_found_whatever_reads_the_byte_later(name: str) -> None:
    before, behind = CONSTANT[name]
    for of, rules in (("%out", ["constant-load-of-written"]), ("%x", list[str]())):
        body = f"""mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %out, %rd1; add.u64 %rd3, {of}, %rd1;
        {before}
        ld.global.nc.u32 %r1, [%rd3];
        {behind}
        ret;"""
        found, _ = collected(Kernel(body, {"x": np.zeros(32, np.uint32), "out": np.zeros(32, np.uint32)}))
        assert slugs(found) == rules, f"a load of {of} with .nc, {name}: {list(map(str, found))}"
        assert not found or "ld.global.nc" in found[0].text, f"{found[0]} names another load"


def test_a_constant_load_from_two_buffers_is_found() -> None:
    body = """mul.wide.u32 %rd1, %tx, 4; setp.lt.u32 %p1, %tx, 16; selp.b64 %rd2, %out, %x, %p1;
    add.u64 %rd2, %rd2, %rd1; ld.global.nc.u32 %r1, [%rd2]; @%p1 st.global.u32 [%rd2], %tx; ret;"""
    found, _ = collected(Kernel(body, {"x": np.zeros(32, np.uint32), "out": np.zeros(32, np.uint32)}))
    assert slugs(found) == ["constant-load-of-written"], f"found {list(map(str, found))}"


def test_a_constant_load_in_machine_code_is_found_too() -> None:
    """A loop loads so many words with .nc that the load is compiled, and each again without. The last is written."""
    count = 3000
    body = f"""mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %out, %rd1; mov.u32 %r3, 0;
    AGAIN:
    ld.global.nc.u32 %r1, [%rd2];
    ld.global.u32 %r2, [%rd2];
    add.u64 %rd2, %rd2, 128; add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, {count}; @%p1 bra AGAIN;
    st.global.u32 [%rd2+-128], %tx;
    ret;"""
    found, _ = collected(Kernel(body, {"out": np.zeros(32 * count, np.uint32)}))
    assert slugs(found) == ["constant-load-of-written"], f"found {list(map(str, found))}"
    assert f"byte {128 * (count - 1)} of `out`" in str(found[0]), f"{found[0]} names a word that nobody writes"


@pytest.mark.parametrize("rule", GRADED)
def test_a_judged_row_fails_on_it_unless_only_collectors_are_told(rule: str) -> None:
    met = ""
    try:
        GRADED[rule][0].launch(Machine("eager"))
    except Fault as fault:
        met = fault.rule
    assert met == ("" if rule in COLLECTED_ONLY else rule), f"a row meets {met!r}, unlike docs/rules/README.md"


@pytest.mark.parametrize("rule", COUNTERS)
def test_a_judged_row_counts_what_it_does_not_fail_on(rule: str) -> None:
    """The gate tracks the count, and the fixed kernel has none."""
    counted: list[int] = []
    for kernel in GRADED[rule]:
        machine = Machine("eager")
        kernel.launch(machine)
        counted.append(machine.counters.get(COUNTERS[rule], 0))
        assert direction(COUNTERS[rule]) == "cost", f"more of {COUNTERS[rule]} is worse, and the gate does not know it"
        assert COUNTERS[rule] in NOT_FAILED_ON, f"a run passes with {COUNTERS[rule]} and does not tell"
    broken, mended = counted
    assert broken, f"[{rule}] is broken, and {COUNTERS[rule]} does not say so"
    assert not mended, f"{COUNTERS[rule]} is {mended} of a kernel that keeps [{rule}]"


def test_both_tcgen05_fences_are_asked_for() -> None:
    without, _ = collected(accumulating(BEFORE, ""))
    assert slugs(without) == ["missing-tcgen05-fence"]
    assert "after_thread_sync" in str(without[0])
    both = accumulating(BEFORE, AFTER)
    early = both.body.replace(f"\n{BEFORE}", "").replace(ZEROS, f"{BEFORE}\n{ZEROS}")
    ahead, _ = collected(replace(both, body=early))
    assert slugs(ahead) == ["missing-tcgen05-fence"], "the fence stands in front of what it should order"
    plain, _ = collected(mma_kernel())
    assert slugs(plain) == ["missing-tcgen05-fence"], "a load behind a commit needs the fence after the wait"


def test_a_warp_needs_no_fence_behind_itself() -> None:
    """Only cells written by other warps need the fences, not those of the issuing warp."""
    found, _ = collected(accumulating("", ""))
    assert slugs(found) == ["missing-tcgen05-fence"]
    assert found[0].other is not None
    assert found[0].other.who != "warp 0", f"{found[0]}: warp 0 issues the MMA"


def test_a_lane_that_copies_alone_waits_for_the_other_lanes() -> None:
    lines = {one.line for one in collected(exchanged(""))[0]}
    texts = [exchanged("").ptx.splitlines()[line - 1] for line in sorted(lines)]
    assert any("cp.async.bulk" in text for text in texts), f"the copy by lane 0 is not found: {texts}"
    own = exchanged("").body.replace("xor.b32 %r17, %r17, 4;", "").replace("cp.async.bulk.global", "// ")
    assert not collected(Kernel(own, exchanged("").buffers))[0], "a lane needs no barrier behind itself"


def test_an_arrival_of_one_lane_releases_what_the_others_stored_before_they_met() -> None:
    """compute-sanitizer's racecheck takes the fixed kernel for the broken one (docs/compute-sanitizer.md)."""
    for schedule in SCHEDULES:
        found, data = collected(handed_over(ONE_ARRIVES), schedule)
        assert slugs(found) == ["lanes-unordered"], f"{schedule}: planted, found {list(map(str, found))}"
        assert "lane 1 of warp 0 wrote" in str(found[0]), f"{found[0]}"
        assert np.array_equal(data["out"], np.arange(32)), "the run goes on"
    elected, _ = collected(handed_over(f"elect.sync %r2|%p3, 0xffffffff; @%p3 {ALL_ARRIVE}"))
    assert slugs(elected) == ["lanes-unordered"], f"to elect a lane orders no memory: {list(map(str, elected))}"
    matrix, _ = collected(handed_over(ONE_ARRIVES, store=STMATRIX))
    assert slugs(matrix) == ["lanes-unordered"], f"all lanes have stored the matrix: {list(map(str, matrix))}"
    copy = "cp.async.bulk.global.shared::cta.bulk_group [%out], [cells], 128;"
    drain = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    take = f"setp.ne.u32 %p3, %lane, 0; @%p3 bra END; mov.u32 %r1, 1; {copy} {drain}"
    copied, _ = collected(handed_over(ONE_ARRIVES, take=take))
    assert "lanes-unordered" in slugs(copied), f"an asynchronous reader is not told: {list(map(str, copied))}"


def test_what_releases_all_that_is_read_is_no_finding() -> None:
    own = handed_over(ONE_ARRIVES, take="ld.shared.u32 %r1, [cells];")
    rightly = {
        "lanes meet ahead of the arrival": handed_over(f"{LANES_MEET} {ONE_ARRIVES}"),
        "another instruction gathers them": handed_over(f"vote.sync.any.pred %p2, %p3, 0xffffffff; {ONE_ARRIVES}"),
        "every lane arrives": handed_over(ALL_ARRIVE, count=32),
        "every lane arrives, then one once more": handed_over(f"{ALL_ARRIVE} {ONE_ARRIVES}", count=33),
        "every lane arrives, then one once more, of a matrix": handed_over(
            f"{ALL_ARRIVE} {ONE_ARRIVES}", count=33, store=STMATRIX
        ),
        "only what the arriving lane stored is read": own,
        "lanes meet only behind, and arrive again": handed_over(
            ONE_ARRIVES, count=2, behind=f"{LANES_MEET} {ONE_ARRIVES}"
        ),
    }
    for what, kernel in rightly.items():
        for schedule in SCHEDULES:
            found, _ = collected(kernel, schedule)
            assert not found, f"{what}, {schedule}: {list(map(str, found))}"


@pytest.mark.parametrize("apart", [True, False])
def test_flags_in_global_memory_order_lanes_behind_their_warp_barriers_alone(apart: bool) -> None:
    """On both sides of a flag, the lanes that store or read meet the lane that releases or acquires."""
    released, acquired = f"{LANES_MEET} {ONE_RELEASES}", f"{ONE_ACQUIRES} {LANES_MEET}"
    fenced, relaxed = "fence.acq_rel.gpu;", "st.relaxed.gpu.global.u32 [%flag], 1;"
    by_fence = f"setp.ne.u32 %p3, %lane, 0; @%p3 bra END; {fenced} {relaxed}"
    noticed = ONE_ACQUIRES.replace("ld.acquire", "ld.relaxed").replace("TOLD:", f"{fenced} TOLD:")
    counted = ONE_RELEASES.replace("st.release.gpu.global.u32", "red.release.gpu.global.add.u32")
    exchanged = ONE_RELEASES.replace("st.release.gpu.global.u32", "atom.acq_rel.gpu.global.exch.b32 %r2,")
    broken = {
        "one lane releases": (ONE_RELEASES, acquired),
        "one lane releases as it counts": (counted, acquired),
        "one lane releases as it acquires": (exchanged, acquired),
        "one lane is elected to release": (f"elect.sync %r2|%p3, 0xffffffff; @%p3 {ALL_RELEASE}", acquired),
        "one lane releases by a fence": (by_fence, acquired),
        "one lane acquires": (released, ONE_ACQUIRES),
        "one lane acquires by a fence": (released, noticed),
    }
    for what, (release, acquire) in broken.items():
        for schedule in SCHEDULES:
            found, data = collected(told(release, acquire, apart=apart), schedule)
            assert slugs(found) == ["lanes-unordered"], f"{what}, {schedule}: found {list(map(str, found))}"
            side = "ahead of the release" if "releases" in what or "to release" in what else "behind the acquire"
            assert side in str(found[0]), f"{what}: {found[0]}"
            assert np.array_equal(data["out"], np.arange(32)), "the run goes on"
    right = {
        "lanes meet on both sides": (released, acquired),
        "other instructions gather them": (
            f"vote.sync.any.pred %p2, %p3, 0xffffffff; {ONE_RELEASES}",
            f"{ONE_ACQUIRES} shfl.sync.idx.b32 %r1, %r1, 0, 31, 0xffffffff;",
        ),
        "lanes meet before one counts": (f"{LANES_MEET} {counted}", acquired),
        "lanes meet before one exchanges": (f"{LANES_MEET} {exchanged}", acquired),
        "every lane releases and acquires": (ALL_RELEASE, ALL_ACQUIRE),
        "one lane releases by a fence, behind the others": (f"{LANES_MEET} {by_fence}", acquired),
        "one lane acquires by a fence, ahead of the others": (released, f"{noticed} {LANES_MEET}"),
        "every lane acquires behind the one": (released, f"{ONE_ACQUIRES} {ALL_ACQUIRE.replace('POLL', 'AGAIN')}"),
    }
    for what, (release, acquire) in right.items():
        for schedule in SCHEDULES:
            found, _ = collected(told(release, acquire, apart=apart), schedule)
            assert not found, f"{what}, {schedule}: {list(map(str, found))}"
    for value, expected in (("7", ["lanes-unordered"]), ("%lane", [])):
        over = f"mov.u32 %r1, {value}; st.global.u32 [%rd1], %r1;"
        found, _ = collected(told(ONE_RELEASES, acquired, take=over, apart=apart))
        assert slugs(found) == expected, f"{value} is written over what a lane stored: {list(map(str, found))}"
    alone = told(ONE_RELEASES, f"{ONE_ACQUIRES} @%p3 bra END;", apart=apart)
    assert not collected(alone)[0], "the lane that acquires reads what the lane that releases has stored"


@pytest.mark.parametrize("flag", ["st.release.cta.shared.u32", "red.release.cta.shared.add.u32"])
def test_flags_in_shared_memory_order_lanes_behind_their_warp_barriers_alone(flag: str) -> None:
    body = f""".shared .align 16 .b8 cells[256]; mov.u32 %r3, cells; mad.lo.u32 %r4, %lane, 4, %r3;
setp.eq.u32 %p3, %lane, 0; setp.eq.u32 %p2, %tx, 0; @%p2 st.shared.u32 [%r3+128], 0; bar.sync 0;
setp.ne.u32 %p2, %warp, 0; @%p2 bra READER;
st.shared.u32 [%r4], %lane;
BETWEEN
@%p3 {flag} [%r3+128], 1; bra END;
READER: ld.acquire.cta.shared.u32 %r1, [%r3+128]; setp.eq.u32 %p4, %r1, 0; @%p4 bra READER;
ld.shared.u32 %r1, [%r4];
END: ret;"""
    for between, expected in (("", ["lanes-unordered"]), (LANES_MEET, [])):
        found, _ = collected(Kernel(body.replace("BETWEEN", between), block=(64, 1, 1)))
        assert slugs(found) == expected, f"{flag} behind {between!r}: {list(map(str, found))}"


OTHERS_END = "setp.ne.u32 %p3, %lane, 0; @%p3 ret;"


def test_what_others_release_or_meet_orders_no_lane_that_has_ended_in_shared_memory() -> None:
    met = "bar.sync 1, 64;"
    read_by_its_own_warp = f"{OTHERS_END} {LANES_MEET} ld.shared.u32 %r1, [%r17+4];"
    broken = {
        "the last lane arrives": handed_over(f"{OTHERS_END} {ALL_ARRIVE}"),
        "the last lane arrives, of a matrix": handed_over(f"{OTHERS_END} {ALL_ARRIVE}", store=STMATRIX),
        "the last lanes meet, and arrive": handed_over(f"{OTHERS_END} {LANES_MEET} {ALL_ARRIVE}"),
        "the last lane comes to a barrier": handed_over(f"{OTHERS_END} {met}", until=met),
        "the last lane meets itself, and reads": handed_over(read_by_its_own_warp, until="bra END;"),
    }
    for what, kernel in broken.items():
        for schedule in SCHEDULES:
            found, _ = collected(kernel, schedule)
            assert slugs(found) == ["lanes-unordered"], f"{what}, {schedule}: found {list(map(str, found))}"
            assert "ahead of its end" in str(found[0]), f"{what}: {found[0]}"
    early = "setp.lt.u32 %p3, %warp, 1; setp.ne.and.u32 %p3, %lane, 0, %p3; @%p3 ret;"
    alone = handed_over(ALL_ARRIVE, take="ld.shared.u32 %r1, [cells];")
    upper_end = "setp.gt.u32 %p3, %lane, 15; @%p3 ret;"
    right = {
        "each lane of a matrix arrives before it ends": handed_over(
            f"setp.gt.u32 %p3, %lane, 15; @!%p3 bra LOW; {ALL_ARRIVE} ret; LOW: {ALL_ARRIVE}", count=32, store=STMATRIX
        ),
        "lanes meet ahead of the end of some": handed_over(f"{LANES_MEET} {OTHERS_END} {ALL_ARRIVE}"),
        "every lane arrives, and some end": handed_over(f"{ALL_ARRIVE} {upper_end} {ALL_ARRIVE}", count=48),
        "lanes that have stored nothing end": replace(
            alone, body=alone.body.replace("setp.ne.u32 %p2", f"{early} setp.ne.u32 %p2", 1)
        ),
        "the lane that is left stores once more": handed_over(
            f"{LANES_MEET} {OTHERS_END} st.shared.u32 [cells], 0; {ALL_ARRIVE}"
        ),
    }
    for what, kernel in right.items():
        for schedule in SCHEDULES:
            found, _ = collected(kernel, schedule)
            assert not found, f"{what}, {schedule}: {list(map(str, found))}"


@pytest.mark.parametrize("apart", [True, False])
def test_what_others_release_or_meet_orders_no_lane_that_has_ended_in_global_memory(apart: bool) -> None:
    acquired, counted = f"{ONE_ACQUIRES} {LANES_MEET}", "red.release.gpu.global.add.u32 [%flag], 1;"
    fenced = "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%flag], 1;"
    all_have_counted = ALL_ACQUIRE.replace("setp.eq.u32 %p4, %r1, 0", "setp.lt.u32 %p4, %r1, 32")
    for release in (ALL_RELEASE, counted, fenced, f"{LANES_MEET} {ALL_RELEASE}"):
        for between, expected in (("", ["lanes-unordered"]), (LANES_MEET, [])):
            for schedule in SCHEDULES:
                found, _ = collected(told(f"{between} {OTHERS_END} {release}", acquired, apart=apart), schedule)
                assert slugs(found) == expected, f"{release} behind {between!r}, {schedule}: {list(map(str, found))}"
                assert all("ahead of its end" in str(one) for one in found), f"{list(map(str, found))}"
    right = {
        "each lane counts before it ends": told(f"{counted} {OTHERS_END} {counted}", all_have_counted, apart=apart),
        "the lane that is left has stored what is read": told(
            f"{OTHERS_END} {ALL_RELEASE}", f"{ONE_ACQUIRES} @%p3 bra END;", apart=apart
        ),
    }
    for what, kernel in right.items():
        for schedule in SCHEDULES:
            found, _ = collected(kernel, schedule)
            assert not found, f"{what}, {schedule}: {list(map(str, found))}"


@pytest.mark.parametrize(
    "take", ["ld.global.u32 %r1, [%rd1];", "cp.async.ca.shared.global [%r3], [%rd1], 4; cp.async.wait_all;"]
)
def test_a_lane_reads_of_global_memory_what_another_one_stored_behind_a_meeting(take: str) -> None:
    body = f""".shared .align 16 .b8 landing[128]; mov.u32 %r3, landing; mad.lo.u32 %r3, %lane, 4, %r3;
xor.b32 %r2, %lane, OTHER; mul.wide.u32 %rd2, %lane, 4; add.u64 %rd2, %rd2, %cells; st.global.u32 [%rd2], %lane;
BETWEEN
mul.wide.u32 %rd1, %r2, 4; add.u64 %rd1, %rd1, %cells; {take} ret;"""
    cells = {"cells": np.zeros(32, np.uint32)}
    for between, other in (("", 4), (LANES_MEET, 4), ("", 0)):
        found, _ = collected(Kernel(body.replace("BETWEEN", between).replace("OTHER", str(other)), cells))
        expected = [] if between or not other else ["lanes-unordered"]
        assert slugs(found) == expected, f"{between!r}, the lane {other} further: {list(map(str, found))}"


def test_every_grade_has_rules_and_each_that_is_no_error_is_planted() -> None:
    grades = {slug: rule.grade for slug, rule in RULES.items()}
    assert set(grades.values()) == {"error", "portability", "note"}
    assert {slug for slug, grade in grades.items() if grade != "error"} == set(GRADED)
    unreasoned = [slug for slug, rule in RULES.items() if rule.grade == "portability" and not rule.reliance]
    assert not unreasoned, f"{unreasoned}: say who relies on more than the ISA promises"


def test_the_table_has_every_rule_that_the_machine_names() -> None:
    sources = [path.read_text("utf-8") for path in sorted((ROOT / "backends" / "vm").rglob("*.py"))]
    table = (ROOT / "backends" / "vm" / "rules.py").read_text("utf-8")
    text = "".join(one for one in sources if one != table)
    named = set(_slugs_of(text))
    assert named <= set(RULES), f"not in the table: {sorted(named - set(RULES))}"
    # `megamoe check` itself compares schedules; everything else is a Fault of the machine.
    unused = [slug for slug in RULES if f'"{slug}"' not in text and slug != "schedule-dependent"]
    assert not unused, f"no Fault names {unused}"
    assert {*LEADS_TO, *(slug for led_to in LEADS_TO.values() for slug in led_to)} <= set(RULES)
    unordered = [slug for slug in LEADS_TO if not RULES[slug].missing]
    assert not unordered, f"{unordered}: only a missing order is a cause"
    assert _slugs_of('raise Fault("no-such-rule", "x")') == ["no-such-rule"], "the search finds a rule"


def _slugs_of(text: str) -> list[str]:
    return re.findall(r'\bFault\(\s*"([a-z0-9-]+)"', text)


def test_the_page_of_rules_is_the_table() -> None:
    page = (ROOT / "docs" / "rules" / "README.md").read_text("utf-8")
    assert page == as_markdown(), "python -m backends.vm.rules > docs/rules/README.md"


def test_every_error_is_planted_somewhere() -> None:
    tests = "".join(path.read_text("utf-8") for path in sorted((ROOT / "conformance").rglob("test_*.py")))
    missing = [slug for slug, rule in RULES.items() if rule.grade == "error" and slug not in tests]
    assert not missing, f"no test plants {missing}"


NARROW = """.shared .align 16 .b8 buf[512]; mov.u32 %r41, buf; mov.u32 %r30, 0; setp.ne.u32 %p3, %tx, 0; @%p3 bra END;
"""
OPERANDS = {
    "tensor-coordinates": copy_kernel({"store": STORE.replace("{%r30, %r30}", "{%r31, %r30}") + " //!",
                                       "before store": "mov.u32 %r31, -4;\n@%p3 bra END;"}),
    "bulk-copy": Kernel(NARROW + "cp.async.bulk.global.shared::cta.bulk_group [%out], [buf], %r30; //!\nEND: ret;",
                        {"out": np.zeros(4, np.uint32)}),
    "cp-async": Kernel(NARROW + "mov.u32 %r31, 20;\ncp.async.ca.shared.global [%r41], [%out], 16, %r31; //!\nEND: ret;",
                       {"out": np.zeros(8, np.uint32)}),
    "mixed-windows": Kernel(f"""{NARROW.split("setp")[0]} cvt.u64.u32 %rd1, %r41; cvta.shared.u64 %rd1, %rd1;
setp.eq.u32 %p4, %tx, 0; selp.b64 %rd1, %rd1, %out, %p4;
mbarrier.arrive.b64 _, [%rd1]; //!
ret;""", {"out": np.zeros(8, np.uint32)}),
}  # fmt: skip


@pytest.mark.parametrize("rule", OPERANDS)
def test_an_operand_that_no_unit_takes(rule: str) -> None:
    assert_blamed(OPERANDS[rule], rule, schedules=("eager",))


# One finding per site, and the run goes on


RACES = f""".shared .align 4 .b8 cell[128]; .shared .align 4 .b8 more[128];
mov.u32 %r1, cell; shl.b32 %r2, %lane, 2; add.u32 %r1, %r1, %r2; mov.u32 %r3, more; add.u32 %r3, %r3, %r2;
setp.ne.u32 %p1, %warp, 0; @%p1 bra OTHER;
st.shared.u32 [%r1], 7;
st.shared.u32 [%r3], 8;
bra MEET;
OTHER: st.shared.u32 [%r1], %lane;
add.u32 %r4, %lane, 1;
st.shared.u32 [%r3], %r4;
MEET: {SYNC}
mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %out; st.relaxed.gpu.global.u32 [%rd1], %lane;
ret;"""
"""In every CTA, two warps write different values to two places; then all threads store."""


def test_two_faults_are_two_findings_however_often_they_are_met() -> None:
    kernel = Kernel(RACES, {"out": np.zeros(64, np.uint32)}, grid=(8, 1, 1), block=(64, 1, 1))
    sites = set[object]()
    for schedule in SCHEDULES:
        found, data = collected(kernel, schedule)
        assert slugs(found) == ["race", "race"], f"{schedule}: {list(map(str, found))}"
        assert sum(one.times for one in found) == 16, f"{schedule}: 8 CTAs meet 2 faults"
        assert np.array_equal(data["out"], np.tile(np.arange(32), 2)), f"{schedule}: the run goes to its end"
        sites |= {one.site for one in found}
    assert len(sites) == 2, f"{len(sites)} findings over three schedules; the same two faults are the same two findings"


def test_one_access_that_collides_with_two_lines_is_two_findings() -> None:
    halves = """.shared .align 4 .b8 cell[128]; mov.u32 %r1, cell; shl.b32 %r2, %lane, 2; add.u32 %r1, %r1, %r2;
setp.ne.u32 %p1, %warp, 0; setp.lt.u32 %p2, %lane, 16;
@%p1 bra OTHER;
@%p2 st.shared.u32 [%r1], 1;
@!%p2 st.shared.u32 [%r1], 2;
st.relaxed.cta.shared.u32 [%r1], 9;
bra END;
OTHER: ld.relaxed.gpu.global.u32 %r5, [%out];
st.shared.u32 [%r1], 5;
END: ret;"""
    kernel = Kernel(halves.replace("st.relaxed.cta.shared.u32 [%r1], 9;\n", ""), {"out": np.zeros(1, np.uint32)},
                    block=(64, 1, 1))  # fmt: skip
    found, _ = collected(kernel)
    assert slugs(found) == ["race", "race"]
    assert len({one.other.line for one in found if one.other}) == 2


def test_a_missing_order_is_kept_by_the_run() -> None:
    """A copy that nobody waits for has completed when its destination is read, under every schedule."""
    unawaited = copy_kernel({"wait": SYNC, "drain": "cp.async.bulk.wait_group 0;"})
    unstored = copy_kernel({"drain": ""})
    for schedule in SCHEDULES:
        found, data = collected(unawaited, schedule)
        assert "copy-not-awaited" in slugs(found), f"{schedule}: {slugs(found)}"
        assert np.array_equal(data["out"], X + 1), f"{schedule}: the copy is done first"
        _, data = collected(unstored, schedule)
        assert np.array_equal(data["out"], X + 1), f"{schedule}: what a CTA leaves behind is done"


def test_a_fault_without_a_meaning_ends_the_launch() -> None:
    kernel = Kernel(f"{RACES.split('mul.wide')[0]} st.global.u32 [%out+4096], 1; ret;", {"out": np.zeros(4, np.uint32)},
                    block=(64, 1, 1))  # fmt: skip
    machine = Machine()
    machine.findings = Findings()
    with pytest.raises(Fault) as caught:
        kernel.launch(machine)
    assert caught.value.rule == "out-of-bounds"
    assert slugs(list(machine.findings.by_site.values())) == ["race", "race"], "what was found before is kept"


def test_without_a_collector_the_first_fault_ends_the_launch() -> None:
    for rule in ("exit-with-pending-store", "copy-missing-proxy-fence", "tmem-lane-ignored", "mbarrier-reinitialised"):
        with pytest.raises(Fault) as caught:
            GRADED[rule][0].run()
        assert caught.value.rule == rule, "a judged row is held to errors and to portability"


# Not findings


def test_threads_that_write_what_is_already_written_do_not_race() -> None:
    same = ".shared .align 4 .b32 cell; st.shared.u32 [cell], %r1; st.global.u32 [%out], %r1; ret;"
    out = {"out": np.zeros(4, np.uint32)}
    for block, grid in ((64, 1), (64, 2)):
        for value, findings in (("mov.u32 %r1, 64;", 0), ("mov.u32 %r1, %warp;", 2)):
            kernel = Kernel(value + same, out, grid=(grid, 1, 1), block=(block, 1, 1))
            found, _ = collected(kernel)
            assert len({one.rule for one in found}) == findings, f"{value} {grid} CTAs: {list(map(str, found))}"


def test_a_bulk_store_after_a_wait_is_no_finding() -> None:
    found, data = collected(copy_kernel({"store": STORE}))
    assert not found
    assert np.array_equal(data["out"], X + 1)


TRY_CANCEL = f""".shared .align 16 .b8 answer[16]; .shared .align 4 .b32 word;
{{}}
setp.ne.u32 %p3, %tx, 0; @%p3 bra WAITING;
st.shared.u32 [word], 7;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 16;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [answer], [mbar];
WAITING: {wait("mbar", 0)}
ld.shared.u32 %r2, [word];
mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %out; st.global.u32 [%rd1], %r2;
ret;"""


def test_the_end_of_a_try_cancel_carries_order() -> None:
    """What precedes the issue also precedes the completion, and so the threads that wait for it (PTX ISA 8.9.4)."""
    body = ".shared .align 8 .b64 mbar;\n" + TRY_CANCEL.replace("{}", init("mbar"))
    for schedule in SCHEDULES:
        found, data = collected(Kernel(body, {"out": np.zeros(64, np.uint32)}, block=(64, 1, 1)), schedule)
        assert not found, f"{schedule}: {list(map(str, found))}"
        assert set(data["out"].tolist()) == {7}


# Source locations


INLINED = """.version 8.7
.target sm_100a
.address_size 64
.file 1 "/src/kernel.cu"
.file 2 "/src" "helper.h"
.visible .entry kernel()
{
.loc 1 5 4
.loc 1 3 4, function_name $names, inlined_at 1 5 4
.loc 2 1 73, function_name $names+6, inlined_at 1 3 4
mov.u32 %r1, 0;
.loc 1 6 1
// begin inline asm
.loc 1 6 1
mov.u32 %r1, 0;
.loc 1 7 1
mov.u32 %r1, 1;
// end inline asm
.loc 1 8 1
ret;
}
.section .debug_str
{
$names:
.b8 111, 117, 116, 101, 114
.b8 0
.b8 105,110,110,101,114,0
}
"""


def test_a_line_of_ptx_names_its_source_and_who_called_it() -> None:
    places = [(one.file, one.line, one.function) for one in source_of(INLINED, 11)]
    assert places == [("/src/helper.h", 1, "inner"), ("/src/kernel.cu", 3, "outer"), ("/src/kernel.cu", 5, "")]
    assert [source_of(INLINED, line)[0].line for line in (15, 17, 20)] == [6, 6, 8], "inline assembly is one place"
    assert source_of(INLINED, 2) == (), "nothing is said of a line before the first .loc"
    assert source_of(INLINED, 999) == ()
    assert Path(places[0][0]).name == "helper.h"


def test_the_stages_of_the_kernels_here_are_there() -> None:
    assert {"publish", "before", "wait", "read"} <= set(STAGES), "the kernels above replace these stages"
