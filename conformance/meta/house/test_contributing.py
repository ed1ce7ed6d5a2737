"""CONTRIBUTING.md speaks of what is there: the map's names, the rooms, the files of its commands."""

from __future__ import annotations

import re

import pytest

from conformance import ROOT
from conformance.meta.house.test_import_rules import CONFORMANCE, MEGAMOE, VM

TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
MAP = re.findall(r"\| `([\w./]+\.py):(\w+)` \|", TEXT)


def defines(text: str, name: str) -> bool:
    """Whether a module with this text defines `name`, at its top or in a class."""
    return re.search(rf"^ *(def|class) {name}\b|^{name}\b *[:=]", text, re.MULTILINE) is not None


def test_the_map_has_the_fifteen_hunts() -> None:
    assert len(MAP) == len(set(MAP)) == 15


@pytest.mark.parametrize(("path", "name"), MAP)
def test_what_the_map_points_at_is_there(path: str, name: str) -> None:
    assert (ROOT / path).is_file(), f"the map of CONTRIBUTING.md says {path}, which has moved"
    assert defines((ROOT / path).read_text("utf-8"), name), f"{path} has no {name}: CONTRIBUTING.md is out of date"


def test_a_name_that_moved_would_be_noticed() -> None:
    assert not defines("from megamoe.codec.nvfp4 import _codes\nx = _codes(1)\n", "_codes")


def test_every_room_is_named() -> None:
    rooms = {name.partition(".")[0] for table in (MEGAMOE, VM, CONFORMANCE) for name in table} - {"__main__"}
    rooms -= {"load", "coverage"}
    missing = sorted(room for room in rooms if not re.search(rf"`{room}\b", TEXT))
    assert not missing, f"CONTRIBUTING.md does not name these rooms: {missing}"


FILES = set(re.findall(r"\b(?:conformance|megamoe|backends|results)/[\w/]+\.\w+", TEXT))


@pytest.mark.parametrize("path", sorted(path for path in FILES if not path.endswith("/OP.py")))
def test_what_it_mentions_is_there(path: str) -> None:
    assert (ROOT / path).exists()
