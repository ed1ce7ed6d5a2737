"""y[token] = the sum of its expert rows in ascending order of the choices: deterministic, whatever the schedule.

Rounding contract: multiply each row by its weight (only if the weight comes after the requantisation) and add from 0,
each rounded to nearest even in fp32; then round to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from backends.ptx.builder import CTAID_X, CTAID_Y, TID_X, Builder
from backends.ptx.moe.routing import NO_ROW
from backends.ptx.operands import Register, Vector, at
from backends.ptx.parameters import U32, Parameters, Pointer
from megamoe.contract import Target

ENTRY = "moe_combine"
THREADS = 128
PER_THREAD = 8
COLUMNS = THREADS * PER_THREAD
BF16_BYTES = 2
HIGH_HALF = 0xFFFF0000


@dataclass(frozen=True, slots=True)
class LayerCombineParams(Parameters):
    """`topk_weights` is null if the weight is applied before the requantisation."""

    rows: Pointer
    row_of_route: Pointer
    topk_weights: Pointer
    y: Pointer
    hidden: U32
    topk: U32


@cache
def combine_kernel(version: tuple[int, int], target: Target = "sm_100a") -> Builder:
    """Grid: (tokens, groups of COLUMNS of hidden)."""
    x = Builder(ENTRY, target=target, version=version, block=THREADS)
    x.header(["Combine: y = sum of the rows of a token, in the order of its choices."])
    params = LayerCombineParams.declare(x)
    x.section("which token, which columns")
    token = x.let("token", "mov.u32", CTAID_X)
    group = x.let("group", "mov.u32", CTAID_Y)
    column = x.let("column", "mad.lo.u32", group, THREADS, x.let("thread", "mov.u32", TID_X))
    x.emit("mul.lo.u32", column, column, PER_THREAD)
    inside = x.let("inside", "setp.lt.u32", column, params.hidden)
    with x.when(inside, "columns"):
        total = x.regs("total", "f32", PER_THREAD)
        for value in total:
            x.emit("mov.f32", value, 0.0)
        _sum(x, params, token, x.indexed_wide("columns_at", params.rows, column, BF16_BYTES), total)
        packed = x.packed_bf16("packed", total)
        element = x.let("element", "mul.wide.u32", token, params.hidden)
        x.emit("shl.b64", element, element, BF16_BYTES.bit_length() - 1)
        x.emit("add.s64", element, element, params.y)
        x.emit("st.global.v4.b32", at(x.indexed_wide("y_at", element, column, BF16_BYTES)), packed)
    x.emit("ret")
    return x


def _sum(x: Builder, params: LayerCombineParams, token: Register, columns_at: Register, total: Vector) -> None:
    """Adds this thread's columns of the token's expert rows to `total`. `columns_at`: their address in row 0."""
    route = x.let("route", "mul.lo.u32", token, params.topk)
    end = x.let("last_route", "add.u32", route, params.topk)
    weighted = x.let("weighted", "setp.ne.u64", params.topk_weights, 0)
    weight = x.let("weight", "mov.f32", 1.0)
    with x.while_below("choices", route, end, "finished", (route, 1)):
        nowhere = x.reg("nowhere", "pred")
        row = x.entry_of("row", params.row_of_route, route)
        x.emit("setp.eq.u32", nowhere, row, NO_ROW)
        with x.unless(nowhere, "row"):
            weight_at = x.indexed_wide("weight_at", params.topk_weights, route, 4)
            x.emit("ld.global.f32", weight, at(weight_at), guard=weighted)
            element = x.let("row_element", "mul.wide.u32", row, params.hidden)
            x.emit("shl.b64", element, element, BF16_BYTES.bit_length() - 1)
            x.emit("add.s64", element, element, columns_at)
            pairs = x.regs("pair", "b32", PER_THREAD // 2)
            x.emit("ld.global.v4.b32", pairs, at(element))
            _accumulate(x, pairs, weight, total)


def _accumulate(x: Builder, pairs: Vector, weight: Register, total: Vector) -> None:
    """Adds weight * value to `total`. A bf16 is the upper half of an f32."""
    value = x.reg("value", "f32")
    for index, pair in enumerate(pairs):
        for opcode, operand, sum_so_far in (
            ("shl.b32", 16, total[2 * index]),
            ("and.b32", HIGH_HALF, total[2 * index + 1]),
        ):
            x.emit(opcode, value, pair, operand)
            x.emit("mul.rn.f32", value, value, weight)
            x.emit("add.rn.f32", sum_so_far, sum_so_far, value)
