"""YAML as plain values, with the line of every key and item. The harness reads every YAML file that it judges by here.

It accepts the part of YAML 1.1 that everyone reads the same way: mappings with distinct text keys, sequences, text,
decimal numbers, true, false, null. It refuses tags, aliases, merge keys, `yes`/`on`, octal and base-60 numbers.

ruamel.yaml 0.19 keeps lines too but would not shorten this file, most of which consists of refusals: it reads 010 as
10, accepts 0x1F, 1_000, .inf, tags and aliases, crashes on deeply nested brackets, and takes twice as long.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer, ComposerError
from yaml.events import AliasEvent, Event
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import ReaderError
from yaml.resolver import Resolver

from megamoe.contract.counted import counted

try:
    from yaml.cyaml import CParser as _CParser  # pyright: ignore[reportAttributeAccessIssue]

    CParser: Any = _CParser
except ImportError:
    CParser: Any = None

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
KeyPath = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, re.Pattern[str]] = {
    "null": re.compile(r"null"),
    "bool": re.compile(r"true|false"),
    "int": re.compile(r"[-+]?(0|[1-9][0-9]{0,17})"),
    "float": re.compile(r"[-+]?(0|[1-9][0-9]*)\.[0-9]*([eE][-+][0-9]{1,3})?"),
    "timestamp": re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
}
PLAIN_ONLY = "write plain mappings, lists and scalars only"


@dataclass(frozen=True, slots=True)
class MarkedYaml:
    """A document: its file, its value (None if empty) and the line, from 1, of each key path.

    A key path looks like ("tensors", "q", "shape", 0).
    """

    file: Path
    value: Plain
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest enclosing path that the file contains."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def place(self, path: KeyPath) -> str:
        """File, line and key of `path`."""
        return f"{self.file}:{self.line(path)}: {dotted(path)}"

    def error(self, path: KeyPath, sentence: str) -> SpecError:
        """A SpecError at `path`."""
        return SpecError(sentence, file=self.file, line=self.line(path), key=dotted(path))


def dotted(path: KeyPath) -> str:
    """`path` as a person writes it: tensors.q.shape[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


class _Refusing(Composer):
    """A parser mix-in: a composer that refuses aliases, tags and deep nesting."""

    depth = 0

    def compose_node(self, parent: Node | None, index: object) -> Node | None:
        event: Event = self.peek_event()  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(event, AliasEvent):
            sentence = f"alias *{event.anchor} is refused; write the value out"
            raise ComposerError(None, None, sentence, event.start_mark)
        if (tag := getattr(event, "tag", None)) is not None:
            sentence = f"tag {tag!r} is refused; {PLAIN_ONLY}"
            raise ComposerError(None, None, sentence, event.start_mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            sentence = f"nested deeper than {MAX_DEPTH} levels, which no file here needs"
            raise ComposerError(None, None, sentence, event.start_mark)
        node = super().compose_node(parent, index)  # pyright: ignore[reportArgumentType]
        self.depth -= 1
        return node


class _InC(_Refusing, CParser or object, Resolver):  # pyright: ignore[reportGeneralTypeIssues]
    """Reads with libyaml, if PyYAML was built with it."""

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        Resolver.__init__(self)


class _InPython(_Refusing, yaml.SafeLoader):
    """Reads with PyYAML's own parser, seven times slower than libyaml. If it refuses a text, the text is refused."""


_READ_OTHERWISE = re.compile(r"[\t\r\x85\u2028\u2029\ufeff?]|^(%|---|\.\.\.)|[|>][-+0-9]*#", re.MULTILINE)
"""Texts that libyaml 0.2.5 accepts and PyYAML refuses, or where line counts differ; found with 300,000 random texts."""


def _composed(text: str) -> Node | None:
    """The node tree of a text. Raises what PyYAML raises."""
    if CParser is not None and not _READ_OTHERWISE.search(text):
        with suppress(yaml.YAMLError):
            return _root(_InC(text))
    return _root(_InPython(text))


def _root(loader: _InC | _InPython) -> Node | None:
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def read_marked_yaml(file: Path, *, days: bool = False) -> MarkedYaml:
    """The document in `file`. Raises SpecError if the file is missing, unreadable or not acceptable YAML.

    `days`: accept an unquoted date such as 2026-12-24 as its text. Otherwise a date must be quoted.
    """
    return parse_marked_yaml(read_text(file), file, days=days)


def read_text(file: Path) -> str:
    """The text of `file`. Raises SpecError if the file is missing, unreadable, too long or not UTF-8."""
    if not file.is_file():
        what = "is no regular file" if file.exists() else "there is no such file"
        raise SpecError(f"{what}; name a YAML file", file=file)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror}", file=file) from None
    if len(data) > MAX_BYTES:
        raise SpecError(f"is {counted(len(data), 'byte')} long; it may have at most {MAX_BYTES:,}", file=file)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        sentence = f"byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        raise SpecError(sentence, file=file, line=line) from None


def parse_marked_yaml(text: str, file: Path, *, days: bool = False) -> MarkedYaml:
    """As `read_marked_yaml`, for text already in memory. Errors name `file`."""
    try:
        root = _composed(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise SpecError(f"is not acceptable YAML: {what}", file=file, line=line) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError(
            f"is not acceptable YAML: control character U+{int(error.character):04X}", file=file, line=line
        ) from None
    if root is None:
        return MarkedYaml(file, None)
    reader = _Reader(file, frozenset(_SCALARS) if days else frozenset(_SCALARS) - {"timestamp"})
    return MarkedYaml(file, reader.value(root, ()), reader.lines)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns nodes into plain values. `kinds`: the accepted kinds of scalar other than text."""

    file: Path
    kinds: frozenset[str]
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])

    def value(self, node: Node, path: KeyPath) -> Plain:
        self.lines.setdefault(path, node.start_mark.line + 1)
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, MappingNode) and kind == "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and kind == "seq":
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self._scalar(node.value, kind, path)
        raise self._error(path, f"a {kind} is refused; {PLAIN_ONLY}")

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Plain]:
        entries: dict[str, Plain] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode) or key.tag != _TAG + "str":
                seen = repr(key.value) if isinstance(key, ScalarNode) else "a collection"
                raise SpecError(f"a key must be plain text, not {seen}", file=self.file, line=line, key=dotted(path))
            here = (*path, key.value)
            if key.value in entries:
                sentence = f"key {key.value!r} is given twice, first in line {self.lines[here]}; keep one"
                raise SpecError(sentence, file=self.file, line=line, key=dotted(here))
            self.lines[here] = line
            entries[key.value] = self.value(value, here)
        return entries

    def _scalar(self, text: str, kind: str, path: KeyPath) -> Plain:
        if kind == "str":
            return text
        if kind not in self.kinds:
            raise self._error(
                path, f"{text!r} would be read as a {kind}, which has no place here; quote it if it is text"
            )
        if not _SCALARS[kind].fullmatch(text):
            sentence = f"{text!r} would be read as {kind}; write true, false, null or a plain decimal, or quote it"
            raise self._error(path, sentence)
        match kind:
            case "null":
                return None
            case "bool":
                return text == "true"
            case "int":
                return int(text)
            case "float":
                return float(text)
            case _:
                return text

    def _error(self, path: KeyPath, sentence: str) -> SpecError:
        return MarkedYaml(self.file, None, self.lines).error(path, sentence)


class SpecError(ValueError):
    """A sentence with file, line (from 1) and key, the value seen, and what would be right."""

    def __init__(self, sentence: str, *, file: Path | None = None, line: int | None = None, key: str = "") -> None:
        place = "" if file is None else f"{file}:{line}: " if line is not None else f"{file}: "
        super().__init__(f"{place}{key}: {sentence}" if key else f"{place}{sentence}")
        self.sentence, self.file, self.line, self.key = sentence, file, line, key
