"""conformance.forked_workers: every test has its outcome, whatever becomes of the process that runs it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from conformance import ROOT
from conformance.forked_workers import MOST_AT_A_TIME, pieces

SUITE = """
import os, warnings
import pytest

def test_fails():
    print("said before it failed")
    os.system("echo said by a child")
    assert [1, 2] == [1, 3]

def test_leaves():
    os._exit(3)

def test_is_killed():
    os.kill(os.getpid(), 9)

def test_warns():
    warnings.warn("look out", DeprecationWarning)

@pytest.mark.xfail
def test_is_known():
    assert 0

def test_is_skipped():
    pytest.skip("not here")

@pytest.fixture
def broken():
    raise ValueError("no such luck")

def test_has_no_fixture(broken):
    pass
"""
SHARES = """
import os
import pytest

COLLECTED = os.getpid()

@pytest.fixture(scope="module")
def once():
    with open("made", "a") as made:
        made.write(f"{os.getpid()}\\n")
    yield
    with open("made", "a") as made:
        made.write("gone\\n")

@pytest.mark.parametrize("number", range(9))
def test_a_fixture_of_the_module(once, number, tmp_path):
    assert os.getpid() != COLLECTED
    assert not [*tmp_path.iterdir()]
"""


class Ran(NamedTuple):
    """A run of pytest in `folder`: its exit status, and all that it said."""

    folder: Path
    status: int
    said: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "below").mkdir()
    (folder / "below" / "conftest.py").write_text("")
    (folder / "below" / "test_shares.py").write_text(SHARES)
    ended = _pytest(folder, "--forks", "2")
    (folder / "made").rename(folder / "made first")
    return Ran(folder, *ended)


def _pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    # The plugin is found by its place, and there is no conftest.py of ours.
    chosen = ["-ra", "-p", "no:cacheprovider", "-p", "conformance.forked_workers", *arguments]
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import pytest; sys.exit(pytest.main({chosen!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_every_test_has_its_outcome(ran: Ran) -> None:
    assert "3 failed, 10 passed, 1 skipped, 1 xfailed, 1 warning, 1 error in" in ran.said, ran.said
    assert ran.status == pytest.ExitCode.TESTS_FAILED


def test_where_all_passes_it_ends_with_0(ran: Ran) -> None:
    status, said = _pytest(ran.folder, "--forks", "2", "below")
    assert (status, "9 passed" in said) == (0, True), said


def test_a_test_whose_worker_dies_is_named_and_the_others_run(ran: Ran) -> None:
    said = ran.said
    assert "the worker of test_suite.py::test_leaves died with exit status 3" in said
    assert "the worker of test_suite.py::test_is_killed died of SIGKILL" in said


def test_a_failure_is_told_as_ever(ran: Ran) -> None:
    said = ran.said
    assert "At index 1 diff: 2 != 3" in said, "the assertion is explained"
    assert "said before it failed\nsaid by a child" in said, "what it printed is shown"
    assert "no such luck" in said
    assert "DeprecationWarning: look out" in said


def test_what_a_module_shares_is_made_once(ran: Ran) -> None:
    made = (ran.folder / "made first").read_text().splitlines()
    assert len(made) == 2, f"one worker has the whole module, and tears down what it shares: {made}"


def test_the_first_failure_can_end_it_all(ran: Ran) -> None:
    status, said = _pytest(ran.folder, "--forks", "1", "-x")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 9 passed" in said, said
    assert "stopping after 1 failures" in said


GROWS = """
import os
from pathlib import Path

KEPT = []

def test_grows():
    KEPT.append(b"x" * (GROWTH << 20))
    Path(f"{Path(__file__).stem}.pid").write_text(str(os.getpid()))
"""


@pytest.mark.parametrize(("growth", "workers"), [(0, 1), (64, 2)])
def test_a_worker_that_has_grown_gives_way(tmp_path: Path, growth: int, workers: int) -> None:
    (tmp_path / "conftest.py").write_text("from conformance import forked_workers as x\nx.MAX_GROWTH_MIB = 32\n")
    for name in ("first", "second", "third"):
        (tmp_path / f"test_{name}.py").write_text(GROWS.replace("GROWTH", str(growth)))
    status, said = _pytest(tmp_path, "--forks", "1")
    assert (status, "3 passed" in said) == (0, True), said
    pids = {path.read_text() for path in tmp_path.glob("*.pid")}
    assert len(pids) == workers, f"each test keeps {growth} MiB, a worker may grow by 32, and asks one test ahead"


@pytest.mark.parametrize("asked", ["-1", "many"])
def test_a_number_that_is_none_is_refused(ran: Ran, asked: str) -> None:
    assert (
        f"--forks is '{asked}'; it must be a number of processes, or auto" in _pytest(ran.folder, f"--forks={asked}")[1]
    )


def test_every_test_is_handed_out_once_and_with_its_module() -> None:
    sizes = {"a": 3, "b": 2 * MOST_AT_A_TIME + 1, "c": 1}
    modules = [name for name, size in sizes.items() for _ in range(size)]
    handed = [*pieces(modules)]
    assert [number for piece in handed for number in piece] == [*range(len(modules))]
    assert all(len({modules[number] for number in piece}) == 1 for piece in handed)
    assert max(map(len, handed)) <= MOST_AT_A_TIME
    assert Counter(modules[piece[0]] for piece in handed) == {"a": 1, "b": 3, "c": 1}
