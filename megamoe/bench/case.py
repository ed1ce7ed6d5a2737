"""One case: programs of several backends on the same buffers, checked, timed in turns, checked again.

This is the judge's side. Runners build and run the programs (megamoe.bench.device). This process owns the buffers,
draws the inputs after everything is built, computes the references and compares.

Outputs are poisoned before every turn; guard bands, inputs and outputs are checked after it. So the judge sees what the
timed launches wrote, and a program that goes wrong in its replays, or does nothing in them, fails in that turn.

Before or after the samples of each turn, at random, a program is launched once more on the timed inputs and once on
inputs that it has never seen, at the same addresses, in either order. A program that reuses earlier results is slower
on new inputs: it fails if that is certain and by more than MAX_NEW_OVER_TIMED. In one random turn per temperature, and
once at the end, it is judged on other inputs, so it must be right on those too.
"""

from __future__ import annotations

import gc
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

import torch

from megamoe.bench.device import BoundCall, Buffers, bare_read_of, facts_of, throttled_since
from megamoe.bench.timing import (
    TEMPERATURES,
    Contender,
    Policy,
    Series,
    floor_of,
    surely_slower,
    take,
    timing_of,
)
from megamoe.bench.worker import Progress
from megamoe.contract import (
    DeviceFacts,
    DeviceLostError,
    Row,
    Status,
    Target,
    UnsupportedError,
)
from megamoe.contract.counted import counted
from megamoe.judge.arena import Arena, is_cuda
from megamoe.judge.comparison import Expected, compared, complaints, expected_of
from megamoe.judge.figures import leave_program, program_sha256
from megamoe.judge.guarded import Built, needed_work
from megamoe.judge.isolated import Processes, hidden_folders
from megamoe.ops import reference
from megamoe.records.lines import Evidence, Record, Timing, record_of
from megamoe.runner.child import explain_error
from megamoe.runner.limits import share_of_memory
from megamoe.runner.process import RunnerDiedError, RunnerFaultError
from megamoe.spec.load import load_specs

if TYPE_CHECKING:
    from megamoe.bench.timing import Floor
    from megamoe.contract import Case, Temperature
    from megamoe.runner.process import Runner
    from megamoe.spec.spec import Spec

# Above this many useful operations only a sample of the outputs is judged.
MAX_ORACLE_FLOPS = 2 * 10**11
# Digests of more input bytes would take longer than the measurement.
MAX_DIGESTED_BYTES = 1 << 30
# How many turns whose outputs differ from the accepted ones are judged in full. The last replay always is.
MAX_JUDGED_TURNS = 3
# Pairs of cold launches after the last sample, in addition to one pair per turn.
LAST_PAIRS = 20
# How many times as long a launch on new inputs may take as one on timed inputs: by the lower bound of surely_slower,
# and by the median, for when the pairs are too few to be sure.
MAX_NEW_OVER_TIMED = 1.1
MAX_MEDIAN_OVER_TIMED = 1.5


@dataclass(frozen=True, slots=True)
class CaseSettings:
    """How to measure a case. `device`: as the run found it, None to ask again. `patience`: as in Progress.

    `programs`: folder for the PTX (megamoe.judge.figures). `hidden`: what runners must not see, besides the results.
    """

    run: str
    device: DeviceFacts | None = None
    policy: Policy = field(default_factory=Policy)
    specs: Path | None = None
    programs: Path | None = None
    hidden: tuple[Path, ...] = ()
    max_oracle_flops: int = MAX_ORACLE_FLOPS
    patience: float = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One row: its verdict, its times at both temperatures, and the versions of third-party software."""

    record: Record
    timings: tuple[Timing, ...]
    software: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """Rows that are done, and rows left for another process. `spoilt`: a row has made this process unusable."""

    done: tuple[Measured, ...]
    left: tuple[Row, ...] = ()
    spoilt: bool = False


@dataclass(slots=True)
class _Candidate:
    """One row in progress. `status` is None until a conclusion; the first conclusion counts."""

    row: Row
    built: Built | None = None
    bound: BoundCall | None = None
    contender: Contender | None = None
    status: Status | None = None
    sentence: str = ""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    series: list[Series] = field(default_factory=list[Series])
    accepted: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    differing_turns: int = 0
    aside: dict[Temperature, _Aside] = field(default_factory=dict["Temperature", "_Aside"])
    last_pairs: list[Pair] = field(default_factory=list["Pair"])

    def conclude(self, status: Status, sentence: str) -> None:
        if self.status is None:
            self.status, self.sentence = status, sentence


Pair = tuple[float, float]
"""Microseconds of a launch on the timed inputs and of one on new inputs."""


@dataclass(slots=True)
class _Aside:
    """The checks between the samples of one temperature.

    `judged_in`: the turn, from 0, in which the candidate is judged on other inputs. `first`: whether the checks come
    before the samples of the current turn.
    """

    judged_in: int
    pairs: list[Pair] = field(default_factory=list["Pair"])
    first: bool = False


class _SpoiltError(Exception):
    """The runners cannot be trusted any more: memory was damaged, or something failed in mid-work."""


@cache
def _processes(hidden: tuple[Path, ...]) -> Processes:
    """The runners of this process, reused from case to case."""
    return Processes(hidden_folders(*hidden), share_of_memory(1))


def measure_case(rows: Sequence[Row], settings: CaseSettings, progress: Path) -> CaseOutcome:
    """Checks and times `rows`, all of one case, target and executor, in runners of this process.

    Faults of a backend, the executor or a kernel become a status, never an exception. `progress`: the file for stages.
    """
    # The host draws and compares tensors of gigabytes; none of that is timed.
    torch.set_num_threads(os.cpu_count() or 1)
    candidates = [_Candidate(row) for row in rows]
    stages = Progress(progress, settings.patience)
    bench: _CaseBench | None = None
    spoilt = False
    try:
        bench = _CaseBench(candidates, settings, stages)
        bench.measure()
    except _SpoiltError:
        spoilt = True
    except UnsupportedError as error:
        _conclude_all(candidates, "unsupported", str(error))
    except (RunnerDiedError, RunnerFaultError) as error:
        _conclude_all(candidates, "error", f"the machine cannot be used: {error}")
        spoilt = True
    except (Exception, SystemExit) as error:
        _conclude_all(candidates, "error", explain_error(error))
    if bench is not None and (not bench.closed() or spoilt):
        spoilt = True
        bench.end_runners()
    stages.close()
    return CaseOutcome(
        tuple(_measured(one, bench, settings) for one in candidates if one.status is not None),
        tuple(one.row for one in candidates if one.status is None),
        # A device fault from these buffers may have outlived them in the driver.
        spoilt or DeviceLostError.met is not None,
    )


def device_facts(row: Row, settings: CaseSettings, progress: Path) -> object:
    """The DeviceFacts of the executor of `row`, or the exception if they cannot be had."""
    stages = Progress(progress)
    stages.enter(None, "measuring the device", 120.0)
    try:
        machine = _processes(_hidden(settings)).runner_of(row, Built(None))
        return facts_of(machine, row.executor, stages.left_s)
    except Exception as error:
        return error
    finally:
        stages.close()


def _hidden(settings: CaseSettings) -> tuple[Path, ...]:
    return (*settings.hidden, *([settings.programs] if settings.programs else []))


def _conclude_all(candidates: Sequence[_Candidate], status: Status, sentence: str) -> None:
    for candidate in candidates:
        candidate.conclude(status, sentence)


class _CaseBench:
    """The shared state of the candidates of one case. It is the `Watch` of their turns."""

    arena: Arena
    expected: Expected

    def __init__(self, candidates: Sequence[_Candidate], settings: CaseSettings, stages: Progress) -> None:
        first = candidates[0].row
        self.candidates = {candidate.row.backend: candidate for candidate in candidates}
        self.settings, self.stages = settings, stages
        self.current = candidates[0]
        self.spec: Spec = load_specs(settings.specs)[first.op]
        self.case: Case = self.spec.parse_case(first.case)
        self.target: Target = cast(Target, first.target)
        self.input_sha256: Mapping[str, str] = {}
        self.bare_read: tuple[float | None] | None = None
        self.seed = secrets.randbelow(1 << 31)
        self.otherwise: dict[frozenset[str], Expected] = {}
        self.turn: Temperature | None = None
        self.processes = _processes(_hidden(settings))
        stages.enter(None, "asking the executor", 60.0)
        about = self.processes.machine(first, self._deadline())
        if not about["timed"]:
            raise UnsupportedError(f"executor {first.executor} keeps no time of its own")
        self.row, self.device = first, str(about["device"])
        self.buffers = Buffers(first.executor, self.device, lambda: stages.left_s)

    def _deadline(self) -> float:
        return time.monotonic() + self.stages.left_s

    @property
    def machine(self) -> Runner:
        """The runner of every program that is data (not a Python call)."""
        return self.processes.runner_of(self.row, Built(None))

    def alive(self) -> list[_Candidate]:
        return [candidate for candidate in self.candidates.values() if candidate.status is None]

    def closed(self) -> bool:
        """Frees the bindings and the buffers; False if that failed."""
        self.stages.enter(None, "freeing the buffers", 60.0)
        try:
            self.buffers.close()
        except Exception:
            return False
        finally:
            self.candidates = {}
            del self.buffers
            gc.collect()
            if is_cuda(self.device):
                torch.cuda.empty_cache()
        return True

    def end_runners(self) -> None:
        """Ends every runner, so that the remaining rows start in new ones."""
        self.processes.end()

    @contextmanager
    def blaming(self, candidate: _Candidate, doing: str, limit_s: float, spoils: bool = True) -> Iterator[None]:
        """An exception inside concludes `candidate` and, with `spoils`, ends the runners."""
        self.current = candidate
        self.stages.enter(candidate.row.backend, doing, limit_s)
        with self._failing(doing, spoils):
            yield

    @contextmanager
    def _failing(self, doing: str, spoils: bool = True) -> Iterator[None]:
        """As `blaming`, but an exception concludes whichever candidate is current then."""
        try:
            yield
        except UnsupportedError as error:
            self.current.conclude("unsupported", str(error))
        except _SpoiltError:
            raise
        except RunnerDiedError as died:
            late = f"it hung: not done within {self.stages.limit_s:g} host seconds"
            self.current.conclude(
                "timed_out" if died.late else "crashed", f"{late if died.late else died}, while {doing}"
            )
            # Everything else bound in that process is gone.
            raise _SpoiltError from died
        except (Exception, SystemExit) as error:
            said = str(error) if isinstance(error, RunnerFaultError | DeviceLostError) else explain_error(error)
            self.current.conclude("error", f"{said}, while {doing}")
            if spoils or isinstance(error, DeviceLostError):
                raise _SpoiltError from error

    def measure(self) -> None:
        for candidate in self.alive():
            with self.blaming(candidate, "building its program", 300.0, spoils=False):
                candidate.built = self.processes.build(candidate.row, self.case, self._deadline())
                if candidate.built.ptx is not None and self.settings.programs is not None:
                    leave_program(self.settings.programs, candidate.built.ptx)
        if self.alive():
            self._lay_out()
        for candidate in self.alive():
            self._check(candidate)
        for candidate in self.alive():
            self._set_up_stopwatch(candidate)
        if self.alive():
            self._take()
        for candidate in self.alive():
            self._check_replay(candidate)

    def _lay_out(self) -> None:
        """Puts the inputs on the device once and computes the references there."""
        self.stages.enter(None, "drawing the inputs", 600.0)
        inputs = reference(self.case.op).make_inputs(self.case, self.device)
        self.stages.enter(None, "copying the inputs", 120.0)
        self.arena = self.buffers.lay_out(self.spec, self.case, inputs)
        if sum(tensor.nbytes for tensor in inputs.values()) <= MAX_DIGESTED_BYTES:
            self.input_sha256 = self.arena.input_sha256
        given = {name: self.arena.tensors[name] for name in inputs}
        del inputs
        self.stages.enter(None, "computing the references", 600.0)
        self.expected = expected_of(self.case, given, self.settings.max_oracle_flops)

    def _check(self, candidate: _Candidate) -> None:
        built = candidate.built
        assert built is not None
        with self.blaming(candidate, "loading its program", 300.0, spoils=False):
            runner = self.processes.runner_of(candidate.row, built)
            candidate.bound = self.buffers.bind(runner, candidate.row.backend, built)
        if candidate.bound is None:
            return
        with self.blaming(candidate, "running for the first time", 120.0):
            self._poison()
            candidate.bound.launch()
            self._judge(candidate, "")
            candidate.accepted = {name: self.arena.tensors[name].clone() for name in self.expected.oracle}

    def _set_up_stopwatch(self, candidate: _Candidate) -> None:
        with self.blaming(candidate, "being captured", 120.0):
            assert candidate.bound is not None
            self._poison()
            candidate.bound.capture()
            if not self.arena.intact():
                self._judge(candidate, "in a replay before the first sample: ")
            facts = self.settings.device or facts_of(self.machine, self.row.executor, self.stages.left_s)
            floors: dict[Temperature, Floor] = {}
            for temperature in TEMPERATURES:
                floor = floor_of(self.case, self.target, facts, temperature)
                if floor:
                    floors[temperature] = floor
            candidate.contender = Contender(candidate.bound, floors, self._bare_read_us())

    def _bare_read_us(self) -> float | None:
        """Time to read the bytes that the case needs; measured once, together with its rows."""
        if self.bare_read is None:
            size = reference(self.case.op).minimum_bytes(self.case)
            self.bare_read = (bare_read_of(self.machine, self.row.executor, size, self.stages.left_s),)
        return self.bare_read[0]

    def _take(self) -> None:
        contenders = {one.row.backend: one.contender for one in self.alive() if one.contender}
        taken: list[Series] = []
        with self._failing("being timed"):
            taken = take(contenders, self, self._throttled, self.settings.policy)
        for one in taken:
            self.candidates[one.name].series.append(one)

    def _throttled(self) -> str | None:
        return throttled_since(self.machine, self.row.executor, self.stages.left_s)

    def _check_replay(self, candidate: _Candidate) -> None:
        with self.blaming(candidate, "replaying for the last time", 120.0):
            assert candidate.bound is not None
            self._poison()
            candidate.bound.sample("hot", 1)
            self._collect(candidate)
            self._judge(candidate, "in a replay after the last sample: ")
            if candidate.status is None and self._can_change(candidate):
                self._change_inputs(candidate, "cold")
                candidate.last_pairs = [self._pair(candidate, "cold") for _ in range(LAST_PAIRS)]
                self._compare_pairs(candidate)
            candidate.conclude("passed", "")

    def _can_change(self, candidate: _Candidate) -> bool:
        """Whether the launches read any inputs directly. Inputs that a library has converted do not count."""
        assert candidate.built is not None
        return bool(self.arena.scalable(candidate.built.prepares))

    def _change_inputs(self, candidate: _Candidate, temperature: Temperature) -> None:
        """Concludes a candidate that is wrong on other inputs, such as one that keeps an earlier result.

        Does not poison the outputs, so that a candidate that looks for poison fails too.
        """
        assert candidate.bound is not None
        assert candidate.built is not None
        before = candidate.accepted
        with self.arena.scaled_inputs(self.seed, candidate.built.prepares):
            expected = self._expected_otherwise(candidate.built.prepares)
            self.buffers.synchronise()
            self.stages.enter(candidate.row.backend, "replaying on other inputs", 60.0)
            candidate.bound.sample(temperature, 1)
            self._collect(candidate)
            outputs = {name: self.arena.tensors[name] for name in before}
            kept = [name for name, seen in before.items() if _same_bits(outputs[name], seen)]
            judgement = compared(self.spec, expected, outputs)
            self.buffers.synchronise()
        if len(kept) == len(before):
            self._conclude_kept(candidate)
        elif not judgement.passed:
            # A single output may rightly be unchanged, such as codes if the block scales absorbed the change.
            still = f"{' and '.join(kept)} still as on the inputs before; " if kept else ""
            candidate.conclude("failed", f"in a replay on other inputs: {still}{judgement.sentence}")
        if not self.arena.intact():
            self._judge(candidate, "in a replay on other inputs: ")

    def _conclude_kept(self, candidate: _Candidate) -> None:
        sentence = "in a replay on other inputs: the outputs are still those of the inputs before"
        call = candidate.built is not None and candidate.built.call is not None
        cure = ". Inputs that a Python call has prepared ahead belong into PythonProgram.prepares" if call else ""
        candidate.conclude("failed", f"{sentence}, so that what was timed is not the work{cure}")

    def _expected_otherwise(self, without: frozenset[str]) -> Expected:
        """The expected outputs on the inputs as scaled by `seed`, which the arena holds now."""
        if without not in self.otherwise:
            self.stages.enter(None, "computing the references of other inputs", 600.0)
            given = {name: tensor for name, tensor in self.arena.tensors.items() if name not in self.arena.outputs}
            self.otherwise[without] = expected_of(self.case, given, self.settings.max_oracle_flops)
        return self.otherwise[without]

    def _step_aside(self, candidate: _Candidate, temperature: Temperature) -> None:
        """The checks between samples. A launch cannot tell them from the samples around it."""
        aside = candidate.aside[temperature]
        if candidate.status is None and self._can_change(candidate):
            if len(aside.pairs) == aside.judged_in:
                self._change_inputs(candidate, temperature)
            aside.pairs.append(self._pair(candidate, temperature))

    def _pair(self, candidate: _Candidate, temperature: Temperature) -> Pair:
        """One launch on the timed inputs and one on inputs that the program has never seen, in either order.

        Before either, the host does the same work: it writes the inputs. A timed-input launch follows another one on
        the same inputs, so a program that remembers only its last inputs reuses its results here too.
        """
        self.stages.enter(candidate.row.backend, "being timed on new inputs", 60.0)
        first = secrets.randbelow(2)
        new = self._launch_alone(candidate, temperature, new=True) if first else 0.0
        self._launch_alone(candidate, temperature, new=False)
        timed = self._launch_alone(candidate, temperature, new=False)
        new = new if first else self._launch_alone(candidate, temperature, new=True)
        if not self.arena.intact():
            # Check now: otherwise the next contender's turn would be blamed.
            self._judge(candidate, "in a launch between the samples: ")
        return timed, new

    def _launch_alone(self, candidate: _Candidate, temperature: Temperature, new: bool) -> float:
        """Microseconds of one launch. Concludes a candidate whose outputs stay the same on new inputs."""
        assert candidate.bound is not None
        assert candidate.built is not None
        with self.arena.scaled_inputs(secrets.randbelow(1 << 31), candidate.built.prepares):
            self.buffers.synchronise()
            if new:
                us = candidate.bound.sample(temperature, 1)
                self._collect(candidate)
                if self._as_accepted(candidate):
                    self._conclude_kept(candidate)
                self.buffers.synchronise()
                return us
        self.buffers.synchronise()
        us = candidate.bound.sample(temperature, 1)
        self._collect(candidate)
        return us

    def _compare_pairs(self, candidate: _Candidate) -> None:
        """Concludes a candidate that is right on new inputs but slow: it reuses results for the inputs that it was
        timed on.

        It may have stopped reusing them when the samples were done, so pairs are also compared without the last ones.
        """
        for temperature, aside in candidate.aside.items():
            last = candidate.last_pairs if temperature == "cold" else []
            for pairs in (aside.pairs, [*aside.pairs, *last], last):
                self._compare(candidate, temperature, [one for one in pairs if min(one) > 0.0])

    def _compare(self, candidate: _Candidate, temperature: Temperature, pairs: Sequence[Pair]) -> None:
        if not pairs:
            return
        surely, likely = surely_slower(pairs), median(new / timed for timed, new in pairs)
        candidate.metrics.setdefault(f"new_over_timed.{temperature}", likely)
        if (surely or 0.0) <= MAX_NEW_OVER_TIMED and likely <= MAX_MEDIAN_OVER_TIMED:
            return
        least = f"surely at least {surely:.4g}" if surely else "too few to be surer"
        candidate.conclude(
            "failed",
            f"{temperature}: a launch on inputs that it had not seen took {likely:.4g} times as long as one on those "
            f"that it was timed on (median of {counted(len(pairs), 'pair')}, {least}); at most "
            f"{MAX_NEW_OVER_TIMED:g} times as "
            "long is believed: it recalls an earlier result, so that what was timed is not the work",
        )

    def begin(self, name: str, temperature: Temperature | None) -> None:
        """See Watch."""
        self.current = candidate = self.candidates[name]
        self.turn = temperature
        if temperature is not None:
            if temperature not in candidate.aside:
                candidate.aside[temperature] = _Aside(secrets.randbelow(max(1, self.settings.policy.min_rounds)))
            candidate.aside[temperature].first = bool(secrets.randbelow(2))
            if candidate.aside[temperature].first:
                self._step_aside(candidate, temperature)
        self.stages.enter(name, "being timed", 60.0)
        self._poison()

    def end(self, name: str) -> str | None:
        """See Watch. Outputs that equal the accepted ones bit for bit are right."""
        candidate = self.candidates[name]
        self._collect(candidate)
        same = self._as_accepted(candidate)
        if not same:
            candidate.differing_turns += 1
        if not self.arena.intact() or (not same and candidate.differing_turns <= MAX_JUDGED_TURNS):
            self._judge(candidate, "in a timed replay: ")
        if self.turn is not None and not candidate.aside[self.turn].first:
            self._step_aside(candidate, self.turn)
        return candidate.sentence or None

    def _as_accepted(self, candidate: _Candidate) -> bool:
        """Whether the outputs equal the accepted ones bit for bit."""
        return all(_same_bits(self.arena.tensors[name], seen) for name, seen in candidate.accepted.items())

    def _judge(self, candidate: _Candidate, when: str) -> None:
        """Concludes a candidate with wrong outputs. Raises _SpoiltError if it damaged guard bands or inputs."""
        judgement = compared(
            self.spec, self.expected, {name: self.arena.tensors[name] for name in self.expected.oracle}
        )
        candidate.metrics |= {**judgement.metrics, "differing_turns": float(candidate.differing_turns)}
        wrong = complaints(self.arena, self.expected, judgement)
        if wrong or not judgement.passed:
            candidate.conclude("failed", f"{when}{wrong}")
        if not self.arena.intact():
            raise _SpoiltError

    def _poison(self) -> None:
        self.arena.poison()
        self.buffers.synchronise()

    def _collect(self, candidate: _Candidate) -> None:
        assert candidate.bound is not None
        candidate.bound.collect()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _measured(candidate: _Candidate, bench: _CaseBench | None, settings: CaseSettings) -> Measured:
    row, built = candidate.row, candidate.built
    digest = None if built is None else program_sha256(built.ptx)
    record = record_of(
        settings.run,
        row,
        candidate.status or "error",
        candidate.sentence,
        Evidence(
            candidate.metrics, needed_work(bench.case) if bench else {}, digest, bench.input_sha256 if bench else {}
        ),
        specs=settings.specs,
    )
    software = built.software if built is not None else {}
    series = (
        candidate.series if candidate.status == "passed" else failed_series(row, candidate.status, candidate.sentence)
    )
    return Measured(
        record, tuple(timing_of(one, settings.run, row, candidate.contender, digest) for one in series), software
    )


def failed_series(row: Row, status: Status | None, sentence: str) -> list[Series]:
    """The series of a row without times."""
    found = [Series(row.backend, temperature) for temperature in TEMPERATURES]
    for series in found:
        series.fail(status or "error", sentence)
    return found


def lost(row: Row, settings: CaseSettings, status: Status, sentence: str) -> Measured:
    """The result of a row whose process died or was killed."""
    record = record_of(settings.run, row, status, sentence, specs=settings.specs)
    series = failed_series(row, status, sentence)
    return Measured(record, tuple(timing_of(one, settings.run, row, None, None) for one in series))
