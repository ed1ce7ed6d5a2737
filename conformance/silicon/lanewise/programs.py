"""Programs for lane-wise spellings: each kernel applies instructions to its operands, with one thread for each value.

every.py has a program for each spelling. programs.json keeps 1,010 of an earlier draw, whose answers are kept in full.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from backends.vm.load import load
from backends.vm.machine.machine import Machine
from conformance import SILICON

Words = npt.NDArray[np.uint64]

COUNT: Final = 512
"""Values of each operand."""
WIDTH: Final[Mapping[str, int]] = {
    **dict.fromkeys(("s8", "u8", "b8", "e2m1x2"), 8),
    **dict.fromkeys(("s16", "u16", "b16", "f16", "bf16", "e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "ue8m0x2"), 16),
    **dict.fromkeys(("s32", "u32", "b32", "f32", "f16x2", "bf16x2", "tf32", "u16x2", "s16x2"), 32),
    **dict.fromkeys(("amount", "lane", "few", "bit", "nth"), 32),
    **dict.fromkeys(("s64", "u64", "b64", "f64", "f32x2", "few64"), 64),
}
"""Bits of each type, and of each kind of operand with its own range."""
FLOATS: Final = {"f16": (16, 5, 10, 15), "bf16": (16, 8, 7, 127), "f32": (32, 8, 23, 127), "f64": (64, 11, 52, 1023)}
"""Bits, exponent bits, mantissa bits and bias of each type."""
PAIRS: Final = {
    "f16x2": ("f16", 16), "bf16x2": ("bf16", 16), "f32x2": ("f32", 32), "u16x2": ("u16", 16), "s16x2": ("s16", 16),
}  # fmt: skip
"""The type of each half, and the bits of the lower one."""


def operand(kind: str, seed: str, place: int) -> Words:
    """uint64 [COUNT]: the operand of `kind` at `place`, drawn for `seed`; for programs.json that is the opcode."""
    draw = np.random.default_rng([11, crc32(seed.encode()), place])
    if kind in PAIRS and PAIRS[kind][0] in FLOATS:
        half, shift = PAIRS[kind]
        return _floats(half, draw) | _floats(half, draw) << np.uint64(shift)
    if kind in FLOATS:
        return _floats(kind, draw)
    return _RANGES[kind](draw) if kind in _RANGES else _integers(WIDTH[kind], draw)


def _bits(draw: np.random.Generator) -> Words:
    return draw.integers(0, 1 << 64, COUNT, dtype=np.uint64)


def specials(kind: str) -> list[int]:
    """Values of `kind` at which instructions change their ways; none for a kind of small range."""
    if kind in PAIRS:
        half, shift = PAIRS[kind]
        halves = specials(half)
        # 5 and the number of values have no common divisor, so each half takes each of them.
        return [low | halves[(5 * at + 3) % len(halves)] << shift for at, low in enumerate(halves)]
    if kind in FLOATS:
        bits, exponent_bits, mantissa_bits, bias = FLOATS[kind]
        one, all_ones = 1 << mantissa_bits, (1 << exponent_bits) - 1
        infinity, largest = all_ones * one, (all_ones - 1) * one | (one - 1)
        magnitudes = (0, 1, one - 1, one, bias * one, (bias + 1) * one, (bias - 1) * one, (bias + 14) * one, largest)
        nans = (infinity | 1, infinity | one >> 1, infinity | (one - 1))
        return [m | sign for m in (*magnitudes, infinity, *nans) for sign in (0, 1 << (bits - 1))]
    if kind == "amount":
        return [0, 1, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 255]
    return [] if kind in _RANGES else _edges(WIDTH[kind])


def _edges(bits: int) -> list[int]:
    top = 1 << (bits - 1)
    return [0, 1, 2, top - 1, top, top + 1, 2 * top - 1]


def _floats(kind: str, draw: np.random.Generator) -> Words:
    bits, _, mantissa_bits, bias = FLOATS[kind]
    one, top = 1 << mantissa_bits, 1 << (bits - 1)
    random = _bits(draw) & np.uint64((1 << bits) - 1)
    mantissa = random & np.uint64(one - 1 | top)
    near_one = mantissa | (draw.integers(bias - 6, bias + 7, COUNT).astype(np.uint64) << np.uint64(mantissa_bits))
    special = draw.choice(np.array(specials(kind), np.uint64), COUNT)
    halves = np.round(draw.normal(0, 300, COUNT) * 2) / 2
    small = {
        "f16": lambda: halves.astype(np.float16).view(np.uint16),
        "bf16": lambda: halves.astype(np.float32).view(np.uint32) >> np.uint32(16),
        "f32": lambda: halves.astype(np.float32).view(np.uint32),
        "f64": lambda: halves.view(np.uint64),
    }[kind]().astype(np.uint64)
    pick = draw.integers(0, 10, COUNT)
    return np.select([pick < 3, pick < 6, pick < 8, pick < 9], [random, near_one, special, small], mantissa)


def _integers(bits: int, draw: np.random.Generator) -> Words:
    mask = np.uint64((1 << bits) - 1)
    random = _bits(draw) & mask
    small = random >> draw.integers(0, bits, COUNT).astype(np.uint64)
    edges = draw.choice(np.array(_edges(bits), np.uint64), COUNT)
    pick = draw.integers(0, 8, COUNT)
    return np.select([pick < 3, pick < 5, pick < 7], [random, small, ~small & mask], edges)


def _amounts(draw: np.random.Generator) -> Words:
    """Shift amounts, positions and lengths from 0 to 255; PTX defines these for every instruction."""
    return np.where(draw.integers(0, 4, COUNT) < 3, draw.integers(0, 70, COUNT), draw.integers(0, 256, COUNT)).astype(
        np.uint64
    )


def _few(draw: np.random.Generator) -> Words:
    """Values that several lanes of a warp share; in half of the warps, whole half-warps share one."""
    shared = np.repeat(draw.integers(0, 3, COUNT // 16), 16)
    mixed = np.repeat(draw.integers(0, 2, COUNT // 32), 32)
    return (shared + draw.integers(0, 2, COUNT) * mixed).astype(np.uint64)


_RANGES: Final[Mapping[str, Callable[[np.random.Generator], Words]]] = {
    "amount": _amounts,
    "lane": lambda draw: draw.integers(0, 40, COUNT).astype(np.uint64),
    "bit": lambda draw: draw.integers(0, 32, COUNT).astype(np.uint64),
    "nth": lambda draw: draw.integers(-6, 7, COUNT).astype(np.int32).view(np.uint32).astype(np.uint64),
    "few": _few,
    "few64": lambda draw: _few(draw) * np.uint64(0x1_0000_0001),
}


FILE: Final = SILICON / "lanewise" / "programs.json"
HEAD: Final = ".version 8.6\n.target sm_90a\n.address_size 64\n"
MAX_BLOCK: Final = 1024
"""Threads of a block on the machine, where a few large blocks are sooner ready than many small ones."""
SOURCES: Final = "abce"
"""The letters of a program's operands."""
_BOOLEANS: Final = ("and", "or", "xor")
_CARRIES: Final = ("addc", "subc", "madc")
_WIDER: Final = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_UNARY: Final = (
    "abs", "neg", "not", "cnot", "brev", "rcp", "sqrt", "rsqrt", "sin", "cos", "ex2", "lg2", "tanh",
)  # fmt: skip
_BINARY: Final = ("add", "sub", "mul", "div", "rem", "min", "max", "and", "or", "xor", "copysign")


@dataclass(frozen=True, slots=True)
class Program:
    """`text` applies `opcode` to %a, %b, %c, %e and the predicates %q, %q3, and writes %d; some texts also write %q2.

    `destination` is a type or "pred"; `sources` are types or kinds of WIDTH.
    """

    opcode: str
    text: str
    destination: str
    sources: tuple[str, ...]

    @property
    def entry(self) -> str:
        """The kernel's name."""
        return "k_" + "".join(c if c.isalnum() else "_" for c in self.opcode)


def kept() -> list[Program]:
    """The programs that an H200 has answered."""
    return [Program(**{**each, "sources": tuple(each["sources"])}) for each in json.loads(FILE.read_text("utf-8"))]


def operands(program: Program) -> list[Words]:
    """uint64 [COUNT] for each source."""
    return [operand(kind, program.opcode, place) for place, kind in enumerate(program.sources)]


def vm_answers(program: Program) -> Words:
    """uint64 [COUNT]: the machine's results."""
    return answered([program], kernel(program), operands(program), COUNT)[0]


def answered(programs: Sequence[Program], text: str, sources: Sequence[Words], count: int) -> Words:
    """uint64 [programs, count]: the machine's results of the kernel `text`, which has the programs' results in turn."""
    machine, results = Machine(), np.zeros((len(programs), count), np.uint64)
    params = [
        struct.pack("<Q", machine.memory.add(f"v{place}", array.reshape(-1).view(np.uint8)).base)
        for place, array in enumerate([*sources, results])
    ]
    block = min(count, MAX_BLOCK)
    machine.launch(load(HEAD + text).entry(programs[0].entry), (count // block, 1, 1), (block, 1, 1), params)
    return results


def kernel(program: Program) -> str:
    """The PTX entry of one program; its parameters are the addresses of the operands and of the result."""
    return bundled([program], 0)


def bundled(programs: Sequence[Program], count: int) -> str:
    """The PTX entry, named after the first, of programs with the same sources: `count` results of each in turn."""
    first = programs[0]
    names = SOURCES[: len(first.sources)]
    lines = [
        f".visible .entry {first.entry}({', '.join(f'.param .u64 p{name}' for name in [*names, 'd'])})",
        "{",
        ".reg .b64 %p, %i, %o, %wa, %wb, %wc, %we, %wd, %w2; .reg .b32 %t, %x, %y; .reg .pred %q, %q2, %q3;",
        *(f".reg .{register_of(kind)} %{name};" for name, kind in zip(names, first.sources, strict=True)),
        "mov.u32 %t, %tid.x; mov.u32 %x, %ctaid.x; mov.u32 %y, %ntid.x; mad.lo.u32 %t, %x, %y, %t;",
        "mul.wide.u32 %i, %t, 8; mul.lo.u32 %x, %t, 0x9E3779B1; shr.u32 %x, %x, 13;",
        "and.b32 %y, %x, 1; setp.ne.u32 %q, %y, 0; and.b32 %y, %x, 6; setp.eq.u32 %q3, %y, 6;",
    ]
    for name, kind in zip(names, first.sources, strict=True):
        lines += [f"ld.param.u64 %p, [p{name}]; add.u64 %p, %p, %i; ld.global.b64 %w{name}, [%p];", _cut(name, kind)]
    lines.append("ld.param.u64 %o, [pd]; add.u64 %o, %o, %i;")
    for place, program in enumerate(programs):
        lines += [
            f"{{ .reg .{register_of(program.destination)} %d; mov.pred %q2, %q3;",
            program.text,
            _widened(program.destination),
        ]
        if "|%q2" in program.text:
            lines.append("selp.b64 %w2, 0x8000000000000000, 0, %q2; xor.b64 %wd, %wd, %w2;")
        lines.append(f"st.global.b64 [%o+{8 * count * place}], %wd; }}")
    return "\n".join([*lines, "ret;", "}"])


def register_of(kind: str) -> str:
    """The type of a register that holds `kind`, a type or "pred"."""
    return "pred" if kind == "pred" else f"b{max(WIDTH[kind], 16)}"


def _cut(name: str, kind: str) -> str:
    width = max(WIDTH[kind], 16)
    return f"mov.b64 %{name}, %w{name};" if width == 64 else f"cvt.u{width}.u64 %{name}, %w{name};"


def _widened(kind: str) -> str:
    if kind == "pred":
        return "selp.u64 %wd, 1, 0, %d;"
    if WIDTH[kind] == 64:
        return "mov.b64 %wd, %d;"
    cut = " and.b64 %wd, %wd, 255;" if WIDTH[kind] == 8 else ""
    return f"cvt.u64.u{max(WIDTH[kind], 16)} %wd, %d;{cut}"


def program_of(parts: Sequence[str], draw: random.Random) -> Program | None:
    """Returns a program for one spelling; None if it is not lane-wise or needs another kernel."""
    made = applied(parts, draw)
    if made is None:
        return None
    destination, sources, arguments = made
    if (destination != "pred" and destination not in WIDTH) or not all(kind in WIDTH for kind in sources):
        return None
    opcode = ".".join(parts)
    text = f"{opcode} {arguments};"
    if parts[0] in _CARRIES or "cc" in parts:
        # The carry in comes from a, and the carry out is added to the result.
        bits = parts[-1][1:]
        before = f"add.cc.u{bits} %d, %a, %a; " if parts[0] in _CARRIES else ""
        after = f" addc.u{bits} %d, %d, 0;" if "cc" in parts else ""
        text = f"{before}{text}{after}"
    return Program(opcode, text, destination, tuple(sources))


def applied(parts: Sequence[str], draw: random.Random) -> tuple[str, list[str], str] | None:
    """Destination, sources and the instruction's arguments; None if it is not lane-wise."""
    op, last = parts[0], parts[-1]
    third = ", %q" if any(word in parts for word in _BOOLEANS) else ""
    if op == "set":
        return parts[-2], [last, last], f"%d, %a, %b{third}"
    if op == "setp":
        second = "" if last in ("f16", "bf16") else "|%q2"
        return "pred", [last, last], f"%d{second}, %a, %b{third}"
    if op in ("cvt", "shfl", "vote", "match", "redux"):
        return _converted(parts) if op == "cvt" else _exchanged(parts, draw)
    if last == "pred":
        return {"not": ("pred", [], "%d, %q"), "mov": ("pred", [], "%d, %q")}.get(op) or (
            ("pred", [], "%d, %q, %q3") if op in _BOOLEANS else None
        )
    if op in _CARRIES or "cc" in parts:
        count = 3 if op.startswith("mad") else 2
        return last, [last] * count, ", ".join(["%d", "%a", "%b", "%c"][: count + 1])
    if op[0] == "v" and op not in ("vote",):
        return _video(parts, draw)
    if op == "lop3" and parts[1] in _BOOLEANS:
        return "b32", ["b32"] * 3, f"%d|%q2, %a, %b, %c, {draw.randrange(256)}, %q"
    if op in ("mul", "mad") and "wide" in parts:
        wide = _WIDER[last]
        return wide, [last, last, *([wide] if op == "mad" else [])], "%d, %a, %b" + (", %c" if op == "mad" else "")
    if op in ("add", "sub", "fma") and parts[-2] == "f32" and last in ("f16", "bf16"):
        count = 3 if op == "fma" else 2
        return "f32", [last] * (count - 1) + ["f32"], ", ".join(["%d", "%a", "%b", "%c"][: count + 1])
    fixed = {
        "testp": ("pred", [last], "%d, %a"),
        "slct": (parts[-2], [parts[-2], parts[-2], last], "%d, %a, %b, %c"),
        "selp": (last, [last, last], "%d, %a, %b, %q"),
        "fma": (last, [last] * 3, "%d, %a, %b, %c"),
        "mad": (last, [last] * 3, "%d, %a, %b, %c"),
        "popc": ("b32", [last], "%d, %a"),
        "clz": ("b32", [last], "%d, %a"),
        "bfind": ("b32", [last], "%d, %a"),
        "shl": (last, [last, "amount"], "%d, %a, %b"),
        "shr": (last, [last, "amount"], "%d, %a, %b"),
        "bfe": (last, [last, "amount", "amount"], "%d, %a, %b, %c"),
        "bfi": (last, [last, last, "amount", "amount"], "%d, %a, %b, %c, %e"),
        "dp4a": ("b32", ["b32"] * 3, "%d, %a, %b, %c"),
        "dp2a": ("b32", ["b32"] * 3, "%d, %a, %b, %c"),
        "sad": (last, [last] * 3, "%d, %a, %b, %c"),
        "mul24": (last, [last] * 2, "%d, %a, %b"),
        "mad24": (last, [last] * 3, "%d, %a, %b, %c"),
        "bmsk": (last, ["amount", "amount"], "%d, %a, %b"),
        "szext": (last, [last, "amount"], "%d, %a, %b"),
        "fns": (last, ["b32", "bit", "nth"], "%d, %a, %b, %c"),
        "lop3": ("b32", ["b32"] * 3, f"%d, %a, %b, %c, {draw.randrange(256)}"),
        "shf": ("b32", ["b32", "b32", "amount"], "%d, %a, %b, %c"),
        "prmt": ("b32", ["b32"] * 3, "%d, %a, %b, %c"),
        "mov": (last, [last], "%d, %a"),
        **dict.fromkeys(_UNARY, (last, [last], "%d, %a")),
        **dict.fromkeys(_BINARY, (last, [last, last], "%d, %a, %b")),
    }
    return fixed.get(op)


def _video(parts: Sequence[str], draw: random.Random) -> tuple[str, list[str], str]:
    """Draws some of the selectors that an instruction may have."""
    many = next((count for count in (2, 4) if parts[0].endswith(str(count))), 0)
    if many:
        digits, mask = ("0123", ("h0", "h1", "h10")) if many == 2 else ("01234567", ("b0", "b21", "b3210", "b30"))
        chosen = [mask[0][0] + "".join(draw.choice(digits) for _ in range(many)) for _ in range(2)]
        places = [draw.choice((name, f"{name}.{one}")) for name, one in zip(("%a", "%b"), chosen, strict=True)]
        names = [draw.choice(("%d", "%d." + draw.choice(mask))), *places]
        return "b32", ["b32"] * 3, ", ".join([*names, "%c"])
    part = ("", "", ".b0", ".b2", ".b3", ".h0", ".h1")
    second = any(word in parts[4:] for word in ("add", "min", "max")) or (
        parts[0] == "vset" and any(word in parts for word in ("add", "min", "max"))
    )
    to = "" if second or parts[0] == "vmad" else draw.choice(part)
    third = ", %c" if second or to or parts[0] == "vmad" else ""
    operands = f"%d{to}, %a{draw.choice(part)}, %b{draw.choice(part)}{third}"
    return "b32", ["b32"] * (3 if third else 2), operands


def _converted(parts: Sequence[str]) -> tuple[str, list[str], str] | None:
    destination, source = parts[-2], parts[-1]
    if "pack" in parts:
        packs_more = source == "b32"
        return "b32", ["s32", "s32", *(["b32"] if packs_more else [])], "%d, %a, %b" + (", %c" if packs_more else "")
    if "rs" in parts:
        return None
    if destination.endswith("x2") and source == "f32":
        return destination, ["f32", "f32"], "%d, %a, %b"
    return destination, [source], "%d, %a"


def _exchanged(parts: Sequence[str], draw: random.Random) -> tuple[str, list[str], str] | None:
    op, last = parts[0], parts[-1]
    if op == "shfl":
        clamp = draw.choice((0x1F, 0x1C1F, 0x181F, 0x0F07, 0x100F, 0, 0x1E1F))
        return "b32", ["b32", "lane"], f"%d|%q2, %a, %b, {clamp}, -1"
    if op == "vote":
        return ("b32" if "ballot" in parts else "pred"), [], "%d, %q, -1"
    if op == "match":
        return "b32", ["few64" if last == "b64" else "few"], f"%d{'|%q2' if 'all' in parts else ''}, %a, -1"
    return "b32", [last], "%d, %a, -1"


# Products of one warp's matrices: the operands fill their registers, and D is folded into one word.


_MADE: Final = "mov.b32 %x0, %a; mov.b32 %x1, %b; mov.b32 %x2, %c; mov.b32 %x3, %e;"


def _vector(name: str, start: int, count: int) -> str:
    return "{" + ", ".join(f"%{name}{start + i}" for i in range(count)) + "}"


def _integer_matrices(opcode: str, a: int, b: int, c: int) -> Program:
    """Registers of any bits: words and mixtures of them."""
    made = " ".join(f"mad.lo.u32 %x{i}, %x{i - 4}, 0x9E3779B1, %x{(i - 1) % 4};" for i in range(4, a + b + c))
    folded = " ".join(f"mad.lo.u32 %x0, %x0, 31, %y{i};" for i in range(c))
    text = (
        f"{{ .reg .b32 %x<16>; .reg .b32 %y<4>; {_MADE} {made} {opcode} {_vector('y', 0, c)}, {_vector('x', 0, a)}, "
        f"{_vector('x', a, b)}, {_vector('x', a + b, c)}; mov.b32 %x0, 0; {folded} mov.b32 %d, %x0; }}"
    )
    return Program(opcode, text, "b32", ("b32",) * 4)


def _double_matrices(opcode: str, a: int, b: int, c: int) -> Program:
    """Doubles made from integers of up to 31 bits, so that products and sums are rounded."""
    made = " ".join(f"mad.lo.s32 %x{i}, %x{i - 4}, 0x9E3779B1, %x{(i - 1) % 4};" for i in range(4, a + b + c))
    doubles = " ".join(f"shr.s32 %x{i}, %x{i}, {i % 7}; cvt.rn.f64.s32 %z{i}, %x{i};" for i in range(a + b + c))
    folded = " ".join(f"mov.b64 %i, %y{i}; mad.lo.u64 %d, %d, 31, %i;" for i in range(c))
    text = (
        f"{{ .reg .b32 %x<24>; .reg .f64 %z<24>; .reg .f64 %y<4>; .reg .b64 %i; {_MADE} {made} {doubles} "
        f"{opcode} {_vector('y', 0, c)}, {_vector('z', 0, a)}, {_vector('z', a, b)}, {_vector('z', a + b, c)}; "
        f"mov.b64 %d, 0; {folded} }}"
    )
    return Program(opcode, text, "b64", ("b32",) * 4)


def _quarter_matrices(opcode: str, d: int, c: int) -> Program:
    """m8n8k4 of f16 small integers, exact in every order."""
    made = " ".join(f"mad.lo.u32 %x{i}, %x{i - 4}, 0x9E3779B1, %x{(i - 1) % 4};" for i in range(4, 12))
    pair = "and.b32 %y0, %x{0}, 7; shr.u32 %y1, %x{0}, 16; and.b32 %y1, %y1, 7; cvt.rn.f16.u32 %h0, %y0; " \
           "cvt.rn.f16.u32 %h1, %y1; mov.b32 %x{0}, {{%h0, %h1}};"  # fmt: skip
    single = "and.b32 %x{0}, %x{0}, 255; cvt.rn.f32.u32 %x{0}, %x{0};"
    values = " ".join(pair.format(i) for i in range(4)) + " "
    values += " ".join((pair if c == 4 else single).format(i) for i in range(4, 4 + c))
    folded = " ".join(f"mad.lo.u32 %x0, %x0, 31, %y{i};" for i in range(d))
    text = (
        f"{{ .reg .b32 %x<12>; .reg .b32 %y<8>; .reg .b16 %h<2>; {_MADE} {made} {values} "
        f"{opcode} {_vector('y', 0, d)}, {_vector('x', 0, 2)}, {_vector('x', 2, 2)}, {_vector('x', 4, c)}; "
        f"mov.b32 %x0, 0; {folded} mov.b32 %d, %x0; }}"
    )
    return Program(opcode, text, "b32", ("b32",) * 4)


def matrix_programs() -> Iterator[Program]:
    """mma.sync of types whose result on an H200 is exact, or rounded in one order."""
    integers = {
        "m8n8k16.row.col.s32.u8.s8.s32": (1, 1, 2), "m8n8k16.row.col.satfinite.s32.s8.s8.s32": (1, 1, 2),
        "m8n8k32.row.col.s32.u4.s4.s32": (1, 1, 2), "m8n8k32.row.col.satfinite.s32.s4.u4.s32": (1, 1, 2),
        "m16n8k16.row.col.s32.u8.s8.s32": (2, 1, 4), "m16n8k32.row.col.satfinite.s32.s8.u8.s32": (4, 2, 4),
        "m16n8k32.row.col.s32.u4.u4.s32": (2, 1, 4), "m16n8k32.row.col.satfinite.s32.s4.s4.s32": (2, 1, 4),
        "m16n8k64.row.col.s32.s4.u4.s32": (4, 2, 4), "m16n8k64.row.col.satfinite.s32.u4.u4.s32": (4, 2, 4),
        "m8n8k128.row.col.s32.b1.b1.s32.and.popc": (1, 1, 2), "m8n8k128.row.col.s32.b1.b1.s32.xor.popc": (1, 1, 2),
        "m16n8k128.row.col.s32.b1.b1.s32.and.popc": (2, 1, 4), "m16n8k128.row.col.s32.b1.b1.s32.xor.popc": (2, 1, 4),
        "m16n8k256.row.col.s32.b1.b1.s32.and.popc": (4, 2, 4), "m16n8k256.row.col.s32.b1.b1.s32.xor.popc": (4, 2, 4),
    }  # fmt: skip
    for spelling, counts in integers.items():
        yield _integer_matrices(f"mma.sync.aligned.{spelling}", *counts)
    for shape, counts in {"m8n8k4": (1, 1, 2), "m16n8k4": (2, 1, 4), "m16n8k8": (4, 2, 4)}.items():
        for rounding in ("", ".rm"):
            yield _double_matrices(f"mma.sync.aligned.{shape}.row.col{rounding}.f64.f64.f64.f64", *counts)
    for layouts in ("row.row", "row.col"):
        for d, c in (("f16", "f16"), ("f32", "f16"), ("f32", "f32")):
            yield _quarter_matrices(
                f"mma.sync.aligned.m8n8k4.{layouts}.{d}.f16.f16.{c}", 4 if d == "f16" else 8, 4 if c == "f16" else 8
            )
