"""The `megamoe` command: its subcommands, and how any of them ends.

Exit status: 0 all well, 1 the gate is closed, 2 input that cannot be used (one sentence on stderr), 130 interrupted,
141 nobody reads the output. A command that ends without having said its verdict never ends with 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, cast

import typer

from megamoe.cli import check, gate, run, show, views
from megamoe.cli.terminal import READER_GONE, complain, let_go_of_stdout
from megamoe.diff.sides import ComparisonError
from megamoe.gate.expected import ExpectedError
from megamoe.records.lines import RecordError
from megamoe.records.provenance import installed_version
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import SelectionError

USER_ERRORS = (SelectionError, SpecError, RecordError, ExpectedError, ComparisonError)
# typer has a copy of click inside and names only the most special of its errors.
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])


class Ended(Exception):
    """A command that did not come to its end, with the exit status and a sentence, empty if nobody would read it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _ending(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose every way to end but its own becomes Ended."""

    @wraps(command)
    def ended(*arguments: object, **options: object) -> None:
        try:
            command(*arguments, **options)
        except SystemExit as end:
            raise Ended(
                2, f"something it called ended the command by sys.exit({end.code!r}), without a verdict"
            ) from end
        except KeyboardInterrupt:
            raise Ended(run.INTERRUPTED, "interrupted") from None
        except BrokenPipeError:
            raise Ended(READER_GONE, "") from None
        except USER_ERRORS as error:
            raise Ended(2, str(error)) from error
        except OSError as error:
            # Of stdout, of the temporary folder, of the current one: what a command reads and writes by name says more.
            where = f" {error.filename}" if error.filename else ""
            raise Ended(2, f"cannot read or write{where}: {error.strerror or error}") from error

    return ended


app = typer.Typer(
    name="megamoe",
    help="Conformance and benchmark harness for attention and NVFP4 Mixture-of-Experts kernels.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in {
    "list": show.list_cases,
    "run": run.run,
    "check": check.check,
    "gate": gate.gate,
    "accept": gate.accept,
    "compare": views.compare,
    "doctor": show.doctor,
    "explain": show.explain_case,
    "report": views.report,
    "schema": show.schema,
}.items():
    app.command(_name)(_ending(_command))
_export = typer.Typer(no_args_is_help=True, help="Writes records in the formats of others.")
_export.callback()(views.formats)
_export.command("flashinfer")(_ending(views.export_flashinfer))
app.add_typer(_export, name="export")


def _version(asked: bool) -> None:
    if asked:
        print(f"megamoe {installed_version('megamoe')}")
        raise typer.Exit


@app.callback()
def _house(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Conformance and benchmark harness for attention and NVFP4 Mixture-of-Experts kernels."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (sys.argv[1:] by default) and returns its exit status."""
    try:
        status = app(args=None if arguments is None else list(arguments), prog_name="megamoe", standalone_mode=False)
        sys.stdout.flush()
    except Ended as end:
        if end.status == READER_GONE:
            let_go_of_stdout()
        else:
            complain(f"megamoe: {end}")
        return end.status
    except BrokenPipeError:
        let_go_of_stdout()
        return READER_GONE
    except OSError as error:
        let_go_of_stdout()
        complain(f"megamoe: cannot write the output: {error.strerror or error}")
        return 2
    except _UsageError as error:
        complain(_usage(error))
        return 2
    return status if isinstance(status, int) else 0


def _usage(error: Exception) -> str:
    """What typer would print about options that it cannot use; for a command without any, its help."""
    context, text = getattr(error, "ctx", None), str(getattr(error, "format_message", error.__str__)())
    if context is None or text.startswith("Usage:"):
        return text
    return f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n\nError: {text}"
