"""A small language for writing machine code that checks and marks memory: loops, arrays, stamps and refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from backends.vm.memory.clocks import EPOCH_BITS, EPOCH_MASK
from backends.vm.memory.definedness import DEFINED
from backends.vm.memory.marks import COMPARED, EVERY_BYTE, GRANULE, READ, WRITTEN
from backends.vm.numerics.compiled import ENTRY, linked
from backends.vm.numpy_calls import address_of, word_at

NO: Final = -1
"""The answer of machine code that refuses. It has then changed nothing; the same holds for the answers below."""
NO_ROOM: Final = -2
"""If only a place for the readings of an agent is missing, the answer is NO_ROOM less the agent."""
I8, I32, I64 = (ir.IntType(bits) for bits in (8, 32, 64))
POINTER: Final = ir.PointerType()

WRITE_MARKS: Final = ("writer", "writer_line", "lane", "met")
READ_MARKS: Final = ("reader", "reader_line", "read_lane", "read_met")
_BYTE_MARKS: Final = tuple(f"byte_{name}" for name in (*WRITE_MARKS, *READ_MARKS))
BYTE_FIELDS: Final = len(_BYTE_MARKS)
"""The last fields of a place in shared memory: 0 until there are marks of bytes."""
SHARED_FIELDS: Final = (
    "first", "end", "data", "defined", "in_flight", "divided", "many_readers", "partial", "read_partial", "last_reads",
    "readers", "granules", *WRITE_MARKS, *READ_MARKS, *_BYTE_MARKS,
)  # fmt: skip
GLOBAL_FIELDS: Final = (
    "end", "data", "state", "shadow_base", "shift", "writer", "reader", "writer_line", "reader_line", "constant_line",
    "lane", "met", "comparer", "partial",
)  # fmt: skip
"""The fields of a place: byte bounds, then addresses of arrays; in global memory 0 where there is no such array.
`readers`: the number of agents whose readings SharedMemory keeps, then each agent and the address of its readings."""


CHANGES: Final = np.zeros(1, np.int64)
"""How often any machine has replaced a place of global memory within a launch. Machine code that keeps a place compares
it."""


def places_change() -> None:
    """Count a change: a buffer goes away, or its arrays of marks are replaced."""
    CHANGES[0] += 1


class MemoryWords:
    """A memory as machine code reads it at `address`: values of SHARED_FIELDS or GLOBAL_FIELDS, arrays by address."""

    __slots__ = ("_words", "address", "fields")

    def __init__(self, *fields: int | npt.NDArray[Any] | None) -> None:
        self.fields = fields
        words = [address_of(one) if isinstance(one, np.ndarray) else one or 0 for one in fields]
        self._words = np.array(words, np.int64)
        self.address: int = address_of(self._words)

    def tell_last(self, *fields: npt.NDArray[Any]) -> None:
        """Replace the last fields by arrays."""
        self.fields = (*self.fields[: -len(fields)], *fields)
        self._words[-len(fields) :] = [address_of(one) for one in fields]


def number(value: int) -> ir.Constant:
    """A constant of 64 bits."""
    return ir.Constant(I64, value)


def defined(size: int) -> ir.Constant:
    """The constant that marks `size` bytes as defined."""
    return ir.Constant(ir.IntType(8 * size), int.from_bytes(bytes([DEFINED]) * size, "little"))


def callable_of(write: Callable[[ir.Function], object], pointers: int, numbers: int) -> Callable[..., int]:
    """A callable of `pointers` addresses, then `numbers` 64-bit numbers, that returns a number. `write` writes its
    code."""
    module = ir.Module("access")
    write(ir.Function(module, ir.FunctionType(I64, [POINTER] * pointers + [I64] * numbers), ENTRY))
    kind = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * pointers, *[ctypes.c_int64] * numbers)
    return cast("Callable[..., int]", kind(linked(module)))


def code_of(function: Callable[..., int]) -> int:
    """The address of the machine code behind a result of `callable_of`."""
    return word_at(ctypes.addressof(cast("ctypes.c_void_p", function)))


Made = TypeVar("Made")


class OnDemand(Generic[Made]):
    """Machine code that is compiled once NumPy has done the same so often that compiling takes no longer."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._times = 0
        self._made: Made | None = None

    def wanted(self, worth: int) -> Made | None:
        """The machine code for the operation about to run; None before call number `worth`."""
        if self._made is None:
            self._times += 1
            if self._times >= worth:
                self._made = self._make()
        return self._made


Found = Callable[[str], Any]
"""The value of a mark by its name, one of WRITE_MARKS and READ_MARKS."""


def _kind(name: str) -> ir.IntType:
    """The type of a mark."""
    return I8 if name in ("lane", "read_lane") else I32


class MemoryCode:
    """Writes a function that checks the memory `place`, with fields `names`, and jumps to `no` to refuse.

    `clock`: what the acting agent has seen.
    """

    def __init__(self, function: ir.Function, place: Any, names: Sequence[str], clock: Any) -> None:
        self.b = ir.IRBuilder(function.append_basic_block())
        self.no = function.append_basic_block()
        self.clock = clock
        self.place = {name: self.at(place, i, I64) for i, name in enumerate(names)}
        self._known = self._variable(I64)
        # Whether some granule that has been looked at is divided, so that its bytes must be marked.
        self.apart = self._variable(I64)

    def _end(self, answer: Any) -> None:
        """Return `answer`, and NO from the refusing block."""
        self.b.ret(answer)
        self.b.position_at_end(self.no)
        self.b.ret(number(NO))

    def at(self, pointer: Any, index: Any, kind: Any, *, scale: int = 1) -> Any:
        """Element `index` of an array."""
        index = number(scale * index) if isinstance(index, int) else index
        return self.b.load(self.b.gep(pointer, [index], source_etype=kind), typ=kind, align=1)

    def put(self, pointer: Any, index: Any, value: Any, kind: Any) -> None:
        """Write element `index` of an array."""
        self.b.store(value, self.b.gep(pointer, [index], source_etype=kind), align=1)

    def _pointer(self, name: str) -> Any:
        return self.b.inttoptr(self.place[name], POINTER)

    def _of(self, name: str, index: Any, kind: Any) -> Any:
        return self.at(self._pointer(name), index, kind)

    def _set_in(self, name: str, index: Any) -> Any:
        return self.b.icmp_unsigned("!=", self._of(name, index, I8), ir.Constant(I8, 0))

    def _refuse(self, condition: Any) -> None:
        following = self.b.append_basic_block()
        self.b.cbranch(condition, self.no, following)
        self.b.position_at_end(following)

    def _variable(self, kind: Any) -> Any:
        made = self.b.alloca(kind)
        self.b.store(ir.Constant(kind, 0), made)
        return made

    def _value(self, variable: Any) -> Any:
        return self.b.load(variable, typ=I64)

    def _set(self, variable: Any, value: Any) -> None:
        self.b.store(value, variable)

    @contextmanager
    def _each(self, first: Any, last: Any) -> Iterator[Any]:
        """Repeat the code written within for each index from `first` to `last`, both included."""
        b = self.b
        before, body = b.block, b.append_basic_block()
        b.branch(body)
        b.position_at_end(body)
        index = b.phi(I64)
        index.add_incoming(first, before)
        yield index
        following = b.add(index, number(1))
        index.add_incoming(following, b.block)
        end = b.append_basic_block()
        b.cbranch(b.icmp_signed("<=", following, last), body, end)
        b.position_at_end(end)

    # Stamps, and the readers besides the last.

    def _late(self, stamp: Any) -> Any:
        """Whether a stamp lies outside of what the clock has seen."""
        return self._beyond(self.clock, stamp)

    def _beyond(self, clock: Any, stamp: Any) -> Any:
        epoch = self.b.zext(self.b.and_(stamp, ir.Constant(I32, EPOCH_MASK)), I64)
        return self.b.icmp_signed(">", epoch, self.at(clock, self._agent(stamp), I64))

    def _agent(self, stamp: Any) -> Any:
        return self.b.sext(self.b.ashr(stamp, ir.Constant(I32, EPOCH_BITS)), I64)

    # Marks of granules and bytes of shared memory.

    def _marks_of(self, granule: Any) -> Found:
        """The marks of a granule."""
        return lambda name: self._of(name, granule, _kind(name))

    def _marks_at(self, granule: Any, byte: Any, divided: Any) -> Found:
        """The marks of a byte; those of its granule where the flags `divided` say so."""
        b = self.b

        def found(name: str) -> Any:
            bit = ir.Constant(I8, READ if name in READ_MARKS else WRITTEN)
            own = b.icmp_unsigned("!=", b.and_(divided, bit), ir.Constant(I8, 0))
            kind = _kind(name)
            return b.select(own, self._of(f"byte_{name}", byte, kind), self._of(name, granule, kind))

        return found

    def _compared(self, divided: Any) -> Any:
        """Whether the flags `divided` of a granule say that a compare-and-swap has failed there."""
        return self.b.icmp_unsigned("!=", self.b.and_(divided, ir.Constant(I8, COMPARED)), ir.Constant(I8, 0))

    def _none_apart(self) -> Any:
        return self.b.icmp_signed("==", self._value(self.apart), number(0))

    @contextmanager
    def _bytes_of(self, granule: Any) -> Iterator[Any]:
        """For each byte of a granule."""
        first = self.b.shl(granule, number(2))
        with self._each(first, self.b.add(first, number(GRANULE - 1))) as byte:
            yield byte

    def _divide(self, granule: Any, bit: int) -> None:
        """Do as Divided.divide."""
        b, flag = self.b, ir.Constant(I8, bit)
        divided = self._of("divided", granule, I8)
        with b.if_then(b.icmp_unsigned("==", b.and_(divided, flag), ir.Constant(I8, 0))):
            first = b.shl(granule, number(2))
            for name in READ_MARKS if bit == READ else WRITE_MARKS:
                value = self._marks_of(granule)(name)
                for i in range(GRANULE):
                    self.put(self._pointer(f"byte_{name}"), b.add(first, number(i)), value, _kind(name))
            self.put(self._pointer("divided"), granule, b.or_(divided, flag), I8)

    def _given_back_alone(self, found: Found) -> Any:
        """Whether a last reader in shared memory has lanes that have read and not released it."""
        return self.b.and_(self._set_in("read_partial", self._agent(found("reader"))),
                           self.b.icmp_signed(">", found("read_met"), ir.Constant(I32, 0)))  # fmt: skip

    @contextmanager
    def _kept_readers(self) -> Iterator[tuple[Any, Any]]:
        """For each agent with kept readings: its number, and the address of its readings."""
        b, readers = self.b, self._pointer("readers")
        count = self.at(readers, 0, I64)
        with b.if_then(b.icmp_signed(">", count, number(0))), self._each(number(0), b.sub(count, number(1))) as i:
            first = b.shl(i, number(1))
            where = self.at(readers, b.add(first, number(2)), I64)
            yield self.at(readers, b.add(first, number(1)), I64), b.inttoptr(where, POINTER)

    def _kept_rows(self, granule: Any) -> list[Any]:
        """Where kept readings have the epoch, the line and the bytes of a granule."""
        granules = self.place["granules"]
        return [granule, self.b.add(granule, granules), self.b.add(granule, self.b.shl(granules, number(1)))]

    def _check_kept(self, granule: Any, bits: Any = None) -> None:
        """Refuse if a kept reading of a granule, or of those of its bytes that are set in `bits`, is not ordered
        before."""
        b = self.b
        with b.if_then(self._set_in("many_readers", granule)), self._kept_readers() as (agent, kept):
            late = b.icmp_signed(">", b.sext(self.at(kept, granule, I32), I64), self.at(self.clock, agent, I64))
            if bits is not None:
                read = b.and_(bits, self.at(kept, self._kept_rows(granule)[2], I32))
                late = b.and_(late, b.icmp_signed("!=", read, ir.Constant(I32, 0)))
            self._refuse(late)

    def _forget_kept(self, granule: Any) -> None:
        """Drop the kept readings of a granule."""
        b, zero = self.b, ir.Constant(I32, 0)
        with b.if_then(self._set_in("many_readers", granule)):
            self.put(self._pointer("many_readers"), granule, ir.Constant(I8, 0), I8)
            with self._kept_readers() as (_, kept):
                for row in self._kept_rows(granule):
                    self.put(kept, row, zero, I32)

    def _check_keepable(self, reader: Any, mark: Any) -> None:
        """Return NO_ROOM for the agent of `reader` if its reading must be kept beside `mark` and has no place."""
        b = self.b
        with b.if_then(self._kept_beside(reader, mark)):
            found = self._known
            self._set(found, number(0))
            with self._kept_readers() as (agent, _):
                own = b.icmp_signed("==", agent, self._agent(reader))
                self._set(found, b.or_(self._value(found), b.zext(own, I64)))
            with b.if_then(b.icmp_signed("==", self._value(found), number(0))):
                b.ret(b.sub(number(NO_ROOM), self._agent(reader)))

    def _note_reader(self, granule: Any, mark: Any, line: Any, by: tuple[Any, Any] | None = None) -> None:
        """Record a read of a granule by the agent of `mark`. A last reader that nothing orders before it is kept.

        `by`: the lane (8 bits) and the meetings of its warp (32 bits).
        """
        self._keep_reader(granule, self._marks_of(granule), mark, ir.Constant(I32, EVERY_BYTE))
        for name, value in zip(READ_MARKS, (mark, line, *(by or ())), strict=False):
            self.put(self._pointer(name), granule, value, _kind(name))

    def _note_bytes_read(self, granule: Any, mark: Any, line: Any, by: tuple[Any, Any] | None = None) -> None:
        """To call before _note_reader: record the read of all bytes of a granule, if it is divided."""
        b = self.b
        divided = b.and_(self._of("divided", granule, I8), ir.Constant(I8, READ))
        with b.if_then(b.icmp_unsigned("!=", divided, ir.Constant(I8, 0))):
            with self._bytes_of(granule) as byte:
                self._note_byte_read(granule, byte, mark, line, by)
            # The mark of the granule is old, and not to be kept.
            self.put(self._pointer("reader"), granule, mark, I32)

    def _note_byte_read(self, granule: Any, byte: Any, mark: Any, line: Any, by: tuple[Any, Any] | None = None) -> None:
        """As _note_reader, for a byte of a divided granule."""
        b = self.b
        bit = b.shl(ir.Constant(I32, 1), b.and_(b.trunc(byte, I32), ir.Constant(I32, GRANULE - 1)))
        self._keep_reader(granule, lambda name: self._of(f"byte_{name}", byte, _kind(name)), mark, bit)
        for name, value in zip(READ_MARKS, (mark, line, *(by or ())), strict=False):
            self.put(self._pointer(f"byte_{name}"), byte, value, _kind(name))

    def _keep_reader(self, granule: Any, found: Found, mark: Any, bits: Any) -> None:
        """Do as SharedMemory._keep with the last reader that has read the bytes `bits`, if it must be kept beside
        `mark`."""
        b, reader = self.b, found("reader")
        with b.if_then(self._kept_beside(reader, mark)):
            self.put(self._pointer("many_readers"), granule, ir.Constant(I8, 1), I8)
            with self._kept_readers() as (agent, kept), b.if_then(b.icmp_signed("==", agent, self._agent(reader))):
                epoch, line = b.and_(reader, ir.Constant(I32, EPOCH_MASK)), found("reader_line")
                rows = self._kept_rows(granule)
                before, known, read = (self.at(kept, row, I32) for row in rows)
                newer, same = b.icmp_signed(">", epoch, before), b.icmp_signed("==", epoch, before)
                later = b.or_(newer, b.and_(same, b.icmp_signed(">", line, known)))
                every = b.select(newer, bits, b.select(same, b.or_(read, bits), read))
                values = (b.select(newer, epoch, before), b.select(later, line, known), every)
                for row, value in zip(rows, values, strict=True):
                    self.put(kept, row, value, I32)

    def _kept_beside(self, reader: Any, mark: Any) -> Any:
        return self.b.and_(self.b.icmp_signed("!=", reader, mark), self._late(reader))
