"""Where an instruction exists: the targets and PTX versions that have it, and mixtures of modifiers that no target has.

FEATURES and the rules below match what ptxas 13.5 accepts, as recorded in results/acceptance.md; a test holds them to
it. A form says what its words mean; this file says whether an assembler would have accepted them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from backends.vm.ptx.ast import Immediate, Instruction
from backends.vm.tensor.tma_box import REDUCED_TYPES

Version = tuple[int, int]
Words = frozenset[str]

OLDEST: Version = (1, 0)


@dataclass(frozen=True, slots=True)
class Feature:
    """Instructions whose dotted spelling starts with a match of `pattern`.

    `since` is the first architecture that has it, as 90 for sm_90. `specific`: from there on it needs a target of one
    architecture (sm_100a) or of a family (sm_100f); a target whose code runs on all later ones (sm_100) does not have
    it. `only` lists all targets that have it, where `since` would include too many. `version` is the first PTX version
    with it. `operands`: it applies only with this number of operands. `constants`: only if the last operand is one of
    these.
    """

    pattern: str
    since: int = 0
    specific: bool = False
    only: str = ""
    version: Version = OLDEST
    operands: int | None = None
    constants: range | None = None


_TENSOR_CORE = "sm_100a sm_103a sm_100f sm_103f"
_TENSOR_CORE_A = "sm_100a sm_103a"
_BLACKWELL_A = "sm_100a sm_103a sm_120a"
_NARROW = "(e[23]m[23]x2|e4m3x2|e5m2x2)"

FEATURES = (
    Feature(r"wgmma\.", only="sm_90a"),
    Feature(r"wgmma\.mma_async\.sp\.", version=(8, 2)),
    Feature(r"wgmma\.\S*\.s32\.(s8\.u8|u8\.s8)", version=(8, 4)),
    Feature(r"tcgen05\.", only=_TENSOR_CORE),
    Feature(r"tcgen05\.\S*kind::i8", only="sm_100a"),
    Feature(r"tcgen05\.ld\.red", only="sm_103a sm_103f"),
    Feature(r"tcgen05\.\S*kind::mxf4nvf4", version=(8, 7)),
    Feature(r"tcgen05\.mma\.sp\.\S*kind::mxf4", only=_TENSOR_CORE_A),
    Feature(r"tcgen05\.\S*scale_vec::", only=_TENSOR_CORE_A),
    Feature(r"tcgen05\.\S*\.block(16|32)", version=(8, 8)),
    Feature(r"(add|sub|mul|fma)\S*\.f32x2$", since=100),
    Feature(r"(add|sub|fma)\S*\.f32\.b?f16$", since=100),
    Feature(r"fma\.rn\.oob", version=(8, 1)),
    Feature(r"(min|max)\S*\.f32$", since=100, version=(8, 8), operands=4),
    Feature(r"(add|sub|min|max|neg)\S*\.[us]8x4$", only="sm_120a sm_120f", version=(9, 2)),
    Feature(r"(add|sub)\.sat\.[us]16x2$", only="sm_120a sm_120f", version=(9, 2)),
    Feature(r"redux\.sync\S*\.f32$", only=_TENSOR_CORE),
    Feature(r"clusterlaunchcontrol\.", since=100),
    Feature(r"clusterlaunchcontrol\.\S*multicast", since=100, specific=True),
    Feature(r"setmaxnreg", since=90, specific=True),
    Feature(r"cp\.async\.bulk\S*\.cta_group::", only=_TENSOR_CORE),
    Feature(r"cp\.async\.bulk\.prefetch\S*\.(tile::gather4|im2col::w)", only=_TENSOR_CORE),
    Feature(r"cp\.async\.bulk\.tensor\S*\.shared::cta\.global\S*\.(tile::gather4|im2col::w)(\.|$)", since=100),
    Feature(r"cp\.async\.bulk\.tensor\S*\.shared::cluster\.global\S*\.(tile::gather4|im2col::w)(\.|$)",
            only=_TENSOR_CORE),
    Feature(r"cp\.async\.bulk\S*\.(tile::scatter4|im2col::w::128)(\.|$)", only=_TENSOR_CORE),
    Feature(r"cp\.async\.bulk(\.tensor\.\dd)?\.shared::cta\.(global|shared::cta)", version=(8, 6)),
    Feature(r"\S*\.cp_mask", since=100),
    Feature(r"cvt\.rs\.", only=_TENSOR_CORE_A, version=(8, 7)),
    Feature(r"cvt\.\S*ue8m0x2", since=100, specific=True),
    Feature(r"cvt\.r[nz]\.\S*satfinite\S*\.tf32", since=100),
    Feature(r"cvt\.rna\S*satfinite\S*\.tf32", version=(8, 1)),
    Feature(r"cvt\.\S*e2m1x2", since=100, specific=True),
    Feature(r"cvt\.\S*\.(e2m3x2|e3m2x2)", since=100, specific=True),
    Feature(r"cvt\.\S*\.(e2m3x2|e3m2x2|e2m1x2|e4m3x2|e5m2x2)\.bf16x2", since=100, specific=True, version=(9, 1)),
    Feature(r"cvt\.\S*\.(e2m3x2|e3m2x2|e2m1x2)\.f16x2", since=100, specific=True, version=(9, 1)),
    Feature(rf"cvt\.\S*\.bf16x2\.({_NARROW}|e2m1x2)", since=100, specific=True, version=(9, 2)),
    Feature(r"cvt\.\S*s2f6x2", only=_BLACKWELL_A, version=(9, 1)),
    Feature(r"cvt\.r[nz]\S*satfinite\S*\.b?f16(x2)?\.f32", version=(8, 1)),
    Feature(r"cvt\.\S*scaled::n2::ue8m0", since=100, specific=True, version=(9, 1)),
    Feature(r"tensormap\.replace\S*swizzle_atomicity", since=100, specific=True),
    Feature(r"tensormap\.replace\S*elemtype", since=100, specific=True, version=(8, 7), constants=range(13, 16)),
    Feature(r"tensormap\.replace\S*swizzle_mode", only="sm_103a sm_103f", version=(8, 8), constants=range(4, 5)),
    Feature(r"tensormap\.(replace|cp_fenceproxy)", version=(8, 3)),
    Feature(r"tensormap\.replace", since=90, specific=True),
    Feature(r"fence\.proxy\.tensormap", version=(8, 3)),
    Feature(r"fence\S*\.sync_restrict", version=(8, 6)),
    Feature(r"fence\.(acquire|release)\.", version=(8, 6)),
    Feature(r"mbarrier\.(arrive|arrive_drop|test_wait|try_wait)\S*\.relaxed", version=(8, 6)),
    Feature(r"st\.async\S*\.(mmio|release|global)", since=100, version=(8, 7)),
    Feature(r"st\.async\.", version=(8, 1)),
    Feature(r"st\.async\S*\.b128", version=(9, 2)),
    Feature(r"red\.async\.", version=(8, 1)),
    Feature(r"st\.bulk", since=100),
    Feature(r"multimem\.", version=(8, 1)),
    Feature(r"multimem\.ld_reduce\S*acc::f32", version=(8, 2)),
    Feature(r"multimem\S*e[45]m[23]x4", only=f"{_TENSOR_CORE} sm_120a"),
    Feature(r"multimem\S*acc::f16", only=f"{_TENSOR_CORE} sm_120a"),
    Feature(r"multimem\.cp\.", version=(9, 1)),
    Feature(r"(atom|red)\.\S*\.v[248]\.", version=(8, 1)),
    Feature(r"\S*\.b128", version=(8, 3)),
    Feature(r"(atom|ld|st)\.\S*sys\.\S*b128", version=(8, 4)),
    Feature(r"mma\S*scale_vec::4X\S*ue8m0", version=(9, 1)),
    Feature(r"\S*param::(entry|func)", version=(8, 3)),
    Feature(r"(ld|st)\.\S*(\.v8\.\w32|\.v4\.\w64)$", since=100, version=(8, 8)),
    Feature(r"lop3\.(and|or)", version=(8, 2)),
    Feature(r"clmad", version=(9, 3)),
    Feature(r"ldmatrix\S*\.(m16n16|m8n16)", since=100, specific=True),
    Feature(r"stmatrix\S*\.m16n8", since=100, specific=True),
    Feature(r"mma\S*(e4m3|e5m2)", version=(8, 4)),
    Feature(r"mma\.sync\.aligned\.m16n8k16\S*(e4m3|e5m2)", version=(8, 7)),
    Feature(r"mma\S*\.f16\.(e4m3|e5m2)\.(e4m3|e5m2)\.f16", version=(8, 7)),
    Feature(r"mma\S*kind::f8f6f4", since=100, specific=True),
    Feature(r"mma\S*(e3m2|e2m3|e2m1)", only="sm_120a sm_120f"),
    Feature(r"mma\S*block_scale", only="sm_120a sm_120f"),
    Feature(r"mma\.sp::ordered_metadata", version=(8, 5)),
    Feature(r"mma\.sp\S*m16n8k64\S*\.f16\.e", only="sm_120a sm_120f", version=(8, 7)),
)  # fmt: skip


def missing(instruction: Instruction, target: str, version: Version) -> str | None:
    """Why ptxas refuses the instruction for `target` ("sm_90a"), or None. Its modifiers are in the order of its form
    (backends.vm.bind.forms.in_order)."""
    operands = instruction.operands
    features, reason = _known(instruction.parts, len(operands))
    last = operands[-1].value if operands and isinstance(operands[-1], Immediate) else None
    for feature in features:
        if feature.constants is not None and last not in feature.constants:
            continue
        if (lacking := _lacking(feature, target, version)) is not None:
            return lacking
    return reason


def _lacking(feature: Feature, target: str, version: Version) -> str | None:
    """What `target` or `version` lacks of a feature, or None."""
    if feature.only and target not in feature.only.split():
        return f"it needs target {' or '.join(feature.only.split())}, and the module is for {target}"
    number = int(re.sub(r"\D", "", target) or 0)
    if number < feature.since:
        return f"it needs target sm_{feature.since} or higher, and the module is for {target}"
    if feature.specific and target[-1] not in "af":
        return f"it needs a target such as sm_{feature.since}a, and the module is for {target}"
    if version < feature.version:
        needed, given = (".".join(map(str, one)) for one in (feature.version, version))
        return f"it needs PTX version {needed} or later, and the module is of version {given}"
    return None


@cache
def _known(parts: tuple[str, ...], operands: int) -> tuple[tuple[Feature, ...], str | None]:
    """The features of a spelling, and the reason if no target has it."""
    opcode, words = ".".join(parts), frozenset(parts)
    features = tuple(
        feature for feature in FEATURES if feature.operands in (None, operands) and re.match(feature.pattern, opcode)
    )
    return features, next((reason for rule in _RULES.get(parts[0], ()) for reason in rule(parts, words)), None)


# Mixtures of modifiers that no target has: each function yields the reasons.


Rule = Callable[[tuple[str, ...], Words], Iterator[str]]

_ORDERS = frozenset({"relaxed", "acquire", "release", "acq_rel"})
_SCOPES = frozenset({"cta", "cluster", "gpu", "sys"})
_HALVES = frozenset({"f16", "f16x2", "bf16", "bf16x2"})
_WORDS_OF_64 = frozenset({"b64", "u64", "s64", "f64"})


def _ordered(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """An order needs a scope and a scope an order (PTX ISA 8.5, 8.6)."""
    order, scope = words & _ORDERS, words & _SCOPES
    if order and not scope:
        yield f".{min(order)} needs a scope, such as .gpu"
    if scope and not order:
        yield f".{min(scope)} needs an order, such as .relaxed"


def _access(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """ld and st (PTX ISA 9.7.9.8, 9.7.9.11)."""
    if parts[1:2] in (("async",), ("bulk",)):
        return
    stores = parts[0] == "st"
    yield from _ordered(parts, words)
    if wrong := words & ({"acquire", "nc", "lu", "cv", "ca"} if stores else {"release", "wb", "wt"}):
        yield f"{parts[0]} has no .{min(wrong)}"
    if "mmio" in words and (not words & {"relaxed"} or "sys" not in words):
        yield ".mmio needs .relaxed.sys"
    strong = words & {*_ORDERS, "volatile", "mmio"}
    caches = words & {"ca", "cg", "cs", "lu", "cv", "wb", "wt"}
    if strong and caches:
        yield f".{min(strong)} and .{min(caches)} exclude each other"
    if strong and "nc" in words:
        yield f".{min(strong)} and .nc exclude each other"
    if "weak" in words and (strong or words & _SCOPES):
        yield ".weak has no order and no scope"
    yield from _where(parts, words, stores=stores)


def _where(parts: tuple[str, ...], words: Words, *, stores: bool) -> Iterator[str]:
    spaces = {part for part in parts if part.startswith(("global", "local", "shared", "param", "const"))}
    first, second = (
        [part for part in parts if part.startswith(level)]
        for level in (("L1::",), ("L2::evict",))
    )  # fmt: skip
    prefetched = words & {"L2::64B", "L2::128B", "L2::256B"}
    vector = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    bits = vector * int(re.sub(r"\D", "", parts[-1]))
    if len(first) > 1 or len(second) > 1:
        yield "two eviction priorities of one level"
    elsewhere = min(spaces - {"global"}, default=None)
    if elsewhere is not None and (first or second or prefetched or "L2::cache_hint" in words):
        yield f"cache priorities, hints and prefetches are for global memory, not .{elsewhere}"
    if "nc" in words and "global" not in spaces:
        yield ".nc needs .global"
    if "mmio" in words and "global" not in spaces and spaces:
        yield ".mmio is for global memory"
    if "volatile" in words and (first or second or "L2::cache_hint" in words):
        yield ".volatile has no cache priority"
    if ("mmio" in words or stores) and prefetched:
        yield f".{min(prefetched)} does not go with {parts[0]}{'.mmio' if 'mmio' in words else ''}"
    if words & {"cg", "cs", "lu", "cv", "wb", "wt"} and first:
        yield f".{first[0]} does not go with a cache operator"
    wide = (vector, parts[-1][1:]) in ((8, "32"), (4, "64"))
    if bits > 128 and not wide:
        yield f"a vector of {bits} bits"
    if wide and elsewhere is not None:
        yield "256 bits at once are for global memory"
    if second and not wide:
        yield f".{second[0]} needs 256 bits at once: .v8.b32 or .v4.b64"
    if stores and words & {"const", "param::entry", "param::func"}:
        yield "stores to this space"


_ATOMIC_TYPES = {
    **dict.fromkeys(("and", "or", "xor"), "b32 b64"),
    "exch": "b32 b64 b128",
    "cas": "b16 b32 b64 b128",
    **dict.fromkeys(("inc", "dec"), "u32"),
    "add": "u32 s32 u64 f32 f64 f16 f16x2 bf16 bf16x2",
    **dict.fromkeys(("min", "max"), "u32 s32 u64 s64 f16 f16x2 bf16 bf16x2"),
}


def _atomic(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """atom and red (PTX ISA 9.7.13.5, 9.7.13.6)."""
    if parts[1:2] == ("async",):
        return
    op = next((part for part in parts if part in _ATOMIC_TYPES), "")
    if op and parts[-1] not in _ATOMIC_TYPES[op].split():
        yield f".{op} is for {_ATOMIC_TYPES[op]}"
    halves, vector = parts[-1] in _HALVES, any(part in words for part in ("v2", "v4", "v8"))
    if "noftz" in words and not halves:
        yield ".noftz is for halves"
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    if halves and count * (32 if parts[-1].endswith("x2") else 16) > 128:
        yield "a vector of more than 128 bits"
    if halves and op in ("min", "max") and not vector:
        yield f".{op} of halves is for vectors"
    shared = next((part for part in parts if part.startswith("shared")), None)
    if "L2::cache_hint" in words and (shared or op == "cas"):
        yield f".L2::cache_hint does not go with .{shared or op}"
    if parts[0] == "red" and (wrong := words & {"acquire", "acq_rel", "exch", "cas"}):
        yield f"red has no .{min(wrong)}"


_MULTIMEM_TYPES = {
    **dict.fromkeys(("and", "or", "xor"), "b32 b64"),
    **dict.fromkeys(("min", "max"), "u32 s32 u64 s64 f16 f16x2 bf16 bf16x2 e4m3x4 e5m2x4"),
    "add": "u32 s32 u64 f32 f64 f16 f16x2 bf16 bf16x2 e4m3x4 e5m2x4",
}


def _multimem(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """multimem.ld_reduce, .st and .red (PTX ISA 9.7.9.14)."""
    if parts[1] == "cp":
        return
    yield from _ordered(parts, words)
    if "weak" in words and words & _SCOPES:
        yield ".weak has no scope"
    kind, op = parts[-1], next((part for part in parts if part in _MULTIMEM_TYPES), "")
    if op and kind not in _MULTIMEM_TYPES[op].split():
        yield f".{op} is for {_MULTIMEM_TYPES[op]}"
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    most = 8 if kind in ("f16", "bf16") else 4 if kind in _HALVES or kind in ("f32", "e4m3x4", "e5m2x4") else 1
    if count > most or (count == 1 and kind in ("f16", "bf16")):
        yield f"a vector of {count} of {kind}"
    if parts[1] == "red" and count == 1 and op in ("min", "max") and kind in _HALVES:
        yield f".{op} of halves is for vectors"
    summed = next((part for part in parts if part.startswith("acc::")), None)
    wide = _HALVES if summed == "acc::f32" else ("e4m3x4", "e5m2x4")
    if summed and (op != "add" or kind not in wide):
        yield f".{summed} goes with .add of {' '.join(sorted(wide))}"


def _barrier(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """mbarrier (PTX ISA 9.7.13.15)."""
    yield from _ordered(parts, words)
    if parts[1].startswith("arrive") and "acquire" in words:
        yield "an arrival has no .acquire"
    if "noComplete" in words and words & {"relaxed", "cluster", "shared::cluster"}:
        yield ".noComplete is no .relaxed, has the scope .cta, and is for shared memory of the CTA"
    if parts[1] in ("init", "inval", "test_wait", "try_wait") and "shared::cluster" in words:
        yield f"mbarrier.{parts[1]} is for shared memory of the CTA"


def _bulk(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """cp.async.bulk and cp.reduce.async.bulk (PTX ISA 9.7.9.25 to 9.7.9.27)."""
    opcode = ".".join(parts)
    if "multicast::cluster" in words and ".shared::cta.global" in opcode:
        yield ".multicast::cluster needs .shared::cluster"
    if "shared::cta.shared::cta" in opcode:
        yield "a copy from shared memory goes to .shared::cluster"
    if words & {"tile::gather4", "tile::scatter4"} and "2d" not in words:
        yield "four rows are gathered from, and scattered to, tensors of two dimensions"
    if any(part.startswith("im2col") for part in parts) and words & {"1d", "2d"}:
        yield "im2col needs three dimensions or more"
    if parts[1] == "async" or "reduce" not in parts[:2] or "tensor" in words:
        return
    op = next(part for part in parts if part in REDUCED_TYPES)
    if parts[-1] not in REDUCED_TYPES[op].split():
        yield f".{op} is for {REDUCED_TYPES[op]}"
    elif ("noftz" in words) != (op == "add" and parts[-1] in _HALVES):
        yield ".noftz goes with .add of halves, and those need it"


def _conversion(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """cvt (PTX ISA 9.7.9.21)."""
    to, source = parts[-2], parts[-1]
    integers = [re.fullmatch(r"([us])(\d+)", one) for one in (to, source)]
    if "sat" in words and all(integers) and "pack" not in words:
        (low, high), (least, most) = (_range(*one.groups()) for one in integers if one)
        if low <= least and most <= high:
            yield f"a .{source} always fits a .{to}, so .sat does not go with it"
    if {"rna", "relu"} <= words:
        yield ".rna and .relu exclude each other"


def _range(sign: str, bits: str) -> tuple[int, int]:
    width = int(bits)
    return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if sign == "s" else (0, (1 << width) - 1)


def _tensor_core(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """tcgen05.mma and tcgen05.cp (PTX ISA 9.7.16.9, 9.7.16.10)."""
    kind = next((part.removeprefix("kind::") for part in parts if part.startswith("kind::")), "")
    size = next((part for part in parts if part.startswith(("scale_vec", "block1", "block3"))), "")
    sizes = {"mxf8f6f4": ("scale_vec::1X", "block32", ""), "mxf4": ("scale_vec::2X", "block32", ""),
             "mxf4nvf4": ("scale_vec::2X", "scale_vec::4X", "block16", "block32")}  # fmt: skip
    if kind in sizes and size not in sizes[kind]:
        yield f"kind::{kind} takes {' or '.join(filter(None, sizes[kind]))} for its scale factors"
    if parts[1] == "cp" and ("b8x16" in words) != bool(words & {"b4x16_p64", "b6x16_p32"}):
        yield "the format conversion names .b8x16 and what it comes from"
    if parts[1] in ("ld", "st"):
        shape = next((part for part in parts if re.match(r"(16|32)x", part)), "")
        count = next((int(part[1:]) for part in parts if re.fullmatch(r"x\d+", part)), 1)
        if count * {"16x128b": 2, "16x256b": 4}.get(shape, 1) > 128:
            yield "more than 128 registers"


def _policy(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """createpolicy (PTX ISA 9.7.9.18)."""
    if parts[1] != "fractional":
        return
    priorities = [part for part in parts if part.startswith(("L1::", "L2::"))]
    if any(part.startswith("L1::") for part in priorities):
        yield "policies are for the level .L2"
    if parts[-2:] == ("b64", "b64"):
        yield "the type is named once"
    if priorities[1:] and priorities[1] not in ("L2::evict_first", "L2::evict_unchanged"):
        yield "the second priority is .L2::evict_first or .L2::evict_unchanged"


def _compared(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """set (PTX ISA 9.7.7.1)."""
    if "ftz" in words and parts[-2] == "bf16":
        yield "set to bf16 has no .ftz"


def _cached(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """prefetch and ldu (PTX ISA 9.7.9.15, 9.7.9.10)."""
    if parts[0] == "prefetch" and "local" in words and words & {"L2::evict_last", "L2::evict_normal"}:
        yield "eviction priorities are for global memory"
    vector = next((int(part[1:]) for part in parts if part in ("v2", "v4")), 1)
    if parts[0] == "ldu" and vector * int(re.sub(r"\D", "", parts[-1])) > 128:
        yield "more than 128 bits"


def _remote(parts: tuple[str, ...], words: Words) -> Iterator[str]:
    """st.async (PTX ISA 9.7.9.12)."""
    if parts[1:2] == ("async",) and "v4" in words and parts[-1] in _WORDS_OF_64:
        yield "more than 128 bits"


_RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("ld", "st"), (_access, _remote)),
    **dict.fromkeys(("atom", "red"), (_atomic,)),
    "mbarrier": (_barrier,),
    "multimem": (_multimem,),
    "cp": (_bulk,),
    "cvt": (_conversion,),
    "tcgen05": (_tensor_core,),
    "createpolicy": (_policy,),
    "set": (_compared,),
    **dict.fromkeys(("prefetch", "ldu"), (_cached,)),
}
