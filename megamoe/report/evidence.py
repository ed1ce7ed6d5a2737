"""Files that a report shows besides records: bundles of failures, output of `megamoe explain`, the VM's coverage.

Error maps and pictures of tensor memory are small and embedded in the page; other files are linked. megamoe may not
import the VM, so it reads two tracked tables: coverage.md says what the VM implements, witness.jsonl what confirms it.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import quote

from megamoe.explain import folder_of
from megamoe.records.lines import Record

MAX_FILE_BYTES = 64_000
MAX_BYTES = 400_000


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files about one row. `links`: name -> URL relative to the page. `maps`: tensor -> the text of its error map.

    `pictures`: name -> data URL of an SVG file. As an image source, an SVG can neither run nor load anything.
    """

    links: Mapping[str, str] = field(default_factory=dict[str, str])
    maps: Mapping[str, str] = field(default_factory=dict[str, str])
    pictures: Mapping[str, str] = field(default_factory=dict[str, str])


def bundles(records: Iterable[Record], page: Path, home: Path = Path()) -> dict[str, RowFiles]:
    """Bundle named by a record -> its files, for folders that exist. Paths are relative to `home`.

    `page`: the path of the report. Once the error maps exceed MAX_BYTES in total, the rest is only linked.
    """
    found: dict[str, RowFiles] = {}
    left = MAX_BYTES
    for name in dict.fromkeys(record.bundle for record in records if record.bundle):
        folder = home / name
        maps: dict[str, str] = {}
        for file in _files(folder):
            text = _small_text(file) if file.name.endswith(".error.txt") else None
            if text is not None and len(text) <= left:
                left -= len(text)
                maps[file.name.removesuffix(".error.txt")] = text
        links = {file.name: link(file, page) for file in _files(folder)}
        if links:
            found[name] = RowFiles(links, maps)
    return found


def traces(records: Iterable[Record], page: Path, home: Path = Path()) -> dict[str, RowFiles]:
    """Maps case, backend and target in one string to the files of `megamoe explain`, for folders that exist.

    Once the pictures of tensor memory exceed MAX_BYTES in total, the rest is only linked.
    """
    found: dict[str, RowFiles] = {}
    left = MAX_BYTES
    for case, backend, target in dict.fromkeys((one.case, one.backend, one.target) for one in records):
        folder = home / folder_of(case, backend, target)
        pictures: dict[str, str] = {}
        for file in _files(folder):
            text = _small_text(file) if file.name.startswith("tmem") and file.suffix == ".svg" else None
            if text is not None and len(text) <= left:
                left -= len(text)
                pictures[file.name] = f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}"
        links = {file.name: link(file, page) for file in _files(folder)}
        if links:
            found[f"{case} {backend} {target}"] = RowFiles(links, pictures=pictures)
    return found


def link(file: Path, page: Path) -> str:
    """The URL of `file` relative to the folder of `page`, quoted for an attribute."""
    relative = os.path.relpath(file.resolve(), page.resolve().parent)
    return quote(Path(relative).as_posix())


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.is_file())
    except OSError:
        return []


def _small_text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if file.stat().st_size <= MAX_FILE_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None


COVERAGE = Path("results/coverage.md")
WITNESS = Path("results/witness.jsonl")
_ROW = re.compile(r"\| `(?P<form>[^`]*)` \| (?P<section>[^|]*) \| (?P<witness>[^|]*) \|(?P<kernels>[^|]*)\|")


@dataclass(frozen=True, slots=True)
class InstructionForm:
    """One instruction form. `witness`: "hardware" or "document". `kernels`: third-party packages whose kernels ran
    it."""

    family: str
    form: str
    section: str
    witness: str
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForeignKernel:
    """A third-party kernel that ran in the VM."""

    package: str
    target: str
    kernel: str
    options: str
    shape: str
    status: str
    error: float | None
    reason: str


def read_coverage(path: Path = COVERAGE) -> tuple[InstructionForm, ...]:
    """The forms in the order of the table. Empty if there is no file."""
    return tuple(_forms(_text(path)))


def _forms(text: str) -> Iterator[InstructionForm]:
    family = ""
    for line in text.splitlines():
        if line.startswith("## "):
            family = line.removeprefix("## ").strip()
        elif found := _ROW.fullmatch(line):
            kernels = tuple(name.strip() for name in found["kernels"].split(",") if name.strip())
            yield InstructionForm(family, found["form"], found["section"].strip(), found["witness"].strip(), kernels)


def read_foreign_kernels(path: Path = WITNESS) -> tuple[ForeignKernel, ...]:
    """The kernels of the table. Skips lines that are not objects; the table's own test checks those."""
    return tuple(kernel for line in _text(path).splitlines() if (kernel := _kernel(line)))


def _kernel(line: str) -> ForeignKernel | None:
    try:
        found: object = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    fields = cast("dict[str, object]", found)
    words = {name: str(fields.get(name, "")) for name in ("target", "kernel", "options", "shape", "status", "reason")}
    error = fields.get("error")
    package = f"{fields.get('package', '')} {fields.get('version', '')}".strip()
    return ForeignKernel(package=package, error=error if isinstance(error, float) else None, **words)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
