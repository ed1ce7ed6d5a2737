"""Shrinks a random program while two levels of ptxas still disagree about it, on the device machine.

`python3 FOLDER/smallest.py FOLDER OUT SECONDS NUMBER ..`: FOLDER as on_device.py packs it. Each program is assembled
with -O0 by the first ptxas of the path, and at the level that it was drawn for by the same one or, if nothing differs
then, by the next. Statements are removed while the two outputs still differ (Zeller's ddmin): the last line `kept` of
OUT/NUMBER.txt has the numbers of the remaining statements.

A program keeps its defined behaviour. Everything that meets, orders or waits stays. A statement goes with the one that
gives it a temporary register, and a branch stays if it parts the lanes of a partial mask or the warps of a barrier. So
the machine, which reports everything undefined, can run the result (errata.py).

This file needs only the standard library, ask.py beside it, and thereby NumPy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.silicon.whole.drawn import Drawn

_PIECE = re.compile(r"\bL\d+:|(?:(?!\bL\d+:)[^;])+;?")
_STATEMENT = re.compile(r"[\s{}]*(@!?%\w+ )?([a-z.][\w.:]*)(?: (\([^)]*\)|\{[^}]*\}|[^,;]*)(?:,? ([^;]*))?)?;")
_STAYS = re.compile(
    r"\.param|ret|bar\.|barrier\.|fence\.|mbarrier\.|wgmma\.(fence|commit|wait)|cp\.async\.(bulk|commit|wait)"
)
_TOGETHER = re.compile(r"\.sync|bar\.|barrier\.|mbarrier\.|wgmma|cp\.async\.bulk")
_NO_RESULT = ("st.", "red.", "bra", "brx", "bar.sync", "bar.arrive", "bar.warp", "barrier", "fence", "cp.", "wgmma.")
_TEMPORARY = re.compile(r"%(?:[tul]\d|q\d|tx|warp|lane|slot|phase|cell|cells|map|out|copied|in)\b")
_SUSPECT = re.compile(
    r"min\.f(?:32|64) (%\w+), (%\w+), \2|abs\.f(?:32|16x2)|rcp\.approx|(?:add|mul|fma|min)\S*\.f64|testp"
)
"""Instructions with known ptxas faults: removed first, so that an unknown fault remains."""
Disagrees = Callable[[str], bool]


@dataclass
class Pieces:
    """The statements of a program, and the statements that each one needs."""

    program: Drawn
    before: str
    pieces: list[str]
    needs: list[set[int]] = field(default_factory=list[set[int]])
    stays: set[int] = field(default_factory=set[int])
    follows: dict[int, int] = field(default_factory=dict[int, int])

    def text(self, kept: Iterable[int]) -> str:
        """Returns the program with the statements `kept`; braces and labels stay."""
        keep = set(kept) | self.stays
        keep |= {at for at, brx in self.follows.items() if brx in keep}
        out = [one if at in keep else one[: len(one) - len(one.lstrip(" \n{}"))] for at, one in enumerate(self.pieces)]
        return self.before + "".join(out)

    @property
    def droppable(self) -> list[int]:
        """Numbers of the statements that may be removed."""
        return [at for at in range(len(self.pieces)) if at not in self.stays and at not in self.follows]

    def closed(self, kept: Iterable[int]) -> set[int] | None:
        """Returns `kept` without statements that lack something they need; None if one of these must stay."""
        keep = set(kept)
        while True:
            whole = keep | self.stays
            lacking = {at for at in whole if not self.needs[at] <= whole}
            if not lacking:
                return keep
            if lacking & self.stays:
                return None
            keep -= lacking


def pieces_of(program: Drawn) -> Pieces:
    """Splits the text after the first barrier of the frame into pieces."""
    text = program.text
    start = text.index("\n", text.index("mbarrier.init"))
    made = Pieces(program, text[:start], _PIECE.findall(text[start:]))
    last: dict[str, int] = {}
    carry: int | None = None
    labels = {one[:-1].strip(): at for at, one in enumerate(made.pieces) if re.fullmatch(r"\s*L\d+:", one)}
    stores: set[int] = set()
    forward: list[tuple[int, int]] = []
    for at, one in enumerate(made.pieces):
        found = _STATEMENT.match(one)
        made.needs.append(set())
        if found is None:
            made.stays.add(at)
            continue
        guard, opcode, into, rest = (part or "" for part in found.groups())
        if opcode == ".branchtargets":
            made.stays.add(at)
            continue
        if _STAYS.match(opcode):
            made.stays.add(at)
        result = not opcode.startswith(_NO_RESULT) and "[" not in into
        read = f"{guard} {rest}" if result else f"{guard} {into} {rest}"
        made.needs[at] |= {last[name] for name in _TEMPORARY.findall(read) if name in last}
        if opcode.startswith(("addc", "subc", "madc")) and carry is not None:
            made.needs[at].add(carry)
        if ".cc" in opcode:
            carry = at
        if opcode.startswith("st.param"):
            last[f"param {into or rest}"] = at
        if opcode.startswith("call"):
            made.needs[at] |= {place for name, place in last.items() if name.startswith("param ")}
            last["called"] = at
        if opcode.startswith("ld.param") and "called" in last:
            made.needs[at].add(last["called"])
        if opcode.startswith("st.shared.v4.b32") and "[%t4" in one:
            stores.add(at)
        if opcode.startswith("wgmma.mma_async"):
            made.needs[at] |= stores
            stores = set()
        if opcode.startswith("bra"):
            target = labels.get((into or rest).strip())
            if target is not None and target > at:
                forward.append((at, target))
            elif target is not None and any("mbarrier." in piece for piece in made.pieces[target:at]):
                made.stays.add(at)
        if result:
            for name in _TEMPORARY.findall(into):
                last[name] = at
    _keep_together(made, forward)
    return made


def _keep_together(made: Pieces, forward: Sequence[tuple[int, int]]) -> None:
    """A meeting of warps needs the branches over it, a table goes with its switch, and statements that stay keep their
    needs.

    `forward`: forward branches with their labels.
    """
    for branch, target in forward:
        for at in range(branch + 1, target):
            if _TOGETHER.search(made.pieces[at]):
                made.needs[at].add(branch)
    tables = [at for at, one in enumerate(made.pieces) if ".branchtargets" in one]
    switches = [at for at, one in enumerate(made.pieces) if "brx.idx" in one]
    for table, switch in zip(tables, switches, strict=True):
        made.stays.discard(table)
        made.follows[table] = switch
    while grown := {need for at in made.stays for need in made.needs[at]} - made.stays:
        made.stays |= grown


def smallest(pieces: Pieces, kept: Sequence[int], disagrees: Disagrees, keep: Callable[[list[int]], None]) -> list[int]:
    """Shrinks `kept` by ddmin while the program disagrees; calls `keep` at each step."""

    def tried(some: Iterable[int]) -> bool:
        nonlocal kept
        closed = pieces.closed(some)
        if closed is None or len(closed) >= len(kept) or not disagrees(pieces.text(closed)):
            return False
        kept = sorted(closed)
        keep(list(kept))
        return True

    suspects = [at for at in kept if _SUSPECT.search(pieces.pieces[at])]
    if suspects and not tried(set(kept) - set(suspects)):
        for one in suspects:
            tried(set(kept) - {one})
    size = len(kept) // 2
    while size:
        again, at = False, len(kept)
        while at > 0:
            at = min(at, len(kept)) - size
            again |= tried(set(kept) - set(kept[max(at, 0) : at + size]))
        size = size if size == 1 and again else size // 2
    return list(kept)


class OnDevice:
    """The device's outputs of a text by two assemblers."""

    def __init__(self, folder: Path, out: Path, number: int) -> None:
        sys.path.insert(0, str(folder))
        import ask  # type: ignore[import-not-found]
        import drawn  # type: ignore[import-not-found]

        self.program, self.level = drawn.drawn(number), ask.level_of(number)
        self.head = drawn.HEAD + drawn.FUNCTIONS
        self.size, self.log, self.scratch = drawn.OUTPUT_BYTES, out / f"{number}.txt", out / f"{number}"
        self.device, self.given, self.output = _device(folder, self.size)
        raw = json.loads((folder / "maps.json").read_text())[self.program.map_number]
        self.map = ask.placed(raw, self.given)
        self.failed = {line.split()[1] for line in self.lines("failed")}
        self.ptxas: list[str] = []
        self.words: list[Any] = []

    def lines(self, word: str) -> list[str]:
        """Returns the lines of the program's file that begin with `word`."""
        text = self.log.read_text() if self.log.exists() else ""
        return [line for line in text.splitlines() if line.startswith(f"{word} ")]

    def kept(self) -> list[int] | None:
        """Returns the statements kept by an earlier run."""
        lines = self.lines("kept")
        return [int(one) for one in lines[-1].split()[1:]] if lines else None

    def say(self, line: str) -> None:
        """Writes a line to the program's file."""
        with self.log.open("a") as file:
            file.write(f"{line}\n")

    def disagree(self, text: str) -> bool:
        """Whether the two outputs differ. A text that hangs or fails ends the process, and is not tried again."""
        digest = sha256(f"{self.ptxas[1]} {text}".encode()).hexdigest()[:16]
        if digest in self.failed:
            return False
        self.say(f"failed {digest}")
        self.failed.add(digest)
        source = self.scratch.with_suffix(".ptx")
        source.write_text(self.head + text)
        cubins = [self.scratch.with_suffix(f".{place}.cubin") for place in (0, 1)]
        calls = [
            subprocess.Popen(
                [ptxas, level, "-arch=sm_90a", "-o", str(cubin), str(source)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for ptxas, level, cubin in zip(self.ptxas, ("-O0", self.level), cubins, strict=True)
        ]
        if sum(one.wait() != 0 for one in calls):
            return False
        row = {"entry": self.program.entry, "threads": self.program.threads}
        left = []
        for cubin in cubins:
            module = self.device.load(cubin)
            left.append(self.device.left(module, row, self.given, self.output, self.map, self.size))
            self.device.driver.cuModuleUnload(module)
        self.words = [one.view("uint32") for one in left]
        return bool((left[0] != left[1]).any())

    def shown(self) -> str:
        """Where the last two outputs differ: how many words, the first of them, and its two values."""
        at = [int(one) for one in (self.words[0] != self.words[1]).nonzero()[0]]
        first = ", ".join(f"{one}: {int(self.words[0][one]):#x} {int(self.words[1][one]):#x}" for one in at[:6])
        return f"{len(at)} words; {first}"


@cache
def _device(folder: Path, size: int) -> tuple[Any, int, int]:
    """The device, and the addresses of the input and of the output: one of each a process."""
    import ask  # type: ignore[import-not-found]
    import numpy as np

    device, bits = ask.Device(), np.load(folder / "inputs.npz")["bits"]
    return device, device.memory(bits.size, bits), device.memory(size)


def _one(folder: Path, out: Path, number: int, assemblers: Sequence[str]) -> None:
    asked = OnDevice(folder, out, number)
    if any(line for line in asked.lines("done")):
        return
    pieces = pieces_of(asked.program)
    for subject in assemblers:
        asked.ptxas = [assemblers[0], subject]
        kept = pieces.droppable
        if asked.lines(f"by {subject}"):
            kept = asked.kept() or kept
        elif asked.disagree(pieces.text(kept)):
            asked.say(f"by {subject} {asked.level} of {len(kept)}")
        else:
            continue
        left = smallest(pieces, kept, asked.disagree, lambda some: asked.say("kept " + " ".join(map(str, some))))
        asked.failed.clear()
        sure = asked.disagree(pieces.text(left))
        asked.say(f"done {len(left)} {'sure' if sure else 'by chance'}: {asked.shown()}")
        return
    asked.say("done 0 nothing differs")


def _worker(folder: Path, out: Path, until: float, numbers: Sequence[int]) -> None:
    assemblers = list(dict.fromkeys(str(Path(one).resolve()) for one in _all_ptxas()))
    for number in numbers:
        if time.time() > until:
            os._exit(0)
        try:
            _one(folder, out, number, assemblers)
        except RuntimeError as error:
            with (out / f"{number}.txt").open("a") as file:
                file.write(f"died {error}\n")
            os._exit(3)
    os._exit(0)


def _all_ptxas() -> Iterator[str]:
    """Yields every ptxas of the path, in its order."""
    found = subprocess.run(["which", "-a", "ptxas"], capture_output=True, text=True, check=False).stdout
    yield from found.split()


def main(arguments: Sequence[str]) -> None:
    """Runs the command line; see the module."""
    if arguments[0] == "--until":
        _worker(Path(arguments[2]), Path(arguments[3]), float(arguments[1]), [int(one) for one in arguments[4:]])
    folder, out, seconds, numbers = Path(arguments[0]), Path(arguments[1]), float(arguments[2]), arguments[3:]
    out.mkdir(parents=True, exist_ok=True)
    until, jobs = time.time() + seconds, max((os.cpu_count() or 2) - 1, 1)
    worker = [sys.executable, __file__, "--until", str(until), str(folder), str(out)]
    shares = [list(numbers[at::jobs]) for at in range(jobs)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    started = [0] * jobs
    while time.time() < until + 5:
        for at, share in enumerate(shares):
            one = running.get(at)
            if share and (one is None or one.poll() not in (None, 0)) and time.time() < until and started[at] < 40:
                started[at] += 1
                running[at] = subprocess.Popen([*worker, *share])
        if running and all(one.poll() == 0 for one in running.values()):
            break
        time.sleep(0.05)
    for one in running.values():
        one.kill()
    for file in [*out.glob("*.ptx"), *out.glob("*.cubin")]:
        file.unlink()
    done = [file for file in out.glob("*.txt") if "\ndone " in f"\n{file.read_text()}"]
    print(f"{len(done)} of {len(numbers)} programs are as small as they get")


if __name__ == "__main__":
    main(sys.argv[1:])
