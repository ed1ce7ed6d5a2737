"""From touches of tensor memory to a map: which columns hold what, written by whom, until when somebody reads it.

What a block is called (S, P, O) is inferred from who reads it and says so; everything else is as recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megamoe.contract.trace import Bounds, CtaTrace, TmemTouch
from megamoe.explain.roles import ranges, role_name

ACCUMULATORS = ("tcgen05.mma",)
READS_AN_MMA = 8
"""Blocks of tensor memory that one mma reads, at most: parts of its accumulator and of operand A."""


@dataclass(slots=True)
class Read:
    """Columns read at a step; `by` as "tcgen05.ld" or "tcgen05.mma", `line` in the PTX.

    `of_accumulator`: the mma reads what it adds to, not its operand A.
    """

    step: int
    by: str
    warp: int
    line: int
    columns: Bounds
    of_accumulator: bool = False


@dataclass(slots=True)
class Holding:
    """Columns (inclusive) that hold one value from step `begins` on; later holdings may overwrite parts of them.

    `landed` is when its last write was complete, `last_read` when it was last read (None: never).
    """

    by: str
    columns: Bounds
    begins: int
    landed: int
    lines: set[int] = field(default_factory=set[int])
    warps: set[int] = field(default_factory=set[int])
    cells: set[tuple[Bounds, Bounds]] = field(default_factory=set[tuple[Bounds, Bounds]])
    writes: list[int] = field(default_factory=list[int])
    reads: list[Read] = field(default_factory=list[Read])
    accumulates: bool = False
    name: str = ""

    @property
    def last_read(self) -> int | None:
        """The step of the last read."""
        return max((read.step for read in self.reads), default=None)

    @property
    def writer(self) -> str:
        """Who wrote, in words; the same words for every round of a loop."""
        return f"{self.by} of {'warp' if len(self.warps) == 1 else 'warps'} {ranges(sorted(self.warps))}"


@dataclass(frozen=True, slots=True)
class TmemMap:
    """The holdings of one CTA in order of their beginning. It had columns during the steps `begins` to `ends`."""

    begins: int
    ends: int
    columns: int
    holdings: tuple[Holding, ...]


def tmem_map(cta: CtaTrace, last_step: int) -> TmemMap | None:
    """The map of a CTA, or None if it never had tensor memory."""
    if not cta.tmem_spans:
        return None
    ends = {operation.number: operation.ended for operation in cta.operations}
    holdings: list[Holding] = []
    for touch in cta.tmem:
        landed = (ends.get(touch.operation) if touch.operation is not None else None) or touch.step
        if touch.verb == "read":
            _note_read(holdings, touch, landed)
        else:
            _note_write(holdings, touch, landed)
    _name(cta, holdings)
    return TmemMap(
        begins=min(span.begins for span in cta.tmem_spans),
        ends=max(span.ends or last_step for span in cta.tmem_spans),
        columns=max(span.first + span.columns for span in cta.tmem_spans),
        holdings=tuple(holdings),
    )


def overlap(a: Bounds, b: Bounds) -> bool:
    """Whether two inclusive ranges have a number in common."""
    return a[0] <= b[1] and b[0] <= a[1]


def _touches(a: Bounds, b: Bounds) -> bool:
    return a[0] <= b[1] + 1 and b[0] <= a[1] + 1


def _current(holdings: Sequence[Holding], touch: TmemTouch) -> list[tuple[Holding, Bounds]]:
    """The holdings that the cells of a touch show, latest first, each with the columns that are its own."""
    left, found = set(range(touch.columns[0], touch.columns[1] + 1)), list[tuple[Holding, Bounds]]()
    for holding in reversed(holdings):
        covered = {
            column
            for lanes, columns in holding.cells
            if overlap(lanes, touch.lanes) and overlap(columns, touch.columns)
            for column in range(columns[0], columns[1] + 1)
        } & left
        if covered:
            found.append((holding, (min(covered), max(covered))))
            left -= covered
        if not left:
            break
    return found


def _note_read(holdings: list[Holding], touch: TmemTouch, landed: int) -> None:
    for holding, columns in _current(holdings, touch):
        holding.reads.append(Read(landed, touch.by, touch.warp, touch.line, columns))


def _note_write(holdings: list[Holding], touch: TmemTouch, landed: int) -> None:
    into: Holding | None = None
    accumulating = False
    if touch.by.startswith(ACCUMULATORS):
        current = _current(holdings, touch)
        for holding, _ in current:
            for read in holding.reads[-READS_AN_MMA:]:
                if (read.line, read.warp, read.step) == (touch.line, touch.warp, landed):
                    accumulating = read.of_accumulator = True
        if accumulating and current[0][0].by == touch.by and current[0][0].columns == touch.columns:
            into = current[0][0]
    else:
        into = next((one for one in reversed(holdings[-8:]) if _continues(one, touch)), None)
    if into is None:
        into = Holding(touch.by, touch.columns, touch.step, landed, accumulates=accumulating)
        holdings.append(into)
    into.columns = (min(into.columns[0], touch.columns[0]), max(into.columns[1], touch.columns[1]))
    into.landed = max(into.landed, landed)
    into.lines.add(touch.line)
    into.warps.add(touch.warp)
    into.cells.add((touch.lanes, touch.columns))
    into.writes.append(landed)


def _continues(holding: Holding, touch: TmemTouch) -> bool:
    """Whether a store belongs to a holding: it fills other cells beside those already there."""
    if holding.by != touch.by or not _touches(holding.columns, touch.columns):
        return False
    return not any(overlap(lanes, touch.lanes) and overlap(columns, touch.columns) for lanes, columns in holding.cells)


def _name(cta: CtaTrace, holdings: Sequence[Holding]) -> None:
    """S: an accumulator that softmax warps read. P: what was stored and is then operand A of an mma. O: an accumulator
    that others read. Without softmax warps accumulators are D."""
    softmax = {warp.index for warp in cta.warps if "softmax" in role_name(warp.opcodes)}
    for holding in holdings:
        readers = {read.warp for read in holding.reads if read.by == "tcgen05.ld"}
        if holding.by.startswith("tcgen05.cp"):
            holding.name = "scale factors"
        elif holding.by == "tcgen05.mma":
            holding.name = (
                ("S" if readers & softmax or not (readers or holding.accumulates) else "O") if softmax else "D"
            )
    accumulators = [one.columns for one in holdings if one.name in ("O", "D")]
    for holding in holdings:
        if holding.by == "tcgen05.st":
            again = any(overlap(holding.columns, columns) for columns in accumulators)
            operand = any(read.by == "tcgen05.mma" and not read.of_accumulator for read in holding.reads)
            holding.name = "rescaled O" if again else "P" if operand else "stored values"
