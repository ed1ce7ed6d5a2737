"""A cache of compiled artifacts on disk, keyed by sources, options, compiler and target. Imports no CuTeDSL.

An entry is a ZIP archive, named by the SHA-256 of its key. It holds machine code that runs in this process. So an entry
that is damaged, made from another key, or not written by this user (megamoe.contract.cache) is never used: it is
rebuilt and replaced.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from backends.cutedsl.compile.artifact import Artifact, Resources
from megamoe.contract import TARGETS, Target
from megamoe.contract.cache import UserCache

FORMAT: Final = 2
SUFFIX: Final = ".artifact"
_MANIFEST, _PTX, _CUBIN, _OBJECT = "manifest.json", "kernel.ptx", "kernel.cubin", "host.o"
_BACKEND = Path(__file__).parents[1]
_KERNEL_MODULE = "program.py"
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Source:
    """A file at `place` below the folder `root`, as it was when read. `sha256` is empty if it could not be read."""

    root: Path
    place: str
    sha256: str

    def now(self) -> Source:
        """The same file as it is now."""
        try:
            return Source(self.root, self.place, _sha256((self.root / self.place).read_bytes()))
        except OSError:
            return Source(self.root, self.place, "")

    @property
    def folder(self) -> str:
        """The folder of `root` that holds the file; empty for a file of `root` itself."""
        return self.place.partition("/")[0] if "/" in self.place else ""


@dataclass(frozen=True, slots=True)
class ArtifactKey:
    """Everything that an artifact depends on.

    `sources`: every file that the kernel's code may come from, read before the code was imported (`imported`).
    `options`: all constants and compile options by name. `compiler`: name and version, compile.compiler_version().
    """

    name: str
    sources: tuple[Source, ...]
    options: Mapping[str, str | int | float | bool | None]
    target: Target
    compiler: str

    def text(self) -> str:
        """The key as JSON, file contents as their SHA-256."""
        return json.dumps(
            {
                "format": FORMAT,
                "name": self.name,
                "sources": sorted([source.place, source.sha256] for source in self.sources),
                "options": dict(self.options),
                "target": self.target,
                "compiler": self.compiler,
                "processor": platform.machine(),
            },
            sort_keys=True,
        )

    def is_current(self) -> bool:
        """Whether the files still have the content of `sources`."""
        return all(source == source.now() for source in self.sources)


def cached_artifact(key: ArtifactKey, build: Callable[[], Artifact], cache: UserCache | None) -> Artifact:
    """The artifact of `key` from `cache`, or from `build`, whose result goes into the cache.

    The result is not kept if there is no cache, if the cache cannot be written, or if a source was edited since it was
    read, because it is then unknown which text was compiled. Exceptions of `build` pass through.
    """
    if cache is None:
        return build()
    text = key.text()
    name = f"{_sha256(text.encode())}{SUFFIX}"
    found = cache.kept(name, lambda archive: _unpack(archive, text))
    if found is None:
        found = build()
        if key.is_current():
            cache.keep(name, _pack(found, text))
    return found


def sources_in(root: Path) -> tuple[Source, ...]:
    """Every Python file in `root` and below, sorted by path."""
    places = (path.relative_to(root).as_posix() for path in sorted(root.rglob("*.py")))
    return tuple(Source(root, place, "").now() for place in places)


def sources_of(kernel: str, sources: Iterable[Source]) -> tuple[Source, ...]:
    """The `sources` that the code of `kernel` may come from: all but the files in other kernels' folders.

    A folder of the root belongs to a kernel if it holds a program.py. Every other file is covered, so no shared file
    has to be listed.
    """
    found = tuple(sources)
    others = {source.folder for source in found if source.place == f"{source.folder}/{_KERNEL_MODULE}"} - {kernel}
    return tuple(source for source in found if source.folder not in others)


def imported(kernel: str) -> tuple[Source, ...]:
    """The sources of `kernel`, a folder of backends/cutedsl, as they were at import."""
    return sources_of(kernel, IMPORTED)


def _unpack(archive: bytes, key: str) -> Artifact | None:
    with zipfile.ZipFile(io.BytesIO(archive)) as entry:
        manifest: dict[str, object] = json.loads(entry.read(_MANIFEST))
        if manifest["key"] != key or manifest["target"] not in TARGETS:
            return None
        resources = cast("dict[str, list[int]]", manifest["resources"])
        return Artifact(
            target=cast(Target, manifest["target"]),
            ptx=entry.read(_PTX).decode(),
            cubin=entry.read(_CUBIN),
            host_object=entry.read(_OBJECT),
            entry=str(manifest["entry"]),
            packed_entry=str(manifest["packed_entry"]),
            parameters=tuple(cast("list[str]", manifest["parameters"])),
            compiler=str(manifest["compiler"]),
            resources={kernel: Resources(*values) for kernel, values in resources.items()},
        )


def _pack(artifact: Artifact, key: str) -> bytes:
    manifest = {
        "key": key,
        "target": artifact.target,
        "entry": artifact.entry,
        "packed_entry": artifact.packed_entry,
        "parameters": artifact.parameters,
        "compiler": artifact.compiler,
        "resources": {kernel: [one.registers, one.stack] for kernel, one in artifact.resources.items()},
    }
    parts = {
        _MANIFEST: json.dumps(manifest).encode(),
        _PTX: artifact.ptx.encode(),
        _CUBIN: artifact.cubin,
        _OBJECT: artifact.host_object,
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as entry:
        for name, content in parts.items():
            entry.writestr(zipfile.ZipInfo(name, _ZIP_EPOCH), content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Read when this module is imported, before any kernel is. A process that outlives an edit compiles the text that it
# imported; it must not keep the result under the key of the new text.
IMPORTED: Final = sources_in(_BACKEND)
