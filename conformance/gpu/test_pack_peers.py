"""Parts of the peers' archive travel one by one and join on the other side."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from conformance.gpu.pack import pins
from conformance.gpu.pack_peers import PACKAGES, compress, spread


def _packed(tmp_path: Path) -> Path:
    site = tmp_path / "made"
    (site / "peer").mkdir(parents=True)
    (site / "peer" / "__init__.py").write_text("word = 'here'\n")
    (site / "tool").write_bytes(os.urandom(1 << 16))
    (site / "tool").chmod(0o755)
    archive = tmp_path / "site.tar.xz"
    compress(site, archive)
    spread(archive, [tmp_path / "a", tmp_path / "b"], str(tmp_path / "there"))
    return tmp_path / "there"


def _source(folder: Path, then: str = "true") -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f"source {folder}/activate.sh; {then}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder.parent)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_parts_come_together_in_any_order(tmp_path: Path, order: str) -> None:
    there = _packed(tmp_path)
    first, last = (tmp_path / name for name in order)
    assert "1 of 2 parts are here" in _source(first).stderr, "half of the parts must be told from all of them"
    assert not there.exists(), "nothing may be unpacked from half an archive"
    done = _source(last, "python3 -c 'import peer; print(peer.word)'")
    assert (done.stdout.strip(), done.stderr) == ("here", ""), "with its last part the site is on the path"
    assert (there / "tool").stat().st_mode & 0o111, "what was executable must stay so"
    for path in tmp_path.glob("?/part.*"):
        path.unlink()
    assert _source(first).stderr == "", "a later shell needs no part"


def test_every_peer_is_pinned() -> None:
    names = {name.lower().replace("_", "-") for name in PACKAGES} - {"py-cpuinfo"}
    assert names <= set(pins()), f"constraints.txt must pin {sorted(names - set(pins()))}"
