"""Callbacks, one per grammar rule, that build the unresolved tree while Lark parses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from lark import Token, Transformer

from backends.vm.ptx import literals, plain
from backends.vm.ptx.literals import Constant, ConstantError
from backends.vm.ptx.tree import (
    MisreadError,
    RawAddress,
    RawArguments,
    RawBlock,
    RawCall,
    RawDeclarator,
    RawDirective,
    RawDisplaced,
    RawFunction,
    RawInitial,
    RawInitialAddress,
    RawInitialList,
    RawInstruction,
    RawModule,
    RawOperand,
    RawPair,
    RawPrototype,
    RawRegisters,
    RawStatement,
    RawTargets,
    RawVariable,
    RawVector,
)


class _Align(NamedTuple):
    bytes: Constant


class _Dimension(NamedTuple):
    extent: Constant | None


class _Parameters(NamedTuple):
    items: list[RawVariable]


class _Generic(NamedTuple):
    name: Token


class _Pragma(NamedTuple):
    texts: list[Token]


_DEEPEST = 16
_LINKAGE = "LINKAGE"
_DROPPED = frozenset(["LOC", "FILE", "SECTION", "STRING"])
T = TypeVar("T")


def _all(children: list[object], kind: type[T]) -> list[T]:
    return [child for child in children if isinstance(child, kind)]


def _tokens(children: list[object], *types: str) -> list[Token]:
    return [child for child in children if isinstance(child, Token) and child.type in types]


def _vector_length(children: list[object]) -> int:
    vectors = _tokens(children, "VECTOR")
    return int(vectors[-1][2:]) if vectors else 1


def _variable(children: list[object]) -> RawVariable:
    aligns = _all(children, _Align)
    return RawVariable(
        linkage=tuple(token[1:] for token in _tokens(children, _LINKAGE)),
        space=_tokens(children, "SPACE", "PARAMETER_SPACE")[0][1:],
        align=aligns[0].bytes if aligns else None,
        vector=_vector_length(children),
        type=_tokens(children, "TYPE")[0][1:],
        declarators=_all(children, RawDeclarator),
        pointer=any("".join(token.split()).startswith((".ptr.global", ".ptr.align")) or token == ".ptr"
                    for token in _tokens(children, "POINTER")),
    )  # fmt: skip


def _function(children: list[object], is_entry: bool) -> RawFunction:
    at = children.index(_tokens(children, "NAME")[0])
    blocks = _all(children, RawBlock)
    return RawFunction(
        linkage=tuple(token[1:] for token in _tokens(children, _LINKAGE)),
        is_entry=is_entry,
        name=_tokens(children, "NAME")[0],
        returns=[item for group in _all(children[:at], _Parameters) for item in group.items],
        params=[item for group in _all(children[at:], _Parameters) for item in group.items],
        directives=_all(children, RawDirective),
        body=blocks[0] if blocks else None,
    )


@contextmanager
def _placed(at: object) -> Iterator[None]:
    """Gives a ConstantError the place of the token `at`."""
    try:
        yield
    except ConstantError as error:
        raise MisreadError(str(error), at if isinstance(at, Token) else None) from None


def _depth(begin: object, inner: int) -> int:
    if inner >= _DEEPEST:
        raise MisreadError(f"braces are nested more than {_DEEPEST} deep", begin if isinstance(begin, Token) else None)
    return inner + 1


class TreeBuilder(Transformer[Token, RawModule]):
    """Callbacks named after rules and terminals. Stateless, so that one parser serves all threads."""

    def INT(self, token: Token) -> int:  # noqa: N802 (Lark finds it by the terminal's name)
        with _placed(token):
            return literals.integer(token)

    def FLOAT(self, token: Token) -> Constant:  # noqa: N802
        return literals.real(token)

    # ---- constant expressions

    def unary(self, children: tuple[Token, Constant]) -> Constant:
        operator, value = children
        with _placed(operator):
            return literals.unary(operator, value)

    def parenthesised(self, children: list[Constant]) -> Constant:
        return children[0]

    def folded(self, children: list[Token | Constant]) -> Constant:
        with _placed(children[1]):
            return literals.fold(children)

    def conditional(self, children: tuple[Constant, Token, Constant, Constant]) -> Constant:
        condition, question, chosen, other = children
        with _placed(question):
            return chosen if literals.is_true(condition) else other

    # ---- operands and instructions

    def displaced(self, children: list[Token | Constant]) -> RawDisplaced:
        name, *terms = children
        assert isinstance(name, Token)
        with _placed(name):
            return RawDisplaced(name, literals.fold([0, *terms]))

    def pair(self, children: tuple[Token, Token]) -> RawPair:
        return RawPair(*children)

    def vector(self, children: list[RawOperand]) -> RawVector:
        begin, *items = children
        return RawVector(
            items, _depth(begin, max([each.depth for each in items if isinstance(each, RawVector)], default=0))
        )

    def address(self, children: list[Token | RawDisplaced | Constant | RawVector]) -> RawAddress:
        base, *tuples = children
        assert not isinstance(base, RawVector)
        return RawAddress(base, _all(list(tuples), RawVector))

    def arguments(self, children: list[RawOperand]) -> RawArguments:
        return RawArguments(children)

    def instruction(self, children: list[Token | RawOperand]) -> RawInstruction:
        first, end = children[0], children[-1]
        assert isinstance(first, Token)
        assert isinstance(end, Token)
        place = first.line or 0, first.start_pos or 0, end.end_pos or 0
        if first.type == "GUARD":
            opcode = children[1]
            assert isinstance(opcode, Token)
            return RawInstruction(first, opcode, children[2:-1], *place)
        return RawInstruction(None, first, children[1:-1], *place)

    def PLAIN(self, token: Token) -> list[RawStatement]:  # noqa: N802
        return plain.statements(token)

    def call(self, children: list[object]) -> RawCall:
        guards, (opcode,) = _tokens(children, "GUARD"), _tokens(children, "CALL")
        target, *prototypes = _tokens(children, "OPERAND_NAME")
        at, first = children.index(target), (guards or [opcode])[0]
        returns, arguments = _all(children[:at], RawArguments), _all(children[at:], RawArguments)
        return RawCall(
            guard=guards[0] if guards else None,
            opcode=opcode,
            returns=returns[0] if returns else None,
            target=target,
            arguments=arguments[0] if arguments else None,
            prototype=prototypes[0] if prototypes else None,
            line=first.line or 0,
            start=first.start_pos or 0,
            end=_tokens(children, "END")[0].end_pos or 0,
        )

    # ---- declarations

    def align(self, children: list[Constant]) -> _Align:
        return _Align(children[0])

    def dimension(self, children: list[Constant]) -> _Dimension:
        return _Dimension(children[0] if children else None)

    def generic(self, children: list[Token]) -> _Generic:
        return _Generic(children[-1])

    def initial_address(self, children: list[object]) -> RawInitialAddress:
        first, *rest = children
        name = first.name if isinstance(first, _Generic) else first
        assert isinstance(name, Token)
        with _placed(name):
            offset = literals.fold([0, *rest]) if rest else 0  # pyright: ignore[reportArgumentType]
        return RawInitialAddress(name, isinstance(first, _Generic), offset)

    def initial_list(self, children: list[Token | RawInitial]) -> RawInitialList:
        begin, *items = children
        depth = _depth(begin, max([each.depth for each in items if isinstance(each, RawInitialList)], default=0))
        return RawInitialList(items, depth)  # pyright: ignore[reportArgumentType]

    def declarator(self, children: list[object]) -> RawDeclarator:
        name, *rest = children
        assert isinstance(name, Token)
        dimensions = _all(rest, _Dimension)
        initial = rest[len(dimensions) :]
        return RawDeclarator(name, [each.extent for each in dimensions], initial[0] if initial else None)  # pyright: ignore[reportArgumentType]

    def variable(self, children: list[object]) -> RawVariable:
        return _variable(children)

    def local_variable(self, children: list[object]) -> RawVariable:
        return _variable(children)

    def parameter(self, children: list[object]) -> RawVariable:
        return _variable(children)

    def parameters(self, children: list[RawVariable]) -> _Parameters:
        return _Parameters(children)

    def register_name(self, children: list[Token | int]) -> tuple[Token, int | None]:
        name = children[0]
        assert isinstance(name, Token)
        return name, children[1] if len(children) > 1 else None  # pyright: ignore[reportReturnType]

    def registers(self, children: list[object]) -> RawRegisters:
        (type_,) = _tokens(children, "TYPE")
        return RawRegisters(_vector_length(children), type_[1:], _all(children, tuple))

    # ---- functions and modules

    def directive(self, children: list[Token | Constant]) -> RawDirective:
        name, *values = children
        return RawDirective(str(name)[1:], _all(list(values), int))

    def pragma(self, children: list[Token]) -> _Pragma:
        return _Pragma(children)

    def branch_targets(self, children: list[Token]) -> RawTargets:
        return RawTargets(children[0], children[2:])

    def call_prototype(self, children: list[object]) -> RawPrototype:
        (label,) = _tokens(children, "LABEL")
        return RawPrototype(label)

    def block(self, children: list[RawStatement | list[RawStatement]]) -> RawBlock:
        begin, *found = children
        assert isinstance(begin, Token)
        statements: list[RawStatement] = []
        for each in found:
            if isinstance(each, list):
                statements += each
            elif not _is_dropped(each):
                statements.append(each)
        return RawBlock(begin, statements)

    def entry(self, children: list[object]) -> RawFunction:
        return _function(children, is_entry=True)

    def func(self, children: list[object]) -> RawFunction:
        return _function(children, is_entry=False)

    def module(self, children: list[object]) -> RawModule:
        (version,) = _tokens(children, "VERSION_NUMBER")
        sizes = _tokens(children, "ADDRESS_SIZE")
        return RawModule(
            version=version,
            target=_tokens(children, "NAME"),
            address_size=sizes[0] if sizes else None,
            items=[child for child in children if isinstance(child, RawVariable | RawFunction)],
        )


def _is_dropped(child: object) -> bool:
    return isinstance(child, _Pragma) or (isinstance(child, Token) and child.type in _DROPPED)
