"""Judges rows on a Ray cluster: each row is a task, its record comes back with its evidence, and one file takes them
all.

A task needs one unit of the resource that its row runs on (`resource_of`). Nodes declare how much they have, as in `ray
start --resources '{"vm": 8}'` or '{"H200": 1}'. When a node dies, Ray reruns its tasks elsewhere, so a lost node costs
time but no row. A task judges its row as a worker of this host does (megamoe.judge.isolated).

A node needs the command's tree at the same path, or an installed one; a task compares the digests of the code. Nothing
is read from a shared file system: what a row writes (programs, outputs, bundles) travels back as bytes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megamoe.contract import Row, Status
from megamoe.contract.counted import counted
from megamoe.contract.scratch import scratch_folder
from megamoe.judge.run import GRACE_S, RunSettings, chosen_for_audits
from megamoe.records.files import write_file
from megamoe.records.lines import Record, RecordError, record_of
from megamoe.records.provenance import digests_of
from megamoe.spec.selection import DEFAULT_EXECUTOR, SelectionError

if TYPE_CHECKING:
    from megamoe.judge.judge import Bench

LOCAL: Final = "local"
"""The address that means a cluster of this host alone, started for this run."""
DEVICES: Final[Mapping[str, tuple[str, ...]]] = {"sm_90a": ("H200", "H100"), "sm_100a": ("B200", "GB200")}
"""Resource names of device nodes, by the target that they run."""
MAX_TRIES: Final = 4
MAX_CARRIED: Final = 256 << 20
"""Limit in bytes for what one row sends back besides its record."""
NO_NODE_S: Final = 30.0
"""A row is given up after no node has offered its resource for this long."""
_POLL_S: Final = 0.5
_DEATHS: Final = ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "ObjectLostError")
"""What Ray raises when a task's process or node died on every try."""
_FOLDERS: Final = ("failures", "outputs", "programs")


@dataclass(frozen=True, slots=True)
class Task:
    """What a node needs to judge a row. `folder`, `path`: the command's working folder and module search path; `code`:
    the digest of its tree."""

    row: Row
    audited: bool
    folder: str
    path: tuple[str, ...]
    code: str


@dataclass(frozen=True, slots=True)
class Judged:
    """What a node returns: a record, and files by path in the folders of RunSettings, such as "programs/HASH.ptx"."""

    record: Record
    files: Mapping[str, bytes]


def resource_of(row: Row, offered: Mapping[str, float]) -> str:
    """The resource that a node must offer to run `row`: "vm", or a device name of its target."""
    if row.executor == DEFAULT_EXECUTOR or ":" in row.executor:
        return DEFAULT_EXECUTOR
    devices = DEVICES[row.target]
    return next((name for name in devices if offered.get(name)), devices[0])


# The command's side


@contextmanager
def joined(address: str, jobs: int) -> Iterator[None]:
    """Joins the cluster at `address`, or LOCAL with `jobs` slots. On exit the tasks of this process end.

    Raises SelectionError if Ray is not installed or there is no such cluster.
    """
    try:
        ray = _ray()
    except ImportError as error:
        raise SelectionError(
            f"--ray needs Ray, which is not installed: in a checkout, pip install -e '.[ray]' ({error})"
        ) from None
    # Turns off Ray's usage reports, and a warning about devices that Ray hides from tasks that request none.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    where = {"num_cpus": jobs, "resources": {DEFAULT_EXECUTOR: jobs}} if address == LOCAL else {"address": address}
    try:
        ray.init(**where, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise SelectionError(f"--ray {address}: no cluster can be used: {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _ray() -> Any:
    return import_module("ray")


def task_of(row: Row, specs: Path | None, audited: bool = False) -> Task:
    """The task that judges `row`."""
    return Task(row, audited, os.getcwd(), tuple(sys.path), digests_of(specs)["code"])


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that returned nothing."""

    status: Status
    sentence: str


Call = tuple[Callable[..., object], tuple[object, ...]]


def shared_out(calls: Iterable[tuple[Row, Call]]) -> Iterator[tuple[Row, object]]:
    """Calls each function on a node that can run its row. Yields the row and the result, or a Failure, as they finish.

    If the process or node dies, Ray calls the function again, MAX_TRIES times in all at most.
    """
    ray = _ray()
    pending: dict[Any, Row] = {}
    for row, (function, arguments) in calls:
        needed = resource_of(row, ray.cluster_resources())
        there = ray.remote(max_retries=MAX_TRIES - 1)(function)
        submit = there.options(num_cpus=0, num_gpus=int(needed != DEFAULT_EXECUTOR), resources={needed: 1})
        pending[submit.remote(*arguments)] = row
    lacking_since: dict[str, float] = {}
    while pending:
        finished, _ = ray.wait([*pending], timeout=_POLL_S)
        for one in finished:
            yield pending.pop(one), _returned(ray, one)
        if finished:
            lacking_since.clear()
            continue
        offered = ray.cluster_resources()
        for ref, row in [*pending.items()]:
            needed = resource_of(row, offered)
            if offered.get(needed):
                lacking_since.pop(needed, None)
            elif time.monotonic() - lacking_since.setdefault(needed, time.monotonic()) > NO_NODE_S:
                del pending[ref]
                ray.cancel(ref)
                start = shlex.join(["ray", "start", "--resources", json.dumps({needed: 1})])
                why = f"no node of the cluster offers {needed!r}; a node that does is started by {start} --address ..."
                yield row, Failure("not_run", why)


def _returned(ray: Any, finished: Any) -> object:
    try:
        return ray.get(finished)
    except tuple(getattr(ray.exceptions, name) for name in _DEATHS) as error:
        why = f"the process that judged it, or its node, died {MAX_TRIES} times: {type(error).__name__}"
        return Failure("crashed", why)
    except ray.exceptions.RayError as error:
        first = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        return Failure("error", f"the cluster returned no record: {first.strip()}")


def judged_on_cluster(rows: Sequence[Row], settings: RunSettings) -> Generator[Record, None, None]:
    """Like megamoe.judge.run.judged, on the cluster that this process has `joined`."""
    audited = chosen_for_audits(rows, settings.specs)
    told = _ray().put(settings)
    tasks = [replace(task_of(rows[0], settings.specs), row=row, audited=row in audited) for row in rows]
    for row, answer in shared_out((task.row, (judged_there, (task, told))) for task in tasks):
        yield _record(row, answer, settings)


def _record(row: Row, answer: object, settings: RunSettings) -> Record:
    """The record of a finished task. Writes the task's files to the folders of `settings`."""
    if isinstance(answer, Failure):
        return record_of(settings.run, row, answer.status, answer.sentence, specs=settings.specs)
    assert isinstance(answer, Judged)
    try:
        _keep(answer.files, settings)
    except RecordError as error:
        if answer.record.status == "passed":
            why = f"its evidence cannot be kept: {error}"
            return record_of(settings.run, row, "error", why, specs=settings.specs)
        # Only evidence of a failure is lost, so the row keeps its status.
    return answer.record


def _keep(files: Mapping[str, bytes], settings: RunSettings) -> None:
    for name, data in files.items():
        folder, _, rest = name.partition("/")
        place: Path | None = getattr(settings, folder) if folder in _FOLDERS else None
        if place is not None and ".." not in Path(rest).parts and not (place / rest).exists():
            write_file(place / rest, data, "what a node has sent", durable=False)


# A node's side


def judged_there(task: Task, settings: RunSettings) -> Judged:
    """Judges a row in a process of a node. Ray keeps the process for later rows. `settings`: the run's."""
    settle(task)
    home = _home()
    row = task.row
    here = replace(settings, **{name: home / name for name in _FOLDERS if getattr(settings, name) is not None})
    thread = ThreadPoolExecutor(1)
    try:
        record = thread.submit(_judged_here, row, here, task.audited).result(settings.timeout_s + GRACE_S)
    except TimeoutError:
        _bench(row.backend, here).end()
        why = f"no verdict within {settings.timeout_s:g} host seconds: it hung"
        record = record_of(settings.run, row, "timed_out", why, specs=settings.specs)
    finally:
        thread.shutdown(wait=False)
    files, left = _collected(home)
    sentence, bundle = record.sentence, record.bundle
    if settings.failures is not None:
        sentence = sentence.replace(str(home / "failures"), str(settings.failures))
        bundle = bundle and bundle.replace(str(home / "failures"), str(settings.failures))
    if left and sentence:
        sentence = f"{sentence} ({counted(left, 'byte')} of evidence left out: a row sends at most {MAX_CARRIED})"
    return Judged(record.model_copy(update={"sentence": sentence, "bundle": bundle}), files)


def settle(task: Task) -> None:
    """Gives this process the command's folder and module path. Raises RuntimeError if its code differs."""
    if os.path.isdir(task.folder):
        os.chdir(task.folder)
    for place in reversed(task.path):
        if place not in sys.path and os.path.isdir(place or "."):
            sys.path.insert(0, place)
    ours = _own_code()
    if ours != task.code:
        raise RuntimeError(
            f"node {os.uname().nodename} has other code (megamoe, backends, constraints) than the command: "
            f"{ours[:12]}, not {task.code[:12]}"
        )


@cache
def _own_code() -> str:
    import torch

    torch.set_num_threads(1)
    return digests_of()["code"]


def _judged_here(row: Row, settings: RunSettings, audited: bool) -> Record:
    from megamoe.judge.audit import Audits
    from megamoe.judge.judge import judge

    folders = {name: getattr(settings, name) for name in _FOLDERS}
    bench = replace(_bench(row.backend, settings).bench, audits=Audits(frozenset({row} if audited else ())))
    return judge(row, settings.run, specs=settings.specs, bench=bench, **folders)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The bench that this process keeps for the rows of one backend and one run."""

    bench: Bench

    def end(self) -> None:
        from megamoe.judge.isolated import Processes

        if isinstance(self.bench.runners, Processes):
            self.bench.runners.end()


@cache
def _bench(backend: str, settings: RunSettings) -> _Kept:
    # One bench per backend, so that a backend's code cannot reach another backend's rows.
    from megamoe.judge.run import bench_of

    return _Kept(bench_of(settings))


_HOMES: Final = ExitStack()


@cache
def _home() -> Path:
    home = _HOMES.enter_context(scratch_folder("node"))
    for name in _FOLDERS:
        (home / name).mkdir()
    return home


def _collected(home: Path) -> tuple[dict[str, bytes], int]:
    """Takes the files out of `home`, smallest first. Also returns how many bytes did not fit."""
    paths = sorted((path for path in home.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    found: dict[str, bytes] = {}
    taken = left = 0
    for path in paths:
        size = path.stat().st_size
        if taken + size <= MAX_CARRIED:
            taken += size
            found[path.relative_to(home).as_posix()] = path.read_bytes()
        else:
            left += size
    for name in _FOLDERS:
        shutil.rmtree(home / name, ignore_errors=True)
        (home / name).mkdir()
    return found, left
