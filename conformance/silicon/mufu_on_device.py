"""Asks the GPU of this host for the hashes of mufu.py again. Needs NumPy, ptxas and the driver.

One CTA computes the outputs of one block and their hash. MUFU.SIN and MUFU.COS have no PTX instruction of their own, so
`mufu_sin` and `mufu_cos` are not asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.silicon.whole.on_device import Device

THREADS = 1024
HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
_UPPER = {"rcp64h": "rcp.approx.ftz.f64", "rsq64h": "rsqrt.approx.ftz.f64"}
NOT_ASKED = ("mufu_sin", "mufu_cos")
_UNARY = "cvt.u32.u64 %a, %i;"
_PAIR = """add.u64 %z, %i, 1; mul.lo.u64 %z, %z, 0x9E3779B97F4A7C15;
shr.u64 %k, %z, 30; xor.b64 %z, %z, %k; mul.lo.u64 %z, %z, 0xBF58476D1CE4E5B9;
shr.u64 %k, %z, 27; xor.b64 %z, %z, %k; mul.lo.u64 %z, %z, 0x94D049BB133111EB;
shr.u64 %k, %z, 31; xor.b64 %z, %z, %k; mov.b64 {%b, %a}, %z;"""
_SCALED = """bfe.u32 %e, %b, 23, 8; cvt.u32.u64 %c, %i; and.b32 %d, %c, 7; add.s32 %e, %e, %d; sub.s32 %e, %e, AWAY;
max.s32 %e, %e, 0; min.s32 %e, %e, 255; shl.b32 %e, %e, 23; and.b32 %a, %a, 0x807FFFFF; or.b32 %a, %a, %e;"""
_NEAR = """and.b32 %d, %a, 3; add.u32 %d, %b, %d; and.b32 %d, %d, 0x7FFFFF; and.b32 %e, %a, 0xFF800000;
or.b32 %d, %d, %e; and.b32 %c, %c, 24; setp.eq.u32 %p, %c, 0; selp.b32 %a, %d, %a, %p;"""
_OPERANDS = {
    "0": _PAIR,
    "1": _PAIR + _SCALED.replace("AWAY", "130") + _NEAR,
    "2": _PAIR + _SCALED.replace("AWAY", "-124"),
}
"""By the last letter of a division's name: the operands of mufu.pairs."""


def _instruction(name: str) -> str:
    """Computes %o from %a, for divisions from %a and %b."""
    if name in _UPPER:
        return f"mov.b64 %f, {{0, %a}}; {_UPPER[name]} %f, %f; mov.b64 {{%c, %o}}, %f;"
    words = name.split("_")
    ftz = ".ftz" if "ftz" in words else ""
    if words[0] == "div":
        return f"div.{words[1]}{ftz}.f32 %y, %a, %b; mov.b32 %o, %y;"
    return f"{words[0]}.approx{ftz}.f32 %y, %a; mov.b32 %o, %y;"


def kernel(name: str) -> str:
    """The entry `name`: CTA n adds the hash of block n to word n of its first parameter.

    The second parameter is the number of outputs of a block.
    """
    operands = _OPERANDS[name[-1]] if name.startswith("div") else _UNARY
    return f"""{HEAD}.visible .entry {name}(.param .u64 phashes, .param .u32 pcount)
{{
.reg .b32 %a, %b, %c, %d, %e, %o, %y, %j, %n, %q, %block; .reg .b64 %i, %k, %z, %f, %m, %first, %sum, %to;
.reg .pred %p;
mov.u32 %j, %tid.x; mov.u32 %block, %ctaid.x; ld.param.u32 %n, [pcount]; mul.wide.u32 %first, %block, %n;
mov.b64 %sum, 0;
NEXT: cvt.u64.u32 %i, %j; add.u64 %i, %i, %first;
{operands}
{_instruction(name)}
shl.b32 %q, %j, 1; add.u32 %q, %q, 1; mul.wide.u32 %m, %o, %q; add.u64 %sum, %sum, %m;
add.u32 %j, %j, {THREADS}; setp.lt.u32 %p, %j, %n; @%p bra NEXT;
ld.param.u64 %to, [phashes]; mul.wide.u32 %k, %block, 8; add.u64 %to, %to, %k; red.global.add.u64 [%to], %sum; ret;
}}
"""


def asked_again(hashes: Mapping[str, Any], outputs: int = 1 << 22) -> dict[str, list[int]]:
    """The blocks of each function whose hash on the GPU is not the one in `hashes`."""
    device, found = Device(), dict[str, list[int]]()
    for name, held in hashes.items():
        if name in NOT_ASKED:
            continue
        module, _ = device.compiled(kernel(name))
        place = device.memory(held.nbytes, np.zeros_like(held))
        device.launch(module, name, len(held), THREADS, [ctypes.c_uint64(place), ctypes.c_uint32(outputs)])
        given = device.read(place, held.nbytes).view(np.uint64)
        found[name] = np.flatnonzero(given != held).tolist()
    return found


def device_name() -> str:
    """The name of the GPU."""
    said = (ctypes.c_char * 100)()
    driver = Device().driver
    driver.cuDeviceGetName(said, 100, 0)
    return said.value.decode()
