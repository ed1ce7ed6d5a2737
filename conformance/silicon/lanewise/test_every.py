"""The machine gives an H200's results for every lane-wise spelling that ptxas takes for sm_90a."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.ptx.assembler import find_ptxas
from backends.vm.numerics import f32
from conformance.silicon.lanewise.as_ptxas import DIFFERS, departures, translated
from conformance.silicon.lanewise.every import (
    Answers,
    asked_of,
    bundles,
    candidates,
    differences,
    identity,
    machine_checks,
    merged,
    pack,
    unanswered,
)
from conformance.silicon.lanewise.on_device import CHECKED, ask, checksums
from conformance.silicon.lanewise.programs import Program, Words, answered, kernel
from conformance.silicon.lanewise.values import count_of, values_of

CANDIDATES = list(candidates())
BY_NAME = {one.opcode: one for one in CANDIDATES}
ANSWERS = Answers.read()
ANSWERED = bundles(BY_NAME[name] for name in ANSWERS.checks if name in BY_NAME)
PARTS = 16
SOME = ("add.rn.f32", "add.rm.ftz.f32", "setp.lt.and.f16x2", "vote.sync.ballot.b32", "cvt.rn.f16x2.e4m3x2",
        "match.any.sync.b32", "vadd4.s32.s32.u32.sat")  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


class _Device:
    """Runs the programs on the machine; changes one result of `wrong`."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def load(self, cubin: Path) -> bytes:
        return cubin.read_bytes()

    def results(self, module: bytes, entry: str, sources: str, count: int) -> Words:
        program = next(one for one in CANDIDATES if one.entry == entry)
        assert entry.encode() in module, f"ptxas made no machine code of {entry}"
        assert sources.split() == list(program.sources)
        made = answered([program], kernel(program), values_of(program.sources), count)[0]
        if program.opcode == self.wrong:
            made[CHECKED + 3] ^= np.uint64(1)
        return made


@pytest.mark.parametrize("part", range(PARTS))
def test_the_machine_gives_what_an_h200_gave(part: int) -> None:
    """The first values of each spelling; `python -m conformance.silicon.lanewise.every` compares all."""
    some = [[one for one in bundle if not departures(one)] for bundle in ANSWERED[part::PARTS]]
    wrong = [said for bundle in some if bundle for said in differences(bundle, ANSWERS, CHECKED)]
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("begin", DIFFERS)
def test_what_differs_still_differs(begin: str) -> None:
    some = [one for bundle in ANSWERED for one in bundle if begin in departures(one)]
    assert any(differences([one], ANSWERS) for one in some), f"{begin} gives an H200's bits now: take it out of DIFFERS"


def test_scalar_video_instructions_are_what_ptxas_makes_of_them() -> None:
    """An H200 gave the results of as_ptxas.py, so a difference of the machine there is the one that DIFFERS names."""
    some = [BY_NAME[name] for name in ANSWERS.checks if re.match(r"v(add|sub|absdiff|min|max|shl|shr|set|mad)\.", name)]
    wrong = [one.text for one in some if not _as_ptxas(one)]
    assert not wrong, f"an H200 gave other results than as_ptxas.py: {wrong[:5]}"


def test_another_part_of_an_operand_is_noticed() -> None:
    program = BY_NAME["vadd.u32.u32.u32.sat"]
    assert _as_ptxas(program)
    assert not _as_ptxas(replace(program, text=program.text.replace("%a.h0", "%a.h1")))


def _as_ptxas(program: Program) -> bool:
    values = tuple(one[:CHECKED] for one in values_of(program.sources))
    return bool(checksums(translated(program, values))[0] == ANSWERS.checks[program.opcode][1][0])


def test_every_spelling_is_answered_or_refused() -> None:
    new = [one for name, one in BY_NAME.items() if name not in ANSWERS.checks and name not in ANSWERS.refused]
    silent = [one.opcode for one in asked_of(new)]
    assert not silent, f"ptxas takes these for sm_90a: ask an H200, see every.py: {silent[:5]}"
    gone = [name for name in ANSWERS.checks if name not in BY_NAME]
    assert not gone, f"no form of the machine has these: {gone[:5]}"
    changed = unanswered([BY_NAME[name] for name in ANSWERS.checks], ANSWERS)
    assert not changed, f"an H200 ran other kernels or operands of these: {[one.opcode for one in changed[:5]]}"


def _asked(folder: Path, programs: Sequence[Program], wrong: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    monkeypatch.setenv("PATH", str(find_ptxas().parent), prepend=os.pathsep)
    pack(folder, programs)
    said = ask(folder, folder, _Device(wrong))
    return np.load(folder / "differing.npz"), said


def test_one_wrong_result_is_told_recorded_and_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [BY_NAME[name] for name in SOME]
    kept, said = _asked(tmp_path, programs, "add.rn.f32", monkeypatch)
    assert kept.files == ["add.rn.f32"], said
    assert "add.rn.f32: 1 of 4 parts differ" in said
    answers = merged(tmp_path, Answers({}, frozenset()), CANDIDATES, programs)
    (tmp_path / "every.npz").write_bytes(answers.packed())
    answers = Answers.read(tmp_path / "every.npz")
    assert set(answers.checks) == set(SOME)
    assert "add.rz.f32" in answers.refused
    assert not unanswered(programs, answers)
    said = [one for some in bundles(programs) for one in differences(some, answers)]
    assert len(said) == 1, said
    assert f"add.rn.f32: of values {CHECKED} to {2 * CHECKED - 1} the machine" in said[0]


def test_an_altered_rule_of_the_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The altered one runs in a kernel of two programs, because the machine keeps what it made of a text."""
    program, other = BY_NAME["fma.rm.ftz.f32"], BY_NAME["fma.rz.ftz.f32"]
    checks = {one.opcode: (identity(one), machine_checks([one], CHECKED)[0]) for one in (program, other)}
    answers = Answers(checks, frozenset())
    exact = f32.fma
    monkeypatch.setattr(f32, "fma", lambda a, b, c, **options: exact(a, b, c, **{**options, "rounding": "rz"}))
    (said,) = differences([program, other], answers, CHECKED)
    assert program.opcode in said


def test_other_operands_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = BY_NAME["add.rn.f32"]
    held = Answers({program.opcode: (identity(program), machine_checks([program])[0])}, frozenset())
    assert not unanswered([program], held)
    monkeypatch.setattr("conformance.silicon.lanewise.every.identity", lambda one: 0)
    assert unanswered([program], held) == [program]


def test_only_what_ptxas_and_the_machine_take_is_asked() -> None:
    """sm_90a has no add.rn.f32x2. An exact conversion has no rounding, but that ptxas takes one of a bf16."""
    names = ("add.rn.f32", "add.rn.f32x2", "cvt.rn.f32.f16", "cvt.f32.f16", "cvt.rn.f32.bf16", "max.relu.s32")
    assert sorted(one.opcode for one in asked_of([BY_NAME[name] for name in names])) == [
        "add.rn.f32", "cvt.f32.f16", "cvt.rn.f32.bf16", "max.relu.s32",
    ]  # fmt: skip


def test_a_kernel_of_many_gives_what_kernels_of_one_give() -> None:
    some = next(one for one in bundles(map(BY_NAME.__getitem__, CARRIES)) if len(one) > 1)
    together = machine_checks(some)
    apart = [machine_checks([one])[0] for one in some]
    assert np.array_equal(together, apart)


CARRIES = ("addc.cc.u32", "addc.u32", "addc.cc.s64")


@pytest.mark.parametrize("sources", [("f16",), ("bf16",), ("u16",), ("f16x2",)])
def test_one_narrow_operand_has_all_of_its_values(sources: tuple[str]) -> None:
    (values,) = values_of(sources)
    assert len(np.unique(values & np.uint64(0xFFFF))) == count_of(sources) == 1 << 16


def test_special_values_meet() -> None:
    a, b = values_of(("f32", "f32"))
    infinite = [(int(x), int(y)) for x, y in zip(a, b, strict=True) if x == 0x7F800000 and y in (0, 0xFF800000)]
    assert set(infinite) == {(0x7F800000, 0), (0x7F800000, 0xFF800000)}
    (one,) = values_of(("f32",))
    assert len(set((one >> np.uint64(23)).tolist())) == 512, "each exponent with both signs"
