"""Direct calls: the body of each function replaces its call, so that a machine needs no stack.

Registers, labels and locals of a body get new names at each call; `.param` variables of a call become local variables
(PTX ISA 7.1). A recursive or an indirect call is refused by name. So is a call of a function without a body, except the
system functions (SYSTEM_CALLS), whose calls stay and take registers as operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from backends.vm.faults import Refusals, UnknownInstructionError, counted
from backends.vm.ptx.ast import (
    Address,
    Function,
    Guard,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)

MAX_INSTRUCTIONS: Final = 1_000_000
"""Limit for a kernel with all its calls inlined."""
SYSTEM_CALLS: Final[Mapping[str, int]] = {"vprintf": 2, "__assertfail": 5, "malloc": 1, "free": 1}
"""Functions of CUDA's device runtime that this machine has too (CUDA programming guide, formatted output, assertion,
dynamic global memory allocation), with their number of arguments."""
ANSWERING: Final = ("malloc",)
"""System functions whose result kernels use."""
_WORDS: Final = (1, 2, 4, 8)
"""Argument sizes in bytes that one load can read."""
_LAUNCHES: Final = ("__cudaCDP2", "cudaCDP2", "cudaLaunchDevice", "cudaGetParameterBuffer")
"""Name prefixes of the functions by which kernels launch kernels (CUDA programming guide, CUDA dynamic parallelism)."""
_CALL_SPACE: Final = ("param", "param::func")


class _UnfollowedError(UnknownInstructionError):
    """A call that cannot be followed. All else can be told without it."""


def with_calls_in_place(module: Module, function: Function) -> tuple[Function, Refusals]:
    """`function` with its calls inlined, and a refusal for each call that cannot be followed.

    Such a call is left out. Raises UnknownInstructionError for a kernel that is too long.
    """
    passing = any(one.space == "param" for one in function.variables)
    if not passing and not any(one.parts[0] == "call" for one in function.instructions):
        return function, ()
    names = dict.fromkeys(one.name for one in function.params)
    placed = _Placer(module, function, dict(function.registers))
    placed.body(_Frame(function, "", {}, (function.name,), None), names)
    whole = Function(
        name=function.name,
        is_entry=function.is_entry,
        params=function.params,
        returns=function.returns,
        registers=placed.registers,
        variables=tuple(placed.variables.values()),
        instructions=tuple(placed.instructions),
        labels=placed.labels,
        directives=function.directives,
        branch_targets=placed.branch_targets,
        line=function.line,
    )
    return whole, placed.refused


@dataclass(frozen=True, slots=True)
class _Frame:
    """One body being inlined: the prefix of its names, the operands for its parameters, the functions around it.

    `end`: the label that its `ret` jumps to; None for the kernel itself, whose `ret` ends the thread.
    """

    function: Function
    prefix: str
    parameters: Mapping[str, Operand]
    around: tuple[str, ...]
    end: str | None


@dataclass(slots=True)
class _Placer:
    module: Module
    entry: Function
    registers: dict[str, str]
    variables: dict[str, Variable] = field(default_factory=dict[str, Variable])
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    labels: dict[str, int] = field(default_factory=dict[str, int])
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    refused: list[tuple[int, UnknownInstructionError]] = field(
        default_factory=list[tuple[int, UnknownInstructionError]]
    )
    calls: int = 0

    def body(self, frame: _Frame, kept: Mapping[str, object]) -> None:
        """Append the instructions of a frame. `kept`: names that stay as they are (parameters of the kernel)."""
        function = frame.function
        names = self._declare(frame, kept)
        at = dict[int, list[str]]()
        for label, index in function.labels.items():
            at.setdefault(index, []).append(names[label].name)
        for label, targets in function.branch_targets.items():
            self.branch_targets[frame.prefix + label] = tuple(names[one].name for one in targets)
            names[label] = Symbol(frame.prefix + label)
        called = {one.name for one in function.variables if one.space == "param"} | set(frame.parameters)
        for index, instruction in enumerate(function.instructions):
            self._mark(at.get(index, ()))
            self._one(frame, names, called, instruction)
        self._mark(at.get(len(function.instructions), ()))
        if len(self.instructions) > MAX_INSTRUCTIONS:
            raise UnknownInstructionError(
                f"the kernel {self.entry.name} has more than {MAX_INSTRUCTIONS} instructions with its calls in place"
            )

    def _mark(self, labels: object) -> None:
        for label in labels if isinstance(labels, list) else ():
            self.labels[label] = len(self.instructions)

    def _declare(self, frame: _Frame, kept: Mapping[str, object]) -> dict[str, Symbol]:
        """New names of the labels and variables of a frame."""
        function, prefix = frame.function, frame.prefix
        names = {label: Symbol(prefix + label) for label in function.labels}
        for register, kind in function.registers.items():
            self.registers[prefix + register] = kind
        for one in function.variables:
            # All calls of a function share its static shared variables; each call has its own locals.
            own = prefix if one.space in ("local", "param") else f"{function.name}$" if prefix else ""
            name, space = own + one.name, "local" if one.space == "param" else one.space
            self.variables.setdefault(
                name,
                Variable(name, space, one.type, one.align, one.size, one.initial, one.extern, one.line, one.addresses),
            )
            names[one.name] = Symbol(name)
        names.update({name: Symbol(name) for name in kept})
        return names

    def _one(self, frame: _Frame, names: dict[str, Symbol], called: set[str], instruction: Instruction) -> None:
        parts = instruction.parts
        if parts[0] == "call":
            before = len(self.instructions)
            try:
                self._call(frame, names, instruction)
            except _UnfollowedError as refusal:
                # What was placed for it may go to labels that are not there.
                del self.instructions[before:]
                self.refused.append((instruction.line, refusal))
            return
        guard = instruction.guard and Guard(frame.prefix + instruction.guard.register, instruction.guard.negated)
        if parts[0] == "ret" and frame.end is not None:
            self._append(instruction, ("bra",), (Symbol(frame.end),), guard)
            return
        if parts[0] in ("ld", "st") and any(_based_on(one, called) for one in instruction.operands):
            parts = tuple("local" if part in _CALL_SPACE else part for part in parts)
        operands = tuple(self._renamed(one, frame, names) for one in instruction.operands)
        self._append(instruction, parts, operands, guard)

    def _append(
        self, like: Instruction, parts: tuple[str, ...], operands: tuple[Operand, ...], guard: Guard | None = None
    ) -> None:
        self.instructions.append(Instruction(parts, operands, guard, like.line, like.text))

    def _renamed(self, operand: Operand, frame: _Frame, names: Mapping[str, Symbol]) -> Operand:
        def of(one: Operand) -> Operand:
            return self._renamed(one, frame, names)

        if isinstance(operand, Register):
            return Register(frame.prefix + operand.name) if operand.name in frame.function.registers else operand
        if isinstance(operand, Symbol):
            if isinstance(actual := frame.parameters.get(operand.name), Symbol):
                return Symbol(actual.name, actual.offset + operand.offset)
            return Symbol(names[operand.name].name, operand.offset) if operand.name in names else operand
        if isinstance(operand, Negated):
            return Negated(Register(frame.prefix + operand.operand.name))
        if isinstance(operand, Vector):
            return Vector(tuple(map(of, operand.items)))
        if isinstance(operand, Pair):
            return Pair(of(operand.first), of(operand.second))
        if isinstance(operand, Address):
            base = of(operand.base)
            extra = base.offset if isinstance(base, Symbol) else 0
            base = Symbol(base.name) if isinstance(base, Symbol) else base
            assert isinstance(base, Register | Symbol | Immediate)
            return Address(base, operand.offset + extra, tuple(map(of, operand.coordinates)))
        return operand

    def _call(self, frame: _Frame, names: dict[str, Symbol], call: Instruction) -> None:
        returns, target, given = (self._renamed(one, frame, names) for one in call.operands[:3])
        assert isinstance(returns, Vector)
        assert isinstance(given, Vector)
        if not isinstance(target, Symbol) or len(call.operands) > 3:
            raise self._refused(
                call, "a function through a register (an indirect call); this machine follows calls by name"
            )
        self.calls += 1
        serial = f"call{self.calls}$"
        if call.guard is not None:
            guard = Guard(frame.prefix + call.guard.register, not call.guard.negated)
            self._append(call, ("bra",), (Symbol(f"{serial}skip"),), guard)
        function = self.module.functions.get(target.name)
        if target.name in SYSTEM_CALLS:
            self._system_call(serial, target.name, returns, given, call)
        elif target.name.startswith(_LAUNCHES):
            raise self._refused(call, f"{target.name}, by which a kernel launches another one (dynamic parallelism); "
                                "this machine runs what the host launches")  # fmt: skip
        elif function is None or "extern" in function.directives:
            raise self._refused(call, f"the function {target.name}, which has no body here")
        elif target.name in frame.around:
            raise self._refused(call, f"the function {target.name}, which calls itself; recursion needs a stack")
        else:
            formal, actual = (*function.returns, *function.params), (*returns.items, *given.items)
            if len(formal) != len(actual) or not all(self._slot(one) for one in actual):
                raise self._refused(call, f"{target.name} with other arguments than its {len(formal)} in .param space")
            values = {one.name: value for one, value in zip(formal, actual, strict=True)}
            inner = _Frame(function, serial, values, (*frame.around, target.name), f"{serial}end")
            self.body(inner, {})
            self._mark([f"{serial}end"])
        self._mark([f"{serial}skip"])

    def _system_call(self, serial: str, name: str, returns: Vector, given: Vector, call: Instruction) -> None:
        """Load the arguments into 64-bit registers, call, and store the result."""
        if len(given.items) != SYSTEM_CALLS[name]:
            raise self._refused(
                call, f"{name} with {counted(len(given.items), 'argument')} where it takes {SYSTEM_CALLS[name]}"
            )
        registers = list[Operand]()
        for index, one in enumerate(given.items):
            slot = self._slot(one)
            if slot is None or slot.size not in _WORDS:
                raise self._refused(call, f"{name} with an argument that is no variable of 1, 2, 4 or 8 bytes in "
                                    ".param space")  # fmt: skip
            self.registers[f"{serial}{index}"] = "b64"
            registers.append(Register(f"{serial}{index}"))
            self._append(call, ("ld", "local", f"u{8 * slot.size}"), (registers[-1], Address(Symbol(slot.name))))
        results = list[Operand]()
        if name in ANSWERING:
            self.registers[f"{serial}result"] = "b64"
            results.append(Register(f"{serial}result"))
        self._append(call, call.parts, (Vector(tuple(results)), Symbol(name), Vector(tuple(registers))))
        kind, value, size = ("u64", results[0], 8) if results else ("u32", Immediate(len(registers)), 4)
        for one in returns.items:
            slot = self._slot(one)
            if slot is None or slot.size < size or len(returns.items) > 1:
                raise self._refused(
                    call, f"{name} with a result that is not one variable of {counted(size, 'byte')} in .param space"
                )
            self._append(call, ("st", "local", kind), (Address(Symbol(slot.name)), value))

    def _slot(self, operand: Operand) -> Variable | None:
        """The variable in .param space that an argument or a result of a call names."""
        return self.variables.get(operand.name) if isinstance(operand, Symbol) else None

    def _refused(self, call: Instruction, what: str) -> _UnfollowedError:
        return _UnfollowedError(f"PTX line {call.line}: `{call.text}` calls {what}")


def _based_on(operand: Operand, names: set[str]) -> bool:
    return isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.name in names
