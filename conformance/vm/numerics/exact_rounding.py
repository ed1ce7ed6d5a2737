"""Rounding by definition, in exact fractions: the reference for the numerics tests."""

from __future__ import annotations

from fractions import Fraction
from math import inf


def round_exactly(exact: Fraction, mode: str, *, precision: int, lowest: int, highest: int) -> float:
    """Rounds nonzero `exact` to `precision` bits, exponents `lowest`..`highest`, subnormals below; rn: ties to even."""
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    steps, rest = divmod(magnitude, unit)
    towards_infinity = {"rz": False, "rm": exact < 0, "rp": exact > 0}
    if mode == "rn":
        steps += rest > unit / 2 or (rest == unit / 2 and steps % 2 == 1)
    else:
        steps += rest > 0 and towards_infinity[mode]
    rounded = steps * unit
    sign = -1 if exact < 0 else 1
    if rounded < Fraction(2) ** (highest + 1):
        return sign * float(rounded)
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** highest
    return sign * (inf if mode == "rn" or towards_infinity[mode] else float(largest))


def round_f32(exact: Fraction, mode: str) -> float:
    return round_exactly(exact, mode, precision=24, lowest=-126, highest=127)


def round_f64(exact: Fraction, mode: str) -> float:
    return round_exactly(exact, mode, precision=53, lowest=-1022, highest=1023)


def round_f16(exact: Fraction, mode: str) -> float:
    return round_exactly(exact, mode, precision=11, lowest=-14, highest=15)


def round_bf16(exact: Fraction, mode: str) -> float:
    return round_exactly(exact, mode, precision=8, lowest=-126, highest=127)
