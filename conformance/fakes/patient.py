"""Kernels whose mbarrier waits give up, so that a kernel that would hang on a device ends."""

from __future__ import annotations

import re

PATIENCE_NS = 150_000_000
"""Nanoseconds from the start of a kernel. Nearly all of ours take less under a tool."""


def patient(ptx: str, nanoseconds: int = PATIENCE_NS) -> str:
    """Returns `ptx` with mbarrier waits that give up `nanoseconds` after their kernel has begun: the thread counts that
    in the variable `gave_up` and exits."""
    parts = re.split(r"^(?=.*\.entry\b)", ptx, flags=re.MULTILINE)
    given = [parts[0], *(_patient_entry(one, nanoseconds) for one in parts[1:])]
    if "".join(given) == ptx:
        return ptx
    return "".join([given[0], ".visible .global .align 4 .u32 gave_up;\n", *given[1:]])


def _patient_entry(entry: str, nanoseconds: int) -> str:
    text, waits = re.subn(
        r"^.*mbarrier\.try_wait\S*\s+(%?\w+),.*;",
        r"\g<0>\n  mov.u64 %patience_now, %globaltimer;\n"
        r"  setp.gt.and.u64 %patience_spent, %patience_now, %patience_ends, !\1;\n"
        r"  @%patience_spent red.global.add.u32 [gave_up], 1;\n  @%patience_spent exit;",
        entry,
        flags=re.MULTILINE,
    )
    if not waits:
        return entry
    begin = (
        "{\n  .reg .b64 %patience_now, %patience_ends;\n  .reg .pred %patience_spent;\n"
        f"  mov.u64 %patience_ends, %globaltimer;\n  add.u64 %patience_ends, %patience_ends, {nanoseconds};\n"
    )
    return re.sub(r"^\s*\{\n", begin, text, count=1, flags=re.MULTILINE)
