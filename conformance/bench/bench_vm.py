"""The cost of the VM and the harness on this machine, beside the bars of the issues: `nox -s bench -- vm`.

Each benchmark runs a user's command in a fresh process, so the time includes imports and worker start-up. `extra_info`
holds the bar, the number of rows judged and the peak memory of the process tree. No test asserts a time: the table at
the end says which bars hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from backends.vm.load import load
from backends.vm.ptx.parser import parse
from megamoe.contract import load_backend
from megamoe.spec.load import load_specs

MEBIBYTE = 2**20
EXPERT = "nvfp4_moe:hidden=7168,intermediate=3072,num_experts=1,tokens=128"


def _tree_memory(root: psutil.Process) -> int:
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _run(arguments: list[str]) -> dict[str, int]:
    """Runs `megamoe ARGUMENTS`; returns the peak memory of its process tree in bytes and its exit status."""
    process = subprocess.Popen([sys.executable, "-m", "megamoe", *arguments], stdout=subprocess.DEVNULL)
    watched, peak = psutil.Process(process.pid), 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            try:
                peak = max(peak, _tree_memory(watched))
            except psutil.NoSuchProcess:
                return
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    watcher.join()
    return {"peak_bytes": peak, "status": status}


def _command(
    benchmark: BenchmarkFixture, arguments: list[str], bar_seconds: float, bar_mebibytes: float | None
) -> None:
    found = benchmark.pedantic(_run, args=(arguments,), rounds=1, iterations=1)
    benchmark.extra_info["bar_seconds"] = bar_seconds
    benchmark.extra_info["peak_mebibytes"] = round(found["peak_bytes"] / MEBIBYTE)
    benchmark.extra_info["bar_mebibytes"] = bar_mebibytes
    benchmark.extra_info["cores"] = os.cpu_count()
    assert found["status"] == 0, f"`megamoe {' '.join(arguments)}` ended with status {found['status']}: nothing to time"


def test_smoke_profile(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Issue 2: the smoke profile of attention in at most 60 s."""
    arguments = ["run", "--op", "fmha", "--profile", "smoke", "--backend", "ptx"]
    _command(benchmark, [*arguments, "--output", str(tmp_path / "smoke.jsonl")], 60, None)


def test_published_cells(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Issue 2: all 72 cells under one schedule in at most 4 minutes and 4 GiB."""
    arguments = ["run", "--op", "fmha", "--profile", "schedules", "--backend", "ptx", "--schedule", "eager"]
    _command(benchmark, [*arguments, "--output", str(tmp_path / "cells.jsonl")], 240, 4096)


def test_smoke_profile_of_everything(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """The smoke profile of every op on every backend: what `nox -s conformance` does."""
    _command(benchmark, ["run", "--output", str(tmp_path / "all.jsonl")], 90, None)


def test_published_cells_of_cutedsl(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Issue 3: all 72 cells through the compiled CuTeDSL artifact in at most 5 minutes."""
    arguments = ["run", "--op", "fmha", "--profile", "schedules", "--backend", "cutedsl", "--schedule", "eager"]
    _command(benchmark, [*arguments, "--output", str(tmp_path / "cells.jsonl")], 300, None)


@pytest.mark.parametrize("backend", ["ptx", "cutedsl"])
def test_real_expert(benchmark: BenchmarkFixture, tmp_path: Path, backend: str) -> None:
    """Issue 4: one expert of a real layer in at most 90 s and 6 GiB a backend."""
    arguments = ["run", "--case", EXPERT, "--backend", backend, "--output", str(tmp_path / "expert.jsonl")]
    _command(benchmark, arguments, 90, 6144)


def test_full_profile_of_everything(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Issue 4: the full profile of both ops on both backends in at most 25 minutes."""
    _command(benchmark, ["run", "--profile", "full", "--output", str(tmp_path / "full.jsonl")], 1500, None)


def test_list(benchmark: BenchmarkFixture) -> None:
    """Issue 2: `megamoe list` answers in at most 1 s."""
    _command(benchmark, ["list"], 1, None)


@pytest.mark.parametrize("hd", [64, 512])
def test_parse_module(benchmark: BenchmarkFixture, hd: int) -> None:
    """PTX text to syntax tree, without a cache."""
    ptx = _ptx(hd)
    benchmark.extra_info["lines"] = ptx.count("\n")
    benchmark.pedantic(parse, args=(ptx,), rounds=3)


def test_load_module_again(benchmark: BenchmarkFixture) -> None:
    """Loading a decoded module again costs one look-up."""
    ptx = _ptx(64)
    first = load(ptx)
    assert benchmark(load, ptx) is first, "the decoded module was not kept"


def _ptx(hd: int) -> str:
    case = load_specs(None)["fmha"].parse_case(f"fmha:hd={hd},t=1,s_k=128")
    return load_backend("ptx").build(case, "sm_100a").ptx or ""


def test_instruction_rate(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Warp instructions of one cell; `extra_info` has the VM's rate."""
    records = tmp_path / "one.jsonl"
    arguments = ["run", "--case", "fmha:hd=128,t=128,s_k=1024", "--backend", "ptx", "--output", str(records)]
    _command(benchmark, arguments, 60, None)
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    counters = next(line["counters"] for line in lines if line.get("counters"))
    benchmark.extra_info["warp_instructions"] = sum(v for k, v in counters.items() if k.startswith("instructions_"))
