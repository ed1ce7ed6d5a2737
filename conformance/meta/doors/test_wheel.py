"""A built wheel works outside of a checkout: it contains the specs, the machine and the doors."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conformance import ROOT

SHIPPED = ("megamoe", "backends", "specs", "pyproject.toml", "README.md")
LAUNCH = """
import numpy as np, megamoe.vm
y = np.zeros(1, np.uint32)
ptx = '''.version 8.7
.target sm_100a
.address_size 64
.visible .entry seven(.param .u64 y)
{
  .reg .u64 %rd1;
  ld.param.u64 %rd1, [y];
  st.global.u32 [%rd1], 7;
  ret;
}
'''
megamoe.vm.Device("sm_100a").launch(ptx, "seven", 1, 1, y)
print(megamoe.__file__, y[0])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built offline from a copy of the shipped files."""
    place = tmp_path_factory.mktemp("wheel")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, place / "source" / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(source, place / "source" / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", str(place), str(place / "source")], check=True, capture_output=True, text=True)
    (wheel,) = place.glob("*.whl")
    shutil.rmtree(place / "source")
    zipfile.ZipFile(wheel).extractall(place / "site")
    return place / "site"


def _run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["env", f"PYTHONPATH={installed}", sys.executable, *arguments]
    return subprocess.run(command, cwd=installed.parent, capture_output=True, text=True, check=False)


def test_it_lists_its_cases(installed: Path) -> None:
    done = _run(installed, "-m", "megamoe", "list", "--profile", "smoke")
    assert done.returncode == 0, done.stderr
    assert "fmha:" in done.stdout
    assert "nvfp4_moe:" in done.stdout


def test_it_runs_a_kernel(installed: Path) -> None:
    done = _run(installed, "-c", LAUNCH)
    assert done.stdout.split() == [str(installed / "megamoe" / "__init__.py"), "7"], done.stderr
