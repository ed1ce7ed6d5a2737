"""From a selection (profile, cases, backends, ...) to the rows that a run owes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Literal, cast

from megamoe.contract import (
    TARGETS,
    Case,
    Row,
    Target,
    UnsupportedError,
    backend_names,
    executor_names,
    spell,
)
from megamoe.contract.known_names import nearest
from megamoe.runner.capabilities import Offer, machine_of, offer_of

if TYPE_CHECKING:
    from megamoe.spec.spec import Spec

DEFAULT_EXECUTOR = "vm"
DEFAULT_PROFILE = "smoke"
MAX_SEEDS = 10_000
ROW_FORM = "CASE on BACKEND TARGET EXECUTOR SCHEDULE"
_SCHEDULE = re.compile(r"eager|lazy|(random|late_cta|late_warp):(\d+)(?:-(\d+))?")


class SelectionError(Exception):
    """A selection names something unknown or selects nothing. The text says what would be right."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What to run. Empty tuples mean every op, the profile's cases and schedules, every backend, all its targets.

    `cases`: ids, replacing the profile's cases. `where`: axis filters such as "hd=64". `rows`: exactly these rows, in
    printed form; everything else is then ignored.
    """

    profile: str = DEFAULT_PROFILE
    ops: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    executors: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """One word for file names."""
        return "rows" if self.rows else "cases" if self.cases else self.profile

    @property
    def kept(self) -> dict[str, str | tuple[str, ...]]:
        """What a record header stores. `rows` only if there are any, because older readers and baselines lack it."""
        return {name: value for name, value in asdict(self).items() if value or name != "rows"}

    @property
    def options(self) -> list[str]:
        """The command-line options for the same selection. SelectionError for `rows`, which have no option."""
        if self.rows:
            raise SelectionError("rows of a record file are no options of a command")
        named = {
            "--op": self.ops, "--case": self.cases, "--where": self.where, "--backend": self.backends,
            "--target": self.targets, "--executor": self.executors, "--schedule": self.schedules,
        }  # fmt: skip
        profile = [] if self.cases else ["--profile", self.profile]
        return profile + [word for option, values in named.items() for value in values for word in (option, value)]


def parse_row(text: str) -> Row:
    """The row that `text` names in printed form. SelectionError if it names none."""
    case, on, rest = text.strip().partition(" on ")
    words = rest.split()
    if not on or len(words) != 4 or ":" not in case:
        raise SelectionError(f"{text!r} is no row; rows are printed as {ROW_FORM}, which a shell wants quoted")
    return Row(case.strip(), *words)


def expand_schedules(names: Iterable[str]) -> tuple[str, ...]:
    """ "random:0-7" -> random:0 ... random:7; order kept, duplicates dropped. Raises SelectionError."""
    result: dict[str, None] = {}
    for name in names:
        match = _SCHEDULE.fullmatch(name)
        if not match:
            raise SelectionError(f"schedule {name!r} is not eager, lazy, random:SEED, random:FIRST-LAST, late_cta:RANK "
                                 "or late_warp:INDEX")  # fmt: skip
        if match[1] is None:
            result[name] = None
            continue
        first, last = int(match[2]), int(match[3] or match[2])
        if last < first or last - first >= MAX_SEEDS:
            raise SelectionError(f"schedule range {name!r} must go upwards and hold at most {MAX_SEEDS} seeds")
        result.update({f"{match[1]}:{seed}": None for seed in range(first, last + 1)})
    return tuple(result)


def parse_where(filters: Iterable[str]) -> dict[str, frozenset[str]]:
    """ "hd=64,t=1" -> {"hd": {"64"}, "t": {"1"}}; "hd=64|128" admits either value. Raises SelectionError."""
    result: dict[str, frozenset[str]] = {}
    for part in (part for text in filters for part in text.split(",")):
        axis, equals, values = part.strip().partition("=")
        if not (axis and equals and values):
            raise SelectionError(f"filter {part!r} is not of the form axis=value or axis=value|value")
        result[axis] = result.get(axis, frozenset()) | frozenset(values.split("|"))
    return result


def matching(cases: Iterable[Case], where: Mapping[str, frozenset[str]]) -> list[Case]:
    """The cases whose axes have the wanted values. Raises SelectionError for an axis or a value that no case has."""
    cases = list(cases)
    known = {name for case in cases for name, _ in case.axes}
    unknown = sorted(set(where) - known)
    if unknown and cases:
        axes = sorted(known)
        raise SelectionError(
            f"no selected case has an axis {unknown[0]!r}; axes: {', '.join(axes)}{nearest(unknown[0], axes)}"
        )
    for name, wanted in where.items() if cases else ():
        there = dict.fromkeys(spell(value) for case in cases for axis, value in case.axes if axis == name)
        for value in sorted(wanted - there.keys()):
            raise SelectionError(
                f"no selected case has {name}={value}; {name} is {', '.join(there)}{nearest(value, there)}"
            )
    return [case for case in cases if _has_values(case, where)]


def _has_values(case: Case, where: Mapping[str, frozenset[str]]) -> bool:
    axes = dict(case.axes)
    return all(name in axes and spell(axes[name]) in wanted for name, wanted in where.items())


def selected_specs(specs: Mapping[str, Spec], ops: Sequence[str]) -> list[Spec]:
    """The specs of `ops`, or all. Raises SelectionError for an op that no spec describes."""
    for op in ops:
        if op not in specs:
            known = sorted(specs)
            raise SelectionError(
                f"there is no op {op!r}; specs describe: {', '.join(known) or 'none'}{nearest(op, known)}"
            )
    return [specs[op] for op in (ops or sorted(specs))]


def spec_of(specs: Mapping[str, Spec], case_id: str) -> Spec:
    """The spec of the op at the start of a case id. Raises SelectionError."""
    return selected_specs(specs, [case_id.partition(":")[0]])[0]


def known_cases(spec: Spec) -> dict[str, Case]:
    """Every case in a matrix or a profile of `spec`, by id, in file order."""
    listed = [*spec.matrices.values(), *(profile.cases for profile in spec.profiles.values())]
    return {case.id: case for cases in listed for case in cases}


def _cases_and_schedules(specs: Mapping[str, Spec], selection: Selection) -> list[tuple[Case, tuple[str, ...]]]:
    chosen = expand_schedules(selection.schedules)
    where = parse_where(selection.where)
    found: list[tuple[Case, tuple[str, ...]]] = []
    if selection.cases:
        cases = [spec_of(specs, case).parse_case(case) for case in selection.cases]
        return [(case, chosen or ("eager",)) for case in matching(cases, where)]
    offering = with_name(selected_specs(specs, selection.ops), "profiles", [selection.profile])
    profiles = [spec.profile(selection.profile) for spec in offering]
    kept = {case.id for case in matching((case for profile in profiles for case in profile.cases), where)}
    for profile in profiles:
        schedules = chosen or expand_schedules(profile.schedules)
        found += [(case, schedules) for case in profile.cases if case.id in kept]
    return found


def with_name(specs: Sequence[Spec], kind: Literal["matrices", "profiles"], names: Sequence[str]) -> list[Spec]:
    """The specs with any of `names` among their matrices or profiles; all specs if `names` is empty.

    Ops may have different ones. Raises SelectionError for a name that no spec has.
    """
    known = sorted({name for spec in specs for name in getattr(spec, kind)})
    for name in names:
        if name not in known:
            what = {"matrices": "matrix", "profiles": "profile"}[kind]
            raise SelectionError(
                f"--{what}: {name!r} is no {what} of {' or '.join(spec.op for spec in specs)}; there are "
                f"{', '.join(known)}{nearest(name, known)}"
            )
    return [spec for spec in specs if not names or any(name in getattr(spec, kind) for name in names)]


def checked_targets(names: Iterable[str]) -> tuple[Target, ...]:
    """The names as targets. Raises SelectionError for an unknown one."""
    for name in names:
        if name not in TARGETS:
            raise SelectionError(f"there is no target {name!r}; targets: {', '.join(TARGETS)}{nearest(name, TARGETS)}")
    return cast("tuple[Target, ...]", tuple(names))


def checked_names(kind: str, names: Sequence[str], registered: Sequence[str]) -> tuple[str, ...]:
    """`names`, if each is registered or of the form package.module:ATTRIBUTE. Raises SelectionError."""
    for name in names:
        if name not in registered and ":" not in name:
            known = ", ".join(registered) or "none"
            raise SelectionError(
                f"there is no {kind} {name!r}; registered: {known}; your own: package.module:ATTRIBUTE"
                f"{nearest(name, registered)}"
            )
        if name not in registered and not _module_exists(name.partition(":")[0]):
            raise SelectionError(
                f"the {kind} {name!r} cannot be loaded: there is no module {name.partition(':')[0]!r} here or on "
                "PYTHONPATH; put its folder there"
            )
    return tuple(names)


def _module_exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def targets_of(backend: str, op: str) -> tuple[Target, ...]:
    """The targets for which a backend implements `op`. Raises SelectionError if the backend cannot be loaded."""
    return _offer(backend, op).targets


def _offer(backend: str, op: str) -> Offer:
    try:
        return offer_of(backend, op)
    except UnsupportedError as error:
        raise SelectionError(str(error)) from error


def owed_rows(specs: Mapping[str, Spec], selection: Selection) -> list[Row]:
    """Every row that a run of `selection` owes, most work first.

    A backend with no target for an op owes no rows of it; `not_offered` reports that. But if the op or the case was
    requested by name, and the target too, the row is owed without a kernel and becomes `unsupported`.

    Raises SelectionError, also if nothing is selected, and SpecError for a bad case id.
    """
    if selection.rows:
        return _named_rows(specs, selection.rows)
    backends = checked_names("backend", selection.backends, backend_names()) or backend_names()
    executors = checked_names("executor", selection.executors, executor_names()) or (DEFAULT_EXECUTOR,)
    targets = checked_targets(selection.targets)
    rows: dict[Row, int] = {}
    asked = bool(selection.ops or selection.cases)
    places: dict[str, list[tuple[str, Target, str]]] = {}
    for case, schedules in _cases_and_schedules(specs, selection):
        if case.op not in places:
            places[case.op] = _places(case.op, backends, executors, targets, asked)
        work = work_hint(case)
        for backend, target, executor in places[case.op]:
            names = schedules_of(executor, schedules, bool(selection.schedules))
            rows.update({Row(case.id, backend, target, executor, name): work for name in names})
    if not rows:
        left_out = "".join(f"; {sentence}" for sentence in not_offered(specs, selection))
        raise SelectionError(
            f"the selection holds no row: loosen --profile, --op, --where, --backend, --target or --schedule{left_out}"
        )
    idle = [name for name in selection.backends if name not in {row.backend for row in rows}]
    if idle:
        raise SelectionError(f"backend {idle[0]!r} was asked for, but has no kernel of any selected op: leave it out")
    return sorted(rows, key=lambda row: -rows[row])


def _named_rows(specs: Mapping[str, Spec], texts: Iterable[str]) -> list[Row]:
    rows: dict[Row, int] = {}
    for text in texts:
        row = parse_row(text)
        case = spec_of(specs, row.case).parse_case(row.case)
        checked_names("backend", [row.backend], backend_names())
        checked_names("executor", [row.executor], executor_names())
        checked_targets([row.target])
        expand_schedules([row.schedule])
        rows[row._replace(case=case.id)] = work_hint(case)
    return sorted(rows, key=lambda row: -rows[row])


def _places(
    op: str, backends: Sequence[str], executors: Sequence[str], targets: Sequence[Target], asked: bool
) -> list[tuple[str, Target, str]]:
    """Backend, target and executor of the rows that a case of `op` owes. `asked`: the op or case was named."""
    found: list[tuple[str, Target, str]] = []
    for backend in backends:
        offer = _offer(backend, op)
        for target in (targets or offer.targets) if offer.targets or asked else ():
            own = offer.executors
            found.extend((backend, target, name) for name in executors if own is None or name in own)
    return found


def schedules_of(executor: str, schedules: Sequence[str], asked: bool) -> Sequence[str]:
    """The `schedules` that `executor` has. If it has none of them: () if they were `asked` for, else the executor's
    own.

    Only a software machine orders its agents as requested. A device has one schedule, its own.
    """
    own = _own_schedules(executor)
    return schedules if own is None else [name for name in schedules if name in own] or (() if asked else own)


@cache
def _own_schedules(executor: str) -> tuple[str, ...] | None:
    # The default executor has all schedules. Asking it would make every command import torch.
    if executor == DEFAULT_EXECUTOR:
        return None
    try:
        return machine_of(executor).schedules
    except UnsupportedError:
        # Its rows will say why it cannot be loaded.
        return None


def keeps_time(executor: str) -> bool:
    """Whether an executor has its own clock; False if it does not say."""
    # The default executor has none. Asking it would make every command import torch.
    if executor == DEFAULT_EXECUTOR:
        return False
    try:
        return machine_of(executor).timed
    except UnsupportedError:
        return False


def not_offered(specs: Mapping[str, Spec], selection: Selection) -> list[str]:
    """A sentence for each selected op that no backend implements: none of its rows is owed. Raises as `owed_rows`."""
    if selection.rows:
        return []
    backends = selection.backends or backend_names()
    found: list[str] = []
    for op in dict.fromkeys(case.op for case, _ in _cases_and_schedules(specs, selection)):
        if not any(targets_of(backend, op) for backend in backends):
            found.append(
                f"{op} is left out: no kernel of it in {', '.join(backends) or 'any backend, as there is none'}"
            )
    return found


def work_hint(case: Case) -> int:
    """The product of the case's integer axes: good enough to start the long rows first."""
    return prod(value for _, value in case.axes if isinstance(value, int) and not isinstance(value, bool) and value > 0)
