"""The documents are true: CONTRIBUTING.md about files and rooms, the READMEs about records, specs and the VM."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import yaml
from jsonschema_rs import Draft202012Validator

from conformance import ROOT
from conformance.fakes.broken_kernels import BROKEN_PTX
from conformance.meta.house.test_import_rules import CONFORMANCE, MEGAMOE, VM
from megamoe.contract import load_executor
from megamoe.diff.differ import CALLS
from megamoe.gate.expected import read_expected
from megamoe.gate.verdict import judge_run
from megamoe.judge.guarded import GuardedCase
from megamoe.records.files import RecordFile, parse_records, read_records
from megamoe.records.lines import record_schema
from megamoe.spec.load import load_specs
from megamoe.spec.schema import BenchmarkEntry

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
MAP = re.findall(r"\| `([\w./]+\.py):(\w+)` \|", CONTRIBUTING)


def defines(text: str, name: str) -> bool:
    """Whether a module with this text defines `name`, at top level or in a class."""
    return re.search(rf"^ *(def|class) {name}\b|^{name}\b *[:=]", text, re.MULTILINE) is not None


def test_the_map_has_the_fifteen_hunts() -> None:
    assert len(MAP) == len(set(MAP)) == 15


@pytest.mark.parametrize(("path", "name"), MAP)
def test_what_the_map_points_at_is_there(path: str, name: str) -> None:
    assert (ROOT / path).is_file(), f"the map of CONTRIBUTING.md says {path}, which has moved"
    assert defines((ROOT / path).read_text("utf-8"), name), f"{path} has no {name}: CONTRIBUTING.md is out of date"


def test_a_name_that_moved_would_be_noticed() -> None:
    assert not defines("from megamoe.codec.nvfp4 import _codes\nx = _codes(1)\n", "_codes")


def test_every_room_is_named() -> None:
    rooms = {name.partition(".")[0] for table in (MEGAMOE, VM, CONFORMANCE) for name in table} - {"__main__"}
    rooms -= {"load", "coverage"}
    missing = sorted(room for room in rooms if not re.search(rf"`{room}\b", CONTRIBUTING))
    assert not missing, f"CONTRIBUTING.md does not name these rooms: {missing}"


ROOMS = {
    **{(name, "megamoe"): f"conformance/meta/*{name}*" for name in MEGAMOE if name.isidentifier() and name[0] != "_"},
    **{(name, "backends/vm"): f"conformance/vm/{name}" for name in VM if name not in ("load", "coverage")},
}
"""Room and its parent -> where CONTRIBUTING.md says that its tests are, unless it makes an exception."""
(_EXCEPTIONS,) = re.findall(r"^Rooms whose tests lie elsewhere: (.*?)\n\n", CONTRIBUTING, re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    room: place
    for rooms, place in re.findall(r"((?:`\w+`,? )+)in `([\w/]+)`", " ".join(_EXCEPTIONS.split()))
    for room in re.findall(r"\w+", rooms)
}


def _with_tests(pattern: str) -> list[Path]:
    """Files of tests, and folders that hold some, that a shell finds for `pattern`."""
    found = sorted(ROOT.glob(pattern))
    return [one for one in found if one.name.startswith("test_") or next(one.glob("test_*.py"), None)]


@pytest.mark.parametrize(("room", "parent"), ROOMS)
def test_every_room_leads_to_its_tests(room: str, parent: str) -> None:
    said, place = _with_tests(ROOMS[room, parent]), ELSEWHERE.get(room)
    if place is None:
        assert said, f"`pytest -q {ROOMS[room, parent]}` finds nothing: CONTRIBUTING.md must say where the tests are"
        return
    assert not said, f"{room} needs no exception in CONTRIBUTING.md: {said[0]} is found"
    assert _with_tests(place), f"CONTRIBUTING.md says that {place} tests {room}, and there are no tests"
    module = re.escape(f"{parent}/{room}").replace("/", r"\W+(?:import )?")
    texts = (file.read_text("utf-8") for file in (ROOT / place).glob("*.py"))
    assert any(re.search(rf"\b{module}\b", text) for text in texts), f"nothing in {place} names {parent}/{room}"


def test_an_exception_is_about_a_room() -> None:
    unknown = set(ELSEWHERE) - {room for room, _ in ROOMS}
    assert ELSEWHERE, "CONTRIBUTING.md makes no exceptions, so none was read"
    assert not unknown, f"CONTRIBUTING.md says where the tests of {sorted(unknown)} are, which are no rooms"


MENTIONED = set(re.findall(r"\b(?:conformance|megamoe|backends|results)/[\w/]+(?:\.\w+)+", CONTRIBUTING))


@pytest.mark.parametrize("path", sorted(path for path in MENTIONED if not path.endswith("/OP.py")))
def test_what_it_mentions_is_there(path: str) -> None:
    assert (ROOT / path).exists()


RECORDS = ROOT / "results" / "records"
EXPECTED = ROOT / "conformance" / "expected.yaml"
README = (ROOT / "README.md").read_text("utf-8")
ON_A_GPU = (ROOT / "docs" / "gpu.md").read_text("utf-8")
OURS, BEFORE = "ours", "before"
PEERS = {"cuDNN": "cudnn", "sdpa flash": "sdpa flash", "FA3": "fa3", "FA4": "fa4", "cudnn-frontend": "cudnn-frontend"}
ROW = re.compile(r"^\| `(hd=[^`]+)` \| ([\d.]+) \| ([\d.]+) \| ([A-Za-z][\w -]*?) ([\d.]+) \|$", re.MULTILINE)


def _id(case: str) -> str:
    return load_specs(None)["fmha"].parse_case(f"fmha:{case}").id


def _measured() -> dict[str, tuple[float, dict[str, float]]]:
    """Case -> microseconds of a bare read, and of each kernel, in that session."""
    rows = json.loads((RECORDS / "h200-fmha-rows.json").read_text("utf-8"))
    return {_id(case): (row["bare_read_us"], {k: v for k, v in row["us"].items() if k != BEFORE})
            for case, row in rows.items()}  # fmt: skip


def _best(times: dict[str, float]) -> tuple[float, str]:
    return min((us, name) for name, us in times.items() if name != OURS)


def test_the_smoke_profile_prints_what_its_record_holds() -> None:
    records = read_records(RECORDS / "smoke.jsonl").records
    passed = [one for one in records if one.status == "passed"]
    baseline = read_records(ROOT / "results" / "baselines" / "vm.jsonl").records
    assert {one.row for one in passed} == {one.row for one in baseline}, "smoke.jsonl has not the rows of the gate"
    counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    seconds: dict[tuple[str, ...], float] = defaultdict(float)
    for one in records:
        group = one.op, one.backend, one.target, one.executor
        counts[group][one.status] += 1
        seconds[group] += one.judge_host_seconds or 0.0
    shown = re.findall(r"^ (\w+) +(\w+) +(sm_\w+) +(vm) +(\d+) +(\d+) +([\d.]+) $", README, re.MULTILINE)
    assert {tuple(line[:4]): (int(line[4]), int(line[5]), line[6]) for line in shown} == {
        group: (count["passed"], count["unsupported"], f"{seconds[group]:.1f}") for group, count in counts.items()
    }
    assert f"{len(passed)} passed, 0 failed, {len(records) - len(passed)} unsupported" in README


def test_the_times_are_those_of_the_record() -> None:
    measured, rows = _measured(), ROW.findall(ON_A_GPU)
    assert rows, "docs/gpu.md has no table of times"
    for case, bare, ours, peer, theirs in rows:
        read, times = measured[_id(case)]
        assert (f"{read:.1f}", f"{times[OURS]:.1f}") == (bare, ours), case
        us, name = _best(times)
        assert name == PEERS[peer], f"{case}: {name} is the best peer, not {peer}"
        assert f"{us:.1f}" == theirs, case


def test_the_count_of_rows_ahead_is_that_of_the_record() -> None:
    measured = _measured()
    ahead = [case for case, (_, times) in measured.items() if times[OURS] <= _best(times)[0]]
    said = f"in {len(ahead)} of {len(measured)} measured rows"
    for page, text in (("README.md", README), ("docs/gpu.md", ON_A_GPU)):
        assert said in " ".join(text.split()), f"{page} does not say {said!r}"


def test_the_broken_rule_is_what_the_vm_says() -> None:
    spec = load_specs(None)["fmha"]
    case = spec.parse_case("fmha:hd=64,t=1,s_k=128")
    program = BROKEN_PTX.build(case, "sm_100a")
    said = GuardedCase(spec, case, load_executor("vm")).run(program).execution.violation or ""
    (shown,) = re.findall(r"```text\n(\[tmem-store-not-waited\].*?)\n```", README, re.DOTALL)
    assert " ".join(shown.split()) == said


PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
CODE = re.compile(r"^```.*?^```|`[^`\n]+`(?!\])", re.DOTALL | re.MULTILINE)
LINKS = sorted(
    {(page, to) for page in PAGES for to in re.findall(r"\]\(([\w./-]+)\)", CODE.sub("", page.read_text("utf-8")))}
)


@pytest.mark.parametrize(("page", "to"), LINKS, ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_what_it_links_to_is_there(page: Path, to: str) -> None:
    assert (page.parent / to).exists(), f"{page.relative_to(ROOT)} links to {to}, which is not there"


RESULTS_README = (ROOT / "results" / "README.md").read_text("utf-8")
KINDS = ("run", "record", "agreement", "timing", "figures", "acceptance")


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", RESULTS_README, re.DOTALL)


def test_there_is_an_example_of_every_kind_under_its_heading() -> None:
    headings = re.findall(r"^### `(\w+)`:", RESULTS_README, re.MULTILINE)
    assert tuple(headings) == KINDS
    assert [json.loads(text)["kind"] for text in fenced("json")] == headings


@pytest.mark.parametrize("text", fenced("json"), ids=lambda text: json.loads(text)["kind"])
def test_every_example_is_a_line(text: str) -> None:
    (line,) = parse_records(Path("README"), text.encode()).lines
    assert json.loads(line.model_dump_json()) == json.loads(text), "and a whole one, as it is written today"
    Draft202012Validator(record_schema()).validate(json.loads(text))


def test_the_python_in_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (source,) = fenced("python")
    assert sum(bool(line) for line in source.splitlines()) == 5, "five lines, as the text says"
    exec(compile(source, "README", "exec"), {})
    assert capsys.readouterr().out == "144 of 144 passed; whole\n"


def test_the_yaml_in_it_is_a_spec_s() -> None:
    (text,) = fenced("yaml")
    entry = BenchmarkEntry.model_validate(yaml.safe_load(text)["benchmark"])
    assert len(entry.overrides) == 2


def test_it_names_every_call() -> None:
    assert [call for call in CALLS if f"`{call}`" not in RESULTS_README] == []


KEPT = sorted(RECORDS.glob("*.jsonl"))


def _complaints(file: RecordFile) -> list[str]:
    found = [file.torn] if file.torn else []
    # A borrowed device machine gets a copy of the tree without its history; README.md names the commit.
    elsewhere = {record.run for record in file.records if record.executor == "gpu"}
    for header in (header for header in file.headers if header.run not in elsewhere):
        if header.git_revision is None or not re.fullmatch(r"[0-9a-f]{40}", header.git_revision):
            found.append(f"{file.path.name} is of revision {header.git_revision}, which nobody can check out")
    for header in file.headers:
        rows = {record.row for record in file.records if record.run == header.run}
        if len(rows) != header.owed_rows:
            found.append(f"{file.path.name}: run {header.run} owed {header.owed_rows} rows and has {len(rows)}")
    return found


def test_each_is_listed() -> None:
    listed = re.findall(r"^\| `([^`/]+\.jsonl)`", (RECORDS / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == [file.name for file in KEPT]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_each_is_whole_and_of_a_revision(path: Path) -> None:
    assert _complaints(read_records(path)) == []


def test_a_torn_file_of_changed_code_is_noticed(tmp_path: Path) -> None:
    header = KEPT[0].read_text("utf-8").splitlines()[0]
    revision = read_records(KEPT[0]).headers[0].git_revision
    (tmp_path / "r.jsonl").write_text(header.replace(f'"{revision}"', f'"{revision}+changes"') + '\n{"torn')
    torn, changed, cut = _complaints(read_records(tmp_path / "r.jsonl"))
    assert "is torn" in torn
    assert "+changes, which nobody can check out" in changed
    assert "rows and has 0" in cut


def test_a_run_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    lines = (RECORDS / "smoke.jsonl").read_text("utf-8").splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"kind":"record"' in line)
    (tmp_path / "r.jsonl").write_text("".join(lines[:last] + lines[last + 1 :]))
    (cut,) = _complaints(read_records(tmp_path / "r.jsonl"))
    assert re.search(r"owed (\d+) rows and has \d+", cut), cut


def test_the_smoke_profile_passed_as_a_whole() -> None:
    file = read_records(RECORDS / "smoke.jsonl")
    (header,) = file.headers
    verdict = judge_run({one.row for one in file.records}, file.records, read_expected(EXPECTED))
    assert verdict.passed, verdict.problems
    assert len({record.row for record in file.records}) == header.owed_rows
    passed = {record.program_sha256 for record in file.records if record.status == "passed"}
    assert {line.program_sha256 for line in file.figures} == passed
