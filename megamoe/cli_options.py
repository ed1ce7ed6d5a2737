"""Options that several commands share. Names may be given several times."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.models import OptionInfo

from megamoe.rows import DEFAULT_EXECUTOR, DEFAULT_PROFILE, Selection, SelectionError


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
Specs = Annotated[Path | None, _names("--specs", "FOLDER", "Folder of the specs.", "specs of the checkout")]
Expected = Annotated[Path | None, _names("--expected", "FILE", "Known failures.", "conformance/expected.yaml")]


def selection_of(
    profile: str | None,
    ops: list[str] | None,
    cases: list[str] | None,
    where: list[str] | None,
    backends: list[str] | None,
    targets: list[str] | None,
    executors: list[str] | None,
    schedules: list[str] | None,
) -> Selection:
    """The selection that the options ask for. Raises SelectionError for a contradiction."""
    if cases and (profile or ops):
        raise SelectionError("--case names its own rows: drop --profile and --op")
    find_modules_of_the_user([*(backends or ()), *(executors or ())])
    return Selection(
        profile or DEFAULT_PROFILE,
        *(tuple(names or ()) for names in (ops, cases, where, backends, targets, executors, schedules)),
    )


def find_modules_of_the_user(names: list[str]) -> None:
    """Lets package.module:ATTRIBUTE mean a module in the current folder, which a console script cannot see."""
    if any(":" in name for name in names) and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def console() -> Console:
    """Where a command prints: as wide as the terminal, and wide enough for any table where there is none."""
    found = Console(highlight=False, soft_wrap=True)
    return found if found.is_terminal else Console(highlight=False, soft_wrap=True, width=200)


def in_ci() -> bool:
    """Whether a CI service runs this: they all set CI."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
