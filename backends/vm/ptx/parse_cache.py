"""Keeps parsed modules between processes, where the caller passes a Shelf. backends.vm.load keeps them in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Protocol

import msgspec

from backends.vm.ptx.ast import Module
from backends.vm.ptx.parser import parse

_DECODER = msgspec.json.Decoder(Module)


class Shelf(Protocol):
    """A store of modules across processes. It may return only what this user has stored: the machine runs it."""

    def kept(self, name: str, decoded: Callable[[bytes], Module]) -> Module | None:
        """`decoded` of the content under `name`; None if there is none that can be trusted and decoded."""
        ...

    def keep(self, name: str, content: bytes) -> None:
        """Stores `content` under `name`. May fail silently."""
        ...


def parse_cached(text: str, name: str = "<ptx>", shelf: Shelf | None = None) -> Module:
    """`parse(text, name)`, or the module that `shelf` keeps under the SHA-256 of text and parser."""
    if shelf is None:
        return parse(text, name)
    key = hashlib.sha256(f"{_parser_version()}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()
    module = shelf.kept(f"{key}.json", _DECODER.decode)
    if module is None:
        module = parse(text, name)
        shelf.keep(f"{key}.json", msgspec.json.encode(module))
    return module


@cache
def _parser_version() -> str:
    digest = hashlib.sha256()
    for source in sorted(resources.files("backends.vm.ptx").iterdir(), key=lambda file: file.name):
        if source.name.endswith((".py", ".lark")):
            digest.update(source.read_bytes())
    return digest.hexdigest()
