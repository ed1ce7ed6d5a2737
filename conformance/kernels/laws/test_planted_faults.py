"""Each law catches the fault planted for it, says so in one line that reruns it, and passes kernels that are legal."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import Phase, given, settings

from conformance.fakes import fmha as fake_fmha
from conformance.kernels.laws.hunt import EXAMPLES, hunt, hunting, searching
from conformance.kernels.laws.law import BrokenLawError, Machine, laws_of, spec_of
from conformance.kernels.laws.trial import OutOfScopeError, Tally, Trial, conduct, trials

LAWS = laws_of("fmha")


def machine_of(backend: str) -> Machine:
    return Machine(f"{fake_fmha.__name__}:{backend.upper()}", "sm_100a", f"{fake_fmha.__name__}:EXECUTOR")


@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault, (_, name) in fake_fmha.LAW_FAULTS.items()])
def test_a_law_catches_its_fault(fault: str, name: str) -> None:
    with pytest.raises(BrokenLawError) as caught:
        hunt(LAWS[name], machine_of(fault), searching)
    line = str(caught.value)
    assert line.startswith(f"{name} is broken: fmha:"), f"the law and the case come first: {line}"
    assert "\n" not in line, f"a failure is one line: {line}"
    assert LAWS[name].sentence in line, f"the failure does not state the law: {line}"


def test_every_law_has_a_planted_fault() -> None:
    without = set(LAWS) - {name for _, name in fake_fmha.LAW_FAULTS.values()}
    assert not without, f"no fault in fakes/fmha.py shows that these laws can fail: {sorted(without)}"


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("backend", fake_fmha.STYLES)
def test_a_legal_kernel_keeps_the_law(name: str, backend: str) -> None:
    tally = hunt(LAWS[name], machine_of(backend))
    assert tally.held >= EXAMPLES // 2, f"only {tally.held} of {EXAMPLES} drawn cases were tried"


def test_a_failure_reruns_as_printed() -> None:
    with pytest.raises(BrokenLawError) as caught:
        hunt(LAWS["gqa_equals_expanded_mha"], machine_of("kv_head_modulo"), searching)
    words = shlex.split(str(caught.value).partition("Rerun the case: ")[2].partition(" Rerun the law:")[0])
    assert words[:2] == ["megamoe", "run"], f"not a command: {words}"
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert set(options) == {"--case", "--backend", "--target", "--executor", "--schedule"}, f"options: {options}"
    assert spec_of("fmha").parse_case(options["--case"]).id == options["--case"]


def test_a_failure_is_shrunk() -> None:
    shrinking = settings(searching, phases=[Phase.generate, Phase.shrink])
    with pytest.raises(BrokenLawError) as caught:
        hunt(LAWS["schedule_independent"], machine_of("schedule_decides_order"), shrinking)
    simplest = ("fmha:hd=64,t=1,s_k=128:", "fmha:hd=64,t=1,s_k=129:")
    assert str(caught.value).split(" ")[3] in simplest, f"two tiles are not the simplest case: {caught.value}"


def test_a_failure_names_coordinate_and_both_values() -> None:
    law, case = LAWS["batch_invariant"], spec_of("fmha").parse_case("fmha:hd=64,t=1,s_k=1,batch=2")
    with pytest.raises(BrokenLawError, match=r"o at batch=0, heads=0, t=0, hd=\d+: \S+ as sequence 1 of 2, \S+ alone"):
        conduct(law, machine_of("first_batch_read"), Trial(case, ("eager",)), Tally())


def test_cases_that_a_backend_declines_do_not_count() -> None:
    tally = hunt(LAWS["bitwise_repeatable"], machine_of("narrow"))
    assert tally.held, "a backend with one hd was not tried on that hd"
    assert tally.declined, "no case was declined, so that nothing was shown"


def test_a_backend_that_declines_everything_is_skipped_with_its_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match="no kernel that works"):
        hunt(LAWS["bitwise_repeatable"], machine_of("nothing"))


def test_a_given_case_is_the_only_one_tried() -> None:
    law, seen = LAWS["kv_permutation"], set[str]()

    @hunting
    @given(trials(law, "fmha:hd=128,t=2,s_k=9", ["lazy"]))
    def collect(trial: Trial) -> None:
        seen.add(repr(trial))

    collect()
    assert seen == {"fmha:hd=128,t=2,s_k=9 under lazy"}
    with pytest.raises(OutOfScopeError, match="says nothing about"):
        trials(law, "fmha:hd=128,t=2,s_k=9,causal=true", [])
