"""The current stage of a measuring worker, for the process that must explain why the worker died or hangs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

_BYTES = 4096


@dataclass(frozen=True, slots=True)
class WorkerStage:
    """What a worker does now. `backend`: whose code runs, None for the harness; `limit_s`: seconds it may take.

    `number` counts the stages of a worker, so that two of one kind differ.
    """

    number: int
    backend: str | None
    doing: str
    limit_s: float


class Progress:
    """Writes the stage into a file, in place: one small write, cheap enough between two turns."""

    def __init__(self, path: Path, patience: float = 1.0) -> None:
        """`patience`: factor on all limits."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._patience = patience
        self._number = 0

    def enter(self, backend: str | None, doing: str, limit_s: float) -> None:
        """Enters a stage: `backend` is `doing` something (a participle) for at most `limit_s` seconds."""
        self._number += 1
        stage = json.dumps([self._number, backend, doing, limit_s * self._patience])
        os.pwrite(self._descriptor, stage.encode().ljust(_BYTES), 0)

    def close(self) -> None:
        """Closes the file; the last stage stays in it."""
        os.close(self._descriptor)


def read_stage(path: Path) -> WorkerStage | None:
    """The last stage entered. None if there was none, or if it is being written."""
    try:
        return WorkerStage(*json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
