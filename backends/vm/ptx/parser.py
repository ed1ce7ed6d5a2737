"""PTX text to syntax tree: `parse`. The grammar is ptx.lark. Names are resolved once the whole file is read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources

from lark import Lark, Token, UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from backends.vm.faults import MOST_TOLD
from backends.vm.ptx import plain
from backends.vm.ptx.ast import Function, Module, Variable
from backends.vm.ptx.comments import blanked
from backends.vm.ptx.functions import FunctionBuilder, Scopes, check_unreserved, is_special
from backends.vm.ptx.recovery import without_statement
from backends.vm.ptx.tree import MisreadError, PtxSyntaxError, RawFunction, RawModule, RawVariable
from backends.vm.ptx.tree_builder import TreeBuilder
from backends.vm.ptx.unclosed import unclosed
from backends.vm.ptx.variables import declare

__all__ = ["PtxSyntaxError", "parse"]

_NAMED = {
    "OPCODE": "an instruction",
    "CALL": "a call",
    "LABEL": "a label",
    "GUARD": "a guard such as @%p",
    "NAME": "a name",
    "OPERAND_NAME": "a register or symbol",
    "INT": "an integer",
    "FLOAT": "a floating-point constant",
    "END": "';'",
    "SEMICOLON": "';'",
    "QUESTION": "'?'",
    "COMMA": "','",
    "BEGIN": "'{'",
    "RBRACE": "'}'",
    "LSQB": "'['",
    "RSQB": "']'",
    "LPAR": "'('",
    "RPAR": "')'",
    "VBAR": "'|'",
    "MORETHAN": "'>'",
    "LESSTHAN": "'<'",
    "EQUAL": "'='",
    "BINARY": "an operator",
    "SIGN": "'+' or '-'",
    "UNARY": "'!' or '~'",
    "NEGATED": "a negated predicate",
    "TYPE": "a type such as .b32",
    "SPACE": "a state space such as .shared",
    "PARAMETER_SPACE": "'.param'",
    "LINKAGE": "a linkage such as .visible",
    "DIRECTIVE": "a directive such as .reqntid",
    "VERSION_NUMBER": "a version such as 8.6",
    "ADDRESS_SIZE": "64",
    "VECTOR": "a vector length such as .v4",
    "STRING": "a string",
    "SECTION": "'.section'",
    "LOC": "'.loc'",
    "FILE": "'.file'",
    "$END": "the end",
    "POINTER": "'.ptr'",
    "GENERIC": "'generic('",
    "ATTRIBUTE": "'.attribute'",
    "BRANCH_TARGETS": "'.branchtargets'",
}
ADDRESS_SIZE = 64
NEWEST_MAJOR = 9
LAST_MINOR = {1: 5, 2: 3, 3: 2, 4: 3, 5: 0, 6: 5, 7: 8, 8: 8}
"""The last PTX version of each major one that has ended (PTX ISA 13)."""
_CONSTANT = {_NAMED[each] for each in ("INT", "FLOAT", "UNARY", "SIGN", "LPAR")}


@cache
def grammar(extension: str = "") -> Lark:
    """The parser of ptx.lark plus `extension`. It builds the tree with unresolved names."""
    text = resources.files("backends.vm.ptx").joinpath("ptx.lark").read_text(encoding="utf-8")
    return Lark(
        text + extension,
        start="module",
        parser="lalr",
        lexer="contextual",
        transformer=TreeBuilder(),
        maybe_placeholders=False,
    )


def parse(text: str, name: str = "<ptx>") -> Module:
    """The module in `text`, with scopes flattened and every name resolved.

    Errors quote `name` as the file. PtxSyntaxError, a sentence with line and column, for text outside the grammar and
    for a name declared twice or not at all. It is the first one, and has all others that do not follow from another.
    """
    wrong, left = list[PtxSyntaxError](), text
    while True:
        try:
            rest = _read(left, name)
            break
        except PtxSyntaxError as error:
            wrong += [error, *error.others]
            rest = error.rest
            known = rest is not None or error.others or len(wrong) >= MOST_TOLD
            skipped = None if known else without_statement(left, error.line, error.column)
            if skipped is None:
                break
            left = skipped
    if not wrong:
        assert rest is not None
        return rest
    first, *others = sorted(wrong, key=lambda one: (one.line or 0, one.column or 0))
    first.others, first.rest = tuple(others), rest
    raise first


def _read(text: str, name: str) -> Module:
    """The module in `text`. PtxSyntaxError for what is wrong first, with all else if the text is in the grammar."""
    # PLAIN tokens carry no positions. Text with an error inside one is read again token by token to find the place.
    try:
        return module_of(text, grammar(plain.EXTENSION))
    except UnexpectedInput as error:
        if not (isinstance(error, UnexpectedToken) and error.token.type == plain.TERMINAL):
            raise _outside_grammar(error, text, name) from None
    except MisreadError:
        pass
    try:
        return module_of(text, grammar())
    except UnexpectedInput as error:
        raise _outside_grammar(error, text, name) from None
    except MisreadError as problem:
        raise problem.of_file(name) from None


def module_of(text: str, read: Lark) -> Module:
    """The module in `text`; UnexpectedInput or MisreadError for text that is not a module."""
    raw = read.parse(text)
    assert isinstance(raw, RawModule)
    return _ModuleBuilder(text).build(raw)


class _ModuleBuilder:
    def __init__(self, text: str) -> None:
        self._text = text
        self._names: set[str] = set()
        self._variables: dict[str, Variable] = {}
        self._functions: dict[str, Function] = {}
        self._wrong: list[MisreadError] = []

    def build(self, raw: RawModule) -> Module:
        """The Module. MisreadError for the first instruction that is wrong, with all later ones."""
        try:
            module = self._module(raw)
        except MisreadError as last:
            first, *others = [*self._wrong, last]
            raise first.with_others(others, None) from None
        if self._wrong:
            first, *others = self._wrong
            raise first.with_others(others, module)
        return module

    def _module(self, raw: RawModule) -> Module:
        for item in raw.items:
            if isinstance(item, RawVariable):
                self._declare_variables(item)
            else:
                self._declare_function(item)
        major, minor = map(int, raw.version.split("."))
        if not 1 <= major <= NEWEST_MAJOR or minor > LAST_MINOR.get(major, minor):
            last = f"the last {major}.x is {major}.{LAST_MINOR[major]}" if major in LAST_MINOR else "the latest is 9.x"
            raise MisreadError(f".version is {raw.version}; PTX has no such version, {last}", raw.version)
        if raw.address_size is not None and int(raw.address_size) != ADDRESS_SIZE:
            raise MisreadError(
                f".address_size is {raw.address_size}; sm_90 and later have addresses of {ADDRESS_SIZE} bits only",
                raw.address_size,
            )
        return Module(
            version=(major, minor),
            target=tuple(str(each) for each in raw.target),
            address_size=ADDRESS_SIZE,
            variables=self._variables,
            functions=self._functions,
        )

    def _declare_variables(self, raw: RawVariable) -> None:
        for declarator in raw.declarators:
            name = str(declarator.name)
            _check_of_module(declarator.name)
            known = self._variables.get(name)
            if name in self._functions:
                raise MisreadError(f"{name} is declared twice, first as a function", declarator.name)
            if known is not None and not known.extern:
                raise MisreadError(
                    f"{name} is declared twice; it is first declared in line {known.line}", declarator.name
                )
            self._variables[name] = declare(raw, declarator, name)
            self._names.add(name)

    def _declare_function(self, raw: RawFunction) -> None:
        name = str(raw.name)
        _check_of_module(raw.name)
        known = self._functions.get(name)
        defined = known is not None and "extern" not in known.directives
        if name in self._variables or (defined and raw.body is not None):
            raise MisreadError(f"{name} is declared twice; a function has one body and a name of its own", raw.name)
        self._names.add(name)
        if not defined:
            self._functions[name] = FunctionBuilder(self._text, Scopes(self._names), self._wrong).build(raw)


def _check_of_module(name: Token) -> None:
    """MisreadError for a name that only a function may declare anew, or nobody."""
    check_unreserved(name, str(name))
    if is_special(name):
        raise MisreadError(f"{name} is declared in the module, but it is a special register; choose another name", name)


def _outside_grammar(error: UnexpectedInput, text: str, name: str) -> PtxSyntaxError:
    told = _unexpected(error, text, name)
    told.outside_grammar = True
    return told


def _unexpected(error: UnexpectedInput, text: str, name: str) -> PtxSyntaxError:
    line: int | None = error.line
    column: int | None = error.column
    if isinstance(error, UnexpectedToken):
        token: Token = error.token
        ended = token.type == "$END"
        expected = error.accepts or error.expected
        seen = "the text ends" if ended else f"{_shown(str(token))} stands"
        if ended:
            line, column = text.count("\n") + 1, len(text) - (text.rfind("\n") + 1) + 1
    elif isinstance(error, UnexpectedCharacters):
        at = error.pos_in_stream or 0
        seen = f"{_shown(text[at : at + 20].splitlines()[0] or text[at])} stands"
        expected = error.allowed or ()
    else:
        seen, expected = "the text ends", ()
    if text.startswith("/*", error.pos_in_stream or 0):
        return PtxSyntaxError("a comment begins here and has no end", name, line, column)
    place = len(text) if seen == "the text ends" else error.pos_in_stream or 0
    bracket, owner = unclosed(text, place, expected)
    if bracket:
        return PtxSyntaxError(
            f"{seen} where {bracket!r} should; the {bracket!r} of {owner} is missing", name, line, column
        )
    open_line = _unended(text, line or 0, column or 0) if "END" in expected else 0
    ends = f"; line {open_line} ends without a ';'" if open_line else ""
    return PtxSyntaxError(f"{seen} where {_one_of(expected)} should{ends}", name, line, column)


def _unended(text: str, line: int, column: int) -> int:
    """The line above with the end of an unfinished statement, if the place (from 1) begins a line of code; else 0."""
    lines = blanked(text).split("\n")[:line]
    if not lines or lines[-1][: column - 1].strip():
        return 0
    return next((number for number in range(line - 1, 0, -1) if lines[number - 1].strip()), 0)


def _shown(seen: str) -> str:
    return ascii(seen if len(seen) <= 40 else seen[:40] + "...")


def _one_of(expected: Iterable[str]) -> str:
    names = {_spelling(each) for each in expected if each != plain.TERMINAL}
    if names >= _CONSTANT:
        names = names - _CONSTANT | {"a constant"}
    ordered = sorted(names)
    if not names:
        return "something else"
    return ordered[0] if len(ordered) == 1 else ", ".join(ordered[:-1]) + " or " + ordered[-1]


def _spelling(terminal: str) -> str:
    if terminal in _NAMED:
        return _NAMED[terminal]
    pattern = next((each.pattern for each in grammar(plain.EXTENSION).terminals if each.name == terminal), None)
    if pattern is not None and pattern.type == "str":
        return f"'{pattern.value}'"
    return "." + terminal.lower()
