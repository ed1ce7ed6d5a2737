"""Arithmetic on f16 and bf16, scalar and packed, also mixed with f32 (PTX ISA 9.7.4 and 9.7.5)."""

from __future__ import annotations

from functools import partial
from typing import cast

from backends.vm.bind.binder import Binder, Compute, bind_lanewise, lanewise
from backends.vm.bind.forms import Step, opcode
from backends.vm.numerics import half
from backends.vm.numerics.formats import FloatFormat, Rounding

_F16 = "f16 f16x2"
_BF16 = "bf16 bf16x2"
_ARITHMETIC = {"add": half.add, "sub": half.sub, "mul": half.mul}


def _type(b: Binder) -> tuple[str, FloatFormat]:
    """The view of the operands and the format of their halves."""
    name = b.instruction.parts[-1]
    return ("u16x2" if name.endswith("x2") else "u16"), half.FORMATS[name.removesuffix("x2")]


def _flags(b: Binder, *names: str) -> dict[str, bool]:
    return {name: True for name in names if b.words.get(name)}


@opcode("add{.rn}{.ftz}{.sat}.<type>", section="9.7.4.1", counter="float", type=_F16)
@opcode("add{.rn}.<type>", section="9.7.4.1", counter="float", type=_BF16)
@opcode("sub{.rn}{.ftz}{.sat}.<type>", section="9.7.4.2", counter="float", type=_F16)
@opcode("sub{.rn}.<type>", section="9.7.4.2", counter="float", type=_BF16)
@opcode("mul{.rn}{.ftz}{.sat}.<type>", section="9.7.4.3", counter="float", type=_F16)
@opcode("mul{.rn}.<type>", section="9.7.4.3", counter="float", type=_BF16)
def arithmetic(b: Binder) -> Step:
    """Sum, difference or product, rounded to nearest."""
    view, fmt = _type(b)
    function = _ARITHMETIC[b.instruction.parts[0]]
    return lanewise(b, view, cast(Compute, partial(function, fmt=fmt, **_flags(b, "ftz", "sat"))), 2)


@opcode("fma.rn{.ftz}{.sat}.<type>", "fma.rn{.ftz}.relu.<type>", section="9.7.4.4", counter="float", type=_F16)
@opcode("fma.rn{.relu}.<type>", section="9.7.4.4", counter="float", type=_BF16)
def fma(b: Binder) -> Step:
    """a * c + e rounded once."""
    view, fmt = _type(b)
    return lanewise(b, view, cast(Compute, partial(half.fma, fmt=fmt, **_flags(b, "ftz", "sat", "relu"))), 3)


@opcode("neg{.ftz}.<type>", section="9.7.4.5", counter="float", type=_F16)
@opcode("neg.<type>", section="9.7.4.5", counter="float", type=_BF16)
@opcode("abs{.ftz}.<type>", section="9.7.4.6", counter="float", type=_F16)
@opcode("abs.<type>", section="9.7.4.6", counter="float", type=_BF16)
def sign_bit(b: Binder) -> Step:
    """Negation or magnitude."""
    view, fmt = _type(b)
    function = half.negate if b.instruction.parts[0] == "neg" else half.absolute
    return lanewise(b, view, cast(Compute, partial(function, fmt=fmt, **_flags(b, "ftz"))), 1)


@opcode("min{.ftz}{.NaN}.<type>", "min{.ftz}{.NaN}.xorsign.abs.<type>", section="9.7.4.7", counter="float", type=_F16)
@opcode("min{.NaN}.<type>", "min{.NaN}.xorsign.abs.<type>", section="9.7.4.7", counter="float", type=_BF16)
@opcode("max{.ftz}{.NaN}.<type>", "max{.ftz}{.NaN}.xorsign.abs.<type>", section="9.7.4.8", counter="float", type=_F16)
@opcode("max{.NaN}.<type>", "max{.NaN}.xorsign.abs.<type>", section="9.7.4.8", counter="float", type=_BF16)
def extremum(b: Binder) -> Step:
    """Minimum or maximum. NaN operands are ignored unless `.NaN`, and -0 is below +0."""
    view, fmt = _type(b)
    function = half.minimum if b.instruction.parts[0] == "min" else half.maximum
    options = {"nan": bool(b.words["NaN"]), "xorsign_abs": "xorsign" in b.words, **_flags(b, "ftz")}
    return lanewise(b, view, cast(Compute, partial(function, fmt=fmt, **options)), 2)


@opcode("tanh.approx.<type>", section="9.7.4.9", counter="special", type=f"{_F16} {_BF16}")
@opcode("ex2.approx.<type>", section="9.7.4.10", counter="special", type=_F16)
@opcode("ex2.approx.ftz.<type>", section="9.7.4.10", counter="special", type=_BF16)
def approximate(b: Binder) -> Step:
    """2^a or the hyperbolic tangent: the f32 unit's result, truncated (facts.md 7.4)."""
    view, fmt = _type(b)
    function = half.tanh if b.instruction.parts[0] == "tanh" else half.ex2
    return lanewise(b, view, cast(Compute, partial(function, fmt=fmt)), 1)


def _mixed_options(b: Binder) -> dict[str, object]:
    rounding = cast(Rounding, b.words["rnd"] or "rn")
    return {"fmt": half.FORMATS[b.words["type"]], "rounding": rounding, **_flags(b, "sat")}


@opcode("add{.<rnd>}{.sat}.f32.<type>", section="9.7.5.1", counter="float", rnd="rn rz rm rp", type="f16 bf16")
@opcode("sub{.<rnd>}{.sat}.f32.<type>", section="9.7.5.2", counter="float", rnd="rn rz rm rp", type="f16 bf16")
def mixed_sum(b: Binder) -> Step:
    """A half plus or minus an f32, in f32."""
    function = half.mixed_add if b.instruction.parts[0] == "add" else half.mixed_sub
    return bind_lanewise(b, "f32", ["u16", "f32"], cast(Compute, partial(function, **_mixed_options(b))))


@opcode("fma.<rnd>{.sat}.f32.<type>", section="9.7.5.3", counter="float", rnd="rn rz rm rp", type="f16 bf16")
def mixed_fma(b: Binder) -> Step:
    """The product of two halves plus an f32, rounded once to f32."""
    return bind_lanewise(b, "f32", ["u16", "u16", "f32"], cast(Compute, partial(half.mixed_fma, **_mixed_options(b))))
