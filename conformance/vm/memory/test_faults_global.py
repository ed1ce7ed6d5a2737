"""Races in global memory, between clusters, between warps of one CTA, and with copies, with line and agent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.vm.executor import EXECUTOR, VmExecutor
from backends.vm.machine.machine import Machine
from backends.vm.trace.recorder import Recorder
from conformance.vm.kernel import (
    EVERY_SCHEDULE,
    EXPECT,
    LOAD,
    MAPS,
    STORE,
    Kernel,
    Map,
    X,
    assert_blamed,
    assert_clean,
    collected,
    copy_kernel,
    slugs,
    wait,
)
from megamoe.cli.check import SCHEDULES
from megamoe.contract import BufferArg, Launch, Program, RunOptions

THREADS = 64
COMBINE = """.shared .align 4 .b32 ticket; .shared .align 4 .b32 unused;
mul.lo.u32 %r1, %cta, 256; mul.lo.u32 %r2, %tx, 4; add.u32 %r1, %r1, %r2; cvt.u64.u32 %rd1, %r1;
add.u64 %rd1, %rd1, %part; add.u32 %r3, %cta, 1; setp.eq.u32 %p1, %tx, 0;
WRITE
PUBLISHED
@%p1 TICKET %r4, [%count], 1; @%p1 st.shared.b32 [ticket], %r4;
bar.sync 0;
ld.shared.b32 %r4, [ticket]; setp.ne.u32 %p2, %r4, 1; @%p2 bra END;
SEEN
cvt.u64.u32 %rd2, %r2; add.u64 %rd3, %part, %rd2;
READ
add.u32 %r5, %r5, %r6; add.u64 %rd4, %out, %rd2; st.global.b32 [%rd4], %r5;
END: ret;"""
"""Each of two CTAs writes its partial row; the one that draws the last ticket adds the rows up."""
READ = "ld.global.b32 %r5, [%rd3]; ld.global.b32 %r6, [%rd3+256];"
WRITE = "st.global.b32 [%rd1], %r3;"
FENCE = "fence.acq_rel.gpu;"
RELAXED, ORDERED = "atom.relaxed.gpu.global.add.u32", "atom.acq_rel.gpu.global.add.u32"


def combine(ticket: str, published: str, seen: str, read: str = READ, write: str = WRITE) -> Kernel:
    """COMBINE with its placeholders filled. Both barriers surround lane 0's ticket."""
    body = COMBINE.replace("TICKET", ticket).replace("PUBLISHED", published).replace("SEEN", seen)
    buffers = {
        "part": np.zeros((2, THREADS), np.uint32),
        "count": np.zeros(1, np.uint32),
        "out": np.zeros(THREADS, np.uint32),
    }
    body = body.replace("READ", read).replace("WRITE", write)
    return Kernel(body, buffers, grid=(2, 1, 1), block=(THREADS, 1, 1))


CLEAN = {
    "an atomic that acquires and releases": (ORDERED, "bar.sync 0;", ""),
    "fences of one thread": (RELAXED, f"bar.sync 0;\n@%p1 {FENCE}", FENCE),
    "a fence of every thread": (RELAXED, f"{FENCE}\nbar.sync 0;", FENCE),
    "the old spelling of fences": ("atom.global.add.u32", "membar.gl; bar.sync 0;", "membar.gl;"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_combine_with_its_flag_is_clean(name: str) -> None:
    assert_clean(combine(*CLEAN[name]), {"out": np.full(THREADS, 3, np.uint32)})


MARKED = "ld.global.b32 %r5, [%rd3]; ld.global.b32 %r6, [%rd3+256]; //!"
PLANTED = {
    "no fence before the ticket": (RELAXED, "bar.sync 0;", FENCE),
    "no fence behind the ticket": (RELAXED, f"{FENCE}\nbar.sync 0;", ""),
    "a fence of the CTA only": (RELAXED, "fence.acq_rel.cta;\nbar.sync 0;", FENCE),
    "an atomic that only acquires": ("atom.acquire.gpu.global.add.u32", "bar.sync 0;", ""),
    "an atomic that only releases": ("atom.release.gpu.global.add.u32", "bar.sync 0;", ""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_combine_whose_flag_orders_nothing(name: str) -> None:
    kernel = combine(*PLANTED[name], read=MARKED)
    assert_blamed(kernel, "global-race", "`part` is read", "wrote it at PTX line", "acquire of gpu scope")


def test_a_ticket_of_the_cta_only() -> None:
    """It orders nothing between CTAs; and as two may draw the same one, it is a fault itself."""
    kernel = combine("atom.acq_rel.cta.global.add.u32", "bar.sync 0;", "")
    for schedule in EVERY_SCHEDULE:
        assert slugs(collected(kernel, schedule)[0]) == ["global-race", "scope-too-narrow"], schedule


def test_a_ticket_drawn_before_the_other_warp_has_written() -> None:
    """Warp 0 releases only what it has seen: a barrier is missing between warp 1's row and the ticket."""
    last = f"setp.ne.u32 %p3, %warp, 0; @%p3 {WRITE}\n@!%p3 {WRITE}"
    kernel = combine(ORDERED, "", "", read=MARKED, write=last)
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Exception, match=r"\[global-race\].*`part`.*warp 1 of CTA"):
            kernel.run(schedule)


def two_ctas(body: str, element: type[np.generic] = np.uint32, launches: int = 1) -> Kernel:
    """Two CTAs of one warp; `%rd1` is the address of element `2 * lane + CTA` of `out`."""
    size = np.dtype(element).itemsize
    address = f"mad.lo.u32 %r1, %lane, 2, %cta; mul.wide.u32 %rd1, %r1, {size}; add.u64 %rd1, %rd1, %out;\n"
    return Kernel(address + body, {"out": np.zeros(64, element)}, grid=(2, 1, 1), launches=launches)


def test_two_ctas_write_the_same_bytes() -> None:
    """If both write the same value, the writer cannot be observed (PTX ISA 8.7.2). If the values differ, it can."""
    assert_clean(two_ctas("st.global.b32 [%out], 7; ret;"), {"out": np.array([7] + [0] * 63, np.uint32)})
    kernel = two_ctas("st.global.b32 [%out], %cta; //!")
    assert_blamed(kernel, "global-race", "byte 0 of `out` is overwritten", "warp 0 of CTA (", "wrote it at PTX line")


@pytest.mark.parametrize(("element", "type_"), [(np.uint8, "b8"), (np.uint16, "b16"), (np.uint32, "b32")])
def test_neighbours_do_not_race(element: type[np.generic], type_: str) -> None:
    body = f"mov.b16 %h1, 5; mov.b32 %r2, 5; st.global.{type_} [%rd1], {'%r2' if type_ == 'b32' else '%h1'}; ret;"
    assert_clean(two_ctas(body, element), {"out": np.full(64, 5, element)})


def test_what_neighbours_wrote_in_small_pieces_is_told_apart() -> None:
    """The other CTA writes one byte of a word that was written as a whole; the race is found."""
    body = """mov.b16 %h1, 5; setp.eq.u32 %p1, %cta, 0; @%p1 st.global.b32 [%out+4], 9; @%p1 bra END;
    st.global.b8 [%out+3], %h1; st.global.b8 [%out+8], %h1; st.global.b8 [%out+6], %h1;
    END: ret;"""
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Exception, match=r"\[global-race\].*byte [46] of `out`"):
            two_ctas(body).run(schedule)


def test_launches_are_ordered() -> None:
    body = "setp.eq.u32 %p1, %cta, 0; @%p1 st.global.b32 [%out], 7; ret;"
    assert_clean(two_ctas(body, launches=2), {"out": np.array([7] + [0] * 63, np.uint32)})


def test_atomics_do_not_race() -> None:
    expected = np.zeros(64, np.uint32)
    expected[0] = 64
    assert_clean(two_ctas("red.global.add.u32 [%out], 1; ret;"), {"out": expected})


POLL = "POLL: ld.{poll}.gpu.global.b32 %r2, [%out+128]; setp.eq.u32 %p2, %r2, 0; @%p2 bra POLL;"


@pytest.mark.parametrize("poll", ["acquire", "relaxed"])
@pytest.mark.parametrize("set_", ["release", "relaxed"])
def test_overwriting_what_another_cta_has_read(poll: str, set_: str) -> None:
    body = f"""setp.eq.u32 %p1, %cta, 0; @%p1 bra READER;
    {POLL.format(poll=poll)}
    st.global.b32 [%out], 7; //!
    ret;
    READER: ld.global.b32 %r3, [%out]; st.{set_}.gpu.global.b32 [%out+128], 1; ret;"""
    kernel = two_ctas(body)
    if (poll, set_) == ("acquire", "release"):
        expected = np.zeros(64, np.uint32)
        expected[[0, 32]] = [7, 1]
        assert_clean(kernel, {"out": expected})
    else:
        assert_blamed(kernel, "global-race", "byte 0 of `out` is overwritten", "of CTA (0, 0, 0) read it")


@pytest.mark.parametrize("forgotten", [0, 1])
@pytest.mark.parametrize("set_", ["release", "relaxed"])
def test_overwriting_what_two_have_read(forgotten: int, set_: str) -> None:
    """The writer waits for both readers, and `forgotten` tells it with `set_`. A byte's mark holds only its last
    reader, so that a schedule of `megamoe check` must let each of them come last."""
    told = [set_ if one == forgotten else "release" for one in range(2)]
    body = f"""setp.eq.u32 %p1, %warp, 2; @%p1 bra WRITER; ld.global.b32 %r3, [%out]; setp.eq.u32 %p1, %warp, 1;
    @%p1 bra LAST; st.{told[0]}.gpu.global.b32 [%out+128], 1; ret;
    LAST: st.{told[1]}.gpu.global.b32 [%out+132], 1; ret;
    WRITER: {POLL.format(poll="acquire")}
    AGAIN: ld.acquire.gpu.global.b32 %r2, [%out+132]; setp.eq.u32 %p2, %r2, 0; @%p2 bra AGAIN;
    st.global.b32 [%out], 7; ret;"""
    kernel, found = Kernel(body, {"out": np.zeros(64, np.uint32)}, block=(96, 1, 1)), set[str]()
    for schedule in SCHEDULES:
        found.update(slugs(collected(kernel, schedule)[0]))
    assert found == ({"global-race"} if set_ == "relaxed" else set())


@pytest.mark.parametrize("between", ["bar.sync 0;", ""])
def test_two_warps_of_one_cta(between: str) -> None:
    body = f"""setp.eq.u32 %p1, %warp, 0; setp.eq.u32 %p2, %warp, 1;
    @%p1 st.global.b32 [%out], 7; @%p1 st.relaxed.gpu.global.b32 [%out+128], 1;
    {between}
    @%p1 bra END;
    {POLL.format(poll="relaxed")}
    ld.global.b32 %r3, [%out]; //!
    END: ret;"""
    kernel = Kernel(body, {"out": np.zeros(64, np.uint32)}, block=(64, 1, 1))
    if between:
        expected = np.zeros(64, np.uint32)
        expected[[0, 32]] = [7, 1]
        assert_clean(kernel, {"out": expected})
    else:
        assert_blamed(kernel, "global-race", "byte 0 of `out` is read", "warp 0 wrote it at PTX line")


@pytest.mark.parametrize("wait", ["cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"])
def test_reading_back_what_a_copy_has_written(wait: str) -> None:
    """A wait with .read says that the source has been read, not that the destination has been written."""
    body = f""".shared .align 16 .b8 s[16]; setp.ne.u32 %p1, %tx, 0; @%p1 bra END;
    mov.u32 %r1, s; st.shared.b32 [%r1], 7; st.shared.b32 [%r1+4], 7; st.shared.b32 [%r1+8], 7;
    st.shared.b32 [%r1+12], 7; fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], 16; cp.async.bulk.commit_group;
    {wait}
    ld.global.b32 %r2, [%out]; st.global.b32 [%out+128], %r2; //!
    END: ret;"""
    body = body.replace(" st.global.b32 [%out+128], %r2; //!", " //!\nst.global.b32 [%out+128], %r2;")
    kernel = Kernel(body, {"out": np.zeros(64, np.uint32)})
    if ".read" in wait:
        assert_blamed(kernel, "global-race", "byte 0 of `out` is read", "a copy wrote it at PTX line")
    else:
        expected = np.zeros(64, np.uint32)
        expected[[0, 1, 2, 3, 32]] = 7
        assert_clean(kernel, {"out": expected})


SPILL = """mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %rd1, %part; add.u64 %rd3, %rd1, %out;
WRITE
READ
END: ret;"""
KEEP = "st.global.b32 [%rd2], %tx;"
READERS = {
    "a load": "ld.global.b32 %r1, [%rd2];",
    "half of a wider load": "and.b64 %rd2, %rd2, -8; bar.warp.sync -1;\nld.global.v2.b32 {%r1, %r2}, [%rd2];\n"
    "add.u32 %r1, %r1, %r2;",
    "a poll": "ld.acquire.gpu.global.b32 %r1, [%rd2];",
    "an atomic": "atom.global.add.u32 %r1, [%rd2], 1; //!",
    "a cp.async": "mov.u32 %r3, buf; mad.lo.u32 %r3, %tx, 4, %r3;\n"
    "cp.async.ca.shared.global [%r3], [%rd2], 4;\ncp.async.wait_all; ld.shared.b32 %r1, [%r3];",
}
"""An atomic needs the value at once. The others only carry it; the blame falls on the store into a result."""


def spill(read: str, write: str = KEEP, unwritten: tuple[str, ...] = ("part",)) -> Kernel:
    """Each thread stores a word in the workspace `part`, which holds noise at first, and reads it back."""
    blamed = "" if "//!" in read else " //!"
    body = SPILL.replace("WRITE", write).replace("READ", f"{read}\nst.global.b32 [%rd3], %r1;{blamed}")
    buffers = {"part": np.full(32, 0xFFFFFFFF, np.uint32), "out": np.zeros(32, np.uint32)}
    declared = ".shared .align 16 .b8 buf[128];"
    return Kernel(f"{declared}\n{body}", buffers, unwritten=unwritten)


@pytest.mark.parametrize("name", READERS)
def test_what_nobody_stored_is_not_read(name: str) -> None:
    """Found whatever the bytes hold: a missing initialisation is found even if the noise looks like the value."""
    kernel = spill(READERS[name], write="setp.lt.u32 %p1, %tx, 31; @%p1 st.global.b32 [%rd2], %tx;")
    assert_blamed(kernel, "uninitialised-global", "of `part`, which was not yet written")


@pytest.mark.parametrize("name", [name for name in READERS if name != "half of a wider load"])
def test_what_was_stored_is_read(name: str) -> None:
    assert_clean(spill(READERS[name]), {"out": np.arange(32)})
    given = spill(READERS[name], write="", unwritten=())
    assert_clean(given, {"out": np.full(32, 0xFFFFFFFF)})


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_an_exchange_initialises_what_nobody_wrote(kind: str) -> None:
    """Its old value matters only if it is used, as with a lock that was never released."""
    wide = "shl.b64 %rd1, %rd1, 1; add.u64 %rd2, %rd1, %part; cvt.u64.u32 %rd4, %tx;"
    register = {"b32": "%r1", "b64": "%rd5"}[kind]
    exchange = f"{wide}\natom.global.exch.{kind} {register}, [%rd2], {'%tx' if kind == 'b32' else '%rd4'};"
    keep = spill("ld.global.b32 %r1, [%rd2];", write=exchange)
    buffers = {**keep.buffers, "part": np.full(64, 0xFFFFFFFF, np.uint32)}
    assert_clean(replace(keep, buffers=buffers), {"out": np.arange(32)}, schedules=("eager",))
    narrow = "" if kind == "b32" else "cvt.u32.u64 %r1, %rd5;"
    used = replace(spill(narrow, write=exchange), buffers=buffers)
    assert_blamed(used, "uninitialised-global", "of `part`, which was not yet written", schedules=("eager",))


CLAMPS = {
    "a greatest one above all that it may be": ("max.u32 %r1, %r1, 0xffffffff;", True),
    "a least one of signed numbers": ("min.s32 %r1, %r1, 0x80000000;", True),
    "between two equal bounds": ("min.u32 %r1, %r1, 7; max.u32 %r1, %r1, 7;", True),
    "the high bits of what is at most 7": ("min.u32 %r1, %r1, 7; shr.u32 %r1, %r1, 3;", True),
    "the low bits of what is at most 7": ("min.u32 %r1, %r1, 7;", False),
    "the sign of what is at most 7": ("min.s32 %r1, %r1, 7; shr.u32 %r1, %r1, 31;", False),
    "of a byte, beside 256": ("and.b32 %r1, %r1, 255; max.u32 %r1, %r1, 256;", True),
    "of a byte, beside 255": ("and.b32 %r1, %r1, 255; min.u32 %r1, %r1, 254;", False),
}


@pytest.mark.parametrize("name", CLAMPS)
def test_a_clamp_decides_what_an_undefined_value_may_be(name: str) -> None:
    clamp, decided = CLAMPS[name]
    kernel = spill(f"ld.global.b32 %r1, [%rd2];\n{clamp}", write="")
    if decided:
        kernel.run()
    else:
        assert_blamed(kernel, "uninitialised-global", "of `part`, which was not yet written", schedules=("eager",))


def test_an_element_that_nobody_uses() -> None:
    """Compilers load whole vectors even if they need only part."""
    word = "and.b64 %rd2, %rd2, -8;\nld.global.v2.b32 {%r1, %r2}, [%rd2];"
    even = "and.b32 %r4, %tx, 1; setp.eq.u32 %p1, %r4, 0; @%p1 st.global.b32 [%rd2], %tx; bar.warp.sync -1;"
    assert_clean(spill(word, write=even), {"out": np.arange(32) & ~1})


def test_a_tile_of_which_a_part_holds_nothing() -> None:
    """A bulk copy takes whatever is there: grouped GEMMs also load the rows past an expert's last token."""
    store = "cp.async.bulk.global.shared::cta.bulk_group [%mid], [%r41], 240;"
    again = f"{store}\ncp.async.bulk.commit_group; cp.async.bulk.wait_group 0;\n{EXPECT}\n{LOAD}"
    changes = {
        "store": again.replace("[%from,", "[%back,").replace("[mbar]", "[other]"),
        "commit": "",
        "drain": f"{wait('other', 0)}\n{STORE}\ncp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
    }
    maps = {**MAPS, "back": Map("mid", "u32", (16, 4), (64,), (16, 4))}
    kernel = copy_kernel(changes, {"mid": np.full(64, 9, np.uint32)}, maps=maps, unwritten=("mid", "out"))
    assert_clean(kernel, {"out": np.append(X[:60] + 1, [9] * 4)})


def test_the_results_of_a_row_are_looked_at_after_its_last_launch() -> None:
    """An output may be used as scratch in between. The final content is blamed on the kernel that stored it."""
    place = "mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %rd1, %out;\n"
    rough, last = f"{place}st.global.b32 [%rd2], %r7; ret;", f"{place}st.global.b32 [%rd2], %tx; ret;"
    kernel = Kernel(rough, {"out": np.zeros(32, np.uint32)}, others={"last": last})
    launches = {name: Launch(name, (1, 1, 1), (32, 1, 1), (BufferArg("out"),)) for name in ("kernel", "last")}
    for order, clean in ((("kernel", "last"), True), (("last", "kernel"), False), (("kernel", "kernel"), False)):
        program = Program("sm_100a", kernel.ptx, tuple(launches[name] for name in order))
        memory = {"out": torch.zeros(32, dtype=torch.int32)}
        said = EXECUTOR.run(program, memory, RunOptions(outputs=("out",))).violation or ""
        assert bool(said) != clean, f"{order}: {said!r}"
        assert clean or ("kernel kernel" in said and "st.global.b32 [%rd2], %r7;" in said), f"{order}: {said!r}"


def test_the_machine_of_a_row_knows_its_outputs_and_its_workspaces() -> None:
    """A workspace holds noise, and a kernel that reads an output before writing it breaks a rule."""
    add = "ld.global.b32 %r1, [%rd2]; add.u32 %r1, %r1, 1; st.global.b32 [%rd3], %r1;"
    body = "mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %rd1, %part; add.u64 %rd3, %rd1, %out;\n" + add + "ret;"
    kernel = Kernel(body, {"part": np.zeros(32, np.uint32), "out": np.zeros(32, np.uint32)})
    for scratch, tensors in ((True, ("out",)), (False, ("part", "out"))):
        program = Program(
            "sm_100a", kernel.ptx, (Launch("kernel", (1, 1, 1), (32, 1, 1), (BufferArg("part"), BufferArg("out"))),),
            {"part": 128} if scratch else {},
        )  # fmt: skip
        memory = {name: torch.zeros(32, dtype=torch.int32) for name in tensors}
        said = EXECUTOR.run(program, memory, RunOptions(outputs=tensors)).violation or ""
        assert said.startswith("[uninitialised-global]"), f"scratch {scratch}: {said!r}"
        assert "`part`" in said, f"scratch {scratch}: {said!r}"


def noise_of_a_row(grid: int = 1, size: int = 32, first: int = 0) -> bytes:
    """What the workspace `part` holds when a row begins: the launch has `grid` CTAs, the output `size` words."""
    made: list[Machine] = []

    def kept(schedule: str, accumulate: str, budget: int, observer: Recorder | None) -> Machine:
        made.append(Machine(schedule, accumulate, budget, observer))
        return made[0]

    executor = VmExecutor()
    executor.machines = kept
    kernel = Kernel("ret;", {"part": np.zeros(1), "out": np.zeros(1)})
    launch = Launch("kernel", (grid, 1, 1), (32, 1, 1), (BufferArg("part"), BufferArg("out")))
    given = torch.zeros(size, dtype=torch.int32)
    given[0] = first
    said = executor.run(Program("sm_100a", kernel.ptx, (launch,), {"part": 64}), {"out": given}, RunOptions())
    assert said.violation is None, said
    return next(one.data.tobytes() for one in made[0].memory.buffers if one.name == "part")


def test_the_noise_of_a_workspace_differs_by_row() -> None:
    """No kernel can rely on it, not even on a value that it has in one row; the same row has the same noise."""
    rows = [noise_of_a_row(), noise_of_a_row(grid=2), noise_of_a_row(size=64), noise_of_a_row(first=1)]
    assert len(set(rows)) == len(rows), "two rows have the same noise"
    assert noise_of_a_row() == rows[0], "a rerun has other noise"
    assert all(len(set(row)) > 16 for row in rows), "the noise is no single value"
