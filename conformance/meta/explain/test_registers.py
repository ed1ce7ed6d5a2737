"""Which register holds which (M, N): held against the VM's own layout; and the picture of a SwiGLU tile."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest

from backends.vm.tensor.tmem_layout import register_map
from megamoe.contract import Row
from megamoe.explain.explain import Explanation, explain, write_files
from megamoe.explain.registers import AccumulatorTile, accumulator_tile, fragment
from megamoe.spec.load import load_specs

CASE = "nvfp4_moe:hidden=128,intermediate=128,num_experts=1,tokens=128,stage=l1"


@cache
def _found(case: str = CASE) -> Explanation:
    row = Row(case, "ptx", "sm_100a", "vm", "eager")
    return explain(load_specs(None)[row.op], row)


def _tile(case: str = CASE, interleave: int | None = 8) -> AccumulatorTile:
    found = _found(case)
    for launch in found.trace.launches:
        tile = accumulator_tile(launch.ctas[0], found.ptx, found.trace.steps, interleave)
        if tile is not None:
            return tile
    raise AssertionError("no launch loads an accumulator")


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
@pytest.mark.parametrize("num", [1, 4, 32])
def test_fragment_is_that_of_the_machine(shape: str, num: int) -> None:
    """The figures of the ISA are written twice, independently, so a mistake in one shows."""
    layout = register_map(shape, num)
    machine = {
        (int(layout.lanes[register, thread]), int(layout.columns[register, thread])): (thread, register)
        for register in range(len(layout.lanes))
        for thread in range(32)
    }
    assert fragment(shape, num) == machine


def test_swiglu_tile_is_taken_once_and_whole() -> None:
    tile = _tile()
    cells = [cell for load in tile.loads for cell in load.cells]
    assert len(cells) == len(set(cells)), "a cell is loaded into two registers"
    assert set(cells) == {(m, n) for m in range(128) for n in range(tile.columns)}, "a cell is loaded into none"
    assert tile.turns == 8, "gate and up take turns of the case's interleave where exponentials are computed"


@pytest.mark.parametrize(("m", "n", "thread", "register"), [(0, 0, 0, 0), (77, 8, 77 % 32, 8), (127, 21, 31, 21)])
def test_register_of_a_cell(m: int, n: int, thread: int, register: int) -> None:
    """The cells that conformance/kernels/ptx/test_moe_registers.py finds by setting registers to zero."""
    holders = [load.cells[m, n] for load in _tile().loads if (m, n) in load.cells and load.warp == m // 32]
    assert holders == [(thread, register)]


def test_no_turns_without_exponentials() -> None:
    assert _tile("nvfp4_moe:hidden=128,intermediate=128,num_experts=1,tokens=3,stage=l2").turns is None


def test_picture_names_thread_and_register(tmp_path: Path) -> None:
    pictures = [path for path in write_files(_found(), tmp_path) if path.name.startswith("registers")]
    assert pictures, "the launch that loads an accumulator has no picture of it"
    words = {node.text for node in ElementTree.parse(pictures[0]).iter() if node.tag.endswith(("text", "title"))}
    assert {"t0 r0", "t31 r19", "M 31", "N 19", "gate, 8 columns a turn"} <= words
    assert "M 3, N 12: thread 3, register 12" in words
