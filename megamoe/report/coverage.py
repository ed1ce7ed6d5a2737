"""What the VM implements and what witnesses it, read from two tracked tables: coverage.md and witness.jsonl.

megamoe may not import the VM, so it reads the generated table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

COVERAGE = Path("results/coverage.md")
WITNESS = Path("results/witness.jsonl")
_ROW = re.compile(r"\| `(?P<form>[^`]*)` \| (?P<section>[^|]*) \| (?P<witness>[^|]*) \|(?P<kernels>[^|]*)\|")


@dataclass(frozen=True, slots=True)
class InstructionForm:
    """One instruction form. `witness`: "hardware" or "document". `kernels`: packages of others whose kernels ran it."""

    family: str
    form: str
    section: str
    witness: str
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForeignKernel:
    """A kernel that others wrote, run in the VM."""

    package: str
    target: str
    kernel: str
    options: str
    shape: str
    status: str
    error: float | None
    reason: str


def read_coverage(path: Path = COVERAGE) -> tuple[InstructionForm, ...]:
    """The forms in the order of the table; none if there is no file."""
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
    """The kernels of the table. Skips lines that are no object: the test of the table judges them."""
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
