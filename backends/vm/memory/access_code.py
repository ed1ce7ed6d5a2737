"""A small language for writing machine code that checks and marks memory: loops, arrays, stamps and refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from backends.vm.counting import address_of, word_at
from backends.vm.memory.clocks import EPOCH_BITS, EPOCH_MASK
from backends.vm.memory.definedness import DEFINED
from backends.vm.numerics.compiled import ENTRY, linked

NO: Final = -1
"""The answer of machine code that refuses. It has then changed nothing; the same holds for the answers below."""
NO_ROOM: Final = -2
"""If only a place for the readings of an agent is missing, the answer is NO_ROOM less the agent."""
I8, I32, I64 = (ir.IntType(bits) for bits in (8, 32, 64))
POINTER: Final = ir.PointerType()

SHARED_FIELDS: Final = (
    "first", "end", "data", "defined", "in_flight", "writer", "reader", "writer_line", "reader_line", "contested",
    "many_readers", "lane", "met", "partial", "readers", "granules", "read_lane", "read_met", "read_partial",
    "last_reads",
)  # fmt: skip
GLOBAL_FIELDS: Final = (
    "end", "data", "state", "shadow_base", "shift", "writer", "reader", "writer_line", "reader_line", "constant_line",
    "lane", "met", "partial",
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

    def _given_back_alone(self, granule: Any, reader: Any) -> Any:
        """Whether the last reader of a granule of shared memory has lanes that have read and not released it."""
        met = self._of("read_met", granule, I32)
        return self.b.and_(self._set_in("read_partial", self._agent(reader)),
                           self.b.icmp_signed(">", met, ir.Constant(I32, 0)))  # fmt: skip

    @contextmanager
    def _kept_readers(self) -> Iterator[tuple[Any, Any]]:
        """For each agent with kept readings: its number, and the address of its readings."""
        b, readers = self.b, self._pointer("readers")
        count = self.at(readers, 0, I64)
        with b.if_then(b.icmp_signed(">", count, number(0))), self._each(number(0), b.sub(count, number(1))) as i:
            first = b.shl(i, number(1))
            where = self.at(readers, b.add(first, number(2)), I64)
            yield self.at(readers, b.add(first, number(1)), I64), b.inttoptr(where, POINTER)

    def _check_kept(self, granule: Any) -> None:
        """Refuse if a kept reading of a granule is not ordered before."""
        with self.b.if_then(self._set_in("many_readers", granule)), self._kept_readers() as (agent, kept):
            epoch = self.b.sext(self.at(kept, granule, I32), I64)
            self._refuse(self.b.icmp_signed(">", epoch, self.at(self.clock, agent, I64)))

    def _forget_kept(self, granule: Any) -> None:
        """Drop the kept readings of a granule."""
        b, zero = self.b, ir.Constant(I32, 0)
        with b.if_then(self._set_in("many_readers", granule)):
            self.put(self._pointer("many_readers"), granule, ir.Constant(I8, 0), I8)
            with self._kept_readers() as (_, kept):
                for row in (granule, b.add(granule, self.place["granules"])):
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

    def _note_reader(self, granule: Any, mark: Any, line: Any) -> None:
        """Record a read of a granule by the agent of `mark`. A last reader that nothing orders before it is kept."""
        b, reader = self.b, self._of("reader", granule, I32)
        with b.if_then(self._kept_beside(reader, mark)):
            self.put(self._pointer("many_readers"), granule, ir.Constant(I8, 1), I8)
            with self._kept_readers() as (agent, kept), b.if_then(b.icmp_signed("==", agent, self._agent(reader))):
                epoch, before = b.and_(reader, ir.Constant(I32, EPOCH_MASK)), self.at(kept, granule, I32)
                self.put(kept, granule, b.select(b.icmp_signed(">", epoch, before), epoch, before), I32)
                row = b.add(granule, self.place["granules"])
                self.put(kept, row, self._of("reader_line", granule, I32), I32)
        self.put(self._pointer("reader"), granule, mark, I32)
        self.put(self._pointer("reader_line"), granule, line, I32)

    def _kept_beside(self, reader: Any, mark: Any) -> Any:
        return self.b.and_(self.b.icmp_signed("!=", reader, mark), self._late(reader))
