"""The CI files that we ship ask for jobs, options and files that exist, and keep what they promise."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from typer.main import get_command

from conformance import ROOT
from megamoe.cli.main import app

GITHUB, GITLAB = ROOT / ".github/workflows/conformance.yml", ROOT / ".gitlab-ci.yml"
FILES = (GITHUB, GITLAB)
JUNIT, RECORDS = "results/runs/gate.xml", "results/runs/gate.jsonl"


def _sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text("utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {one.name for one in functions if any(ast.unparse(mark) == "nox.session" for mark in one.decorator_list)}


def _options(command: str) -> set[str]:
    commands = cast("Any", get_command(app)).commands
    return {option for parameter in commands[command].params for option in parameter.opts}


def _texts(node: object) -> Iterator[str]:
    """Every text in a YAML document."""
    if isinstance(node, dict):
        for value in cast("dict[object, object]", node).values():
            yield from _texts(value)
    elif isinstance(node, list):
        for value in cast("list[object]", node):
            yield from _texts(value)
    elif isinstance(node, str):
        yield node


def _calls_of_nox(text: str) -> Iterator[tuple[str, list[str]]]:
    """The session and the words after -- of each call of nox in a file."""
    for line in (line for part in _texts(yaml.safe_load(text)) for line in part.splitlines()):
        for call in re.findall(r"\bnox -s [^;|]*", line):
            words = shlex.split(call)
            yield words[2], words[4:] if words[3:4] == ["--"] else words[3:]


def _complaints(text: str) -> list[str]:
    """What a CI file asks for that does not exist, and what it has to ask for but does not."""
    calls = list(_calls_of_nox(text))
    found = [f"there is no nox session {session!r}" for session, _ in calls if session not in _sessions()]
    for session, words in calls:
        options = {word for word in words if word.startswith("--")}
        found += [f"{session} has no option {option}" for option in sorted(options - _options_if_known(session))]
    gates = [words for session, words in calls if session == "gate"]
    if not any(words[words.index("--junit") + 1] == JUNIT for words in gates if "--junit" in words):
        found.append(f"no gate writes {JUNIT}")
    if not any(RECORDS in words for session, words in calls if session == "compare"):
        found.append(f"nothing compares {RECORDS}")
    return found


def _options_if_known(session: str) -> set[str]:
    return _options(session) if session in ("gate", "compare") else set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_asks_for_what_there_is(file: Path) -> None:
    assert _complaints(file.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("nox -s gate", "nox -s gaet", "there is no nox session 'gaet'"),
        ("--junit", "--junit-xml", "gate has no option --junit-xml"),
        ("gate.xml", "other.xml", f"no gate writes {JUNIT}"),
        ("nox -s compare", "true", f"nothing compares {RECORDS}"),
    ],
)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_planted_fault_is_noticed(file: Path, old: str, new: str, complaint: str) -> None:
    text = file.read_text("utf-8")
    assert old in text, "the planted fault must change the file"
    assert complaint in _complaints(text.replace(old, new))


def test_the_workflow_has_the_keys_that_github_wants() -> None:
    workflow = yaml.safe_load(GITHUB.read_text("utf-8"))
    # YAML 1.1 reads the key `on` as true.
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}
    assert set(workflow[True]) == {"push", "pull_request"}
    (job,) = workflow["jobs"].values()
    assert set(job) == {"runs-on", "timeout-minutes", "permissions", "steps"}
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step), f"a step uses an action or runs a command: {step}"
        assert set(step) <= {"name", "if", "uses", "run", "with", "env", "continue-on-error"}
    kept = next(step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact"))
    assert kept["if"] == "always()", "records of a gate that closed are those that somebody wants to see"
    assert "results/runs/" in kept["with"]["path"].split()


def test_no_text_of_a_pull_request_becomes_code() -> None:
    """What `${{ }}` inserts into a command is run by the shell: such values come in through `env` only."""
    (job,) = yaml.safe_load(GITHUB.read_text("utf-8"))["jobs"].values()
    assert not [step["run"] for step in job["steps"] if "${{" in step.get("run", "")]
    assert job["permissions"] == {"contents": "read", "pull-requests": "write"}, "no more than a comment takes"


def test_gitlab_shows_the_verdicts() -> None:
    (job,) = yaml.safe_load(GITLAB.read_text("utf-8")).values()
    assert job["artifacts"]["reports"] == {"junit": JUNIT}
    assert job["artifacts"]["when"] == "always"
    assert "results/runs/" in job["artifacts"]["paths"]
