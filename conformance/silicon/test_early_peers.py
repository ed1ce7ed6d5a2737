"""The machine blames the kernels of early_peers.py that lost arrivals or failed on an H200, and no others."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from backends.vm.faults import Fault, Findings
from backends.vm.load import load
from backends.vm.machine.machine import LaunchRequest, Machine, launch_shape
from conformance import ROOT
from conformance.silicon.early_peers import PROCESSES, Early, kernels, text

RECORD = json.loads((ROOT / "results/records/h200-early-peers.json").read_text("utf-8"))
ALONE, BESIDE = "1 of 1 at once", "3 of 4 at once"
EXPECTED = {"uninitialised-shared"}
"""The first exchange reads what the shared memory happens to hold."""
CLUSTERS = 2
"""Clusters of a launch on the machine."""


def launched(one: Early, schedule: str) -> tuple[set[str], int, int]:
    """The rules of the findings, and the numbers of early and lost accesses."""
    machine, counts = Machine(schedule), np.zeros(2, np.uint32)
    machine.findings = Findings()
    ctas = CLUSTERS * one.cluster
    places = [machine.memory.add("counts", counts.view(np.uint8)).base,
              machine.memory.add("times", np.zeros(8 * ctas, np.uint8)).base]  # fmt: skip
    function = load(text(one)).entry(one.name)
    shape = launch_shape(function, (ctas, 1, 1), (one.threads, 1, 1), (one.cluster, 1, 1), 0, explicit=True)
    params = [struct.pack("<QQ", *places)[at : at + 8] for at in (0, 8)]
    rules = set[str]()
    try:
        machine.perform(LaunchRequest(function, shape, [*params, struct.pack("<I", 1)]))
    except Fault as last:
        rules = {last.rule}
    early, lost = counts.tolist()
    return rules | {finding.rule for finding in machine.findings.by_site.values()}, early, lost


@pytest.mark.parametrize("one", [one for one in kernels() if (one.cluster, one.threads) == (4, 32)],
                         ids=lambda one: one.name)  # fmt: skip
@pytest.mark.parametrize("schedule", ["eager", "lazy", "late_cta:0", "late_cta:1"])
def test_the_machine_blames_accesses_that_nothing_orders_after_the_start(one: Early, schedule: str) -> None:
    rules, early, lost = launched(one, schedule)
    if one.how == "met":
        assert not rules - EXPECTED, f"blamed after a barrier of the cluster: {rules}"
        assert (early, lost) == (0, 0)
    else:
        assert ("mbarrier-misuse" if one.what == "arrival" else "peer-not-started") in rules


def _told(mode: str, how: str, *, arrivals: bool) -> Iterator[Mapping[str, Any]]:
    for one in kernels():
        if one.how == how and (one.what == "arrival") == arrivals:
            yield RECORD[mode][one.name]


def _sum(mode: str, how: str, what: str, *, arrivals: bool = False) -> int:
    return sum(told[what] for told in _told(mode, how, arrivals=arrivals))


@pytest.mark.parametrize("mode", [ALONE, BESIDE])
def test_what_an_h200_counted(mode: str) -> None:
    assert _sum(mode, "met", "early") == _sum(mode, "met", "lost") == 0, "a barrier of the cluster orders nothing"
    assert _sum(mode, "met", "lost", arrivals=True) == 0
    assert not [told["failures"] for told in _told(mode, "met", arrivals=False) if told["failures"]]
    assert _sum(mode, "unordered", "early") > 1_000_000, "the kernels show nothing"
    assert _sum(mode, "unordered", "lost") == 0, "the page says that none is lost"
    (control,) = _told(mode, "overwritten", arrivals=False)
    assert control["lost"] > control["words"] / 2, "what is overwritten does not count as lost"


def test_the_page_says_what_an_h200_did() -> None:
    beside = [*_told(BESIDE, "unordered", arrivals=False)]
    failures, processes = sum(len(told["failures"]) for told in beside), PROCESSES[4] * len(beside)
    page = " ".join((ROOT / "docs/rules/cluster-life.md").read_text("utf-8").split())
    for sentence in (
        f"{_sum(ALONE, 'unordered', 'early'):,} of {_sum(ALONE, 'unordered', 'words'):,} accesses",
        f"{failures} of {processes} processes ended",
        f"{_sum(ALONE, 'unordered', 'lost', arrivals=True):,} of "
        f"{_sum(ALONE, 'unordered', 'words', arrivals=True):,} mbarriers",
        *RECORD["exceptions"].values(),
    ):
        assert sentence in page, f"the page does not say: {sentence}"
    assert not [told["failures"] for told in _told(ALONE, "unordered", arrivals=False) if told["failures"]]
