"""A cache on disk whose entries are trusted only if this user wrote them.

An entry may be machine code, or the proof that a kernel was read. Whoever can write an entry could run code or pass a
wrong kernel. Three rules in this file prevent that:

- An entry begins with the HMAC-SHA256 (RFC 2104) of its cache, its name and its content. The key belongs to this user
  and lies outside the cache folder. Write access to the cache alone, as a CI service has when it restores one, is not
  enough to forge an entry.
- The folder belongs to this user and is closed to others (mode 0700), and so is the key (0600).
- Nothing in an entry is decoded before its HMAC is verified.

An entry that fails is rebuilt. CI that keeps a cache supplies the key as a secret and puts it where `user_cache` looks
for it. A process that must not write entries, such as one that runs untrusted code, must not be able to read the key.
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
"""Which registered backend or executor writes which cache."""
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

    No method raises. Without a folder or a key of this user, nothing is found and nothing is stored.
    """

    folder: Path
    key_file: Path

    def kept(self, name: str, decoded: Callable[[bytes], T]) -> T | None:
        """Returns `decoded(content)` of entry `name`; None if this user wrote no such entry.

        If `decoded` raises anything, the entry counts as missing.
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
            # RecursionError and MemoryError too: a bad entry must cost a rebuild and nothing else.
            return None

    def keep(self, name: str, content: bytes) -> None:
        """Stores `content` as entry `name` atomically. Makes the folder and the key if they do not exist."""
        with suppress(OSError):
            key = _read_key(self.key_file) or _new_key(self.key_file)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _own_folder(self.folder), unfinished(self.folder) as part:
                part.write_bytes(self._mac(key, name, content) + content)
                os.replace(part, self.folder / name)

    def prepare(self) -> None:
        """Makes the folder and the key if they do not exist, where possible."""
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _read_key(self.key_file) is None:
                _new_key(self.key_file)

    def _mac(self, key: bytes, name: str, content: bytes) -> bytes:
        """Covers the cache and the name too: an entry copied to another name or from another cache does not match."""
        mac = hmac.new(key, f"{self.folder.name}\0{name}\0".encode(), hashlib.sha256)
        mac.update(content)
        return mac.digest()


def user_cache(name: str, home: Path | None = None) -> UserCache | None:
    """The cache `name` of the user whose home is `home` (this process's home by default); None without a home.

    Entries lie in ~/.cache/megamoe/NAME, the key in ~/.local/state/megamoe/NAME.key. Each cache has its own key, so a
    process can be given access to just one.
    """
    try:
        home = home or Path.home()
    except RuntimeError:
        return None
    return UserCache(home / ".cache/megamoe" / name, home / ".local/state/megamoe" / f"{name}.key")


def keys_kept_from(runs: str) -> tuple[str, ...]:
    """The key files to hide from a process that runs the backend or executor `runs`: the keys of all other caches.

    Makes missing keys and folders first. Once a key is hidden from the process, the process cannot create anything next
    to it.
    """
    caches = {owner: cache for owner, name in OWNERS.items() if (cache := user_cache(name)) is not None}
    for cache in caches.values():
        cache.prepare()
    return tuple(str(cache.key_file) for owner, cache in caches.items() if owner != runs)


@contextmanager
def _own_folder(path: Path) -> Iterator[int]:
    """Yields a descriptor of the folder at `path`, closed to others. PermissionError if another user owns it."""
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
    """Reads a plain file that this user owns and no other user may write. Raises PermissionError for anything else."""
    with open(os.open(path, os.O_RDONLY | _FLAGS, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        loose = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or loose or found.st_size > most:
            raise PermissionError(f"{path} is no plain file of this user")
        return file.read()


def _read_key(path: Path) -> bytes | None:
    """The key; None if there is none or if others may have read it. OSError if this process may not read it."""
    try:
        if path.lstat().st_mode & _OTHERS:
            return None
        key = _read_plain(path, MAX_KEY_BYTES).strip()
    except FileNotFoundError:
        return None
    return key if len(key) >= MIN_KEY_BYTES else None


def _new_key(path: Path) -> bytes:
    """Makes a key at `path`, or takes the one that another process has just made there."""
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
