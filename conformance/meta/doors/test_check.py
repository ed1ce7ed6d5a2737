"""`megamoe check`: its messages about good and bad kernels, its exit status, and the examples, which run."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from subprocess import CompletedProcess
from typing import cast

import numpy as np
import pytest
import torch

from backends.vm.host.session import Session
from conformance import ROOT
from conformance.fakes.commands import WITHOUT_HYPOTHESIS, python
from megamoe.cli.main import main
from megamoe.vm import Device

GUIDE = (ROOT / "docs" / "bring-your-kernel.md").read_text("utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"
GOOD = f"""{HEAD}
.visible .entry fill(.param .u64 y, .param .u32 n)
{{
  .reg .pred %p1;
  .reg .u64 %rd<3>;
  .reg .u32 %r<3>;
  ld.param.u64 %rd1, [y];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %tid.x;
  setp.ge.u32 %p1, %r2, %r1;
  @%p1 ret;
  mul.wide.u32 %rd2, %r2, 4;
  add.u64 %rd1, %rd1, %rd2;
  st.global.u32 [%rd1], %r2;
  ret;
}}
"""
# Warp 0 stores, warp 1 loads, without an order between them: the schedule decides what is stored.
RACE = f"""{HEAD}
.visible .entry race(.param .u64 y)
{{
  .reg .pred %p1;
  .reg .u64 %rd1;
  .reg .u32 %r<3>;
  .shared .u32 cell;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra other;
  st.shared.u32 [cell], 7;
  ret;
other:
  setp.ne.u32 %p1, %r1, 32;
  @%p1 ret;
  ld.shared.u32 %r2, [cell];
  st.global.u32 [%rd1], %r2;
  ret;
}}
"""


def _check(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main(["check", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.ptx"
    path.write_text(GOOD)
    return path


def test_every_instruction_must_have_a_meaning(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bound = f"{kernel}: fill: 2 parameters; every instruction has a meaning on sm_100a\n"
    status, said = _check(capsys, kernel)
    assert (status, said.startswith(bound), "it was only read; --entry NAME launches" in said) == (0, True, True), said
    kernel.write_text(GOOD.replace(", .param .u32 n", "").replace("ld.param.u32 %r1, [n]", "mov.u32 %r1, 3"))
    assert "fill: 1 parameter;" in _check(capsys, kernel)[1]
    kernel.write_text(GOOD.replace("setp.ge", "setp.gremlin"))
    status, said = _check(capsys, kernel)
    assert status == 1
    assert "setp.gremlin" in said


WRONG = (("setp.ge.u32", "bar.sync 0, 48;"), ("@%p1 ret", "bar.sync 17;"), ("mul.wide", "add.u32 %r1, %r77, 1;"))
"""Before which instruction of GOOD which wrong one is put."""


def _with_wrong(*wrong: tuple[str, str]) -> tuple[str, list[int]]:
    """GOOD with wrong instructions, and their lines."""
    text = GOOD
    for before, one in wrong:
        text = text.replace(f"  {before}", f"  {one}\n  {before}")
    return text, [text[: text.index(one)].count("\n") + 1 for _, one in wrong]


@pytest.mark.parametrize("launch", [(), ("--entry", "fill", "--arg", "u32[4]", "--arg", "4")])
def test_all_refused_instructions_are_told(
    launch: tuple[str, ...], kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, (first, second) = _with_wrong(*WRONG[:2])
    kernel.write_text(text)
    status, said = _check(capsys, kernel, *launch)
    told = [one for one in said.splitlines() if "PTX line" in one]
    assert status == 1, said
    assert [one.partition(" `")[0] for one in told] == [
        f"{kernel}: fill: PTX line {line}:" for line in (first, second)
    ], said
    assert "under the schedule" not in said, "a refusal depends on no schedule"
    text, (first, second, third) = _with_wrong(*WRONG)
    kernel.write_text(text)
    status, said = _check(capsys, kernel, *launch)
    assert status == 1, said
    places = (f"PTX line {first}: `", f"PTX line {second}: `", f"line {third}, column 16: %r77 is not declared")
    assert [said.find(f"{kernel}, {one}") >= 0 for one in places] == [True] * 3, said


def test_a_refused_instruction_has_its_place_in_every_format(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, (line, _) = _with_wrong(*WRONG[:2])
    kernel.write_text(text)
    run = json.loads(_check(capsys, kernel, "--format", "sarif")[1])["runs"][0]
    first, second = run["invocations"][0]["toolExecutionNotifications"]
    assert first["level"] == second["level"] == "error"
    (place,) = first["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"].endswith("kernel.ptx")
    assert place["physicalLocation"]["region"] == {"startLine": line}
    assert f'name="1. refused instruction at {kernel}:{line}"' in _check(capsys, kernel, "--format", "junit")[1]
    located = text.replace(".visible", '.file 1 "/src/fill.cu"\n.visible', 1).replace(
        "  bar.sync 0", "  .loc 1 7 3\n  bar.sync 0"
    )
    kernel.write_text(located)
    run = json.loads(_check(capsys, kernel, "--format", "sarif")[1])["runs"][0]
    (place,) = run["invocations"][0]["toolExecutionNotifications"][0]["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "file:///src/fill.cu"
    assert place["physicalLocation"]["region"] == {"startLine": 7, "startColumn": 3}


@pytest.mark.parametrize("launch", [(), ("--entry", "fill", "--arg", "u32[4]", "--arg", "4")])
def test_an_error_in_the_text_has_its_place_in_every_format(
    launch: tuple[str, ...], kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that is not declared, a refused instruction and a syntax error."""
    text, (undeclared, refused, misspelt) = _with_wrong(
        ("setp.ge.u32", "add.u32 %r1, %r77, 1;"), WRONG[1], ("mul.wide", "add.u32 %r1 1;")
    )
    kernel.write_text(text)
    written = {one: tmp_path / f"found.{one}" for one in ("sarif", "json", "junit", "text")}
    for form, file in written.items():
        assert _check(capsys, kernel, *launch, "--format", form, "--output", file)[0] == 1, f"the status of {form}"
    (run,) = json.loads(written["sarif"].read_text())["runs"]
    notices = run["invocations"][0]["toolExecutionNotifications"]
    assert [one["locations"][0]["physicalLocation"]["region"] for one in notices] == [
        {"startLine": undeclared, "startColumn": 16},
        {"startLine": refused},
        {"startLine": misspelt, "startColumn": 15},
    ], "SARIF lacks an error or its place"
    sentences = [one["message"]["text"] for one in notices]
    assert json.loads(written["json"].read_text())["failures"] == sentences, "JSON says something else"
    assert all(f"{one}\n" in written["text"].read_text() for one in sentences), "the text says something else"
    names = re.findall(r'name="(\d\. [^"]*)"', written["junit"].read_text())
    assert names == [
        f"1. unreadable PTX at {kernel}:{undeclared}:16",
        f"2. refused instruction at {kernel}:{refused}",
        f"3. unreadable PTX at {kernel}:{misspelt}:15",
    ], "JUnit XML lacks an error or its place"


def test_a_report_in_a_file_is_said_with_its_place(
    kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Like the files of other commands: its folder is made, and its name is told with what it holds."""
    kernel.write_text(RACE)
    launch = ("--entry", "race", "--block", 64, "--arg", "u32[1]", "--schedule", "eager")
    out = tmp_path / "new" / "found.sarif"
    status, said = _check(capsys, kernel, *launch, "--format", "sarif", "--output", out)
    results = json.loads(out.read_text())["runs"][0]["results"]
    assert (status, len(results), said) == (1, 1, f"{out}: 1 finding, 0 failures\n"), said
    kernel.write_text(_with_wrong(*WRONG[:2])[0])
    assert _check(capsys, kernel, "--output", out) == (1, f"{out}: 0 findings, 2 failures\n")
    status, said = _check(capsys, kernel, "--output", tmp_path)
    assert (status, "cannot write findings to" in said, "PTX line" in said) == (2, True, False), said


def test_errors_come_before_what_was_clean(kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (good := tmp_path / "good.ptx").write_text(GOOD)
    kernel.write_text(_with_wrong(*WRONG[:2])[0])
    lines = _check(capsys, good, kernel)[1].splitlines()
    kinds = ["PTX line" in one for one in lines]
    assert kinds == [True, True, False, False, False], f"errors are not first: {lines}"
    assert sum("it was only read" in one for one in lines) == 2, lines


def test_an_error_in_a_text_ends_no_other_file(
    kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (broken := tmp_path / "broken.ptx").write_text("junk\n")
    status, said = _check(capsys, broken, kernel)
    told = f"{broken}, line 1, column 1: ", f"{kernel}: fill: 2 parameters; every instruction has a meaning"
    assert (status, *(one in said for one in told)) == (1, True, True), said


def test_a_launch_holds_the_schedules_against_each_other(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = _check(capsys, kernel, "--entry", "fill", "--arg", "u32[100]", "--arg", "100")
    assert (status, "no rule broken" in said) == (0, True), said
    status, said = _check(capsys, kernel, "--entry", "fill", "--arg", "u32[100]", "--arg", "101")
    assert (status, "out-of-bounds" in said) == (1, True), said
    kernel.write_text(RACE)
    asked = ("--entry", "race", "--block", "64", "--arg", "u32[1]")
    status, said = _check(capsys, kernel, *asked)
    assert status == 1, f"a race goes unseen: {said}"
    for part in (
        "address: 0x400 of the CTA's shared memory is byte 0 of `cell`",
        "read more: docs/rules/races.md",
        "found 5 times under eager, lazy, late_cta:0, late_warp:0, random:0;",
    ):
        assert part in said, f"{part!r} is not in {said}"
    assert "under late_warp:0, random:0;" in said, "the stored value is undefined only if warp 0 comes late"
    line = RACE[: RACE.index("ld.shared")].count("\n") + 1
    assert said.count("may follow from") == 1, "only the undefined value may follow from something"
    assert f"may follow from: [race] at PTX line {line}" in said.partition("[uninitialised-shared]")[2], said
    moved = RACE.replace(".shared .u32 cell;", ".shared .u32 row[2];").replace("[cell]", "[row+4]")
    kernel.write_text(moved)
    assert "0x404 of the CTA's shared memory is byte 4 of `row`" in _check(capsys, kernel, *asked)[1]
    kernel.write_text(
        RACE.replace(".shared .u32 cell;", ".shared .u32 a;")
        .replace("[cell]", "[rows+8]")
        .replace(".visible", ".extern .shared .align 128 .b8 rows[];\n.visible")
    )
    assert (
        "0x488 of the CTA's shared memory is byte 8 of the dynamic" in _check(capsys, kernel, *asked, "--smem", 64)[1]
    )


# Each CTA or warp draws a number, and WHO keeps it. No rule is broken, but the order decides who gets which.
TICKETS = f"""{HEAD}
.visible .entry draw(.param .u64 y)
{{
  .reg .pred %p;
  .reg .u64 %rd<3>;
  .reg .u32 %r<3>;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  and.b32 %r1, %r1, 31;
  setp.ne.u32 %p, %r1, 0;
  @%p ret;
  atom.global.add.u32 %r2, [%rd1], 1;
  mov.u32 %r1, WHO;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd1, %rd1, %rd2;
  st.global.u32 [%rd1+4], %r2;
  ret;
}}
"""


@pytest.mark.parametrize(
    ("late", "who", "launched"),
    [
        ("late_cta:0", "%ctaid.x", ("--grid", "2", "--cluster", "2", "--block", "32")),
        ("late_warp:0", "%warpid", ("--block", "64")),
    ],
)
def test_a_cta_and_a_warp_come_late(
    kernel: Path, capsys: pytest.CaptureFixture[str], late: str, who: str, launched: tuple[str, ...]
) -> None:
    kernel.write_text(TICKETS.replace("WHO", who))
    status, said = _check(capsys, kernel, "--entry", "draw", *launched, "--arg", "u32[3]")
    assert (status, f"under the schedule {late} than under eager" in said) == (1, True), said
    kernel.write_text(TICKETS.replace("WHO", who).replace("[%rd1+4], %r2", "[%rd1+4], %r1"))
    status, said = _check(capsys, kernel, "--entry", "draw", *launched, "--arg", "u32[3]")
    assert (status, "the same results under eager, lazy, late_cta:0, late_warp:0, random:0" in said) == (0, True), said


@pytest.mark.parametrize(
    ("late", "launched", "sentence"),
    [
        ("late_warp:99", ("--block", "32"), "late_warp:99 delays nothing: a CTA of this launch has one warp"),
        ("late_warp:99", ("--block", "48"), "late_warp:99 delays warp 1: a CTA of this launch has 2 warps"),
        ("late_cta:7", ("--grid", "2"), "late_cta:7 delays nothing: a cluster of this launch has one CTA"),
        (
            "late_cta:7",
            ("--grid", "2", "--cluster", "2"),
            "late_cta:7 delays CTA 1: a cluster of this launch has 2 CTAs",
        ),
        ("late_warp:1", ("--block", "64"), ""),
        ("eager", ("--block", "32"), ""),
    ],
)
def test_a_schedule_that_delays_nothing_is_said(
    kernel: Path, capsys: pytest.CaptureFixture[str], late: str, launched: tuple[str, ...], sentence: str
) -> None:
    asked = ("--entry", "fill", *launched, "--schedule", late, "--arg", "u32[100]", "--arg", "32")
    status, said = _check(capsys, kernel, *asked)
    assert status == 0, said
    assert (
        (f"{kernel}: the schedule {sentence}" in " ".join(said.split())) if sentence else "the schedule" not in said
    ), said


MANGLED = "_ZN4mine4fillEPjj"


def test_refusals_and_entries_have_the_names_of_the_source(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"\b([yn])\b(?=[,)\]])", rf"{MANGLED}_param_\1", GOOD).replace(" fill(", f" {MANGLED}(")
    kernel.write_text(text)
    assert f"{kernel}: mine::fill: 2 parameters" in _check(capsys, kernel)[1]
    for asked, sentence in (
        (("--arg", "u32[4]"), "mine::fill takes 2 arguments (.u64 param_y, .u32 param_n) and is given 1"),
        (("--arg", "u32[4]", "--arg", "0.5"), "argument 1 of mine::fill (.u32 param_n, 4 bytes) cannot be 0.5"),
        (("--arg", "u32[4]", "--arg", "4", "--block", "4096"), "mine::fill: grid (1, 1, 1), cluster (1, 1, 1), block"),
    ):
        status, said = _check(capsys, kernel, "--entry", "fill", *asked)
        assert (status, sentence in said, MANGLED in said) == (2, True, False), said


def test_a_result_that_depends_on_the_schedule_leads_to_a_page(
    kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(TICKETS.replace("WHO", "%warpid"))
    _, said = _check(capsys, kernel, "--entry", "draw", "--block", "64", "--arg", "u32[3]")
    assert "read more: docs/rules/races.md" in said, said
    assert "schedule-dependent" in (ROOT / "docs/rules/races.md").read_text("utf-8")


SPIN = "mov.u32 %r2, 0;\nagain: add.u32 %r2, %r2, 1;\nsetp.lt.u32 %p1, %r2, 4000000000;\n@%p1 bra again;"


def test_a_kernel_that_does_not_end_is_a_sentence_that_says_where(
    kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(GOOD.replace("mov.u32 %r2, %tid.x;", SPIN))
    asked = ["--entry", "fill", "--timeout", "0.3", "--arg", "u32[100]", "--arg", "100"]
    status, said = _check(capsys, kernel, *asked)
    assert status == 1, "it did not show that it is right"
    assert "under the schedule eager: no end within 0.3 host seconds: kernel fill: CTA (0, 0, 0), warp 0" in said, said
    assert "spin at PTX lines 13 to 15" in said, said


SPINNING = """
from pathlib import Path
import megamoe.vm

def test_spin(megamoe_vm):
    try:
        megamoe_vm.launch(Path("kernel.ptx"), "fill", 1, 32, None, 100)
    except Exception:
        pass
"""


def _forked(command: list[str], **_: object) -> CompletedProcess[str]:
    done = python(*command[1:], cwd=Path.cwd())
    print(done.stdout)
    return done


def test_the_time_limit_holds_for_launches_of_tests(
    kernel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(GOOD.replace("mov.u32 %r2, %tid.x;", SPIN))
    (kernel.parent / "test_spin.py").write_text(SPINNING)
    monkeypatch.chdir(kernel.parent)
    monkeypatch.setattr("megamoe.cli.check.subprocess.run", _forked)
    status = main(["check", "test_spin.py", "--timeout", "0.3"])
    said = capfd.readouterr().out
    assert status == 1, said
    assert "the launch was stopped: no end within 0.3 host seconds: kernel fill" in said, said


def test_what_the_machine_was_at_is_no_part_of_an_interrupt(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("sm_100a")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(device.machine, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt, match="interrupted in a launch") as stop:
        device.launch(kernel, "fill", 1, 32, None, 100)
    assert stop.value.__suppress_context__, "the traceback goes on inside of the machine"


def test_the_ptx_that_lines_are_of_is_kept(
    kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamoe.vm.compiled", lambda *_: GOOD)
    (source := tmp_path / "fill.cu").write_text("__global__ void fill() {}")
    kept = tmp_path / "kept.ptx"
    status, said = _check(capsys, source, "--keep-ptx", str(kept))
    assert (status, kept.read_text()) == (0, GOOD), said
    status, said = _check(capsys, source, "--keep-ptx", str(kernel / "kept.ptx"))
    assert (status, "cannot write PTX to" in said) == (2, True), said


def test_a_kernel_that_takes_all_memory_is_a_sentence(
    kernel: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamoe.cli.check.share_of_memory", lambda _: 1 << 28)
    status, said = _check(capsys, kernel, "--entry", "fill", "--arg", "u32[200000000]", "--arg", "100")
    assert (status, "more memory than this machine has, 0.25 GiB" in said) == (1, True), said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["kernel.py", "--entry", "x"], "launches a kernel of one file"),
        (["kernel.txt"], "a source is KERNEL.ptx"),
        (["none.ptx"], "'none.ptx' cannot be read: No such file or directory; name a file of PTX or CUDA C++"),
        (["none.py::test_none"], "none.py::test_none: there is no such file; name TEST.py or TEST.py::NAME"),
        (["KERNEL", "--target", "sm_80"], "no machine for the target 'sm_80'"),
        (["KERNEL", "--entry", "fil"], "no entry 'fil'"),
        (["KERNEL", "--entry", "fill", "--arg", "q7[3]"], "no dtype 'q7'"),
        (["KERNEL", "--entry", "fill", "--arg", "i32[3]"], "no dtype 'i32'; did you mean 's32'?"),
        (["KERNEL", "--entry", "fill", "--arg", "int64[3]"], "did you mean 's64'?"),
        (["KERNEL", "--entry", "fill", "--arg", "uint8[3]"], "did you mean 'u8'?"),
        (["KERNEL", "--entry", "fill", "--arg", "float32[3]"], "did you mean 'f32'?"),
        (["KERNEL", "--entry", "fill", "--arg", "bfloat16[3]"], "did you mean 'bf16'?"),
        (["KERNEL", "--entry", "fill", "--arg", "float8_e4m3fn[3]"], "did you mean 'e4m3'?"),
        (["KERNEL", "--entry", "fill", "--arg", "i128[3]"], "no dtype 'i128'"),
        (["KERNEL", "--entry", "fill", "--arg", "u32[4]", "--arg", "4.0"], "cannot be 4.0; it takes a whole number"),
        (["KERNEL", "--entry", "fill", "--arg", "what"], "write a number, null"),
        (["KERNEL", "--entry", "fill", "--grid", "a"], "megamoe: --grid: 'a' is no size; write 8 or 8,2,1"),
        (
            ["KERNEL", "--entry", "fill", "--schedule", "sideways"],
            "schedule 'sideways' is not eager, lazy, random:SEED",
        ),
        (["KERNEL", "--entry", "fill"], "takes 2 arguments"),
        (["KERNEL", "--entry", "fill", "--arg", "u32[99999999999999]"], "an array has at most"),
        (["KERNEL", "--arg", "u32[4]"], "--arg does nothing without --entry NAME"),
        (["KERNEL", "--block", "64"], "--block does nothing without --entry NAME"),
    ],
)
def test_input_that_cannot_be_used_is_said(
    kernel: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = _check(capsys, *(str(kernel) if one == "KERNEL" else one for one in arguments))
    assert status == 2
    assert sentence in said


KEPT = f"""{HEAD}
.visible .entry kept(.param .u64 y, .param .u64 x)
{{
  .reg .u64 %rd<3>;
  .reg .b16 %h<2>;
  ld.param.u64 %rd1, [y];
  ld.param.u64 %rd2, [x];
  ld.global.b16 %h1, [%rd2+4];
  st.global.b16 [%rd1], %h1;
  ret;
}}
"""


@pytest.mark.parametrize(("kind", "values"), [("bf16", torch.bfloat16), ("e4m3", torch.float8_e4m3fn),
                                              ("e5m2", torch.float8_e5m2)])  # fmt: skip
def test_floats_that_numpy_lacks_are_random_arguments(
    kind: str, values: torch.dtype, kernel: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, launch = list[tuple[object, ...]](), Device.launch
    monkeypatch.setattr(
        Device, "launch", lambda self, *asked, **more: (given.append(asked), launch(self, *asked, **more))[1]
    )
    kernel.write_text(KEPT)
    status, said = _check(capsys, kernel, "--entry", "kept", "--arg", "u16[1]", "--arg", f"{kind}[400]")
    assert (status, "no rule broken" in said) == (0, True), said
    drawn = torch.from_numpy(given[0][-1]).view(values).float()
    assert drawn.shape == (400,), "an element of another size"
    assert 0.8 < drawn.std().item() < 1.2, "normal numbers, as for f32"


def test_an_error_of_the_machine_ends_no_other_file(
    kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (bad := tmp_path / "bad.ptx").write_text(GOOD.replace("fill", "bad"))
    whole = Session.bind

    def broken(self: Session, ptx: str, entry: str) -> None:
        if entry == "bad":
            raise KeyError("two\nlines")
        whole(self, ptx, entry)

    monkeypatch.setattr(Session, "bind", broken)
    status, said = _check(capsys, bad, kernel)
    told = " ".join(said.split())
    assert status == 1, told
    assert f"{bad}: this is an error of the machine, not of the kernel: KeyError: " in told
    assert re.search(r"at \S*test_check\.py:\d+ in broken; please report it", told), told
    assert f"{kernel}: fill: 2 parameters; every instruction has a meaning" in told, "the other file is not read"
    assert _check(capsys, kernel)[0] == 0


@pytest.mark.parametrize("launch", [(), ("--entry", "fill", "--arg", "u32[4]", "--arg", "4")])
def test_a_file_for_another_target_is_refused_and_the_target_is_named(
    launch: tuple[str, ...], kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(GOOD.replace(".target sm_100a", ".target sm_90a"))
    status, said = _check(capsys, kernel, *launch)
    assert (status, "the PTX is for sm_90a" in said, "--target sm_90a" in said) == (2, True, True), said
    assert _check(capsys, kernel, *launch, "--target", "sm_90a")[0] == 0
    kernel.write_text(GOOD.replace(".target sm_100a", ".target sm_120a"))
    status, said = _check(capsys, kernel, *launch)
    assert (status, "compile it for sm_100a\n" in said) == (2, True), said


@pytest.mark.parametrize("launch", [(), ("--entry", "fill")])
def test_a_file_that_cannot_be_read_is_named_once(
    launch: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.ptx"
    broken.write_text(GOOD.replace("mov.u32 %r2, %tid.x;", "mov.u32 %r2 %tid.x;"), "utf-8")
    status, said = _check(capsys, str(broken), *launch)
    line = GOOD[: GOOD.index("mov.u32 %r2")].count("\n") + 1
    assert status == 1
    told = " ".join(said.split())
    assert f"broken.ptx, line {line}, column" in told, f"the place is not said: {told}"
    assert (told.count("broken.ptx"), "<ptx>" in told) == (1, False), f"the file is not named once: {told}"
    status, said = _check(capsys, str(tmp_path / "none.ptx"), *launch)
    assert (status, said.count("none.ptx")) == (2, 1), f"a file that is not there is not named once: {said}"


@pytest.mark.parametrize("launch", [(), ("--entry", "fill")])
@pytest.mark.parametrize(("content", "first"), [("hello world\n", "hello"), (GOOD.partition("\n")[2], ".target")])
def test_a_file_is_ptx_by_its_name(
    content: str, first: str, launch: tuple[str, ...], kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(content)
    said = _check(capsys, kernel, *launch)[1]
    line = content[: content.index(first)].count("\n") + 1
    wanted = f"{kernel}, line {line}, column 1: '{first}' stands where '.version' should\n"
    assert said.endswith(wanted), f"the file is not read as PTX: {said}"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b".version 8.8\n.target sm_100a\n.address_size 64\n", "holds no kernel"),
        (b".version \xff", "is no text in UTF-8"),
    ],
)
def test_a_file_without_a_kernel_is_not_passed(
    kernel: Path, content: bytes, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_bytes(content)
    status, said = _check(capsys, kernel)
    assert (status, sentence in said) == (2, True), said


@pytest.mark.parametrize("grid", ["16", 8.5, (1, "2"), None])
def test_a_grid_that_is_no_number_is_refused(kernel: Path, grid: object) -> None:
    with pytest.raises(ValueError, match="must be a number of whole units"):
        Device("sm_100a").launch(kernel, "fill", cast("int", grid), 32, np.zeros(4, np.uint32), 4)


def test_a_test_suite_is_run_by_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_suite.py").write_text(
        "import torch\n\ndef test_it():\n    assert torch.ones(2, device='cuda').sum() == 2\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, value in WITHOUT_HYPOTHESIS.items():
        monkeypatch.setenv(name, value)
    status = main(["check", "test_suite.py::test_it"])
    said = capfd.readouterr()
    assert (status, "1 passed" in said.out) == (0, True), said


def test_the_guide_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"megamoe\.(\w+)\.(\w+)", GUIDE))
    assert len(named) > 8, "the guide names the doors"
    for module, name in sorted(named):
        text = (ROOT / "megamoe" / f"{module}.py").read_text("utf-8")
        assert re.search(rf"^(def|class) {name}\b|import .*\b{name}\b", text, re.MULTILINE), f"megamoe.{module}.{name}"
    _, said = _check(capsys, "--help")
    plugin = (ROOT / "megamoe" / "pytest_plugin.py").read_text("utf-8")
    of_pytest = {"--full-trace"}
    for option in sorted(set(re.findall(r"--[a-z][a-z-]+", GUIDE)) - of_pytest):
        assert option in said or f'"{option}"' in plugin, f"the guide names {option}, which is no option"


def test_the_command_of_readme_for_plain_ptx_runs(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = re.findall(r"^megamoe check (kernel\.ptx .*)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    words = shlex.split(line, comments=True)
    named = {"kernel.ptx": str(kernel), "NAME": "fill"}
    ptx = GOOD.replace("sm_100a", words[words.index("--target") + 1]).replace(", .param .u32 n", "")
    kernel.write_text(ptx.replace("ld.param.u32 %r1, [n]", "mov.u32 %r1, 128"))
    status, said = _check(capsys, *(named.get(word, word) for word in words))
    assert (status, "fill: no rule broken" in said) == (0, True), said


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    wanted = {"cutedsl": "cutlass", "triton": "triton"}.get(example.stem.partition("_")[0])
    if wanted and importlib.util.find_spec(wanted) is None:
        pytest.skip(f"{wanted} is not installed")
    done = python(str(example), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [("raise RuntimeError('planted')", 1, "RuntimeError: planted"), ("sys.exit('planted')", 1, "planted"),
     ("sys.exit(3)", 3, ""), ("os.kill(os.getpid(), 9)", -9, ""), ("print('done')", 0, "")],
)  # fmt: skip
def test_an_example_that_fails_is_noticed(line: str, status: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(f"import os, sys\n{line}\n")
    done = python(str(tmp_path / "planted.py"), cwd=tmp_path)
    assert (done.returncode, told in done.stderr) == (status, True), done
    assert done.stdout == ("done\n" if status == 0 else "")


def test_a_test_suite_without_pytest_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytest" else found(name))
    assert main(["check", "test_ops.py"]) == 2
    assert "test_ops.py: pytest runs test-suites, and it is not installed" in capsys.readouterr().err


def test_a_refused_entry_names_the_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "k.ptx").write_text(HEAD + ".visible .entry kernel() { ret; }\n")
    monkeypatch.chdir(tmp_path)
    for name in ("k.ptx", "./k.ptx"):
        status, said = _check(capsys, name, "--entry", "absent")
        assert (status, said.count("k.ptx")) == (2, 1), said
        assert "k.ptx: the module has no entry 'absent'" in said, said
