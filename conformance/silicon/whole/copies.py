"""Programs of copies: cp.async, bulk copies and reductions, copies within a cluster, and tensor copies of TMA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from conformance.silicon.whole.programs import ANOTHER, FILL, LONGS, SLOT, WORDS, TiledMap, Whole, kept, show, vector


def copy_programs() -> Iterator[Whole]:
    """cp.async: sizes, zero fill after a shorter source, hints, groups, and arrivals at an mbarrier."""
    variants = [
        "ca.shared.global [%r40], [%d20], 4;",
        "ca.shared::cta.global [%r40], [%d20], 8;",
        "ca.shared.global [%r40], [%d20], 16;",
        "cg.shared.global [%r40], [%d20], 16;",
        "ca.shared.global [%r40], [%d20], 16, 5;",
        "cg.shared.global [%r40], [%d20], 16, 0;",
        "ca.shared.global [%r40], [%d20], 8, %r30;",
        "cg.shared.global.L2::128B [%r40], [%d20], 16;",
        "ca.shared.global.L2::64B [%r40], [%d20], 4;",
        "cg.shared.global.L2::256B [%r40], [%d20], 16, 12;",
        "cg.shared.global.L2::cache_hint [%r40], [%d20], 16, %d15;",
        "ca.shared.global [%r40], [%d20], 16, %p1;",
    ]
    ends = [
        "cp.async.wait_all;",
        "cp.async.commit_group; cp.async.wait_group 0;",
        "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;",
    ]
    lines = [
        WORDS,
        SLOT,
        "and.b32 %r30, %tx, 7; createpolicy.fractional.L2::evict_first.b64 %d15, 1.0; setp.lt.u32 %p1, %lane, 11;",
    ]
    for i, one in enumerate(variants):
        lines.append(
            f"st.shared.v4.b32 [%r40], {{%r3, %r2, %r1, %r0}}; cp.async.{one} {ends[i % 3]} ld.shared.v2.b64 {{%d1, %d2}}, [%r40]; {kept('%d1', '%d2', at=16 * i)}"  # noqa: E501
        )
    yield Whole("cp.async", "\n".join(lines))
    for noinc in ("", ".noinc"):
        body = f"""{WORDS} {SLOT} @%first mbarrier.init.shared.b64 [gate], {256 if noinc else 128}; bar.sync 0;
cp.async.ca.shared.global [%r40], [%d20+0], 16;
cp.async.mbarrier.arrive{noinc}.shared.b64 [gate]; mbarrier.arrive.shared.b64 %d5, [gate];
ON: mbarrier.try_wait.parity.shared.b64 %p1, [gate], 0; @!%p1 bra ON;
{ANOTHER} ld.shared.v2.b64 {{%d1, %d2}}, [%r9]; {kept("%d1", "%d2")}"""
        yield Whole(f"cp.async.mbarrier.arrive{noinc}", body, 128)


_WAIT = "ON: mbarrier.try_wait.parity.shared::cta.b64 %p1, [gate], 0; @!%p1 bra ON;"
_OPEN = "@%first mbarrier.init.shared::cta.b64 [gate], 1; fence.mbarrier_init.release.cluster; fence.proxy.async; bar.sync 0; mov.u32 %r30, tile; mov.u32 %r31, gate;"  # noqa: E501


def bulk_programs() -> Iterator[Whole]:
    """Bulk copies in and out, and reductions of every operation and type."""
    for into, size, more in (
        ("shared::cluster", 2048, ""),
        ("shared::cta", 4096, ""),
        ("shared::cluster", 16, ""),
        ("shared::cluster", 1008, ".L2::cache_hint"),
    ):
        hint = ", %d15" if more else ""
        yield Whole(
            f"bulk to {into} {size}",
            f"""{FILL} {_OPEN} createpolicy.fractional.L2::evict_last.b64 %d15, 1.0;
@%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], {size}; add.u64 %d1, %in, 1024; add.u32 %r32, %r30, 512;
@%first cp.async.bulk.{into}.global.mbarrier::complete_tx::bytes{more} [%r32], [%d1], {size}, [%r31]{hint};
{_WAIT} {show(0, 8192, 128)}""",
            128,
        )
    yield Whole(
        "bulk out",
        f"""{FILL} createpolicy.fractional.L2::evict_last.b64 %d15, 1.0; mov.u32 %r30, tile; add.u64 %d1, %out, 4096;
add.u64 %d2, %out, 16384;
@%first cp.async.bulk.global.shared::cta.bulk_group [%out], [%r30], 2048; @%first cp.async.bulk.commit_group;
add.u32 %r31, %r30, 64;
@%first cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%d1], [%r31], 4080, %d15;
@%first cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r30], 16;
@%first cp.async.bulk.commit_group; @%first cp.async.bulk.wait_group.read 1; @%first cp.async.bulk.wait_group 0;""",
        128,
    )
    table = {
        "add": ("u32", "s32", "u64", "f32", "f64"),
        "add.noftz": ("f16", "bf16"),
        "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
        "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
        "and": ("b32", "b64"),
        "or": ("b32", "b64"),
        "xor": ("b32", "b64"),
        "inc": ("u32",),
        "dec": ("u32",),
    }
    for op, kinds in table.items():
        for kind in kinds:
            yield Whole(
                f"bulk reduction {op}.{kind}",
                f"""{FILL} mov.u32 %r30, tile; add.u32 %r31, %r30, 2048; shl.b32 %t, %tx, 4; cvt.u64.u32 %d2, %t;
add.u64 %d2, %d2, %out;
add.u32 %t, %t, %r30; ld.shared.v2.b64 {{%d4, %d5}}, [%t]; st.global.v2.b64 [%d2], {{%d4, %d5}}; fence.proxy.async;
bar.sync 0;
@%first cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{kind} [%out], [%r31], 1536;
@%first cp.async.bulk.commit_group; @%first cp.async.bulk.wait_group 0;""",
                128,
            )


_CLUSTER = """@%first mbarrier.init.shared::cta.b64 [gate], 1; fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned; mov.u32 %r30, tile; mov.u32 %r31, gate; mov.u32 %r35, %cluster_ctarank;
mov.u32 %r36, %cluster_nctarank;
add.u32 %r37, %r35, 1; rem.u32 %r37, %r37, %r36; mapa.shared::cluster.u32 %r32, %r30, %r37;
mapa.shared::cluster.u32 %r33, %r31, %r37;"""
_APART = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
_SHOWN = (
    f"shl.b32 %r9, %tx, 4; add.u32 %r9, %r9, %r30; ld.shared.v2.b64 {{%d1, %d2}}, [%r9]; {_APART} {kept('%d1', '%d2')}"
)
"""Stores 16 bytes of `tile` a thread; no CTA ends before all have arrived here."""


_LANES = {
    "all lanes": ("", "setp.eq.u32 %p2, %tx, %tx;"),
    "half a warp": ("@%p2 ", "setp.lt.u32 %p2, %lane, 16;"),
    "lanes not elected": ("@!%p3 ", "elect.sync %r20|%p3, 0xFFFFFFFF; not.pred %p2, %p3;"),
    "lanes by their words": (
        "@%p2 ",
        "shl.b32 %r20, %lane, 2; cvt.u64.u32 %d1, %r20; add.u64 %d1, %d1, %in; ld.global.u32 %r20, [%d1]; "
        "and.b32 %r20, %r20, 1; setp.ne.u32 %p2, %r20, 0;",
    ),
}
"""By issuing lanes: the copy's guard, and the code that sets the guard and an equal %p2."""


def issued_programs() -> Iterator[Whole]:
    """Reductions that several lanes of a warp issue with equal operands: sums show one reduction for each of these
    lanes.

    Loads are left out: they leave no trace, and are not awaited before the next one writes the same bytes; an mbarrier
    that expects one of them never opens.
    """
    tensor = TiledMap("u32", (1024, 4), (4096,), (16, 4), over_output=True)
    for who, (guard, choice) in _LANES.items():
        yield Whole(
            f"bulk reductions by {who}",
            f"""{FILL} {choice} mov.u32 %r30, tile;
{guard}cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%r30], 256;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;""",
        )
        yield Whole(
            f"bulk reductions to a cluster by {who}",
            f"""{FILL} {_CLUSTER} {choice} vote.sync.ballot.b32 %r21, %p2, 0xFFFFFFFF; popc.b32 %r21, %r21;
shl.b32 %r22, %r21, 8; @%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], %r22; {_APART} add.u32 %r9, %r30, 4096;
{guard}cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r32], [%r9], 256, [%r33];
{_WAIT} {_SHOWN}""",
            32,
            2,
            2,
        )
        yield Whole(
            f"tensor reductions by {who}",
            f"""{FILL} {choice} mov.u32 %r30, tile; mov.u32 %r37, 0;
{guard}cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%map, {{%r37, %r37}}], [%r30];
{guard}cp.async.bulk.prefetch.tensor.2d.L2.global [%map, {{%r37, %r37}}];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;""",
            tensor_map=tensor,
        )


def cluster_programs() -> Iterator[Whole]:
    """CTAs of a cluster: addresses, stores, reductions and copies into the next CTA's shared memory."""
    for arrive, wait in (
        (".release.aligned", ".acquire.aligned"),
        ("", ""),
        (".aligned", ".aligned"),
        (".release", ".acquire"),
        (".relaxed.aligned", ".acquire.aligned"),
    ):
        fence = "fence.acq_rel.cluster;" if "relaxed" in arrive else ""
        yield Whole(
            f"cluster barrier {arrive}",
            f"""{WORDS} {SLOT} {_CLUSTER} add.u32 %r0, %r0, %r35; st.shared.v4.b32 [%r40], {{%r0, %r1, %r2, %r3}};
{fence} barrier.cluster.arrive{arrive}; barrier.cluster.wait{wait}; shl.b32 %r9, %tx, 4; add.u32 %r9, %r9, %r32;
ld.shared::cluster.v2.b64 {{%d1, %d2}}, [%r9];
getctarank.shared::cluster.u32 %r10, %r32; cvt.u64.u32 %d3, %r30; cvta.shared.u64 %d3, %d3; mapa.u64 %d4, %d3, %r37;
getctarank.u64 %r11, %d4; ld.u32 %r12, [%d4+4];
mapa.shared::cluster.u32 %r13, %r30, 0; getctarank.shared::cluster.u32 %r13, %r13; getctarank.u64 %r14, %d3; {_APART}
{kept("%d1", "%d2", "%r10", "%r11", "%r12", "%r13", "%r14")}""",
            64,
            4,
            4,
        )
    yield Whole(
        "cluster stores",
        f"""{WORDS} {_CLUSTER} shl.b32 %r9, %tx, 4; add.u32 %r9, %r9, %r32; add.u32 %r0, %r0, %r35;
st.shared::cluster.v4.b32 [%r9], {{%r0, %r1, %r2, %r3}};
{_APART} and.b32 %r11, %r1, 60; add.u32 %r11, %r11, %r32; red.shared::cluster.add.u32 [%r11], %r2;
add.u32 %r12, %r9, 2048; mov.u64 %d9, 5; st.shared::cluster.b64 [%r12], %d9;
atom.shared::cluster.add.u64 %d8, [%r12], %d9; {_APART} shl.b32 %r9, %tx, 4; add.u32 %r9, %r9, %r30;
ld.shared.v2.b64 {{%d1, %d2}}, [%r9]; ld.shared.b64 %d3, [%r9+2048]; {kept("%d1", "%d2", "%d8", "%d3")}""",
        64,
        2,
        2,
    )
    yield Whole(
        "one-way proxy fences",
        f"""{FILL} {WORDS} @%first mbarrier.init.shared::cta.b64 [gate+8], 64; {_CLUSTER}
@%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], 1024; shl.b32 %r9, %tx, 4; add.u32 %r9, %r9, %r30;
ld.shared.v2.b64 {{%d1, %d2}}, [%r9]; fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;
add.u32 %r10, %r33, 8; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10];
READ: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [gate+8], 0; @!%p2 bra READ;
fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster; add.u32 %r11, %r30, 4096;
@%first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r32], [%r11], 1024, [%r33]; {_WAIT}
ld.shared.v2.b64 {{%d3, %d4}}, [%r9]; {_APART} {kept("%d1", "%d2", "%d3", "%d4")}""",
        64,
        2,
        2,
    )
    yield from _copies_to_a_cluster()


def _copies_to_a_cluster() -> Iterator[Whole]:
    stores = [
        ("b32", "%r0", 4),
        ("v2.b32", "{%r0, %r1}", 8),
        ("v4.u32", "{%r0, %r1, %r2, %r3}", 16),
        ("b64", "%d0", 8),
        ("v2.u64", "{%d0, %d1}", 16),
        ("f32", "%r1", 4),
        ("s64", "%d1", 8),
    ]
    for i, (kind, value, size) in enumerate(stores):
        yield Whole(
            f"st.async {kind}",
            f"""{FILL} {WORDS} {LONGS} {_CLUSTER} @%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], {64 * size}; {_APART}
shl.b32 %r9, %tx, 4; add.u32 %r9, %r9, %r32;
st.async{".weak" if i % 2 else ""}.shared::cluster.mbarrier::complete_tx::bytes.{kind} [%r9], {value}, [%r33]; {_WAIT}
{_SHOWN}""",  # noqa: E501
            64,
            2,
            2,
        )
    table = {
        "add": ("u32", "s32", "u64"),
        "min": ("u32", "s32"),
        "max": ("u32", "s32"),
        "and": ("b32",),
        "or": ("b32",),
        "xor": ("b32",),
        "inc": ("u32",),
        "dec": ("u32",),
    }
    for op, kinds in table.items():
        for kind in kinds:
            value, size = ("%d0", 8) if kind == "u64" else ("%r20" if op in ("inc", "dec") else "%r2", 4)
            yield Whole(
                f"red.async {op}.{kind}",
                f"""{FILL} {WORDS} {LONGS} {_CLUSTER} @%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], {64 * size}; {_APART}
mov.u32 %r20, 60; and.b32 %r9, %tx, 15; shl.b32 %r9, %r9, 3; add.u32 %r9, %r9, %r32;
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op}.{kind} [%r9], {value}, [%r33]; {_WAIT}
shl.b32 %r9, %tx, 3; add.u32 %r9, %r9, %r30; ld.shared.b64 %d1, [%r9]; {_APART} {kept("%d1")}""",  # noqa: E501
                64,
                2,
                2,
            )
            yield Whole(
                f"bulk reduction to a cluster {op}.{kind}",
                f"""{FILL} {_CLUSTER} @%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], 1024;
{_APART} add.u32 %r9, %r30, 4096;
@%first cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}.{kind} [%r32], [%r9], 1024, [%r33]; {_WAIT}
{_SHOWN}""",  # noqa: E501
                64,
                2,
                2,
            )
    yield Whole(
        "bulk to a cluster",
        f"""{FILL} {_CLUSTER} @%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], 2048;
{_APART} add.u32 %r9, %r30, 4096; add.u32 %r10, %r32, 128;
@%first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r10], [%r9], 2048, [%r33]; {_WAIT}
shl.b32 %r9, %tx, 5; add.u32 %r9, %r9, %r30; ld.shared.v2.b64 {{%d1, %d2}}, [%r9];
ld.shared.v2.b64 {{%d3, %d4}}, [%r9+16]; {_APART} {kept("%d1", "%d2", "%d3", "%d4")}""",
        64,
        2,
        2,
    )
    yield Whole(
        "bulk multicast",
        f"""{FILL} {_CLUSTER} @%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], 1024; {_APART} mov.u16 %h0, 11;
setp.eq.u32 %p2, %r35, 1; and.pred %p2, %p2, %first;
setp.eq.u32 %p3, %r35, 2; @%p3 bra LEFT;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r30], [%in+4096], 1024, [%r31], %h0; {_WAIT} LEFT:
{_SHOWN}""",  # noqa: E501
        64,
        4,
        4,
    )


def tensor_programs() -> Iterator[Whole]:
    """TMA: types, ranks, swizzles, steps, fills, borders, im2col; loads, stores, reductions, prefetches, multicast.

    Left out: im2col stores. With maps whose lower corners are negative an H200 calls each an illegal instruction.
    """
    yield from _tile_programs()
    yield from _im2col_programs()
    yield from _odd_tensor_programs()


_BYTES = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "f64": 8, "u64": 8, "s64": 8}
"""Bytes of an element, if not 4."""


def _tiles() -> list[tuple[TiledMap, tuple[int, ...]]]:
    """Maps, and the origin of a box of each."""
    tiles: list[tuple[TiledMap, tuple[int, ...]]] = []
    for swizzle in ("none", "32B", "64B", "128B"):
        for dtype in ("u8", "u16", "f32", "u64", "s32", "bf16", "f16", "f64", "s64"):
            size = _BYTES.get(dtype, 4)
            inner = {"none": 64, "32B": 32, "64B": 64, "128B": 128}[swizzle] // size
            tiles.append(
                (
                    TiledMap(dtype, (256 // size, 30), (256,), (inner, 9), swizzle),
                    (16 // size * (3 - len(tiles) % 7), len(tiles) % 5 - 2),
                )
            )
    for dtype in ("f32", "f32_ftz", "tf32", "tf32_ftz", "f16", "bf16", "f64"):
        size = _BYTES.get(dtype, 4)
        tiles.append(
            (
                TiledMap(dtype, (256 // size, 32), (256,), (64 // size, 8), "64B", fill="nan"),
                (256 // size - 32 // size, 28),
            )
        )
    tiles += [
        (TiledMap("u16", (1000,), (), (128,)), (-24,)),
        (TiledMap("u16", (32, 6, 10), (64, 384), (16, 3, 4), "32B"), (8, 4, -1)),
        (TiledMap("u8", (64, 4, 4, 7), (64, 256, 1024), (32, 2, 3, 2)), (32, 3, -1, 6)),
        (TiledMap("f16", (16, 3, 4, 3, 7), (32, 96, 384, 1152), (8, 2, 3, 2, 3)), (8, 1, 2, -1, 5)),
        (TiledMap("u16", (64, 50), (128,), (64, 9), "128B", (1, 3)), (0, 2)),
        (TiledMap("u32", (32, 20, 3), (128, 2560), (8, 10, 2), "32B", (1, 2, 1)), (4, -3, 1)),
    ]
    return tiles


_REDUCTIONS: dict[str, tuple[str, ...]] = {
    "u8": (),
    "u16": (),
    "u32": ("add", "min", "max", "and", "or", "xor", "inc", "dec"),
    "s32": ("min", "max"),
    "u64": ("add", "and", "or", "xor"),
    "s64": ("min", "max"),
    "f16": ("add", "min", "max"),
    "bf16": ("add", "min", "max"),
    "f32": ("add",),
    "f64": ("add",),
}
"""Reductions to try on a tensor of each dtype, beside a plain store."""


def _tile_programs() -> Iterator[Whole]:
    for number, (tensor_map, at) in enumerate(_tiles()):
        dims = len(tensor_map.dims)
        size = _box_bytes(tensor_map)
        where = vector("r", dims, 10)
        name = f"{number} {tensor_map.dtype} {tensor_map.swizzle}"
        mode = ("", ".tile")[number % 2]
        yield Whole(
            f"tensor load {name}",
            f"""{FILL} {_OPEN} {_positions(at)} @%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], {size};
add.u32 %r32, %r30, {1024 * (number % 3)};
@%first cp.async.bulk.prefetch.tensor.{dims}d.L2.global{mode} [%map, {where}];
@%first cp.async.bulk.tensor.{dims}d.shared::{("cluster", "cta")[number % 2]}.global{mode}.mbarrier::complete_tx::bytes [%r32], [%map, {where}], [%r31]; {_WAIT} {show(0, 8192, 128)}""",  # noqa: E501
            128,
            tensor_map=tensor_map,
        )
        if tensor_map.fill == "nan":
            continue
        ops = ("", *_REDUCTIONS[tensor_map.dtype])
        op = ops[number % len(ops)]
        opcode = (
            f"cp.async.bulk.tensor.{dims}d.global.shared::cta{mode}.bulk_group"
            if not op
            else f"cp.reduce.async.bulk.tensor.{dims}d.global.shared::cta.{op}{mode}.bulk_group"
        )
        out = replace(tensor_map, over_output=True)
        yield Whole(
            f"tensor store {op or 'plain'} {name}",
            f"""{FILL} {_positions([max(one, 0) for one in at])} mov.u32 %r30, tile; shl.b32 %t, %tx, 4;
COPY: cvt.u64.u32 %d2, %t; add.u64 %d3, %d2, %out; add.u64 %d2, %d2, %in;
ld.global.v2.b64 {{%d4, %d5}}, [%d2]; st.global.v2.b64 [%d3], {{%d5, %d4}}; add.u32 %t, %t, 2048;
setp.lt.u32 %p0, %t, 8192; @%p0 bra COPY; fence.proxy.async; bar.sync 0; add.u32 %r32, %r30, {1024 * (number % 3)};
@%first {opcode} [%map, {where}], [%r32]; @%first cp.async.bulk.commit_group;
@%first cp.async.bulk.wait_group 0;""",
            128,
            tensor_map=out,
        )


def _im2col_programs() -> Iterator[Whole]:
    images = [
        (TiledMap("f16", (16, 9, 14), (32, 288), (16,), "32B", corners=((-1,), (-1,), 20)), (0, -1, 1), (1,)),
        (
            TiledMap("u16", (16, 5, 6, 8), (32, 160, 960), (8,), "none", corners=((-1, -1), (-1, -1), 24)),
            (8, 2, 1, 3),
            (2, 1),
        ),
        (
            TiledMap("u8", (32, 3, 4, 3, 6), (32, 96, 384, 1152), (32,), "32B", corners=((0, -1, 0), (-1, -1, 0), 17)),
            (0, 1, 2, 1, 2),
            (1, 2, 0),
        ),
        (
            TiledMap("f32", (8, 7, 7, 4), (32, 224, 1568), (8,), "32B", (1, 2, 2, 1), corners=((-1, -1), (0, 0), 13)),
            (0, 1, -1, 0),
            (0, 1),
        ),
    ]
    for number, (tensor_map, at, offsets) in enumerate(images):
        dims = len(at)
        size = _box_bytes(tensor_map) * tensor_map.corners[2]  # type: ignore[index]
        where, away = vector("r", dims, 10), vector("h", len(offsets))
        moved = " ".join([_positions(at), *(f"mov.u16 %h{i}, {value};" for i, value in enumerate(offsets))])
        yield Whole(
            f"im2col load {number}",
            f"""{FILL} {_OPEN} {moved} @%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], {size};
@%first cp.async.bulk.prefetch.tensor.{dims}d.L2.global.im2col [%map, {where}], {away};
@%first cp.async.bulk.tensor.{dims}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r30], [%map, {where}], [%r31], {away}; {_WAIT} {show(0, 8192, 128)}""",  # noqa: E501
            128,
            tensor_map=tensor_map,
        )


def _odd_tensor_programs() -> Iterator[Whole]:
    tile = TiledMap("u32", (32, 64), (128,), (8, 8), "32B")
    yield Whole(
        "tensor multicast",
        f"""{FILL} {_CLUSTER} @%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], 256; {_APART} mov.u16 %h0, 3;
setp.eq.u32 %p2, %r35, 1; and.pred %p2, %p2, %first;
mov.u32 %r10, 12; mov.u32 %r11, 59;
@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r30], [%map, {{%r10, %r11}}], [%r31], %h0; {_WAIT}
{_SHOWN}""",  # noqa: E501
        64,
        2,
        2,
        tensor_map=tile,
    )
    yield Whole(
        "tensor map changed in shared memory",
        f"""{FILL} {_OPEN} setp.lt.u32 %p5, %tx, 8; mul.wide.u32 %d1, %tx, 16; add.u64 %d1, %d1, %map;
shl.b32 %r20, %tx, 4; add.u32 %r20, %r20, %r30;
@%p5 ld.v2.b64 {{%d2, %d3}}, [%d1]; @%p5 st.shared.v2.b64 [%r20+8192], {{%d2, %d3}}; bar.sync 0;
add.u32 %r21, %r30, 8192; mov.b64 %d4, 0; add.u64 %d5, %out, 32768; mov.u32 %r22, 16;
@%first tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r21], 0, %r22;
@%first tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r21], 1, 5;
bar.sync 0; setp.ne.u32 %p6, %warp, 0; @%p6 bra COPIED;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d5], [%r21], 128;
COPIED: bar.sync 0; fence.proxy.tensormap::generic.acquire.gpu [%d5], 128; mov.u32 %r10, 12; mov.u32 %r11, 3;
@%first mbarrier.arrive.expect_tx.shared.b64 _, [gate], 160;
@%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r30], [%d5, {{%r10, %r11}}], [%r31]; {_WAIT} {show(0, 512, 128)}
bar.sync 0; setp.lt.u32 %p5, %tx, 8; mul.wide.u32 %d1, %tx, 16; add.u64 %d1, %d1, %out; mov.u64 %d2, 0;
@%p5 st.global.v2.b64 [%d1+32768], {{%d2, %d2}};""",  # noqa: E501
        128,
        tensor_map=tile,
    )


def _positions(at: Sequence[int]) -> str:
    return " ".join(f"mov.s32 %r{10 + i}, {value};" for i, value in enumerate(at))


def _box_bytes(tensor_map: TiledMap) -> int:
    """Bytes that a copy brings to shared memory; for an im2col map, bytes of each pixel."""
    size = _BYTES.get(tensor_map.dtype, 4)
    steps = tensor_map.element_strides or (1,) * len(tensor_map.box)
    for extent, step in zip(tensor_map.box, steps, strict=False):
        size *= -(-extent // step)
    return size
