"""Every backend, target and executor that is registered: adding one to pyproject.toml adds it to these tests."""

from __future__ import annotations

import pytest
from law import Machine

from backends.peers.peer import Peer
from megamoe.backend import UnsupportedError, backend_names, executor_names, load_backend, load_executor


def machines(op: str) -> list[Machine]:
    """All machines on which there is a kernel of `op`, whether they can run here or not.

    Peers are not among them: they are what ours are timed against, judged row by row before that, and theirs to mend.
    """
    return [
        Machine(backend, target, executor)
        for backend in backend_names()
        if not isinstance(load_backend(backend), Peer)
        for target in load_backend(backend).targets(op)
        for executor in executor_names()
    ]


def skip_unless_available(machine: Machine) -> None:
    """Ends the test as skipped, with the executor's reason, if the machine cannot run here."""
    try:
        reason = load_executor(machine.executor).unavailable(machine.target)
    except UnsupportedError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"unsupported: {machine.executor} cannot run {machine.target} here: {reason}")
