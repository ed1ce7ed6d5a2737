"""Packs the peers' kernels for a device machine without a network: python -m conformance.gpu.pack_peers FOLDER ...

Packs the CuTeDSL compiler and the packages of backends/peers, for Python 3.12 on x86-64, installed and compressed into
one archive, a third smaller than the wheels. The archive is cut into one part a folder, and each part travels alone. On
the device machine, in the repository's root, after the folder of conformance.gpu.pack: source FOLDER/activate.sh for
each folder. The last one unpacks.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance.gpu.pack import PLATFORMS, download

# A machine with torch has the rest: torch with CUDA, triton, numpy, jinja2, filelock and typing_extensions.
PACKAGES = (
    "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi", "torch_c_dlpack_ext", "einops", "flash-attn-4", "quack-kernels",
    "fa3-fwd", "nvidia-cudnn-frontend", "humming-kernels", "pytest-benchmark", "py-cpuinfo",
)  # fmt: skip
PRESET = 5
SITE = "/tmp/megamoe-peers"
_ACTIVATE = """# Source this from the repository's root, after each part has come; once per shell later on.
site={site} parts={site}-parts
if [ ! -f $site/ready ] && [ -f {folder}/{part} ]; then
  mkdir -p $parts && cp {folder}/{part} $parts/
  if [ "$(ls $parts | wc -l)" = {parts} ]; then
    cat $parts/part.* | python3 -c "import sys, tarfile; \\
safe = {{'filter': 'data'}} if hasattr(tarfile, 'data_filter') else {{}}; \\
tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall('$site', **safe)" &&
      touch $site/ready || echo "unpacking the peers failed" >&2
  fi
fi
[ -f $site/ready ] || echo "peers: $(ls $parts | wc -l) of {parts} parts are here" >&2
export PYTHONPATH=$PWD:$site:$site/nvidia_cutlass_dsl/dsl_packages${{PYTHONPATH:+:$PYTHONPATH}}
"""


def install(wheels: Path, site: Path) -> None:
    """Unpacks the wheels as pip does, for the other Python. CalledProcessError if one does not fit that Python."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    command += ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    command += [part for name in PLATFORMS for part in ("--platform", name)]
    subprocess.run([*command, "--target", str(site), *map(str, sorted(wheels.glob("*.whl")))], check=True)


def compress(site: Path, archive: Path) -> None:
    """Archives the files in `site`; equal files give equal bytes."""
    with tarfile.open(archive, "w:xz", preset=PRESET) as tar:
        for path in sorted(site.iterdir()):
            tar.add(path, path.name, filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if "__pycache__" in Path(entry.name).parts:
        return None
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def spread(archive: Path, folders: list[Path], site: str = SITE) -> None:
    """Cuts the archive into equal parts, one for each new folder, with the script that joins them in `site`."""
    content = archive.read_bytes()
    size = -(-len(content) // len(folders))
    for number, folder in enumerate(folders):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        part = f"part.{number:02}"
        (folder / part).write_bytes(content[number * size : (number + 1) * size])
        (folder / "activate.sh").write_text(_ACTIVATE.format(folder=folder, part=part, parts=len(folders), site=site))
        print(f"{folder}: {(folder / part).stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    """Creates the folders anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as work:
        wheels, site, archive = (Path(work, name) for name in ("wheels", "site", "site.tar.xz"))
        download(PACKAGES, wheels)
        install(wheels, site)
        compress(site, archive)
        spread(archive, given.folders)


if __name__ == "__main__":
    main()
