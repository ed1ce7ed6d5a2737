"""Turns a parsed function into one that a machine can launch: binds instructions, cuts blocks, places symbols."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import is_
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import numpy.typing as npt

from backends.vm.bind.availability import Version, missing
from backends.vm.bind.binder import Binder, OutsideRingError
from backends.vm.bind.calls import with_calls_in_place
from backends.vm.bind.constants import impossible
from backends.vm.bind.definedness import InstructionCarrier, flow_of, unwritten_registers
from backends.vm.bind.flow import (
    Bound,
    FlowGraph,
    check_warpgroup_registers,
    end_loads_at_use,
    replace_unread,
    touched_by,
)
from backends.vm.bind.forms import Form, bind_in_ring, find, in_order
from backends.vm.bind.lanes import RunFinder
from backends.vm.bind.operand_types import misplaced, mistyped
from backends.vm.faults import Fault, Refusals, UnknownInstructionError, counted
from backends.vm.machine.code import (
    HANDLED,
    LANES,
    NEXT,
    Block,
    BoundFunction,
    Code,
    Key,
    RegisterRows,
    Step,
    lanes_in,
    lanes_together,
)
from backends.vm.machine.special import RESERVED_OFFSETS
from backends.vm.memory.shared import RESERVED
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Function, Instruction, Module, Symbol, Variable

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp


def guarded(step: Step, guard: tuple[int, bool]) -> Step:
    """`@%p step`: only the active lanes whose predicate holds execute."""
    row, negated = guard
    nobody = LANES if negated else 0

    def run(warp: Warp) -> None:
        predicate = warp.pred[row]
        if warp.where is True and (holds := count_nonzero(predicate)) in (0, LANES):
            if holds != nobody:
                step(warp)
            return
        lanes = warp.mask & ~predicate if negated else warp.mask & predicate
        if not count_nonzero(lanes):
            return
        warp.in_lanes(lanes, step)

    return run


def jump(target: int) -> Step:
    """`bra target`."""
    return lambda warp: target


def jump_by(index: Step, targets: Sequence[int], guard: tuple[int, bool] | None, after: int) -> Step:
    """`@%p brx.idx`: each lane goes to the block that its index names."""

    def run(warp: Warp) -> object:
        lanes = warp.mask
        if guard is not None:
            predicate = warp.pred[guard[0]]
            lanes = warp.mask & ~predicate if guard[1] else warp.mask & predicate
        chosen = cast("npt.NDArray[np.uint32]", index(warp))
        wrong = lanes & (chosen >= len(targets))
        if count_nonzero(wrong):
            lane = int(np.flatnonzero(wrong)[0])
            labels = counted(len(targets), "label")
            raise Fault("branch-index", f"brx.idx with index {chosen[lane]} into a list of {labels} is undefined "
                        "(PTX ISA 9.7.12.4)", lane=lane)  # fmt: skip
        parts = [(targets[one], lanes & (chosen == one)) for one in np.unique(chosen[lanes]).tolist()]
        if count_nonzero(warp.mask & ~lanes):
            parts.append((after, warp.mask & ~lanes))
        if len(parts) == 1:
            return parts[0][0]
        warp.split(*parts)
        return HANDLED

    return run


def jump_if(target: int, after: int, guard: tuple[int, bool]) -> Step:
    """`@%p bra target`: splits the strand where lanes disagree."""
    row, negated = guard
    nobody = LANES if negated else 0

    def run(warp: Warp) -> object:
        predicate = warp.pred[row]
        if warp.where is True and (holds := count_nonzero(predicate)) in (0, LANES):
            return after if holds == nobody else target
        taken = warp.mask & ~predicate if negated else warp.mask & predicate
        if not count_nonzero(taken):
            return after
        if not count_nonzero(taken != warp.mask):
            return target
        warp.split((target, taken), (after, warp.mask & ~taken))
        return HANDLED

    return run


def guarded_tail(tail: Step, guard: tuple[int, bool], after: int, together: int) -> Step:
    """`@%p` before an instruction that may wait: lanes that do not take part go on after it.

    `together`: the lanes that must not skip it while others execute it, as bits.
    """
    row, negated = guard

    def run(warp: Warp) -> object:
        predicate = warp.pred[row]
        lanes = warp.mask & ~predicate if negated else warp.mask & predicate
        if not count_nonzero(lanes):
            return after
        if not count_nonzero(lanes != warp.mask):
            return tail(warp)
        if together and count_nonzero(lanes_in(together) & warp.mask & ~lanes):
            # The lanes that skip it are not elsewhere; they will not come. This raises `diverged`.
            return warp.in_lanes(lanes, tail)
        warp.split((warp.block, lanes), (after, warp.mask & ~lanes))
        return HANDLED

    return run


def guarded_leave(guard: tuple[int, bool]) -> Step:
    """`@%p ret`: the lanes whose predicate holds end, the others go on."""
    row, negated = guard

    def run(warp: Warp) -> object:
        predicate = warp.pred[row]
        lanes = warp.mask & ~predicate if negated else warp.mask & predicate
        if not count_nonzero(lanes != warp.mask):
            return leave(warp)
        if count_nonzero(lanes):
            warp.drop(lanes)
        return NEXT

    return run


def leave(warp: Warp) -> object:
    """`ret` or `exit` of an entry: the active lanes end."""
    warp.retire()
    return HANDLED


@dataclass(slots=True)
class Relatives:
    """Shares bound instructions between similar functions of one module, or of copies of it.

    The first function that is bound leaves its instructions to later ones with the same declarations.
    """

    target: tuple[str, Version] | None = None
    rows: RegisterRows | None = None
    bound: dict[Instruction, Bound] = field(default_factory=dict[Instruction, Bound])

    def rows_for(
        self, types: Mapping[str, str], symbols: Mapping[str, str], target: tuple[str, Version]
    ) -> RegisterRows:
        """Rows for a function of these declarations. They extend the first function's rows if its declarations are the
        same."""
        rows = self.rows
        if rows is not None and (rows.types, rows.symbols, self.target) == (types, symbols, target):
            return rows.extended()
        return RegisterRows.of(types, symbols)

    def instruction(self, one: Instruction, rows: RegisterRows) -> Bound | None:
        """What the first function has bound, if it has the same instruction and `rows` come from its rows."""
        known = self.bound.get(one) if self.rows is not None and rows.used is self.rows.used else None
        return None if known is None else known.as_bound()

    def leave(self, target: tuple[str, Version], rows: RegisterRows, bound: Sequence[Bound]) -> None:
        """Keep what was bound for a function if it is the first one."""
        if self.rows is None:
            self.target, self.rows = target, rows
            self.bound = {one.instruction: one for one in bound}


def build(
    function: Function,
    symbol_spaces: Mapping[str, str],
    target: str,
    version: Version,
    *,
    ring: bool = False,
    relatives: Relatives | None = None,
    unfollowed: Refusals = (),
) -> Code:
    """Bind every instruction of `function` and cut it into blocks.

    `symbol_spaces` maps the names of variables and parameters that it may address to their state space. `target` and
    `version` are the module's; an instruction that they do not have is refused. `ring`: floats are elements of a ring.
    `relatives`: instructions that are bound already. `unfollowed`: refusals of calls that are left out of `function`.
    Raises UnknownInstructionError for these and all instructions that this machine does not have.
    """
    known = Relatives() if relatives is None else relatives
    function = _in_order(function)
    rows = known.rows_for(function.registers, symbol_spaces, (target, version))
    bound, refused = list[Bound](), [*unfollowed]
    for one in function.instructions:
        try:
            item = known.instruction(one, rows) or _bind(one, rows, target, version, ring=ring)
            _check_labels(function, item)
            bound.append(item)
        except UnknownInstructionError as refusal:
            refused.append((one.line, refusal))
    refused += _undeclared(function, symbol_spaces, rows)
    if refused:
        raise UnknownInstructionError.of(refused)
    rows.used.update(key for item in bound for key in item.uses)
    leaders = _leaders(function, bound)
    block_of = {start: number for number, start in enumerate(leaders)}
    blocks = [range(start, end) for start, end in pairwise([*leaders, len(bound)])]
    followers = [[block_of[target] for target in _successors(function, bound, block)] for block in blocks]
    graph = FlowGraph(bound, blocks, followers)
    unwritten = unwritten_registers(graph, rows)
    replace_unread(graph)
    check_warpgroup_registers(graph)
    end_loads_at_use(graph)
    if relatives is not None:
        relatives.leave((target, version), rows, bound)
    return Code(function, [_block(function, bound, block, block_of, rows) for block in blocks], rows, unwritten)


def _check_labels(function: Function, item: Bound) -> None:
    """UnknownInstructionError if a branch goes to a label that is not there."""
    if item.form.control == "branch":
        branch_target(function, item.instruction)
    elif item.form.control == "table":
        branch_table(function, item.instruction)


def _undeclared(
    function: Function, symbol_spaces: Mapping[str, str], rows: RegisterRows
) -> Iterator[tuple[int, UnknownInstructionError]]:
    """A refusal for each name of which the address is taken and which no variable has, and its first PTX line.

    This machine follows calls and branches by name, so that code has no address.
    """
    for name in dict.fromkeys(name for name, _, _ in rows.addresses):
        if name == "_" or symbol_spaces.get(name, "code") != "code":
            continue
        named = re.compile(rf"(?<![\w$%]){re.escape(name)}(?![\w$])")
        line = next((one.line for one in function.instructions if named.search(one.text)), 0)
        why = (
            "is not declared"
            if name not in symbol_spaces
            else "is code; this machine follows calls and branches by name"
        )
        at = f"PTX line {line}: " if line else ""
        yield line, UnknownInstructionError(f"{at}function {function.name} takes the address of `{name}`, which {why}")


def _in_order(function: Function) -> Function:
    """The function with the modifiers of its instructions in the order of their forms."""
    ordered = tuple(map(in_order, function.instructions))
    if all(map(is_, ordered, function.instructions)):
        return function
    return msgspec.structs.replace(function, instructions=ordered)


def _in_ring(form: Form, binder: Binder) -> Step:
    """The step of an instruction where floats are elements of a ring. Without a counterpart it raises when executed."""
    bind = bind_in_ring(form, binder.instruction.parts)
    try:
        if bind is not None:
            return bind(binder)
        refusal = binder.outside_ring()
    except OutsideRingError as outside:
        refusal = outside
    form.bind(binder)

    def refuse(warp: Warp) -> object:
        raise refusal

    return refuse


_NO_ADDRESSES = frozenset[Key]()


def _bind(instruction: Instruction, rows: RegisterRows, target: str, version: Version, *, ring: bool) -> Bound:
    form, words = find(instruction)
    binder = Binder(instruction, words, rows)
    guard = None
    if instruction.guard is not None:
        key = rows.rows.get(instruction.guard.register)
        if key is None or key[0] != 1:
            raise binder.error(f"the guard `{instruction.guard.register}` is not a predicate register")
        guard = (key[1], instruction.guard.negated)
        binder.uses.append(key)
    step = _in_ring(form, binder) if ring else form.bind(binder)
    refusal = missing(instruction, target, version) or misused(instruction, rows)
    if refusal is not None:
        raise binder.error(refusal)
    addresses = frozenset(binder.addresses) if binder.addresses else _NO_ADDRESSES
    return Bound(instruction, form, step, tuple(binder.uses), tuple(binder.defines), guard, tuple(binder.reads),
                 addresses, binder.carrying, tuple(binder.places), None if ring else step,
                 in_run=binder.in_run, unread=None if ring else binder.unread)  # fmt: skip


def misused(instruction: Instruction, rows: RegisterRows) -> str | None:
    """The reason why an operand cannot be what it is, whatever the target, as ptxas finds it; None if it takes all."""
    return mistyped(instruction, rows.types) or misplaced(instruction, rows.symbols) or impossible(instruction)


def _leaders(function: Function, bound: list[Bound]) -> list[int]:
    starts = {0} | set(function.labels.values())
    for index, item in enumerate(bound):
        if item.form.kind == "tail":
            starts.add(index + 1)
            if not item.form.control:
                starts.add(index)
    return sorted(start for start in starts if start < len(bound)) or [0]


def branch_target(function: Function, instruction: Instruction) -> int:
    """Index of the instruction that a `bra` goes to."""
    label = instruction.operands[0] if instruction.operands else None
    if not isinstance(label, Symbol) or label.name not in function.labels:
        raise UnknownInstructionError(f"PTX line {instruction.line}: `{instruction.text}`: no such label")
    return function.labels[label.name]


def branch_table(function: Function, instruction: Instruction) -> list[int]:
    """Indices of the instructions that a `brx.idx` may go to."""
    label = instruction.operands[1]
    names = function.branch_targets.get(label.name, ()) if isinstance(label, Symbol) else ()
    if not names or any(name not in function.labels for name in names):
        raise UnknownInstructionError(f"PTX line {instruction.line}: `{instruction.text}`: no such .branchtargets list")
    return [function.labels[name] for name in names]


def _successors(function: Function, bound: list[Bound], block: range) -> list[int]:
    if not block:
        return []
    last = bound[block[-1]]
    targets: list[int] = []
    if last.form.control == "branch":
        targets.append(branch_target(function, last.instruction))
    elif last.form.control == "table":
        targets += branch_table(function, last.instruction)
    if not last.form.control or last.guard is not None:
        targets.append(block.stop)
    return [target for target in targets if target < len(bound)]


def _block(
    function: Function, bound: list[Bound], indices: range, block_of: Mapping[int, int], rows: RegisterRows
) -> Block:
    body = [bound[index] for index in indices]
    block = Block([], [item.instruction for item in body], make_carriers=lambda: [*map(InstructionCarrier, body)],
                  find_touched=lambda: touched_by(body), find_flow=lambda: flow_of(body))  # fmt: skip
    block.classes.update(item.form.counter for item in body)
    after = block_of.get(indices.stop, len(block_of))
    for item in body:
        step = _controlled(function, item, after, block_of)
        if item.form.kind == "tail":
            block.tail = step
        else:
            block.steps.append(step)
    block.find_runs = RunFinder(body[: len(block.steps)], rows, block.steps)
    return block


def _controlled(function: Function, item: Bound, after: int, block_of: Mapping[int, int]) -> Step:
    if item.form.kind == "step":
        return guarded(item.step, item.guard) if item.guard else item.step
    if item.form.control == "branch":
        target = block_of.get(branch_target(function, item.instruction), len(block_of))
        return jump_if(target, after, item.guard) if item.guard else jump(target)
    if item.form.control == "table":
        table = [block_of.get(target, len(block_of)) for target in branch_table(function, item.instruction)]
        return jump_by(item.step, table, item.guard, after)
    if item.form.control == "exit":
        return guarded_leave(item.guard) if item.guard else leave
    return guarded_tail(item.step, item.guard, after, lanes_together(item.instruction)) if item.guard else item.step


def _align(offset: int, align: int) -> int:
    return -(-offset // align) * align


def bind_function(
    module: Module, function: Function, *, ring: bool = False, relatives: Relatives | None = None
) -> BoundFunction:
    """Bind the code of `function` and place its parameters, locals and the module's shared variables.

    `ring`: floats are elements of a ring, and `function` has no `relatives`.
    """
    function, unfollowed = with_calls_in_place(module, function)
    visible = {**module.variables, **{v.name: v for v in (*function.variables, *function.params)}}
    spaces = {name: variable.space for name, variable in visible.items()}
    spaces.update(dict.fromkeys((*function.labels, *module.functions), "code"))
    target = next((one for one in module.target if one.startswith("sm_")), "")
    layout = BoundFunction(
        build(function, spaces, target, module.version, ring=ring, relatives=relatives, unfollowed=unfollowed),
        module.variables,
    )
    dynamic: set[str] = set()
    shared = RESERVED
    for variable in (*module.variables.values(), *function.variables):
        if variable.space == "shared" and variable.size == 0:
            dynamic.add(variable.name)
            layout.dynamic_align = max(layout.dynamic_align, variable.align)
        elif variable.space == "shared":
            shared = _align(shared, variable.align)
            layout.offsets[variable.name] = ("shared", shared)
            shared += variable.size
        elif variable.space == "local":
            layout.local_size = _place(layout, variable, layout.local_size)
        else:
            layout.offsets[variable.name] = (variable.space, 0)
    for param in function.params:
        layout.param_size = _place(layout, param, layout.param_size)
    layout.static_shared = shared - RESERVED
    layout.dynamic = frozenset(dynamic)
    layout.of_system = any(name.removeprefix("%") in RESERVED_OFFSETS for name in layout.code.rows.specials)
    return layout


def _place(layout: BoundFunction, variable: Variable, offset: int) -> int:
    offset = _align(offset, variable.align)
    layout.offsets[variable.name] = (variable.space, offset)
    return offset + variable.size
