"""Files beside the records: bundles of failures with their error maps, and what `megamoe explain` wrote.

Error maps and pictures of tensor memory are small and shown in the page; the other files are linked.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from megamoe.explain import folder_of
from megamoe.records.lines import Record

MAX_FILE_BYTES = 64_000
MAX_BYTES = 400_000


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files about one row. `links`: name -> URL relative to the page. `maps`: tensor -> the text of its error map.

    `pictures`: name -> data URL of an SVG file. As the source of an image, an SVG can neither run nor load anything.
    """

    links: Mapping[str, str] = field(default_factory=dict[str, str])
    maps: Mapping[str, str] = field(default_factory=dict[str, str])
    pictures: Mapping[str, str] = field(default_factory=dict[str, str])


def bundles(records: Iterable[Record], page: Path, home: Path = Path()) -> dict[str, RowFiles]:
    """Bundle that a record names -> its files, for the folders that exist. Paths are relative to `home`.

    `page`: the path of the report. Error maps beyond MAX_BYTES in all are only linked.
    """
    found: dict[str, RowFiles] = {}
    left = MAX_BYTES
    for name in dict.fromkeys(record.bundle for record in records if record.bundle):
        folder = home / name
        maps: dict[str, str] = {}
        for file in _files(folder):
            text = _small_text(file) if file.name.endswith(".error.txt") else None
            if text is not None and len(text) <= left:
                left -= len(text)
                maps[file.name.removesuffix(".error.txt")] = text
        links = {file.name: link(file, page) for file in _files(folder)}
        if links:
            found[name] = RowFiles(links, maps)
    return found


def traces(records: Iterable[Record], page: Path, home: Path = Path()) -> dict[str, RowFiles]:
    """ "case backend target" -> the files of `megamoe explain`, for the folders that exist.

    Pictures of tensor memory beyond MAX_BYTES in all are only linked.
    """
    found: dict[str, RowFiles] = {}
    left = MAX_BYTES
    for case, backend, target in dict.fromkeys((one.case, one.backend, one.target) for one in records):
        folder = home / folder_of(case, backend, target)
        pictures: dict[str, str] = {}
        for file in _files(folder):
            text = _small_text(file) if file.name.startswith("tmem") and file.suffix == ".svg" else None
            if text is not None and len(text) <= left:
                left -= len(text)
                pictures[file.name] = f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}"
        links = {file.name: link(file, page) for file in _files(folder)}
        if links:
            found[f"{case} {backend} {target}"] = RowFiles(links, pictures=pictures)
    return found


def link(file: Path, page: Path) -> str:
    """The URL of `file` relative to the folder of `page`, quoted for an attribute."""
    relative = os.path.relpath(file.resolve(), page.resolve().parent)
    return quote(Path(relative).as_posix())


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.is_file())
    except OSError:
        return []


def _small_text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if file.stat().st_size <= MAX_FILE_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None
