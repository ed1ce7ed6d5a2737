"""A kernel that crashes, hangs or lies fails only its own row; comparison of backends; samples of large cases."""

from __future__ import annotations

import os
import shutil
import subprocess
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from pebble import ThreadPool

from conformance import ROOT
from conformance.fakes import backends as fake_backends
from conformance.fakes import broken_kernels
from megamoe.cli.main import main
from megamoe.contract import Case, Row, Status
from megamoe.judge.arena import Arena
from megamoe.judge.bundle import heat_map
from megamoe.judge.comparison import Expected, compared, complaints, expected_of
from megamoe.judge.judge import expected_for, judge
from megamoe.judge.run import RunSettings, chosen_for_audits, judged
from megamoe.judge.side_by_side import agreements, leave_outputs
from megamoe.ops import reference
from megamoe.ops.nvfp4_moe.inputs import COUNTED, draw_topk_ids
from megamoe.records.files import read_records
from megamoe.records.lines import Record, record_of
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows

CASE = "fmha:hd=64,t=2,s_k=3"
# Rows take half a second. They must not time out on a machine with six times as much work as cores.
TIMEOUT_S = 3.0


def _row(attribute: str, case: str = CASE) -> Row:
    room = fake_backends.__name__
    return Row(case, f"{room}:{attribute}", "sm_100a", f"{room}:EXECUTOR", "eager")


def _judge(row: Row, failures: Path | None = None) -> Record:
    return judge(row, "run-1", failures=failures)


NEIGHBOURS = [_row("WORKS", f"fmha:hd=64,t={t},s_k=5") for t in range(1, 6)]
MACHINE = f"executor {fake_backends.__name__}:EXECUTOR"
FATES: dict[str, tuple[Status, str]] = {
    "EXITS": ("crashed", f"the process of {MACHINE} died with exit status 3. Rerun: megamoe run --case "),
    "EXITS_QUIETLY": ("crashed", f"the process of {MACHINE} died with exit status 0. Rerun: "),
    "SEGFAULTS": ("crashed", f"the process of {MACHINE} died of SIGSEGV. Rerun: "),
    "HANGS": ("timed_out", f"no verdict within {TIMEOUT_S:g} host seconds: it hung: the process of executor "),
    "RAISES": ("error", "RuntimeError: the tile of 96 does not divide 128 (backends.py, line "),
}


@pytest.fixture(scope="module")
def records() -> dict[Row, Record]:
    doomed = [_row(name) for name in FATES]
    rows = [row for pair in zip(doomed, NEIGHBOURS, strict=False) for row in pair] + NEIGHBOURS[len(doomed) :]
    settings = RunSettings("run-1", jobs=3, timeout_s=TIMEOUT_S)
    with pytest.MonkeyPatch.context() as patch:
        # One pool for all: the others run while one hangs, in the workers that the doomed ones had.
        patch.setattr("megamoe.judge.run.backends_apart", lambda rows: [list(rows)])
        return {record.row: record for record in judged(rows, settings)}


def test_every_row_has_its_record(records: dict[Row, Record]) -> None:
    assert set(records) == {*NEIGHBOURS, *map(_row, FATES)}


@pytest.mark.parametrize("name", FATES)
def test_a_row_that_dies_has_its_status_and_sentence(records: dict[Row, Record], name: str) -> None:
    status, sentence = FATES[name]
    record = records[_row(name)]
    assert record.status == status
    assert record.sentence.startswith(sentence)
    assert record.sentence.endswith(record.row.rerun)


def test_each_real_layer_has_an_audited_row() -> None:
    """Rows of a layer share its weights, so only weights of another seed reveal that a backend caches any."""
    spec = load_specs()["nvfp4_moe"]
    chosen = Selection(profile="gpu", ops=("nvfp4_moe",), backends=("ptx", "cutedsl"), executors=("gpu",))
    rows = owed_rows({spec.op: spec}, chosen)
    picked, layers = chosen_for_audits(rows, None), dict[tuple[object, ...], list[Row]]()
    for row in rows:
        case = spec.parse_case(row.case)
        shapes = {name: spec.shape(name, case) for name in ("w1_codes", "w2_codes") if name in spec.tensors_of(case)}
        if any(2 * prod(shape) > COUNTED for shape in shapes.values()):
            layers.setdefault((row.backend, row.target, *shapes.items()), []).append(row)
    assert layers, "the profile has no real layer, so nothing was tested"
    for layer, rows_of_it in layers.items():
        assert picked.intersection(rows_of_it), f"none of the {len(rows_of_it)} rows of {layer} is audited"


def test_weights_of_a_real_layer_are_let_go_of_when_another_op_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take gigabytes of a device that the judge shares with every runner."""
    monkeypatch.setattr("megamoe.ops.nvfp4_moe.inputs.COUNTED", 128 * 128)
    spec, fmha = (load_specs()[op] for op in ("nvfp4_moe", "fmha"))
    one = spec.case(hidden=128, intermediate=128, num_experts=4, tokens=5)
    weights = weakref.ref(expected_for(spec, one, "cpu").inputs["w1_codes"])
    shared = expected_for(spec, spec.vary(one, tokens=6), "cpu").inputs["w1_codes"]
    assert shared is weights(), "the next row of the layer drew its weights again"
    del shared
    seen: list[bool] = []
    monkeypatch.setattr("megamoe.ops.nvfp4_moe.inputs.draw_topk_ids", partial(_noted, seen, weights))
    other = expected_for(spec, spec.vary(one, hidden=256), "cpu").inputs["w1_codes"]
    assert seen == [True], "two layers' weights are there at once"
    weights = weakref.ref(other)
    del other
    expected_for(fmha, fmha.parse_case(CASE), "cpu")
    assert weights() is None, "a row of attention finds the weights of the rows before it still there"


def _noted(seen: list[bool], weights: Callable[[], torch.Tensor | None], case: Case) -> torch.Tensor:
    """Draws a case's choices, and notes whether `weights` have been freed by then."""
    seen.append(weights() is None)
    return draw_topk_ids(case)


def test_its_neighbours_pass(records: dict[Row, Record]) -> None:
    for row in NEIGHBOURS:
        assert records[row].status == "passed", records[row].sentence


def test_what_an_audit_took_is_told_apart(records: dict[Row, Record]) -> None:
    took = {row: one.audit_host_seconds for row, one in records.items() if one.audit_host_seconds is not None}
    assert NEIGHBOURS[-1] in took, "the last row of a kind is audited, and its record does not say how long that took"
    for row, seconds in took.items():
        assert 0 < seconds < (records[row].judge_host_seconds or 0.0), f"{row}: {seconds} s are no part of the whole"
    assert _judge(_row("WORKS")).audit_host_seconds is None, "a row that is not audited tells what its audit took"


def test_a_row_that_hangs_says_where() -> None:
    """The kernel counts while it polls, so only the wall clock can tell that it will not end."""
    room = broken_kernels.__name__
    row = Row("fmha:hd=64,t=1,s_k=128,seed=11", f"{room}:FAULTY", "sm_90a", "vm", "eager")
    (record,) = judged([row], RunSettings("run-1", timeout_s=2.5))
    assert record.status == "timed_out", record.sentence
    assert "it hung; when its time was up: kernel faulty: " in record.sentence
    for part in ("warp 0", "PTX line", "ld.relaxed.gpu.global.u32 %y, [%p]", "%y = 7"):
        assert part in record.sentence, f"a person who debugs it wants {part!r}: {record.sentence}"


def test_closing_the_iterator_ends_busy_workers() -> None:
    results = judged([_row("WORKS"), _row("HANGS")], RunSettings("run-1", jobs=2, timeout_s=600))
    assert next(results).status == "passed"
    results.close()


def test_workers_that_cannot_start_are_not_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamoe.judge.worker.start_worker", fake_backends.die_at_start)
    found = list(judged([_row("WORKS"), NEIGHBOURS[0]], RunSettings("run-1", jobs=2, timeout_s=TIMEOUT_S)))
    assert [record.status for record in found] == ["crashed", "crashed"]
    assert "no worker process could be started" in found[0].sentence


class _EndedPool(ThreadPool):
    """A pool that ends without reporting its rows, like one whose workers died while they started."""

    def schedule(self, *_: object, **__: object) -> Future[Record]:
        self.stop()
        return Future()


def test_a_pool_that_ends_without_a_word_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamoe.judge.run.worker_pool", lambda workers, module: _EndedPool(max_workers=1))
    (record,) = judged([_row("WORKS")], RunSettings("run-1", timeout_s=TIMEOUT_S))
    assert record.status == "crashed"
    assert record.sentence.startswith("no worker process could be started for this row")


@pytest.mark.parametrize(
    ("name", "status", "sentence"),
    [
        ("WORKS", "passed", ""),
        ("WRITES_NAN", "failed", "tensor o: NaN"),
        (
            "WRITES_PAST_THE_END",
            "failed",
            "guard bytes above tensor o were overwritten, the nearest 0 bytes past its end",
        ),
        ("CHANGES_AN_INPUT", "failed", "input k was changed"),
        ("STOPS_HALF_WAY", "failed", "64 elements of o and 1 element of lse were never written"),
        ("SCALES", "failed", "tensor o: "),
        ("BREAKS_A_RULE", "failed", "warp 0, lane 3: ld.shared reads 4 bytes at 0x10 that nobody wrote"),
        ("RAISES", "error", "RuntimeError: the tile of 96 does not divide 128"),
        ("LEAVES", "error", "SystemExit: the kernel author called exit"),
        ("DECLINES", "unsupported", "hd=64 needs a tile that this backend does not have"),
        ("NOT_A_BACKEND", "unsupported", "is of type int, without name, targets() and build()"),
        ("NOT_THERE", "unsupported", "cannot be loaded"),
    ],
)
def test_a_misbehaving_kernel_has_its_status_and_sentence(name: str, status: Status, sentence: str) -> None:
    record = _judge(_row(name))
    assert record.status == status, record.sentence
    assert sentence in record.sentence
    assert status == "passed" or record.sentence.endswith(f"Rerun: {record.row.rerun}")


def test_a_target_that_the_backend_lacks_is_unsupported() -> None:
    record = _judge(_row("WORKS")._replace(target="sm_90a"))
    assert record.status == "unsupported"
    assert "has fmha for sm_100a, not sm_90a" in record.sentence


def test_a_machine_that_is_not_there_is_unsupported() -> None:
    record = _judge(_row("WORKS")._replace(executor=f"{fake_backends.__name__}:BROKEN_MACHINE"))
    assert record.status == "unsupported"
    assert "it has no such tensor cores" in record.sentence


def test_a_record_carries_counters_metrics_and_the_digest_of_the_program() -> None:
    first, second = _judge(_row("WORKS")), _judge(_row("WORKS", "fmha:hd=64,t=2,s_k=4"))
    assert first.counters["instructions"] == 7
    assert first.metrics["o.rms"] <= first.metrics["o.rms.bar"]
    assert first.program_sha256 != second.program_sha256, "another program must have another digest"
    assert first.judge_host_seconds is not None


def test_a_failure_leaves_its_evidence(tmp_path: Path) -> None:
    record = _judge(_row("SCALES"), tmp_path)
    assert record.bundle is not None
    place = Path(record.bundle)
    assert record.row.rerun in (place / "rerun.sh").read_text()
    assert (place / "program.ptx").read_text() == f"scales\n{CASE}"
    tensors = torch.load(place / "tensors.pt")
    assert torch.equal(tensors["outputs"]["o"], (2 * tensors["outputs"]["o"]) * 0.5)
    assert set(tensors["inputs"]) == {"q", "k", "v"}
    error = np.load(place / "o.error.npy")
    assert error.shape == tensors["oracle"]["o"].shape
    assert error.max() > 0
    assert "columns; ? not finite" in (place / "o.error.txt").read_text()
    assert record.bundle in record.sentence, "the sentence must say where the evidence is"


def test_the_evidence_of_a_large_row_leaves_out_what_its_rerun_makes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamoe.judge.bundle.MAX_KEPT", 1)
    record = _judge(_row("SCALES"), tmp_path)
    assert record.bundle is not None
    assert torch.load(Path(record.bundle) / "tensors.pt") == {}, "all tensors are larger than a byte"
    assert sorted(path.name for path in Path(record.bundle).glob("*.error.*")) == ["lse.error.txt", "o.error.txt"]


def test_a_launch_that_was_refused_has_no_picture_of_its_error(tmp_path: Path) -> None:
    record = _judge(_row("IS_REFUSED"), tmp_path)
    assert record.bundle is not None
    assert not list(Path(record.bundle).glob("*.error.*")), "poison minus the right output is no error of a kernel"
    assert (Path(record.bundle) / "tensors.pt").exists()


def test_an_error_leaves_its_traceback(tmp_path: Path) -> None:
    record = _judge(_row("RAISES"), tmp_path)
    assert record.bundle is not None
    assert "Traceback" in (Path(record.bundle) / "traceback.txt").read_text()


def test_a_bundle_replaces_the_one_before(tmp_path: Path) -> None:
    for leftover in ("first", "second"):
        place = Path(_judge(_row("SCALES"), tmp_path).bundle or "")
        assert not list(place.glob("*.old")), f"{leftover}: an earlier failure left evidence behind"
        (place / "x.old").touch()


def test_the_command_that_reruns_names_the_specs_that_were_given(tmp_path: Path) -> None:
    ours = shutil.copytree(ROOT / "specs", tmp_path / "our specs")
    wanted = f"--specs '{ours}'"
    judged_here = judge(_row("SCALES"), "run-1", specs=ours, failures=tmp_path / "failures")
    (died,) = judged([_row("EXITS")], RunSettings("run-1", timeout_s=TIMEOUT_S, specs=ours))
    for record in (judged_here, died):
        assert record.status != "passed"
        assert record.sentence.endswith(f"{record.row.rerun} {wanted}"), "the command must use the same specs"
    assert wanted in (Path(judged_here.bundle or "") / "rerun.sh").read_text()
    assert "--specs" not in _row("SCALES").rerun, "a run with the specs of the checkout needs no --specs"


def test_a_pass_leaves_none(tmp_path: Path) -> None:
    assert _judge(_row("WORKS"), tmp_path).bundle is None
    assert not os.listdir(tmp_path)


def test_a_heat_map_shows_the_block_that_is_wrong() -> None:
    error = np.zeros((64, 128))
    error[10:12, 4:6] = 1.0
    error[63, 127] = np.nan
    lines = heat_map("o", error).splitlines()[1:]
    marked = [(y, x) for y, line in enumerate(lines) for x, shade in enumerate(line[1:-1]) if shade != " "]
    assert marked == [(5, 2), (31, 63)], "row 10 column 4 falls into block (5, 2), the NaN into the last"
    assert lines[31][-2] == "?"


def test_the_script_of_a_bundle_runs_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    shutil.copy(str(fake_backends.__file__), tmp_path / "own" / "unregistered.py")
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    record = _judge(_row("SCALES")._replace(backend="unregistered:SCALES"), tmp_path)
    script = Path(record.bundle or "") / "rerun.sh"
    ended = subprocess.run([script], cwd=tmp_path, capture_output=True, text=True, check=False)
    # This test's backend is on no user's search path.
    assert ended.returncode == 2, f"megamoe itself must answer: {ended.stderr}"
    assert "the backend 'unregistered:SCALES' cannot be loaded" in ended.stderr


FAKE = fake_backends.__name__


def _left(folder: Path, backend: str, status: Status, o: list[float]) -> Record:
    row = Row(CASE, backend, "sm_100a", "vm", "eager")
    leave_outputs(folder, row, {"o": torch.tensor(o, dtype=torch.bfloat16)})
    return record_of("run-1", row, status, "" if status == "passed" else "it is wrong")


def test_distances_are_those_of_the_outputs(tmp_path: Path) -> None:
    records = [
        _left(tmp_path, "a", "passed", [1.0, 2.0, 3.0, 4.0]),
        _left(tmp_path, "b", "passed", [1.0, 2.0, 3.5, 4.0]),
    ]
    (found,) = agreements("run-1", records, tmp_path)
    assert found.metrics == {"a~b.o.max": 0.5, "a~b.o.rms": 0.25, "a~b.o.unequal": 0.25}
    assert found.alone is None, "two backends that both pass do not stand alone"


def test_nan_in_one_is_unequal_and_in_both_is_not(tmp_path: Path) -> None:
    nan = float("nan")
    records = [_left(tmp_path, "a", "passed", [nan, nan]), _left(tmp_path, "b", "failed", [nan, 1.0])]
    (found,) = agreements("run-1", records, tmp_path)
    assert found.metrics["a~b.o.unequal"] == 0.5
    assert found.metrics["a~b.o.max"] == 0.0, "no element is finite in both"


@pytest.mark.parametrize(
    ("statuses", "alone"),
    [
        ({"a": "passed", "b": "failed"}, "b"),
        ({"a": "passed", "b": "passed", "c": "failed"}, "c"),
        ({"a": "failed", "b": "failed", "c": "passed"}, "c"),
        ({"a": "failed", "b": "failed"}, None),
    ],
)
def test_who_stands_alone(statuses: dict[str, Status], alone: str | None, tmp_path: Path) -> None:
    records = [_left(tmp_path, backend, status, [1.0]) for backend, status in statuses.items()]
    (found,) = agreements("run-1", records, tmp_path)
    assert found.alone == alone, f"of {statuses}"


def test_a_run_says_which_backend_stands_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(fake_backends.__file__).parent))
    options = ["--target", "sm_100a", "--executor", f"{FAKE}:EXECUTOR", "--schedule", "eager", "--jobs", "1"]
    backends = ["--backend", f"{FAKE}:WORKS", "--backend", f"{FAKE}:SCALES"]
    assert main(["run", "--case", CASE, *backends, *options, "--output", "r.jsonl"]) == 1
    assert f"{FAKE}:SCALES stands alone" in capsys.readouterr().out
    (agreement,) = read_records(Path("r.jsonl")).agreements
    assert agreement.alone == f"{FAKE}:SCALES"
    assert agreement.metrics[f"{FAKE}:SCALES~{FAKE}:WORKS.o.max"] > 0.0


SPEC = load_specs()["nvfp4_moe"]
ROOM = reference("nvfp4_moe")
CASES = tuple(
    SPEC.parse_case(f"nvfp4_moe:hidden=128,intermediate=128,num_experts=4,tokens={rest}")
    for rest in ("140,topk=2,load=skewed", "24,topk=2,load=slice", "20,topk=2,inputs=poisoned_padding,weight=before")
)


def sampled(case: Case, share: float) -> tuple[dict[str, torch.Tensor], Expected]:
    inputs = ROOM.make_inputs(case)
    return inputs, expected_of(case, inputs, int(ROOM.useful_flops(case) * share))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sample_has_the_results_of_the_whole(case: Case) -> None:
    inputs, part = sampled(case, 0.3)
    whole = expected_of(case, inputs)
    assert part.sample is not None
    rows = part.sample.rows["y"]
    assert 1 <= len(rows) < case.int("tokens")
    assert rows[0] == 0, "from the first token"
    torch.testing.assert_close(part.oracle["y"], whole.oracle["y"][rows], rtol=0, atol=0)
    torch.testing.assert_close(part.simulated["y"], whole.simulated["y"][rows], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right_outputs_pass_and_a_fault_in_the_sample_does_not(case: Case) -> None:
    inputs, part = sampled(case, 0.3)
    assert part.sample is not None
    y = ROOM.simulated(case, inputs)["y"]
    assert compared(SPEC, part, {"y": y}).passed
    wrong = y.clone()
    token = next(int(row) for row in part.sample.rows["y"] if y[row].abs().sum() > 0)
    wrong[token] *= -1
    arena = Arena(SPEC, case, inputs)
    arena.tensors["y"].copy_(wrong)
    comparison = compared(SPEC, part, {"y": wrong})
    assert not comparison.passed
    assert "which alone were judged" in complaints(arena, part, comparison)


def test_a_cheap_case_is_judged_whole() -> None:
    case = CASES[0]
    assert ROOM.sample(case, ROOM.make_inputs(case), ROOM.useful_flops(case)) is None
    assert sampled(case, 1.0)[1].sample is None


@pytest.mark.parametrize("stage", ["l1", "requantise", "l2", "combine"])
def test_a_stage_is_of_one_piece(stage: str) -> None:
    case = SPEC.vary(CASES[0], stage=stage)
    assert ROOM.sample(case, ROOM.make_inputs(case), 1) is None


def test_the_sample_keeps_the_name_of_the_case() -> None:
    _, part = sampled(CASES[0], 0.3)
    assert part.case.id == CASES[0].id, "sentences and reruns name the case that was asked for"
    assert part.case != replace(CASES[0]), "its number of tokens is the sample's"
