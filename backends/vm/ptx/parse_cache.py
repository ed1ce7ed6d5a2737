"""Caches parsed modules: the latest in memory, and all of them on disk when the caller passes a Shelf."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from importlib import resources
from threading import Lock
from typing import Protocol

import msgspec

from backends.vm.ptx.ast import Module
from backends.vm.ptx.parser import parse

_KEPT = 64
_DECODER = msgspec.json.Decoder(Module)


class Shelf(Protocol):
    """A store of modules across processes. It may return only what this user has stored: the machine runs it."""

    def kept(self, name: str, decoded: Callable[[bytes], Module]) -> Module | None:
        """`decoded` of the content under `name`; None if there is none that can be trusted and decoded."""
        ...

    def keep(self, name: str, content: bytes) -> None:
        """Stores `content` under `name`. May fail silently."""
        ...


_memory: OrderedDict[str, Module] = OrderedDict()
_lock = Lock()


def parse_cached(text: str, name: str = "<ptx>", shelf: Shelf | None = None) -> Module:
    """`parse(text, name)`, once per text: from memory or from `shelf`, under the SHA-256 of text and parser."""
    key = hashlib.sha256(f"{_parser_version()}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()
    with _lock:
        if key in _memory:
            _memory.move_to_end(key)
            return _memory[key]
    module = None if shelf is None else shelf.kept(f"{key}.json", _DECODER.decode)
    if module is None:
        module = parse(text, name)
        if shelf is not None:
            shelf.keep(f"{key}.json", msgspec.json.encode(module))
    with _lock:
        _memory[key] = module
        while len(_memory) > _KEPT:
            _memory.popitem(last=False)
    return module


def forget() -> None:
    """Clears the cache in memory. Files stay."""
    with _lock:
        _memory.clear()


@cache
def _parser_version() -> str:
    digest = hashlib.sha256()
    for source in sorted(resources.files("backends.vm.ptx").iterdir(), key=lambda file: file.name):
        if source.name.endswith((".py", ".lark")):
            digest.update(source.read_bytes())
    return digest.hexdigest()
