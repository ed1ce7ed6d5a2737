"""A changed kernel that runs alone, with the other launches played back, is killed as in a run of the whole program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from backends.vm.machine.machine import LaunchRequest, Machine
from conformance.kernels.mutants import campaign
from conformance.kernels.mutants.campaign import Subject, collected, drawn, killed_by, subjects, verdict
from conformance.kernels.mutants.mutant import Edit, Mutant, instructions, mutants
from conformance.kernels.mutants.replay import Kept, Playing, Tape, bodies, entry_of, player, recorder
from megamoe.contract import RunOptions
from megamoe.spec.selection import Selection

LAYER = "nvfp4_moe:hidden=128,intermediate=128,num_experts=1,tokens=1"
GEMM, LAST = "moe_swiglu_interleave8", "moe_combine"


@pytest.fixture(scope="module")
def layer() -> Subject:
    """A program of five kernels."""
    (found,) = subjects(Selection(cases=(LAYER,), backends=("ptx",), targets=("sm_100a",), executors=("vm",)))
    return found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the kernels that machines run."""
    seen: list[str] = []
    perform = Machine.perform

    def told(self: Machine, asked: LaunchRequest) -> None:
        seen.append(asked.function.name)
        perform(self, asked)

    monkeypatch.setattr(Machine, "perform", told)
    return seen


def _of(subject: Subject, entry: str) -> list[Mutant]:
    program = subject.built[0].program
    return [one for one in mutants(program) if entry_of(program.ptx, one) == entry]


def _idle(subject: Subject, entry: str) -> Mutant:
    """Changes white space in a kernel."""
    ptx = subject.built[0].program.ptx
    at = next(one for one in instructions(ptx) if one.entry == entry)
    return Mutant("idle", "drop", at.line, "", "", (Edit(at.begin, at.begin, "\t"),))


def test_a_kernel_alone_dies_as_in_the_whole_program(layer: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    built = layer.built[0]
    chosen = [
        (one, schedule)
        for entry in bodies(built.program.ptx)
        for schedule, seed, count in (("eager", 7, 2), ("random:3", 3, 1))
        for one in drawn(_of(layer, entry), count, seed)
    ]
    alone = [killed_by(layer, built, *one) for one in chosen]
    monkeypatch.setattr(campaign, "player", lambda *_: None)
    whole = [killed_by(layer, built, *one) for one in chosen]
    unlike = [(*each, one.id) for *each, (one, _) in zip(alone, whole, chosen, strict=True) if each[0] != each[1]]
    assert not unlike, f"alone and in the whole program: {unlike}"
    dead = Counter(bool(check) for check, _ in alone)
    assert min(dead[True], dead[False]) > 1, f"hardly any dies, or lives: {dead}"


def test_what_leaves_the_program_s_bytes_runs_alone(layer: Subject, ran: list[str]) -> None:
    built = layer.built[0]
    layer.baseline(built, "eager")
    ran.clear()
    assert killed_by(layer, built, _idle(layer, GEMM), "eager") == ("", "")
    assert ran == [GEMM], f"a change of {GEMM} that changes nothing ran {ran}"


def test_what_leaves_other_bytes_runs_to_the_end(
    layer: Subject, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: memory counts as the program's whatever it holds."""
    built = layer.built[0]
    layer.baseline(built, "eager")
    found = (one for one in _of(layer, GEMM) if one.kind in ("rounding", "operand", "opcode"))
    wrong = next(one for one in found if killed_by(layer, built, one, "eager")[0].startswith("metric"))
    ran.clear()
    killed_by(layer, built, wrong, "eager")
    assert (ran[0], ran[-1]) == (GEMM, LAST), f"{wrong.before} -> {wrong.after} ran {ran}"
    monkeypatch.setattr(Kept, "is_in", lambda *_: True)
    assert killed_by(layer, built, wrong, "eager") == ("", ""), "the planted fault goes unnoticed"


def test_played_launches_leave_bytes_counters_and_findings_of_the_program(layer: Subject) -> None:
    """Tests the last kernel: all before it are played, under an order in which each launch draws."""
    built, options = layer.built[0], RunOptions(schedule="random:5")
    tape = Tape()
    check, _, own = verdict(built, built.program, options, recorder(tape))
    assert (check, [mark.entry for mark in tape.marks][-1]) == ("", LAST)
    executor = player(tape, built.program, _idle(layer, LAST))
    assert executor is not None
    check, sentence, counters = verdict(built, built.program, options, executor)
    assert (check, counters) == ("", own), sentence
    seen = collected(built, built.program, options, listening=executor)
    assert not seen.found, seen.found


def test_a_change_outside_of_kernels_or_of_a_launch_is_not_played(layer: Subject) -> None:
    built = layer.built[0]
    tape = layer.baseline(built, "eager").tape
    launched = next(one for one in mutants(built.program) if one.launch is not None)
    assert player(tape, built.program, launched) is None, "what a launch is given is no text"
    first, second = (_idle(layer, entry).edits for entry in (GEMM, LAST))
    assert player(tape, built.program, replace(launched, launch=None, edits=(*first, *second))) is None
    assert player(tape, built.program, replace(launched, launch=None, edits=(Edit(0, 0, " "),))) is None


def test_launches_that_may_overlap_are_run_together(layer: Subject) -> None:
    """A race partner is kept with the launch before it, which is not played then."""
    built = layer.built[0]
    tape = layer.baseline(built, "eager").tape
    entries = [mark.entry for mark in tape.marks]
    assert tape.groups == list(range(1, 1 + len(entries))), "none of these launches overlaps another"
    at = entries.index(GEMM)
    chained = Tape([replace(mark, dependent=place == at) for place, mark in enumerate(tape.marks)])
    machine = Playing(chained, GEMM, lambda: pytest.fail("it ran"), "eager", "fast", 1, None)
    assert machine.touched == {chained.groups[at - 1]} == {chained.groups[at]}, "the launch before it would be played"


def test_the_bodies_of_kernels_are_found() -> None:
    text = ".entry a(.param .u64 x) { // }\n{ mov.b64 {%r1, %r2}, %rd1; } }\n.func f() { } .entry b() { ret; }"
    assert [text[begin:end] for begin, end in bodies(text).values()] == [
        " // }\n{ mov.b64 {%r1, %r2}, %rd1; } ",
        " ret; ",
    ]
