"""A parsed module as JSON text and back, so that it can be kept on disk without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypedDict

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
    Sink,
    Symbol,
    Variable,
    Vector,
)
from backends.vm.ptx.variables import AddressedVariable, InitialAddress, with_addresses

Json: TypeAlias = "str | int | bool | list[Json] | dict[str, Json] | None"

InstructionRecord: TypeAlias = "tuple[str, list[Json], tuple[str, bool] | None, int, str]"


class VariableRecord(TypedDict):
    """A Variable; `initial` in hexadecimal, `addresses` as (offset, symbol, addend, generic)."""

    name: str
    space: str
    type: str
    align: int
    size: int
    initial: str | None
    extern: bool
    line: int
    addresses: list[tuple[int, str, int, bool]]


class FunctionRecord(TypedDict):
    """A Function, field by field."""

    name: str
    is_entry: bool
    params: list[VariableRecord]
    returns: list[VariableRecord]
    registers: dict[str, str]
    variables: list[VariableRecord]
    instructions: list[InstructionRecord]
    labels: dict[str, int]
    directives: dict[str, list[int]]
    branch_targets: dict[str, list[str]]
    line: int


_SINK = Sink()


def encode(module: Module) -> str:
    """Compact JSON text; `decode` gives an equal module back."""
    functions = [_function_out(each) for each in module.functions.values()]
    variables = [_variable_out(each) for each in module.variables.values()]
    head = (module.version, module.target, module.address_size)
    return json.dumps([*head, variables, functions], separators=(",", ":"))


def decode(text: str) -> Module:
    """The module that `encode` wrote. ValueError, KeyError, TypeError or IndexError for anything else."""
    version, target, address_size, variables, functions = json.loads(text)
    return Module(
        version=(version[0], version[1]),
        target=tuple(target),
        address_size=address_size,
        variables={each.name: each for each in map(_variable_in, variables)},
        functions={each.name: each for each in map(_function_in, functions)},
    )


# ---- out


def _operand_out(operand: Operand) -> Json:
    match operand:
        case Register(name):
            return name
        case Immediate(value, "int"):
            return value
        case Immediate(value, kind):
            return ["i", value, kind]
        case Symbol(name, offset):
            return ["s", name, offset]
        case Sink():
            return None
        case Negated(register):
            return ["n", register.name]
        case Vector(items):
            return ["v", *map(_operand_out, items)]
        case Pair(first, second):
            return ["p", _operand_out(first), _operand_out(second)]
        case Address(base, offset, coordinates):
            return ["a", _operand_out(base), offset, *map(_operand_out, coordinates)]


def _instruction_out(each: Instruction) -> InstructionRecord:
    guard = None if each.guard is None else (each.guard.register, each.guard.negated)
    return ".".join(each.parts), [_operand_out(operand) for operand in each.operands], guard, each.line, each.text


def _variable_out(each: Variable) -> VariableRecord:
    addresses = each.addresses if isinstance(each, AddressedVariable) else ()
    return {
        "name": each.name,
        "space": each.space,
        "type": each.type,
        "align": each.align,
        "size": each.size,
        "initial": None if each.initial is None else each.initial.hex(),
        "extern": each.extern,
        "line": each.line,
        "addresses": [(at.offset, at.symbol, at.addend, at.generic) for at in addresses],
    }


def _function_out(each: Function) -> FunctionRecord:
    return {
        "name": each.name,
        "is_entry": each.is_entry,
        "params": [_variable_out(variable) for variable in each.params],
        "returns": [_variable_out(variable) for variable in each.returns],
        "registers": dict(each.registers),
        "variables": [_variable_out(variable) for variable in each.variables],
        "instructions": [_instruction_out(instruction) for instruction in each.instructions],
        "labels": dict(each.labels),
        "directives": {name: list(values) for name, values in each.directives.items()},
        "branch_targets": {name: list(labels) for name, labels in each.branch_targets.items()},
        "line": each.line,
    }


# ---- in


class _OperandReader:
    """Reads operands; equal registers are one object, as most operands are."""

    def __init__(self) -> None:
        self._registers: dict[str, Register] = {}
        self._readers: Mapping[str, Callable[..., Operand]] = {
            "i": Immediate,
            "s": Symbol,
            "n": lambda name: Negated(self._register(name)),
            "v": lambda *items: Vector(tuple([self.read(item) for item in items])),
            "p": lambda first, second: Pair(self.read(first), self.read(second)),
            "a": self._address,
        }

    def read(self, raw: Json) -> Operand:
        if isinstance(raw, str):
            return self._register(raw)
        if isinstance(raw, int):
            return Immediate(raw)
        if raw is None:
            return _SINK
        if not isinstance(raw, list) or not isinstance(raw[0], str):
            raise TypeError("not an operand")
        return self._readers[raw[0]](*raw[1:])

    def _register(self, name: str) -> Register:
        register = self._registers.get(name)
        if register is None:
            register = self._registers[name] = Register(name)
        return register

    def _address(self, base: Json, offset: int, *coordinates: Json) -> Address:
        read = self.read(base)
        if not isinstance(read, Register | Symbol | Immediate):
            raise TypeError("not an address")
        return Address(read, offset, tuple([self.read(each) for each in coordinates]))


def _variable_in(raw: VariableRecord) -> Variable:
    initial = None if raw["initial"] is None else bytes.fromhex(raw["initial"])
    plain = Variable(
        raw["name"], raw["space"], raw["type"], raw["align"], raw["size"], initial, raw["extern"], raw["line"]
    )  # fmt: skip
    return with_addresses(plain, [InitialAddress(*each) for each in raw["addresses"]])


def _function_in(raw: FunctionRecord) -> Function:
    read = _OperandReader().read
    parts: dict[str, tuple[str, ...]] = {}
    instructions: list[Instruction] = []
    for opcode, operands, guard, line, text in raw["instructions"]:
        if opcode not in parts:
            parts[opcode] = tuple(opcode.split("."))
        placed = None if guard is None else Guard(guard[0], guard[1])
        instructions.append(Instruction(parts[opcode], tuple([read(each) for each in operands]), placed, line, text))
    return Function(
        name=raw["name"],
        is_entry=raw["is_entry"],
        params=tuple(map(_variable_in, raw["params"])),
        returns=tuple(map(_variable_in, raw["returns"])),
        registers=raw["registers"],
        variables=tuple(map(_variable_in, raw["variables"])),
        instructions=tuple(instructions),
        labels=raw["labels"],
        directives={key: tuple(values) for key, values in raw["directives"].items()},
        branch_targets={key: tuple(names) for key, names in raw["branch_targets"].items()},
        line=raw["line"],
    )
