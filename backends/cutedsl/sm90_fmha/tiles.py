# pyright: reportMissingImports=false
"""Work items of the persistent attention kernel, and the rows that a thread has of one."""

from typing import NamedTuple

from cutlass import Int32

from backends.cutedsl.attention_tiles import AttentionItem, Problem, attention_item
from backends.cutedsl.sm90_fmha.plan import GROUP_M, Sm90FmhaPlan


class Consumer(NamedTuple):
    """A thread of the consumers: its warpgroup, 0 or 1, and its number there, 0 to 127."""

    group: Int32
    thread: Int32


def work_item(plan: Sm90FmhaPlan, problem: Problem, index: Int32) -> AttentionItem:
    """Work item `index`. Split i begins at key tile i * key_tiles // splits."""

    def part_begin(split: Int32) -> Int32:
        return split * problem.key_tiles // problem.splits

    return attention_item(problem, index, (plan.tile_m, plan.tile_n), part_begin)


def first_row(plan: Sm90FmhaPlan, item: AttentionItem, consumer: Consumer) -> Int32:
    """The row of register row 0 of this thread, as softmax.py counts them."""
    row = item.row_tile * plan.tile_m + (consumer.thread // 32) * 16 + (consumer.thread % 32) // 4
    return row + consumer.group * GROUP_M if plan.share == "rows" else row
