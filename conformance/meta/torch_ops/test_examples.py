"""The examples of docs/torch.md run, in this process: separate processes would mostly import torch."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from statistics import median

import pytest

from conformance import ROOT

EXAMPLES = sorted((ROOT / "examples" / "operators").glob("*.py"))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if "safetensors" in example.read_text("utf-8"):
        pytest.importorskip("safetensors")
    runpy.run_path(str(example), run_name="__main__")
    assert capfd.readouterr().out.strip(), "an example says what it found"


def test_the_page_names_each_example() -> None:
    page = (ROOT / "docs" / "torch.md").read_text("utf-8")
    linked = {(ROOT / "docs" / path).resolve() for path in re.findall(r"\]\((\.\./[\w./-]+)\)", page)}
    assert {path for path in linked if not path.exists()} == set(), "the page links to what is not there"
    assert set(EXAMPLES) <= linked, "an example that no page names"


def test_the_costs_on_the_page_are_those_of_the_record() -> None:
    page = (ROOT / "docs" / "torch.md").read_text("utf-8")
    record = json.loads((ROOT / "results" / "records" / "h200-torch-ops.json").read_text("utf-8"))
    processes = record["operators, six processes on two hosts"]
    for line, name in {
        "`megamoe.attention`": "megamoe.attention",
        "of it the registered operator": "torch.ops.megamoe.attention",
        "of it allocating outputs and workspaces, and the launch": "launch path: allocate, address, launch",
        "of it the launch": "launch alone",
    }.items():
        ours = [
            f"{median(one[f'attention_cost {backend}'][name]['median'] for one in processes):.1f}"
            for backend in ("ptx", "cutedsl")
        ]
        assert f"| {line} | {' | '.join(ours)} |" in page, f"{line}: the record has {ours}"
    for tokens in (64, 512, 4096):
        times = record["ranks"][f"{tokens} tokens"]
        row = f"| {tokens} | {times['one GPU, us']:.0f} | {times['2 GPUs, us']:.0f} |"
        assert row in page, f"the record has {row}"
