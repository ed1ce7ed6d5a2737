"""A write is all or nothing, whatever the disk or the writer does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megamoe.records.files import write_file, write_folder
from megamoe.records.lines import RecordError


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_file_is_replaced_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    for data in ("one \N{GREEK SMALL LETTER LAMDA}", b"two"):
        write_file(path, data, "the list")
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert path.stat().st_mode & 0o777 == 0o644
    assert _names(tmp_path) == ["a.txt", "new"]


@pytest.mark.parametrize("step", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize(("fault", "raised"), [(_full, RecordError), (_interrupted, KeyboardInterrupt)])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, fault: object, raised: type[BaseException]
) -> None:
    path = tmp_path / "a.txt"
    write_file(path, "old", "the list")
    monkeypatch.setattr(os, step, fault)
    with pytest.raises(raised) as refusal:
        write_file(path, "new", "the list")
    assert str(refusal.value) in ("", f"cannot write the list {path}: No space left on device")
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["a.txt"], "nothing half written stays"


def test_a_folder_is_there_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "out", {"a/b.txt": "b", "c.txt": "c"}, "the dataset")
    assert _names(tmp_path) == ["a", "b.txt", "c.txt", "out"]
    with pytest.raises(RecordError, match="is not empty; give a new folder"):
        write_folder(tmp_path / "out", {"d.txt": "d"}, "the dataset")
    monkeypatch.setattr(os, "replace", _full)
    with pytest.raises(RecordError, match=r"cannot write the dataset to .*: No space left on device"):
        write_folder(tmp_path / "other", {"d.txt": "d"}, "the dataset")
    assert _names(tmp_path) == ["a", "b.txt", "c.txt", "out"], "nothing half written stays"


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write the list"):
        write_file(tmp_path / "file" / "a.txt", "", "the list")
    with pytest.raises(RecordError, match="cannot write the dataset to"):
        write_folder(tmp_path / "file" / "out", {}, "the dataset")
