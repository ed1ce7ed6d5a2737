"""The machine: global memory, and launches of bound functions that run to their end or to the first broken rule."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from backends.vm.faults import Fault, Findings, LaunchError, OtherAccess, collecting, counted, report
from backends.vm.machine.code import Block, BoundFunction, give_registers_back
from backends.vm.machine.cta import Cluster
from backends.vm.machine.engine import Engine
from backends.vm.machine.scheduler import Schedule, schedule
from backends.vm.machine.special import Dim3, LaunchShape
from backends.vm.machine.spinning import RoundWatch, SpinWatch, grouped, spins, who_does
from backends.vm.machine.warp import Warp
from backends.vm.memory.global_memory import PARAM_WINDOW, WINDOW_SHIFT, Bytes, DeviceHeap, GlobalMemory
from backends.vm.memory.global_races import GlobalRaces
from backends.vm.memory.shared import MAX_DYNAMIC
from backends.vm.numerics.accumulate import Policy, policy_called
from backends.vm.ptx.ast import Variable

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_CLUSTER = 16
"""Launch limits of compute capability 9.0 and 10.0 (CUDA programming guide). More than 8 CTAs are not portable."""
MAX_LOCAL = 512 << 10
"""Bytes of local memory per thread (CUDA programming guide, compute capabilities 9.0 and 10.0)."""
MAX_CONST = 64 << 10
"""Bytes of constant memory of a module (the same table)."""
MAX_PARAMS = 32764
"""Bytes of the parameters of a kernel (PTX ISA 5.1.6.1, of sm_70 and later)."""
MAX_GLOBAL = 4 << 30
"""Bytes of a module's .global variables: a limit of this machine, which keeps them in host memory."""
MAX_CTAS = 1 << 20
"""CTAs of a grid: a limit of this machine, which would take hours for more than a million."""
STORES = ("st", "stmatrix", "cp", "discard")
"""First parts of the opcodes that write the contents of a register or of shared memory to global memory."""
MOST_ADMITTED = 64
"""Clusters that join at a time those that all spin."""
LONG_RUN = 2000
"""Turns after which one more cluster joins those in flight: they may wait for it in global memory."""


class Observer(Protocol):
    """Watches a machine. It never changes who moves next; backends.vm.trace has one that records."""

    def engine(self, defers: bool) -> Engine:
        """The engine of the observed machine; `defers` as in Engine."""
        ...

    def function(self, function: BoundFunction) -> BoundFunction:
        """The function to run instead of `function`: it does the same and reports to this observer."""
        ...

    def launch(self, run: Run) -> AbstractContextManager[None]:
        """Context in which a grid runs, to its end or to the first broken rule."""
        ...

    def cluster_begins(self, cluster: Cluster) -> None:
        """A cluster has become resident."""
        ...

    def run(self, warp: Warp, quantum: int) -> int:
        """Run `warp` as Warp.run does."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A launch: see Machine.launch."""

    function: BoundFunction
    shape: LaunchShape
    params: Sequence[bytes]
    dependent: bool = False
    cooperative: bool = False


PEAKS = ("smem_bytes", "tmem_columns")
"""Counters that keep the maximum over all launches; the others add up."""


class Machine:
    """A GPU without a clock: memory, a schedule, an accumulation policy, and counters over all launches.

    `unstarted`: the first CTA of each cluster of the running launch that has not begun. `heap`: for malloc and free.
    `grid_workspace`: the address of the barrier of a cooperative launch, 0 in others. `printed` gets what kernels
    print, piece by piece; by default it is dropped. `findings` collects the faults that a launch can survive; without
    it, the first fault ends the launch. `looks_after_each`: each launch ends with `check_outcome`; otherwise the owner
    calls it once.
    """

    def __init__(
        self,
        schedule_name: str = "eager",
        accumulate: str = "fast",
        step_budget: int = 200_000_000,
        observer: Observer | None = None,
    ) -> None:
        self.memory = GlobalMemory()
        self.heap = DeviceHeap(self.memory)
        self.grid_workspace = 0
        self.schedule: Schedule = schedule(schedule_name)
        self.accumulate: Policy = policy_called(accumulate)
        self.step_budget = step_budget
        self.steps_left = step_budget
        self.observer = observer
        self.engine = Engine(self.schedule.defers) if observer is None else observer.engine(self.schedule.defers)
        self.counters: Counter[str] = Counter()
        self.blocks_run: dict[int, Block] = {}
        self.params: Bytes = np.zeros(0, np.uint8)
        self.unstarted: list[Dim3] = []
        self.races = GlobalRaces()
        self.printed: Callable[[str], object] = _dropped
        self.findings: Findings | None = None
        self.looks_after_each = True
        self.running: Run | None = None
        self._function: BoundFunction | None = None
        self._launched: dict[str, BoundFunction] = {}
        self._placed: dict[int, tuple[Variable, int]] = {}

    @property
    def ring(self) -> bool:
        """Whether floats are elements of a ring (backends.vm.numerics.ring)."""
        return self.accumulate == "ring"

    def launch(
        self,
        function: BoundFunction,
        grid: Dim3,
        block: Dim3,
        params: Sequence[bytes],
        cluster: Dim3 = (1, 1, 1),
        dynamic_smem: int = 0,
        *,
        dependent: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Run a grid to its end. `params` holds the bytes of each parameter; sizes in threads, CTAs and bytes.

        `dependent`: it may overlap the launch before it (programmatic dependent launch). `cooperative`: all its CTAs
        are resident at once, and may wait for each other.

        Raises LaunchError for a launch that no GPU would take, Fault for a broken rule that ends the launch: the first
        one unless `findings` collects.
        """
        shape = launch_shape(function, grid, block, cluster, dynamic_smem)
        self.perform(LaunchRequest(function, shape, params, dependent, cooperative))

    def perform(self, asked: LaunchRequest) -> None:
        """As `launch`, for a LaunchRequest."""
        function, shape = asked.function, asked.shape
        _check_launch(function, shape)
        self.counters["smem_bytes"] = max(self.counters["smem_bytes"], function.static_shared + shape.dynamic_smem)
        self.params = _param_block(function, asked.params)
        self.races.begin_launch(function.name, dependent=asked.dependent)
        self._function = function if self.observer is None else self.observer.function(function)
        self.running = run = Run(self, self._function, shape)
        try:
            with (
                self._grid_barrier(run) if asked.cooperative else nullcontext(),
                np.errstate(all="ignore"),
                nullcontext() if self.observer is None else self.observer.launch(run),
                collecting(run.met if self.findings is None else run.found),
            ):
                run.to_the_end()
                self._check_constant_loads(function)
                self.note_last(function)
                if self.looks_after_each:
                    self.check_outcome()
        finally:
            run.leave()
            # As in Cluster.part: an ended launch must not keep the machine alive.
            self.running = None

    def _check_constant_loads(self, function: BoundFunction) -> None:
        """Report loads with .nc of bytes that the launch that has just ended wrote, before or after."""
        loads = function.code.constant_loads
        for base, address, line, writer in self.races.written_constants():
            buffer = self.memory.holding(base)
            name, offset = (buffer.name, address - base) if buffer is not None else ("global memory", address)
            report(Fault("constant-load-of-written", f"byte {offset} of `{name}`, which the same launch writes at PTX "
                         f"line {writer}, is loaded with .nc", kernel=function.name, line=line, text=loads[line],
                         other=OtherAccess("the launch", "writes", writer)))  # fmt: skip

    def note_last(self, function: BoundFunction) -> None:
        """Move `function` to the end of the launched functions, even if it was launched before."""
        self._launched.pop(function.name, None)
        self._launched[function.name] = function

    @contextmanager
    def _grid_barrier(self, run: Run) -> Iterator[None]:
        """Context in which every CTA of `run` is resident and there is memory for a barrier of the grid.

        Its address is in %envreg1 (high) and %envreg2 (low), where cooperative_groups looks for it. The second word is
        the barrier.
        """
        run.together = True
        workspace = self.memory.add("the barrier of the grid", np.zeros(8, np.uint8))
        workspace.scratch = True
        self.grid_workspace = workspace.base
        try:
            yield
        finally:
            self.grid_workspace = 0
            self.memory.remove(workspace)

    def check_outcome(self) -> None:
        """Report a Fault if the launches have left an undefined value where the host can see it."""
        for fault in self.memory.outcome():
            for function in reversed(self._launched.values()):
                line = [one for one in function.code.function.instructions if one.line == fault.line]
                text = next((one.text for one in line if one.parts[0] in STORES), "")
                if text:
                    fault.kernel, fault.text = function.name, text
                    break
            report(fault)

    def whereabouts(self) -> str:
        """Where the warps of the running launch are, what they wait for and what values they read; "" outside a
        launch."""
        if self.running is None:
            return ""
        moving = [warp for warp in self.running.warps if not warp.done and warp.waiting() is None]
        told = [*grouped(moving, {}), *_parked(self.running.warps)]
        return f"kernel {self.running.function.name}: {'; '.join(told)}" if told else ""

    def opcodes_run(self) -> frozenset[tuple[str, ...]]:
        """Opcodes, split at the dots, of every basic block that ran in a launch that has ended."""
        return frozenset(one.parts for block in self.blocks_run.values() for one in block.instructions)

    def lines_run(self) -> frozenset[int]:
        """PTX lines of every basic block that ran in a launch that has ended."""
        return frozenset(one.line for block in self.blocks_run.values() for one in block.instructions)

    def constants(self) -> list[tuple[int, int]]:
        """Address and size in bytes of each .const variable that has been placed."""
        return [(at, max(one.size, 1)) for one, at in self._placed.values() if one.space == "const"]

    def variable_address(self, name: str) -> int:
        """Global address of variable `name` of the running module. The first use places the variable."""
        if self._function is None:
            raise LaunchError(f"the variable {name!r} has no address before a launch")
        variable = self._function.variables[name]
        if id(variable) not in self._placed:
            data = np.zeros(max(variable.size, 1), np.uint8)
            if variable.initial is not None:
                data[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
            buffer = self.memory.add(name, data, writable=variable.space != "const")
            buffer.scratch = True
            self._placed[id(variable)] = (variable, buffer.base)
            self._fill_addresses(variable, data)
        return self._placed[id(variable)][1]

    def _fill_addresses(self, variable: Variable, data: Bytes) -> None:
        for item in variable.addresses:
            address = self.variable_address(item.symbol) + item.addend
            width = variable.size - item.offset if variable.size - item.offset < 8 else 8
            data[item.offset : item.offset + width] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)[:width]

    def read_generic(self, address: int, size: int) -> Bytes:
        """Bytes at a generic address in parameter or global space (tensor maps)."""
        if address >> WINDOW_SHIFT == PARAM_WINDOW >> WINDOW_SHIFT:
            offset = address - PARAM_WINDOW
            if offset + size > self.params.size:
                past = f"the {counted(self.params.size, 'byte')} of parameters"
                raise Fault("out-of-bounds", f"read of {counted(size, 'byte')} past {past}", address=address)
            return self.params[offset : offset + size]
        return self.memory.load(np.array([address], np.int64), size)[0]


def _dropped(text: str) -> None:
    return None


def launch_shape(
    function: BoundFunction, grid: Dim3, block: Dim3, cluster: Dim3, dynamic_smem: int, *, explicit: bool = False
) -> LaunchShape:
    """The shape of a launch of a kernel that may declare the size of its cluster (PTX ISA 11.7.1, 11.8.1).

    `cluster`: of one CTA if the launch gives none; then what the kernel declares counts. `explicit`: it gives one even
    if it is of one CTA. The grid of a kernel with .blocksareclusters is given in clusters. LaunchError for another size
    than the declared one.
    """
    directives, name = function.code.function.directives, function.name
    explicit = explicit or cluster != (1, 1, 1) or "explicitcluster" in directives or "reqnctapercluster" in directives
    if (declared := directives.get("reqnctapercluster")) is not None:
        x, y, z = [*declared, 1, 1][:3]
        if cluster not in ((1, 1, 1), (x, y, z)):
            raise LaunchError(f"{name}: cluster {cluster} where the kernel declares .reqnctapercluster {declared}")
        cluster = (x, y, z)
    if "blocksareclusters" in directives:
        grid = (grid[0] * cluster[0], grid[1] * cluster[1], grid[2] * cluster[2])
    shape = LaunchShape(grid, block, cluster, dynamic_smem, explicit)
    most = directives.get("maxclusterrank")
    if most and shape.cluster_ctas > most[0]:
        raise LaunchError(f"{name}: a cluster of {shape.cluster_ctas} CTAs where the kernel declares .maxclusterrank "
                          f"{most[0]}")  # fmt: skip
    return shape


def _check_launch(function: BoundFunction, shape: LaunchShape) -> None:
    name, grid, block, cluster = function.name, shape.grid, shape.block, shape.cluster
    if min(*grid, *block, *cluster) < 1 or shape.threads > MAX_THREADS:
        raise LaunchError(
            f"{name}: grid {grid}, cluster {cluster}, block {block}: every size is at least 1 and a block has at most "
            f"{MAX_THREADS} threads"
        )
    for what, sizes, most in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
        for axis, size, limit in zip("xyz", sizes, most, strict=True):
            if size > limit:
                raise LaunchError(f"{name}: {what} {sizes}: {size} in {axis}, where at most {limit} are possible")
    if shape.cluster_ctas > MAX_CLUSTER:
        raise LaunchError(f"{name}: a cluster of {cluster} CTAs; at most {MAX_CLUSTER} are possible")
    if any(size % part for size, part in zip(grid, cluster, strict=True)):
        raise LaunchError(f"{name}: grid {grid} is not a multiple of the cluster {cluster}")
    if int(np.prod(grid, dtype=object)) > MAX_CTAS:
        raise LaunchError(f"{name}: grid {grid} has more than the {MAX_CTAS} CTAs that this machine runs")
    if shape.dynamic_smem < 0:
        raise LaunchError(f"{name}: {shape.dynamic_smem} bytes of dynamic shared memory; there are 0 or more")
    if shape.dynamic_smem + function.static_shared > MAX_DYNAMIC:
        raise LaunchError(
            f"{name}: {counted(shape.dynamic_smem, 'byte')} of dynamic shared memory and {function.static_shared} "
            f"static ones exceed {MAX_DYNAMIC}"
        )
    if function.local_size > MAX_LOCAL:
        raise LaunchError(f"{name}: {function.local_size} bytes of local memory a thread exceed {MAX_LOCAL}")
    if function.param_size > MAX_PARAMS:
        raise LaunchError(f"{name}: parameters of {function.param_size} bytes; at most {MAX_PARAMS} are possible")
    for space, most in (("const", MAX_CONST), ("global", MAX_GLOBAL)):
        total = sum(variable.size for variable in function.variables.values() if variable.space == space)
        if total > most:
            raise LaunchError(f"{name}: the .{space} variables of its module have {total} bytes; at most {most} do")
    required = function.code.function.directives.get("reqntid")
    if required and tuple([*required, 1, 1][:3]) != tuple(block):
        raise LaunchError(f"{name}: block {block} where the kernel declares .reqntid {required}")
    most = function.code.function.directives.get("maxntid")
    if most and shape.threads > int(np.prod(most)):
        raise LaunchError(f"{name}: {counted(shape.threads, 'thread')} where the kernel declares .maxntid {most}")


def _param_block(function: BoundFunction, params: Sequence[bytes]) -> Bytes:
    declared = function.code.function.params
    if len(declared) != len(params):
        raise LaunchError(f"{function.name} takes {counted(len(declared), 'parameter')} and is given {len(params)}")
    block = np.zeros(function.param_size, np.uint8)
    for variable, value in zip(declared, params, strict=True):
        if len(value) != variable.size:
            raise LaunchError(
                f"{function.name}: parameter `{variable.name}` has {counted(variable.size, 'byte')} and is given "
                f"{len(value)}"
            )
        offset = function.offsets[variable.name][1]
        block[offset : offset + variable.size] = np.frombuffer(value, np.uint8)
    return block


_numbers = count(1)


class Run:
    """One launch in progress: clusters not yet begun, those resident, and the warps that can move.

    `number` is unique in the process. `together`: all clusters are resident from the beginning (a cooperative launch).
    """

    def __init__(self, machine: Machine, function: BoundFunction, shape: LaunchShape) -> None:
        self.machine = machine
        self.number = next(_numbers)
        self.engine = machine.engine
        self.function = function
        self.shape = shape
        grid, cluster = shape.grid, shape.cluster
        firsts = [
            (x, y, z)
            for z in range(0, grid[2], cluster[2])
            for y in range(0, grid[1], cluster[1])
            for x in range(0, grid[0], cluster[0])
        ]
        self.queue = machine.unstarted = [firsts[i] for i in machine.schedule.order(len(firsts))]
        self.resident: list[Cluster] = []
        self.warps: list[Warp] = []
        self.running: Warp | None = None
        self.some_ended = False
        self.together = False

    def to_the_end(self) -> None:
        """Run until every CTA has ended. Fault for a deadlock, a leak or a broken rule."""
        stuck_at: object = None
        watch, rounds = SpinWatch(), RoundWatch()
        turns = 0
        resident = len(self.queue) if self.together else self.machine.schedule.resident
        while self._admit(resident):
            if self.machine.schedule.turn(self):
                turns += 1
                if turns % LONG_RUN == 0:
                    self.admit_one_more()
                if (spinning := watch.stuck(self) or rounds.stuck(self)) is not None:
                    parked = _parked(self.warps)
                    raise Fault("deadlock", "nothing changes any more: " + "; ".join([spinning, *parked]),
                                kernel=self.function.name, where="all warps wait or spin")  # fmt: skip
                continue
            if self._retire() or any(warp.yield_strand() for warp in self.warps):
                continue
            if self._admit(len(self.resident) + 1, only_new=True):
                continue
            state = (self.engine.events, [(warp.index, warp.block) for warp in self.warps])
            if state == stuck_at or not self.expire():
                raise Fault("deadlock", _deadlock(self.warps), kernel=self.function.name, where="all warps wait")
            stuck_at = state

    def leave(self) -> None:
        """Flush the counters of the remaining warps, whether the run completed or not, and drop what is left of it."""
        for warp in self.warps:
            warp.count_served()
        self.engine.abandon()
        if self.machine.observer is None:
            for cluster in self.resident:
                cluster.part()
            self.resident, self.warps, self.running = [], [], None

    def line(self) -> int:
        """PTX line of the running instruction, 0 if there is none."""
        return 0 if self.running is None else self.running.instruction.line

    def acting(self) -> int:
        """The agent of the running warp, -1 if there is none."""
        return -1 if self.running is None else self.running.agent

    def met(self, fault: Fault) -> None:
        """Handle a survivable fault of a judged row: raise it, or count it if the row does not fail on it.

        A fault with no `counter` is counted where it is found.
        """
        if fault.fails_rows:
            raise fault
        if fault.counter:
            self.machine.counters[fault.counter] += 1

    def found(self, fault: Fault) -> None:
        """Collect a fault that the launch survives. As in the missing order, the operation it collides with ends
        first."""
        engine = self.engine
        if engine.performing is not None:
            engine.performing.locate(fault)
        elif self.running is not None:
            self.running.locate(fault)
        if fault.other is not None and fault.other.line:
            engine.settle(fault.kernel, fault.other.line)
        if self.machine.findings is not None:
            self.machine.findings.add(fault, ends=False)

    def _admit(self, limit: int, *, only_new: bool = False) -> bool:
        self._retire()
        before = len(self.resident)
        while self.queue and len(self.resident) < limit:
            begun = Cluster(self, self.queue.pop(0))
            self.resident.append(begun)
            if self.machine.observer is not None:
                self.machine.observer.cluster_begins(begun)
            self.warps.extend(begun.warps)
        return len(self.resident) > before if only_new else bool(self.resident)

    def admit_one_more(self) -> None:
        """Launch one more cluster than the schedule keeps in flight."""
        self._admit(len(self.resident) + 1)

    def admit_more(self) -> bool:
        """Launch as many clusters as are in flight, or as many as are left, up to MOST_ADMITTED. False if none is
        left."""
        return self._admit(len(self.resident) + min(len(self.resident), MOST_ADMITTED), only_new=True)

    def _retire(self) -> bool:
        if not self.some_ended:
            return False
        self.some_ended = False
        over = [cluster for cluster in self.resident if cluster.done]
        for cluster in over:
            self.running = None
            for cta in cluster.ctas:
                cta.check_exit()
            self._check_nothing_pending(cluster)
            for cta in cluster.ctas:
                self._count(cta.warps)
                for warp in cta.warps:
                    warp.count_served()
                tmem, counters = cta.used_tmem, self.machine.counters
                counters["tmem_columns"] = max(counters["tmem_columns"], tmem.peak_columns if tmem is not None else 0)
                if cta.smem.unfenced_overwrites:
                    counters["smem_unfenced_overwrites"] += cta.smem.unfenced_overwrites
                if tmem is not None and tmem.unwaited_overwrites:
                    counters["tmem_unwaited_overwrites"] += tmem.unwaited_overwrites
            self.resident.remove(cluster)
            for cta in cluster.ctas:
                cta.smem.give_readings_back()
                for warp in cta.warps:
                    give_registers_back(warp.registers)
            self.warps = [warp for warp in self.warps if warp.cta.cluster is not cluster]
            if self.machine.observer is None:
                cluster.part()
        return bool(over)

    def _check_nothing_pending(self, cluster: Cluster) -> None:
        if not self.engine.pending:
            return
        names = {warp.name for warp in cluster.warps}
        for operation in list(self.engine.pending):
            if operation.issuer in names and not operation.done:
                report(Fault("exit-with-pending-operation", f"{operation.what} was issued, but its CTA ends without "
                             "having waited for it", kernel=operation.kernel, line=operation.line, text=operation.text,
                             where=operation.issuer))  # fmt: skip
                self.engine.settle(operation.kernel, operation.line)

    def _count(self, warps: list[Warp]) -> None:
        counters, code = self.machine.counters, warps[0].code
        executed = b"".join([warp.executed for warp in warps])
        times = np.frombuffer(executed, np.int64).reshape(len(warps), -1).sum(axis=0)
        names, classes = code.classes
        for name, number in zip(names, (times @ classes).tolist(), strict=True):
            if number:
                counters[f"instructions_{name}"] += number
        ran = [code.blocks[index] for index in np.flatnonzero(times).tolist()]
        self.machine.blocks_run.update(zip(map(id, ran), ran, strict=True))

    def advance(self, warp: Warp, quantum: int) -> int:
        """Let a warp run up to `quantum` blocks. Returns how many it ran."""
        if warp.done:
            return 0
        observer, self.running = self.machine.observer, warp
        ran = warp.run(quantum) if observer is None else observer.run(warp, quantum)
        self.machine.steps_left -= ran
        if warp.done:
            self.some_ended = True
        if self.machine.steps_left < 0:
            raise Fault("runaway", f"the launch has executed {self.machine.step_budget} basic blocks, its budget; "
                        f"{warp.name} is at PTX line {warp.line} and {spins(warp)}", kernel=self.function.name,
                        where="step budget")  # fmt: skip
        return ran

    def awaited(self) -> list[object]:
        """The objects (mbarriers and the like) that parked warps wait for."""
        waits = [warp.strands[0].wait for warp in self.warps if warp.strands]
        return [wait.target for wait in waits if wait is not None and wait.target is not None]

    def _impatient(self, warps: Sequence[Warp]) -> list[Warp]:
        """Those at an unfinished wait that may time out (mbarrier.try_wait, PTX ISA 9.7.13.15.16)."""
        return [warp for warp in warps if (wait := warp.waiting()) is not None and wait.expire is not None]

    def expire_one(self, choice: random.Random) -> bool:
        """Expire one wait that may time out. False if there is none."""
        waiting = self._impatient(self.warps)
        if not waiting:
            return False
        choice.choice(waiting).expire()
        self.machine.steps_left -= 1
        return True

    def expire(self, warps: Sequence[Warp] | None = None, *, idle: bool = True) -> bool:
        """Expire all waits of `warps` (None: of all) that may time out. False if there is none.

        `idle`: also those that would be asked again at once, with the same answer (Code.idle_waits).
        """
        waiting = self._impatient(self.warps if warps is None else warps)
        if not idle:
            waiting = [warp for warp in waiting if not warp.idle]
        for warp in waiting:
            warp.expire()
        return bool(waiting)


def _deadlock(warps: Sequence[Warp]) -> str:
    """The report of a deadlock: who waits for what."""
    clauses = _parked(warps)
    return "nobody can move: " + "; ".join(clauses) if clauses else "no warp can move"


def _parked(warps: Sequence[Warp]) -> list[str]:
    """One clause per parked warp, with equal clauses merged."""
    clauses: dict[str, list[str]] = {}
    for warp in warps:
        for strand in warp.strands:
            if strand.wait is not None:
                line = warp.code.blocks[strand.block].instructions[-1].line
                clauses.setdefault(f"at PTX line {line} for {strand.wait.reason()}", []).append(warp.name)
    return [f"{who_does(names, 'wait')} {clause}" for clause, names in clauses.items()]
