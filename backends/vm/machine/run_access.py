"""Loads and stores inside a run of machine code: the glue between the run (backends.vm.bind.lanes) and the access code.

The glue reads what the access code needs from the words of the warp. It returns 0 to the run if all is done, and 1 if
nothing is: Python then does the instruction. It also returns 1 if the access is done but Python has to look at the
`answer` that it has left among the words of the warp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from llvmlite import ir

from backends.vm.machine.code import LANES, WORD
from backends.vm.memory.access_code import I8, I32, I64, POINTER, number
from backends.vm.memory.compiled_access import CHANGED, CONFLICT, SERVED_SHIFT, UNDEFINED
from backends.vm.memory.global_memory import PARAM_WINDOW
from backends.vm.numerics.compiled import ENTRY, linked

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

_SITE = ("performer", "stores", "base", "place", "launch", "changes", "waited", "program")
SITE: Final = {name: index for index, name in enumerate(_SITE)}
"""What an instruction provides: the address of the machine code of its kind (0: none yet) and whether it stores. Then,
about the buffer that it found last: where it begins, its place, the launch and the value of access_code.CHANGES when it
was found, and which element of a clock must not be 0 (0: none). Then the program of the access."""
_LANES_MASK: Final = ir.VectorType(I8, LANES)
_PERFORMER: Final = ir.FunctionType(I64, [POINTER] * 5 + [I64] * 4)


@dataclass(frozen=True, slots=True)
class RunAccess:
    """An access as a run sees it. `function` performs it and takes `words`; `after` handles an answer that needs
    Python."""

    function: int
    words: Callable[[], tuple[int, ...]]
    after: Callable[[Warp, int], object]


class _Code:
    """Writes a function `int64 entry(bounds, rows, mask)`, which returns 0 at once if no lane is active."""

    def __init__(self) -> None:
        self.module = ir.Module("run_access")
        made = ir.Function(self.module, ir.FunctionType(I64, [POINTER] * 3), ENTRY)
        self.bounds, self.rows, self.mask = made.args
        self.b = b = ir.IRBuilder(made.append_basic_block())
        self._done, self._no = made.append_basic_block(), made.append_basic_block()
        for block, answer in ((self._done, 0), (self._no, 1)):
            with b.goto_block(block):
                b.ret(number(answer))
        self.active = b.icmp_unsigned("!=", b.load(self.mask, typ=_LANES_MASK, align=1),
                                      ir.Constant(_LANES_MASK, [0] * LANES))  # fmt: skip
        nobody = b.icmp_unsigned("==", b.bitcast(self.active, I32), ir.Constant(I32, 0))
        following = b.append_basic_block()
        b.cbranch(nobody, self._done, following)
        b.position_at_end(following)

    def at(self, pointer: Any, index: int | Any) -> Any:
        """Word `index` after `pointer`."""
        return self.b.load(self._place(pointer, index), typ=I64)

    def _place(self, pointer: Any, index: int | Any) -> Any:
        return self.b.gep(pointer, [number(index) if isinstance(index, int) else index], source_etype=I64)

    def told(self, name: str) -> Any:
        """A word of the warp."""
        return self.at(self.bounds, WORD[name])

    def tell(self, name: str, value: Any) -> None:
        """Set a word of the warp."""
        self.b.store(value, self._place(self.bounds, WORD[name]))

    def pointer(self, word: Any) -> Any:
        """A word as an address."""
        return self.b.inttoptr(word, POINTER)

    def refuse(self, condition: Any) -> None:
        """Return 1, with nothing done, if `condition` holds."""
        following = self.b.append_basic_block()
        self.b.cbranch(condition, self._no, following)
        self.b.position_at_end(following)

    def is_zero(self, word: Any) -> Any:
        """Whether a word is 0."""
        return self.b.icmp_signed("==", word, number(0))

    def address(self) -> int:
        """End the function and return its address."""
        self.b.branch(self._done)
        return linked(self.module)


def _perform(code: _Code, site: Any, place: Any, base: Any, mark: Any, where: str) -> None:
    b = code.b
    performer = code.at(site, SITE["performer"])
    code.refuse(b.or_(code.is_zero(performer), code.is_zero(place)))
    program = b.gep(site, [number(SITE["program"])], source_etype=I64)
    arguments = [program, code.bounds, code.mask, code.pointer(place), code.pointer(code.told("seen")), base, mark,
                 code.told("met"), code.told("agent")]  # fmt: skip
    answer = b.call(b.inttoptr(performer, _PERFORMER.as_pointer()), arguments)
    code.refuse(b.icmp_signed("<", answer, number(0)))
    stored, changed = f"stored{where}", f"changed{where}"
    code.tell(stored, b.add(code.told(stored), code.at(site, SITE["stores"])))
    new = b.zext(b.icmp_signed("!=", b.and_(answer, number(CHANGED)), number(0)), I64)
    code.tell(changed, b.add(code.told(changed), new))
    looks = b.icmp_signed("!=", b.and_(answer, number(UNDEFINED | CONFLICT)), number(0))
    code.tell("answer", b.select(looks, answer, number(0)))
    code.refuse(looks)
    code.tell("served", b.add(code.told("served"), b.ashr(answer, number(SERVED_SHIFT))))


@cache
def of_shared() -> int:
    """The function of weak accesses to `.shared`; its word is the address of a SITE."""
    code = _Code()
    site = code.pointer(code.at(code.rows, 0))
    code.refuse(code.b.not_(code.is_zero(code.told("uneven"))))
    _perform(code, site, code.told("shared"), code.told("base"), code.told("mark"), "")
    return code.address()


@cache
def of_global() -> int:
    """The function of weak accesses to `.global`; its word is the address of a SITE."""
    code = _Code()
    b, site = code.b, code.pointer(code.at(code.rows, 0))
    now = code.at(code.pointer(code.told("changes")), 0)
    code.refuse(b.icmp_signed("!=", code.at(site, SITE["changes"]), now))
    code.refuse(b.icmp_signed("!=", code.at(site, SITE["launch"]), code.told("launch")))
    code.refuse(b.not_(code.is_zero(code.told("uneven"))))
    waited = code.at(site, SITE["waited"])
    missing = code.is_zero(code.at(code.pointer(code.told("seen")), waited))
    code.refuse(b.and_(b.not_(code.is_zero(waited)), missing))
    mark = b.or_(code.told("cluster"), code.told("mark"))
    _perform(code, site, code.at(site, SITE["place"]), code.at(site, SITE["base"]), mark, "_globally")
    return code.address()


@cache
def of_parameters(size: int, count: int) -> int:
    """The function for loads of `count` elements of `size` bytes from a named parameter to registers of that size.

    Its words: bound and offset of the row of the address; the bytes of all elements, discarded ones included; then for
    each register its bound, offset and element number.
    """
    code = _Code()
    b, kind = code.b, ir.IntType(8 * size)
    lanes = ir.VectorType(kind, LANES)

    def row(word: int) -> Any:
        return code.pointer(b.add(code.at(code.bounds, code.at(code.rows, word)), code.at(code.rows, word + 1)))

    at = b.sub(b.load(row(0), typ=I64), number(PARAM_WINDOW))
    total = code.at(code.rows, 2)
    beyond = b.icmp_signed(">", b.add(at, total), code.told("parameter_bytes"))
    astray = b.icmp_signed("!=", b.and_(at, b.sub(total, number(1))), number(0))
    code.refuse(b.or_(b.icmp_signed("<", at, number(0)), b.or_(beyond, astray)))
    first = b.add(code.told("parameters"), at)
    values = list[Any]()
    for index in range(count):
        offset = b.mul(code.at(code.rows, 3 + 3 * index + 2), number(size))
        values.append(b.load(code.pointer(b.add(first, offset)), typ=kind, align=1))
    for index, value in enumerate(values):
        register = row(3 + 3 * index)
        everywhere = b.insert_element(ir.Constant(lanes, ir.Undefined), value, ir.Constant(I32, 0))
        everywhere = b.shuffle_vector(everywhere, everywhere, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))
        b.store(b.select(code.active, everywhere, b.load(register, typ=lanes, align=8)), register, align=8)
    return code.address()
