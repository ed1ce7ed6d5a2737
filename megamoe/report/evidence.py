"""What lies on disk beside the records: bundles of failures with their error maps, and recorded runs of the VM.

Small things are shown in the page, an error map and a map of tensor memory; the rest is linked.
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

MOST_FILE_BYTES = 64_000
MOST_BYTES = 400_000


@dataclass(frozen=True, slots=True)
class Evidence:
    """Files about one row. `links`: name -> URL relative to the page. `maps`: tensor -> the text of its error map.

    `pictures`: name -> data URL of an SVG file; as the source of an image it can neither run nor load anything.
    """

    links: Mapping[str, str] = field(default_factory=dict[str, str])
    maps: Mapping[str, str] = field(default_factory=dict[str, str])
    pictures: Mapping[str, str] = field(default_factory=dict[str, str])


def bundles(records: Iterable[Record], page: Path, home: Path = Path()) -> dict[str, Evidence]:
    """Evidence by the bundle that a record names, as far as the folder is there; paths are as seen from `home`.

    `page` is where the report will lie. Error maps beyond MOST_BYTES in all are linked only.
    """
    found: dict[str, Evidence] = {}
    left = MOST_BYTES
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
            found[name] = Evidence(links, maps)
    return found


def traces(records: Iterable[Record], page: Path, home: Path = Path()) -> dict[str, Evidence]:
    """What `megamoe explain` left, by "case backend target", for the records whose folder is there.

    Pictures of tensor memory beyond MOST_BYTES in all are linked only.
    """
    found: dict[str, Evidence] = {}
    left = MOST_BYTES
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
            found[f"{case} {backend} {target}"] = Evidence(links, pictures=pictures)
    return found


def link(file: Path, page: Path) -> str:
    """A URL of `file` relative to the folder of `page`, safe in an attribute."""
    relative = os.path.relpath(file.resolve(), page.resolve().parent)
    return quote(Path(relative).as_posix())


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.is_file())
    except OSError:
        return []


def _small_text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if file.stat().st_size <= MOST_FILE_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None
