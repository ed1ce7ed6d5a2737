"""Mutants in processes of their own end as in this one, whatever becomes of a process."""

from __future__ import annotations

import lzma
import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.kernels.mutants import processes
from conformance.kernels.mutants.__main__ import main
from conformance.kernels.mutants.campaign import Here, Outcome, Record, Subject, drawn, subjects
from conformance.kernels.mutants.mutant import Mutant, mutants
from conformance.kernels.mutants.processes import PORTION, Processes, pack, unpacked
from conformance.kernels.mutants.smoke import check_of
from conformance.kernels.mutants.table import argued
from megamoe.spec.selection import Selection

SELECTION = Selection(
    cases=("fmha:hd=64,t=17,s_k=96,lse=false", "fmha:hd=128,t=1,s_k=8"),
    backends=("ptx",),
    targets=("sm_90a",),
    executors=("vm",),
)
SCHEDULES = ("eager",)


class Deadly(Mutant):
    """A planted fault: it ends the process that runs it."""

    def text_of(self, ptx: str) -> str:
        os._exit(3)


class DeadlyOnce(Mutant):
    """A planted fault: something else ends the process that runs it first. `after` names a file that tells of it."""

    def text_of(self, ptx: str) -> str:
        if not Path(self.after).exists():
            Path(self.after).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().text_of(ptx)


@pytest.fixture(scope="module")
def programs() -> list[Subject]:
    return subjects(SELECTION)


def _of(program: Subject, count: int) -> list[tuple[Subject, Mutant]]:
    return [(program, one) for one in drawn(list(mutants(program.built[0].program)), count, 3)]


def _told(outcomes: list[Outcome]) -> dict[str, Outcome]:
    """The outcomes by id; processor time differs from run to run."""
    return {one.id: replace(one, seconds=0.0) for one in outcomes}


def test_processes_find_what_one_finds(programs: list[Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs in two processes; and a mutant that takes its process with it costs no other its outcome."""
    monkeypatch.setattr(processes, "WORTH", 1)
    todo = [pair for program in programs for pair in _of(program, PORTION)]
    model = todo[0][1]
    deadly = Deadly("deadly", model.kind, model.line, model.before, model.after, model.edits)
    examined = Processes(2, Here(SCHEDULES, argued=argued))
    outcomes = _told(list(examined([*todo[:3], (programs[0], deadly), *todo[3:]])))
    died = outcomes.pop("deadly")
    assert (died.check, died.sentence) == ("crashed", "its process ended with exit code 3"), died
    here = _told(list(Here(SCHEDULES, argued=argued)(todo)))
    assert outcomes == here, "a mutant ends otherwise in another process"
    assert any(one.killed for one in here.values()), "nothing was killed, so nothing was shown"
    assert examined.unchanged > 0, "the unchanged programs took no time"


def test_a_process_that_the_system_ends_kills_no_mutant(programs: list[Subject], tmp_path: Path) -> None:
    """Alone in its portion or not, a mutant runs again, and what comes of it then counts."""
    todo = _of(programs[0], 2)
    here = _told(list(Here(SCHEDULES, argued=argued)(todo)))
    for some in (todo[:1], todo):
        program, one = some[0]
        mark = str(tmp_path / f"of-{len(some)}")
        first = DeadlyOnce(one.id, one.kind, one.line, one.before, mark, one.edits)
        found = _told(list(Processes(1, Here(SCHEDULES, argued=argued))([(program, first), *some[1:]])))
        assert found[one.id].check == here[one.id].check, f"{len(some)}: {found[one.id]}"
        assert found.keys() == {each.id for _, each in some}


def test_no_mutant_begins_after_its_time(programs: list[Subject]) -> None:
    assert not list(Processes(1, Here(SCHEDULES, seconds=0.0))(_of(programs[0], 2)))


def test_what_is_unpacked_is_what_was_packed(programs: list[Subject], tmp_path: Path) -> None:
    assert len(list(pack(programs, tmp_path))) == len(programs)
    found = unpacked(tmp_path)
    assert [one.name for one in found] == [one.name for one in programs]
    for one, packed in zip(programs, found, strict=True):
        assert [(each.case, each.program) for each in packed.built] == [(each.case, each.program) for each in one.built]
        assert packed.few_are_known, "the programs on few CTAs are not in the file, and its host cannot build them"
        assert {count: few.name for count, few in packed.few.items()} == {
            count: few.name for count, few in one.few.items()
        }
    with pytest.raises(ValueError, match="is of an earlier call; name another folder"):
        list(pack(programs, tmp_path))


def test_a_campaign_runs_what_was_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, record = str(tmp_path / "programs"), str(tmp_path / "mutants.jsonl")
    selected = ["--case", SELECTION.cases[0], "--backend", "ptx", "--target", "sm_90a"]
    assert main(["--pack", folder, *selected]) == 0
    asked = ["--schedule", "eager", "--sync", "4", "--others", "0", "--jobs", "1"]
    assert main(["--packed", folder, *asked, "--record", record]) == 0
    assert "4 mutants took" in capsys.readouterr().out
    assert main(["--smoke", "--packed", folder, "--record", record]) == 2
    assert "may lack rows of smoke" in (told := capsys.readouterr().err), told
    (tmp_path / "programs" / "profile").write_text("smoke")
    assert main(["--smoke", "--packed", folder, "--record", record]) == 0
    unasked = [one.id for one in Record(Path(record)).results if check_of(one) is None and not argued(one)]
    assert not unasked, f"smoke was not asked about {unasked}: {capsys.readouterr().out}"
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    for content in (b"", b"text", lzma.compress(b"text"), lzma.compress(pickle.dumps({}))):
        (spoilt / "0001.program").write_bytes(content)
        assert main(["--packed", str(spoilt), *asked, "--record", record]) == 2
        assert "0001.program" in capsys.readouterr().err, content
    assert main(["--packed", str(tmp_path), *asked, "--record", record]) == 2
    assert "has no programs; --pack writes them" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--packed", folder, *selected])
    assert "so --case would do nothing" in capsys.readouterr().err
