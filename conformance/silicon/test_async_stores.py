"""st.async and red.async work in the machine where they work on an H200, and reserved shared memory lies where it does
there."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from backends.vm.faults import Fault, Findings
from backends.vm.load import load
from backends.vm.machine.machine import LaunchRequest, Machine, launch_shape
from conformance import ROOT
from conformance.silicon.async_stores import HELD, OFFSETS, SENT, Store, offsets_text, stores, text

ANSWERS = json.loads((ROOT / "results/records/h200-async-stores.json").read_text("utf-8"))


def launched(source: str, entry: str, words: int, ctas: int = 1, given: int | None = None, schedule: str = "eager",
             found: Findings | None = None) -> list[int]:  # fmt: skip
    """The words that an entry leaves. Fault for a broken rule that ends the launch."""
    machine, out = Machine(schedule), np.zeros(words, np.uint32)
    machine.findings = Findings() if found is None else found
    params = [struct.pack("<Q", machine.memory.add("out", out.view(np.uint8)).base)]
    function = load(source).entry(entry)
    shape = launch_shape(function, (ctas, 1, 1), (32, 1, 1), (given or 1, 1, 1), 0, explicit=given is not None)
    machine.perform(LaunchRequest(function, shape, params))
    return out.tolist()


@pytest.mark.parametrize("one", [*stores()], ids=lambda one: one.name)
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_asynchronous_stores_work_where_they_do_on_an_h200(one: Store, schedule: str) -> None:
    answer, found = ANSWERS["left"][one.name], Findings()
    given = text(one), one.name, one.words, one.ctas, one.given, schedule, found
    if not isinstance(answer, list):
        assert "ILLEGAL_INSTRUCTION" in answer, f"an H200 ended the launch otherwise: {answer}"
        with pytest.raises(Fault) as fault:
            launched(*given)
        assert fault.value.rule == "async-without-cluster"
        return
    assert launched(*given) == answer
    defined = one.ctas > 1 and (one.distance or one.what == "st.async")
    rules = {finding.rule for finding in found.by_site.values()}
    assert rules == (set() if defined else {"async-to-own-cta"}), "what the ISA does not define is a finding"


def test_an_h200_stores_and_adds() -> None:
    """Without this, kernels that leave what they found would agree on nothing."""
    sent = {"own": [SENT, SENT + 1], "other": [SENT + 1, SENT]}
    for to, words in sent.items():
        for how in ("declared", "given"):
            assert ANSWERS["left"][f"st_async_cluster_of_2_{how}_{to}"] == [*words, 1]
            assert ANSWERS["left"][f"red_async_cluster_of_2_{how}_{to}"] == [*[HELD + word for word in words], 1]


def test_reserved_shared_memory_lies_where_it_does_on_an_h200() -> None:
    wanted = [ANSWERS["reserved_smem_offsets"][name] for name in OFFSETS]
    assert launched(offsets_text(), "offsets", len(OFFSETS)) == wanted
