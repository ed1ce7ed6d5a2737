"""The undefined bits of a warp's registers, and how a block runs that touches one of these registers.

A warp whose registers are all defined pays one check per block. Otherwise the instructions that touch an undefined
register run through the `Carrier` that binding has made for each of them: it says what becomes of the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from backends.vm.faults import report
from backends.vm.machine.code import BYTES_OF_VIEW, LANES, STORAGE, WIDTH_OF_VIEW, Key, Step, first_lanes
from backends.vm.memory.definedness import Mask, Origin
from backends.vm.numpy_calls import count_nonzero

if TYPE_CHECKING:
    from backends.vm.machine.code import Code
    from backends.vm.machine.warp import Warp


Bits = npt.NDArray[Any]
"""The undefined bits of a register: unsigned integers (a predicate: bool) [32], or [32, n] for packed views."""
_Element = TypeVar("_Element", bound=np.generic)


class BecameUndefined(Exception):
    """Raised by a step that has done all its work and has left undefined bits in a register.

    The rest of the block must run through its carriers. An exception costs the other steps nothing.
    """


class Carrier(Protocol):
    """Runs one instruction that may have an undefined operand. `touches`: the registers that it reads or writes.

    `computes`: it does nothing but write its results. `by_bits`: moreover it has no guard, and the undefined bits of
    its results depend on no register's value.
    """

    @property
    def touches(self) -> frozenset[Key]: ...
    @property
    def computes(self) -> bool: ...
    @property
    def by_bits(self) -> bool: ...

    def mark(self, warp: Warp, step: Step) -> None:
        """Mark the undefined bits of the results of `step`, which is `by_bits`, in all lanes, without doing it."""
        ...

    def carry(self, warp: Warp, step: Step) -> object:
        """Do `step`, the instruction itself, and mark the undefined bits of its results. Returns the step's result."""
        ...


@dataclass(slots=True)
class Undefined:
    """The undefined bits of a register, at least one of them set, in the shape and type of its storage; their origin.

    Several registers may share one array of bits, so it is never modified. Nor is this: it is not frozen because that
    makes it twice as slow to make.
    """

    bits: Bits
    origin: Origin


_UNSIGNED: dict[int, type[np.unsignedinteger]] = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def no_bits(width: int) -> Bits:
    """A new row without undefined bits."""
    return np.zeros((LANES, 2) if width == 128 else LANES, STORAGE[width])


_NO_BITS = {width: no_bits(width) for width in STORAGE}
for _row in _NO_BITS.values():
    _row.setflags(write=False)


def all_bits(width: int, lanes: Mask) -> Bits:
    """A row whose bits are undefined in `lanes`, bool [32]. It is read-only."""
    return _all_bits(width, lanes.tobytes())


@lru_cache(maxsize=1024)
def _all_bits(width: int, lanes: bytes) -> Bits:
    """Cached, because a computation keeps to the lanes in which it began: few sets of lanes come up."""
    row = no_bits(width)
    row[np.frombuffer(lanes, np.bool_)] = True if width == 1 else 2**width - 1 if width < 128 else 2**64 - 1
    row.setflags(write=False)
    return row


def lanes_of(bits: Bits) -> Mask:
    """The lanes in which any bit is set: bool [32]."""
    found = bits != 0
    return found if found.ndim == 1 else found.any(axis=1)


class UndefinedRegisters(dict[Key, Undefined]):
    """Undefined bits by register. A register that is absent is defined in every lane."""

    @classmethod
    def at_start(cls, code: Code, lanes: int) -> UndefinedRegisters:
        """The registers that some path reads unwritten, at the start of a warp of `lanes` lanes."""
        found = code.at_start.get(lanes)
        if found is None:
            alive = first_lanes(lanes)
            bits = {width: all_bits(width, alive) for width in {width for width, _ in code.unwritten}}
            found = {key: Undefined(bits[key[0]], origin) for key, origin in code.unwritten.items()}
            code.at_start[lanes] = found
        return cls(found)

    def bits(self, key: Key) -> Bits:
        """The undefined bits of a register. Read-only."""
        found = self.get(key)
        return _NO_BITS[key[0]] if found is None else found.bits

    def shown(self, view: str, row: int) -> Bits:
        """The undefined bits of register `row` in the shape of `view`, as unsigned integers."""
        width = WIDTH_OF_VIEW[view]
        bits = self.bits((width, row))
        if width == 1:
            return bits
        shown = bits.view(f"u{BYTES_OF_VIEW[view]}").reshape(LANES, -1)
        return shown if shown.shape[1] > 1 else shown[:, 0]

    def origin(self, keys: Iterable[Key], line: int) -> Origin | None:
        """The origin of the undefined value of one of `keys`, which PTX `line` reads. None if all are defined."""
        for key in keys:
            found = self.get(key)
            if found is not None:
                return found.origin.read_at(line)
        return None

    def put(self, key: Key, bits: Bits, lanes: Mask, origin: Origin | None) -> None:
        """Note a write of `lanes` to a register: `bits` of it are undefined and come from `origin` if there are any."""
        known = self.get(key)
        if count_nonzero(lanes) < LANES:
            where = lanes if bits.ndim == 1 else lanes[:, None]
            bits = np.where(where, bits, 0 if known is None else known.bits).astype(bits.dtype)
        if count_nonzero(bits):
            origin = origin or (known.origin if known is not None else None)
            assert origin is not None, "undefined bits come from somewhere"
            self[key] = Undefined(bits, origin)
        elif known is not None:
            del self[key]

    def clear_lanes(self, key: Key, lanes: Mask) -> None:
        """Record that `lanes` have written defined values to a register."""
        known = self.get(key)
        if known is None:
            return
        if count_nonzero(lanes) == LANES:
            del self[key]
        else:
            self.put(key, no_bits(key[0]), lanes, known.origin)

    def fill(self, view: str, row: int, parts: Bits, lanes: Mask, origin: Origin) -> None:
        """Record that `lanes` have written register `row` through `view`; `parts` [lanes, ...] has the undefined bits.

        They are extended like a value of that view.
        """
        width = WIDTH_OF_VIEW[view]
        bits = no_bits(width)
        bits.view(view_type(view))[lanes] = parts
        self.put((width, row), bits, lanes, origin)

    def put_rows(self, rows: Sequence[int], words: Iterable[Bits], lanes: Mask, origin: Origin | None) -> None:
        """As `put` for several 32-bit registers: uint32 [rows, 32]."""
        for row, bits in zip(rows, words, strict=True):
            self.put((32, row), bits, lanes, origin)

    def decide(self, warp: Warp, key: Key, what: str, line: int, lanes: Mask | None = None) -> None:
        """Report a Fault if a register that decides `what` (a noun) is undefined in one of `lanes` (None: the active
        ones).

        If the run goes on, it uses the value that is there and counts it as defined.
        """
        found = self.get(key)
        if found is None:
            return
        bad = lanes_of(found.bits) & (warp.mask if lanes is None else lanes)
        if count_nonzero(bad):
            report(found.origin.read_at(line).fault(f"`{name_of(key, warp)}` decides {what}", lane=int(bad.argmax())))
            self.clear_lanes(key, bad)

    def forget_dead(self, alive: Mask) -> None:
        """Drop the registers of lanes that have ended."""
        if not count_nonzero(alive):
            self.clear()
            return
        for key, found in list(self.items()):
            self.put(key, no_bits(key[0]), ~alive, found.origin)


def name_of(key: Key, warp: Warp) -> str:
    """The name of a register in the PTX text."""
    return next((name for name, row in warp.code.rows.rows.items() if row == key), str(key))


def view_type(view: str) -> str:
    """The NumPy type that extends undefined bits like the values of an integer `view`."""
    return f"{'i' if view[0] == 's' else 'u'}{BYTES_OF_VIEW[view]}"


def undefined_words(missing: Mask, dtype: np.dtype[_Element]) -> npt.NDArray[_Element]:
    """The undefined bits of elements of `dtype` whose undefined bytes are `missing` [n, size]: [n, elements]."""
    return spread(missing, 8).view(dtype)


def spread(lost: Mask, element_bits: int) -> npt.NDArray[np.unsignedinteger]:
    """The undefined bits of elements of 8, 16 or 32 bits, each undefined as a whole where `lost`."""
    return np.negative(lost.astype(_UNSIGNED[element_bits]))
