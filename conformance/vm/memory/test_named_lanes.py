"""A finding names the lane of the warp, also where a guard leaves some lanes out of the access."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from backends.vm.faults import ByLanes, Fault, report
from conformance.vm.kernel import EVERY_SCHEDULE, Kernel, assert_clean, collected, fault_of

LANE, OTHER = 5, 9


@dataclass(frozen=True)
class Planted:
    """What a first warp does and what lane LANE, or also lane OTHER, of a second warp does afterwards.

    `first` is done by one lane. `second` is guarded by %p5, true in LANE, or by %p6, true in both.
    """

    rule: str
    first: str
    second: str
    lane: int = LANE
    cluster: int = 1
    block: int = 32
    unwritten: tuple[str, ...] = ()


WRITE = "st.global.b32 [%word], 7;"
SHARED = "mov.u32 %r8, told; st.shared.b32 [%r8], 7;"
TO_PEER = "mov.u32 %r8, told; mapa.shared::cluster.u32 %r8, %r8, 1;"
FAULTS = {
    "global: a read": Planted("global-race", WRITE, "@%p5 ld.global.b32 %r3, [%word]; //!"),
    "global: an overwrite": Planted("global-race", WRITE, "@%p5 st.global.b32 [%word], 8; //!"),
    "global: a narrow poll": Planted("scope-too-narrow", "st.relaxed.gpu.global.b32 [%word], 7;",
                                     "@%p5 ld.relaxed.cta.global.b32 %r3, [%word]; //!"),
    "global: nothing to add to": Planted("uninitialised-global", WRITE, "@%p5 red.global.add.u32 [%none], 1; //!",
                                         unwritten=("none",)),
    "global: a failed swap": Planted("scope-too-narrow", "st.relaxed.gpu.global.b32 [%word], 7;",
                                     "@%p5 atom.relaxed.cta.global.cas.b32 %r3, [%word], 99, 1; //!"),
    "two buffers: a failed swap": Planted("scope-too-narrow", "st.relaxed.gpu.global.b32 [%word], 7;",
                                          "@%p6 atom.relaxed.cta.global.cas.b32 %r3, [%rd9], 99, 1; //!", OTHER),
    "two spaces: a failed swap": Planted("scope-too-narrow", "st.relaxed.gpu.global.b32 [%word], 7;",
                                         "@%p6 atom.relaxed.cta.cas.b32 %r3, [%rd10], 99, 1; //!", OTHER),
    "shared of another CTA: a failed swap": Planted(
        "scope-too-narrow", f"{TO_PEER} st.relaxed.cluster.shared::cluster.b32 [%r8], 7;",
        "@%p5 atom.relaxed.cta.shared.cas.b32 %r3, [%r7], 99, 1; //!", cluster=2),
    "two buffers: a read": Planted("global-race", WRITE, "@%p6 ld.global.b32 %r3, [%rd9]; //!", OTHER),
    "two buffers: an overwrite": Planted("global-race", WRITE, "@%p6 st.global.b32 [%rd9], 8; //!", OTHER),
    "two buffers: a narrow poll": Planted("scope-too-narrow", "st.relaxed.gpu.global.b32 [%word], 7;",
                                          "@%p6 ld.relaxed.cta.global.b32 %r3, [%rd9]; //!", OTHER),
    "shared: a read": Planted("race", SHARED, "@%p5 ld.shared.b32 %r3, [%r7]; //!", block=64),
    "shared: an overwrite": Planted("race", SHARED, "@%p5 st.shared.b32 [%r7], 8; //!", block=64),
    "shared: an overwrite by a copy": Planted(
        "race", SHARED, "@%p5 cp.async.ca.shared.global [%r7], [%spare], 4; //!\ncp.async.wait_all;", block=64),
    "shared of another CTA: a read": Planted(
        "race", f"{TO_PEER} st.shared::cluster.b32 [%r8], 7;", "@%p5 ld.shared.b32 %r3, [%r7]; //!", cluster=2),
    "shared of another CTA: a narrow poll": Planted(
        "scope-too-narrow", f"{TO_PEER} st.relaxed.cluster.shared::cluster.b32 [%r8], 7;",
        "@%p5 ld.relaxed.cta.shared.b32 %r3, [%r7]; //!", cluster=2),
    "shared of two CTAs: a read": Planted("race", SHARED, "@%p6 ld.shared::cluster.b32 %r3, [%r6]; //!", OTHER, 2),
    "two spaces: a read": Planted("global-race", WRITE, "@%p6 ld.b32 %r3, [%rd10]; //!", OTHER),
    "two spaces: an overwrite": Planted("global-race", WRITE, "@%p6 st.b32 [%rd10], 8; //!", OTHER),
    "an mbarrier": Planted("misaligned", WRITE, "@%p5 mbarrier.init.shared::cta.b64 [%r7+4], 1; //!"),
}  # fmt: skip


def kernel_of(planted: Planted, told: tuple[str, str] = ("relaxed", "relaxed")) -> Kernel:
    """CTA 0, or warp 0 of the only CTA, acts first. LANE is sent to memory that it may access, OTHER to the other."""
    apart = planted.block == 32
    body = f""".shared .align 16 .b8 told[32];
    setp.eq.u32 %p5, %lane, {LANE}; setp.eq.u32 %p7, %lane, {OTHER}; or.pred %p6, %p5, %p7;
    mov.u32 %r7, told; st.shared.b32 [%r7+16], 0;
    selp.b64 %rd9, %word, %spare, %p7;
    cvt.u64.u32 %rd10, %r7; cvta.shared.u64 %rd10, %rd10; add.u64 %rd10, %rd10, 16; selp.b64 %rd10, %word, %rd10, %p7;
    {"barrier.cluster.arrive; barrier.cluster.wait;" if planted.cluster > 1 else "bar.sync 0;"}
    mapa.shared::cluster.u32 %r6, %r7, 0; add.u32 %r5, %r7, 16; selp.b32 %r6, %r6, %r5, %p7;
    mov.u32 %r1, {"%ctaid.x" if apart else "%warp"}; setp.eq.u32 %p1, %r1, 0; @%p1 bra FIRST;
    POLL: ld.{told[1]}.gpu.global.b32 %r2, [%flag]; setp.eq.u32 %p2, %r2, 0; @%p2 bra POLL;
    {planted.second}
    bra END;
    FIRST: setp.ne.u32 %p1, %lane, 0; @%p1 bra END;
    {planted.first}
    st.{told[0]}.gpu.global.b32 [%flag], 1;
    END: {"barrier.cluster.arrive; barrier.cluster.wait;" if planted.cluster > 1 else ""} ret;"""
    words = {name: np.zeros(4, np.uint32) for name in ("word", "flag", "spare", *planted.unwritten)}
    size = planted.cluster
    return Kernel(body, words, grid=(2 if apart else 1, 1, 1), block=(planted.block, 1, 1), cluster=(size, 1, 1),
                  unwritten=planted.unwritten)  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_finding_names_the_lane_of_the_warp(name: str) -> None:
    planted = FAULTS[name]
    kernel = kernel_of(planted)
    for schedule in EVERY_SCHEDULE:
        raised = fault_of(kernel, schedule)
        found, _ = collected(kernel, schedule) if planted.rule != "misaligned" else ([raised], {})
        for one in (raised, *found):
            assert one is not None, f"{schedule}: nothing was found"
            assert (one.rule, one.lane) == (planted.rule, planted.lane), f"{schedule}: {one}"
            assert one.line == kernel.blamed_line, f"{schedule}: {one}"


@pytest.mark.parametrize("name", [name for name, one in FAULTS.items() if "race" in one.rule or "scope" in one.rule])
def test_an_order_leaves_nothing_to_name(name: str) -> None:
    assert_clean(kernel_of(FAULTS[name], ("release", "acquire")), {}, EVERY_SCHEDULE)


BEYOND = "selp.b64 %rd1, 65536, 0, %p5; add.u64 %rd1, %rd1, %word; mad.lo.u32 %r8, %lane, 4, %r7;"
ALONE = {
    "a source of cp.async": (
        "out-of-bounds", f"{BEYOND}\ncp.async.ca.shared.global [%r8], [%rd1], 4; //!\ncp.async.wait_all;"),
    "an arrival at no mbarrier": (
        "mbarrier-misuse", "@%p5 mbarrier.arrive.shared::cta.b64 _, [%r7]; //!"),
    "a wait at no mbarrier": (
        "mbarrier-misuse", "@%p5 mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r7], 0; //!"),
    "an arrival of cp.async at no mbarrier": (
        "mbarrier-misuse", "@%p5 cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r7]; //!"),
    "a count of 0": (
        "mbarrier-misuse", "mov.u32 %r3, 0;\n@%p5 mbarrier.init.shared::cta.b64 [%r7], %r3; //!"),
    "an mbarrier anew": (
        "mbarrier-misuse", "setp.eq.u32 %p1, %lane, 0; @%p1 mbarrier.init.shared::cta.b64 [%r7], 1;\n"
        "bar.warp.sync -1;\n@%p5 mbarrier.init.shared::cta.b64 [%r7], 2; //!"),
}  # fmt: skip
"""What one warp does: the lane at fault is LANE, alone or among 32."""


@pytest.mark.parametrize("name", ALONE)
def test_a_fault_without_another_access_names_its_lane(name: str) -> None:
    rule, steps = ALONE[name]
    body = f""".shared .align 16 .b8 told[128]; mov.u32 %r7, told; setp.eq.u32 %p5, %lane, {LANE};
    {steps}
    ret;"""
    kernel = Kernel(body, {"word": np.zeros(4, np.uint32)})
    for schedule in EVERY_SCHEDULE:
        one = fault_of(kernel, schedule)
        assert one is not None, f"{schedule}: nothing was found"
        assert (one.rule, one.lane, one.line) == (rule, LANE, kernel.blamed_line), f"{schedule}: {one}"


@pytest.mark.parametrize("lane", [LANE, OTHER])
def test_a_swap_is_by_the_lane_whose_comparison_held(lane: int) -> None:
    """The word is 0. LANE and OTHER compare it, one of them with 5 and `lane` with 0."""
    held = f"setp.ne.u32 %p1, %lane, {lane}; selp.b32 %r3, 5, 0, %p1;"
    swap = f"{held} @%p6 atom.relaxed.gpu.global.cas.b32 %r4, [%word], %r3, 9; //!"
    found, _ = collected(kernel_of(Planted("global-race", "ld.global.b32 %r3, [%word];", swap)))
    assert [(one.rule, one.lane) for one in found] == [("global-race", lane)], [str(one) for one in found]
    assert_clean(kernel_of(Planted("", "ld.global.b32 %r3, [%word];", swap), ("release", "acquire")),
                 {"word": np.array([9, 0, 0, 0])}, EVERY_SCHEDULE)  # fmt: skip


def test_lanes_of_an_access_within_an_access() -> None:
    """The innermost lanes count, once; outside of an access the lane is one of the warp already."""

    def told(*lanes: list[int], raising: bool) -> int | None:
        fault = Fault("race", "it races", lane=0)
        try:
            with ByLanes(lanes[0]), ByLanes(lanes[-1]):
                if raising:
                    raise fault
                report(fault)
        except Fault as one:
            return one.lane
        return None

    for raising in (False, True):
        assert told([LANE], raising=raising) == LANE
        assert told([1, 2], [OTHER], raising=raising) == OTHER
    with pytest.raises(Fault) as found:
        report(Fault("race", "it races", lane=LANE))
    assert found.value.lane == LANE
