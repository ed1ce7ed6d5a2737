"""Files that outlive a process: a cache only vouches for what its user wrote, and a kill leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.contract import scratch
from megamoe.contract.cache import MIN_KEY_BYTES, UserCache, user_cache
from megamoe.contract.counted import counted
from megamoe.contract.scratch import PREFIX, clear_abandoned, scratch_folder, unfinished

GOOD, EVIL = b"what the user wrote", b"what somebody else wrote"


def cache_in(home: Path, name: str = "code") -> UserCache:
    found = user_cache(name, home)
    assert found is not None
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_kept_comes_back_in_closed_places(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    assert cache.kept("a", bytes) is None
    assert not cache.key_file.exists(), "a look makes no key"
    cache.keep("a", GOOD)
    assert cache.kept("a", bytes) == GOOD
    assert (mode(cache.folder), mode(cache.folder / "a")) == (0o700, 0o600), "other users could read or write here"
    assert (mode(cache.key_file.parent), mode(cache.key_file)) == (0o700, 0o600), "other users could read the key"
    assert cache.folder not in cache.key_file.parents, "who can write the cache has the key, too"
    assert len(list(cache.folder.iterdir())) == len(list(cache.key_file.parent.iterdir())) == 1, "something was left"


def _edited(cache: UserCache) -> None:
    entry = cache.folder / "a"
    entry.write_bytes(entry.read_bytes().replace(GOOD, EVIL))


def _by_another_user(cache: UserCache) -> None:
    other = cache_in(cache.folder / "other")
    UserCache(cache.folder, other.key_file).keep("a", EVIL)


def _of_another_name(cache: UserCache) -> None:
    cache.keep("b", EVIL)
    (cache.folder / "b").rename(cache.folder / "a")


def _of_another_cache(cache: UserCache) -> None:
    other = UserCache(cache.folder.with_name("others"), cache.key_file)
    other.keep("a", EVIL)
    (other.folder / "a").rename(cache.folder / "a")


def _a_link_to_it(cache: UserCache) -> None:
    (cache.folder / "a").rename(cache.folder.parent / "moved")
    (cache.folder / "a").symlink_to(cache.folder.parent / "moved")


def _a_pipe(cache: UserCache) -> None:
    (cache.folder / "a").unlink()
    os.mkfifo(cache.folder / "a")


def _a_key_that_others_can_read(cache: UserCache) -> None:
    cache.key_file.chmod(0o644)


def _a_key_that_anyone_can_guess(cache: UserCache) -> None:
    cache.key_file.write_bytes(b"k" * (MIN_KEY_BYTES - 1))
    UserCache(cache.folder, cache.key_file).keep("b", GOOD)


ATTACKS = (
    _edited, _by_another_user, _of_another_name, _of_another_cache, _a_link_to_it, _a_pipe,
    _a_key_that_others_can_read, _a_key_that_anyone_can_guess,
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_what_its_user_did_not_write_is_rebuilt(tmp_path: Path, attack: Callable[[UserCache], None]) -> None:
    cache = cache_in(tmp_path)
    cache.keep("a", GOOD)
    attack(cache)
    assert cache.kept("a", bytes) is None, "the entry was believed"
    cache.keep("a", GOOD)
    assert cache.kept("a", bytes) == GOOD, "it was not rebuilt"


def test_nothing_is_decoded_that_is_not_authentic(tmp_path: Path) -> None:
    """A decoder that unpickles would execute what it decodes."""
    cache, decoded = cache_in(tmp_path), list[bytes]()
    cache.keep("a", GOOD)
    _edited(cache)
    cache.kept("a", decoded.append)
    assert decoded == []


@pytest.mark.parametrize("error", [RecursionError, MemoryError, OverflowError, ValueError, EOFError])
def test_an_entry_that_cannot_be_decoded_is_rebuilt(tmp_path: Path, error: type[Exception]) -> None:
    def fails(content: bytes) -> bytes:
        raise error

    cache = cache_in(tmp_path)
    cache.keep("a", GOOD)
    assert cache.kept("a", fails) is None


def test_a_folder_that_was_open_is_closed(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    cache.keep("a", GOOD)
    cache.folder.chmod(0o777)
    assert cache.kept("a", bytes) == GOOD
    assert mode(cache.folder) == 0o700


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_in(tmp_path)
    cache.keep("a", GOOD)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert cache.kept("a", bytes) is None
    cache.keep("b", EVIL)
    assert not (cache.folder / "b").exists()


def test_a_process_that_the_key_is_kept_from_neither_believes_nor_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_in(tmp_path)
    cache.keep("a", GOOD)
    opened = os.open

    def hidden(path: object, *arguments: int, **options: int | None) -> int:
        if str(path).startswith(str(cache.key_file.parent)):
            raise PermissionError(13, "hidden", str(path))
        return opened(path, *arguments, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(os, "open", hidden)
    assert cache.kept("a", bytes) is None
    cache.keep("b", EVIL)
    assert not (cache.folder / "b").exists(), "without the key, an entry proves nothing"


# What a kill leaves


_KILLED = """
import os, signal, sys
from pathlib import Path
from megamoe.contract.scratch import scratch_folder, unfinished
place = Path(sys.argv[1])
with scratch_folder("run", place) as folder, unfinished(place) as part, unfinished(place, folder=True) as whole:
    (folder / "deep").mkdir()
    (folder / "deep" / "bytes").write_bytes(b"x" * 1000)
    print("made", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_cleared_and_what_lives_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "megamoe-of-somebody"
    theirs.mkdir()
    maker = subprocess.Popen([sys.executable, "-c", _KILLED, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert maker.stdout
    assert maker.stdin
    assert maker.stdout.readline() == b"made\n"
    made = [path for path in tmp_path.iterdir() if path.name.startswith(PREFIX)]
    assert len(made) == 3
    monkeypatch.setattr(scratch, "_cleared", set[tuple[int, Path]]())
    clear_abandoned(tmp_path)
    assert all(path.exists() for path in made), "what a living process works with was removed"
    maker.stdin.close()
    assert maker.wait(20) == -signal.SIGKILL
    maker.stdout.close()
    assert all(path.exists() for path in made), "the kill must leave something, or this tests nothing"
    monkeypatch.setattr(scratch, "_cleared", set[tuple[int, Path]]())
    with scratch_folder("run", tmp_path) as folder:
        assert [*tmp_path.iterdir()] == [theirs, folder] or [*tmp_path.iterdir()] == [folder, theirs]
    assert [*tmp_path.iterdir()] == [theirs]


@pytest.mark.parametrize("instant", ["open", "flock"])
@pytest.mark.parametrize("what", ["a folder", "a file", "an unfinished folder"])
def test_what_another_process_clears_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, instant: str
) -> None:
    """The other process intervenes just before the maker opens its file, and just before it locks it."""
    clear_abandoned(tmp_path)
    module, cleared = {"open": os, "flock": fcntl}[instant], list[Path]()
    really: Callable[..., object] = getattr(module, instant)

    def after_a_look(*arguments: object, **options: object) -> object:
        made = [path for path in tmp_path.iterdir() if path.name.startswith(PREFIX)]
        if made and not cleared:
            cleared.extend(made)
            for path in made:
                path.rmdir() if path.is_dir() else path.unlink()
        return really(*arguments, **options)

    monkeypatch.setattr(module, instant, after_a_look)
    kinds = {
        "a folder": lambda: scratch_folder("run", tmp_path),
        "a file": lambda: unfinished(tmp_path),
        "an unfinished folder": lambda: unfinished(tmp_path, folder=True),
    }
    with kinds[what]() as path:
        assert cleared, "nothing was cleared, so this tests nothing"
        assert path.exists(), f"{what} that another process cleared before {instant} was handed out"
    assert [*tmp_path.iterdir()] == []


def test_what_is_renamed_stays(tmp_path: Path) -> None:
    with unfinished(tmp_path) as part:
        part.write_text("whole")
        part.rename(tmp_path / "file")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


def test_one_thing_is_no_things() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 1024)] == ["0 rows", "1 row", "2 rows", "1,024 rows"]
    assert [counted(number, "row", "is", "are") for number in (0, 1, 2)] == ["0 rows are", "1 row is", "2 rows are"]
