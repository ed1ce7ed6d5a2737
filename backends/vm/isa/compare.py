"""Comparisons into predicates: setp on integers and bits (PTX ISA 9.7.6.2); float forms live with float arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.machine.warp import Warp

Compare = Callable[..., np.ndarray]

INTEGER_COMPARISONS: dict[str, Compare] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_COMBINE: dict[str, Compare] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def bind_setp(b: Binder, view: str, compare: Compare) -> Step:
    """`setp.cmp{.bool} p|q, a, c{, r}` for one way of comparing rows of `view`."""
    combine = _COMBINE.get(b.words["bool"])
    d, a, c, *rest = b.expect(4 if combine else 3)
    first, second = b.pair(d)
    rp = b.destination(first, "pred")
    rq = b.destination(second, "pred") if second is not None else None
    ra, rc = b.source(a, view), b.source(c, view)
    with_predicate = b.predicate(rest[0]) if rest else None
    if combine is None and rq is None:
        if view == "s32":
            return lambda warp: compare(warp.s32[ra], warp.s32[rc], warp.pred[rp], where=warp.where)
        if view == "u32":
            return lambda warp: compare(warp.u32[ra], warp.u32[rc], warp.pred[rp], where=warp.where)

    def step(warp: Warp) -> None:
        rows = getattr(warp, view)
        holds = compare(rows[ra], rows[rc])
        fails = ~holds
        if combine is not None and with_predicate is not None:
            other = warp.pred[with_predicate[0]] ^ with_predicate[1]
            holds, fails = combine(holds, other), combine(fails, other)
        np.copyto(warp.pred[rp], holds, where=warp.where)
        if rq is not None:
            np.copyto(warp.pred[rq], fails, where=warp.where)

    return step


@opcode("setp.<cmp>{.<bool>}.<type>", section="9.7.6.2", cmp=" ".join(INTEGER_COMPARISONS), bool="and or xor",
        type="u16 s16 u32 s32 u64 s64")  # fmt: skip
@opcode("setp.<cmp>{.<bool>}.<type>", section="9.7.6.2", cmp="eq ne", bool="and or xor", type="b16 b32 b64")
def setp(b: Binder) -> Step:
    """Compare two integers; with a boolean operator the result is combined with a third predicate."""
    kind = b.words["type"]
    if kind[0] == "s" and b.words["cmp"] in ("lo", "ls", "hi", "hs"):
        raise b.error(f".{b.words['cmp']} compares unsigned integers, not {kind}")
    return bind_setp(b, "u" + kind[1:] if kind[0] == "b" else kind, INTEGER_COMPARISONS[b.words["cmp"]])
