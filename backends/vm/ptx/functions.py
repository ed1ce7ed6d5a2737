"""One function: scopes flattened, operands resolved, instructions in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from lark import Token

from backends.vm.ptx.ast import (
    Address,
    Function,
    Guard,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Variable,
    Vector,
)
from backends.vm.ptx.scopes import Scopes
from backends.vm.ptx.syntax_error import MisreadError
from backends.vm.ptx.tree import (
    RawAddress,
    RawArguments,
    RawBlock,
    RawCall,
    RawDisplaced,
    RawFunction,
    RawInstruction,
    RawOperand,
    RawPair,
    RawPrototype,
    RawRegisters,
    RawStatement,
    RawTargets,
    RawVariable,
    RawVector,
)
from backends.vm.ptx.variables import declare

_SINK = Sink()
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BRANCHES = frozenset(["bra", "brx"])


@lru_cache(maxsize=4096)
def _parts(opcode: str) -> tuple[str, ...]:
    return tuple("".join(opcode.split()).split("."))


def labels_of(block: RawBlock) -> list[Token]:
    """The labels that stand in a scope itself, not in scopes inside it."""
    labels = [each for each in block.statements if isinstance(each, Token)]
    return labels + [each.label for each in block.statements if isinstance(each, RawTargets | RawPrototype)]


class FunctionBuilder:
    """Turns one RawFunction into a Function; used once."""

    def __init__(self, source: str, scopes: Scopes) -> None:
        self._source = source
        self._scopes = scopes
        self._variables: list[Variable] = []
        self._instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._branch_targets: dict[str, tuple[str, ...]] = {}

    def build(self, raw: RawFunction) -> Function:
        """The Function; MisreadError for a name that is declared twice or not at all."""
        returns, params = self._parameters(raw.returns), self._parameters(raw.params)
        directives = {each.name: tuple(int(value) for value in each.values) for each in raw.directives}
        if raw.body is None:
            directives["extern"] = ()
        else:
            self._scopes.declare_labels(labels_of(raw.body))
            self._statements(raw.body)
        return Function(
            name=str(raw.name),
            is_entry=raw.is_entry,
            params=params,
            returns=returns,
            registers=self._scopes.registers,
            variables=tuple(self._variables),
            instructions=tuple(self._instructions),
            labels=self._labels,
            directives=directives,
            branch_targets=self._branch_targets,
            line=raw.name.line or 0,
        )

    def _parameters(self, raws: Sequence[RawVariable]) -> tuple[Variable, ...]:
        variables = []
        for raw in raws:
            (declarator,) = raw.declarators
            name = declarator.name
            if raw.space == "reg":
                self._scopes.declare_register(name, raw.type, raw.vector, None)
                variables.append(declare(raw, declarator, str(name)))
            elif name == "_":
                variables.append(declare(raw, declarator, "_"))
            else:
                variables.append(declare(raw, declarator, self._scopes.declare_symbol(name, str(name))))
        return tuple(variables)

    # ---- statements

    def _statements(self, block: RawBlock) -> None:
        for statement in block.statements:
            if isinstance(statement, RawInstruction):
                self._instruction(statement)
            else:
                self._other(statement)

    def _other(self, statement: RawStatement) -> None:
        if isinstance(statement, Token):
            self._labels[self._symbol(statement, statement[:-1].rstrip()).name] = len(self._instructions)
        elif isinstance(statement, RawBlock):
            with self._scopes.inner(statement.begin, labels_of(statement)):
                self._statements(statement)
        elif isinstance(statement, RawRegisters):
            for name, count in statement.names:
                self._scopes.declare_register(name, statement.type, statement.vector, count)
        elif isinstance(statement, RawVariable):
            for declarator in statement.declarators:
                unique = self._scopes.declare_symbol(declarator.name, str(declarator.name))
                self._variables.append(declare(statement, declarator, unique))
        elif isinstance(statement, RawTargets):
            name = self._symbol(statement.label, statement.label[:-1].rstrip()).name
            self._branch_targets[name] = tuple(self._symbol(each, str(each)).name for each in statement.names)
        elif isinstance(statement, RawCall):
            self._call(statement)

    def _symbol(self, token: Token, name: str) -> Symbol:
        found = self._scopes.find(Token.new_borrow_pos(token.type, name, token))
        if not isinstance(found, Symbol):
            raise MisreadError(f"the label {name} does not exist in this scope or in one around it", token)
        return found

    def _instruction(self, raw: RawInstruction) -> None:
        opcode = raw.opcode
        parts = _parts(opcode)
        operands = tuple([self._operand(each, opcode) for each in raw.operands])
        self._append(raw.guard, opcode, parts, operands, raw.end)

    def _call(self, raw: RawCall) -> None:
        groups = [
            self._arguments(raw.returns, raw.opcode),
            self._name(raw.target, raw.opcode),
            self._arguments(raw.arguments, raw.opcode),
        ]
        if raw.prototype is not None:
            groups.append(self._symbol(raw.prototype, str(raw.prototype)))
        self._append(raw.guard, raw.opcode, _parts(raw.opcode), tuple(groups), raw.end)

    def _arguments(self, raw: RawArguments | None, opcode: Token) -> Vector:
        if raw is None:
            return Vector(())
        return Vector(tuple(self._operand(each, opcode) for each in raw.items))

    def _append(
        self, guard: Token | None, opcode: Token, parts: tuple[str, ...], operands: tuple[Operand, ...], end: int
    ) -> None:
        first = guard if guard is not None else opcode
        text = self._source[first.start_pos : end]
        if "/" in text:
            text = _COMMENT.sub(" ", text)
        self._instructions.append(
            Instruction(
                parts,
                operands,
                self._guard(guard) if guard is not None else None,
                first.line or 0,
                " ".join(text.split()),
            )
        )

    def _guard(self, token: Token) -> Guard:
        spelt = token[1:].lstrip()
        negated = spelt[0] == "!"
        name = spelt[1:].lstrip() if negated else spelt
        return Guard(self._predicate(token, name).name, negated)

    def _predicate(self, token: Token, name: str) -> Register:
        found = self._scopes.find(Token.new_borrow_pos(token.type, name, token))
        if not isinstance(found, Register) or self._scopes.registers.get(found.name) != "pred":
            raise MisreadError(f"{name} stands where a predicate should, but no .reg .pred declares it here", token)
        return found

    # ---- operands

    def _operand(self, raw: RawOperand, opcode: Token | None) -> Operand:
        if isinstance(raw, Token):
            if raw.type == "NEGATED":
                return Negated(self._predicate(raw, raw[1:].lstrip()))
            return self._name(raw, opcode)
        if isinstance(raw, int):
            return Immediate(int(raw))
        if isinstance(raw, Immediate):
            return raw
        if isinstance(raw, RawAddress):
            return self._address(raw, opcode)
        if isinstance(raw, RawVector):
            return Vector(tuple([self._operand(each, opcode) for each in raw.items]))
        if isinstance(raw, RawPair):
            return Pair(self._name(raw.first, opcode), self._name(raw.second, opcode))
        base, offset = self._displaced(raw)
        if not isinstance(base, Symbol):
            raise MisreadError(
                f"{raw.name} is no symbol; outside [ ] only a symbol's address takes an offset", raw.name
            )
        return Symbol(base.name, offset)

    def _name(self, token: Token, opcode: Token | None) -> Operand:
        if token == "_":
            return _SINK
        found = self._scopes.find(token)
        if found is not None:
            return found
        if opcode is not None and _parts(opcode)[0] in _BRANCHES and not token.startswith("%"):
            raise MisreadError(f"the label {token} does not exist in this scope or in one around it", token)
        raise MisreadError(
            f"{token} is not declared: no register, variable, parameter, function or label of that name is seen here",
            token,
        )

    def _displaced(self, raw: RawDisplaced) -> tuple[Operand, int]:
        if isinstance(raw.offset, Immediate):
            raise MisreadError(
                f"the offset of {raw.name} is a floating-point constant; it must be an integer", raw.name
            )
        return self._name(raw.name, None), int(raw.offset)

    def _address(self, raw: RawAddress, opcode: Token | None) -> Address:
        coordinates = tuple([self._operand(item, None) for each in raw.tuples for item in each.items])
        if isinstance(raw.base, int):
            return Address(Immediate(int(raw.base)), 0, coordinates)
        if isinstance(raw.base, Immediate):
            raise MisreadError("an address is a floating-point constant; it must be an integer", opcode)
        if isinstance(raw.base, RawDisplaced):
            base, offset = self._displaced(raw.base)
            token = raw.base.name
        else:
            base, offset, token = self._name(raw.base, None), 0, raw.base
        if not isinstance(base, Register | Symbol):
            raise MisreadError(f"{token} stands in [ ] but is neither a scalar register nor a symbol", token)
        return Address(base, offset, coordinates)
