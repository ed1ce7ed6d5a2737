"""For any text and launch the machine answers with a result, a finding, or a sentence of refusal, and soon.

Inputs are drawn from numbered seeds, so that each can be made again: `python -m conformance.vm.test_fuzz --only 1234`
prints and runs input 1234. There are four ways to make one:
- `mutation`: instructions of our own kernels and tests, some operands, modifiers or guards changed;
- `grammar`: forms of the instruction table with modifiers and operands of any kind;
- `text`: characters and lines of whole modules dropped, doubled, moved and replaced;
- `launch`: valid modules with odd grids, blocks, clusters, shared memory, parameters and sizes of variables.

The test runs CI_INPUTS of them. `nox -s fuzz` runs 100,000 and reports which grammar rules and spellings they reached.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources
from pathlib import Path
from random import Random

import numpy as np
from lark import Lark, Token, Tree

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Form, all_forms, find
from backends.vm.faults import Fault, LaunchError, UnknownInstructionError
from backends.vm.load import LoadedModule
from backends.vm.machine.code import WIDTH_OF_TYPE, RegisterRows
from backends.vm.machine.machine import Machine
from backends.vm.ptx.ast import (
    Address,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)
from backends.vm.ptx.parser import PtxSyntaxError, parse
from backends.vm.tensor.tensor_map import encode_tensor_map
from conformance.vm.kernel import copy_kernel
from conformance.vm.tensor_kernel import mma_kernel
from megamoe.contract import Program, Target, load_backend
from megamoe.runner.limits import memory_at_most, seconds_at_most
from megamoe.spec.load import load_specs

CI_INPUTS = 2_000
SESSION_INPUTS = 100_000
MAX_SECONDS = 10.0
"""Per input. The slowest takes a fraction of a second on two cores; one that takes longer would never have ended."""
MAX_BYTES = 3 << 30
"""Address space that an input may take beyond what the process already has."""
STEP_BUDGET = 300
OURS = (Fault, LaunchError, UnknownInstructionError, PtxSyntaxError)
WAYS = ("mutation", "mutation", "mutation", "grammar", "grammar", "text", "launch")

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Input:
    """A module, the launch of its entry `kernel`, and how it was made. `params` is None for parameters that fit."""

    number: int
    way: str
    ptx: str
    schedule: str = "eager"
    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (32, 1, 1)
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0
    params: tuple[bytes, ...] | None = None


@dataclass
class Reached:
    """How inputs ended (by class of the answer), and the spellings of the forms that were bound and run."""

    answers: Counter[str] = field(default_factory=Counter[str])
    bound: set[str] = field(default_factory=set[str])
    ran: set[str] = field(default_factory=set[str])
    slowest: float = 0.0


# Building blocks: registers with values of many kinds, and the instructions of our own programs.

VALUES = {
    16: ("0", "1", "-1", "0x7c01"),
    32: ("0", "1", "-1", "0x7fffffff", "buf", "mbar", "16", "0x40490fdb", "0x7fc00001", "32", "tag"),
    64: ("out", "shared", "0", "-1", "0x7fffffffffffffff", "0x4000404000010040", "map", "0x3ff8000000000001"),
}
NAMES = {1: "%p", 16: "%h", 32: "%r", 64: "%d", 128: "%q"}
COUNTS = {1: 4, 16: 4, 32: 12, 64: 8, 128: 2}
IMMEDIATES = (0, 1, -1, 2, 7, 8, 16, 31, 32, 64, 255, 4096, 65536, 2**31 - 1, 2**31, 2**32 - 1, -(2**31), 2**63 - 1,
              -(2**63), 2**64 - 1)  # fmt: skip
DECLARED = """.reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<12>; .reg .b64 %d<8>; .reg .b128 %q<2>;
.shared .align 1024 .b8 buf[2048]; .shared .align 8 .b64 mbar; .shared .align 4 .b32 taken;
.local .align 8 .b8 own[64];"""


def _prologue() -> str:
    lines = ["ld.param.b64 %d0, [p_out]; mov.b64 %d6, p_map; cvta.param.u64 %d6, %d6;",
             "mov.b64 %d1, buf; cvta.shared.u64 %d1, %d1; mov.u32 %r10, %tid.x; mov.b32 %r4, buf; mov.b32 %r5, mbar;",
             "setp.eq.u32 %p0, %r10, 0; @%p0 mbarrier.init.shared.b64 [mbar], 1; bar.sync 0;",
             "setp.ne.u32 %p1, %r10, 0; mov.pred %p2, %p0; mov.pred %p3, %p1; mov.b128 %q0, {%d0, %d1};",
             "mov.b128 %q1, {%d1, %d0}; mad.lo.u32 %r11, %r10, 16, %r4;",
             "st.shared.v4.b32 [%r11], {%r4,%r5,%r10,%r11};"]  # fmt: skip
    given = {("%d", 0), ("%d", 1), ("%d", 6), ("%r", 4), ("%r", 5), ("%r", 10)}
    for width, values in VALUES.items():
        for number, value in enumerate(values):
            if (NAMES[width], number) not in given:
                lines.append(f"mov.b{width} {NAMES[width]}{number}, {value};")
    return "\n".join([*lines[6:], *lines[:6]])


PROLOGUE = _prologue()
HEAD = ".version 9.2\n.target TARGET\n.address_size 64\n"
ENTRY = ".visible .entry kernel(.param .b64 p_out, .param .align 64 .b8 p_map[128])\n{\n"


@cache
def _texts() -> tuple[str, ...]:
    """Short whole modules: those of the parser's tests, and small kernels of the machine's tests."""
    files = sorted((Path(__file__).parent / "ptx").glob("*.ptx"))
    return (*(file.read_text(encoding="utf-8") for file in files), copy_kernel().ptx, mma_kernel().ptx)


@cache
def _own_programs() -> tuple[str, ...]:
    specs, backend = load_specs(None), load_backend("ptx")
    small = "hidden=128,intermediate=128,num_experts=1,tokens=1"
    cases: tuple[tuple[str, str, Target], ...] = (
        ("fmha", "hd=64,t=1,s_k=128", "sm_90a"),
        ("fmha", "hd=64,t=1,s_k=128", "sm_100a"),
        ("nvfp4_moe", small, "sm_100a"),
    )
    built = [backend.build(specs[op].parse_case(f"{op}:{case}"), target) for op, case, target in cases]
    return tuple(program.ptx for program in built if isinstance(program, Program))


@cache
def pool() -> tuple[tuple[Instruction, dict[str, int]], ...]:
    """One instruction of each spelling and operand count in our programs, with the widths of its registers."""
    found: dict[tuple[str, int, str], tuple[Instruction, dict[str, int]]] = {}
    for text in (*_own_programs(), *_texts()):
        module = parse(text)
        for function in module.functions.values():
            widths = {name: WIDTH_OF_TYPE[kind] for name, kind in function.registers.items()}
            for one in function.instructions:
                shapes = "".join(type(operand).__name__[0] for operand in one.operands)
                found.setdefault((one.opcode, len(one.operands), shapes), (one, widths))
    return tuple(found.values())


LEARNT_WIDTHS = {f"%w{width}_{number}": width for width in NAMES for number in range(40)}
_TYPES = {1: "pred", 16: "b16", 32: "b32", 64: "b64", 128: "b128"}
_ELSEWHERE = re.compile(r"`(%w\d+_\d+)` holds \d+ bits where \w+ needs (\d+)|(\d+) operands where this form takes "
                        r"([\d or]+)|vector of \d+ where ([\d or]+) are needed")  # fmt: skip


@cache
def _learnt_rows() -> RegisterRows:
    return RegisterRows.of({name: _TYPES[width] for name, width in LEARNT_WIDTHS.items()}, {})


class Learner:
    """Learns the operands that a form takes from its refusals: how many, how wide, how long a vector."""

    def __init__(self, form: Form, seed: int) -> None:
        self.draw = Random(f"{form.spelling}:{seed}")
        self.parts = tuple(self.draw.choice(sorted(slot.choices)) for slot in form.slots
                           if not slot.optional or self.draw.random() < 0.3)  # fmt: skip
        self.widths = [self.draw.choice((1, 16, 32, 32, 64, 64)) for _ in range(3)]
        self.kinds = [self._kind() for _ in self.widths]

    def _kind(self) -> str:
        return self.draw.choice(("register", "register", "register", "address", "vector 4", "immediate", "map", "pair"))

    def learn(self, tries: int = 60) -> Instruction | None:
        """An instruction that binds, or None after `tries` attempts."""
        for _ in range(tries):
            operands = tuple(self._operand(place) for place in range(len(self.kinds)))
            one = Instruction(self.parts, operands, None, 1, ".".join(self.parts))
            try:
                form, words = find(one)
                form.bind(Binder(one, words, _learnt_rows()))
            except UnknownInstructionError as refusal:
                self._follow(str(refusal))
            except Exception:
                return one  # a defect; the inputs made from it will show it
            else:
                return one
        return None

    def _operand(self, place: int) -> Operand:
        width, kind = self.widths[place], self.kinds[place]
        first = Register(f"%w{width}_{place}")
        if kind.startswith("vector"):
            return Vector(tuple(Register(f"%w{width}_{(place + i) % 40}") for i in range(int(kind[7:]))))
        return {
            "register": first,
            "immediate": Immediate(self.draw.choice((0, 1, 4, 8, 16, 128))),
            "address": Address(Register(f"%w{self.draw.choice((32, 64))}_{place}")),
            "map": Address(Register(f"%w64_{place}"), 0, (Vector((Register(f"%w32_{place}"),) * 2),)),
            "pair": Pair(first, Register(f"%w1_{place}")),
        }[kind]

    def _follow(self, refusal: str) -> None:
        hint = _ELSEWHERE.search(refusal)
        place = self.draw.randrange(len(self.kinds)) if self.kinds else 0
        if hint is None or self.draw.random() < 0.1:
            if self.kinds:
                self.kinds[place] = self._kind()
        elif hint[1]:
            self.widths[int(hint[1].partition("_")[2]) % len(self.widths)] = int(hint[2])
        elif hint[4]:
            count = int(self.draw.choice(hint[4].split(" or ")))
            self.kinds = (self.kinds + [self._kind() for _ in range(count)])[:count]
            self.widths = (self.widths + [32] * count)[:count]
        else:
            self.kinds[place] = f"vector {self.draw.choice(hint[5].split(' or '))}"


@cache
def learnt() -> tuple[tuple[Instruction, dict[str, int]], ...]:
    """Instructions that bind, for almost every form, found by trial."""
    found = (Learner(form, seed).learn() for form in all_forms() for seed in range(4))
    return tuple((one, LEARNT_WIDTHS) for one in found if one is not None)


class Maker:
    """Makes input `number`. All its random choices come from one generator."""

    def __init__(self, seed: int, number: int) -> None:
        self.number = number
        self.draw = Random(f"{seed}:{number}")

    def make(self) -> Input:
        """Makes the input."""
        way = self.draw.choice(WAYS)
        return {"mutation": self.mutated, "grammar": self.generated, "text": self.garbled, "launch": self.launched}[
            way
        ]()

    # ---- operands

    def register(self, width: int) -> str:
        """A register of `width` bits, occasionally of another width."""
        if self.draw.random() < 0.02:
            width = self.draw.choice(list(NAMES))
        return f"{NAMES[width]}{self.draw.randrange(COUNTS[width])}"

    def immediate(self) -> str:
        """An integer, mostly at the edge of a type, or a float."""
        if self.draw.random() < 0.1:
            return self.draw.choice(("0f7fc00000", "0f00000001", "0d7ff0000000000000", "1.5", "1e300"))
        value = self.draw.choice(IMMEDIATES)
        return str(value + self.draw.choice((0, 0, 1, -1))) if value < 2**63 else str(value)

    def any_operand(self) -> str:
        """An operand of any kind."""
        kind = self.draw.randrange(10)
        width = self.draw.choice((1, 16, 32, 32, 32, 64, 64, 128))
        if kind < 4:
            return self.register(width)
        if kind == 4:
            return self.immediate()
        if kind < 7:
            return self.any_address()
        if kind == 7:
            count = self.draw.choice((1, 2, 2, 4, 4, 8, 16))
            return "{" + ", ".join(self.register(width) for _ in range(count)) + "}"
        return self.draw.choice(("_", "!%p1", f"{self.register(32)}|%p2", "buf", "mbar", "own", "p_out", "%clock64"))

    def any_address(self) -> str:
        """`[...]` with shared memory, a buffer, an mbarrier, a map with coordinates, or something invalid."""
        base = self.draw.choice(("%r4", "%r4", "%r11", "%d0", "%d1", "mbar", "buf", "%d6, {%r0, %r1}", "own", "taken",
                                 "p_out", self.register(32), self.register(64), self.immediate()))  # fmt: skip
        if "{" not in base and not base[0].isdigit() and self.draw.random() < 0.3:
            base += f"+{self.draw.choice(IMMEDIATES)}"
        return f"[{base}]".replace("+-", "-")

    def rendered(self, operand: Operand, widths: dict[str, int]) -> str:
        """The text of an operand of our programs, with its registers replaced by this input's."""
        if isinstance(operand, Register):
            return self.register(widths[operand.name]) if operand.name in widths else operand.name
        if isinstance(operand, Immediate):
            if operand.kind == "int":
                return str(operand.value) if self.draw.random() < 0.8 else self.immediate()
            return f"0{operand.kind[0]}{operand.value:08x}" if operand.kind == "f32" else f"0d{operand.value:016x}"
        if isinstance(operand, Address):
            return self._rendered_address(operand, widths)
        if isinstance(operand, Vector):
            return "{" + ", ".join(self.rendered(item, widths) for item in operand.items) + "}"
        if isinstance(operand, Pair):
            return f"{self.rendered(operand.first, widths)}|{self.rendered(operand.second, widths)}"
        if isinstance(operand, Negated):
            return f"!{self.register(1)}"
        return "_" if isinstance(operand, Sink) else self.draw.choice(("buf", "mbar", "END"))

    def _rendered_address(self, operand: Address, widths: dict[str, int]) -> str:
        if operand.coordinates:
            items = "".join(f", {self.rendered(item, widths)}" for item in operand.coordinates)
            return f"[%d6{items}]"
        if self.draw.random() < 0.15:
            return self.any_address()
        if isinstance(operand.base, Symbol):
            return f"[{self.draw.choice(('mbar', 'buf', 'taken'))}]"
        wide = isinstance(operand.base, Register) and widths.get(operand.base.name, 32) == 64
        base = self.draw.choice(("%d0", "%d0", "%d1")) if wide else self.draw.choice(("%r4", "%r5", "%r11", "%r4"))
        return f"[{base}+{operand.offset}]" if operand.offset > 0 else f"[{base}]"

    # ---- ways to make an input

    def _kernel(self, way: str, lines: list[str]) -> Input:
        target = self.draw.choice(("sm_90a", "sm_100a"))
        loop = ["AGAIN:", *lines, "@%p2 bra AGAIN;"] if self.draw.random() < 0.05 else lines
        body = "\n".join([DECLARED, PROLOGUE, *loop, "END: ret;", "}"])
        cluster = self.draw.choice((1, 1, 1, 2))
        return Input(
            self.number, way, HEAD.replace("TARGET", target) + ENTRY + body,
            schedule=self.draw.choice(("eager", "lazy", "random:1")), grid=(cluster, 1, 1), cluster=(cluster, 1, 1),
            block=(self.draw.choice((32, 32, 33, 64, 128)), 1, 1),
        )  # fmt: skip

    def mutated(self) -> Input:
        """A few of our instructions, most of them changed in one place."""
        lines: list[str] = []
        count = self.draw.randint(1, 4)
        changed = self.draw.randrange(count) if self.draw.random() < 0.6 else -1
        for place in range(count):
            one, widths = self.draw.choice(pool() if self.draw.random() < 0.5 else learnt())
            parts, operands = list(one.parts), [self.rendered(operand, widths) for operand in one.operands]
            if place == changed:
                self._change(parts, operands)
            guard = self.draw.choice(("", "", "@%p0 ", "@!%p1 "))
            lines.append(f"{guard}{'.'.join(parts)} {', '.join(operands)};")
        return self._kernel("mutation", lines)

    def _change(self, parts: list[str], operands: list[str]) -> None:
        what = self.draw.randrange(8)
        if what < 4 and operands:
            operands[self.draw.randrange(len(operands))] = self.any_operand()
        elif what == 4 and operands:
            del operands[self.draw.randrange(len(operands))]
        elif what == 5:
            operands.insert(self.draw.randint(0, len(operands)), self.any_operand())
        elif what == 6 and len(parts) > 1:
            del parts[self.draw.randrange(1, len(parts))]
        elif len(parts) > 1:
            parts[self.draw.randrange(1, len(parts))] = self.draw.choice(self.draw.choice(pool())[0].parts)

    def generated(self) -> Input:
        """Forms of the table, with each slot filled by one of its words and operands of any kind."""
        lines: list[str] = []
        for _ in range(self.draw.randint(1, 3)):
            form = self.draw.choice(all_forms())
            words = [self.draw.choice(sorted(slot.choices)) for slot in form.slots
                     if not slot.optional or self.draw.random() < 0.4]  # fmt: skip
            operands = [self.any_operand() for _ in range(self.draw.choice((0, 1, 2, 2, 3, 3, 4, 5, 6)))]
            lines.append(f"{'.'.join(words)} {', '.join(operands)};")
        return self._kernel("grammar", lines)

    def garbled(self) -> Input:
        """A module with a few characters, words or lines changed."""
        text = self.draw.choice(_texts())
        for _ in range(self.draw.randint(1, 4)):
            at = self.draw.randrange(len(text))
            end = min(at + self.draw.choice((1, 1, 2, 8, 40)), len(text))
            strange = ("", "{", "}", ";", "\0", "é", "/*", '"', "<2147483647>", ".b8 big[1099511627776];", ".align 3")
            piece = self.draw.choice((text[at:end] * 2, self.immediate(), self.any_operand(), *strange))
            text = text[:at] + piece + text[end:]
        return Input(self.number, "text", text)

    def launched(self) -> Input:
        """A valid kernel launched oddly, or one that declares more memory than there is."""
        sizes = (1, 2, 3, 8, 17, 1024, 1025, 65535, 65536, 2**31 - 1, 2**31, 2**40, 0, -1)
        near = (1, 1, 1, 2, 4)

        def three() -> Dim3:
            x, y, z = (self.draw.choice(sizes if self.draw.random() < 0.2 else near) for _ in range(3))
            return x, y, z

        space, size = self.draw.choice(("local", "shared", "const", "global")), self.draw.choice((*sizes[:8], 2**37))
        declared = f".{space} .b8 big[{size}];"
        inside = self.draw.random() < 0.5 and space in ("local", "shared")
        use = f"{{ {declared if inside else ''} mov.b64 %d7, big; ld.{space}.b8 %h0, [big]; }}"
        ptx = HEAD.replace("TARGET", "sm_90a") + (declared if not inside else "") + ENTRY + DECLARED + use + "ret; }"
        params = self.draw.choice((None, None, (), (b"",), (b"x" * 8,), (b"x" * 8, b"y" * 127)))
        smem = self.draw.choice((0, 0, 16, 232448, 232449, 2**40, -1, -(2**63)))
        return Input(self.number, "launch", ptx, "eager", three(), three(), self.draw.choice(((1, 1, 1), three())),
                     smem, params)  # fmt: skip


# Running an input.


class TooSlowError(Exception):
    """An input did not end in MAX_SECONDS."""


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises TooSlowError after `seconds`, and MemoryError for MAX_BYTES more than the process has."""
    late = partial(TooSlowError, f"not over in {seconds:g} s")
    with memory_at_most(MAX_BYTES), seconds_at_most(seconds, late):
        yield


def run(one: Input, reached: Reached) -> None:
    """Parses, binds and launches `one` within its bounds. Raises whatever the machine raises."""
    module = parse(one.ptx)
    loaded = LoadedModule(module)
    machine = Machine(one.schedule, step_budget=STEP_BUDGET)
    memory = np.arange(4096, dtype=np.uint8)
    base = machine.memory.add("out", memory).base
    names = [name for name, function in module.functions.items() if function.is_entry] or ["kernel"]
    for name in names:
        entry = loaded.entry(name)
        reached.bound |= _spellings(module, name)
        params = one.params if one.params is not None else _params(module, name, base)
        machine.launch(entry, one.grid, one.block, params, one.cluster, one.dynamic_smem)
        reached.ran |= _spellings(module, name)


def _spellings(module: Module, name: str) -> set[str]:
    return {find(instruction)[0].spelling for instruction in module.functions[name].instructions}


def _params(module: Module, name: str, base: int) -> list[bytes]:
    found: list[bytes] = []
    for variable in module.functions[name].params:
        tensor_map = encode_tensor_map(base, "u8", (64, 32), (64,), (64, 4))
        given = tensor_map if variable.size == 128 else struct.pack("<Q", base)
        found.append((given * (min(variable.size, 1 << 16) // len(given) + 1))[: variable.size])
    return found


def ended(one: Input, reached: Reached) -> str | None:
    """Runs `one`. Returns a report if anything but an answer of the machine came out, or if no answer came in time."""
    began = time.perf_counter()
    try:
        run(one, reached)
        answer = "ran"
    except OURS as said:
        answer = type(said).__name__
        if not str(said).strip():
            return f"input {one.number} ({one.way}): a {answer} without a word"
    except Exception as foreign:
        where = traceback.extract_tb(foreign.__traceback__)[-1]
        return (f"input {one.number} ({one.way}): {type(foreign).__name__}: {foreign} at {Path(where.filename).name}:"
                f"{where.lineno} {'; '.join(getattr(foreign, '__notes__', []))}")  # fmt: skip
    took = time.perf_counter() - began
    reached.slowest = max(reached.slowest, took)
    reached.answers[f"{one.way}: {answer}"] += 1
    return None


def hunt(seed: int, numbers: range, reached: Reached, say: Callable[[str], object] | None = None) -> list[str]:
    """Runs inputs `numbers` of `seed`; returns reports of those that the machine did not answer."""
    pool()
    learnt()
    found: list[str] = []
    for number in numbers:
        try:
            with bounded(MAX_SECONDS):
                report = ended(Maker(seed, number).make(), reached)
        except TooSlowError as slow:
            report = f"input {number}: {slow}"
        if report:
            found.append(report)
            if say:
                say(report)
    return found


def test_every_input_is_answered() -> None:
    """Foreign exceptions and hangs are defects of the machine, whatever the text."""
    reached = Reached()
    found = hunt(0, range(CI_INPUTS), reached)
    assert not found, f"{len(found)} of {CI_INPUTS} inputs: " + "\n".join(found[:20])
    forms = len({form.spelling for form in all_forms()})
    assert len(reached.bound) > forms // 3, f"only {len(reached.bound)} of {forms} forms were bound: inputs are poor"


def test_a_foreign_exception_and_a_hang_are_reported() -> None:
    """Planted faults for the fuzzer itself."""
    loop = HEAD.replace("TARGET", "sm_90a") + ".entry kernel() { AGAIN: bra AGAIN; }"
    assert ended(Input(0, "planted", loop), Reached()) is None, "a loop is ended by the budget, and that is an answer"
    broken = Input(0, "planted", loop, block="not a block")  # pyright: ignore[reportArgumentType]
    assert "Error" in (ended(broken, Reached()) or ""), "a block that is no triple leaves the machine as an exception"
    began = time.perf_counter()
    try:
        with bounded(0.05):
            while time.perf_counter() - began < 5:
                pass
    except TooSlowError:
        return
    raise AssertionError("an endless input was not stopped")


# ---- the session


def _rules(texts: list[str]) -> tuple[set[str], set[str]]:
    """The grammar's productions used by the accepted `texts`, and all productions."""
    grammar = resources.files("backends.vm.ptx").joinpath("ptx.lark").read_text(encoding="utf-8")
    every = set(re.findall(r"^([a-z]\w*):", grammar, re.MULTILINE))
    lark = Lark(grammar, start="module", parser="lalr", lexer="contextual", maybe_placeholders=False)
    seen: set[str] = set()
    for text in texts:
        with contextlib.suppress(Exception):
            tree: Tree[Token] = lark.parse(text)
            seen |= {str(part.data) for part in tree.iter_subtrees()}
    return seen & every, every


def main() -> int:
    """`--count N`, `--seed S`, `--only NUMBER`."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=SESSION_INPUTS)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", type=int)
    given = options.parse_args()
    if given.only is not None:
        one = Maker(given.seed, given.only).make()
        sys.stdout.write(f"{one}\n\n{one.ptx}\n")
        run(one, Reached())
        return 0
    reached, began = Reached(), time.perf_counter()
    numbers = range(given.first, given.first + given.count)
    found = hunt(given.seed, numbers, reached, lambda report: sys.stdout.write(f"{report}\n"))
    took = time.perf_counter() - began
    forms = {form.spelling for form in all_forms()}
    sample = [Maker(given.seed, number).make().ptx for number in numbers[: given.count // 20]]
    rules, every = _rules([*_texts(), *sample])
    lines = [f"{given.count} inputs in {took:.0f} s, the slowest {reached.slowest:.2f} s; {len(found)} not answered",
             *(f"  {answer}: {count}" for answer, count in sorted(reached.answers.items())),
             f"forms bound: {len(reached.bound)} of {len(forms)}; run to the end: {len(reached.ran)}; never bound: "
             f"{', '.join(sorted(forms - reached.bound)) or 'none'}",
             f"productions of the grammar: {len(rules)} of {len(every)}; not reached: "
             f"{', '.join(sorted(every - rules)) or 'none'}"]  # fmt: skip
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
