"""The mutation tool: its transformations, its draws, its record, its table, and a sample run."""

from __future__ import annotations

import lzma
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from conformance import ROOT
from conformance.fakes import backends
from conformance.kernels.mutants.__main__ import main
from conformance.kernels.mutants.campaign import (
    FEW_CTAS,
    SCHEDULES,
    Outcome,
    Plan,
    Record,
    Subject,
    UntilNew,
    built_no_more,
    collected,
    drawn,
    examine,
    in_clusters,
    planned,
    run,
    subjects,
)
from conformance.kernels.mutants.command import blamed, drawn_of, told_of
from conformance.kernels.mutants.journal import Ran
from conformance.kernels.mutants.mutant import (
    ID,
    KINDS,
    MEANINGS,
    SYNCHRONISATION,
    Edit,
    LaunchEdit,
    Mutant,
    instructions,
    mutants,
)
from conformance.kernels.mutants.options import RUNS as CAMPAIGN
from conformance.kernels.mutants.search import Effort, Hunt, as_row, hunt
from conformance.kernels.mutants.smoke import check_of, smoked
from conformance.kernels.mutants.table import RECORD, TABLE, Reason, reason_of, reasons, survivors, table
from conformance.kernels.mutants.unmutated import Watch, Watched, told, watch, watched
from megamoe.contract import BufferArg, Launch, Program, RunOptions, ScalarArg, TensorMapArg
from megamoe.records.files import RUNS
from megamoe.records.lines import RecordError
from megamoe.records.shards import Nth
from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import parse_marked_yaml
from megamoe.spec.selection import Selection, owed_rows

PTX = """\
.version 8.6
.visible .entry k(.param .u64 a)
{
    .reg .pred %p, %done;  // bar.sync 9;
    mbarrier.init.shared::cta.b64 [%smem + 8], 1;
    fence.proxy.async.shared::cta;
    bar.sync 1, 128;
$again:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem + 8], %phase;
    @!%done bra $again;
    ld.shared.u32 %x, [%smem];
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem + 8], 64;
    cp.async.bulk.wait_group.read 0;
    fence.acq_rel.gpu;
    cp.async.bulk.wait_group 1;
    add.s32 %y, %x, 7;
    setp.lt.u32 %p, %x, %y;
    @%p st.global.f32 [%a + 4], %f;
    fma.rn.ftz.f32 %f, %g, %h, 0f3F800000;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0,
        %d1}, %da, %db, %p, 1, 1, 0, 0;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r}, [%taddr + 8];
    tcgen05.mma.cta_group::1.kind::f16 [%taddr], %da, %db, %idesc, %p;
    ret;
}
"""
PROGRAM = Program(
    "sm_90a",
    PTX,
    (
        Launch(
            "k",
            (4, 1, 1),
            (128, 1, 1),
            (BufferArg("q"), ScalarArg("u32", 7), TensorMapArg("q", "bf16", (64, 9), (128,), (64, 8), "128B")),
        ),
    ),
)
EXPECTED = {
    "drop": {"", "setp.eq.u32 %done, 0, 0;"},
    "weaken": {
        "bar.arrive 1, 128;",
        "fence.proxy.async.global;",
        "fence.acq_rel.cluster;",
        "cp.async.bulk.wait_group.read 1;",
        "cp.async.bulk.wait_group 2;",
    },
    "widen": {
        "fence.proxy.async;",
        "cp.async.bulk.wait_group 0;",
        "fence.acq_rel.sys;",
    },
    "parity": {
        "xor.b32 %phase, %phase, 0x1; mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem + 8], %phase; "
        "xor.b32 %phase, %phase, 0x1;"
    },
    "count": {"mbarrier.init.shared::cta.b64 [%smem + 8], 2;", "bar.sync 2, 128;", "bar.sync 1, 96;"},
    "bytes": {"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem + 8], 80;"},
    "instruction-descriptor": {
        "xor.b32 %idesc, %idesc, 0x2000; tcgen05.mma.cta_group::1.kind::f16 [%taddr], %da, %db, %idesc, %p; "
        "xor.b32 %idesc, %idesc, 0x2000;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1}, %da, %db, %p, 1, 1, 1, 0;",
    },
    "tensor-memory": {"tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r}, [%taddr + 9];"},
    "setp": {"setp.le.u32 %p, %x, %y;"},
    "immediate": {"add.s32 %y, %x, 8;", "fma.rn.ftz.f32 %f, %g, %h, 0f3F820000;"},
    "address": {"@%p st.global.f32 [%a + 8], %f;"},
    "operand": {"setp.lt.u32 %p, %y, %x;", "fma.rn.ftz.f32 %f, %g, %g, 0f3F800000;"},
    "opcode": {"sub.s32 %y, %x, 7;"},
    "predicate": {"@%done bra $again;", "@!%p st.global.f32 [%a + 4], %f;"},
    "guard": {"st.global.f32 [%a + 4], %f;"},
    "rounding": {"fma.rz.ftz.f32 %f, %g, %h, 0f3F800000;", "fma.rn.f32 %f, %g, %h, 0f3F800000;"},
    "store": {""},
}


def _of_kind(kind: str) -> list[Mutant]:
    return [one for one in mutants(PROGRAM) if one.kind == kind]


@pytest.mark.parametrize("kind", EXPECTED)
def test_each_class_changes_what_it_says(kind: str) -> None:
    made = {edit.text for one in _of_kind(kind) for edit in one.edits}
    assert EXPECTED[kind] <= made, f"{kind} makes {sorted(made)}"


def test_a_wait_moves_as_a_whole_and_an_arrival_both_ways() -> None:
    texts = [one.of(PROGRAM).ptx for one in _of_kind("move")]
    moved = (
        "ld.shared.u32 %x, [%smem]; $again: mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem + 8], %phase; "
        "@!%done bra $again;"
    )
    assert any(moved in text for text in texts), "the wait stands behind the load, with its label and its branch"
    arrival = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem + 8], 64;"
    assert any(f"{arrival} ld.shared.u32" in text for text in texts), "an arrival before what it publishes"


def test_a_matrix_descriptor_is_changed_and_changed_back() -> None:
    for one in _of_kind("matrix-descriptor"):
        before, _, after = (part.strip() for part in one.edits[0].text.rstrip(";").split(";"))
        undone = {"add": "sub", "xor": "xor"}[before[:3]] + before[3:]
        assert after == undone, f"{one.id}: the register keeps its change: {after}"


def test_launches_and_tensor_maps_change() -> None:
    changed = [one.of(PROGRAM) for one in mutants(PROGRAM) if one.launch is not None]
    launches = [one.launches[0] for one in changed if isinstance(one, Program)]
    assert {launch.grid[0] for launch in launches} >= {3, 5}
    assert 96 in {launch.block[0] for launch in launches}
    assert {launch.args[1] for launch in launches} >= {ScalarArg("u32", 8), ScalarArg("u32", 6)}
    maps = [launch.args[2] for launch in launches]
    assert {part.dims for part in maps if isinstance(part, TensorMapArg)} >= {(63, 9), (64, 10)}
    assert {part.swizzle for part in maps if isinstance(part, TensorMapArg)} == {"128B", "64B"}


def test_a_size_that_would_vanish_stays() -> None:
    small = replace(PROGRAM, launches=(replace(PROGRAM.launches[0], grid=(1, 1, 1)),))
    assert LaunchEdit(0, None, "grid", 0, -1).of(small).launches[0].grid == (1, 1, 1)


def test_every_mutant_has_a_name_and_keeps_the_lines() -> None:
    made = list(mutants(PROGRAM))
    assert len({one.id for one in made}) == len(made), "two mutants have one id"
    assert [one.id for one in mutants(PROGRAM)] == [one.id for one in made], "ids depend on the text alone"
    assert {one.kind for one in made} == set(KINDS), "a class without an example proves nothing"
    for one in made:
        changed = one.of(PROGRAM)
        assert changed != PROGRAM, f"{one.id} changes nothing"
        assert changed.ptx.count("\n") == PTX.count("\n"), f"{one.id}: findings would name other lines"


def test_comments_are_no_instructions() -> None:
    assert "bar.sync 9;" not in {one.spelled() for one in instructions(PTX)}
    (wide,) = (one for one in instructions(PTX) if one.opcode.startswith("wgmma.mma"))
    assert (wide.line, wide.operands[0]) == (20, "{%d0, %d1}"), "an instruction of two lines"


def test_draws_are_repeatable_and_take_classes_in_turn() -> None:
    every = list(mutants(PROGRAM))
    few = drawn(every, len(KINDS), 0)
    assert {one.kind for one in few} == set(KINDS)
    assert few == drawn(list(reversed(every)), len(KINDS), 0), "the order of the text decides nothing"
    assert few != drawn(every, len(KINDS), 1), "another seed draws others"


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


def test_a_sample_of_the_tool(program: Subject, tmp_path: Path) -> None:
    """Each survivor has a reason; and shards run each mutant once, whatever was run before."""
    known = reasons()
    record = Record(tmp_path / "mutants.jsonl")
    plan = Plan(SELECTION, synchronisation=20, others=12, seed=11)
    todo = planned(plan, [program])
    parts = [planned(replace(plan, shard=Nth(part, 3)), [program]) for part in (1, 2, 3)]
    assert sorted(one.id for part in parts for _, one in part) == sorted(one.id for _, one in todo)
    for part in parts:
        list(run(part, record, ("eager", "lazy")))
    assert not list(run(todo, Record(tmp_path / "mutants.jsonl"), ("eager",))), "a record that is whole runs nothing"
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
    assert told == "of 2 drawn cases 0 built its text, 1 another, and the backend refused 1", told


def test_a_mutant_of_no_consequence_survives_as_the_same_code(program: Subject) -> None:
    text = program.built[0].program.ptx
    at = text.index("    ret;")
    one = Mutant("none", "drop", 0, "", "", (Edit(at, at + 4, "\t    "),))
    outcome = examine(program, one)
    assert not outcome.killed, outcome.sentence
    assert outcome.same_code is not False, "white space changes no machine code"


def test_what_is_equivalent_by_an_argument_runs_no_further_than_the_first_turns(program: Subject) -> None:
    moves = [one for one in mutants(program.built[0].program) if one.kind == "move"]
    earlier = next(one for one in moves if one.before.startswith("mbarrier.arrive.expect_tx"))
    whole = examine(program, earlier, ask_assemblers=False)
    assert (whole.killed, whole.reached) == (False, True), f"{earlier.before} -> {earlier.after}: {whole}"
    for argued in (lambda _: True, lambda lived: lived.reached is True):
        seen = examine(program, earlier, ask_assemblers=False, argued=argued)
        assert 0 < seen.runs < whole.runs, f"{seen.runs} of {whole.runs} runs of what is argued"


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
    broken = replace(program.built[0], program=_of_kind("drop")[0].of(PROGRAM))
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


def test_a_wait_without_its_loop_dies_under_an_order_in_which_it_gives_up(program: Subject) -> None:
    """It is not in a synchronisation class, and in order mbarrier.try_wait returns when the phase is over."""
    code = instructions(program.built[0].program.ptx)
    wait = next(at for at, one in enumerate(code) if one.opcode.startswith("mbarrier.try_wait"))
    back = code[wait + 1]
    assert back.opcode.startswith("bra"), f"behind the wait stands {back.spelled()}"
    once = Mutant("once", "guard", back.line, back.spelled(), "", (Edit(back.begin, back.end, ""),))
    found = examine(program, once, ("eager", *(f"random:{seed}" for seed in range(8))), ask_assemblers=False)
    assert found.schedule.startswith("random"), f"{found.check or 'nothing'} under {found.schedule}: {found.sentence}"


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
    """A row of smoke kills a dropped wait. No row kills an unchanged program, or one that smoke does not build."""
    wait = next(one for one in mutants(program.built[0].program) if one.kind == "drop" and "try_wait" in one.before)
    none = next(one for one in mutants(program.built[0].program) if one.kind == "rounding")
    record = Record(tmp_path / "mutants.jsonl")
    killed = Outcome(wait.id, program.name, "drop", 1, "", "", "rule:race", "fmha:hd=64,t=4,s_k=300", "lazy")
    elsewhere = replace(killed, id="0123456789ab/drop/1.0")
    for one in (killed, elsewhere, replace(killed, id=none.id, check="")):
        record.append(one)
        assert check_of(one) is None, "lazy is no schedule of smoke, so nobody has asked"
    assert check_of(replace(killed, case="fmha:hd=64,t=1,s_k=1", schedule="eager")) == "rule:race"
    part = replace(SELECTION, cases=SELECTION.cases[:1])
    list(smoked(record, selection=part))
    said = {one.id: one.smoke for one in Record(record.path).results}
    assert said[wait.id], "a row of smoke runs without a wait, and nothing is said"
    assert (said[none.id], said[elsewhere.id]) == ("", ""), f"smoke is said to kill what it cannot: {said}"


def test_what_is_watched_has_no_error_and_a_planted_one_is_told(program: Subject, tmp_path: Path) -> None:
    whole = program.built[0]
    clean = watched("ptx", "sm_90a", whole, range(2))
    assert (clean.rows, clean.errors) == (2, ()), f"a program as it is: {clean}"
    wait = next(one for one in mutants(whole.program) if one.kind == "drop" and "try_wait" in one.before)
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


def test_a_torn_line_is_cut_off_and_run_again(tmp_path: Path) -> None:
    path = tmp_path / "mutants.jsonl"
    record = Record(path)
    record.append(Ran("--sync all", "abc", "2026-11-22 04:47 UTC", 2))
    record.append(Outcome("a/drop/1.0", "p", "drop", 1, "bar.sync 0;", ""))
    record.close()
    whole = path.read_text()
    path.write_text(f'{whole}{{"id": "a/drop/2')
    torn, again = path.read_text(), Record(path)
    assert (path.read_text(), set(again.by_id), len(again.calls)) == (torn, {"a/drop/1.0"}, 1), "reading writes nothing"
    again.append(record.calls[0])
    assert path.read_text() == whole + whole.splitlines(keepends=True)[0], "the next line is written over the torn one"


def test_a_torn_record_that_is_written_anew_is_appended_to(tmp_path: Path) -> None:
    """As with --forget --smoke: the old end of the file says nothing about what was written since."""
    record = Record(tmp_path / "mutants.jsonl")
    one = Outcome("a/drop/1.0", "p", "drop", 1, "bar.sync 0;", "")
    others = [replace(one, id=f"b/drop/{at}.0") for at in range(3)]
    for each in (one, *others):
        record.append(each)
    record.close()
    with record.path.open("a") as out:
        out.write('{"id": "a/drop/2')
    torn = Record(record.path)
    torn.leave_out({one.id})
    torn.append(replace(one, id="c/drop/1.0"))
    wanted = [*(each.id for each in others), "c/drop/1.0"]
    assert list(Record(record.path).by_id) == wanted, f"the file holds {record.path.read_bytes()[-200:]!r}"


_WRITER = """
import sys
from pathlib import Path
from conformance.kernels.mutants.journal import Journal, Ran
record = Journal(Ran, Path(sys.argv[1]))
print("read", flush=True)
sys.stdin.readline()
record.append(Ran("--unmutated 2", "abc", "2026-11-22 04:47 UTC", 2))
print("written", flush=True)
sys.stdin.readline()
"""


def test_of_two_processes_that_write_one_record_the_second_is_refused(tmp_path: Path) -> None:
    """One read the file before the first wrote, one reads while it writes; lines of both are whole."""
    path, mine = tmp_path / "unmutated.jsonl", Watched("ptx", "sm_90a", "fmha:hd=64,t=1,s_k=1", rows=1)
    early = Watch(path)
    with Popen([sys.executable, "-c", _WRITER, str(path)], stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "read\n"
        print(file=other.stdin, flush=True)
        assert other.stdout.readline() == "written\n"
        for late in (early, Watch(path)):
            with pytest.raises(RecordError, match="is being written by another process"):
                late.append(mine)
            with pytest.raises(RecordError, match="is being written by another process"):
                late.leave_out(set())
    with pytest.raises(RecordError, match="since it was read"):
        early.append(mine)
    late = Watch(path)
    late.append(mine)
    late.leave_out(set())
    with pytest.raises(RecordError, match="is being written"):
        Watch(path).append(mine)
    assert (len(late.calls), late.rows, len(Watch(path).calls)) == (1, 1, 1), path.read_text()


@pytest.mark.parametrize(
    "held",
    [
        '{"command": "a", "machine": "", "started": "", "planned": 1}',
        '{"my": "data"}',
        '{"my": "data"}\n',
        "some\nnotes",
        '{"id": 3}\n',
        "[1]\n",
        "3",
    ],
)
@pytest.mark.parametrize("option", ["--table", "--smoke", "--holes"])
def test_a_file_that_is_no_record_is_left_as_it_is(
    held: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(held)
    case = ["--case", "fmha:hd=64,t=1,s_k=1"] if option == "--holes" else []
    assert main([option, "--record", str(path), *case]) == 2
    assert f"{path}:1: " in (told := capsys.readouterr().err), told
    assert "name another file with --record" in told, told
    assert (path.read_text(), list(tmp_path.iterdir())) == (held, [path]), "somebody's file was changed"


def test_the_table_of_somebody_s_record_lies_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, before = Record(tmp_path / "mine.jsonl"), TABLE.read_text("utf-8")
    assert main(["--table", "--record", str(record.path)]) == 2, "there is nothing to tell"
    assert main(["--table", "--record", str(tmp_path)]) == 2, "a folder is no record"
    record.append(Outcome("a/drop/1.0", "mine:BACKEND sm_90a fmha:hd=64,t=1,s_k=1 a", "drop", 1, "bar.sync 0;", ""))
    assert main(["--table", "--record", str(record.path)]) == 0
    assert str(place := tmp_path / "mine.md") in capsys.readouterr().out
    assert "All: 1 mutant," in (told := place.read_text("utf-8")), told
    assert "unmutated" not in told, "what was run of other programs is in it"
    assert "excuses only what rests on PTX alone" in told, "which reasons are applied is not said"
    assert TABLE.read_text("utf-8") == before, "the project's table was written"


PART = (
    Outcome("a/drop/1.0", "ptx sm_90a fmha:hd=64,t=1,s_k=1 a", "drop", 1, "bar.sync 0;", ""),
    Outcome("b/drop/1.0", "cutedsl sm_90a fmha:hd=64,t=1,s_k=1 b", "drop", 1, "bar.sync 0;", ""),
    Outcome("c/drop/1.0", "ptx sm_100a nvfp4_moe:tokens=1 c", "drop", 1, "bar.sync 0;", ""),
)


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ([], "abc"),
        (["--backend", "ptx"], "ac"),
        (["--backend", "ptx", "--backend", "cutedsl"], "abc"),
        (["--op", "fmha", "--target", "sm_90a"], "ab"),
        (["--program", "s_k=1 b"], "b"),
    ],
)
def test_a_table_has_what_its_options_select(
    asked: list[str], ids: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record(tmp_path / "mine.jsonl")
    for one in PART:
        record.append(one)
    record.close()
    assert main(["--table", "--record", str(record.path), *asked]) == 0
    (page,) = tmp_path.glob("*.md")
    assert str(page) in capsys.readouterr().out
    told = page.read_text("utf-8")
    assert [one for one in "abc" if f"`{one}/drop/1.0`" in told] == list(ids), told
    assert (page.name == "mine.md") == (ids == "abc"), "a part is written over the whole table"
    assert ("a part of the record" in told) == (ids != "abc")


@pytest.mark.parametrize("option", ["--table", "--smoke", "--forget"])
def test_a_misspelt_backend_of_a_record_is_a_sentence(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record(tmp_path / "mine.jsonl")
    for one in PART:
        record.append(one)
    record.close()
    held = record.path.read_bytes()
    assert main([option, "--record", str(record.path), "--backend", "cutdsl"]) == 2
    told = capsys.readouterr().err
    assert "has no mutants of the backend 'cutdsl'; it has cutedsl, ptx; did you mean 'cutedsl'?" in told, told
    assert (list(tmp_path.iterdir()), record.path.read_bytes()) == ([record.path], held)


def test_a_table_of_a_part_leaves_the_project_s_own_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = TABLE.read_text("utf-8")
    assert main(["--table", "--backend", "ptx", "--target", "sm_100a"]) == 0
    assert (place := "results/mutants/mutants-ptx-sm_100a.md") in capsys.readouterr().out
    assert "cutedsl" not in (tmp_path / place).read_text("utf-8").partition("## What was run")[0]
    assert TABLE.read_text("utf-8") == before, "the project's table was written"


def test_what_smoke_kills_is_not_told_before_it_was_measured(tmp_path: Path) -> None:
    record = Record(tmp_path / "mine.jsonl")
    killed = replace(PART[0], check="rule:race", case="fmha:hd=64,t=1,s_k=1", schedule="eager")
    for one in (killed, PART[1]):
        record.append(one)
    assert "alone kill was not measured" in (told := table(record, [], ours=False)), told
    assert "the 1 mutant that another check" in told, told
    record.append(replace(PART[1], smoke=""))
    assert "kill 1 of 2 that are not equivalent (50.0%)." in (told := table(record, [], ours=False)), told
    record.append(PART[2])
    assert "1 other has not run there, so the share is 33.3% to 66.7%." in (told := table(record, [], ours=False)), told


def test_the_table_and_the_documents_say_what_an_id_and_a_class_are(tmp_path: Path) -> None:
    record = Record(tmp_path / "mine.jsonl")
    record.append(PART[0])
    told, docs = table(record, [], ours=False), (ROOT / "docs" / "mutants.md").read_text("utf-8")
    assert f"| drop | {MEANINGS['drop']} | 1 |" in told, told
    assert f"An id is {ID}." in told, told
    assert ID in " ".join(docs.split())
    lacking = [kind for kind, meaning in MEANINGS.items() if f"| `{kind}` | {meaning} |" not in docs]
    assert not lacking, f"docs/mutants.md does not say what these are: {lacking}"


def test_one_mutant_that_lives_ends_with_status_1(program: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    first = program.built[0]
    selected = ["--case", first.case.id, "--backend", "ptx", "--target", "sm_90a"]
    wait = next(one for one in mutants(first.program) if one.kind == "drop" and "try_wait" in one.before)
    assert main(["--id", wait.id, *selected, "--schedule", "eager"]) == 0
    assert f": ptx sm_90a {first.case.id}, {wait.id} `" in (told := capsys.readouterr().out), told
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conformance.kernels.mutants.command.examine", lambda *_: PART[0])
        patch.setattr("conformance.kernels.mutants.command.reasons", list)
        for asked in (["--id", wait.id], ["--text", "try_wait"]):
            assert main([*asked, *selected]) == 1, f"{asked}: a mutant without a reason lives"
    assert "SURVIVED, a hole without a reason: ptx sm_90a fmha" in capsys.readouterr().out


def test_what_a_backend_refuses_is_told_with_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    selected = ["--backend", f"{backends.__name__}:DECLINES", "--case", "fmha:hd=64,t=1,s_k=1"]
    assert main([*selected, "--record", str(tmp_path / "mutants.jsonl")]) == 2
    told = capsys.readouterr().err
    assert "nothing to change; 1 case is left out, as the backend refuses (fmha:hd=64,t=1,s_k=1 on" in told, told
    assert told.endswith(": hd=64 needs a tile that this backend does not have\n"), told


def test_the_example_of_a_backend_goes_the_way_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutants of it, what smoke kills, and the table: the record is found by the backend's name alone."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    own = ["--backend", "my_backend:BACKEND"]
    small = ["--case", "fmha:hd=64,t=1,s_k=128", "--target", "sm_90a", "--program", "s_k=128"]
    assert main([*own, *small, "--sync", "all", "--others", "0"]) == 0
    told = capsys.readouterr().out
    assert "rule:race on fmha:hd=64,t=1,s_k=128, eager: my_backend:BACKEND sm_90a fmha:hd=64" in told, told
    assert "1 killed, 1 equivalent, 0 holes" in told, told
    assert main([*own, *small, "--others", "12"]) == 1, "roundings live"
    assert main([*own, "--smoke", "--target", "sm_90a"]) == 0
    assert main([*own, "--table"]) == 0
    told = (tmp_path / CAMPAIGN.with_suffix(".md")).read_text("utf-8")
    assert "Rows of the profile smoke alone" in told, told
    (killed,) = re.findall(r"for them, kill (\d+) of", told)
    assert int(killed) > 8, "rows of smoke that this backend builds are not run"


def test_a_hole_excuses_no_backend_of_somebody_s_own() -> None:
    """Our reasons say which check is missing. That is no excuse for users who ask how good their backends' checks
    are."""
    ours = Outcome("a/drop/1.0", "ptx sm_90a fmha:hd=64,t=1,s_k=1 a", "rounding", 1, "no such;", "")
    known = [Reason("hole", "a check is missing")]
    assert not blamed(ours, known), "a listed hole has its reason"
    own = replace(ours, program="mine:BACKEND sm_90a fmha:hd=64,t=1,s_k=1 a")
    assert blamed(own, known), "her campaign ends with status 0 and a hole"
    assert not blamed(own, [Reason("equivalent", "nothing can tell", any_program=True)]), "no run can tell her program"
    assert blamed(own, [Reason("equivalent", "so our kernel is made")]), "what is true of our programs excuses hers"
    asked = Reason("equivalent", "the machine would have told", reached=True)
    assert not blamed(replace(own, reached=True), [asked]), "the machine was asked about this mutant"
    assert blamed(replace(own, reached=True), [replace(asked, program="*sm_90a*")]), "it names programs of ours"
    assert blamed(ours, []), "a survivor without a reason"
    pairs = replace(ours, program="backends.cutedsl:CTA_PAIRS sm_100a nvfp4_moe:tokens=1 a")
    assert not blamed(pairs, known), "another rule of our own backend is ours"


def test_a_survivor_is_printed_with_its_reason() -> None:
    ours = Outcome("a/drop/1.0", "ptx sm_90a fmha:hd=64,t=1,s_k=1 a", "rounding", 1, "no such;", "")
    hole, equal = Reason("hole", "a check is missing"), Reason("equivalent", "nothing can tell", any_program=True)
    own = replace(ours, program="mine:BACKEND sm_90a fmha:hd=64,t=1,s_k=1 a")
    asked = Reason("hole", "nobody has asked", reached=False, any_program=True)
    for one, reason, fate in (
        (ours, hole, "SURVIVED, a hole that is excused: "),
        (ours, equal, "SURVIVED, equivalent: "),
        (own, equal, "SURVIVED, equivalent: "),
        (replace(own, reached=False), asked, "SURVIVED, a hole: "),
    ):
        told = told_of(one, [reason])
        assert told.startswith(fate), f"{told!r} does not begin with {fate!r}"
        assert told.endswith(f": {reason.why}"), f"{told!r} does not end with the reason {reason.why!r}"
    assert told_of(ours, []).startswith("SURVIVED, a hole without a reason: "), told_of(ours, [])
    killed = replace(ours, check="rule:race", case="fmha:hd=64,t=1,s_k=1", schedule="eager")
    assert hole.why not in (told := told_of(killed, [hole])), f"a killed one needs no reason: {told}"
    assert told.startswith("rule:race on fmha:hd=64,t=1,s_k=1, eager: "), told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--sync", "alll"], "'alll' is neither a number nor `all`"),
        (["--others", "-1"], "'-1' is neither a number nor `all`"),
        (["--seconds", "-1"], "'-1' is no number of seconds"),
        (["--seconds", "nan"], "'nan' is no number of seconds"),
        (["--sycn", "all"], "unrecognized arguments: --sycn all"),
        (["--table", "--case", "fmha:hd=64,t=1,s_k=1"], "--table reads only --op, --backend, --target, --program, so"),
        (["--smoke", "--schedule", "lazy"], "so --schedule would do nothing"),
        (["--unmutated", "3", "--backend", "ptx"], "its programs are fixed, so --backend would do nothing"),
    ],
)
def test_options_that_mean_nothing_are_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    told = capsys.readouterr().err
    assert (ended.value.code, said in told) == (2, True), told
    assert told.count("\n") == 1, f"it is not one sentence: {told}"


def test_each_option_says_what_it_is_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["--help"])
    told = dict(re.findall(r"^  (--\w+)(?: \S+)? +(\S.*)$", capsys.readouterr().out, re.MULTILINE))
    assert {"--case", "--sync", "--record", "--search"} <= told.keys(), told
    short = {name: about for name, about in told.items() if not re.match(r"[A-Z].{25,}\.( \[default: \S+\])?$", about)}
    assert not short, f"these have no sentence: {short}"


def test_a_campaign_is_not_written_among_the_runs() -> None:
    assert CAMPAIGN.parent != RUNS, "`megamoe` would take it for a run"
    assert f"/{CAMPAIGN.parent}/" in (ROOT / ".gitignore").read_text("utf-8").splitlines(), "git would track it"


@pytest.mark.parametrize("shard", ["3", "a/b", "1/2/3", "3/2", "0/2"])
def test_a_shard_that_is_none_is_refused(shard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--shard", shard, "--record", str(tmp_path / "mutants.jsonl"), "--case", "fmha:hd=64,t=1,s_k=1"]
    assert main(given) == 2
    assert "shard" in (told := capsys.readouterr().err), told


def test_a_backend_that_builds_nothing_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--backend", "conformance.fakes.adversaries:BUILDS_NOTHING", "--record", str(tmp_path / "mutants.jsonl")]
    assert main([*own, "--case", "fmha:hd=64,t=1,s_k=1", "--target", "sm_90a"]) == 2
    said = capsys.readouterr().err
    assert "BUILDS_NOTHING' returned None; it must return a megamoe.contract.Program" in said, said


def test_the_table_is_that_of_the_record_and_survivors_and_reasons_have_each_other(tmp_path: Path) -> None:
    """A reason may also be about survivors of the whole campaign."""
    known, record, whole = reasons(), Record(RECORD), tmp_path / "whole.jsonl"
    whole.write_bytes(lzma.decompress((ROOT / "results" / "records" / "mutants-whole.jsonl.xz").read_bytes()))
    explained = dict(survivors(record, known))
    lacking = [one.id for one, why in explained.items() if why is None]
    assert not lacking, f"survivors.yaml says nothing about {lacking}"
    used = {*explained.values(), *(why for _, why in survivors(Record(whole), known))}
    stale = [one.why for one in known if one not in used]
    assert not stale, f"no survivor of a record needs these entries of survivors.yaml: {stale}"
    assert TABLE.read_text("utf-8") == table(record, known), "out of date; run: nox -s mutants -- --table"


def test_what_is_killed_is_killed_on_rows_that_a_profile_has_or_on_few_ctas() -> None:
    profiles = [Selection(name, executors=("vm",)) for name in ("smoke", "full")]
    cases = {row.case for one in profiles for row in owed_rows(load_specs(None), one)}
    killed = [one for one in Record(RECORD).results if one.killed and not one.schedule.startswith(FEW_CTAS)]
    beside = Counter(one.case for one in killed if one.case not in cases)
    assert not beside, f"kills on cases that are no rows of smoke or full: {dict(beside)}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "it must be a list"),
        ("- {verdict: hole}", "needed are verdict and why"),
        ("- {verdict: fine, why: because}", "neither equivalent nor hole"),
        ("- {verdict: hole, why: because, sort: drop}", "needed are verdict and why"),
        ("- {verdict: hole, why: because, reached: 3}", "reached 3 is neither true nor false"),
    ],
)
def test_reasons_that_mean_nothing_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "survivors.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        reasons(path)
