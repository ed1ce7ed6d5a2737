"""Made-up rows, records, figures, claims and baselines for tests of the gate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megamoe.contract import Row, Status
from megamoe.gate.baseline import Baseline, settled, settled_figures
from megamoe.gate.counters import Claim
from megamoe.records.keys import Key
from megamoe.records.lines import Evidence, Figures, Record, RunHeader, record_of
from megamoe.spec.selection import Selection

CASE, OTHER = "fmha:hd=64,t=1,s_k=128", "fmha:hd=64,t=4,s_k=128"
ROW = Row(CASE, "ptx", "sm_100a", "vm", "eager")
NEIGHBOUR = ROW._replace(case=OTHER)
COUNTERS = {"instructions_alu": 100, "mma_flops": 4096, "tma_stores": 2, "useful_flops": 2048}
KERNEL = {"registers": 168, "spill_bytes": 0, "smem_bytes": 1024, "code_bytes": 4096}


def record(row: Row, counters: Mapping[str, int] = COUNTERS, status: Status = "passed", program: str = "p1") -> Record:
    """A record of `row` as a run writes it, with values that no other run would repeat."""
    sentence = "" if status == "passed" else "the outputs are wrong"
    found = record_of("run-7", row, status, sentence, Evidence({"o.rms": 0.125}, counters or {}, program), 1.25)
    return found.model_copy(update={"input_sha256": {"q": "1234"}})


def figures(row: Row, kernel: Mapping[str, int] = KERNEL, assembler: str = "ptxas", entry: str = "fmha") -> Figures:
    """The figures of the program of `row`."""
    return Figures(
        run="run-7",
        case=row.case,
        op=row.op,
        backend=row.backend,
        target=row.target,
        assembler=assembler,
        program_sha256="p1",
        cubin_sha256="c1",
        kernels={entry: kernel},
    )


def baseline(*lines: Record | Figures, path: Path = Path("baseline.jsonl")) -> Baseline:
    """A baseline of these lines."""
    records = {line.row: settled(line) for line in lines if isinstance(line, Record)}
    programs = {Key.of(line): settled_figures(line) for line in lines if isinstance(line, Figures)}
    return Baseline(path, records=records, figures=programs)


def claim(*rows: Row, selection: Selection | None = None) -> Claim:
    """A claim that the baseline holds `rows`, from a run of `selection`."""
    return Claim(frozenset(rows), [selection or Selection()], lambda row: f"megamoe accept '{row}'")


def header(owed_rows: int = 2, run: str = "run-7") -> RunHeader:
    """The header of the run of all these lines."""
    return RunHeader(
        run=run,
        started="2026-11-21T18:00:00+00:00",
        selection={name: "smoke" if name == "profile" else () for name in Selection.__dataclass_fields__},
        owed_rows=owed_rows,
        git_revision="abc",
        megamoe="0.1.0",
        python="3.12.3",
        torch="2.11.0",
        numpy="2.4.6",
        platform="Linux",
        machine="x86_64",
        cpu_count=64,
        software={"nvidia-cuda-nvcc": "13.5.37"},
    )
