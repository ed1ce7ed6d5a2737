"""The tables of an explanation for the terminal, and the regions of shared memory that one of them shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megamoe.contract.counted import counted
from megamoe.contract.trace import CtaTrace, LaunchTrace, Party, SmemUse, WarpTrace
from megamoe.explain.explain import Explanation
from megamoe.explain.roles import ranges, roles

MBARRIER_BYTES = 8
_BY = {"generic": "", "copy": "TMA, issued by ", "tensor core": "tensor core, issued by "}


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [`first`, `behind`) of the CTA's shared window, with their writers and readers in words."""

    first: int
    behind: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]


def regions(cta: CtaTrace) -> list[Region]:
    """The touched regions, in ascending order. mbarriers are regions of their own."""
    edges = {edge for use in cta.smem for one in use.ranges for edge in one}
    for barrier in cta.mbarriers:
        edges |= {barrier.offset, barrier.offset + MBARRIER_BYTES}
    ordered = sorted(edges)
    barriers = {barrier.offset for barrier in cta.mbarriers}
    found: list[Region] = []
    for first, behind in pairwise(ordered):
        if first in barriers:
            _add(found, Region(first, behind, ("mbarriers",), ()))
            continue
        covering = [use for use in cta.smem if any(low <= first and behind <= high for low, high in use.ranges)]
        if covering:
            _add(found, Region(first, behind, _who(covering, "write"), _who(covering, "read")))
    return found


def _add(found: list[Region], region: Region) -> None:
    last = found[-1] if found else None
    if last and last.behind == region.first and (last.writers, last.readers) == (region.writers, region.readers):
        found[-1] = Region(last.first, region.behind, region.writers, region.readers)
    else:
        found.append(region)


def _who(uses: Sequence[SmemUse], verb: str) -> tuple[str, ...]:
    groups: dict[str, set[int]] = {}
    for use in uses:
        if use.verb == verb:
            groups.setdefault(use.by, set()).update(use.warps)
    return tuple(
        f"{_BY.get(by, by)}warp{'s' * (len(warps) > 1)} {ranges(sorted(warps))}" for by, warps in groups.items()
    )


MAX_LINES = 5


def report(found: Explanation) -> Group:
    """All of `found` that a terminal can show."""
    parts: list[RenderableType] = [_heading(found), _assembly(found)]
    for number, launch in enumerate(found.trace.launches):
        parts += [Text(), _geometry(found, number, launch)]
        for cta in launch.ctas[:1]:
            of = f"CTA {cta.ctaid}" + (f", one of {launch.total_ctas}" if launch.total_ctas > 1 else "")
            parts += [
                Text(), _roles(cta, of), Text(), _smem(cta, of), Text(),
                *_stages(cta, found.barrier_names(launch), of), Text(), _waits(cta, found.barrier_names(launch), of),
            ]  # fmt: skip
        if launch.bank_conflicts:
            parts += [Text(), _conflicts(launch)]
    parts += [Text(), _counters(found.counters)]
    return Group(*parts)


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, title=title, title_justify="left", title_style="bold", header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _heading(found: Explanation) -> Text:
    row, trace = found.row, found.trace
    text = Text()
    text.append(row.case, style="bold")
    text.append(f"  {row.backend} on {row.target}, executor {row.executor}, schedule {trace.schedule}\n")
    text.append(f"{trace.steps:,} VM steps (basic blocks and operations, in order; never a time of a GPU)")
    if trace.left_out:
        text.append(f"; {counted(trace.left_out, 'event')} beyond the first {trace.event_limit:,} not recorded")
    if found.violation:
        text.append(f"\nthe run broke a rule, and what follows ends there: {found.violation}", style="bold red")
    return text


def _assembly(found: Explanation) -> Text:
    text = Text()
    for one in found.assembled:
        said = one.sentence or "; ".join(f"{name} {number:,}" for name, number in one.numbers)
        text.append(f"{one.assembler}: {said}\n")
    text.rstrip()
    return text


def _geometry(found: Explanation, number: int, launch: LaunchTrace) -> Table:
    table = _table(f"launch {number}: {launch.entry}", "", "")
    recorded = len(launch.ctas)
    table.add_row("grid", f"{launch.grid}, {counted(launch.total_ctas, 'CTA')}" + f" ({recorded} recorded)")
    table.add_row("cluster", f"{launch.cluster}")
    table.add_row("block", f"{launch.block}, {counted(-(-prod(launch.block) // 32), 'warp')}")
    table.add_row("shared memory", f"{launch.dynamic_smem:,} bytes dynamic, {launch.static_smem:,} static")
    columns = found.counters.get("tmem_columns")
    if columns:
        table.add_row("tensor memory", f"{columns} of 512 columns at most")
    return table


def _roles(cta: CtaTrace, of: str) -> Table:
    table = _table(f"warp roles, inferred from what they executed ({of})", "role", "warps", "registers", "executed",
                   right=["registers"])  # fmt: skip
    for role in roles(cta.warps):
        told = ", ".join(f"{times:,} {opcode}" for opcode, times in role.evidence[:MAX_LINES]) or "nothing notable"
        table.add_row(role.name, ranges(role.warps), str(role.registers or ""), told)
    return table


def _smem(cta: CtaTrace, of: str) -> Table:
    table = _table(f"shared memory, offsets from the start of the dynamic part ({of})", "bytes", "size", "written by",
                   "read by", right=["size"])  # fmt: skip
    for one in regions(cta):
        low, high = one.first - cta.smem_origin, one.behind - cta.smem_origin
        table.add_row(f"{low:,} - {high - 1:,}", f"{high - low:,}", "; ".join(one.writers) or "nobody",
                      "; ".join(one.readers) or ("" if one.writers == ("mbarriers",) else "nobody"))  # fmt: skip
    return table


def _stages(cta: CtaTrace, names: Mapping[int, str], of: str) -> Iterator[RenderableType]:
    table = _table(f"pipeline stages: mbarriers ({of})", "mbarrier", "arrivals a phase", "phases", "who arrives",
                   "who waits", right=["arrivals a phase", "phases"])  # fmt: skip
    idle: list[str] = []
    for one in cta.mbarriers:
        name = names.get(one.offset, f"{one.offset:#x}")
        if one.phases or one.arrivals:
            table.add_row(
                escape(name), str(one.expected), str(len(one.phases)), _parties(one.arrivals), _parties(one.waits)
            )
        else:
            idle.append(name)
    yield table
    if idle:
        yield Text(f"never reached: {', '.join(idle)}", style="dim")


def _parties(parties: Sequence[Party]) -> str:
    groups: dict[tuple[str, int, str], tuple[set[int], int]] = {}
    for one in parties:
        warps, times = groups.get((one.agent, one.line, one.opcode), (set[int](), 0))
        groups[one.agent, one.line, one.opcode] = ({*warps, one.warp}, times + one.times)
    told: list[str] = []
    for (agent, line, opcode), (warps, times) in groups.items():
        who = f"warp{'s' * (len(warps) > 1)} {ranges(sorted(warps))}" if agent == "warp" else opcode.partition(" ")[2]
        told.append(f"{who} (line {line}, {times}x)")
    return "; ".join(told)


def _waits(cta: CtaTrace, names: Mapping[int, str], of: str) -> Table:
    table = _table(f"waits of each warp ({of})", "warp", "blocks run", "waits", "steps waited", "longest for",
                   right=["blocks run", "waits", "steps waited"])  # fmt: skip
    for warp in cta.warps:
        waited = _waited(warp)
        top = sorted(waited.items(), key=lambda item: -item[1])[:3]
        told = ", ".join(f"{_named(target, names)} {steps}" for target, steps in top)
        blocks = sum(run.blocks for run in warp.runs)
        table.add_row(str(warp.index), f"{blocks:,}", str(len(warp.waits)), f"{sum(waited.values()):,}", escape(told))
    return table


def _waited(warp: WarpTrace) -> dict[str, int]:
    waited: dict[str, int] = {}
    for wait in warp.waits:
        waited[wait.target] = waited.get(wait.target, 0) + wait.ends - wait.begins
    return waited


def _named(target: str, names: Mapping[int, str]) -> str:
    kind, _, at = target.partition(" ")
    return names.get(int(at, 16), target) if kind == "mbarrier" and at.startswith("0x") else target


def _conflicts(launch: LaunchTrace) -> Table:
    table = _table("bank conflicts by PTX line (recorded CTAs)", "line", "conflicts", "instruction",
                   right=["line", "conflicts"])  # fmt: skip
    for one in launch.bank_conflicts[:MAX_LINES]:
        table.add_row(str(one.line), f"{one.conflicts:,}", escape(one.text[:100]))
    return table


def _counters(counters: Mapping[str, int]) -> Table:
    table = _table("counters, exact and repeatable", "", "", "", right=[])
    table.columns[1].justify = "right"

    def row(name: str, value: int, note: str = "") -> None:
        table.add_row(name, f"{value:,}", note)

    def ratio(value: int, against: int, what: str) -> str:
        return f"{value / against:.2f} times {what}" if against else ""

    useful, least = counters["useful_flops"], counters["minimum_bytes"]
    flops = counters.get("mma_flops", 0)
    moved = counters.get("tma_load_bytes", 0) + counters.get("tma_store_bytes", 0)
    row("MMA FLOPs issued", flops, ratio(flops, useful, f"the {useful:,} useful ones"))
    row(
        "bytes moved by TMA",
        moved,
        ratio(moved, least, f"inputs and outputs, {least:,}, which other accesses may move too"),
    )
    conflicts, passes = counters.get("smem_bank_conflicts", 0), counters.get("smem_wavefronts", 0)
    row("bank conflicts", conflicts, f"of {passes:,} passes over the banks")
    shown = {"useful_flops", "minimum_bytes", "mma_flops", "tma_load_bytes", "tma_store_bytes", "smem_bank_conflicts",
             "smem_wavefronts", "tmem_columns"}  # fmt: skip
    classes = {name: value for name, value in counters.items() if name.startswith("instructions_")}
    for name, value in counters.items():
        if name not in shown and name not in classes:
            row(name.replace("_", " "), value)
    ordered = sorted(classes.items(), key=lambda item: -item[1])
    told = ", ".join(f"{value:,} {name.removeprefix('instructions_')}" for name, value in ordered)
    row("warp instructions", sum(classes.values()), told)
    return table
