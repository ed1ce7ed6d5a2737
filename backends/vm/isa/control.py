"""Control flow: branches, returns, traps and the hints around them (PTX ISA 9.7.12)."""

from __future__ import annotations

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.machine.code import NEXT, Wait
from backends.vm.machine.register_pool import RegisterPool, Resize
from backends.vm.machine.warp import Warp
from backends.vm.ptx.ast import Symbol


def _nothing(warp: Warp) -> None:
    return None


@opcode("bra{.uni}", section="9.7.12.3", kind="tail", control="branch", counter="control")
def bra(b: Binder) -> Step:
    """Jump. The label is resolved when the code is cut into blocks."""
    (label,) = b.expect(1)
    if not isinstance(label, Symbol):
        raise b.error("the target must be a label")
    return _nothing


@opcode("brx.idx{.uni}", section="9.7.12.4", kind="tail", control="table", counter="control")
def brx(b: Binder) -> Step:
    """Jump by each lane's index into a list of labels. The list is resolved when the code is cut into blocks."""
    index, labels = b.expect(2)
    if not isinstance(labels, Symbol):
        raise b.error("the second operand must be the label of a .branchtargets list")
    row = b.source(index, "u32")
    return lambda warp: warp.u32[row]


@opcode("ret{.uni}", section="9.7.12.6", kind="tail", control="exit", counter="control")
@opcode("exit", section="9.7.12.7", kind="tail", control="exit", counter="control")
def leave(b: Binder) -> Step:
    """End the active lanes."""
    b.expect(0)
    return _nothing


@opcode("trap", section="9.7.19.4", kind="tail", counter="control")
def trap(b: Binder) -> Step:
    """Fault: the kernel traps."""

    def step(warp: Warp) -> object:
        raise Fault("trap", "the kernel executed trap")

    return step


@opcode("brkpt", section="9.7.19.1", counter="control")
@opcode("nanosleep.u32", section="9.7.19.2", counter="control")
@opcode("pmevent{.mask}", section="9.7.19.3", counter="control")
def no_effect(b: Binder) -> Step:
    """Do nothing: the machine has no notion of time."""
    return _nothing


@opcode("griddepcontrol.<action>", section="9.7.13.13", counter="control", action="launch_dependents wait")
def griddepcontrol(b: Binder) -> Step:
    """Track in clocks which warps have waited for the previous grid. Grids run one after another anyway."""
    b.expect(0)
    if b.words["action"] == "launch_dependents":
        return _nothing
    return lambda warp: warp.cta.machine.races.chain.wait(warp.clock, warp.released)


@opcode("setmaxnreg.<way>.sync.aligned.u32", section="9.7.19.5", kind="tail", counter="control", way="inc dec")
def setmaxnreg(b: Binder) -> Step:
    """Return registers to the CTA's pool, or wait until the pool has enough."""
    count = b.immediate(b.expect(1)[0])
    if not 24 <= count <= 256 or count % 8:
        raise b.error(f"the register count {count} must be a multiple of 8 in 24..256")
    one = Resize(b.words["way"], count, b.instruction.line, b.instruction.text)

    def step(warp: Warp) -> object:
        warp.meet("setmaxnreg")
        pool = warp.cta.register_pool
        pool.check_possible(warp.index, one)
        pool.execute(warp, one)
        if not pool.lacking(warp.index, count):
            pool.take(warp, one)
            warp.cta.machine.engine.events += 1
            return NEXT
        return Wait(
            ready=lambda: not pool.lacking(warp.index, count),
            reason=lambda: (
                f"{pool.lacking(warp.index, count)} more registers: of the {pool.size} of its CTA "
                f"{pool.free} are free and the warps hold {_held(pool)} a thread"
            ),
            finish=lambda: pool.take(warp, one),
        )

    return step


def _held(pool: RegisterPool) -> str:
    return ", ".join(map(str, pool.held))
