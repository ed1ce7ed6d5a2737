"""Which samples to take, in which order, which of them count, and when to stop: a policy without a device.

Contenders (programs of several backends for one case) take turns. In each round, all contenders have a turn at one
temperature, then all at the other. The first contender changes from round to round, so clock drift affects all alike. A
turn is a few samples in a row.

The figure of merit is the median. Its standard error is the larger of two estimates:

* from the order statistics of all samples: half the distance between the samples sqrt(n) / 2 ranks above and below the
  median. That is one standard deviation of the binomial on either side; it assumes no distribution.
* from the spread of the rounds' medians, which shows what changes more slowly than a turn.

A series ends when its error is at most `Policy.target` of the median, or when its budget is spent. No sample below the
floor of its case counts. The floor is the time for the case's bytes and FLOPs at the rates that a copy and a matrix
product reach on the device.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median, stdev
from typing import TYPE_CHECKING, Final, Literal, Protocol

from megamoe.contract import Row, Status, Temperature
from megamoe.contract.counted import counted
from megamoe.ops import reference
from megamoe.records.lines import RERUN, Timing

if TYPE_CHECKING:
    from megamoe.contract import Case, DeviceFacts, Stopwatch, Target


# The ceilings were measured with a copy and a matrix product. A kernel that only reads, or a smaller product that draws
# less power, may be a little faster than these, but not by a tenth.
FLOOR_SLACK: Final = 0.9


@dataclass(frozen=True, slots=True)
class Floor:
    """Microseconds of a kernel at the ceilings, and which ceiling binds."""

    us: float
    by: Literal["bytes", "flops"]

    @property
    def limit_us(self) -> float:
        """Shorter times are not believed."""
        return self.us * FLOOR_SLACK


def floor_of(case: Case, target: Target, device: DeviceFacts, temperature: Temperature) -> Floor | None:
    """The floor of `case` on `device`. None if neither ceiling was measured.

    "cold": every needed byte (`Reference.minimum_bytes`) comes from device memory. "hot": the L2 may still hold bytes
    up to its size from the launch before, so only the bytes beyond that size do. FLOPs (`Reference.useful_flops`) count
    at the measured bf16 rate, times the target's factor for narrower operands (`Reference.MATRIX_RATES`).
    """
    room = reference(case.op)
    floors: list[Floor] = []
    if device.copy_bytes_per_s:
        kept = device.l2_bytes if temperature == "hot" else 0
        moved = max(0, room.minimum_bytes(case) - kept)
        floors.append(Floor(1e6 * moved / device.copy_bytes_per_s, "bytes"))
    if device.bf16_flops_per_s:
        rate = device.bf16_flops_per_s * room.MATRIX_RATES.get(target, 1.0)
        floors.append(Floor(1e6 * room.useful_flops(case) / rate, "flops"))
    return max(floors, key=lambda floor: floor.us, default=None)


TEMPERATURES: Final[tuple[Temperature, ...]] = ("cold", "hot")
THROTTLED: Final = "throttled"
UNDER_THE_FLOOR: Final = "under the floor"


@dataclass(frozen=True, slots=True)
class Policy:
    """When to stop, and what a sample is.

    `target`: relative standard error of the median. A series stops for precision after at least `min_samples` and
    `min_rounds`, and stops at the latest at `budget_s` (device seconds) or `max_samples`, discarded samples included. A
    hot sample consists of as many launches in a row as take `hot_sample_us`, at most `max_launches`.
    """

    target: float = 0.005
    samples_a_turn: int = 10
    min_samples: int = 50
    min_rounds: int = 5
    budget_s: float = 0.5
    max_samples: int = 2000
    hot_sample_us: float = 100.0
    max_launches: int = 64


# Fraction of a series' samples that may lie under the floor as strays. More of them fail the series.
MAX_STRAYS: Final = 0.05
# MIN_TO_FOLLOW or more launches in a row must take more than MIN_GROWTH times as long as one.
MIN_TO_FOLLOW: Final = 8
MIN_GROWTH: Final = 2.0
# Probability that surely_slower gives a wrong answer.
MAX_CHANCE: Final = 0.001


@dataclass(frozen=True, slots=True)
class Contender:
    """A stopwatch, the floors of its program where known, and the microseconds of a bare read of the case's bytes."""

    stopwatch: Stopwatch
    floors: Mapping[Temperature, Floor] = field(default_factory=dict["Temperature", "Floor"])
    bare_read_us: float | None = None


class Watch(Protocol):
    """Prepares and checks memory around each turn, untimed."""

    def begin(self, name: str, temperature: Temperature | None) -> None:
        """Prepares the outputs for a turn of contender `name`. Without a temperature, its samples will not count."""
        ...

    def end(self, name: str) -> str | None:
        """A sentence if the turn of `name` left wrong outputs; none of its times count then."""
        ...


@dataclass(slots=True)
class Series:
    """The samples of one contender at one temperature. No samples unless `status` is "passed"."""

    name: str
    temperature: Temperature
    launches: int = 1
    samples_us: list[float] = field(default_factory=list[float])
    rounds: list[int] = field(default_factory=list[int])
    discarded: Counter[str] = field(default_factory=Counter[str])
    device_us: float = 0.0
    stopped_by: Literal["precision", "budget"] | None = None
    status: Status = "passed"
    sentence: str = ""

    @property
    def taken(self) -> int:
        """Samples taken, discarded ones included."""
        return len(self.samples_us) + self.discarded.total()

    @property
    def running(self) -> bool:
        """Whether the series takes part in the next round."""
        return self.status == "passed" and self.stopped_by is None

    def fail(self, status: Status, sentence: str) -> None:
        """Ends the series and drops its times."""
        self.status, self.sentence, self.stopped_by = status, sentence, None
        self.samples_us, self.rounds = [], []


def relative_error(samples: Sequence[float], rounds: Sequence[int]) -> float:
    """Standard error of the median over the median (see the module); infinite for fewer than two rounds."""
    groups: dict[int, list[float]] = {}
    for number, sample in zip(rounds, samples, strict=True):
        groups.setdefault(number, []).append(sample)
    if len(groups) < 2:
        return math.inf
    ordered, n = sorted(samples), len(samples)
    low = max(0, math.floor(n / 2 - math.sqrt(n) / 2))
    high = min(n - 1, math.ceil(n / 2 + math.sqrt(n) / 2))
    within = (ordered[high] - ordered[low]) / 2
    between = stdev(median(group) for group in groups.values()) / math.sqrt(len(groups))
    return max(within, between) / median(samples)


def surely_slower(pairs: Sequence[tuple[float, float]]) -> float | None:
    """A lower bound on how many times as long the second of a pair takes: on the median of the ratios.

    It is one of the ratios. Whatever their distribution, the probability that so many of them lie above the median is
    at most MAX_CHANCE. None if there are too few pairs.
    """
    ratios = sorted(second / first for first, second in pairs)
    below, chance = 0, 0.5 ** len(ratios)
    while chance <= MAX_CHANCE:
        below += 1
        chance += math.comb(len(ratios), below) * 0.5 ** len(ratios)
    return ratios[below - 1] if below else None


def take(
    contenders: Mapping[str, Contender], watch: Watch, throttled: Callable[[], str | None], policy: Policy = Policy()
) -> list[Series]:
    """Two series for each contender, cold and hot. Exceptions of a stopwatch or of `watch` pass through.

    `throttled`: returns why the device slowed down since the last call, None if it did not. A turn during which it did
    is discarded and counted. A series fails, and then has no samples at all, if outputs are wrong after a turn (both
    temperatures then), if more than MAX_STRAYS of its samples lie under the floor, if the clock stands still, or if all
    samples were discarded.
    """
    table: dict[Temperature, dict[str, Series]] = {"cold": {}, "hot": {}}
    for temperature, group in table.items():
        group.update({name: Series(name, temperature) for name in contenders})
    for name, contender in contenders.items():
        watch.begin(name, None)
        _calibrate(table["hot"][name], contender.stopwatch, policy)
        _fail_both(table, name, watch.end(name))
    names = list(contenders)
    for number in count():
        first = number % len(names) if names else 0
        temperatures = TEMPERATURES if number % 2 == 0 else TEMPERATURES[::-1]
        turns = [table[temperature][name] for temperature in temperatures for name in names[first:] + names[:first]]
        if not any(series.running for series in turns):
            return [series for group in table.values() for series in group.values()]
        for series in turns:
            if series.running:
                wrong = _turn(series, number, contenders[series.name], watch, throttled, policy)
                _fail_both(table, series.name, wrong)
    raise AssertionError("the rounds have no end but the one above")


def _fail_both(table: Mapping[Temperature, Mapping[str, Series]], name: str, wrong: str | None) -> None:
    """Ends both series of a contender with wrong outputs."""
    if wrong:
        for group in table.values():
            group[name].fail("failed", wrong)


def _calibrate(series: Series, stopwatch: Stopwatch, policy: Policy) -> None:
    """Finds the number of launches per hot sample, and checks that the clock follows the work."""
    alone = min(stopwatch.sample("hot", 1) for _ in range(3))
    if not _is_time(alone):
        series.fail("error", _no_time(alone))
        return
    series.launches = max(1, min(policy.max_launches, math.ceil(policy.hot_sample_us / alone)))
    if series.launches < MIN_TO_FOLLOW:
        return
    together = stopwatch.sample("hot", series.launches) * series.launches
    if not together > MIN_GROWTH * alone:
        sentence = (
            f"{series.launches} launches in a row took {together:.4g} us, one alone {alone:.4g} us: "
            "the clock does not follow the work, or the work is done once only"
        )
        series.fail("error", sentence)


def _turn(
    series: Series, number: int, contender: Contender, watch: Watch, throttled: Callable[[], str | None], policy: Policy
) -> str | None:
    """Runs one turn. Returns a sentence if it left wrong outputs."""
    watch.begin(series.name, series.temperature)
    throttled()
    if series.temperature == "hot":
        # Warm up: the contender before has filled the L2.
        contender.stopwatch.sample("hot", series.launches)
    taken = contender.stopwatch.samples(series.temperature, series.launches, policy.samples_a_turn)
    slow = throttled()
    wrong = watch.end(series.name)
    if wrong:
        return wrong
    strange = next((sample for sample in taken if not _is_time(sample)), None)
    if strange is not None:
        series.fail("error", _no_time(strange))
        return None
    series.device_us += sum(taken) * series.launches
    _keep(series, number, taken, slow, contender.floors.get(series.temperature))
    if series.status == "passed":
        _stop(series, slow, policy)
    return None


def _keep(series: Series, number: int, taken: Sequence[float], slow: str | None, floor: Floor | None) -> None:
    """Keeps those samples of a turn that count."""
    limit = floor.limit_us if floor else 0.0
    believed = [sample for sample in taken if sample >= limit]
    series.discarded[UNDER_THE_FLOOR] += len(taken) - len(believed)
    if slow:
        series.discarded[THROTTLED] += len(believed)
    else:
        series.samples_us += believed
        series.rounds += [number] * len(believed)
    series.discarded = +series.discarded
    strays = series.discarded[UNDER_THE_FLOOR]
    if floor and strays > max(1.0, MAX_STRAYS * series.taken):
        sentence = (
            f"{series.temperature}: {min(taken):.4g} us is under the physical floor of {floor.us:.4g} us "
            f"(by {floor.by}; {strays} of {counted(series.taken, 'sample')}): a time "
            "under the floor means that the work was not done"
        )
        series.fail("failed", sentence)


def _stop(series: Series, slow: str | None, policy: Policy) -> None:
    """Ends the series if it is precise enough or its budget is spent."""
    enough = len(series.samples_us) >= policy.min_samples and len(set(series.rounds)) >= policy.min_rounds
    if enough and relative_error(series.samples_us, series.rounds) <= policy.target:
        series.stopped_by = "precision"
    elif series.device_us >= policy.budget_s * 1e6 or series.taken >= policy.max_samples:
        series.stopped_by = "budget"
        if not series.samples_us:
            thrown = ", ".join(f"{number} {reason}" for reason, number in series.discarded.items())
            why = f" (last: {slow})" if slow else ""
            series.fail("error", f"{series.temperature}: no sample counts: {thrown}{why}")


def _is_time(sample: float) -> bool:
    return 0.0 < sample < math.inf


def _no_time(sample: float) -> str:
    return f"the stopwatch said {sample:g} us a launch, which is no time: the device's clock stands still or is broken"


def timing_of(series: Series, run: str, row: Row, contender: Contender | None, program_sha256: str | None) -> Timing:
    """The record line of `series` for `row`. `contender`: None for a row that was never timed."""
    floor = contender.floors.get(series.temperature) if contender else None
    again = f"{series.sentence.rstrip('.')}{RERUN}{bench_again(row)}"
    return Timing(
        run=run,
        case=row.case,
        op=row.op,
        backend=row.backend,
        target=row.target,
        executor=row.executor,
        temperature=series.temperature,
        method=contender.stopwatch.method if contender else None,
        flush=contender.stopwatch.flush if contender and series.temperature == "cold" else None,
        bare_read_us=contender.bare_read_us if contender and series.temperature == "cold" else None,
        status=series.status,
        sentence=again if series.sentence else "",
        samples_us=tuple(series.samples_us),
        rounds=tuple(series.rounds),
        launches_per_sample=series.launches,
        discarded=dict(series.discarded),
        stopped_by=series.stopped_by,
        floor_us=floor.us if floor else None,
        floor_by=floor.by if floor else None,
        program_sha256=program_sha256,
    )


def bench_again(row: Row) -> str:
    """The command line that times exactly this row again."""
    options = [part for name in ("case", "backend", "target", "executor") for part in (f"--{name}", getattr(row, name))]
    return shlex.join(["nox", "-s", "bench", "--", *options])
