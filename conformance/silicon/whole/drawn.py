"""Random programs without undefined behaviour: the same text for the same number, on any Python.

A program is one CTA of four to six warps: at least MIN_INSTRUCTIONS instructions, loops, branches that diverge, shared,
global and local memory, barriers, shuffles and votes; every tenth one also wgmma or a copy by TMA. Each thread begins
with words of INPUT in its registers and ends by storing all of them, so that one wrong bit shows.

Behaviour stays defined as follows: every register and byte is written before it is read; a thread writes its own slot
of shared memory, and reads the slots of others between two barriers; results of atomics on shared cells are dropped,
while those on a thread's own cell are used; floating-point instructions spell their rounding, so that ptxas contracts
nothing; shifts of bit fields stay below 32, divisors are odd; a shuffle with a partial mask reads lanes of the mask.
This file needs only the standard library: the device machine draws the same programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeVar

HEAD: Final = ".version 8.7\n.target sm_90a\n.address_size 64\n"
MIN_INSTRUCTIONS: Final = 100
INPUT_WORDS: Final = 2048
"""32-bit words of INPUT, which every program reads: 64 rows of 32."""
OUTPUT_BYTES: Final = 24576
"""A program's own bytes: its registers, 96 bytes a thread, then THREAD_CELLS, CELLS and COPIED."""
THREADS_MOST: Final = 192
SLOT: Final = 16
_DUMP: Final = 96
THREAD_CELLS: Final = THREADS_MOST * _DUMP
CELLS: Final = THREAD_CELLS + THREADS_MOST * SLOT
COPIED: Final = CELLS + 64
COPIED_BYTES: Final = 1024
_TILE: Final = 8192
MAPS: Final = (("none", (32, 4)), ("32B", (8, 16)), ("64B", (16, 8)), ("128B", (32, 4)), ("none", (16, 3)))
"""Tensor maps over INPUT as u32 [64, 32]: swizzle and box. Program i gets map i modulo their number."""

SPECIAL: Final = (
    0,
    1,
    0x80000000,
    0x7FFFFFFF,
    0xFFFFFFFF,
    0x3F800000,
    0xBF800000,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x00800000,
    0x007FFFFF,
    0x3C003C00,
    0x7C00FC00,
    0x7E003BFF,
    0x3F803F80,
    0x00010001,
    0x42F6E979,
    0xC2C80000,
    0x33D6BF95,
)


def input_words() -> list[int]:
    """INPUT: any bits, numbers near one, small numbers, special ones."""
    draw = Random("input")
    words: list[int] = []
    for _ in range(INPUT_WORDS):
        kind, bits = draw.getrandbits(3), draw.getrandbits(32)
        near_one = (bits & 0x80FFFFFF) + 0x3F000000 if bits >> 24 & 1 else (bits & 0x807FFFFF) | 0x3F800000
        words.append((bits, bits, near_one, near_one, bits & 0xFF, bits >> 16, ~bits & 0x3F, SPECIAL[bits % 20])[kind])
    return [word & 0xFFFFFFFF for word in words]


_WORDS: Final = tuple(
    """add.u32 d, a, b|sub.u32 d, a, b|mul.lo.u32 d, a, b|mul.hi.u32 d, a, b|mul.hi.s32 d, a, b|mad.lo.s32 d, a, b, c
mad.hi.u32 d, a, b, c|min.s32 d, a, b|max.u32 d, a, b|add.sat.s32 d, a, b|sub.sat.s32 d, a, b|abs.s32 d, a
neg.s32 d, a|and.b32 d, a, b|or.b32 d, a, b|xor.b32 d, a, b|not.b32 d, a|cnot.b32 d, a|popc.b32 d, a|clz.b32 d, a
brev.b32 d, a|bfind.u32 d, a|bfind.shiftamt.s32 d, a|shl.b32 d, a, n|shr.u32 d, a, n|shr.s32 d, a, n|shr.s32 d, a, b
shf.l.wrap.b32 d, a, b, c|shf.r.clamp.b32 d, a, b, c|prmt.b32 d, a, b, c|prmt.b32.rc16 d, a, b, c
lop3.b32 d, a, b, c, m|lop3.b32 d, a, b, c, m|sad.s32 d, a, b, c|sad.u32 d, a, b, c|dp4a.s32.u32 d, a, b, c
dp4a.u32.u32 d, a, b, c|dp2a.lo.s32.s32 d, a, b, c|mul24.lo.s32 d, a, b|mad24.hi.u32 d, a, b, c|szext.wrap.s32 d, a, b
bmsk.clamp.b32 d, n, n|bfe.u32 d, a, n, n|bfe.s32 d, a, n, n|bfi.b32 d, a, b, n, n|add.u32 d, a, i|xor.b32 d, a, i
mad.lo.u32 d, a, i, b|vadd4.u32.u32.u32 d, a, b, c|vabsdiff4.u32.u32.u32.add d, a, b, c|add.u16x2 d, a, b
max.s16x2 d, a, b|selp.b32 d, a, b, q|slct.s32.s32 d, a, b, c|set.lt.u32.s32 d, a, b|set.gtu.u32.f32 d, a, b
cvt.u32.u8 d, a|cvt.s32.s8 d, a|cvt.s32.s16 d, a|cvt.sat.s8.s32 d, a|cvt.sat.u8.s32 d, a|cvt.rn.f32.s32 d, a
cvt.rz.f32.u32 d, a|cvt.rni.s32.f32 d, a|cvt.rzi.u32.f32 d, a|cvt.rmi.f32.f32 d, a|cvt.rn.f16x2.f32 d, a, b
cvt.rn.bf16x2.f32 d, a, b|cvt.rz.relu.bf16x2.f32 d, a, b|cvt.rna.tf32.f32 d, a|cvt.pack.sat.u16.s32 d, a, b""".replace(
        "\n", "|"
    ).split("|")
)
_FLOATS: Final = tuple(
    """add.rn.f32 d, a, b|sub.rn.f32 d, a, b|mul.rn.f32 d, a, b|fma.rn.f32 d, a, b, c|fma.rz.ftz.f32 d, a, b, c
fma.rm.f32 d, a, b, c|add.rp.ftz.f32 d, a, b|mul.rn.ftz.sat.f32 d, a, b|fma.rn.sat.f32 d, a, b, c|min.f32 d, a, b
max.NaN.f32 d, a, b|min.ftz.NaN.f32 d, a, b|max.xorsign.abs.f32 d, a, b|abs.f32 d, a|neg.ftz.f32 d, a
copysign.f32 d, a, b|ex2.approx.ftz.f32 d, a|lg2.approx.f32 d, a|rcp.approx.ftz.f32 d, a|rsqrt.approx.f32 d, a
sqrt.approx.ftz.f32 d, a|sin.approx.f32 d, a|cos.approx.ftz.f32 d, a|tanh.approx.f32 d, a|div.full.f32 d, a, b
div.approx.ftz.f32 d, a, b|rcp.rn.f32 d, a|sqrt.rn.f32 d, a|add.rn.f16x2 d, a, b|mul.rn.f16x2 d, a, b
fma.rn.f16x2 d, a, b, c|fma.rn.relu.f16x2 d, a, b, c|fma.rn.ftz.sat.f16x2 d, a, b, c|sub.rn.f16x2 d, a, b
min.f16x2 d, a, b|max.NaN.f16x2 d, a, b|ex2.approx.f16x2 d, a|tanh.approx.f16x2 d, a|fma.rn.bf16x2 d, a, b, c
fma.rn.relu.bf16x2 d, a, b, c|add.rn.bf16x2 d, a, b|mul.rn.bf16x2 d, a, b|max.bf16x2 d, a, b|min.NaN.bf16x2 d, a, b
ex2.approx.ftz.bf16x2 d, a|tanh.approx.bf16x2 d, a|neg.bf16x2 d, a|abs.f16x2 d, a|set.le.f16x2.f16x2 d, a, b""".replace(
        "\n", "|"
    ).split("|")
)
_LONGS: Final = tuple(
    """add.u64 D, A, B|sub.u64 D, A, B|mul.lo.u64 D, A, B|mul.hi.u64 D, A, B|mad.lo.u64 D, A, B, C|mul.wide.u32 D, a, b
mul.wide.s32 D, a, b|mad.wide.u32 D, a, b, A|xor.b64 D, A, B|and.b64 D, A, B|or.b64 D, A, B|shl.b64 D, A, n
shr.s64 D, A, n|min.s64 D, A, B|max.u64 D, A, B|popc.b64 d, A|clz.b64 d, A|brev.b64 D, A|bfind.u64 d, A
mov.b64 D, {a, b}|mov.b64 {d, e}, A|cvt.u64.u32 D, a|cvt.s64.s32 D, a|cvt.u32.u64 d, A|selp.b64 D, A, B, q
add.rn.f64 D, A, B|mul.rn.f64 D, A, B|fma.rn.f64 D, A, B, C|min.f64 D, A, B|cvt.rn.f32.f64 d, A|cvt.f64.f32 D, a
cvt.rn.f64.s32 D, a|cvt.rzi.s32.f64 d, A|add.cc.u32 d, a, b; addc.u32 d, c, e
sub.cc.u32 d, a, b; subc.cc.u32 e, c, a; subc.u32 d, d, e|mad.lo.cc.u32 d, a, b, c; madc.hi.u32 e, a, b, c""".replace(
        "\n", "|"
    ).split("|")
)
# "%" separates these, because "|" stands between two results.
_PREDICATES: Final = tuple(
    """setp.lt.s32 p, a, b%setp.ne.u32 p, a, b%setp.hi.u32 p, a, b%setp.ge.and.s32 p, a, b, q
setp.eq.xor.u32 p|q, a, i, r%setp.lt.f32 p, a, b%setp.gtu.ftz.f32 p, a, b%setp.num.or.f32 p, a, b, q%setp.gt.u64 p, A, B
setp.leu.f64 p, A, B%and.pred p, q, r%xor.pred p, q, r%not.pred p, q%testp.normal.f32 p, a%testp.subnormal.f32 p, a
setp.lt.f16x2 p|q, a, b%setp.geu.bf16x2 p|r, a, b%lop3.or.b32 d|p, a, b, c, m, q""".replace("\n", "%").split("%")
)

_LETTER: Final = re.compile(r"\b[abcdeABCDpqrnim]\b")
_REGISTERS: Final = 12
_WIDE: Final = 4
_ENOUGH: Final = 150
_LIMIT: Final = 300
"""Instructions of the drawn part that a warp runs, with loops: more would not fit 100,000 programs into minutes."""
_FRAME: Final = 50
"""Instructions before and after the drawn part."""
_Choice = TypeVar("_Choice")

FUNCTIONS: Final = """.const .align 16 .b32 table[16] = {3, 0x9E3779B9, 5, 0x7F800000, 1, 0x80000000, 17, 0x3F800000,
0xFFFFFFFF, 2, 0xDEADBEEF, 0x00800000, 0x12345678, 31, 0x40490FDB, 0};
.func (.param .b32 out) mixed(.param .b32 first, .param .b32 second)
{ .reg .b32 %x, %y, %k; .reg .pred %go; ld.param.b32 %x, [first]; ld.param.b32 %y, [second]; and.b32 %k, %y, 3;
ROUND: mad.lo.u32 %x, %x, 0x9E3779B1, %y; shf.l.wrap.b32 %x, %x, %x, 13; sub.s32 %k, %k, 1; setp.ge.s32 %go, %k, 0;
@%go bra ROUND; st.param.b32 [out], %x; ret; }
.func (.param .b32 out) chosen(.param .b32 first, .param .b32 second)
{ .reg .b32 %x, %y; .reg .pred %less; ld.param.b32 %x, [first]; ld.param.b32 %y, [second]; setp.lt.s32 %less, %x, %y;
@%less bra LOW; xor.b32 %x, %x, %y; st.param.b32 [out], %x; ret;
LOW: sub.s32 %x, %y, %x; st.param.b32 [out], %x; ret; }
"""


@dataclass
class _Text:
    """The body of one program while it is drawn. `turns`: how often a warp runs the part being drawn; `cost`: so
    far."""

    draw: Random
    warps: int
    map_box: tuple[int, int]
    lines: list[str] = field(default_factory=list[str])
    labels: int = 0
    depth: int = 0
    turns: int = 1
    cost: int = 0
    static: int = 0

    def below(self, count: int) -> int:
        """Draws 0 to `count` - 1, from the same bits on every Python."""
        return self.draw.getrandbits(30) % count

    def pick(self, choices: Sequence[_Choice]) -> _Choice:
        return choices[self.below(len(choices))]

    def add(self, text: str) -> None:
        """Lines of `;`-ended instructions."""
        self.lines.append(text)
        count = text.count(";")
        self.static += count
        self.cost += count * self.turns

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def word(self) -> str:
        return f"%r{self.below(_REGISTERS)}"

    def predicate(self) -> str:
        return f"%p{self.below(4)}"

    def threads(self) -> int:
        return 32 * self.warps


def _filled(text: _Text, template: str) -> str:
    """Replaces the letters of a template by registers: d e a b c of 32 bits, D A B C of 64, p q r predicates; n, m, i
    numbers."""
    first, predicate = text.below(_REGISTERS), text.below(4)
    known = {
        "d": f"%r{first}",
        "e": f"%r{(first + 1 + text.below(_REGISTERS - 1)) % _REGISTERS}",
        "p": f"%p{predicate}",
        "q": f"%p{(predicate + 1) % 4}",
        "r": f"%p{(predicate + 2) % 4}",
    }

    def of(match: re.Match[str]) -> str:
        letter = match.group()
        if letter in "abc":
            return text.word()
        if letter in "nmi":
            return str(text.below({"n": 32, "m": 256, "i": 1 << 16}[letter]))
        if letter in "ABCD":
            return f"%d{text.below(_WIDE)}"
        return known[letter]

    parts = []
    for one in template.split("; "):
        opcode, _, operands = one.partition(" ")
        parts.append(f"{opcode} {_LETTER.sub(of, operands)};")
    return " ".join(parts)


def _plain(text: _Text) -> None:
    for _ in range(2 + text.below(5)):
        table = text.pick((_WORDS, _WORDS, _WORDS, _FLOATS, _FLOATS, _LONGS, _PREDICATES))
        guard = f"@{text.pick(('', '!'))}{text.predicate()} " if text.below(6) == 0 else ""
        line = _filled(text, text.pick(table))
        text.add(line if "; " in line else guard + line)


def _divided(text: _Text) -> None:
    """Divides by an odd number, which is positive if signed."""
    d, a, b = text.word(), text.word(), text.word()
    op, sign = text.pick(("div", "rem")), text.pick("us")
    mask = "0x7FFFFFFF" if sign == "s" else "0xFFFFFFFF"
    text.add(f"and.b32 %t0, {b}, {mask}; or.b32 %t0, %t0, 1; {op}.{sign}32 {d}, {a}, %t0;")


def _called(text: _Text) -> None:
    text.add(
        f"{{ .param .b32 of, first, second; st.param.b32 [first], {text.word()}; st.param.b32 [second], {text.word()};"
    )
    text.add(f"call (of), {text.pick(('mixed', 'chosen'))}, (first, second); ld.param.b32 {text.word()}, [of]; }}")


def _index(text: _Text, bytes_: int, align: int) -> None:
    """Sets %t1 from a register: an offset below `bytes_`, a power of two; a multiple of `align`."""
    text.add(f"shr.u32 %t1, {text.word()}, {text.below(20)}; and.b32 %t1, %t1, {bytes_ - align};")


def _read(text: _Text, space: str, address: str) -> None:
    """A load of up to 16 bytes at `address`, a multiple of 16 with 16 defined bytes."""
    r, wide = text.below(_REGISTERS), text.below(_WIDE - 1)
    four = ", ".join(f"%r{(r + i) % _REGISTERS}" for i in range(4))
    nc = text.pick(("", ".nc")) if space == "global" else ""
    text.add(
        text.pick(
            (
                f"ld.{space}{nc}.u32 %r{r}, [{address}+4];",
                f"ld.{space}{nc}.v4.b32 {{{four}}}, [{address}];",
                f"ld.{space}{nc}.v2.f32 {{%r{r}, %r{(r + 5) % _REGISTERS}}}, [{address}+8];",
                f"ld.{space}{nc}.u8 %r{r}, [{address}+{text.below(16)}];",
                f"ld.{space}{nc}.s8 %r{r}, [{address}+{text.below(16)}];",
                f"ld.{space}{nc}.s16 %r{r}, [{address}+{2 * text.below(8)}];",
                f"ld.{space}{nc}.b64 %d{wide}, [{address}+8];",
                f"ld.{space}{nc}.v2.u64 {{%d{wide}, %d{wide + 1}}}, [{address}];",
            )
        )
    )


def _written(text: _Text, space: str, address: str) -> None:
    a, b = text.word(), text.word()
    text.add(
        text.pick(
            (
                f"st.{space}.u32 [{address}+{4 * text.below(4)}], {a};",
                f"st.{space}.v2.b32 [{address}+8], {{{a}, {b}}};",
                f"st.{space}.v4.u32 [{address}], {{{a}, {b}, {text.word()}, {text.word()}}};",
                f"st.{space}.u8 [{address}+{text.below(16)}], {a};",
                f"st.{space}.b16 [{address}+{2 * text.below(8)}], {a};",
                f"st.{space}.b64 [{address}], %d{text.below(_WIDE)};",
            )
        )
    )


def _own_memory(text: _Text) -> None:
    """A thread's own slot, its local array, INPUT, the module's constants."""
    kind = text.below(5)
    if kind == 0:
        _written(text, "shared", "%slot")
        _read(text, "shared", "%slot")
    elif kind == 1:
        _index(text, 64, 16)
        text.add("mov.u32 %t2, mine; add.u32 %t2, %t2, %t1;")
        _written(text, "local", "%t2")
        _index(text, 64, 16)
        text.add("mov.u32 %t2, mine; add.u32 %t2, %t2, %t1;")
        _read(text, "local", "%t2")
    elif kind == 2:
        _index(text, 64, 4)
        text.add(f"mov.u64 %u1, table; cvt.u64.u32 %u2, %t1; add.u64 %u1, %u1, %u2; ld.const.b32 {text.word()}, [%u1];")
    else:
        _index(text, 4 * INPUT_WORDS, 16)
        text.add("cvt.u64.u32 %u1, %t1; add.u64 %u1, %u1, %in;")
        _read(text, "global", "%u1")


def _own_atomic(text: _Text) -> None:
    space, at = text.pick((("shared", "%slot"), ("global", "%cell")))
    sign = text.pick("us")
    d, a, b = text.word(), text.word(), text.word()
    text.add(
        text.pick(
            (
                f"atom.{space}.add.u32 {d}, [{at}+4], {a};",
                f"atom.{space}.exch.b32 {d}, [{at}], {a};",
                f"atom.{space}.cas.b32 {d}, [{at}+8], {a}, {b};",
                f"atom.{space}.min.{sign}32 {d}, [{at}], {a};",
                f"atom.{space}.max.{sign}32 {d}, [{at}+12], {a};",
                f"atom.{space}.inc.u32 {d}, [{at}], {a};",
                f"atom.{space}.dec.u32 {d}, [{at}+4], {a};",
                f"atom.{space}.xor.b32 {d}, [{at}+8], {a};",
                f"atom.{space}.add.u64 %d{text.below(_WIDE)}, [{at}+8], %d0;",
                f"atom.{space}.cas.b64 %d{text.below(_WIDE)}, [{at}], %d1, %d2;",
                f"atom.{space}.max.{sign}64 %d{text.below(_WIDE)}, [{at}], %d3;",
                f"atom.{space}.add.f32 {d}, [{at}], {a};",
            )
        )
    )


def _shared_count(text: _Text) -> None:
    """Sums over the whole CTA, which nobody reads before the end."""
    text.add(f"and.b32 %t1, {text.word()}, 60; cvt.u64.u32 %u1, %t1; add.u64 %u1, %u1, %cells;")
    guard = text.pick(("", f"@{text.predicate()} "))
    text.add(f"{guard}red.global.add.u32 [%u1], {text.word()};")


def _copied_in(text: _Text) -> None:
    """cp.async into the thread's own slot, awaited."""
    size = text.pick((4, 8, 16))
    _index(text, 4 * INPUT_WORDS, 16)
    text.add("cvt.u64.u32 %u1, %t1; add.u64 %u1, %u1, %in;")
    fewer = f", {text.below(size + 1)}" if text.below(3) == 0 else ""
    cache = "cg" if size == 16 and text.below(2) else "ca"
    done = text.pick(("cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_group 0;"))
    text.add(f"cp.async.{cache}.shared.global [%slot], [%u1], {size}{fewer}; {done}")
    _read(text, "shared", "%slot")


def _branch(text: _Text) -> None:
    """Lanes diverge at a predicate, and meet again."""
    other, end = text.label(), text.label()
    text.add(f"@{text.pick(('', '!'))}{text.predicate()} bra {other};")
    _some(text, _LANE, 1 + text.below(2))
    if text.below(2):
        text.add(f"bra {end}; {other}:")
        _some(text, _LANE, 1)
        text.add(f"{end}:")
    else:
        text.add(f"{other}:")


def _switch(text: _Text) -> None:
    targets, end = [text.label() for _ in range(3)], text.label()
    table = text.label()
    text.add(f"{table}: .branchtargets {', '.join(targets)}; and.b32 %t1, {text.word()}, 3; min.u32 %t1, %t1, 2;")
    text.add(f"brx.idx %t1, {table};")
    for target in targets:
        text.add(f"{target}:")
        _plain(text)
        text.add(f"bra {end};")
    text.add(f"{end}:")


def _loop(text: _Text, inside: Sequence[Callable[[_Text], None]], *, by_lane: bool) -> None:
    """Two to four iterations; if `by_lane`, each lane has its own number, from a register, and some leave early."""
    counter, again, end = f"%l{text.depth}", text.label(), text.label()
    turns = 2 + text.below(3)
    if by_lane:
        text.add(f"and.b32 {counter}, {text.word()}, 3; add.u32 {counter}, {counter}, 1;")
    else:
        text.add(f"mov.u32 {counter}, {turns};")
    text.add(f"{again}:")
    text.turns, text.depth = text.turns * turns, text.depth + 1
    _some(text, inside, 1 + text.below(2))
    if by_lane and text.below(2):
        text.add(f"@{text.predicate()} bra {end};")
    text.turns, text.depth = text.turns // turns, text.depth - 1
    text.add(f"sub.u32 {counter}, {counter}, 1; setp.ne.u32 %q0, {counter}, 0; @%q0 bra {again}; {end}:")


def _lane_loop(text: _Text) -> None:
    _loop(text, _LANE, by_lane=True)


def _warp_loop(text: _Text) -> None:
    _loop(text, _WARP, by_lane=False)


def _cta_loop(text: _Text) -> None:
    _loop(text, _CTA, by_lane=False)


def _of_some_warps(text: _Text) -> None:
    """Whole warps diverge, by their numbers."""
    end = text.label()
    text.add(f"and.b32 %t1, %warp, {text.pick((1, 2, 3))}; setp.eq.u32 %q1, %t1, 0; @%q1 bra {end};")
    _some(text, _WARP, 1 + text.below(2))
    text.add(f"{end}:")


def _spoken(text: _Text, mask: str) -> None:
    """One exchange among the lanes of `mask`."""
    d, a, b = text.word(), text.word(), text.word()
    op = text.pick(("and", "or", "xor"))
    kind = text.pick(("add.u32", "min.s32", "max.u32", "min.u32", "max.s32"))
    text.add(
        text.pick(
            (
                f"vote.sync.ballot.b32 {d}, {text.predicate()}, {mask};",
                f"vote.sync.{text.pick(('any', 'all', 'uni'))}.pred {text.predicate()}, {text.predicate()}, {mask};",
                f"and.b32 %t1, {a}, 3; match.any.sync.b32 {d}, %t1, {mask};",
                f"and.b32 %t1, {a}, 1; match.all.sync.b32 {d}|{text.predicate()}, %t1, {mask};",
                f"redux.sync.{op}.b32 {d}, {b}, {mask};",
                f"redux.sync.{kind} {d}, {b}, {mask};",
                f"bar.warp.sync {mask}; elect.sync {d}|{text.predicate()}, {mask};",
            )
        )
    )


def _exchanged(text: _Text) -> None:
    """A vote, a match, a reduction or a shuffle of the whole warp."""
    if text.below(2):
        _spoken(text, "0xFFFFFFFF")
        return
    mode, clamp = text.pick(
        (
            ("up", 0),
            ("up", 0x1000),
            ("down", 31),
            ("down", 0x181F),
            ("bfly", 31),
            ("bfly", 0x1C1F),
            ("idx", 31),
            ("idx", 0x101F),
            ("idx", 0x0F07),
        )
    )
    lane = text.pick((text.word(), str(text.below(32))))
    text.add(f"shfl.sync.{mode}.b32 {text.word()}|{text.predicate()}, {text.word()}, {lane}, {clamp}, 0xFFFFFFFF;")


def _of_some_lanes(text: _Text) -> None:
    """Lanes of a mask leave the others and exchange among themselves; a shuffle reads a lane of the mask."""
    mask = (text.draw.getrandbits(32) & text.draw.getrandbits(32)) | 1 << text.below(32)
    end, lane = text.label(), text.pick([one for one in range(32) if mask >> one & 1])
    text.add(f"shr.u32 %t1, {mask:#x}, %lane; and.b32 %t1, %t1, 1; setp.eq.u32 %q1, %t1, 0; @%q1 bra {end};")
    _spoken(text, f"{mask:#x}")
    text.add(f"shfl.sync.idx.b32 {text.word()}|{text.predicate()}, {text.word()}, {lane}, 31, {mask:#x};")
    _plain(text)
    text.add(f"{end}:")


def _turned(text: _Text) -> None:
    """Matrices of the warp: its slots through ldmatrix and stmatrix, or products of its registers."""
    kind = text.below(5)
    x = [text.word() for _ in range(10)]
    if kind == 0:
        trans = text.pick(("", ".trans"))
        text.add(f"bar.warp.sync 0xFFFFFFFF; shl.b32 %t1, %warp, 9; and.b32 %t2, {x[0]}, 0x1F0; add.u32 %t1, %t1, %t2;")
        text.add("mov.u32 %t2, slots; add.u32 %t1, %t1, %t2;")
        text.add(
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r0, %r3, %r6, %r9}}, [%t1]; bar.warp.sync 0xFFFFFFFF;"
        )
    elif kind == 1:
        trans = text.pick(("", ".trans"))
        text.add("bar.warp.sync 0xFFFFFFFF;")
        text.add(
            f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%slot], {{{x[0]}, {x[1]}, {x[2]}, {x[3]}}}; "
            "bar.warp.sync 0xFFFFFFFF;"
        )
        _read(text, "shared", "%slot")
    elif kind == 2:
        types, sat = text.pick(("s8.s8", "u8.s8", "s8.u8", "u8.u8")), text.pick(("", ".satfinite"))
        text.add(
            f"mma.sync.aligned.m16n8k32.row.col{sat}.s32.{types}.s32 {{%r0, %r2, %r4, %r6}}, "
            f"{{{x[0]}, {x[1]}, {x[2]}, {x[3]}}}, {{{x[4]}, {x[5]}}}, {{{x[6]}, {x[7]}, {x[8]}, {x[9]}}};"
        )
    elif kind == 3:
        for i in range(3):
            text.add(f"and.b32 %t{i}, {x[i]}, 0x80008000; or.b32 %t{i}, %t{i}, 0x3C003C00;")
        text.add(f"and.b32 %t3, {x[3]}, 0xFFFF; cvt.rn.f32.u32 %t3, %t3;")
        text.add(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r1, %r3, %r5, %r7}, {%t0, %t1}, {%t2}, "
            "{%t3, %t3, %t3, %t3};"
        )
    else:
        text.add(f"movmatrix.sync.aligned.m8n8.trans.b16 {text.word()}, {x[0]};")


def _mbarrier_wait(text: _Text, before: str) -> None:
    """After `before`, wait for the end of the current phase of `gate`."""
    again, way = text.label(), "try_wait" if text.below(8) else "test_wait"
    text.add(
        f"{before} {again}: mbarrier.{way}.parity.shared.b64 %q0, [gate], %phase; @!%q0 bra {again}; "
        "xor.b32 %phase, %phase, 1;"
    )


def _together(text: _Text) -> None:
    """All threads of the CTA meet, one way or another."""
    p, q = text.predicate(), text.predicate()
    kind = text.below(7)
    if kind == 6:
        _mbarrier_wait(text, "mbarrier.arrive.shared.b64 %u2, [gate];")
        return
    text.add(
        (
            "bar.sync 0;",
            "barrier.sync 0;",
            f"barrier.sync 2, {text.threads()};",
            f"bar.red.popc.u32 {text.word()}, 0, {p};",
            f"bar.red.and.pred {p}, 0, {q};",
            f"bar.red.or.pred {p}, 0, !{q};",
        )[kind]
    )


def _from_another(text: _Text) -> None:
    """Slots are written, all meet, each thread reads the slot of any other, all meet."""
    _written(text, "shared", "%slot")
    _together(text)
    text.add(f"mul.hi.u32 %t1, {text.word()}, {text.threads()}; mov.u32 %t2, slots; mad.lo.u32 %t1, %t1, {SLOT}, %t2;")
    _read(text, "shared", "%t1")
    _together(text)


def _from_the_pair(text: _Text) -> None:
    """Like _from_another, between two warps that meet at a barrier of their own."""
    _written(text, "shared", "%slot")
    text.add("shr.u32 %t3, %warp, 1; add.u32 %t3, %t3, 4; bar.sync %t3, 64;")
    text.add(f"and.b32 %t1, {text.word()}, 63; shr.u32 %t2, %warp, 1; shl.b32 %t2, %t2, 6; add.u32 %t1, %t1, %t2;")
    text.add(f"mov.u32 %t2, slots; mad.lo.u32 %t1, %t1, {SLOT}, %t2;")
    _read(text, "shared", "%t1")
    text.add("bar.sync %t3, 64;")


def _one_way(text: _Text) -> None:
    """Warps 0 and 1 arrive with their slots written, the others wait and read."""
    arrive, end = text.label(), text.label()
    _written(text, "shared", "%slot")
    text.add(f"setp.lt.u32 %q1, %warp, 2; @%q1 bra {arrive}; bar.sync 3, {text.threads()};")
    text.add(f"and.b32 %t1, {text.word()}, 63; mov.u32 %t2, slots; mad.lo.u32 %t1, %t1, {SLOT}, %t2;")
    _read(text, "shared", "%t1")
    text.add(f"bra {end}; {arrive}: bar.arrive 3, {text.threads()}; {end}: bar.sync 0;")


def _counted(text: _Text) -> None:
    """Atomics of all threads on shared cells, all of one operation, between meetings; then the sums are read."""
    op = text.pick(("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32", "dec.u32"))
    guard = text.pick(("", f"@{text.predicate()} ", f"@!{text.predicate()} "))
    operand = "1000" if op in ("inc.u32", "dec.u32") else text.word()
    _together(text)
    text.add(f"and.b32 %t1, {text.word()}, 60; mov.u32 %t2, sums; add.u32 %t1, %t1, %t2;")
    text.add(f"{guard}red.shared.{op} [%t1], {operand};")
    _together(text)
    text.add(f"and.b32 %t1, {text.word()}, 60; mov.u32 %t2, sums; add.u32 %t1, %t1, %t2;")
    text.add(f"ld.shared.u32 {text.word()}, [%t1];")


_WGMMAS: Final = (
    ("m64n8k16.f32.f16.f16", 4, True),
    ("m64n16k16.f32.bf16.bf16", 8, True),
    ("m64n8k16.f16.f16.f16", 2, True),
    ("m64n8k32.s32.s8.s8", 4, False),
    ("m64n16k32.s32.u8.s8", 8, False),
    ("m64n8k32.f32.e4m3.e5m2", 4, False),
    ("m64n16k8.f32.tf32.tf32", 8, False),
)


def _multiplied(text: _Text) -> None:
    """Threads fill A and B from their registers, without infinities and NaN, and the warpgroup multiplies."""
    name, count, majors = text.pick(_WGMMAS)
    keep = {"f16": 0xBBFFBBFF, "bf16": 0xBFFFBFFF, "tf32": 0xBFFFFFFF, "e5m2": 0x3F3F3F3F}.get(name.rsplit(".")[-1])
    _together(text)
    for i in range(4):
        masked = f"and.b32 %t{i}, {text.word()}, {keep:#x};" if keep else f"mov.b32 %t{i}, {text.word()};"
        text.add(masked)
    text.add(f"shl.b32 %t4, %tx, 4; mov.u32 %t5, tile; add.u32 %t4, %t4, %t5; and.b32 %t6, {text.word()}, 3;")
    for quarter in range(4):
        a, b, c, d = (f"%t{(quarter + i) % 4}" for i in range(4))
        text.add(f"st.shared.v4.b32 [%t4+{2048 * quarter}], {{{a}, {b}, {c}, {d}}};")
    swizzle = text.below(4)
    leading, stride = (8 * text.below(8), 8 * (1 + text.below(7))) if not swizzle else (1, (64, 32, 16)[swizzle - 1])
    upper = swizzle << 62 | stride << 32 | leading << 16
    text.add(
        f"fence.proxy.async.shared::cta; bar.sync 0; cvt.u64.u32 %u1, %t5; shr.u64 %u1, %u1, 4; or.b64 %u1, %u1, {upper:#x};"  # noqa: E501
    )
    text.add(f"add.u64 %u2, %u1, {0 if swizzle else 8 * text.below(8)};")
    registers = ", ".join(f"%r{i}" for i in range(count))
    if "s32" in name:
        use, scales = text.pick(("0", "1")), ""
    else:
        use, scales = "0", f", {text.pick(('1', '-1'))}, {text.pick(('1', '-1'))}"
    opcode = f"wgmma.mma_async.sync.aligned.{name}"
    rest = scales + (", 0, 0" if majors else "")
    text.add(
        f"setp.ne.u32 %q1, {use}, 0; wgmma.fence.sync.aligned; {opcode} {{{registers}}}, %u1, %u2, %q1{rest}; "
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    )


def _bulk(text: _Text) -> None:
    """A TMA copy into `tile` by thread 0, awaited and read by all; or one out of `tile`, and sums of it."""
    kind = text.below(3)
    text.add("mov.u32 %t5, tile; fence.proxy.async;")
    _together(text)
    if kind < 2:
        width, height = text.map_box
        size = 4 * width * height if kind == 0 else 16 * (1 + text.below(64))
        text.add("mov.u32 %t6, gate; setp.eq.u32 %q1, %tx, 0;")
        if kind == 0:
            text.add(
                f"and.b32 %t0, {text.word()}, 60; sub.s32 %t0, %t0, 16; and.b32 %t1, {text.word()}, 127; sub.s32 %t1, %t1, 32;"  # noqa: E501
            )
            copy = (
                "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%t5], "
                "[%map, {%t0, %t1}], [%t6];"
            )
        else:
            text.add(f"and.b32 %t0, {text.word()}, 0x1FF; mad.wide.u32 %u1, %t0, 8, %in; and.b64 %u1, %u1, -16;")
            copy = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%t5], [%u1], {size}, [%t6];"
        text.add(f"@%q1 mbarrier.expect_tx.relaxed.cta.shared.b64 [gate], {size}; @%q1 {copy}")
        _mbarrier_wait(text, "mbarrier.arrive.shared.b64 %u2, [gate];")
        text.add(f"mul.hi.u32 %t1, {text.word()}, {size // 16}; mad.lo.u32 %t1, %t1, 16, %t5;")
        _read(text, "shared", "%t1")
        return
    text.add("shl.b32 %t4, %tx, 2; add.u32 %t4, %t4, %t5;")
    for at in (0, 4 * text.threads()):
        text.add(f"st.shared.b32 [%t4+{at}], {text.word()};")
    text.add("fence.proxy.async; bar.sync 0; setp.eq.u32 %q1, %tx, 0;")
    size = 16 * (1 + text.below(COPIED_BYTES // 16))
    opcode = text.pick(
        (
            "cp.async.bulk.global.shared::cta.bulk_group",
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32",
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.max.s32",
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.xor.b32",
        )
    )
    text.add(
        f"@%q1 {opcode} [%copied], [%t5], {size}; @%q1 cp.async.bulk.commit_group; "
        "@%q1 cp.async.bulk.wait_group 0; bar.sync 0;"
    )


_LANE: Final[tuple[Callable[[_Text], None], ...]] = (
    _plain,
    _plain,
    _plain,
    _divided,
    _called,
    _own_memory,
    _own_memory,
    _own_atomic,
    _shared_count,
    _copied_in,
    _branch,
    _switch,
    _lane_loop,
)
_WARP: Final = (*_LANE, _exchanged, _exchanged, _exchanged, _of_some_lanes, _turned, _turned, _warp_loop)
_CTA: Final = (*_WARP, _from_another, _from_another, _from_the_pair, _one_way, _counted, _of_some_warps, _cta_loop)
_NESTING: Final = (_branch, _switch, _lane_loop, _warp_loop, _cta_loop, _of_some_warps)
_ENGINES: Final = {"": (), "wgmma": (_multiplied,), "tma": (_bulk,)}


def _some(text: _Text, kinds: Sequence[Callable[[_Text], None]], count: int) -> None:
    for _ in range(count):
        kind = text.pick(kinds)
        if kind in _NESTING and (text.depth > 1 or text.turns > 4 or text.cost > _LIMIT // 2):
            kind = _plain
        text.depth += kind in _NESTING
        kind(text)
        text.depth -= kind in _NESTING


@dataclass(frozen=True)
class Drawn:
    """A program: its entry's text, the threads of its one CTA, and which of MAPS it gets."""

    entry: str
    text: str
    threads: int
    map_number: int
    engine: str


def drawn(number: int) -> Drawn:
    """Program `number`."""
    draw = Random(number)
    engine = ("wgmma", "tma")[number // 10 % 2] if number % 10 == 0 else ""
    warps = 4 if engine == "wgmma" or draw.getrandbits(30) % 4 else 6
    text = _Text(draw, warps, MAPS[number % len(MAPS)][1])
    while True:
        _some(text, _CTA, 1)
        if engine:
            _some(text, _ENGINES[engine], 1)
        if text.static + _FRAME >= MIN_INSTRUCTIONS and text.cost >= _ENOUGH:
            break
    entry = f"drawn_{number}"
    words, longs = range(_REGISTERS), range(_WIDE)
    fours = [f"{{%r{i}, %r{i + 1}, %r{i + 2}, %r{i + 3}}}" for i in words[::4]]
    pairs = [f"{{%d{i}, %d{i + 1}}}" for i in longs[::2]]
    dump = [f"st.global.v4.b32 [%u0+{16 * i}], {four};" for i, four in enumerate(fours)]
    dump += [f"st.global.v2.b64 [%u0+{48 + 16 * i}], {pair};" for i, pair in enumerate(pairs)]
    loads = [f"ld.global.v4.b32 {four}, [%u0+{16 * i}];" for i, four in enumerate(fours)]
    loads += [f"ld.global.v2.b64 {pair}, [%u0+{48 + 16 * i}];" for i, pair in enumerate(pairs)]
    slots = [f"st.shared.v4.b32 [%slot], {fours[0]};"]
    slots += [f"st.local.v4.b32 [mine+{16 * i}], {fours[i % 3]};" for i in range(4)]
    preds = [f"setp.lt.s32 %p{i}, %r{i}, %r{i + 4};" for i in range(4)]
    packed = [f"selp.b32 %t1, {1 << i}, 0, %p{i}; or.b32 %t0, %t0, %t1;" for i in range(4)]
    lines = [
        f".visible .entry {entry}(.param .u64 pin, .param .u64 pout, .param .align 64 .b8 pmap[128])",
        "{",
        f".reg .b32 %r<{_REGISTERS}>, %t<8>, %l<8>, %tx, %warp, %lane, %slot, %phase; .reg .b64 %d<{_WIDE}>, %u<3>;",
        ".reg .b64 %in, %out, %cell, %cells, %copied, %map; .reg .pred %p<4>, %q<2>;",
        f".shared .align 1024 .b8 tile[{_TILE}]; .shared .align 16 .b8 slots[{THREADS_MOST * SLOT}];",
        ".shared .align 16 .b32 sums[16]; .shared .align 8 .b64 gate; .local .align 16 .b8 mine[64];",
        "mov.u32 %tx, %tid.x; shr.u32 %warp, %tx, 5; and.b32 %lane, %tx, 31; mov.u32 %phase, 0;",
        "ld.param.u64 %in, [pin]; ld.param.u64 %out, [pout]; mov.b64 %map, pmap; cvta.param.u64 %map, %map;",
        f"add.u64 %cells, %out, {CELLS}; add.u64 %copied, %out, {COPIED}; mul.wide.u32 %cell, %tx, {SLOT};",
        f"add.u64 %cell, %cell, %out; add.u64 %cell, %cell, {THREAD_CELLS};",
        f"mov.u32 %slot, slots; mad.lo.u32 %slot, %tx, {SLOT}, %slot;",
        f"mad.wide.u32 %u0, %tx, {16 * (1 + number % 2)}, %in; add.u64 %u0, %u0, {16 * (number % 32)};",
        *loads,
        *preds,
        *slots,
        "setp.lt.u32 %q0, %tx, 16; shl.b32 %t0, %tx, 2; mov.u32 %t1, sums; add.u32 %t1, %t1, %t0;",
        "@%q0 st.shared.b32 [%t1], %r5; setp.eq.u32 %q0, %tx, 0;",
        f"@%q0 mbarrier.init.shared.b64 [gate], {32 * warps}; bar.sync 0;",
        *text.lines,
        f"mov.u32 %t0, 0; {' '.join(packed)} mad.wide.u32 %u0, %tx, {_DUMP}, %out; st.global.b32 [%u0+80], %t0;",
        *dump,
        "ret;",
        "}",
    ]
    return Drawn(entry, "\n".join(lines), 32 * warps, number % len(MAPS), engine)
