"""What the command prints, its tables, its exit statuses and what it refuses."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import ROOT
from conformance.fakes import backends
from conformance.kernels.mutants.__main__ import main
from conformance.kernels.mutants.campaign import FEW_CTAS, Outcome, Record
from conformance.kernels.mutants.command import blamed, told_of
from conformance.kernels.mutants.mutant import ID, MEANINGS
from conformance.kernels.mutants.options import RUNS as CAMPAIGN
from conformance.kernels.mutants.table import RECORD, TABLE, Reason, reasons, survivors, table
from megamoe.records.files import RUNS
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows


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
    assert main([*own, *small, "--others", "12"]) == 1, "they live, although the record has all of them"
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
        (["--smoke", "--sync", "all"], "so --sync would do nothing"),
        (["--smoke", "--shard", "1/2"], "so --shard would do nothing"),
        (["--table", "--excused", "0"], "so --excused would do nothing"),
        (["--id", "1a2b3c4d5e6f/drop/79.0", "--holes"], "so --holes would do nothing"),
        (["--id", "1a2b3c4d5e6f/drop/79.0"], "--backend is missing, as in --id 1a2b3c4d5e6f/drop/79.0 --backend ptx"),
        (["--search", "3", "--others", "7"], "so --others would do nothing"),
        (["--search", "3", "--id", "1a2b3c4d5e6f/drop/79.0", "--others", "7"], "so --others would do nothing"),
        (["--search", "3", "--table"], "--table and --search are two calls"),
        (["--search", "0"], "'0' is no number from 1 on"),
        (["--unmutated", "0"], "'0' is no number from 1 on"),
        (["--jobs", "0"], "'0' is no number of processes from 1 to 1024"),
        (["--packed", "there", "--case", "fmha:hd=64,t=1,s_k=1"], "so --case would do nothing"),
        (
            ["--packed", "there", "--table"],
            "so --packed would do nothing",
        ),
        (["--pack", "there", "--program", "hd=64"], "so --program would do nothing"),
        (["--unmutated", "3", "--backend", "ptx"], "--unmutated reads only --seconds, so --backend would do nothing"),
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


def test_the_table_is_that_of_the_record_and_survivors_and_reasons_have_each_other() -> None:
    known, record = reasons(), Record(RECORD)
    explained = dict(survivors(record.results, known))
    lacking = [one.id for one, why in explained.items() if why is None]
    assert not lacking, f"survivors.yaml says nothing about {lacking}"
    stale = [one.why for one in known if one not in set(explained.values())]
    assert not stale, f"no survivor of the record needs these entries of survivors.yaml: {stale}"
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
