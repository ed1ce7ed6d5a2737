"""Options that several commands share, and what they all ask of the terminal and the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.models import OptionInfo

from megamoe.spec.selection import DEFAULT_EXECUTOR, DEFAULT_PROFILE, Selection, SelectionError


def _names(option: str, metavar: str, meaning: str, default: str) -> OptionInfo:
    return typer.Option(option, metavar=metavar, help=f"{meaning}  [default: {default}]")


_Names = list[str] | None
Ops = Annotated[_Names, _names("--op", "OP", "Only this op.", "all")]
Cases = Annotated[_Names, _names("--case", "ID", "This case, instead of a profile's.", "the profile's")]
Wheres = Annotated[_Names, _names("--where", "FILTER", 'Axis filter such as "hd=64|128,t=1".', "none")]
ProfileName = Annotated[str | None, _names("--profile", "NAME", "smoke, full, schedules, ...", DEFAULT_PROFILE)]
Backends = Annotated[_Names, _names("--backend", "NAME", "Registered, or package.module:ATTRIBUTE.", "all")]
Targets = Annotated[_Names, _names("--target", "NAME", "sm_90a or sm_100a.", "what the backend has")]
Executors = Annotated[_Names, _names("--executor", "NAME", "As for --backend.", DEFAULT_EXECUTOR)]
Schedules = Annotated[_Names, _names("--schedule", "NAME", "eager, lazy, random:SEED, random:0-7.", "the profile's")]
JOBS = os.cpu_count() or 1
Specs = Annotated[Path | None, _names("--specs", "FOLDER", "Folder of the specs.", "specs of the checkout")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Worker processes.")]
TimeLimit = Annotated[float, typer.Option("--timeout", min=0.1, help="Host seconds a row.")]
Expected = Annotated[Path | None, _names("--expected", "FILE", "Known failures.", "conformance/expected.yaml")]


@dataclass(frozen=True, slots=True)
class Asked:
    """The values of the options that select rows; None for an option that was not given."""

    profile: str | None = None
    op: list[str] | None = None
    case: list[str] | None = None
    where: list[str] | None = None
    backend: list[str] | None = None
    target: list[str] | None = None
    executor: list[str] | None = None
    schedule: list[str] | None = None

    @property
    def anything(self) -> bool:
        """Whether any option was given."""
        return self != Asked()

    def selection(self) -> Selection:
        """The selection. Raises SelectionError for options that contradict each other."""
        if self.case and (self.profile or self.op):
            raise SelectionError("--case names its own rows: drop --profile and --op")
        find_modules_of_the_user([*(self.backend or ()), *(self.executor or ())])
        return Selection(
            self.profile or DEFAULT_PROFILE,
            *(tuple(names or ()) for names in (self.op, self.case, self.where, self.backend)),
            *(tuple(names or ()) for names in (self.target, self.executor, self.schedule)),
        )


_ASKED = {
    "profile": ProfileName,
    "op": Ops,
    "case": Cases,
    "where": Wheres,
    "backend": Backends,
    "target": Targets,
    "executor": Executors,
    "schedule": Schedules,
}


def with_selection(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter `asked` of `command` by the options that select rows.

    Typer reads options from the signature, so this makes a signature.
    """
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_ASKED[name]) for name in _ASKED]
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        asked = parameter.name == "asked"
        parameters += options if asked else [parameter.replace(kind=Parameter.KEYWORD_ONLY)]

    @wraps(command)
    def with_options(**given: object) -> None:
        asked = Asked(**{name: given.pop(name) for name in _ASKED})  # pyright: ignore[reportArgumentType]
        command(asked=asked, **given)

    with_options.__signature__ = Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return with_options


def find_modules_of_the_user(names: list[str]) -> None:
    """Lets package.module:ATTRIBUTE name a module in the current folder; a console script does not search there."""
    if any(":" in name for name in names) and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def console() -> Console:
    """The console of a command: as wide as the terminal, or 200 columns where there is none."""
    found = Console(highlight=False, soft_wrap=True)
    return found if found.is_terminal else Console(highlight=False, soft_wrap=True, width=200)


def in_ci() -> bool:
    """Whether a CI service runs this. All of them set CI."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
