"""Each law of NVFP4 MoE catches the faults planted for it, and passes kernels that are legal."""

from __future__ import annotations

import pytest

from conformance.fakes.nvfp4_moe import LAW_FAULTS, STYLES
from conformance.kernels.laws.hunt import EXAMPLES, hunt, searching
from conformance.kernels.laws.law import BrokenLawError, Machine, laws_of

LAWS = laws_of("nvfp4_moe")
# A kernel that takes liberties must still be the same kernel, whatever runs beside it: these do, to the bit.
LEGAL = ("correct", "truncating")


def machine_of(backend: str) -> Machine:
    return Machine(f"conformance.fakes.nvfp4_moe:{backend.upper()}", "sm_100a", "conformance.fakes.nvfp4_moe:EXECUTOR")


@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault, (_, name) in LAW_FAULTS.items()])
def test_a_law_catches_its_fault(fault: str, name: str) -> None:
    with pytest.raises(BrokenLawError) as caught:
        hunt(LAWS[name], machine_of(fault), searching)
    line = str(caught.value)
    assert line.startswith(f"{name} is broken: nvfp4_moe:"), f"the law and the case come first: {line}"
    assert "\n" not in line, f"a failure is one line: {line}"


def test_every_law_has_a_planted_fault() -> None:
    without = set(LAWS) - {name for _, name in LAW_FAULTS.values()}
    assert not without, f"no fault in fakes/nvfp4_moe.py shows that these laws can fail: {sorted(without)}"


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("backend", LEGAL)
def test_a_legal_kernel_keeps_the_law(name: str, backend: str) -> None:
    assert backend in STYLES, f"{backend} is no style"
    tally = hunt(LAWS[name], machine_of(backend))
    assert tally.held >= EXAMPLES // 2, f"only {tally.held} of {EXAMPLES} drawn cases were tried"
