"""Tensor maps that a kernel changes: tensormap.replace as an H200 does it, and maps copied to global memory."""

from __future__ import annotations

import re

import numpy as np
import pytest

from backends.vm.faults import Fault, UnknownInstructionError
from conformance import SILICON
from conformance.vm.kernel import Kernel

MAPS_OF_H200 = np.load(SILICON / "movement" / "tensor_map.npz")
NAMES = [str(name) for name in MAPS_OF_H200["repl_names"]]
FIELDS = {"interleave": "interleave_layout", "swizzle": "swizzle_mode", "fill": "fill_mode"}
WIDE = ("global_address", "global_stride")

CONSTANT = ("elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")
HEAD = """.shared .align 128 .b8 s[256];
.reg .b32 %v, %a; .reg .b64 %w, %g; .reg .pred %one;
setp.eq.s32 %one, %tx, 0; mov.u32 %a, s;
shl.b32 %v, %tx, 2; add.s32 %a, %a, %v; cvt.u64.u32 %w, %v; add.s64 %w, %w, %map;
ld.global.b32 %v, [%w]; st.shared.b32 [%a], %v; mov.u32 %a, s; bar.warp.sync -1;
"""
COPY = """bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%out], [%a], 128;
ret;"""


def run(body: str, before: bytes = bytes(128)) -> tuple[bytes, bytes]:
    """The map in global memory, and the copy of it that the kernel made in shared memory and then wrote to `out`."""
    found, _ = Kernel(
        HEAD + body + COPY, {"map": np.frombuffer(before, np.uint8), "out": np.zeros(128, np.uint8)}
    ).run()
    return found["map"].tobytes(), found["out"].tobytes()


def instruction(name: str, space: str) -> str:
    """The instruction for a golden name such as `box_dim[3]=0x155`."""
    parts = re.fullmatch(r"(\w+)(?:\[(\d)\])?=(\w+)", name)
    assert parts is not None, name
    field, ordinal, value = parts.groups()
    bits, register = (64, "%w") if field in WIDE else (32, "%v")
    place = {".global": "%map", ".shared::cta": "%a", "": "%g"}[space]
    given = value if FIELDS.get(field, field) in CONSTANT else register
    operands = ", ".join(filter(None, (f"[{place}]", ordinal, given)))
    return (
        f"cvt.u64.u32 %g, %a; cvta.shared.u64 %g, %g; mov.b{bits} {register}, {value};"
        f"@%one tensormap.replace.tile.{FIELDS.get(field, field)}{space}.b1024.b{bits} {operands};"
    )


@pytest.mark.parametrize("space", [".shared::cta", ".global", ""], ids=["shared", "global", "generic"])
def test_every_field_lands_where_an_h200_puts_it(space: str) -> None:
    blank = bytes(128)
    for name, expected in zip(NAMES, MAPS_OF_H200["repl"], strict=True):
        in_global, copied = run(instruction(name, space))
        found = in_global if space == ".global" else copied
        assert found == expected.tobytes(), f"{name} in {space or 'generic'} memory: other bits than an H200's"
        assert (copied if space == ".global" else in_global) == blank, f"{name}: the other map was changed too"


def test_other_fields_keep_their_bits() -> None:
    full = bytes([0xFF] * 128)
    for name, zeroed in zip(NAMES, MAPS_OF_H200["repl"], strict=True):
        _, found = run(instruction(name, ".shared::cta"), full)
        cleared = int.from_bytes(full, "little") ^ int.from_bytes(found, "little")
        assert cleared & int.from_bytes(zeroed.tobytes(), "little") == 0, f"{name}: bits of the new value are clear"
        assert cleared.bit_count() <= 64, f"{name}: more than one field has changed"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%a], 5, %v;", "ordinal 5"),
        ("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%a], 4, %w;", "ordinal 4"),
        ("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%a], 0, %v;", "3 operands"),
        ("tensormap.replace.tile.rank.shared::cta.b1024.b64 [%a], %w;", "no form"),
        ("tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%a], 5;", "must be 0..4"),
        ("tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%a], -1;", "must be 0..1"),
    ],
)
def test_forms_that_do_not_exist(body: str, says: str) -> None:
    with pytest.raises(UnknownInstructionError, match=says):
        run(body)


def test_a_map_at_an_odd_address() -> None:
    with pytest.raises(Fault, match="multiple of 64 bytes"):
        run("add.s32 %a, %a, 16; @%one tensormap.replace.tile.rank.shared::cta.b1024.b32 [%a], %v;")


def test_a_change_that_another_thread_does_not_wait_for() -> None:
    """Two warps without a barrier between the change and the copy."""
    body = HEAD.replace("bar.warp.sync -1;", "bar.sync 0;").replace(
        "shl.b32 %v, %tx, 2;", "and.b32 %v, %lane, 31; shl.b32 %v, %v, 2;"
    )
    change = "setp.eq.s32 %one, %tx, 32; @%one tensormap.replace.tile.rank.shared::cta.b1024.b32 [%a], %tx; "
    copy = "setp.lt.s32 %one, %tx, 32; @!%one bra OUT;" + COPY.replace("ret;", "OUT: ret;")
    buffers = {name: np.zeros(128, np.uint8) for name in ("map", "out")}
    with pytest.raises(Fault) as caught:
        Kernel(body + change + copy, buffers, block=(64, 1, 1)).run()
    assert caught.value.rule == "race", f"found {caught.value}"
