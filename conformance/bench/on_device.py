"""Benchmarks that need a device, in sections: python3 -m conformance.bench.on_device OUT SECTION...

Each section is a session of bench_rows.py (A/A: ten sessions) in its own process, stopped after its share of time.
Records and pytest-benchmark's JSON go to OUT, packed as OUT/SECTION.tar.gz. The exit status is the worst section's. A
failing row makes it nonzero, so look at the records.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory

BENCH = "conformance/bench/bench_rows.py"
GEMMS = ("humming", "torch-grouped-mm")
REPEATED = ("ptx", "torch-sdpa-cudnn", "torch-sdpa-efficient", "fa3")
# Section -> seconds in all, number of sessions, options of each session.
SECTIONS: dict[str, tuple[float, int, tuple[str, ...]]] = {
    "small": (
        200.0,
        1,
        ("--op", "fmha", "--profile", "gpu", "--where", "hd=64|128,t=1|128,s_k=128|512,heads=1,window=null"),
    ),
    "decode": (420.0, 1, ("--op", "fmha", "--profile", "gpu", "--where", "s_k=8192|32768")),
    # The second GEMM of one rank's experts, with 1, 4, 16, 64 and 256 rows each: the peers that run on Hopper have it.
    "gemms": (
        300.0,
        1,
        (
            *("--op", "nvfp4_moe", "--profile", "gpu"),
            *("--where", "hidden=7168,num_experts=48,stage=l2,activations=nvfp4"),
            *(part for name in GEMMS for part in ("--backend", name)),
        ),
    ),
    # Kernels of 4 us to 500 us, four backends, each session in its own processes.
    "aa": (
        300.0,
        10,
        (
            *("--op", "fmha", "--profile", "gpu"),
            *("--where", "hd=128|256,t=4,s_k=128|8192,batch=1|4,heads=1|64,kv_heads=1|8,window=null"),
            *(part for name in REPEATED for part in ("--backend", name)),
        ),
    ),
}


def session(out: Path, name: str, options: tuple[str, ...], seconds: float) -> int:
    """Runs one session of bench_rows.py. Returns its exit status, or 124 if its time ran out."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=line",
        BENCH,
        "--benchmark-only",
        "--executor",
        "gpu",
        *options,
    ]
    command += ["--target", "sm_90a"]
    command += ["--output", str(out / f"{name}.jsonl"), f"--benchmark-json={out / name}.json", "--benchmark-quiet"]
    try:
        return subprocess.run(command, timeout=max(seconds, 1.0), check=False).returncode
    except subprocess.TimeoutExpired:
        return 124


def section(out: Path, name: str) -> int:
    """Runs the sessions of a section until its time runs out."""
    seconds, sessions, options = SECTIONS[name]
    began, worst, longest = time.monotonic(), 0, 0.0
    with TemporaryDirectory() as folder:
        for number in range(sessions):
            started = time.monotonic()
            left = seconds - (started - began)
            if left < longest:
                print(f"{name}: time for {number} of {sessions} sessions only")
                break
            stem = f"{name}-{number}" if sessions > 1 else name
            status = session(Path(folder), stem, options, left)
            longest = max(longest, time.monotonic() - started)
            print(f"{stem}: status {status} after {time.monotonic() - began:.0f} s", flush=True)
            worst = max(worst, status)
        with tarfile.open(out / f"{name}.tar.gz", "w:gz") as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.add(path, path.name)
    return worst


def main() -> int:
    """Runs the requested sections, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=list(SECTIONS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    return max(section(given.out, name) for name in given.sections)


if __name__ == "__main__":
    sys.exit(main())
