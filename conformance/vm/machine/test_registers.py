"""Register files that one warp after another uses."""

from __future__ import annotations

import numpy as np

from backends.vm.machine.code import WIDTH_OF_TYPE, RegisterFiles, RegisterRows

TYPES = {"p": "pred", "h": "b16", "r": "b32", "l": "b64", "q": "b128"}


def test_a_file_that_comes_back_is_zero_and_keeps_its_literals() -> None:
    rows = RegisterRows.of(TYPES, {})
    literal = rows.literal(32, 0x1234_5678)
    files = RegisterFiles(rows)
    first = files.take()
    for name, kind in TYPES.items():
        width, row = rows.rows[name]
        assert width == WIDTH_OF_TYPE[kind]
        first._storage[width][row] = 1
    files.give_back(first)
    again = files.take()
    assert again is first, "a file of a warp that has ended serves the next"
    for name in TYPES:
        width, row = rows.rows[name]
        assert not np.any(again._storage[width][row]), f"%{name} still holds what the last warp wrote"
    assert np.all(again._storage[32][literal] == 0x1234_5678), "a literal must outlive the warp"
