"""The timing policy on stopwatches of known noise: order, stopping, discarded samples, refusals; and the floor."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from statistics import mean, median, pstdev

import pytest

from conformance.fakes.results import H200
from conformance.fakes.simulated_device import (
    COLD,
    DeafStopwatch,
    Noise,
    SimulatedClock,
    SimulatedStopwatch,
    StoppedStopwatch,
    bimodal,
    drifting,
    outliers,
    quiet,
    rough,
)
from megamoe.bench.timing import (
    FLOOR_SLACK,
    THROTTLED,
    UNDER_THE_FLOOR,
    Contender,
    Floor,
    Policy,
    Series,
    floor_of,
    relative_error,
    surely_slower,
    take,
    timing_of,
)
from megamoe.contract import Row, Target, Temperature
from megamoe.ops import reference
from megamoe.records.lines import Timing
from megamoe.spec.load import load_specs

ROW = Row("fmha:hd=64,t=1,s_k=128", "ours", "sm_90a", "gpu", "eager")


class Turns:
    """A Watch that records its turns, and reports wrong outputs after a turn in `faulty`."""

    def __init__(self, faulty: str | None = None, after: int = 3) -> None:
        self.order: list[str] = []
        self.faulty, self.after = faulty, after

    def begin(self, name: str, temperature: Temperature | None) -> None:
        self.order.append(name)

    def end(self, name: str) -> str | None:
        wrong = name == self.faulty and self.order.count(name) > self.after
        return "tensor o: 7 of 64 elements are off" if wrong else None


def taken(
    stopwatches: Mapping[str, SimulatedStopwatch],
    clock: SimulatedClock,
    watch: Turns | None = None,
    policy: Policy | None = None,
    floor: Floor | None = None,
) -> dict[tuple[str, Temperature], Series]:
    floors: dict[Temperature, Floor] = {"cold": floor, "hot": floor} if floor else {}
    contenders = {name: Contender(one, floors) for name, one in stopwatches.items()}
    series = take(contenders, watch or Turns(), clock.throttled, policy or Policy())
    assert len(series) == 2 * len(stopwatches), "every contender has a series at each temperature"
    return {(one.name, one.temperature): one for one in series}


def alone(noise: Noise = quiet, policy: Policy | None = None, hot_us: float = 10.0, seed: int = 0) -> Series:
    clock = SimulatedClock()
    return taken({"ours": SimulatedStopwatch(hot_us, noise, clock, seed=seed)}, clock, policy=policy)["ours", "cold"]


# When to stop


def test_a_quiet_kernel_is_done_after_the_least_number_of_samples() -> None:
    series, policy = alone(), Policy()
    assert series.stopped_by == "precision"
    assert len(series.samples_us) == policy.min_samples
    assert len(set(series.rounds)) == policy.min_rounds
    assert median(series.samples_us) == pytest.approx(10.0 * COLD, rel=0.002)


def test_a_rough_kernel_takes_more_and_gets_there() -> None:
    series = alone(rough)
    assert series.stopped_by == "precision"
    assert len(series.samples_us) > 4 * Policy().min_samples, "a tenth of noise needs hundreds of samples"
    assert relative_error(series.samples_us, series.rounds) <= Policy().target


def test_a_budget_of_device_time_ends_a_series() -> None:
    series = alone(rough, Policy(budget_s=0.002))
    assert series.stopped_by == "budget"
    assert sum(series.samples_us) < 2 * 2000, "no more than one turn beyond the budget"
    assert series.status == "passed", "an imprecise time is a time"


def test_a_number_of_samples_ends_a_series_whose_clock_hardly_moves() -> None:
    series = alone(rough, Policy(target=1e-9, max_samples=200), hot_us=0.001)
    assert series.stopped_by == "budget"
    assert series.taken == 200


@pytest.mark.parametrize("noise", [quiet, rough, outliers, bimodal])
def test_the_error_that_stops_a_series_is_the_error_that_it_has(noise: Noise) -> None:
    """Medians of repeated series scatter as much as the estimated error says, within a factor."""
    several = [alone(noise, Policy(target=0.0, budget_s=0.0025), seed=seed) for seed in range(60)]
    medians = [median(one.samples_us) for one in several]
    claimed = mean(relative_error(one.samples_us, one.rounds) for one in several)
    assert pstdev(medians) / mean(medians) <= 1.5 * claimed, f"the median scatters more than the {claimed:.2%} claimed"


def test_outliers_do_not_move_the_figure_of_merit() -> None:
    series = alone(outliers)
    assert median(series.samples_us) == pytest.approx(10.0 * COLD, rel=0.005)
    assert max(series.samples_us) > 50 * COLD, "raw samples are kept, the odd ones too"


def test_a_drift_between_rounds_is_seen_as_error() -> None:
    steady = [10.0, 10.01, 9.99, 10.0, 10.0] * 10
    rounds = [number for number in range(10) for _ in range(5)]
    sinking = [sample * (1.0 + 0.01 * number) for sample, number in zip(steady, rounds, strict=True)]
    assert relative_error(sinking, rounds) > 5 * relative_error(steady, rounds)


def test_one_round_says_nothing_of_drift() -> None:
    assert relative_error([10.0] * 50, [0] * 50) == math.inf


def test_any_order_of_samples_within_rounds_has_the_same_error() -> None:
    source = random.Random(3)
    pairs = [(source.gauss(10, 1), number) for number in range(6) for _ in range(8)]
    shuffled = source.sample(pairs, len(pairs))
    first, second = ([list(part) for part in zip(*some, strict=True)] for some in (pairs, shuffled))
    assert relative_error(first[0], [int(n) for n in first[1]]) == relative_error(
        second[0], [int(n) for n in second[1]]
    )


# The order


def test_contenders_alternate_and_none_always_goes_first() -> None:
    clock, watch = SimulatedClock(), Turns()
    names = ("a", "b", "c")
    taken({name: SimulatedStopwatch(10.0, rough, clock, seed=ord(name)) for name in names}, clock, watch)
    rounds = [watch.order[i : i + 6] for i in range(3, 33, 6)]  # each was calibrated first
    assert all(sorted(one) == ["a", "a", "b", "b", "c", "c"] for one in rounds), f"{rounds}: each twice a round"
    assert {one[0] for one in rounds} == set(names), f"{rounds}: each goes first at times"


def test_a_drift_falls_on_all_contenders_alike() -> None:
    clock = SimulatedClock()
    found = taken({name: SimulatedStopwatch(10.0, drifting, clock, seed=ord(name)) for name in "ab"}, clock)
    for temperature in ("cold", "hot"):
        a, b = (median(found[name, temperature].samples_us) for name in "ab")
        assert a == pytest.approx(b, rel=0.01), "the same kernel twice, while the clocks sink by a twentieth"


def test_samples_are_kept_in_order_with_their_rounds() -> None:
    series = alone(drifting)
    assert series.rounds == sorted(series.rounds)
    assert len(series.rounds) == len(series.samples_us)
    first, last = series.samples_us[:10], series.samples_us[-10:]
    assert mean(last) > mean(first), "a drift must still be there in the raw samples"


def test_hot_samples_are_long_enough_and_cold_ones_single() -> None:
    clock = SimulatedClock()
    stopwatch = SimulatedStopwatch(10.0, quiet, clock)
    found = taken({"ours": stopwatch}, clock)
    assert found["ours", "cold"].launches == 1
    assert 100.0 <= found["ours", "hot"].launches * 10.0 <= 130.0
    assert {launches for temperature, launches in stopwatch.taken if temperature == "cold"} == {1}


# Discarded samples


def test_samples_of_a_throttled_device_are_discarded_and_counted() -> None:
    clock = SimulatedClock(episodes=((2000.0, 9000.0), (12_000.0, 15_000.0)))
    series = taken({"ours": SimulatedStopwatch(10.0, quiet, clock)}, clock)["ours", "cold"]
    assert series.status == "passed"
    assert series.discarded[THROTTLED] > 0
    assert max(series.samples_us) < 11.0 * COLD, "a sample of a throttled device, twice as slow, was kept"


def test_nothing_is_made_of_a_device_that_was_throttled_all_the_time() -> None:
    clock = SimulatedClock(episodes=((0.0, math.inf),))
    series = taken({"ours": SimulatedStopwatch(10.0, quiet, clock)}, clock, policy=Policy(budget_s=0.01))[
        "ours", "cold"
    ]
    assert series.status == "error"
    assert "no sample counts" in series.sentence
    assert "thermal slowdown" in series.sentence
    assert not series.samples_us


def test_a_stray_under_the_floor_is_discarded_and_counted() -> None:
    clock = SimulatedClock()
    strays = iter([1.0] * 60 + [0.01] + [1.0] * 10_000)
    stopwatch = SimulatedStopwatch(10.0, lambda source, now: next(strays), clock)
    found = taken({"ours": stopwatch}, clock, floor=Floor(5.0, "bytes"), policy=Policy(max_launches=1))
    assert sum(one.discarded[UNDER_THE_FLOOR] for one in found.values()) == 1
    assert all(one.status == "passed" and min(one.samples_us) > 5.0 for one in found.values())


# Refusals


def test_a_cheater_is_refused_with_both_numbers() -> None:
    clock = SimulatedClock()
    found = taken({"cheat": SimulatedStopwatch(2.0, quiet, clock)}, clock, floor=Floor(31.6, "bytes"))
    for series in found.values():
        assert series.status == "failed"
        assert "the work was not done" in series.sentence
        assert "31.6 us" in series.sentence, "the floor"
        assert series.sentence.startswith("cold: 2." if series.temperature == "cold" else "hot: 2 us"), "the time"
        assert not series.samples_us, "a failure is never a number"


def test_a_kernel_at_the_floor_is_not_refused() -> None:
    clock = SimulatedClock()
    found = taken({"ours": SimulatedStopwatch(30.0, quiet, clock)}, clock, floor=Floor(31.6, "bytes"))
    assert {one.status for one in found.values()} == {"passed"}, "within the slack of what a copy attains"


def test_one_that_works_now_and_then_is_refused() -> None:
    clock = SimulatedClock()
    lazy = SimulatedStopwatch(10.0, lambda source, now: 1.0 if source.random() < 0.8 else 0.01, clock)
    found = taken({"lazy": lazy}, clock, floor=Floor(5.0, "flops"))
    assert found["lazy", "cold"].status == "failed"


@pytest.mark.parametrize("stopwatch", [StoppedStopwatch, DeafStopwatch])
def test_a_clock_that_does_not_follow_the_work_is_an_error(stopwatch: type[SimulatedStopwatch]) -> None:
    clock = SimulatedClock()
    found = taken({"ours": stopwatch(10.0, quiet, clock)}, clock)["ours", "hot"]
    assert found.status == "error"
    assert "clock" in found.sentence


def test_wrong_outputs_after_a_turn_take_both_temperatures_and_nobody_else() -> None:
    clock = SimulatedClock()
    stopwatches = {name: SimulatedStopwatch(10.0, quiet, clock) for name in ("right", "wrong")}
    found = taken(stopwatches, clock, Turns("wrong"))
    for temperature in ("cold", "hot"):
        assert found["wrong", temperature].status == "failed"
        assert not found["wrong", temperature].samples_us, "three turns were right, and still there is no time"
        assert "7 of 64" in found["wrong", temperature].sentence
        assert found["right", temperature].status == "passed"


def test_what_a_stopwatch_raises_passes_through() -> None:
    def fault() -> None:
        raise RuntimeError("the device is gone")

    clock = SimulatedClock()
    with pytest.raises(RuntimeError, match="the device is gone"):
        taken({"ours": SimulatedStopwatch(10.0, quiet, clock, fault)}, clock)


# The line


def test_a_series_becomes_a_line_and_back() -> None:
    clock = SimulatedClock()
    contender = Contender(SimulatedStopwatch(10.0, quiet, clock), {"cold": Floor(1.5, "bytes")})
    cold, hot = take({"ours": contender}, Turns(), clock.throttled)
    line = timing_of(cold, "run-1", ROW, contender, "ab")
    assert Timing.model_validate_json(line.model_dump_json()) == line
    assert (line.floor_us, line.floor_by, line.method) == (1.5, "bytes", "graph")
    assert timing_of(hot, "run-1", ROW, contender, "ab").floor_us is None


def test_a_failed_series_says_how_to_run_it_again() -> None:
    series = Series("ours", "cold")
    series.fail("crashed", "the worker process died of SIGSEGV")
    line = timing_of(series, "run-1", ROW, None, None)
    assert line.sentence.endswith(
        "Rerun: nox -s bench -- --case fmha:hd=64,t=1,s_k=128 --backend ours --target sm_90a --executor gpu"
    )
    assert line.method is None


SPECS = load_specs()
DEVICE = H200.model_copy(update={"l2_bytes": 50 << 20, "copy_bytes_per_s": 4e12, "bf16_flops_per_s": 8e14})
LONG = SPECS["fmha"].parse_case("fmha:hd=128,t=1,s_k=8192,batch=32,heads=64,kv_heads=8")
SHORT = SPECS["fmha"].parse_case("fmha:hd=128,t=128,s_k=512")
LAYER = SPECS["nvfp4_moe"].parse_case(
    "nvfp4_moe:hidden=7168,intermediate=3072,num_experts=48,tokens=8192,topk=6,load=slice"
)


def test_a_long_cache_is_bound_by_its_bytes() -> None:
    floor = floor_of(LONG, "sm_90a", DEVICE, "cold")
    assert floor is not None
    assert floor.by == "bytes"
    assert floor.us == pytest.approx(reference("fmha").minimum_bytes(LONG) / 4e12 * 1e6)


def test_a_large_batch_is_bound_by_its_flops() -> None:
    floor = floor_of(LAYER, "sm_90a", DEVICE, "cold")
    assert floor is not None
    assert floor.by == "flops"
    assert floor.us == pytest.approx(reference("nvfp4_moe").useful_flops(LAYER) / 8e14 * 1e6)


def test_only_a_target_with_fp4_tensor_cores_is_faster_than_bf16() -> None:
    hopper, blackwell = (floor_of(LAYER, target, DEVICE, "cold") for target in ("sm_90a", "sm_100a"))
    assert hopper is not None
    assert blackwell is not None
    assert blackwell.us < hopper.us
    targets: tuple[Target, ...] = ("sm_90a", "sm_100a")
    one, other = (floor_of(SHORT, target, DEVICE, "hot") for target in targets)
    assert one == other, "bf16 operands have one rate"


def test_what_fits_in_the_cache_need_not_come_from_memory_again() -> None:
    cold, hot = (floor_of(SHORT, "sm_90a", DEVICE, temperature) for temperature in ("cold", "hot"))
    assert cold is not None
    assert hot is not None
    assert (cold.by, hot.by) == ("bytes", "flops")
    long_hot, long_cold = (floor_of(LONG, "sm_90a", DEVICE, temperature) for temperature in ("hot", "cold"))
    assert long_hot is not None
    assert long_cold is not None
    assert long_cold.us - long_hot.us == pytest.approx((50 << 20) / 4e12 * 1e6)


def test_there_is_no_floor_without_a_measured_ceiling() -> None:
    bare = DEVICE.model_copy(update={"copy_bytes_per_s": None, "bf16_flops_per_s": None})
    assert floor_of(LONG, "sm_90a", bare, "cold") is None
    half = DEVICE.model_copy(update={"copy_bytes_per_s": None})
    floor = floor_of(LONG, "sm_90a", half, "cold")
    assert floor is not None
    assert floor.by == "flops"


def test_a_time_is_believed_down_to_a_little_below_the_floor() -> None:
    assert Floor(100.0, "bytes").limit_us == pytest.approx(100.0 * FLOOR_SLACK)
    assert 0.8 < FLOOR_SLACK < 1.0


def test_what_is_slower_is_sure_and_what_is_not_is_never_said() -> None:
    source = random.Random(7)

    def pairs(count: int, factor: float) -> list[tuple[float, float]]:
        return [(rough(source, 0.0), factor * rough(source, 0.0)) for _ in range(count)]

    assert surely_slower(pairs(9, 5.0)) is None, "nine pairs may all be above the median by luck"
    assert (surely_slower(pairs(40, 1.4)) or 0.0) > 1.1
    said = sum((surely_slower(pairs(10 + number % 30, 1.0)) or 0.0) > 1.0 for number in range(2000))
    assert said <= 10, f"of 2,000 kernels that recall nothing, {said} were called slower on new inputs"
