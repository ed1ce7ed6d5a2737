"""The interval in which the ratio of two device times lies, from raw samples.

Samples that were taken together are not independent: they share a clock frequency, a temperature, and a host that is
busy for a second and slow to launch. So it is not samples that are counted:

1. A unit is one round of one run. A run of more than 10 rounds has 10 units instead, blocks of consecutive rounds, as
   what disturbs a device lasts longer than a round; so does one of fewer than 4, blocks of consecutive samples. Where a
   side has 4 runs of a row or more, its units are the runs, as the means of theirs: two processes differ by more than
   two parts of one.
2. A unit says two things: the logarithms of its median and of its lower quartile. What disturbs a kernel adds time, so
   that the quartile is what is least disturbed; a kernel that is slower only now and then shows in the median.
3. The centre of a side is the mean of its units without the least and the greatest tenth; its error is Yuen's (1974),
   from the variance of the winsorised units. Of ten rounds, one that something disturbed moves neither.
4. Units that follow each other may still be alike (clocks that drift). The error is widened by (1 + r) / (1 - r), r
   being the correlation of neighbours, corrected for its bias in short series and held within 0 and 0.6.
5. The difference of both centres has Welch's interval of Student's t, at 99 %, and half a tick of each clock more: a
   clock that counts in steps of 32 ns cannot see less.
6. The interval of a row holds that of the medians and that of the quartiles: for a difference both must show it, and to
   be the same, both must be. The ratio is that of the medians.

Less than two units a side give no error, and so an infinite interval: then nothing can be said. How often two runs of
the same program are called different by this is measured (conformance/bench/false_alarms.py); a shift between processes
that one run a side cannot show is what the threshold is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from megamoe.records.lines import Timing

CONFIDENCE = 0.99
QUANTILES = (0.5, 0.25)
LEAST_ROUNDS = 4
LEAST_RUNS = 4
BLOCKS = 10
TRIM = 0.1
MOST_CORRELATION = 0.6
LEAST_FREEDOM = 3.0

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Centres:
    """One side of every row: arrays [quantile of QUANTILES, row], but for `samples` [row].

    `centre`: log of microseconds. `error`: its standard error, infinite where it is unknown. `freedom`: degrees of
    freedom of that error. `tick`: step of the clock, log of microseconds. `samples`: how many.
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
        """Whether there are samples enough to know an error [row]."""
        return np.all(np.isfinite(self.error), axis=0).tolist()


def centres(rows: Sequence[Sequence[Timing]]) -> Centres:
    """What each row's lines, at least one with samples, say together."""
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
    """After over before, and between what it lies at 99 % confidence; arrays of one element a row."""

    ratio: Floats
    low: Floats
    high: Floats


def ratios(before: Centres, after: Centres) -> Ratios:
    """The ratio of the medians of each row, and the interval: from 0 to infinity where nothing can be said."""
    before_share, after_share = before.error**2, after.error**2
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        variance = before_share + after_share
        freedom = variance**2 / (before_share**2 / before.freedom + after_share**2 / after.freedom)
        # Zero over zero: no scatter at all on either side. Infinity over infinity: an unknown one.
        freedom = np.where(np.isfinite(freedom), freedom, LEAST_FREEDOM)
        half = student(freedom) * np.sqrt(variance) + (before.tick + after.tick) / 2
        difference = after.centre - before.centre
        low, high = (difference - half).min(axis=0), (difference + half).max(axis=0)
        return Ratios(np.exp(difference[0]), np.exp(low), np.exp(high))


def student(freedom: Floats) -> Floats:
    """The quantile of Student's t that leaves (1 - CONFIDENCE) / 2 above it, for `freedom` >= 1.

    From 3 on by the expansion of Abramowitz and Stegun, 26.7.5, 0.8 % low at 3 and better than 0.25 % from 4 on;
    below, the closed forms at 1 and at 2.
    """
    tail = (1 - CONFIDENCE) / 2
    z = NormalDist().inv_cdf(1 - tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    expansion = z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
    at_1 = 1 / np.tan(np.pi * tail)
    at_2 = (1 - 2 * tail) * np.sqrt(2 / (4 * tail * (1 - tail)))
    return np.where(freedom >= 3, expansion, np.where(freedom >= 2, at_2, at_1))


def _units(values: Floats, rounds: Integers, lengths: Integers) -> tuple[Floats, Integers, Integers]:
    """`values` with those of a unit next to each other, how many each unit has, and the line that it is of."""
    line = np.repeat(np.arange(len(lengths)), lengths)
    same_line = line[1:] == line[:-1]
    if np.any(same_line & (rounds[1:] < rounds[:-1])):
        order = np.lexsort((rounds, line))
        values, rounds = values[order], rounds[order]
    starts = np.flatnonzero(_starts(line, _parts(line, rounds, lengths)))
    return values, np.diff(np.append(starts, len(values))), line[starts]


def _parts(line: Integers, rounds: Integers, lengths: Integers) -> Integers:
    """For each sample, the part of its line that it belongs to: its round, or a block of rounds or of samples."""
    first = _starts(line, rounds)
    of_line = np.bincount(line[first], minlength=len(lengths))
    begin = np.cumsum(lengths) - lengths
    # The number of its round within its line, from 0.
    ordinal = np.cumsum(first) - 1
    ordinal = ordinal - ordinal[begin][line]
    position = np.arange(len(line)) - begin[line]
    blocks = np.minimum(lengths, BLOCKS)
    in_blocks = np.where(
        (of_line < LEAST_ROUNDS)[line],
        position * blocks[line] // lengths[line],
        ordinal * BLOCKS // of_line[line],
    )
    as_rounds = (of_line >= LEAST_ROUNDS) & (of_line <= BLOCKS)
    return np.where(as_rounds[line], ordinal, in_blocks)


def _starts(line: Integers, part: Integers) -> npt.NDArray[np.bool_]:
    starts = np.ones(len(line), dtype=bool)
    starts[1:] = (line[1:] != line[:-1]) | (part[1:] != part[:-1])
    return starts


def _runs_as_units(units: Floats, line_of_unit: Integers, row_of_line: Integers) -> tuple[Floats, Integers]:
    """Units with runs in the place of rounds where a row has enough runs, and the row of each unit."""
    many = (np.bincount(row_of_line) >= LEAST_RUNS)[row_of_line][line_of_unit]
    mean = np.bincount(line_of_unit, weights=units) / np.bincount(line_of_unit)
    first = np.ones(len(units), dtype=bool)
    first[1:] = line_of_unit[1:] != line_of_unit[:-1]
    kept = first | ~many
    return np.where(many, mean[line_of_unit], units)[kept], row_of_line[line_of_unit][kept]


def _by_size(sizes: Integers) -> Iterator[tuple[Integers, Integers, npt.NDArray[np.bool_]]]:
    """Parts of a ragged array, those of like size together: which, the index of each element, whether there is one."""
    starts = np.cumsum(sizes) - sizes
    doublings = np.ceil(np.log2(sizes)).astype(np.int64)
    for doubling in np.unique(doublings):
        which = np.flatnonzero(doublings == doubling)
        column = np.arange(sizes[which].max())
        inside = column < sizes[which, None]
        yield which, np.where(inside, starts[which, None] + column, 0), inside


def _quantiles(values: Floats, sizes: Integers) -> Floats:
    """[quantile of QUANTILES, unit], between two samples in proportion."""
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
    """The least difference of two samples that differ, as the step of a clock; 0 where all are equal."""
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
    for which, index, inside in _by_size(counts):
        n = counts[which]
        cut = (TRIM * n).astype(np.int64)
        left = n - 2 * cut
        ordered = np.sort(np.where(inside, units[index], np.inf), axis=1)
        column, row = np.arange(ordered.shape[1]), np.arange(len(which))
        kept = (column >= cut[:, None]) & (column < (n - cut)[:, None])
        centre[which] = np.where(kept, ordered, 0.0).sum(axis=1) / left
        winsorised = np.clip(units[index], ordered[row, cut, None], ordered[row, n - cut - 1, None])
        mean = np.where(inside, winsorised, 0.0).sum(axis=1) / n
        deviation = np.where(inside, winsorised - mean[:, None], 0.0)
        widening = _widening(deviation, n)
        with np.errstate(divide="ignore", invalid="ignore"):
            squared = (deviation**2).sum(axis=1) / (left * (left - 1)) * widening
        error[which] = np.where(left < 2, np.inf, np.sqrt(squared))
        freedom[which] = np.maximum(left / widening - 1, np.clip(left - 1.0, 1.0, LEAST_FREEDOM))
    return centre, error, freedom


def _widening(deviation: Floats, n: Integers) -> Floats:
    """By what the variance of a mean is larger because neighbours are alike."""
    squares = (deviation**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        r = (deviation[:, 1:] * deviation[:, :-1]).sum(axis=1) / squares
    r = np.clip(np.nan_to_num(r + (1 + 3 * r) / n), 0.0, MOST_CORRELATION)
    return (1 + r) / (1 - r)
