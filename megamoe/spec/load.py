"""Specs from their files."""

from __future__ import annotations

from pathlib import Path

from megamoe import CHECKOUT
from megamoe.spec.build import build_spec
from megamoe.spec.error import SpecError
from megamoe.spec.marked_yaml import read_marked_yaml
from megamoe.spec.spec import Spec


def load_spec(path: str | Path) -> Spec:
    """The spec in the file `path`; SpecError with file, line, key and what would be right if anything is amiss."""
    return build_spec(read_marked_yaml(Path(path)))


def load_specs(folder: str | Path | None = None) -> dict[str, Spec]:
    """The specs of all *.yaml files in `folder` (default: specs/ next to this package), by op, sorted by file name."""
    where = CHECKOUT / "specs" if folder is None else Path(folder)
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
