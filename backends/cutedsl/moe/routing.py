# pyright: reportMissingImports=false
"""Steps of the routing kernels."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """The sum of `value` over all lanes up to and including this one."""
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        value += cutlass.select_(lane >= (1 << step), below, Int32(0))
    return value
