"""With machine code for blocks that run often, kernels do the same, and faults keep their lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from backends.vm.bind import lanes
from backends.vm.bind.lanes import truth
from backends.vm.machine import code
from conformance.vm.kernel import Kernel, assert_blamed

_DIVERGENT = """ld.param.u64 %rd0, [p_x]; mov.u32 %r3, 0; mov.u32 %r9, 0;
AGAIN: add.u32 %r3, %r3, 1; xor.b32 %r4, %r3, %lane; and.b32 %r5, %r4, 3;
setp.eq.u32 %p0, %r5, 1;
@%p0 mad.lo.u32 %r9, %r3, 7, %r9;
@!%p0 add.u32 %r9, %r9, %r4;
lop3.b32 %r9, %r9, %r3, %lane, 0x96; lop3.b32 %r9, %r9, %r3, %lane, 0xE8;
setp.lt.u32 %p1, %r3, 20; @!%p1 bra OVER;
setp.lt.u32 %p2, %lane, 9; @%p2 bra AGAIN;
setp.lt.u32 %p3, %r3, 12; @%p3 bra AGAIN;
OVER: mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd0, %rd1; st.global.u32 [%rd1], %r9; ret;"""
_UNDEFINED = """ld.param.u64 %rd0, [p_x]; mov.u32 %r3, 0;
setp.eq.u32 %p7, %tx, 77; @%p7 mov.u32 %r20, 5;
AGAIN: add.u32 %r3, %r3, 1; setp.eq.u32 %p0, %r3, 99; selp.u32 %r4, %r20, %r3, %p0; add.u32 %r5, %r4, %r3;
setp.lt.u32 %p1, %r3, 40; @%p1 bra AGAIN;
mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd0, %rd1; st.global.u32 [%rd1], %r5; ret;"""
_BEYOND = """ld.param.u64 %rd0, [p_x]; mov.u32 %r3, 0;
AGAIN: add.u32 %r3, %r3, 1; mul.wide.u32 %rd1, %r3, 256; add.u64 %rd1, %rd1, %rd0; xor.b32 %r4, %r3, 5;
st.global.u32 [%rd1], %r4; //!
add.u32 %r5, %r3, 1; bra AGAIN;"""

_EXCHANGES = """ld.param.u64 %rd0, [p_x]; mov.u32 %r3, 0; mad.lo.u32 %r9, %tx, 77, 5; setp.lt.u32 %p7, %tx, 77;
AGAIN: add.u32 %r3, %r3, 1; mul.lo.u32 %r4, %r3, %lane; mad.lo.u32 %r5, %r3, 2654435761, %r9;
shfl.sync.bfly.b32 %r6|%p0, %r9, %r4, %r5, -1; add.u32 %r9, %r9, %r6; @%p0 add.u32 %r9, %r9, 1;
shfl.sync.up.b32 %r6|%p0, %r9, %r4, %r5, -1; xor.b32 %r9, %r9, %r6; @%p0 add.u32 %r9, %r9, 1;
shfl.sync.down.b32 %r6|%p0, %r9, %r4, %r5, -1; add.u32 %r9, %r9, %r6; @!%p0 add.u32 %r9, %r9, 1;
shfl.sync.idx.b32 %r9, %r9, %r4, %r5, -1; add.u32 %r9, %r9, %tx;
@%p7 shfl.sync.idx.b32 %r9|%p0, %r9, %r5, 31, -1; mad.lo.u32 %r9, %r9, %r3, %tx;
shfl.sync.bfly.b32 %r6, %r9, 3, 31, -1; mad.lo.u32 %r9, %r9, 3, %r6;
setp.eq.u32 %p0, %r3, 99; selp.u32 %r7, %r8, %r9, %p0; shfl.sync.bfly.b32 %r7, %r7, 1, 31, -1;
add.u32 %r9, %r9, %r7; setp.lt.u32 %p1, %r3, 20; @%p1 bra AGAIN;
mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd0, %rd1; st.global.u32 [%rd1], %r9; ret;"""
"""Lane steps and limits of all kinds, and %r8, which is undefined but does not matter."""
_ABSENT = """mov.u32 %r3, 0;
AGAIN: add.u32 %r3, %r3, 1; setp.eq.u32 %p0, %r3, 5; selp.u32 %r4, 0x7fffffff, -1, %p0; add.u32 %r5, %r3, %lane;
shfl.sync.bfly.b32 %r6, %r5, 1, 31, %r4; //!
add.u32 %r5, %r6, 1; bra AGAIN;"""


def _at_once(patch: pytest.MonkeyPatch) -> None:
    """Uses machine code from the first execution on."""
    patch.setattr(code, "OFTEN", 1)
    patch.setattr(lanes, "WORTH", 0)


@pytest.mark.parametrize(
    ("body", "threads"),
    [(_DIVERGENT, 45), (_UNDEFINED, 45), (_EXCHANGES, 64)],
    ids=["lanes diverge", "a register is undefined", "lanes exchange"],
)
def test_a_kernel_does_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch, body: str, threads: int) -> None:
    """Same memory and counters, including in a warp where some lanes do not exist."""
    kernel = Kernel(body, {"x": np.zeros(64, np.uint32)}, block=(threads, 1, 1))
    monkeypatch.setattr(code, "OFTEN", 1 << 40)
    plain, plain_counters = kernel.run()
    _at_once(monkeypatch)
    performed = list[int]()
    monkeypatch.setattr(lanes, "_perform", _noting(performed, lanes._perform))  # pyright: ignore[reportPrivateUsage]
    # Changed text, because bound code is cached by text.
    quick, quick_counters = replace(kernel, body=f"{body} // again").run()
    assert performed, "no machine code ran"
    assert (plain["x"] == quick["x"]).all(), f"{quick['x'].tolist()} instead of {plain['x'].tolist()}"
    assert plain_counters == quick_counters, f"{quick_counters} instead of {plain_counters}"


def _noting(performed: list[int], perform: Callable[..., int]) -> Callable[..., int]:
    def noted(*arguments: object) -> int:
        performed.append(1)
        return perform(*arguments)

    return noted


def test_a_fault_behind_machine_code_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _at_once(monkeypatch)
    assert_blamed(Kernel(_BEYOND, {"x": np.zeros(256, np.uint32)}), "out-of-bounds", schedules=("eager",))


def test_a_fault_of_what_machine_code_refuses_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is in the middle of a run, in the fifth iteration."""
    _at_once(monkeypatch)
    assert_blamed(Kernel(_ABSENT, {"x": np.zeros(1, np.uint32)}), "diverged", schedules=("eager",))


def test_an_exchange_between_the_wrong_lanes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine code of a shfl that leaves each lane its own value."""

    def own(b: object, cells: Sequence[lanes.Cell], *others: object) -> None:
        for cell, value in zip(cells[:-4], (cells[-4], cells[-1]), strict=False):
            cell.written = value.content() if cell.width == 32 else truth(cell.builder, cell.place)

    written = dict.fromkeys(lanes._WRITTEN, own)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(lanes, "_WRITTEN", written)
    monkeypatch.setattr(lanes, "_KINDS", {})
    with pytest.raises(AssertionError, match="instead of"):
        test_a_kernel_does_the_same_with_and_without(monkeypatch, f"{_EXCHANGES} // wrong", 64)
