"""Plain loads and stores of a warp as machine code: checks, marks and data in one call.

The machine code refuses, and has changed nothing, if an address is out of bounds or misaligned, a copy is in flight,
the last access of another agent is not known to be ordered before, or a rule needs more than this to be judged.
SharedMemory, Buffer and GlobalRaces then do the access again and report, so that reports come from one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from backends.vm.memory.access_code import (
    GLOBAL_FIELDS,
    I8,
    I32,
    I64,
    POINTER,
    SHARED_FIELDS,
    WRITE_MARKS,
    Found,
    MemoryCode,
    callable_of,
    defined,
    number,
)
from backends.vm.memory.clocks import CLUSTER_SHIFT
from backends.vm.memory.lane_releases import LANE_BITS
from backends.vm.memory.marks import GRANULE, LASTING, READ, WRITTEN

LANES: Final = 32
BANKS: Final = 32
"""Banks of shared memory, each four bytes wide."""
UNDEFINED, CONFLICT, CHANGED, SERVED_SHIFT = 1, 2, 4, 3
"""Bits of an answer: a byte that was read is undefined; lanes want several words of one bank; a byte has changed, or
has become defined. The bits from SERVED_SHIFT on: how many groups of lanes the banks of shared memory have served."""

_BANK_WORDS: Final = ir.VectorType(I32, BANKS)

Words = npt.NDArray[np.int64]
Memory = Literal["shared", "global"]
Perform = Callable[[int, int, int, int, int, int, int, int, int], int]
"""Takes the addresses of a program, of the bounds of the registers, of the mask, the place and the clock; then the base
of the addresses, the warp's mark, how often it has met, and its agent. Returns the answer."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What selects the machine code of an access.

    `address`: bytes of the address register. `element`: bytes in memory; `registers`: bytes per lane of each register,
    0 for a discarded one. `constant`: a load with .nc.
    """

    memory: Memory
    stores: bool
    address: int
    element: int
    signed: bool
    registers: tuple[int, ...]
    constant: bool = False

    @property
    def size(self) -> int:
        """Bytes per lane."""
        return self.element * len(self.registers)


@cache
def performer(kind: Kind) -> Perform:
    """The machine code for all accesses of a kind."""
    return callable_of(lambda function: _Access(kind, function).emit(), 5, 4)


def program(address: tuple[int, int], offset: int, line: int, registers: Sequence[tuple[int, int]]) -> Words:
    """The parameters of an instruction for its performer: places of address and registers, offset, PTX line.

    A place is the index of a bound of the register file and the offset from there in bytes.
    """
    return np.array([*address, offset, line, *(word for place in registers for word in place)], np.int64)


class _Access(MemoryCode):
    """Writes the machine code of a kind. It passes over the lanes twice: first to check, then to act."""

    def __init__(self, kind: Kind, function: ir.Function) -> None:
        self.kind = kind
        self.shared = kind.memory == "shared"
        self.narrow = self.shared and kind.size < GRANULE
        self.program, self.bounds, self.mask, place, clock, self.base, self.mark, self.met, self.agent = function.args
        super().__init__(function, place, SHARED_FIELDS if self.shared else GLOBAL_FIELDS, clock)
        b = self.b
        self.line = b.trunc(self.at(self.program, 3, I32, scale=2), I32)
        self.addresses = self._row(0)
        self.offset = self.at(self.program, 2, I64)
        self.rows = [self._row(4 + 2 * i) if size else None for i, size in enumerate(kind.registers)]
        self.undefined, self.conflict, self.changed = (self._variable(I64) for _ in range(3))

    def emit(self) -> None:
        """Write the whole function."""
        b = self.b
        served = self._variable(I64)
        banks = b.inttoptr(b.ptrtoint(b.alloca(_BANK_WORDS), I64), POINTER) if self.shared else None
        waiting = self._variable(I64)
        if banks is not None:
            self._clear(banks)
        if self.narrow:
            self._refuse(b.icmp_signed("==", self.place["byte_writer"], number(0)))
        with self._lanes() as lane:
            at = self._checked(lane)
            with self._granules(at) as granule:
                self._look_at(granule, lane, at)
            if not self.kind.stores:
                self._look_for_undefined(at)
            if banks is not None:
                self._count_banks(banks, at, waiting, served)
        if self.shared:
            left = b.icmp_signed(">", self._value(waiting), number(0))
            self._set(served, b.add(self._value(served), b.zext(left, I64)))
            if not self.kind.stores:
                self._note_reading_lanes()
        if self.shared and not self.narrow:
            with (
                b.if_then(b.not_(self._none_apart()), likely=False),
                self._lanes() as lane,
                self._granules(self._place_of(lane)) as granule,
            ):
                self._mark_divided(granule, lane)
        with self._lanes() as lane:
            at = self._place_of(lane)
            with self._granules(at) as granule:
                self._mark(granule, lane, at)
            self._move(lane, at)
        answer = b.or_(self._value(self.undefined), b.shl(self._value(self.conflict), number(1)))
        answer = b.or_(answer, b.shl(self._value(self.changed), number(2)))
        self._end(b.or_(answer, b.shl(self._value(served), number(SERVED_SHIFT))))

    # The checks of an access.

    def _place_of(self, lane: Any) -> Any:
        """The position of a lane's bytes, counted from `base`."""
        kind = I64 if self.kind.address == 8 else I32
        address = self.at(self.addresses, lane, kind)
        if kind is I32:
            address = self.b.zext(address, I64)
        return self.b.sub(self.b.add(address, self.offset), self.base)

    def _checked(self, lane: Any) -> Any:
        b, size, at = self.b, self.kind.size, self._place_of(lane)
        low = self.place["first"] if self.shared else number(0)
        bad = b.or_(b.icmp_signed("<", at, low), b.icmp_signed(">", at, b.sub(self.place["end"], number(size))))
        address = at if self.shared else b.add(at, self.base)
        self._refuse(b.or_(bad, b.icmp_signed("!=", b.and_(address, number(size - 1)), number(0))))
        return at

    def _look_at(self, granule: Any, lane: Any, at: Any) -> None:
        """Refuse if the last accesses of a granule are not plainly in order."""
        if self.shared:
            self._look_at_shared(granule, lane, at)
            return
        b = self.b
        if self.kind.constant:
            self._refuse(b.icmp_signed("==", self.place["constant_line"], number(0)))
        self._look_at_mark("writer", granule, lane)
        if self.kind.stores:
            self._look_at_mark("reader", granule, lane)
            self._look_at_comparer(granule, lane)

    def _look_at_comparer(self, granule: Any, lane: Any) -> None:
        with self.b.if_then(self.b.icmp_signed("!=", self.place["comparer"], number(0)), likely=False):
            self._look_at_mark("comparer", granule, lane)

    def _look_at_mark(self, name: str, granule: Any, lane: Any) -> None:
        b = self.b
        found = self.at(self._pointer(name), granule, I64)
        serial, own = (b.ashr(one, number(CLUSTER_SHIFT)) for one in (found, self.mark))
        foreign = b.icmp_signed("!=", serial, own)
        with b.if_then(b.icmp_signed("!=", found, number(0))):
            self._refuse(foreign)
            stamp = b.trunc(found, I32)
            self._refuse(self._late(stamp))
            marks = self._marks_of(granule)
            self._refuse(self._released_alone(marks, stamp) if self.kind.stores else
                         self._loose(marks, lane, stamp))  # fmt: skip

    def _look_at_shared(self, granule: Any, lane: Any, at: Any) -> None:
        b, none = self.b, ir.Constant(I8, 0)
        busy = b.icmp_signed("!=", self._of("in_flight", granule, I32), ir.Constant(I32, 0))
        divided = self._of("divided", granule, I8)
        with b.if_else(b.icmp_unsigned("==", divided, none), likely=True) as (whole, apart):
            with whole:
                self._look_at_marks(self._marks_of(granule), lane, busy)
            with apart:
                if self.kind.stores:
                    self._refuse(self._compared(divided))
                self._set(self.apart, number(1))
                if self.narrow:
                    for byte in self._own(at):
                        self._look_at_marks(self._marks_at(granule, byte, divided), lane, busy)
                else:
                    with self._bytes_of(granule) as byte:
                        self._look_at_marks(self._marks_at(granule, byte, divided), lane, busy)
        if self.kind.stores:
            self._check_kept(granule, self._bits(at) if self.narrow else None)

    def _look_at_marks(self, found: Found, lane: Any, busy: Any) -> None:
        b, writer = self.b, found("writer")
        bad = b.or_(busy, self._late(writer))
        if self.kind.stores:
            bad = b.or_(bad, self._late(found("reader")))
            self._refuse(b.or_(bad, self._given_back_alone(found)))
        else:
            self._refuse(b.or_(bad, self._loose(found, lane, writer)))
            self._check_keepable(found("reader"), b.trunc(self.mark, I32))

    def _own(self, at: Any) -> list[Any]:
        """The bytes of a narrow access."""
        return [self.b.add(at, number(i)) for i in range(self.kind.size)]

    def _bits(self, at: Any) -> Any:
        """The bytes of its granule that a narrow access reaches, as bits."""
        own = ir.Constant(I32, (1 << self.kind.size) - 1)
        return self.b.shl(own, self.b.trunc(self.b.and_(at, number(GRANULE - 1)), I32))

    def _loose(self, found: Found, lane: Any, writer: Any) -> Any:
        """Whether another lane of the warp wrote a granule since they last met, or its writer has lanes that released
        alone."""
        b, by = self.b, self._agent(writer)
        other = b.icmp_signed("!=", found("lane"), b.trunc(lane, I8))
        own = b.icmp_signed("==", by, self.agent)
        since = b.icmp_signed("==", b.sext(found("met"), I64), self.met)
        return b.or_(b.and_(b.and_(other, own), since), self._released_alone(found, writer))

    def _released_alone(self, found: Found, writer: Any) -> Any:
        return self.b.and_(self._set_in("partial", self._agent(writer)),
                           self.b.icmp_signed(">", found("met"), ir.Constant(I32, 0)))  # fmt: skip

    def _look_for_undefined(self, at: Any) -> None:
        """Record whether a byte is undefined."""
        b, size = self.b, self.kind.size
        name = "defined" if self.shared else "state"
        kind = ir.IntType(8 * size)
        whole = defined(size)

        def look() -> None:
            pointer = b.gep(self._pointer(name), [at], source_etype=I8)
            bad = b.icmp_unsigned("!=", b.load(pointer, typ=kind, align=1), whole)
            self._set(self.undefined, b.or_(self._value(self.undefined), b.zext(bad, I64)))

        if self.shared:
            look()
        else:
            with b.if_then(b.icmp_signed("!=", self.place[name], number(0))):
                look()

    def _count_banks(self, banks: Any, at: Any, waiting: Any, served: Any) -> None:
        """Count the groups of lanes that the banks serve. Lanes of a group share words or use different banks, or
        conflict.

        `waiting`: lanes of the group that is not full.
        """
        b, words = self.b, max(self.kind.size // 4, 1)
        first = b.ashr(at, number(2))
        for i in range(words):
            word = b.trunc(b.add(first, number(i)), I32)
            bank = b.gep(banks, [b.zext(b.and_(word, ir.Constant(I32, BANKS - 1)), I64)], source_etype=I32)
            held = b.load(bank, typ=I32)
            free = b.icmp_signed("==", held, ir.Constant(I32, -1))
            clash = b.and_(b.not_(free), b.icmp_signed("!=", held, word))
            self._set(self.conflict, b.or_(self._value(self.conflict), b.zext(clash, I64)))
            b.store(word, bank)
        self._set(waiting, b.add(self._value(waiting), number(1)))
        with b.if_then(b.icmp_signed("==", self._value(waiting), number(max(BANKS // words, 1)))):
            self._set(waiting, number(0))
            self._set(served, b.add(self._value(served), number(1)))
            self._clear(banks)

    def _clear(self, banks: Any) -> None:
        self.b.store(ir.Constant(_BANK_WORDS, [-1] * BANKS), banks, align=4)

    # The effects of an access.

    def _mark(self, granule: Any, lane: Any, at: Any) -> None:
        b = self.b
        by = b.trunc(lane, I8), b.trunc(self.met, I32)
        if not self.shared:
            own = "writer" if self.kind.stores else "reader"
            with b.if_then(b.icmp_signed("!=", self.place[own], number(0))):
                self.put(self._pointer(own), granule, self.mark, I64)
                self.put(self._pointer(f"{own}_line"), granule, self.line, I32)
                if self.kind.stores:
                    self.put(self._pointer("lane"), granule, by[0], I8)
                    self.put(self._pointer("met"), granule, by[1], I32)
            if self.kind.constant:
                self.put(self._pointer("constant_line"), granule, self.line, I32)
            return
        mark = b.trunc(self.mark, I32)
        if self.narrow:
            self._divide(granule, WRITTEN if self.kind.stores else READ)
            for byte in self._own(at):
                if self.kind.stores:
                    self._note_writer("byte_", byte, (mark, self.line, *by))
                else:
                    self._note_byte_read(granule, byte, mark, self.line, by)
        elif self.kind.stores:
            self._note_writer("", granule, (mark, self.line, *by))
            self._forget_kept(granule)
        else:
            self._note_reader(granule, mark, self.line, by)

    def _mark_divided(self, granule: Any, lane: Any) -> None:
        """To call before _mark, if a granule of a wider access may be divided."""
        b = self.b
        if self.kind.stores:
            kept = b.and_(self._of("divided", granule, I8), ir.Constant(I8, LASTING))
            self.put(self._pointer("divided"), granule, kept, I8)
        else:
            by = b.trunc(lane, I8), b.trunc(self.met, I32)
            self._note_bytes_read(granule, b.trunc(self.mark, I32), self.line, by)

    def _note_writer(self, unit: str, cell: Any, values: tuple[Any, ...]) -> None:
        for name, value in zip(WRITE_MARKS, values, strict=True):
            self.put(self._pointer(f"{unit}{name}"), cell, value, value.type)

    def _note_reading_lanes(self) -> None:
        """Do as LaneReads.read."""
        b, lanes, above = self.b, ir.VectorType(I8, LANES), number(LANE_BITS)
        active = b.icmp_unsigned("!=", b.load(self.mask, typ=lanes, align=1), ir.Constant(lanes, [0] * LANES))
        last = self.at(self._pointer("last_reads"), self.agent, I64)
        same = b.icmp_signed("==", b.ashr(last, above), self.met)
        last = b.select(same, last, b.shl(self.met, above))
        new = b.or_(last, b.zext(b.bitcast(active, I32), I64))
        self.put(self._pointer("last_reads"), self.agent, new, I64)

    def _move(self, lane: Any, at: Any) -> None:
        b, element = self.b, ir.IntType(8 * self.kind.element)
        for i, (row, size) in enumerate(zip(self.rows, self.kind.registers, strict=True)):
            if row is None:
                continue
            wide = ir.IntType(8 * size)
            register = b.gep(row, [lane], source_etype=wide)
            place = b.gep(self._pointer("data"), [b.add(at, number(i * self.kind.element))], source_etype=I8)
            if self.kind.stores:
                value = b.load(register, typ=wide, align=1)
                self._overwrite(place, value if wide == element else b.trunc(value, element), element)
            else:
                value = b.load(place, typ=element, align=1)
                extend = b.sext if self.kind.signed else b.zext
                b.store(value if wide == element else extend(value, wide), register, align=1)
        if not self.kind.stores:
            return
        size, name = self.kind.size, "defined" if self.shared else "state"
        with b.if_then(b.icmp_signed("!=", self.place[name], number(0))):
            marks = b.gep(self._pointer(name), [at], source_etype=I8)
            self._overwrite(marks, defined(size), ir.IntType(8 * size))

    def _overwrite(self, place: Any, value: Any, kind: Any) -> None:
        """Store `value`, and record whether something else was there."""
        b = self.b
        new = b.icmp_unsigned("!=", b.load(place, typ=kind, align=1), value)
        self._set(self.changed, b.or_(self._value(self.changed), b.zext(new, I64)))
        b.store(value, place, align=1)

    def _row(self, first: int) -> Any:
        bound = self.at(self.bounds, self.at(self.program, first, I64), I64)
        return self.b.inttoptr(self.b.add(bound, self.at(self.program, first + 1, I64)), POINTER)

    @contextmanager
    def _lanes(self) -> Iterator[Any]:
        """For each active lane."""
        with self._each(number(0), number(LANES - 1)) as lane:
            active = self.b.icmp_unsigned("!=", self.at(self.mask, lane, I8), ir.Constant(I8, 0))
            with self.b.if_then(active):
                yield lane

    @contextmanager
    def _granules(self, at: Any) -> Iterator[Any]:
        """For each granule of a lane's bytes. Read-only buffers have none."""
        b, size = self.b, self.kind.size
        if self.shared:
            first, last = b.ashr(at, number(2)), b.ashr(b.add(at, number(size - 1)), number(2))
            with self._each(first, last) as granule:
                yield granule
            return
        with b.if_then(b.icmp_signed("!=", self.place["writer"], number(0))):
            begins = b.sub(b.add(at, self.base), self.place["shadow_base"])
            first = b.ashr(begins, self.place["shift"])
            last = b.ashr(b.add(begins, number(size - 1)), self.place["shift"])
            with self._each(first, last) as granule:
                yield granule
