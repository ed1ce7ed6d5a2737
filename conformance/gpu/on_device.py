"""All checks that need a device, in one go: python3 -m conformance.gpu.on_device OUT [--carried FOLDER].

Each section runs in its own process, so that a fault leaves the others alone. Its findings are printed and written to
OUT. The exit status is the worst section's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SECTION_SECONDS = 280
FAULT_SECONDS = 45.0
PEERS = {"hot": "do_bench_cudagraph", "do_bench_cudagraph": "do_bench_cudagraph"}
PROBES = ("product", "exchange", "cutedsl-tvm_ffi", "cutedsl-packed", "fmha-64", "fmha-128", "fmha-256", "fmha-512")
CASES = tuple(f"fmha:hd=64,t=4,s_k=256{',seed=' * bool(seed)}{seed or ''}" for seed in range(11))
WANTED = {1: "failed", 3: "timed_out", 5: "failed", 7: "failed", 9: "error"}


def facts(out: Path, carried: Path | None) -> bool:
    """Writes the executor's description of the device, and software versions."""
    from backends.gpu.executor import EXECUTOR

    for name in ("torch", "triton", "cuda-bindings", "nvidia-ml-py", "apache-tvm-ffi", "nvidia-cutlass-dsl"):
        print(f"{name}: {_version(name)}")
    print(f"python: {platform.python_version()}")
    reasons = {target: EXECUTOR.unavailable(target) for target in ("sm_90a", "sm_100a")}
    print(f"unavailable: {reasons}")
    began = time.perf_counter()
    found = EXECUTOR.facts()
    print(f"facts in {time.perf_counter() - began:.1f} s: {found.model_dump_json(indent=1)}")
    print(f"throttled: {EXECUTOR.throttled()}; asked again: {EXECUTOR.throttled()}")
    (out / "facts.json").write_text(found.model_dump_json(indent=1))
    return reasons["sm_90a"] is None


def probe(name: str) -> Callable[[Path, Path | None], bool]:
    """Section: one probe on the device, compared with the VM's outputs."""

    def section(out: Path, carried: Path | None) -> bool:
        from backends.gpu.executor import EXECUTOR
        from conformance.gpu.probe import differences, load

        if carried is None:
            raise SystemExit("the results of the VM are needed: --carried FOLDER, as conformance.gpu.pack makes it")
        held = load(carried / f"{name}.probe")
        good = True
        for attempt in range(3):
            found = held.on(EXECUTOR, "cuda")
            unequal = differences(found, held.expected)
            good = good and not any(unequal.values())
            sizes = {output: tensor.numel() for output, tensor in found.items()}
            print(f"run {attempt}: elements that differ from the VM's: {unequal} of {sizes}")
            for output in (output for output, count in unequal.items() if count):
                difference = (found[output].double() - held.expected[output].double()).abs()
                print(f"  {output}: largest difference {difference.nan_to_num(0.0).max():.3g}")
        return good

    return section


def faults(out: Path, carried: Path | None) -> bool:
    """Section: rows that break the device, each between two rows that must pass."""
    from megamoe.contract import Row
    from megamoe.judge.run import RunSettings, judged
    from megamoe.records.files import RecordWriter
    from megamoe.records.provenance import run_header
    from megamoe.spec.selection import Selection

    rows = [Row(case, "conformance.fakes.broken_kernels:FAULTY", "sm_90a", "gpu", "eager") for case in CASES]
    header = run_header(Selection(cases=CASES), len(rows))
    good = True
    with RecordWriter(out / "faults.jsonl") as writer:
        writer.append(header)
        for record in judged(rows, RunSettings(header.run, timeout_s=FAULT_SECONDS)):
            wanted = WANTED.get(CASES.index(record.case), "passed")
            good = good and record.status == wanted
            mark = "as wanted" if record.status == wanted else f"WANTED {wanted}"
            print(f"{record.case} -> {record.status} ({mark}), {record.judge_host_seconds} s: {record.sentence}")
            writer.append(record)
    return good


def rows(out: Path, carried: Path | None) -> bool:
    """Section: every cell of the full profile that our kernels have for this device, judged as usual."""
    from megamoe.judge.run import RunSettings, judged
    from megamoe.records.files import RecordWriter
    from megamoe.records.provenance import run_header
    from megamoe.spec.load import load_specs
    from megamoe.spec.selection import Selection, owed_rows

    selection = Selection("full", ops=("fmha",), backends=("ptx",), targets=("sm_90a",), executors=("gpu",))
    owed = owed_rows(load_specs(), selection)
    header = run_header(selection, len(owed))
    found: dict[str, int] = {}
    with RecordWriter(out / "rows.jsonl") as writer:
        writer.append(header)
        for record in judged(owed, RunSettings(header.run, jobs=4, timeout_s=FAULT_SECONDS)):
            found[record.status] = found.get(record.status, 0) + 1
            writer.append(record)
            if record.status != "passed":
                print(f"{record.case} -> {record.status}: {record.sentence}")
    print(f"{len(owed)} rows: {found}")
    return found.get("passed") == len(owed)


def times(out: Path, carried: Path | None) -> bool:
    """Section: the stopwatch against triton.testing.do_bench."""
    from conformance.gpu.agreement import KERNELS, compared

    table: dict[str, object] = {}
    good = True
    for name, make in KERNELS.items():
        try:
            medians, mhz = compared(make())
        except Exception:
            traceback.print_exc()
            good = False
            continue
        table[name] = {"us": medians, "sm_mhz": mhz}
        for way, found in medians.items():
            other = statistics.median(medians[PEERS.get(way, "do_bench")])
            ratio = f"{statistics.median(found) / other:.4f} of do_bench's"
            print(f"{name:12} {way:20} {' '.join(f'{one:10.3f}' for one in found)} us, {ratio}, MHz {mhz[way]}")
    (out / "times.json").write_text(json.dumps(table, indent=1))
    return good


SECTIONS: Mapping[str, Callable[[Path, Path | None], bool]] = {
    "facts": facts,
    **{name: probe(name) for name in PROBES},
    "rows": rows,
    "times": times,
    "faults": faults,
}


def main() -> int:
    """Runs every section, or only the named one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder that takes the results")
    parser.add_argument("--carried", type=Path, help="folder with the probes, as conformance.gpu.pack makes it")
    parser.add_argument("--section", choices=SECTIONS, help="only this one, in this process")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), help="these, each in a process")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.section:
        return 0 if SECTIONS[given.section](given.out, given.carried) else 1
    codes = {name: _in_a_process(name, given.out, given.carried) for name in given.only}
    print(f"sections: {codes}")
    return max(codes.values(), default=0)


def _in_a_process(name: str, out: Path, carried: Path | None) -> int:
    print(f"===== {name}", flush=True)
    began = time.perf_counter()
    command = [sys.executable, "-u", "-m", "conformance.gpu.on_device", str(out), "--section", name]
    command += ["--carried", str(carried)] if carried else []
    try:
        code = abs(subprocess.run(command, timeout=SECTION_SECONDS, check=False).returncode)
    except subprocess.TimeoutExpired:
        code = 124
    print(f"===== {name}: status {code} after {time.perf_counter() - began:.1f} s", flush=True)
    return code


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
