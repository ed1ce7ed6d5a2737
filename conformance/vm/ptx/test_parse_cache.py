"""The parse cache: a cached module equals the parsed one, and a file that this user did not write is never used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from backends.vm.ptx import parse_cache
from backends.vm.ptx.ast import Module
from backends.vm.ptx.parse_cache import parse_cached
from backends.vm.ptx.parser import PtxSyntaxError, parse
from megamoe.contract.cache import UserCache, user_cache

PTX = sorted(Path(__file__).parent.glob("*.ptx"))
TEXT = ".version 8.6\n.target sm_90a\n.address_size 64\n.entry f() { .reg .b32 a; mov.b32 a, 12345; ret; }\n"


@pytest.fixture
def cache(tmp_path: Path) -> UserCache:
    found = user_cache("ptx", tmp_path)
    assert found is not None
    return found


@pytest.mark.parametrize("path", PTX, ids=lambda path: path.stem)
def test_json_gives_the_same_module_back(path: Path) -> None:
    module = parse(path.read_text(encoding="utf-8"))
    assert msgspec.json.decode(msgspec.json.encode(module), type=Module) == module


def test_a_text_is_parsed_once(cache: UserCache, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def counted(text: str, name: str) -> object:
        parsed.append(name)
        return parse(text, name)

    monkeypatch.setattr(parse_cache, "parse", counted)
    first = parse_cached(TEXT, "a", cache)
    assert parse_cached(TEXT, "b", cache) == first, "the folder gave another module"
    assert parse_cached(TEXT + "\n", "c", cache) == first
    assert parsed == ["a", "c"], "only a new text is parsed"


def damages(good: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "cut": good[: len(good) // 2],
        "binary": b"\xff\xfe\x00" * 50,
        "another number": good.replace(b"12345", b"54321"),
        "a checksum of no secret": hashlib.sha256(good[32:]).digest() + good[32:].replace(b"12345", b"54321"),
        "no payload": good[:32],
    }


@pytest.mark.parametrize("kind", sorted(damages(b"12345")))
def test_a_damaged_file_is_rebuilt_and_never_used(kind: str, cache: UserCache) -> None:
    module = parse_cached(TEXT, shelf=cache)
    (file,) = cache.folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(damages(good)[kind])
    assert file.read_bytes() != good, "the damage changed nothing"
    assert parse_cached(TEXT, shelf=cache) == module
    assert [each.read_bytes() for each in cache.folder.iterdir()] == [good], "the file was not replaced by a good one"


def test_an_entry_that_is_no_module_is_rebuilt(cache: UserCache) -> None:
    module = parse_cached(TEXT, shelf=cache)
    (file,) = cache.folder.iterdir()
    for payload in ("[]", "{}", "3", "[[8],[],64,[],[{}]]", "null", "[" * 200_000):
        cache.keep(file.name, payload.encode())
        assert parse_cached(TEXT, shelf=cache) == module, f"{payload[:40]} was taken for a module"


def test_a_file_of_another_text_under_this_name_is_rebuilt(cache: UserCache) -> None:
    module = parse_cached(TEXT, shelf=cache)
    (file,) = cache.folder.iterdir()
    parse_cached(TEXT.replace("12345", "54321"), shelf=cache)
    (other,) = set(cache.folder.iterdir()) - {file}
    file.write_bytes(other.read_bytes())
    assert parse_cached(TEXT, shelf=cache) == module, "the module of another text was taken"


def test_a_folder_that_cannot_be_written_is_not_needed(tmp_path: Path) -> None:
    occupied = tmp_path / ".cache"
    occupied.write_text("not a folder")
    assert parse_cached(TEXT, shelf=user_cache("ptx", tmp_path)) == parse(TEXT)
    assert occupied.read_text() == "not a folder"


def test_refused_text_is_refused_again_and_leaves_no_file(cache: UserCache) -> None:
    for name in ("first.ptx", "second.ptx"):
        with pytest.raises(PtxSyntaxError, match=name):
            parse_cached("nonsense", name, cache)
    assert not cache.folder.exists()
