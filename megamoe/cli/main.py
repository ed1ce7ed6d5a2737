"""The `megamoe` command. Each cli_*.py adds its commands here; only this family reads the environment.

Exit status: 0 all well, 1 the gate is closed, 2 input that cannot be used (one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from megamoe.cli import (
    accept as cli_accept,
)
from megamoe.cli import (
    compare as cli_compare,
)
from megamoe.cli import (
    doctor as cli_doctor,
)
from megamoe.cli import (
    explain as cli_explain,
)
from megamoe.cli import (
    export as cli_export,
)
from megamoe.cli import (
    gate as cli_gate,
)
from megamoe.cli import (
    list as cli_list,
)
from megamoe.cli import (
    report as cli_report,
)
from megamoe.cli import (
    run as cli_run,
)
from megamoe.cli import (
    schema as cli_schema,
)
from megamoe.diff.sides import ComparisonError
from megamoe.gate.expected import ExpectedError
from megamoe.records.lines import RecordError
from megamoe.spec.error import SpecError
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
app.command("list")(cli_list.list_cases)
app.command("run")(cli_run.run)
app.command("gate")(cli_gate.gate)
app.command("accept")(cli_accept.accept)
app.command("compare")(cli_compare.compare)
app.command("doctor")(cli_doctor.doctor)
app.command("explain")(cli_explain.explain_case)
app.add_typer(cli_export.export, name="export")
app.command("report")(cli_report.report)
app.command("schema")(cli_schema.schema)


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
