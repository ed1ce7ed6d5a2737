"""The CI files that we ship name jobs, options and files that exist, and keep their promises."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from typer.main import get_command

from conformance import ROOT
from megamoe.cli.main import app
from megamoe.contract.cache import user_cache

GITHUB, GITLAB = ROOT / ".github/workflows/conformance.yml", ROOT / ".gitlab-ci.yml"
FILES = (GITHUB, GITLAB)
JUNIT, RECORDS = "results/runs/gate.xml", "results/runs/gate.jsonl"


def _sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text("utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {one.name for one in functions if any(ast.unparse(mark) == "nox.session" for mark in one.decorator_list)}


@functools.cache
def _commands() -> dict[str, Any]:
    return cast("Any", get_command(app())).commands


def _options(command: str) -> set[str]:
    commands = _commands()
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
    """The session and the words after -- for each nox call in a file."""
    for line in (line for part in _texts(yaml.safe_load(text)) for line in part.splitlines()):
        for call in re.findall(r"\bnox -s [^;|]*", line):
            words = shlex.split(call)
            yield words[2], words[4:] if words[3:4] == ["--"] else words[3:]


def _complaints(text: str) -> list[str]:
    """What a CI file uses that does not exist, and what it must use but does not."""
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
    if any("--shard" in words for words in gates):
        if not any(RECORDS in words and "--shard" not in words for words in gates):
            found.append(f"no gate holds {RECORDS} whole")
        if f"cat results/runs/shard-*.jsonl > {RECORDS}" not in text:
            found.append("nothing puts the records of the shards together")
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
        (f"gate -- {RECORDS}", f"gate -- --shard 1/2 {RECORDS}", f"no gate holds {RECORDS} whole"),
        ("cat results", "ls results", "nothing puts the records of the shards together"),
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
    shard, gate = (workflow["jobs"][name] for name in ("shard", "gate"))
    assert set(shard) == {"runs-on", "timeout-minutes", "strategy", "steps"}
    assert set(gate) == {"if", "needs", "runs-on", "timeout-minutes", "permissions", "steps"}
    assert shard["strategy"]["matrix"]["shard"] == [*range(1, len(shard["strategy"]["matrix"]["shard"]) + 1)]
    assert (gate["needs"], gate["if"]) == ("shard", "always()"), "a shard that failed is what the gate must see"
    for job in (shard, gate):
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), f"a step uses an action or runs a command: {step}"
            assert set(step) <= {"name", "id", "if", "uses", "run", "with", "env", "continue-on-error"}
        kept = next(step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact"))
        assert kept["if"] == "always()", "records of a gate that closed are those that somebody wants to see"
        assert "results/runs/" in kept["with"]["path"].split()


def _cached_without_a_key(steps: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with how a workflow caches ~/.cache/megamoe, whose entries are executed; "" if nothing is."""
    for number, step in enumerate(steps):
        if not step.get("uses", "").startswith("actions/cache"):
            continue
        key = next((one for one in steps[:number] if one.get("id") == "key"), None)
        if key is None or "secrets." not in key["env"]["KEY"] or step.get("if") != "steps.key.outputs.kept == 'true'":
            return "a cache is restored where no secret vouches for it"
        home = Path("home")
        files = {name: user_cache(name, home) for name in ("cutedsl", "ptx")}
        for name, cache in files.items():
            assert cache is not None
            if step["with"]["path"] != f"~/{cache.folder.parent.relative_to(home)}":
                return f"{cache.folder} is not what is cached"
            if f"~/{cache.key_file.parent.relative_to(home)}/$cache.key" not in key["run"] or name not in key["run"]:
                return f"no step writes {cache.key_file}"
    return ""


def test_a_cache_in_ci_brings_its_key_or_is_none() -> None:
    job = yaml.safe_load(GITHUB.read_text("utf-8"))["jobs"]["shard"]
    assert _cached_without_a_key(job["steps"]) == ""
    without_condition = [{key: value for key, value in step.items() if key != "if"} for step in job["steps"]]
    without_key = [step for step in job["steps"] if step.get("id") != "key"]
    for planted in (without_condition, without_key):
        assert _cached_without_a_key(planted) == "a cache is restored where no secret vouches for it"
    assert "cache:" not in GITLAB.read_text("utf-8"), "GitLab restores a cache before a job could check its key"


def test_the_key_of_ci_is_one_that_a_cache_takes(tmp_path: Path) -> None:
    job = yaml.safe_load(GITHUB.read_text("utf-8"))["jobs"]["shard"]
    script = next(step["run"] for step in job["steps"] if step.get("id") == "key")
    for secret, kept in (("", False), ("k" * 32, True)):
        home = tmp_path / str(kept)
        home.mkdir()
        environment = {"HOME": str(home), "KEY": secret, "GITHUB_OUTPUT": str(home / "output"), "PATH": os.defpath}
        subprocess.run(["bash", "-e", "-c", script], env=environment, check=True)
        cache = user_cache("ptx", home)
        assert cache is not None
        assert cache.key_file.exists() == kept
        if kept:
            cache.keep("a", b"x")
            assert cache.kept("a", bytes) == b"x"
            assert cache.key_file.read_bytes() == secret.encode(), "the key of CI was replaced"
            assert (home / "output").read_text() == "kept=true\n"


def test_no_text_of_a_pull_request_becomes_code() -> None:
    """The shell runs what `${{ }}` inserts into a command, so such values may only come in through `env`."""
    workflow = yaml.safe_load(GITHUB.read_text("utf-8"))
    shard, gate = (workflow["jobs"][name] for name in ("shard", "gate"))
    assert not [step["run"] for step in (*shard["steps"], *gate["steps"]) if "${{" in step.get("run", "")]
    assert workflow["permissions"] == {"contents": "read"}, "what the jobs of the shards have"
    assert gate["permissions"] == {"contents": "read", "pull-requests": "write"}, "no more than a comment takes"


def test_gitlab_shows_the_verdicts() -> None:
    job = yaml.safe_load(GITLAB.read_text("utf-8"))["conformance"]
    assert job["artifacts"]["reports"] == {"junit": JUNIT}
    assert job["artifacts"]["when"] == "always"
    assert "results/runs/" in job["artifacts"]["paths"]
