"""The machine blames the kernels of warpgroup_waits.py whose sums an H200 spoiled, and no other."""

from __future__ import annotations

import json

import numpy as np
import pytest

import megamoe.vm
from conformance import ROOT
from conformance.silicon.warpgroup_waits import kernels, name, text
from megamoe.contract.machine import KernelFault

WRONG = json.loads((ROOT / "results/records/h200-warpgroup-waits.json").read_text("utf-8"))["wrong_sums_by_warp"]
CHAIN = 4
"""Products of a kernel on the machine. The number changes no order."""


@pytest.mark.parametrize(("late", "waits"), [*kernels()])
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_the_wait_of_one_warp_covers_the_reads_of_all_four(late: str, waits: bool, schedule: str) -> None:
    out, rule = np.zeros(128, np.uint32), ""
    try:
        megamoe.vm.Device("sm_90a", schedule=schedule).launch(text(late, waits, CHAIN), name(late, waits), 1, 128, out)
    except KernelFault as fault:
        rule = fault.rule
    spoiled = sum(WRONG[name(late, waits)])
    assert rule == ("race" if spoiled else ""), f"the machine reports {rule!r}; an H200 spoiled {spoiled} sums"
    assert spoiled or not out.any(), "sums are wrong on the machine"
