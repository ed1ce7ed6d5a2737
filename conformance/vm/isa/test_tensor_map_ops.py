"""tensormap.replace against an H200's bits, and the way of a changed map from shared memory to the TMA unit's."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest

from backends.vm.faults import Fault, UnknownInstructionError
from backends.vm.load import load
from backends.vm.machine.machine import Machine
from conformance import SILICON

GOLDEN = np.load(SILICON / "movement" / "tensor_map.npz")
NAMES = [str(name) for name in GOLDEN["repl_names"]]
FIELDS = {"interleave": "interleave_layout", "swizzle": "swizzle_mode", "fill": "fill_mode"}
WIDE = ("global_address", "global_stride")

HEAD = """.version 9.2
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 map, .param .u64 out)
{
.shared .align 128 .b8 s[256];
.reg .b32 %t, %v, %a; .reg .b64 %m, %o, %w, %g; .reg .pred %one;
mov.u32 %t, %tid.x; setp.eq.s32 %one, %t, 0; mov.u32 %a, s;
ld.param.u64 %m, [map]; ld.param.u64 %o, [out];
shl.b32 %v, %t, 2; add.s32 %a, %a, %v; cvt.u64.u32 %w, %v; add.s64 %w, %w, %m;
ld.global.b32 %v, [%w]; st.shared.b32 [%a], %v; mov.u32 %a, s; bar.warp.sync -1;
"""
COPY = """bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%o], [%a], 128;
ret; }"""


def run(body: str, before: bytes = bytes(128)) -> tuple[bytes, bytes]:
    """The map where it was (global memory) and the one that the kernel copied from its shared memory."""
    given, out = np.frombuffer(before, np.uint8).copy(), np.zeros(128, np.uint8)
    machine = Machine()
    params = [struct.pack("<Q", machine.memory.add(name, array).base) for name, array in (("map", given), ("out", out))]
    machine.launch(load(HEAD + body + COPY).entry("k"), (1, 1, 1), (32, 1, 1), params)
    return given.tobytes(), out.tobytes()


def instruction(name: str, space: str) -> str:
    """The instruction behind a golden name such as `box_dim[3]=0x155`."""
    parts = re.fullmatch(r"(\w+)(?:\[(\d)\])?=(\w+)", name)
    assert parts is not None, name
    field, ordinal, value = parts.groups()
    bits, register = (64, "%w") if field in WIDE else (32, "%v")
    place = {".global": "%m", ".shared::cta": "%a", "": "%g"}[space]
    operands = ", ".join(filter(None, (f"[{place}]", ordinal, register)))
    return (
        f"cvt.u64.u32 %g, %a; cvta.shared.u64 %g, %g; mov.b{bits} {register}, {value};"
        f"@%one tensormap.replace.tile.{FIELDS.get(field, field)}{space}.b1024.b{bits} {operands};"
    )


@pytest.mark.parametrize("space", [".shared::cta", ".global", ""], ids=["shared", "global", "generic"])
def test_every_field_lands_where_an_h200_puts_it(space: str) -> None:
    blank = bytes(128)
    for name, expected in zip(NAMES, GOLDEN["repl"], strict=True):
        in_global, copied = run(instruction(name, space))
        found = in_global if space == ".global" else copied
        assert found == expected.tobytes(), f"{name} in {space or 'generic'} memory: other bits than an H200's"
        assert (copied if space == ".global" else in_global) == blank, f"{name}: the other map was changed too"


def test_other_fields_keep_their_bits() -> None:
    full = bytes([0xFF] * 128)
    for name, zeroed in zip(NAMES, GOLDEN["repl"], strict=True):
        _, found = run(instruction(name, ".shared::cta"), full)
        cleared = int.from_bytes(full, "little") ^ int.from_bytes(found, "little")
        assert cleared & int.from_bytes(zeroed.tobytes(), "little") == 0, f"{name}: bits that were asked for are clear"
        assert cleared.bit_count() <= 64, f"{name}: more than one field has changed"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%a], 5, %v;", "ordinal 5"),
        ("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%a], 4, %w;", "ordinal 4"),
        ("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%a], 0, %v;", "3 operands"),
        ("tensormap.replace.tile.rank.shared::cta.b1024.b64 [%a], %w;", "no form"),
    ],
)
def test_forms_that_do_not_exist(body: str, says: str) -> None:
    with pytest.raises(UnknownInstructionError, match=says):
        run(body)


def test_a_map_at_an_odd_address() -> None:
    with pytest.raises(Fault, match="multiple of 64 bytes"):
        run("add.s32 %a, %a, 16; @%one tensormap.replace.tile.rank.shared::cta.b1024.b32 [%a], %v;")


def test_a_change_that_another_thread_does_not_wait_for() -> None:
    """Two warps and no barrier between the change and the copy."""
    body = HEAD.replace("bar.warp.sync -1;", "bar.sync 0;").replace(
        "shl.b32 %v, %t, 2;", "and.b32 %v, %t, 31; shl.b32 %v, %v, 2;"
    )
    change = "setp.eq.s32 %one, %t, 32; @%one tensormap.replace.tile.rank.shared::cta.b1024.b32 [%a], %t; "
    copy = "setp.lt.s32 %one, %t, 32; @!%one bra OUT;" + COPY.replace("ret;", "OUT: ret;")
    machine = Machine()
    params = [struct.pack("<Q", machine.memory.add(n, np.zeros(128, np.uint8)).base) for n in ("map", "out")]
    with pytest.raises(Fault) as caught:
        machine.launch(load(body + change + copy).entry("k"), (1, 1, 1), (64, 1, 1), params)
    assert caught.value.rule == "race", f"found {caught.value}"
