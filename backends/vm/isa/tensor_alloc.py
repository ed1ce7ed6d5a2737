"""tcgen05.alloc, dealloc and relinquish_alloc_permit (PTX ISA 9.7.16.7.1).

With cta_group::2 one warp of each CTA of the pair must execute them, in the same order; the first waits for the second.
The ISA leaves open whether dealloc and relinquish wait; here they do, which exposes a kernel that relies on either
answer (Table 48).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.isa.tensor_operands import GROUPS, group_of, pair, same_group
from backends.vm.machine.access import resolve
from backends.vm.machine.code import NEXT, Wait
from backends.vm.machine.warp import Warp
from backends.vm.memory.shared import OFFSET_MASK
from backends.vm.memory.tmem import COLUMNS, Meeting, TensorMemory

if TYPE_CHECKING:
    from backends.vm.machine.cta import Cta

_COUNTS = (32, 64, 128, 256, 512)


def uniform(warp: Warp, row: int, what: str) -> int:
    """The value that all active lanes hold in a 32-bit register."""
    values = warp.u32[row][warp.mask]
    if (values != values[0]).any():
        raise Fault("diverged", f"{what} must be the same in all lanes; they hold {sorted(set(values.tolist()))[:4]}")
    return int(values[0])


def _collective(warp: Warp, what: str, arguments: tuple[int, ...]) -> tuple[Meeting, tuple[Cta, Cta]]:
    """Note that `warp` takes part for its CTA in the pair's next collective instruction."""
    both = pair(warp, what)
    tmem, rank = warp.cta.tmem, warp.cta.place.cta_rank
    meeting = both[0].tmem.meetings.setdefault(tmem.collectives, Meeting(what, arguments))
    tmem.collectives += 1
    if (meeting.what, meeting.arguments) != (what, arguments):
        raise Fault("cta-pair", f"{what} of {_listed(arguments)} by CTA rank {rank} where its peer executes "
                    f"{meeting.what} of {_listed(meeting.arguments)}; both must execute the same")  # fmt: skip
    meeting.ranks.add(rank)
    warp.cta.machine.engine.events += 1
    return meeting, both


def _listed(arguments: tuple[int, ...]) -> str:
    return ", ".join(f"{value:#x}" for value in arguments) or "nothing"


def _absent(meeting: Meeting, both: tuple[Cta, Cta]) -> str:
    missing = [cta.place.cta_rank for cta in both if cta.place.cta_rank not in meeting.ranks]
    return f"a warp of the peer CTA rank {missing} to execute {meeting.what} with .cta_group::2 too"


@opcode("tcgen05.alloc.<group>.sync.aligned{.<space>}.b32", section="9.7.16.7.1", kind="tail", counter="tmem",
        group=GROUPS, space="shared::cta")  # fmt: skip
def alloc(b: Binder) -> Step:
    """Give columns to the CTA (or both of a pair), all 128 lanes of them; waits while there are not enough.

    The address goes to shared memory, of each CTA its own.
    """
    destination, count = b.expect(2)
    address, row = b.address(destination), b.source(count, "u32")
    wide = b.width(getattr(destination, "base", destination)) == 64
    line, group = b.instruction.line, group_of(b.words["group"])

    def step(warp: Warp) -> object:
        warp.converged("tcgen05.alloc")
        same_group(warp, group, "tcgen05.alloc")
        columns = uniform(warp, row, "the column count")
        if columns not in _COUNTS:
            raise Fault("tmem-alloc", f"{columns} columns asked for; the count is a power of two in 32..512")
        if not warp.cta.tmem.permit:
            raise Fault("tmem-alloc", "an alloc after the CTA gave up its permit (relinquish_alloc_permit)")
        at = address(warp)[:1]
        offset = int((resolve("", at)[1] if wide else at)[0]) & OFFSET_MASK

        def give(first: int) -> None:
            value = np.array([[first]], np.uint32).view(np.uint8)
            warp.cta.smem.store(np.array([offset], np.int64), value, warp.clock, warp.stamp, line)

        return _alloc_one(warp, columns, line, give) if group == 1 else _alloc_pair(warp, columns, offset, line, give)

    return step


def _alloc_one(warp: Warp, columns: int, line: int, give: Callable[[int], None]) -> object:
    tmem = warp.cta.tmem
    first = tmem.find_free(columns)
    if first is not None:
        tmem.allocate(first, columns, line)
        give(first)
        return NEXT
    return Wait(
        ready=lambda: tmem.find_free(columns) is not None,
        reason=lambda: f"{columns} free columns of tensor memory; held: {_held(tmem)}",
        again=True,
    )


def _held(tmem: TensorMemory) -> str:
    return ", ".join(f"{a.columns} columns (PTX line {a.line})" for a in tmem.allocations) or "none"


def _alloc_pair(warp: Warp, columns: int, offset: int, line: int, give: Callable[[int], None]) -> Wait:
    meeting, both = _collective(warp, "tcgen05.alloc", (columns, offset))

    def free() -> int | None:
        owned = both[0].tmem.owned | both[1].tmem.owned
        return next((at for at in range(0, COLUMNS, columns) if not owned[at : at + columns].any()), None)

    def finish() -> None:
        if meeting.first is None:
            meeting.first = free()
            assert meeting.first is not None
            for cta in both:
                cta.tmem.allocate(meeting.first, columns, line)
            warp.cta.machine.engine.events += 1
        give(meeting.first)

    def reason() -> str:
        held = "; ".join(f"CTA rank {cta.place.cta_rank} holds {_held(cta.tmem)}" for cta in both)
        return f"{columns} free columns in both CTAs; {held}" if len(meeting.ranks) == 2 else _absent(meeting, both)

    return Wait(
        ready=lambda: len(meeting.ranks) == 2 and (meeting.first is not None or free() is not None),
        reason=reason,
        finish=finish,
    )


def _together(warp: Warp, group: int, what: str, arguments: tuple[int, ...], perform: Callable[[], None]) -> object:
    """Perform at once, or when the peer is here too."""
    if group == 1:
        perform()
        return NEXT
    meeting, both = _collective(warp, what, arguments)
    return Wait(ready=lambda: len(meeting.ranks) == 2, reason=lambda: _absent(meeting, both), finish=perform)


@opcode("tcgen05.dealloc.<group>.sync.aligned.b32", section="9.7.16.7.1", kind="tail", counter="tmem", group=GROUPS)
def dealloc(b: Binder) -> Step:
    """Take an allocation back."""
    address, count = b.expect(2)
    ra, rc = b.source(address, "u32"), b.source(count, "u32")
    group = group_of(b.words["group"])

    def step(warp: Warp) -> object:
        warp.converged("tcgen05.dealloc")
        same_group(warp, group, "tcgen05.dealloc")
        taddr, columns = uniform(warp, ra, "the address"), uniform(warp, rc, "the column count")

        def perform() -> None:
            warp.cta.machine.engine.events += 1
            warp.cta.tmem.free(taddr, columns, warp.clock)

        return _together(warp, group, "tcgen05.dealloc", (taddr, columns), perform)

    return step


@opcode("tcgen05.relinquish_alloc_permit.<group>.sync.aligned", section="9.7.16.7.1", kind="tail", counter="tmem",
        group=GROUPS)  # fmt: skip
def relinquish(b: Binder) -> Step:
    """No thread of the CTA may allocate from now on."""
    b.expect(0)
    group = group_of(b.words["group"])

    def step(warp: Warp) -> object:
        warp.converged("tcgen05.relinquish_alloc_permit")
        same_group(warp, group, "tcgen05.relinquish_alloc_permit")

        def perform() -> None:
            warp.cta.tmem.permit = False

        return _together(warp, group, "tcgen05.relinquish_alloc_permit", (), perform)

    return step
