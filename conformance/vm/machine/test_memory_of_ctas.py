"""Memory is freed as soon as its owner ends: CTAs and machines are in no reference cycles that need Python's collector.

A CTA has up to 228 KiB of shared memory and 256 KiB of tensor memory, each with the clocks of its granules. In cycles,
a run kept a hundred MiB alive until a collection, and each such collection took tenths of a second.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from backends.vm.executor import VmExecutor
from backends.vm.faults import Fault
from backends.vm.machine.cta import Cluster, Cta
from backends.vm.machine.machine import Machine
from backends.vm.memory.mbarrier import MBarrier
from backends.vm.memory.shared import SharedMemory
from backends.vm.memory.tmem import TensorMemory
from conformance.vm.kernel import EVERY_SCHEDULE, Kernel, copy_kernel, wait
from conformance.vm.machine.test_cluster_life import MEET, USES, kernel
from conformance.vm.tensor_kernel import mma_kernel
from megamoe.contract import Launch, Program, RunOptions

PARTS = (Machine, Cta, SharedMemory, TensorMemory, MBarrier)
KERNELS = {
    "copies and mbarriers": copy_kernel(launches=2),
    "a tensor core": mma_kernel(buffers={"out": np.zeros(128, np.float32)}),
    "a cluster": kernel(USES["an atomic"], leave=MEET),
}

BROKEN = {
    "a wait in vain": copy_kernel({"wait": wait("other", 0)}),
    "a trap while a copy is in flight": copy_kernel({"wait": "trap;"}),
}


def alive() -> dict[str, int]:
    """The number of live machine parts, by class."""
    there = Counter(map(type, gc.get_objects()))
    return {part.__name__: there[part] for part in PARTS}


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Within the context nothing is collected, and `alive` sees only what was made in it: the rest is frozen."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("name", KERNELS)
def test_a_machine_and_its_ctas_are_free_at_once(name: str, schedule: str) -> None:
    with no_search_for_cycles():
        before = alive()
        KERNELS[name].run(schedule)
        assert alive() == before, f"{name}: what ran under {schedule} is still there after its machine"


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("name", BROKEN)
def test_a_machine_that_a_fault_has_ended_is_free_with_its_frames(name: str, schedule: str) -> None:
    with no_search_for_cycles():
        before = alive()
        try:
            BROKEN[name].run(schedule)
        except Fault as fault:
            traceback.clear_frames(fault.__traceback__)
        assert alive() == before, f"{name}: what ran under {schedule} is still there after its machine"


@pytest.mark.parametrize("body", ["trap;", "@%p1 bra END; END: ret;"], ids=["the end", "what a run can survive"])
def test_an_executor_keeps_nothing_of_a_fault(body: str) -> None:
    program = Program("sm_100a", Kernel(body).ptx, (Launch("kernel", (1, 1, 1), (32, 1, 1), ()),))
    with no_search_for_cycles():
        before = alive()
        assert VmExecutor().run(program, {}, RunOptions()).violation is not None
        assert alive() == before, "the machine is still there after the verdict"


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("name", KERNELS)
def test_ctas_are_free_while_their_machine_lives(name: str, schedule: str) -> None:
    with no_search_for_cycles():
        machine, before = Machine(schedule), alive()
        KERNELS[name].launch(machine)
        left = {part: count - before[part] for part, count in alive().items() if part != "Machine"}
        assert not any(left.values()), f"{name}: {left} are there after the launch, under {schedule}"


def test_ctas_that_hold_each_other_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "part", lambda cluster: None)
    with pytest.raises(AssertionError, match="still there"):
        test_a_machine_and_its_ctas_are_free_at_once("a cluster", "eager")
