"""Operands that ptxas 13.5 demands or refuses where the spelling alone does not tell."""

from __future__ import annotations

import pytest

from backends.vm.faults import UnknownInstructionError
from backends.vm.load import load

_HEAD = """.version 9.2
.target TARGET
.address_size 64
.visible .entry k() {
.reg .b8 %b; .reg .b16 %h; .reg .b32 %r<8>; .reg .b64 %l<3>; .reg .pred %p;
"""
_MMA = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r0, %r1, %r2, %r3}, {%r4, %r5}, B, {%r0, %r1, %r2, %r3};"
_PREFETCH = "cp.async.bulk.prefetch"


def bind(body: str, target: str) -> None:
    load(f"{_HEAD.replace('TARGET', target)}{body}\nret;\n}}").entry("k")


PAIRS = [
    ("mbarrier.arrive.shared::cluster.b64 _, [%r0];", "mbarrier.arrive.shared::cluster.b64 %l0, [%r0];", "`_` must"),
    ("mbarrier.arrive.b64 _, [%l0];", "mbarrier.arrive.b64 [%l0];", "1 operand where"),
    (
        "mbarrier.arrive_drop.expect_tx.shared::cluster.b64 _, [%r0], 16;",
        "mbarrier.arrive_drop.expect_tx.shared::cluster.b64 %l0, [%r0], 16;",
        "`_` must",
    ),
    ("cvt.rn.bf16.u8 %h, %b;", "cvt.rn.bf16.u8 %h, %r0;", "takes a register of 8 bits"),
    ("cvt.rzi.s8.bf16 %b, %h;", "cvt.rzi.s8.bf16 %h, %h;", "takes a register of 8 bits"),
    ("ldmatrix.sync.aligned.m8n8.x1.b16 {%r0}, [%l0];", "ldmatrix.sync.aligned.m8n8.x1.b16 %r0, [%l0];", "in braces"),
    ("stmatrix.sync.aligned.m8n8.x1.b16 [%l0], {%r0};", "stmatrix.sync.aligned.m8n8.x1.b16 [%l0], %r0;", "in braces"),
    (_MMA.replace("B", "{%r6}"), _MMA.replace("B", "%r6"), "in braces"),
    (f"{_PREFETCH}.L2.global [%l0], %r0;", f"{_PREFETCH}.L2.global [%l0], %r0, %l1;", "3 operands where"),
    (
        f"{_PREFETCH}.tensor.3d.L2.global [%l0, {{%r0, %r1, %r2}}];",
        f"{_PREFETCH}.tensor.3d.L2.global [%l0, {{%r0, %r1, %r2}}], {{%h}};",
        "2 operands where",
    ),
    (
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%l0, {%r0, %r1}], [%r2];",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%l0, {%r0, %r1, %r3}], [%r2];",
        "3 coordinates where 2",
    ),
]
ON_BLACKWELL = [
    (
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%r1];",
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r0, [%r1];",
        "in braces",
    ),
    (
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r0};",
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], %r0;",
        "in braces",
    ),
    (
        "tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r0], 3;",
        "tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r0], 4;",
        "needs target sm_103a",
    ),
]


@pytest.mark.parametrize(
    ("target", "right", "wrong", "says"),
    [
        *[("sm_90a", *one) for one in PAIRS],
        *[("sm_100a", *one) for one in ON_BLACKWELL],
    ],
)
def test_operands_that_ptxas_refuses(target: str, right: str, wrong: str, says: str) -> None:
    bind(right, target)
    with pytest.raises(UnknownInstructionError, match="PTX line 6") as refusal:
        bind(wrong, target)
    assert says in str(refusal.value)


_VARIABLES = (
    ".global .align 64 .u32 g[32];\n.const .align 64 .u32 c[4];\n.visible .entry k(.param .align 64 .b8 p[128]) {\n"
)
_LOCAL = ".shared .align 64 .u64 s[4];\n.local .align 16 .u32 l[4];\n"
_COPY = "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group"
IN_ANOTHER_SPACE = [
    ("ld.global.u32 %r0, [g];", "ld.shared.u32 %r0, [g];", "g", "shared"),
    ("ld.shared.u32 %r0, [s+4];", "ld.global.u32 %r0, [s+4];", "s", "global"),
    ("ld.const.u32 %r0, [c];", "ld.global.u32 %r0, [c];", "c", "global"),
    ("st.local.u32 [l], %r0;", "st.local.u32 [g], %r0;", "g", "local"),
    ("ld.param.u32 %r0, [p];", "ld.global.u32 %r0, [p];", "p", "global"),
    ("ld.u32 %r0, [g];", "ld.param.u32 %r0, [g];", "g", "param"),
    ("atom.shared::cluster.add.u32 %r0, [s], 1;", "atom.shared::cluster.add.u32 %r0, [g], 1;", "g", "shared"),
    ("cvta.shared.u64 %l0, s;", "cvta.shared.u64 %l0, g;", "g", "shared"),
    ("mapa.shared::cluster.u64 %l0, s, 0;", "mapa.shared::cluster.u64 %l0, g, 0;", "g", "shared"),
    ("mbarrier.init.b64 [s], 1;", "mbarrier.init.b64 [g], 1;", "g", "shared"),
    ("cp.async.ca.shared.global [s], [g], 4;", "cp.async.ca.shared.global [s], [s], 4;", "s", "global"),
    (f"{_COPY} [s], [g, {{%r0}}], [s];", f"{_COPY} [s], [s, {{%r0}}], [s];", "s", "global"),
    (f"{_COPY} [s], [g, {{%r0}}], [s];", f"{_COPY} [s], [g, {{%r0}}], [g];", "g", "shared"),
    (f"{_STORE} [g, {{%r0}}], [s];", f"{_STORE} [g, {{%r0}}], [g];", "g", "shared"),
]


@pytest.mark.parametrize(("taken", "refused", "name", "space"), IN_ANOTHER_SPACE)
def test_a_variable_in_another_state_space_is_refused(taken: str, refused: str, name: str, space: str) -> None:
    head = _HEAD.replace("TARGET", "sm_90a").replace(".visible .entry k() {\n", _VARIABLES) + _LOCAL
    load(f"{head}{taken}\nret;\n}}").entry("k")
    with pytest.raises(UnknownInstructionError, match=rf"`{name}` is a variable in \.\w+, where .* in \.{space}; name"):
        load(f"{head}{refused}\nret;\n}}").entry("k")
