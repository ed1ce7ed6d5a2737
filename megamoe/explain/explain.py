"""Explain one row: build it, assemble it, run it with a trace, and write the pictures and the trace."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megamoe.contract import Case, Execution, Row, RunOptions, Target, UnsupportedError, load_backend, load_executor
from megamoe.contract.assembly import Assembled, assembled
from megamoe.contract.trace import CtaTrace, LaunchTrace, Trace
from megamoe.explain.perfetto import perfetto
from megamoe.explain.registers import accumulator_tile, draw_registers
from megamoe.explain.tmem import draw_tmem, tmem_map
from megamoe.judge.guarded import GuardedCase, build_program, needed_work
from megamoe.records.files import write_file
from megamoe.spec.spec import Spec


class ExplainError(Exception):
    """The row cannot be explained; the text says why."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a run of `row` showed. `counters`: the executor's counters, plus useful_flops and minimum_bytes."""

    row: Row
    case: Case
    ptx: str
    assembled: tuple[Assembled, ...]
    trace: Trace
    counters: Mapping[str, int]
    violation: str | None

    def comment(self, line: int) -> str:
        """The comment after the instruction at a PTX line, "" if there is none. Kernels name places with comments."""
        lines = self.ptx.splitlines()
        return lines[line - 1].partition("//")[2].strip() if 0 < line <= len(lines) else ""

    def barrier_names(self, launch: LaunchTrace) -> dict[int, str]:
        """Offset -> name of each mbarrier: the comment of the PTX line that initialises it alone, else the offset."""
        barriers = {one.offset: one.line for cta in launch.ctas for one in cta.mbarriers}
        shared = Counter(barriers.values())
        named = {at: self.comment(line) for at, line in barriers.items() if shared[line] == 1}
        return {at: f"{named[at]} ({at:#x})" if named.get(at) else f"{at:#x}" for at in sorted(barriers)}


def explain(spec: Spec, row: Row) -> Explanation:
    """Runs `row` with a trace. Raises UnsupportedError or ExplainError with a sentence."""
    case, target = spec.parse_case(row.case), cast(Target, row.target)
    backend, executor = load_backend(row.backend), load_executor(row.executor)
    program = build_program(row, case, backend, executor)
    if program.ptx is None:
        raise UnsupportedError(f"backend {row.backend} calls somebody else's kernel: there is no PTX to explain")
    options = RunOptions(schedule=row.schedule, trace=True)
    execution = GuardedCase(spec, case, executor).run(program, options).execution
    return Explanation(
        row,
        case,
        program.ptx,
        tuple(assembled(program.ptx, target)),
        _trace(row, execution),
        {**execution.counters, **needed_work(case)},
        execution.violation,
    )


def _trace(row: Row, execution: Execution) -> Trace:
    # An executor may be third-party code, whose trace need not follow the contract's types.
    trace: object = execution.trace
    if trace is None:
        raise ExplainError(
            f"the executor {row.executor} leaves no trace"
            + (f": {execution.violation}" if execution.violation else "; the vm executor does")
        )
    if not isinstance(trace, Trace):
        raise ExplainError(
            f"the executor {row.executor} hands over a {type(trace).__name__} as its trace; it must be a "
            "megamoe.contract.Trace"
        )
    return trace


def write_files(found: Explanation, folder: Path) -> list[Path]:
    """Writes the PTX, a Perfetto trace, and pictures of tensor memory and registers for the first CTA of each launch.
    RecordError if a file cannot be written."""
    row, trace = found.row, found.trace
    files: dict[str, str] = {"kernel.ptx": found.ptx}
    names: dict[str, str] = {}
    for launch in trace.launches:
        names |= {f"mbarrier {at:#x}": f"mbarrier {name}" for at, name in found.barrier_names(launch).items()}
    title = f"{row.case}, backend {row.backend}, {row.target}"
    events = perfetto(trace, title, lambda target: names.get(target, target))
    files["trace.perfetto.json"] = json.dumps(events, separators=(",", ":"))
    for number, launch in enumerate(trace.launches):
        suffix = "" if len(trace.launches) == 1 else f"-launch{number}"
        for cta in launch.ctas[:1]:
            pictures = {"tmem": _tmem(found, launch, cta), "registers": _registers(found, launch, cta)}
            files |= {f"{name}{suffix}.svg": picture for name, picture in pictures.items() if picture is not None}
    for name, text in files.items():
        write_file(folder / name, text, "the explanation")
    return [folder / name for name in files]


def _tmem(found: Explanation, launch: LaunchTrace, cta: CtaTrace) -> str | None:
    """The picture of a CTA's tensor memory, or None if it has none."""
    map_ = tmem_map(cta, launch.ends or found.trace.steps)
    if map_ is None:
        return None
    subtitle = (
        f"{launch.entry}, CTA {cta.ctaid}; backend {found.row.backend} on {found.row.target}; "
        f"schedule {found.trace.schedule}; S, P and O are inferred from who reads"
    )
    return draw_tmem(map_, f"Tensor memory of {found.row.case}", subtitle)


def _registers(found: Explanation, launch: LaunchTrace, cta: CtaTrace) -> str | None:
    """The picture of the first accumulator that a CTA loads into registers, or None if it loads none."""
    interleave = dict(found.case.axes).get("interleave")
    turns = interleave if isinstance(interleave, int) else None
    tile = accumulator_tile(cta, found.ptx, launch.ends or found.trace.steps, turns)
    if tile is None:
        return None
    where = f"{launch.entry}, CTA {cta.ctaid}; backend {found.row.backend} on {found.row.target}"
    return draw_registers(tile, f"Accumulator in registers, {found.row.case}", where)
