"""What an executor recorded, checked on the way in: the JSON-like data of Execution.trace as frozen models.

Any executor may write it; the VM's is backends.vm.trace, whose field names these are. Steps are a count of what the
machine did, in its order; they are never a time of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

Dim3 = tuple[int, int, int]
Bounds = tuple[int, int]


class TraceError(ValueError):
    """An executor's trace that does not have the agreed form; the text names the field."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSlice(_Part):
    """A warp between two waits, with what it executed of the notable opcodes."""

    begins: int
    ends: int
    blocks: int
    opcodes: dict[str, int]


class Release(_Part):
    """What ended a wait: the end of an operation, or something that a warp of recorded CTA `cta` did."""

    step: int
    cta: int
    warp: int
    operation: int | None


class WaitSlice(_Part):
    """A parked warp. `target` names what it waits for."""

    begins: int
    ends: int
    line: int
    opcode: str
    target: str
    reason: str
    release: Release | None


class WarpTrace(_Part):
    """One warp of a CTA."""

    index: int
    classes: dict[str, int]
    opcodes: dict[str, int]
    runs: tuple[RunSlice, ...]
    waits: tuple[WaitSlice, ...]


class OperationTrace(_Part):
    """An asynchronous operation; `agent` is "copy" or "tensor core"."""

    number: int
    what: str
    agent: str
    warp: int
    line: int
    text: str
    issued: int
    ended: int | None


class TmemTouch(_Part):
    """Lanes and columns (inclusive bounds) that an instruction wrote or read; `operation`: when the write lands."""

    step: int
    verb: str
    by: str
    warp: int
    line: int
    lanes: Bounds
    columns: Bounds
    operation: int | None


class TmemSpan(_Part):
    """Allocated columns."""

    first: int
    columns: int
    line: int
    begins: int
    ends: int | None


class SmemUse(_Part):
    """Byte ranges [first, behind the last) that one PTX line wrote or read."""

    verb: str
    by: str
    line: int
    warps: tuple[int, ...]
    ranges: tuple[Bounds, ...]


class Party(_Part):
    """Who arrives at or waits on an mbarrier, how many times."""

    agent: str
    warp: int
    line: int
    opcode: str
    times: int


class MBarrierTrace(_Part):
    """One mbarrier; `phases` are the steps at which its phases ended."""

    offset: int
    expected: int
    line: int
    phases: tuple[int, ...]
    arrivals: tuple[Party, ...]
    waits: tuple[Party, ...]


class CtaTrace(_Part):
    """One recorded CTA."""

    ctaid: Dim3
    rank: int
    smem_origin: int
    warps: tuple[WarpTrace, ...]
    operations: tuple[OperationTrace, ...]
    tmem: tuple[TmemTouch, ...]
    tmem_spans: tuple[TmemSpan, ...]
    smem: tuple[SmemUse, ...]
    mbarriers: tuple[MBarrierTrace, ...]


class BankConflicts(_Part):
    """Bank conflicts of one PTX line over the recorded CTAs."""

    line: int
    text: str
    conflicts: int


class LaunchTrace(_Part):
    """One launch; sizes in bytes."""

    entry: str
    grid: Dim3
    cluster: Dim3
    block: Dim3
    dynamic_smem: int
    static_smem: int
    total_ctas: int
    begins: int
    ends: int | None
    ctas: tuple[CtaTrace, ...]
    bank_conflicts: tuple[BankConflicts, ...]


class Trace(_Part):
    """A whole run. `left_out` events came after the `event_limit`."""

    schedule: str
    steps: int
    event_limit: int
    left_out: int
    launches: tuple[LaunchTrace, ...]


def read_trace(data: Mapping[str, object]) -> Trace:
    """The trace in `data`. Raises TraceError with the first field that is wrong."""
    try:
        return Trace.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise TraceError(f"the executor's trace is wrong at {place or 'its top'}: {first['msg']}") from error
