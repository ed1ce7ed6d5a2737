"""The interval in which the ratio of two device times lies, from raw samples.

Samples of one round are not independent: they share a clock frequency, a temperature and whatever else ran. What is
independent, nearly, are rounds, so that rounds are counted, not samples:

1. A unit is one round of one run: the logarithm of the median of its samples. A run of fewer than 4 rounds is cut into
   10 blocks of consecutive samples instead. Where a side has 4 runs of a row or more, its units are the runs, as the
   means of theirs: two processes differ by more than two rounds of one.
2. The centre of a side is the mean of its units without the least and the greatest tenth; its error is Yuen's (1974),
   from the variance of the winsorised units. Of ten rounds, one that something disturbed moves neither.
3. Rounds that follow each other may still be alike (clocks that drift). The error is widened by (1 + r) / (1 - r), r
   being the correlation of neighbours, corrected for its bias in short series and held within 0 and 0.6.
4. The difference of both centres has Welch's interval of Student's t, at 99 %, and half a tick of each clock more: a
   clock that counts in steps of 32 ns cannot see less.

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

from megamoe.record import Timing

CONFIDENCE = 0.99
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
    """One side of every row, as arrays of one element a row.

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
        """The centre as a time."""
        return np.exp(self.centre)


def centres(rows: Sequence[Sequence[Timing]]) -> Centres:
    """What each row's lines, at least one with samples, say together."""
    lines = [line for row in rows for line in row]
    lengths = np.fromiter((len(line.samples_us) for line in lines), np.int64, len(lines))
    values = np.fromiter(chain.from_iterable(line.samples_us for line in lines), np.float64, int(lengths.sum()))
    rounds = np.fromiter(chain.from_iterable(line.rounds for line in lines), np.int64, int(lengths.sum()))
    row_of_line = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    values, unit_sizes, line_of_unit = _units(values, rounds, lengths)
    units = np.log(_medians(values, unit_sizes))
    units, row_of_unit = _runs_as_units(units, line_of_unit, row_of_line)
    centre, error, freedom = _trimmed(units, np.bincount(row_of_unit, minlength=len(rows)))
    samples = np.bincount(row_of_line, weights=lengths, minlength=len(rows)).astype(np.int64)
    return Centres(centre, error, freedom, _ticks(values, samples) / np.exp(centre), samples)


@dataclass(frozen=True, slots=True)
class Ratios:
    """After over before, and between what it lies at 99 % confidence; arrays of one element a row."""

    ratio: Floats
    low: Floats
    high: Floats


def ratios(before: Centres, after: Centres) -> Ratios:
    """The ratio of both sides of each row, with its interval: from 0 to infinity where nothing can be said."""
    before_share, after_share = before.error**2, after.error**2
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        variance = before_share + after_share
        freedom = variance**2 / (before_share**2 / before.freedom + after_share**2 / after.freedom)
        # Zero over zero: no scatter at all on either side. Infinity over infinity: an unknown one.
        freedom = np.where(np.isfinite(freedom), freedom, LEAST_FREEDOM)
        half = student(freedom) * np.sqrt(variance) + (before.tick + after.tick) / 2
        difference = after.centre - before.centre
        return Ratios(np.exp(difference), np.exp(difference - half), np.exp(difference + half))


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
    position = np.arange(len(values)) - (np.cumsum(lengths) - lengths)[line]
    few = np.bincount(line[_starts(line, rounds)], minlength=len(lengths)) < LEAST_ROUNDS
    block = position * np.minimum(lengths, BLOCKS)[line] // lengths[line]
    starts = np.flatnonzero(_starts(line, np.where(few[line], block, rounds)))
    return values, np.diff(np.append(starts, len(values))), line[starts]


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


def _medians(values: Floats, sizes: Integers) -> Floats:
    found = np.empty(len(sizes))
    for which, index, inside in _by_size(sizes):
        ordered = np.sort(np.where(inside, values[index], np.inf), axis=1)
        row, size = np.arange(len(which)), sizes[which]
        found[which] = (ordered[row, (size - 1) // 2] + ordered[row, size // 2]) / 2
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
