"""The page: one HTML file that holds its style, script and data, and needs no network.

A content security policy admits this style and this script by their digests, so nothing in a record can run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from megamoe.records.keys import SEVERITY
from megamoe.report.encoding import Encoder, Json, number
from megamoe.report.evidence import ForeignKernel, InstructionForm, RowFiles
from megamoe.report.layout import Block, Listing, lay_out, spans
from megamoe.report.material import Material
from megamoe.report.measures import MEASURES, SIGNS
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.spec import Spec

if TYPE_CHECKING:
    from megamoe.diff.differ import ComparedRow, Comparison

SCRIPTS = (
    "data.js", "dom.js", "heatmap.js", "plots.js", "detail.js", "performance.js", "listings.js", "keyboard.js",
    "main.js",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extras:
    """What a report shows besides records. `made`: when; `specs`: op -> spec, used to lay out the cases."""

    specs: Mapping[str, Spec]
    made: datetime
    revision: str | None = None
    version: str = ""
    bundles: Mapping[str, RowFiles] | None = None
    traces: Mapping[str, RowFiles] | None = None
    comparison: Comparison | None = None
    coverage: tuple[InstructionForm, ...] = ()
    foreign_kernels: tuple[ForeignKernel, ...] = ()


def page(material: Material, extras: Extras) -> str:
    """The whole HTML text."""
    script = "\n".join(asset(name) for name in SCRIPTS)
    script = f"(() => {{\n{script}\n}})();\n"
    style = asset("report.css")
    environment = Environment(loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("template.html.j2").render(
        style=Markup(style),
        script=Markup(script),
        style_digest=_digest(style),
        script_digest=_digest(script),
        data=Markup(embedded(page_data(material, extras))),
        made=extras.made,
    )


@cache
def asset(name: str) -> str:
    """The text of a file in assets."""
    return (files("megamoe.report") / "assets" / name).read_text(encoding="utf-8")


def embedded(data: Json) -> str:
    """`data` as JSON in ASCII without <, > and &, so it cannot end the script element around it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page_data(material: Material, extras: Extras) -> Json:
    """The page's data as one object; encoding.py defines the form of its lines."""
    encoder = Encoder(material)
    newest = {id(line) for line in material.latest_timings}
    data: Json = {
        "made": {"at": extras.made.isoformat(timespec="seconds"), "revision": extras.revision, "by": extras.version},
        "sources": [{"path": str(file.path), "lines": len(file.lines)} for file in material.files],
        "notes": list(material.notes),
        "runs": [header.model_dump(mode="json", exclude={"kind", "schema_version"}) for header in material.runs],
        "records": [encoder.record(line) for line in material.records],
        "agreements": [encoder.agreement(line) for line in material.agreements],
        "timings": [encoder.timing(line, id(line) in newest) for line in material.timings],
        "figures": [encoder.figures(line) for line in material.figures],
        "acceptances": [line.model_dump(mode="json", include=_ACCEPTANCE) for line in material.acceptances],
        "measures": [asdict(measure) for measure in MEASURES],
        "signs": dict(SIGNS),
        "severity": list(SEVERITY),
        "ops": {op: _op(op, material, encoder, extras.specs.get(op)) for op in material.ops},
        "work": _work(material, encoder),
        "bundles": {name: asdict(one) for name, one in (extras.bundles or {}).items()},
        "traces": {name: asdict(one) for name, one in (extras.traces or {}).items()},
        "comparison": extras.comparison and _comparison(extras.comparison, encoder),
        "coverage": [[one.family, one.form, one.section, one.witness, *one.kernels] for one in extras.coverage],
        "foreign": [asdict(one) for one in extras.foreign_kernels],
    }
    return {**data, **encoder.tables(), "run_ids": encoder.runs.values}


_ACCEPTANCE = {"row", "reason", "accepted", "git_revision", "changes"}


def _op(op: str, material: Material, encoder: Encoder, spec: Spec | None) -> Json:
    lines = (*material.records, *material.timings, *material.figures)
    cases = list(dict.fromkeys(line.case for line in lines if line.op == op))
    return {
        "doc": "" if spec is None else spec.doc,
        "cosine": None if spec is None else spec.tolerance.cosine,
        "published": [encoder.cases[case] for case in cases if spec is not None and _published(spec, case)],
        "blocks": [_block(block, encoder) for block in lay_out(spec, cases)],
    }


def _published(spec: Spec, case: str) -> bool:
    try:
        return spec.published(spec.parse_case(case))
    except SpecError:
        return False


def _block(block: Block, encoder: Encoder) -> Json:
    if isinstance(block, Listing):
        return {"title": block.title, "cases": [encoder.cases[case] for case in block.cases], "shared": block.shared}
    return {
        "title": block.title,
        "row": block.row_axis,
        "rows": block.rows,
        "columns": block.column_axes,
        "headers": [spans(block.columns, level) for level in range(len(block.column_axes))],
        "cells": [[None if case is None else encoder.cases[case] for case in row] for row in block.cells],
        "shared": [f"{name}={value}" for name, value in block.fixed.items()],
    }


def _work(material: Material, encoder: Encoder) -> Json:
    """Case -> useful FLOPs and minimum bytes, its place under a roofline."""
    found = {one.case: one.counters for one in material.records if {"useful_flops", "minimum_bytes"} <= {*one.counters}}
    return {str(encoder.cases[case]): [one["useful_flops"], one["minimum_bytes"]] for case, one in found.items()}


def _comparison(found: Comparison, encoder: Encoder) -> Json:
    return {
        "before": found.before,
        "after": found.after,
        "line": found.line,
        "status": found.exit_status(),
        "notes": list(found.notes),
        "across": list(found.across),
        "counts": dict(found.counts),
        "rows": [_compared(row, encoder) for row in found.rows],
    }


def _compared(row: ComparedRow, encoder: Encoder) -> list[object]:
    key = row.key
    times = [row.before_us, row.after_us, row.ratio, row.low, row.high, row.threshold]
    return [
        key.kind, encoder.cases[key.case], key.backend, key.target, key.by, key.variant, row.call,
        int(row.regression), encoder.texts[row.sentence], row.before_status, row.after_status,
        None if row.ratio is None else [None if value is None else number(value) for value in times],
        [str(change) for change in row.changes],
    ]  # fmt: skip
