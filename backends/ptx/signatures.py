"""The operands that each opcode takes: with this table the builder catches a mistake before ptxas or a GPU sees it.

One line per opcode. The key is the leading dotted parts of the mnemonic; the longest match wins. The value lists the
operands and marks the destination with `=`:

    T        a register or immediate of the instruction's own type, its last fundamental type suffix
    W        the same, twice as wide (`mul.wide`)
    S        a source of the type before the last one in `cvt.D.S`, where T is then the destination
    b32 ...  exactly that width
    pred     a predicate
    V:T      a register, or a vector of the length that `.v2`/`.v4` (else 1) says
    N:f32    the accumulators of a wgmma of shape `.m64nNk16`: N / 2 registers; A:b32 is its A operand in four registers
    X:b32    a vector of the length that `.x32`, `.x16`, ... says (tcgen05.ld and st, shape 32x32b; ldmatrix, stmatrix)
    C:f32    the four accumulators of an m16n8k16 mma; B:b32 is its second operand in two registers
    P        a vector of narrower registers that together fill the instruction's own type (`mov` packs and unpacks)
    [32]     an address with a 32-bit base (shared memory, tensor memory); [64] global or generic
    [mma]    an address in a register declared .b32, the only type ptxas takes for D and A in tensor memory
    [map]    a tensor map: a 64-bit base and as many 32-bit coordinates as `.1d` ... `.5d` says (gather4: 5)
    label, elected, imm
    ?        before an operand: it may be absent
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from backends.ptx.operands import (
    WIDTHS,
    Address,
    BuilderError,
    Elected,
    Label,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    spelled,
)

SIGNATURES: dict[str, str] = {
    "mov": "=T T",
    "add": "=T T T",
    "sub": "=T T T",
    "mul": "=T T T",
    "mul.lo": "=T T T",
    "mul.wide": "=W T T",
    "mad.lo": "=T T T T",
    "mad.wide": "=W T T W",
    "fma": "=T T T T",
    "div": "=T T T",
    "rem": "=T T T",
    "min": "=T T T",
    "max": "=T T T",
    "and": "=T T T",
    "or": "=T T T",
    "xor": "=T T T",
    "shl": "=T T b32",
    "shr": "=T T b32",
    "ex2": "=T T",
    "lg2": "=T T",
    "rcp": "=T T",
    "neg": "=T T",
    "abs": "=T T",
    "popc": "=u32 T",
    "selp": "=T T T pred",
    "setp": "=pred T T ?pred",
    "cvt": "=T S",
    "cvt.rn.bf16x2": "=T f32 f32",
    "cvt.rn.satfinite.e2m1x2": "=b8 f32 f32",
    "cvt.rn.satfinite.e4m3x2": "=b16 f32 f32",
    "cvt.rn.f16x2.e4m3x2": "=b32 b16",
    "cvta": "=T T",
    "ld.shared": "=V:T [32]",
    "st.shared": "[32] V:T",
    "ld.global": "=V:T [64]",
    "st.global": "[64] V:T",
    "st.global.u8": "[64] b16",
    "red.shared": "[32] T",
    "setmaxnreg": "imm",
    "bra": "label",
    "bar.sync": "b32 ?imm",
    "bar.warp.sync": "b32",
    "vote.sync": "=pred pred b32",
    "vote.sync.ballot": "=b32 pred b32",
    "redux.sync": "=T T b32",
    "elect.sync": "=elected b32",
    "shfl.sync": "=T T b32 b32 b32",
    "prmt": "=T T T T",
    "lop3": "=T T T T T",
    "ldmatrix": "=X:b32 [32]",
    "stmatrix": "[32] X:b32",
    "mma.sync.aligned.m16n8k16": "=C:f32 A:b32 B:b32 C:f32",
    "fence": "",
    "ret": "",
    "mbarrier.init": "[32] b32",
    "mbarrier.arrive": "=sink [32]",
    "mbarrier.arrive.expect_tx": "=sink [32] b32",
    "mbarrier.try_wait.parity": "=pred [32] b32",
    "prefetch.tensormap": "[64]",
    "cp.async.bulk": "[32] [64] b32 [32]",
    "cp.async.bulk.tensor": "[32] [map] [32]",
    "cp.async.bulk.commit_group": "",
    "cp.async.bulk.wait_group": "imm",
    "wgmma.fence": "",
    "wgmma.commit_group": "",
    "wgmma.wait_group": "imm",
    "wgmma.mma_async": "=N:f32 b64 b64 pred imm imm imm imm",
    "tcgen05.alloc": "[32] imm",
    "tcgen05.dealloc": "b32 imm",
    "tcgen05.relinquish_alloc_permit": "",
    "tcgen05.ld": "=X:b32 [32]",
    "tcgen05.st": "[32] X:b32",
    "tcgen05.wait::ld": "",
    "tcgen05.wait::st": "",
    "tcgen05.fence::before_thread_sync": "",
    "tcgen05.fence::after_thread_sync": "",
    "tcgen05.commit": "[32]",
    "tcgen05.cp": "[mma] b64",
    "tcgen05.mma": "[mma] b64 b64 b32 pred",
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4": "[mma] b64 b64 b32 [mma] [mma] pred",
}
"""Operands by opcode. Add a line for each instruction that a new kernel needs."""

CONTAINERS = {"bf16x2": "b32", "f16x2": "b32", "f32x2": "b64", "bf16": "b16"}
"""Packed types are declared as untyped registers (PTX ISA, "Packed Data Types")."""

MMA_REGISTERS = {"A": 4, "B": 2, "C": 4}
"""Per warp, A is 16 x 16 16-bit elements, eight per thread (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"
and "Matrix Fragments for mma.m16n8k16"), B is 8 x 16, and the accumulators are 16 x 8."""
GATHERED_COORDINATES = 5
"""A column and four rows (PTX ISA, tile::gather4 mode)."""

SPELLING_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("cp.async.bulk.tensor", "global.shared::cta"): "[map] [32]",
    ("wgmma.mma_async", "register_a"): "=N:f32 A:b32 b64 pred imm imm imm",
    ("tcgen05.mma", "tmem_a"): "[mma] [mma] b64 b32 pred",
    ("mov", "pack"): "=T P",
    ("mov", "unpack"): "=P T",
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """A mnemonic with its operands; `destinations` checks them against the signature."""

    opcode: str
    operands: tuple[Operand, ...]

    @property
    def parts(self) -> list[str]:
        """The dotted parts of the mnemonic."""
        return self.opcode.split(".")

    @property
    def types(self) -> list[str]:
        """The fundamental types among the parts, in order."""
        return [part for part in self.parts if part in WIDTHS]

    def fail(self, reason: str) -> BuilderError:
        """An error that quotes this instruction."""
        text = ", ".join(spelled(operand) for operand in self.operands)
        return BuilderError(f"`{self.opcode} {text};` {reason}")

    def signature(self) -> list[str]:
        """The operand kinds of this opcode. Raises BuilderError if the table has no line for it."""
        parts = self.parts
        for length in range(len(parts), 0, -1):
            key = ".".join(parts[:length])
            if key in SIGNATURES:
                return self._variant(key).split()
        raise self.fail("has no line in the signature table; add one to SIGNATURES")

    def _variant(self, key: str) -> str:
        if key == "cp.async.bulk.tensor" and "global.shared::cta" in self.opcode:
            return SPELLING_EXCEPTIONS[key, "global.shared::cta"]
        if key == "tcgen05.mma" and len(self.operands) > 1 and isinstance(self.operands[1], Address):
            return SPELLING_EXCEPTIONS[key, "tmem_a"]
        vectors = [isinstance(operand, tuple) for operand in self.operands]
        if key == "wgmma.mma_async" and sum(vectors) > 1:
            return SPELLING_EXCEPTIONS[key, "register_a"]
        if key == "mov" and any(vectors):
            return SPELLING_EXCEPTIONS[key, "unpack" if vectors[0] and len(vectors) > 1 else "pack"]
        return SIGNATURES[key]

    def result_type(self) -> str:
        """The type of the register that this opcode writes."""
        kind = self.signature()[0]
        if not kind.startswith("="):
            raise self.fail("writes no register, so it has no result to declare")
        kind = kind[1:].removeprefix("V:")
        if kind == "W":
            return self.types[-1][0] + str(2 * WIDTHS[self.types[-1]])
        if kind == "T":
            return CONTAINERS.get(self._own_type(), self._own_type())
        return "pred" if kind == "elected" else kind

    def destinations(self) -> list[Register]:
        """The registers that it writes. Raises BuilderError if an operand does not fit the signature."""
        kinds = self.signature()
        required = [kind for kind in kinds if not kind.startswith("?")]
        if not len(required) <= len(self.operands) <= len(kinds):
            raise self.fail(
                f"has {len(self.operands)} operands; {self.opcode} takes {len(required)}: {' '.join(kinds)}"
            )
        written: list[Register] = []
        for kind, operand in zip(kinds, self.operands, strict=False):
            self._check(kind.lstrip("=?"), operand)
            if kind.startswith("="):
                written += _registers_of(operand)
        return written

    def _own_type(self) -> str:
        types = self.types
        if not types:
            raise self.fail("carries no type suffix such as .u32")
        return types[-2] if self.parts[0] == "cvt" and len(types) > 1 else types[-1]

    def _check(self, kind: str, operand: Operand) -> None:
        if kind == "sink":
            if not isinstance(operand, Sink):
                raise self.fail(f"takes `_` as its destination, not {spelled(operand)}")
        elif kind.startswith("["):
            self._check_address(kind, operand)
        elif kind in ("label", "elected", "imm"):
            wanted = {"label": Label, "elected": Elected, "imm": int}[kind]
            if not isinstance(operand, wanted):
                raise self.fail(f"wants a {kind} where {spelled(operand)} stands")
        elif kind == "P":
            self._check_parts(operand)
        elif kind.startswith(("V:", "X:", "N:", "A:", "B:", "C:")):
            self._check_vector(kind, operand)
        else:
            self._check_value(self._resolved(kind), operand)

    def _resolved(self, kind: str) -> str:
        if kind == "T":
            return self._own_type()
        if kind == "W":
            return self.types[-1][0] + str(2 * WIDTHS[self.types[-1]])
        return self.types[-1] if kind == "S" else kind

    def _check_value(self, wanted: str, operand: Operand) -> None:
        if isinstance(operand, int | float):
            fits = isinstance(operand, float) == (wanted == "f32") or _untyped(wanted, operand)
            if wanted == "pred" or not fits:
                raise self.fail(f"wants .{wanted} where the immediate {operand!r} stands")
            return
        if not isinstance(operand, Register | Special | Negated):
            raise self.fail(f"wants a .{wanted} register where {spelled(operand)} stands")
        actual = operand.register.type if isinstance(operand, Negated) else operand.type
        if WIDTHS[actual] != WIDTHS[wanted]:
            raise self.fail(
                f"wants .{wanted} ({WIDTHS[wanted]} bits) where {operand} is .{actual} ({WIDTHS[actual]} bits)"
            )
        if _is_float(actual) != _is_float(wanted) and "b" not in (actual[0], wanted[0]):
            raise self.fail(f"wants .{wanted} where {operand} is .{actual}")

    def _check_address(self, kind: str, operand: Operand) -> None:
        if not isinstance(operand, Address):
            raise self.fail(f"wants an address where {spelled(operand)} stands")
        if kind == "[mma]" and operand.base.type != "b32":
            raise self.fail(f"wants tensor memory addresses in .b32 registers; {operand.base} is .{operand.base.type}")
        width = 32 if kind in ("[32]", "[mma]") else 64
        if WIDTHS[operand.base.type] != width:
            raise self.fail(f"wants a {width}-bit address; {operand.base} is .{operand.base.type}")
        rank = next((int(part[0]) for part in self.parts if part in ("1d", "2d", "3d", "4d", "5d")), 0)
        wanted = GATHERED_COORDINATES if "tile::gather4" in self.parts else rank
        wanted = wanted if kind == "[map]" else 0
        if len(operand.coordinates) != wanted:
            raise self.fail(f"wants {wanted} coordinates in {operand}, which has {len(operand.coordinates)}")
        for coordinate in operand.coordinates:
            self._check_value("s32", coordinate)

    def _check_parts(self, operand: Operand) -> None:
        parts = operand if isinstance(operand, tuple) else ()
        filled, wanted = sum(WIDTHS[part.type] for part in parts), WIDTHS[self._own_type()]
        if filled != wanted:
            raise self.fail(f"packs {filled} bits where .{self._own_type()} has {wanted}")

    def _check_vector(self, kind: str, operand: Operand) -> None:
        letter, _, element = kind.partition(":")
        length = self._vector_length(letter)
        items = operand if isinstance(operand, tuple) else (operand,)
        if len(items) != length or (letter != "V" and not isinstance(operand, tuple)):
            raise self.fail(f"moves {length} registers; {len(items)} are named")
        for item in items:
            self._check_value(self._resolved(element), item)

    def _vector_length(self, letter: str) -> int:
        if letter in MMA_REGISTERS:
            return MMA_REGISTERS[letter]
        if letter == "N":
            shapes = [re.fullmatch(r"m64n(\d+)k\d+", part) for part in self.parts]
            return next((int(shape[1]) // 2 for shape in shapes if shape), 0)
        prefix = "v" if letter == "V" else "x"
        lengths = [int(part[1:]) for part in self.parts if part[:1] == prefix and part[1:].isdigit()]
        return lengths[0] if lengths else 1


def _is_float(type_name: str) -> bool:
    return "f" in type_name


def _untyped(wanted: str, operand: int | float) -> bool:
    """Whether a float immediate gives the bit pattern of a .b32 operand."""
    return wanted == "b32" and isinstance(operand, float)


def _registers_of(operand: Operand) -> list[Register]:
    if isinstance(operand, Elected):
        return [operand.predicate]
    if isinstance(operand, tuple):
        return list(operand)
    return [operand] if isinstance(operand, Register) else []
