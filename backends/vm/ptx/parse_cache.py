"""Parsed modules kept: the latest in memory, all of them on disk when the caller names a folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import OrderedDict
from functools import cache
from importlib import resources
from pathlib import Path
from threading import Lock

import msgspec

from backends.vm.ptx.ast import Module
from backends.vm.ptx.parser import parse

_KEPT = 64
_DECODER = msgspec.json.Decoder(Module)

_memory: OrderedDict[str, Module] = OrderedDict()
_lock = Lock()


def parse_cached(text: str, name: str = "<ptx>", folder: Path | None = None) -> Module:
    """`parse(text, name)`, done once a text: from memory, or from `folder` if a file there holds it undamaged.

    A file's name is the SHA-256 of the text and of the parser's own sources; its first line is the SHA-256 of the
    rest. A file that does not match is parsed anew and replaced; a folder that cannot be written is done without.
    """
    key = hashlib.sha256(f"{_parser_version()}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()
    with _lock:
        if key in _memory:
            _memory.move_to_end(key)
            return _memory[key]
    path = None if folder is None else folder / f"{key}.json"
    module = None if path is None else _read(path)
    if module is None:
        module = parse(text, name)
        if path is not None:
            _write(path, msgspec.json.encode(module))
    with _lock:
        _memory[key] = module
        while len(_memory) > _KEPT:
            _memory.popitem(last=False)
    return module


def forget() -> None:
    """Empties the memory; files stay."""
    with _lock:
        _memory.clear()


@cache
def _parser_version() -> str:
    digest = hashlib.sha256()
    for source in sorted(resources.files("backends.vm.ptx").iterdir(), key=lambda file: file.name):
        if source.name.endswith((".py", ".lark")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Module | None:
    try:
        checksum, _, payload = path.read_bytes().partition(b"\n")
        return _DECODER.decode(payload) if checksum == _checksum(path, payload) else None
    except (OSError, ValueError, RecursionError):
        return None


def _write(path: Path, payload: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_checksum(path, payload) + b"\n" + payload)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
    except OSError:
        return


def _checksum(path: Path, payload: bytes) -> bytes:
    """Of the key, which is the file's name, and the payload: a file copied under another name does not match."""
    return hashlib.sha256(path.stem.encode() + b"\n" + payload).hexdigest().encode()
