"""Options of `nox -s bench` that select nothing or contradict each other are usage errors of one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from conformance import ROOT

HOME = ROOT
# pytest-benchmark turns itself off in a worker of xdist.
APART = ("env", "-u", "PYTEST_XDIST_WORKER")
BENCH = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "conformance/bench/bench_rows.py", "--benchmark-only")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--where", "hd=65", "--executor", "vm"), "the selection holds no row"),
        (("--case", "fmha:hd=64,t=2,s_k=3", "--profile", "smoke"), "--case names its own row"),
    ],
)
def test_a_wrong_selection_is_one_sentence_and_a_usage_error(options: tuple[str, ...], said: str) -> None:
    done = subprocess.run(
        [*APART, sys.executable, *BENCH, *options], cwd=HOME, capture_output=True, text=True, timeout=120, check=False
    )
    told = done.stdout + done.stderr
    assert said in told
    assert "pluggy" not in told, f"a traceback surrounds the sentence: {told}"
    assert len([line for line in told.splitlines() if line.strip()]) <= 3, told
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, "wrong options are status 4, not that of a row that failed"
