"""Places a case in the heat map of its op: in a grid if its matrix is a product of axes, else in a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from megamoe.contract import AxisValue, Case, spell
from megamoe.report.material import natural
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import known_cases
from megamoe.spec.spec import Spec

OTHER = "other cases"


@dataclass(frozen=True, slots=True)
class Grid:
    """Cases by axes. `cells[row][column]` is a case id, or None where there is no case.

    Rows have one axis, `row_axis`; columns may have several. Values are spelt as in case ids. `fixed`: axes that have
    one value in all cells, other than their default.
    """

    title: str
    row_axis: str
    rows: tuple[str, ...]
    column_axes: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    cells: tuple[tuple[str | None, ...], ...]
    fixed: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of cases whose axes do not form a grid."""

    title: str
    cases: tuple[str, ...]

    @property
    def shared(self) -> list[str]:
        """The parts of the id that all cases share. Empty for a single case."""
        parts = [case.partition(":")[2].split(",") for case in self.cases]
        return [part for part in parts[0] if all(part in other for other in parts)] if len(parts) > 1 else []


Block = Grid | Listing


def lay_out(spec: Spec | None, case_ids: Iterable[str]) -> list[Block]:
    """Blocks that hold each of `case_ids` once. A grid is complete; a listing holds only the given cases.

    Blocks follow the order of the spec, with cases unknown to it last. Without a spec there is one listing.
    """
    wanted = dict.fromkeys(case_ids)
    blocks: list[Block] = []
    if spec is not None:
        grids = _merged([(name, cases) for name, cases in spec.matrices.items() if _varying(cases)])
        for title, cases in grids:
            if wanted.keys() & {case.id for case in cases}:
                blocks.append(_grid(title, cases, spec))
        blocks += _listings(spec, wanted, {case.id for _, cases in grids for case in cases})
    placed = {case for block in blocks for case in cases_of(block)}
    left = sorted((case for case in wanted if case not in placed), key=natural)
    if left:
        blocks.append(Listing(OTHER if blocks else "cases", tuple(left)))
    return blocks


def cases_of(block: Block) -> list[str]:
    """The ids of the cases in `block`."""
    if isinstance(block, Listing):
        return list(block.cases)
    return [case for row in block.cells for case in row if case is not None]


def axes_of(spec: Spec | None, case_id: str) -> dict[str, str]:
    """Axis -> value as spelt in ids, including defaults. For an id that the spec refuses, only the values in the id."""
    if spec is not None:
        try:
            return {name: spell(value) for name, value in spec.parse_case(case_id).axes}
        except SpecError:
            pass
    parts = (part.partition("=") for part in case_id.partition(":")[2].split(","))
    return {name: value for name, equals, value in parts if equals}


def _listings(spec: Spec, wanted: Mapping[str, None], gridded: set[str]) -> list[Listing]:
    taken = set(gridded)
    found: list[Listing] = []
    for name, cases in spec.matrices.items():
        here = [case.id for case in cases if case.id in wanted and case.id not in taken]
        taken.update(here)
        if here:
            found.append(Listing(name, tuple(here)))
    strays = [case for case in known_cases(spec) if case in wanted and case not in taken]
    return [*found, *([Listing("profiles", tuple(strays))] if strays else [])]


def _values(cases: Sequence[Case], axis: str) -> list[AxisValue]:
    return list(dict.fromkeys(case[axis] for case in cases))


def _varying(cases: Sequence[Case]) -> list[str]:
    """The axes whose full product is `cases`. Empty if there are fewer than two axes or the product is incomplete."""
    if not cases or len({(case.inputs, case.seed) for case in cases}) > 1:
        return []
    axes = [name for name, _ in cases[0].axes if len(_values(cases, name)) > 1]
    size = 1
    for name in axes:
        size *= len(_values(cases, name))
    return axes if len(axes) > 1 and size == len({case.id for case in cases}) else []


def _merged(products: Sequence[tuple[str, Sequence[Case]]]) -> list[tuple[str, list[Case]]]:
    """Joins products whose fixed axes agree into one grid, so that a matrix of long rows is next to one of shorter
    rows."""
    grids: list[tuple[str, list[Case]]] = []
    for name, cases in products:
        for place, (title, held) in enumerate(grids):
            if _fits(held, cases):
                grids[place] = (f"{title}, {name}", held + [case for case in cases if case not in held])
                break
        else:
            grids.append((name, list(cases)))
    return grids


def _fits(held: Sequence[Case], cases: Sequence[Case]) -> bool:
    if held[0].inputs != cases[0].inputs or held[0].seed != cases[0].seed:
        return False
    varying = {name for name, _ in held[0].axes if len(_values(held, name)) > 1}
    fixed = {name: value for name, value in held[0].axes if name not in varying}
    return all(_values(cases, name) == [value] for name, value in fixed.items()) and bool(_varying(cases))


def _grid(title: str, cases: Sequence[Case], spec: Spec) -> Grid:
    axes = [name for name, _ in cases[0].axes if len(_values(cases, name)) > 1]
    row_axis, column_axes = axes[0], tuple(axes[1:])
    rows = sorted(_values(cases, row_axis), key=_rank)
    columns = sorted({tuple(case[name] for name in column_axes) for case in cases}, key=lambda key: [*map(_rank, key)])
    at = {(case[row_axis], tuple(case[name] for name in column_axes)): case.id for case in cases}
    fixed = {
        name: spell(value)
        for name, value in cases[0].axes
        if name not in axes and (spec.axes[name].required or value != spec.axes[name].default)
    }
    return Grid(
        title,
        row_axis,
        tuple(spell(value) for value in rows),
        column_axes,
        tuple(tuple(spell(value) for value in column) for column in columns),
        tuple(tuple(at.get((row, column)) for column in columns) for row in rows),
        fixed,
    )


def _rank(value: AxisValue) -> tuple[bool, float, str]:
    """A sort key: numbers by size, then words."""
    number = not isinstance(value, str) and value is not None
    return (not number, float(value) if isinstance(value, int | float) else 0.0, spell(value))


def spans(columns: Sequence[tuple[str, ...]], level: int) -> list[tuple[str, int]]:
    """The headers of one level of column axes: (value, number of columns under it)."""
    keys = groupby(columns, key=lambda column: column[: level + 1])
    return [(key[level], len(list(group))) for key, group in keys]
