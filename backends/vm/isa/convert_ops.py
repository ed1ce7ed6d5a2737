"""cvt and cvt.pack (PTX ISA 9.7.9.21 and 9.7.9.22). The arithmetic is in backends.vm.numerics.convert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.machine.warp import Warp
from backends.vm.numerics.convert import WIDTH, Modifiers, UnknownConversionError, conversion
from backends.vm.numerics.cvt_scalar import SIGNED
from backends.vm.ptx.ast import Operand

_INTEGERS = "u8 u16 u32 u64 s8 s16 s32 s64"
_SCALARS = _INTEGERS + " f16 bf16 f32 f64"
_FP8 = "e4m3x2 e5m2x2"
_FP6_AND_FP4 = "e3m2x2 e2m3x2 e2m1x2"


_SCALED = "scaled::n2::ue8m0"


def _container(bits: int) -> int:
    return max(bits, 16)


@opcode("cvt{.<rnd>}{.ftz}{.sat}.<dst>.<src>", section="9.7.9.21", counter="convert",
        rnd="rni rzi rmi rpi rn rz rm rp", dst=_SCALARS, src=_SCALARS)  # fmt: skip
@opcode("cvt.<rnd>{.relu}{.satfinite}.<dst>.f32", section="9.7.9.21", counter="convert",
        rnd="rn rz", dst="f16 bf16 f16x2 bf16x2")  # fmt: skip
@opcode("cvt.rs{.relu}{.satfinite}.<dst>.f32", section="9.7.9.21", counter="convert", dst="f16x2 bf16x2")
@opcode("cvt.<rnd>{.satfinite}{.relu}.tf32.f32", section="9.7.9.21", counter="convert",
        rnd="rna rn rz")  # fmt: skip
@opcode("cvt.rn.satfinite{.relu}.<fp8>.<src>", section="9.7.9.21", counter="convert",
        fp8=_FP8, src="f32 f16x2")  # fmt: skip
@opcode("cvt.rn.satfinite{.relu}.<fp8>.bf16x2", section="9.7.9.21", counter="convert", fp8=_FP8)
@opcode("cvt.rn.satfinite{.relu}.<fp6_or_fp4>.<src>", section="9.7.9.21", counter="convert",
        fp6_or_fp4=_FP6_AND_FP4, src="f32 f16x2 bf16x2")  # fmt: skip
@opcode("cvt.rn{.relu}.f16x2.<fp8>", section="9.7.9.21", counter="convert", fp8=_FP8)
@opcode("cvt.rn{.relu}.f16x2.<fp6_or_fp4>", section="9.7.9.21", counter="convert", fp6_or_fp4=_FP6_AND_FP4)
@opcode("cvt.<rnd>{.satfinite}.ue8m0x2.<src>", section="9.7.9.21", counter="convert", rnd="rz rp", src="f32 bf16x2")
@opcode("cvt.rn.bf16x2.ue8m0x2", section="9.7.9.21", counter="convert")
@opcode("cvt.rn{.satfinite}{.relu}{.scaled::n2::ue8m0}.bf16x2.<small>", section="9.7.9.21", counter="convert",
        small=f"{_FP8} {_FP6_AND_FP4} s2f6x2")  # fmt: skip
@opcode("cvt.rn.satfinite{.relu}{.scaled::n2::ue8m0}.s2f6x2.<src>", section="9.7.9.21", counter="convert",
        src="f32 bf16x2")  # fmt: skip
@opcode("cvt.rs{.relu}.satfinite.<four>.f32", section="9.7.9.21", counter="convert", four="e4m3x4 e5m2x4 e3m2x4 e2m3x4")
def cvt(b: Binder) -> Step:
    """Convert. Registers may be wider than their type: sources are truncated, results extended (PTX ISA 9.4.1)."""
    *between, dst, src = b.instruction.parts[1:]
    flags = {flag: flag in between for flag in ("ftz", "sat", "satfinite", "relu")}
    scaled = _SCALED in between
    rounding = next((word for word in between if word not in (*flags, _SCALED)), "")
    try:
        convert = conversion(dst, src, Modifiers(rounding, scaled=scaled, **flags))
    except UnknownConversionError as unknown:
        raise b.error(str(unknown)) from None
    four = dst.endswith("x4")
    d, *operands = b.expect(3 if four else convert.operands + 1)
    out, rd = _destination(b, d, dst)
    last = [_source(b, operands.pop(), "u16" if scaled else "u32")] if scaled or rounding == "rs" else []
    values = b.vector(operands[0], 4) if four else operands
    sources = [_source(b, operand, src) for operand in values] + last
    extend = _extension(dst, out)
    run = convert.apply

    def step(warp: Warp) -> None:
        result = run(*[getattr(warp, view)[row] for view, row in sources])
        if extend is not None:
            result = result.view(extend)
        np.copyto(getattr(warp, out)[rd], result, where=warp.where, casting="unsafe")

    return step


def _destination(b: Binder, operand: Operand, kind: str) -> tuple[str, int]:
    width = max(b.width(operand), _container(WIDTH[kind]))
    row = b.destination(operand, f"u{_container(WIDTH[kind])}", wider=True)
    return f"u{width}", row


def _source(b: Binder, operand: Operand, kind: str) -> tuple[str, int]:
    width = max(b.width(operand), _container(WIDTH[kind]))
    if kind in ("f32", "f64") and not b.width(operand):
        return f"u{width}", b.source(operand, kind)
    return f"u{width}", b.source(operand, f"u{_container(WIDTH[kind])}", wider=True)


def _extension(kind: str, out: str) -> np.dtype[np.generic] | None:
    """The signed type as which a result is extended into a wider register; None if it needs none."""
    bits = WIDTH[kind]
    return np.dtype(SIGNED[bits]) if kind[0] == "s" and int(out[1:]) > bits else None


@opcode("cvt.pack.sat.<type>.s32", section="9.7.9.22", counter="convert", type="u16 s16")
@opcode("cvt.pack.sat.<type>.s32.b32", section="9.7.9.22", counter="convert", type="u2 s2 u4 s4 u8 s8")
def cvt_pack(b: Binder) -> Step:
    """Pack two saturated integers into the low bits of d, the second one lowest, with the low bits of c above them."""
    kind = b.words["type"]
    size = int(kind[1:])
    low, high = (0, 2**size - 1) if kind[0] == "u" else (-(2 ** (size - 1)), 2 ** (size - 1) - 1)
    d, *operands = b.expect(3 if size == 16 else 4)
    rd, ra, rc = b.destination(d, "u32"), b.source(operands[0], "s32"), b.source(operands[1], "s32")
    rest = b.source(operands[2], "u32") if size < 16 else None

    def field(values: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        return np.clip(values, low, high).astype(np.uint32) & np.uint32(2**size - 1)

    def step(warp: Warp) -> None:
        packed = field(warp.s32[ra]) << np.uint32(size) | field(warp.s32[rc])
        if rest is not None:
            packed = packed | warp.u32[rest] << np.uint32(2 * size)
        np.copyto(warp.u32[rd], packed, where=warp.where)

    return step
