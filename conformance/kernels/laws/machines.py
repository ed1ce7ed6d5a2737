"""Every registered backend, target and executor: adding one to pyproject.toml adds it to these tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import pytest

from backends.peers.peer import Peer
from conformance.kernels.laws.law import Machine
from megamoe.contract import UnsupportedError, backend_names, executor_names, load_backend, load_executor
from megamoe.gate.expected import Expectation
from megamoe.records.lines import Record


def machines(op: str) -> list[Machine]:
    """Returns all machines that have a kernel of `op`, whether they can run here or not.

    Peers are left out: our kernels are timed against them, each row is judged before that, and their authors fix them.
    """
    return [
        Machine(backend, target, executor)
        for backend in backend_names()
        if not isinstance(load_backend(backend), Peer)
        for target in load_backend(backend).targets(op)
        for executor in executor_names()
    ]


def end_as_unsupported(record: Record, in_ci: bool, expected: Sequence[Expectation] = ()) -> NoReturn:
    """Ends the test of a cell that this machine cannot run: skips it with the reason, or in CI fails it unless
    expected.

    Otherwise CI without CuTeDSL, say, would be green without having tested anything.
    """
    excused = any(one.entry.matches(record.row) and one.entry.status == record.status for one in expected)
    if in_ci and not excused:
        pytest.fail(
            f"{record.row} is owed here and unsupported: {record.sentence} In CI nothing that is owed is skipped: "
            f"install what is missing (pip install -e '.[cutedsl]'), or give conformance/expected.yaml an entry",
            pytrace=False,
        )
    pytest.skip(f"unsupported: {record.sentence}")


def skip_unless_available(machine: Machine) -> None:
    """Skips the test, with the executor's reason, if the machine cannot run here."""
    try:
        reason = load_executor(machine.executor).unavailable(machine.target)
    except UnsupportedError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"unsupported: {machine.executor} cannot run {machine.target} here: {reason}")
