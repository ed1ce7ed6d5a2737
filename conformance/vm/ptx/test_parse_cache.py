"""The parse cache: a kept module equals the parsed one, and a damaged file is never used."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from backends.vm.ptx import parse_cache
from backends.vm.ptx.ast import Module
from backends.vm.ptx.parse_cache import forget, parse_cached
from backends.vm.ptx.parser import PtxSyntaxError, parse

PTX = sorted(Path(__file__).parent.glob("*.ptx"))
TEXT = ".version 8.6\n.target sm_90a\n.address_size 64\n.entry f() { .reg .b32 a; mov.b32 a, 12345; ret; }\n"


@pytest.fixture(autouse=True)
def _empty_memory() -> None:
    forget()


@pytest.mark.parametrize("path", PTX, ids=lambda path: path.stem)
def test_json_gives_the_same_module_back(path: Path) -> None:
    module = parse(path.read_text(encoding="utf-8"))
    assert msgspec.json.decode(msgspec.json.encode(module), type=Module) == module


def test_a_text_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def counted(text: str, name: str) -> object:
        parsed.append(name)
        return parse(text, name)

    monkeypatch.setattr(parse_cache, "parse", counted)
    first = parse_cached(TEXT, "a", tmp_path)
    assert parse_cached(TEXT, "b", tmp_path) is first, "memory did not answer"
    forget()
    assert parse_cached(TEXT, "c", tmp_path) == first, "the folder gave another module"
    assert parse_cached(TEXT + "\n", "d", tmp_path) == first
    assert parsed == ["a", "d"], "only a new text is parsed"


def damages(good: bytes) -> dict[str, bytes]:
    checksum, payload = good.split(b"\n", 1)
    return {
        "empty": b"",
        "cut": good[: len(good) // 2],
        "binary": b"\xff\xfe\x00" * 50,
        "another number": good.replace(b"12345", b"54321"),
        "another checksum": b"0" * 64 + b"\n" + payload,
        "no payload": checksum + b"\n",
    }


@pytest.mark.parametrize("kind", sorted(damages(b"x\n12345")))
def test_a_damaged_file_is_rebuilt_and_never_used(kind: str, tmp_path: Path) -> None:
    module = parse_cached(TEXT, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(damages(good)[kind])
    assert file.read_bytes() != good, "the damage changed nothing"
    forget()
    assert parse_cached(TEXT, folder=tmp_path) == module
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [good], "the file was not replaced by a good one"


def test_a_file_with_a_good_checksum_but_no_module_is_rebuilt(tmp_path: Path) -> None:
    module = parse_cached(TEXT, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    for payload in ("[]", "{}", "3", "[[8],[],64,[],[{}]]", "null", "[" * 200_000):
        file.write_text(f"{parse_cache._checksum(file, payload.encode()).decode()}\n{payload}", encoding="utf-8")
        forget()
        assert parse_cached(TEXT, folder=tmp_path) == module, f"{payload[:40]} was taken for a module"


def test_a_file_of_another_text_under_this_name_is_rebuilt(tmp_path: Path) -> None:
    module = parse_cached(TEXT, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    forget()
    parse_cached(TEXT.replace("12345", "54321"), folder=tmp_path)
    (other,) = set(tmp_path.iterdir()) - {file}
    file.write_bytes(other.read_bytes())
    forget()
    assert parse_cached(TEXT, folder=tmp_path) == module, "the module of another text was taken"


def test_a_folder_that_cannot_be_written_is_not_needed(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    assert parse_cached(TEXT, folder=occupied / "below") == parse(TEXT)
    assert occupied.read_text() == "not a folder"


def test_refused_text_is_refused_again_and_leaves_no_file(tmp_path: Path) -> None:
    for name in ("first.ptx", "second.ptx"):
        with pytest.raises(PtxSyntaxError, match=name):
            parse_cached("nonsense", name, tmp_path)
    assert list(tmp_path.iterdir()) == []
