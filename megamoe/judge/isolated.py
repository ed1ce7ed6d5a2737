"""Runs one program on the tensors of one case, in processes that the judge does not trust.

A *builder* imports the backend and hands the program over as data. A *machine* imports the executor, and nothing of the
backend, and runs that data, so that what ran is what was hashed. A Python call cannot travel and runs in its builder.
The judge draws the inputs after the build. The tensors lie in a block of memory that the judge owns and shares, on the
host or on the executor's device. The judge copies the outputs out of the block before it looks at them.

Both processes are kept for later rows; megamoe.judge.audit detects results that they remember. An executor is an
instrument: the judge believes its counters. A user's own executor (package.module:ATTRIBUTE) may import the references,
because emulators need them; a registered one may not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch

from megamoe import CHECKOUT
from megamoe.contract import DeviceLostError, HostProgram, Program, RunOptions, Target, UnsupportedError
from megamoe.contract.cache import keys_kept_from
from megamoe.judge.arena import Arena, block_bytes, give_device_memory_back, is_cuda, layouts_of, lent_block
from megamoe.judge.guarded import Built, Ran
from megamoe.runner import requests
from megamoe.runner.child import Confinement
from megamoe.runner.process import Runner, RunnerDiedError, RunnerFaultError, nursery
from megamoe.runner.wire import Frame, WireError, decoded, encoded, told_case

if TYPE_CHECKING:
    from megamoe.contract import Case, Row
    from megamoe.spec.spec import Spec

Tensors = Mapping[str, "torch.Tensor"]
NO_LIMIT_S: Final = 24 * 3600.0
MAX_PROCESSES: Final = 256
"""Limit for one runner and its children at any time. A compiler takes a handful."""
MAX_WRITTEN: Final = 16 << 30
"""Limit in bytes for all files that a runner writes in its lifetime. MAX_FILE_BYTES limits each file as well."""
PACKAGE: Final = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class Processes:
    """The runners of one judge, kept from row to row.

    `hidden`: folders that no runner may see. `memory`: bytes that each may have beyond what it starts with.
    """

    hidden: tuple[str, ...]
    memory: int
    kept: dict[tuple[str, ...], Runner] = field(default_factory=dict[tuple[str, ...], Runner])
    told: dict[tuple[int, str, str], Mapping[str, object]] = field(
        default_factory=dict[tuple[int, str, str], Mapping[str, object]]
    )

    def build(self, row: Row, case: Case, deadline: float) -> Built:
        """The program of `row`. Raises UnsupportedError if the backend or this machine lacks the target."""
        target = cast(Target, row.target)
        builder = self._builder(row)
        about = {"backend": row.backend, "ops": [case.op]}
        offered = builder.ask(requests.BACKEND, about, _left(deadline)).told["targets"][case.op]
        if target not in offered:
            known = ", ".join(str(name) for name in offered) or "no target"
            raise UnsupportedError(f"backend {row.backend} has {case.op} for {known}, not {target}")
        reason = cast("Mapping[str, object]", self.machine(row, deadline)["unavailable"])[target]
        if reason:
            raise UnsupportedError(f"executor {row.executor} cannot run {target} here: {reason}")
        asked = {"backend": row.backend, "case": told_case(case), "target": target}
        answer = builder.ask(requests.BUILD, asked, _left(deadline))
        if "number" in answer.told:
            told = answer.told
            return Built(None, int(told["number"]), dict(told["software"]), frozenset(told["prepares"]))
        try:
            return Built(decoded(answer))
        except WireError as error:
            raise RunnerFaultError(f"the backend built what is no program: {error}") from None

    def machine(self, row: Row, deadline: float) -> Mapping[str, object]:
        """What the executor of `row` reports about itself."""
        machine = self._machine(row)
        key = (machine.number, row.executor, row.target)
        if key not in self.told:
            about = {"executor": row.executor, "targets": [row.target]}
            self.told[key] = machine.ask(requests.EXECUTOR, about, _left(deadline)).told
        return self.told[key]

    def device(self, row: Row, deadline: float) -> str:
        """The device on which the executor of `row` runs programs."""
        return str(self.machine(row, deadline)["device"])

    def run(
        self, row: Row, built: Built, tensors: tuple[Spec, Case, Tensors], deadline: float, fresh: bool = False
    ) -> Ran:
        """Runs a program once on poisoned outputs. `tensors`: the spec, the case, its inputs.

        `fresh`: in a machine that has not run the program before. A program that is only data leaves nothing behind for
        another program, so one such machine serves them all. Native code gets a machine of its own, which ends with it.
        """
        spec, case, inputs = tensors
        layouts = layouts_of(spec, case)
        if built.call is not None:
            runner, sent = self._builder(row), Frame({"number": built.call})
        else:
            assert isinstance(built.program, Program | HostProgram)
            sent = encoded(built.program)
            if fresh and isinstance(built.program, HostProgram):
                runner = self._new_machine(row)
            else:
                runner = self._other_machine(row) if fresh else self._machine(row)
        try:
            home = str(next(iter(inputs.values())).device)
            with lent_block(block_bytes(layouts), home) as lent:
                arena = Arena(spec, case, inputs, home, shared=lent.block)
                options = RunOptions(schedule=row.schedule, outputs=arena.outputs)
                asked = {**sent.told, "executor": row.executor, "options": asdict(options)}
                asked |= {"tensors": arena.told, "handle": lent.handle}
                if is_cuda(home):
                    # The runner reads the block from another process, and needs device memory that this process holds
                    # unused.
                    torch.cuda.synchronize()
                    give_device_memory_back()
                try:
                    answer = runner.ask(requests.RUN, asked, _left(deadline), sent.parts, lent.descriptor)
                except (DeviceLostError, RunnerFaultError, RunnerDiedError):
                    # The runner's device, or its memory, may be broken.
                    runner.end()
                    lent.give_up()
                    raise
                arena.taken()
        finally:
            if fresh and isinstance(built.program, HostProgram):
                runner.end()
        if answer.told.get("spent"):
            runner.end()
        return Ran(arena, _counters(answer.told.get("counters")), _text(answer.told.get("violation")))

    def runner_of(self, row: Row, built: Built) -> Runner:
        """The process that runs `built`: the machine, or the builder for a Python call."""
        return self._machine(row) if built.call is None else self._builder(row)

    def end_builder(self, row: Row) -> None:
        """Ends the builder of `row`, so that a new one makes the next build."""
        self._builder(row).end()

    def end(self) -> None:
        """Ends all runners."""
        for runner in self.kept.values():
            runner.end()
        self.kept.clear()

    def _builder(self, row: Row) -> Runner:
        return self._kept(("builder", row.backend, row.executor), row, f"backend {row.backend}")

    def _machine(self, row: Row) -> Runner:
        return self._kept(("machine", row.executor), row, f"executor {row.executor}")

    def _other_machine(self, row: Row) -> Runner:
        return self._kept(("machine", row.executor, "again"), row, f"executor {row.executor}")

    def _new_machine(self, row: Row) -> Runner:
        return nursery(torch=True).runner(f"executor {row.executor}", self._confinement("machine", row))

    def _kept(self, key: tuple[str, ...], row: Row, what: str) -> Runner:
        if key not in self.kept or self.kept[key].ended:
            self.kept[key] = nursery(torch=True).runner(what, self._confinement(key[0], row))
        return self.kept[key]

    def _confinement(self, kind: str, row: Row) -> Confinement:
        # CUDA reserves terabytes of address space, so only resident memory can be limited.
        on_vm = row.executor == "vm"
        emulates = kind == "machine" and ":" in row.executor
        # Nothing can be created beside a hidden key, and a peer on a device may keep its own cache in the same home.
        on_device = row.executor == "gpu"
        keys = () if on_device else keys_kept_from(row.backend if kind == "builder" else row.executor)
        hidden = self.hidden + keys + (() if emulates else references())
        memory = {"memory" if on_vm else "resident": self.memory}
        return Confinement(hidden, emulates, **memory, processes=MAX_PROCESSES, written=MAX_WRITTEN)


@cache
def references() -> tuple[str, ...]:
    """The files that compute the right outputs."""
    folder = PACKAGE / "ops"
    return tuple(str(path) for path in sorted(folder.iterdir()) if path.name != "__init__.py")


def hidden_folders(*folders: Path | None) -> tuple[str, ...]:
    """What no runner may see of a run: its records, its evidence, and all results of the checkout."""
    places = [CHECKOUT / "results", Path("results"), *(folder for folder in folders if folder is not None)]
    return tuple(dict.fromkeys(str(place.absolute()) for place in places if place.exists()))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RunnerDiedError("the time of the row was up", late=True)
    return left


def _counters(told: object) -> dict[str, int]:
    if not isinstance(told, dict) or len(cast("dict[object, object]", told)) > 10_000:
        raise RunnerFaultError("the executor gave counters that are no mapping of names to counts")
    found: dict[str, int] = {}
    for name, count in cast("dict[str, object]", told).items():
        if not isinstance(count, int) or count < 0:
            raise RunnerFaultError(f"the executor gave the counter {name[:80]!r} as {str(count)[:40]}")
        found[name] = count
    return found


def _text(told: object) -> str | None:
    return None if told is None else str(told)[:4000]
