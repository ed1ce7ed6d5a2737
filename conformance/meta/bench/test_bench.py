"""Measures rows on a simulated device: a planted fault fails only its own row, and the other rows have their times."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.fakes import simulated_device
from megamoe.bench.run import BenchRun, BenchSettings, Outcome
from megamoe.bench.timing import Policy
from megamoe.contract import Row, Status
from megamoe.records.files import RecordFile, read_records
from megamoe.spec.selection import Selection

CASE = "fmha:hd=64,t=2,s_k=3"
ROOM = simulated_device.__name__
# Few samples, because a simulated launch copies tensors and no test here is about precision.
POLICY = Policy(samples_a_turn=4, min_samples=12, min_rounds=3, hot_sample_us=40.0)
SETTINGS = BenchSettings(jobs=1, policy=POLICY, patience=0.05)


def row(attribute: str, case: str = CASE, executor: str = "EXECUTOR") -> Row:
    return Row(case, f"{ROOM}:{attribute}", "sm_90a", f"{ROOM}:{executor}", "eager")


def run(rows: list[Row], output: Path, settings: BenchSettings = SETTINGS) -> tuple[dict[Row, Outcome], RecordFile]:
    with BenchRun(rows, Selection(), settings, output) as bench:
        found = {outcome.record.row: outcome for outcome in bench.outcomes()}
    return found, read_records(output)


DIED = f"the process of executor {ROOM}:EXECUTOR died with exit status"
# Fault -> status of the row, and part of its sentence.
FAULTS: dict[str, tuple[Status, str]] = {
    "WRONG": ("failed", "tensor o: "),
    "PATCHES_THE_JUDGE": ("failed", "tensor o: "),
    "WRONG_FROM_THE_SECOND": ("failed", "in a timed replay: fmha:hd=64,t=2,s_k=3: tensor o: "),
    "WRONG_LATE": ("failed", "tensor o: "),
    "IDLE_IN_REPLAYS": ("failed", "never written"),
    "KEEPS_ITS_OUTPUTS": ("failed", "in a replay on other inputs: the outputs are still those of the inputs before"),
    "FORGETS_ON_NEW_INPUTS": ("failed", "in a replay on other inputs: fmha:hd=64,t=2,s_k=3: tensor "),
    "KEEPS_ONE_OUTPUT": ("failed", "in a replay on other inputs: lse still as on the inputs before; "),
    "RECALLS": ("failed", "it recalls an earlier result"),
    "RECALLS_A_PART": ("failed", "it recalls an earlier result"),
    "STOPS_RECALLING": ("failed", "it recalls an earlier result"),
    "GUESSES": ("failed", "in a replay on other inputs: fmha:hd=64,t=2,s_k=3: tensor "),
    "CALL_KEEPS_ITS_OUTPUTS": ("failed", "belong into PythonProgram.prepares"),
    "LEAVES_WHAT_IS_THERE": ("failed", "in a replay on other inputs: "),
    "CHANGES_AN_INPUT": ("failed", "input k was changed"),
    "WRITES_PAST_THE_END": ("failed", "guard bytes above tensor o were overwritten"),
    "CRASHES": ("crashed", f"{DIED} 3, while "),
    "CRASHES_AT_ONCE": (
        "crashed",
        f"{DIED} 4, while running for the first time",
    ),
    "HANGS": ("timed_out", "it hung: not done within 3 host seconds, while "),
    "FAULTS": ("error", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    "DECLINES": ("unsupported", "hd=64 needs a tile that this backend does not have"),
    "CANNOT_BUILD": ("error", "RuntimeError: the tile of 96 does not divide 128"),
    "CANNOT_LOAD": ("error", "CUDA_ERROR_INVALID_PTX"),
}
FINE = ("WORKS", "SLOWER", "NEVER_THE_SAME", "PATCHES_THE_CLOCK", "CALL", "CALL_PREPARES_ALL")
# After each of these the other rows of its case start again in a fresh process, so they have a case with few others.
SPOILERS = ("CRASHES", "CRASHES_AT_ONCE", "HANGS", "FAULTS", "CHANGES_AN_INPUT", "WRITES_PAST_THE_END")
SPOILT = "fmha:hd=64,t=2,s_k=4"
BESIDE = [row("WORKS", SPOILT), row("CALL", SPOILT)]


def faulty(name: str) -> Row:
    return row(name, SPOILT if name in SPOILERS else CASE)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Row, Outcome], RecordFile]:
    """The outcomes of all backends, faulty and correct, in one run over two cases."""
    doomed = [faulty(name) for name in FAULTS]
    fine = [*map(row, FINE), *BESIDE]
    mixed = [one for pair in zip(fine, doomed, strict=False) for one in pair] + doomed[len(fine) :]
    return run(mixed, tmp_path_factory.mktemp("bench") / "all.jsonl")


Together = tuple[dict[Row, Outcome], RecordFile]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_costs_its_row_the_status_and_all_times(together: Together, name: str) -> None:
    found, (status, sentence) = together[0][faulty(name)], FAULTS[name]
    assert found.record.status == status, found.record.sentence
    assert sentence in found.record.sentence
    assert found.record.sentence.endswith(faulty(name).rerun)
    assert [one.temperature for one in found.timings] == ["cold", "hot"], "there are lines about its times"
    for timing in found.timings:
        assert timing.status == status
        assert not timing.samples_us, "a failure is never a number"
        assert "Rerun: nox -s bench" in timing.sentence


@pytest.mark.parametrize("fine", [*map(row, FINE), *BESIDE], ids=str)
def test_the_others_have_their_times(together: Together, fine: Row) -> None:
    found = together[0][fine]
    assert found.record.status == "passed", found.record.sentence
    for timing in found.timings:
        assert timing.status == "passed", timing.sentence
        assert len(timing.samples_us) >= POLICY.min_samples
        assert timing.floor_us is not None


def test_a_backend_cannot_set_the_clock(together: Together) -> None:
    cold, hot = together[0][row("PATCHES_THE_CLOCK")].timings
    assert min(cold.samples_us) > 9.0, "its code lies in its builder; the clock is the machine's"
    assert min(hot.samples_us) > 9.0


def test_fine_rows_are_timed_by_turns(together: Together) -> None:
    rounds = [set(timing.rounds) for name in FINE for timing in together[0][row(name)].timings]
    assert all(set(range(3)) <= one for one in rounds), f"{rounds}: all were in the first three rounds"


def test_outputs_that_differ_but_are_right_are_no_fault_and_are_told(together: Together) -> None:
    assert together[0][row("NEVER_THE_SAME")].record.metrics["differing_turns"] > 0
    assert together[0][row("WORKS")].record.metrics["differing_turns"] == 0


def test_the_file_holds_the_device_and_every_line_once(together: Together) -> None:
    outcomes, file = together
    (header,) = file.headers
    assert header.device is not None
    assert header.device.name == "Simulated H0"
    assert {record.row for record in file.records} == set(outcomes)
    assert len(file.records) == len(outcomes) == header.owed_rows
    assert sorted(map(repr, file.timings)) == sorted(repr(one) for found in outcomes.values() for one in found.timings)


def test_a_time_under_the_floor_has_no_line_with_a_number(tmp_path: Path) -> None:
    found, _ = run([row("WORKS", executor="SLOW_MEMORY")], tmp_path / "slow.jsonl")
    (outcome,) = found.values()
    assert outcome.record.status == "passed", "the outputs are right"
    assert {one.status for one in outcome.timings} == {"failed", "passed"}, "hot, the inputs are in the cache"
    cold = outcome.timings[0]
    assert "the work was not done" in cold.sentence
    assert cold.temperature == "cold"


def test_a_clock_that_stands_still_is_an_error_of_the_times_alone(tmp_path: Path) -> None:
    found, _ = run([row("STOPPED")], tmp_path / "stopped.jsonl")
    (outcome,) = found.values()
    assert outcome.record.status == "passed"
    assert {one.status for one in outcome.timings} == {"error"}


def test_a_machine_that_is_not_there_makes_rows_unsupported(tmp_path: Path) -> None:
    found, file = run([row("WORKS", executor="BROKEN_MACHINE")], tmp_path / "none.jsonl")
    (outcome,) = found.values()
    assert outcome.record.status == "unsupported"
    assert "it has no such tensor cores" in outcome.record.sentence
    assert len(file.timings) == 2


def test_each_case_has_a_group_and_the_order_of_the_rows_is_kept(tmp_path: Path) -> None:
    rows = [row(name, case) for case in (CASE, "fmha:hd=64,t=1,s_k=5") for name in ("WORKS", "SLOWER")]
    with BenchRun(rows, Selection(), SETTINGS, tmp_path / "two.jsonl") as bench:
        assert [outcome.record.row for outcome in bench.outcomes()] == rows


def test_closing_a_run_ends_it_and_leaves_whole_lines(tmp_path: Path) -> None:
    output = tmp_path / "closed.jsonl"
    bench = BenchRun([row("WORKS"), row("WORKS", "fmha:hd=64,t=1,s_k=5")], Selection(), SETTINGS, output)
    assert bench.outcome(row("WORKS")).record.status == "passed"
    bench.close()
    file = read_records(output)
    assert file.torn is None
    assert len(file.records) == 1


# Without a clock


VM_ROWS = [Row("fmha:hd=64,t=1,s_k=1", backend, "sm_100a", "vm", "eager") for backend in ("ptx", "cutedsl")]


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Row, Outcome]]:
    folder = tmp_path_factory.mktemp("vm")
    return [run(VM_ROWS, folder / f"{number}.jsonl", BenchSettings(jobs=1))[0] for number in range(2)]


def test_counters_of_the_vm_are_exactly_repeatable(twice: list[dict[Row, Outcome]]) -> None:
    for one in VM_ROWS:
        first, second = (found[one].record for found in twice)
        assert first.status == "passed", first.sentence
        assert first.counters == second.counters
        assert first.counters["mma_flops"] > 0
        assert first.counters["smem_bytes"] > 1024, "shared memory of the largest launch, which no assembler knows"
        assert not twice[0][one].timings, "a machine without a clock gives no times"


def test_figures_of_the_compiler_are_exactly_repeatable(twice: list[dict[Row, Outcome]]) -> None:
    for one in VM_ROWS:
        first, second = (found[one].figures for found in twice)
        assert len(first) == 1, "one assembler is registered"
        assert first[0].kernels == second[0].kernels
        assert first[0].cubin_sha256 == second[0].cubin_sha256, "the same PTX must give the same cubin"
        assert first[0].program_sha256 == twice[0][one].record.program_sha256
        for name, figures in first[0].kernels.items():
            assert figures["registers"] > 0, name
            assert figures["code_bytes"] > 0, name
