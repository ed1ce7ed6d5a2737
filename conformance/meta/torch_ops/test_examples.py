"""The examples of docs/torch.md run, in this process: a process each would mostly import torch."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

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
