"""An assembler-level builder: Python that reads like PTX and writes PTX that reads like a person wrote it.

    x = Builder("scale", target="sm_100a", version=(8, 6), block=128)
    n = x.param("n", "u32")
    x.section("every thread")
    i = x.let("i", "mov.u32", TID_X)
    beyond = x.let("beyond", "setp.ge.u32", i, n)
    with x.unless(beyond, "in_range"):
        ...
    x.emit("ret")
    print(x.text())

`let` declares the register it writes, with the type that the mnemonic gives it; `emit` writes an instruction into
registers that exist. Every operand is checked against the table in signatures.py when the line is written, and
`text` refuses labels that were never placed and registers that are read but never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from backends.ptx.operands import (
    SINK,
    SPECIAL_REGISTERS,
    WIDTHS,
    Address,
    BuilderError,
    Label,
    Negated,
    Operand,
    Register,
    Special,
    at,
    spelled,
)
from backends.ptx.signatures import Instruction

TENSOR_MAP_BYTES = 128
TID_X = Special("%tid.x", "u32")
Predicate = Register | Negated


@dataclass(frozen=True, slots=True)
class Loop:
    """The labels of a loop: `again` is its first instruction, `done` the one after it."""

    again: Label
    done: Label


@dataclass(slots=True)
class _Section:
    title: str
    declared: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    lines: list[str] = field(default_factory=list[str])


class Builder:
    """Collects one entry. `version` is the lowest PTX ISA version that has what the kernel uses."""

    def __init__(self, entry: str, *, target: str, version: tuple[int, int], block: int) -> None:
        self.entry = entry
        self.target = target
        self.version = version
        self.block = block
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
        """Comment lines that open the file."""
        self._header += lines

    def section(self, title: str) -> None:
        """Opens a part of the kernel; the registers that it makes are declared at its head."""
        self._sections.append(_Section(title))

    def comment(self, text: str) -> None:
        """A comment line of its own."""
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
        """Declares the dynamic shared memory of the launch; the register holds its shared-window address."""
        self._dynamic_smem = f".extern .shared .align {align} .b8 {name}[];"
        return self.let("smem", "mov.u32", Special(name, "u32"))

    def name_place(self, place: Address, name: str) -> None:
        """From here on an instruction that addresses `place` says `name` in a comment, unless it has one."""
        self._place_names[place.base.name, place.offset] = name

    def reg(self, name: str, type_name: str) -> Register:
        """A new register. A name that is taken gets a number, so that two uses never share storage unnoticed."""
        if type_name not in WIDTHS:
            raise BuilderError(f"register %{name}: there is no type .{type_name}; known: {', '.join(sorted(WIDTHS))}")
        if name in SPECIAL_REGISTERS:
            raise BuilderError(f"register %{name} would hide the special register of that name; choose another")
        register = Register(self._unique(name), type_name)
        self._declare(type_name, str(register))
        return register

    def regs(self, name: str, type_name: str, count: int) -> tuple[Register, ...]:
        """`count` registers `%name0`, `%name1`, ..., declared in one go."""
        stem = self._unique(name)
        self._declare(type_name, f"%{stem}_<{count}>")
        return tuple(Register(f"{stem}_{index}", type_name) for index in range(count))

    def emit(self, opcode: str, *operands: Operand, guard: Predicate | None = None, note: str = "") -> None:
        """Writes one instruction. `guard` becomes `@%p`, `note` the comment behind it."""
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
        """Declares a register of the type that `opcode` writes, and writes it."""
        register = self.reg(name, Instruction(opcode, sources).result_type())
        self.emit(opcode, register, *sources, guard=guard, note=note)
        return register

    def label(self, name: str) -> Label:
        """A label with a unique name, to be placed later."""
        unique = self._unique(name)
        self._labels[unique] = False
        return Label(unique)

    def place(self, label: Label) -> None:
        """Puts a label before the next instruction."""
        if self._labels.get(label.name, True):
            raise BuilderError(f"{self.entry}: label {label} is placed twice or was never made by this builder")
        self._labels[label.name] = True
        self._sections[-1].lines.append(f"{label}:")

    @contextmanager
    def when(self, predicate: Predicate, name: str) -> Iterator[None]:
        """The body runs in threads whose predicate holds; the others branch over it."""
        inverse = predicate.register if isinstance(predicate, Negated) else ~predicate
        with self.unless(inverse, name):
            yield

    @contextmanager
    def unless(self, predicate: Predicate, name: str) -> Iterator[None]:
        """The body runs in threads whose predicate does not hold."""
        done = self.label(f"{name}_done")
        self.emit("bra", done, guard=predicate)
        yield
        self.place(done)

    @contextmanager
    def loop(self, name: str) -> Iterator[Loop]:
        """An endless loop; the body leaves it with `emit("bra", loop.done, guard=p)`."""
        loop = Loop(self.label(name), self.label(f"{name}_done"))
        self.place(loop.again)
        yield loop
        self.emit("bra", loop.again)
        self.place(loop.done)

    def wait(self, barrier: Address, parity: Register | int, name: str) -> None:
        """Blocks until the phase `parity` of an mbarrier has completed (PTX ISA, mbarrier.try_wait).

        On a fresh barrier parity 1 counts as completed, parity 0 does not.
        """
        completed = self.reg(f"{name}_completed", "pred")
        again = self.label(f"wait_{name}")
        self.place(again)
        self.emit("mbarrier.try_wait.parity.shared::cta.b64", completed, barrier, parity)
        self.emit("bra", again, guard=~completed)

    def arrive(self, barrier: Address, note: str = "") -> None:
        """One arrival of every executing thread, releasing what it did before."""
        self.emit("mbarrier.arrive.shared::cta.b64", SINK, barrier, note=note)

    def indexed(self, name: str, base: Register, index: Register, stride: int) -> Register:
        """The 32-bit address `base + index * stride`."""
        return self.let(name, "mad.lo.u32", index, stride, base)

    def text(self) -> str:
        """The PTX module. Raises BuilderError for unplaced labels and for registers that nothing writes."""
        return module_text([self])

    def entry_text(self) -> list[str]:
        """The lines of the entry, without what a module begins with. Raises BuilderError as `text` does."""
        forgotten = sorted(name for name, placed in self._labels.items() if not placed)
        if forgotten:
            raise BuilderError(f"{self.entry}: labels made but never placed: {', '.join(forgotten)}")
        for name, reader in self._first_read.items():
            if name not in self._written:
                raise BuilderError(f"{self.entry}: %{name} is read by `{reader}` but nothing writes it")
        lines = [self._dynamic_smem, ""] if self._dynamic_smem else []
        lines += [f".visible .entry {self.entry}(", *_separated(self._params), ")"]
        lines += [f".reqntid {self.block}, 1, 1", "{"]
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


def module_text(builders: Sequence[Builder]) -> str:
    """One PTX module of several entries for one target. Its version is the lowest that serves them all."""
    targets = {builder.target for builder in builders}
    if len(targets) != 1:
        raise BuilderError(f"a module is for one target; these entries are for {', '.join(sorted(targets)) or 'none'}")
    major, minor = max(builder.version for builder in builders)
    lines = [
        *builders[0].description(),
        "",
        f".version {major}.{minor}",
        f".target {targets.pop()}",
        ".address_size 64",
    ]
    for index, builder in enumerate(builders):
        lines += ["", *(builder.description() if index else []), *builder.entry_text()[:-1]]
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


__all__ = ["TID_X", "Builder", "Loop", "Predicate", "at", "module_text"]
