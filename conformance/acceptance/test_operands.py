"""Operands that ptxas 13.5 demands or refuses where the spelling alone does not tell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from backends.ptx.assembler import find_ptxas
from backends.vm.faults import UnknownInstructionError
from backends.vm.load import load
from megamoe.contract import UnsupportedError

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

_ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], N;"
_DEALLOC = "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r0, N;"
_CONSTANTS = [
    ("bar.sync N;", "0 15 %r0", "16 -1", "there are 0..15"),
    ("bar.cta.sync N, %r1;", "15 %r0", "0x10", "there are 0..15"),
    ("barrier.arrive N, 64;", "15 %r0", "16", "barrier 16 does not exist"),
    ("bar.red.popc.u32 %r0, N, %p;", "15 %r1", "16", "barrier 16 does not exist"),
    ("bar.sync 0, N;", "0 64 4096 -32 %r0", "33 -31", "must be a multiple of 32"),
    ("barrier.sync %r1, N;", "64", "48", "the thread count is 48"),
    ("bar.arrive 1, N;", "64 -32 %r0", "0", "arrive needs a positive one"),
    ("barrier.red.and.aligned.pred %p, 0, N, %p;", "0 64 %r0", "33", "the thread count is 33"),
    ("mbarrier.init.b64 [%l0], N;", "1 1048575 %r0", "0 1048576 -1", "must be in 1..1048575"),
    ("mbarrier.arrive.b64 _, [%l0], N;", "1 1048576 0x80000000 %r0", "0 -1", "must be positive"),
    ("mbarrier.arrive_drop.b64 %l1, [%l0], N;", "1 %r0", "0", "the count is 0"),
    ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], N;", "0 16 -16 %r0", "", ""),
    ("mbarrier.test_wait.parity.b64 %p, [%l0], N;", "0 1 %r0", "2 -1", "must be 0 or 1"),
    ("mbarrier.try_wait.parity.b64 %p, [%l0], N, 2;", "0 1 %r0", "2", "the parity is 2"),
]
"""Instructions with N: what it may be, what it may not be, and what the refusal says."""
_OF_TENSOR_MEMORY = [
    (_ALLOC, "32 512 %r1", "0 16 48 96 1024 -32", "must be a power of two in 32..512"),
    (_DEALLOC, "32 512 %r1", "0 48 96 1024", "must be a power of two in 32..512"),
]
CONSTANTS = [*[("sm_90a", *one) for one in _CONSTANTS], *[("sm_100a", *one) for one in _OF_TENSOR_MEMORY]]


@pytest.mark.parametrize(("target", "instruction", "may", "may_not", "says"), CONSTANTS)
def test_constants_that_ptxas_refuses(target: str, instruction: str, may: str, may_not: str, says: str) -> None:
    """A register may hold any value until it is used."""
    for value in may.split():
        bind(instruction.replace("N;", f"{value};").replace("N,", f"{value},"), target)
    for value in may_not.split():
        with pytest.raises(UnknownInstructionError, match="PTX line 6") as refusal:
            bind(instruction.replace("N;", f"{value};").replace("N,", f"{value},"), target)
        assert says in str(refusal.value)


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


def among_variables(body: str) -> str:
    """A kernel for sm_90a with variables `g`, `c`, `s` and `l`, named after their state spaces, and a parameter `p`."""
    head = _HEAD.replace("TARGET", "sm_90a").replace(".visible .entry k() {\n", _VARIABLES)
    return f"{head}{_LOCAL}{body}\nret;\n}}"


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
    load(among_variables(taken)).entry("k")
    with pytest.raises(UnknownInstructionError, match=rf"`{name}` is a variable in \.\w+, where .* in \.{space}; name"):
        load(among_variables(refused)).entry("k")


_FENCE = "fence.proxy.tensormap::generic.acquire.gpu"
WITHOUT_A_SPACE = [
    ("ld.u32 %r0, [g];", "ld.u32 %r0, [c];"),
    ("ld.u32 %r0, [s];", "ld.u32 %r0, [p+4];"),
    ("st.u32 [l], %r0;", "st.u32 [c], %r0;"),
    ("atom.add.u32 %r0, [s], 1;", "atom.add.u32 %r0, [c], 1;"),
    ("red.add.u32 [g], 1;", "red.add.u32 [p], 1;"),
    ("prefetch.param.tensormap [p];", "prefetch.tensormap [p];"),
    (f"{_FENCE} [p], 128;", "prefetch.L1 [c];"),
    ("mapa.u64 %l0, s, 0;", "mapa.u64 %l0, g, 0;"),
    ("getctarank.u64 %r0, s;", "getctarank.u64 %r0, g;"),
    ("cvta.to.global.u64 %l0, %l0;", "cvta.to.global.u64 %l0, g;"),
    ("cvta.to.global.u64 %l0, g+4;", "cvta.to.shared.u64 %l0, s;"),
    ("cvta.param.u64 %l0, p;", "cvta.to.param.u64 %l0, p;"),
]


MISPLACED = [
    # ptxas takes red, and ends in an error of its own where atom, a prefetch or a discard has no code.
    ("red.add.u32 [l], 1;", "atom.add.u32 %r0, [l], 1;", "`l` is a variable in .local, of which atom"),
    ("atom.cas.b32 %r0, [s], 1, 2;", "atom.cas.b32 %r0, [l+4], 1, 2;", "of which atom"),
    ("atom.exch.b32 %r0, [g], 1;", "atom.acquire.gpu.exch.b32 %r0, [l], 1;", "of which atom"),
    ("prefetch.L1 [l];", "prefetch.L1 [s];", "`s` is a variable in .shared, of which prefetch"),
    ("prefetch.tensormap [s];", "prefetch.L2::evict_last [s+4];", "of which prefetch"),
    ("prefetchu.L1 [g];", "prefetchu.L1 [l];", "of which prefetchu"),
    ("prefetch.local.L1 [l];", "prefetchu.L1 [s];", "of which prefetchu"),
    ("discard.L2 [l], 128;", "discard.L2 [s], 128;", "of which discard"),
    ("applypriority.L2::evict_normal [l], 128;", "applypriority.L2::evict_normal [s], 128;", "of which applypriority"),
    ("isspacep.global %p, g+4;", "isspacep.global %p, c+4;", "no generic address"),
    ("isspacep.param %p, c+4;", "isspacep.local %p, p+4;", "no generic address"),
    # Orders, where no other thread stores
    ("ld.volatile.local.u32 %r0, [l];", "ld.relaxed.gpu.local.u32 %r0, [l];", "no .relaxed in .local"),
    ("ld.weak.const.u32 %r0, [c];", "ld.volatile.const.u32 %r0, [c];", "no .volatile in .const"),
    ("ld.acquire.gpu.u32 %r0, [%l0];", "ld.acquire.gpu.const.u32 %r0, [%l0];", "no .acquire in .const"),
    ("ld.weak.param.u32 %r0, [p];", "ld.volatile.param.v2.u32 {%r0, %r1}, [p];", "no .volatile in .param"),
    ("st.release.gpu.shared.u32 [s], %r0;", "st.release.gpu.local.u32 [l], %r0;", "no .release in .local"),
    ("st.volatile.local.u32 [l], %r0;", "st.relaxed.cta.local.v2.u32 [%l0], {%r0, %r1};", "no .relaxed in .local"),
    ("ld.param.u32 %r0, [p];", "st.param.u32 [p], %r0;", "`p` is a parameter of the kernel"),
    ("{ .param .b32 q; st.param.b32 [q], %r0; }", "st.param.b32 [p], %r0;", "`p` is a parameter of the kernel"),
    ("ld.local.u32 %r0, [l];", "ld.param.u32 %r0, [l];", "address in .param; name"),
    # Names of variables as values
    ("mov.u64 %l0, g+4;", "add.u64 %l0, g, 4;", "`g` is a variable; its address is no operand here"),
    ("mov.b64 {%r0, %r1}, c;", "mov.b64 %l0, {s, %r0};", "`s` is a variable; its address"),
    ("st.global.u64 [g], %l0;", "st.global.u64 [g], s;", "`s` is a variable; its address"),
    ("st.global.v2.u64 [g], {%l1, %l0};", "st.global.v2.u64 [g], {p, %l0};", "`p` is a variable; its address"),
    ("add.u64 %l0, g+4, %l1;", "add.f64 %l0, g+4, %l1;", "`g` is a variable; its address"),
    ("st.global.u32 [g], s+8;", "st.global.f32 [g], s+8;", "`s` is a variable; its address"),
    ("setp.eq.u64 %p, %l0, l+4;", "setp.eq.u64 %p, l, 0;", "`l` is a variable; its address"),
    ("red.add.u64 [g], %l0;", "red.add.u64 [g], c;", "`c` is a variable; its address"),
    ("bar.sync 0;", "bar.sync s;", "`s` is a variable; its address"),
    ("mov.u64 %l0, s;", "mov.f64 %l0, s;", "`s` is a variable; its address"),
    ("mov.u32 %r0, s;", "mov.u32 %r0, g;", "`g` is a variable in .global, where an address has 64 bits"),
    ("mov.u32 %r0, g+4;", "mov.b32 %r0, g;", "`g` is a variable in .global, where an address has 64 bits"),
]


@pytest.mark.parametrize(("taken", "refused", "says"), MISPLACED)
def test_a_variable_or_an_order_where_ptxas_has_none_is_refused(taken: str, refused: str, says: str) -> None:
    """As by ptxas 13.5, which was asked for each with -arch sm_90a. It has most from -arch compute_90a on."""
    load(among_variables(taken)).entry("k")
    with pytest.raises(UnknownInstructionError) as refusal:
        load(among_variables(refused)).entry("k")
    assert says in str(refusal.value)


@pytest.mark.parametrize(("taken", "refused", "says"), MISPLACED)
def test_ptxas_says_the_same(taken: str, refused: str, says: str, tmp_path: Path) -> None:
    try:
        ptxas = find_ptxas()
    except UnsupportedError as lacking:
        pytest.skip(str(lacking))
    for body, wanted in ((taken, True), (refused, False)):
        source = tmp_path / "one.ptx"
        source.write_text(among_variables(body), "utf-8")
        command = [str(ptxas), "-arch", "sm_90a", "-o", str(tmp_path / "one.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == wanted, f"{body}: {done.stderr}; the machine says: {says}"


@pytest.mark.parametrize(("taken", "refused"), WITHOUT_A_SPACE)
def test_a_variable_without_a_generic_address_is_refused(taken: str, refused: str) -> None:
    """As by ptxas 13.5, which was asked for each."""
    load(among_variables(taken)).entry("k")
    with pytest.raises(UnknownInstructionError, match=r"is a variable( in \.\w+, which has no|, where this)"):
        load(among_variables(refused)).entry("k")
