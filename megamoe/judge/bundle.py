"""Writes a failure to disk: tensors, PTX, sentence, error map, and the command that reruns the row."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megamoe.contract import Row, file_name
from megamoe.contract.counted import counted
from megamoe.contract.scratch import unfinished
from megamoe.records.lines import RecordError, shortened

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

HEAT_ROWS, HEAT_COLUMNS = 32, 64
MAX_TRACEBACK = 100_000
MAX_KEPT = 1 << 28
"""Limit in bytes for the tensors, and for an error array, of a bundle. A row may have gigabytes; its rerun makes them
again."""
_SHADES = " .:-=+*#%@"


@dataclass(slots=True)
class BundleContents:
    """What the judge knows about a row that did not pass. None for steps that were not reached."""

    sentence: str = ""
    traceback: str | None = None
    ptx: str | None = None
    inputs: Mapping[str, torch.Tensor] | None = None
    outputs: Mapping[str, torch.Tensor] | None = None
    oracle: Mapping[str, torch.Tensor] | None = None


def bundle_name(row: Row) -> str:
    """A folder name for `row`, in characters that every file system accepts."""
    return file_name("-".join(row))


def unwritten(write: Callable[[], object]) -> str:
    """Why `write` could not write evidence, "" if it could. A full disk costs the evidence, never the verdict."""
    try:
        write()
    except (OSError, RecordError, ValueError, RuntimeError) as error:
        return shortened(str(error))
    return ""


def write_bundle(folder: Path, row: Row, contents: BundleContents, specs: Path | None = None) -> Path:
    """Writes the bundle of `row` under `folder` and returns its folder. Replaces an earlier bundle of the same row.

    tensors.pt holds {"inputs", "outputs", "oracle"} for torch.load. For every output, NAME.error.npy is the absolute
    error against the oracle (float64, NaN where the output is NaN) and NAME.error.txt a heat map of it. An output that
    was never written, as after a refused launch, has neither. Anything above MAX_KEPT bytes is left out, except the
    heat map. `specs`: the spec folder of the run. Raises OSError if the bundle cannot be written; then the row has
    none.
    """
    place = folder / bundle_name(row)
    folder.mkdir(parents=True, exist_ok=True)
    if place.exists() or place.is_symlink():
        shutil.rmtree(place)
    with unfinished(folder, folder=True) as part:
        part.chmod(0o755)
        try:
            _fill(part, row, contents, specs)
        except RuntimeError as error:
            # torch.save raises RuntimeError when the disk is full.
            raise OSError(errno.EIO, shortened(str(error))) from error
        os.replace(part, place)
    return place


def _fill(place: Path, row: Row, contents: BundleContents, specs: Path | None) -> None:
    texts = {
        "sentence.txt": f"{row}\n{contents.sentence}\n",
        "rerun.sh": _rerun(row, specs),
        "program.ptx": contents.ptx,
        "traceback.txt": contents.traceback and shortened(contents.traceback, MAX_TRACEBACK),
    }
    for name, text in texts.items():
        if text is not None:
            (place / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    (place / "rerun.sh").chmod(0o755)
    if contents.inputs is not None:
        _write_tensors(place, contents.inputs, contents.outputs or {}, contents.oracle or {})


def _rerun(row: Row, specs: Path | None) -> str:
    """A script that judges the row again, in this run's folder and with its Python, wherever it is called."""
    here, programs = shlex.quote(str(Path.cwd())), shlex.quote(str(Path(sys.executable).parent))
    return f'#!/bin/sh\ncd {here} && PATH={programs}:"$PATH" && {row.rerun_with(specs)}\n'


def _write_tensors(
    place: Path,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
) -> None:
    import torch

    from megamoe.judge.arena import is_poison

    groups = {
        name: group
        for name, group in {"inputs": inputs, "outputs": outputs, "oracle": oracle}.items()
        if sum(tensor.nbytes for tensor in group.values()) <= MAX_KEPT
    }
    torch.save(
        {name: {key: t.detach().cpu().clone() for key, t in group.items()} for name, group in groups.items()},
        place / "tensors.pt",
    )
    for name in outputs.keys() & oracle.keys():
        if is_poison(outputs[name]).all():
            continue
        wanted = oracle[name].double()
        seen = outputs[name].to(wanted.device).double()
        # The log-sum-exp of an empty row must be -inf, so equal infinities are no error.
        error = (seen - wanted).abs().masked_fill_(seen == wanted, 0.0).cpu().numpy()
        if error.nbytes <= MAX_KEPT:
            np.save(place / f"{name}.error.npy", error)
        (place / f"{name}.error.txt").write_text(heat_map(name, error), encoding="utf-8")


def heat_map(name: str, error: NDArray[np.float64]) -> str:
    """A text picture of `error` [..., columns]. Leading axes fold into rows; a character shows the worst error of its
    block.

    Shades are logarithmic steps from the smallest to the largest error shown. "?" marks a NaN or infinity.
    """
    flat = error.reshape(-1, error.shape[-1]) if error.ndim > 1 else error.reshape(1, -1)
    if flat.size == 0:
        return f"{name}: no element\n"
    blocks = np.array(
        [
            [_worst(block) for block in np.array_split(band, min(HEAT_COLUMNS, flat.shape[1]), axis=1)]
            for band in np.array_split(flat, min(HEAT_ROWS, flat.shape[0]), axis=0)
        ]
    )
    finite = blocks[np.isfinite(blocks) & (blocks > 0)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    lines = ["".join(_shade(float(value), low, high) for value in band) for band in blocks]
    title = (
        f"{name}: |error| from {low:.3g} to {high:.3g}; {counted(flat.shape[0], 'row')} x "
        f"{counted(flat.shape[1], 'column')}; ? not finite"
    )
    return "\n".join([title, *(f"|{line}|" for line in lines), ""])


def _worst(block: NDArray[np.float64]) -> float:
    return float(block.max()) if np.isfinite(block).all() else float("nan")


def _shade(value: float, low: float, high: float) -> str:
    if not np.isfinite(value):
        return "?"
    if value == 0:
        return _SHADES[0]
    if high <= low:
        return _SHADES[-1]
    step = np.log(value / low) / np.log(high / low)
    return _SHADES[1 + round(step * (len(_SHADES) - 2))]
