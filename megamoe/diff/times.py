"""The confidence interval of the ratio of two device times, from raw samples.

Samples taken together are not independent: they share a clock frequency, a temperature, and a host that may be busy for
a second and slow to launch. So the method counts units, not samples:

1. A unit is one round of one run. A run of more than 10 rounds has 10 units instead, blocks of consecutive rounds,
   because disturbances of a device last longer than a round. A run of fewer than 4 rounds has blocks of consecutive
   samples. If a side has 4 or more runs of a row, its units are the runs, each the mean of its own units: two processes
   differ by more than two parts of one process.
2. A unit gives two numbers: the logarithms of its median and of its lower quartile. Disturbances add time, so the
   quartile is the least disturbed; a kernel that is slower only now and then shows in the median.
3. The centre of a side is the trimmed mean of its units, without the lowest and the highest tenth. Its error is Yuen's
   (1974), from the variance of the winsorised units. One disturbed round in ten moves neither.
4. Consecutive units may still be alike (drifting clocks). The variance is widened by (1 + r) / (1 - r), where r is the
   correlation of neighbours, corrected for its bias in short series and limited to 0 to 0.6.
5. The difference of the centres has Welch's interval with Student's t, at 99 %, plus half a tick of each clock: a clock
   with steps of 32 ns cannot resolve less.
6. The interval of a row covers the interval of the medians and that of the quartiles: both must show a difference, and
   both must show sameness. The ratio is the ratio of the medians.

With fewer than two units a side has no error and the interval is infinite: nothing can be said.
conformance/bench/false_alarms.py measures how often two runs of the same program are called different. One run per side
cannot show a shift between processes; the threshold covers it.

Student's t comes from scipy.special, which scipy.stats.t calls: importing scipy.stats takes 0.7 s, and comparing 10,000
rows must take at most 2 s. Trimming and winsorising use slices of a sorted array: scipy.stats.ttest_ind(trim=) cannot
do the widening of step 4, and scipy.stats.mstats.winsorize takes 1 s for 20,000 rows of ten units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from megamoe.records.lines import Timing

CONFIDENCE = 0.99
QUANTILES = (0.5, 0.25)
MIN_ROUNDS = 4
MIN_RUNS = 4
BLOCKS = 10
TRIM = 0.1
MAX_CORRELATION = 0.6
MIN_FREEDOM = 3.0

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Centres:
    """One side of every row: arrays [quantile of QUANTILES, row], except `samples` [row].

    `centre`: log of microseconds. `error`: its standard error, infinite if unknown. `freedom`: degrees of freedom of
    that error. `tick`: step of the clock, in log of microseconds. `samples`: their number.
    """

    centre: Floats
    error: Floats
    freedom: Floats
    tick: Floats
    samples: Integers

    @property
    def microseconds(self) -> Floats:
        """The centre of the medians, as times [row]."""
        return np.exp(self.centre[0])

    @property
    def known(self) -> list[bool]:
        """Whether there are enough samples for an error [row]."""
        return np.all(np.isfinite(self.error), axis=0).tolist()


def centres(rows: Sequence[Sequence[Timing]]) -> Centres:
    """The centre of each row, from all its lines. Each row must have a line with samples."""
    lines = [line for row in rows for line in row]
    lengths = np.fromiter((len(line.samples_us) for line in lines), np.int64, len(lines))
    values = np.fromiter(chain.from_iterable(line.samples_us for line in lines), np.float64, int(lengths.sum()))
    rounds = np.fromiter(chain.from_iterable(line.rounds for line in lines), np.int64, int(lengths.sum()))
    row_of_line = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    values, unit_sizes, line_of_unit = _units(values, rounds, lengths)
    samples = np.bincount(row_of_line, weights=lengths, minlength=len(rows)).astype(np.int64)
    sides: list[tuple[Floats, Floats, Floats]] = []
    for units in np.log(_quantiles(values, unit_sizes)):
        of_runs, row_of_unit = _runs_as_units(units, line_of_unit, row_of_line)
        sides.append(_trimmed(of_runs, np.bincount(row_of_unit, minlength=len(rows))))
    centre, error, freedom = (np.stack(part) for part in zip(*sides, strict=True))
    return Centres(centre, error, freedom, _ticks(values, samples) / np.exp(centre), samples)


@dataclass(frozen=True, slots=True)
class Ratios:
    """After over before, and its interval at 99 % confidence; arrays with one element per row."""

    ratio: Floats
    low: Floats
    high: Floats


def ratios(before: Centres, after: Centres) -> Ratios:
    """The ratio of the medians of each row and its interval. The interval is 0 to infinity if nothing can be said."""
    before_share, after_share = before.error**2, after.error**2
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        variance = before_share + after_share
        freedom = variance**2 / (before_share**2 / before.freedom + after_share**2 / after.freedom)
        # 0 / 0: neither side scatters at all. inf / inf: a side's error is unknown.
        freedom = np.where(np.isfinite(freedom), freedom, MIN_FREEDOM)
        half = stdtrit(freedom, (1 + CONFIDENCE) / 2) * np.sqrt(variance) + (before.tick + after.tick) / 2
        difference = after.centre - before.centre
        low, high = (difference - half).min(axis=0), (difference + half).max(axis=0)
        return Ratios(np.exp(difference[0]), np.exp(low), np.exp(high))


def _units(values: Floats, rounds: Integers, lengths: Integers) -> tuple[Floats, Integers, Integers]:
    """`values` sorted by unit, the number of samples of each unit, and the line of each unit."""
    line = np.repeat(np.arange(len(lengths)), lengths)
    same_line = line[1:] == line[:-1]
    if np.any(same_line & (rounds[1:] < rounds[:-1])):
        order = np.lexsort((rounds, line))
        values, rounds = values[order], rounds[order]
    starts = np.flatnonzero(_starts(line, _parts(line, rounds, lengths)))
    return values, np.diff(np.append(starts, len(values))), line[starts]


def _parts(line: Integers, rounds: Integers, lengths: Integers) -> Integers:
    """For each sample its part of the line: its round, or a block of rounds or of samples."""
    first = _starts(line, rounds)
    of_line = np.bincount(line[first], minlength=len(lengths))
    begin = np.cumsum(lengths) - lengths
    # The index of its round within its line.
    ordinal = np.cumsum(first) - 1
    ordinal = ordinal - ordinal[begin][line]
    position = np.arange(len(line)) - begin[line]
    blocks = np.minimum(lengths, BLOCKS)
    in_blocks = np.where(
        (of_line < MIN_ROUNDS)[line],
        position * blocks[line] // lengths[line],
        ordinal * BLOCKS // of_line[line],
    )
    as_rounds = (of_line >= MIN_ROUNDS) & (of_line <= BLOCKS)
    return np.where(as_rounds[line], ordinal, in_blocks)


def _starts(line: Integers, part: Integers) -> npt.NDArray[np.bool_]:
    starts = np.ones(len(line), dtype=bool)
    starts[1:] = (line[1:] != line[:-1]) | (part[1:] != part[:-1])
    return starts


def _runs_as_units(units: Floats, line_of_unit: Integers, row_of_line: Integers) -> tuple[Floats, Integers]:
    """Units and the row of each. In rows with MIN_RUNS or more runs, each run is one unit."""
    many = (np.bincount(row_of_line) >= MIN_RUNS)[row_of_line][line_of_unit]
    mean = np.bincount(line_of_unit, weights=units) / np.bincount(line_of_unit)
    first = np.ones(len(units), dtype=bool)
    first[1:] = line_of_unit[1:] != line_of_unit[:-1]
    kept = first | ~many
    return np.where(many, mean[line_of_unit], units)[kept], row_of_line[line_of_unit][kept]


def _by_size(sizes: Integers) -> Iterator[tuple[Integers, Integers, npt.NDArray[np.bool_]]]:
    """Pads a ragged array, grouping parts of similar size. Yields which parts, each element's index, and a mask."""
    starts = np.cumsum(sizes) - sizes
    doublings = np.ceil(np.log2(sizes)).astype(np.int64)
    for doubling in np.unique(doublings):
        which = np.flatnonzero(doublings == doubling)
        column = np.arange(sizes[which].max())
        inside = column < sizes[which, None]
        yield which, np.where(inside, starts[which, None] + column, 0), inside


def _quantiles(values: Floats, sizes: Integers) -> Floats:
    """[quantile of QUANTILES, unit], interpolated linearly between samples."""
    found = np.empty((len(QUANTILES), len(sizes)))
    for which, index, inside in _by_size(sizes):
        ordered = np.sort(np.where(inside, values[index], np.inf), axis=1)
        row, last = np.arange(len(which)), sizes[which] - 1
        for i, quantile in enumerate(QUANTILES):
            below = np.floor(quantile * last).astype(np.int64)
            share = quantile * last - below
            above = np.minimum(below + 1, last)
            found[i, which] = (1 - share) * ordered[row, below] + share * ordered[row, above]
    return found


def _ticks(values: Floats, sizes: Integers) -> Floats:
    """Each row's clock step: the smallest difference between two samples, 0 if all are equal."""
    found = np.zeros(len(sizes))
    for which, index, inside in _by_size(sizes):
        ordered = np.sort(np.where(inside, values[index], np.inf), axis=1)
        with np.errstate(invalid="ignore"):
            gaps = np.diff(ordered, axis=1)
        gaps[~(np.isfinite(gaps) & (gaps > 0))] = np.inf
        least = gaps.min(axis=1, initial=np.inf)
        found[which] = np.where(np.isfinite(least), least, 0.0)
    return found


def _trimmed(units: Floats, counts: Integers) -> tuple[Floats, Floats, Floats]:
    """Trimmed mean, its standard error and the degrees of freedom of each row's units."""
    centre, error, freedom = np.empty(len(counts)), np.empty(len(counts)), np.empty(len(counts))
    starts = np.cumsum(counts) - counts
    for n in np.unique(counts):
        which = np.flatnonzero(counts == n)
        values = units[starts[which, None] + np.arange(n)]
        cut = int(TRIM * n)
        left = n - 2 * cut
        ordered = np.sort(values, axis=1)
        centre[which] = ordered[:, cut : n - cut].mean(axis=1)
        winsorised = np.clip(values, ordered[:, [cut]], ordered[:, [n - cut - 1]])
        deviation = winsorised - winsorised.mean(axis=1, keepdims=True)
        widening = _widening(deviation)
        if left < 2:
            error[which] = np.inf
        else:
            error[which] = np.sqrt((deviation**2).sum(axis=1) / (left * (left - 1)) * widening)
        freedom[which] = np.maximum(left / widening - 1, np.clip(left - 1.0, 1.0, MIN_FREEDOM))
    return centre, error, freedom


def _widening(deviation: Floats) -> Floats:
    """The factor by which the variance of a mean grows when neighbours are correlated."""
    with np.errstate(divide="ignore", invalid="ignore"):
        r = (deviation[:, 1:] * deviation[:, :-1]).sum(axis=1) / (deviation**2).sum(axis=1)
    r = np.clip(np.nan_to_num(r + (1 + 3 * r) / deviation.shape[1]), 0.0, MAX_CORRELATION)
    return (1 + r) / (1 - r)
