"""mma.sp: mma.sync with a sparse A that stores half of each row (PTX ISA 9.7.14.6)."""

from __future__ import annotations

import re
from collections.abc import Callable

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.isa.warp_mma import summed, whole_warp
from backends.vm.isa.warp_mma_types import HeldFragment, integer_product
from backends.vm.machine.warp import Warp
from backends.vm.numerics.accumulate import Mask
from backends.vm.tensor.operand_types import to_float32
from backends.vm.tensor.sparsity import Granularity, codes_in_registers, dense, selectors, stored_places
from backends.vm.tensor.warp_fragments import Raw, accumulator_fragment, operand_fragment

SparseProduct = Callable[[Warp, Raw, Raw, Raw, Mask], Raw]
"""Raw D from raw A [m, k] with zeros filled in, B [k, n], C [m, n], and a mask of the stored elements of A."""

_SECTION = "9.7.14.6.3"
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "u8": 8, "s8": 8, "u4": 4, "s4": 4}
_FP8 = "e4m3 e5m2"
_NARROW = "e4m3 e5m2 e3m2 e2m3 e2m1"


def _both(rest: str) -> tuple[str, str]:
    """Both spellings: with metadata in any order, and with ordered metadata."""
    return f"mma.sp.sync.aligned.{rest}", f"mma.sp::ordered_metadata.sync.aligned.{rest}"


@opcode(*_both("<shape>.row.col.<d>.<a>.<b>.<c>"), section=_SECTION, counter="mma", shape="m16n8k16 m16n8k32",
        d="f32 f16", a="f16", b="f16", c="f32 f16")  # fmt: skip
@opcode(*_both("<shape>.row.col.f32.<a>.<b>.f32"), section=_SECTION, counter="mma", shape="m16n8k16 m16n8k32",
        a="bf16", b="bf16")  # fmt: skip
@opcode(*_both("<shape>.row.col.f32.<a>.<b>.f32"), section=_SECTION, counter="mma", shape="m16n8k8 m16n8k16",
        a="tf32", b="tf32")  # fmt: skip
@opcode(*_both("<shape>.row.col.f32.<a>.<b>.f32"), section=_SECTION, counter="mma", shape="m16n8k64", a=_FP8, b=_FP8)
@opcode(_both("<shape>.row.col.<d>.<a>.<b>.<c>")[1], section=_SECTION, counter="mma", shape="m16n8k64", d="f16",
        a=_FP8, b=_FP8, c="f16")  # fmt: skip
@opcode(_both("<shape>.row.col.kind::f8f6f4.<d>.<a>.<b>.<c>")[1], section=_SECTION, counter="mma", shape="m16n8k64",
        d="f32 f16", a=_NARROW, b=_NARROW, c="f32 f16")  # fmt: skip
def mma_sparse(b: Binder) -> Step:
    """Floating-point inputs. Accumulation is as in mma.sync."""
    a_type, b_type, c_type = b.words["a"], b.words["b"], b.words.get("c", "f32")
    if b.words.get("d", "f32") != c_type:
        raise b.error(f"D is {b.words['d']} and C {c_type}: they must be of one type")

    def product(warp: Warp, a: Raw, right: Raw, addend: Raw, stored: Mask) -> Raw:
        return summed(warp, to_float32(a, a_type), to_float32(right, b_type), addend, c_type, a_type, stored)

    return _sparse(b, _BITS.get(a_type, 8), 16 if c_type == "f16" else 32, product)


@opcode(*_both("<shape>.row.col{.satfinite}.s32.<a>.<b>.s32"), section=_SECTION, counter="mma",
        shape="m16n8k32 m16n8k64", a="u8 s8", b="u8 s8")  # fmt: skip
@opcode(*_both("<shape>.row.col{.satfinite}.s32.<a>.<b>.s32"), section=_SECTION, counter="mma",
        shape="m16n8k64 m16n8k128", a="u4 s4", b="u4 s4")  # fmt: skip
def mma_sparse_integer(b: Binder) -> Step:
    """Integers of 4 or 8 bits into s32, exact."""
    a_type = b.words["a"]
    product = integer_product(a_type, b.words["b"], saturates=bool(b.words["satfinite"]))
    return _sparse(b, _BITS[a_type], 32, lambda warp, a, right, addend, stored: product(warp, a, right, addend))


def _sparse(b: Binder, bits: int, c_bits: int, product: SparseProduct) -> Step:
    """`d, a, b, c, metadata, selector`. A has the fragment of an mma.sync with half the K, B with all of K."""
    d, left, right, addend, metadata, chosen = b.expect(6)
    k = int(re.findall(r"\d+", b.words["shape"])[2])
    c = accumulator_fragment(16, c_bits)
    out = HeldFragment(b, d, c, written=True)
    held = [HeldFragment(b, one, fragment) for one, fragment in (
        (left, operand_fragment("a", 16, k // 2, bits)), (right, operand_fragment("b", 8, k, bits)), (addend, c))
    ]  # fmt: skip
    row, selector = b.source(metadata, "u32"), b.immediate(chosen)
    if not 0 <= selector < selectors(k, bits):
        raise b.error(f"the sparsity selector is {selector}; it must be below {selectors(k, bits)} here")
    what, ordered, granularity = b.instruction.opcode, "sp" not in b.instruction.parts, Granularity.of(bits)

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        stored, others, before = (one.matrix(warp) for one in held)
        codes = codes_in_registers(warp.u32[row], k, bits, selector)
        places = stored_places(codes, granularity, ordered=ordered)
        a = dense(stored, codes, granularity, ordered=ordered)
        out.put_matrix(warp, product(warp, a, others, before, places))
        counters = warp.cta.machine.counters
        counters["mma_instructions"] += 1
        counters["mma_flops"] += 2 * 16 * 8 * k

    return step
