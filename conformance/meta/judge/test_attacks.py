"""Backends that try to be believed, to break the judge or to outlive it: each attack ends as results/attacks.md
says."""

from __future__ import annotations

import hashlib
import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from conformance import ROOT
from conformance.fakes import adversaries, backends
from megamoe.cli.main import main
from megamoe.contract import DeviceLostError, Program, Row, Status
from megamoe.judge import isolated
from megamoe.judge.arena import Arena, Layout, Lent, block_bytes, shared_block
from megamoe.judge.guarded import Built
from megamoe.judge.isolated import Processes
from megamoe.judge.run import RunSettings, judged
from megamoe.ops import reference
from megamoe.records.lines import Record
from megamoe.runner import capabilities, requests
from megamoe.runner.child import landlock_version
from megamoe.runner.process import RunnerDiedError, RunnerFaultError
from megamoe.runner.wire import Frame, WireError, decoded
from megamoe.spec.load import load_specs

CASE = "fmha:hd=64,t=1,s_k=128"
ROOM = adversaries.__name__
DEVICE = f"{ROOM}:DEVICE"
LOCKED = landlock_version() > 0
LOST = DeviceLostError.__new__(DeviceLostError)

# Attribute -> the status, and words of the sentence. Attacks that only Landlock stops are skipped without it.
ATTACKS: dict[str, tuple[Status, str]] = {
    "HONEST": ("passed", ""),
    "IMPORTS_THE_REFERENCE": ("error", "is not for the process that runs a kernel"),
    "READS_THE_REFERENCE": ("error", "Permission denied"),
    "REPLACES_THE_REFERENCE": ("error", "Permission denied"),
    "WRITES_INTO_ITS_KEEPER": ("error", "Permission denied"),
    "KILLS_ITS_KEEPER": ("error", "Operation not permitted"),
    "PATCHES_THE_JUDGE": ("failed", "tensor lse: "),
    "FORKS_AND_DIES": ("crashed", "died with exit status 0"),
    "LEAVES_QUIETLY": ("crashed", "died with exit status 0"),
    "LEAVES_A_CHILD": ("passed", ""),
    "FORKS_MANY": ("crashed", "it had more processes at a time than its share"),
    "PRINTS_MUCH": ("passed", ""),
    "KEEPS_THE_FIRST": ("failed", "on other inputs, of a seed drawn after it was built"),
    "KEEPS_A_FILE": ("failed", "on other inputs, of a seed drawn after it was built"),
    "IS_PRECOMPUTED": ("failed", "on other inputs, of a seed drawn after it was built"),
    "IS_RIGHT_TWICE": ("failed", "run again in the same process"),
    "HAS_TWO_FACES": ("failed", "tensor lse: "),
    "BUILDS_NOTHING": ("error", "returned None; it must return a megamoe.contract.Program"),
    "BUILDS_NONSENSE": ("error", "is ('no launch',); a Program has tuple[Launch, ...] there"),
    "BUILDS_BYTES": ("error", "ptx is of type bytes; it must be text"),
    "TAKES_MEMORY": ("error", "MemoryError"),
    "RELABELLED": ("failed", "says .target sm_100a, and the row is of sm_90a"),
    "RELABELLED_IN_THE_TEXT": ("failed", "and the module is for sm_90a"),
}
NEEDS_LANDLOCK = ("READS_THE_REFERENCE", "REPLACES_THE_REFERENCE", "WRITES_INTO_ITS_KEEPER", "KILLS_ITS_KEEPER")
ON_THE_VM = {
    "TAKES_MEMORY": "sm_100a",
    "FORKS_MANY": "sm_100a",
    "RELABELLED": "sm_90a",
    "RELABELLED_IN_THE_TEXT": "sm_90a",
}


def _row(attribute: str) -> Row:
    target, machine = ON_THE_VM.get(attribute, "sm_100a"), "vm" if attribute in ON_THE_VM else DEVICE
    return Row(CASE, f"{ROOM}:{attribute}", target, machine, "eager")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """The record of each attack. All share one pool: the workers survive every attack."""
    folder = tmp_path_factory.mktemp("attacks")
    with pytest.MonkeyPatch.context() as patch:
        # One pool for all, because starting a pool per backend takes time.
        patch.setattr("megamoe.judge.run.backends_apart", lambda rows: [list(rows)])
        rows = [_row(name) for name in ATTACKS if LOCKED or name not in NEEDS_LANDLOCK]
        settings = RunSettings("run-1", jobs=2, timeout_s=30.0, programs=folder)
        found = {record.backend.partition(":")[2]: record for record in judged(rows, settings)}
    # The keeper ends leftovers once its worker has ended, after the last record.
    patience = time.monotonic() + 10.0
    while _children() and time.monotonic() < patience:
        time.sleep(0.02)
    found["child"] = found["HONEST"].model_copy(update={"counters": {"alive": _children()}})
    return found


def _children() -> int:
    """Number of live children of those that LEAVES_A_CHILD starts."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += adversaries.CHILD.encode() in path.read_bytes().split(b"\0")
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_as_the_table_says(ended: dict[str, Record], name: str) -> None:
    if name not in ended:
        pytest.skip("this kernel has no Landlock: results/attacks.md lists the attack as open")
    status, words = ATTACKS[name]
    record = ended[name]
    assert record.status == status, f"{name} ended as {record.status}: {record.sentence}"
    assert words in record.sentence, f"{name}: {record.sentence}"


def test_the_table_lists_every_attack() -> None:
    text = (ROOT / "results" / "attacks.md").read_text("utf-8")
    missing = [name for name in ATTACKS if name != "HONEST" and f"`{name}`" not in text]
    assert not missing, f"results/attacks.md does not say how these end: {missing}"


def test_what_ran_is_what_was_hashed(ended: dict[str, Record]) -> None:
    wrong = hashlib.sha256(f"{adversaries.WRONG}\n{CASE}".encode()).hexdigest()
    assert ended["HAS_TWO_FACES"].program_sha256 == wrong, "the text that failed must be the one in the record"


def test_no_child_outlives_the_run(ended: dict[str, Record]) -> None:
    assert not ended["child"].counters["alive"], "a process that a backend started lives on"


LEAVES = {
    "os._exit(0)": "died with exit status 0",
    "sys.exit(0)": "SystemExit: 0",
    "time.sleep(600)": "had not answered within 0.5 host seconds",
    "os.kill(os.getpid(), 9)": "died of SIGKILL",
    "raise KeyboardInterrupt": "died with exit status 1",
}


@pytest.mark.parametrize("line", LEAVES)
@pytest.mark.parametrize("command", ["gate", "run"])
def test_a_command_survives_the_import_of_a_backend(
    command: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostile.py").write_text(f"import os, sys, time\n{line}\nBACKEND = None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if "sleep" in line:
        monkeypatch.setattr(capabilities, "MAX_ASKED_S", 0.5)
    status = main([command, "--case", CASE, "--backend", "hostile:BACKEND"])
    said = capsys.readouterr().err
    assert status == 2, f"{command} ended with {status} although it has no verdict"
    assert "the backend 'hostile:BACKEND' cannot be loaded" in said, said
    assert LEAVES[line] in said, said


def test_memory_cannot_be_taken_from_the_judge() -> None:
    layouts = {"x": Layout((4,), torch.float32, "input"), "y": Layout((4,), torch.float32, "output")}
    with shared_block(block_bytes(layouts)) as (descriptor, block):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 1)
        arena = Arena.of_layouts(layouts, {"x": torch.ones(4)})
        arena._place(layouts, block.clone())  # pyright: ignore[reportPrivateUsage]
        shared = arena.tensors["y"]
        shared.fill_(1.0)
        arena.taken()
        shared.fill_(2.0)
        assert torch.equal(arena.tensors["y"], torch.ones(4)), "a late write reached what is judged"


@dataclass
class Dying:
    """A runner that fails on every request."""

    error: Exception
    ended: bool = False

    def ask(self, *_: object) -> Frame:
        raise self.error

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize(
    "error", [RunnerDiedError("died"), RunnerDiedError("was late", late=True), RunnerFaultError("failed", ""), LOST]
)
def test_a_runner_that_dies_keeps_no_memory_of_a_device(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the processes that map a block, and one that dies is never subtracted."""
    spec = load_specs()["fmha"]
    case, row = spec.parse_case(CASE), Row(CASE, "ptx", "sm_90a", "gpu", "eager")
    done, runner = list[tuple[object, ...]](), Dying(error)

    @contextmanager
    def lent(size: int, device: str) -> Iterator[Lent]:
        yield Lent(torch.empty(size, dtype=torch.uint8), handle={"counter": b"/name".hex(), "counter_offset": 7})
        done.append(("freed",))

    def released(*told: object) -> None:
        done.append((*told, runner.ended))

    monkeypatch.setattr(isolated, "lent_block", lent)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", released)
    monkeypatch.setattr(Processes, "_machine", lambda *_: runner)
    built = Built(Program("sm_90a", "", ()))
    with pytest.raises(type(error)):
        Processes((), 0).run(row, built, (spec, case, reference("fmha").make_inputs(case)), time.monotonic() + 60)
    assert done[:1] == [(b"/name", 7, True)], f"{done}: the runner has ended, and the block is given up in its place"


def test_a_runner_lets_go_of_memory_on_a_device_once_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that stayed mapped would be exposed to a late write, and missing for the next row."""
    layouts = {"x": Layout((4,), torch.float32, "input"), "y": Layout((4,), torch.float32, "output")}
    arena, done = Arena.of_layouts(layouts, {"x": torch.ones(4)}), list[str]()
    monkeypatch.setattr(requests, "block_on_device", lambda handle: arena._block)  # pyright: ignore
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))
    with requests.tensors_on_device({}, arena.told) as tensors:
        assert torch.equal(tensors["x"], torch.ones(4)), "tensors lie where the judge says"
        tensors["y"].fill_(3.0)
        assert not done, "the program has not run yet"
    assert done == ["synchronize", "empty_cache"], "the judge looks from another process, at what is complete"
    assert not tensors, "the runner still holds the judge's memory"
    assert torch.equal(arena.tensors["y"], torch.full((4,), 3.0)), "what it wrote is there"


MESSAGES = {
    "of no kind": ({"program": {"kind": "Popen"}}, (b"",), "of kind 'Popen'"),
    "of another class": ({"program": {"kind": "Program", "target": {"kind": "os"}, "launches": []}}, (b"",), "Program"),
    "with more": ({"program": {"kind": "Program", "target": "sm_90a", "launches": [], "x": 1}}, (b"",), "no field 'x'"),
    "not text": ({"program": {"kind": "Program", "target": "sm_90a", "launches": []}}, (b"\xff",), "UTF-8"),
    "of other types": ({"program": {"kind": "Program", "target": "sm_90a", "launches": [7]}}, (b"",), "Launch"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_program_that_is_none_is_refused(name: str) -> None:
    told, parts, words = MESSAGES[name]
    with pytest.raises(WireError, match=words):
        decoded(Frame(told, parts))


def test_a_server_of_forks_that_dies_costs_no_row_its_status() -> None:
    room = backends.__name__
    rows = [Row(f"fmha:hd=64,t={t},s_k=3", f"{room}:DAWDLES", "sm_100a", f"{room}:EXECUTOR", "eager") for t in (1, 2)]
    results = judged(rows, RunSettings("run-1", jobs=1, timeout_s=30.0))
    found = [next(results)]
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # pyright: ignore
    time.sleep(0.2)
    os.kill(server, signal.SIGKILL)
    found += results
    assert [record.status for record in found] == ["passed", "passed"], [record.sentence for record in found]
