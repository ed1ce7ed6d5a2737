"""The data of the page: one compact object of lists and numbers that holds every record of the input.

Repeated values (texts, metrics, counters) are stored once and referred to by index, so a record is a dozen small
numbers. assets/data.js decodes it, and so does `decode_records` here; tests compare the result with the input.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, cast

from megamoe.records.lines import Agreement, Figures, Record, Timing
from megamoe.report.material import Material, Subject
from megamoe.report.measures import counter_ratios, error_ratio, floor_of, spread

Json = dict[str, object]
DIGITS = 5
MAX_SAMPLES = 256
"""The page draws at most this many samples of a timing, and its extremes. Median and interval use all samples."""
STEPS = 4095
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
RECORD_FIELDS = (
    "case", "subject", "schedule", "run", "status", "sentence", "metrics", "counters", "seconds", "program", "inputs",
    "bundle", "artifact",
)  # fmt: skip
TIMING_FIELDS = ("case", "subject", "run", "hot", "status", "sentence", "how", "spread", "samples")
FIGURES_FIELDS = ("case", "backend", "target", "run", "assembler", "program", "cubin", "kernels")
_Key = TypeVar("_Key", bound=Hashable)


class Index(Generic[_Key]):
    """Numbers distinct values in order of first appearance."""

    def __init__(self, values: Sequence[_Key] = ()) -> None:
        self._places: dict[_Key, int] = {value: place for place, value in enumerate(values)}

    def __getitem__(self, value: _Key) -> int:
        return self._places.setdefault(value, len(self._places))

    @property
    def values(self) -> list[_Key]:
        """The values in the order of their numbers."""
        return list(self._places)


def number(value: float) -> float | int | str | None:
    """`value` with DIGITS significant digits; NaN and infinities as text, spelt as in records."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int):
        return value
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


class Encoder:
    """Turns lines into rows of numbers. Once all lines are encoded, `tables` holds the values that the numbers refer
    to."""

    def __init__(self, material: Material) -> None:
        self.texts: Index[str] = Index()
        self.cases: Index[str] = Index()
        self.subjects: Index[Subject] = Index(material.subjects)
        self.schedules: Index[str] = Index()
        self.runs: Index[str] = Index([header.run for header in material.runs])
        self.statuses: Index[str] = Index()
        self._devices = material.devices
        self._names: Index[tuple[str, ...]] = Index()
        self._metrics: Index[tuple[int, tuple[float | int | str | None, ...]]] = Index()
        self._worst: list[list[object] | None] = []
        self._counters: Index[tuple[int, tuple[int, ...]]] = Index()
        self._ratios: list[Json] = []
        self._inputs: Index[tuple[tuple[int, int], ...]] = Index()

    def record(self, line: Record) -> list[object]:
        """The values of RECORD_FIELDS; None for one that the record lacks."""
        return [
            self.cases[line.case],
            self.subjects[Subject(line.backend, line.target, line.executor)],
            self.schedules[line.schedule],
            self.runs[line.run],
            self.statuses[line.status],
            self.texts[line.sentence],
            self._metric_place(line.metrics),
            self._counter_place(line.counters),
            line.judge_host_seconds and round(line.judge_host_seconds, 2),
            line.program_sha256 and self.texts[line.program_sha256],
            self._named(line.input_sha256),
            line.bundle and self.texts[line.bundle],
            self._named(line.artifact),
        ]

    def _named(self, texts: Mapping[str, str]) -> int:
        return self._inputs[tuple((self.texts[name], self.texts[text]) for name, text in texts.items())]

    def _metric_place(self, metrics: Mapping[str, float]) -> int:
        key = (self._names[tuple(metrics)], tuple(number(value) for value in metrics.values()))
        place = self._metrics[key]
        if place == len(self._worst):
            worst = error_ratio(metrics)
            self._worst.append(worst and [number(worst[0]), worst[1]])
        return place

    def _counter_place(self, counters: Mapping[str, int]) -> int:
        place = self._counters[self._names[tuple(counters)], tuple(counters.values())]
        if place == len(self._ratios):
            self._ratios.append({name: number(value) for name, value in counter_ratios(counters).items()})
        return place

    def agreement(self, line: Agreement) -> Json:
        """Encodes the distance between the backends' outputs for one case."""
        return {
            "case": self.cases[line.case], "target": line.target, "executor": line.executor, "schedule": line.schedule,
            "run": self.runs[line.run], "backends": line.backends, "alone": line.alone, "sentence": line.sentence,
            "metrics": self._metric_place(line.metrics),
        }  # fmt: skip

    def timing(self, line: Timing, drawn: bool) -> list[object]:
        """The values of TIMING_FIELDS, with at most MAX_SAMPLES samples if they will be `drawn`."""
        told = spread(line.samples_us)
        found = floor_of(line, self._devices.get(line.run))
        floor, by = (number(found[0]), found[1]) if found else (None, None)
        return [
            self.cases[line.case],
            self.subjects[Subject(line.backend, line.target, line.executor)],
            self.runs[line.run],
            line.temperature == "hot",
            self.statuses[line.status],
            self.texts[line.sentence],
            [line.method, line.launches_per_sample, line.stopped_by, floor, by, dict(line.discarded)],
            [len(line.samples_us), *map(number, (told.median, told.low, told.high))] if told else None,
            _packed(line.samples_us) if drawn and told else None,
        ]

    def figures(self, line: Figures) -> list[object]:
        """The values of FIGURES_FIELDS."""
        kernels = [[self.texts[name], self._counter_place(kernel)] for name, kernel in line.kernels.items()]
        return [
            self.cases[line.case],
            self.texts[line.backend],
            self.texts[line.target],
            self.runs[line.run],
            self.texts[line.assembler],
            self.texts[line.program_sha256],
            line.cubin_sha256 and self.texts[line.cubin_sha256],
            kernels,
        ]

    def tables(self) -> Json:
        """The tables that the encoded lines refer to."""
        metrics = zip(self._metrics.values, self._worst, strict=True)
        counters = zip(self._counters.values, self._ratios, strict=True)
        return {
            "texts": self.texts.values, "cases": self.cases.values,
            "subjects": [list(one) for one in self.subjects.values], "schedules": self.schedules.values,
            "statuses": self.statuses.values, "names": [list(one) for one in self._names.values],
            "metrics": [[names, list(values), worst] for (names, values), worst in metrics],
            "counters": [[names, list(values), ratios] for (names, values), ratios in counters],
            "inputs": [[list(pair) for pair in one] for one in self._inputs.values],
        }  # fmt: skip


def _packed(samples: Sequence[float]) -> list[object]:
    """The smallest and the largest sample shown, and each sample in two letters: its step of STEPS between them."""
    kept = sorted({*_evenly(len(samples)), samples.index(min(samples)), samples.index(max(samples))})
    shown = [samples[place] for place in kept]
    low, high = min(shown), max(shown)
    steps = [round((value - low) / (high - low) * STEPS) if high > low else 0 for value in shown]
    return [number(low), number(high), "".join(_ALPHABET[step >> 6] + _ALPHABET[step & 63] for step in steps)]


def _evenly(count: int) -> list[int]:
    if count <= MAX_SAMPLES:
        return list(range(count))
    return [round(place * (count - 1) / (MAX_SAMPLES - 1)) for place in range(MAX_SAMPLES)]


def decode_records(data: Mapping[str, list[list[object]]]) -> Iterator[Json]:
    """Decodes the records of a page's data as assets/data.js does; for tests and scripts."""
    for row in data["records"]:
        found = dict(zip(RECORD_FIELDS, row, strict=True))
        backend, target, executor = data["subjects"][_place(found["subject"])]
        yield {
            "case": data["cases"][_place(found["case"])], "backend": backend, "target": target, "executor": executor,
            "schedule": data["schedules"][_place(found["schedule"])], "run": data["run_ids"][_place(found["run"])],
            "status": data["statuses"][_place(found["status"])], "sentence": data["texts"][_place(found["sentence"])],
            "metrics": _named(data, "metrics", found["metrics"]),
            "counters": _named(data, "counters", found["counters"]),
            "artifact": {
                str(data["texts"][_place(name)]): data["texts"][_place(text)]
                for name, text in cast("list[tuple[int, int]]", data["inputs"][_place(found["artifact"])])
            },
        }  # fmt: skip


def _place(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"the index of a table is {value!r}, not an integer")
    return value


def _named(data: Mapping[str, list[list[object]]], table: str, place: object) -> dict[object, object]:
    names, values, *_ = data[table][_place(place)]
    assert isinstance(values, list)
    return dict(zip(data["names"][_place(names)], values, strict=True))
