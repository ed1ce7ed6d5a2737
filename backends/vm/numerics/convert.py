"""Every `cvt` of PTX ISA 9.7.9.21 that the machine knows, by destination and source type.

    conversion("bf16x2", "f32", Modifiers(rounding="rn")).apply(a, b)

Operands and results are bit patterns in unsigned arrays; a result has exactly the destination type's width and is to
be extended into a wider register by its owner (signed integers by sign, all else by zeros).
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.vm.numerics.cvt_packed import packed_rules
from backends.vm.numerics.cvt_rules import WIDTH, Function, Modifiers, Rule
from backends.vm.numerics.cvt_scalar import scalar_rules

__all__ = ["RULES", "WIDTH", "Conversion", "Modifiers", "UnknownConversionError", "conversion"]

RULES: dict[tuple[str, str], Rule] = {**scalar_rules(), **packed_rules()}


class UnknownConversionError(LookupError):
    """No such `cvt`; the message says what is wrong with it and what there is."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion ready to run: `apply` takes `operands` arrays of source bits and returns destination bits."""

    dst: str
    src: str
    operands: int
    apply: Function


def conversion(dst: str, src: str, modifiers: Modifiers) -> Conversion:
    """The conversion that `cvt.MODIFIERS.dst.src` names; UnknownConversionError if there is none."""
    rule = RULES.get((dst, src))
    spelling = ".".join(word for word in ("cvt", modifiers.rounding, *sorted(modifiers.flags), dst, src) if word)
    if rule is None:
        sources = ", ".join(sorted(s for d, s in RULES if d == dst))
        known = f"{dst} is converted from {sources}" if sources else f"{dst} is no destination type of cvt"
        raise UnknownConversionError(f"{spelling}: no conversion from {src} to {dst} (PTX ISA 9.7.9.21); {known}.")
    if modifiers.rounding not in rule.roundings:
        known = ", ".join(f".{word}" if word else "none" for word in sorted(rule.roundings))
        seen = f".{modifiers.rounding}" if modifiers.rounding else "no rounding modifier"
        raise UnknownConversionError(f"{spelling}: {seen} where {src} to {dst} takes {known} (PTX ISA 9.7.9.21).")
    if extra := modifiers.flags - rule.flags:
        known = ", ".join(f".{word}" for word in sorted(rule.flags)) or "no modifier besides the rounding"
        seen = ", ".join(f".{word}" for word in sorted(extra))
        raise UnknownConversionError(f"{spelling}: {seen} where {src} to {dst} takes {known} (PTX ISA 9.7.9.21).")
    if missing := rule.required - modifiers.flags:
        seen = ", ".join(f".{word}" for word in sorted(missing))
        raise UnknownConversionError(f"{spelling}: {seen} is mandatory from {src} to {dst} (PTX ISA 9.7.9.21).")
    return Conversion(dst, src, rule.operands + (modifiers.rounding == "rs"), rule.build(modifiers))
