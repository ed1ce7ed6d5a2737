"""A backend of your own: attention by one CTA a query row, for at most 128 keys, not fast but complete.

megamoe run --backend my_backend:BACKEND --case fmha:hd=64,t=1,s_k=128      (with PYTHONPATH=examples)
"""

from __future__ import annotations

import math

from megamoe.contract import BufferArg, Case, Launch, Program, ScalarArg, Target, UnsupportedError

KEYS = 128  # Threads of a CTA, and so the most keys: one thread computes the score of one key.
PTX = """.version 8.7
.target {target}
.address_size 64
.visible .entry attention(.param .u64 q, .param .u64 k, .param .u64 v, .param .u64 o, .param .u64 lse,
                          .param .u32 keys, .param .f32 scale)
{{
.shared .align 4 .b8 scores[512];
.reg .pred %p;
.reg .b16 %h;
.reg .b32 %i, %n, %thread, %row, %sequence, %at;
.reg .b64 %q, %k, %v, %o, %step;
.reg .f32 %x, %y, %dot, %max, %sum, %out, %scale;
ld.param.u64 %q, [q];  ld.param.u64 %k, [k];  ld.param.u64 %v, [v];  ld.param.u64 %o, [o];
ld.param.u32 %n, [keys];  ld.param.f32 %scale, [scale];
mov.u32 %thread, %tid.x;  mov.u32 %sequence, %ctaid.x;  mov.u32 %row, %nctaid.y;  mov.u32 %at, %ctaid.y;
mad.lo.u32 %row, %sequence, %row, %at;
mad.wide.u32 %q, %row, {bytes}, %q;  mad.wide.u32 %o, %row, {bytes}, %o;
mul.lo.u32 %at, %sequence, %n;
mad.wide.u32 %k, %at, {bytes}, %k;  mad.wide.u32 %v, %at, {bytes}, %v;

setp.ge.u32 %p, %thread, %n;
@%p bra SCORED;
mad.wide.u32 %k, %thread, {bytes}, %k;
mov.f32 %dot, 0f00000000;  mov.u32 %i, 0;
DOT:
ld.global.b16 %h, [%q];  cvt.f32.bf16 %x, %h;  add.u64 %q, %q, 2;
ld.global.b16 %h, [%k];  cvt.f32.bf16 %y, %h;  add.u64 %k, %k, 2;
fma.rn.f32 %dot, %x, %y, %dot;
add.u32 %i, %i, 1;  setp.lt.u32 %p, %i, {hd};
@%p bra DOT;
mul.f32 %dot, %dot, %scale;  // to base 2
mov.u32 %at, scores;  mad.lo.u32 %at, %thread, 4, %at;
st.shared.f32 [%at], %dot;
SCORED:
bar.sync 0;  // every score is stored before one is read

setp.ge.u32 %p, %thread, {hd};
@%p ret;
mov.u32 %at, scores;  mov.f32 %max, 0fFF800000;  mov.u32 %i, 0;
MAXIMUM:
ld.shared.f32 %x, [%at];  max.f32 %max, %max, %x;
add.u32 %at, %at, 4;  add.u32 %i, %i, 1;  setp.lt.u32 %p, %i, %n;
@%p bra MAXIMUM;
mul.wide.u32 %step, %thread, 2;  add.u64 %v, %v, %step;  add.u64 %o, %o, %step;
mov.u32 %at, scores;  mov.f32 %sum, 0f00000000;  mov.f32 %out, 0f00000000;  mov.u32 %i, 0;
VALUES:
ld.shared.f32 %x, [%at];  sub.f32 %x, %x, %max;  ex2.approx.f32 %x, %x;  add.f32 %sum, %sum, %x;
ld.global.b16 %h, [%v];  cvt.f32.bf16 %y, %h;  fma.rn.f32 %out, %x, %y, %out;
add.u64 %v, %v, {bytes};  add.u32 %at, %at, 4;  add.u32 %i, %i, 1;  setp.lt.u32 %p, %i, %n;
@%p bra VALUES;
div.rn.f32 %out, %out, %sum;  cvt.rn.bf16.f32 %h, %out;  st.global.b16 [%o], %h;
setp.ne.u32 %p, %thread, 0;
@%p ret;
lg2.approx.f32 %sum, %sum;  add.f32 %sum, %sum, %max;  mul.f32 %sum, %sum, 0f3F317218;  // to base e
ld.param.u64 %o, [lse];  mad.wide.u32 %o, %row, 4, %o;  st.global.f32 [%o], %sum;
ret;
}}
"""
TAKES = {"causal": False, "window": None, "lse": True, "sinks": False, "kv": "apart", "ragged": False}


class MyBackend:
    """The interface is megamoe/contract/backend.py: a name, targets, and a program for a case."""

    name = "mine"

    def targets(self, op: str) -> tuple[Target, ...]:
        """Where there is a kernel of `op`: rows for other targets are not owed."""
        return ("sm_90a", "sm_100a") if op == "fmha" else ()

    def build(self, case: Case, target: Target) -> Program:
        """The program of `case`. A shape that the kernel does not take is refused, with the reason."""
        hd, keys, heads = case.int("hd"), case.int("s_k"), case.int("heads")
        for axis, value in TAKES.items():
            if case[axis] != value:
                raise UnsupportedError(f"{axis} is {case[axis]}; this kernel takes {value}")
        if heads != case.int("kv_heads"):
            raise UnsupportedError(f"{heads} heads share {case['kv_heads']} KV heads; here each has its own")
        if hd > KEYS or keys > KEYS:
            raise UnsupportedError(f"hd is {hd} and s_k {keys}; a CTA has a thread for each, at most {KEYS}")
        scale = case["scale"]
        to_base_2 = (float(scale) if isinstance(scale, float) else 1 / math.sqrt(hd)) * math.log2(math.e)
        buffers = [BufferArg(name) for name in ("q", "k", "v", "o", "lse")]
        args = (*buffers, ScalarArg("u32", keys), ScalarArg("f32", to_base_2))
        launch = Launch("attention", (case.int("batch") * heads, case.int("t"), 1), (KEYS, 1, 1), args)
        return Program(target, PTX.format(target=target, hd=hd, bytes=2 * hd), (launch,))


BACKEND = MyBackend()
