"""Hypothesis profiles, and the options that pick cells of the matrix or rerun one example of a law.

`default`: random, and failures are remembered. `ci` (environment CI=true): derandomised, nothing is remembered. `hunt`
(--hypothesis-profile hunt): many examples, for a run over night.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from megamoe.runner.child import give_memory_back
from megamoe.runner.process import PRELOADED, fork_keepers_from_the_server

# Kernels are small, and a thread pool costs more than it saves: it is ten times slower on two busy cores. numpy and
# torch read these variables when they are imported, after this file.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# Machines are in no reference cycles (vm/machine/test_memory_of_ctas.py). What is in some is freed when memory is given
# back, between tests and trials. A collection within a test scans a million objects of decoded kernels.
gc.set_threshold(0)

# An example runs kernels, so it has no deadline, and a backend may decline many of the drawn cases.
_SLOW = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
)
settings.register_profile("default", _SLOW)
settings.register_profile("ci", _SLOW, derandomize=True, database=None, print_blob=False)
settings.register_profile("hunt", _SLOW, max_examples=20_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the laws in conformance/kernels."""
    group = parser.getgroup("megamoe", "laws of the kernels")
    group.addoption("--case", help="hold the laws on this case id alone, instead of drawing cases")
    group.addoption(
        "--where", action="append", default=[], help="only cells of the matrix with axis=value, as hd=64,t=1"
    )
    group.addoption("--schedule", action="append", default=[], help="with --case: a schedule to run it under")


def pytest_configure(config: pytest.Config) -> None:
    """Loads the profile of CI or the default one, unless --hypothesis-profile is given."""
    chosen = config.getoption("--hypothesis-profile", None)
    if not chosen:
        settings.load_profile("ci" if _in_ci() else "default")
    if chosen != "hunt":
        # Hypothesis also draws constants of the modules that are loaded, and those differ between workers.
        providers._get_local_constants = Constants


def pytest_collection_finish() -> None:
    """Freezes modules and tests, so that the collector skips them: they outnumber the objects that a test makes."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Collects once: pytest does it five times when it ends, and a million objects live on in caches."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _keepers_share_pages() -> Iterator[None]:
    """Forks the keepers from one server, as a command does: each would import torch by itself otherwise.

    This server has also loaded what many forks of tests import, and no command's: pytest, and libraries of the machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        libraries = ("lark", "llvmlite.binding", "llvmlite.ir", "pytest")
        patch.setattr("megamoe.runner.forks.PRELOADED", (*PRELOADED, *libraries))
        fork_keepers_from_the_server()
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Gives a test's memory back to the system: the allocator would keep up to 4 GB of it."""
    result = yield
    give_memory_back()
    return result


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_kept_for_later_modules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clears decoded programs and the test module's caches: the next module has no use for them."""
    yield
    cached: list[object] = [one for one in vars(request.module).values() if hasattr(one, "cache_clear")]
    decoded = sys.modules.get("backends.vm.load")
    for one in (*cached, *([] if decoded is None else [decoded.load])):
        if getattr(one, "__module__", "") in (request.module.__name__, "backends.vm.load"):
            cast("Any", one).cache_clear()


@pytest.fixture(autouse=True)
def _search_path_as_before() -> Iterator[None]:
    """Restores sys.path: a command run by a test puts its folder there for the user's modules."""
    before = [*sys.path]
    yield
    sys.path[:] = before


def _in_ci() -> bool:
    return os.environ.get("CI") == "true"


@pytest.fixture(scope="session")
def in_ci() -> bool:
    """Whether a CI service runs this. CI does not excuse a missing installation."""
    return _in_ci()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the cells that --where describes. -k cannot: it takes no "=", and every case id has one.

    Tests in a browser come first: it holds 0.6 GB, and the workers of pytest are small then.
    """
    items.sort(key=lambda item: "browser" not in getattr(item, "fixturenames", ()))
    filters = config.getoption("--where")
    if not filters:
        return
    from megamoe.contract import Case
    from megamoe.spec.selection import SelectionError, matching, parse_where

    cells = {item.nodeid: case for item in items if isinstance(case := _parameters(item).get("case"), Case)}
    try:
        kept = set(matching(cells.values(), parse_where(filters)))
    except SelectionError as error:
        raise pytest.UsageError(f"--where: {error}") from None
    chosen = [item for item in items if cells.get(item.nodeid) in kept]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _parameters(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params
