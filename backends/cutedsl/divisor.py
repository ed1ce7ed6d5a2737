# pyright: reportMissingImports=false
"""Division of non-negative numbers by multiplication.

A division by a run-time number takes some forty dependent instructions. Ten divisions before the first load take an
H200 more than a microsecond. If a divisor is known at launch, the host computes its reciprocal once, and the device
only multiplies and shifts.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

NUMBER_BITS = 31
"""Bits of a dividend, a non-negative Int32."""


@dsl_user_op
def high_word(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """The upper 32 bits of a * b."""
    values = [value.ir_value(loc=loc, ip=ip) for value in (a, b)]
    instructions = "{ .reg .b32 low; .reg .b64 product; mul.wide.u32 product, $1, $2; mov.b64 {low, $0}, product; }"
    return Uint32(llvm.inline_asm(T.i32(), values, instructions, "=r,r,r", loc=loc, ip=ip))


def parts(number: Int32, size: Int32) -> tuple[Int32, Int32]:
    """Quotient and remainder of non-negative numbers, with a quarter of the registers of a signed division."""
    quotient = Uint32(number) // Uint32(size)
    return Int32(quotient), number - Int32(quotient) * size


class Divisor(NamedTuple):
    """A positive number `value`, and its reciprocal as factor / 2^(NUMBER_BITS + bits).

    2^bits is at least `value` and less than twice `value`. `factor` is rounded up and stays below 2^32. Then
    number * factor / 2^(NUMBER_BITS + bits) exceeds number / value by less than 1 / value, so rounding it down gives
    the quotient.
    """

    value: Int32
    factor: Uint32
    bits: Uint32

    def parts(self, number: Int32, same: bool = True) -> tuple[Int32, Int32]:
        """Quotient and remainder of a non-negative number. `same`: whether all threads of a warp have the same number.

        If so, the wide product of `high_word` lets ptxas use uniform registers, which it does not do for an upper half
        alone. If not, the upper half alone takes one register of a thread, where a wide product takes two.
        """
        twice = Uint32(number) << Uint32(1)
        high = high_word(twice, self.factor) if same else Uint32((Uint64(twice) * Uint64(self.factor)) >> Uint64(32))
        quotient = Int32(high >> self.bits)
        return quotient, number - quotient * self.value


@cute.jit
def divisor_of(value: Int32) -> Divisor:
    """The Divisor of `value`, at least 1."""
    bits = Int32(0)
    while (Int64(1) << Int64(bits)) < Int64(value):
        bits = bits + 1
    factor = ((Int64(1) << Int64(bits + NUMBER_BITS)) + Int64(value) - 1) // Int64(value)
    return Divisor(value, Uint32(factor), Uint32(bits))
