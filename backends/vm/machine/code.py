"""The executable form of a function: basic blocks of steps, and what a step answers to its warp.

A block is a straight run of steps and a tail. Instructions that may wait stand alone as the tail of their own block,
so that a parked warp executes just that instruction again. Branch targets are block numbers. Block numbers grow with
the program counter: of a diverged warp, the strand in the lowest block runs.

A tail returns the number of the next block (int), NEXT to fall through, a Wait to park, or HANDLED when it has
rearranged the strands of the warp itself. What other steps return is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from backends.vm.machine.registers import Key, RegisterRows
from backends.vm.ptx.ast import Function, Instruction, Variable

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

Step = Callable[["Warp"], object]


class _Sentinel:
    pass


NEXT: Final = None
HANDLED: Final = _Sentinel()


@dataclass(slots=True)
class Wait:
    """Why a strand cannot go on.

    Once `ready` answers true, `finish` runs for its effects and the strand continues after the instruction; with
    `again` it executes the instruction anew instead. `reason` is a clause for reports.

    `expire` is set by waits that may give up (mbarrier.try_wait): it is called when nothing else in the machine can
    move. `target` is the object that ends the wait, if one does. `local`: only other lanes of the same warp can end the
    wait, so they run on meanwhile.
    """

    ready: Callable[[], bool]
    reason: Callable[[], str]
    finish: Callable[[], None] | None = None
    again: bool = False
    expire: Callable[[], None] | None = None
    target: object = None
    local: bool = False


@dataclass(slots=True)
class Block:
    """Steps in order, then `tail` (None: fall through). `classes` counts its instructions by counter name."""

    steps: list[Step]
    instructions: list[Instruction]
    tail: Step | None = None
    classes: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class Code:
    """The blocks of a function. `tracked` registers need a record of which lanes have written them."""

    function: Function
    blocks: list[Block]
    rows: RegisterRows
    tracked: frozenset[Key]


@dataclass(slots=True)
class BoundFunction:
    """A function that a machine can launch: its code and where everything that it names lies, in bytes.

    `offsets`: state space and offset of each symbol. `dynamic`: the names of dynamic shared memory. `variables`: those
    of the module, the same mapping for all its functions.
    """

    code: Code
    variables: Mapping[str, Variable]
    offsets: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    dynamic: frozenset[str] = frozenset()
    static_shared: int = 0
    dynamic_align: int = 16
    local_size: int = 0
    param_size: int = 0

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.code.function.name

    def place_of(self, name: str, dynamic_offset: int) -> tuple[str, int]:
        """State space and offset of a symbol; dynamic shared memory begins at `dynamic_offset`."""
        if name in self.dynamic:
            return "shared", dynamic_offset
        return self.offsets[name]
