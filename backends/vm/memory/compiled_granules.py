"""Accesses of the asynchronous proxy to many granules of shared memory as machine code, for the plain cases.

An operand or a box is checked and marked in microseconds. As in compiled_access, the machine code refuses and has
changed nothing unless everything is plainly ordered before; SharedMemory then does the access again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final, Literal, get_args

from llvmlite import ir

from backends.vm.memory.access_code import (
    I8,
    I32,
    I64,
    SHARED_FIELDS,
    Found,
    MemoryCode,
    OnDemand,
    callable_of,
    defined,
    number,
)
from backends.vm.memory.marks import COMPARED, GRANULE, LASTING, READ, WRITTEN

WORTH: Final = 100
"""Calls by NumPy that take as long as compiling the machine code."""
_TOGETHER: Final = 4
"""Neighbouring granules handled as one vector: operands and boxes lie in units of 16 bytes."""
_BYTES, _WORDS, _PLACES = (ir.VectorType(kind, _TOGETHER) for kind in (I8, I32, I64))

Deed = Literal["read", "write begins", "write ends"]
Perform = Callable[[int, int, int, int, int, int, int, int], int]
"""Takes the addresses of the place, of the granules (int64), of the clock and of the part of it that the asynchronous
proxy sees (0 for a copy by the generic proxy); then the number of granules, the mark, the PTX line, and the first agent
that is no warp. Returns NO, or whether a byte is undefined."""


@cache
def performer(deed: Deed) -> Perform:
    """The machine code for a deed."""
    return callable_of(lambda function: _GranuleAccess(deed, function).emit(), 4, 4)


_CODES: Final[dict[Deed, OnDemand[Perform]]] = {deed: OnDemand(partial(performer, deed)) for deed in get_args(Deed)}


def wanted(deed: Deed) -> Perform | None:
    """The machine code for an operation about to run; None while compiling it is not worth it."""
    return _CODES[deed].wanted(WORTH)


class _GranuleAccess(MemoryCode):
    """Writes the machine code of a deed. It passes over the granules twice: first to check, then to act."""

    def __init__(self, deed: Deed, function: ir.Function) -> None:
        self.deed: Deed = deed
        place, self.granules, clock, self.fenced, self.count, mark, line, self.engine = function.args
        super().__init__(function, place, SHARED_FIELDS, clock)
        b = self.b
        self.mark, self.line = b.trunc(mark, I32), b.trunc(line, I32)
        self.generic = b.icmp_unsigned("==", b.ptrtoint(self.fenced, I64), number(0))
        # Neighbours mostly share one stamp, so the last stamps found to be in order are kept for comparison.
        self.writer, self.reader = (b.alloca(I32) for _ in range(2))
        b.store(ir.Constant(I32, 0), self.writer)
        b.store(self.mark if deed == "read" else ir.Constant(I32, 0), self.reader)
        self.keeps, self.undefined = self._variable(I64), self._variable(I64)

    def emit(self) -> None:
        """Write the whole function."""
        with self._groups() as (first, neighbours, single):
            self._look(first, neighbours, single)
        with self._groups() as (first, neighbours, single):
            self._act(first, neighbours, single)
        self._end(self._value(self.undefined))

    @contextmanager
    def _groups(self) -> Iterator[tuple[Any, Any, Callable[[], Any]]]:
        """For each group of granules: the first one, whether the others follow it in memory, and a loop over all."""
        b = self.b
        with (
            b.if_then(b.icmp_signed(">", self.count, number(0))),
            self._each(number(0), b.ashr(b.sub(self.count, number(1)), number(2))) as group,
        ):
            index = b.shl(group, number(2))
            last = b.add(index, number(_TOGETHER - 1))
            whole = b.icmp_signed("<", last, self.count)
            last = b.select(whole, last, b.sub(self.count, number(1)))
            first = self.at(self.granules, index, I64)
            steps = [self.at(self.granules, b.select(whole, b.add(index, number(i)), last), I64) for i in range(1, 4)]
            for i, one in enumerate(steps, 1):
                whole = b.and_(whole, b.icmp_signed("==", one, b.add(first, number(i))))

            @contextmanager
            def single() -> Iterator[Any]:
                with self._each(index, last) as i:
                    yield self.at(self.granules, i, I64)

            yield first, whole, single

    # The checks.

    def _look(self, first: Any, neighbours: Any, single: Callable[[], Any]) -> None:
        b = self.b
        inside = b.and_(self._inside(first), self._inside(b.add(first, number(_TOGETHER - 1))))
        near, apart, end = (b.append_basic_block() for _ in range(3))
        b.cbranch(b.and_(neighbours, inside), near, apart)
        b.position_at_end(near)
        if self.deed == "write ends":
            b.branch(end)
        else:
            plain = b.and_(
                self._untouched(first), b.and_(self._all_known("writer", first), self._all_known("reader", first))
            )
            whole, divided = self._none_set("divided", first), b.append_basic_block()
            b.cbranch(b.and_(plain, whole), end, divided)
            b.position_at_end(divided)
            b.cbranch(whole, apart, self._look_at_divided(first, end, apart))
        b.position_at_end(apart)
        with single() as granule:
            self._refuse(b.not_(self._inside(granule)))
            if self.deed != "write ends":
                self._refuse(b.icmp_signed("!=", self._of("in_flight", granule, I32), ir.Constant(I32, 0)))
                self._look_at_marks(granule)
                if self.deed == "write begins":
                    self._check_kept(granule)
        b.branch(end)
        b.position_at_end(end)

    def _look_at_divided(self, first: Any, plain: Any, apart: Any) -> Any:
        """A block for neighbours that may all be divided alike: it goes on to `plain` if they need no closer look."""
        b, began = self.b, self.b.block
        made = b.append_basic_block()
        b.position_at_end(made)
        fine = self._untouched(first)
        if self.deed == "write begins":
            fine = b.and_(fine, self._none_compared(first))
        for name, bit in (("writer", WRITTEN), ("reader", READ)):
            flags = b.and_(self._vector("divided", first, I8, _BYTES), ir.Constant(_BYTES, [bit] * _TOGETHER))
            every, none = (self._same(flags, ir.Constant(_BYTES, [flag] * _TOGETHER)) for flag in (bit, 0))
            alike = b.and_(none, self._all_known(name, first))
            # To mark the bytes as read takes more than to mark neighbours.
            if (self.deed, name) != ("read", "reader"):
                byte = b.shl(first, number(2))
                for i in range(0, GRANULE * _TOGETHER, _TOGETHER):
                    every = b.and_(every, self._all_known(name, b.add(byte, number(i)), "byte_"))
                alike = b.or_(alike, every)
            fine = b.and_(fine, alike)
        b.cbranch(fine, plain, apart)
        b.position_at_end(began)
        return made

    def _untouched(self, first: Any) -> Any:
        """Whether no copy into neighbours is in flight, and none that would be overwritten has many readers."""
        idle = self._all("in_flight", first, ir.Constant(I32, 0))
        return idle if self.deed == "read" else self.b.and_(idle, self._none_set("many_readers", first))

    def _all_known(self, name: str, first: Any, unit: str = "") -> Any:
        """Whether all writers or readers of neighbours are the one that was last found to be in order."""
        last = self.writer if name == "writer" else self.reader
        return self._all(unit + name, first, self.b.load(last, typ=I32))

    def _none_set(self, name: str, first: Any) -> Any:
        return self._same(self._vector(name, first, I8, _BYTES), ir.Constant(_BYTES, [0] * _TOGETHER))

    def _none_compared(self, first: Any) -> Any:
        """Whether no compare-and-swap has failed on neighbours."""
        flags = self._vector("divided", first, I8, _BYTES)
        flags = self.b.and_(flags, ir.Constant(_BYTES, [COMPARED] * _TOGETHER))
        return self._same(flags, ir.Constant(_BYTES, [0] * _TOGETHER))

    def _inside(self, granule: Any) -> Any:
        b = self.b
        low = b.icmp_signed(">=", granule, b.ashr(self.place["first"], number(2)))
        return b.and_(low, b.icmp_signed("<", granule, b.ashr(self.place["end"], number(2))))

    def _look_at_marks(self, granule: Any) -> None:
        b, none = self.b, ir.Constant(I8, 0)
        divided = self._of("divided", granule, I8)
        with b.if_else(b.icmp_unsigned("==", divided, none), likely=True) as (whole, apart):
            with whole:
                self._look_at_writer(self._marks_of(granule))
                self._look_at_reader(self._marks_of(granule))
            with apart:
                if self.deed == "write begins":
                    self._refuse(self._compared(divided))
                read = b.zext(b.and_(divided, ir.Constant(I8, READ)), I64)
                self._set(self.apart, b.or_(self._value(self.apart), read))
                with self._bytes_of(granule) as byte:
                    self._look_at_writer(self._marks_at(granule, byte, divided))
                    self._look_at_reader(self._marks_at(granule, byte, divided))

    def _look_at_writer(self, found: Found) -> None:
        b, writer = self.b, found("writer")
        partial = self._set_in("partial", self._agent(writer))
        self._refuse(self._late(writer))
        self._refuse(b.and_(partial, b.icmp_signed(">", found("met"), ir.Constant(I32, 0))))
        with b.if_then(b.not_(self.generic)):
            self._refuse(self._beyond(self.fenced, writer))
        with b.if_then(b.not_(partial)):
            b.store(writer, self.writer)

    def _look_at_reader(self, found: Found) -> None:
        b, reader = self.b, found("reader")
        if self.deed == "read":
            self._check_keepable(reader, self.mark)
            kept = self._kept_beside(reader, self.mark)
            self._set(self.keeps, b.or_(self._value(self.keeps), b.zext(kept, I64)))
            with b.if_then(b.not_(kept)):
                b.store(reader, self.reader)
            return
        self._refuse(self._late(reader))
        with b.if_then(b.not_(self.generic)):
            warps = b.icmp_signed("<", self._agent(reader), self.engine)
            self._refuse(b.and_(warps, self._beyond(self.fenced, reader)))
        self._refuse(self._given_back_alone(found))
        with b.if_then(b.not_(self._set_in("read_partial", self._agent(reader)))):
            b.store(reader, self.reader)

    # The effects.

    def _act(self, first: Any, neighbours: Any, single: Callable[[], Any]) -> None:
        b = self.b
        together = neighbours
        if self.deed == "read":
            together = b.and_(together, b.icmp_signed("==", self._value(self.keeps), number(0)))
            together = b.and_(together, self._none_apart())
        near, apart, end = (b.append_basic_block() for _ in range(3))
        b.cbranch(together, near, apart)
        b.position_at_end(near)
        self._mark(first, _TOGETHER)
        if self.deed == "write begins":
            with b.if_then(b.not_(self._none_set("many_readers", first))), single() as granule:
                self._forget_kept(granule)
        b.branch(end)
        b.position_at_end(apart)
        with single() as granule:
            if self.deed == "read":
                self._note_bytes_read(granule, self.mark, self.line)
                self._note_reader(granule, self.mark, self.line)
            elif self.deed == "write begins":
                self._forget_kept(granule)
            self._mark(granule, 1)
        b.branch(end)
        b.position_at_end(end)

    def _mark(self, granule: Any, count: int) -> None:
        b = self.b
        if self.deed == "read":
            if count > 1:
                self._fill("reader", granule, self.mark, count)
                self._fill("reader_line", granule, self.line, count)
            found = self._vector("defined", b.shl(granule, number(2)), I8, ir.IntType(32 * count))
            bad = b.zext(b.icmp_unsigned("!=", found, defined(4 * count)), I64)
            self._set(self.undefined, b.or_(self._value(self.undefined), bad))
        elif self.deed == "write begins":
            self._fill("in_flight", granule, self.line, count)
        else:
            self._fill("in_flight", granule, ir.Constant(I32, 0), count)
            kind = ir.IntType(8 * count)
            place = b.gep(self._pointer("divided"), [granule], source_etype=I8)
            kept = ir.Constant(kind, int.from_bytes(bytes([LASTING]) * count, "little"))
            b.store(b.and_(b.load(place, typ=kind, align=1), kept), place, align=1)
            self._fill("writer", granule, self.mark, count)
            self._fill("writer_line", granule, self.line, count)
            place = b.gep(self._pointer("defined"), [b.shl(granule, number(2))], source_etype=I8)
            b.store(defined(4 * count), place, align=1)

    # Vectors.

    def _vector(self, name: str, index: Any, element: Any, kind: Any) -> Any:
        pointer = self.b.gep(self._pointer(name), [index], source_etype=element)
        return self.b.load(pointer, typ=kind, align=1)

    def _all(self, name: str, first: Any, value: Any) -> Any:
        """Whether the words of neighbours all equal `value`."""
        return self._same(self._vector(name, first, I32, _WORDS), self._spread(value, _WORDS))

    def _same(self, a: Any, b: Any) -> Any:
        differ = self.b.bitcast(self.b.icmp_signed("!=", a, b), ir.IntType(_TOGETHER))
        return self.b.icmp_unsigned("==", differ, ir.Constant(ir.IntType(_TOGETHER), 0))

    def _spread(self, value: Any, kind: Any) -> Any:
        made: Any = ir.Constant(kind, ir.Undefined)
        for i in range(_TOGETHER):
            made = self.b.insert_element(made, value, ir.Constant(I32, i))
        return made

    def _fill(self, name: str, granule: Any, value: Any, count: int) -> None:
        kind = value.type
        place = self.b.gep(self._pointer(name), [granule], source_etype=kind)
        if count > 1:
            value = self._spread(value, ir.VectorType(kind, count))
        self.b.store(value, place, align=1)
