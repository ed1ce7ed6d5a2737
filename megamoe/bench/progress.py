"""Whose turn it is in a worker that measures, for the process that must find out why it died or hangs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Stage:
    """What a worker is doing. `backend`: whose code runs, None for the harness's own; `limit_s`: how long it may take.

    `number` counts the stages of a worker, so that two of the same kind differ.
    """

    number: int
    backend: str | None
    doing: str
    limit_s: float


class Progress:
    """Writes the stage into a file, in place: one small write, so that it can be done between two turns."""

    def __init__(self, path: Path, patience: float = 1.0) -> None:
        """`patience`: factor on all limits."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._patience = patience
        self._number = 0

    def enter(self, backend: str | None, doing: str, limit_s: float) -> None:
        """From now on `backend` is doing something (a participle) that may take `limit_s` seconds."""
        self._number += 1
        stage = json.dumps([self._number, backend, doing, limit_s * self._patience])
        os.pwrite(self._descriptor, stage.encode().ljust(_BYTES), 0)

    def close(self) -> None:
        """Closes the file, which keeps the last stage."""
        os.close(self._descriptor)


def read_stage(path: Path) -> Stage | None:
    """The last stage that was entered; None if none was, or if it is being written."""
    try:
        return Stage(*json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
