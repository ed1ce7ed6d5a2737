"""Times: the interval of a ratio on a simulated device, and the rate of false alarms in ten repetitions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import ROOT
from conformance.bench.false_alarms import main
from conformance.fakes.results import header, record, timing, write
from megamoe.diff import times as comparison_time
from megamoe.diff.times import Centres, centres, ratios
from megamoe.records.lines import Timing

ROWS = 1000
THRESHOLD = 0.02
Table = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Table]


def normal(random: np.random.Generator, rounds: int, samples: int) -> Table:
    return 1 + 0.02 * random.standard_normal((ROWS, rounds, samples))


def heavy_tail(random: np.random.Generator, rounds: int, samples: int) -> Table:
    """A floor with rare samples far above it, some of them several times as long."""
    return 1 + 0.01 * np.abs(random.standard_t(2, (ROWS, rounds, samples)))


def bimodal(random: np.random.Generator, rounds: int, samples: int) -> Table:
    """Two samples in five take 4 % longer."""
    return 1 + 0.04 * (random.random((ROWS, rounds, samples)) < 0.4) + normal(random, rounds, samples) / 10 - 0.1


def bimodal_rounds(random: np.random.Generator, rounds: int, samples: int) -> Table:
    """In two of five rounds, every sample takes 4 % longer."""
    return 1 + 0.04 * (random.random((ROWS, rounds, 1)) < 0.4) + normal(random, rounds, samples) / 10 - 0.1


def rounds_apart(random: np.random.Generator, rounds: int, samples: int) -> Table:
    """Rounds differ as much as samples do, so samples alone would suggest far too much certainty."""
    return 1 + 0.01 * random.standard_normal((ROWS, rounds, 1)) + 0.01 * random.standard_normal((ROWS, rounds, samples))


def drift(random: np.random.Generator, rounds: int, samples: int) -> Table:
    """Clocks drift slowly up or down during a run, by about 2 % in all."""
    slope = 0.02 * random.standard_normal((ROWS, 1, 1)) * np.linspace(-0.5, 0.5, rounds)[None, :, None]
    return 1 + slope + 0.005 * random.standard_normal((ROWS, rounds, samples))


def alike_neighbours(random: np.random.Generator, rounds: int, samples: int) -> Table:
    """Each round resembles the previous one, with correlation 0.5."""
    step = random.standard_normal((ROWS, rounds))
    for i in range(1, rounds):
        step[:, i] = 0.5 * step[:, i - 1] + np.sqrt(0.75) * step[:, i]
    return 1 + 0.01 * step[:, :, None] + 0.005 * random.standard_normal((ROWS, rounds, samples))


def ticking(random: np.random.Generator, rounds: int, samples: int) -> Table:
    """A clock with a resolution of half a per cent."""
    return np.round(200 + 0.8 * random.standard_normal((ROWS, rounds, samples))) / 200


def slow_phases(random: np.random.Generator, rounds: int, samples: int) -> Table:
    """A host that is busy for a while: one stretch of up to half of a run has samples several times as long."""
    began, part = random.random((ROWS, 1)), 0.5 * random.random((ROWS, 1))
    when = (np.arange(rounds) / rounds)[None, :]
    inside = ((when - began) % 1 < part)[:, :, None]
    late = inside * (random.random((ROWS, rounds, samples)) < 0.8) * random.exponential(3.0, (ROWS, rounds, samples))
    return 1 + 0.01 * random.standard_normal((ROWS, rounds, samples)) + late


SHAPES: Sequence[Noise] = (
    normal,
    heavy_tail,
    bimodal,
    bimodal_rounds,
    rounds_apart,
    drift,
    alike_neighbours,
    ticking,
    slow_phases,
)


def _lines(table: Table) -> list[list[Timing]]:
    # Validated once, because a hundred thousand lines of one shape are copied from it.
    whole = timing(table[0])
    return [[whole.model_copy(update={"samples_us": tuple(row.ravel().tolist())})] for row in table]


def _interval(before: Table, after: Table) -> tuple[Table, Table, Table]:
    found = ratios(centres(_lines(before)), centres(_lines(after)))
    return found.low, found.ratio, found.high


def _name(noise: object) -> str:
    return getattr(noise, "__name__", str(noise))


@pytest.mark.parametrize(("rounds", "samples"), [(5, 20), (10, 10), (60, 5)])
@pytest.mark.parametrize("noise", SHAPES, ids=_name)
def test_two_runs_of_the_same_program_are_rarely_called_different(noise: Noise, rounds: int, samples: int) -> None:
    random = np.random.default_rng(1)
    low, _, high = _interval(noise(random, rounds, samples), noise(random, rounds, samples))
    alarms = np.mean((low > 1 + THRESHOLD) | (high < 1 - THRESHOLD))
    assert alarms <= 0.01, f"{alarms:.2%} of {ROWS} rows were called SLOWER or FASTER, at most 1 % may be"
    missed = np.mean((low > 1) | (high < 1))
    allowed = 0.06 if noise in (alike_neighbours, drift) else 0.02
    assert missed <= allowed, f"{missed:.2%} of the intervals at 99 % confidence do not hold the true ratio"


@pytest.mark.parametrize("noise", SHAPES, ids=_name)
def test_a_shift_as_large_as_the_threshold_is_rarely_called(noise: Noise) -> None:
    """The largest difference that must not be called: the true ratio lies exactly on the threshold."""
    random = np.random.default_rng(2)
    low, _, _ = _interval(noise(random, 10, 10), noise(random, 10, 10) * (1 + THRESHOLD))
    assert np.mean(low > 1 + THRESHOLD) <= (0.03 if noise is alike_neighbours else 0.01)


@pytest.mark.parametrize(
    ("noise", "shift", "least"),
    [(normal, 0.05, 0.95), (heavy_tail, 0.05, 0.99), (rounds_apart, 0.06, 0.9), (ticking, 0.05, 0.99)],
    ids=_name,
)
def test_a_real_difference_is_seen(noise: Noise, shift: float, least: float) -> None:
    random = np.random.default_rng(3)
    low, _, high = _interval(noise(random, 10, 20), noise(random, 10, 20) * (1 + shift))
    assert np.mean(low > 1 + THRESHOLD) >= least, f"a run slower by {shift:.0%} must be called SLOWER"
    assert not np.any(high < 1 - THRESHOLD), "and never FASTER"
    low, _, high = _interval(noise(random, 10, 20), noise(random, 10, 20) / (1 + shift))
    assert np.mean(high < 1 - THRESHOLD) >= least, f"a run faster by {shift:.0%} must be called FASTER"


def test_little_noise_is_called_the_same() -> None:
    random = np.random.default_rng(4)
    low, _, high = _interval(heavy_tail(random, 10, 20), heavy_tail(random, 10, 20))
    assert np.mean((low >= 1 - THRESHOLD) & (high <= 1 + THRESHOLD)) > 0.95


def test_samples_of_a_round_are_not_believed_as_if_they_were_independent() -> None:
    """The method exists for this fault: if rounds are shuffled away, the same times give false alarms."""
    random = np.random.default_rng(5)
    before, after = (rounds_apart(random, 5, 40) for _ in range(2))
    apart = _interval(before, after)

    def one_by_one(table: Table) -> Table:
        return random.permuted(table.reshape(ROWS, 1, -1), axis=2).reshape(ROWS, 20, -1)

    mixed = _interval(one_by_one(before), one_by_one(after))
    share = [np.mean((low > 1) | (high < 1)) for low, _, high in (apart, mixed)]
    assert share[0] < 0.02 < 0.2 < share[1], f"{share} of the intervals do not hold the truth, with rounds and without"


def test_one_disturbed_round_of_ten_changes_little() -> None:
    random = np.random.default_rng(6)
    quiet = 1 + 0.005 * random.standard_normal((ROWS, 10, 20))
    disturbed = quiet.copy()
    disturbed[:, 4] *= 1.5
    low, ratio, high = _interval(quiet, disturbed)
    assert np.all(np.abs(ratio - 1) < 0.01), "a round that took half as long again must not move the ratio by 1 %"
    assert np.mean((low >= 1 - THRESHOLD) & (high <= 1 + THRESHOLD)) > 0.95, "nor make the row ambiguous"


@pytest.mark.parametrize("rounds", [10, 50])
def test_a_kernel_that_is_slower_now_and_then_is_not_called_the_same(rounds: int) -> None:
    """Three of five samples take half as long again. The call must not be SAME, although the least disturbed samples
    agree."""
    random = np.random.default_rng(8)
    quiet = 1 + 0.005 * random.standard_normal((ROWS, rounds, 20))
    slower = quiet * (1 + 0.5 * (random.random(quiet.shape) < 0.6))
    low, _, high = _interval(quiet, slower)
    assert not np.any((low >= 1 - THRESHOLD) & (high <= 1 + THRESHOLD))
    assert not np.any(high < 1 - THRESHOLD), "and never FASTER"


def test_a_disturbance_of_many_rounds_is_not_believed_to_be_many_disturbances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without blocks, quartiles and the correlation of neighbours there are false alarms."""
    random = np.random.default_rng(9)
    before, after = (slow_phases(random, 60, 5) for _ in range(2))

    def alarms() -> float:
        low, _, high = _interval(before, after)
        return float(np.mean((low > 1 + THRESHOLD) | (high < 1 - THRESHOLD)))

    assert alarms() <= 0.01
    monkeypatch.setattr(comparison_time, "BLOCKS", 60)
    monkeypatch.setattr(comparison_time, "QUANTILES", (0.5,))
    monkeypatch.setattr(comparison_time, "MAX_CORRELATION", 0.0)
    assert alarms() > 0.1, "then this test shows nothing"


def test_four_runs_or_more_are_counted_as_runs() -> None:
    """Processes differ by 2 % while each is quiet: the rounds of four runs count as no more than four units."""
    random = np.random.default_rng(7)

    def of_runs(number: int) -> list[list[Timing]]:
        level = 1 + 0.02 * random.standard_normal((300, number, 1, 1))
        table = level + 0.002 * random.standard_normal((300, number, 8, 5))
        return [[timing(run) for run in row] for row in table]

    found = ratios(centres(of_runs(5)), centres(of_runs(5)))
    assert np.mean((found.low > 1) | (found.high < 1)) < 0.03


@pytest.mark.parametrize("samples", [[[10.0]], [[10.0, 11.0]]])
def test_too_few_samples_say_nothing(samples: list[list[float]]) -> None:
    one, many = timing([[10.0]]), timing(samples)
    found = ratios(centres([[one]]), centres([[many]]))
    assert found.low[0] == 0
    assert found.high[0] == np.inf, "one sample has no error that one could know"


def test_times_without_any_scatter_have_a_ratio_and_no_width() -> None:
    found = ratios(centres([[timing([[10.0] * 8] * 5)]]), centres([[timing([[10.5] * 8] * 5)]]))
    assert [found.low[0], found.ratio[0], found.high[0]] == pytest.approx([1.05] * 3)


def test_a_clock_cannot_see_less_than_its_tick() -> None:
    table = [[10.0] * 7 + [10.5]] * 5
    found = ratios(centres([[timing(table)]]), centres([[timing(table)]]))
    assert found.low[0] <= 0.96
    assert found.high[0] >= 1.04, "all medians are equal, but times within a step of 0.5 us look equal as well"


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 63.657), (2, 9.925), (3, 5.841), (4, 4.604), (10, 3.169), (30, 2.750), (1e9, 2.576)]
)
def test_the_interval_is_as_wide_as_student_says(freedom: float, quantile: float) -> None:
    """One side is known exactly, so the degrees of freedom are the other side's."""
    zero = np.zeros((2, 1))
    known = Centres(zero, zero, zero + 1, zero, np.array([9]))
    found = ratios(known, Centres(zero, zero + 0.01, zero + freedom, zero, np.array([9])))
    assert np.log(found.high[0]) / 0.01 == pytest.approx(quantile, rel=2e-4)
    assert found.low[0] == pytest.approx(1 / found.high[0])


times = st.floats(0.5, 1e6, allow_subnormal=False)


def _mixed(rounds: int, some: list[float], seed: int) -> Timing:
    """A line with that many rounds of 1 to 6 samples each, all drawn from `some`."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 7, rounds)
    return timing(random.choice(some, sizes.sum()), np.repeat(np.arange(rounds), sizes).tolist())


# Drawing each sample would take a hundred times as long as the law under test.
seeds = st.integers(0, 2**32 - 1)
lines = st.builds(_mixed, st.integers(1, 12), st.lists(times, min_size=1, max_size=8), seeds)
rows = st.lists(lines, min_size=1, max_size=6)


# A row alone cannot show anything, so there are two or more: planted faults then come within 60 examples.
@given(st.lists(st.tuples(rows, rows), min_size=2, max_size=4))
@settings(max_examples=80)
def test_rows_do_not_influence_each_other(pairs: list[tuple[list[Timing], list[Timing]]]) -> None:
    """Ragged rows, padded and sorted by size in arrays, must give the same as each row alone."""
    together = ratios(centres([old for old, _ in pairs]), centres([new for _, new in pairs]))
    for i, (old, new) in enumerate(pairs):
        alone = ratios(centres([old]), centres([new]))
        for name in ("ratio", "low", "high"):
            assert getattr(together, name)[i] == pytest.approx(getattr(alone, name)[0], rel=1e-9), (
                f"{name} of row {i} depends on the other rows"
            )


@given(rows, rows)
@settings(max_examples=150)
def test_the_interval_holds_the_ratio_and_turns_with_the_sides(old: list[Timing], new: list[Timing]) -> None:
    there, back = ratios(centres([old]), centres([new])), ratios(centres([new]), centres([old]))
    assert there.low[0] <= there.ratio[0] <= there.high[0]
    assert there.ratio[0] == pytest.approx(1 / back.ratio[0], rel=1e-9)
    assert _log(there.low[0]) == pytest.approx(-_log(back.high[0]), rel=1e-6, abs=1e-9)


def _log(ratio: float) -> float:
    """The logarithm of a ratio, within what a ratio and its reciprocal can both be as normal numbers."""
    with np.errstate(divide="ignore"):
        return float(np.clip(np.log(ratio), -708.0, 708.0))


@given(rows, rows, st.sampled_from([0.125, 8.0, 1024.0]))
@settings(max_examples=100)
def test_the_unit_of_time_does_not_matter(old: list[Timing], new: list[Timing], factor: float) -> None:
    def scaled(row: list[Timing]) -> list[Timing]:
        return [timing([x * factor for x in line.samples_us], line.rounds) for line in row]

    here, there = ratios(centres([old]), centres([new])), ratios(centres([scaled(old)]), centres([scaled(new)]))
    for name in ("ratio", "low", "high"):
        here_and_there = [_log(getattr(one, name)[0]) for one in (here, there)]
        assert here_and_there[0] == pytest.approx(here_and_there[1], rel=1e-6, abs=1e-9)


@given(lines, st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_the_order_within_a_round_does_not_matter(line: Timing, random: object) -> None:
    """Holds only with enough rounds; otherwise units are consecutive samples."""
    if len(set(line.rounds)) < 4:
        return
    pairs = list(zip(line.rounds, line.samples_us, strict=True))
    random.shuffle(pairs)  # pyright: ignore[reportAttributeAccessIssue]
    shuffled = timing([x for _, x in pairs], [i for i, _ in pairs])
    one, other = centres([[line]]), centres([[shuffled]])
    assert one.centre[0] == pytest.approx(other.centre[0], rel=1e-12)
    assert one.error[0] == pytest.approx(other.error[0], rel=1e-9)
    assert one.tick[0] == other.tick[0]


# False alarms


REPEATED, RUNS = 40, 10
RECORDS = ROOT / "results" / "records"


def repetitions(folder: Path, odd_one: float = 1.0) -> Path:
    """Runs of one program on a device with noise between samples, between rounds and between processes.

    The last run takes `odd_one` times as long as it should.
    """
    random = np.random.default_rng(11)
    for run in range(RUNS):
        name = f"run-{run}"
        lines = []
        for row in range(REPEATED):
            process, rounds = 0.003 * random.standard_normal(), 0.004 * random.standard_normal((8, 1))
            noise = 0.01 * np.abs(random.standard_t(3, (8, 10)))
            times = 5.0 * (row + 1) * (1 + process + rounds + noise) * (odd_one if run == RUNS - 1 else 1.0)
            lines.append(timing(times, case=f"fmha:hd=64,t=1,s_k={row + 1}", run=name))
        write(folder / f"{run:02d}.jsonl", header(name), *lines)
    return folder


def test_repetitions_of_one_program_keep_the_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tmp_path / "summary.json"
    status = main([str(repetitions(tmp_path / "runs")), "--json", str(summary)])
    out = capsys.readouterr().out
    assert status == 0, out
    found = json.loads(summary.read_text())
    assert found["all_pairs"]["pairs"] == 45
    assert found["all_pairs"]["rows"] == 45 * REPEATED
    assert found["consecutive_pairs"]["pairs"] == 9
    assert found["all_pairs"]["false_alarms"] <= 0.01
    assert found["device"]["name"] == "NVIDIA H200"
    assert len(found["widest"]) == REPEATED
    assert found["all_pairs_by_temperature"]["cold"]["rows"] == 45 * REPEATED
    assert found["planted_slowdowns"]["20%"]["cold"] == {"SLOWER": 1.0}, "what is planted must be seen"


def test_a_run_that_was_slower_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main([str(repetitions(tmp_path / "runs", odd_one=1.08))])
    out = capsys.readouterr().out
    assert status == 1
    assert "SLOWER 00.jsonl -> 09.jsonl" in out
    assert "NOT kept" in out


def test_what_cannot_be_measured_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "need at least 2" in capsys.readouterr().err
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", record())
    assert main([str(tmp_path)]) == 2
    assert "share no time" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["aa", "aa-later", "aa-busy-host"])
def test_the_committed_repetitions_keep_the_bar(tmp_path: Path, folder: str) -> None:
    """Ten sessions on an H200, each in its own processes. The tracked summary equals the command's current output."""
    summary = tmp_path / "summary.json"
    status = main([str(RECORDS / folder), "--json", str(summary)])
    found = json.loads(summary.read_text())
    committed = json.loads((RECORDS / folder / "false-alarms.json").read_text("utf-8"))
    assert len(found["files"]) == RUNS
    for name in (name for name in found if "pairs" in name or "planted" in name):
        assert found[name] == committed[name], "renew it: python -m conformance.bench.false_alarms FOLDER --json FILE"
    assert status == 0, f"more than 1 % are false alarms: {found['all_pairs']}"
    assert found["all_pairs_at_default_threshold"]["false_alarms"] <= 0.01, "nor may the thresholds of specs hide them"
