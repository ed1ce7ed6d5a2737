"""`megamoe list`: the cases of the matrices, without importing torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from megamoe.cli.options import Ops, Specs, Wheres, console
from megamoe.contract import Case, spell
from megamoe.spec.load import load_specs
from megamoe.spec.selection import (
    SelectionError,
    known_cases,
    matching,
    parse_where,
    selected_specs,
    with_name,
)
from megamoe.spec.spec import Spec


def list_cases(
    op: Ops = None,
    matrix: Annotated[
        list[str] | None, typer.Option("--matrix", metavar="NAME", help="Only this matrix; may be repeated.")
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", metavar="NAME", help="Only this profile.")] = None,
    where: Wheres = None,
    specs: Specs = None,
    axes: Annotated[
        bool, typer.Option("--axes", help="A column for every axis that varies, defaults included.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON array instead of a table.")] = False,
) -> None:
    """Lists the cases of the matrices, as a table or as JSON."""
    known = with_name(selected_specs(load_specs(specs), op or []), "matrices", matrix or ())
    known = with_name(known, "profiles", () if profile is None else (profile,))
    rows = [row for spec in known for row in _rows(spec, matrix, profile)]
    kept = {case.id for case in matching((case for case, *_ in rows), parse_where(where or []))}
    rows = [row for row in rows if row[0].id in kept]
    if not rows:
        raise SelectionError("no case matches: loosen --op, --matrix, --profile or --where")
    if as_json:
        print(json.dumps([_as_json(*row) for row in rows], indent=1))
    else:
        _print_table(rows, axes)


_Row = tuple[Case, list[str], list[str], bool]


def _rows(spec: Spec, matrix: list[str] | None, profile: str | None) -> list[_Row]:
    """The cases of a spec with their matrices, profiles and whether they are published. SpecError: unknown names."""
    matrices = {name: {case.id for case in cases} for name, cases in spec.matrices.items()}
    profiles = {name: {case.id for case in one.cases} for name, one in spec.profiles.items()}
    for name in matrix or ():
        spec.cases(name)
    if profile is not None:
        spec.profile(profile)
    rows: list[_Row] = []
    for case in known_cases(spec).values():
        in_matrices = [name for name, ids in matrices.items() if case.id in ids]
        in_profiles = [name for name, ids in profiles.items() if case.id in ids]
        if (not matrix or set(matrix) & set(in_matrices)) and (profile is None or profile in in_profiles):
            rows.append((case, in_matrices, in_profiles, spec.published(case)))
    return rows


def _as_json(case: Case, matrices: list[str], profiles: list[str], published: bool) -> dict[str, object]:
    return {
        "case": case.id,
        "op": case.op,
        "axes": dict(case.axes),
        "inputs": case.inputs,
        "seed": case.seed,
        "matrices": matrices,
        "profiles": profiles,
        "published": published,
    }


def _print_table(rows: list[_Row], with_axes: bool) -> None:
    """A line for each case. The id omits axes at their default; `with_axes` adds a column for each axis that varies."""
    axes = dict.fromkeys(name for case, *_ in rows for name, _ in case.axes) if with_axes else ()
    varying = [name for name in axes if len({dict(case.axes).get(name) for case, *_ in rows}) > 1]
    table = Table(box=None, header_style="bold")
    table.add_column("case", no_wrap=True, overflow="fold")
    for name in varying:
        table.add_column(name, justify="right")
    for name in ("matrix", "profiles", "published"):
        table.add_column(name, no_wrap=True)
    for case, matrices, profiles, published in rows:
        values = dict(case.axes)
        cells = [spell(values[name]) if name in values else "" for name in varying]
        table.add_row(case.id, *cells, " ".join(matrices), " ".join(profiles), "yes" if published else "")
    out = console()
    out.print(table)
    out.print(f"{len(rows)} cases, {sum(published for *_, published in rows)} of them published")
