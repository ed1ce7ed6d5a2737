"""The harness handles ops that differ: stages with their own tensors, codes, padding, ops without a kernel."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from conformance.fakes import backends as fake_backends
from conformance.kernels.laws.law import specs
from megamoe import ops
from megamoe.cli.main import main
from megamoe.contract import Case
from megamoe.judge.arena import Arena, Layout
from megamoe.judge.tolerance import compare
from megamoe.ops import Codes, Latitude, fmha, reference, referenced_ops
from megamoe.ops.nvfp4_moe import inputs as moe_inputs
from megamoe.spec.load import load_spec
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import Selection, SelectionError, not_offered, owed_rows
from megamoe.spec.spec import Spec

SPECS = specs()
FAKE = fake_backends.__name__
CASE = Case("codes", (), "normal", 0, "codes:n=8")

STAGED = """\
op: staged
doc: Two stages.
axes:
  n: {type: int, min: 1, max: 8, doc: elements}
  stage: {type: str, in: [whole, first, second], default: whole, doc: what runs}
tensors:
  x: {shape: [n], dtype: f32, role: {stage: {whole: input, first: input}}}
  middle: {shape: [n], dtype: f32, role: {stage: {first: output, second: input}}}
  y: {shape: [n], dtype: f32, role: {stage: {whole: output, second: output}}}
matrices:
  all:
    n: [2]
    stage: [whole, first, second]
inputs: [normal]
laws: [matches_reference]
tolerance:
  cosine: {value: 0.99, reason: as published}
  noise_ratio: {value: 2.0, reason: twice the noise}
profiles:
  smoke: {doc: All of it., schedules: [eager], matrices: [all]}
"""


def staged(tmp_path: Path, text: str = STAGED) -> Spec:
    (tmp_path / "staged.yaml").write_text(text)
    return load_spec(tmp_path / "staged.yaml")


# Roles that depend on an axis


def test_a_tensor_has_another_role_in_another_stage(tmp_path: Path) -> None:
    spec = staged(tmp_path)
    roles = {
        case["stage"]: {name: tensor.role for name, tensor in spec.tensors_of(case).items()}
        for case in spec.cases("all")
    }
    assert roles == {
        "whole": {"x": "input", "y": "output"},
        "first": {"x": "input", "middle": "output"},
        "second": {"middle": "input", "y": "output"},
    }
    with pytest.raises(SpecError, match="has no middle: stage is whole"):
        spec.shape("middle", spec.case(n=2))


@pytest.mark.parametrize(
    ("there", "instead", "sentence"),
    [
        ("{stage: {whole: input", "{stagee: {whole: input", "no axis of text 'stagee'"),
        ("{stage: {whole: input", "{n: {whole: input", "no axis of text 'n'"),
        ("{stage: {first: output, second", "{stage: {first: output, secnd", "stage is never 'secnd'"),
        (
            "whole: input, first: input",
            "whole: inputs, first: input",
            "role.stage.whole: must be 'input' or 'output', not 'inputs'",
        ),
        ("{whole: output, second: output}}", "{whole: output}, n: {}}", "role"),
        ("{whole: output, second: output}", "{whole: output}", "with role: output if stage is second"),
    ],
)
def test_spoilt_roles_are_refused(there: str, instead: str, sentence: str, tmp_path: Path) -> None:
    assert STAGED.count(there) == 1, f"{there!r} must be in the spec once"
    with pytest.raises(SpecError, match=sentence):
        staged(tmp_path, STAGED.replace(there, instead))


# Outputs of codes, free elements, settled oracles


def codes(seen: list[float], lowest: list[float], highest: list[float]) -> Codes:
    parts = (torch.tensor([values], dtype=torch.float64) for values in (seen, lowest, highest))
    return Codes(*parts, axes=("row", "column"), rows=torch.tensor([5]))


def verdict_on(given: Codes):
    bytes_ = torch.zeros(8, 2, dtype=torch.uint8)
    outputs = {"a2": bytes_}
    return compare(
        CASE, outputs, outputs, outputs, SPECS["fmha"].tolerance, False, latitude=Latitude(codes={"a2": given})
    )


def test_codes_are_right_within_their_intervals() -> None:
    verdict = verdict_on(codes([0.0, 1.0, 1.5, -6.0], [0.0, 1.0, 1.0, -6.0], [0.0, 1.0, 1.5, -6.0]))
    assert verdict.passed, verdict.sentence
    assert verdict.metrics == {"a2.wrong": 0.0, "a2.undecided": 1.0, "a2.share.wrong": 0.0}


@pytest.mark.parametrize("wrong", [0.5, -1.0, 3.0, math.nan])
def test_a_code_outside_of_its_interval_is_named(wrong: float) -> None:
    verdict = verdict_on(codes([0.0, wrong, 1.0], [0.0, 1.0, 1.0], [0.0, 1.5, 1.0]))
    assert not verdict.passed
    assert "worst at row=5, column=1: seen" in verdict.sentence, verdict.sentence
    assert "correct is 1 to 1.5" in verdict.sentence, verdict.sentence


def test_free_elements_may_hold_anything() -> None:
    right = torch.ones(4, 3)
    seen, free = right.clone(), torch.zeros(4, 3, dtype=torch.bool)
    seen[2], free[2] = math.nan, True
    held = SPECS["fmha"].tolerance
    assert compare(CASE, {"y": seen}, {"y": right.double()}, {"y": right}, held, False, free={"y": free}).passed
    assert not compare(CASE, {"y": seen}, {"y": right.double()}, {"y": right}, held, False).passed, "the others not"


def test_a_settled_oracle_leaves_the_noise_as_it_is() -> None:
    """The kernel's choices move its reference, not the allowed distance from it."""
    oracle, moved = torch.ones(4, 64).double(), torch.full((4, 64), 2.0).double()
    simulated, held = oracle.bfloat16(), SPECS["fmha"].tolerance
    given = Latitude(oracle={"y": moved})
    right = compare(CASE, {"y": moved.bfloat16()}, {"y": oracle}, {"y": simulated}, held, False, latitude=given)
    assert right.passed, right.sentence
    wrong = compare(
        CASE, {"y": (moved * 1.02).bfloat16()}, {"y": oracle}, {"y": simulated}, held, False, latitude=given
    )
    assert not wrong.passed, "two per cent off the settled oracle"


# Memory


def test_free_elements_need_not_be_written() -> None:
    arena = Arena.of_layouts({"y": Layout((4, 3), torch.bfloat16, "output")}, {})
    free = torch.zeros(4, 3, dtype=torch.bool)
    free[1:] = True
    assert arena.unwritten({"y": free}) == {"y": 3}
    arena.tensors["y"][0] = 1.0
    assert arena.unwritten({"y": free}) == {"y": 0}


def test_a_byte_that_looks_like_poison_is_a_byte() -> None:
    arena = Arena.of_layouts({"codes": Layout((64, 4), torch.uint8, "output")}, {})
    assert arena.unwritten() == {"codes": 256}
    arena.tensors["codes"][::2] = 0x11
    assert arena.unwritten() == {"codes": 0}, "four bytes of 0xA5 may be codes"
    arena.poison()
    arena.tensors["codes"][:60] = 0x11
    assert arena.unwritten() == {"codes": 16}, "sixteen in a row are not"


# Ops that not every backend has


ONE_OP = fake_backends.NamedBackend("works", "fmha")
HERE = f"{__name__}:ONE_OP"


def test_an_op_without_a_kernel_owes_no_row_and_is_named() -> None:
    selection = Selection(backends=(HERE,))
    assert {row.op for row in owed_rows(SPECS, selection)} == {"fmha"}
    others = [f"{op} is left out: no kernel of it in {HERE}" for op in SPECS if op != "fmha"]
    assert others, "there is one op, so nothing is shown"
    assert not_offered(SPECS, selection) == others
    with_target = Selection(backends=(HERE,), targets=("sm_100a",))
    assert {row.op for row in owed_rows(SPECS, with_target)} == {"fmha"}, "nor if a target is named"


def test_an_op_without_a_kernel_that_is_asked_for_is_owed() -> None:
    asked = Selection(ops=("nvfp4_moe",), backends=(HERE,), targets=("sm_100a",))
    assert {row.op for row in owed_rows(SPECS, asked)} == {"nvfp4_moe"}
    with pytest.raises(SelectionError, match=r"holds no row.*nvfp4_moe is left out: no kernel of it"):
        owed_rows(SPECS, Selection(ops=("nvfp4_moe",), backends=(HERE,)))


def test_filters_and_names_that_one_op_has_select_that_op(capsys: pytest.CaptureFixture[str]) -> None:
    rows = owed_rows(SPECS, Selection(where=("hd=64,t=1",), backends=(f"{FAKE}:WORKS",)))
    assert {row.op for row in rows} == {"fmha"}
    assert main(["list", "--matrix", "slices"]) == 0
    assert "fmha:" not in capsys.readouterr().out, "matrix slices is one of nvfp4_moe alone"
    with pytest.raises(SelectionError, match="no selected case has an axis 'head_dim'"):
        owed_rows(SPECS, Selection(where=("head_dim=64",), backends=(f"{FAKE}:WORKS",)))


def test_every_op_has_a_spec_and_a_reference() -> None:
    """A module in the ops folder is an op; a module in an op's own folder is not."""
    assert referenced_ops() == tuple(sorted(specs()))


def test_an_op_may_be_named_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is matched by prefix: fmha_x and nvfp4_moe_inputs are separate ops."""
    for name in ("fmha_x", "nvfp4_moe_inputs"):
        (tmp_path / f"{name}.py").write_text(f"ABSOLUTE_SCALE = {{'{name}': 1.0}}\n")
    before = referenced_ops()
    monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(tmp_path)])
    referenced_ops.cache_clear()
    try:
        assert referenced_ops() == tuple(sorted((*before, "fmha_x", "nvfp4_moe_inputs")))
        assert reference("fmha_x").ABSOLUTE_SCALE == {"fmha_x": 1.0}
        assert reference("nvfp4_moe_inputs").ABSOLUTE_SCALE == {"nvfp4_moe_inputs": 1.0}
        assert reference("fmha").ABSOLUTE_SCALE == {"lse": 1.0}
    finally:
        referenced_ops.cache_clear()


@pytest.mark.parametrize("op", ["attention", "fmha_inputs", "stages"])
def test_an_unknown_op_is_refused_with_a_sentence(op: str) -> None:
    with pytest.raises(ValueError, match=rf"no reference for op '{op}'; references exist for: .*fmha"):
        reference(op)


DISTRIBUTIONS = {"fmha": fmha.DISTRIBUTIONS, "nvfp4_moe": moe_inputs.DISTRIBUTIONS}


@pytest.mark.parametrize("op", DISTRIBUTIONS)
def test_the_spec_and_the_reference_name_the_same_distributions(op: str) -> None:
    assert set(SPECS[op].inputs) == set(DISTRIBUTIONS[op])
    case = dataclasses.replace(SPECS[op].profile("smoke").cases[0], inputs="uniform")
    with pytest.raises(ValueError, match=rf"no input distribution 'uniform' for {op}; there are: normal"):
        reference(op).make_inputs(case)


@pytest.mark.parametrize("op", DISTRIBUTIONS)
def test_a_simulated_reference_refuses_a_lowered_precision(op: str) -> None:
    case = SPECS[op].profile("smoke").cases[0]
    inputs = reference(op).make_inputs(case)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ValueError, match=r"float32 matmul precision is 'medium'.*needs 'highest'"):
            reference(op).simulated(case, inputs)
    finally:
        torch.set_float32_matmul_precision("highest")
