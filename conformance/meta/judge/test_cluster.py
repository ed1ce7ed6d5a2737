"""Rows on a Ray cluster of several nodes of this host: one file of records, and a node that dies costs no row.

`nox -s ray` installs Ray and runs this. Without Ray one test remains: the command reports that Ray is missing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from conformance.fakes import backends as fake_backends
from conformance.fakes import simulated_device
from megamoe.bench.run import BenchRun, BenchSettings
from megamoe.bench.timing import Policy
from megamoe.cli.main import main
from megamoe.contract import Row
from megamoe.judge import cluster
from megamoe.judge.cluster import joined, judged_on_cluster, resource_of
from megamoe.judge.run import RunSettings
from megamoe.records.files import read_records
from megamoe.records.lines import Record
from megamoe.spec.selection import Selection

FAKE = fake_backends.__name__
CASES = [f"fmha:hd=64,t={t},s_k=3" for t in range(1, 7)]
pytestmark = [
    # Resources that Ray itself leaves open, and its warnings about future versions.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def _row(case: str, name: str = "WORKS") -> Row:
    return Row(case, f"{FAKE}:{name}", "sm_100a", f"{FAKE}:EXECUTOR", "eager")


@dataclass
class Hosts:
    """A cluster, and its nodes that offer a `vm`. The head offers none."""

    cluster: Any
    nodes: list[Any]

    def lose_a_busy_one(self) -> None:
        """Kills a node that is in the middle of a row."""
        state = import_module("ray._private.state")
        for _ in range(100):
            free = state.available_resources_per_node()
            busy = [node for node in self.nodes if not free.get(node.node_id, {"vm": 1}).get("vm")]
            if busy:
                self.nodes.remove(busy[0])
                self.cluster.remove_node(busy[0], allow_graceful=False)
                return
            time.sleep(0.1)
        raise AssertionError("no node is busy, though rows are left")


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    ray_cluster = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: nox -s ray")
    monkeypatch.chdir(tmp_path)
    found = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield Hosts(found, [found.add_node(num_cpus=1, resources={"vm": 1}) for _ in range(2)])
    finally:
        found.shutdown()


def _records_and_a_lost_node(hosts: Hosts, rows: list[Row]) -> list[Record]:
    """Judges slow `rows`, and kills a node that is in the middle of a row, after the second record."""
    records: list[Record] = []
    with joined(hosts.cluster.address, 1), closing(judged_on_cluster(rows, RunSettings("run-1"))) as judged:
        for record in judged:
            records.append(record)
            if len(records) == 2:
                hosts.lose_a_busy_one()
    return records


def test_a_lost_node_costs_no_row(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_row(case, "DAWDLES") for case in CASES]
    records = _records_and_a_lost_node(hosts, rows)
    assert sorted(record.row for record in records) == sorted(rows), "a row is lost, or was recorded twice"
    assert {record.status for record in records} == {"passed"}, [record.sentence for record in records]
    hosts.nodes.append(hosts.cluster.add_node(num_cpus=1, resources={"vm": 1}))
    monkeypatch.setattr(cluster, "MAX_TRIES", 1)
    found = _records_and_a_lost_node(hosts, rows)
    crashed = [record for record in found if record.status == "crashed"]
    assert crashed, "without a second try the row that the node was at must be lost, or this test kills an idle node"
    assert "or its node, died 1 times" in crashed[0].sentence


def test_one_file_holds_the_whole_run(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [word for case in CASES[:2] for word in ("--case", case)]
    given = [*rows, "--backend", f"{FAKE}:WORKS", "--backend", f"{FAKE}:SCALES", "--executor", f"{FAKE}:EXECUTOR"]
    assert main(["run", *given, "--ray", hosts.cluster.address, "--output", "r.jsonl"]) == 1
    file = read_records(Path("r.jsonl"))
    assert len(file.records) == file.headers[0].owed_rows == 4
    assert {(one.backend.rpartition(":")[2], one.status) for one in file.records} == {
        ("WORKS", "passed"), ("SCALES", "failed"),
    }  # fmt: skip
    assert len(file.agreements) == 2, "outputs come back, so that backends are held against each other"
    bundles = [Path(one.bundle) for one in file.records if one.bundle]
    assert len(bundles) == 2
    assert all((place / "tensors.pt").is_file() for place in bundles), "the evidence of a failure comes back"
    assert all(f"Evidence: {one.bundle}" in one.sentence for one in file.records if one.bundle)


def test_a_benchmark_is_shared_out_by_case(hosts: Hosts) -> None:
    settings = BenchSettings(
        jobs=1, policy=Policy(samples_a_turn=4, min_samples=12, min_rounds=3), ray=hosts.cluster.address
    )
    device = simulated_device.__name__
    rows = [
        Row(case, f"{device}:{name}", "sm_90a", f"{device}:EXECUTOR", "eager")
        for case in CASES[:2]
        for name in ("WORKS", "SLOWER", "WRONG")
    ]
    with BenchRun([*rows, _row(CASES[0])], Selection(), settings, Path("bench.jsonl")) as run:
        found = {outcome.record.row: outcome for outcome in run.outcomes()}
    header = read_records(Path("bench.jsonl")).headers[0]
    assert header.device is not None
    assert header.device.name == "Simulated H0", "a node describes the device"
    for row in rows:
        timed = found[row].timings
        if row.backend.endswith("WRONG"):
            assert {one.status for one in timed} == {"failed"}
        else:
            assert all(len(one.samples_us) >= 12 for one in timed), found[row].record.sentence
            assert {0, 1, 2} <= set(timed[0].rounds), "backends of a case take turns on one node"
    assert found[_row(CASES[0])].record.status == "passed", "rows without a clock are judged there, too"


def test_what_no_node_offers_is_not_run(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "NO_NODE_S", 1.0)
    rows = [_row(CASES[0]), Row(CASES[0], "ptx", "sm_90a", "gpu", "eager")]
    with joined(hosts.cluster.address, 1):
        found = {record.row: record for record in judged_on_cluster(rows, RunSettings("run-1"))}
    assert found[rows[0]].status == "passed"
    assert found[rows[1]].status == "not_run"
    assert "no node of the cluster offers 'H200'" in found[rows[1]].sentence


def test_a_node_with_other_code_judges_nothing(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "digests_of", lambda specs: {"code": "0" * 64})
    with joined(hosts.cluster.address, 1):
        (record,) = judged_on_cluster([_row(CASES[0])], RunSettings("run-1"))
    assert record.status == "error"
    assert "has other code (megamoe, backends, constraints) than the command" in record.sentence


def test_no_cluster_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--case", CASES[0], "--backend", f"{FAKE}:WORKS", "--executor", f"{FAKE}:EXECUTOR"]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["run", *given, "--ray", "local"]) == 2
    assert "--ray needs Ray, which is not installed: in a checkout, pip install -e '.[ray]'" in capsys.readouterr().err
    assert not list(Path("results").glob("runs/*")), "a run that never began leaves no file"


def test_a_row_runs_where_its_device_is() -> None:
    on_device = Row(CASES[0], "ptx", "sm_90a", "gpu", "eager")
    assert resource_of(_row(CASES[0]), {}) == "vm", "what is emulated needs no device"
    assert resource_of(on_device, {"H200": 1}) == "H200"
    assert resource_of(on_device, {"H100": 8}) == "H100"
    assert resource_of(on_device._replace(target="sm_100a"), {"H200": 1}) == "B200", "a target runs on its own devices"
