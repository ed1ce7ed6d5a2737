"""What the VM notices when one synchronising instruction is taken out of a real kernel: the raw-PTX FMHA at hd 64.

`python -m conformance.kernels.mutants.mutations` prints the table that results/mutations.md holds; with a part of an
instruction's text, as `tcgen05.wait::st`, it says of each instruction that has it what notices its absence.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache

import torch

from megamoe.contract import Program, RunOptions, load_backend, load_executor
from megamoe.judge.guarded import GuardedCase
from megamoe.ops import reference
from megamoe.spec.load import load_specs
from megamoe.spec.spec import Spec

CASE = "fmha:hd=64,t=64,s_k=800,inputs=large_logits"
"""Seven key tiles of two stages wrap the ring of eight; large logits change the running maximum, and so O's scale."""
SCHEDULES = ("eager", "lazy", "random:3")
_SYNCHRONISING = re.compile(
    r"(@!?%\w+ )?(mbarrier\.(init|arrive|try_wait)|tcgen05\.(wait|fence|commit|dealloc)|fence\.|bar\."
    r"|cp\.async\.bulk\.(commit|wait)_group)"
)

NOT_NOTICED = {
    "tcgen05.fence": "CuTeDSL's own kernels leave these fences out, so the VM does not ask for them",
    "tcgen05.wait::ld": "a load's last piece waits for the pieces before it too, and nobody overwrites them in between",
    "fence.mbarrier_init": "the VM orders mbarrier.init by barriers and does not model other proxies' view of it",
    "bar.warp.sync": "the VM brings diverged lanes together at the first common instruction, sooner than silicon must",
    "%s_free_completed": "an MMA that overwrites what an earlier MMA reads: the VM lets the tensor core read in order, "
    "as production kernels assume, though the ISA does not promise it",
    "%ring_drained_completed": "the producer's last wait; the tensor core, in order, has by then ended what it awaits",
}
"""Why the VM lets an instruction go unmissed, by a part of its text. All others must be noticed."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """The kernel without the instruction of one PTX line (with its branch, for a wait)."""

    line: int
    text: str
    ptx: str

    @property
    def kind(self) -> str:
        """The opcode up to where its variants begin: "mbarrier.arrive", "tcgen05.wait::st", ..."""
        word = self.text.split()[1] if self.text.startswith("@") else self.text.split()[0]
        parts = word.rstrip(";").split(".")
        if parts[0] == "tcgen05":
            return ".".join(parts[:2]).replace("::before_thread_sync", "").replace("::after_thread_sync", "")
        return ".".join(parts[: 3 if parts[0] in ("bar", "fence") and parts[1] in ("warp", "proxy") else 2])


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a mutant: the first schedule that noticed it and what was said, or two empty strings."""

    mutant: Mutant
    schedule: str
    sentence: str

    @property
    def excuse(self) -> str:
        """Why it may go unnoticed, or "" if it must be noticed."""
        return next((why for part, why in NOT_NOTICED.items() if part in self.mutant.text), "")


@cache
def _spec() -> Spec:
    return load_specs(None)["fmha"]


@cache
def _inputs() -> dict[str, torch.Tensor]:
    return reference("fmha").make_inputs(_spec().parse_case(CASE))


@cache
def program() -> Program:
    """The kernel as it should be."""
    built = load_backend("ptx").build(_spec().parse_case(CASE), "sm_100a")
    if not isinstance(built, Program):
        raise TypeError(f"the ptx backend built a {type(built).__name__}, not PTX with launches")
    return built


def mutants(ptx: str) -> Iterator[Mutant]:
    """One mutant for each synchronising instruction, in program order."""
    lines = ptx.splitlines()
    for index, line in enumerate(lines):
        text = line.split("//")[0].strip()
        if not _SYNCHRONISING.match(text):
            continue
        removed = 2 if "try_wait" in text else 1
        yield Mutant(index + 1, text, "\n".join(lines[:index] + [""] * removed + lines[index + removed :]))


def _outputs(built: Program, schedule: str) -> tuple[dict[str, torch.Tensor], str]:
    guarded = GuardedCase(_spec(), _spec().parse_case(CASE), load_executor("vm"), _inputs())
    ran = guarded.run(built, RunOptions(schedule=schedule, step_budget=200_000))
    sentence = ran.fault(may_leave_unwritten=True)
    if not sentence and (unwaited := ran.execution.counters.get("tmem_unwaited_overwrites", 0)):
        sentence = f"counted: {unwaited} writes to tensor memory that only a register dependence orders after a load"
    return ran.outputs, sentence


def examine(mutant: Mutant, right: dict[str, torch.Tensor]) -> Finding:
    """Run a mutant under one schedule after the other until it is noticed; `right` holds the kernel's own outputs."""
    for schedule in SCHEDULES:
        outputs, sentence = _outputs(replace(program(), ptx=mutant.ptx), schedule)
        if not sentence and any(not torch.equal(outputs[name], right[name]) for name in right):
            sentence = "the outputs differ from those of the whole kernel"
        if sentence:
            return Finding(mutant, schedule, sentence)
    return Finding(mutant, "", "")


def findings(part: str = "") -> Iterator[Finding]:
    """The findings of the mutants whose instruction has `part` in its text, in program order."""
    whole = program()
    right, sentence = _outputs(whole, "eager")
    if sentence:
        raise AssertionError(f"the kernel itself does not pass: {sentence}")
    for mutant in mutants(whole.ptx):
        if part in mutant.text:
            yield examine(mutant, right)


def no_mutant(part: str) -> str:
    """The sentence about a text that no synchronising instruction has."""
    kinds = sorted({mutant.kind for mutant in mutants(program().ptx)})
    like = get_close_matches(part, kinds, 1)
    guess = f"; did you mean {like[0]}?" if like else ""
    return f"no synchronising instruction of {CASE} has {part!r} in its text; there are {', '.join(kinds)}{guess}"


def table(found: list[Finding]) -> str:
    """Markdown: by kind of instruction, how many were taken out and how many were missed."""
    kinds: dict[str, list[Finding]] = {}
    for finding in found:
        kinds.setdefault(finding.mutant.kind, []).append(finding)
    noticed = sum(bool(finding.schedule) for finding in found)
    rows = [
        "# Mutations",
        "",
        f"`{CASE}`, raw-PTX kernel for sm_100a: each of its {len(found)} synchronising instructions",
        f"taken out, one at a time, and run under {', '.join(SCHEDULES)} until somebody notices.",
        f"Noticed: {noticed} of {len(found)}. "
        "Made by `python -m conformance.kernels.mutants.mutations`; a test keeps it true.",
        "",
        "| instruction | taken out | noticed | first under | why not all |",
        "|---|---|---|---|---|",
    ]
    for kind, items in sorted(kinds.items()):
        schedules = Counter(item.schedule for item in items if item.schedule)
        first = ", ".join(f"{name} {count}" for name, count in schedules.items())
        why = "; ".join(dict.fromkeys(item.excuse for item in items if not item.schedule))
        rows.append(f"| `{kind}` | {len(items)} | {schedules.total()} | {first} | {why} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    if len(sys.argv) == 2:
        if not any(sys.argv[1] in mutant.text for mutant in mutants(program().ptx)):
            sys.exit(no_mutant(sys.argv[1]))
        for one in findings(sys.argv[1]):
            seen = f"{one.schedule}: {one.sentence}" if one.schedule else f"not noticed: {one.excuse or 'no excuse'}"
            print(f"PTX line {one.mutant.line} `{one.mutant.text}` {seen}")
    else:
        print(table(list(findings())), end="")
