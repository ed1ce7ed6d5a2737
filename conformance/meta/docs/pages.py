"""The programs of a page, in order: `ptx` is a kernel, `diff` changes it, `python` runs it, `text` is its output.

A `python` block finds the kernel in the current folder, under the name that it passes to `launch`. If a `text` block
follows, the run must end with that finding. Otherwise it must end without one, and the block's assertions must hold. A
`diff` without a `python` block after it is run by the previous `python` block.

`python -m conformance.meta.docs.pages` rewrites the `text` blocks with the machine's current output.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import megamoe.vm
from conformance import ROOT
from megamoe.contract.scratch import scratch_folder
from megamoe.vm import KernelFault

FOLDERS = ("rules", "notes", "found")
SCHEDULES = ("eager", "lazy", "random:1")
KERNEL = "kernel.ptx"
WIDTH = 120
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OTHERS = re.compile(r" \(and \d+ more findings? that counts?\)$")


def pages() -> list[Path]:
    """Every page with programs."""
    return [path for folder in FOLDERS for path in sorted((ROOT / "docs" / folder).glob("*.md")) if _blocks(path)]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a page: `kernel` under `python`. `said` is the finding that the page shows, "" for none."""

    kernel: str
    python: str
    said: str

    @property
    def rule(self) -> str:
        """The slug of the finding, "" for none."""
        found = re.match(r"\[([\w-]+)\]", self.said)
        return found[1] if found else ""


def _blocks(path: Path) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in _BLOCK.findall(path.read_text("utf-8")) if kind in _KINDS]


_KINDS = ("ptx", "diff", "python", "text")


def trials(path: Path) -> Iterator[Trial]:
    """The runs of a page. Raises ValueError if the page's blocks are not in such an order."""
    kernel = python = ""
    blocks = [*_blocks(path), ("", "")]
    for (kind, text), (following, next_text) in pairwise(blocks):
        if kind == "ptx":
            kernel = text
        elif kind == "diff":
            kernel = patched(kernel, text, path.name)
        elif kind == "python":
            python = text
        if kind == "python" or (kind == "diff" and following != "python"):
            said = " ".join(next_text.split()) if following == "text" else ""
            yield Trial(kernel, python, said)


def patched(kernel: str, diff: str, page: str) -> str:
    """`kernel` with the lines of `diff` changed. Lines that begin with @@ separate hunks."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
        if kernel.count(before) != 1 or not before:
            raise ValueError(
                f"{page}: these lines of a diff occur {kernel.count(before)} times in the kernel:\n{before}"
            )
        kernel = kernel.replace(before, after)
    return kernel


def outcome(trial: Trial, folder: Path, schedule: str = "") -> str:
    """The result of a run in `folder`: the sentence of its finding, or "". The block's assertions may fail.

    `schedule`: replaces the block's own. Every grade of finding counts. Addresses of host memory are removed from the
    sentence.
    """
    (folder / KERNEL).write_text(trial.kernel, "utf-8")
    source = trial.python.replace(f'"{KERNEL}"', repr(str(folder / KERNEL)))
    forced = {"profile": "strict", **({"schedule": schedule} if schedule else {})}
    whole = megamoe.vm.Device
    with patch.object(megamoe.vm, "Device", lambda *args, **named: whole(*args, **{**named, **forced})):
        try:
            exec(compile(source, KERNEL, "exec"), {})
        except KernelFault as fault:
            # A page says in its own words how to mend it.
            return " ".join(_OTHERS.sub("", str(fault).splitlines()[0]).split())
    return ""


def renewed(path: Path) -> str:
    """The page with every `text` block replaced by the machine's output."""
    text = path.read_text("utf-8")
    shown = [trial for trial in trials(path) if trial.said]
    with scratch_folder("pages") as folder:
        said = [outcome(trial, folder) for trial in shown]
    blocks = iter(said)

    def block(found: re.Match[str]) -> str:
        if found[1] != "text":
            return found[0]
        lines = textwrap.wrap(next(blocks), WIDTH, break_long_words=False, break_on_hyphens=False)
        return "\n".join(["```text", *lines, "```"])

    return _BLOCK.sub(block, text)


def main() -> None:
    """Writes the pages that changed. Arguments are names of pages, all by default."""
    for path in pages():
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        text = renewed(path)
        if text != path.read_text("utf-8"):
            path.write_text(text, "utf-8")
            print(f"renewed {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
