"""The instruction table: every family registers the spellings it accepts, in the notation of the PTX ISA.

A form such as `add{.<rnd>}{.ftz}{.sat}.f32` is matched against the dotted parts of an instruction: literals are
required, `{...}` is optional, `<rnd>` stands for one of the words listed for it. An instruction that no form lists is
refused by name, with the closest forms. Nothing is guessed. Where ptxas accepts the modifiers of a family in any order
and compilers use that, so does the table (ANY_ORDER).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Literal

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


ANY_ORDER = (
    ("atom",),
    ("red",),
    ("ld",),
    ("st",),
    ("ldmatrix",),
    ("stmatrix",),
    ("tcgen05", "cp"),
    ("cp", "async", "bulk"),
    ("cp", "reduce", "async", "bulk"),
)
"""Families whose modifiers ptxas accepts in any order (tested with 13.5), as long as types keep their order and state
spaces theirs: libcu++ and Triton write them in orders of their own. The words of each tuple stay in front."""
_ORDERED = re.compile(r"(pred|[busf]\d+(x\d+)?|bf16(x2)?|global|local|const|shared|param)(::|$)")


def _match_in_any_order(form: Form, parts: tuple[str, ...]) -> Mapping[str, str] | None:
    """As Form.match, with the parts after the family's name in any order. Types and spaces must keep theirs."""
    family = next((one for one in ANY_ORDER if parts[: len(one)] == one), None)
    if family is None:
        return None

    def search(slot: int, left: list[str], found: dict[str, str]) -> dict[str, str] | None:
        if slot == len(form.slots):
            return None if left else found
        here = form.slots[slot]
        first = {_is_space(part): part for part in reversed(left) if _ORDERED.match(part)}
        for index, part in enumerate(left[:1] if slot < len(family) else left):
            if part not in here.choices or (_ORDERED.match(part) and part != first[_is_space(part)]):
                continue
            rest = [*left[:index], *left[index + 1 :]]
            if (done := search(slot + 1, rest, {**found, here.name: part})) is not None:
                return done
        return search(slot + 1, left, {**found, here.name: ""}) if here.optional else None

    return search(0, list(parts), {})


def _is_space(part: str) -> bool:
    return part.startswith(("global", "local", "const", "shared", "param"))


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


@cache
def _lookup(parts: tuple[str, ...]) -> tuple[Form, Mapping[str, str]] | None:
    for form in _TABLE.get(parts[0], []):
        words = form.match(parts)
        if words is not None:
            return form, words
    for form in _TABLE.get(parts[0], []):
        words = _match_in_any_order(form, parts)
        if words is not None:
            return form, words
    return None


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
        like = get_close_matches(instruction.parts[0], _TABLE, 1)
        raise UnknownInstructionError(
            f"PTX line {instruction.line}: `{instruction.text}`: this machine does not know the opcode "
            f"`{instruction.parts[0]}`{f'; did you mean `{like[0]}`?' if like else ''}"
        )
    common = sorted(family, key=lambda form: -_shared(form, instruction.parts))[:4]
    listed = "; ".join(f"`{form.spelling}` (PTX ISA {form.section})" for form in common)
    raise UnknownInstructionError(
        f"PTX line {instruction.line}: `{instruction.text}`: no form of `{instruction.opcode}` is known; "
        f"the nearest are {listed}"
    )


def _shared(form: Form, parts: tuple[str, ...]) -> int:
    return sum(any(part in slot.choices for slot in form.slots) for part in parts)


def all_forms() -> list[Form]:
    """Every registered form, sorted by spelling."""
    return sorted((form for forms in _TABLE.values() for form in forms), key=lambda form: form.spelling)
