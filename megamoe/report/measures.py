"""The measures that a cell of the heat map can show: numbers of records and timings, and their scales.

Every scale runs from 0 at the ideal to 6 far from it, so a strong colour always asks for attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megamoe.contract import DeviceFacts, Status
from megamoe.records.lines import Timing

LEVELS = 7
Style = Literal["number", "percent", "microseconds"]

# Signs differ in shape, so that colour-blind readers and black-and-white prints can tell them apart.
SIGNS: Mapping[Status, str] = {
    "passed": "✓",
    "failed": "✗",
    "error": "E",
    "crashed": "C",
    "timed_out": "T",
    "unsupported": "\u2013",
    "not_run": "○",
}


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a row. `bounds`: the LEVELS - 1 limits between levels, from the ideal outwards; none for verdicts.

    `source`: where the number comes from: "metrics" or "counters" of records, "cold" or "hot" timings.
    """

    name: str
    title: str
    meaning: str
    source: Literal["status", "metrics", "counters", "cold", "hot"]
    style: Style = "number"
    bounds: tuple[float, ...] = ()
    higher_is_better: bool = False

    def level(self, value: float) -> int:
        """The level: 0 at the ideal, up to 6. NaN is 6."""
        if math.isnan(value):
            return LEVELS - 1
        beyond = (value < bound if self.higher_is_better else value > bound for bound in self.bounds)
        return sum(beyond)


_OVERHEAD = (1.0, 1.1, 1.5, 2.0, 4.0, 16.0)
_FLOOR = (0.9, 0.75, 0.6, 0.4, 0.2, 0.1)

MEASURES: tuple[Measure, ...] = (
    Measure("verdict", "verdict", "status of the row, the worst of the schedules shown", "status"),
    Measure(
        "error",
        "error / bar",
        "largest error of an output, as a share of the bar it is held to; above 1 fails",
        "metrics",
        bounds=(0.25, 0.5, 0.7, 0.85, 0.95, 1.0),
    ),
    Measure(
        "floor_cold",
        "floor / time, cold",
        "floor over median device time, L2 flushed before each launch; 1 is the floor",
        "cold",
        bounds=_FLOOR,
        higher_is_better=True,
    ),
    Measure(
        "floor_hot",
        "floor / time, hot",
        "floor over median device time, launches back to back; above 1 the L2 helps",
        "hot",
        bounds=_FLOOR,
        higher_is_better=True,
    ),
    Measure(
        "mma_flops",
        "MMA FLOPs / useful",
        "FLOPs that the tensor cores were told to do over those that the case needs",
        "counters",
        bounds=_OVERHEAD,
    ),
    Measure(
        "tma_bytes",
        "TMA bytes / minimum",
        "bytes that TMA moved over those of all inputs and outputs once; below 1, the rest moved otherwise",
        "counters",
        bounds=_OVERHEAD,
    ),
    Measure(
        "bank_conflicts",
        "bank conflicts",
        "share of the passes over the shared-memory banks that a conflict caused",
        "counters",
        "percent",
        bounds=(0.0, 0.01, 0.05, 0.1, 0.25, 0.5),
    ),
)


def error_ratio(metrics: Mapping[str, float]) -> tuple[float, str] | None:
    """The largest ratio of a TENSOR.METRIC to its TENSOR.METRIC.bar, and its name. None if no metric has a bar.

    Outputs of codes have no bar: any wrong code counts as infinity, none as 0. NaN counts as infinity.
    """
    found = [
        (_over(value, metrics[f"{name}.bar"]), name) for name, value in metrics.items() if f"{name}.bar" in metrics
    ]
    found += [
        (math.inf if value > 0 else 0.0, name)
        for name, value in metrics.items()
        if name.endswith(".wrong") and not name.endswith("share.wrong")
    ]
    return max(found, default=None)


def _over(value: float, bar: float) -> float:
    if math.isnan(value) or math.isnan(bar):
        return math.inf
    return value / bar if bar else (0.0 if value == 0 else math.inf)


def counter_ratios(counters: Mapping[str, int]) -> dict[str, float]:
    """Measure of source "counters" -> its value, for the measures that these counters allow."""
    found: dict[str, float] = {}
    if counters.get("useful_flops") and "mma_flops" in counters:
        found["mma_flops"] = counters["mma_flops"] / counters["useful_flops"]
    moved = [counters[name] for name in ("tma_load_bytes", "tma_store_bytes") if name in counters]
    if counters.get("minimum_bytes") and moved:
        found["tma_bytes"] = sum(moved) / counters["minimum_bytes"]
    if counters.get("smem_wavefronts"):
        found["bank_conflicts"] = counters.get("smem_bank_conflicts", 0) / counters["smem_wavefronts"]
    return found


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of samples and its distribution-free interval with at least 95 % confidence, from order statistics.

    With fewer than six samples the interval is their whole range, at less confidence.
    """

    median: float
    low: float
    high: float


MIN_LAUNCH_US = 1.0
"""A shorter physical floor says nothing about a kernel: none in an H200's records runs in less than 3 us."""


def floor_of(timing: Timing, device: DeviceFacts | None) -> tuple[float, str] | None:
    """The floor to compare a timing with, in microseconds, and what sets it. None if the timing has none.

    With "bytes" or "flops" it is the physical floor, with "empty kernel" this device's time to launch a kernel that
    does nothing. With "launch" it is a physical floor shorter than any launch, on a device whose empty kernel has not
    been timed: then a share of it would mean nothing.
    """
    if timing.floor_us is None:
        return None
    empty = (device.empty_kernel_us if device else None) or {}
    if empty.get(timing.temperature, 0.0) > timing.floor_us:
        return empty[timing.temperature], "empty kernel"
    by = "launch" if timing.floor_us < MIN_LAUNCH_US and timing.temperature not in empty else timing.floor_by
    return timing.floor_us, by or "bytes"


def share_of_floor(timing: Timing, device: DeviceFacts | None) -> float | None:
    """Floor over median time. None if nothing was timed or no kernel could reach the floor."""
    told, floor = spread(timing.samples_us), floor_of(timing, device)
    return None if told is None or floor is None or floor[1] == "launch" else floor[0] / told.median


def spread(samples: Sequence[float]) -> Spread | None:
    """The spread of `samples`; None if there are none."""
    if not samples:
        return None
    ordered = sorted(samples)
    count, middle = len(ordered), len(ordered) // 2
    median = ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    rank = _rank(count)
    return Spread(median, ordered[rank], ordered[count - 1 - rank])


def _rank(count: int) -> int:
    """Samples to leave out at either end: the largest rank with 2 P(Binomial(count, 1/2) <= rank) within 5 %."""
    if count > 1000:
        return max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)) - 1)
    tail, rank = 1, 0
    while 40 * tail <= 2**count:
        rank += 1
        tail += math.comb(count, rank)
    return max(0, rank - 1)
