"""The machine's approximate functions against an H200's: hashes of every output of every unary function.

`python -m conformance.silicon.mufu RECORD` computes all of 19 x 2^32 outputs and 12 x 2^28 quotients, in some 15
minutes of one core (`--jobs`), and writes what it found; `--step 1024` takes every 1024th block. `--device` asks the
GPU of this host again, too. A block is 2^22 outputs; its hash is the sum of out[j] (2 j + 1) modulo 2^64. The hashes
come from an H200 (driver 580.159.04, CUDA 13.0) that ran each instruction on all its operands on 2026-11-21.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from inspect import getsource
from multiprocessing import get_context
from pathlib import Path

import llvmlite
import numpy as np

from backends.vm.numerics import approx, mufu
from backends.vm.numerics.compiled import compiled
from backends.vm.numerics.mufu import Words
from conformance import ROOT, SILICON
from conformance.silicon import mufu_on_device

RECORD = ROOT / "results" / "records" / "h200-mufu.json"
BLOCK = 1 << 22
HASHES = np.load(SILICON / "numerics" / "mufu_hashes.npz")
# Computing and summing in pieces that fit a core's cache is three times faster than a whole block at once.
PIECE = 1 << 16
_WEIGHTS = 2 * np.arange(BLOCK, dtype=np.uint64) + np.uint64(1)
_COUNT = np.arange(PIECE, dtype=np.uint64)
_UNIT = {"mufu_sin": mufu.sin, "mufu_cos": mufu.cos, "rcp64h": mufu.rcp64h, "rsq64h": mufu.rsq64h, "tanh": mufu.tanh}


def pairs(first: int, kind: int) -> tuple[Words, Words]:
    """Returns PIECE operands of the divisions, from number `first` on.

    `kind` 0: any bits; 1: quotients near 2^-126; 2: quotients near overflow.
    """
    i = _COUNT + np.uint64(first)
    z = (i + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    a, b = (z >> np.uint64(32)).astype(np.uint32), z.astype(np.uint32)
    if kind:
        exponent = ((b >> np.uint32(23)) & np.uint32(255)).astype(np.int64)
        away = (i & np.uint64(7)).astype(np.int64) - (130 if kind == 1 else -124)
        a = (a & np.uint32(0x807F_FFFF)) | (np.clip(exponent + away, 0, 255).astype(np.uint32) << np.uint32(23))
    if kind == 1:
        near = (a & np.uint32(0xFF80_0000)) | ((b + (a & np.uint32(3))) & np.uint32(0x7F_FFFF))
        a = np.where((i & np.uint64(24)) == 0, near, a)
    return a, b


def function_of(name: str) -> Callable[..., Words]:
    """Returns the machine's function for the hashes `name`, on words."""
    if name in _UNIT:
        return compiled(_UNIT[name])
    ftz, base = "_ftz" in name, name.replace("_ftz", "")
    if base.startswith("div"):
        base = base[:-2]
    spelt = partial(getattr(approx, base), ftz=ftz)
    return lambda *words: spelt(*[one.view(np.float32) for one in words]).view(np.uint32)


def operands_of(name: str) -> str:
    """A key that the functions with the same operand words share."""
    return f"div{name[-1]}" if name.startswith("div") else "unary"


def differing(names: Sequence[str], blocks: Iterable[int]) -> list[tuple[str, int]]:
    """Returns name and block of all outputs in `blocks` that differ from an H200's. All names must have the same
    operands. Block k of a unary function holds the operands from k 2^22 on."""
    functions = {name: function_of(name) for name in names}
    return [
        (name, block)
        for block in blocks
        for name, found in _hashes(functions, block).items()
        if found != int(HASHES[name][block])
    ]


def _hashes(functions: Mapping[str, Callable[..., Words]], block: int) -> dict[str, int]:
    (operands,) = {operands_of(name) for name in functions}
    totals = dict.fromkeys(functions, 0)
    for at in range(0, BLOCK, PIECE):
        first = block * BLOCK + at
        if operands == "unary":
            words = ((_COUNT + np.uint64(first)).astype(np.uint32),)
        else:
            words = pairs(first, int(operands[-1]))
        for name, function in functions.items():
            totals[name] += int(np.dot(function(*words).astype(np.uint64), _WEIGHTS[at : at + PIECE]))
    return {name: total % (1 << 64) for name, total in totals.items()}


def model() -> str:
    """SHA-256 of the lines of approx.py and mufu.py that are no comments, and of mufu's tables."""
    digest = hashlib.sha256()
    for module in (approx, mufu):
        lines = [line for line in getsource(module).splitlines() if not line.lstrip().startswith("#")]
        digest.update("\n".join(lines).encode())
    digest.update(Path(mufu.__file__).with_name("mufu_tables.npz").read_bytes())
    return digest.hexdigest()


def _parts(step: int, size: int = 16) -> list[tuple[list[str], range]]:
    """Names and blocks, in parts of similar work; divisions that share operands stay together."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in HASHES.files:
        shared = operands_of(name)
        groups[shared, name if shared == "unary" else ""].append(name)
    return [
        (names, range(at, min(at + size * step, len(HASHES[names[0]])), step))
        for names in groups.values()
        for at in range(0, len(HASHES[names[0]]), size * step)
    ]


def _of_part(part: tuple[list[str], range]) -> list[tuple[str, int]]:
    with np.errstate(all="ignore"):
        return differing(*part)


def checked(jobs: int, step: int) -> dict[str, list[int]]:
    """The blocks of each function, of every `step`-th one, in which the machine differs from the hashes."""
    found: dict[str, list[int]] = {name: [] for name in HASHES.files}
    with ProcessPoolExecutor(jobs, get_context("forkserver")) as pool:
        for some in pool.map(_of_part, _parts(step)):
            for name, block in some:
                found[name].append(block)
    return found


def record(jobs: int, step: int, *, device: bool) -> dict[str, object]:
    """What results/records/h200-mufu.json holds: see results/records/README.md."""
    begun = time.monotonic()
    again = mufu_on_device.asked_again(HASHES) if device else {}
    asked_s = time.monotonic() - begun
    found = checked(jobs, step)
    functions = {
        name: {
            "outputs": len(range(0, len(HASHES[name]), step)) * BLOCK,
            "blocks_that_differ": found[name],
            **({"blocks_that_differ_on_the_device": again[name]} if name in again else {}),
        }
        for name in HASHES.files
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model(),
        "host": {"cpu": platform.processor() or platform.machine(), "jobs": jobs, "python": platform.python_version(),
                 "numpy": np.__version__, "llvmlite": llvmlite.__version__},
        "device": mufu_on_device.device_name() if device else None,
        "seconds": {"device": round(asked_s, 1), "machine": round(time.monotonic() - begun - asked_s, 1)},
        "functions": functions,
    }  # fmt: skip


def main() -> None:
    """Runs the command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--device", action="store_true")
    given = parser.parse_args()
    made = record(given.jobs, given.step, device=given.device)
    given.record.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made))


if __name__ == "__main__":
    main()
