# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
"""A CuTeDSL kernel that divides numbers by a Divisor in both ways."""

import cutlass.cute as cute
from cutlass import Int32

from backends.cutedsl.divisor import Divisor, divisor_of


@cute.kernel
def divide_numbers(number: cute.Tensor, same: cute.Tensor, own: cute.Tensor, divisor: Divisor):
    """Writes quotient and remainder of `number`, int32, to `same` and `own`; one CTA of one thread for each number."""
    block, _, _ = cute.arch.block_idx()
    one = Int32(number[block])
    same[block, 0], same[block, 1] = divisor.parts(one)
    own[block, 0], own[block, 1] = divisor.parts(one, same=False)


@cute.jit
def divide(number: cute.Tensor, same: cute.Tensor, own: cute.Tensor, value: Int32, stream):
    """Queues divide_numbers by `value` on `stream`."""
    divide_numbers(number, same, own, divisor_of(value)).launch(
        grid=[number.shape[0], 1, 1], block=[1, 1, 1], stream=stream
    )
