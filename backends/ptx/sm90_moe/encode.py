"""e2m1 codes by integer arithmetic: sm_90a has no cvt for them.

|v| * 2^-126 is a float whose bits 24 to 22 are the code of v: exponent 0, a subnormal, below 1. Rounding these bits to
nearest even is rounding v, but for a v within 2^-24 of the halves below 1.
"""

from __future__ import annotations

from backends.ptx.builder import Builder
from backends.ptx.operands import Register, Vector

E2M1_MAX = 6.0
TO_CODE = 2.0**-126
CODE_BIT = 22
SIGN_TO_CODE = 28
SIGN_OF_CODE = 0x8


def code_word(x: Builder, values: Vector) -> Register:
    """The e2m1 codes of eight f32 `values`, the first in the lowest bits: to nearest even, saturating."""
    word = x.let("code_word", "mov.b32", 0)
    for index, value in enumerate(values):
        code = x.let("code", "abs.f32", value)
        x.emit("min.f32", code, code, E2M1_MAX)
        x.emit("mul.rn.f32", code, code, TO_CODE)
        bits = x.let("code_bits", "mov.b32", code)
        odd = x.let("odd", "shr.u32", bits, CODE_BIT)
        x.emit("and.b32", odd, odd, 1)
        x.emit("add.u32", bits, bits, odd)
        x.emit("add.u32", bits, bits, (1 << CODE_BIT - 1) - 1)
        x.emit("shr.u32", bits, bits, CODE_BIT)
        sign = x.let("sign", "mov.b32", value)
        x.emit("shr.u32", sign, sign, SIGN_TO_CODE)
        x.emit("and.b32", sign, sign, SIGN_OF_CODE)
        x.emit("or.b32", bits, bits, sign)
        x.emit("shl.b32", bits, bits, 4 * index)
        x.emit("or.b32", word, word, bits)
    return word
