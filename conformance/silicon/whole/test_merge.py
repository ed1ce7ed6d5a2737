"""Answers to random programs enter the record whole and once, and doubtful ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conformance.silicon.whole import drawn, merge
from conformance.silicon.whole.merge import DRAWN, DrawnAnswers, MergeError, main, merge_drawn
from conformance.silicon.whole.on_device import DRAWN_MODULE, drawer_of

DRAWER = np.array(drawer_of(Path(drawn.__file__)), np.uint32)


def hashes(seed: int, *failed: int) -> npt.NDArray[np.uint64]:
    found = np.random.default_rng(seed).integers(1 << 40, 1 << 63, DRAWN_MODULE).astype(np.uint64)
    found[list(failed)] = 0
    return found


def told(folder: Path, modules: dict[int, npt.NDArray[Any]], failed: str = "", drawer: object = DRAWER) -> Path:
    """Makes an OUT as ask.py does."""
    folder.mkdir()
    arrays = {str(first): one for first, one in modules.items()} | {"drawer": np.asarray(drawer)}
    np.savez_compressed(folder / "hashes.npz", allow_pickle=False, **arrays)
    (folder / "drawn-failed.txt").write_text(failed)
    return folder


def test_modules_are_added_in_order_with_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "drawn.npz"
    later = told(
        tmp_path / "later", {500: hashes(1, 7)}, "drawn_507: it hangs\ndrawn_9000: of a module that never ended\n"
    )
    assert merge_drawn(later, file) == "250 random programs are new, of which 1 failed; drawn.npz has 250"
    earlier = told(
        tmp_path / "earlier", {0: hashes(2), 500: hashes(1, 7, 8)}, "drawn_507: it hangs\ndrawn_508: CUDA_ERROR\n"
    )
    assert merge_drawn(earlier, file) == "250 random programs are new, of which 0 failed; drawn.npz has 500"
    held = np.load(file)
    assert held["first"].tolist() == [0, 500]
    assert held["failed"].tolist() == [507], "program 508 ran before, and its hash is held"
    assert (held["hashes"] == np.stack([hashes(2), hashes(1, 7)])).all()
    assert held["hashes"].dtype == np.uint64, "a hash keeps all of its bits: its lower half sees half of an output"


def test_the_record_is_what_reading_and_writing_leaves() -> None:
    held, again = np.load(DRAWN), DrawnAnswers.read(DRAWN).arrays()
    assert set(held.files) == set(again)
    assert all(np.array_equal(held[name], again[name]) for name in again)


@pytest.mark.parametrize(
    ("modules", "failed", "drawer", "sentence"),
    [
        ({0: hashes(2)}, "", DRAWER, "program 0 left other bytes than when it ran before"),
        ({250: hashes(1)}, "", 7, "other programs than those that drawn.py draws"),
        ({250: hashes(1)[:100]}, "", DRAWER, "so ask for whole ones"),
        ({260: hashes(1)}, "", DRAWER, "from a multiple of 250 on"),
        ({250: hashes(1).astype(np.uint32)}, "", DRAWER, "has uint32"),
        ({250: hashes(1, 3)}, "", DRAWER, "no hash of program 253, which drawn-failed.txt does not name"),
        ({250: hashes(1, 3)}, "program 253 hangs\n", DRAWER, "a program that failed is told as drawn_NUMBER: why"),
        ({}, "", DRAWER, "has no module of random programs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_doubtful_is_refused_and_nothing_is_written(
    tmp_path: Path, modules: dict[int, npt.NDArray[Any]], failed: str, drawer: object, sentence: str
) -> None:
    file = tmp_path / "drawn.npz"
    merge_drawn(told(tmp_path / "held", {0: hashes(1)}), file)
    before = file.read_bytes()
    with pytest.raises(MergeError, match=sentence):
        merge_drawn(told(tmp_path / "out", modules, failed, drawer), file)
    assert file.read_bytes() == before


def test_the_command_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[Path] = []
    monkeypatch.setattr(merge, "merge_drawn", lambda out: f"taken {taken.append(out)}")
    out = told(tmp_path / "out", {0: hashes(1)})
    assert main([str(out)]) == 0
    assert taken == [out]
    assert "taken" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2
    assert "has neither whole.npz nor hashes.npz" in capsys.readouterr().err
