"""Reads each run of plain statements as one token.

A plain statement is a label, a declaration of registers or of a variable, or an instruction whose operands are names,
numbers, vectors of them, or addresses. Lark takes some 50 us to read a statement token by token; this takes 3. Its
parts keep no positions, so backends.vm.ptx.parser reads text with an error in one again without this. Rare
statements are left to the grammar.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from lark import Token

from backends.vm.ptx import literals
from backends.vm.ptx.literals import Constant
from backends.vm.ptx.tree import (
    RawAddress,
    RawDeclarator,
    RawDisplaced,
    RawInstruction,
    RawOperand,
    RawPair,
    RawRegisters,
    RawStatement,
    RawVariable,
    RawVector,
)

_NAME = r"(?:[A-Za-z_]|[%$][A-Za-z0-9_$])[A-Za-z0-9_$]*+"
_OPERAND_NAME = rf"{_NAME}(?:\.[A-Za-z]+[0-7]{{0,4}})?"
_COUNT = r"(?:0|[1-9][0-9]{0,17})"
_NUMBER = rf"0[xX][0-9a-fA-F]{{1,16}}|0[fF][0-9a-fA-F]{{8}}|0[dD][0-9a-fA-F]{{16}}|-?{_COUNT}"
_ONE = rf"(?:{_OPERAND_NAME}|{_NUMBER})"
_COMMA = r"[ \t]*,[ \t]*"
_VECTOR = rf"\{{[ \t]*{_ONE}(?:{_COMMA}{_ONE})*[ \t]*\}}"
_DISPLACED = rf"{_OPERAND_NAME}(?:[ \t]*[+-][ \t]*-?{_COUNT})?"
_ADDRESS = rf"\[[ \t]*{_DISPLACED}(?:{_COMMA}{_VECTOR})*[ \t]*\]"
_OPERAND = rf"(?:{_OPERAND_NAME}(?:\|{_OPERAND_NAME})?|{_NUMBER}|{_ADDRESS}|{_VECTOR}|!{_NAME})"
_GUARD = rf"@!?{_NAME}"
# The grammar has a rule of its own for calls.
_OPCODE = r"(?!call(?:\.uni)?(?![A-Za-z0-9_$.:]))[A-Za-z][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*)*"
_INSTRUCTION = rf"(?:{_GUARD}[ \t]+)?{_OPCODE}(?:[ \t]+{_OPERAND}(?:{_COMMA}{_OPERAND})*)?[ \t]*;"
_TYPE = r"\.(?:pred|[bus]8|[busf]16|[busf]32|[busf]64|b128|f16x2|bf16|bf16x2)"
_REGISTER = rf"{_NAME}(?:<{_COUNT}>)?"
_REGISTERS = rf"\.reg[ \t]+(?:\.v[248][ \t]+)?{_TYPE}[ \t]+{_REGISTER}(?:{_COMMA}{_REGISTER})*[ \t]*;"
_ALIGN = rf"\.align[ \t]+{_COUNT}"
_VARIABLE = rf"\.(?:shared|local|param)[ \t]+(?:{_ALIGN}[ \t]+)?{_TYPE}[ \t]+{_NAME}(?:\[{_COUNT}\])?[ \t]*;"
# No possessive groups: after one, Python 3.11.2 lets a negative lookahead pass that fails.
_GAP = r"[ \t\r\n]*+(?://[^\n]*+\n[ \t\r\n]*+)*"
_LABEL = rf"{_NAME}:(?!:)"
# A label before anything but an instruction is left to the grammar: it may name a list of branch targets. So are many
# labels in a row, since each of them would be tried with all that follow.
_STATEMENT = rf"(?:(?:{_LABEL}{_GAP}){{0,8}}{_INSTRUCTION}|{_REGISTERS}|{_VARIABLE}){_GAP}"
_RUN = f"(?>{_STATEMENT})+".replace("/", r"\/")

TERMINAL: Final = "PLAIN"
"""The terminal that reads a run of plain statements. It is accepted where an instruction is."""
EXTENSION: Final = f"\n%extend _statement: {TERMINAL}\n{TERMINAL}.9: /{_RUN}/\n"
"""Grammar rules that this module adds."""
_EACH = re.compile(rf"({_LABEL}|[^;]*+;)({_GAP})")
_PARTS = re.compile(rf"(?:({_GUARD})[ \t]+)?({_OPCODE})([^;]*)")
_OPERANDS = re.compile(_OPERAND)
_ONES = re.compile(_ONE)
_VECTORS = re.compile(_VECTOR)
_OFFSET = re.compile(rf"({_OPERAND_NAME})[ \t]*(?:([+-])[ \t]*(-?{_COUNT}))?")
_DECLARED = re.compile(
    rf"\.(\w+)[ \t]+(?:\.align[ \t]+({_COUNT})[ \t]+)?(?:\.v([248])[ \t]+)?\.(\w+)[ \t]+(.*?)[ \t]*;", re.DOTALL
)
_NAMED = re.compile(rf"({_NAME})(?:[<\[]({_COUNT})[>\]])?")
_BEGINS_NUMBER = frozenset("-0123456789")
_KEPT = 16384
"""Cached statements, operands, opcodes and guards. A large program has some 5,000."""


class _Plain(NamedTuple):
    guard: Token | None
    opcode: Token
    operands: tuple[RawOperand, ...]


def statements(run: Token) -> list[RawStatement]:
    """The statements in a PLAIN token."""
    found: list[RawStatement] = []
    start, line = run.start_pos or 0, run.line or 0
    for each in _EACH.finditer(run):
        text, gap = each.groups()
        one = statement(text)
        if isinstance(one, _Plain):
            found.append(RawInstruction(*one, line, start + each.start(), start + each.end(1)))
        else:
            found.append(_in_line(line, one) if isinstance(one, RawVariable) else one)
        line += gap.count("\n")
    return found


def _in_line(line: int, variable: RawVariable) -> RawVariable:
    """`variable`, declared in that line. Only variables remember it."""
    (one,) = variable.declarators
    return variable._replace(declarators=[one._replace(name=Token("NAME", one.name, line=line))])


@lru_cache(maxsize=_KEPT)
def statement(text: str) -> _Plain | RawRegisters | RawVariable | Token:
    """The parts of a plain statement; of a label, itself."""
    if text[0] == ".":
        return _declaration(text)
    if text[-1] == ":":
        return Token("LABEL", text)
    parts = _PARTS.match(text)
    assert parts is not None
    guard, opcode, operands = parts.groups()
    return _Plain(
        None if guard is None else _token("GUARD", guard),
        _token("OPCODE", opcode),
        tuple(map(operand, _OPERANDS.findall(operands))),
    )


def _declaration(text: str) -> RawRegisters | RawVariable:
    parts = _DECLARED.match(text)
    assert parts is not None
    space, align, vector, kind, names = parts.groups()
    declared = [(Token("NAME", name), int(count) if count else None) for name, count in _NAMED.findall(names)]
    if space == "reg":
        return RawRegisters(int(vector or 1), kind, declared)
    ((name, extent),) = declared
    declarator = RawDeclarator(name, [] if extent is None else [extent], None)
    return RawVariable((), space, None if align is None else int(align), 1, kind, [declarator])


@lru_cache(maxsize=_KEPT)
def _token(kind: str, text: str) -> Token:
    return Token(kind, text)


@lru_cache(maxsize=_KEPT)
def operand(text: str) -> RawOperand:
    """A name, a pair of them, a number, a vector of names and numbers, an address, or a negated predicate."""
    if text[0] == "{":
        return _vector(text)
    if text[0] == "[":
        return _address(text)
    if text[0] == "!":
        return Token("NEGATED", text)
    if text[0] in _BEGINS_NUMBER:
        return _number(text)
    first, _, second = text.partition("|")
    name = Token("OPERAND_NAME", first)
    return RawPair(name, Token("OPERAND_NAME", second)) if second else name


def _vector(text: str) -> RawVector:
    return RawVector([operand(each) for each in _ONES.findall(text)], 1)


def _address(text: str) -> RawAddress:
    parts = _OFFSET.match(text[1:].lstrip(" \t"))
    assert parts is not None
    base, sign, offset = parts.groups()
    name = Token("OPERAND_NAME", base)
    whole = RawDisplaced(name, literals.fold([0, sign, _number(offset)])) if sign else name
    return RawAddress(whole, [_vector(each) for each in _VECTORS.findall(text)])


def _number(text: str) -> Constant:
    if text[:2].lower() in ("0f", "0d"):
        return literals.real(text)
    return literals.unary("-", literals.integer(text[1:])) if text[0] == "-" else literals.integer(text)
