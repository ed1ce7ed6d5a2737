"""Compiles runs of instructions that compute, load and store: one call per run instead of NumPy calls for each.

The machine code of an instruction is derived from the step that its family has bound: the step runs once on symbolic
registers (numerics.traced). The code takes the rows of its operands, so one function serves every instruction of the
kind, whatever its registers and literals, in all launches of the process. A step that cannot be traced, because it
decides by values or needs more of the warp than registers, stays as it is, unless its family writes machine code for
the plain case (`writes`). Loads and stores are in backends.vm.machine.run_access. An instruction that data-flow
analysis has put something before begins a run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain
from typing import Any, Final, cast

import numpy as np
from llvmlite import ir

from backends.vm.bind.binder import Binder
from backends.vm.bind.definedness import PURE
from backends.vm.bind.flow import Bound, touched_by
from backends.vm.bind.forms import Bind, find
from backends.vm.faults import UnknownInstructionError
from backends.vm.machine.code import (
    DTYPE_OF_VIEW,
    LANES,
    STORAGE,
    WIDTH_OF_VIEW,
    WORD,
    Key,
    QuickRun,
    RegisterRows,
    Step,
    place_of,
)
from backends.vm.machine.warp import Warp
from backends.vm.numerics.compiled import ENTRY, linked
from backends.vm.numerics.traced import INDEX, Traced, llvm_type
from backends.vm.numpy_calls import address_of
from backends.vm.ptx.ast import Immediate, Instruction, Negated, Operand, Pair, Register, Vector

_POINTER: Final = ir.PointerType()
_FUNCTION: Final = ir.FunctionType(INDEX, [_POINTER] * 3)
"""The signature of the machine code of an instruction."""
_MASK_BYTES: Final = ir.VectorType(ir.IntType(8), LANES)

WORTH = 200
"""Executions of a kind of instruction by NumPy that take as long as compiling its machine code."""

Kind = tuple[object, ...]


# Symbolic registers.


class _Row(Traced):
    """A register in one of its views."""

    def __init__(self, cell: Cell, view: str) -> None:
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
class Cell:
    """A register while a step is traced. `place`: the pointer to its row. `written`: its value since a write."""

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
        """The current value of the register."""
        if self.written is not None:
            return self.written
        if self.loaded is None:
            self.loaded = truth(self.builder, self.place) if self.width == 1 else self._load(self.type)
        return self.loaded

    def _load(self, kind: Any) -> Any:
        return self.builder.load(self.place, typ=kind, align=8)

    def store(self, mask: Any) -> None:
        """Store the written value in the lanes of `mask`."""
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


def truth(b: ir.IRBuilder, place: Any) -> Any:
    """The bytes of a mask or a predicate as bits."""
    found = b.load(place, typ=_MASK_BYTES, align=1)
    return b.icmp_unsigned("!=", found, ir.Constant(_MASK_BYTES, [0] * LANES))


class _View:
    def __init__(self, warp: _SymbolicWarp, name: str) -> None:
        self._warp, self._name = warp, name

    def __getitem__(self, row: int) -> _Row:
        return _Row(self._warp.cells[WIDTH_OF_VIEW[self._name], row], self._name)


class _SymbolicWarp:
    """The parts of a warp that a traced step may use: registers, and the fact that all lanes are active."""

    where = True

    def __init__(self, cells: dict[Key, Cell]) -> None:
        self.cells = cells

    def __getattr__(self, name: str) -> _View:
        if name not in WIDTH_OF_VIEW:
            raise AttributeError(f"a symbolic warp has no {name!r}")
        return _View(self, name)


# Kinds of instructions.


@dataclass(frozen=True, slots=True)
class _Literal:
    """A literal whose value a family sees only through `Binder.immediate`."""

    operand: Immediate
    number: int


@dataclass(slots=True)
class _KindBinder(Binder):
    """Binds each operand to a row of its own. `seen`: numbers of the literals whose values the family has asked for."""

    seen: set[int] = field(default_factory=set[int])
    hidden: tuple[Operand, ...] = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands, with literals hidden."""
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
    """`operand` with its literals hidden and appended to `literals`."""
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
    """The properties of an operand that decide how an instruction is bound, except the values of literals."""
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
    """The state of the machine code of a kind.

    `seen`: numbers of the literals whose values split it into several kinds. `demand`: how often its instructions have
    run without machine code. `made`: compilation has been tried; `address` is None if it failed.
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
    """The code of an instruction's kind, after an attempt to compile it."""
    code = _code_of(instruction, rows)
    if code.made:
        return code
    binder = _KindBinder(instruction, find(instruction)[1], rows, hidden=_hidden_operands(instruction)[0])
    address = _machine_code(instruction, binder)
    code.seen = tuple(sorted(binder.seen))
    code = _code_of(instruction, rows)
    code.made, code.address = True, address
    return code


Write = Callable[[ir.IRBuilder, Sequence[Cell], Any, Instruction], None]
"""Writes machine code for an instruction. It gets the cells of the operands, in the order in which the family asks for
them, and the mask of the active lanes. The code may return 1 to refuse, and must not have changed anything then."""
_WRITTEN: Final[dict[Bind, Write]] = {}


def writes(family: Bind) -> Callable[[Write], Write]:
    """Register the writer of machine code for a family whose steps need more than registers.

    Each of these steps is a meeting of the warp's lanes.
    """

    def register(write: Write) -> Write:
        _WRITTEN[family] = write
        return write

    return register


def _machine_code(instruction: Instruction, binder: _KindBinder) -> int | None:
    """Machine code `int64 entry(bounds, rows, mask)`, or None if it cannot be made.

    `rows` has a bound and an offset from it for each place. The code returns 0, or 1 if it refuses.
    """
    module = ir.Module("lanes")
    made = ir.Function(module, _FUNCTION, ENTRY)
    b = ir.IRBuilder(made.append_basic_block())
    bounds, rows, mask = made.args

    def word(number: int) -> Any:
        return b.load(b.gep(rows, [ir.Constant(INDEX, number)], source_etype=INDEX), typ=INDEX)

    try:
        family = find(instruction)[0].bind
        step = family(binder)
        cells = dict[Key, Cell]()
        for index, key in enumerate(binder.places):
            bound = b.load(b.gep(bounds, [word(2 * index)], source_etype=_POINTER), typ=_POINTER)
            cells[key] = Cell(b, key[0], b.gep(bound, [word(2 * index + 1)], source_etype=ir.IntType(8)))
        if family in _WRITTEN:
            _WRITTEN[family](b, [cells[key] for key in binder.places], mask, instruction)
        else:
            step(cast("Warp", _SymbolicWarp(cells)))
    except (TypeError, AttributeError, ValueError, LookupError, UnknownInstructionError):
        # Traced, the symbolic warp and NumPy raise these if the step asks for more than they can answer, and the family
        # if it rejects a literal that it cannot see.
        return None
    active = truth(b, mask)
    for cell in cells.values():
        cell.store(active)
    b.ret(ir.Constant(INDEX, 0))
    return linked(module)


# Runs.


def _runner() -> ir.Module:
    """`int64 entry(program, number, bounds, mask)`: call the functions of `number` instructions of a program.

    It returns how many it has called before the one that refuses, or `number`. A program has for each instruction its
    function, its guard (0: none, 1: a predicate, 2: a negated one), the bound and the offset of the predicate, the
    number of words that follow, and the rows that the function takes.
    """
    module = ir.Module("run")
    made = ir.Function(module, ir.FunctionType(INDEX, [_POINTER, INDEX, _POINTER, _POINTER]), ENTRY)
    program, number, bounds, mask = made.args
    b = ir.IRBuilder(made.append_basic_block())
    loop, guarded, call, done, end = (made.append_basic_block() for _ in range(5))
    entry, zero, one = b.block, ir.Constant(INDEX, 0), ir.Constant(INDEX, 1)

    def word(at: Any, number: int) -> Any:
        return b.load(b.gep(at, [ir.Constant(INDEX, number)], source_etype=INDEX), typ=INDEX)

    own = b.alloca(_MASK_BYTES)
    b.branch(loop)
    b.position_at_end(loop)
    at, count = b.phi(_POINTER), b.phi(INDEX)
    b.cbranch(b.icmp_unsigned("==", word(at, 1), zero), call, guarded)
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
    function = b.inttoptr(word(at, 0), _FUNCTION.as_pointer())
    rows = b.gep(at, [ir.Constant(INDEX, 5)], source_etype=INDEX)
    refused = b.call(function, [bounds, rows, here])
    b.cbranch(b.icmp_unsigned("==", refused, zero), done, end)
    b.position_at_end(done)
    following = b.gep(rows, [word(at, 4)], source_etype=INDEX)
    so_far = b.add(count, one)
    at.add_incoming(program, entry)
    at.add_incoming(following, done)
    count.add_incoming(zero, entry)
    count.add_incoming(so_far, done)
    b.cbranch(b.icmp_unsigned("==", so_far, number), end, loop)
    b.position_at_end(end)
    answer = b.phi(INDEX)
    answer.add_incoming(count, call)
    answer.add_incoming(so_far, done)
    b.ret(answer)
    return module


@cache
def _run() -> Callable[[int, int, int, int], int]:
    kind = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    return cast("Callable[[int, int, int, int], int]", kind(linked(_runner())))


class _Run:
    """A run from step `begin` of its block. `items`: its instructions with their functions; `steps`: their steps."""

    __slots__ = ("_accesses", "_addresses", "_before", "_begin", "_meets", "_program", "_steps", "count", "touches")

    def __init__(self, begin: int, items: Sequence[tuple[Bound, int]], steps: Sequence[Step]) -> None:
        self.count = len(items)
        self.touches = touched_by([item for item, _ in items])
        words, places = list[int](), list[int]()
        for item, function in items:
            guard = (0, 0, 0) if item.guard is None else (1 + item.guard[1], *place_of((1, item.guard[0])))
            places.append(len(words))
            taken = item.in_run.words() if item.in_run else list(chain.from_iterable(map(place_of, item.places)))
            words += [function, *guard, len(taken), *taken]
        self._program = np.array(words, np.int64)
        base: int = address_of(self._program)
        self._addresses = [base + self._program.itemsize * place for place in places]
        self._begin, self._steps, self._before = begin, steps, items[0][0].before
        meets = [0, *accumulate(item.form.bind in _WRITTEN for item, _ in items)]
        self._meets = meets if meets[-1] else None
        self._accesses = [item for item, _ in items] if any(item.in_run for item, _ in items) else None

    def step(self, warp: Warp) -> None:
        """Run all of it, and pass over the places of its other steps."""
        self.part(warp, 0, self.count)
        if self.count > 1:
            warp.at_step(self._begin + self.count - 1)

    def part(self, warp: Warp, first: int, count: int) -> None:
        """Run `count` of its instructions, from number `first`. What data-flow analysis has put before number 0 runs
        too."""
        if first == 0:
            for before in self._before:
                before(warp)
        end = first + count
        while first < end:
            if self._accesses is not None:
                _tell(warp)
            done = first + _perform(self._addresses[first], end - first, warp)
            answer = 0 if self._accesses is None else _note_stores(warp)
            if self._meets is not None:
                warp.meetings += self._meets[done] - self._meets[first]
            first = done + 1
            if done < end:
                warp.at_step(self._begin + done)
                if answer and self._accesses is not None:
                    _look_at(warp, self._accesses[done], answer)
                else:
                    self._steps[done](warp)


def _perform(program: int, number: int, warp: Warp) -> int:
    return _run()(program, number, warp.registers.bounds_address, warp.mask_address)


_MARK, _MET, _UNEVEN, _ANSWER = (WORD[name] for name in ("mark", "met", "uneven", "answer"))
_STORED, _CHANGED = WORD["stored"], WORD["changed"]
_STORED_GLOBALLY, _CHANGED_GLOBALLY = WORD["stored_globally"], WORD["changed_globally"]


def _tell(warp: Warp) -> None:
    """Before accesses: update the words of the warp that change."""
    told = warp.registers.told
    told[_MARK], told[_MET] = warp.stamp, warp.meetings
    told[_UNEVEN] = warp.acquires.at == warp.meetings and warp.knows_unevenly()


def _note_stores(warp: Warp) -> int:
    """After accesses: let waiters for a store go on. Returns the answer that must be looked at, 0 for none."""
    told = warp.registers.told
    if told[_STORED]:
        warp.note_stores(told[_CHANGED])
        told[_STORED] = told[_CHANGED] = 0
    if told[_STORED_GLOBALLY]:
        warp.note_global_stores(told[_CHANGED_GLOBALLY])
        told[_STORED_GLOBALLY] = told[_CHANGED_GLOBALLY] = 0
    answer = told[_ANSWER]
    if answer:
        told[_ANSWER] = 0
    return answer


def _look_at(warp: Warp, item: Bound, answer: int) -> None:
    """Finish an access in its lanes as its answer requires."""
    assert item.in_run is not None, "only accesses answer"
    if item.guard is None:
        item.in_run.after(warp, answer)
        return
    row, negated = item.guard
    warp.in_lanes(warp.mask & (~warp.pred[row] if negated else warp.pred[row]), item.in_run.after, answer)


class RunFinder:
    """Finds the runs among the instructions of a block; see machine.code.FindRuns. `steps`: their steps."""

    def __init__(self, items: Sequence[Bound], rows: RegisterRows, steps: Sequence[Step]) -> None:
        self._items, self._rows, self._steps = items, rows, steps
        self._codes: list[_Code | None] = []
        self._left: list[int] = []
        self._known: dict[int, QuickRun] = {}

    def __call__(self, times: int) -> tuple[dict[int, QuickRun], bool]:
        """The runs, and whether there may be more of them later."""
        first = not self._codes
        if first:
            self._codes = [self._code(item) for item in self._items]
        left = list[int]()
        for index in range(len(self._items)) if first else self._left:
            code = self._codes[index]
            if code is None:
                continue
            if not code.made:
                code.demand += times
                if code.demand >= WORTH:
                    code = self._codes[index] = _made(self._items[index].instruction, self._rows)
            if not code.made:
                left.append(index)
        if first or len(left) < len(self._left):
            self._known = self._runs(self._codes)
        self._left = left
        return self._known, bool(left)

    def _code(self, item: Bound) -> _Code | None:
        if item.plain is None or (item.before and (item.guard or item.form.bind in _WRITTEN)):
            return None
        if item.in_run is not None:
            return _Code(made=True, address=item.in_run.function)
        wanted = item.form.counter in PURE or item.form.bind in _WRITTEN
        return _code_of(item.instruction, self._rows) if wanted else None

    def _met_since(self, run: Sequence[tuple[Bound, int]], index: int) -> bool:
        """Whether instruction `index` is an access that would see a stale number of meetings, because `run` has
        some."""
        return self._items[index].in_run is not None and any(item.form.bind in _WRITTEN for item, _ in run)

    def _runs(self, codes: Sequence[_Code | None]) -> dict[int, QuickRun]:
        runs = dict[int, QuickRun]()
        run: list[tuple[Bound, int]] = []
        for index, code in enumerate([*codes, None]):
            made = code is not None and code.address is not None
            if run and (not made or self._items[index].before or self._met_since(run, index)):
                begin = index - len(run)
                runs[begin] = _Run(begin, run, self._steps[begin:index])
                run = []
            if code is not None and code.address is not None:
                run.append((self._items[index], code.address))
        return runs
