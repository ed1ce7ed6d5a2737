"""Case: one fixed point of a matrix. Row: a case with a backend, a target, an executor and a schedule.

Tests, records, benchmarks and the command line refer to a case by its id.
"""

from __future__ import annotations

import builtins
import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

AxisValue = int | float | bool | str | None


def spell(value: AxisValue) -> str:
    """`value` as a case id writes it: as in YAML, without characters that a shell would interpret."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


@dataclass(frozen=True, slots=True)
class Case:
    """One point of a matrix: the value of every axis in the order of the spec, the input distribution and its seed.

    Only `Spec.case` and `Spec.parse_case` make one: they fill in defaults, check the limits and set its id.
    """

    op: str
    axes: tuple[tuple[str, AxisValue], ...]
    inputs: str
    seed: builtins.int
    id: str

    def __getitem__(self, axis: str) -> AxisValue:
        """The value of `axis`. Raises KeyError if the op has no such axis."""
        for name, value in self.axes:
            if name == axis:
                return value
        known = ", ".join(name for name, _ in self.axes)
        raise KeyError(f"case {self.id} has no axis {axis!r}; it has: {known}")

    def int(self, axis: str) -> builtins.int:
        """The integer value of `axis`. Raises ValueError if it is not an integer, KeyError if there is no such axis."""
        value = self[axis]
        if isinstance(value, bool) or not isinstance(value, builtins.int):
            raise ValueError(f"axis {axis} of case {self.id} is {spell(value)}, not an integer")
        return value

    def __str__(self) -> str:
        return self.id


Status = Literal["passed", "failed", "error", "crashed", "timed_out", "unsupported", "not_run"]
STATUSES: tuple[Status, ...] = get_args(Status)
Temperature = Literal["cold", "hot"]


MAX_FILE_NAME = 160


def file_name(text: str) -> str:
    """A file name for untrusted `text`: a single path component that does not begin with a dot.

    Characters that some file system refuses become "_". Text that loses information this way, or is too long, gets a
    digest, so that no two texts share a file. Colons, which every row has, also become "_" but do not count as a loss.
    """
    name = re.sub(r"[^A-Za-z0-9=.,_-]+", "_", text)
    if re.fullmatch(r"[A-Za-z0-9=.,_:-]+", text) and not text.startswith(".") and len(text) <= MAX_FILE_NAME:
        return name
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{name.lstrip('.')[: MAX_FILE_NAME - 13]}-{digest}"


class Row(NamedTuple):
    """What one record is about, and the gate's key for it. `case` is a Case.id."""

    case: str
    backend: str
    target: str
    executor: str
    schedule: str

    @property
    def op(self) -> str:
        """The op of the case."""
        return self.case.partition(":")[0]

    @property
    def rerun(self) -> str:
        """The command that judges exactly this row again, with the specs of the checkout."""
        return self.rerun_with(None)

    def rerun_with(self, specs: Path | None) -> str:
        """As `rerun`, with the specs in the folder `specs`; None means the specs of the checkout."""
        options = [part for name, value in self._asdict().items() for part in (f"--{name}", value)]
        folder = [] if specs is None else ["--specs", str(specs)]
        return shlex.join(["megamoe", "run", *options, *folder])

    def __str__(self) -> str:
        return f"{self.case} on {self.backend} {self.target} {self.executor} {self.schedule}"
