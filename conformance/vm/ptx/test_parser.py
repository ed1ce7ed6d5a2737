"""The tree contains what the PTX text says: scopes, operands, literals, declarations."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.vm.ptx.ast import (
    Address,
    Function,
    Guard,
    Immediate,
    InitialAddress,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)
from backends.vm.ptx.parser import parse

PTX = sorted(Path(__file__).parent.glob("*.ptx"))
HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def read(name: str) -> Module:
    path = Path(__file__).parent / f"{name}.ptx"
    return parse(path.read_text(encoding="utf-8"), path.name)


def body(statements: str, registers: str = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;") -> Function:
    return parse(f"{HEADER}.entry f(.param .b64 argument) {{ {registers} {statements} }}").functions["f"]


def operands(statement: str) -> tuple[Operand, ...]:
    return body(statement).instructions[0].operands


def without_places(function: Function) -> Function:
    instructions = tuple(msgspec.structs.replace(each, line=0, text="") for each in function.instructions)
    variables = tuple(msgspec.structs.replace(each, line=0) for each in function.variables)
    params = tuple(msgspec.structs.replace(each, line=0) for each in function.params)
    return msgspec.structs.replace(function, instructions=instructions, variables=variables, params=params, line=0)


@pytest.mark.parametrize("path", PTX, ids=lambda path: path.stem)
def test_every_instruction_of_the_text_is_in_the_tree_once(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    bare = re.sub(r"//[^\n]*|/\*.*?\*/|\.section.*|\.loc\s[^\n]*", "", text, flags=re.DOTALL)
    opcodes = re.findall(r"(?:^|[;{}:]|@!?[%\w]+)\s*([a-z][a-z0-9_]*(?:[.:]+\w+)*)(?=\s[^;:]*;|;)", bare)
    expected = Counter(opcode.split(".")[0] for opcode in opcodes)
    found = Counter(each.parts[0] for function in parse(text).functions.values() for each in function.instructions)
    assert found == expected, "a plain search for opcodes and the parser disagree"


@pytest.mark.parametrize("path", PTX, ids=lambda path: path.stem)
def test_text_and_line_of_an_instruction_lead_back_to_the_source(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    for function in parse("\n".join(lines)).functions.values():
        for each in function.instructions:
            assert each.text in " ".join(lines[each.line - 1].split()), f"line {each.line} does not hold {each.text!r}"


def test_scopes_with_the_same_names_stay_apart() -> None:
    function = read("scopes").functions["scopes"]
    waits = [label for label in function.labels if label.startswith("LAB_WAIT")]
    assert len(waits) == 2, f"two scopes declare LAB_WAIT, the labels are {sorted(function.labels)}"
    for wait in waits:
        loop = function.instructions[function.labels[wait] : function.labels[wait] + 3]
        assert loop[2].operands == (Symbol(wait),), "a branch leaves its own scope's loop"
        assert loop[1].guard == Guard(loop[0].operands[0].name, False)  # pyright: ignore
        done = loop[1].operands[0]
        assert isinstance(done, Symbol)
        assert function.labels[done.name] == function.labels[wait] + 3, "DONE is not the end of its own scope"
    assert len({name for name in function.registers if name.startswith("P1")}) == 2


def test_an_inner_register_hides_the_outer_one_until_its_scope_ends() -> None:
    function = body("mov.b32 %r1, 1; { .reg .f32 %r1; mov.b32 %r1, 2; { mov.b32 %r1, 3; } } mov.b32 %r1, 4;")
    first, second, third, fourth = (each.operands[0] for each in function.instructions)
    assert first == fourth == Register("%r1")
    assert second == third != first
    assert isinstance(second, Register)
    assert (function.registers["%r1"], function.registers[second.name]) == ("b32", "f32")


def test_unique_names_never_meet_a_name_of_the_text() -> None:
    function = body(
        "mov.b32 x, 1; mov.b32 x$1, 2; mov.b32 x$$1, 3; { .reg .b32 x; mov.b32 x, 4; }", ".reg .b32 x, x$1, x$$1;"
    )
    names = [each.operands[0] for each in function.instructions]
    assert len(set(names)) == 4, f"four registers became {names}"


def test_a_declaration_hides_a_special_register_where_it_is_seen() -> None:
    statements = "mov.u32 %r0, %laneid; .reg .b32 %laneid; mov.u32 %laneid, 1; .reg .v4 .b32 %tid; mov.u32 %r0, %tid.x;"
    before, after, component = (each.operands for each in body(statements).instructions)
    assert before[1] == Register("%laneid"), "ptxas reads the special register before the declaration"
    assert after[0] != before[1]
    assert component[1] != Register("%tid.x"), "the component is that of the declared vector"


def test_every_name_that_instructions_use_is_declared() -> None:
    for path in PTX:
        module = parse(path.read_text(encoding="utf-8"))
        for function in module.functions.values():
            known = {each.name for each in (*function.params, *function.returns, *function.variables)}
            known |= {*function.labels, *function.branch_targets, *module.variables, *module.functions}
            for each in function.instructions:
                for name, is_register in names_in(each.operands[:3] if each.parts[0] == "call" else each.operands):
                    declared = name in function.registers or name.startswith("%tid") if is_register else name in known
                    assert declared, f"{path.name}, line {each.line}: {name} of {each.text!r} is declared nowhere"


def names_in(found: tuple[Operand, ...]) -> list[tuple[str, bool]]:
    names: list[tuple[str, bool]] = []
    for each in found:
        match each:
            case Register(name):
                names.append((name, True))
            case Symbol(name):
                names.append((name, False))
            case Negated(operand):
                names.append((operand.name, True))
            case Vector(items):
                names += names_in(items)
            case Pair(first, second):
                names += names_in((first, second))
            case Address(base, _, coordinates):
                names += names_in((base, *coordinates))
            case Immediate() | Sink():
                pass
    return names


R1, R2, RD1, P1 = Register("%r1"), Register("%r2"), Register("%rd1"), Register("%p1")


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("ld.b32 %r1, [%rd1];", (R1, Address(RD1))),
        ("ld.b32 %r1, [%rd1+16];", (R1, Address(RD1, 16))),
        ("ld.b32 %r1, [%rd1+-16];", (R1, Address(RD1, -16))),
        ("ld.b32 %r1, [%rd1 - 0x10];", (R1, Address(RD1, -16))),
        ("ld.b32 %r1, [argument+4];", (R1, Address(Symbol("argument"), 4))),
        ("ld.b32 %r1, [64];", (R1, Address(Immediate(64)))),
        ("mov.b64 %rd1, argument+8-2;", (RD1, Symbol("argument", 6))),
        ("mov.b64 {%r1, _}, %rd1;", (Vector((R1, Sink())), RD1)),
        ("foo {{%r1, %r2}, {_, 3}};", (Vector((Vector((R1, R2)), Vector((Sink(), Immediate(3))))),)),
        ("elect.sync %r1|%p1, -1;", (Pair(R1, P1), Immediate(-1))),
        ("elect.sync _|%p1, -1;", (Pair(Sink(), P1), Immediate(-1))),
        ("foo %r1, !%p1;", (R1, Negated(P1))),
        ("foo [%rd1, {%r1, 2}], [%r2+8];", (Address(RD1, 0, (R1, Immediate(2))), Address(R2, 8))),
        ("foo [%rd1, {%r1}, {%r2, 0}];", (Address(RD1, 0, (R1, R2, Immediate(0))),)),
        ("mov.u32 %r1, %tid.x;", (R1, Register("%tid.x"))),
        ("mov.u32 %r1, WARP_SZ;", (R1, Immediate(32))),
        ("call f, (%r1, 4);", (Vector(()), Symbol("f"), Vector((R1, Immediate(4))))),
        ("call.uni (%r1), f;", (Vector((R1,)), Symbol("f"), Vector(()))),
        ("ret;", ()),
    ],
)
def test_operands(statement: str, expected: tuple[Operand, ...]) -> None:
    assert operands(statement) == expected


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("0x1F", Immediate(31)),
        ("0b101U", Immediate(5)),
        ("017", Immediate(15)),
        ("-9223372036854775808", Immediate(-(2**63))),
        ("0xFFFFFFFFFFFFFFFF", Immediate(2**64 - 1)),
        ("0f3F800000", Immediate(0x3F800000, "f32")),
        ("0dBFF0000000000000", Immediate(0xBFF0000000000000, "f64")),
        ("1.5", Immediate(0x3FF8000000000000, "f64")),
        ("-1.5", Immediate(0xBFF8000000000000, "f64")),
        ("2.5e-1", Immediate(0x3FD0000000000000, "f64")),
        ("1 + 2 * 3 - 8 / 4 % 3", Immediate(5)),
        ("(1 << 4 | 3) & ~1", Immediate(18)),
        ("-7 / 2", Immediate(-3)),
        ("-7 % 2", Immediate(-1)),
        ("-8 >> 1", Immediate(-4)),
        ("0xFFFFFFFFFFFFFFF8 >> 1", Immediate(0x7FFFFFFFFFFFFFFC)),
        ("1 < 2 && 3 != 3 ? 10 : 1 ? 20 : 30", Immediate(20)),
        ("3%2", Immediate(1)),
    ],
)
def test_literals_and_constant_expressions(literal: str, expected: Immediate) -> None:
    assert operands(f"mov.b64 %rd1, {literal};") == (RD1, expected)


@given(st.integers(-(2**63), 2**64 - 1), st.sampled_from(["d", "x", "b", "o"]))
def test_an_integer_in_any_base_is_itself(value: int, base: str) -> None:
    prefix = {"d": "", "x": "0x", "b": "0b", "o": "0"}[base]
    spelt = f"{'-' if value < 0 else ''}{prefix}{abs(value):{base}}"
    assert operands(f"mov.b64 %rd1, {spelt};")[1] == Immediate(value), f"{spelt} is read as another number"


@given(st.floats(width=64, allow_nan=False, allow_infinity=False))
def test_a_float_in_hex_or_decimal_has_the_same_bits(value: float) -> None:
    import struct

    bits = int.from_bytes(struct.pack(">d", value))
    sign = "-" if bits >> 63 else ""
    mantissa, _, exponent = repr(abs(value)).partition("e")
    decimal = f"{sign}{mantissa if '.' in mantissa else mantissa + '.0'}{'e' + exponent if exponent else ''}"
    for spelt in (f"0d{bits:016X}", decimal):
        assert operands(f"mov.f64 %rd1, {spelt};")[1] == Immediate(bits, "f64"), f"{spelt} is read as another number"


def test_declarations() -> None:
    module = read("declarations")
    assert (module.version, module.target, module.address_size) == ((8, 6), ("sm_90a", "debug"), 64)
    variables = module.variables
    assert variables["message"].initial == b"\x68\x69\x21\x00\x00\x00\x00\x00", "the rest of an initialiser is zero"
    assert variables["shorts"].initial == b"".join(
        each.to_bytes(2, "little", signed=True) for each in (-1, -1, 1, 7, 11, 0)
    )
    assert variables["table"].initial == bytes.fromhex("0000c03f 000080bf 0000803e 00004040 00000000 00000000")
    assert (variables["unit"].type, variables["unit"].size, variables["unit"].align) == ("v4.f32", 16, 16)
    smem = variables["dynamic_smem"]
    assert (smem.space, smem.size, smem.align, smem.extern) == ("shared", 0, 1024, True)
    pointers = variables["pointers"]
    assert pointers.addresses == tuple(
        InitialAddress(8 * index, "table", addend, generic)
        for index, (addend, generic) in enumerate([(0, False), (0, True), (8, True)])
    )
    assert pointers.initial == bytes(24) + (5).to_bytes(8, "little")


def test_functions() -> None:
    functions = read("declarations").functions
    entry = functions["declarations"]
    assert [(each.name, each.size, each.align) for each in entry.params] == [("n", 4, 4), ("map", 128, 64)]
    assert entry.directives == {"maxntid": (256,)}
    spaces = {each.name: each.space for each in entry.variables}
    assert spaces["tile"] == "shared"
    assert spaces["depot"] == "local"
    assert list(spaces.values()).count("param") == 6, "each call sequence has its own parameters"
    assert entry.branch_targets == {"targets": ("Lzero", "Lone", "Ltwo")}
    plus = functions["plus"]
    assert ([each.name for each in plus.params], [each.name for each in plus.returns]) == (["a", "b"], ["sum"])
    assert functions["twice"].params[0].space == "reg"
    assert "extern" in functions["vprintf"].directives
    assert (entry.registers["pair.x"], entry.registers["pair.y"]) == ("b32", "b32")
    assert read("scopes").functions["scopes"].directives == {
        "reqntid": (128, 1, 1),
        "minnctapersm": (1,),
        "maxnreg": (64,),
    }


@given(st.lists(st.sampled_from([" ", "\n", "\t", " // ; } x\n", "/* { ; */", "/***/"]), min_size=1, max_size=8))
def test_space_and_comments_change_nothing(fillers: list[str]) -> None:
    text = (Path(__file__).parent / "scopes.ptx").read_text(encoding="utf-8")
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    count = 0

    def fill(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return match[0] + fillers[count % len(fillers)]

    filled = re.sub(r"[,;{}\[\]|]|\s(?=%)", fill, bare)
    assert without_places(parse(filled).functions["scopes"]) == without_places(parse(text).functions["scopes"])
