"""Reads each run of plain statements as one token: operands are names, numbers, vectors of them, or addresses.

Lark takes some 50 us to read a statement token by token; this takes 5. The parts of a statement keep no positions, so
backends.vm.ptx.parser reads text with an error again without this. Rare statements are left to the grammar.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from lark import Token

from backends.vm.ptx import literals
from backends.vm.ptx.literals import Constant
from backends.vm.ptx.tree import RawAddress, RawDisplaced, RawInstruction, RawOperand, RawPair, RawVector

_NAME = r"(?:[A-Za-z_]|[%$][A-Za-z0-9_$])[A-Za-z0-9_$]*"
_OPERAND_NAME = rf"{_NAME}(?:\.[A-Za-z]+[0-7]{{0,4}})?"
_DECIMAL = r"-?(?:0|[1-9][0-9]{0,17})"
_NUMBER = rf"0[xX][0-9a-fA-F]{{1,16}}|0[fF][0-9a-fA-F]{{8}}|0[dD][0-9a-fA-F]{{16}}|{_DECIMAL}"
_ONE = rf"(?:{_OPERAND_NAME}|{_NUMBER})"
_COMMA = r"[ \t]*,[ \t]*"
_ADDRESS = rf"\[[ \t]*{_OPERAND_NAME}(?:\+{_DECIMAL})?[ \t]*\]"
_PAIR = rf"{_OPERAND_NAME}\|{_OPERAND_NAME}"
_OPERAND = rf"(?:{_PAIR}|{_ONE}|{_ADDRESS}|\{{[ \t]*{_ONE}(?:{_COMMA}{_ONE})*[ \t]*\}})"
_GUARD = rf"@!?{_NAME}"
# The grammar has a rule of its own for calls.
_OPCODE = r"(?!call(?:\.uni)?(?![A-Za-z0-9_$.:]))[A-Za-z][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*)*"
_STATEMENT = rf"(?:{_GUARD}[ \t]+)?{_OPCODE}(?:[ \t]+{_OPERAND}(?:{_COMMA}{_OPERAND})*)?[ \t]*;[ \t\r\n]*"

EXTENSION: Final = f"\n%extend _statement: PLAIN\nPLAIN.9: /(?>{_STATEMENT})+/\n"
"""Grammar rules that this module adds."""
_EACH = re.compile(rf"(?:({_GUARD})[ \t]+)?({_OPCODE})([^;]*);[ \t\r\n]*")
_OPERANDS = re.compile(_OPERAND)
_PARTS = re.compile(_ONE)
_BEGINS_NUMBER = frozenset("-0123456789")
_KEPT = 16384
"""Cached operands, opcodes and guards. A large program has some 5,000."""


def instructions(run: Token) -> list[RawInstruction]:
    """The instructions in a PLAIN token."""
    found: list[RawInstruction] = []
    start, line, counted = run.start_pos or 0, run.line or 0, 0
    for each in _EACH.finditer(run):
        guard, opcode, operands = each.groups()
        line += run.count("\n", counted, each.start())
        counted = each.start()
        found.append(
            RawInstruction(
                guard=None if guard is None else _token("GUARD", guard),
                opcode=_token("OPCODE", opcode),
                operands=[operand(text) for text in _OPERANDS.findall(operands)],
                line=line,
                start=start + counted,
                end=start + each.end(),
            )
        )
    return found


@lru_cache(maxsize=_KEPT)
def _token(kind: str, text: str) -> Token:
    return Token(kind, text)


@lru_cache(maxsize=_KEPT)
def operand(text: str) -> RawOperand:
    """A name, a pair of them, a number, a vector of names and numbers, or an address."""
    if text[0] == "{":
        return RawVector([operand(each) for each in _PARTS.findall(text)], 1)
    if text[0] == "[":
        base, _, offset = text[1:-1].strip(" \t").partition("+")
        name = Token("OPERAND_NAME", base)
        return RawAddress(RawDisplaced(name, literals.fold([0, "+", _number(offset)])) if offset else name, [])
    if text[0] in _BEGINS_NUMBER:
        return _number(text)
    first, _, second = text.partition("|")
    name = Token("OPERAND_NAME", first)
    return RawPair(name, Token("OPERAND_NAME", second)) if second else name


def _number(text: str) -> Constant:
    if text[:2].lower() in ("0f", "0d"):
        return literals.real(text)
    return literals.unary("-", literals.integer(text[1:])) if text[0] == "-" else literals.integer(text)
