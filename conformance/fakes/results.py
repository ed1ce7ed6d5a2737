"""Made-up results: lines of record files, sides of a comparison, and both sides of a gate.

`judged`, `compiled`, `baseline` and `claim` are for tests of the gate: each is about one row, with values that no other
run would repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megamoe.contract import DeviceFacts, Row, Status, Temperature
from megamoe.diff.sides import Side
from megamoe.gate.baseline import Baseline, settled, settled_figures
from megamoe.gate.counters import Claim
from megamoe.gate.expected import Expectation, ExpectedEntry
from megamoe.records.files import RecordFile, RecordWriter
from megamoe.records.keys import Key
from megamoe.records.lines import (
    ERRORS,
    Acceptance,
    Agreement,
    AnyLine,
    Evidence,
    Figures,
    Record,
    RunHeader,
    Timing,
    record_of,
)
from megamoe.records.provenance import digests_of
from megamoe.spec.selection import Selection

CASE, OTHER = "fmha:hd=64,t=1,s_k=128", "fmha:hd=64,t=4,s_k=128"
ROW = Row(CASE, "ptx", "sm_100a", "vm", "eager")
NEIGHBOUR = ROW._replace(case=OTHER)
COUNTERS = {
    "instructions_alu": 100, "instructions_control": 7, "minimum_bytes": 512, "mma_flops": 4096, "tma_stores": 2,
    "useful_flops": 2048,
}  # fmt: skip
KERNEL = {"registers": 168, "spill_bytes": 0, "smem_bytes": 1024, "code_bytes": 4096}
H200 = DeviceFacts(
    name="NVIDIA H200",
    compute_capability="9.0",
    driver="580.65",
    toolkit="13.0",
    multiprocessors=132,
    memory_bytes=150_000_000_000,
    l2_bytes=60_000_000,
    sm_clock_mhz=1980,
)
KNOWN = {
    "case": CASE, "backend": "ptx", "target": "sm_100a", "executor": "vm", "status": "failed", "example": CASE,
    "reason": "the ring of one stage deadlocks", "expires": date(2026, 3, 1),
}  # fmt: skip
AGREEMENT = Agreement(
    run="run-1",
    case=CASE,
    op="fmha",
    target="sm_100a",
    executor="vm",
    schedule="eager",
    backends=("cutedsl", "ptx"),
    metrics={"cutedsl~ptx.o.max": 0.5},
)
ACCEPTANCE = Acceptance(run="run-1", row="a row", reason="on purpose", accepted="2026-11-21", git_revision=None)


def header(
    run: str = "run-1",
    device: DeviceFacts | None = H200,
    software: Mapping[str, str] | None = None,
    owed_rows: int = 1,
    selection: Mapping[str, str | tuple[str, ...]] | None = None,
) -> RunHeader:
    return RunHeader(
        run=run,
        started="2026-11-21T18:00:00+00:00",
        selection=selection or {},
        owed_rows=owed_rows,
        git_revision="abc",
        megamoe="0.1.0",
        python="3.12.3",
        torch="2.11.0",
        numpy="2.4.6",
        platform="Linux",
        machine="x86_64",
        cpu_count=16,
        device=device,
        software=software or {},
    )


def timing(
    samples_us: Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[np.float64],
    rounds: Sequence[int] | None = None,
    *,
    case: str = CASE,
    backend: str = "ptx",
    temperature: Temperature = "cold",
    run: str = "run-1",
    status: Status = "passed",
    program: str | None = None,
) -> Timing:
    """A timing of `samples_us`: an array of shape [rounds, samples], or a flat array that is one round."""
    table = np.atleast_2d(np.asarray(samples_us, dtype=np.float64))
    which = np.repeat(np.arange(table.shape[0]), table.shape[1]).tolist() if rounds is None else list(rounds)
    return Timing(
        run=run,
        case=case,
        op=case.partition(":")[0],
        backend=backend,
        target="sm_90a",
        executor="gpu",
        temperature=temperature,
        method="graph",
        status=status,
        sentence="" if status == "passed" else f"it {status}",
        samples_us=tuple(table.ravel().tolist()) if status == "passed" else (),
        rounds=tuple(which) if status == "passed" else (),
        program_sha256=program,
    )


def record(
    status: Status = "passed",
    counters: Mapping[str, int] | None = None,
    *,
    case: str = CASE,
    backend: str = "ptx",
    schedule: str = "eager",
    run: str = "run-1",
    program: str | None = None,
    inputs: Mapping[str, str] | None = None,
) -> Record:
    return Record(
        run=run,
        case=case,
        op=case.partition(":")[0],
        backend=backend,
        target="sm_100a",
        executor="vm",
        schedule=schedule,
        status=status,
        sentence="" if status == "passed" else f"it {status}",
        counters=counters or {},
        judge_host_seconds=0.1,
        program_sha256=program,
        input_sha256=inputs or {},
    )


def figures(registers: int, assembler: str = "ptxas 13.5", spill_bytes: int = 0) -> Figures:
    return Figures(
        run="run-1",
        case=CASE,
        op="fmha",
        backend="ptx",
        target="sm_100a",
        assembler=assembler,
        program_sha256="ab",
        kernels={"fmha_split": {"registers": registers, "spill_bytes": spill_bytes}},
    )


def side(*lines: AnyLine, label: str = "side") -> Side:
    return Side(label, (RecordFile(Path(label), tuple(lines), None),))


def write(path: Path, *lines: AnyLine) -> Path:
    with RecordWriter(path) as writer:
        for line in lines:
            writer.append(line)
    return path


def judged(row: Row, counters: Mapping[str, int] = COUNTERS, status: Status = "passed", program: str = "p1") -> Record:
    """A record of `row` as a run writes it."""
    sentence = "" if status == "passed" else "the outputs are wrong"
    errors = {f"{name}.{error}": 0.125 for name in ("o", "lse") for error in ERRORS}
    metrics = {**errors, **{f"{name}.bar": 0.25 for name in errors}, "o.cosine": 1.0, "lse.cosine": 1.0}
    found = record_of("run-7", row, status, sentence, Evidence(metrics, counters or {}, program), 1.25)
    return found.model_copy(update={"input_sha256": {"q": "1234", "k": "5678", "v": "9abc"}})


def compiled(row: Row, kernel: Mapping[str, int] = KERNEL, assembler: str = "ptxas", entry: str = "fmha") -> Figures:
    """The compiler figures of the program of `row`."""
    found = figures(0, assembler).model_copy(update={"run": "run-7", "program_sha256": "p1", "cubin_sha256": "c1"})
    about = {"case": row.case, "op": row.op, "backend": row.backend, "target": row.target}
    return found.model_copy(update={**about, "kernels": {entry: kernel}})


def gated(owed_rows: int = 2, run: str = "run-7", specs: Path | None = None, expected: Path | None = None) -> RunHeader:
    """The header of the run behind these lines, with the profile smoke. `specs`, `expected`: None for the
    repository's."""
    selection = {name: "smoke" if name == "profile" else () for name in Selection.__dataclass_fields__}
    made = header(run, None, {"nvidia-cuda-nvcc": "13.5.37"}, owed_rows, selection)
    own = digests_of(specs, expected) if specs or expected else _digests()
    return made.model_copy(update={"digests": own})


@cache
def _digests() -> dict[str, str]:
    return digests_of()


def baseline(*lines: Record | Figures, path: Path = Path("baseline.jsonl")) -> Baseline:
    """A baseline of these lines."""
    records = {line.row: settled(line) for line in lines if isinstance(line, Record)}
    programs = {Key.of(line): settled_figures(line) for line in lines if isinstance(line, Figures)}
    return Baseline(path, records=records, figures=programs)


def claim(*rows: Row, selection: Selection | None = None) -> Claim:
    """A claim that the baseline holds `rows`, from a run of `selection`."""
    return Claim(frozenset(rows), [selection or Selection()], lambda row: f"megamoe accept '{row}'")


def expectation(**changes: object) -> Expectation:
    """The entry that expects ROW to fail until March 2026, with `changes`."""
    entry = {**KNOWN, **changes}
    return Expectation(ExpectedEntry.model_validate(entry), "expected.yaml, line 3")
