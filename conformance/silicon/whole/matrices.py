"""Programs of matrices: mma.sync, its sparse forms, wmma and wgmma, of every type that sm_90a has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from conformance.silicon.whole.programs import ADDENDS, FILL, KINDS, PAIRS, SINGLES, Whole, vector

_BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "f32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
    "b1": 1,
    "f64": 64,
    "s32": 32,
}
_REPEATS = 4
_FP8 = [(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
_INTS = [(a, b) for a in ("s8", "u8") for b in ("s8", "u8")]
_NIBBLES = [(a, b) for a in ("s4", "u4") for b in ("s4", "u4")]


def _shape(shape: str) -> tuple[int, int, int]:
    m, n, k = map(int, re.findall(r"\d+", shape))
    return m, n, k


def _kinds(a: str) -> tuple[str, ...]:
    return KINDS if a not in ("s8", "u8", "s4", "u4", "b1") else ("special",)


def _loads(name: str, count: int, at: int) -> str:
    return " ".join(f"ld.global.b32 %{name}{i}, [%d0+{at + 4 * i}];" for i in range(count))


def _mma(
    opcode: str, shape: str, types: tuple[str, str, str, str], *, sparse: tuple[int, int] | None = None, kind: str
) -> Whole:
    """Four products of the input's matrices. `sparse`: offset of the metadata, and the number of selectors."""
    d_type, a_type, b_type, c_type = types
    m, n, k = _shape(shape)
    a = m * k * _BITS[a_type] // 1024 // (2 if sparse else 1)
    b, c, d = k * n * _BITS[b_type] // 1024, m * n * _BITS[c_type] // 1024, m * n * _BITS[d_type] // 1024
    lines = ["mul.wide.u32 %d0, %lane, 16; add.u64 %d0, %d0, %in; mul.wide.u32 %d1, %lane, 4; add.u64 %d1, %d1, %in;"]
    for turn in range(_REPEATS):
        where = 512 * turn
        tail = ""
        if sparse:
            at, selectors = sparse
            lines.append(f"ld.global.b32 %r0, [%d1+{at + 128 * turn}];")
            tail = f", %r0, {turn % selectors}"
        lines += [_loads("x", a, where), _loads("x1", b, 2048 + where), _loads("x2", c, ADDENDS + where)]
        lines.append(f"{opcode} {vector('x3', d)}, {vector('x', a)}, {vector('x1', b)}, {vector('x2', c)}{tail};")
        lines += [f"st.global.b32 [%own+{4 * (d * turn + i)}], %x3{i};" for i in range(d)]
    name = f"{opcode} {kind}"
    return Whole(name, "\n".join(lines), given=f"{a_type}-{b_type}-{c_type}-{kind}")


def mma_programs() -> Iterator[Whole]:
    """mma.sync of floating types, and mma.sp of all."""
    dense = [
        *((s, (d, "f16", "f16", d)) for s in ("m16n8k8", "m16n8k16") for d in ("f16", "f32")),
        *((s, ("f32", "bf16", "bf16", "f32")) for s in ("m16n8k8", "m16n8k16")),
        *((s, ("f32", "tf32", "tf32", "f32")) for s in ("m16n8k4", "m16n8k8")),
        *((s, (d, a, b, d)) for s in ("m16n8k16", "m16n8k32") for a, b in _FP8 for d in ("f16", "f32")),
    ]
    for shape, types in dense:
        for kind in _kinds(types[1]):
            yield _mma(f"mma.sync.aligned.{shape}.row.col.{'.'.join(types)}", shape, types, kind=kind)
    sparse = [
        *((f"m16n8k{k}", (d, "f16", "f16", d), (PAIRS, s)) for k, s in ((16, 4), (32, 2)) for d in ("f16", "f32")),
        *((f"m16n8k{k}", ("f32", "bf16", "bf16", "f32"), (PAIRS, s)) for k, s in ((16, 4), (32, 2))),
        *((f"m16n8k{k}", ("f32", "tf32", "tf32", "f32"), (SINGLES, s)) for k, s in ((8, 4), (16, 2))),
        *(("m16n8k64", ("f32", a, b, "f32"), (PAIRS, 1)) for a, b in _FP8),
        *(("m16n8k32", ("s32", a, b, "s32"), (PAIRS, 2)) for a, b in _INTS),
        *(("m16n8k64", ("s32", a, b, "s32"), (PAIRS, 1)) for a, b in _INTS),
        *(("m16n8k64", ("s32", a, b, "s32"), (PAIRS, 2)) for a, b in _NIBBLES),
        *(("m16n8k128", ("s32", a, b, "s32"), (PAIRS, 1)) for a, b in _NIBBLES),
    ]
    for ordered in ("", "::ordered_metadata"):
        for shape, types, where in sparse:
            for kind in _kinds(types[1]):
                saturated = ".satfinite" if types[0] == "s32" and types[1] != types[2] else ""
                opcode = f"mma.sp{ordered}.sync.aligned.{shape}.row.col{saturated}.{'.'.join(types)}"
                yield _mma(opcode, shape, types, sparse=where, kind=kind)


def wmma_programs() -> Iterator[Whole]:
    """Loads of A, B and C from global or shared memory, the product, and its store."""
    halves = [(d, "f16", "f16", c) for d in ("f16", "f32") for c in ("f16", "f32")]
    combinations = [
        *(
            (s, t)
            for s in ("m16n16k16", "m32n8k16", "m8n32k16")
            for t in [*halves, ("f32", "bf16", "bf16", "f32"), ("s32", "s8", "s8", "s32"), ("s32", "u8", "u8", "s32")]
        ),
        ("m16n16k8", ("f32", "tf32", "tf32", "f32")),
        ("m8n8k4", ("f64", "f64", "f64", "f64")),
    ]
    for number, (shape, types) in enumerate(combinations):
        for kind in _kinds(types[1]):
            layouts = [("row", "col"), ("col", "row"), ("row", "row"), ("col", "col")][number % 4]
            yield _wmma(shape, types, layouts, kind, shared=number % 2 == 0)


def _wmma(shape: str, types: tuple[str, str, str, str], layouts: tuple[str, str], kind: str, *, shared: bool) -> Whole:
    d, a, b, c = types
    m, n, k = _shape(shape)
    count = {
        "f16": {"a": 8, "b": 8, "c": 4},
        "f32": {"c": 8},
        "s32": {"c": 8},
        "tf32": {"a": 4, "b": 4},
        "bf16": {"a": m * k // 64, "b": k * n // 64},
        "s8": {"a": m * k // 128, "b": k * n // 128},
        "u8": {"a": m * k // 128, "b": k * n // 128},
        "f64": {"a": 1, "b": 1, "c": 2},
    }
    wide, between = ("d", 2) if a == "f64" else ("x", 8)
    ra, rb, rc, rd = (
        vector(wide, count[of][which], 4 + between * place)
        for place, (of, which) in enumerate(((a, "a"), (b, "b"), (c, "c"), (d, "c")))
    )
    space = ".shared" if shared else ".global"
    lines = [FILL, "mov.u32 %r6, tile; mov.b64 %d0, %in; add.u64 %d1, %in, 2048;"]
    base_a, base_b = ("%r6", "%r6+2048") if shared else ("%d0", "%d1")
    stride = {"row": k, "col": m}[layouts[0]], {"row": n, "col": k}[layouts[1]]
    align = 128 // _BITS[a]
    sa, sb = (max(one, align) for one in stride)
    lines.append(f"wmma.load.a.sync.aligned.{layouts[0]}.{shape}{space}.{a} {ra}, [{base_a}], {sa};")
    lines.append(f"wmma.load.b.sync.aligned.{layouts[1]}.{shape}{space}.{b} {rb}, [{base_b}], {sb};")
    lines.append(f"add.u64 %d2, %in, {ADDENDS}; wmma.load.c.sync.aligned.row.{shape}.global.{c} {rc}, [%d2], {n};")
    named = f"{d}.{c}" if a == "f16" else f"{d}.{a}.{b}.{c}"
    sat = ".satfinite" if a == "u8" else ""
    opcode = f"wmma.mma.sync.aligned.{layouts[0]}.{layouts[1]}.{shape}.{named}{sat}"
    lines.append(f"{opcode} {rd}, {ra}, {rb}, {rc};")
    lines.append(f"wmma.store.d.sync.aligned.row.{shape}.global.{d} [%out], {rd}, {n};")
    lines.append(f"mov.u32 %r7, tile; wmma.store.d.sync.aligned.col.{shape}.shared.{d} [%r7+8192], {rd}, {m};")
    each = m * n * _BITS[d] // 256
    lines.append(
        f"mul.wide.u32 %u, %lane, {each}; add.u64 %u, %u, %out; mad.lo.u32 %t, %lane, {each}, %r7; bar.warp.sync -1;"
    )
    for i in range(0, each, 16):
        lines.append(
            f"ld.shared.v4.b32 {{%r8, %r9, %r10, %r11}}, [%t+{8192 + i}]; "
            f"st.global.v4.b32 [%u+{4096 + i}], {{%r8, %r9, %r10, %r11}};"
        )
    return Whole(f"{opcode} {kind}", "\n".join(lines), given=f"{a}-{b}-{c}-{kind}")


_WIDTHS = (8, 16, 24, 64, 96, 128, 192)


def wgmma_programs() -> Iterator[Whole]:
    """One product that overwrites, one that adds its negative; A from shared memory and from registers."""
    table = [
        *((16, (d, "f16", "f16")) for d in ("f16", "f32")),
        (16, ("f32", "bf16", "bf16")),
        (8, ("f32", "tf32", "tf32")),
        *((32, (d, a, b)) for a, b in _FP8 for d in ("f16", "f32")),
        *((32, ("s32", a, b)) for a, b in _INTS),
    ]
    number = 0
    for sparse in (False, True):
        widths = [n for n in _WIDTHS if not sparse or n <= 96]
        for k, types in table:
            for registers in (False, True):
                for kind in _kinds(types[1]):
                    n = widths[number % len(widths)]
                    number += 1
                    yield _wgmma(f"m64n{n}k{k * (2 if sparse else 1)}", types, kind, sparse=sparse, registers=registers)


def _wgmma(shape: str, types: tuple[str, str, str], kind: str, *, sparse: bool, registers: bool) -> Whole:
    d_type, a_type, b_type = types
    _, n, _ = _shape(shape)
    count = n // 2 if _BITS[d_type] == 32 else n // 4
    integer = d_type == "s32"
    # Rows of A hold 32 bytes; rows of B 32, or 64 under a sparse A: core matrices of 8 rows of 16 bytes, along K first.
    of_a, of_b = 16 << 32 | 8 << 16, (32 if sparse else 16) << 32 | 8 << 16
    lines = [
        FILL,
        f"mov.u32 %r0, tile; cvt.u64.u32 %d0, %r0; shr.u64 %d0, %d0, 4; or.b64 %d1, %d0, {of_a:#x};",
        f"add.u64 %d0, %d0, 128; or.b64 %d2, %d0, {of_b:#x}; and.b32 %r1, %tx, 63; mul.wide.u32 %d3, %r1, 4;",
        "add.u64 %d3, %d3, %in; setp.ne.u32 %p1, %tx, %tx; not.pred %p2, %p1;",
    ]
    lines += [f"ld.global.b32 %x{i}, [%d3+{ADDENDS + 132 * i % 3840}];" for i in range(count)]
    a = "%d1"
    if registers:
        lines += [f"ld.global.b32 %r{8 + i}, [%d3+{(256 * i)}];" for i in range(4)]
        a = vector("r", 4, 8)
    meta = ""
    if sparse:
        where = SINGLES if a_type == "tf32" else PAIRS
        lines.append(f"ld.global.b32 %r2, [%d3+{where}];")
        meta = ", %r2, 0"
    opcode = f"wgmma.mma_async{'.sp' if sparse else ''}.sync.aligned.{shape}"
    if integer and a_type != b_type:
        opcode += ".satfinite"
    opcode += f".{d_type}.{a_type}.{b_type}"
    majors = "" if _BITS[a_type] != 16 else (", 0" if registers else ", 0, 0")
    out = vector("x", count)
    first, second = ("", "") if integer else (", 1, 1" + majors, ", -1, 1" + majors)
    lines.append(f"wgmma.fence.sync.aligned; {opcode} {out}, {a}, %d2{meta}, %p2{first};")
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    lines += [f"st.global.b32 [%own+{4 * i}], %x{i};" for i in range(count)]
    if count < 48:
        lines.append(f"wgmma.fence.sync.aligned; {opcode} {out}, {a}, %d2{meta}, %p1{first};")
        lines.append(f"{opcode} {out}, {a}, %d2{meta}, %p2{second};")
        lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
        lines += [f"st.global.b32 [%own+{4 * (48 + i)}], %x{i};" for i in range(count)]
    where = "registers" if registers else "shared"
    return Whole(f"{opcode} {where} {kind}", "\n".join(lines), 128, given=f"{a_type}-{b_type}-{d_type}-{kind}")
