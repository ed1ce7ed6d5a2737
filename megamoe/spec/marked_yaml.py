"""YAML as plain values, with the line of every key and item; whatever is ambiguous or unsafe is refused.

Of YAML 1.1 only what reads the same to everybody is taken: mappings with distinct text keys, sequences, text,
decimal numbers, true, false, null. Tags, aliases, merge keys, `yes`/`on`, octal and base-60 numbers are errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.composer import ComposerError
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import ReaderError

from megamoe.spec.error import SpecError

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
KeyPath = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]*)\.[0-9]*([eE][-+][0-9]{1,3})?")
_SCALARS: dict[str, re.Pattern[str]] = {
    "null": re.compile(r"null"),
    "bool": re.compile(r"true|false"),
    "int": _INT,
    "float": _FLOAT,
}


@dataclass(frozen=True, slots=True)
class MarkedYaml:
    """A document: its file, its value and the line (from 1) of every key path, e.g. ("tensors", "q", "shape", 0)."""

    file: Path
    value: Plain
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest thing around it that is written in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def error(self, path: KeyPath, sentence: str) -> SpecError:
        """A SpecError at `path`."""
        return SpecError(sentence, file=self.file, line=self.line(path), key=dotted(path))


def dotted(path: KeyPath) -> str:
    """`path` as a person writes it: tensors.q.shape[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


class _Composer(yaml.SafeLoader):
    """SafeLoader that composes no aliases and no towers of brackets."""

    depth = 0

    def compose_node(self, parent: Node | None, index: object) -> Node | None:
        event = self.peek_event()
        if isinstance(event, AliasEvent):
            sentence = f"alias *{event.anchor} is refused; write the value out"
            raise ComposerError(None, None, sentence, event.start_mark)
        if (tag := getattr(event, "tag", None)) is not None:
            sentence = f"tag {tag!r} is refused; a spec has plain mappings, lists and scalars only"
            raise ComposerError(None, None, sentence, event.start_mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            sentence = f"nested deeper than {MAX_DEPTH} levels, which no spec needs"
            raise ComposerError(None, None, sentence, event.start_mark)
        node = super().compose_node(parent, index)  # pyright: ignore[reportArgumentType]
        self.depth -= 1
        return node


def read_marked_yaml(file: Path) -> MarkedYaml:
    """The document in `file`; SpecError for a file that is missing, unreadable, empty or not acceptable YAML."""
    if not file.is_file():
        what = "is no regular file" if file.exists() else "there is no such file"
        raise SpecError(f"{what}; a spec is a YAML file, specs/OP.yaml", file=file)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror}); a spec is a YAML file", file=file) from None
    if len(data) > MAX_BYTES:
        raise SpecError(f"is {len(data)} bytes long; a spec has at most {MAX_BYTES}", file=file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        sentence = f"byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        raise SpecError(sentence, file=file, line=line) from None
    return parse_marked_yaml(text, file)


def parse_marked_yaml(text: str, file: Path) -> MarkedYaml:
    """As `read_marked_yaml`, of a text that is already here; `file` is what errors name."""
    try:
        loader = _Composer(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
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
        raise SpecError("is empty; a spec begins with op:", file=file, line=1)
    document = MarkedYaml(file, None)
    document.lines[()] = root.start_mark.line + 1
    return MarkedYaml(file, _construct(root, (), document), document.lines)


def _construct(node: Node, path: KeyPath, document: MarkedYaml) -> Plain:
    document.lines.setdefault(path, node.start_mark.line + 1)
    kind = node.tag.removeprefix(_TAG)
    if isinstance(node, MappingNode) and kind == "map":
        return _mapping(node, path, document)
    if isinstance(node, SequenceNode) and kind == "seq":
        return [_construct(item, (*path, i), document) for i, item in enumerate(node.value)]
    if isinstance(node, ScalarNode):
        return _scalar(node, kind, path, document)
    raise document.error(path, f"a {kind} is refused; a spec has plain mappings, lists and scalars only")


def _mapping(node: MappingNode, path: KeyPath, document: MarkedYaml) -> dict[str, Plain]:
    entries: dict[str, Plain] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, ScalarNode) or key.tag != _TAG + "str":
            seen = repr(key.value) if isinstance(key, ScalarNode) else "a collection"
            raise SpecError(f"a key must be plain text, not {seen}", file=document.file, line=line, key=dotted(path))
        here = (*path, key.value)
        if key.value in entries:
            sentence = f"key {key.value!r} is given twice, first in line {document.lines[here]}; keep one"
            raise SpecError(sentence, file=document.file, line=line, key=dotted(here))
        document.lines[here] = line
        entries[key.value] = _construct(value, here, document)
    return entries


def _scalar(node: ScalarNode, kind: str, path: KeyPath, document: MarkedYaml) -> Plain:
    text: str = node.value
    if kind == "str":
        return text
    if kind not in _SCALARS:
        sentence = f"{text!r} would be read as a {kind}, which no spec has; quote it if it is text"
        raise document.error(path, sentence)
    if not _SCALARS[kind].fullmatch(text):
        sentence = f"{text!r} would be read as {kind}; write true, false, null or a plain decimal, or quote it"
        raise document.error(path, sentence)
    if kind == "null":
        return None
    if kind == "bool":
        return text == "true"
    return int(text) if kind == "int" else float(text)
