"""From YAML files to Specs: checks meanings and cross-references and expands the matrices."""

from __future__ import annotations

import itertools
import keyword
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from megamoe import SPECS
from megamoe.contract import AxisValue, Case, spell
from megamoe.contract.counted import counted
from megamoe.contract.known_names import nearest_of
from megamoe.spec.case_space import Axis, CaseSpace, OutsideError, Range
from megamoe.spec.expression import Expression, ExpressionError, HasValue, parse_expression
from megamoe.spec.marked_yaml import KeyPath, MarkedYaml, SpecError, parse_marked_yaml, read_text
from megamoe.spec.schema import AxisEntry, OverrideEntry, ProfileEntry, RangeEntry, Role, SpecEntry, read_entry
from megamoe.spec.spec import Override, Profile, Spec, TensorSpec, Thresholds, Tolerance, told

MAX_CELLS = 20_000
RESERVED = ("inputs", "seed", "op", "null", "true", "false")


def build_spec(document: MarkedYaml) -> Spec:
    """The Spec that `document` describes. Raises SpecError with file, line and key if anything in it is wrong."""
    return _Builder(document).build()


def load_spec(path: str | Path) -> Spec:
    """The spec in the file `path`. Raises SpecError with file, line, key and what would be right."""
    file = Path(path)
    return _spec_in(file, read_text(file))


@lru_cache(maxsize=8)
def _spec_in(file: Path, text: str) -> Spec:
    # Cached: one process may run many commands, as tests do, on the same specs, and nobody modifies them.
    return build_spec(parse_marked_yaml(text, file))


def load_specs(folder: str | Path | None = None) -> dict[str, Spec]:
    """Op -> spec, for all *.yaml files in `folder` by file name. The default is specs/ of the checkout."""
    where = SPECS if folder is None else Path(folder)
    if not where.is_dir():
        raise SpecError("there is no such folder; specs are in specs/ at the top of the repository", file=where)
    files = sorted(where.glob("*.yaml"))
    for stray in where.glob("*.yml"):
        raise SpecError("would be overlooked; the name of a spec ends in .yaml", file=stray)
    if not files:
        raise SpecError("there is no *.yaml in this folder, so nothing would be tested; add OP.yaml", file=where)
    specs: dict[str, Spec] = {}
    for file in files:
        spec = load_spec(file)
        if spec.op in specs:
            sentence = f"op {spec.op!r} is also in {specs[spec.op].file}; one op has one file"
            raise SpecError(sentence, file=file, line=spec.document.line(("op",)), key="op")
        specs[spec.op] = spec
    return specs


def _values(limits: Range) -> Sequence[AxisValue]:
    """Every value of an axis that conditions may use: its choices, or a range of integers."""
    if limits.choices is not None:
        return limits.choices
    low, high = limits.min, limits.max
    assert isinstance(low, int), "conditions speak of integers, bools and texts"
    assert isinstance(high, int), "conditions speak of integers, bools and texts"
    return range(low, high + 1)


def _holds(constraint: Expression, axes: Mapping[str, AxisValue]) -> bool:
    try:
        return bool(constraint.value(axes))
    except ExpressionError:
        return False  # as in CaseSpace: there is no such case


class _Builder:
    def __init__(self, document: MarkedYaml) -> None:
        self.document = document
        self.entry: SpecEntry = read_entry(document)
        self.axes = {name: self._axis(name, entry) for name, entry in self.entry.axes.items()}
        for name in self.entry.ranges:
            self._known(("ranges", name), "axis", name, self.axes)
        self.space = CaseSpace(self.entry.op, self.axes, self._distinct("inputs"), self._constraints())

    def build(self) -> Spec:
        entry, tensors = self.entry, self._tensors()
        matrices = self._matrices()
        bounds = entry.tolerance
        spec = Spec(
            op=entry.op,
            doc=entry.doc,
            file=self.document.file,
            axes=self.axes,
            tensors=tensors,
            inputs=self.space.inputs,
            laws=self._distinct("laws"),
            tolerance=Tolerance(
                cosine=bounds.cosine.value,
                noise_ratio=bounds.noise_ratio.value,
                cosine_reason=bounds.cosine.reason,
                noise_ratio_reason=bounds.noise_ratio.reason,
            ),
            matrices=matrices,
            profiles={name: self._profile(name, profile, matrices) for name, profile in entry.profiles.items()},
            thresholds=Thresholds(
                entry.benchmark.threshold.value,
                tuple(self._override(i, override, matrices) for i, override in enumerate(entry.benchmark.overrides)),
            ),
            space=self.space,
            document=self.document,
            published_cells=frozenset(case for name in self._listed("published") for case in matrices[name]),
        )
        for case in itertools.chain(*matrices.values()):
            for tensor in spec.tensors_of(case):
                spec.shape(tensor, case)
        return spec

    # axes and ranges

    def _axis(self, name: str, entry: AxisEntry) -> Axis:
        path: KeyPath = ("axes", name)
        if name in RESERVED or keyword.iskeyword(name):
            raise self.document.error(path, f"{name!r} cannot name an axis: case ids or expressions use the word")
        any_value = Range()
        bare = Axis(name, entry.type, entry.doc, any_value, any_value, optional=entry.optional)
        limits = self._range(path, bare, entry)
        required = "default" not in entry.model_fields_set
        default = None if required else self._coerce((*path, "default"), bare, entry.default)
        if not required and not limits.admits(default):
            raise self.document.error(
                (*path, "default"), f"default {spell(default)} is no value of it; it must be {limits}"
            )
        drawn = limits
        if name in self.entry.ranges:
            drawn = self._range(("ranges", name), bare, self.entry.ranges[name])
            if not drawn.within(limits):
                sentence = f"range {drawn} goes beyond the limits of axis {name}, {limits}"
                raise self.document.error(("ranges", name), sentence)
        return Axis(name, entry.type, entry.doc, limits, drawn, default, required, entry.optional)

    def _range(self, path: KeyPath, axis: Axis, entry: RangeEntry) -> Range:
        if entry.choices is not None:
            if entry.min is not None or entry.max is not None:
                raise self.document.error(path, "has both 'in' and 'min' or 'max'; give one or the other")
            values = [self._coerce((*path, "in", i), axis, value) for i, value in enumerate(entry.choices)]
            self._no_repeats((*path, "in"), [spell(value) for value in values])
            return Range(choices=tuple(values), null=None in values)
        if axis.kind == "bool" and entry.min is None and entry.max is None:
            return Range(choices=(False, True, None) if axis.optional else (False, True), null=axis.optional)
        if axis.kind not in ("int", "float") or entry.min is None or entry.max is None:
            give = "'min' and 'max', or 'in'" if axis.kind in ("int", "float") else "'in', a list of its values"
            raise self.document.error(path, f"axis {axis.name} of type {axis.kind} has no complete range; give {give}")
        low, high = self._coerce((*path, "min"), axis, entry.min), self._coerce((*path, "max"), axis, entry.max)
        assert isinstance(low, int | float)
        assert isinstance(high, int | float)
        if low > high:
            raise self.document.error((*path, "min"), f"min {low} is above max {high}, so the range is empty")
        return Range(min=low, max=high, null=axis.optional)

    def _coerce(self, path: KeyPath, axis: Axis, value: AxisValue) -> AxisValue:
        try:
            return axis.coerce(value)
        except ValueError as error:
            raise self.document.error(path, str(error)) from None

    # expressions and tensors

    def _constraints(self) -> tuple[Expression, ...]:
        countable = [name for name, axis in self.axes.items() if axis.kind in ("int", "bool")]
        texts = self._distinct("constraints")
        return tuple(self._condition(("constraints", i), text, countable) for i, text in enumerate(texts))

    def _condition(self, path: KeyPath, text: str, known: list[str]) -> Expression:
        condition = self._expression(path, text, known)
        if part := condition.uncompared([name for name, axis in self.axes.items() if axis.kind == "bool"]):
            where = "" if part == text else f"in {text!r}, "
            sentence = f"{where}{part!r} is neither true nor false; compare it with something, as in '{part} == 0'"
            raise self.document.error(path, sentence)
        return condition

    def _expression(self, path: KeyPath, text: str, known: list[str]) -> Expression:
        try:
            return parse_expression(text, known)
        except ExpressionError as error:
            raise self.document.error(path, str(error)) from None

    def _tensors(self) -> dict[str, TensorSpec]:
        lengths = [name for name, axis in self.axes.items() if axis.kind == "int" and not axis.optional]
        flags = [name for name, axis in self.axes.items() if axis.kind == "bool"]
        tensors: dict[str, TensorSpec] = {}
        for name, entry in self.entry.tensors.items():
            path: KeyPath = ("tensors", name)
            shape, dims = self._shape((*path, "shape"), entry.shape, lengths)
            shape_if = None
            for axis, other in entry.shape_if.items():
                self._known((*path, "shape_if"), "bool axis", axis, flags)
                shape_if = (axis, *self._shape((*path, "shape_if", axis), other, lengths))
            roles = self._roles((*path, "role"), entry.role)
            when = self._when((*path, "when"), entry.when, lengths, flags)
            role = next(iter(roles[1].values())) if roles else entry.role
            assert isinstance(role, str)
            doc = entry.doc or ""
            tensors[name] = TensorSpec(name, shape, entry.dtype, role, when, doc, dims, roles, shape_if)
        self._hold_conditions(tensors)
        self._hold_outputs(tensors)
        return tensors

    def _shape(
        self, path: KeyPath, entry: list[str | int], lengths: list[str]
    ) -> tuple[tuple[str, ...], tuple[Expression, ...]]:
        shape = tuple(str(dim) for dim in entry)
        dims = tuple(self._expression((*path, i), dim, lengths) for i, dim in enumerate(shape))
        for i, dim in enumerate(dims):
            if not dim.counts:
                raise self.document.error((*path, i), f"{dim.text!r} is no number; an extent is an integer from 0")
        return shape, dims

    def _roles(self, path: KeyPath, given: Role | dict[str, dict[str, Role]]) -> tuple[str, dict[str, Role]] | None:
        if isinstance(given, str):
            return None
        ((name, roles),) = given.items()
        self._hold_values(path, name, roles)
        return name, roles

    def _when(
        self, path: KeyPath, given: str | dict[str, str] | None, lengths: list[str], flags: list[str]
    ) -> Expression | HasValue | None:
        if given is None:
            return None
        if isinstance(given, str):
            if given.isidentifier():
                self._known(path, "bool axis", given, flags)
            return self._condition(path, given, [*lengths, *flags])
        ((name, value),) = given.items()
        self._hold_values(path, name, (value,))
        return HasValue(name, value)

    def _hold_values(self, path: KeyPath, name: str, values: Iterable[str]) -> None:
        """SpecError if `name` is not a text axis, or never has one of `values`."""
        self._known(path, "axis of text", name, [name for name, axis in self.axes.items() if axis.kind == "str"])
        for value in values:
            if value not in (choices := self.axes[name].limits.choices or ()):
                known = ", ".join(spell(choice) for choice in choices)
                raise self.document.error((*path, name, value), f"{name} is never {value!r}; it is one of {known}")

    def _hold_conditions(self, tensors: Mapping[str, TensorSpec]) -> None:
        """SpecError if a condition cannot be computed. With too many values to try, a case reports it."""
        for name, tensor in tensors.items():
            for axes in self._points(sorted(tensor.conditions)) or ():
                try:
                    tensor.role_in(axes)
                except ExpressionError as error:
                    raise self.document.error(("tensors", name, "when"), f"{error}, where {told(axes)}") from None

    def _hold_outputs(self, tensors: Mapping[str, TensorSpec]) -> None:
        """SpecError if some values of the deciding axes leave no output, or if there are too many values to check."""
        outputs = [tensor for tensor in tensors.values() if tensor.may_be("output")]
        if any(not tensor.conditions for tensor in outputs):
            return
        deciding = sorted({name for tensor in outputs for name in tensor.conditions})
        points = self._points(deciding)
        if points is None:
            sentence = (
                f"whether one with role: output is there depends on {', '.join(deciding)}, which have more than "
                f"{MAX_CELLS} values together; have one that is always there, or let axes of fewer values decide"
            )
            raise self.document.error(("tensors",), sentence)
        for axes in points:
            if not any(tensor.role_in(axes) == "output" for tensor in outputs):
                where = f" if {told(axes)}" if axes else ""
                sentence = f"none is there with role: output{where}, so nothing would be compared"
                raise self.document.error(("tensors",), sentence)

    def _points(self, names: list[str]) -> Iterator[dict[str, AxisValue]] | None:
        """The joint values of these axes that satisfy the constraints on them alone; None if there are more than
        MAX_CELLS before constraints."""
        values = [_values(self.axes[name].limits) for name in names]
        if math.prod(map(len, values)) > MAX_CELLS:
            return None
        held = [one for one in self.space.constraints if one.names <= set(names)]
        points = (dict(zip(names, point, strict=True)) for point in itertools.product(*values))
        return (point for point in points if all(_holds(one, point) for one in held))

    # matrices and profiles

    def _matrices(self) -> dict[str, tuple[Case, ...]]:
        beyond, first = self._listed("beyond_ranges"), dict[str, KeyPath]()
        matrices: dict[str, tuple[Case, ...]] = {}
        for name in self.entry.matrices:
            cases: list[Case] = []
            undrawn: OutsideError | None = None
            for path, row in self._rows(name):
                case = self._case(path, row)
                if case.id in first:
                    there = first[case.id]
                    sentence = f"{case.id} is already in matrix {there[1]}, line {self.document.line(there)}; keep one"
                    raise self.document.error(path, sentence)
                first[case.id] = path
                refusal = self.space.undrawn(case)
                undrawn = undrawn or refusal
                if refusal and name not in beyond:
                    sentence = f"{refusal}; widen the range, or list matrix {name} under beyond_ranges"
                    raise self.document.error(path if refusal.culprit is None else (*path, refusal.culprit), sentence)
                cases.append(case)
            if name in beyond and undrawn is None:
                where: KeyPath = ("beyond_ranges", self.entry.beyond_ranges.index(name))
                raise self.document.error(where, f"no row of matrix {name} is beyond the ranges; remove it here")
            matrices[name] = tuple(cases)
        return matrices

    def _rows(self, name: str) -> Iterator[tuple[KeyPath, Mapping[str, AxisValue]]]:
        """Each row and its place in the file. The last axis of a product varies fastest."""
        matrix = self.entry.matrices[name]
        path: KeyPath = ("matrices", name)
        if isinstance(matrix, list):
            yield from (((*path, i), row) for i, row in enumerate(matrix))
            return
        for axis, values in matrix.items():
            self._no_repeats((*path, axis), [spell(value) for value in values])
        if (cells := math.prod(len(values) for values in matrix.values())) > MAX_CELLS:
            raise self.document.error(path, f"has {counted(cells, 'cell')}; a matrix has at most {MAX_CELLS:,}")
        for point in itertools.product(*matrix.values()):
            yield path, dict(zip(matrix, point, strict=True))

    def _case(self, path: KeyPath, row: Mapping[str, AxisValue]) -> Case:
        axes = {name: value for name, value in row.items() if name not in ("inputs", "seed")}
        try:
            return self.space.point(axes, row.get("inputs", self.space.inputs[0]), row.get("seed", 0))
        except OutsideError as error:
            here = path if error.culprit is None else (*path, error.culprit)
            raise self.document.error(here, str(error)) from None

    def _profile(self, name: str, entry: ProfileEntry, matrices: Mapping[str, tuple[Case, ...]]) -> Profile:
        path: KeyPath = ("profiles", name)
        self._no_repeats((*path, "schedules"), entry.schedules)
        self._no_repeats((*path, "matrices"), entry.matrices)
        cases: dict[str, Case] = {}
        for i, matrix in enumerate(entry.matrices):
            self._known((*path, "matrices", i), "matrix", matrix, matrices)
            cases.update((case.id, case) for case in matrices[matrix])
        rows = {case.id for case in itertools.chain(*matrices.values())}
        for i, row in enumerate(entry.cases):
            here: KeyPath = (*path, "cases", i)
            case = self._case(here, row)
            if case.id not in rows:
                raise self.document.error(here, f"{case.id} is a row of no matrix; add it to one, or name a row")
            if case.id in cases:
                raise self.document.error(here, f"{case.id} is selected twice in profile {name}; keep one")
            cases[case.id] = case
        if not cases:
            raise self.document.error(path, "selects no case, so nothing would be tested; give matrices or cases")
        return Profile(name, entry.doc, tuple(cases.values()), tuple(entry.schedules))

    # thresholds of times

    def _override(self, i: int, entry: OverrideEntry, matrices: Mapping[str, tuple[Case, ...]]) -> Override:
        path: KeyPath = ("benchmark", "overrides", i)
        if entry.matrix is None and entry.where is None and entry.temperature is None:
            sentence = "selects everything, as the threshold above it does; give it matrix, where or temperature"
            raise self.document.error(path, sentence)
        if entry.matrix is not None:
            self._known((*path, "matrix"), "matrix", entry.matrix, matrices)
        where: dict[str, tuple[AxisValue, ...]] = {}
        for name, values in (entry.where or {}).items():
            here: KeyPath = (*path, "where", name)
            self._known(here, "axis", name, self.axes)
            where[name] = tuple(self._coerce((*here, j), self.axes[name], value) for j, value in enumerate(values))
            self._no_repeats(here, [spell(value) for value in where[name]])
        cases = None if entry.matrix is None else frozenset(case.id for case in matrices[entry.matrix])
        override = Override(entry.value, entry.reason, cases, where, entry.temperature)
        if not any(override.speaks_of(case) for case in itertools.chain(*matrices.values())):
            raise self.document.error(path, "matches no case of any matrix, so it says nothing; correct or remove it")
        return override

    # lists of names

    def _distinct(self, key: str) -> tuple[str, ...]:
        values: list[str] = getattr(self.entry, key)
        self._no_repeats((key,), values)
        return tuple(values)

    def _listed(self, key: str) -> tuple[str, ...]:
        for i, name in enumerate(names := self._distinct(key)):
            self._known((key, i), "matrix", name, self.entry.matrices)
        return names

    def _known(self, path: KeyPath, what: str, name: str, known: Iterable[str]) -> None:
        if name not in (names := list(known)):
            raise self.document.error(path, f"there is no {what} {name!r}{nearest_of(name, names)}")

    def _no_repeats(self, path: KeyPath, values: list[str]) -> None:
        seen: set[str] = set()
        for i, value in enumerate(values):
            if value in seen:
                raise self.document.error((*path, i), f"{value} is given twice; keep one")
            seen.add(value)
