"""Comparisons into predicates and values: setp on integers, bits and floats, set, slct (PTX ISA 9.7.6 and 9.7.7)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import PACKED, Binder, write
from backends.vm.bind.forms import Step, opcode
from backends.vm.machine.warp import Warp
from backends.vm.numerics import f32, half
from backends.vm.numerics.formats import COMPARISONS
from backends.vm.ptx.ast import Pair

Truth = npt.NDArray[np.bool_]
Compare = Callable[..., Truth]

INTEGER_COMPARISONS: dict[str, Compare] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_COMBINE: dict[str, np.ufunc] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


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
    """Compare two integers. A boolean operator combines the result with a third predicate."""
    kind = b.words["type"]
    if kind[0] == "s" and b.words["cmp"] in ("lo", "ls", "hi", "hs"):
        raise b.error(f".{b.words['cmp']} compares unsigned integers, not {kind}")
    return bind_setp(b, "u" + kind[1:] if kind[0] == "b" else kind, INTEGER_COMPARISONS[b.words["cmp"]])


# Comparisons of floats, and set and slct of all types (PTX ISA 9.7.6 and 9.7.7).


_FLOAT_COMPARISONS = " ".join(COMPARISONS)
_INTEGERS = "u16 s16 u32 s32 u64 s64"
_HALF_VIEW = {"f16": "u16", "bf16": "u16", "f16x2": "u16x2", "bf16x2": "u16x2"}


def comparison(type_name: str, op: str, *, ftz: bool = False) -> tuple[str, Compare]:
    """The view for operands of `type_name`, and the function that compares two such rows by `op`.

    Packed halves compare to [32, 2]. KeyError for an operator that the type lacks.
    """
    if type_name in _HALF_VIEW:
        fmt = half.FORMATS[type_name.removesuffix("x2")]
        return _HALF_VIEW[type_name], lambda a, c: half.compare(op, a, c, fmt, ftz=ftz)
    if type_name in ("f32", "f64"):
        compare = COMPARISONS[op]
        if ftz:
            return type_name, lambda a, c: compare(f32.flush(a), f32.flush(c))
        return type_name, compare
    if type_name[0] == "s" and op in ("lo", "ls", "hi", "hs"):
        raise KeyError(op)
    return "u" + type_name[1:] if type_name[0] == "b" else type_name, INTEGER_COMPARISONS[op]


@opcode("setp.<cmp>{.<bool>}{.ftz}.f32", "setp.<cmp>{.<bool>}.f64", section="9.7.6.2", cmp=_FLOAT_COMPARISONS,
        bool="and or xor")  # fmt: skip
@opcode("setp.<cmp>{.<bool>}{.ftz}.f16", "setp.<cmp>{.<bool>}.bf16", section="9.7.7.2", cmp=_FLOAT_COMPARISONS,
        bool="and or xor")  # fmt: skip
def setp_float(b: Binder) -> Step:
    """Compare two floats. With a NaN operand ordered comparisons are false and unordered ones (`u`) are true."""
    kind = b.instruction.parts[-1]
    d = b.expect(4 if b.words["bool"] else 3)[0]
    if kind in _HALF_VIEW and isinstance(d, Pair):
        raise b.error(f"setp on {kind} writes one predicate, not two")
    view, compare = comparison(kind, b.words["cmp"], ftz=bool(b.words.get("ftz")))
    if view == "f32" and isinstance(compare, np.ufunc) and not b.words["bool"] and not isinstance(d, Pair):
        return _straight(b, compare)
    return bind_setp(b, view, compare)


def _straight(b: Binder, compare: np.ufunc) -> Step:
    """The fast path: one f32 comparison straight into one predicate."""
    p, a, c = b.expect(3)
    rp, ra, rc = b.destination(p, "pred"), b.source(a, "f32"), b.source(c, "f32")
    return lambda warp: compare(warp.f32[ra], warp.f32[rc], warp.pred[rp], where=warp.where)


@opcode("setp.<cmp>{.<bool>}{.ftz}.f16x2", "setp.<cmp>{.<bool>}.bf16x2", section="9.7.7.2", cmp=_FLOAT_COMPARISONS,
        bool="and or xor")  # fmt: skip
def setp_pair(b: Binder) -> Step:
    """Compare both halves: the lower one sets the first predicate, the upper one the second."""
    view, compare = comparison(b.instruction.parts[-1], b.words["cmp"], ftz=bool(b.words.get("ftz")))
    combine = _COMBINE.get(b.words["bool"])
    d, a, c, *rest = b.expect(4 if combine else 3)
    lower, upper = b.pair(d)
    if upper is None:
        raise b.error("setp on packed halves writes two predicates, `p|q`")
    rows = [b.destination(lower, "pred"), b.destination(upper, "pred")]
    ra, rc = b.source(a, view), b.source(c, view)
    with_predicate = b.predicate(rest[0]) if rest else None

    def step(warp: Warp) -> None:
        holds = compare(warp.u16x2[ra], warp.u16x2[rc])
        if combine is not None and with_predicate is not None:
            holds = combine(holds, (warp.pred[with_predicate[0]] ^ with_predicate[1])[:, None])
        for column, row in enumerate(rows):
            np.copyto(warp.pred[row], holds[:, column], where=warp.where)

    return step


_TRUE = {"f32": 0x3F80_0000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}


@opcode("set.<cmp>{.<bool>}{.ftz}.<dtype>.<stype>", section="9.7.6.1", cmp=_FLOAT_COMPARISONS, bool="and or xor",
        dtype="u32 s32 f32", stype="f32 f64")  # fmt: skip
@opcode("set.<cmp>{.<bool>}.<dtype>.<stype>", section="9.7.6.1", cmp=" ".join(INTEGER_COMPARISONS), bool="and or xor",
        dtype="u32 s32 f32 f16 bf16", stype=_INTEGERS)  # fmt: skip
@opcode("set.<cmp>{.<bool>}.<dtype>.<stype>", section="9.7.6.1", cmp="eq ne", bool="and or xor",
        dtype="u32 s32 f32 f16 bf16", stype="b16 b32 b64")  # fmt: skip
@opcode("set.<cmp>{.<bool>}{.ftz}.<dtype>.<stype>", section="9.7.7.1", cmp=_FLOAT_COMPARISONS, bool="and or xor",
        dtype="f16 bf16", stype="f32 f64 f16")  # fmt: skip
@opcode("set.<cmp>{.<bool>}{.ftz}.<dtype>.<stype>", section="9.7.7.1", cmp=_FLOAT_COMPARISONS, bool="and or xor",
        dtype="u16 s16 u32 s32", stype="f16 bf16")  # fmt: skip
@opcode("set.<cmp>{.<bool>}{.ftz}.<dtype>.f16x2", section="9.7.7.1", cmp=_FLOAT_COMPARISONS, bool="and or xor",
        dtype="f16x2 u32 s32")  # fmt: skip
@opcode("set.<cmp>{.<bool>}.<dtype>.bf16x2", section="9.7.7.1", cmp=_FLOAT_COMPARISONS, bool="and or xor",
        dtype="bf16x2 u32 s32")  # fmt: skip
def set_value(b: Binder) -> Step:
    """Compare and write a value: all ones or 1.0 if true, zero if false."""
    dtype, stype = b.instruction.parts[-2], b.instruction.parts[-1]
    ftz = bool(b.words.get("ftz"))
    if ftz and stype not in ("f32", "f16", "f16x2"):
        raise b.error(f".ftz does not apply to a comparison of {stype}")
    try:
        view, compare = comparison(stype, b.words["cmp"], ftz=ftz)
    except KeyError:
        raise b.error(f".{b.words['cmp']} compares unsigned integers, not {stype}") from None
    combine = _COMBINE.get(b.words["bool"])
    d, a, c, *rest = b.expect(4 if combine else 3)
    out = "u16x2" if view == "u16x2" else "u16" if dtype in ("f16", "bf16", "u16", "s16") else "u32"
    rd, ra, rc = b.destination(d, out), b.source(a, view), b.source(c, view)
    with_predicate = b.predicate(rest[0]) if rest else None
    dtype_of = np.uint32 if out == "u32" else np.uint16
    true = dtype_of(_TRUE.get(dtype, np.iinfo(dtype_of).max))

    def step(warp: Warp) -> None:
        rows = getattr(warp, view)
        holds = compare(rows[ra], rows[rc])
        if combine is not None and with_predicate is not None:
            other = warp.pred[with_predicate[0]] ^ with_predicate[1]
            holds = combine(holds, other[:, None] if out in PACKED else other)
        write(warp, getattr(warp, out)[rd], holds * true)

    return step


_WIDTHS = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64"


@opcode("slct.<dtype>.s32", "slct{.ftz}.<dtype>.f32", section="9.7.6.4", dtype=_WIDTHS)
def slct(b: Binder) -> Step:
    """d = c >= 0 ? a : b. NaN selects b. -0 selects a, and so does a flushed subnormal."""
    bits, selector = b.words["dtype"][1:], b.instruction.parts[-1]
    view = b.words["dtype"] if b.words["dtype"][0] == "f" else f"u{bits}"
    d, a, c, chooser = b.expect(4)
    rd, ra, rc, rs = b.destination(d, view), b.source(a, view), b.source(c, view), b.source(chooser, selector)
    flush = f32.flush if b.words.get("ftz") else None

    def step(warp: Warp) -> None:
        rows, chosen_by = getattr(warp, view), getattr(warp, selector)[rs]
        if flush is not None:
            chosen_by = flush(chosen_by)
        np.copyto(rows[rd], np.where(chosen_by >= 0, rows[ra], rows[rc]), where=warp.where)

    return step
