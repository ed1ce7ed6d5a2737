"""The instruction table: every family registers the spellings it accepts, in the notation of the PTX ISA.

A form such as `add{.<rnd>}{.ftz}{.sat}.f32` is matched against the dotted parts of an instruction: literals are
required, `{...}` is optional, `<rnd>` stands for one of the words listed for it. An instruction that no form lists is
refused by name, with the closest forms. Nothing is guessed.

ptxas takes the words behind an instruction's name in any order, unlike the ISA's syntax, and compilers, libcu++ and
people use that (`red.add.f32.global`, `setp.u32.eq`). So does the table: `in_order` puts them into the order of the
form. Which words make up the name, and which modifiers keep their order among themselves, was asked of ptxas 13.5 for
every form with every two neighbours exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import msgspec

from backends.vm.bind.spelling import meant, told_of
from backends.vm.faults import UnknownInstructionError
from backends.vm.machine.code import Step

if TYPE_CHECKING:
    from backends.vm.bind.binder import Binder
    from backends.vm.ptx.ast import Instruction

Bind = Callable[["Binder"], Step]
Kind = Literal["step", "tail"]

_TOKEN = re.compile(r"(?P<open>\{)?\.?(?P<name><\w+>|[^.{}<>]+)(?P<close>\})?")


@dataclass(frozen=True, slots=True)
class _Slot:
    name: str
    choices: frozenset[str]
    optional: bool


@dataclass(frozen=True, slots=True)
class Form:
    """One accepted spelling of a family.

    `kind` "tail" marks an instruction that may wait or branch, see backends.vm.machine.code. `section` is the PTX ISA
    section, `counter` the instruction class for counting, `control` "branch", "table", "exit" or "".
    """

    spelling: str
    slots: tuple[_Slot, ...]
    bind: Bind
    kind: Kind
    section: str
    counter: str
    control: str

    def match(self, parts: tuple[str, ...]) -> Mapping[str, str] | None:
        """Words chosen for each slot ("" for an absent optional), or None if the spelling does not fit."""
        return _match(self.slots, parts, 0, 0, {})


def _match(
    slots: tuple[_Slot, ...], parts: tuple[str, ...], slot: int, part: int, found: dict[str, str]
) -> dict[str, str] | None:
    if slot == len(slots):
        return found if part == len(parts) else None
    here = slots[slot]
    if part < len(parts) and parts[part] in here.choices:
        rest = _match(slots, parts, slot + 1, part + 1, {**found, here.name: parts[part]})
        if rest is not None:
            return rest
    if here.optional:
        return _match(slots, parts, slot + 1, part, {**found, here.name: ""})
    return None


def _compile(spelling: str, words: Mapping[str, str]) -> tuple[_Slot, ...]:
    slots: list[_Slot] = []
    for token in _TOKEN.finditer(spelling):
        name = token["name"]
        if name.startswith("<"):
            name = name[1:-1]
            if name not in words:
                raise ValueError(f"form {spelling!r} names the slot <{name}> but lists no words for it")
            choices = frozenset(words[name].split())
        else:
            choices = frozenset([name])
        slots.append(_Slot(name, choices, token["open"] is not None))
    return tuple(slots)


_NAMES: Mapping[str, frozenset[str]] = {
    first: frozenset(words.split())
    for first, words in {
        "bar": "warp cta sync arrive red",
        "barrier": "cluster cta arrive red wait",
        "clusterlaunchcontrol": "try_cancel async query_cancel",
        "cp": "async bulk reduce prefetch tensor mbarrier arrive commit_group wait_group wait_all",
        "createpolicy": "cvt fractional range",
        "cvt": "pack",
        "cvta": "to",
        "div": "full",
        **dict.fromkeys(("mul", "mul24", "mad", "mad24", "madc", "dp2a"), "lo hi wide"),
        "fence": "proxy",
        "mbarrier": "init inval arrive arrive_drop expect_tx complete_tx pending_count test_wait try_wait parity",
        "multimem": "ld_reduce red st cp reduce async bulk",
        "red": "async",
        "setmaxnreg": "inc dec",
        "shf": "l r",
        "st": "async bulk",
        "tcgen05": "alloc dealloc relinquish_alloc_permit ld st red wait::ld wait::st cp shift mma ws commit",
        "tensormap": "replace cp_fenceproxy",
        "wgmma": "fence commit_group wait_group mma_async",
        "wmma": "load store mma a b c d",
    }.items()
}
"""Words that belong to the name of an instruction, by its first word. They stay in front, in order."""
_TYPE = re.compile(r"(?!b1024)(pred|[busf]\d+(x\d+)?(_p\d+)?|bf16(x2)?|tf32|u?e\d+m\d(x\d)?|s2f6x2)")
_IN_ORDER = (
    ("a type", _TYPE),
    ("a state space", re.compile(r"(global|local|const|shared|param)(::(cta|cluster|entry|func))?")),
    ("a layout", re.compile(r"row|col")),
    ("an eviction priority", re.compile(r"L2::evict_\w+")),
    ("an operation on bits", re.compile(r"and|or|xor|popc")),
)
"""Modifiers of one kind keep their order among themselves: the first type is the destination's, and so on."""


def is_type(part: str) -> bool:
    """Whether a word of an opcode names a type, packed ones included."""
    return _TYPE.fullmatch(part) is not None


@cache
def _kind_of(first: str, part: str) -> str:
    """The kind of a word whose order counts, "" for one that may stand anywhere behind the name."""
    if part in _NAMES.get(first, ()):
        return "the name"
    return next((kind for kind, pattern in _IN_ORDER if pattern.fullmatch(part)), "")


def _ordered_for(form: Form, parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """`parts` in the order of a form, or None if it has others. Behind the name, words of one kind keep their order."""
    first, rest = parts[0], parts[1:]
    kinds = [_kind_of(first, part) for part in rest]
    named = kinds.count("the name")
    if kinds[:named].count("the name") != named or first not in form.slots[0].choices:
        return None

    def search(slot: int, left: tuple[int, ...], found: tuple[str, ...]) -> tuple[str, ...] | None:
        if slot == len(form.slots):
            return None if left else found
        here = form.slots[slot]
        seen = set[str]()
        for index in left:
            kind, part = kinds[index], rest[index]
            waits = kind in seen
            if kind:
                seen.add(kind)
            if part in here.choices and not waits:
                others = tuple(one for one in left if one != index)
                if (done := search(slot + 1, others, (*found, part))) is not None:
                    return done
        return search(slot + 1, left, found) if here.optional else None

    return search(1, tuple(range(len(rest))), (first,))


_DOWN = "no text says whether row i becomes row i + 1 or row i - 1, and what the last row holds then "
REFUSED: Mapping[str, str] = {
    r"tcgen05\.cp\.\S*4x256b": "no text says to which lane of each quarter of tensor memory a row goes "
    "(PTX ISA 9.7.16.9.2)",
    r"cp\.async\.bulk\S*im2col::w": "only figures show in which order its pixels and halo lie (PTX ISA 5.5.5)",
    r"tcgen05\.shift\.": _DOWN + "(PTX ISA 9.7.16.9.3)",
    r"tcgen05\.mma\.\S*ashift": _DOWN + "(PTX ISA 9.7.16.10.9.1)",
    r"cvt\.rs\.\S*e2m1x4": "no text says which of its random bits round which operand (PTX ISA 9.7.9.21)",
    r"fma\.\S*oob": "no text says whether the addend counts among its operands (PTX ISA 9.7.4.4)",
    r"clmad": "PTX ISA 9.1, the latest text at hand, does not have it",
    r"istypep": "there are no textures, samplers and surfaces here (PTX ISA 9.7.10.6)",
    r"(alloca|stacksave|stackrestore)\.": "this machine puts functions in the place of their calls and has no stack "
    "(PTX ISA 9.7.17)",
}
"""Spellings that ptxas accepts and this machine refuses: a pattern for their beginning, and the reason."""

_NO_TEXTURES = "textures and surfaces are not supported (PTX ISA 9.7.10, 9.7.11)"
ABSENT: Mapping[str, str] = dict.fromkeys(("tex", "tld4", "txq", "suld", "sust", "sured", "suq"), _NO_TEXTURES)
"""First words of instructions that this machine lacks altogether, and the reason."""

_TABLE: dict[str, list[Form]] = {}
_IN_RING: dict[Bind, Bind] = {}
_FLOATS = re.compile(r"(bf|tf|f)(16|32|64)(x2)?|e\dm\d(x\d)?|ue8m0x2|s2f6x2")
_MOVES = ("ld", "ldu", "st", "mov", "selp", "cp", "wgmma", "tcgen05", "ldmatrix", "stmatrix", "prefetch")
"""First words of instructions that move floats, or multiply matrices, which the accumulation policy covers."""


def in_ring(*families: Bind) -> Callable[[Bind], Bind]:
    """Register the function that binds the instructions of some families where floats are elements of a ring."""

    def register(bind: Bind) -> Bind:
        _IN_RING.update(dict.fromkeys(families, bind))
        return bind

    return register


def bind_in_ring(form: Form, parts: tuple[str, ...]) -> Bind | None:
    """The function that binds an instruction in the ring. None if it computes with floats and has no counterpart."""
    if not any(map(_FLOATS.fullmatch, parts)):
        return form.bind
    moves = parts[0] in _MOVES and "reduce" not in parts
    return _IN_RING.get(form.bind, form.bind if moves else None)


def opcode(
    *spellings: str,
    section: str,
    kind: Kind = "step",
    counter: str = "alu",
    control: str = "",
    vocabulary: Mapping[str, str] | None = None,
    **words: str,
) -> Callable[[Bind], Bind]:
    """Register a family under every spelling given; see Form for the rest.

    Keyword arguments list the words of `<slots>`, space-separated. `vocabulary` does the same for words that families
    share.
    """

    listed = {**(vocabulary or {}), **words}

    def register(bind: Bind) -> Bind:
        for spelling in spellings:
            form = Form(spelling, _compile(spelling, listed), bind, kind, section, counter, control)
            first = next(iter(form.slots[0].choices))
            _TABLE.setdefault(first, []).append(form)
        return bind

    return register


def in_order(instruction: Instruction) -> Instruction:
    """The instruction with its modifiers in the order of its form. Itself if they are, or if no form has them."""
    parts = _in_order(instruction.parts)
    return instruction if parts == instruction.parts else msgspec.structs.replace(instruction, parts=parts)


@cache
def _in_order(parts: tuple[str, ...]) -> tuple[str, ...]:
    family = _TABLE.get(parts[0], [])
    if any(form.match(parts) is not None for form in family):
        return parts
    return next((ordered for form in family if (ordered := _ordered_for(form, parts)) is not None), parts)


@cache
def _lookup(parts: tuple[str, ...]) -> tuple[Form, Mapping[str, str]] | None:
    ordered = _in_order(parts)
    matches = ((form, form.match(ordered)) for form in _TABLE.get(parts[0], []))
    return next(((form, words) for form, words in matches if words is not None), None)


def find(instruction: Instruction) -> tuple[Form, Mapping[str, str]]:
    """The form of an instruction and the words of its slots. Raises UnknownInstructionError if no form fits."""
    found = _lookup(instruction.parts)
    if found is not None:
        return found
    reason = next((why for pattern, why in REFUSED.items() if re.match(pattern, ".".join(instruction.parts))), None)
    if reason is not None:
        raise UnknownInstructionError(
            f"PTX line {instruction.line}: `{instruction.text}`: this machine refuses `{instruction.opcode}`: {reason}"
        )
    family = _TABLE.get(instruction.parts[0])
    if not family and (absent := ABSENT.get(instruction.parts[0])):
        raise UnknownInstructionError(
            f"PTX line {instruction.line}: `{instruction.text}`: this machine has no `{instruction.parts[0]}`: {absent}"
        )
    if not family:
        raise UnknownInstructionError(
            f"PTX line {instruction.line}: `{instruction.text}`: this machine does not know the opcode "
            f"`{instruction.parts[0]}`{meant(instruction.parts[0], _TABLE)}"
        )
    told = told_of(instruction.parts, family, lambda parts: _lookup(parts) is not None)
    raise UnknownInstructionError(
        f"PTX line {instruction.line}: `{instruction.text}`: no form of `{instruction.opcode}` is known; {told}"
    )


def all_forms() -> list[Form]:
    """Every registered form, sorted by spelling."""
    return sorted((form for forms in _TABLE.values() for form in forms), key=lambda form: form.spelling)
