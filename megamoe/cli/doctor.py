"""`megamoe doctor`: the diagnosis as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from megamoe.cli.diagnosis import diagnose
from megamoe.cli.options import Specs, console


def doctor(
    specs: Specs = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON array instead of a table.")] = False,
) -> None:
    """Says what can run here and, for what cannot, why."""
    findings = list(diagnose(specs))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return
    table = Table(box=None, show_header=False)
    for finding in findings:
        mark = "[green]yes[/]" if finding.works else "[yellow]no[/]"
        table.add_row(mark, escape(finding.subject), escape(finding.detail))
    console().print(table)
