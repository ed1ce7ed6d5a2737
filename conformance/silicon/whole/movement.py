"""Programs that move data, meet and wait: memory, atomics, barriers, fences, control and mbarriers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from conformance.silicon.whole.programs import ANOTHER, LONGS, SLOT, WORDS, Whole, kept


def barrier_programs() -> Iterator[Whole]:
    """A thread stores before a barrier and another reads after it; and reductions of barriers."""
    plain = (
        "bar.sync 0;",
        "bar.sync 1, 128;",
        "barrier.sync 0;",
        "barrier.sync 3, 128;",
        "barrier.sync.aligned 2;",
        "bar.cta.sync 0;",
        "bar.cta.sync 4, 128;",
        "barrier.cta.sync 1;",
        "barrier.cta.sync.aligned 1, 128;",
        "mov.u32 %r7, 5; bar.sync %r7, 128;",
    )
    pred = "and.b32 %r6, %r0, 1; setp.ne.u32 %p1, %r6, 0; setp.ne.u32 %p2, %tx, 7;"
    reduced = [
        f"{pred} {base}.{op} {result}, {number}{count}, {source}; {after}"
        for base, number, count in (
            ("bar.red", 0, ""),
            ("bar.cta.red", 2, ", 128"),
            ("barrier.red", 1, ", 128"),
            ("barrier.cta.red.aligned", 0, ""),
            ("barrier.red.aligned", 6, ""),
        )
        for op, result, source, after in (
            ("popc.u32", "%r8", "%p1", ""),
            ("and.pred", "%p3", "%p2", "selp.b32 %r8, 1, 0, %p3;"),
            ("or.pred", "%p3", "!%p2", "selp.b32 %r8, 1, 0, %p3;"),
            ("and.pred", "%p3", "%p2", "selp.b32 %r8, 5, 6, %p3;"),
        )
    ]
    for meeting in (*plain, *reduced):
        body = f"""{WORDS} {SLOT} mov.u32 %r8, 0; st.shared.v4.b32 [%r40], {{%r0, %r1, %r2, %r3}}; {meeting}
{ANOTHER} ld.shared.b64 %d1, [%r9+8]; {kept("%d1", "%r8")}"""
        yield Whole(f"meets {meeting}", body, 128)
    for arrive, sync in (
        ("bar.arrive 1, 128;", "bar.sync 1, 128;"),
        ("bar.cta.arrive 2, 128;", "bar.cta.sync 2, 128;"),
        ("barrier.arrive 1, 128;", "barrier.sync 1, 128;"),
        ("barrier.cta.arrive.aligned 3, 128;", "barrier.cta.sync.aligned 3, 128;"),
    ):
        body = f"""{WORDS} {SLOT} st.shared.v4.b32 [%r40], {{%r0, %r1, %r2, %r3}}; setp.lt.u32 %p1, %tx, 64;
mov.b64 %d1, 0; @%p1 bra ARRIVES; {sync} {ANOTHER} ld.shared.b64 %d1, [%r9];
bra DONE; ARRIVES: {arrive} DONE: {kept("%d1")}"""
        yield Whole(f"arrives {arrive}", body, 128)
    for mask, guard in (
        ("0xFFFFFFFF", ""),
        ("0x0000FFFF", "setp.lt.u32 %p1, %lane, 16; @!%p1 bra OUT;"),
        ("0xA5A5A5A5", "shr.u32 %r9, 0xA5A5A5A5, %lane; and.b32 %r9, %r9, 1; setp.eq.u32 %p1, %r9, 1; @!%p1 bra OUT;"),
    ):
        body = f"""{WORDS} {SLOT} mov.u32 %r5, 0; {guard} st.shared.v4.b32 [%r40], {{%r0, %r1, %r2, %r3}};
bar.warp.sync {mask}; xor.b32 %r9, %tx, 5; mad.lo.u32 %r9, %r9, 16, %r41; xor.b32 %r10, %lane, 5;
shr.u32 %r11, {mask}, %r10; and.b32 %r11, %r11, 1; setp.ne.u32 %p2, %r11, 0; @%p2 ld.shared.u32 %r5, [%r9];
OUT: {kept("%r5")}"""
        yield Whole(f"warp {mask}", body, 128)
    scopes = ("cta", "cluster", "gpu", "sys")
    fences = [f"fence.{sem}.{scope};" for sem in ("sc", "acq_rel", "acquire", "release") for scope in scopes]
    fences += [f"fence.{scope};" for scope in scopes] + [f"membar.{level};" for level in ("cta", "gl", "sys")]
    fences += [f"fence.proxy.async{space};" for space in ("", ".global", ".shared::cta", ".shared::cluster")]
    fences += [
        "fence.proxy.alias;",
        "fence.mbarrier_init.release.cluster;",
        "fence.acquire.sync_restrict::shared::cluster.cluster;",
        "fence.release.sync_restrict::shared::cta.cluster;",
    ]
    fences += [f"fence.proxy.tensormap::generic.release.{scope};" for scope in scopes]
    fences += [f"fence.proxy.tensormap::generic.acquire.{scope} [%map], 128;" for scope in scopes]
    for part, some in enumerate((fences[:16], fences[16:27], fences[27:])):
        lines = [WORDS, SLOT]
        for i, fence in enumerate(some):
            lines.append(
                f"add.u32 %r0, %r0, %r{1 + i % 3}; st.shared.u32 [%r40], %r0; st.global.u32 [%own+256], %r0; {fence} "
                f"bar.sync 0; xor.b32 %r9, %tx, {i + 1}; mad.lo.u32 %r9, %r9, 16, %r41; ld.shared.u32 %r10, [%r9]; "
                f"st.global.u32 [%own+{4 * i}], %r10; bar.sync 0;"
            )
        yield Whole(f"fences {part}", "\n".join(lines), 128)


def control_programs() -> Iterator[Whole]:
    """Jumps, jump tables, calls, exits of some lanes, and instructions that only take time."""
    yield Whole(
        "bra.uni",
        f"{WORDS} bra.uni ON; add.u32 %r0, %r0, 1; ON: mov.u32 %r9, 3; AGAIN: mad.lo.u32 %r0, %r0, 5, %r1; "
        f"sub.u32 %r9, %r9, 1; setp.ne.u32 %p1, %r9, 0; @%p1 bra.uni AGAIN; {kept('%r0')}",
    )
    for uni, index in (("", "%r0"), (".uni", "%warp")):
        yield Whole(
            f"brx{uni}",
            f"""{WORDS} and.b32 %r9, {index}, 3; TABLE: .branchtargets ONE, TWO, THREE, FOUR;
brx.idx{uni} %r9, TABLE; ONE: add.u32 %r1, %r1, %r2; bra DONE; TWO: mul.lo.u32 %r1, %r1, %r2;
THREE: xor.b32 %r1, %r1, %r3;
bra DONE; FOUR: not.b32 %r1, %r1; DONE: {kept("%r1")}""",
            128,
        )
    yield Whole(
        "exit",
        f"{WORDS} {kept('%r0')} and.b32 %r9, %r0, 3; setp.eq.u32 %p1, %r9, 0; @%p1 exit; {kept('%r1', at=8)} "
        f"setp.lt.s32 %p2, %r2, 0; @%p2 ret; {kept('%r2', at=16)}",
    )
    yield Whole("ret.uni", f"{WORDS} {kept('%r0')} setp.gt.u32 %p1, %warp, 1; @%p1 ret.uni; {kept('%r1', at=8)}", 128)
    yield Whole(
        "passes time", f"{WORDS} nanosleep.u32 20; nanosleep.u32 %lane; pmevent 3; pmevent.mask 5; {kept('%r0')}"
    )
    yield Whole("griddepcontrol", f"{WORDS} griddepcontrol.launch_dependents; griddepcontrol.wait; {kept('%r0')}", 128)
    yield Whole(
        "setmaxnreg",
        f"""{WORDS} setp.lt.u32 %p1, %tx, 128; @%p1 bra LESS; setmaxnreg.inc.sync.aligned.u32 152;
add.u32 %r0, %r0, %r1; bra DONE; LESS: setmaxnreg.dec.sync.aligned.u32 40; sub.u32 %r0, %r0, %r1;
DONE: {kept("%r0")}""",
        256,
        directives=".maxntid 256, 1, 1 .maxnreg 128",
    )
    function = """.func (.param .b32 out) FN(.param .b32 first, .param .b64 second) { .reg .b32 %x, %k; .reg .b64 %y;
ld.param.b32 %x, [first]; ld.param.b64 %y, [second]; cvt.u32.u64 %k, %y; BODY st.param.b32 [out], %x; ret; }"""
    module = function.replace("FN", "sums").replace("BODY", "add.u32 %x, %x, %k;") + function.replace(
        "FN", "mixes"
    ).replace("BODY", "mad.lo.u32 %x, %x, 33, %k; xor.b32 %x, %x, 7;")
    given = "{ .param .b32 of, first; .param .b64 second; st.param.b32 [first], %r0; st.param.b64 [second], %d0;"
    back = "ld.param.b32 %r5, [of]; }"
    yield Whole(
        "calls",
        f"""{WORDS} {LONGS} setp.lt.s32 %p1, %r1, 0; {given} call.uni (of), sums, (first, second);
{back} @%p1 bra OVER; {given} call (of), mixes, (first, second);
{back} OVER:
{kept("%r5")}""",
        128,
        module=module,
    )
    yield Whole("activemask", f"activemask.b32 %r5; setp.lt.u32 %p1, %lane, 32; {kept('%r5')}")


def memory_programs() -> Iterator[Whole]:
    """Loads, stores, address spaces, hints and policies."""
    yield from _loads()
    yield from _loads_of_other_spaces()
    yield from _stores()
    yield from _stores_to_shared()
    yield _wrapped()
    yield from _hints()


def _wrapped() -> Whole:
    """Registers below 0 whose offset leads back into memory."""
    return Whole(
        "addresses that wrap",
        f"""{WORDS} {SLOT} .local .align 16 .b8 own[16]; sub.u32 %r42, %r40, 1048576; mov.u32 %r43, own;
sub.u32 %r43, %r43, 1048576; st.shared.v4.b32 [%r42+1048576], {{%r0, %r1, %r2, %r3}};
ld.shared.v2.b64 {{%d1, %d2}}, [%r42+1048576]; atom.shared.add.u32 %r9, [%r42+1048580], %r2;
red.shared.xor.b32 [%r42+1048584], %r1; ld.shared.v2.b64 {{%d3, %d4}}, [%r40]; st.local.b64 [%r43+1048576], %d3;
ld.local.b64 %d5, [%r43+1048576]; cp.async.ca.shared.global [%r42+1048576], [%d20], 8; cp.async.wait_all;
ld.shared.b64 %d6, [%r42+1048576]; {kept("%d1", "%d2", "%r9", "%d3", "%d4", "%d5", "%d6")}""",
    )


_POLICY = "createpolicy.fractional.L2::evict_last.b64 %d15, 1.0;"


def _loads() -> Iterator[Whole]:
    ends = (
        "acquire.cta",
        "acquire.cluster",
        "acquire.gpu",
        "acquire.sys",
        "relaxed.cta",
        "relaxed.gpu",
        "relaxed.sys",
        "volatile",
        "weak",
        "mmio.relaxed.sys",
    )
    loads = [f"ld.{end}.global.u32 %r9, [%d20+4];" for end in ends]
    loads += [f"ld.{end}.u32 %r9, [%d20+8];" for end in ("relaxed.gpu", "weak", "volatile")]
    loads += [f"ld.global.{word}.u32 %r9, [%d20+12];" for word in ("ca", "cg", "cs", "cv", "lu")]
    loads += [
        f"ld.global.{word}.u32 %r9, [%d20];"
        for word in (
            "nc",
            "nc.ca",
            "nc.L1::no_allocate",
            "L1::evict_first",
            "L1::evict_last",
            "L1::evict_normal",
            "L1::evict_unchanged",
            "L1::no_allocate",
            "L2::64B",
            "L2::128B",
            "L2::256B",
            "nc.L1::evict_last.L2::128B",
        )
    ]
    loads += [f"ld.global.{kind} %r9, [%d20+{at}];" for kind in ("u8", "s8", "b8") for at in (0, 1, 7)]
    loads += [f"ld.global.{kind} %r9, [%d20+{at}];" for kind in ("u16", "s16", "b16") for at in (0, 6)]
    loads += [
        "ld.global.s32 %d9, [%d20+4];",
        "ld.global.u32 %d9, [%d20+4];",
        "ld.global.s8 %d9, [%d20+3];",
        "ld.global.nc.v2.u16 {%h0, %h1}, [%d20]; mov.b32 %r9, {%h1, %h0};",
        "ld.global.v4.u8 {%r9, %r10, %r11, %r12}, [%d20]; mad.lo.u32 %r9, %r11, 256, %r9;",
        "ld.global.nc.v2.f64 {%d9, %d8}, [%d20]; xor.b64 %d9, %d9, %d8;",
        "ld.global.b128 %q0, [%d20]; mov.b128 {%d9, %d8}, %q0;",
        "ldu.global.u32 %r9, [%in+64];",
        "ldu.global.v4.b32 {%r9, %r10, %r11, %r12}, [%in+32]; xor.b32 %r9, %r10, %r12;",
        "ldu.global.b64 %d9, [%in+16];",
        "ld.param.u64 %d9, [pin]; sub.u64 %d9, %d9, %in;",
        "ld.param::entry.u32 %r9, [pmap+64];",
        "ld.const.u32 %r9, [numbers+8];",
        "ld.const.v2.u32 {%r9, %r10}, [numbers]; xor.b32 %r9, %r9, %r10;",
    ]
    loads += [
        f"{_POLICY} ld.global.L2::cache_hint.u32 %r9, [%d20], %d15;",
        f"{_POLICY} ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {{%r9, %r10}}, [%d20], %d15;",
    ]
    yield _each("loads of global memory", loads[:32])
    yield _each(
        "loads of global memory 2", loads[32:], module=".const .align 16 .b32 numbers[4] = {3, 5, 0x80000001, 77};"
    )


def _loads_of_other_spaces() -> Iterator[Whole]:
    shared = [f"ld.{end}.shared.u32 %r9, [%r40+4];" for end in ("volatile", "weak", "relaxed.cta", "acquire.cluster")]
    shared += [
        f"ld.shared{space}.{kind} %r9, [%r40+{at}];"
        for space, kind, at in (
            ("", "u8", 3),
            ("::cta", "s8", 5),
            ("::cluster", "u32", 4),
            ("", "s16", 2),
            ("::cta", "b32", 12),
            ("::cluster", "u16", 8),
        )
    ]
    shared += [
        "ld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r40]; xor.b32 %r9, %r9, %r12;",
        "ld.shared.v2.b64 {%d8, %d9}, [%r40];",
        "cvt.u64.u32 %d8, %r40; cvta.shared.u64 %d8, %d8; ld.u32 %r9, [%d8+4];",
        "cvt.u64.u32 %d8, %r40; cvta.shared::cta.u64 %d8, %d8; cvta.to.shared.u64 %d8, %d8; cvt.u32.u64 %r10, %d8; "
        "ld.shared.u32 %r9, [%r10+8];",
        "mov.u64 %d8, own; cvta.local.u64 %d8, %d8; ld.u32 %r9, [%d8+4];",
        "ld.local.v2.u32 {%r9, %r10}, [own+8];",
        "mov.u64 %d8, own; ld.local.u32 %r9, [%d8+12];",
        "ld.local.s8 %r9, [own+3];",
        "cvta.to.global.u64 %d8, %d20; cvta.global.u64 %d8, %d8; ld.u32 %r9, [%d8];",
        "mov.u64 %d8, values; cvta.const.u64 %d8, %d8; ld.u32 %r9, [%d8+4];",
        "ld.shared.b128 %q0, [%r40]; mov.b128 {%d8, %d9}, %q0;",
    ]
    shared += [
        f"{to} isspacep.{space} %p1, %d8; selp.b32 %r9, 1, 0, %p1;"
        for space in ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
        for to in (
            "mov.b64 %d8, %d20;",
            "cvt.u64.u32 %d8, %r40; cvta.shared.u64 %d8, %d8;",
            "mov.u64 %d8, own; cvta.local.u64 %d8, %d8;",
        )
    ]
    yield _each(
        "loads of other spaces",
        shared,
        module=".const .align 16 .b32 values[4] = {3, 5, 0x80000001, 77};",
        before=f"{SLOT} .local .align 16 .b8 own[16]; st.local.v4.b32 [own], {{%r3, %r2, %r1, %r0}}; "
        "st.shared.v4.b32 [%r40], {%r0, %r1, %r2, %r3};",
    )


def _stores() -> Iterator[Whole]:
    stores = [
        f"st.{end}.global.u32 [%own], %r0;"
        for end in (
            "release.cta",
            "release.cluster",
            "release.gpu",
            "release.sys",
            "relaxed.gpu",
            "volatile",
            "weak",
            "mmio.relaxed.sys",
        )
    ]
    stores += [
        f"st.global.{word}.u32 [%own], %r1;"
        for word in (
            "wb",
            "cg",
            "cs",
            "wt",
            "L1::no_allocate",
            "L1::evict_last",
            "L1::evict_first",
            "L1::evict_unchanged",
            "L1::evict_normal",
        )
    ]
    stores += [
        f"{_POLICY} st.global.L2::cache_hint.v2.u32 [%own], {{%r1, %r2}}, %d15;",
        "st.u32 [%own], %r3;",
        "st.global.u8 [%own+3], %r0;",
        "st.global.b16 [%own+2], %r1;",
        "st.global.v4.u8 [%own], {%r0, %r1, %r2, %r3};",
        "st.global.v2.f64 [%own], {%d0, %d1};",
        "mov.b128 %q0, {%d0, %d1}; st.global.b128 [%own], %q0;",
        "st.global.v4.f32 [%own], {%r3, %r2, %r1, %r0};",
        "st.global.s16 [%own+6], %r2;",
    ]
    lines = [WORDS, LONGS]
    for i, store in enumerate(stores):
        lines.append(f"add.u64 %d8, %own, {16 * i}; {store.replace('%own', '%d8')}")
    yield Whole("stores to global memory", "\n".join(lines))


def _stores_to_shared() -> Iterator[Whole]:
    into = [f"st.{end}.shared.u32 [%r40], %r0;" for end in ("release.cta", "relaxed.cta", "volatile", "weak")]
    into += [
        "st.shared::cta.v2.u32 [%r40+8], {%r1, %r2};",
        "st.shared::cluster.u8 [%r40+5], %r3;",
        "st.shared.b64 [%r40], %d0;",
        "st.shared.v4.b32 [%r40], {%r3, %r1, %r0, %r2};",
        "st.shared.u16 [%r40+2], %r3;",
        "st.local.u16 [own+2], %r3;",
        "st.local.b64 [own+8], %d1;",
    ]
    lines = [
        WORDS,
        LONGS,
        SLOT,
        ".local .align 16 .b8 own[16]; st.shared.v4.b32 [%r40], {%r0, %r1, %r2, %r3}; st.local.v4.b32 [own], {%r0, %r1, %r2, %r3};",  # noqa: E501
    ]
    for i, store in enumerate(into):
        lines.append(
            f"{store} ld.shared.v4.b32 {{%r9, %r10, %r11, %r12}}, [%r40]; ld.local.v4.b32 {{%r13, %r14, %r15, %r16}}, [own]; "  # noqa: E501
            f"st.global.v4.b32 [%own+{32 * i}], {{%r9, %r10, %r11, %r12}}; st.global.v4.b32 [%own+{32 * i + 16}], {{%r13, %r14, %r15, %r16}};"  # noqa: E501
        )
    yield Whole("stores to shared memory", "\n".join(lines))


def _hints() -> Iterator[Whole]:
    hints = [
        "prefetch.global.L1 [%d20];",
        "prefetch.global.L2 [%d20];",
        "prefetch.L1 [%d20];",
        "prefetch.L2 [%d20];",
        "prefetch.local.L1 [own];",
        "prefetch.global.L2::evict_last [%d20];",
        "prefetch.global.L2::evict_normal [%d20];",
        "prefetchu.L1 [%d20];",
        "applypriority.global.L2::evict_normal [%in], 128;",
        "applypriority.L2::evict_normal [%in+128], 128;",
        "prefetch.tensormap [%map];",
        "prefetch.param.tensormap [pmap];",
        "cp.async.bulk.prefetch.L2.global [%in], 512;",
        f"{_POLICY} cp.async.bulk.prefetch.L2.global.L2::cache_hint [%in], 64, %d15;",
        "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %d15, 0.5; ld.global.L2::cache_hint.u32 %r9, [%d20], %d15;",  # noqa: E501
        "createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %d15, [%in], 1024, 4096; ld.global.L2::cache_hint.u32 %r9, [%d20], %d15;",  # noqa: E501
        "createpolicy.range.L2::evict_first.b64 %d15, [%in], 1024, 4096; ld.global.L2::cache_hint.u32 %r9, [%d20+4], %d15;",  # noqa: E501
        "createpolicy.cvt.L2.b64 %d15, 0x14F0000000000000; ld.global.L2::cache_hint.u32 %r9, [%d20+8], %d15;",
    ]
    yield _each("hints", hints, before=".local .align 16 .b8 own[16]; st.local.u32 [own], %r0;")
    yield Whole(
        "discard",
        f"{WORDS} discard.global.L2 [%own], 128; discard.L2 [%own+128], 128; "
        + " ".join(f"st.global.v4.b32 [%own+{at}], {{%r0, %r1, %r2, %r3}};" for at in range(0, 256, 16)),
    )


def _each(name: str, lines: Sequence[str], *, before: str = "", module: str = "") -> Whole:
    """Each line sets %r9 or %d9; all are stored. It finds words in %r0..%r3 and %d0, %d1, which are loaded from
    %d20."""
    text = [WORDS, LONGS, before]
    for i, line in enumerate(lines):
        text.append(f"mov.u32 %r9, {i}; mov.u64 %d9, 0; {line} {kept('%r9', '%d9', at=16 * i)}")
    return Whole(name, "\n".join(text), 32, module=module)


_SEMANTICS = ("", ".relaxed.gpu", ".acquire.cta", ".release.sys", ".acq_rel.cluster")


def atomic_programs() -> Iterator[Whole]:
    """Every operation and type, in both spaces, on the thread's own cells; reductions of all threads into few cells."""
    table = {
        "add": ("u32", "s32", "u64", "f32", "f64"),
        "min": ("u32", "s32", "u64", "s64"),
        "max": ("u32", "s32", "u64", "s64"),
        "and": ("b32", "b64"),
        "or": ("b32", "b64"),
        "xor": ("b32", "b64"),
        "inc": ("u32",),
        "dec": ("u32",),
        "exch": ("b32", "b64"),
        "cas": ("b32", "b64"),
    }
    operations = [(op, kind) for op, kinds in table.items() for kind in kinds]
    halves = [("add.noftz", kind) for kind in ("f16", "f16x2", "bf16", "bf16x2")]
    for space, cell in (
        ("shared", "%r40"),
        ("global", "%own"),
        ("shared::cta", "%r40"),
        ("", "%own"),
        ("shared::cluster", "%r40"),
    ):
        lines = [WORDS, LONGS, SLOT, "mov.b32 {%h0, %h1}, %r1; ld.global.v2.b64 {%d2, %d3}, [%d20+16];"]
        spelt = f".{space}" if space else ""
        for i, (op, kind) in enumerate([*operations, *halves, ("cas", "b16"), ("exch", "b128"), ("cas", "b128")]):
            bits = {"f16x2": 32, "bf16x2": 32, "bf16": 16}.get(kind) or int(kind.lstrip("usbf"))
            sem = _SEMANTICS[i % 5] if kind != "b128" else ""
            at = 1024 if cell == "%own" else 0
            lines.append(f"st.{'shared' if cell == '%r40' else 'global'}.v2.b64 [{cell}+{at}], {{%d2, %d3}};")
            a, b = {16: ("%h0", "%h1"), 32: ("%r0", "%r3"), 64: ("%d0", "%d1"), 128: ("%q0", "%q1")}[bits]
            if op == "cas" and i % 2:
                b, a = a, b
            d = {16: "%h2", 32: "%r9", 64: "%d9", 128: "%q2"}[bits]
            if bits == 128:
                lines.append("mov.b128 %q0, {%d2, %d3}; mov.b128 %q1, {%d0, %d1};")
            operands = f"{a}, {b}" if op == "cas" else a
            lines.append(
                f"mov.u32 %r9, 0; mov.u64 %d9, 0; mov.u16 %h2, 0; atom{sem}{spelt}.{op}.{kind} {d}, [{cell}+{at}], {operands};"  # noqa: E501
            )
            if bits == 128:
                lines.append("mov.b128 {%d9, %d10}, %q2;")
            lines.append("cvt.u32.u16 %r10, %h2; or.b32 %r9, %r9, %r10;")
            if op not in ("exch", "cas"):
                lines.append(
                    f"red{_SEMANTICS[i % 5 // 3 * 3] if sem else ''}{spelt}.{op}.{kind} [{cell}+{at}], {operands};"
                )
            lines.append(f"ld.{'shared' if cell == '%r40' else 'global'}.v2.b64 {{%d4, %d5}}, [{cell}+{at}];")
            lines.append(kept("%r9", "%d9", "%d4", "%d5", at=32 * i))
        yield Whole(f"atomics {space or 'generic'}", "\n".join(lines))
    yield from _vector_atomics()
    yield from _reductions_of_all()


def _vector_atomics() -> Iterator[Whole]:
    vectors = [
        *((f"add.v{n}.f32", [f"%r{i}" for i in range(n)], [f"%r{9 + i}" for i in range(n)]) for n in (2, 4)),
        *(
            (f"{op}.noftz.v{n}.{kind}", [f"%r{i}" for i in range(n)], [f"%r{9 + i}" for i in range(n)])
            for op in ("add", "min", "max")
            for n in (2, 4)
            for kind in ("f16x2", "bf16x2")
        ),
        *(
            (f"{op}.noftz.v{n}.{kind}", [f"%h{i % 2}" for i in range(n)], [f"%h{2 + i}" for i in range(n)])
            for op in ("add", "max")
            for n in (2, 4)
            for kind in ("f16", "bf16")
        ),
    ]
    lines = [WORDS, "mov.b32 {%h0, %h1}, %r1;"]
    for i, (op, sources, results) in enumerate(vectors):
        lines.append(
            "st.global.v4.b32 [%own+1024], {%r3, %r2, %r1, %r0}; "
            f"atom{_SEMANTICS[i % 5]}.global.{op} {{{', '.join(results)}}}, [%own+1024], {{{', '.join(sources)}}};"
        )
        lines.append(
            f"red.global.{op} [%own+1024], {{{', '.join(sources)}}}; ld.global.v2.b64 {{%d4, %d5}}, [%own+1024];"
        )
        lines.append(kept("%d4", "%d5", results[0], results[-1], at=32 * i))
    yield Whole("atomics of vectors", "\n".join(lines))


def _reductions_of_all() -> Iterator[Whole]:
    for op, kind in (
        ("add", "u32"),
        ("min", "s32"),
        ("max", "u32"),
        ("and", "b32"),
        ("or", "b32"),
        ("xor", "b32"),
        ("inc", "u32"),
        ("add", "u64"),
        ("max", "s64"),
        ("xor", "b64"),
    ):
        value = "%d0" if kind.endswith("64") else "1000" if op == "inc" else "%r0"
        body = f"""{WORDS} {LONGS} setp.lt.u32 %p1, %tx, 16; mov.u32 %r41, tile;
shl.b32 %r42, %tx, 3;
add.u32 %r42, %r42, %r41; @%p1 st.shared.b64 [%r42], %d1; bar.sync 0; and.b32 %r43, %r1, 120;
add.u32 %r43, %r43, %r41; setp.ne.u32 %p2, %lane, 9;
@%p2 red.shared.{op}.{kind} [%r43], {value}; cvt.u64.u32 %d6, %r43; and.b64 %d6, %d6, 120; add.u64 %d6, %d6, %out;
red.global.{op}.{kind} [%d6+65280], {value};
bar.sync 0; mov.u64 %d7, 0; @%p1 ld.shared.b64 %d7, [%r42]; {kept("%d7")}"""
        yield Whole(f"reductions of all {op} {kind}", body, 128)


def barrier_histories() -> Iterator[Whole]:
    """Random histories of an mbarrier, with every permitted query after each operation."""
    for seed in range(24):
        yield Whole(f"mbarrier history {seed}", _history(Random(seed)), 32)
    for scope, sem in (
        ("", ""),
        (".cta", ".acquire"),
        (".cluster", ".acquire"),
        (".cta", ".relaxed"),
        (".cluster", ".relaxed"),
    ):
        for way in ("try_wait", "test_wait"):
            arrive = ".release" if sem == ".acquire" else sem
            body = f"""{WORDS} {SLOT} @%first mbarrier.init.shared::cta.b64 [gate], 128; bar.sync 0;
st.shared.v4.b32 [%r40], {{%r0, %r1, %r2, %r3}};
{"fence.acq_rel.cta;" if sem == ".relaxed" else ""} mbarrier.arrive{arrive}{scope}.shared::cta.b64 %d5, [gate];
ON: mbarrier.{way}{sem}{scope}.shared::cta.b64 %p1, [gate], %d5; @!%p1 bra ON;
{"fence.acq_rel.cta;" if sem == ".relaxed" else ""} {ANOTHER}
ld.shared.b64 %d1, [%r9]; mbarrier.arrive{arrive}{scope}.shared.b64 %d6, [gate];
mov.u32 %r30, gate; cvt.u64.u32 %d8, %r30; cvta.shared.u64 %d8, %d8;
TWO: mbarrier.{way}.parity{sem}{scope}.b64 %p1, [%d8], 1; @!%p1 bra TWO; {kept("%d1")}"""
            yield Whole(f"waits {way}{sem}{scope}", body, 128)


def _history(draw: Random) -> str:
    """History by one thread. `expected`: arrivals a phase; `pending`: of this phase; `tx`: bytes still expected."""
    lines = [
        f"@!%first ret; mbarrier.init.shared::cta.b64 [gate], {(expected := 2 + draw.getrandbits(4))}; mov.u64 %d1, 0;"
    ]
    pending, tx, token, at = expected, 0, False, 0
    for _ in range(20):
        kind = draw.choice(
            ("arrive", "arrive", "count", "expect_tx", "both", "complete", "complete", "drop", "nocomplete")
        )
        space = draw.choice((".shared", ".shared::cta"))
        if pending <= 1 and tx:
            kind = "complete"
        count, size = 1, 0
        if kind == "arrive":
            lines.append(
                f"mbarrier.arrive{draw.choice(('', '.release.cta', '.relaxed.cluster'))}{space}.b64 %d1, [gate];"
            )
        elif kind == "count":
            count = 1 + draw.getrandbits(8) % max(pending - (1 if tx else 0), 1)
            lines.append(f"mbarrier.arrive{space}.b64 %d1, [gate], {count};")
        elif kind == "nocomplete" and pending > 1:
            count = 1 + draw.getrandbits(8) % (pending - 1)
            lines.append(
                f"mbarrier.arrive.noComplete{draw.choice(('', '.release.cta'))}{space}.b64 %d1, [gate], {count};"
            )
        elif kind == "both" and pending > 1:
            size = draw.getrandbits(12)
            lines.append(
                f"mbarrier.arrive.expect_tx{draw.choice(('', '.release.cta'))}{space}.b64 %d1, [gate], {size};"
            )
        elif kind == "drop" and expected > 2:
            expected -= 1
            lines.append(f"mbarrier.arrive_drop{space}.b64 %d1, [gate];")
        elif kind == "expect_tx":
            count, size = 0, draw.getrandbits(12)
            lines.append(f"mbarrier.expect_tx.relaxed.cta{space}.b64 [gate], {size};")
        elif tx:
            count, size = 0, -(tx if draw.getrandbits(1) else 1 + draw.getrandbits(12) % tx)
            lines.append(f"mbarrier.complete_tx.relaxed.cta{space}.b64 [gate], {-size};")
        else:
            lines.append("mbarrier.arrive.shared.b64 %d1, [gate];")
        token = token or "%d1" in lines[-1]
        pending, tx = pending - count, tx + size
        if pending == 0 and tx == 0:
            pending = expected
        lines.append(
            "mbarrier.test_wait.parity.shared::cta.b64 %p1, [gate], 0; mbarrier.test_wait.parity.shared::cta.b64 %p2, [gate], 1; "  # noqa: E501
            "selp.b32 %r9, 1, 0, %p1; selp.b32 %r10, 2, 0, %p2; or.b32 %r9, %r9, %r10;"
        )
        if token:
            lines.append(
                "mbarrier.pending_count.b64 %r11, %d1; mad.lo.u32 %r9, %r11, 16, %r9; mbarrier.test_wait.shared::cta.b64 %p1, [gate], %d1; "  # noqa: E501
                "selp.b32 %r10, 4, 0, %p1; or.b32 %r9, %r9, %r10;"
            )
        lines.append(f"st.global.b32 [%own+{at}], %r9;")
        at += 4
    lines.append("mbarrier.inval.shared.b64 [gate];")
    return "\n".join(lines)
