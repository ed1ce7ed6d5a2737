"""Options of the row benchmarks: which rows, and where results go; and the single run behind a session.

`--case`, `--where` and `--schedule` are defined in conformance/conftest.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from megamoe.bench.run import BenchRun, BenchSettings
from megamoe.bench.timing import TEMPERATURES, Policy
from megamoe.contract import Row, Temperature
from megamoe.records.lines import Shard
from megamoe.records.provenance import digests_of
from megamoe.records.shards import Nth, cut_now
from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import Selection, SelectionError, known_cases, owed_rows

RUNS = Path("results/runs")
_RUN = pytest.StashKey[BenchRun]()
_WRONG = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of bench_rows.py."""
    group = parser.getgroup("megamoe bench", "rows to measure")
    for name in ("backend", "target", "executor", "op"):
        group.addoption(f"--{name}", action="append", default=[], help=f"only this {name}; may be given several times")
    group.addoption("--profile", help="default: gpu where an executor with a clock runs, else smoke")
    group.addoption("--specs", type=Path, help="folder of the specs")
    group.addoption("--output", type=Path, help=f"record file; default: a new one in {RUNS}")
    group.addoption("--jobs", type=int, help="worker processes where nothing is timed; default: one a core")
    group.addoption("--shard", metavar="I/N", help="part I of N, of about equal cost; rows of one case stay together")
    group.addoption("--run-set", metavar="ID", default="", help="name that all shards share; default: from their rows")
    group.addoption("--ray", metavar="ADDRESS", help='cases as tasks of this Ray cluster; "local": of one on this host')
    group.addoption("--rse", type=float, default=Policy().target, help="relative standard error that is enough")
    group.addoption("--budget", type=float, default=Policy().budget_s, help="device seconds of a row and temperature")
    group.addoption("--patience", type=float, default=1.0, help="factor on the time limits of what runs on a device")


def pytest_configure(config: pytest.Config) -> None:
    """Silences pytest-benchmark's warning about rows that fail before they have a time."""
    from pytest_benchmark.logger import PytestBenchmarkWarning

    config.addinivalue_line("filterwarnings", "ignore::pytest_benchmark.logger.PytestBenchmarkWarning")
    # Warnings at the very end of a session use the filters from before the line above.
    warnings.filterwarnings("ignore", category=PytestBenchmarkWarning)


def selection_of(config: pytest.Config) -> Selection:
    """The selection that the options ask for. UsageError for a contradiction."""
    case, where = config.option.case, config.option.where
    if case and (config.option.profile or config.option.op):
        raise pytest.UsageError("--case names its own row: drop --profile and --op")
    # Looking for a device imports torch, so do it only when needed.
    executors = tuple(config.option.executor) or default_executors()
    return Selection(
        config.option.profile or ("smoke" if executors == ("vm",) else "gpu"),
        ops=tuple(config.option.op),
        cases=(case,) if case else (),
        where=tuple(where),
        backends=tuple(config.option.backend),
        targets=tuple(config.option.target),
        executors=executors,
        schedules=tuple(config.option.schedule) or ("eager",),
    )


def shard_of(config: pytest.Config, rows: Sequence[Row], selection: Selection) -> tuple[Sequence[Row], Shard | None]:
    """The rows left by the options, and the shard for the header. SelectionError for an invalid shard."""
    if config.option.shard is None:
        return rows, None
    nth = Nth.parse(config.option.shard, config.option.run_set)
    shares = cut_now(rows, nth.count)
    return shares.shards[nth.index - 1], shares.shard(nth, selection, digests_of(config.option.specs))


def default_executors() -> tuple[str, ...]:
    """`gpu` if it can run some target, else `vm`."""
    from megamoe.contract import TARGETS, UnsupportedError, load_executor

    try:
        gpu = load_executor("gpu")
    except (UnsupportedError, ImportError):
        return ("vm",)
    return ("vm",) if all(gpu.unavailable(target) for target in TARGETS) else ("gpu",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One benchmark a row, or two (cold and hot) if the executor has a clock."""
    if "row" not in metafunc.fixturenames:
        return
    config = metafunc.config
    try:
        specs = load_specs(config.option.specs)
        selection = selection_of(config)
        rows, shard = shard_of(config, owed_rows(specs, selection), selection)
    except (SelectionError, SpecError, pytest.UsageError) as error:
        config.stash[_WRONG] = str(error)
        metafunc.parametrize(("case", "row", "temperature"), [])
        return
    settings = BenchSettings(
        jobs=config.option.jobs or os.cpu_count() or 1,
        specs=config.option.specs,
        policy=Policy(target=config.option.rse, budget_s=config.option.budget),
        patience=config.option.patience,
        ray=config.option.ray,
    )
    output = config.option.output or RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-bench-{selection.label}.jsonl"
    config.stash[_RUN] = run = BenchRun(rows, selection, settings, output, shard)
    found = measurements(rows, run)
    listed = {id: case for spec in specs.values() for id, case in known_cases(spec).items()}
    cases = {row.case: listed.get(row.case) or specs[row.op].parse_case(row.case) for row in rows}
    metafunc.parametrize(
        ("case", "row", "temperature"),
        [(cases[row.case], row, temperature) for row, temperature in found],
        ids=[row_id(row, temperature) for row, temperature in found],
    )


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """UsageError for options that select nothing. Raised while tests are generated, it would print a traceback."""
    if _WRONG in config.stash:
        raise pytest.UsageError(config.stash[_WRONG])


def measurements(rows: Sequence[Row], run: BenchRun) -> list[tuple[Row, Temperature | None]]:
    """Each row with each temperature at which it is timed, or with None if its executor has no clock."""
    found: list[tuple[Row, Temperature | None]] = []
    for row in rows:
        if row in run.timed:
            found.extend((row, temperature) for temperature in TEMPERATURES)
        else:
            found.append((row, None))
    return found


def row_id(row: Row, temperature: Temperature | None) -> str:
    """The name of one measurement in pytest and pytest-benchmark."""
    return "|".join([*row[:4], temperature or row.schedule])


@pytest.fixture(scope="session")
def bench_run(pytestconfig: pytest.Config) -> Iterator[BenchRun]:
    """The run behind all rows. It measures a row when a benchmark requests it."""
    with pytestconfig.stash[_RUN] as run:
        yield run


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Adds what a time depends on: the driver's description of the device, and software versions."""
    run = config.stash.get(_RUN, None)
    if run is None:
        return
    header = run.header
    machine_info["gpu"] = None if header.device is None else header.device.model_dump()
    machine_info["software"] = {**header.software, "torch": header.torch, "numpy": header.numpy}


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Adds the run to which the file belongs."""
    run = config.stash.get(_RUN, None)
    if run is not None:
        output_json["megamoe"] = {
            "run": run.header.run,
            "records": str(run.output),
            "revision": run.header.git_revision,
        }


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says where the records are."""
    run = config.stash.get(_RUN, None)
    if run is not None and run.output.exists():
        terminalreporter.write_line(f"records: {run.output}")
