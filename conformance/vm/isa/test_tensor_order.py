"""A tcgen05.cp into an operand of an earlier mma: the ISA does not order them, the machine does, and counts it."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.vm.kernel import EVERY_SCHEDULE, init, tmem_alloc, wait
from conformance.vm.tensor_kernel import COMMIT, EXPECTED, MMA, mma_kernel

COPY = "tcgen05.cp.cta_group::1.128x256b [%r47], %rd10;"
"""All of A to tensor memory."""
FROM_TMEM = MMA.replace("%rd10", "[%r47]")
SIGNAL = COMMIT.replace("[mbar]", "[other]")
BETWEEN = {
    "nothing": ("", True),
    "a commit without a wait": (SIGNAL, True),
    "a commit and its wait": (f"{SIGNAL}\n{wait('other', 0)}", False),
    "a wait for a commit before the mma": ("", True),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_copy_over_an_operand_of_an_mma(name: str) -> None:
    between, counted = BETWEEN[name]
    first = f"{COPY}\n{SIGNAL}\n{wait('other', 0)}" if "before" in name else COPY
    stages = {
        "setup": f"{init('mbar', 'other')}\n{tmem_alloc(32)}\nadd.u32 %r47, %r40, 16;",
        "issue": f"{first}\n{FROM_TMEM}\n{between}\n{COPY}\n{FROM_TMEM}\n{COMMIT}",
    }
    for schedule in EVERY_SCHEDULE:
        data, counters = mma_kernel(stages).run(schedule)
        assert np.array_equal(data["out"], EXPECTED), f"{schedule}: both products must give 16 everywhere"
        copies = counters.get("tmem_unordered_copies", 0)
        assert copies == int(counted), (
            f"{schedule}, {name}: {copies} copies counted as unordered after an mma, not {int(counted)}"
        )


def test_a_copy_to_columns_that_no_mma_reads_is_not_counted() -> None:
    setup = f"{init('mbar')}\n{tmem_alloc(32)}\nadd.u32 %r47, %r40, 16; add.u32 %r39, %r40, 24;"
    issue = f"{COPY}\n{FROM_TMEM}\n{COPY.replace('%r47', '%r39')}\n{COMMIT}"
    for schedule in EVERY_SCHEDULE:
        data, counters = mma_kernel({"setup": setup, "issue": issue}).run(schedule)
        assert np.array_equal(data["out"], EXPECTED), f"{schedule}: the product must give 16 everywhere"
        assert "tmem_unordered_copies" not in counters, (
            f"{schedule}: no mma reads the columns of the second copy, yet it is counted"
        )
