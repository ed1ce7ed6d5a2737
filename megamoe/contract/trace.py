"""What an executor records of a run: Execution.trace, filled by backends.vm.trace and read by megamoe.explain.

Time is a count of steps: one for every basic block that a warp executes and one for every operation (copy, mma, commit)
that ends, in the order in which the schedule lets them happen. Steps order events; they are never GPU time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megamoe.contract.program import Dim3

Bounds = tuple[int, int]


@dataclass(slots=True)
class RunSlice:
    """A warp between two waits, from step `begins` to `ends`: the number of blocks it ran and its notable opcodes."""

    begins: int
    ends: int
    blocks: int = 0
    opcodes: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class Release:
    """What ended a wait at `step`: the operation with number `operation`, or, if that is None, an action of `warp` of
    `cta`.

    `cta` is an index into the recorded CTAs of the launch.
    """

    step: int
    cta: int
    warp: int
    operation: int | None = None


@dataclass(slots=True)
class WaitSlice:
    """A warp parked at PTX line `line`. `target` names what it waits for; `reason` describes its state at that time."""

    begins: int
    ends: int
    line: int
    opcode: str
    target: str
    reason: str
    release: Release | None = None


@dataclass(slots=True)
class WarpTrace:
    """One warp. `classes` counts instructions by counter name, `opcodes` the notable opcodes that at least one lane
    executed."""

    index: int
    classes: dict[str, int] = field(default_factory=dict[str, int])
    opcodes: dict[str, int] = field(default_factory=dict[str, int])
    runs: list[RunSlice] = field(default_factory=list[RunSlice])
    waits: list[WaitSlice] = field(default_factory=list[WaitSlice])


@dataclass(slots=True)
class OperationTrace:
    """An asynchronous operation from issue to end (None: it never ended). `agent`: "tensor core" or "copy"."""

    number: int
    what: str
    agent: str
    warp: int
    line: int
    text: str
    issued: int
    ended: int | None = None


@dataclass(slots=True)
class TmemTouch:
    """Cells of tensor memory that an instruction writes or reads; bounds of lanes and columns are inclusive.

    `operation`: the operation at whose end the write lands.
    """

    step: int
    verb: str
    by: str
    warp: int
    line: int
    lanes: Bounds
    columns: Bounds
    operation: int | None = None


@dataclass(slots=True)
class TmemSpan:
    """Columns `first` .. `first + columns - 1`, allocated at step `begins` and freed at `ends` (None: never)."""

    first: int
    columns: int
    line: int
    begins: int
    ends: int | None = None


@dataclass(slots=True)
class SmemUse:
    """Bytes of shared memory that one PTX line touched, as half-open ranges [first, end).

    `by`: "generic" (ld, st), "copy" (bulk copies), or "tensor core".
    """

    verb: str
    by: str
    line: int
    warps: list[int]
    ranges: list[Bounds]


@dataclass(slots=True)
class Party:
    """Who arrives at or waits on an mbarrier: `agent` "warp", "copy" or "tensor core", from PTX line `line`."""

    agent: str
    warp: int
    line: int
    opcode: str
    times: int = 0


@dataclass(slots=True)
class MBarrierTrace:
    """One mbarrier: arrivals per phase, the steps at which phases ended, who arrives, who waits."""

    offset: int
    expected: int
    line: int
    phases: list[int] = field(default_factory=list[int])
    arrivals: list[Party] = field(default_factory=list[Party])
    waits: list[Party] = field(default_factory=list[Party])


@dataclass(slots=True)
class CtaTrace:
    """One CTA of a launch. `smem_origin` is the offset at which its dynamic shared memory begins."""

    ctaid: Dim3
    rank: int
    smem_origin: int
    warps: list[WarpTrace]
    operations: list[OperationTrace] = field(default_factory=list[OperationTrace])
    tmem: list[TmemTouch] = field(default_factory=list[TmemTouch])
    tmem_spans: list[TmemSpan] = field(default_factory=list[TmemSpan])
    smem: list[SmemUse] = field(default_factory=list[SmemUse])
    mbarriers: list[MBarrierTrace] = field(default_factory=list[MBarrierTrace])


@dataclass(slots=True)
class BankConflicts:
    """Bank passes beyond the minimum, caused by one PTX line in all recorded CTAs."""

    line: int
    text: str
    conflicts: int = 0


@dataclass(slots=True)
class LaunchTrace:
    """One launch; sizes in bytes. `ctas` holds the recorded CTAs out of `total_ctas`, in the order in which they
    began."""

    entry: str
    grid: Dim3
    cluster: Dim3
    block: Dim3
    dynamic_smem: int
    static_smem: int
    total_ctas: int
    begins: int
    ends: int | None = None
    ctas: list[CtaTrace] = field(default_factory=list[CtaTrace])
    bank_conflicts: list[BankConflicts] = field(default_factory=list[BankConflicts])


@dataclass(slots=True)
class Trace:
    """A whole run. `left_out` counts events beyond `event_limit`, which are not recorded; counters and totals include
    them."""

    schedule: str
    steps: int = 0
    event_limit: int = 0
    left_out: int = 0
    launches: list[LaunchTrace] = field(default_factory=list[LaunchTrace])
