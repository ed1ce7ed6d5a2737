"""Machine code of pure instructions leaves the same bits in every lane as the steps it was traced from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from llvmlite import ir

from backends.vm.bind import lanes
from backends.vm.bind.binder import Binder
from backends.vm.bind.definedness import PURE
from backends.vm.bind.flow import Bound
from backends.vm.bind.forms import all_forms, find
from backends.vm.bind.lanes import WORTH, RunFinder
from backends.vm.faults import UnknownInstructionError
from backends.vm.machine.code import LANES, RegisterFile, RegisterRows, Row
from backends.vm.machine.warp import Warp
from backends.vm.numerics import traced
from backends.vm.ptx.ast import Instruction, Negated, Operand, Pair, Register, Vector
from conformance.acceptance.spellings import REGISTERS, Question, questions_of, spellings

_VIEWS = {1: "pred", 16: "u16", 32: "u32", 64: "u64", 128: "u64x2"}
_COMMON = {"add", "sub", "mul", "mad", "fma", "min", "max", "abs", "neg", "div", "and", "or", "xor", "not", "shl",
           "shr", "shf", "lop3", "popc", "prmt", "mov", "selp", "setp", "set", "slct", "cvt", "ex2", "rcp"}  # fmt: skip
"""The instruction families that fill our kernels; they must have machine code."""
_SPECIAL = (0, 1, 2, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x3C00, 0x7C00, 0x7C01, 0xFC00, 0xFFFF, 0x3F80_0000,
            0x4B00_0000, 0x7F80_0000, 0x7F80_0001, 0x7FFF_FFFF, 0x8000_0000, 0x8000_0001, 0x0080_0000, 0x807F_FFFF,
            0xFF80_0000, 0xFFFF_FFFF, 0x7F7F_FFFF, 0xC2FC_0000, 0x4000_4000, 0x7C00_FC00, 1 << 63, (1 << 63) - 1,
            (1 << 64) - 1, 0x7FF0_0000_0000_0000, 0xFFF8_0000_0000_0001)  # fmt: skip


class Lanes:
    """The part of a warp that a pure step uses: its registers and its active lanes."""

    def __init__(self, rows: RegisterRows) -> None:
        self.registers = RegisterFile(rows)
        self.set_mask(np.ones(LANES, np.bool_))

    def set_mask(self, mask: npt.NDArray[np.bool_]) -> None:
        self.mask, self.where, self.mask_address = mask, True if mask.all() else mask, mask.ctypes.data

    def __getattr__(self, view: str) -> Mapping[int, Row]:
        return self.registers.view(view)


def _distinct(operand: Operand, types: dict[str, str]) -> Operand:
    """Returns `operand` with a new register at each place, and adds their PTX types to `types`."""
    if isinstance(operand, Register):
        name = f"{operand.name}{len(types)}"
        types[name] = REGISTERS[operand.name[1:]][1:]
        return Register(name)
    if isinstance(operand, Negated):
        return Negated(_register(_distinct(operand.operand, types)))
    if isinstance(operand, Pair):
        return Pair(_distinct(operand.first, types), _distinct(operand.second, types))
    if isinstance(operand, Vector):
        return Vector(tuple(_distinct(one, types) for one in operand.items))
    return operand


def _register(operand: Operand) -> Register:
    assert isinstance(operand, Register)
    return operand


def bound(question: Question) -> tuple[Bound, RegisterRows]:
    """Binds a question to registers of its own. UnknownInstructionError if the machine refuses it."""
    types: dict[str, str] = {}
    asked = question.instruction()
    operands = tuple(_distinct(one, types) for one in asked.operands)
    return _bound(Instruction(asked.parts, operands, None, asked.line, asked.text), RegisterRows.of(types, {}))


def _bound(instruction: Instruction, rows: RegisterRows) -> tuple[Bound, RegisterRows]:
    form, words = find(instruction)
    binder = Binder(instruction, words, rows)
    step = form.bind(binder)
    return Bound(instruction, form, step, tuple(binder.uses), tuple(binder.defines), None,
                 places=tuple(binder.places), plain=step), rows  # fmt: skip


def computing() -> Iterator[Question]:
    """Yields one spelling, with operands that fit, of each form whose instructions are pure."""
    left = {one.spelling for one in all_forms() if one.counter in PURE}
    for question in itertools.chain.from_iterable(questions_of(parts)[:1] for parts in spellings()):
        try:
            spelling = find(question.instruction())[0].spelling
            if spelling in left:
                bound(question)
                left.discard(spelling)
                yield question
        except UnknownInstructionError:
            continue


def _drawn(draw: np.random.Generator, row: Row) -> Row:
    """Random bits, numbers at or near the edges of formats, and small integers."""
    bits = draw.integers(0, 2**64, row.shape, np.uint64)
    special = np.array(_SPECIAL, np.uint64)[draw.integers(0, len(_SPECIAL), row.shape)]
    near = special + draw.integers(0, 3, row.shape, np.uint64)
    kind = draw.integers(0, 4, row.shape)
    found = np.choose(kind, [bits, special, near, bits & np.uint64(0x3F)])
    return (found & np.uint64(1)).astype(np.bool_) if row.dtype == np.bool_ else found.astype(row.dtype)


def differing(question: Question, draw: np.random.Generator, trials: int = 4) -> str | None:
    """Says where machine code leaves other bits than the step, with all or some lanes active. "" if nowhere, None
    without machine code."""
    item, rows = bound(question)
    if item.form.counter not in PURE:
        return None
    runs, _ = RunFinder([item], rows, [item.step])(WORTH)
    if not runs:
        return None
    warp = Lanes(rows)
    registers = [
        warp.registers.view(view)[row] for width, view in _VIEWS.items() for row in range(rows.counts.get(width, 0))
    ]
    for trial in range(trials):
        warp.set_mask(np.ones(LANES, np.bool_) if trial % 2 else draw.random(LANES) < 0.5)
        before = [_drawn(draw, row) for row in registers]
        left: list[list[Row]] = []
        for step in (item.step, runs[0].step):
            for row, bits in zip(registers, before, strict=True):
                row[...] = bits
            with np.errstate(all="ignore"):
                step(cast("Warp", warp))
            left.append([row.copy() for row in registers])
        for wanted, found in zip(*left, strict=True):
            wrong = np.flatnonzero((wanted != found).reshape(LANES, -1).any(axis=1))
            if wrong.size:
                lane = int(wrong[0])
                operands = [row[lane].tolist() for row in before]
                return f"lane {lane} of {operands}: {found[lane].tolist()}, the step leaves {wanted[lane].tolist()}"
    return ""


def test_machine_code_leaves_the_bits_of_the_step() -> None:
    """Random bits for each form; and the families in our kernels do have machine code."""
    draw = np.random.default_rng(0)
    found = {question.opcode: differing(question, draw) for question in computing()}
    wrong = {opcode: where for opcode, where in found.items() if where}
    assert not wrong, f"machine code leaves other bits than the interpreter: {wrong}"
    families = {opcode.split(".")[0] for opcode, where in found.items() if where == ""}
    assert families >= _COMMON, f"no form has machine code any more of {sorted(_COMMON - families)}"


def test_a_wrong_translation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An add that subtracts, and a mask that is ignored."""
    question = next(one for one in computing() if one.opcode.startswith("add."))
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "_KINDS", {})
        patch.setitem(traced._ARITHMETIC, np.add, ("sub", "fsub"))  # pyright: ignore[reportPrivateUsage]
        assert differing(question, np.random.default_rng(0)), f"{question.opcode} that subtracts is not noticed"
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "_KINDS", {})
        patch.setattr(lanes, "truth", _always)
        assert differing(question, np.random.default_rng(0)), f"{question.opcode} in lanes that sleep is not noticed"


def _always(builder: ir.IRBuilder, place: object) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(1), LANES), [1] * LANES)


def test_a_register_may_be_source_and_destination() -> None:
    """Of one instruction of each form, though machine code is made for operands that all differ."""
    types = {"%a": "b32", "%p": "pred"}
    for text in ("add", "sub", "xor", "shl"):
        same = Instruction((text, "u32" if text in ("add", "sub") else "b32"), (Register("%a"),) * 3, None, 1, text)
        item, rows = _bound(same, RegisterRows.of(types, {}))
        runs, _ = RunFinder([item], rows, [item.step])(WORTH)
        warp = Lanes(rows)
        values = warp.registers.view("u32")[0]
        values[...] = start = np.arange(LANES, dtype=np.uint32)
        item.step(cast("Warp", warp))
        wanted = values.copy()
        values[...] = start
        runs[0].step(cast("Warp", warp))
        assert (values == wanted).all(), f"{text} %a, %a, %a: {values.tolist()} instead of {wanted.tolist()}"
