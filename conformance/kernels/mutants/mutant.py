"""Mutants of a program: its PTX text or its launches with one thing changed, each with a name that describes the
change.

The transformations know PTX, not kernels: they apply to any backend's text. A text is changed in place and keeps its
lines, so that a finding names the line of the program as it was built.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from backends.vm.ptx.comments import COMMENT, blanked
from megamoe.contract import AnyProgram, BufferArg, HostProgram, Launch, Program, ScalarArg, TensorMapArg

SYNCHRONISATION = ("drop", "move", "weaken", "widen", "parity", "count", "bytes")
"""Classes of mutants of synchronising instructions."""

_INSTRUCTION = re.compile(
    r"(?:^|(?<=[;{]))[ \t]*(?P<guard>@!?[%\w$]+\s+)?(?P<opcode>[a-z]\w*(?:(?:::|\.)\w+)*)(?P<operands>\s[^;]*?)?\s*;",
    re.MULTILINE,
)
_SYNCHRONISES = re.compile(
    r"mbarrier\.(init|arrive|expect_tx|complete_tx|try_wait|test_wait)|tcgen05\.(wait|fence|commit|dealloc|relinquish)"
    r"|fence\.|membar|bar\.|barrier\.|cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all)|cp\.async\.mbarrier"
    r"|wgmma\.(fence|commit_group|wait_group)|griddepcontrol"
)
_TOUCHES_MEMORY = re.compile(
    r"(ld|st|atom|red|cp|ldmatrix|stmatrix|mbarrier|multimem)\.|wgmma\.mma|tcgen05\.(ld|st|mma|cp|shift|commit)"
)
_STORES = re.compile(r"st\.(?!param)|red\.|stmatrix\.|tcgen05\.(st|cp)\.|cp\.(async\.(?!wait|commit)|reduce)")
_ARITHMETIC = re.compile(r"(add|sub|mul|mad|fma|min|max|shl|shr|and|or|xor|selp|mov|bfe|bfi|prmt|lop3|div|rem|setp)\b")
_SYMMETRIC = re.compile(r"setp\.(eq|ne)\b")
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})")
_REGISTER = re.compile(r"%[\w$]+")
_LABEL = re.compile(r"([$\w]+):\s*$")
_SCOPES = ("cta", "cluster", "gpu", "sys")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a text: characters `begin` .. `end - 1`, including the semicolon. `line` counts from 1."""

    begin: int
    end: int
    line: int
    entry: str
    guard: str
    opcode: str
    operands: tuple[str, ...]

    def spelled(
        self, opcode: str | None = None, operands: Sequence[str] | None = None, guard: str | None = None
    ) -> str:
        """Returns its text with some parts replaced."""
        of = ", ".join(self.operands if operands is None else operands)
        head = f"{self.guard if guard is None else guard}{opcode or self.opcode}"
        return f"{head} {of};" if of else f"{head};"

    def with_operand(self, index: int, text: str) -> str:
        """Returns its text with another operand at `index`."""
        return self.spelled(operands=[*self.operands[:index], text, *self.operands[index + 1 :]])

    def between(self, before: str, after: str) -> str:
        """Returns its text between two instructions under the same guard: a register is changed and changed back."""
        return f"{self.guard}{before}; {self.spelled()} {self.guard}{after};"

    @property
    def synchronises(self) -> bool:
        """Whether it orders anything."""
        return _SYNCHRONISES.match(self.opcode) is not None


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces characters `begin` .. `end - 1` of a text by `text`."""

    begin: int
    end: int
    text: str


_Part = TypeVar("_Part", Launch, BufferArg, ScalarArg, TensorMapArg)


@dataclass(frozen=True, slots=True)
class LaunchEdit:
    """Field `field` of argument `arg` (None: of the launch), element `place` of it, grows by a number or gets a name.

    Sizes that would be 0 or less stay as they are: a text has launches of several cases.
    """

    launch: int
    arg: int | None
    field: str
    place: int | None
    change: int | float | str

    def of(self, program: Program) -> Program:
        """Returns `program` with the change."""
        launches = list(program.launches)
        launch = launches[self.launch]
        if self.arg is None:
            launches[self.launch] = self._changed(launch)
        else:
            args = list(launch.args)
            args[self.arg] = self._changed(args[self.arg])  # pyright: ignore[reportArgumentType]
            launches[self.launch] = replace(launch, args=tuple(args))
        return replace(program, launches=tuple(launches))

    def _changed(self, whole: _Part) -> _Part:
        old = getattr(whole, self.field)
        if self.place is None:
            return replace(whole, **{self.field: self._after(old)})
        return replace(
            whole, **{self.field: (*old[: self.place], self._after(old[self.place]), *old[self.place + 1 :])}
        )

    def _after(self, old: int | float | str) -> int | float | str:
        if isinstance(self.change, str) or isinstance(old, str):
            return self.change
        return old if old + self.change <= 0 and self.field not in ("value", "offset") else old + self.change


@dataclass(frozen=True, slots=True)
class Mutant:
    """A program with one thing changed. `line`: of the PTX, 0 for a launch. `before` and `after` are for the reader."""

    id: str
    kind: str
    line: int
    before: str
    after: str
    edits: tuple[Edit, ...] = ()
    launch: LaunchEdit | None = None

    def of(self, program: AnyProgram) -> Program | HostProgram:
        """Returns `program` with the change. The mutant must come from its text; the launches may differ."""
        if not isinstance(program, (Program, HostProgram)):
            raise TypeError(f"a {type(program).__name__} has no PTX to change")
        if self.launch is not None:
            if not isinstance(program, Program):
                raise TypeError("the launches of a host program are in its object, not in its data")
            return self.launch.of(program)
        return replace(program, ptx=self.text_of(program.ptx))

    def text_of(self, ptx: str) -> str:
        """Applies the edits to the text that this mutant was made from, and keeps the number of lines."""
        for edit in sorted(self.edits, key=lambda one: -one.begin):
            lines = "\n" * ptx.count("\n", edit.begin, edit.end)
            ptx = f"{ptx[: edit.begin]}{edit.text}{lines}{ptx[edit.end :]}"
        return ptx


def program_id(ptx: str) -> str:
    """The first digits of the SHA-256 of a text; ids of its mutants begin with them."""
    return hashlib.sha256(ptx.encode()).hexdigest()[:12]


def instructions(ptx: str) -> list[Instruction]:
    """The instructions of a text, in order."""
    text = blanked(ptx)
    entries = [
        (found.start(), found[1]) for found in re.finditer(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text)
    ]
    made: list[Instruction] = []
    line, counted, entry = 1, 0, 0
    for found in _INSTRUCTION.finditer(text):
        opcode = found["opcode"]
        if "." not in opcode and opcode not in ("ret", "exit", "trap", "bra"):
            continue
        begin = found.start("guard") if found["guard"] else found.start("opcode")
        line, counted = line + text.count("\n", counted, begin), begin
        while entry < len(entries) and entries[entry][0] < begin:
            entry += 1
        name = entries[entry - 1][1] if entry else ""
        operands = tuple(_operands(" ".join((found["operands"] or "").split())))
        made.append(Instruction(begin, found.end(), line, name, found["guard"] or "", opcode, operands))
    return made


def _operands(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            yield text[begin:at].strip()
            begin = at + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def mutants(program: Program | HostProgram) -> Iterator[Mutant]:
    """Yields all mutants of a program, in the order of its text, then of its launches. Equal texts come once."""
    whole, ptx = program_id(program.ptx), program.ptx
    code = instructions(ptx)
    launched = {launch.entry for launch in program.launches} if isinstance(program, Program) else None
    sites: dict[tuple[str, int], int] = {}
    for at, one in enumerate(code):
        if launched is not None and one.entry not in launched:
            continue
        seen = {one.spelled()}
        changes = [(kind, (Edit(one.begin, one.end, text),)) for kind, text in _changes(one)]
        changes += [("move", edits) for edits in _moves(ptx, code, at)] if one.synchronises else []
        for kind, edits in changes:
            after = " ... ".join(edit.text or "(nothing)" for edit in edits)
            if after in seen:
                continue
            seen.add(after)
            number = sites[kind, one.line] = sites.get((kind, one.line), -1) + 1
            yield Mutant(f"{whole}/{kind}/{one.line}.{number}", kind, one.line, one.spelled(), after, edits)
    if isinstance(program, Program):
        yield from _launch_mutants(program, whole)


def _changes(one: Instruction) -> Iterator[tuple[str, str]]:
    for kind, change in _KINDS.items():
        for text in change(one):
            yield kind, text


def _is_wait(one: Instruction) -> bool:
    return one.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))


def _drop(one: Instruction) -> Iterator[str]:
    if not one.synchronises:
        return
    # The loop around a wait, or the reader of its answer, stays: the wait is over at once.
    yield f"{one.guard}setp.eq.u32 {one.operands[0]}, 0, 0;" if _is_wait(one) else ""


def _weaken(one: Instruction) -> Iterator[str]:
    if one.synchronises or re.search(r"\.(acquire|release|acq_rel)\b", one.opcode):
        yield from _other_scope(one, -1)
        if not one.opcode.startswith("fence"):
            for stronger in ("acquire", "release", "acq_rel"):
                if f".{stronger}." in one.opcode:
                    yield one.spelled(one.opcode.replace(f".{stronger}.", ".relaxed."))
    if "wait_group" in one.opcode and one.operands[0].isdecimal():
        yield one.spelled(operands=[str(int(one.operands[0]) + 1)])
    if re.fullmatch(r"cp\.async\.bulk\.wait_group", one.opcode):
        yield one.spelled(f"{one.opcode}.read")
    for this, other in (("wait::ld", "wait::st"), ("wait::st", "wait::ld"), ("before_thread", "after_thread")):
        if one.opcode.startswith("tcgen05.") and this in one.opcode:
            yield one.spelled(one.opcode.replace(this, other))
    if one.opcode in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        yield one.spelled("fence.proxy.async.global")
    if one.opcode.startswith(("bar.sync", "barrier.sync", "bar.cta.sync")) and len(one.operands) == 2:
        yield one.spelled(one.opcode.replace(".sync", ".arrive", 1))


def _widen(one: Instruction) -> Iterator[str]:
    if one.synchronises:
        yield from _other_scope(one, 1)
    if "wait_group" in one.opcode and one.operands[0].isdecimal() and int(one.operands[0]):
        yield one.spelled(operands=["0"])
    if "wait_group.read" in one.opcode:
        yield one.spelled(one.opcode.replace(".read", ""))
    if re.fullmatch(r"fence\.proxy\.async\..+", one.opcode):
        yield one.spelled("fence.proxy.async")


def _other_scope(one: Instruction, step: int) -> Iterator[str]:
    found = re.search(r"(?<!shared:)(?<!:)\.(cta|cluster|gpu|sys)\b(?!::)", one.opcode)
    if not found or one.opcode.startswith(("bar.cta", "barrier.c", "fence.mbarrier_init")):
        return
    at = _SCOPES.index(found[1]) + step
    if 0 <= at < len(_SCOPES):
        yield one.spelled(f"{one.opcode[: found.start(1)]}{_SCOPES[at]}{one.opcode[found.end(1) :]}")


def _parity(one: Instruction) -> Iterator[str]:
    if _is_wait(one) and ".parity" in one.opcode:
        yield from _flipped(one, 2, (1,), "b32")


def _count(one: Instruction) -> Iterator[str]:
    if one.opcode.startswith("mbarrier.init"):
        yield from _nudged(one, 1, (1, -1), "u32")
    elif one.opcode.startswith("mbarrier.arrive") and "expect_tx" not in one.opcode:
        at = next((i for i, text in enumerate(one.operands) if text.startswith("[")), 0)
        if at + 1 < len(one.operands):
            yield from _nudged(one, at + 1, (1, -1), "u32")
    elif one.opcode.startswith(("bar.", "barrier.")) and "cluster" not in one.opcode and "warp" not in one.opcode:
        yield from _nudged(one, 0, (1,), "u32")
        if len(one.operands) > 1:
            yield from _nudged(one, 1, (32, -32), "u32")


def _bytes(one: Instruction) -> Iterator[str]:
    if "expect_tx" in one.opcode:
        yield from _nudged(one, len(one.operands) - 1, (16, -16), "u32")
    elif one.opcode.startswith("cp.async.bulk.") and ".tensor" not in one.opcode and len(one.operands) > 2:
        yield from _nudged(one, 2, (16, -16), "u32")


def _matrix_descriptor(one: Instruction) -> Iterator[str]:
    places = {"wgmma.mma_async": (1, 2), "tcgen05.mma": (1, 2), "tcgen05.cp": (1,)}
    for name, indices in places.items():
        if not one.opcode.startswith(f"{name}."):
            continue
        for index in indices:
            if _REGISTER.fullmatch(one.operands[index]):
                yield from _nudged(one, index, (2,), "s64")
                # Leading and stride byte offsets, and the swizzle (PTX ISA: matrix descriptors).
                yield from _flipped(one, index, (1 << 16, 1 << 32, 1 << 62), "b64")


def _instruction_descriptor(one: Instruction) -> Iterator[str]:
    if one.opcode.startswith("tcgen05.mma."):
        # D's type, B's type, A negated, B transposed, N, M (PTX ISA: instruction descriptor).
        yield from _flipped(one, 3, (1 << 4, 1 << 10, 1 << 13, 1 << 16, 1 << 17, 1 << 24), "b32")
    elif one.opcode.startswith("wgmma.mma_async."):
        for index, text in enumerate(one.operands[4:], 4):
            if text in ("1", "0", "-1"):
                sign = index < 6
                yield one.with_operand(index, str(-int(text)) if sign else str(1 - int(text)))
    else:
        return
    for index, text in enumerate(one.operands[3:], 3):
        # Whether D is added to: a predicate, recognised by its use alone.
        if _REGISTER.fullmatch(text) and (one.opcode.startswith("wgmma") or index == len(one.operands) - 1 > 3):
            yield one.between(f"not.pred {text}, {text}", f"not.pred {text}, {text}")


def _tensor_memory(one: Instruction) -> Iterator[str]:
    places = {"ld": (1,), "st": (0,), "mma": (0, 1), "cp": (0,)}
    for name, indices in places.items():
        if one.opcode.startswith(f"tcgen05.{name}."):
            for index in indices:
                yield from _shifted(one, index, (1, 16 << 16))
    if one.opcode.startswith(("tcgen05.alloc", "tcgen05.dealloc")) and one.operands[1].isdecimal():
        columns = int(one.operands[1])
        yield one.with_operand(1, str(columns * 2 if columns < 512 else columns // 2))


def _setp(one: Instruction) -> Iterator[str]:
    others = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
    parts = one.opcode.split(".")
    if parts[0] == "setp" and parts[1] in others:
        yield one.spelled(".".join([parts[0], others[parts[1]], *parts[2:]]))


def _immediate(one: Instruction) -> Iterator[str]:
    if not _ARITHMETIC.match(one.opcode):
        return
    for index, text in enumerate(one.operands[1:], 1):
        if _INTEGER.fullmatch(text):
            yield one.with_operand(index, str(_integer(text) + 1))
        elif (found := _FLOAT.fullmatch(text)) is not None:
            # 1/64 more of the value; a zero or an infinity becomes another number.
            yield one.with_operand(index, f"0f{(int(found[1], 16) + (1 << 17)) & 0xFFFFFFFF:08X}")


def _address(one: Instruction) -> Iterator[str]:
    if one.opcode.startswith("ld.param"):
        return
    if one.opcode.startswith(("ld.", "st.", "atom.", "red.", "ldmatrix.", "stmatrix.")):
        at = next((i for i, text in enumerate(one.operands) if text.startswith("[")), None)
        if at is not None:
            yield from _shifted(one, at, (16 if "matrix" in one.opcode or ".v4" in one.opcode else 4,))
    elif one.opcode.startswith("cp.async.bulk.tensor"):
        for index, text in enumerate(one.operands):
            if "{" in text:
                yield from _coordinates(one, index, text)


def _coordinates(one: Instruction, index: int, text: str) -> Iterator[str]:
    inside = text[text.index("{") + 1 : text.index("}")]
    found = [part.strip() for part in inside.split(",")]
    for place, part in enumerate(found):
        if _INTEGER.fullmatch(part):
            others = [*found[:place], str(_integer(part) + 8), *found[place + 1 :]]
            yield one.with_operand(index, text.replace(inside, ", ".join(others)))
        else:
            yield one.between(f"add.s32 {part}, {part}, 8", f"sub.s32 {part}, {part}, 8")


def _operand(one: Instruction) -> Iterator[str]:
    name, of = one.opcode.partition(".")[0], one.operands
    if len(of) < 3 or not _ARITHMETIC.match(one.opcode):
        return
    if (
        name in ("sub", "div", "rem", "shl", "shr", "selp", "setp")
        and of[1] != of[2]
        and not _SYMMETRIC.match(one.opcode)
    ):
        yield one.spelled(operands=[of[0], of[2], of[1], *of[3:]])
    elif name in ("mad", "fma") and len(of) == 4 and of[1] != of[2]:
        yield one.spelled(operands=[of[0], of[1], of[1] if _REGISTER.fullmatch(of[1]) else of[2], of[3]])
    elif name in ("add", "mul", "min", "max", "and", "or", "xor") and _REGISTER.fullmatch(of[1]) and of[1] != of[2]:
        yield one.spelled(operands=[of[0], of[1], of[1]])


def _opcode(one: Instruction) -> Iterator[str]:
    name, _, rest = one.opcode.partition(".")
    others = {"add": "sub", "sub": "add", "min": "max", "max": "min", "and": "or", "or": "and"}
    if name in others:
        yield one.spelled(f"{others[name]}.{rest}")
    if name == "shl":
        yield one.spelled(f"shr.{rest.replace('b', 'u', 1)}")
    if ".lo." in one.opcode and name in ("mul", "mad"):
        yield one.spelled(one.opcode.replace(".lo.", ".hi."))


def _predicate(one: Instruction) -> Iterator[str]:
    if one.guard:
        yield one.spelled(guard=one.guard.replace("@!", "@") if "!" in one.guard else one.guard.replace("@", "@!"))


def _guard(one: Instruction) -> Iterator[str]:
    if one.guard:
        yield one.spelled(guard="")


def _rounding(one: Instruction) -> Iterator[str]:
    for this, other in ((".rn", ".rz"), (".rz", ".rn"), (".rni", ".rzi"), (".rzi", ".rni"), (".rna", ".rz")):
        if re.search(rf"{re.escape(this)}(?=\.|$)", one.opcode):
            yield one.spelled(re.sub(rf"{re.escape(this)}(?=\.|$)", other, one.opcode, count=1))
    if ".ftz" in one.opcode:
        yield one.spelled(one.opcode.replace(".ftz", ""))


def _store(one: Instruction) -> Iterator[str]:
    if _STORES.match(one.opcode) and not one.synchronises:
        yield ""


_KINDS: dict[str, Callable[[Instruction], Iterator[str]]] = {
    "drop": _drop,
    "weaken": _weaken,
    "widen": _widen,
    "parity": _parity,
    "count": _count,
    "bytes": _bytes,
    "matrix-descriptor": _matrix_descriptor,
    "instruction-descriptor": _instruction_descriptor,
    "tensor-memory": _tensor_memory,
    "setp": _setp,
    "immediate": _immediate,
    "address": _address,
    "operand": _operand,
    "opcode": _opcode,
    "predicate": _predicate,
    "guard": _guard,
    "rounding": _rounding,
    "store": _store,
}
MEANINGS: Mapping[str, str] = {
    "drop": "a synchronising instruction is missing; a wait is over at once",
    "weaken": "a synchronisation orders less: a narrower scope, `.relaxed`, one more pending group, an arrival "
    "that does not wait",
    "widen": "a synchronisation orders more than it needs to, which may only cost time",
    "parity": "an mbarrier is waited for in the other phase",
    "count": "an mbarrier or a named barrier expects one arrival (a warp) more or less, or has another number",
    "bytes": "a bulk copy or `expect_tx` has 16 bytes more or less",
    "matrix-descriptor": "an MMA reads shared memory from another address, with another stride or swizzle",
    "instruction-descriptor": "an MMA has another type, sign, transposition, M or N, or D is added to or not",
    "tensor-memory": "tensor memory is used at the next column or the next lanes, or another size of it is allocated",
    "setp": "a comparison has its bound on the other side: `lt` is `le`, `eq` is `ne`",
    "immediate": "a constant is one larger, or 1/64 if it is a float",
    "address": "a memory access or a tile is some elements further",
    "operand": "operands are swapped, or one stands for the other",
    "opcode": "an operation is another: `add` is `sub`, `min` is `max`, `.lo` is `.hi`",
    "predicate": "an instruction runs exactly where it must not",
    "guard": "an instruction runs everywhere",
    "rounding": "a rounding is another, or subnormal numbers are kept",
    "store": "a store or a copy is missing",
    "move": "a synchronisation stands behind the next memory access, or before the previous one",
    "launch": "the grid, the block or an argument of a launch is another",
    "tensor-map": "a size, a stride, the box, the swizzle or the fill of a tensor map is another",
}
"""Every class of mutants, and what a mutant of it has."""
KINDS = tuple(MEANINGS)
ID = "the beginning of the SHA-256 of the program's PTX / the class / the PTX line . the number of the change there"
"""The parts of a mutant's id, as `1a2b3c4d5e6f/drop/79.0`. A changed launch has its number and field in place of a
line."""


def _integer(text: str) -> int:
    return int(text.rstrip("U"), 0)


def _nudged(one: Instruction, index: int, steps: Sequence[int], dtype: str) -> Iterator[str]:
    """One operand, an integer or a register, increased by each of `steps`."""
    text = one.operands[index]
    for step in steps:
        if _INTEGER.fullmatch(text):
            if _integer(text) + step >= 0:
                yield one.with_operand(index, str(_integer(text) + step))
        elif _REGISTER.fullmatch(text):
            yield one.between(f"add.{dtype} {text}, {text}, {step}", f"sub.{dtype} {text}, {text}, {step}")


def _flipped(one: Instruction, index: int, masks: Sequence[int], dtype: str) -> Iterator[str]:
    """One operand, an integer or a register, with the bits of each mask flipped."""
    text = one.operands[index]
    for mask in masks:
        if _INTEGER.fullmatch(text):
            yield one.with_operand(index, str(_integer(text) ^ mask))
        elif _REGISTER.fullmatch(text):
            flip = f"xor.{dtype} {text}, {text}, {mask:#x}"
            yield one.between(flip, flip)


def _shifted(one: Instruction, index: int, steps: Sequence[int]) -> Iterator[str]:
    """One address operand further by each of `steps`."""
    found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:([+-])\s*(-?\d+|0x[0-9a-fA-F]+))?\s*\]", one.operands[index])
    if found is None:
        return
    offset = int(found[3], 0) * (-1 if found[2] == "-" else 1) if found[3] else 0
    for step in steps:
        yield one.with_operand(index, f"[{found[1]} + {offset + step}]")


def _moves(ptx: str, code: Sequence[Instruction], at: int) -> Iterator[tuple[Edit, ...]]:
    """Moves a synchronisation behind the next memory access of its block, or before the previous one."""
    one = code[at]
    if _is_wait(one):
        yield from _moved_wait(ptx, code, at)
        return
    for step in (1, -1):
        other = _neighbour(ptx, code, at, step)
        if other is not None:
            pair = (other.spelled(), one.spelled()) if step > 0 else (one.spelled(), other.spelled())
            yield Edit(one.begin, one.end, ""), Edit(other.begin, other.end, " ".join(pair))


def _moved_wait(ptx: str, code: Sequence[Instruction], at: int) -> Iterator[tuple[Edit, ...]]:
    """Moves `$again: wait; @!done bra $again;` behind the next access. A wait in another form does not move."""
    one = code[at]
    label = _LABEL.search(ptx, code[at - 1].end if at else 0, one.begin)
    if label is None or at + 1 == len(code):
        return
    back = code[at + 1]
    if not back.opcode.startswith("bra") or back.operands != (label[1],):
        return
    other = _neighbour(ptx, code, at + 1, 1)
    if other is not None:
        loop = f"{other.spelled()} {label[1]}: {one.spelled()} {back.spelled()}"
        yield Edit(label.start(), back.end, ""), Edit(other.begin, other.end, loop)


def _neighbour(ptx: str, code: Sequence[Instruction], at: int, step: int) -> Instruction | None:
    """The next access to memory in the direction `step`, if no label, branch or write to an operand is in between.

    An instruction with the same text does not count: two of a kind in a row have no order.
    """
    one = code[at]
    read = set(_REGISTER.findall(" ".join((one.guard, *one.operands))))
    here = at
    while 0 <= here + step < len(code):
        first, second = sorted((code[here], code[here + step]), key=lambda each: each.begin)
        gap = COMMENT.sub("", ptx[first.end : second.begin])
        here += step
        other = code[here]
        if re.search(r"[:{}]", gap) or other.opcode.startswith(("bra", "ret", "exit", "call", "brx", "trap")):
            return None
        if (
            other.operands
            and read & set(_REGISTER.findall(other.operands[0]))
            and not other.operands[0].startswith("[")
        ):
            return None
        if other.opcode.startswith("ld.param") or other.opcode == one.opcode:
            continue
        if _TOUCHES_MEMORY.match(other.opcode):
            return other
    return None


def _launch_mutants(program: Program, whole: str) -> Iterator[Mutant]:
    for number, launch in enumerate(program.launches):
        edits = [("launch", edit) for edit in _launch_edits(number, launch)]
        for index, arg in enumerate(launch.args):
            kind = "tensor-map" if isinstance(arg, TensorMapArg) else "launch"
            edits += [(kind, edit) for edit in _argument_edits(number, index, arg)]
        for kind, edit in edits:
            place = "" if edit.place is None else f"[{edit.place}]"
            part = launch if edit.arg is None else launch.args[edit.arg]
            where = f"{launch.entry}{'' if edit.arg is None else f'.args[{edit.arg}]'}.{edit.field}{place}"
            was = getattr(part, edit.field) if edit.place is None else getattr(part, edit.field)[edit.place]
            change = edit.change if isinstance(edit.change, str) else f"{edit.change:+g}"
            yield Mutant(f"{whole}/{kind}/{number}.{where}:{change}", kind, 0, f"{where} = {was}", change, launch=edit)


def _launch_edits(number: int, launch: Launch) -> Iterator[LaunchEdit]:
    for place in range(3):
        if launch.grid[place] > 1:
            yield LaunchEdit(number, None, "grid", place, -launch.cluster[place])
    yield LaunchEdit(number, None, "grid", 0, launch.cluster[0])
    if launch.block[0] > 32:
        yield LaunchEdit(number, None, "block", 0, -32)
    if launch.dynamic_smem:
        yield LaunchEdit(number, None, "dynamic_smem", None, -16)
    if launch.cluster[0] > 1:
        yield LaunchEdit(number, None, "cluster", 0, 1 - launch.cluster[0])


def _argument_edits(number: int, index: int, arg: BufferArg | ScalarArg | TensorMapArg) -> Iterator[LaunchEdit]:
    if isinstance(arg, BufferArg):
        yield LaunchEdit(number, index, "offset", None, 16)
    elif isinstance(arg, ScalarArg):
        step = 1 if isinstance(arg.value, int) else arg.value / 64
        yield LaunchEdit(number, index, "value", None, step)
        if arg.value > 0:
            yield LaunchEdit(number, index, "value", None, -step)
    else:
        for place, size in enumerate(arg.dims):
            yield LaunchEdit(number, index, "dims", place, 1)
            if size > 1:
                yield LaunchEdit(number, index, "dims", place, -1)
        for place in range(len(arg.strides)):
            yield LaunchEdit(number, index, "strides", place, 16)
        for place, size in enumerate(arg.box):
            if size > 1:
                yield LaunchEdit(number, index, "box", place, -(size // 2))
        yield LaunchEdit(number, index, "swizzle", None, "64B" if arg.swizzle == "128B" else "128B")
        if "f" in arg.dtype:
            yield LaunchEdit(number, index, "oob_fill", None, "zero" if arg.oob_fill == "nan" else "nan")
        yield LaunchEdit(number, index, "offset", None, 16)
