"""Records that try to break out of the page or the terminal, and readers of both."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from math import inf, nan
from pathlib import Path

from rich.console import Console

from conformance.fakes.results import write
from megamoe.contract import Row
from megamoe.records.lines import AnyLine, Evidence, Record, record_of
from megamoe.report.material import Material, gather
from megamoe.report.page import Extras, page
from megamoe.report.text import tables
from megamoe.spec.load import load_specs

SPECS = load_specs()
NOW = datetime(2026, 11, 21, 18, 0, tzinfo=UTC)
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "é 漢字 \u2028 \u202e rtl \x00 \ufffd 🙂",
    "[/bold] [red]no markup[/red] \\",
    "{{ 7 * 7 }} {% raw %}",
    "x" * 10_000,
)


def hostile_records() -> list[Record]:
    rows = [Row(f"fmha:hd=64,t={t},s_k=128", "ptx", "sm_100a", "vm", "eager") for t in range(1, len(HOSTILE) + 1)]
    found = [record_of("run-1", row, "failed", text, host_seconds=1.0) for row, text in zip(rows, HOSTILE, strict=True)]
    odd = Row("fmha:it's <b>odd</b>", "back'end", "sm_100a", "vm", "eager")
    metrics = {"o.rms": nan, "o.rms.bar": 0.1, "o.max": inf, "o.max.bar": 1.0, "o.cosine": -inf, "a2.wrong": 3.0}
    return [
        *found,
        record_of("run-1", odd, "failed", "NaN", Evidence(metrics, {"mma_flops": 10**15, "useful_flops": 3}), 1.0),
    ]


def material_of(tmp_path: Path, *lines: AnyLine) -> Material:
    return gather([write(tmp_path / "lines.jsonl", *lines)])


def data_of(material: Material) -> dict[str, object]:
    """The data read back from the text of the page."""
    return data_in(page(material, Extras(SPECS, NOW)))


def data_in(text: str) -> dict[str, object]:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert len(found) == 1, "the page has its data once"
    return json.loads(found[0])


def printed(material: Material) -> str:
    """The output of `megamoe report --text` on a terminal of 200 columns."""
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        console.print(tables(material, SPECS))
    return capture.get()
