"""A trace for ui.perfetto.dev or chrome://tracing (Trace Event Format, JSON): one track per agent of each CTA.

The format knows only times, so one VM step is shown as one microsecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from megamoe.contract.trace import CtaTrace, LaunchTrace, OperationTrace, Release, RunSlice, Trace, WaitSlice
from megamoe.explain.roles import role_name

MAX_SLICES = 16_000
"""Maximum number of slices in one file: about 4 MB."""
TENSOR_CORE, FIRST_COPY_LANE = 1000, 1001
"""Thread ids. A warp's is its index plus one."""
CLOCK = "one microsecond here is one VM step (a basic block or an operation that ended), which is no time of a GPU"
Event = dict[str, object]
Name = Callable[[str], str]
Place = tuple[int, int]


def perfetto(trace: Trace, title: str, barrier_name: Name = str) -> dict[str, object]:
    """The JSON object. `barrier_name` turns the target of a wait into a readable name."""
    writer = _Writer(barrier_name)
    for number, launch in enumerate(trace.launches):
        writer.launch(number, launch)
    left_out = trace.left_out + writer.left_out
    notes = {"case": title, "schedule": trace.schedule, "clock": CLOCK, "events left out": left_out}
    return {"traceEvents": writer.events, "displayTimeUnit": "ns", "otherData": notes}


class _Writer:
    def __init__(self, barrier_name: Name) -> None:
        self.events: list[Event] = []
        self.left_out = 0
        self._slices = 0
        self._flows = 0
        self._barrier_name = barrier_name

    def launch(self, number: int, launch: LaunchTrace) -> None:
        base = 100 * number + 1
        self._places: dict[int, tuple[Place, float]] = {}
        self._spans: dict[Place, list[tuple[float, float]]] = {}
        for index, cta in enumerate(launch.ctas):
            self._cta(base + index, f"launch {number}, {launch.entry}, CTA {cta.ctaid}", cta)
        for spans in self._spans.values():
            spans.sort()
        for index, cta in enumerate(launch.ctas):
            for warp in cta.warps:
                for wait in warp.waits:
                    self._release(base, (base + index, warp.index + 1), wait)

    def _cta(self, pid: int, name: str, cta: CtaTrace) -> None:
        self._name("process_name", (pid, 0), name)
        for warp in cta.warps:
            place = (pid, warp.index + 1)
            self._name("thread_name", place, f"warp {warp.index}: {role_name(warp.opcodes)}")
            for run in warp.runs:
                self._slice(place, run.begins, run.ends, _run_name(run), "run", {"blocks": run.blocks, **run.opcodes})
            for wait in warp.waits:
                arguments = {"PTX line": wait.line, "opcode": wait.opcode, "waits for": wait.reason}
                self._slice(
                    place, wait.begins, wait.ends, f"wait: {self._barrier_name(wait.target)}", "wait", arguments
                )
        self._tensor_core((pid, TENSOR_CORE), [one for one in cta.operations if one.agent == "tensor core"])
        self._copies(pid, [one for one in cta.operations if one.agent == "copy"])

    def _tensor_core(self, place: Place, operations: Sequence[OperationTrace]) -> None:
        """The tensor core works in order, so each operation is drawn from the step at which it became the oldest."""
        if operations:
            self._name("thread_name", place, "tensor core")
        free = 0
        for one in operations:
            if one.ended is not None:
                self._operation(place, one, max(one.issued, free), one.ended)
                free = one.ended

    def _copies(self, pid: int, operations: Sequence[OperationTrace]) -> None:
        """Copies overlap, so each is drawn in the first lane that is free at its issue."""
        lanes: list[int] = []
        for one in sorted(operations, key=lambda item: item.issued):
            if one.ended is None:
                continue
            lane = next((lane for lane, free in enumerate(lanes) if free <= one.issued), len(lanes))
            place = (pid, FIRST_COPY_LANE + lane)
            if lane == len(lanes):
                lanes.append(0)
                self._name("thread_name", place, f"TMA copies {lane}")
            lanes[lane] = one.ended
            self._operation(place, one, one.issued, one.ended)

    def _operation(self, place: Place, one: OperationTrace, begins: int, ends: int) -> None:
        arguments = {"PTX line": one.line, "PTX": one.text, "issued by warp": one.warp, "issued at step": one.issued}
        if self._slice(place, begins, ends, f"{one.what.removeprefix('a ').removeprefix('an ')}, line {one.line}",
                       one.agent, arguments):  # fmt: skip
            self._places[one.number] = (place, ends - 0.5)

    def _release(self, base: int, waiter: Place, wait: WaitSlice) -> None:
        """Draws an arrow to the end of a wait from what ended it."""
        source = self._source(base, wait.release) if wait.release is not None else None
        finish = wait.ends - 0.25
        if source is None or wait.ends <= wait.begins or source[0] == waiter or source[1] > finish:
            return
        if not (self._drawn(*source) and self._drawn(waiter, finish)):
            return
        self._flows += 1
        common: Event = {"name": "releases", "cat": "release", "id": self._flows}
        (pid, tid), at = source
        self.events.append({**common, "ph": "s", "pid": pid, "tid": tid, "ts": at})
        self.events.append({**common, "ph": "f", "bp": "e", "pid": waiter[0], "tid": waiter[1], "ts": finish})

    def _drawn(self, place: Place, at: float) -> bool:
        """Whether a drawn slice covers this moment of the track."""
        spans = self._spans.get(place, [])
        index = bisect_right(spans, (at, float("inf"))) - 1
        return index >= 0 and spans[index][1] >= at

    def _source(self, base: int, release: Release) -> tuple[Place, float] | None:
        if release.operation is not None:
            return self._places.get(release.operation)
        return (base + release.cta, release.warp + 1), release.step + 0.5

    def _name(self, what: str, place: Place, name: str) -> None:
        pid, tid = place
        self.events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})
        if what == "thread_name":
            self.events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            )

    def _slice(
        self, place: Place, begins: float, ends: float, name: str, category: str, arguments: Mapping[str, object]
    ) -> bool:
        self._slices += 1
        if self._slices > MAX_SLICES:
            self.left_out += 1
            return False
        self._spans.setdefault(place, []).append((begins, ends))
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": place[0],
                "tid": place[1],
                "ts": begins,
                "dur": ends - begins,
                "args": dict(arguments),
            }
        )
        return True


_QUIET = ("mbarrier", "tcgen05.fence", "tcgen05.wait", "bar.", "barrier", "cp.async.bulk.commit", "cp.async.bulk.wait",
          "setmaxnreg", "ld.generic")  # fmt: skip


def _run_name(run: RunSlice) -> str:
    loud = sorted((item for item in run.opcodes.items() if not item[0].startswith(_QUIET)), key=lambda item: -item[1])
    return ", ".join(f"{times} {opcode}" for opcode, times in loud[:2]) or "run"
