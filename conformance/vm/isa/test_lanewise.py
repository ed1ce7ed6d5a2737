"""Laws of every lane-wise family: inactive lanes keep their value, and the spellings of real kernels are known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.load import load
from conformance.vm.kernel import lanes_of, run_ptx

LANE = np.arange(32, dtype=np.uint32)
GENERATOR = np.random.default_rng(21)
WORDS: dict[str, npt.NDArray[np.generic]] = {
    "h": GENERATOR.integers(0, 2**16, 32, dtype=np.uint16),
    "g": GENERATOR.integers(0, 2**16, 32, dtype=np.uint16),
    "r": GENERATOR.integers(0, 2**32, 32, dtype=np.uint32),
    "s": GENERATOR.integers(0, 2**32, 32, dtype=np.uint32),
    "l": GENERATOR.integers(0, 2**64, 32, dtype=np.uint64),
    "k": GENERATOR.integers(0, 2**64, 32, dtype=np.uint64),
    "p": lanes_of(0x0FF0_A5C3),
}
DESTINATIONS: dict[str, type[np.generic]] = {"H": np.uint16, "R": np.uint32, "L": np.uint64, "P": np.bool_}

# One instruction per spelling of these families in CuTeDSL's kernels, from a count of all their opcodes.
# h g: 16 bits, r s: 32, l k: 64, p: predicate; capitals are destinations.
SPELLINGS = """
add.f16 %H, %h, %g;               add.f32 %R, %r, %s;               add.f32x2 %L, %l, %k;
add.rn.f32.f16 %R, %h, %r;        add.rn.f32x2 %L, %l, %k;          add.s16 %H, %h, %g;
add.s32 %R, %r, %s;               add.s64 %L, %l, %k;               add.u64 %L, %l, %k;
and.b16 %H, %h, %g;               and.b32 %R, %r, %s;               and.b64 %L, %l, %k;
and.pred %P, %p, !%p;             cvt.f32.bf16 %R, %h;              cvt.f32.f16 %R, %h;
cvt.f64.f32 %L, %r;               cvt.rn.bf16x2.f32 %R, %r, %s;     cvt.rn.f16x2.f32 %R, %r, %s;
cvt.rn.f32.s16 %R, %h;            cvt.rn.f32.s32 %R, %r;            cvt.rn.satfinite.e4m3x2.f32 %H, %r, %s;
cvt.s16.s8 %H, %h;                cvt.s32.s16 %R, %h;               cvt.s64.s32 %L, %r;
cvt.s8.s32 %H, %r;                cvt.u16.u32 %H, %r;               cvt.u32.u16 %R, %h;
cvt.u32.u64 %R, %l;               cvt.u64.u32 %L, %r;               cvta.global.u64 %L, %l;
cvta.shared.u64 %L, %l;           cvta.to.shared::cluster.u64 %L, %l; div.rn.f32 %R, %r, %s;
div.s32 %R, %r, %s;               div.u32 %R, %r, %s;               elect.sync %R|%P, -1;
ex2.approx.ftz.f32 %R, %r;        fma.rn.bf16x2 %R, %r, %s, %r;     fma.rn.f32 %R, %r, %s, %r;
fma.rn.f32.bf16 %R, %h, %g, %r;   fma.rn.f32x2 %L, %l, %k, %l;      lg2.approx.ftz.f32 %R, %r;
lop3.b32 %R, %r, %s, %r, 0x96;    mad.lo.s32 %R, %r, %s, %r;        mad.lo.s64 %L, %l, %k, %l;
max.NaN.f32 %R, %r, %s;           max.f32 %R, %r, %s;               max.s32 %R, %r, %s;
max.u32 %R, %r, %s;               min.relu.s32 %R, %r, %s;          min.s32 %R, %r, %s;
min.u32 %R, %r, %s;               mov.b16 %H, %h;                   mov.b32 %R, %r;
mov.b32 %R, {%h, %g};             mov.b64 %L, %l;                   mov.b64 %L, {%r, %s};
mov.b32 {%H, _}, %r;              mov.b64 {_, %R}, %l;              mov.pred %P, %p;
mov.u32 %R, %tid.x;               mul.bf16x2 %R, %r, %s;            mul.f16x2 %R, %r, %s;
mul.f32 %R, %r, %s;               mul.f32x2 %L, %l, %k;             mul.hi.s32 %R, %r, %s;
mul.hi.u32 %R, %r, %s;            mul.hi.u64 %L, %l, %k;            mul.lo.s32 %R, %r, %s;
mul.lo.s64 %L, %l, %k;            mul.rn.f32x2 %L, %l, %k;          mul.wide.s16 %R, %h, %g;
mul.wide.s32 %L, %r, %s;          mul.wide.u16 %R, %h, %g;          mul.wide.u32 %L, %r, %s;
neg.f32 %R, %r;                   neg.s32 %R, %r;                   not.b16 %H, %h;
not.b32 %R, %r;                   not.pred %P, %p;                  or.b16 %H, %h, %g;
or.b32 %R, %r, %s;                or.b64 %L, %l, %k;                or.pred %P, %p, %p;
popc.b32 %R, %r;                  prmt.b32 %R, %r, %s, 0x5410;      rcp.approx.ftz.f32 %R, %r;
redux.sync.add.s32 %R, %r, -1;    redux.sync.and.b32 %R, %r, -1;    redux.sync.max.s32 %R, %r, -1;
redux.sync.max.u32 %R, %r, -1;    redux.sync.min.s32 %R, %r, -1;    redux.sync.min.u32 %R, %r, -1;
redux.sync.or.b32 %R, %r, -1;     redux.sync.xor.b32 %R, %r, -1;    rem.s32 %R, %r, %s;
rem.u32 %R, %r, %s;               rsqrt.approx.ftz.f32 %R, %r;      selp.b16 %H, %h, %g, %p;
selp.b32 %R, %r, %s, %p;          selp.b64 %L, %l, %k, %p;          selp.f32 %R, %r, %s, %p;
setp.eq.b32 %P, %r, %s;           setp.eq.f32 %P, %r, %s;           setp.equ.f32 %P, %r, %s;
setp.ge.s32 %P, %r, %s;           setp.ge.u32 %P, %r, %s;           setp.gt.s32 %P, %r, %s;
setp.gt.u32 %P, %r, %s;           setp.gt.u64 %P, %l, %k;           setp.le.f32 %P, %r, %s;
setp.le.s32 %P, %r, %s;           setp.le.s64 %P, %l, %k;           setp.lt.f32 %P, %r, %s;
setp.lt.s32 %P, %r, %s;           setp.lt.s64 %P, %l, %k;           setp.lt.u32 %P, %r, %s;
setp.lt.u64 %P, %l, %k;           setp.ltu.f32 %P, %r, %s;          setp.nan.f32 %P, %r, %s;
setp.ne.b16 %P, %h, %g;           setp.ne.b32 %P, %r, %s;           setp.ne.b64 %P, %l, %k;
setp.neu.f32 %P, %r, %s;          shfl.sync.bfly.b32 %R, %r, 1, 31, -1; shfl.sync.down.b32 %R, %r, 1, 7171, -1;
shfl.sync.idx.b32 %R, %r, 0, 31, -1; shfl.sync.up.b32 %R|%P, %r, 1, 0, -1; shl.b16 %H, %h, 3;
shl.b32 %R, %r, 3;                shl.b64 %L, %l, 3;                shr.s16 %H, %h, 3;
shr.s32 %R, %r, 3;                shr.u16 %H, %h, 3;                shr.u32 %R, %r, 3;
shr.u64 %L, %l, 3;                sub.f32 %R, %r, %s;               sub.f32x2 %L, %l, %k;
sub.s16 %H, %h, %g;               sub.s32 %R, %r, %s;               vote.sync.all.pred %P, %p, -1;
vote.sync.any.pred %P, %p, -1;    vote.sync.ballot.b32 %R, %p, -1;  vote.sync.uni.pred %P, %p, -1;
xor.b32 %R, %r, %s;               xor.pred %P, %p, %p;
movmatrix.sync.aligned.m8n8.trans.b16 %R, %r;
"""
INSTRUCTIONS = [part.strip() + ";" for part in SPELLINGS.replace("\n", " ").split(";") if part.strip()]
WARP_WIDE = ("elect", "redux", "shfl", "vote", "movmatrix")
# Forms of the same families that those kernels do not use: every modifier takes the general path.
FURTHER = """
add.rz.ftz.sat.f32 %R, %r, %s; fma.rm.f32 %R, %r, %s, %r; fma.rp.ftz.f32x2 %L, %l, %k, %l; sub.rn.bf16 %H, %h, %g;
min.ftz.f32 %R, %r, %s, %r; max.xorsign.abs.f32 %R, %r, %s; div.full.ftz.f32 %R, %r, %s; tanh.approx.f32 %R, %r;
sqrt.rn.f32 %R, %r; copysign.f32 %R, %r, %s; testp.normal.f32 %P, %r; set.lt.u32.f32 %R, %r, %s; abs.f16x2 %R, %r;
slct.b32.f32 %R, %r, %s, %r; setp.lt.and.f32 %P, %r, %s, !%p; setp.ge.f16x2 %P|_, %r, %s; max.NaN.bf16x2 %R, %r, %s;
add.rz.f64 %L, %l, %k; fma.rn.f64 %L, %l, %k, %l; max.f64 %L, %l, %k; rcp.approx.ftz.f64 %L, %l; cvt.rzi.s32.f32 %R, %r;
cvt.rn.relu.f16x2.f32 %R, %r, %s; cvt.rna.tf32.f32 %R, %r; cvt.pack.sat.s16.s32 %R, %r, %s; cvt.rn.f16x2.e4m3x2 %R, %h;
bfe.u32 %R, %r, 3, 9; bfi.b64 %L, %l, %k, 3, 9; shf.l.wrap.b32 %R, %r, %s, 7; brev.b64 %L, %l; clz.b32 %R, %r;
dp4a.u32.s32 %R, %r, %s, %r; dp2a.hi.s32.u32 %R, %r, %s, %r; sad.s32 %R, %r, %s, %r; mad24.hi.sat.s32 %R, %r, %s, %r;
bmsk.wrap.b32 %R, %r, %s; szext.clamp.s32 %R, %r, %s; max.relu.s16x2 %R, %r, %s; add.u16x2 %R, %r, %s;
fns.b32 %R, %r, 3, 2; mul.hi.s64 %L, %l, %k;
mad.wide.u16 %R, %h, %g, %r; div.s64 %L, %l, %k; abs.s32 %R, %r; cnot.b32 %R, %r;
"""
LANEWISE = [line for line in INSTRUCTIONS if not line.startswith(WARP_WIDE)]
LANEWISE += [part.strip() + ";" for part in FURTHER.replace("\n", " ").split(";") if part.strip()]
STALE = {
    "H": np.uint16(0xABCD),
    "R": np.uint32(0x7F80_0001),
    "L": np.uint64(0x7FF0_0000_7FA0_0001),
    "P": np.bool_(True),
}


def written(instruction: str) -> str:
    """The capital of the first destination that an instruction writes."""
    return next(letter for letter in instruction if letter in DESTINATIONS and f"%{letter}" in instruction)


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_a_spelling_of_real_kernels_runs(instruction: str) -> None:
    letter = written(instruction)
    run_ptx(instruction, {**WORDS, **STALE}, {letter: DESTINATIONS[letter]})


@pytest.mark.parametrize("instruction", LANEWISE)
def test_lanes_that_take_no_part_keep_their_bits(instruction: str) -> None:
    """The stale values are NaN patterns, which a clean-up of the whole row would change."""
    letter = written(instruction)
    inputs = {**WORDS, **STALE}
    whole = run_ptx(instruction, inputs, {letter: DESTINATIONS[letter]})[letter]
    mask = 0x00F0_F0A5
    wanted = np.where(lanes_of(mask), whole, STALE[letter])
    guarded = run_ptx(f"@%on {instruction}", {**inputs, "on": lanes_of(mask)}, {letter: DESTINATIONS[letter]})[letter]
    assert np.array_equal(guarded, wanted), f"guarded `{instruction}` changes lanes {np.flatnonzero(guarded != wanted)}"
    branch = f"@!%on bra SKIP; {instruction} SKIP:"
    split = run_ptx(branch, {**inputs, "on": lanes_of(mask)}, {letter: DESTINATIONS[letter]})[letter]
    assert np.array_equal(split, wanted), f"diverged `{instruction}` changes lanes {np.flatnonzero(split != wanted)}"


IN_PLACE = [line for line in LANEWISE if line.count("%R") == 1 and ", %r, %s" in line]


@pytest.mark.parametrize("instruction", IN_PLACE)
def test_a_destination_may_be_a_source(instruction: str) -> None:
    apart = run_ptx(instruction, {**WORDS, **STALE}, {"R": np.uint32})["R"]
    for source in "rs":
        merged = instruction.replace("%R", f"%{source}")
        found = run_ptx(merged, {**WORDS, **STALE}, {source: np.uint32})[source]
        assert np.array_equal(found, apart), f"`{merged}` differs from `{instruction}`"


def test_instructions_of_cutedsl_that_need_memory_bind() -> None:
    body = """.reg .b32 %r<4>; .reg .b32 %a;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%a];
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1, %r2, %r3}, [%a];
        ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r0, %r1, %r2, %r3}, [%a];
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%a], {%r0};
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%a], {%r0, %r1, %r2, %r3};
        stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%a], {%r0, %r1, %r2, %r3};"""
    module = load(f".version 9.2\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{{\n{body}\nret;\n}}")
    assert module.entry("k").code.blocks, "nothing was bound"
