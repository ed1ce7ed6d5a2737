"""Planted faults of setmaxnreg: the pool of registers, whole warpgroups, and what must lie between two of them."""

from __future__ import annotations

import pytest

from backends.vm.faults import Fault
from conformance.vm.kernel import EVERY_SCHEDULE, Kernel, assert_blamed, assert_clean, collected, init, slugs, wait


def resized(*sizes: str, directives: str = ".maxnreg 64") -> Kernel:
    """Each of the 8 warps executes its own entry of `sizes`, a line of setmaxnreg instructions."""
    tests = [f"setp.eq.u32 %p1, %warp, {warp}; @%p1 bra W{warp};" for warp in range(len(sizes))]
    parts = [f"W{warp}:\n{text}\nret;" for warp, text in enumerate(sizes)]
    return Kernel("\n".join([*tests, "ret;", *parts]), block=(256, 1, 1), directives=directives)


DEC, INC, TOO_MUCH = (f"setmaxnreg.{way}.sync.aligned.u32 {count};" for way, count in
                      (("dec", 24), ("inc", 104), ("inc", 112)))  # fmt: skip
GROUP = "bar.sync 1, 128;"
"""A barrier of the first warpgroup."""


def test_registers_that_one_warpgroup_gives_to_the_other() -> None:
    """Of 64 registers per thread, one warpgroup keeps 24, so the other may have 104. It waits until they are free."""
    assert_clean(resized(*[INC] * 4, *[DEC] * 4), {})
    assert_clean(resized(*[INC] * 4, *[DEC] * 4, directives=".reqntid 256 .minnctapersm 4"), {})
    assert_clean(resized(*[TOO_MUCH] * 8, directives=""), {})


@pytest.mark.parametrize("directives", [".maxnreg 64", ".maxntid 256 .minnctapersm 4"])
def test_a_register_pool_that_cannot_give(directives: str) -> None:
    kernel = resized(*[TOO_MUCH] * 4, *[DEC] * 4, directives=directives)
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Fault, match=r"\[deadlock\].*1024 more registers: of the 16384 of its CTA 512 are free"):
            kernel.run(schedule)


@pytest.mark.parametrize(
    ("asked", "directives", "clause"),
    [
        (
            "inc.sync.aligned.u32 136",
            ".maxnreg 64",
            "inc to 136 registers a thread, but the CTA was launched with 16384",
        ),
        ("inc.sync.aligned.u32 136", ".maxntid 256 .minnctapersm 4", "128 a thread if one warpgroup has them all"),
        ("dec.sync.aligned.u32 72", ".maxnreg 64", "dec to 72 registers a thread by a warp that holds 64"),
        ("inc.sync.aligned.u32 56", ".maxnreg 64", "inc to 56 registers a thread by a warp that holds 64"),
    ],
)
def test_more_registers_than_the_launch_has(asked: str, directives: str, clause: str) -> None:
    """Two warpgroups of 64 registers per thread: no schedule lets one have more than 128, and .dec adds none."""
    kernel = Kernel(f"setmaxnreg.{asked}; //!\nret;", block=(256, 1, 1), directives=directives)
    assert_blamed(kernel, "register-pool", clause)


def test_as_many_registers_as_the_launch_has() -> None:
    """`.dec` or `.inc` to the current count changes nothing."""
    for way in ("dec", "inc"):
        assert_clean(resized(*[f"setmaxnreg.{way}.sync.aligned.u32 64;"] * 8), {}, EVERY_SCHEDULE)


PARTS = {
    "one warp does without": ([DEC + " //!", DEC, DEC, "", *[""] * 4], "warp 3 ends without", "warp 0"),
    "one warp alone": (["", "", DEC + " //!", "", *[""] * 4], "ends without the setmaxnreg.dec 24 that warp 2"),
    "one warp does it twice": (
        [f"{DEC} {GROUP} {INC} //!", *[DEC + GROUP] * 3, *[""] * 4],
        "setmaxnreg.inc 104 that warp 0",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_warpgroup_resizes(name: str) -> None:
    sizes, *clauses = PARTS[name]
    assert_blamed(resized(*sizes), "warpgroup-diverged", *clauses)


def test_warps_of_a_warpgroup_resize_differently() -> None:
    other = "setmaxnreg.dec.sync.aligned.u32 32;"
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Fault, match=r"\[warpgroup-diverged\].*warp \d of its warpgroup has executed setmaxnreg"):
            resized(DEC, DEC, DEC, other, *[""] * 4).run(schedule)


AGAIN = "setmaxnreg.inc.sync.aligned.u32 40;"
THIRD = "setmaxnreg.dec.sync.aligned.u32 32;"
ARRIVE = "setp.eq.u32 %p3, %lane, 0; @%p3 mbarrier.arrive{} _, [met]; "
MET = f".shared .align 8 .b64 met; {init('met', count=4)}"
BETWEEN = {
    "a barrier": ("", GROUP),
    "a barrier of the CTA": ("", "bar.sync 0;"),
    "an mbarrier": (MET, ARRIVE.format(".shared::cta.b64") + wait("met", 0)),
    "a relaxed arrival, which orders the warps in time": (
        MET,
        ARRIVE.format(".relaxed.cta.shared::cta.b64") + wait("met", 0),
    ),
}
"""By name: what precedes the first setmaxnreg, and what lets the warps of a warpgroup wait for each other after it."""


def again(before: str, between: str, last: str = GROUP, warps: int = 4) -> Kernel:
    """A warpgroup that gives registers back, asks for some again, and gives back again."""
    mark = " //!" if between != last else ""
    body = f"{before}\n{DEC}\n{between}\n{AGAIN}{mark}\n{last}\n{THIRD}\nret;"
    return Kernel(body, block=(32 * warps, 1, 1), directives=".maxnreg 64")


@pytest.mark.parametrize("name", BETWEEN)
def test_what_orders_two_setmaxnreg_of_a_warpgroup(name: str) -> None:
    before, between = BETWEEN[name]
    assert_clean(again(before, between), {})


def assert_told(kernel: Kernel, clause: str) -> None:
    """Every schedule finds that the marked line is not ordered."""
    for schedule in EVERY_SCHEDULE:
        found, _ = collected(kernel, schedule)
        assert "setmaxnreg-unsynchronised" in slugs(found), f"{schedule}: found {list(map(str, found))}"
        said = [str(one) for one in found if one.line == kernel.blamed_line]
        assert any(clause in one for one in said), f"{schedule}: {clause!r} is not in {said}"


@pytest.mark.parametrize("between", ["", "bar.warp.sync 0xffffffff;", "bar.arrive 2, 160;", "fence.acq_rel.cta;"])
def test_a_warpgroup_that_does_not_synchronise_before_the_next_setmaxnreg(between: str) -> None:
    """PTX ISA 9.7.19.5. A barrier of one warp, an arrival that nobody waits for and a fence let no warp wait for
    another."""
    assert_told(again("", between), "nothing orders this setmaxnreg after the one before it by warp")


def test_one_warp_that_does_not_wait_for_the_other_three() -> None:
    between = "setp.eq.u32 %p2, %warp, 3; @%p2 bar.arrive 1, 128; @!%p2 bar.sync 1, 128;"
    assert_told(again("", between, "bar.sync 2, 128;"), "warp 3: nothing orders")


def test_a_warpgroup_that_the_cta_does_not_fill() -> None:
    """Warp 4 of 160 threads has a warpgroup of its own, which lacks three warps; the first one is whole."""
    part = "setp.lt.u32 %p1, %warp, 4; @%p1 bra REST;\nsetmaxnreg.dec.sync.aligned.u32 24; //!\nREST: ret;"
    for block, directives in ((160, ".maxnreg 64"), (160, ""), (224, ".maxnreg 64")):
        kernel = Kernel(part, block=(block, 1, 1), directives=directives)
        assert_blamed(kernel, "warpgroup-diverged", f"of a CTA of {block // 32} warps", "a warpgroup is warps 4..7")
    whole = "setp.ge.u32 %p1, %warp, 4; @%p1 bra REST;\nsetmaxnreg.dec.sync.aligned.u32 24;\nREST: ret;"
    assert_clean(Kernel(whole, block=(160, 1, 1), directives=".maxnreg 64"), {})
    assert_clean(Kernel(part.replace(" //!", ""), block=(256, 1, 1), directives=".maxnreg 64"), {})


def roles(*registers: str, between: str = "", directives: str = "") -> Kernel:
    """Each warpgroup executes its own setmaxnreg."""
    tests = [f"setp.eq.u32 %p1, %r0, {group}; @%p1 bra G{group};" for group in range(len(registers))]
    parts = [f"G{group}:\n{text} {between}\nret;" for group, text in enumerate(registers)]
    body = "\n".join(["shr.u32 %r0, %warp, 2;", *tests, "ret;", *parts])
    return Kernel(body, block=(128 * len(registers), 1, 1), directives=directives)


def sized(way: str, count: int) -> str:
    return f"setmaxnreg.{way}.sync.aligned.u32 {count};"


def test_more_registers_than_an_sm_has() -> None:
    """Three warpgroups of 240 registers hold 92,160 of the 65,536 of an SM, whatever the launch was given."""
    beyond = roles(*[sized("inc", 240)] * 3)
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Fault, match=r"\[register-pool\].*hold 92160, and an SM has 65536.*states no number"):
            beyond.run(schedule)
    assert_clean(roles(sized("dec", 24), sized("inc", 240), sized("inc", 240)), {})
    assert_clean(roles(*[sized("inc", 168)] * 3), {})


def test_registers_that_a_warpgroup_gets_when_another_gives_them_back() -> None:
    """Two warpgroups fill an SM. A third waits for what the first gives back, which must not wait for it in turn."""
    first, second, third = sized("inc", 256), sized("inc", 248), sized("inc", 240)
    back, together = sized("dec", 24), "bar.sync 2, 384;"
    assert_clean(roles(f"{first} {together} {back}", f"{second} {together}", f"{together} {third}"), {}, EVERY_SCHEDULE)
    waits = roles(f"{first} {together} bar.sync 3, 256; {back}", f"{second} {together}",
                  f"{together} {third} bar.sync 3, 256;")  # fmt: skip
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Fault, match=r"\[register-pool\].*and an SM has 65536"):
            waits.run(schedule)
