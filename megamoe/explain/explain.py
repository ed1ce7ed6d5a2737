"""One row looked at closely: build it, assemble it, run it recorded, and write the pictures and traces."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megamoe.contract import (
    Case,
    Execution,
    RunOptions,
    Target,
    UnsupportedError,
    load_backend,
    load_executor,
)
from megamoe.contract.assembly import Assembled, assembled
from megamoe.contract.trace import CtaTrace, LaunchTrace, Trace, TraceError, read_trace
from megamoe.explain.perfetto import perfetto
from megamoe.explain.registers import accumulator_tile
from megamoe.explain.registers_picture import draw_registers
from megamoe.explain.tmem import tmem_map
from megamoe.explain.tmem_picture import draw
from megamoe.judge.arena import Arena
from megamoe.ops import reference
from megamoe.spec.spec import Spec


class ExplainError(Exception):
    """A row that cannot be explained, or files that cannot be written; the text says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What to explain. `schedule`: "eager", "lazy" or "random:SEED"."""

    case: Case
    backend: str
    target: Target
    executor: str
    schedule: str

    @property
    def label(self) -> str:
        """One word for a folder: the row with what a file name cannot hold replaced."""
        words = f"{self.case.id}-{self.backend}-{self.target}"
        return re.sub(r"[^\w.=-]+", "_", words)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was found. `counters` hold the executor's, useful_flops and minimum_bytes."""

    subject: Subject
    ptx: str
    assembled: tuple[Assembled, ...]
    trace: Trace
    counters: Mapping[str, int]
    violation: str | None

    def comment(self, line: int) -> str:
        """The comment behind the instruction at a PTX line, which kernels use to name places; "" if there is none."""
        lines = self.ptx.splitlines()
        return lines[line - 1].partition("//")[2].strip() if 0 < line <= len(lines) else ""

    def barrier_names(self, launch: LaunchTrace) -> dict[int, str]:
        """Names of mbarriers by offset: from the comment of the PTX line that initialises each, if it has its own."""
        barriers = {one.offset: one.line for cta in launch.ctas for one in cta.mbarriers}
        shared = Counter(barriers.values())
        named = {at: self.comment(line) for at, line in barriers.items() if shared[line] == 1}
        return {at: f"{named[at]} ({at:#x})" if named.get(at) else f"{at:#x}" for at in sorted(barriers)}


def explain(spec: Spec, subject: Subject) -> Explanation:
    """Runs `subject` under observation. Raises UnsupportedError or ExplainError with a sentence."""
    backend, executor = load_backend(subject.backend), load_executor(subject.executor)
    op, target = subject.case.op, subject.target
    offered = backend.targets(op)
    if target not in offered:
        raise UnsupportedError(
            f"backend {subject.backend} has {op} for {', '.join(offered) or 'no target'}, not {target}"
        )
    reason = executor.unavailable(target)
    if reason:
        raise UnsupportedError(f"executor {subject.executor} cannot run {target} here: {reason}")
    program = backend.build(subject.case, target)
    if program.ptx is None:
        raise UnsupportedError(f"backend {subject.backend} calls somebody else's kernel: there is no PTX to explain")
    room = reference(op)
    arena = Arena(spec, subject.case, room.make_inputs(subject.case))
    execution = executor.run(program, arena.tensors, RunOptions(schedule=subject.schedule, trace=True))
    return Explanation(
        subject,
        program.ptx,
        tuple(assembled(program.ptx, target)),
        _trace(subject, execution),
        {
            **execution.counters,
            "useful_flops": room.useful_flops(subject.case),
            "minimum_bytes": room.minimum_bytes(subject.case),
        },
        execution.violation,
    )


def _trace(subject: Subject, execution: Execution) -> Trace:
    data = execution.trace
    if data is None:
        raise ExplainError(
            f"the executor {subject.executor} leaves no trace"
            + (f": {execution.violation}" if execution.violation else "; the vm executor does")
        )
    try:
        return read_trace(data)
    except TraceError as error:
        raise ExplainError(f"{subject.executor}: {error}") from error


def write_files(found: Explanation, folder: Path) -> list[Path]:
    """Writes the PTX, a Perfetto trace and maps of tensor memory and of registers. Raises ExplainError if it cannot."""
    subject, trace = found.subject, found.trace
    files: dict[str, str] = {"kernel.ptx": found.ptx}
    names: dict[str, str] = {}
    for launch in trace.launches:
        names |= {f"mbarrier {at:#x}": f"mbarrier {name}" for at, name in found.barrier_names(launch).items()}
    title = f"{subject.case.id}, backend {subject.backend}, {subject.target}"
    events = perfetto(trace, title, lambda target: names.get(target, target))
    files["trace.perfetto.json"] = json.dumps(events, separators=(",", ":"))
    for number, launch in enumerate(trace.launches):
        for cta in launch.ctas[:1]:
            map_ = tmem_map(cta, launch.ends or trace.steps)
            if map_ is not None:
                subtitle = (
                    f"{launch.entry}, CTA {cta.ctaid}; backend {subject.backend} on {subject.target}; "
                    f"schedule {trace.schedule}; S, P and O are inferred from who reads"
                )
                name = "tmem.svg" if len(trace.launches) == 1 else f"tmem-launch{number}.svg"
                files[name] = draw(map_, f"Tensor memory of {subject.case.id}", subtitle)
            picture = _registers(found, launch, cta)
            if picture is not None:
                files["registers.svg" if len(trace.launches) == 1 else f"registers-launch{number}.svg"] = picture
    _write(folder, files)
    return [folder / name for name in files]


def _registers(found: Explanation, launch: LaunchTrace, cta: CtaTrace) -> str | None:
    """The picture of the first accumulator that a CTA loads into registers, or None."""
    interleave = dict(found.subject.case.axes).get("interleave")
    turns = interleave if isinstance(interleave, int) else None
    tile = accumulator_tile(cta, found.ptx, launch.ends or found.trace.steps, turns)
    if tile is None:
        return None
    where = f"{launch.entry}, CTA {cta.ctaid}; backend {found.subject.backend} on {found.subject.target}"
    return draw_registers(tile, f"Accumulator in registers, {found.subject.case.id}", where)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ExplainError(f"cannot write to {folder}: {error.strerror}") from error
