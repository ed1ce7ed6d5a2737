"""Random programs on the machine beside an H200: what is counted, carried and recorded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from conformance.silicon.whole import differential
from conformance.silicon.whole.differential import RECORD, carry, compared, machine_version, run, take
from conformance.silicon.whole.drawn import drawn
from conformance.silicon.whole.merge import DRAWN, DrawnAnswers

HELD = DrawnAnswers.read(DRAWN)
LOST = min(HELD.failed)
FIRST = LOST - LOST % 250


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hashes of a machine that leaves what the H200 left, but for two programs; one has a known reason."""
    mine = HELD.modules[FIRST].copy()
    mine[LOST - FIRST] = 5
    mine[[0, 1]] ^= np.uint64(1)
    np.save(tmp_path / f"{FIRST}.npy", mine)
    (tmp_path / f"{FIRST}.txt").write_text(f"program {FIRST}: a race\n")
    (tmp_path / "version").write_text(machine_version())
    monkeypatch.setattr(differential, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(differential, "explained", lambda number, left: "a reason" if number == FIRST else "")
    return tmp_path


def test_a_record_counts_each_program_once(folder: Path) -> None:
    made, engine = compared(folder, 1), int("wgmma" in drawn(FIRST).text)
    assert made.record() | {"date": ""} == {
        "date": "",
        "machine": machine_version(),
        "ran_on_both": 250,
        "agree": 247,
        "hung_or_failed_on_the_h200": 1,
        "agree_once_changed_as_ptxas_changed_them": {"a reason": {"all": 1, "with_wgmma": engine}},
        "differ": [FIRST + 1],
        "findings": [f"program {FIRST}: a race"],
    }
    assert any(str(FIRST + 1) in line for line in made.lines())


def test_what_is_carried_is_the_same_elsewhere(folder: Path, tmp_path: Path) -> None:
    carry(folder, tmp_path / "carried.npz")
    take(tmp_path / "elsewhere", tmp_path / "carried.npz")
    assert compared(tmp_path / "elsewhere", 1) == compared(folder, 1)


def test_hashes_of_two_versions_of_the_machine_do_not_mix(folder: Path) -> None:
    (folder / "version").write_text("another")
    with pytest.raises(ValueError, match="another version of the machine"):
        run(folder, FIRST, 250, 1)


def test_no_module_begins_after_the_time(folder: Path) -> None:
    run(folder, FIRST + 250, 250, 1, seconds=-1)
    assert not (folder / f"{FIRST + 250}.npy").exists()


def test_the_recorded_run_leaves_nothing_unexplained() -> None:
    held = json.loads(RECORD.read_text("utf-8"))
    assert held["ran_on_both"] == 250 * len(HELD.modules), "not all programs that an H200 ran"
    assert held["hung_or_failed_on_the_h200"] == len(HELD.failed)
    assert not held["differ"], f"these differ for no known reason: {held['differ']}"
    assert not held["findings"], f"the machine finds something in programs without a fault: {held['findings'][:3]}"
    explained = sum(one["all"] for one in held["agree_once_changed_as_ptxas_changed_them"].values())
    assert held["agree"] + explained + held["hung_or_failed_on_the_h200"] == held["ran_on_both"]
