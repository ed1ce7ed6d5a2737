"""Writes one entry of a PTX module: parameters, sections, registers, labels and instructions, all checked.

`Emitter` knows the syntax of PTX but no idioms; builder.py adds those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from backends.ptx.operands import (
    SPECIAL_REGISTERS,
    WIDTHS,
    Address,
    BuilderError,
    Label,
    Negated,
    Operand,
    Register,
    Special,
    spelled,
)
from backends.ptx.signatures import Instruction

TENSOR_MAP_BYTES = 128
Predicate = Register | Negated


@dataclass(slots=True)
class _Section:
    title: str
    declared: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    lines: list[str] = field(default_factory=list[str])


class Emitter:
    """Collects one entry. `version` is the lowest PTX ISA version that has everything the entry uses.

    `ctas_per_sm` is how many CTAs per SM ptxas must leave registers for. setmaxnreg needs it where ptxas would
    otherwise use few registers.
    """

    def __init__(
        self, entry: str, *, target: str, version: tuple[int, int], block: int, ctas_per_sm: int | None = None
    ) -> None:
        self.entry = entry
        self.target = target
        self.version = version
        self.block = block
        self.ctas_per_sm = ctas_per_sm
        self._header: list[str] = []
        self._params: list[str] = []
        self._dynamic_smem: str | None = None
        self._sections = [_Section("parameters")]
        self._taken: set[str] = set()
        self._labels: dict[str, bool] = {}
        self._written: set[str] = set()
        self._first_read: dict[str, str] = {}
        self._place_names: dict[tuple[str, int], str] = {}

    def header(self, lines: list[str]) -> None:
        """Adds comment lines to the head of the entry."""
        self._header += lines

    def section(self, title: str) -> None:
        """Opens a section of the kernel; its registers are declared at its head."""
        self._sections.append(_Section(title))

    def comment(self, text: str) -> None:
        """Writes a comment line."""
        self._line(f"// {text}")

    def param(self, name: str, type_name: str) -> Register:
        """Declares a kernel parameter and loads it into a register of the same name."""
        self._params.append(f".param .{type_name} {name}")
        register = self.reg(name, type_name)
        self._written.add(register.name)
        self._line(f"ld.param.{type_name} {register}, [{name}];")
        return register

    def tensor_map(self, name: str) -> Register:
        """Declares a tensor map passed by value; the register holds its generic address (PTX ISA, Tensor-map)."""
        self._params.append(f".param .align 64 .b8 {name}[{TENSOR_MAP_BYTES}]")
        in_param_space = self.let(f"{name}_param", "mov.b64", Special(name, "b64"))
        return self.let(name, "cvta.param.u64", in_param_space)

    def dynamic_smem(self, name: str, align: int) -> Register:
        """Declares the launch's dynamic shared memory; the register holds its shared-window address."""
        self._dynamic_smem = f".extern .shared .align {align} .b8 {name}[];"
        return self.let("smem", "mov.u32", Special(name, "u32"))

    def name_place(self, place: Address, name: str) -> None:
        """From here on, instructions that address `place` get `name` as a comment unless they have a note."""
        self._place_names[place.base.name, place.offset] = name

    def reg(self, name: str, type_name: str) -> Register:
        """A new register. A taken name gets a number appended, so that two uses never share a register by accident."""
        if type_name not in WIDTHS:
            raise BuilderError(f"register %{name}: there is no type .{type_name}; known: {', '.join(sorted(WIDTHS))}")
        if name in SPECIAL_REGISTERS:
            raise BuilderError(f"register %{name} would hide the special register of that name; choose another")
        register = Register(self._unique(name), type_name)
        self._declare(type_name, str(register))
        return register

    def regs(self, name: str, type_name: str, count: int) -> tuple[Register, ...]:
        """`count` registers `%name0`, `%name1`, ..., declared together."""
        stem = self._unique(name)
        self._declare(type_name, f"%{stem}_<{count}>")
        return tuple(Register(f"{stem}_{index}", type_name) for index in range(count))

    def emit(self, opcode: str, *operands: Operand, guard: Predicate | None = None, note: str = "") -> None:
        """Writes one instruction. `guard` becomes `@%p`, `note` a trailing comment."""
        instruction = Instruction(opcode, operands)
        for register in instruction.destinations():
            self._written.add(register.name)
        text = f"{opcode} {', '.join(spelled(operand) for operand in operands)}".rstrip() + ";"
        self._note_reads(operands, text)
        if guard is not None:
            self._note_reads((guard,), text)
            text = f"@{guard} {text}"
        note = note or self._named_places(operands)
        self._line(f"{text}  // {note}" if note else text)

    def let(
        self, name: str, opcode: str, *sources: Operand, guard: Predicate | None = None, note: str = ""
    ) -> Register:
        """Declares a register of the type that `opcode` writes and emits the instruction."""
        register = self.reg(name, Instruction(opcode, sources).result_type())
        self.emit(opcode, register, *sources, guard=guard, note=note)
        return register

    def label(self, name: str) -> Label:
        """A label with a unique name, to be placed later."""
        unique = self._unique(name)
        self._labels[unique] = False
        return Label(unique)

    def place(self, label: Label) -> None:
        """Places a label before the next instruction."""
        if self._labels.get(label.name, True):
            raise BuilderError(f"{self.entry}: label {label} is placed twice or was never made by this builder")
        self._labels[label.name] = True
        self._sections[-1].lines.append(f"{label}:")

    def text(self) -> str:
        """The PTX module. Raises BuilderError for unplaced labels and for registers that are read but never written."""
        return module_text([self])

    def entry_text(self) -> list[str]:
        """The lines of the entry without the module's header. Raises BuilderError as `text` does."""
        forgotten = sorted(name for name, placed in self._labels.items() if not placed)
        if forgotten:
            raise BuilderError(f"{self.entry}: labels made but never placed: {', '.join(forgotten)}")
        for name, reader in self._first_read.items():
            if name not in self._written:
                raise BuilderError(f"{self.entry}: %{name} is read by `{reader}` but nothing writes it")
        lines = [self._dynamic_smem, ""] if self._dynamic_smem else []
        lines += [f".visible .entry {self.entry}(", *_separated(self._params), ")"]
        lines += [f".reqntid {self.block}, 1, 1"]
        lines += [f".minnctapersm {self.ctas_per_sm}"] if self.ctas_per_sm else []
        lines += ["{"]
        for section in self._sections:
            lines += _section_text(section)
        return [*lines, "}", ""]

    def description(self) -> list[str]:
        """The comment lines that describe the entry."""
        return [f"// {line}".rstrip() for line in self._header]

    def _declare(self, type_name: str, spelling: str) -> None:
        self._sections[-1].declared.setdefault(type_name, []).append(spelling)

    def _unique(self, name: str) -> str:
        unique, number = name, 1
        while unique in self._taken:
            number += 1
            unique = f"{name}_{number}"
        self._taken.add(unique)
        return unique

    def _line(self, text: str) -> None:
        self._sections[-1].lines.append(f"    {text}")

    def _named_places(self, operands: tuple[Operand, ...]) -> str:
        keys = [(item.base.name, item.offset) for item in operands if isinstance(item, Address)]
        return ", ".join(self._place_names[key] for key in keys if key in self._place_names)

    def _note_reads(self, operands: tuple[Operand, ...], text: str) -> None:
        for register in _read_registers(operands):
            self._first_read.setdefault(register.name, text)


def module_text(entries: Sequence[Emitter]) -> str:
    """One PTX module of several entries for one target, with the lowest version that covers them all."""
    targets = {entry.target for entry in entries}
    if len(targets) != 1:
        raise BuilderError(f"a module is for one target; these entries are for {', '.join(sorted(targets)) or 'none'}")
    major, minor = max(entry.version for entry in entries)
    lines = [*entries[0].description(), "", f".version {major}.{minor}", f".target {targets.pop()}", ".address_size 64"]
    for index, entry in enumerate(entries):
        lines += ["", *(entry.description() if index else []), *entry.entry_text()[:-1]]
    return "\n".join([*lines, ""])


def _read_registers(operands: tuple[Operand, ...]) -> Iterator[Register]:
    for operand in operands:
        if isinstance(operand, Register):
            yield operand
        elif isinstance(operand, Negated):
            yield operand.register
        elif isinstance(operand, Address):
            yield operand.base
            yield from (item for item in operand.coordinates if isinstance(item, Register))
        elif isinstance(operand, tuple):
            yield from operand


def _separated(params: list[str]) -> list[str]:
    return [f"    {param}{',' if index + 1 < len(params) else ''}" for index, param in enumerate(params)]


def _section_text(section: _Section) -> list[str]:
    if not section.lines:
        return []
    lines = ["", f"    // ---- {section.title} " + "-" * max(4, 100 - len(section.title))]
    for type_name, names in section.declared.items():
        lines += [f"    .reg .{type_name} {', '.join(names[i : i + 6])};" for i in range(0, len(names), 6)]
    return lines + section.lines
