"""Races for one or two bytes of shared memory, each with a correct twin: other bytes of the granule, or an order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from backends.vm.machine import quick_access
from backends.vm.memory import compiled_granules
from conformance.vm.kernel import FENCE, SYNC, Kernel, collected, init, slugs, wait

SCHEDULES = ("eager", "lazy", "late_warp:0", "late_warp:1", "random:1")
BUFFERS = {"x": np.zeros(64, np.uint32), "out": np.zeros(64, np.uint32)}
MEET = "bar.warp.sync -1;"
ARRIVE = "@%p3 mbarrier.arrive.shared::cta.b64 _, [mbar];"
WAIT = wait("mbar", 0)
BARRIER = "bar.sync 1, 64;"
COPY_OUT = "@%p3 cp.async.bulk.global.shared::cta.bulk_group [%out], [%r3], 128; @%p3 cp.async.bulk.commit_group;"
DRAIN = "@%p3 cp.async.bulk.wait_group 0;"
COPY_IN = """@%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [other], 128;
@%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%x], 128, [other];"""
LDMATRIX = """and.b32 %r2, %lane, 7; mad.lo.u32 %r2, %r2, 16, %r3;
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];"""


def warps(*bodies: str, count: int = 1) -> Kernel:
    """Each body in a warp of its own, behind a fill of all cells and a barrier. `count`: arrivals at mbar."""
    branches = [f"setp.eq.u32 %p1, %warp, {number}; @%p1 bra WARP{number};" for number in range(1, len(bodies))]
    each = [f"WARP{number}: {body} bra END;" if number else f"{body} bra END;" for number, body in enumerate(bodies)]
    begin = f""".shared .align 128 .b8 cells[256]; .shared .align 8 .b64 mbar; .shared .align 8 .b64 other;
mov.u32 %r3, cells; mad.lo.u32 %r4, %lane, 4, %r3; mad.lo.u32 %r5, %lane, 2, %r3; xor.b32 %r6, %lane, 1;
mad.lo.u32 %r6, %r6, 2, %r3; setp.eq.u32 %p3, %lane, 0; setp.eq.u32 %p2, %warp, 0; mov.b16 %h1, 1; mov.b16 %h2, 2;
@%p2 st.shared.u32 [%r4], 0; @%p2 st.shared.u32 [%r4+128], 0; {FENCE}
setp.eq.u32 %p13, %tx, 0; @%p13 mbarrier.init.shared::cta.b64 [mbar], {count}; {init("other")}"""
    return Kernel("\n".join([begin, *branches, *each, "END: ret;"]), BUFFERS, block=(32 * len(bodies), 1, 1))


def one_lane(text: str) -> str:
    """`text` in lane 0."""
    return " ".join(f"@%p3 {part.strip()};" for part in text.split(";") if part.strip())


ST, ST2 = one_lane("st.shared.b8 [cells+1], %h1"), one_lane("st.shared.b8 [cells+1], %h2")
LD = "ld.shared.b8 %h3, [cells+1];"
HALF, LD_HALF = one_lane("st.shared.b16 [cells+2], %h1"), "ld.shared.b16 %h3, [cells+2];"
WORD, LD_WORD = one_lane("st.shared.b32 [cells], 7"), "ld.shared.b32 %r1, [cells];"
STRONG = ST.replace("st.", "st.relaxed.cta.")
PUBLISHED = f"{MEET} {ARRIVE}"


def elsewhere(text: str, to: str) -> str:
    """`text` with its byte or half of the granule moved."""
    return text.replace("cells+1", to).replace("cells+2", to)


RACES: dict[str, tuple[Kernel, Kernel]] = {
    "a byte stored by two warps": (warps(ST, ST2), warps(ST, elsewhere(ST2, "cells+2"))),
    "a byte stored by two warps, with a barrier": (warps(ST, ST2), warps(f"{ST} {BARRIER}", f"{BARRIER} {ST2}")),
    "a byte stored with two values": (warps(ST, ST2), warps(ST, ST)),
    "a byte of a half": (warps(HALF, elsewhere(ST2, "cells+3")), warps(HALF, elsewhere(ST2, "cells+1"))),
    "a byte stored and read": (warps(ST, LD), warps(ST, elsewhere(LD, "cells"))),
    "a byte stored and read, through an mbarrier": (
        warps(f"{ST} {PUBLISHED}", LD), warps(f"{ST} {PUBLISHED}", f"{WAIT} {LD}")
    ),
    "a byte read in a granule that a third warp has stored to in order": (
        warps(f"{ST} {BARRIER}", f"{BARRIER} {elsewhere(ST, 'cells+2')} {PUBLISHED}", f"{WAIT} "
              f"{elsewhere(LD, 'cells+2')} {elsewhere(ST2, 'cells+2')}", LD),
        warps(f"{ST} {BARRIER}", f"{BARRIER} {elsewhere(ST, 'cells+2')} {PUBLISHED}", f"{WAIT} "
              f"{elsewhere(LD, 'cells+2')} {elsewhere(ST2, 'cells+2')}", elsewhere(LD, "cells+3")),
    ),
    "a half stored over a half that is read": (warps(LD_HALF, HALF), warps(elsewhere(LD_HALF, "cells"), HALF)),
    "a half that two warps read and one gives back": (
        warps(f"{LD_HALF} {PUBLISHED}", LD_HALF, f"{WAIT} {HALF}"),
        warps(f"{LD_HALF} {PUBLISHED}", f"{LD_HALF} {PUBLISHED}", f"{WAIT} {HALF}", count=2),
    ),
    "a half stored over a word that is read": (warps(LD_WORD, HALF), warps(LD_WORD, elsewhere(HALF, "cells+4"))),
    "a half stored over a word": (warps(WORD, HALF), warps(WORD, elsewhere(HALF, "cells+4"))),
    "a word stored over a half": (warps(f"{HALF} {PUBLISHED}", WORD), warps(f"{HALF} {PUBLISHED}", f"{WAIT} {WORD}")),
    "a word read behind one of two halves": (
        warps(f"{HALF} {PUBLISHED}", elsewhere(HALF, "cells"), f"{WAIT} {LD_WORD}"),
        warps(f"{HALF} {PUBLISHED}", f"{elsewhere(HALF, 'cells')} {PUBLISHED}", f"{WAIT} {LD_WORD}",
              count=2),
    ),
    "a matrix read behind one of two halves": (
        warps(f"{HALF} {PUBLISHED}", elsewhere(HALF, "cells"), f"{WAIT} {LDMATRIX}"),
        warps(f"{HALF} {PUBLISHED}", f"{elsewhere(HALF, 'cells')} {PUBLISHED}", f"{WAIT} {LDMATRIX}",
              count=2),
    ),
    "halves copied behind one of two": (
        warps(f"{HALF} {FENCE} {PUBLISHED}", elsewhere(HALF, "cells"), f"{WAIT} {COPY_OUT} {DRAIN}"),
        warps(f"{HALF} {FENCE} {PUBLISHED}", f"{elsewhere(HALF, 'cells')} {FENCE} {PUBLISHED}",
              f"{WAIT} {COPY_OUT} {DRAIN}", count=2),
    ),
    "a copy over halves of which one is read": (
        warps(f"{LD_HALF} {FENCE} {PUBLISHED}", elsewhere(LD_HALF, "cells"),
              f"{WAIT} {COPY_IN} {wait('other', 0)}"),
        warps(f"{LD_HALF} {FENCE} {PUBLISHED}", f"{elsewhere(LD_HALF, 'cells')} {FENCE} {PUBLISHED}",
              f"{WAIT} {COPY_IN} {wait('other', 0)}", count=2),
    ),
    "a half stored over what a copy reads": (
        warps(f"{COPY_OUT} {HALF} {DRAIN}"), warps(f"{COPY_OUT} {elsewhere(HALF, 'cells+128')} {DRAIN}")
    ),
    "a half over what another thread's cp.async has copied": (
        warps("@%p3 cp.async.ca.shared.global [cells], [%x], 4; cp.async.wait_all;", HALF),
        warps(f"@%p3 cp.async.ca.shared.global [cells], [%x], 4; cp.async.wait_all; {BARRIER}", f"{BARRIER} {HALF}"),
    ),
    "a strong store of a byte": (
        warps(STRONG, LD), warps(STRONG, f"{STRONG} {LD.replace('ld.', 'ld.relaxed.cta.')}")
    ),
}  # fmt: skip


def _found(kernel: Kernel, schedule: str) -> list[str]:
    return sorted(set(slugs(collected(kernel, schedule)[0])))


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_races_for_bytes(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With machine code from the first access, and without."""
    for worth in (quick_access.WORTH, 0):
        monkeypatch.setattr(quick_access, "WORTH", worth)
        monkeypatch.setattr(compiled_granules, "WORTH", worth)
        wrong, right = RACES[name]
        assert not (found := _found(right, schedule)), f"{schedule}: the twin is blamed for {found}"
        found = _found(wrong, schedule)
        assert found in (["race"], ["copy-not-awaited"]), f"{schedule}: {found} is found, no race"


def test_a_race_names_the_byte() -> None:
    found, _ = collected(warps(ST, f"bar.warp.sync -1; {LD}"), "late_warp:1")
    assert [one.address for one in found] == [0x401], [str(one) for one in found]
    assert "this byte is read after warp 0 wrote it at " in str(found[0])


@pytest.mark.parametrize("schedule", ["late_warp:0", "late_warp:1"])
def test_a_race_says_that_either_access_may_come_first(schedule: str) -> None:
    """The machine meets one order, and the reader may look for the other one."""
    store, load = "st.shared.b32 [%r4], 1;", "ld.shared.b32 %r1, [%r4];"
    (one,), _ = collected(warps(store, load), schedule)
    by, did, other = ("overwritten", "read", 1) if schedule == "late_warp:0" else ("read", "wrote", 0)
    assert f"this 4-byte word is {by} after warp {other} {did} it at PTX line " in str(one), one
    assert ", but nothing orders the two, which may happen in either order: a barrier" in str(one), one


STORE_OWN = "st.shared.b16 [%r5], %h1;"
LANES: dict[str, Callable[[str], Kernel]] = {
    "the other lane's half": lambda meet: warps(f"{STORE_OWN} {meet} ld.shared.b16 %h3, [%r6];"),
    "a word of two lanes' halves": lambda meet: warps(
        f"{STORE_OWN} {meet} and.b32 %r7, %r5, -4; ld.shared.b32 %r1, [%r7];"
    ),
    "a matrix of halves, released by one lane": lambda meet: warps(
        f"{STORE_OWN} {meet} {ARRIVE}", f"{WAIT} {LDMATRIX}"
    ),
    "halves released by one lane": lambda meet: warps(
        f"{STORE_OWN} {meet} {ARRIVE}", f"{WAIT} ld.shared.b16 %h3, [%r6];"
    ),
    "halves given back by one lane": lambda meet: warps(
        f"ld.shared.b16 %h3, [%r5]; {meet} {ARRIVE}", f"{WAIT} {STORE_OWN}"
    ),
    "halves that one lane has awaited": lambda meet: warps(
        f"@!%p3 bra JOIN; {WAIT}\nJOIN: {meet} ld.shared.b16 %h3, [%r5];", f"{STORE_OWN} {MEET} {ARRIVE}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LANES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_that_have_not_met(name: str, schedule: str) -> None:
    assert not _found(LANES[name](MEET), schedule), "the twin is blamed"
    assert _found(LANES[name](""), schedule) == ["lanes-unordered"], "nothing is found"


ALONE = {
    "a lane reads its own half": warps(f"{STORE_OWN} ld.shared.b16 %h3, [%r5];"),
    "a lane that has released alone reads its own half": warps(
        f"{STORE_OWN} {ARRIVE}", f"{WAIT} @%p3 ld.shared.b16 %h3, [%r5];"
    ),
    "warps that own halves read all of them behind a barrier": warps(
        f"{HALF} {BARRIER} {LD_WORD} {BARRIER} {HALF} {BARRIER} {LD_WORD}",
        f"{elsewhere(HALF, 'cells')} {BARRIER} {LD_WORD} {BARRIER} {elsewhere(HALF, 'cells')} {BARRIER} {LD_WORD}",
    ),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_and_warps_with_bytes_of_their_own(name: str, schedule: str) -> None:
    assert not (found := _found(ALONE[name], schedule)), found


def _remote(order: str) -> Kernel:
    """CTA 0 stores a byte into the shared memory of CTA 1, which reads it; `order` stands in between in both."""
    body = f""".shared .align 16 .b8 cells[16]; mov.u32 %r3, cells; mov.b16 %h1, 1; st.shared.b32 [cells], 0;
barrier.cluster.arrive; barrier.cluster.wait; setp.eq.u32 %p1, %cta, 1; setp.eq.u32 %p3, %lane, 0;
mapa.shared::cluster.u32 %r2, %r3, 1; @%p1 bra READER; @%p3 st.shared::cluster.b8 [%r2+1], %h1; {order} bra END;
READER: {order} ld.shared.b8 %h3, [cells+1];
END: barrier.cluster.arrive; barrier.cluster.wait; ret;"""
    return Kernel(body, BUFFERS, grid=(2, 1, 1), cluster=(2, 1, 1))


@pytest.mark.parametrize("schedule", [*SCHEDULES, "late_cta:0", "late_cta:1"])
def test_a_byte_of_another_cta(schedule: str) -> None:
    assert not _found(_remote("barrier.cluster.arrive; barrier.cluster.wait;"), schedule), "the twin is blamed"
    assert _found(_remote(""), schedule) == ["race"], "nothing is found"


def _wgmma(order: str, issued: str = "") -> Kernel:
    """A fifth warp stores a half of an operand of wgmma; `order` stands between. `issued`: behind the issue, and before
    the store."""
    body = f""".shared .align 1024 .b8 cells[4096]; mov.u32 %r3, cells; mad.lo.u32 %r4, %tx, 16, %r3; mov.u32 %r1, 0;
st.shared.v4.b32 [%r4], {{%r1, %r1, %r1, %r1}}; {FENCE} {SYNC} setp.ge.u32 %p1, %warp, 4; @%p1 bra FIFTH;
{order} shr.u32 %r5, %r3, 4; cvt.u64.u32 %rd1, %r5; or.b64 %rd1, %rd1, {8 << 16 | 8 << 32}; mov.f32 %f0, 0f00000000;
mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0; wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f0, %f1, %f2, %f3}}, %rd1, %rd1, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; {issued} wgmma.wait_group.sync.aligned 0; bra END;
FIFTH: {issued} mov.b16 %h1, 0; setp.eq.u32 %p3, %lane, 0; @%p3 st.shared.b16 [cells+2], %h1; {FENCE} {order}
END: ret;"""
    return Kernel(body, BUFFERS, block=(160, 1, 1), target="sm_90a")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_half_of_an_operand_of_wgmma(schedule: str) -> None:
    assert not (found := _found(_wgmma("bar.sync 1, 160;"), schedule)), f"the twin is blamed for {found}"
    assert _found(_wgmma(""), schedule) == ["race"], "nothing is found"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_tensor_core_that_reads_an_operand_is_named(schedule: str) -> None:
    (race,), _ = collected(_wgmma("", issued="bar.sync 1, 160;"), schedule)
    assert race.rule == "race", f"{schedule}: {race}"
    assert "after the tensor core read it at PTX line" in race.detail, f"{schedule}: {race}"
