"""Runs of instructions that only compute, as machine code: one call a run, where NumPy takes one or more for each.

The machine code of an instruction is made of the very step that its family has bound: the step runs once on symbolic
registers (numerics.traced). It takes the rows of its operands, so one function serves every instruction of the kind,
whatever its registers and literals, in all launches of the process. A step that cannot be traced, as it decides by
values or asks for more of the warp than registers, stays as it is. One before which data-flow wants something done is a
run of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from backends.vm.bind.binder import Binder
from backends.vm.bind.definedness import PURE
from backends.vm.bind.flow import Bound, preceded
from backends.vm.bind.forms import find
from backends.vm.faults import UnknownInstructionError
from backends.vm.machine.code import (
    DTYPE_OF_VIEW,
    LANES,
    STORAGE,
    WIDTH_OF_VIEW,
    Key,
    QuickRun,
    RegisterRows,
    Step,
    place_of,
)
from backends.vm.machine.warp import Warp
from backends.vm.numerics.compiled import ENTRY, linked
from backends.vm.numerics.traced import INDEX, Traced, llvm_type
from backends.vm.ptx.ast import Immediate, Instruction, Negated, Operand, Pair, Register, Vector

_POINTER: Final = ir.PointerType()
_MASK_BYTES: Final = ir.VectorType(ir.IntType(8), LANES)

WORTH = 200
"""So many executions of a kind of instruction by NumPy take as long as to make its machine code."""

Kind = tuple[object, ...]


# Symbolic registers.


class _Row(Traced):
    """A register as one of its views shows it."""

    def __init__(self, cell: _Cell, view: str) -> None:
        dtype, width = DTYPE_OF_VIEW[view], cell.width
        elements = max(width // 8, 1) // dtype.itemsize
        super().__init__(cell.builder, dtype, None, (LANES,) if elements == 1 else (LANES, elements))
        self._cell = cell

    @property
    def value(self) -> Any:
        return self.builder.bitcast(self._cell.content(), llvm_type(self.dtype, self.shape))

    def assign(self, source: object) -> None:
        value = self._broadcast(source).astype(self.dtype).value
        self._cell.written = self.builder.bitcast(value, self._cell.type)

    def __getitem__(self, where: object) -> Traced:
        if isinstance(where, tuple) and len(self.shape) == 2 and isinstance(where[1], int):
            return _Column(self, where[1])
        return super().__getitem__(where)


class _Column(Traced):
    """One element of each lane of a packed register."""

    def __init__(self, row: _Row, column: int) -> None:
        super().__init__(row.builder, row.dtype, None, (LANES,))
        self._row, self._column = row, column

    @property
    def value(self) -> Any:
        return Traced.__getitem__(self._row, (slice(None), self._column)).value

    def assign(self, source: object) -> None:
        columns = self._row.shape[1]
        value = self._broadcast(source).astype(self.dtype)
        spread = self._picked(value, [i // columns for i in range(LANES * columns)], self._row.shape)
        chosen = [LANES * columns + i if i % columns == self._column else i for i in range(LANES * columns)]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(chosen)), chosen)
        both = self.builder.shuffle_vector(self._row.value, spread.value, mask)
        self._row.assign(Traced(self.builder, self.dtype, both, self._row.shape))


@dataclass(slots=True)
class _Cell:
    """A register while a step is traced. `place`: the pointer to its row. `written`: what it holds since a write."""

    builder: ir.IRBuilder
    width: int
    place: Any
    loaded: Any = None
    written: Any = None

    @property
    def type(self) -> Any:
        """The LLVM type of the whole row."""
        return llvm_type(STORAGE[self.width], (LANES, 2) if self.width == 128 else (LANES,))

    def content(self) -> Any:
        """What the register holds now."""
        if self.written is not None:
            return self.written
        if self.loaded is None:
            self.loaded = _truth(self.builder, self.place) if self.width == 1 else self._load(self.type)
        return self.loaded

    def _load(self, kind: Any) -> Any:
        return self.builder.load(self.place, typ=kind, align=8)

    def store(self, mask: Any) -> None:
        """Write back what was written, in the lanes of `mask`."""
        b = self.builder
        if self.written is None:
            return
        if self.width == 128:
            both = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [i // 2 for i in range(2 * LANES)])
            mask = b.shuffle_vector(mask, mask, both)
        new, kind = self.written, self.type
        if self.width == 1:
            new, kind = b.zext(new, _MASK_BYTES), _MASK_BYTES
        b.store(b.select(mask, new, self._load(kind)), self.place, align=8)


def _truth(b: ir.IRBuilder, place: Any) -> Any:
    """The bytes of a mask or a predicate as bits."""
    found = b.load(place, typ=_MASK_BYTES, align=1)
    return b.icmp_unsigned("!=", found, ir.Constant(_MASK_BYTES, [0] * LANES))


class _View:
    def __init__(self, warp: _SymbolicWarp, name: str) -> None:
        self._warp, self._name = warp, name

    def __getitem__(self, row: int) -> _Row:
        return _Row(self._warp.cells[WIDTH_OF_VIEW[self._name], row], self._name)


class _SymbolicWarp:
    """All of a warp that a step may ask for: registers, and that all its lanes are active."""

    where = True

    def __init__(self, cells: dict[Key, _Cell]) -> None:
        self.cells = cells

    def __getattr__(self, name: str) -> _View:
        if name not in WIDTH_OF_VIEW:
            raise AttributeError(f"a symbolic warp has no {name!r}")
        return _View(self, name)


# Kinds of instructions.


@dataclass(frozen=True, slots=True)
class _Literal:
    """A literal whose value a family does not see but by `Binder.immediate`."""

    operand: Immediate
    number: int


@dataclass(slots=True)
class _KindBinder(Binder):
    """Binds each operand to a row of its own. `seen`: numbers of the literals whose values the family has asked for."""

    seen: set[int] = field(default_factory=set[int])
    hidden: tuple[Operand, ...] = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands, literals hidden."""
        return self.hidden

    def _own_row(self, width: int) -> int:
        self.places.append((width, len(self.places)))
        return len(self.places) - 1

    def source(self, operand: Operand, view: str, *, wider: bool = False) -> int:
        """A row of its own."""
        return self._own_row(self.width(operand) or WIDTH_OF_VIEW[view])

    def destination(self, operand: Operand, view: str, *, wider: bool = False) -> int:
        """A row of its own."""
        return self._own_row(self.width(operand) or WIDTH_OF_VIEW[view])

    def immediate(self, operand: Operand) -> int:
        """The value of a literal, which becomes part of the kind."""
        literal = cast("_Literal", operand)
        self.seen.add(literal.number)
        return literal.operand.value


def _hidden(operand: Operand, literals: list[Immediate]) -> Operand:
    """`operand` with its literals hidden; they are added to `literals`."""
    if isinstance(operand, Immediate):
        literals.append(operand)
        return cast("Operand", _Literal(operand, len(literals) - 1))
    if isinstance(operand, Vector):
        return Vector(tuple(_hidden(one, literals) for one in operand.items))
    return operand


def _hidden_operands(instruction: Instruction) -> tuple[tuple[Operand, ...], list[Immediate]]:
    literals: list[Immediate] = []
    return tuple(_hidden(one, literals) for one in instruction.operands), literals


def _shape(operand: Operand, rows: RegisterRows) -> object:
    """What of an operand decides how an instruction is bound, but for the values of literals."""
    if isinstance(operand, Register):
        return rows.widths.get(operand.name, operand.name)
    if isinstance(operand, Negated):
        return "!", _shape(operand.operand, rows)
    if isinstance(operand, Vector):
        return "{", *(_shape(one, rows) for one in operand.items)
    if isinstance(operand, Pair):
        return "|", _shape(operand.first, rows), _shape(operand.second, rows)
    return operand.kind if isinstance(operand, Immediate) else type(operand)


@dataclass(slots=True)
class _Code:
    """What there is of a kind.

    `seen`: numbers of the literals whose values make several kinds of it. `demand`: how often its instructions have run
    without machine code. `made`: it was tried to make some; `address` is None where that cannot be.
    """

    seen: tuple[int, ...] = ()
    demand: int = 0
    made: bool = False
    address: int | None = None


_KINDS: Final[dict[Kind, _Code]] = {}


def _code_of(instruction: Instruction, rows: RegisterRows) -> _Code:
    kind: Kind = (instruction.parts, *(_shape(one, rows) for one in instruction.operands))
    code = _KINDS.setdefault(kind, _Code())
    if not code.seen:
        return code
    literals = _hidden_operands(instruction)[1]
    return _KINDS.setdefault((*kind, *(literals[i].value for i in code.seen)), _Code())


def _made(instruction: Instruction, rows: RegisterRows) -> _Code:
    """The code of the kind of an instruction, made if that can be."""
    code = _code_of(instruction, rows)
    if code.made:
        return code
    binder = _KindBinder(instruction, find(instruction)[1], rows, hidden=_hidden_operands(instruction)[0])
    address = _machine_code(instruction, binder)
    code.seen = tuple(sorted(binder.seen))
    code = _code_of(instruction, rows)
    code.made, code.address = True, address
    return code


def _machine_code(instruction: Instruction, binder: _KindBinder) -> int | None:
    """Machine code `void entry(bounds, rows, mask)`; `rows` has a bound and an offset from it for each place."""
    module = ir.Module("lanes")
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), [_POINTER] * 3), ENTRY)
    b = ir.IRBuilder(made.append_basic_block())
    bounds, rows, mask = made.args

    def word(number: int) -> Any:
        return b.load(b.gep(rows, [ir.Constant(INDEX, number)], source_etype=INDEX), typ=INDEX)

    try:
        step = find(instruction)[0].bind(binder)
        cells = dict[Key, _Cell]()
        for index, key in enumerate(binder.places):
            bound = b.load(b.gep(bounds, [word(2 * index)], source_etype=_POINTER), typ=_POINTER)
            cells[key] = _Cell(b, key[0], b.gep(bound, [word(2 * index + 1)], source_etype=ir.IntType(8)))
        step(cast("Warp", _SymbolicWarp(cells)))
    except (TypeError, AttributeError, ValueError, LookupError, UnknownInstructionError):
        # What Traced, the symbolic warp and NumPy raise where the step asks for more than they can tell, and the family
        # where it rejects a literal that it does not see.
        return None
    active = _truth(b, mask)
    for cell in cells.values():
        cell.store(active)
    b.ret_void()
    return linked(module)


# Runs.


def _runner() -> ir.Module:
    """`void entry(program, bounds, mask)`: call the functions of a program, each with its rows.

    A program is words: the number of instructions, then for each its function, its guard (0: none, 1: a predicate, 2: a
    negated one), the bound and the offset of the predicate, the number of words that follow, and the rows.
    """
    module = ir.Module("run")
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), [_POINTER] * 3), ENTRY)
    program, bounds, mask = made.args
    b = ir.IRBuilder(made.append_basic_block())
    loop, guarded, call, end = (made.append_basic_block() for _ in range(4))
    entry, one = b.block, ir.Constant(INDEX, 1)

    def word(at: Any, number: int) -> Any:
        return b.load(b.gep(at, [ir.Constant(INDEX, number)], source_etype=INDEX), typ=INDEX)

    own = b.alloca(_MASK_BYTES)
    number, first = word(program, 0), b.gep(program, [one], source_etype=INDEX)
    b.branch(loop)
    b.position_at_end(loop)
    at, left = b.phi(_POINTER), b.phi(INDEX)
    b.cbranch(b.icmp_unsigned("==", word(at, 1), ir.Constant(INDEX, 0)), call, guarded)
    b.position_at_end(guarded)
    bound = b.load(b.gep(bounds, [word(at, 2)], source_etype=_POINTER), typ=_POINTER)
    predicate = b.load(b.gep(bound, [word(at, 3)], source_etype=ir.IntType(8)), typ=_MASK_BYTES, align=1)
    ones, zeros = (ir.Constant(_MASK_BYTES, [bit] * LANES) for bit in (1, 0))
    flip = b.select(b.icmp_unsigned("==", word(at, 1), ir.Constant(INDEX, 2)), ones, zeros)
    active = b.and_(b.load(mask, typ=_MASK_BYTES, align=1), b.xor(predicate, flip))
    b.store(active, own, align=1)
    b.branch(call)
    b.position_at_end(call)
    here = b.phi(_POINTER)
    here.add_incoming(mask, loop)
    here.add_incoming(own, guarded)
    function = b.inttoptr(word(at, 0), made.ftype.as_pointer())
    rows = b.gep(at, [ir.Constant(INDEX, 5)], source_etype=INDEX)
    b.call(function, [bounds, rows, here])
    following = b.gep(rows, [word(at, 4)], source_etype=INDEX)
    rest = b.sub(left, one)
    at.add_incoming(first, entry)
    at.add_incoming(following, call)
    left.add_incoming(number, entry)
    left.add_incoming(rest, call)
    b.cbranch(b.icmp_unsigned("==", rest, ir.Constant(INDEX, 0)), end, loop)
    b.position_at_end(end)
    b.ret_void()
    return module


@cache
def _run() -> Callable[[int, int, int], None]:
    kind = ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * 3)
    return cast("Callable[[int, int, int], None]", kind(linked(_runner())))


def _quick_run(run: Sequence[tuple[Bound, int]]) -> QuickRun:
    touches = frozenset[Key]().union(*(keys for item, _ in run for keys in (item.uses, item.defines)))
    return QuickRun(_step(run), len(run), touches, lambda: [_step([one]) for one in run])


def _step(run: Sequence[tuple[Bound, int]]) -> Step:
    """The machine code of a run, which begins with what comes before its first instruction."""
    words = [len(run)]
    for item, function in run:
        guard = (0, 0, 0) if item.guard is None else (1 + item.guard[1], *place_of((1, item.guard[0])))
        words += [function, *guard, 2 * len(item.places)]
        words += [word for key in item.places for word in place_of(key)]
    program = np.array(words, np.int64)
    step: Step = partial(_perform, program, program.ctypes.data)
    for first in reversed(run[0][0].before):
        step = preceded(first, step)
    return step


def _perform(program: npt.NDArray[np.int64], address: int, warp: Warp) -> None:
    _run()(address, warp.registers.bounds_address, warp.mask_address)


class RunFinder:
    """Finds the runs among the instructions of a block; see machine.code.FindRuns."""

    def __init__(self, items: Sequence[Bound], rows: RegisterRows) -> None:
        self._items, self._rows = items, rows
        self._codes: list[_Code | None] = []

    def __call__(self, times: int) -> tuple[dict[int, QuickRun], bool]:
        """The runs, and whether there may be more of them later."""
        codes = self._codes = self._codes or [self._code(item) for item in self._items]
        for index, code in enumerate(codes):
            if code is not None and not code.made:
                code.demand += times
                if code.demand >= WORTH:
                    codes[index] = _made(self._items[index].instruction, self._rows)
        return self._runs(codes), any(code is not None and not code.made for code in codes)

    def _code(self, item: Bound) -> _Code | None:
        computes = item.plain is not None and not (item.before and item.guard) and item.form.counter in PURE
        return _code_of(item.instruction, self._rows) if computes else None

    def _runs(self, codes: Sequence[_Code | None]) -> dict[int, QuickRun]:
        runs = dict[int, QuickRun]()
        run: list[tuple[Bound, int]] = []
        for index, code in enumerate([*codes, None]):
            made = code is not None and code.address is not None
            if run and (not made or run[0][0].before or self._items[index].before):
                runs[index - len(run)] = _quick_run(run)
                run = []
            if code is not None and code.address is not None:
                run.append((self._items[index], code.address))
        return runs
