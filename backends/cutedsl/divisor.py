# pyright: reportMissingImports=false
"""Division of numbers that are not negative.

A division by a run-time number is some forty instructions, one after another. Ten of them, before the first load, take
an H200 more than a microsecond. What is known when a kernel is launched the host divides by once; on the device
a multiplication and a shift are left.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

NUMBER_BITS = 31
"""Bits of the numbers that are divided: Int32 that are not negative."""


@dsl_user_op
def high_word(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """The upper half of a b."""
    values = [value.ir_value(loc=loc, ip=ip) for value in (a, b)]
    instructions = "{ .reg .b32 low; .reg .b64 product; mul.wide.u32 product, $1, $2; mov.b64 {low, $0}, product; }"
    return Uint32(llvm.inline_asm(T.i32(), values, instructions, "=r,r,r", loc=loc, ip=ip))


def parts(number: Int32, size: Int32) -> tuple[Int32, Int32]:
    """Quotient and remainder of numbers that are not negative: a quarter of the registers of a signed division."""
    quotient = Uint32(number) // Uint32(size)
    return Int32(quotient), number - Int32(quotient) * size


class Divisor(NamedTuple):
    """A positive number, and what stands for its reciprocal: factor / 2^(NUMBER_BITS + bits).

    2^bits is at least the number and less than twice as much, and factor is the reciprocal rounded up; so it is below
    2^32. Then number * factor / 2^(NUMBER_BITS + bits) exceeds the quotient by less than 1 / value: rounded down it is
    the quotient.
    """

    value: Int32
    factor: Uint32
    bits: Uint32

    def parts(self, number: Int32, same: bool = True) -> tuple[Int32, Int32]:
        """Quotient and remainder of a number that is not negative. `same`: whether all threads of a warp have the same.

        Then ptxas takes uniform registers. The upper half of a product it computes in a register of the thread alone,
        which a wide product takes two of.
        """
        twice = Uint32(number) << Uint32(1)
        high = high_word(twice, self.factor) if same else Uint32((Uint64(twice) * Uint64(self.factor)) >> Uint64(32))
        quotient = Int32(high >> self.bits)
        return quotient, number - quotient * self.value


@cute.jit
def divisor_of(value: Int32) -> Divisor:
    """The divisor of a number from 1 on."""
    bits = Int32(0)
    while (Int64(1) << Int64(bits)) < Int64(value):
        bits = bits + 1
    factor = ((Int64(1) << Int64(bits + NUMBER_BITS)) + Int64(value) - 1) // Int64(value)
    return Divisor(value, Uint32(factor), Uint32(bits))
