"""Content kept between processes that vouches for itself only if this user wrote it.

An entry of a cache may be machine code, or the proof that a kernel was read, so whoever can write one could run code or
pass a wrong kernel. Three rules, here alone, stand against that:

- an entry begins with the HMAC-SHA256 (RFC 2104) of its cache, its name and its content. The key is this user's and
  lies outside of the cache: who can write the cache alone, as where a CI service restores it, can forge nothing;
- the folder is this user's and closed to others (mode 0700), and so is the key (0600);
- nothing of an entry is decoded before its HMAC was right.

What does not keep them is made anew. CI that keeps a cache brings the key as a secret, and puts it where `user_cache`
has it; a process that must not vouch, such as one that runs a stranger's code, is one that cannot read the key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from megamoe.contract.scratch import unfinished

OWNERS: Final = {"cutedsl": "cutedsl", "vm": "ptx"}
"""Who vouches for what: registered backend or executor -> its cache."""
MIN_KEY_BYTES: Final = 32
MAX_KEY_BYTES: Final = 4096
MAX_ENTRY_BYTES: Final = 1 << 30
_MAC_BYTES: Final = hashlib.sha256().digest_size
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UserCache:
    """Entries by name in `folder`, authenticated by the key in `key_file`.

    Nothing here raises: without a folder or a key of this user, nothing is found and nothing is kept.
    """

    folder: Path
    key_file: Path

    def kept(self, name: str, decoded: Callable[[bytes], T]) -> T | None:
        """What `decoded` makes of the content of entry `name`; None if there is no entry that this user wrote.

        An entry that `decoded` fails on, whatever it raises, counts as none.
        """
        try:
            key = _read_key(self.key_file)
            if key is None:
                return None
            with _own_folder(self.folder) as folder:
                entry = _read_plain(name, MAX_ENTRY_BYTES, folder)
            found = entry[_MAC_BYTES:]
            if not hmac.compare_digest(entry[:_MAC_BYTES], self._mac(key, name, found)):
                return None
            return decoded(found)
        except Exception:
            # RecursionError and MemoryError too: a bad entry costs a rebuild and nothing else.
            return None

    def keep(self, name: str, content: bytes) -> None:
        """Keeps `content` as entry `name`, whole or not at all. Makes the folder and the key if they are not there."""
        with suppress(OSError):
            key = _read_key(self.key_file) or _new_key(self.key_file)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _own_folder(self.folder), unfinished(self.folder) as part:
                part.write_bytes(self._mac(key, name, content) + content)
                os.replace(part, self.folder / name)

    def prepare(self) -> None:
        """Makes the folder and the key, where they can be made and are not there."""
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _read_key(self.key_file) is None:
                _new_key(self.key_file)

    def _mac(self, key: bytes, name: str, content: bytes) -> bytes:
        """Of all that an entry claims: an entry copied to another name, or from another cache, does not match."""
        mac = hmac.new(key, f"{self.folder.name}\0{name}\0".encode(), hashlib.sha256)
        mac.update(content)
        return mac.digest()


def user_cache(name: str, home: Path | None = None) -> UserCache | None:
    """The cache `name` of the user whose home is `home` (that of this process by default); None without a home.

    Its entries lie in ~/.cache/megamoe/NAME, its key in ~/.local/state/megamoe/NAME.key. A key a cache, so that a
    process can be given one of them.
    """
    try:
        home = home or Path.home()
    except RuntimeError:
        return None
    return UserCache(home / ".cache/megamoe" / name, home / ".local/state/megamoe" / f"{name}.key")


def keys_kept_from(runs: str) -> tuple[str, ...]:
    """The keys that a process must not see which runs the backend or executor `runs`: those of the others' caches.

    Makes the keys and folders that are not there yet, as a process that something is hidden from can make nothing
    beside it.
    """
    caches = {owner: cache for owner, name in OWNERS.items() if (cache := user_cache(name)) is not None}
    for cache in caches.values():
        cache.prepare()
    return tuple(str(cache.key_file) for owner, cache in caches.items() if owner != runs)


@contextmanager
def _own_folder(path: Path) -> Iterator[int]:
    """A descriptor of the folder at `path`, closed to others. PermissionError if it is another user's."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{path} is another user's")
        if found.st_mode & _OTHERS:
            os.fchmod(descriptor, 0o700)
        yield descriptor
    finally:
        os.close(descriptor)


def _read_plain(path: str | Path, most: int, folder: int | None = None) -> bytes:
    """The content of a plain file of this user, which no other user may write. PermissionError for anything else."""
    with open(os.open(path, os.O_RDONLY | _FLAGS, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        loose = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or loose or found.st_size > most:
            raise PermissionError(f"{path} is no plain file of this user")
        return file.read()


def _read_key(path: Path) -> bytes | None:
    """The key; None if there is none, or one that others may have read. OSError if it is kept from this process."""
    try:
        if path.lstat().st_mode & _OTHERS:
            return None
        key = _read_plain(path, MAX_KEY_BYTES).strip()
    except FileNotFoundError:
        return None
    return key if len(key) >= MIN_KEY_BYTES else None


def _new_key(path: Path) -> bytes:
    """Makes a key at `path`, or takes that which another process has just made there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _own_folder(path.parent), unfinished(path.parent) as part:
        part.write_bytes(secrets.token_hex(MIN_KEY_BYTES).encode())
        if path.is_file() and _read_key(path) is None:
            path.unlink()
        with suppress(FileExistsError):
            os.link(part, path)
    key = _read_key(path)
    if key is None:
        raise PermissionError(f"{path} holds no key of this user")
    return key
