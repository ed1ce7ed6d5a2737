"""Special registers: their types, the instructions that read them (PTX ISA 10, ptxas 13.5), and what they hold."""

from __future__ import annotations

import numpy as np
import pytest

from backends.vm.faults import UnknownInstructionError
from backends.vm.load import load
from conformance.vm.kernel import run_ptx

LANES = np.arange(32, dtype=np.uint32)
_HEAD = """.version 9.2
.target sm_90a
.address_size 64
.visible .entry k() {
.reg .b16 %h<4>; .reg .b32 %r<4>; .reg .b64 %l<4>; .reg .f32 %f; .reg .b128 %q; .reg .pred %p;
.reg .v4 .u32 %v;
mov.b32 %r0, 0; mov.b64 %l0, 0;
"""


def bind(body: str) -> None:
    load(f"{_HEAD}{body}\nret;\n}}").entry("k")


@pytest.mark.parametrize(
    "body",
    [
        "mov.u32 %r1, %tid.w;",
        "mov.u16 %h1, %ntid.x;",
        "mov.b16 %h1, %gridid;",
        "mov.s32 %r1, %gridid;",
        "mov.u64 %l1, %gridid;",
        "mov.b64 {%r1, %r2}, %gridid;",
        "mov.b32 {%h1, %h2}, %laneid;",
        "mov.v4.u32 {%r0, %r1, %r2, %r3}, %cluster_nctaid;",
        "mov.v4.u32 %v, %ctaid;",
        "mov.v4.u16 {%h0, %h1, %h2, %h3}, %tid;",
        "mov.b128 %q, %tid;",
        "mov.b64 %l1, {%tid.x, %tid.y};",
        "mov.u32 %r1, %clock;",
        "mov.u64 %l1, %globaltimer;",
        "mov.b64 {%r1, %r2}, %clock64;",
        "mov.pred %p, %is_explicit_cluster;",
        "cvt.u64.u32 %l1, %tid.x;",
        "cvt.u32.u64 %r1, %gridid;",
        "st.shared.v2.u32 [%r0], {%tid.x, %tid.y};",
    ],
)
def test_moves_that_ptxas_takes(body: str) -> None:
    bind(body)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("add.u32 %r1, %tid.x, %ctaid.x;", "`%tid.x` is a special register; only mov and cvt"),
        ("mad.lo.u32 %r1, %r0, %ctaid.x, %r0;", "`%ctaid.x` is a special register"),
        ("setp.eq.u32 %p, %laneid, 0;", "move it to a register first"),
        ("st.shared.u32 [%r0], %tid.x;", "special register"),
        ("selp.b32 %r1, 1, 2, %is_explicit_cluster;", "special register"),
        ("mov.f32 %f, %laneid;", "special register"),
        ("cvt.rn.f32.u32 %f, %tid.x;", "special register"),
        ("mov.u16 %h1, %laneid;", "`%laneid` holds 32 bits where u16 needs 16"),
        ("mov.u16 %h1, %clusterid.x;", "holds 32 bits"),
        ("mov.u64 %l1, %tid.x;", "holds 32 bits"),
        ("mov.u32 %r1, %clock64;", "`%clock64` holds 64 bits"),
        ("mov.u64 %l1, %clock;", "`%clock` holds 32 bits"),
        ("mov.v2.u32 {%r0, %r1}, %tid;", "a vector of 4 where 2"),
        ("mov.v4.u64 {%l0, %l1, %l2, %l3}, {%l0, %l1, %l2, %l3};", "no form"),
    ],
)
def test_reads_that_ptxas_refuses(body: str, says: str) -> None:
    with pytest.raises(UnknownInstructionError, match="PTX line 8") as refusal:
        bind(body)
    assert says in str(refusal.value)


def test_parts_and_vectors_hold_what_the_components_do() -> None:
    body = """.reg .b16 %h; .reg .b32 %x<4>; .reg .b64 %w; mov.u16 %h, %tid.x; cvt.u32.u16 %d0, %h;
    mov.v4.u32 {%x0, %x1, %x2, %x3}, %tid; add.u32 %d1, %x0, %x3; mov.u64 %w, %gridid; cvt.u32.u64 %d2, %w;
    mov.v2.u32 {%x0, %x1}, {%x1, %x0}; mov.b32 %d3, %x1;"""
    found = run_ptx(f"{{ {body} }}", {}, {f"d{index}": np.uint32 for index in range(4)}, threads=32)
    for name, wanted in (("d0", LANES), ("d1", LANES), ("d2", 0 * LANES), ("d3", LANES)):
        assert np.array_equal(found[name], wanted), f"{name}: {found[name]}"
