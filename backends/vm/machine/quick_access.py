"""Machine code for the plain accesses of one ld or st: finds the memory, and records what warp and machine must know.

The access itself is in backends.vm.memory.compiled_access.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from backends.vm.machine import access
from backends.vm.machine.code import LANES, SCRATCH_PLACES, Key, first_lanes, place_of
from backends.vm.machine.run_access import SITE, RunAccess, of_global, of_shared
from backends.vm.memory.access_code import CHANGES, NO, NO_ROOM, OnDemand, code_of
from backends.vm.memory.compiled_access import CHANGED, CONFLICT, SERVED_SHIFT, Kind, Perform, performer, program
from backends.vm.memory.definedness import Missing
from backends.vm.memory.global_memory import SHARED_WINDOW, WINDOW_SHIFT
from backends.vm.memory.shared import OFFSET_MASK, RANK_SHIFT
from backends.vm.numpy_calls import address_of

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

Addresses = npt.NDArray[np.int64]

WORTH: Final = 200
"""Accesses of a kind that NumPy performs in the time that compiling its machine code takes."""
SPACES: Final = ("", "global", "shared", "shared::cta", "shared::cluster")


@cache
def _codes(*kind: Any) -> tuple[OnDemand[Perform], OnDemand[Perform]]:
    """The code for accesses to shared and to global memory; `kind` is the rest of a Kind."""
    shared, global_ = (OnDemand(partial(performer, Kind(memory, *kind))) for memory in ("shared", "global"))
    return shared, global_


class QuickAccess:
    """The weak accesses of an instruction to one of SPACES.

    `addressed`: the lane addresses of a warp, the register of their base, and the offset added to it. `element`: bytes
    of an element in memory. `registers`: one per element, None to discard it. `constant`: a load with .nc. `rows`:
    nonzero if the whole warp loads this many rows of 16 bytes of its own shared memory, at the addresses of the first
    lanes; they go to the scratch of its registers.
    """

    def __init__(
        self,
        space: str,
        addressed: tuple[Callable[[Warp], Addresses], Key, int],
        element: int,
        registers: Sequence[Key | None],
        line: int,
        *,
        stores: bool,
        signed: bool = False,
        constant: bool = False,
        rows: int = 0,
    ) -> None:
        self._space, self._stores, self._rows = space, stores, rows
        self._givers_address = address_of(first_lanes(rows or LANES))
        self._address, (width, self._row), self._offset = addressed
        self._view = "s64" if width == 64 else "u32"
        self._size = element * len(registers)
        sizes = tuple(0 if key is None else key[0] // 8 for key in registers)
        self._shared, self._global = _codes(stores, width // 8, element, signed, sizes, constant)
        places = SCRATCH_PLACES if rows else [(0, 0) if key is None else place_of(key) for key in registers]
        self._program = program(place_of((width, self._row)), self._offset, line, places)
        self._program_address: int = address_of(self._program)
        self._site: npt.NDArray[np.int64] | None = None

    def in_run(self, look_at: Callable[[Warp, int], object] | None = None) -> RunAccess | None:
        """The access for a run of machine code; None if runs cannot have it. `look_at`: what the instruction does with
        an answer."""
        if self._rows or self._space not in ("shared", "shared::cta", "global"):
            return None

        def after(warp: Warp, answer: int) -> None:
            self.count(warp, answer)
            if look_at is not None:
                look_at(warp, answer)

        function = of_global() if self._space == "global" else of_shared()
        return RunAccess(function, self._words, after)

    def _words(self) -> tuple[int, ...]:
        """The words that a run passes to this access. Nothing is recorded for runs before the first call."""
        if self._site is None:
            self._site = np.concatenate([np.zeros(SITE["program"], np.int64), self._program])
            self._site[SITE["stores"]] = self._stores
        return (address_of(self._site),)

    def perform(self, warp: Warp) -> int:
        """Run the machine code and return its answer. After NO, nothing has been done."""
        cta = warp.cta
        if self._space in ("shared", "shared::cta"):
            return self._in_shared(warp, cta.rank_bits)
        first = 0 if warp.where is True else int(warp.mask.argmax())
        address = int(getattr(warp, self._view)[self._row][first]) + self._offset
        window = address >> WINDOW_SHIFT
        if self._space == "global" or (self._space == "" and window == 0):
            return NO if self._rows else self._in_global(warp, address)
        base = cta.rank_bits + (SHARED_WINDOW if self._space == "" else 0)
        return self._in_shared(warp, base) if address >> RANK_SHIFT == base >> RANK_SHIFT else NO

    def missing(self, warp: Warp, addresses: Addresses) -> Missing | None:
        """The bytes that an answer reports as undefined. `addresses`: those of the active lanes."""
        where, own = access.resolve(self._space, addresses)
        if where.startswith("shared"):
            return warp.cta.smem.missing(own & OFFSET_MASK, self._size)
        buffer, offsets = warp.cta.machine.memory.locate(own, self._size, "load")
        assert buffer is not None, "one place has answered"
        return access.missing_in(buffer, offsets, self._size)

    def _in_shared(self, warp: Warp, base: int) -> int:
        cta = warp.cta
        perform, place = self._shared.wanted(WORTH), cta.smem.place
        if perform is None or place is None or warp.knows_unevenly():
            return NO
        mask = self._givers_address if self._rows else warp.mask_address
        arguments = (self._program_address, warp.registers.bounds_address, mask, place.address, warp.seen_address,
                     base, warp.stamp, warp.meetings, warp.agent)  # fmt: skip
        while (answer := perform(*arguments)) <= NO_ROOM:
            cta.smem.keep_readings_of(NO_ROOM - answer)
        if answer == NO:
            return NO
        if self._site is not None:
            self._site[SITE["performer"]] = code_of(perform)
        self.count(warp, answer)
        if self._stores:
            warp.note_stores(answer & CHANGED)
        return answer

    def count(self, warp: Warp, answer: int) -> None:
        """Count the accesses served by the banks of shared memory."""
        cta = warp.cta
        if self._space == "global":
            return
        if answer & CONFLICT:
            own = self._address(warp)
            own = own[: self._rows] if self._rows else own if warp.where is True else own[warp.mask]
            access.count_banks(warp, own & OFFSET_MASK, self._size)
        else:
            access.count_served(cta.machine, answer >> SERVED_SHIFT)

    def _in_global(self, warp: Warp, address: int) -> int:
        machine = warp.cta.machine
        perform, buffer = self._global.wanted(WORTH), machine.memory.holding(address)
        if perform is None or buffer is None or (self._stores and not buffer.writable) or warp.knows_unevenly():
            return NO
        place = machine.races.place(buffer, self._size, warp.clock)
        if place is None:
            return NO
        mark = warp.agents.mark | warp.stamp
        answer = perform(self._program_address, warp.registers.bounds_address, warp.mask_address, place.address,
                         warp.seen_address, buffer.base, mark, warp.meetings, warp.agent)  # fmt: skip
        if answer == NO:
            return NO
        if self._site is not None and (waited := machine.races.lasting(buffer, warp.clock)) is not None:
            # The launch keeps the place alive. After the launch, or after any change, no run uses it.
            self._site[: SITE["program"]] = (
                code_of(perform), self._stores, buffer.base, place.address, warp.cta.launch, CHANGES[0], waited
            )  # fmt: skip
        if self._stores:
            warp.note_global_stores(answer & CHANGED)
        return answer
