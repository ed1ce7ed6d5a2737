"""Python commands for tests, in forks of the judge's server: torch is loaded there, and importing it takes two seconds.

A test about the start of a process, its signals or its pipes starts a real one.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Final

from megamoe.runner.forks import interrupts_held_back, replace_environment, server_of_forks
from megamoe.runner.process import environment_of_servers

WITHOUT_HYPOTHESIS: Final = {"PYTEST_ADDOPTS": "-p no:hypothesispytest"}
"""An environment in which pytest does not load the plugin of Hypothesis, whose summary imports all of Hypothesis."""
PYTEST: Final = ("-m", "pytest", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""pytest in this repository, whose settings make an error of the warning that the plugin is already imported."""


def python(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, seconds: float = 120.0
) -> CompletedProcess[str]:
    """What `python ARGUMENTS` does in the folder `cwd`. ARGUMENTS begin with a file, or with -m and a module.

    Without `env`, it has the environment of this process, WITHOUT_HYPOTHESIS.
    """
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name, "out"), Path(name, "err")
        given = {**environment_of_servers(), **WITHOUT_HYPOTHESIS} if env is None else dict(env)
        told = (list(arguments), cwd, given, out, err)
        with interrupts_held_back():
            child = server_of_forks().Process(target=_become, args=told)
            child.start()
        child.join(seconds)
        if child.exitcode is None:
            child.kill()
            child.join()
        return CompletedProcess(arguments, child.exitcode or 0, out.read_text("utf-8"), err.read_text("utf-8"))


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the context, SIGINT interrupts this process and those that it starts.

    A shell starts background jobs with SIGINT ignored, and their children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _become(arguments: list[str], cwd: Path, env: Mapping[str, str], out: Path, err: Path) -> None:
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    replace_environment(env)
    os.chdir(cwd)
    tempfile.tempdir = None
    sys.excepthook = sys.__excepthook__
    status = 0
    try:
        _run(arguments, cwd)
    except SystemExit as left:
        status = left.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _run(arguments: Sequence[str], cwd: Path) -> None:
    first, *rest = arguments
    if first == "-m":
        sys.path.insert(0, str(cwd))
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv[:] = arguments
        runpy.run_path(first, run_name="__main__")
