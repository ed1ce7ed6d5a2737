"""The `megamoe` command: its subcommands, and how each of them ends.

Exit status: 0 all well, 1 the gate is closed, 2 unusable input (one sentence on stderr), 130 interrupted, 141 nobody
reads the output. A command that ends without giving its verdict never ends with 0.

Only the requested command is imported, so that a typing error is reported at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, cast

import typer

from megamoe.cli import INTERRUPTED, READER_GONE

# typer bundles click and names only click's most specific errors.
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])
_WRONG_VALUE = re.compile(r"Invalid value for '(?P<option>[^']+)'.*?: (?:Value error, )?(?P<why>.+)", re.DOTALL)
"""What typer says about the value of an option."""
_COMMANDS = {
    "list": ("show", "list_cases"),
    "run": ("run", "run"),
    "check": ("check", "check"),
    "gate": ("gate", "gate"),
    "accept": ("gate", "accept"),
    "compare": ("views", "compare"),
    "doctor": ("show", "doctor"),
    "explain": ("show", "explain_case"),
    "report": ("views", "report"),
    "schema": ("show", "schema"),
}
"""Name -> module of megamoe.cli, function."""
_EXPORT = "export"
_ALL = (*_COMMANDS, _EXPORT)
_COMPLETING = "_MEGAMOE_COMPLETE"
"""The variable that a shell sets to request completions."""


class Ended(Exception):
    """A command ended early, with an exit status and a sentence, which is empty if nobody would read it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text

    def __str__(self) -> str:
        return self.text


def _user_errors() -> tuple[type[Exception], ...]:
    """The exceptions that unusable input raises."""
    from megamoe.diff.sides import ComparisonError
    from megamoe.gate.expected import ExpectedError
    from megamoe.records.lines import RecordError
    from megamoe.spec.marked_yaml import SpecError
    from megamoe.spec.selection import SelectionError

    return SelectionError, SpecError, RecordError, ExpectedError, ComparisonError


def _ending(command: Callable[..., None]) -> Callable[..., None]:
    """Wraps `command` so that every early end becomes Ended."""

    @wraps(command)
    def ended(*arguments: object, **options: object) -> None:
        try:
            command(*arguments, **options)
        except SystemExit as end:
            raise Ended(
                2, f"something it called ended the command by sys.exit({end.code!r}), without a verdict"
            ) from end
        except KeyboardInterrupt:
            raise Ended(INTERRUPTED, "interrupted") from None
        except BrokenPipeError:
            raise Ended(READER_GONE, "") from None
        except _user_errors() as error:
            raise Ended(2, str(error)) from error
        except OSError as error:
            # About stdout, the temporary or the current folder. Files that a command names have better messages.
            where = f" {error.filename}" if error.filename else ""
            raise Ended(2, f"cannot read or write{where}: {error.strerror or error}") from error

    return ended


def _version(asked: bool) -> None:
    if asked:
        print(f"megamoe {version('megamoe')}")
        raise typer.Exit


def _house(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Conformance and benchmark harness for attention and NVFP4 Mixture-of-Experts kernels."""


def app(names: Iterable[str] = _ALL) -> typer.Typer:
    """A typer app with the commands of these names."""
    made = typer.Typer(
        name="megamoe",
        help="Conformance and benchmark harness for attention and NVFP4 Mixture-of-Experts kernels.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_house)
    for name in names:
        if name == _EXPORT:
            made.add_typer(_export(), name=name)
        else:
            module, function = _COMMANDS[name]
            made.command(name)(_ending(getattr(import_module(f"megamoe.cli.{module}"), function)))
    return made


def _export() -> typer.Typer:
    from megamoe.cli import views

    made = typer.Typer(no_args_is_help=True, help="Exports records to other tools' formats.")
    made.callback()(views.formats)
    made.command("flashinfer")(_ending(views.export_flashinfer))
    return made


def _named(words: Sequence[str]) -> str | None:
    """The command that a command line names."""
    return next((word for word in words if not word.startswith("-")), None)


def _path(words: Sequence[str]) -> str:
    """The command that a command line names, with its own subcommand."""
    named = [word for word in words if not word.startswith("-")]
    depth = 2 if named[:2] == [_EXPORT, "flashinfer"] else 1
    return " ".join(("megamoe", *named[:depth]))


def _needed(words: Sequence[str]) -> Sequence[str]:
    """The commands that a command line may use: all of them for `--help`, a typing error or a completion."""
    named = _named(words)
    if _COMPLETING in os.environ or not (named in _ALL or list(words) == ["--version"]):
        return _ALL
    return () if named is None else (named,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (sys.argv[1:] by default) and returns its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = app(_needed(words))(args=words, prog_name="megamoe", standalone_mode=False)
        sys.stdout.flush()
    except (Ended, OSError, _UsageError) as error:
        from megamoe.cli import terminal

        status, text = _end_of(error, _path(words))
        if not isinstance(error, Ended | _UsageError) or status == READER_GONE:
            terminal.let_go_of_stdout()
        if text:
            terminal.complain(text)
    return status if isinstance(status, int) else 0


def _end_of(error: Exception, command: str) -> tuple[int, str]:
    """The exit status and the message for a `command`, such as "megamoe run", that ended with `error`."""
    if isinstance(error, Ended):
        return error.status, "" if error.status == READER_GONE else f"megamoe: {error}"
    if isinstance(error, BrokenPipeError):
        return READER_GONE, ""
    if isinstance(error, OSError):
        return 2, f"megamoe: cannot write the output: {error.strerror or error}"
    return 2, _refusal(error, command)


def _refusal(error: Exception, command: str) -> str:
    """One sentence from typer's message about an option, a value, an argument or a command.

    A group without any command ends with its help instead.
    """
    context, text = getattr(error, "ctx", None), str(getattr(error, "format_message", error.__str__)())
    if text.startswith("Usage:"):
        return text
    text = text.rstrip(".")
    if wrong := _WRONG_VALUE.fullmatch(text):
        return f"megamoe: {wrong['option']}: {wrong['why']}"
    said, _, guess = text.partition(". Did you mean ")
    if options := getattr(error, "possibilities", None):
        said, guess = str(getattr(error, "message", text)), f"{' or '.join(sorted(options))}?"
    end = f"did you mean {guess}" if guess else f"see {context.command_path if context else command} --help"
    return f"megamoe: {said[0].lower()}{said[1:]}; {end}"
