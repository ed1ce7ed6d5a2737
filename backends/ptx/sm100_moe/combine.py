"""y[token] = sum over the choices, in ascending order, of its expert rows: deterministic, whatever ran when.

Rounding contract: row times weight, where the weight comes after the requantisation, and the sum from 0 in fp32, each
to nearest even; then bf16.
"""

from __future__ import annotations

from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Register, Special, at
from backends.ptx.sm100_moe.routing import NO_ROW

ENTRY = "moe_combine"
THREADS = 128
PER_THREAD = 8
COLUMNS = THREADS * PER_THREAD
BF16_BYTES = 2
HIGH_HALF = 0xFFFF0000


def combine_kernel(version: tuple[int, int]) -> Builder:
    """Grid: tokens, and groups of COLUMNS of hidden. `topk_weights` is 0 where the weight came before."""
    x = Builder(ENTRY, target="sm_100a", version=version, block=THREADS)
    x.header(["Combine: y = sum of the rows of a token, in the order of its choices."])
    rows, row_of_route, weights, y = (x.param(n, "u64") for n in ("rows", "row_of_route", "topk_weights", "y"))
    hidden, topk = x.param("hidden", "u32"), x.param("topk", "u32")
    x.section("which token, which columns")
    token = x.let("token", "mov.u32", Special("%ctaid.x", "u32"))
    group = x.let("group", "mov.u32", Special("%ctaid.y", "u32"))
    column = x.let("column", "mad.lo.u32", group, THREADS, x.let("thread", "mov.u32", TID_X))
    x.emit("mul.lo.u32", column, column, PER_THREAD)
    inside = x.let("inside", "setp.lt.u32", column, hidden)
    with x.when(inside, "columns"):
        total = x.regs("total", "f32", PER_THREAD)
        for value in total:
            x.emit("mov.f32", value, 0.0)
        columns_at = x.let("columns_at", "mad.wide.u32", column, BF16_BYTES, rows)
        _sum(x, token, (row_of_route, weights, columns_at), (hidden, topk), total)
        packed = x.regs("packed", "b32", PER_THREAD // 2)
        for index, register in enumerate(packed):
            x.emit("cvt.rn.bf16x2.f32", register, total[2 * index + 1], total[2 * index])
        target = x.let("element", "mul.wide.u32", token, hidden)
        x.emit("shl.b64", target, target, BF16_BYTES.bit_length() - 1)
        x.emit("add.s64", target, target, y)
        x.emit("st.global.v4.b32", at(x.let("y_at", "mad.wide.u32", column, BF16_BYTES, target)), packed)
    x.emit("ret")
    return x


def _sum(
    x: Builder,
    token: Register,
    tables: tuple[Register, Register, Register],
    extents: tuple[Register, Register],
    total: tuple[Register, ...],
) -> None:
    row_of_route, weights, columns_at = tables
    hidden, topk = extents
    route = x.let("route", "mul.lo.u32", token, topk)
    end = x.let("last_route", "add.u32", route, topk)
    weighted = x.let("weighted", "setp.ne.u64", weights, 0)
    weight = x.let("weight", "mov.f32", 1.0)
    finished, nowhere = x.reg("finished", "pred"), x.reg("nowhere", "pred")
    with x.loop("choices") as loop:
        x.emit("setp.ge.u32", finished, route, end)
        x.emit("bra", loop.done, guard=finished)
        row = x.let("row", "ld.global.u32", at(x.let("row_at", "mad.wide.u32", route, 4, row_of_route)))
        x.emit("setp.eq.u32", nowhere, row, NO_ROW)
        with x.unless(nowhere, "row"):
            weight_at = x.let("weight_at", "mad.wide.u32", route, 4, weights)
            x.emit("ld.global.f32", weight, at(weight_at), guard=weighted)
            element = x.let("row_element", "mul.wide.u32", row, hidden)
            x.emit("shl.b64", element, element, BF16_BYTES.bit_length() - 1)
            x.emit("add.s64", element, element, columns_at)
            pairs = x.regs("pair", "b32", PER_THREAD // 2)
            x.emit("ld.global.v4.b32", pairs, at(element))
            _accumulate(x, pairs, weight, total)
        x.emit("add.u32", route, route, 1)


def _accumulate(x: Builder, pairs: tuple[Register, ...], weight: Register, total: tuple[Register, ...]) -> None:
    """A bf16 is the upper half of an f32."""
    value = x.reg("value", "f32")
    for index, pair in enumerate(pairs):
        for opcode, operand, sum_so_far in (
            ("shl.b32", 16, total[2 * index]),
            ("and.b32", HIGH_HALF, total[2 * index + 1]),
        ):
            x.emit(opcode, value, pair, operand)
            x.emit("mul.rn.f32", value, value, weight)
            x.emit("add.rn.f32", sum_so_far, sum_so_far, value)
