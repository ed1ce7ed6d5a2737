"""The script that times NVFP4 MoE rows beside peers, without a device: its rows and floors, its error measure, its dry
run. Each checker meets a planted fault."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from conformance.fakes.peers_on_cpu import install
from conformance.gpu.moe_rows import (
    PEERS,
    ROWS,
    Operands,
    Peers,
    Tensors,
    cases_of,
    error_of,
    floor_us,
    main,
    read_bytes,
    spoil,
)
from megamoe.codec.routing import routing
from megamoe.contract import Case
from megamoe.ops.nvfp4_moe.reference import oracle
from megamoe.spec.load import load_specs

SMALL = "nvfp4_moe:hidden=256,intermediate=128,num_experts=3,tokens=12,topk=2"
MOST_WRONG = {"l1": 0.15, "l2": 1e-9}
"""Error limit of a right answer. l1's is compared before its requantisation to four bits."""


def _answered(stage: str) -> tuple[Case, Tensors]:
    """A small row on the script's operands, with the oracle's outputs."""
    torch.manual_seed(0)
    case = load_specs()["nvfp4_moe"].parse_case(f"{SMALL},stage={stage}")
    tensors = Operands("cpu").tensors(case)
    return case, tensors | oracle(case, tensors)


def test_every_row_is_one_of_the_spec() -> None:
    cases = cases_of(ROWS)
    assert len({case.id for case in cases}) == len(ROWS) == 14, "a row of issue 13 is there twice, or not at all"
    with pytest.raises(KeyError):
        cases_of([f"{ROWS[0]},clamp=0.123"])


def test_floors_are_those_of_the_issue() -> None:
    """Bytes at 4.25 TB/s up to 16 rows an expert, FLOPs at 797 TFLOP/s from 64 rows on."""
    for case in cases_of(ROWS[:5]):
        routes = case.int("tokens") * case.int("topk")
        floor, flops = floor_us(case, routes), 2 * routes * 7168 * 3072 / 797e12 * 1e6
        assert floor is not None, f"{case.id} has no floor"
        weights = read_bytes(case, routes) / 4.25e12 * 1e6
        assert floor >= max(weights, flops) * 0.999, f"{case.id}: a floor of {floor} us, {weights} to read the weights"
        assert floor <= 1.25 * max(weights, flops), f"{case.id}: {floor} us are no floor of {max(weights, flops)}"


@pytest.mark.parametrize("stage", ["l1", "l2"])
def test_the_error_of_a_right_answer_is_small_and_that_of_a_wrong_row_is_not(stage: str) -> None:
    case, tensors = _answered(stage)
    right = error_of(case, tensors)
    assert right < MOST_WRONG[stage], f"{stage}: the oracle's own answer has an error of {right}"
    row = routing(case, tensors["topk_ids"]).row[0]
    name = "rows" if stage == "l2" else "a2_codes"
    tensors[name] = tensors[name].clone()
    tensors[name][row] = 0
    wrong = error_of(case, tensors)
    assert wrong > right + 0.05, f"{stage}: an error of {wrong} with a row of zeros, {right} without"


@pytest.mark.parametrize("stage", ["l1", "l2"])
def test_an_output_that_nobody_wrote_has_a_large_error(stage: str) -> None:
    case, tensors = _answered(stage)
    spoil(case, tensors)
    assert not error_of(case, tensors) < 0.9, f"{stage}: outputs that were never written pass for an answer"


def test_peers_multiply_the_operands_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers' kernels are stand-ins that compute in float32."""
    install(monkeypatch)
    case, tensors = _answered("l2")
    spoil(case, tensors)
    for peer in (Peers().humming, Peers().torch_bf16):
        found = peer(case, tensors).launch()
        assert found is not None, f"{peer.__name__} returns nothing of l2"
        error = error_of(case, tensors, found)
        assert error < 6e-3, f"{peer.__name__}: an error of {error} on the operands of {case.id}"
        found[0] = 0
        assert error_of(case, tensors, found) > 0.05, f"{peer.__name__}: a row of zeros passes for a result"


def test_a_dry_run_names_the_ways_of_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ours.pkl"
    file.write_bytes(pickle.dumps(dict.fromkeys(case.id for case in cases_of(ROWS))))
    assert main([str(tmp_path / "report.json"), "--dry-run", "--programs", str(file)]) == 0, "nothing is missing"
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(ROWS), f"{len(said)} lines for {len(ROWS)} rows"
    for line, case in zip(said, cases_of(ROWS), strict=True):
        peers = () if case["stage"] == "layer" else PEERS
        assert line == f"{case.id}: {', '.join(('ours', *peers))}", f"a dry run says {line!r}"
    assert not (tmp_path / "report.json").exists(), "a dry run writes no report"


def test_a_dry_run_misses_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ours.pkl"
    file.write_bytes(pickle.dumps(dict.fromkeys(case.id for case in cases_of(ROWS[1:]))))
    assert main([str(tmp_path / "report.json"), "--dry-run", "--programs", str(file)]) == 1, "one program is missing"
    assert "not in ours" in capsys.readouterr().out.splitlines()[0], "the row whose program is missing is not named"
