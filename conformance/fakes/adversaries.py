"""Backends that try to pass without computing anything, and a device that does what their programs say.

Each is an attack of conformance/meta/judge/test_attacks.py. `DEVICE` is an emulator as in conformance.fakes.backends;
it remembers what a kernel with memory of its own would keep. A backend acts in the process that builds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from conformance.fakes.backends import FakeExecutor, Tensors
from megamoe.contract import AnyProgram, Case, Program, Target, load_backend
from megamoe.ops import reference

CHILD = "600.0625"
"""Seconds that an orphaned child sleeps: the odd number identifies it."""
WRONG, RIGHT = "wrong", "right"

_KEPT: dict[str, dict[str, torch.Tensor]] = {}
_RUNS: list[int] = []


def _right(case: Case, tensors: Tensors) -> dict[str, torch.Tensor]:
    return reference("fmha").simulated(case, {part: tensors[part] for part in "qkv"})


def _first(case: Case, tensors: Tensors, run: int) -> Mapping[str, torch.Tensor]:
    return _KEPT.setdefault(case.id, _right(case, tensors))


def _from_a_file(case: Case, tensors: Tensors, run: int) -> Mapping[str, torch.Tensor]:
    path = Path(tempfile.gettempdir(), "kept.pt")
    if not path.exists():
        torch.save(_right(case, tensors), path)
    return torch.load(path)


def _precomputed(case: Case, tensors: Tensors, run: int) -> Mapping[str, torch.Tensor]:
    return _right(case, reference("fmha").make_inputs(case))


def _right_at_first(case: Case, tensors: Tensors, run: int) -> Mapping[str, torch.Tensor]:
    _RUNS.append(run)
    return {name: value if len(_RUNS) < 3 else 0.5 * value for name, value in _right(case, tensors).items()}


def _halved(case: Case, tensors: Tensors, run: int) -> Mapping[str, torch.Tensor]:
    return {name: 0.5 * value for name, value in _right(case, tensors).items()}


def _computed(case: Case, tensors: Tensors, run: int) -> Mapping[str, torch.Tensor]:
    return _right(case, tensors)


KERNELS: dict[str, Callable[[Case, Tensors, int], Mapping[str, torch.Tensor]]] = {
    "keeps the first": _first,
    "keeps a file": _from_a_file,
    "is precomputed": _precomputed,
    "is right twice": _right_at_first,
    WRONG: _halved,
    RIGHT: _computed,
}


def _emulate(case: Case, tensors: Tensors, name: str, schedule: str, run: int) -> str | None:
    for output, value in KERNELS[name](case, tensors, run).items():
        tensors[output].copy_(value)
    return None


DEVICE = FakeExecutor(_emulate, "device", counters={"instructions": 7})


@dataclass(frozen=True)
class Adversary:
    """Does something when it builds, and then returns `kernel`."""

    act: Callable[[], object] = lambda: None
    kernel: str = RIGHT
    name: str = "adversary"

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_100a",)

    def build(self, case: Case, target: Target) -> AnyProgram:
        self.act()
        return Program(target, f"{self.kernel}\n{case.id}", ())


class TwoFaces(Program):
    """A program whose text is wrong on the first read and right from then on."""

    reads = 0

    @property
    def ptx(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        TwoFaces.reads += 1
        face = WRONG if TwoFaces.reads == 1 else RIGHT
        return f"{face}\n{_CASES[-1]}"

    @ptx.setter
    def ptx(self, text: str) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass


_CASES: list[str] = []


class Doubleton(Adversary):
    """Builds TwoFaces."""

    def build(self, case: Case, target: Target) -> AnyProgram:
        _CASES.append(case.id)
        program = object.__new__(TwoFaces)
        plain = Program(target, "", ())
        for one in fields(plain):
            if one.name != "ptx":
                object.__setattr__(program, one.name, getattr(plain, one.name))
        return program


class Builds(Adversary):
    """Returns whatever it was given."""

    def __init__(self, what: object) -> None:
        object.__setattr__(self, "what", what)
        object.__setattr__(self, "name", "builds")

    def build(self, case: Case, target: Target) -> AnyProgram:
        return self.what  # pyright: ignore[reportAttributeAccessIssue]


class Relabelled(Adversary):
    """The kernel of another target under this target's name. `text`: renames the target in the PTX too."""

    def __init__(self, text: bool) -> None:
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "name", "relabelled")

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_90a",)

    def build(self, case: Case, target: Target) -> AnyProgram:
        built = load_backend("ptx").build(case, "sm_100a")
        assert isinstance(built, Program)
        ptx = built.ptx.replace(".target sm_100a", f".target {target}") if self.text else built.ptx  # pyright: ignore
        return replace(built, target=target, ptx=ptx)


def _patch_the_judge() -> None:
    modules: Any = sys.modules
    for name in ("megamoe.judge.comparison", "megamoe.judge.tolerance", "megamoe.gate.verdict"):
        import_module(name)
    modules["megamoe.judge.comparison"].complaints = lambda *_: ""
    modules["megamoe.judge.tolerance"].Judgement.passed = True
    modules["megamoe.gate.verdict"].Verdict.passed = True


def _references_file() -> Path:
    import megamoe

    return Path(megamoe.__file__).parent / "ops" / "fmha.py"


def _leave_a_child() -> None:
    subprocess.Popen(["sleep", CHILD], start_new_session=True)


def _fork_and_die() -> None:
    # The child keeps the pipe to the judge open.
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)


def _print_much() -> None:
    for _ in range(1024):
        sys.stdout.write("\x1b[2J" + "x" * (1 << 16))


def _take_memory() -> None:
    bytearray(int(0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def _in_a_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


# A small process forks: forking a process that holds torch takes twenty times as long, and so does ending it.
_FORKS = f"""
import os, time
for _ in range(1200):
    if os.fork() == 0:
        time.sleep({CHILD})
        os._exit(0)
time.sleep(60)
"""


def _fork_many() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", _FORKS], check=False)


IMPORTS_THE_REFERENCE = Adversary(lambda: reference("fmha"))
READS_THE_REFERENCE = Adversary(lambda: _references_file().read_text())
REPLACES_THE_REFERENCE = Adversary(lambda: _references_file().write_text("lost"))
PATCHES_THE_JUDGE = Adversary(_patch_the_judge, WRONG)
KILLS_ITS_KEEPER = Adversary(lambda: os.kill(os.getppid(), signal.SIGKILL))
WRITES_INTO_ITS_KEEPER = Adversary(lambda: Path(f"/proc/{os.getppid()}/mem").write_bytes(b"x"))
LEAVES_A_CHILD = Adversary(_leave_a_child)
FORKS_AND_DIES = Adversary(_fork_and_die)
LEAVES_QUIETLY = Adversary(lambda: os._exit(0))
PRINTS_MUCH = Adversary(_print_much)
FORKS_MANY = Adversary(lambda: _in_a_thread(_fork_many))
TAKES_MEMORY = Adversary(_take_memory)
KEEPS_THE_FIRST = Adversary(kernel="keeps the first")
KEEPS_A_FILE = Adversary(kernel="keeps a file")
IS_PRECOMPUTED = Adversary(kernel="is precomputed")
IS_RIGHT_TWICE = Adversary(kernel="is right twice")
HAS_TWO_FACES = Doubleton()
BUILDS_NOTHING = Builds(None)
BUILDS_NONSENSE = Builds(Program("sm_100a", "", ("no launch",)))  # pyright: ignore[reportArgumentType]
BUILDS_BYTES = Builds(Program("sm_100a", b"bytes", ()))  # pyright: ignore[reportArgumentType]
RELABELLED = Relabelled(text=False)
RELABELLED_IN_THE_TEXT = Relabelled(text=True)
HONEST = Adversary()
