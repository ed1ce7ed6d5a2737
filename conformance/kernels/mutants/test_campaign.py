"""Campaigns on one program: runs, arguments, searches, what smoke kills, unmutated rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.fakes import backends
from conformance.kernels.mutants.__main__ import main
from conformance.kernels.mutants.campaign import (
    SCHEDULES,
    Here,
    Outcome,
    Plan,
    Record,
    Subject,
    UntilNew,
    _turns,  # pyright: ignore[reportPrivateUsage]
    built_no_more,
    collected,
    examine,
    in_clusters,
    planned,
    run,
    subjects,
)
from conformance.kernels.mutants.command import drawn_of, told_of
from conformance.kernels.mutants.journal import Ran
from conformance.kernels.mutants.mutant import SYNCHRONISATION, Edit, LaunchEdit, Mutant, instructions, mutants
from conformance.kernels.mutants.search import Effort, Hunt, as_row, hunt
from conformance.kernels.mutants.smoke import SMOKE, OnSmoke, check_of, smoked, unanswered
from conformance.kernels.mutants.table import Reason, reason_of, reasons, table
from conformance.kernels.mutants.unmutated import Watch, told, watch, watched
from megamoe.contract import HostProgram, Program, RunOptions, TensorMapArg
from megamoe.records.shards import Nth
from megamoe.spec.marked_yaml import parse_marked_yaml
from megamoe.spec.selection import Selection

# One program that is quick to run: the raw-PTX attention for Hopper at hd 64.
SELECTION = Selection(
    cases=(
        "fmha:hd=64,t=17,s_k=96,lse=false",
        "fmha:hd=64,t=4,s_k=130,batch=3",
        "fmha:hd=64,t=16,s_k=400,causal=true",
        "fmha:hd=64,t=128,s_k=128,inputs=lone_keys",
    ),
    backends=("ptx",),
    targets=("sm_90a",),
    executors=("vm",),
)


@pytest.fixture(scope="module")
def program() -> Subject:
    (found,) = subjects(SELECTION)
    return found


def _without_a_wait(program: Program | HostProgram) -> Mutant:
    return next(one for one in mutants(program) if one.kind == "drop" and "try_wait" in one.before)


def _an_earlier_arrival(program: Program | HostProgram) -> Mutant:
    """A survivor."""
    return next(
        one for one in mutants(program) if one.kind == "move" and one.before.startswith("mbarrier.arrive.expect_tx")
    )


def test_a_sample_of_the_tool(program: Subject, tmp_path: Path) -> None:
    """Each survivor has a reason; and shards run each mutant once, whatever was run before."""
    known = reasons()
    record = Record(tmp_path / "mutants.jsonl")
    plan = Plan(SELECTION, synchronisation=20, others=12, seed=11)
    todo = planned(plan, [program])
    parts = [planned(replace(plan, shard=Nth(part, 3)), [program]) for part in (1, 2, 3)]
    assert sorted(one.id for part in parts for _, one in part) == sorted(one.id for _, one in todo)
    for part in parts:
        list(run(part, record, Here(("eager", "lazy"))))
    assert not list(run(todo, Record(tmp_path / "mutants.jsonl"), Here(("eager",)))), (
        "a record that is whole runs nothing"
    )
    lived = [one for one in record.results if not one.killed and reason_of(one, known) is None]
    assert not lived, f"neither killed nor explained: {[f'{one.id} {one.before} -> {one.after}' for one in lived]}"
    ordering = [one for one in record.results if one.kind in SYNCHRONISATION]
    assert sum(one.killed for one in ordering) > len(ordering) / 2, "the machine notices hardly anything"


def test_a_search_finds_the_case_that_a_matrix_lacks(program: Subject) -> None:
    """A tensor map that lacks the last head: a case with one sequence of one head cannot show it."""
    alone = replace(program, built=[one for one in program.built if one.case["batch"] == 1][:1])
    whole = alone.built[0].program
    assert isinstance(whole, Program)
    (launch, *_) = whole.launches
    at = next(at for at, arg in enumerate(launch.args) if isinstance(arg, TensorMapArg) and len(arg.dims) == 3)
    short = Mutant("short", "tensor-map", 0, "heads", "heads - 1", launch=LaunchEdit(0, at, "dims", 2, -1))
    effort = Effort(examples=15, seconds=1.0, schedules=("eager",))
    assert not examine(alone, short, ("eager",), ask_assemblers=False).killed, "the matrix has a case for it already"
    found = hunt(alone, short, effort)
    assert found.killer is not None, f"nothing of {list(found.tried)} kills {short.id}"
    case = found.spec.parse_case(found.killer.case)
    assert case.int("batch") * case.int("heads") > 1, f"{case.id} has one sequence of one head"
    row = as_row(case)
    parsed: Any = parse_marked_yaml(row, Path("specs/fmha.yaml")).value
    inputs, seed = parsed[0].pop("inputs", None), parsed[0].pop("seed", 0)
    assert found.spec.case(inputs=inputs, seed=seed, **parsed[0]) == case, f"{row} is another case than {case.id}"
    again = hunt(alone, short, replace(effort, examples=1), first=[case])
    assert list(again.tried) == [case.id], "a case that is known to kill is tried first, and is enough"


def test_a_search_leaves_other_programs_alone(program: Subject) -> None:
    """A case whose program has another text says nothing about the mutant."""
    one = Hunt(program, next(mutants(program.built[0].program)), Effort())
    assert not one.kills(program.built[0].spec.parse_case("fmha:hd=128,t=1,s_k=8"))
    assert not one.tried, "it ran on a program that the mutant was not made from"
    assert len(one.others) == 1, "a draw that says nothing about the mutant is not counted"
    elsewhere = replace(one, subject=replace(program, backend=f"{backends.__name__}:DECLINES", target="sm_100a"))
    assert not elsewhere.kills(program.built[0].case)
    told = drawn_of(elsewhere)
    assert told.startswith("of 2 drawn cases 0 built its text, 1 another, and the backend refused 1; the search"), told


def test_a_search_says_why_it_ended(program: Subject) -> None:
    """No case is of any use to a backend that refuses all."""
    refuses = replace(program, backend=f"{backends.__name__}:DECLINES", target="sm_100a")
    mutant = next(mutants(program.built[0].program))
    for effort, why in (
        (Effort(1, 0.0), "the 0 s were up"),
        (Effort(4, 60.0), "4 draws were made"),
    ):
        one = hunt(refuses, mutant, effort)
        assert drawn_of(one).endswith(f"; the search ended because {why}"), drawn_of(one)
    few = Hunt(refuses, mutant, Effort(40))
    case = program.built[0].case
    assert not any(few.kills(case) for _ in range(3))
    assert few.ended == "the ranges of the spec have no further case after 3 draws"
    assert replace(few, effort=Effort(3)).ended == "3 draws were made, 2 of them of a case drawn before"


def test_a_mutant_of_no_consequence_survives_as_the_same_code(program: Subject) -> None:
    text = program.built[0].program.ptx
    at = text.index("    ret;")
    one = Mutant("none", "drop", 0, "", "", (Edit(at, at + 4, "\t    "),))
    outcome = examine(program, one)
    assert not outcome.killed, outcome.sentence
    assert outcome.same_code is not False, "white space changes no machine code"


def test_what_is_excused_takes_the_further_turns_that_are_cheap(program: Subject) -> None:
    earlier = _an_earlier_arrival(program.built[0].program)
    whole = examine(program, earlier, ask_assemblers=False)
    assert (whole.killed, whole.reached) == (False, True), f"{earlier.before} -> {earlier.after}: {whole}"
    assert (whole.excused, whole.all_turns) == (False, True), f"nothing excuses it: {whole}"
    for argued in (lambda _: True, lambda lived: lived.reached is True):
        few = examine(program, earlier, ask_assemblers=False, argued=argued, excused_seconds=0.0)
        assert 0 < few.runs < whole.runs, f"{few.runs} of {whole.runs} runs, and none of the further ones was cheap"
        assert (few.excused, few.all_turns) == (True, False), f"it had {few.runs} of {whole.runs} runs: {few}"
        every = examine(program, earlier, ask_assemblers=False, argued=argued, excused_seconds=math.inf)
        assert (every.runs, every.excused, every.all_turns) == (whole.runs, True, True), f"every turn is cheap: {every}"


def test_a_survivor_runs_on_every_case_that_executes_its_line(program: Subject) -> None:
    earlier = _an_earlier_arrival(program.built[0].program)
    turns = [turn for some in _turns(program, earlier, ("eager",), few_ctas=True) for turn in some]
    judged = {turn.built.case.id for turn in turns if turn.name == "eager" and not turn.collects}
    there = {built.case.id for built in program.executing(earlier.line, "eager")}
    assert judged == there, f"it does not run on {there - judged}"
    assert len(there) > 2, "with two cases the first and the last are all"


def test_an_argument_that_a_further_turn_refutes_is_told(program: Subject, tmp_path: Path) -> None:
    """A planted fault: an argument for the mbarrier of the ring's last stage, which the first case does not reach."""
    inits = [one for one in mutants(program.built[0].program) if one.before.startswith("mbarrier.init")]
    last = [one for one in inits if one.kind == "drop"][-1]
    wrong = Reason("equivalent", "nobody comes so far")

    def argued(lived: Outcome) -> bool:
        return wrong.explains(lived)

    some = examine(program, last, ask_assemblers=False, argued=argued, excused_seconds=0.0)
    assert (some.killed, some.excused) == (False, True), f"a first turn kills it, so this test shows nothing: {some}"
    record = Record(tmp_path / "mutants.jsonl")
    (outcome,) = run([(program, last)], record, Here(("eager",), argued=argued))
    assert (outcome.check, outcome.excused) == ("rule:mbarrier-misuse", True), f"{last.before} was excused: {outcome}"
    assert outcome.all_turns is None, "it is told that a mutant that died had all its turns"
    assert told_of(outcome, [wrong]).endswith(f"; this excused it, and is wrong here: {wrong.why}")
    page = table(record, [wrong], ours=False)
    assert "## Killed although excused" in page, page
    assert f"`{last.id}` `{last.before}` → `(nothing)`: rule:mbarrier-misuse on {outcome.case}" in page, page
    assert "1 mutant, 0 equivalent; 1 of the other 1 killed" in page, page


def test_the_table_tells_how_many_of_the_excused_had_every_turn(tmp_path: Path) -> None:
    record, known = Record(tmp_path / "mutants.jsonl"), [Reason("equivalent", "it is said")]
    old = Outcome("a/drop/1.0", "ptx sm_90a fmha:hd=64,t=1,s_k=1 a", "drop", 1, "bar.sync 0;", "")
    record.append(old)
    assert "Turns of" not in table(record, known, ours=False), "a record that does not tell is told of"
    for name, turns, kind in (("b", True, "drop"), ("c", False, "drop"), ("d", True, "rounding")):
        record.append(replace(old, id=f"{name}/{kind}/1.0", kind=kind, excused=True, all_turns=turns))
    page = table(record, known, ours=False)
    assert "equivalent ones, all: 2 had all, 1 only those" in page, page
    assert "equivalent ones, synchronisation: 1 had all, 1 only those" in page, page
    assert "; of 1 the record does not tell." in page, page
    assert "although excused" not in page, "nothing died"


def test_an_argument_excuses_nothing_that_a_run_kills(program: Subject) -> None:
    """Globs of an argument once fitted mutants that the first run would have killed, and so they never ran."""
    every = mutants(program.built[0].program)
    dropped = next(one for one in every if one.kind == "drop" and one.before.startswith("mbarrier.init"))
    told = examine(program, dropped, ask_assemblers=False, argued=lambda _: True)
    assert told.killed, f"{told.before} was excused: {told}"


def test_a_cta_comes_late_in_programs_with_clusters_only() -> None:
    alone, pair = (Program("sm_100a", f"mov.u32 %r, %{name};", ()) for name in ("ctaid.x", "cluster_ctarank"))
    assert (in_clusters(alone), in_clusters(pair)) == (False, True)
    assert [one for one in SCHEDULES if one.startswith("late")] == ["late_warp:0", "late_cta:0"]


def test_a_mutant_runs_on_the_cases_that_execute_its_line(program: Subject) -> None:
    """On other cases its run equals the unchanged program's."""
    lines = [program.collection(one, "eager").lines for one in program.built]
    line = next(iter(lines[-1] - lines[0]))
    found = [one.case.id for one in program.executing(line, "eager")]
    assert found == [one.case.id for one, of in zip(program.built, lines, strict=True) if line in of]
    assert 0 < len(found) < len(program.built), f"line {line}: {found}"
    assert program.executing(0, "eager") == program.built, "a changed launch concerns every case"


def test_a_run_whose_findings_are_collected_ends_with_the_first_new_one(program: Subject) -> None:
    built = program.built[0]
    fence = next(one for one in mutants(built.program) if one.kind == "drop" and one.before.startswith("wgmma.fence"))
    in_order, other = RunOptions(schedule="eager"), fence.of(built.program)
    every = collected(built, other, in_order).found
    often = sum(one.times for one in every)
    assert often > 1, f"a fence less was noticed {often} times"
    (first,) = collected(built, other, in_order, UntilNew()).found
    assert first.times == 1, f"{first.rule} was noticed, and the run went on"
    known = collected(built, other, in_order, UntilNew(own=frozenset(one.site for one in every))).found
    assert sum(one.times for one in known) == often, "what the program itself has ends its runs"


def test_a_program_that_fails_by_itself_is_refused(program: Subject) -> None:
    whole = program.built[0]
    wait = _without_a_wait(whole.program)
    broken = replace(whole, program=wait.of(whole.program))
    with pytest.raises(ValueError, match="itself does not pass"):
        Subject("ptx", "sm_90a", "fmha", [broken]).baseline(broken, "eager")


def test_what_no_case_executes_is_not_argued_by_what_was_seen() -> None:
    seen = Reason("equivalent", "the machine would have told", reached=True)
    lived = Outcome("a/drop/1.0", "p", "drop", 1, "bar.sync 0;", "", reached=True)
    assert seen.explains(lived)
    assert not seen.explains(replace(lived, reached=False)), "nothing was executed that could tell"
    assert not seen.explains(replace(lived, reached=None)), "an older record, without findings"


def test_one_of_several_globs_fits() -> None:
    several = Reason("equivalent", "either is", kind="drop", before=("bar.*", "fence.*"))
    lived = Outcome("a/drop/1.0", "p", "drop", 1, "fence.proxy.async;", "")
    assert several.explains(lived), "the second glob of several fits"
    assert not several.explains(replace(lived, before="cp.async;")), "no glob of several fits"
    assert not several.explains(replace(lived, kind="move")), "one key fits, another one does not"


def test_more_work_than_the_program_s_own_kills() -> None:
    """The first key is rounded up to below 0: tiles that no row sees, and right results."""
    windowed = "fmha:hd=64,t=2,s_k=512,causal=true,window=100"
    (subject,) = subjects(replace(SELECTION, cases=(windowed,)))
    (wider,) = (one for one in mutants(subject.built[0].program) if one.after.startswith("or.b32 %first_key"))
    found = examine(subject, wider, ("eager",), ask_assemblers=False)
    assert found.check == "counter:mma_flops", f"{wider.before} -> {wider.after}: {found.check}, {found.sentence}"


@pytest.mark.parametrize(
    ("instead", "schedules"),
    [("", ("eager",)), ("nanosleep.u32 20;", ("eager", *(f"random:{seed}" for seed in range(8))))],
    ids=["nobody reads its result", "a sleep instead"],
)
def test_a_wait_without_its_loop_dies(program: Subject, instead: str, schedules: tuple[str, ...]) -> None:
    """It is not in a synchronisation class. If nobody reads the result of mbarrier.try_wait, it orders nothing. If it
    is read, that returns in order when the phase is over, and gives up under a random order."""
    code = instructions(program.built[0].program.ptx)
    wait = next(at for at, one in enumerate(code) if one.opcode.startswith("mbarrier.try_wait"))
    back = code[wait + 1]
    assert back.opcode.startswith("bra"), f"behind the wait stands {back.spelled()}"
    after = f"{back.guard}{instead}" if instead else ""
    once = Mutant("once", "guard", back.line, back.spelled(), after, (Edit(back.begin, back.end, after),))
    found = examine(program, once, schedules, ask_assemblers=False)
    assert found.schedule.partition(":")[0] == schedules[-1].partition(":")[0], (
        f"{found.check or 'nothing'} under {found.schedule}: {found.sentence}"
    )


def test_a_program_that_is_built_no_more_is_forgotten(program: Subject, tmp_path: Path) -> None:
    record = Record(tmp_path / "mutants.jsonl")
    record.append(Ran("--sync all", "abc", "2026-11-22 04:47 UTC", 2))
    first = program.built[0].case.id
    gone = f"ptx sm_90a {first} 0123456789ab"
    for name, text in (("a", program.name), ("b", gone)):
        record.append(Outcome(f"{name}/drop/1.0", text, "drop", 1, "bar.sync 0;", ""))
    assert built_no_more(record.results) == [gone], "the backend builds another text for this case"
    record.forget(gone)
    again = Record(record.path)
    assert (set(again.by_id), len(again.calls)) == ({"a/drop/1.0"}, 1), "what was run of the other program stays"


def test_smoke_is_asked_about_what_another_row_killed(program: Subject, tmp_path: Path) -> None:
    """A row of smoke kills a dropped wait. No row kills an unchanged program."""
    wait = _without_a_wait(program.built[0].program)
    none = next(one for one in mutants(program.built[0].program) if one.kind == "rounding")
    record = Record(tmp_path / "mutants.jsonl")
    killed = Outcome(wait.id, program.name, "drop", 1, "", "", "rule:race", "fmha:hd=64,t=4,s_k=300", "lazy")
    elsewhere = replace(killed, id="0123456789ab/drop/1.0")
    for one in (killed, elsewhere, replace(killed, id=none.id, check="")):
        record.append(one)
        assert check_of(one) is None, "lazy is no schedule of smoke, so nobody has asked"
    assert check_of(replace(killed, case="fmha:hd=64,t=1,s_k=1", schedule="eager")) == "rule:race"
    asked = {one.id for one in unanswered(record.results)}
    todo = [pair for pair in planned(Plan(SMOKE, None, None), [program]) if pair[1].id in asked]
    list(smoked(record, todo, OnSmoke()))
    said = {one.id: one.smoke for one in Record(record.path).results}
    assert said[wait.id], "a row of smoke runs without a wait, and nothing is said"
    assert said[none.id] == "", f"smoke is said to kill what it cannot: {said}"
    assert said[elsewhere.id] is None, "its program was not there, and smoke is said to have run on it"


def test_what_is_watched_has_no_error_and_a_planted_one_is_told(program: Subject, tmp_path: Path) -> None:
    whole = program.built[0]
    clean = watched("ptx", "sm_90a", whole, range(2))
    assert (clean.rows, clean.errors) == (2, ()), f"a program as it is: {clean}"
    wait = _without_a_wait(whole.program)
    broken = watched("ptx", "sm_90a", replace(whole, program=wait.of(whole.program)), range(2))
    assert broken.errors, f"without {wait.before} nothing is told"
    record = Watch(tmp_path / "unmutated.jsonl")
    for one in (clean, replace(broken, case="fmha:hd=64,t=1,s_k=1")):
        record.append(one)
    with record.path.open("a") as out:
        out.write('{"backend": "pt')
    again = Watch(record.path)
    assert (again.rows, again.by_id) == (4, record.by_id), "a torn line is cut off, and the others stay"
    said = "\n".join(told(again))
    assert "4 rows: 2 cases, each on a backend and a target, under random orders; 1 with an error." in said
    assert broken.errors[0] in said, "the table hides what was found"


def test_rows_of_a_program_that_is_another_by_now_are_run_again(program: Subject, tmp_path: Path) -> None:
    clean = watched("ptx", "sm_90a", program.built[0], range(4, 5))
    record = Watch(tmp_path / "unmutated.jsonl")
    record.append(replace(clean, text="0123456789ab", errors=("of the program that was",)))
    (again,) = watch(record, clean.rows)
    assert replace(again, seconds=clean.seconds) == clean, f"{again}"
    assert not list(watch(record, clean.rows)), "rows of the program as it is are run again"


def test_the_rows_of_programs_as_they_are_have_no_error() -> None:
    wrong = [f"{one.case} on {one.backend} {one.target}: {one.errors[0]}" for one in Watch().wrong]
    assert not wrong, f"the machine blames programs as they are: {wrong}"


def test_one_mutant_that_lives_ends_with_status_1(program: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    first = program.built[0]
    selected = ["--case", first.case.id, "--backend", "ptx", "--target", "sm_90a"]
    wait = _without_a_wait(first.program)
    assert main(["--id", wait.id, *selected, "--schedule", "eager"]) == 0
    assert f": ptx sm_90a {first.case.id}, {wait.id} `" in (told := capsys.readouterr().out), told
    with pytest.MonkeyPatch.context() as patch:
        lived = Outcome(wait.id, program.name, "drop", 1, wait.before, "")
        patch.setattr("conformance.kernels.mutants.command.examine", lambda *_: lived)
        patch.setattr("conformance.kernels.mutants.command.reasons", list)
        for asked in (["--id", wait.id], ["--text", "try_wait"]):
            assert main([*asked, *selected]) == 1, f"{asked}: a mutant without a reason lives"
    assert "SURVIVED, a hole without a reason: ptx sm_90a fmha" in capsys.readouterr().out
