"""Options that several commands share, their shell completions, and what they mean."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from megamoe import CHECKOUT
from megamoe.contract import TARGETS, backend_names, executor_names
from megamoe.gate.expected import Expectation, read_expected
from megamoe.judge.run import DEFAULT_TIMEOUT_S
from megamoe.records.lines import shortened
from megamoe.records.shards import Nth
from megamoe.runner.limits import MAX_JOBS
from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import DEFAULT_EXECUTOR, DEFAULT_PROFILE, Selection, SelectionError


def _completed(known: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completer that offers the `known` values. It offers none if the specs cannot be read."""

    def starting_with(incomplete: str) -> list[str]:
        try:
            return [name for name in known() if name.startswith(incomplete)]
        except SpecError:
            return []

    return starting_with


def _profiles() -> list[str]:
    return sorted({name for spec in load_specs().values() for name in spec.profiles})


def _case_ids() -> list[str]:
    return sorted({case.id for spec in load_specs().values() for cases in spec.matrices.values() for case in cases})


def _names(
    option: str, metavar: str, meaning: str, default: str, known: Callable[[], Iterable[str]] | None = None
) -> OptionInfo:
    text = f"{meaning}  [default: {default}]"
    return typer.Option(option, metavar=metavar, help=text, autocompletion=_completed(known) if known else None)


Number = TypeVar("Number", int, float)


def bounded(kind: Callable[[str], Number], least: Number, most: Number) -> Callable[[object], Number]:
    """Parser for an option: a number of `kind` from `least` to `most`, or an error that quotes the input."""
    what = "whole number" if kind is int else "number"

    def parsed(text: object) -> Number:
        try:
            value = kind(str(text))
        except ValueError:
            value = None
        # NaN is outside any bounds.
        if value is None or not least <= value <= most:
            raise typer.BadParameter(f"{shortened(repr(str(text)))} is no {what} from {least:,} to {most:,}")
        return value

    return parsed


_Names = list[str] | None
Ops = Annotated[_Names, _names("--op", "OP", "Only this op.", "all", load_specs)]
Cases = Annotated[_Names, _names("--case", "ID", "This case, instead of a profile's.", "the profile's", _case_ids)]
Wheres = Annotated[_Names, _names("--where", "FILTER", 'Axis filter such as "hd=64|128,t=1".', "none")]
ProfileName = Annotated[str | None, _names("--profile", "NAME", "smoke, full, ...", DEFAULT_PROFILE, _profiles)]
Backends = Annotated[
    _Names, _names("--backend", "NAME", "Registered, or package.module:ATTRIBUTE.", "all", backend_names)
]
Targets = Annotated[_Names, _names("--target", "NAME", "sm_90a or sm_100a.", "what the backend has", lambda: TARGETS)]
Executors = Annotated[_Names, _names("--executor", "NAME", "As for --backend.", DEFAULT_EXECUTOR, executor_names)]
Schedules = Annotated[
    _Names,
    _names(
        "--schedule",
        "NAME",
        "eager, lazy, late_cta:RANK, late_warp:INDEX, random:SEED, random:0-7.",
        "the profile's",
        lambda: ("eager", "lazy"),
    ),
]
JOBS = os.cpu_count() or 1
Specs = Annotated[Path | None, _names("--specs", "FOLDER", "Folder of the specs.", "specs of the checkout")]
MAX_TIMEOUT_S = 7 * 24 * 3600
Jobs = Annotated[int, typer.Option("--jobs", parser=bounded(int, 1, MAX_JOBS), metavar="N", help="Worker processes.")]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--timeout",
        parser=bounded(float, 0.1, MAX_TIMEOUT_S),
        metavar="SECONDS",
        help="Time limit per row, in host seconds.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help='Run rows as tasks of this Ray cluster; "local" starts one here.'),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only problems and the verdict.")]
Expected = Annotated[
    Path | None, _names("--expected", "FILE", "Known failures.", "conformance/expected.yaml, for our specs")
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that select rows; None for an option that was not given."""

    profile: ProfileName = None
    op: Ops = None
    case: Cases = None
    where: Wheres = None
    backend: Backends = None
    target: Targets = None
    executor: Executors = None
    schedule: Schedules = None

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


@dataclass(frozen=True, slots=True)
class HowCompared:
    """How two sides are compared."""

    across: Annotated[
        bool, typer.Option("--across", help="Compare across machines or versions; the result is labelled.")
    ] = False
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="NEW=OLD", help="Compare backend NEW with backend OLD of BEFORE."),
    ] = None


@dataclass(frozen=True, slots=True)
class Effort:
    """The resources that a run may use."""

    jobs: Jobs = JOBS
    timeout: TimeLimit = DEFAULT_TIMEOUT_S
    ray: Ray = None


@dataclass(frozen=True, slots=True)
class Sought:
    """Which kernel findings count, and how they are reported."""

    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="strict, default or lenient: which findings count.")
    ] = "default"
    suppress: Annotated[
        Path | None, typer.Option("--suppress", metavar="FILE", help="YAML file of findings to ignore.")
    ] = None
    format: Annotated[str, typer.Option("--format", metavar="NAME", help="text, json, sarif or junit.")] = "text"
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write findings here.  [default: standard output]")
    ] = None


class Size(tuple[int, ...]):
    """Sizes along up to three dimensions. For a plain tuple typer would want several arguments."""

    __slots__ = ()


_ONE, _BLOCK = Size((1,)), Size((128,))


def _parsed_size(text: object) -> Size:
    if isinstance(text, Size):
        return text
    try:
        return Size(int(part) for part in str(text).split(","))
    except ValueError:
        raise typer.BadParameter(f"{shortened(repr(str(text)))} is no size; write 8 or 8,2,1") from None


def _size(option: str, meaning: str) -> OptionInfo:
    return typer.Option(option, parser=_parsed_size, metavar="X[,Y[,Z]]", help=meaning)


MAX_SMEM = 1 << 20
"""More than any CTA has; the machine reports the actual limit."""


@dataclass(frozen=True, slots=True)
class AskedLaunch:
    """How `megamoe check` launches a kernel. `timeout` also limits reading a kernel, and launches in tests."""

    grid: Annotated[Size, _size("--grid", "CTAs of the grid.")] = _ONE
    block: Annotated[Size, _size("--block", "Threads of a CTA.")] = _BLOCK
    cluster: Annotated[Size, _size("--cluster", "CTAs of a cluster.")] = _ONE
    smem: Annotated[
        int,
        typer.Option(
            "--smem", parser=bounded(int, 0, MAX_SMEM), metavar="BYTES", help="Dynamic shared memory of a CTA."
        ),
    ] = 0
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="VALUE",
            help="An argument: f32[1024] (random; also f16, f64, bf16, e4m3, e5m2), s32[4] (zeros), 3.0, null.",
        ),
    ] = None
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            parser=bounded(float, 0.1, MAX_TIMEOUT_S),
            metavar="SECONDS",
            help="Time limit per launch, in seconds.",
        ),
    ] = DEFAULT_TIMEOUT_S

    @property
    def idle(self) -> str:
        """A given option that only a launch uses; "" if there is none."""
        asked = (one for one in fields(self) if one.name != "timeout" and getattr(self, one.name) != one.default)
        return next((one.name for one in asked), "")


@dataclass(frozen=True, slots=True)
class Rules:
    """What rows are checked against. `specs`, `expected`: None for ours."""

    specs: Specs = None
    expected: Expected = None


@dataclass(frozen=True, slots=True)
class Share:
    """Which share of the rows to run or judge."""

    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Run part I of N parts of about equal cost.")
    ] = None
    run_set: Annotated[
        str | None,
        typer.Option("--run-set", metavar="ID", help="Name that all shards share.  [default: from their rows]"),
    ] = None

    @property
    def nth(self) -> Nth | None:
        """The shard; None for all rows. Raises SelectionError for options that name none."""
        if self.shard is None and self.run_set is not None:
            raise SelectionError("--run-set names what shards have in common: give --shard I/N too")
        return None if self.shard is None else Nth.parse(self.shard, self.run_set or "")


GROUPS = (Asked, HowCompared, Effort, Sought, AskedLaunch, Rules, Share)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each parameter of `command` whose type is one of GROUPS by one option per field.

    Typer reads options from the signature, so this builds a signature.
    """
    groups: dict[str, type] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        if parameter.annotation in GROUPS:
            groups[parameter.name] = parameter.annotation
            hints = get_type_hints(parameter.annotation, include_extras=True)
            parameters += [
                Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
                for one in fields(parameter.annotation)
            ]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def with_groups(**given: object) -> None:
        made = {
            name: group(**{one.name: given.pop(one.name) for one in fields(group)}) for name, group in groups.items()
        }
        command(**made, **given)

    with_groups.__signature__ = Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return with_groups


def find_modules_of_the_user(names: list[str]) -> None:
    """Makes package.module:ATTRIBUTE find modules in the current folder, where a console script does not search."""
    if any(":" in name for name in names) and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


EXPECTED = CHECKOUT / "conformance" / "expected.yaml"


def expectations_of(path: Path | None, specs: Path | None = None) -> tuple[Expectation, ...]:
    """The entries of `path`, which must exist. Without a path, those of conformance/expected.yaml, if it exists.

    With `specs`, a folder of the user's own, and no path: none, because our entries do not cover other specs.
    """
    if path is None and (specs is not None or not EXPECTED.exists()):
        return ()
    return read_expected(path or EXPECTED)
