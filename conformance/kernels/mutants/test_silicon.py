"""Mutants on a device: what is packed, how processes are watched, how reports are read, and the table of it.

The driver and compute-sanitizer are stand-ins here: a process that writes the lines of an on_device.py process.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from backends.ptx.assembler import find_ptxas
from conformance.kernels.mutants import carried, on_device, silicon
from conformance.kernels.mutants.campaign import Outcome, Record, Subject, program_of, subjects
from conformance.kernels.mutants.carried import Carried, hangs, is_untold, more_of, of_record, of_silicon
from conformance.kernels.mutants.few_ctas import COUNTS, on_few_ctas
from conformance.kernels.mutants.mutant import mutants, program_id
from conformance.kernels.mutants.on_device import (
    ALONE,
    DEADLOCK,
    GONE,
    SLICE,
    Stage,
    assemble,
    drawn,
    kind_of,
    parts,
    placed,
    reports,
    under_tools,
)
from conformance.kernels.mutants.silicon import Seen, seen_of, told, with_more, with_tools
from conformance.kernels.mutants.table import RECORD
from megamoe.contract import Program
from megamoe.contract.assembly import assemblers
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection

CASE = "fmha:hd=64,t=17,s_k=96,lse=false"
LOG = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at k_m0012+0x1d0 and Read access at k_m0012+0x240 [96 hazards]
=========
========= Error: Race reported between Write access at k_m0012+0x2d0 and Read access at k_m0012+0x340 [4 hazards]
=========
========= Invalid __global__ write of size 4 bytes
=========     at other_m0007+0x70
=========     by thread (0,0,0) in block (1,0,0)
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call
========= ERROR SUMMARY: 3 errors
"""


@pytest.fixture(scope="module")
def subject() -> Subject:
    (found,) = subjects(Selection(cases=(CASE,), backends=("ptx",), targets=("sm_90a",), executors=("vm",)))
    return found


def test_a_report_is_counted_for_the_mutant_that_it_names_and_no_other() -> None:
    found = reports(LOG)
    assert set(found) == {7, 12}, f"what names no kernel belongs to nobody: {found}"
    (heads, first) = found[12]
    assert list(heads.values()) == [2], f"two races that differ in addresses alone are one kind: {heads}"
    assert "+0x1d0" in first, "the first report is kept in full"
    assert "m0012" not in kind_of(LOG.splitlines()[1]), "a kind says nothing of which mutant it was"


def test_addresses_are_put_where_the_parameters_have_them() -> None:
    launch = {"params": ["00" * 16, "ff" * 4], "places": [(0, 8, "q", 32)]}
    params = placed(launch, {"q": 0x1000})
    assert params == [bytes(8) + (0x1020).to_bytes(8, "little"), b"\xff" * 4], f"{params}"


def test_mutants_that_hang_come_last_and_alone() -> None:
    rows = [{"number": at, "id": name, "orders": name == "d"} for at, name in enumerate(("", "a", "b", "c", "d"))]
    order = drawn(rows)
    assert order[0] == 4, f"what orders comes first: {order}"
    stages = under_tools([0], order, {1: "right", 2: "hang", 3: "fault", 4: "wrong"})
    assert list(stages)[-1] == "mutants that hang"
    assert stages["mutants that hang"] == [(DEADLOCK, [2])], f"{stages}"
    assert all(some == [4, 1] for _, some in stages["mutants that end"]), f"{stages}"
    assert all(tool != DEADLOCK for jobs in list(stages.values())[1:3] for tool, _ in jobs)
    rows[4]["stuck"] = True
    assert list(parts(rows, order).values())[-1] == [4], "what holds the device up comes before the others"
    many = [{"number": at, "id": str(at), "orders": True} for at in range(SLICE + 1)]
    assert [len(some) for some in parts(many, drawn(many)).values()] == [SLICE, 1, 0], "a slice is too large"


def _stage(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Stage:
    """A stage whose processes run `script`: argv[1] is the file for their lines, argv[2] their mutants."""
    child = folder / "on_device.py"
    child.write_text(f"import json, os, sys, time\ntold, numbers = sys.argv[5], sys.argv[6].split(',')\n{script}")
    (folder / "raw").mkdir()
    monkeypatch.setattr(on_device, "PATIENCE", {ALONE: 0.1})
    monkeypatch.setattr(on_device, "START", 0.4)
    monkeypatch.setattr(on_device, "LAST_WORDS", 0.2)
    return Stage(folder, folder, time.monotonic() + 60, 2)


TELL = "say = lambda text: open(told, 'a').write(text + '\\n')\n"


def test_a_process_that_hangs_or_dies_costs_its_own_mutant_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant 1 goes silent, 2 ends its process, 4 reports that it hangs and then stays."""
    stage = _stage(tmp_path, monkeypatch, TELL + (
        "for one in numbers:\n"
        "    say(one)\n"
        "    if one == '1': time.sleep(60)\n"
        "    if one == '2': os._exit(1)\n"
        "    say(json.dumps({'number': int(one), 'status': 'hang' if one == '4' else 'right'}))\n"
        "    if one == '4': time.sleep(60)\n"
    ))  # fmt: skip
    stage.jobs.append((ALONE, [0, 1, 2, 3, 4, 5]))
    begun = time.monotonic()
    stage.perform()
    fates = {number: one["status"] for (_, number), one in stage.answers.items()}
    assert fates == {0: "right", 1: "hang", 2: "died", 3: "right", 4: "hang", 5: "right"}, f"{fates}"
    assert time.monotonic() - begun < 30, "a process that sleeps for a minute was waited for"
    written = json.loads((tmp_path / "mutants.json").read_text())
    assert written == list(stage.answers.values()), "what was known was not written as it came"


def test_what_seemed_to_hang_beside_others_is_asked_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant 1 hangs; 0 hangs only beside another process."""
    stage = _stage(tmp_path, monkeypatch, TELL + (
        "import pathlib\n"
        "beside = len(list(pathlib.Path(told).parent.glob('*.told'))) < 2\n"
        "for one in numbers:\n"
        "    say(one)\n"
        "    hangs = one == '1' or (one == '0' and beside)\n"
        "    say(json.dumps({'number': int(one), 'status': 'hang' if hangs else 'right'}))\n"
        "    if hangs: os._exit(3)\n"
    ))  # fmt: skip
    stage.jobs.extend((ALONE, [one]) for one in (0, 1))
    stage.perform()
    assert {one["status"] for one in stage.answers.values()} == {"hang"}, f"{stage.answers}"
    stage.ask_alone([0, 1])
    fates = {number: one["status"] for (_, number), one in stage.answers.items()}
    assert fates == {0: "right", 1: "hang"}, f"{fates}"
    assert stage.processes == 2, "others run alone from now on"
    stage.deadline = time.monotonic()
    stage.ask_alone([1])
    assert not [number for _, number in stage.answers if number == 1], "a hang that nobody saw alone counts as one"


def test_what_a_tool_prints_comes_to_its_mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "sanitizer", lambda _: [])
    stage = _stage(tmp_path, monkeypatch, TELL + (
        f"print({LOG!r})\n"
        "for one in numbers:\n"
        "    say(one)\n"
        "    say(json.dumps({'number': int(one), 'status': 'right'}))\n"
    ))  # fmt: skip
    stage.jobs.append(("racecheck", [7, 8, 12]))
    stage.perform()
    blamed = {number for (_, number), one in stage.answers.items() if one["reports"]}
    assert blamed == {7, 12}, f"{stage.answers}"


def test_a_tool_that_is_missing_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never writes a word is not restarted for ever, and its mutants have not run."""
    stage = _stage(tmp_path, monkeypatch, "os._exit(0)\n")
    stage.jobs.append((ALONE, [0, 1]))
    stage.perform()
    assert not stage.answers, f"nobody spoke, and this is what they said: {stage.answers}"


def test_no_process_starts_once_the_device_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = _stage(tmp_path, monkeypatch, TELL + f"say(numbers[0])\nprint('Fault: {GONE}', flush=True)\nos._exit(1)\n")
    stage.ask((ALONE, [one]) for one in range(40))
    assert not stage.answers, f"a mutant has an answer of no device: {stage.answers}"
    assert stage.count <= stage.processes, f"{stage.count} processes started"


def test_a_call_goes_on_where_an_earlier_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = _stage(tmp_path, monkeypatch, TELL + (
        "for one in numbers:\n"
        "    say(one)\n"
        "    say(json.dumps({'number': int(one), 'status': 'right'}))\n"
    ))  # fmt: skip
    stage.answers = {(ALONE, 1): {"number": 1, "tool": ALONE, "status": "wrong"}}
    stage.ask([(ALONE, [0, 1, 2]), (ALONE, [1])])
    assert {number: one["status"] for (_, number), one in stage.answers.items()} == {0: "right", 1: "wrong", 2: "right"}
    assert stage.count == 1, "a process was given no mutant"


def test_texts_that_travel_are_assembled_to_the_same_code(subject: Subject, tmp_path: Path) -> None:
    if not assemblers():
        pytest.skip("unsupported: no ptxas")
    built = subject.built[0]
    drop = next(one for one in mutants(built.program) if one.kind == "drop")
    there, here = Carried(tmp_path / "texts", texts=True), Carried(tmp_path / "code")
    for one in (there, here):
        assert [one.row(subject, built, each) for each in (None, drop)] == ["", ""]
        one.write()
    (there.folder / "ptxas").symlink_to(find_ptxas())
    assert not assemble(there.folder, [0, 1])
    for number in ("0.cubin", "1.cubin"):
        code = [(one.folder / "code" / number).read_bytes() for one in (there, here)]
        assert code[0] == code[1], f"{number} is other code"
    name, begin, end, _ = there.changes["1"]
    there.changes["1"] = name, begin, end, "nonsense;"
    there.write()
    assert not assemble(there.folder, [1]), "what is assembled already is not assembled again"
    (there.folder / "code" / "1.cubin").unlink()
    assert list(assemble(there.folder, [0, 1])) == [1], "ptxas refuses what it should take, or takes nonsense"


def test_more_of_what_orders_is_taken_on_the_cases_that_have_most(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = subject.built[0]
    few = replace(built, case=built.spec.vary(built.case, sms=1))
    ordering = [one for one in mutants(built.program) if one.kind == "drop"][:4]
    other = next(one for one in mutants(built.program) if one.kind == "setp")
    monkeypatch.setattr(carried, "read", lambda: [Seen(ordering[0].id, "drop", "", "right")])
    every = [(subject, built, one) for one in (*ordering[:3], other)] + [(subject, few, ordering[3])]
    assert [one[2].id for one in more_of(every, 1)] == [one.id for one in ordering[1:3]]
    assert [one[2].id for one in more_of(every, 2)] == [one.id for one in ordering[1:4]]


def test_a_later_session_adds_what_the_record_lacks() -> None:
    held = [Seen("", "", "ptx a fmha:p", "right"), Seen("a/drop/1.0", "drop", "ptx a fmha:p", "wrong")]
    later = [replace(held[0], launches=20), replace(held[1], fate="right"), Seen("a/drop/2.0", "drop", "", "right")]
    assert with_more(held, [*later, Seen("", "", "ptx a fmha:q", "right")]) == [
        *held, later[2], Seen("", "", "ptx a fmha:q", "right")
    ]  # fmt: skip


def test_what_is_carried_is_what_the_machine_would_be_given(subject: Subject, tmp_path: Path) -> None:
    if not assemblers():
        pytest.skip("unsupported: no ptxas, which makes the machine code that travels")
    built = subject.built[0]
    drop = next(one for one in mutants(built.program) if one.kind == "drop")
    shape = next(one for one in mutants(built.program) if one.launch is not None and one.launch.field == "block")
    carried = Carried(tmp_path)
    assert [carried.row(subject, built, one) for one in (None, drop, shape)] == ["", "", ""]
    carried.write()
    held = json.loads((tmp_path / "rows.json").read_text())
    plain, dropped, shaped = held["rows"]
    assert plain["call"] == dropped["call"] != shaped["call"], "a mutant of a launch has launches of its own"
    assert [one["orders"] for one in held["rows"]] == [False, True, False]
    call, other = held["calls"][plain["call"]], held["calls"][shaped["call"]]
    assert call["launches"][0]["block"] != other["launches"][0]["block"], "the changed launch was not carried"
    assert call["outputs"] == ["o"], f"{call['outputs']}"
    names = {name: (size, file) for name, size, file in call["buffers"]}
    size, file = names["q"]
    assert size == 17 * 64 * 2, f"q is {size} bytes"
    assert (tmp_path / "bytes" / file).stat().st_size == size
    assert call["launches"][0]["places"], "no address is left to be put in"
    code = [(tmp_path / "code" / f"{number}.cubin").read_bytes() for number in (0, 1)]
    assert b"_m0001" in code[1], "entries are named by their mutants"
    assert code[0] != code[1].replace(b"_m0001", b"_m0000"), f"{drop.before} was not taken out"
    assert (tmp_path / "on_device.py").read_text() == Path(on_device.__file__).read_text()


def test_a_mutant_that_no_assembler_takes_is_left_out_with_a_sentence(subject: Subject, tmp_path: Path) -> None:
    if not assemblers():
        pytest.skip("unsupported: no ptxas")
    built = subject.built[0]
    program = built.program
    assert isinstance(program, Program)
    broken = replace(built, program=replace(program, ptx=program.ptx.replace("ret;", "rett;")))
    carried = Carried(tmp_path)
    assert carried.row(subject, broken, None), "what does not assemble was carried"
    assert not carried.rows


def test_mutants_of_programs_that_are_built_no_more_stay_here(subject: Subject, tmp_path: Path) -> None:
    one = next(mutants(subject.built[0].program))
    record = Record(tmp_path / "mutants.jsonl")
    record.append(Outcome(one.id, subject.name, one.kind, one.line, one.before, one.after, "rule:race", CASE, "eager"))
    record.append(Outcome("0123456789ab/drop/1.0", f"ptx sm_90a {CASE} 0123456789ab", "drop", 1, "", ""))
    record.append(Outcome("x/drop/1.0", f"ptx sm_100a {CASE} 0123456789ab", "drop", 1, "", ""))
    assert [mutant.id for _, _, mutant in of_record(record)] == [one.id]


ROWS = [
    {"number": 0, "id": "", "kind": "", "base": "ptx a fmha:p"},
    {"number": 1, "id": "a/drop/1.0", "kind": "drop", "base": "ptx a fmha:p"},
    {"number": 2, "id": "a/store/2.0", "kind": "store", "base": "ptx a fmha:p"},
    {"number": 3, "id": "a/drop/3.0", "kind": "drop", "base": "ptx a fmha:p"},
]


def _answer(number: int, tool: str, status: str, **more: object) -> dict[str, object]:
    return {"number": number, "tool": tool, "status": status, "reports": {}, **more}


def test_the_table_says_what_each_of_them_noticed() -> None:
    answers = [
        _answer(0, ALONE, "right", wrong=0, of=20), _answer(0, "memcheck", "right"),
        _answer(1, ALONE, "right", wrong=0, of=20), _answer(1, "racecheck", "right", reports={"a race": 2}),
        _answer(2, ALONE, "wrong", wrong=3, of=20), _answer(2, "memcheck", "right"), _answer(2, "synccheck", "died"),
    ]  # fmt: skip
    seen = seen_of(ROWS, answers)
    assert [one.id for one in seen] == ["", "a/drop/1.0", "a/store/2.0"], "what did not run is not there"
    assert seen[2].tools == {"memcheck": {}}, "a tool that died has said nothing"
    said = told(seen, {"a/drop/1.0"}, {"a/store/2.0"}, ())
    text = "\n".join(said)
    assert "- `a/store/2.0` is wrong on the H200 and survives in the VM" in said, text
    assert any(line.startswith("| drop | 1 | 1 | 0 | 0 | 0 | 1 of 1 |  | 1 of 1 |") for line in said), text
    assert "| racecheck | a race | 1 |" in said, text
    assert not told([], (), (), ()), "no record, no section"
    assert "1 text, 0 of them among" in " ".join(said), "older kernels are not told from today's"
    assert "1 text, 1 of them among" in " ".join(told(seen, (), (), {"a"})), "today's kernels are called older ones"
    alarmed = [replace(seen[0], tools={"racecheck": {"a race": 1}}), *seen[1:]]
    said = told(alarmed, {"a/drop/1.0"}, {"a/store/2.0"}, ())
    assert "- racecheck reports the unchanged `ptx a fmha:p`" in said, "a false alarm is hidden"
    assert "| racecheck | a race | 1 |" not in said, "what a tool says of the program too is no kill"


def test_tools_have_their_say_of_what_hangs_once_waits_give_up() -> None:
    """Except for a tool under which the unchanged program does not end before its waits give up, or that reports it,
    too."""
    rows = [*ROWS, {"number": 4, "id": "", "kind": "", "base": "ptx b fmha:slow"}]
    rows += [{"number": 5, "id": "b/drop/1.0", "kind": "drop", "base": "ptx b fmha:slow"}]
    hangs = [Seen(str(row["id"]), str(row["kind"]), str(row["base"]), "hang" if row["id"] else "right") for row in rows]
    race, gone = {"a race": 1}, {"an exit": 1}
    answers = [
        _answer(0, "racecheck", "right"), _answer(0, "synccheck", "right", reports=gone),
        _answer(1, "racecheck", "wrong", reports=race), _answer(1, "synccheck", "wrong", reports=gone),
        _answer(2, "racecheck", "wrong"), _answer(2, "synccheck", "wrong"),
        _answer(4, "racecheck", "wrong"), _answer(5, "racecheck", "wrong", reports=race),
    ]  # fmt: skip
    seen = with_tools(hangs, rows, answers, patient=True)
    assert [one.patient.get("racecheck") for one in seen] == [{}, race, {}, None, None, None], "the slow one has no say"
    assert not any(one.tools for one in seen), "what gives up is not the mutant as it is"
    table = told(seen, (), (), ())
    assert "| racecheck | 2 | 1 | a race (1) |" in table, "\n".join(table)
    assert not any(line.startswith("| synccheck | 2 |") for line in table), "it reports the program as it is, too"
    plain = with_tools(hangs, rows, answers, patient=False)
    assert plain[1].tools == {"racecheck": race, "synccheck": gone}, "as it is, each answer counts"
    assert plain[1].fate == "hang", "a tool changes nothing of what became of it alone"


def test_mutants_that_hang_are_carried_with_waits_that_give_up(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not assemblers():
        pytest.skip("unsupported: no ptxas")
    first, second, *_ = mutants(subject.built[0].program)
    base = f"ptx {program_id(subject.built[0].program.ptx)} {CASE}"
    recorded = [Seen(first.id, "", base, "hang"), Seen(second.id, "", base, "right")]
    recorded += [Seen("x/drop/1.0", "", f"ptx 0123456789ab {CASE}", "hang"), Seen("", "", base, "right")]
    monkeypatch.setattr(carried, "read", lambda: recorded)
    assert [mutant.id for _, _, mutant in of_silicon(hangs)] == [first.id], "what does not hang, or is built no more"
    assert [mutant.id for _, _, mutant in of_silicon(is_untold)] == [second.id], "no tool ran on it"
    untold = Carried(tmp_path / "untold", texts=True)
    assert [untold.row(subject, subject.built[0], one) for one in (None, second)] == ["", ""]
    untold.write_alone(recorded)
    alone = json.loads((untold.folder / "alone.json").read_text("utf-8"))
    told_alone = [(one["number"], one["tool"], one["status"]) for one in alone]
    assert told_alone == [(1, ALONE, "right")], "the record says what becomes of it, not of its program"
    plain, patient = Carried(tmp_path / "plain"), Carried(tmp_path / "patient", hanging=True)
    for one in (plain, patient):
        assert not one.row(subject, subject.built[0], None)
    codes = [(one.folder / "code" / "0.cubin").read_bytes() for one in (plain, patient)]
    assert [b"gave_up" in code for code in codes] == [False, True], "only what hangs has waits that give up"
    assert [one.rows[0]["runs"] for one in (plain, patient)] == [on_device.RUNS, 1]


def test_the_record_has_no_mutant_that_is_seen_on_silicon_and_lives_in_the_vm() -> None:
    """The machine against an H200: every mutant that is wrong, faults or hangs there is killed here."""
    lived = {one.id: one for one in Record(RECORD).results if not one.killed}
    seen = silicon.read()
    missed = [f"{one.id} ({one.fate})" for one in seen if one.fate != "right" and (one.id in lived or one.vm is False)]
    assert not missed, f"an H200 shows what the machine lets live: {missed}"


def test_what_the_machine_did_is_kept_when_a_program_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    rows = [
        Seen("a/drop/1.0", "drop", "ptx a fmha:p", "wrong"),
        Seen("a/store/2.0", "store", "ptx a fmha:p", "right"),
        Seen("", "", "ptx a fmha:p", "right"),
    ]
    file.write_text(json.dumps([asdict(one) for one in rows]))
    silicon.remember({"a/drop/1.0": True, "b/drop/1.0": False}, file)
    silicon.remember({"a/store/2.0": False}, file)
    kept = silicon.read(file)
    assert [one.vm for one in kept] == [True, False, None], "an answer was lost, or is another mutant's"
    assert "1 of 1 that are wrong" in "\n".join(told(kept, (), (), ())), "the table does not ask what was kept"


def test_programs_as_they_are_were_right_on_silicon() -> None:
    plain = [one for one in silicon.read() if not one.id]
    assert plain, "the record has no program as it is to compare mutants with"
    wrong = [one.base for one in plain if one.fate != "right"]
    assert not wrong, f"not right as they are: {wrong}"


@pytest.mark.parametrize("backend", ["ptx", "cutedsl"])
def test_few_ctas_build_the_same_text_and_take_several_tiles(backend: str) -> None:
    case_id = "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,stage=l1"
    (few,) = subjects(Selection(cases=(case_id,), backends=(backend,), targets=("sm_90a",), executors=("vm",))) or (
        None,
    )
    if few is None:
        pytest.skip(f"unsupported: {backend} builds nothing here")
    assert set(few.few) == set(COUNTS), f"{few.name}: no size of few_ctas.SIZES builds its text"
    for count, one in few.few.items():
        program = one.built[0].program
        assert program.ptx == few.built[0].program.ptx
        if isinstance(program, Program):
            assert program.launches[-1].grid == (count, 1, 1), f"{program.launches[-1].grid} CTAs, not {count}"
    spec = load_specs(None)["nvfp4_moe"]
    build = partial(program_of, backend, "sm_90a")
    assert not on_few_ctas(build, spec, spec.vary(few.built[0].case, stage="combine"), "")


def test_a_kernel_that_does_not_read_how_many_sms_there_are_has_nothing_on_few_ctas(subject: Subject) -> None:
    """Raw-PTX attention has a CTA a tile: for one SM it is the same program."""
    built = subject.built[0]
    few = built.spec.vary(built.case, sms=1)
    assert few.id == f"{built.case.id},sms=1", f"the axis is in no id: {few.id}"
    assert program_of("ptx", "sm_90a", few) == built.program, "attention of raw PTX reads the axis by now: test it"
    assert not subject.few, f"it would run as it is once more: {list(subject.few)}"
