"""Turns one row into one Record: build the program, run it between guard bands, compare with the references."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megamoe.contract import DeviceLostError, Row, Status, UnsupportedError
from megamoe.judge.arena import home_of, layouts_of
from megamoe.judge.audit import Audit, Audits
from megamoe.judge.bundle import BundleContents, unwritten, write_bundle
from megamoe.judge.comparison import Expected, compared, complaints, expected_of
from megamoe.judge.figures import Assemblies, leave_program, program_sha256
from megamoe.judge.guarded import Built, InThisProcess, needed_work
from megamoe.judge.isolated import NO_LIMIT_S, Processes
from megamoe.judge.side_by_side import leave_outputs
from megamoe.ops import reference
from megamoe.records.lines import Evidence, Record, record_of
from megamoe.runner.child import explain_error
from megamoe.runner.process import RunnerDiedError, RunnerFaultError
from megamoe.spec.load import load_specs
from megamoe.spec.spec import Spec

if TYPE_CHECKING:
    from megamoe.contract import Case
    from megamoe.contract.assembly import Assembled


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how rows are judged. `runners`: builds and runs. `timeout_s`: host seconds per row, in runners.

    `audits`: which rows are run again, None for none. `assemblies`: assembles the programs, None to skip assemblers.
    """

    runners: Processes | InThisProcess = field(default_factory=InThisProcess)
    timeout_s: float = NO_LIMIT_S
    audits: Audits | None = None
    assemblies: Assemblies | None = None


HERE: Final = Bench()
_TARGET: Final = re.compile(r"^\s*\.target\s+([^\n;/]*)", re.MULTILINE)


@dataclass(slots=True)
class _Findings(BundleContents):
    """What the judge knows about a row so far. Fields of steps not yet reached are empty."""

    status: Status = "error"
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    input_sha256: Mapping[str, str] = field(default_factory=dict[str, str])
    artifact: Mapping[str, str] = field(default_factory=dict[str, str])
    audit_host_seconds: float | None = None

    def conclude(self, status: Status, sentence: str) -> None:
        self.status, self.sentence = status, sentence


@lru_cache(maxsize=2)
def _specs(folder: Path | None) -> dict[str, Spec]:
    return load_specs(folder)


# The last case and its references. Rows of one case under several schedules are adjacent, and the float64 oracle costs
# more than a small kernel. Keep only one case: the references of a large one take gigabytes.
_LAST: dict[tuple[Case, str], Expected] = {}


def expected_for(spec: Spec, case: Case, home: str) -> Expected:
    """Inputs, oracle and simulated reference of `case`, on the device `home`."""
    if (case, home) not in _LAST:
        # Rows of one layer share its weights while a reference to them exists. Release another layer's weights first,
        # because two sets take gigabytes.
        last = {name: tensor for before in _LAST.values() for name, tensor in before.inputs.items()}
        _LAST.clear()
        shapes = {name: spec.shape(name, case) for name in spec.tensors_of(case)}
        shared = [last.pop(name) for name in list(last) if tuple(last[name].shape) == shapes.get(name)]
        last.clear()
        inputs = reference(case.op).make_inputs(case, home)
        del shared
        _LAST[case, home] = expected_of(case, inputs)
    return _LAST[case, home]


def judge(
    row: Row,
    run: str,
    specs: Path | None = None,
    failures: Path | None = None,
    outputs: Path | None = None,
    programs: Path | None = None,
    bench: Bench = HERE,
) -> Record:
    """Judges `row`. Faults of the backend, executor or kernel become a status, never an exception.

    `run`: id of the run. `specs`: folder of the specs (None: ours). Folders to write to, None to write nothing:
    `failures` takes the bundle of a failure, `outputs` the outputs, `programs` the PTX. `bench`: the default builds and
    runs in this process, unaudited; a run passes runners.
    """
    started = time.perf_counter()
    findings = _Findings()
    try:
        _investigate(row, _specs(specs), findings, bench)
    except UnsupportedError as error:
        findings.conclude("unsupported", str(error))
    except DeviceLostError as error:
        # The kernel lost the device, so the row fails as with a broken rule on the VM.
        findings.conclude("failed", str(error))
    except RunnerFaultError as error:
        findings.conclude("error", str(error))
        findings.traceback = error.trace
    except RunnerDiedError as died:
        late = f"no verdict within {bench.timeout_s:g} host seconds: {died.hung}"
        findings.conclude("timed_out", late) if died.late else findings.conclude("crashed", str(died))
    except (Exception, SystemExit) as error:
        findings.conclude("error", explain_error(error))
        findings.traceback = "".join(traceback.format_exception(error))
    ptx, outs, lost = findings.ptx, findings.outputs, ""
    if outputs is not None and outs:
        lost = unwritten(lambda: leave_outputs(outputs, row, outs))
    if programs is not None and ptx is not None:
        lost = unwritten(lambda: leave_program(programs, ptx)) or lost
    if lost and findings.status != "passed":
        findings.sentence += f" (not all evidence is kept: {lost})"
    bundle = _bundle(row, findings, failures, specs)
    return record_of(
        run,
        row,
        findings.status,
        findings.sentence,
        Evidence(
            findings.metrics,
            findings.counters,
            program_sha256(findings.ptx),
            findings.input_sha256,
            bundle,
            findings.artifact,
            findings.audit_host_seconds,
        ),
        host_seconds=time.perf_counter() - started,
        specs=specs,
    )


def _investigate(row: Row, specs: Mapping[str, Spec], findings: _Findings, bench: Bench) -> None:
    deadline = time.monotonic() + bench.timeout_s
    spec = specs[row.op]
    case = spec.parse_case(row.case)
    built = bench.runners.build(row, case, deadline)
    findings.ptx, findings.artifact = built.ptx, built.artifact
    assembling = _assembling(row, built, bench.assemblies)
    expected = expected_for(spec, case, home_of(layouts_of(spec, case), bench.runners.device(row, deadline)))
    findings.inputs, findings.oracle = expected.inputs, expected.oracle
    began = time.perf_counter()
    ran = bench.runners.run(row, built, (spec, case, expected.inputs), deadline)
    seconds = time.perf_counter() - began
    findings.input_sha256 = ran.arena.input_sha256
    findings.outputs = ran.outputs
    findings.counters = {**ran.counters, **needed_work(case)}
    if ran.violation:
        # The run stopped there. Complaints about the remaining outputs would hide the cause.
        findings.conclude("failed", ran.violation)
        return
    judgement = compared(spec, expected, ran.outputs)
    findings.metrics = judgement.metrics
    wrong = complaints(ran.arena, expected, judgement)
    if not wrong and judgement.passed:
        wrong = _unfit(row, built.ptx) or _refusals(assembling)
    passed = judgement.passed and not wrong
    if passed and isinstance(bench.runners, Processes) and bench.audits and bench.audits.due(row, seconds):
        began = time.perf_counter()
        wrong = Audit(row, spec, expected, built, ran, bench.runners, deadline).complaint()
        findings.audit_host_seconds = time.perf_counter() - began
    findings.conclude("failed" if wrong or not judgement.passed else "passed", wrong)


def _assembling(row: Row, built: Built, assemblies: Assemblies | None) -> Future[list[Assembled]] | None:
    # A user's own executor may emulate programs that are not PTX.
    if assemblies is None or built.ptx is None or ":" in row.executor:
        return None
    return assemblies.begin(built.ptx, row.target)


def _refusals(assembling: Future[list[Assembled]] | None) -> str:
    found = assembling.result() if assembling else []
    return "; ".join(
        f"the assembler {one.assembler} refuses the program: {one.sentence}" for one in found if one.refused
    )


def _unfit(row: Row, ptx: str | None) -> str:
    """What is wrong with a program's `.target` (PTX ISA 11.1.2); "" if nothing is."""
    if ptx is None or ":" in row.executor:
        return ""
    said = [words.split(",")[0].strip() for words in _TARGET.findall(ptx)]
    if said == [row.target]:
        return ""
    what = f"says .target {' and '.join(said)}" if said else "has no .target"
    return f"the program {what}, and the row is of {row.target}: what ran does not show what was claimed"


def _bundle(row: Row, findings: _Findings, failures: Path | None, specs: Path | None) -> str | None:
    if failures is None or findings.status not in ("failed", "error", "crashed"):
        return None
    try:
        place = write_bundle(failures, row, findings, specs)
    except OSError as error:
        findings.sentence += f" (no bundle: cannot write to {failures}: {error.strerror})"
        return None
    findings.sentence = f"{findings.sentence.rstrip('.')}. Evidence: {place}"
    return str(place)
