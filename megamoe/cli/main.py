"""The `megamoe` command: each file of this room adds a subcommand.

Exit status: 0 all well, 1 the gate is closed, 2 input that cannot be used (one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from megamoe.cli import accept, check, compare, doctor, explain, export, gate, report, run, schema
from megamoe.cli import list as list_
from megamoe.diff.sides import ComparisonError
from megamoe.gate.expected import ExpectedError
from megamoe.records.lines import RecordError
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import SelectionError

USER_ERRORS = (SelectionError, SpecError, RecordError, ExpectedError, ComparisonError)

app = typer.Typer(
    name="megamoe",
    help="Conformance and benchmark harness for attention and NVFP4 Mixture-of-Experts kernels.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("list")(list_.list_cases)
app.command("run")(run.run)
app.command("check")(check.check)
app.command("gate")(gate.gate)
app.command("accept")(accept.accept)
app.command("compare")(compare.compare)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain_case)
app.add_typer(export.export, name="export")
app.command("report")(report.report)
app.command("schema")(schema.schema)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (sys.argv[1:] by default) and returns its exit status."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="megamoe")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except USER_ERRORS as error:
        print(f"megamoe: {error}", file=sys.stderr)
        return 2
    return 0
