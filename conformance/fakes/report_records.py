"""Made-up records for tests of the report: a full matrix of both ops, and records that try to break out of the page.

The matrix has both backends and peers, two targets, a VM and a device, several runs. Statuses, errors, counters and
times follow from a seed; nothing in it is a measurement.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import inf, nan
from pathlib import Path
from random import Random

from rich.console import Console

from conformance.fakes.backends import specs
from conformance.fakes.results import H200, write
from megamoe.contract import Case, Row, Status, Temperature
from megamoe.records.lines import AnyLine, Evidence, Figures, Record, RunHeader, Timing, record_of
from megamoe.report.material import Material, gather
from megamoe.report.page import Extras, page
from megamoe.report.text import tables

TARGETS = ("sm_90a", "sm_100a")
BACKENDS = ("cutedsl", "ptx")
PEERS = {"fmha": ("fa3", "flash-attn-4", "torch-sdpa-cudnn"), "nvfp4_moe": ("humming", "torch-grouped-mm")}
CEILINGS = {"copy_bytes_per_s": 4.25e12, "bf16_flops_per_s": 797e12, "flushed_l2_ratio": 2.4}
DEVICE = H200.model_copy(update={"name": "Simulated H200", **CEILINGS})


def full_matrix(runs: int = 3, seed: int = 0, samples: int = 120, one_in: int = 1) -> Iterator[list[AnyLine]]:
    """The lines of each run, the oldest first: cases of the profiles `full` (VM) and `gpu` (device).

    One case in `one_in` has run; on the VM, the whole published table has.
    """
    for number in range(runs):
        random = Random(f"{seed} {number}")
        run = f"2026110{number + 1}T000000Z-0000000{number}"
        yield [
            _header(run, number), *_vm_lines(run, random, one_in), *_device_lines(run, random, samples, one_in)
        ]  # fmt: skip


def write_runs(folder: Path, lines: Sequence[Sequence[AnyLine]]) -> list[Path]:
    """Writes a file for each run in `folder`."""
    paths = [folder / f"run{number}.jsonl" for number in range(len(lines))]
    for path, of_run in zip(paths, lines, strict=True):
        path.write_text("".join(f"{line.model_dump_json()}\n" for line in of_run), encoding="utf-8")
    return paths


def _header(run: str, number: int) -> RunHeader:
    return RunHeader(
        run=run, started=f"2026-11-0{number + 1}T00:00:00+00:00", selection={"profile": "full"}, owed_rows=1,
        git_revision=f"{number}" * 40, megamoe="0.1.0", python="3.12.0", torch="2.11.0", numpy="2.4.6",
        platform="Linux-simulated", machine="x86_64", cpu_count=16, device=DEVICE, software={"triton": "3.6.0"},
    )  # fmt: skip


def _vm_lines(run: str, random: Random, one_in: int) -> Iterator[AnyLine]:
    table = {case.id for case in specs()["fmha"].profile("schedules").cases}
    for spec in (specs()[op] for op in PEERS):
        cases = spec.profile("full").cases
        for case in (case for at, case in enumerate(cases) if at % one_in == 0 or case.id in table):
            for backend in BACKENDS:
                for target in TARGETS:
                    yield _record(run, Row(case.id, backend, target, "vm", "eager"), random)
                    yield _figures(run, case, backend, target)


def _device_lines(run: str, random: Random, samples: int, one_in: int) -> Iterator[AnyLine]:
    for spec in (specs()[op] for op in PEERS):
        for case in spec.profile("gpu").cases[::one_in]:
            for backend in (*BACKENDS, *PEERS[spec.op]):
                yield _record(run, Row(case.id, backend, "sm_90a", "gpu", "eager"), random)
                for temperature in ("cold", "hot"):
                    yield _timing(run, case, backend, temperature, random, samples)


def _status(random: Random) -> Status:
    return random.choices(("passed", "failed", "unsupported", "timed_out", "crashed"), (97, 1, 1, 0.5, 0.5))[0]


def _record(run: str, row: Row, random: Random) -> Record:
    status = _status(random)
    fixed = Random(str(row))
    flops, moved = fixed.randrange(1 << 20, 1 << 36), fixed.randrange(1 << 14, 1 << 30)
    error = fixed.uniform(1.1, 9.0) if status == "failed" else fixed.uniform(0.1, 0.9)
    judged = status in ("passed", "failed")
    metrics = {
        f"{tensor}.{name}": value
        for tensor in ("o", "lse")
        for name, value in (("rms", error / 256), ("rms.bar", 1 / 256), ("max", error / 64), ("max.bar", 1 / 64),
                            ("cosine", 1 - error / 1e6))
    }  # fmt: skip
    counters = {name: fixed.randrange(1 << 18) for name in _COUNTED} if row.executor == "vm" else {}
    counters |= {"mma_flops": flops * fixed.choice((1, 1, 2, 8)), "tma_load_bytes": int(moved * fixed.uniform(0.9, 3))}
    counters |= {"smem_bank_conflicts": counters.get("smem_wavefronts", 0) // fixed.choice((3, 20, 1 << 30))}
    sentence = "" if status == "passed" else f"{row.case}: o.rms error {error:.3g} is above its bar"
    counted = {**(counters if row.executor == "vm" else {}), "useful_flops": flops, "minimum_bytes": moved}
    program = hashlib.sha256(f"{row.case} {row.backend} {row.target}".encode()).hexdigest()
    inputs = {name: hashlib.sha256(f"{row.case} {name}".encode()).hexdigest() for name in ("q", "k", "v")}
    evidence = Evidence(metrics if judged else {}, counted if judged else {}, program, inputs)
    return record_of(run, row, status, sentence, evidence, 0.5)


_COUNTED = (
    "barrier_waits", "smem_wavefronts", "mbarrier_stalls", "tma_loads", "mma_instructions", "instructions_move",
    "instructions_memory", "instructions_warp", "instructions_alu", "instructions_control", "instructions_mbarrier",
    "instructions_fence", "instructions_tmem", "instructions_float", "instructions_special", "instructions_convert",
    "instructions_mma", "instructions_tma", "tmem_columns",
)  # fmt: skip


def _figures(run: str, case: Case, backend: str, target: str) -> Figures:
    fixed = Random(f"{case.id} {backend} {target}")
    kernel = {"registers": fixed.randrange(64, 255), "spill_bytes": 0, "smem_bytes": fixed.randrange(1 << 17)}
    digest = hashlib.sha256(f"{case.id} {backend} {target}".encode()).hexdigest()
    return Figures(
        run=run, case=case.id, op=case.op, backend=backend, target=target, assembler="ptxas 13.1",
        program_sha256=digest, cubin_sha256=digest[::-1], kernels={f"{case.op}_kernel": {**kernel, "code_bytes": 9216}},
    )  # fmt: skip


def _timing(run: str, case: Case, backend: str, temperature: Temperature, random: Random, samples: int) -> Timing:
    fixed = Random(f"{case.id} {backend}")
    floor = Random(case.id).uniform(1, 500)
    time = floor / fixed.uniform(0.08, 0.98)
    status: Status = "passed" if fixed.random() < 0.95 else "unsupported"
    taken = (
        tuple(round(time * (1 + abs(random.gauss(0, 0.02))), 3) for _ in range(samples)) if status == "passed" else ()
    )
    return Timing(
        run=run, case=case.id, op=case.op, backend=backend, target="sm_90a", executor="gpu", temperature=temperature,
        method="graph", status=status, sentence="" if taken else "hd=512 is more than it takes", samples_us=taken,
        rounds=tuple(at // 10 for at in range(len(taken))), discarded={"throttled": 2} if taken else {},
        stopped_by="precision" if taken else None, floor_us=round(floor, 3), floor_by="bytes",
    )  # fmt: skip


SPECS = specs()
NOW = datetime(2026, 11, 21, 18, 0, tzinfo=UTC)
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "é 漢字 \u2028 \u202e rtl \x00 \ufffd 🙂",
    "[/bold] [red]no markup[/red] \\",
    "{{ 7 * 7 }} {% raw %}",
    "x" * 10_000,
)


def hostile_records() -> list[Record]:
    rows = [Row(f"fmha:hd=64,t={t},s_k=128", "ptx", "sm_100a", "vm", "eager") for t in range(1, len(HOSTILE) + 1)]
    found = [record_of("run-1", row, "failed", text, host_seconds=1.0) for row, text in zip(rows, HOSTILE, strict=True)]
    odd = Row("fmha:it's <b>odd</b>", "back'end", "sm_100a", "vm", "eager")
    metrics = {"o.rms": nan, "o.rms.bar": 0.1, "o.max": inf, "o.max.bar": 1.0, "o.cosine": -inf, "a2.wrong": 3.0}
    return [
        *found,
        record_of("run-1", odd, "failed", "NaN", Evidence(metrics, {"mma_flops": 10**15, "useful_flops": 3}), 1.0),
    ]


def material_of(tmp_path: Path, *lines: AnyLine) -> Material:
    return gather([write(tmp_path / "lines.jsonl", *lines)])


def data_of(material: Material) -> dict[str, object]:
    """Reads the data back from the page's text."""
    return data_in(page(material, Extras(SPECS, NOW)))


def data_in(text: str) -> dict[str, object]:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert len(found) == 1, "the page has its data once"
    return json.loads(found[0])


def printed(material: Material) -> str:
    """The output of `megamoe report --text` on a terminal of 200 columns."""
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        console.print(tables(material, SPECS))
    return capture.get()
