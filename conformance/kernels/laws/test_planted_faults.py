"""Each law catches the fault planted for it, reports it in one line that reruns it, and passes legal kernels."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import Phase, given, settings

from conformance.fakes import fmha, nvfp4_moe
from conformance.kernels.laws.law import BrokenLawError, Machine, laws_of, spec_of
from conformance.kernels.laws.trial import (
    EXAMPLES,
    OutOfScopeError,
    Tally,
    Trial,
    conduct,
    hunt,
    hunting,
    searching,
    trials,
)

FAKES = {"fmha": fmha, "nvfp4_moe": nvfp4_moe}
# Legal kernels may take liberties, but their bits must not depend on what runs beside them. These keep to that.
LEGAL = {"fmha": tuple(fmha.STYLES), "nvfp4_moe": ("correct", "truncating")}
LAWS = {op: laws_of(op) for op in FAKES}
FMHA = LAWS["fmha"]


def machine_of(backend: str, op: str = "fmha") -> Machine:
    fake = FAKES[op].__name__
    return Machine(f"{fake}:{backend.upper()}", "sm_100a", f"{fake}:EXECUTOR")


@pytest.mark.parametrize(
    ("op", "fault", "name"),
    [(op, fault, name) for op, fake in FAKES.items() for fault, (_, name) in fake.LAW_FAULTS.items()],
)
def test_a_law_catches_its_fault(op: str, fault: str, name: str) -> None:
    with pytest.raises(BrokenLawError) as caught:
        hunt(LAWS[op][name], machine_of(fault, op), searching)
    line = str(caught.value)
    assert line.startswith(f"{name} is broken: {op}:"), f"the law and the case come first: {line}"
    assert "\n" not in line, f"a failure is one line: {line}"
    assert LAWS[op][name].sentence in line, f"the failure does not state the law: {line}"


@pytest.mark.parametrize("op", FAKES)
def test_every_law_has_a_planted_fault(op: str) -> None:
    without = set(LAWS[op]) - {name for _, name in FAKES[op].LAW_FAULTS.values()}
    assert not without, f"no fault in fakes/{op}.py shows that these laws can fail: {sorted(without)}"


@pytest.mark.parametrize(
    ("op", "backend", "name"),
    [(op, backend, name) for op, legal in LEGAL.items() for backend in legal for name in LAWS[op]],
)
def test_a_legal_kernel_keeps_the_law(op: str, backend: str, name: str) -> None:
    assert backend in FAKES[op].STYLES, f"{backend} is no style"
    tally = hunt(LAWS[op][name], machine_of(backend, op))
    assert tally.held >= EXAMPLES // 2, f"only {tally.held} of {EXAMPLES} drawn cases were tried"


def test_a_failure_reruns_as_printed() -> None:
    with pytest.raises(BrokenLawError) as caught:
        hunt(FMHA["gqa_equals_expanded_mha"], machine_of("kv_head_modulo"), searching)
    words = shlex.split(str(caught.value).partition("Rerun the case: ")[2].partition(" Rerun the law:")[0])
    assert words[:2] == ["megamoe", "run"], f"not a command: {words}"
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert set(options) == {"--case", "--backend", "--target", "--executor", "--schedule"}, f"options: {options}"
    assert spec_of("fmha").parse_case(options["--case"]).id == options["--case"]


def test_a_failure_is_shrunk() -> None:
    shrinking = settings(searching, phases=[Phase.generate, Phase.shrink])
    with pytest.raises(BrokenLawError) as caught:
        hunt(FMHA["schedule_independent"], machine_of("schedule_decides_order"), shrinking)
    simplest = ("fmha:hd=64,t=1,s_k=128:", "fmha:hd=64,t=1,s_k=129:")
    assert str(caught.value).split(" ")[3] in simplest, f"two tiles are not the simplest case: {caught.value}"


def test_a_failure_names_coordinate_and_both_values() -> None:
    law, case = FMHA["batch_invariant"], spec_of("fmha").parse_case("fmha:hd=64,t=1,s_k=1,batch=2")
    with pytest.raises(BrokenLawError, match=r"o at batch=0, heads=0, t=0, hd=\d+: \S+ as sequence 1 of 2, \S+ alone"):
        conduct(law, machine_of("first_batch_read"), Trial(case, ("eager",)), Tally())


def test_cases_that_a_backend_declines_do_not_count() -> None:
    tally = hunt(FMHA["bitwise_repeatable"], machine_of("narrow"))
    assert tally.held, "a backend with one hd was not tried on that hd"
    assert tally.declined, "no case was declined, so that nothing was shown"


def test_a_backend_that_declines_everything_is_skipped_with_its_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match="no kernel that works"):
        hunt(FMHA["bitwise_repeatable"], machine_of("nothing"))


def test_a_given_case_is_the_only_one_tried() -> None:
    law, seen = FMHA["kv_permutation"], set[str]()

    @hunting
    @given(trials(law, "fmha:hd=128,t=2,s_k=9", ["lazy"]))
    def collect(trial: Trial) -> None:
        seen.add(repr(trial))

    collect()
    assert seen == {"fmha:hd=128,t=2,s_k=9 under lazy"}
    with pytest.raises(OutOfScopeError, match="says nothing about"):
        trials(law, "fmha:hd=128,t=2,s_k=9,causal=true", [])
