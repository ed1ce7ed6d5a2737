"""Compiler figures of a run's programs, as lines of its record file, and whether an assembler accepts the programs at
all.

Each text is assembled once per target, however many rows share it, in a separate process because assemblers are entry
points. The results are written next to the text in the program folder, for the process that writes the records.
"""

from __future__ import annotations

import hashlib
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from megamoe.contract import Row, UnsupportedError
from megamoe.contract.assembly import Assembled
from megamoe.records.files import write_file
from megamoe.records.lines import Figures
from megamoe.runner.process import Runner, RunnerDiedError, RunnerFaultError, nursery
from megamoe.runner.requests import ASSEMBLE

MAX_ASSEMBLY_S: Final = 300.0


def program_sha256(ptx: str | None) -> str | None:
    """The digest that names a program in records. None for a program without PTX."""
    return None if ptx is None else hashlib.sha256(ptx.encode()).hexdigest()


def leave_program(folder: Path, ptx: str) -> str:
    """Writes the PTX into `folder` unless it is already there. Returns its digest."""
    digest = hashlib.sha256(ptx.encode()).hexdigest()
    path = folder / f"{digest}.ptx"
    if not path.exists():
        # Several workers may write the same program at once.
        write_file(path, ptx, "the program", durable=False)
    return digest


class Assemblies:
    """Assembles each program once, on its own threads, with one runner per thread. Close it after use.

    `folder`: where processes share their results; None keeps the results in this object.
    """

    def __init__(self, folder: Path | None, jobs: int = 1) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="assembler")
        self._made: dict[tuple[str, str], Future[list[Assembled]]] = {}
        self._runners: dict[int, Runner] = {}

    def begin(self, ptx: str, target: str) -> Future[list[Assembled]]:
        """A future of what every assembler makes of `ptx`."""
        key = (hashlib.sha256(ptx.encode()).hexdigest(), target)
        if key not in self._made:
            self._made[key] = self._pool.submit(self._assembled, key, ptx)
        return self._made[key]

    def close(self) -> None:
        """Cancels what has not begun, and ends the runners."""
        self._pool.shutdown(cancel_futures=True)
        for runner in self._runners.values():
            runner.end()

    def _assembled(self, key: tuple[str, str], ptx: str) -> list[Assembled]:
        path = None if self._folder is None else self._folder / f"{key[0]}.{key[1]}.json"
        if path is not None and path.exists():
            return _read(json.loads(path.read_text("utf-8")))
        try:
            found = _read(self._runner().ask(ASSEMBLE, {"target": key[1]}, MAX_ASSEMBLY_S, [ptx.encode()]).told)
        except (RunnerDiedError, RunnerFaultError, UnsupportedError) as error:
            return [Assembled("none", sentence=str(error))]
        if path is not None:
            write_file(path, json.dumps({"assembled": [asdict(one) for one in found]}), "the figures", durable=False)
        return found

    def _runner(self) -> Runner:
        mine = threading.get_ident()
        if mine not in self._runners or self._runners[mine].ended:
            self._runners[mine] = nursery().runner("the assemblers")
        return self._runners[mine]


def _read(told: Any) -> list[Assembled]:
    return [
        Assembled(**{**one, "numbers": tuple((label, number) for label, number in one["numbers"])})
        for one in told["assembled"]
    ]


class FigureMaker:
    """Makes the figures of the programs in `folder`. Close it after use."""

    def __init__(self, run: str, folder: Path, jobs: int = 1) -> None:
        self._run, self._folder = run, folder
        self._assemblies = Assemblies(folder, jobs)
        self._made: dict[tuple[str, str], Future[list[Assembled]]] = {}

    def begin(self, row: Row, digest: str | None) -> None:
        """Starts to assemble the program of `row`, unless it has none or was started before."""
        path = self._folder / f"{digest}.ptx"
        if digest is not None and (digest, row.target) not in self._made and path.exists():
            ptx = path.read_text("utf-8")
            # Skip a file with a different text: its figures would describe nothing that ran.
            if program_sha256(ptx) == digest:
                self._made[digest, row.target] = self._assemblies.begin(ptx, row.target)

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
        self._assemblies.close()

    def __enter__(self) -> FigureMaker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
