"""Every job of the project, each with all the set-up it needs: `nox -l` lists them.

All jobs share one environment, .nox/house, because torch is large and every job runs the same code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "none"

HOUSE = Path(".nox/house").absolute()
EXTRAS = "test,lint,assembler,cuda,cutedsl,triton"
BIN = HOUSE / "bin"


def _run(session: nox.Session, program: str, *arguments: str, extras: str = EXTRAS) -> None:
    """Make or refresh the house environment, then run one of its programs."""
    _prepare(session, extras)
    session.run(str(BIN / program), *arguments, external=True)


def _end_as(session: nox.Session, program: str, *arguments: str) -> None:
    """Like _run, but nox exits with the program's own non-zero status; by itself it would turn any of them into 1."""
    _prepare(session, EXTRAS)
    status = subprocess.run([str(BIN / program), *arguments], check=False).returncode
    if status:
        sys.exit(status)


def _prepare(session: nox.Session, extras: str) -> None:
    python = str(BIN / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "virtualenv", "-q", str(HOUSE), external=True)
    # pip asks the index every time. Skip it if the same request was installed before.
    asked = "\n".join([extras, Path("pyproject.toml").read_text(), Path("constraints.txt").read_text()])
    stamp = HOUSE / "installed"
    if not stamp.exists() or stamp.read_text() != asked:
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        session.run(*install, "-e", f".[{extras}]", "-c", "constraints.txt", external=True)
        stamp.write_text(asked)


@nox.session
def conformance(session: nox.Session) -> None:
    """The main job: run the matrix and judge every cell. `-- --profile full`, `-- --case ID`, `-- --help`."""
    _end_as(session, "megamoe", "run", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests: the VM's families, the harness itself, the property tests. Arguments go to pytest."""
    workers = os.environ.get("MEGAMOE_WORKERS", "auto")
    _run(session, "pytest", "-q", "-n", workers, "--dist", "worksteal", *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """Rows on a Ray cluster of this host, with one node killed half-way. `-- scaling` measures how that scales."""
    if session.posargs == ["scaling"]:
        _run(session, "python", "-m", "conformance.bench.scaling", extras=f"{EXTRAS},ray")
    else:
        where = "conformance/meta/judge/test_cluster.py"
        _run(session, "pytest", "-q", where, *session.posargs, extras=f"{EXTRAS},ray")


@nox.session
def bench(session: nox.Session) -> None:
    """Rows as benchmarks: times on a device, counters and compiler figures anywhere. `-- --profile full`, `-- --help`.

    `-- vm`, `-- harness`, `-- nvfp4`: what this host pays, against the bars of the issues.
    """
    which, rest = "rows", list(session.posargs)
    if rest and not rest[0].startswith("-"):
        which, *rest = rest
    file = Path("conformance/bench") / f"bench_{which}.py"
    if not file.exists():
        known = ", ".join(sorted(path.stem.removeprefix("bench_") for path in file.parent.glob("bench_*.py")))
        session.error(f"there is no benchmark {which!r}; there are: {known}")
    if which == "rows" and not any(option.startswith("--benchmark-json") for option in rest):
        runs = Path("results/runs")
        runs.mkdir(parents=True, exist_ok=True)
        rest.append(f"--benchmark-json={runs / datetime.now(UTC).strftime('%Y%m%dT%H%M%S.%fZ-bench.json')}")
    _end_as(session, "pytest", "-q", str(file), "--benchmark-only", *rest)


@nox.session
def compare(session: nox.Session) -> None:
    """How every row changed between two runs: `-- BEFORE AFTER`, record files, folders or git revisions."""
    _end_as(session, "megamoe", "compare", *session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """What CI asks, with no GPU: is anything missing, failed or worse? `-- --junit FILE`, `-- RECORDS`, `-- --help`."""
    _end_as(session, "megamoe", "gate", *session.posargs)


@nox.session
def witness(session: nox.Session) -> None:
    """Kernels of wheels in the VM, and of checkouts with `-- --sources DIR`. Renews results/witness.*, public.*.

    `-- --only TEXT`, `-- --help`.
    """
    _run(session, "python", "-m", "conformance.witness", *session.posargs, extras=f"{EXTRAS},witness")
    if not session.posargs:
        table = session.run(str(BIN / "python"), "-m", "backends.vm.coverage", silent=True, external=True)
        Path("results/coverage.md").write_text(str(table), encoding="utf-8")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Random PTX, valid and broken, in the VM: no foreign exception, no hang. `-- --count N`, `-- --only NUMBER`."""
    _end_as(session, "python", "-m", "conformance.vm.test_fuzz", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Programs with one thing changed: does a check notice? `-- --backend module:ATTR`, `-- --table`, `-- --help`."""
    _end_as(session, "python", "-m", "conformance.kernels.mutants", *session.posargs)


@nox.session
def report(session: nox.Session) -> None:
    """Writes report.html, a page of the tracked records and the newest run. `-- --text`, `-- --against BASE`."""
    _end_as(session, "megamoe", "report", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    _run(session, "ruff", "check", ".")
    _run(session, "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Pyright over the library, the backends and the tests."""
    _run(session, "pyright", "--pythonpath", str(BIN / "python"))


@nox.session
def doctor(session: nox.Session) -> None:
    """What can run on this machine, what cannot, and why not."""
    _end_as(session, "megamoe", "doctor", *session.posargs)
