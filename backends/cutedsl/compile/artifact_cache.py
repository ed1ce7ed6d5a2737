"""Compiled artifacts kept on disk by content: what was compiled, how, by what and for what. No CuTeDSL is imported.

An entry is a file named by the SHA-256 of its key: a line with the SHA-256 of the rest, then a ZIP archive. An entry
that is damaged, cut short, or was made from another key is built anew and replaced, never used.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from backends.cutedsl.compile.artifact import Artifact, Resources
from megamoe.contract import TARGETS, Target

FORMAT: Final = 1
SUFFIX: Final = ".artifact"
_MANIFEST, _PTX, _CUBIN, _OBJECT = "manifest.json", "kernel.ptx", "kernel.cubin", "host.o"
_BACKEND = Path(__file__).parents[1]
_SHARED = ("", "compile")
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Source:
    """A file and what it held when it was read; `sha256` is empty if it could not be."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class ArtifactKey:
    """What an artifact depends on. `sources`: every file that the kernel's code comes from, read before the code was
    imported; `options`: all constants and compile options by name; `compiler`: name and version,
    compile.compiler_version()."""

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
                "sources": sorted(
                    [f"{source.path.parent.name}/{source.path.name}", source.sha256] for source in self.sources
                ),
                "options": dict(self.options),
                "target": self.target,
                "compiler": self.compiler,
                "compiled_by": [source.sha256 for source in IMPORTED if _folder(source) == "compile"],
                "processor": platform.machine(),
            },
            sort_keys=True,
        )

    def is_current(self) -> bool:
        """Whether the files still hold what `sources` says."""
        return all(source == _read_source(source.path) for source in self.sources)


def default_folder(home: Path) -> Path:
    """Where artifacts of the user whose home directory is `home` are kept unless another folder is named."""
    return home / ".cache" / "megamoe" / "cutedsl"


def cached_artifact(key: ArtifactKey, build: Callable[[], Artifact], folder: Path | None) -> Artifact:
    """The artifact of `key` from `folder`, or from `build`, whose result is then kept there.

    Without a folder, or with one that cannot be written, every call builds; so it does where a source was edited since
    it was read, as nobody knows which text was compiled. What `build` raises passes through.
    """
    if folder is None:
        return build()
    text = key.text()
    path = folder / f"{_sha256(text.encode())}{SUFFIX}"
    found = _read(path, text)
    if found is None:
        found = build()
        if key.is_current():
            _write(path, _pack(found, text))
    return found


def sources_in(folder: Path) -> tuple[Source, ...]:
    """Every Python file in `folder` and below, sorted: the sources of a package of kernels."""
    return tuple(_read_source(path) for path in sorted(folder.rglob("*.py")))


def imported(kernel: str) -> tuple[Source, ...]:
    """The files of the folder `kernel` and all that no folder of another kernel holds, as they were when imported."""
    return tuple(source for source in IMPORTED if _folder(source) in (kernel, *_SHARED))


def _place(source: Source) -> str:
    return f"{source.path.parent.name}/{source.path.name}"


def _folder(source: Source) -> str:
    return source.path.relative_to(_BACKEND).parts[0] if source.path.parent != _BACKEND else ""


def _read(path: Path, key: str) -> Artifact | None:
    try:
        checksum, _, archive = path.read_bytes().partition(b"\n")
        return _unpack(archive, key) if checksum.decode() == _sha256(archive) else None
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None


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


def _write(path: Path, archive: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_sha256(archive).encode() + b"\n" + archive)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
    except OSError:
        return


def _read_source(path: Path) -> Source:
    try:
        return Source(path, _sha256(path.read_bytes()))
    except OSError:
        return Source(path, "")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Read when this module is imported, which is before any kernel is: a process that runs on after an edit computes with
# the text that it imported, and must not keep the outcome under the name of the new text.
IMPORTED: Final = sources_in(_BACKEND)
