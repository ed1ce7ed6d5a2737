"""Packs the packages that a device machine without a network lacks: python -m conformance.gpu.pack FOLDER [PACKAGE
...].

FOLDER then holds wheels for Python 3.12 on x86-64, CuTeDSL's runtime library, and the probes with the VM's outputs. On
the device machine, in the repository's root: source FOLDER/activate.sh. That also registers the backends and executors
of pyproject.toml. A further PACKAGE is a pip requirement, packed without its dependencies.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from conformance import ROOT

# Imports of megamoe and the executor `gpu` that are missing on a machine with torch, triton, numpy, scipy and pytest.
# llvmlite is too large, and only the VM's host programs need it.
PACKAGES = (
    "annotated-doc", "annotated-types", "apache-tvm-ffi", "click", "cuda-bindings", "cuda-pathfinder", "junitparser",
    "lark", "markdown-it-py", "mdurl", "ml_dtypes", "msgspec", "nvidia-ml-py", "Pebble", "psutil", "pydantic",
    "pydantic_core", "Pygments", "PyYAML", "rich", "shellingham", "typer", "typing-inspection", "typing_extensions",
)  # fmt: skip
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64")
RUNTIME_PACKAGE = "nvidia-cutlass-dsl-libs-cu13"
_ACTIVATE = """# Source this from the repository's root: installs once a machine, then puts everything on the path.
site=/tmp/megamoe-site
if [ ! -f $site/ready ]; then
  mkdir -p $site
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target $site {folder}/*.whl &&
    python3 -m tarfile -e {folder}/extra.tar.xz $site && touch $site/ready || echo "installing the wheels failed" >&2
fi
export PYTHONPATH=$PWD:$site${{PYTHONPATH:+:$PYTHONPATH}} PYTHONUNBUFFERED=1
python3 -m conformance.gpu.pack --metadata $site
"""


def pins() -> dict[str, str]:
    """Returns name -> name==version for the pins of constraints.txt; names are normalised by the packaging rules."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {_normal(line.partition("==")[0]): line for line in lines if "==" in line}


def download(packages: Iterable[str], folder: Path) -> None:
    """Downloads wheels of `packages` into `folder`, at our pins if any. CalledProcessError if one is missing."""
    pinned = pins()
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    wanted = [pinned.get(_normal(name), name) for name in packages]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--pre"]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(folder), *wanted]
    subprocess.run(command, check=True)


def metadata(folder: Path) -> None:
    """Writes a dist-info of this package, so that entry points work without an installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    place = folder / f"{project['name']}-{project['version']}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    texts = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in groups.items()
    ]
    (place / "entry_points.txt").write_text("\n".join(texts))


def runtime(folder: Path) -> None:
    """Packs CuTeDSL's runtime library under its package's name. The compiler is too large."""
    from importlib.metadata import version

    from backends.gpu.host_program import RUNTIME, runtime_library

    library = Path("nvidia_cutlass_dsl", "cu13", "lib", RUNTIME)
    (folder / library).parent.mkdir(parents=True)
    shutil.copy(runtime_library(RUNTIME), folder / library)
    number = version(RUNTIME_PACKAGE)
    place = folder / f"{RUNTIME_PACKAGE.replace('-', '_')}-{number}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {RUNTIME_PACKAGE}\nVersion: {number}\n")
    (place / "RECORD").write_text(f"{library},,\n")


def probes(folder: Path) -> None:
    """Packs every probe with the VM's outputs. Compiles those of CuTeDSL."""
    from conformance.gpu.probe import all_probes, save

    for probe in all_probes():
        save(probe.with_expected(), folder / f"{probe.name}.probe")


def main() -> None:
    """Creates the folder anew, or writes only the metadata."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*", help="further wheels")
    parser.add_argument("--metadata", action="store_true", help="only this package's metadata, into FOLDER")
    given = parser.parse_args()
    folder: Path = given.folder
    if given.metadata:
        return metadata(folder)
    if folder.exists():
        shutil.rmtree(folder)
    extra = folder / "extra"
    extra.mkdir(parents=True)
    probes(folder)
    runtime(extra)
    with tarfile.open(folder / "extra.tar.xz", "w:xz", preset=3) as archive:
        for path in sorted(extra.iterdir()):
            archive.add(path, path.name)
    shutil.rmtree(extra)
    download((*PACKAGES, *given.packages), folder)
    (folder / "activate.sh").write_text(_ACTIVATE.format(folder=folder))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {len(list(folder.iterdir()))} files, {size / 2**20:.1f} MiB")
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
