"""Workers are forks of a server with torch and the record readers loaded, and return a row's memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pebble import ProcessPool

from conformance.fakes import backends as fake_backends
from conformance.fakes.commands import interruptible
from megamoe.judge.worker import end_pool, worker_pool
from megamoe.runner import process
from megamoe.runner.child import Confinement, give_memory_back, resident_mib
from megamoe.runner.forks import interrupts_held_back, server_of_forks
from megamoe.runner.process import Nursery, RunnerDiedError, nursery

LOOK = """
import json, os, signal, sys
torch = sys.modules["torch"]
with open(f"/proc/{os.getppid()}/task/{os.getppid()}/status") as status:
    threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
found = {
    "modules": sorted(sys.modules),
    "cuda": torch.cuda.is_initialized(),
    "threads": threads,
    "interrupts": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []),
}
with open(path, "w") as file:
    json.dump(found, file)
"""


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    pool = worker_pool(1, "json")
    yield pool
    end_pool(pool)


IN_THE_SERVER = ("contract", "runner", "records", "spec", "judge.worker")
"""Rooms of megamoe that run no kernel and know no output."""


def unclean(modules: list[str]) -> list[str]:
    """The modules of ours that run a kernel or know an output."""
    ours = [name for name in modules if name.split(".")[0] in ("megamoe", "backends", "conformance")]
    clean = tuple(f"megamoe.{room}." for room in IN_THE_SERVER)
    return [name for name in ours if name not in ("megamoe", "megamoe.judge") and not f"{name}.".startswith(clean)]


def test_the_server_holds_nothing_that_runs_a_kernel_or_knows_an_output(pool: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    # A function of ours would import modules that must not be loaded.
    fork = multiprocessing.get_context("forkserver").Process(target=exec, args=(LOOK, {"path": str(path)}))
    fork.start()
    fork.join()
    found = json.loads(path.read_text())
    held = unclean(found["modules"])
    assert not held, f"the server has imported {held}, so that its workers do not start clean"
    assert not found["cuda"], "a fork of a process that has initialised CUDA cannot use it"
    assert found["threads"] == 1, "a fork while another thread holds a lock hangs"
    assert found["interrupts"], "Ctrl-C would reach a worker that starts"


@pytest.mark.parametrize("value", ["one", "two"])
def test_a_worker_has_the_environment_of_its_parent(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MEGAMOE_TEST", value)
    pool = worker_pool(1, "json")
    with interrupts_held_back():
        future = pool.schedule(subprocess.getoutput, args=("echo $MEGAMOE_TEST",))
        threads = pool.schedule(subprocess.getoutput, args=("echo $OMP_NUM_THREADS",))
    assert future.result() == value, "the server is older than this variable; its worker must have it all the same"
    assert threads.result() == "1"
    end_pool(pool)


def test_a_worker_is_not_interrupted(pool: ProcessPool) -> None:
    with interrupts_held_back():
        mask = pool.schedule(signal.pthread_sigmask, args=(signal.SIG_BLOCK, ())).result()
    assert signal.SIGINT in mask


@pytest.mark.parametrize("received_by", ["this thread", "another thread"])
def test_an_interrupt_that_is_held_back_comes_at_the_end(received_by: str) -> None:
    held = False
    with interruptible(), pytest.raises(KeyboardInterrupt), interrupts_held_back():
        held = _interrupted_meanwhile(received_by)
    assert held, "the interrupt came while it was held back: a pool that ends would hang"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the next interrupt must arrive"


def _interrupted_meanwhile(received_by: str) -> bool:
    """True if this returns: the system gives a signal to the main thread, or if that blocks it, to any other."""
    with interrupts_held_back():
        if received_by == "this thread":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            unmasked = threading.Thread(target=_receive_an_interrupt)
            unmasked.start()
            unmasked.join()
    time.sleep(0.01)
    return True


def test_an_interrupt_as_the_hold_begins_leaves_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """pthread_sigmask sets the mask, then raises what a signal that has just come raises."""
    set_mask = signal.pthread_sigmask

    def interrupted(how: int, signals: set[int]) -> set[int]:
        before = set_mask(how, signals)
        if how == signal.SIG_BLOCK and signals:
            unmasked = threading.Thread(target=_receive_an_interrupt)
            unmasked.start()
            unmasked.join()
            time.sleep(0.01)
        return before

    with interruptible():
        monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
        with pytest.raises(KeyboardInterrupt), interrupts_held_back():
            pass
        monkeypatch.undo()
        left = signal.SIGINT in signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    assert not left, "SIGINT is blocked for good: Ctrl-C no longer reaches this process"


def _receive_an_interrupt() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.kill(os.getpid(), signal.SIGINT)


START_LATE = """
import multiprocessing, sys
from _multiprocessing import sem_unlink
from megamoe.judge.worker import end_pool, worker_pool
from megamoe.runner import forks

# What fails here needs no torch.
forks.PRELOADED = ()

class Unreadable:
    def __reduce__(self):
        return int, ("x",)

pool = worker_pool(1, "json")
context = multiprocessing.get_context("forkserver")
for missing in ("sense", "pool"):
    lock = context.Lock()
    if missing == "pool":
        sem_unlink(lock._semlock.name)
    print(missing, file=sys.stderr, flush=True)
    late = context.Process(target=len, args=(lock if missing == "pool" else Unreadable(),))
    late.start()
    late.join()
    print(late.exitcode)
end_pool(pool)
"""


def test_a_worker_that_starts_after_its_pool_has_ended_says_nothing() -> None:
    command = [sys.executable, "-c", START_LATE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.split() == ["1", "1"], f"the process fails in either way: {ended.stdout}"
    # The parent prints its own message about the semaphore.
    senseless, gone = ended.stderr.removeprefix("sense\n").split("pool\n", 1)
    assert "in _serve_one" in senseless, f"other errors of a worker are seen: {senseless[-600:]}"
    assert "in _serve_one" not in gone, f"only other errors of a worker are seen: {gone[-600:]}"


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # Earlier tests may have left the mark above what the process holds now.
    monkeypatch.setattr("megamoe.runner.child._resident_mib", 0.0)
    give_memory_back()
    # The last array is on top of the heap, so the allocator cannot shrink the heap by itself.
    arrays = [np.ones(12_000) for _ in range(2_000)]
    full = resident_mib()
    del arrays[:-1]
    give_memory_back()
    assert resident_mib() < full - 150, "2,000 arrays of 96 kB were freed"


def test_files_in_the_current_folder_shadow_nothing_in_a_worker(tmp_path: Path) -> None:
    """The server preloads torch before it takes over our search path. It must not import a queue.py from the user's
    folder."""
    (tmp_path / "queue.py").write_text("x = 1")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    program = "from megamoe.judge.worker import *; print(worker_pool(1, 'json').schedule(len, ('abc',)).result())"
    command = [sys.executable, "-P", "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.strip() == "3", f"no worker came to be: {ended.stderr[-600:]}"


ASKS = """
from multiprocessing import forkserver
from pathlib import Path
from megamoe.runner.process import fork_keepers_from_the_server, nursery
Path("runs").open("a").write("run\\n")
if __name__ == "__main__":
    {first}
    with nursery(torch=True).runner("the looker") as runner:
        print(runner.ask("look:seen", {{}}, 60.0).told["seen"])
    print(forkserver._forkserver._forkserver_pid is not None)
"""
LOOKS = """
import sys
from megamoe.runner.wire import Frame
def seen(request):
    return Frame({"seen": " ".join(sorted(sys.modules))})
"""


@pytest.mark.parametrize("command", [True, False], ids=["of a command", "of a user's process"])
def test_a_keeper_that_holds_torch_has_never_run_the_main_file(tmp_path: Path, command: bool) -> None:
    """multiprocessing would run the main file again in its forks, and a runner would start with everything that it
    imports."""
    (tmp_path / "asks.py").write_text(ASKS.format(first="fork_keepers_from_the_server()" if command else ""))
    (tmp_path / "look.py").write_text(LOOKS)
    asked = [sys.executable, "asks.py"]
    ended = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    *held, server = ended.stdout.split() or [""]
    assert "torch" in held, f"the runner has to import torch: {ended.stderr[-600:]}"
    assert (tmp_path / "runs").read_text() == "run\n", "the main file ran in the server, or in the keeper"
    assert not unclean(held), f"the runner starts with {unclean(held)}"
    assert server == str(command), "multiprocessing's server of forks is the user's in a process of the user"


def test_a_worker_of_somebody_s_pool_has_a_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing lets a daemon have no children."""
    monkeypatch.setattr(process, "_OWN", {})
    monkeypatch.setattr(process, "_COMMANDS", set[int]())
    # torch is already loaded, so it would show nothing.
    monkeypatch.setattr(process, "PRELOADED", ("json",))
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # pyright: ignore
    process.fork_keepers_from_the_server()
    keeper = nursery(torch=True)
    with keeper.runner("the small") as runner:
        assert runner.ask(f"{fake_backends.__name__}:hold_memory", {"bytes": 8, "seconds": 0}, 60.0).told["held"] == 8
    keeper.close()


def test_memory_that_is_held_is_limited_where_addresses_cannot_be() -> None:
    """Needed on a device, because CUDA reserves terabytes of address space. The keeper checks what a runner holds."""
    call = f"{fake_backends.__name__}:hold_memory"
    with nursery().runner("the greedy", Confinement(references=True, resident=600 << 20)) as runner:
        assert runner.ask(call, {"bytes": 64 << 20, "seconds": 0.3}, 60.0).told["held"] == 64 << 20
        with pytest.raises(RunnerDiedError, match="held more memory than its share") as died:
            runner.ask(call, {"bytes": 1 << 30, "seconds": 30.0}, 60.0)
    assert not died.value.late, "it is ended long before its time is up"


@pytest.mark.parametrize("forks", [False, True], ids=["itself", "a child"])
def test_what_is_written_is_limited(forks: bool) -> None:
    """A limit per file does not stop many files, or one that is rewritten again and again, from filling the disk."""
    call = f"{fake_backends.__name__}:write_files"
    with nursery().runner("the writer", Confinement(references=True, written=64 << 20)) as runner:
        runner.ask(call, {"bytes": 32 << 20, "seconds": 0.2, "forks": forks}, 60.0)
        with pytest.raises(RunnerDiedError, match="wrote more to files than its share") as died:
            runner.ask(call, {"bytes": 48 << 20, "seconds": 30.0, "forks": forks}, 60.0)
    assert not died.value.late, "it is ended long before its time is up"


def test_the_children_of_a_runner_are_not_held_against_another() -> None:
    """The keeper adopts them when it ends their parent, and checks again before the last of them has ended."""
    call, few = f"{fake_backends.__name__}:have_children", Confinement(references=True, processes=20)
    with (
        nursery().runner("a neighbour", few) as before,
        nursery().runner("the parent", few) as parent,
        nursery().runner("a neighbour", few) as after,
    ):
        with pytest.raises(RunnerDiedError, match="more processes at a time than its share"):
            parent.ask(call, {"count": 200, "seconds": 30.0}, 60.0)
        for neighbour in (before, after):
            neighbour.ask(call, {"count": 2, "seconds": 0.2}, 60.0)


ENDS = {
    "exits": ({"status": 3}, "died with exit status 3"),
    "is killed": ({"signal": signal.SIGKILL}, "died of SIGKILL"),
    "is ended": ({"status": 3, "programs": 20}, "more processes at a time than its share"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_slow_keeper_says_how_a_runner_ended(end: str) -> None:
    """The asker sees the end of the pipe first, and asks the keeper to end what has ended already."""
    told, words = ENDS[end]
    mine, its = socket.socketpair()
    with its, interrupts_held_back():
        keeper = server_of_forks().Process(target=fake_backends.slow_keeper, args=(its,), daemon=True)
        keeper.start()
    slow = Nursery(mine, keeper.join)
    with (
        slow.runner("the leaver", Confinement(references=True, processes=10)) as runner,
        pytest.raises(RunnerDiedError, match=words),
    ):
        runner.ask(f"{fake_backends.__name__}:end_in_a_way", told, 60.0)
    slow.close()
