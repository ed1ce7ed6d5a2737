"""results/README.md says what is true: its examples are lines of records, its Python runs, its YAML is a spec's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from conformance import ROOT
from megamoe.diff.rows import CALLS
from megamoe.records.files import parse_records
from megamoe.records.lines import record_schema
from megamoe.spec.schema import BenchmarkEntry

TEXT = (ROOT / "results" / "README.md").read_text("utf-8")
KINDS = ("run", "record", "agreement", "timing", "figures", "acceptance")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_there_is_an_example_of_every_kind_under_its_heading() -> None:
    headings = re.findall(r"^### `(\w+)`:", TEXT, re.MULTILINE)
    assert tuple(headings) == KINDS
    assert [json.loads(text)["kind"] for text in blocks("json")] == headings


@pytest.mark.parametrize("text", blocks("json"), ids=lambda text: json.loads(text)["kind"])
def test_every_example_is_a_line(text: str) -> None:
    (line,) = parse_records(Path("README"), text.encode()).lines
    assert json.loads(line.model_dump_json()) == json.loads(text), "and a whole one, as it is written today"
    Draft202012Validator(record_schema()).validate(json.loads(text))


def test_the_python_in_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (source,) = blocks("python")
    assert sum(bool(line) for line in source.splitlines()) == 5, "five lines, as the text says"
    exec(compile(source, "README", "exec"), {})
    assert capsys.readouterr().out == "144 of 144 passed; whole\n"


def test_the_yaml_in_it_is_a_spec_s() -> None:
    (text,) = blocks("yaml")
    entry = BenchmarkEntry.model_validate(yaml.safe_load(text)["benchmark"])
    assert len(entry.overrides) == 2


def test_it_names_every_call() -> None:
    assert [call for call in CALLS if f"`{call}`" not in TEXT] == []
