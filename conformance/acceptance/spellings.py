"""The questions for the assembler and the machine: one instruction each, with operands that fit it.

Spellings come from the machine's own table of forms and from grammar.txt, the ISA's syntax of families that the machine
has in part or not at all. Operands are written with letters: `c` a register of 8 bits, `h` of 16, `r` of 32, `l` of 64,
`q` of 128, `p` a predicate; `[l]` an address, `{r*4}` a vector, `p|p` two destinations.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from backends.vm import isa  # noqa: F401  (registers every instruction family)
from backends.vm.bind.forms import Form, all_forms, in_order
from backends.vm.ptx.ast import Address, Immediate, Instruction, Negated, Operand, Pair, Register, Sink, Symbol, Vector
from conformance.silicon.lanewise.programs import applied

SPELLINGS_A_FORM = 90
"""A form with more spellings is sampled, so that each of its words is in at least one sample."""

GRAMMAR = Path(__file__).with_name("grammar.txt")


@dataclass(frozen=True, slots=True)
class Question:
    """One instruction: its dotted opcode, and its operands in this module's letters, separated by `; `."""

    opcode: str
    operands: str

    def text(self) -> str:
        """Returns PTX that uses the registers and variables of FRAME."""
        return f"{self.opcode} {', '.join(_written(one) for one in self.operands.split('; ') if one)};"

    def instruction(self) -> Instruction:
        """Returns the instruction as the parser would."""
        operands = tuple(_parsed(one) for one in self.operands.split("; ") if one)
        return Instruction(tuple(self.opcode.split(".")), operands, None, 1, self.text())


REGISTERS = {"c": ".b8", "h": ".b16", "r": ".b32", "l": ".b64", "q": ".b128", "p": ".pred"}
FRAME = "\n".join(
    [
        ".visible .entry kernel(.param .b64 par) {",
        *(f".reg {kind} %{letter};" for letter, kind in REGISTERS.items()),
        ".shared .align 16 .b8 buf[64];",
    ]
)
"""Head of the entry around a question: at least three of its lines, then the instruction."""


@cache
def _written(operand: str) -> str:
    spread = re.sub(r"\{(\w+)\*(\d+)\}", lambda m: "{" + ", ".join([m[1]] * int(m[2])) + "}", operand)
    return re.sub(r"(?<![\w:.%])([chrlqp])(?!\w)", r"%\1", spread)


@cache
def _parsed(operand: str) -> Operand:
    if operand == "_":
        return Sink()
    if operand in REGISTERS:
        return Register(f"%{operand}")
    if operand[0] == "%":
        return Register(operand)
    if operand[0] == "!":
        return Negated(Register(f"%{operand[1:]}"))
    if "|" in operand:
        first, second = operand.split("|")
        return Pair(_parsed(first), _parsed(second))
    if operand[0] == "[":
        base, *coordinates = re.split(r", (?=\{)", operand[1:-1])
        place = _parsed(base)
        assert isinstance(place, Register | Symbol | Immediate)
        return Address(place, 0, tuple(_parsed(one) for one in coordinates))
    if operand[0] == "{":
        item, count = operand[1:-1].split("*")
        return Vector((_parsed(item),) * int(count))
    if re.fullmatch(r"-?\d+", operand):
        return Immediate(int(operand))
    return Symbol(operand)


# The spellings.


def spellings() -> Iterator[tuple[str, ...]]:
    """Yields each spelling once, as dotted parts: first the machine's forms, then GRAMMAR."""
    seen: set[tuple[str, ...]] = set()
    for parts in itertools.chain.from_iterable([*map(_of_form, all_forms()), *map(_of_line, _lines())]):
        if parts not in seen:
            seen.add(parts)
            yield parts


def _lines() -> list[str]:
    return [
        one
        for line in GRAMMAR.read_text("utf-8").splitlines()
        if not line.startswith("#")
        for one in re.split(r"\s{2,}", line.strip())
        if one
    ]


def _of_form(form: Form) -> list[tuple[str, ...]]:
    slots = [[*sorted(slot.choices), *([""] if slot.optional else [])] for slot in form.slots]
    return _drawn(form.spelling, slots)


_PART = re.compile(r"(\{)?\.?(?:<([^<>]+)>|([^.{}<>]+))\}?")


def _of_line(line: str) -> list[tuple[str, ...]]:
    slots = [
        [*(choices.split() if choices else [plain]), *([""] if optional else [])]
        for optional, choices, plain in _PART.findall(line)
    ]
    return _drawn(line, slots)


def _drawn(name: str, slots: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    if prod(map(len, slots)) <= SPELLINGS_A_FORM:
        picked = list(itertools.product(*slots))
    else:
        draw = random.Random(name)
        plain = [slot[-1] for slot in slots]
        # Each word with the other slots at their last choice (empty where optional); then random mixtures.
        picked = [(*plain[:at], word, *plain[at + 1 :]) for at, slot in enumerate(slots) for word in slot]
        # Leave most optional words out: few mixtures would be sound otherwise.
        often = [[*slot, *[""] * (2 * len(slot) if slot[-1] == "" else 0)] for slot in slots]
        picked += [tuple(draw.choice(slot) for slot in often) for _ in range(SPELLINGS_A_FORM - len(picked))]
    return [tuple(part for word in words if word for part in word.split(".")) for words in picked]


# The operands of a spelling.


_WIDTHS = {"8": "h", "16": "h", "32": "r", "64": "l", "128": "q"}


def _letter(type_name: str) -> str:
    """Letter of the register that holds a value of this type."""
    if type_name in ("pred", "p"):
        return "p"
    if type_name == "e2m1x2":
        return "c"
    if type_name == "tf32" or type_name.endswith("x4"):
        return "h" if type_name == "e2m1x4" else "r"
    if re.fullmatch(r"(?:e\dm\d|s2f6|ue8m0)x2", type_name):
        return "h"
    bits = int((re.search(r"(\d+)(?:x\d)?$", type_name) or ["", "32"])[1])
    return _WIDTHS.get(str(bits * (int(type_name[-1]) if re.search(r"x\d$", type_name) else 1)), "r")


def questions_of(parts: tuple[str, ...]) -> list[Question]:
    """Returns the spelling with each operand list that it may take. It counts as accepted if one of them is."""
    opcode = ".".join(parts)
    ordered = in_order(Instruction(parts, (), None, 1, opcode)).parts
    return [Question(opcode, operands) for operands in dict.fromkeys(_operands(ordered))]


def _operands(parts: tuple[str, ...]) -> list[str]:
    opcode = ".".join(parts)
    for matches, operands in _patterns():
        if matches(opcode):
            return [operands] if isinstance(operands, str) else list(operands)
    special = _BY_OPCODE.get(parts[0]) or _BY_OPCODE.get(".".join(parts[:2]))
    if special is not None:
        return special(parts)
    made = applied(parts, random.Random(0))
    if made is None:
        return ["", "r; r; r", "r; r"]
    destination, sources, arguments = made
    letters = {"%q": "p", "%q2": "p", "%q3": "p", "%d": _kind(destination)}
    letters.update(zip(("%a", "%b", "%c", "%e"), map(_kind, sources), strict=False))
    return ["; ".join("|".join(letters.get(x, x) for x in one.split("|")) for one in arguments.split(", "))]


@cache
def _patterns() -> list[tuple[Callable[[str], object], str | tuple[str, ...]]]:
    return [(re.compile(pattern).match, operands) for pattern, operands in _PATTERNS]


def _kind(kind: str) -> str:
    return {"few64": "l"}.get(kind, "r") if kind in ("amount", "lane", "few", "few64", "bit", "nth") else _letter(kind)


def _ternary_too(parts: tuple[str, ...]) -> list[str]:
    x = _letter(parts[-1])
    return [f"{x}; {x}; {x}"] + ([f"{x}; {x}; {x}; {x}"] if parts[0] in ("min", "max") and parts[-1] == "f32" else [])


def _vector(parts: tuple[str, ...], letter: str) -> str:
    count = next((part[1:] for part in parts if part in ("v2", "v4", "v8")), None)
    return f"{{{letter}*{count}}}" if count else letter


def _policy(parts: tuple[str, ...]) -> str:
    return "; l" if "L2::cache_hint" in parts else ""


def _load(parts: tuple[str, ...]) -> list[str]:
    address = "[par]" if any(part.startswith("param") for part in parts) else "[l]"
    value = _vector(parts, _letter(parts[-1]))
    both = f"{address}; {value}" if parts[0] == "st" else f"{value}; {address}"
    return [both + _policy(parts)]


def _atomic(parts: tuple[str, ...]) -> list[str]:
    value = _vector(parts, _letter(parts[-1]))
    source = f"{value}; {value}" if "cas" in parts else value
    return [("" if parts[0] == "red" else f"{value}; ") + f"[l]; {source}{_policy(parts)}"]


def _cvt(parts: tuple[str, ...]) -> list[str]:
    to, source = parts[-2], parts[-1]
    if "pack" in parts:
        return ["r; r; r; r" if source == "b32" else "r; r; r"]
    if re.search(r"x[24]$", source) and not re.search(r"x[24]$", to):
        return []
    if "x4" in to:
        return [f"{'h' if to == 'e2m1x4' else 'r'}; {{r*4}}; r"]
    d, s = _letter(to), _letter(source)
    if "bf16" in (to, source):
        d, s = ("c" if to[1:] == "8" else d), ("c" if source[1:] == "8" else s)
    values = f"{s}; {s}" if to.endswith("x2") and source == "f32" else s
    scaled = "; h" if any(part.startswith("scaled") for part in parts) else ""
    bits = "; r" if "rs" in parts else ""
    return [f"{d}; {values}{scaled}{bits}"]


_MMA_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "s32": 32, "b1": 1, "u4": 4, "s4": 4}


def _registers(elements: int, type_name: str) -> str:
    bits = _MMA_BITS.get(type_name, 8)
    letter, size = ("l", 64) if bits == 64 else ("r", 32)
    return f"{{{letter}*{max(1, elements * bits // size // 32)}}}"


def _mma(parts: tuple[str, ...]) -> list[str]:
    m, n, k = (int(one) for one in re.findall(r"\d+", next(part for part in parts if re.match(r"m\d+n\d+k", part))))
    types = [part for part in parts if re.fullmatch(r"(b?f|tf|[us])\d+|b1|e\dm\d", part)][:4]
    if len(types) < 4:
        return ["r; r; r; r"]
    d, a, b, c = types
    sparse = parts[1].startswith("sp")
    if "kind::mxf4" in parts or "kind::mxf4nvf4" in parts:
        a = b = "u4"
    sizes = (m * n, m * k // (2 if sparse else 1), k * n, m * n)
    spread = 4 if (m, n, k) == (8, 8, 4) and a == "f16" else 1
    operands = [_registers(size * spread, one) for size, one in zip(sizes, (d, a, b, c), strict=True)]
    rest = "; r; 0" if sparse else "; r; {h*2}; r; {h*2}" if "block_scale" in parts else ""
    return ["; ".join(operands) + rest]


def _wmma(parts: tuple[str, ...]) -> list[str]:
    what, opcode = parts[1], ".".join(parts)
    shape = next(part for part in parts if re.match(r"m\d+n\d+k", part))
    types = [part for part in parts if re.fullmatch(r"(b?f|tf|[us])\d+", part)]
    m, n, k = (int(one) for one in re.findall(r"\d+", shape))

    def fragment(which: str, kind: str) -> str:
        if which in "cd":
            return {"f16": "{r*4}", "f64": "{l*2}"}.get(kind, "{r*8}")
        if kind == "f16":
            return "{r*8}"
        if kind == "f64":
            return "{l*1}"
        elements = (m if which == "a" else n) * k
        return _registers(elements, kind)

    if what == "load":
        return [f"{fragment(parts[2], parts[-1])}; [l]; r", f"{fragment(parts[2], parts[-1])}; [l]"]
    if what == "store":
        return [f"[l]; {fragment('d', parts[-1])}; r"]
    if len(types) == 2:
        d, c = types
        return ["; ".join((fragment("d", d), fragment("a", "f16"), fragment("b", "f16"), fragment("c", c)))]
    assert opcode
    return ["; ".join(fragment(one, kind) for one, kind in zip("dabc", types, strict=False))]


def _matrix_rows(parts: tuple[str, ...]) -> list[str]:
    count = int(next((part[1:] for part in parts if part in ("x1", "x2", "x4")), "1"))
    count *= 2 if "m16n16" in parts else 1
    return [f"{{r*{count}}}; [l]"] if parts[0] == "ldmatrix" else [f"[l]; {{r*{count}}}"]


def _tensor(parts: tuple[str, ...]) -> list[str]:
    """Operand lists of cp.async.bulk and its relatives."""
    dim = next((int(part[0]) for part in parts if re.fullmatch(r"\dd", part)), 0)
    four = "tile::gather4" in parts or "tile::scatter4" in parts
    place = f"[l, {{r*{5 if four else dim}}}]"
    offsets = [""]
    if "im2col" in parts:
        offsets = [f"; {{h*{dim - 2}}}"] if dim > 2 else []
    if "im2col::w" in parts or "im2col::w::128" in parts:
        offsets = ["; {h*2}"]
    mask = "; h" if "multicast::cluster" in parts else ""
    policy = _policy(parts)
    if "prefetch" in parts:
        return [f"{place}{one}{policy}" for one in offsets] if dim else [f"[l]; r{policy}"]
    if not dim:
        if "mbarrier::complete_tx::bytes" in parts:
            return [f"[l]; [l]; r; [l]{mask}{policy}"]
        return [f"[l]; [l]; r{policy}{'; h' if 'cp_mask' in parts else ''}"]
    if "bulk_group" in parts:
        return [f"{place}; [l]{policy}"]
    return [f"[l]; {place}; [l]{one}{mask}{policy}" for one in offsets]


def _tcgen05(parts: tuple[str, ...]) -> list[str]:
    opcode = ".".join(parts)
    if parts[1] == "mma":
        sparse = "; [r]" if "sp" in parts else ""
        if "block_scale" in parts:
            return [f"[r]; {a}; l{sparse}; r; [r]; [r]; p" for a in ("l", "[r]")]
        return [f"[r]; {a}; l{sparse}; r; p" for a in (("[r]",) if "ashift" in parts else ("l", "[r]"))]
    if parts[1] in ("ld", "st"):
        shape = next(part for part in parts if re.match(r"(16|32)x", part))
        count = int(next(part[1:] for part in parts if re.fullmatch(r"x\d+", part)))
        count *= {"16x128b": 2, "16x256b": 4}.get(shape, 1)
        split = "; 32" if shape == "16x32bx2" else ""
        values = f"{{r*{count}}}"
        if "red" in parts:
            return [f"{values}; r; [r]"]
        return [f"{values}; [r]{split}"] if parts[1] == "ld" else [f"[r]{split}; {values}"]
    if parts[1] == "commit":
        return ["[l]; h" if "multicast::cluster" in parts else "[l]"]
    fixed = {"alloc": "[l]; 32", "dealloc": "r; 32", "relinquish_alloc_permit": "", "shift": "[r]", "cp": "[r]; l"}
    assert opcode
    return [fixed.get(parts[1], "")]


def _wgmma(parts: tuple[str, ...]) -> list[str]:
    shape = next((part for part in parts if re.match(r"m64n\d+k", part)), None)
    if shape is None:
        return ["1" if "wait_group" in parts else ""]
    n = int(re.findall(r"\d+", shape)[1])
    d = parts[parts.index(shape) + 1] if "satfinite" not in parts else "s32"
    count = n // 4 if d == "f16" else n // 2
    sparse = "; r; 0" if "sp" in parts else ""
    left = next(part for part in parts[parts.index(shape) + 2 :] if part not in ("s32",))
    rest = {"f16": "; p; 1; 1; 0; 0", "bf16": "; p; 1; 1; 0; 0"}.get(left, "; p; 1; 1")
    if left in ("u8", "s8", "b1"):
        rest = "; p"
    return [f"{{r*{count}}}; l; l{sparse}{rest}"]


def _mbarrier(parts: tuple[str, ...]) -> list[str]:
    remote = "shared::cluster" in parts
    if parts[1] in ("arrive", "arrive_drop"):
        tail = "; r" if "expect_tx" in parts or "noComplete" in parts else ""
        return [f"_; [l]{tail}"] if remote else [f"l; [l]{tail}"]
    if parts[1] in ("test_wait", "try_wait"):
        return ["p; [l]; r" if "parity" in parts else "p; [l]; l"]
    fixed = {"init": "[l]; r", "inval": "[l]", "expect_tx": "[l]; r", "complete_tx": "[l]; r", "pending_count": "r; l"}
    return [fixed[parts[1]]]


def _multimem(parts: tuple[str, ...]) -> list[str]:
    if "cp" in parts:
        return ["[l]; [l]; r" + ("; h" if "cp_mask" in parts else "")]
    value = _vector(parts, _letter(parts[-1]))
    return [f"{value}; [l]" if parts[1] == "ld_reduce" else f"[l]; {value}"]


def _create_policy(parts: tuple[str, ...]) -> list[str]:
    if parts[1] == "range":
        return ["l; [l]; r; r"]
    return ["l; l" if parts[1] == "cvt" else "l"]


_BY_OPCODE = {
    **dict.fromkeys(("ld", "st", "ldu"), _load),
    **dict.fromkeys(("atom", "red"), _atomic),
    **dict.fromkeys(("min", "max"), _ternary_too),
    "cvt": _cvt,
    "mma": _mma,
    "wmma": _wmma,
    "wgmma": _wgmma,
    "ldmatrix": _matrix_rows,
    "stmatrix": _matrix_rows,
    "tcgen05": _tcgen05,
    "mbarrier": _mbarrier,
    "multimem": _multimem,
    "createpolicy": _create_policy,
}
_PATTERNS: tuple[tuple[str, str | tuple[str, ...]], ...] = (
    (r"(ld|st)\.\S*param::func|st\.\S*param", ()),
    (r"(cp(\.reduce)?\.async\.bulk\.commit_group|cp\.async\.(commit_group|wait_all))", ""),
    (r"cp\.async(\.bulk)?\.wait_group", "1"),
    (r"cp\.async\.mbarrier", "[l]"),
    (r"red\.async", ("[l]; r; [l]", "[l]; l; [l]")),
    (r"st\.async\.(mmio|release)", ("[l]; r", "[l]; l", "[l]; h")),
    (r"st\.async.*\.(v2|v4)\.\w64", ("[l]; {l*2}; [l]", "[l]; {l*4}; [l]")),
    (r"st\.async.*\.(v2|v4)\.", ("[l]; {r*2}; [l]", "[l]; {r*4}; [l]")),
    (r"st\.async", ("[l]; r; [l]", "[l]; l; [l]", "[l]; q; [l]")),
    (r"st\.bulk", "[l]; l; 0"),
    (r"mad[c]?\.(lo|hi)\.(cc\.)?[us]64", "l; l; l; l"),
    (r"mad[c]?\.(lo|hi)(\.cc)?\.[us]32", "r; r; r; r"),
    (r"(add|sub)[c]?(\.cc)?\.[us]64", "l; l; l"),
    (r"(addc|subc|(add|sub)\.cc)", "r; r; r"),
    (r"(vmad|v\w+[24]\.)", "r; r; r; r"),
    (r"v(add|sub|absdiff|min|max)\.[us]32\.[us]32\.[us]32(\.sat)?$", "r; r; r"),
    (r"v(shl|shr)\.[us]32\.[us]32\.u32(\.sat)?\.(clamp|wrap)$", "r; r; r"),
    (r"vset\.[us]32\.[us]32\.\w\w$", "r; r; r"),
    (r"v(add|sub|absdiff|min|max|shl|shr|set)\.", "r; r; r; r"),
    (r"clmad", "l; l; l; l"),
    (r"(max|min)\.u?s?\d*.*xorsign", ()),
    (r"(abs|neg)\.s(8x4|16x2)", "r; r"),
    (r"(add|sub)(\.sat)?\.[us](8x4|16x2)", "r; r; r"),
    (r"(min|max)(\.relu)?\.[us](8x4|16x2)", "r; r; r"),
    (r"(fma\.rn\.oob)(\.relu)?\.b?f16$", "h; h; h; h"),
    (r"(fma\.rn\.oob)(\.relu)?\.b?f16x2", "r; r; r; r"),
    (r"lop3\.(and|or)", "r|p; r; r; r; 7; p"),
    (r"(min|max)\.\S*xorsign\S*\.f32", "r; r; r"),
    (r"mov\.b128", "q; q"),
    (r"mov\.v2\.\w16", "{h*2}; {h*2}"),
    (r"mov\.v4\.\w16", ("{h*4}; {h*4}", "{h*4}; %tid")),
    (r"mov\.v2\.\w32", "{r*2}; {r*2}"),
    (r"mov\.v4\.\w32", ("{r*4}; {r*4}", "{r*4}; %tid")),
    (r"mov\.v2\.\w64", "{l*2}; {l*2}"),
    (r"cvta\.\S*u64", "l; l"),
    (r"cvta\.\S*u32", "r; r"),
    (r"isspacep", "p; l"),
    (r"istypep", "p; l"),
    (r"(bra|brx|call)", ()),
    (r"fence\.proxy\.tensormap::generic\.acquire", "[l]; 128"),
    (r"(trap|exit|ret|brkpt|griddepcontrol|fence|membar|wgmma\.fence)", ""),
    (r"nanosleep", "r"),
    (r"pmevent", "1"),
    (r"setmaxnreg", "64"),
    (r"barrier\.cluster", ""),
    (r"(bar|barrier)\.warp", "-1"),
    (r"(bar|barrier)(\.cta)?\.red\S*\.pred", "p; 0; p"),
    (r"(bar|barrier)(\.cta)?\.red", "r; 0; p"),
    (r"(bar|barrier)(\.cta)?\.arrive", "0; 64"),
    (r"(bar|barrier)", "0"),
    (r"activemask", "r"),
    (r"elect", "r|p; -1"),
    (r"vote\.sync\.ballot", "r; p; -1"),
    (r"vote\.sync", "p; p; -1"),
    (r"vote", "p; p"),
    (r"shfl\.(idx|up|down|bfly)", "r; r; 0; 31"),
    (r"mapa\.\S*u64", "l; l; r"),
    (r"mapa", "r; r; r"),
    (r"getctarank\.\S*u64", "r; l"),
    (r"getctarank", "r; r"),
    (r"movmatrix", "r; r"),
    (r"(prefetchu?|discard|applypriority).*tensormap", "[l]"),
    (r"(prefetchu?)", "[l]"),
    (r"(discard|applypriority)", "[l]; 128"),
    (r"cp\.async\.bulk\.prefetch\.L2\S*cache_hint", "[l]; r; l"),
    (r"cp\.async\.bulk\.prefetch\.L2", "[l]; r"),
    (r"cp\.async\.c[ag]\S*L2::cache_hint", ("[l]; [l]; 16; l", "[l]; [l]; 4; l")),
    (r"cp\.async\.c[ag]", ("[l]; [l]; 16", "[l]; [l]; 4")),
    (r"clusterlaunchcontrol\.try", "[l]; [l]"),
    (r"clusterlaunchcontrol\.query_cancel\.is", "p; q"),
    (r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid\.v4", "{r*4}; q"),
    (r"clusterlaunchcontrol", "r; q"),
    (r"tensormap\.cp", "[l]; [l]; 128"),
    (r"tensormap\.replace\S*b64", ("[l]; l", "[l]; 1; l")),
    (r"tensormap\.replace", ("[l]; 1", "[l]; r", "[l]; 1; r")),
    (r"alloca\.u32", "r; 16"),
    (r"alloca\.u64", "l; 16"),
    (r"stack(save|restore)\.u32", "r"),
    (r"stack(save|restore)\.u64", "l"),
)
_BY_OPCODE["cp.async"] = _BY_OPCODE["cp.reduce"] = _tensor


@cache
def questions() -> tuple[Question, ...]:
    """Every question, in the order of the spellings."""
    return tuple(one for parts in spellings() for one in questions_of(parts))
