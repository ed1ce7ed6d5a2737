"""Compares backends: how far apart their outputs for one case are, and which backend stands alone.

Workers write the outputs of their rows to a folder of the run. When all rows are done, the outputs of one case, target,
executor and schedule are compared. Nothing is judged here: the rows keep their own verdicts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from megamoe.contract import Row
from megamoe.records.lines import Agreement, Record

if TYPE_CHECKING:
    import torch

Outputs = Mapping[str, npt.NDArray[np.generic]]
_BF16: Final = "bf16 "
"""Prefix for an output whose array holds bf16 bits, because numpy has no bf16."""


def _file(folder: Path, row: Row) -> Path:
    return folder / f"{hashlib.sha256(repr(tuple(row)).encode()).hexdigest()}.npz"


def leave_outputs(folder: Path, row: Row, outputs: Mapping[str, torch.Tensor]) -> None:
    """Saves the outputs of `row`, bit for bit."""
    arrays = dict(_stored(name, tensor.cpu()) for name, tensor in outputs.items())
    np.savez(_file(folder, row), **arrays)  # pyright: ignore[reportArgumentType]  (no output is called allow_pickle)


def _stored(name: str, tensor: torch.Tensor) -> tuple[str, npt.NDArray[np.generic]]:
    import torch

    if tensor.dtype == torch.bfloat16:
        return f"{_BF16}{name}", tensor.view(torch.uint16).numpy()
    return name, tensor.numpy() if tensor.dtype in (torch.float32, torch.uint8) else tensor.double().numpy()


def _outputs(folder: Path, row: Row) -> Outputs | None:
    path = _file(folder, row)
    if not path.exists():
        return None
    with np.load(path) as arrays:
        return {name.removeprefix(_BF16): _loaded(name, arrays[name]) for name in arrays.files}


def _loaded(name: str, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return (array.astype(np.uint32) << 16).view(np.float32) if name.startswith(_BF16) else array


def agreements(run: str, records: Iterable[Record], folder: Path) -> list[Agreement]:
    """One Agreement for each case, target, executor and schedule with outputs of two or more backends."""
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.case, record.target, record.executor, record.schedule), []).append(record)
    found = [_agreement(run, group, folder) for group in groups.values() if len(group) > 1]
    return [agreement for agreement in found if agreement is not None]


def _agreement(run: str, group: Sequence[Record], folder: Path) -> Agreement | None:
    left = {record.backend: outputs for record in group if (outputs := _outputs(folder, record.row)) is not None}
    if len(left) < 2:
        return None
    metrics: dict[str, float] = {}
    for one, other in itertools.combinations(sorted(left), 2):
        for name in left[one]:
            apart = _apart(left[one][name], left[other][name])
            metrics.update({f"{one}~{other}.{name}.{kind}": value for kind, value in apart.items()})
    first = group[0]
    alone = _alone(group)
    return Agreement(
        run=run,
        case=first.case,
        op=first.op,
        target=first.target,
        executor=first.executor,
        schedule=first.schedule,
        backends=tuple(sorted(left)),
        metrics=metrics,
        alone=alone,
        sentence=_sentence(group, alone, metrics),
    )


def _apart(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> dict[str, float]:
    """`max` and `rms` of the difference where both are finite; `unequal`: share of elements that differ."""
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    both = np.isfinite(a) & np.isfinite(b)
    here = unequal & both
    difference = np.abs(a[here].astype(np.float64) - b[here].astype(np.float64))
    return {
        "max": float(difference.max(initial=0.0)),
        "rms": float(np.sqrt(np.sum(difference**2) / max(1, np.count_nonzero(both)))),
        "unequal": float(unequal.mean()),
    }


def _alone(group: Sequence[Record]) -> str | None:
    """The backend whose verdict differs, if all others agree; else None."""
    passed = [record.backend for record in group if record.status == "passed"]
    failed = [record.backend for record in group if record.status != "passed"]
    if len(failed) == 1 and passed:
        return failed[0]
    if len(passed) == 1 and len(failed) > 1:
        return passed[0]
    return None


def _sentence(group: Sequence[Record], alone: str | None, metrics: Mapping[str, float]) -> str:
    if alone is None:
        return ""
    verdicts = ", ".join(f"{record.backend} {record.status}" for record in group)
    widest = max((name for name in metrics if name.endswith(".max")), key=lambda name: metrics[name])
    return (
        f"{group[0].case} under {group[0].schedule}: {alone} stands alone ({verdicts}); the outputs lie up to "
        f"{metrics[widest]:.3g} apart ({widest.removesuffix('.max')})"
    )
