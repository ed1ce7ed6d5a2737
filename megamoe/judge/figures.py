"""Compiler figures of the programs of a run, as lines of its record file.

Workers leave the PTX of their rows in a folder, named by its digest. The process that writes the records assembles each
text once for each target, however many rows share it.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

from megamoe.contract import Row, Target
from megamoe.contract.assembly import Assembled, assembled
from megamoe.records.files import write_file
from megamoe.records.lines import Figures


def program_sha256(ptx: str | None) -> str | None:
    """The digest that names a program in records. None for a program without PTX."""
    return None if ptx is None else hashlib.sha256(ptx.encode()).hexdigest()


def leave_program(folder: Path, ptx: str) -> str:
    """Writes the PTX into `folder` unless it is there. Returns its digest."""
    digest = hashlib.sha256(ptx.encode()).hexdigest()
    path = folder / f"{digest}.ptx"
    if not path.exists():
        # Several workers may write the same program at once.
        write_file(path, ptx, "the program", durable=False)
    return digest


class FigureMaker:
    """Assembles each program in `folder` once, on its own threads. Close it after use."""

    def __init__(self, run: str, folder: Path, jobs: int = 1) -> None:
        self._run, self._folder = run, folder
        self._pool = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="assembler")
        self._made: dict[tuple[str, str], Future[list[Assembled]]] = {}

    def begin(self, row: Row, digest: str | None) -> None:
        """Starts to assemble the program of `row`, if it has one that was not started before."""
        path = self._folder / f"{digest}.ptx"
        if digest is not None and (digest, row.target) not in self._made and path.exists():
            ptx = path.read_text("utf-8")
            # A worker says which program it ran. One that left another text under that name gets no figures.
            if program_sha256(ptx) == digest:
                self._made[digest, row.target] = self._pool.submit(assembled, ptx, cast(Target, row.target))

    def of(self, row: Row, digest: str | None) -> list[Figures]:
        """One line for each assembler that accepted the program of `row`. Waits for them. Empty without a program."""
        self.begin(row, digest)
        made = self._made.get((digest or "", row.target))
        found = made.result() if made else []
        return [
            Figures(
                run=self._run,
                case=row.case,
                op=row.op,
                backend=row.backend,
                target=row.target,
                assembler=one.assembler,
                program_sha256=digest or "",
                cubin_sha256=one.cubin_sha256,
                kernels=one.kernels,
            )
            for one in found
            if one.sentence is None
        ]

    def close(self) -> None:
        """Cancels what has not begun."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> FigureMaker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
