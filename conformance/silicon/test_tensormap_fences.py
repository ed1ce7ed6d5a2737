"""The machine blames the kernels of tensormap_fences.py that copied through an old map on an H200, and those that
the ISA leaves undefined; the fenced ones are clean."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from backends.vm.faults import Findings
from backends.vm.load import load
from backends.vm.machine.machine import Machine
from backends.vm.tensor.tensor_map import encode_tensor_map
from conformance import ROOT
from conformance.silicon.tensormap_fences import BOX, MAP_BYTES, Change, changes, text

STALE = json.loads((ROOT / "results/records/h200-tensormap-fences.json").read_text("utf-8"))["stale_words"]
CTAS = 2


def found(one: Change, schedule: str, source: str = "") -> tuple[list[str], list[int]]:
    """The rules of the findings, and the words that the CTAs have copied."""
    machine = Machine(schedule, step_budget=100_000)
    machine.findings = Findings()
    maps, out = np.zeros((CTAS, MAP_BYTES), np.uint8), np.zeros((CTAS, BOX), np.uint32)
    tensors = [machine.memory.add(f"x{value}", np.full(BOX, value, np.uint32).view(np.uint8), writable=False)
               for value in (1, 2)]  # fmt: skip
    maps[:] = np.frombuffer(encode_tensor_map(tensors[0].base, "u32", [BOX], [], [BOX]), np.uint8)
    places = [machine.memory.add("maps", maps.reshape(-1)).base, tensors[1].base,
              machine.memory.add("out", out.reshape(-1).view(np.uint8)).base]  # fmt: skip
    kernel = load(source or text(one)).entry(one.name)
    machine.launch(kernel, (CTAS, 1, 1), (BOX, 1, 1), [struct.pack("<Q", place) for place in places])
    return sorted({finding.rule for finding in machine.findings.by_site.values()}), np.unique(out).tolist()


@pytest.mark.parametrize("one", list(changes()), ids=lambda one: one.name)
@pytest.mark.parametrize("schedule", ["eager", "lazy", "late_cta:0", "random:0"])
def test_a_changed_map_is_fenced(one: Change, schedule: str) -> None:
    rules, words = found(one, schedule)
    lacking = [] if one.acquires else ["tensor-map-not-acquired"]
    if one.acquires and not one.fenced:
        lacking = ["tensor-map-not-released"]
    assert rules == lacking
    assert STALE[one.name] == 0 or not one.acquires, "an H200 copied through the old map in spite of the acquire"
    assert words == [2], "the machine copies through the changed map"


def test_an_acquire_ahead_of_the_change_is_none() -> None:
    one = Change("replace", used=True, releases=True, acquires=True)
    acquire = f"  fence.proxy.tensormap::generic.acquire.gpu [%map], {MAP_BYTES};\n"
    source = text(one)
    assert source.count(acquire) == 1
    early = source.replace(acquire, "").replace("  @!%first bra SKIP;\n", f"{acquire}  @!%first bra SKIP;\n")
    assert found(one, "eager", early)[0] == ["tensor-map-not-acquired"]
