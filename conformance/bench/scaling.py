"""How a run scales over nodes: `nox -s ray -- scaling` renews results/records/scaling.json for docs/scaling.md.

Each node is a Ray node of this host with one `vm`, pinned to its own core; the command and the head share all cores.
Times are taken when lines arrive in the record file: the user waits for these. Three parts do not shrink with nodes:
`header_s` (start of Python, selection, digests), `first_s` (the cluster is joined, its processes start and the first
row is judged) and `tail_s` (agreements, compiler figures, verdict). The rest, `rows_s`, is spread over the nodes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from conformance import ROOT
from megamoe.contract.scratch import scratch_folder
from megamoe.records.files import read_records, write_file
from megamoe.records.provenance import git_revision

RECORD = ROOT / "results/records/scaling.json"
OPTIONS = ("--profile", "smoke", "--backend", "ptx")
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Scaled:
    """Wall-clock seconds of one run on `nodes` nodes. `judged_s`: the judge's host seconds summed over all rows.

    `longest_s`: host seconds of the longest row, a lower limit for any number of nodes. `load`: the machine's, over a
    minute.
    """

    nodes: int
    rows: int
    header_s: float
    first_s: float
    rows_s: float
    tail_s: float
    judged_s: float
    longest_s: float
    load: float

    @property
    def wall_s(self) -> float:
        """Seconds from the command's start to its end."""
        return self.header_s + self.first_s + self.rows_s + self.tail_s


def scaled(nodes: int, folder: Path, options: Sequence[str] = OPTIONS) -> Scaled:
    """Runs once on a fresh cluster of `nodes`. RuntimeError if a row did not pass."""
    cores = sorted(os.sched_getaffinity(0))
    cluster = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for index in range(nodes):
            os.sched_setaffinity(0, {cores[index % len(cores)]})
            cluster.add_node(num_cpus=1, resources={"vm": 1})
        os.sched_setaffinity(0, cores)
        return _watched(cluster, nodes, folder / f"{nodes}.jsonl", options)
    finally:
        os.sched_setaffinity(0, cores)
        cluster.shutdown()


def _watched(cluster: Any, nodes: int, output: Path, options: Sequence[str]) -> Scaled:
    command = [sys.executable, "-m", "megamoe", "run", *options, "--ray", cluster.address, "--output", str(output)]
    load = os.getloadavg()[0]
    began = time.monotonic()
    run = psutil.Popen([*command, "--quiet"], cwd=ROOT, stdout=subprocess.DEVNULL)
    arrived: list[float] = []
    while run.poll() is None:
        with suppress(FileNotFoundError):
            lines = output.read_bytes().count(b'"kind":"r')
            arrived += [time.monotonic()] * (lines - len(arrived))
        time.sleep(_POLL_S)
    ended = time.monotonic()
    records = read_records(output).records
    if run.returncode or any(record.status != "passed" for record in records):
        raise RuntimeError(f"a run on {nodes} nodes ended with status {run.returncode}: see {output}")
    seconds = [record.judge_host_seconds or 0.0 for record in records]
    header, first, last = arrived[0], arrived[1], arrived[-1]
    return Scaled(
        nodes,
        len(records),
        header_s=round(header - began, 2),
        first_s=round(first - header, 2),
        rows_s=round(last - first, 2),
        tail_s=round(ended - last, 2),
        judged_s=round(sum(seconds), 2),
        longest_s=round(max(seconds), 2),
        load=round(load, 2),
    )


def main() -> None:
    """Measures one and two nodes by turns, twice each."""
    with scratch_folder("scaling") as folder:
        runs: list[Scaled] = []
        for nodes in (1, 2, 2, 1):
            runs.append(scaled(nodes, folder))
            (folder / f"{nodes}.jsonl").unlink()
            print(f"{nodes} nodes: {runs[-1].wall_s:.1f} s, {runs[-1]}", flush=True)
    told = {
        "command": " ".join(["megamoe run", *OPTIONS, "--ray ADDRESS"]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(ROOT),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "runs": [{**asdict(one), "wall_s": round(one.wall_s, 2)} for one in runs],
    }
    write_file(RECORD, json.dumps(told, indent=1) + "\n", "the record of scaling")


if __name__ == "__main__":
    main()
