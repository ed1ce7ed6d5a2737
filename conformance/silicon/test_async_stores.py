"""st.async and red.async work in the machine where they work on an H200, and reserved shared memory lies where it does
there."""

from __future__ import annotations

import json

import numpy as np
import pytest

import megamoe.vm
from conformance import ROOT
from conformance.silicon.async_stores import HELD, OFFSETS, SENT, Store, offsets_text, stores, text
from megamoe.contract.machine import KernelFault

ANSWERS = json.loads((ROOT / "results/records/h200-async-stores.json").read_text("utf-8"))


def launched(source: str, entry: str, ctas: int, words: int, schedule: str = "eager") -> list[int]:
    """The words that an entry leaves. KernelFault for a broken rule that is an error."""
    out = np.zeros(words, np.uint32)
    megamoe.vm.Device("sm_90a", schedule=schedule).launch(source, entry, ctas, 32, out)
    return out.tolist()


@pytest.mark.parametrize("one", [*stores()], ids=lambda one: one.name)
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_asynchronous_stores_work_where_they_do_on_an_h200(one: Store, schedule: str) -> None:
    answer = ANSWERS["left"][one.name]
    if isinstance(answer, list):
        assert launched(text(one), one.name, one.words, one.words, schedule) == answer
        return
    assert "ILLEGAL_INSTRUCTION" in answer, f"an H200 ended the launch otherwise: {answer}"
    with pytest.raises(KernelFault) as fault:
        launched(text(one), one.name, one.words, one.words, schedule)
    assert fault.value.rule == "async-without-cluster"


def test_an_h200_stores_and_adds() -> None:
    """Without this, kernels that leave what they found would agree on nothing."""
    sent = {"own": [SENT, SENT + 1], "other": [SENT + 1, SENT]}
    for to, words in sent.items():
        assert ANSWERS["left"][f"st_async_cluster_of_2_{to}"] == words
        assert ANSWERS["left"][f"red_async_cluster_of_2_{to}"] == [HELD + word for word in words]


def test_reserved_shared_memory_lies_where_it_does_on_an_h200() -> None:
    wanted = [ANSWERS["reserved_smem_offsets"][name] for name in OFFSETS]
    assert launched(offsets_text(), "offsets", 1, len(OFFSETS)) == wanted
