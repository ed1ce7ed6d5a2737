"""megamoe.triton and `pytest --megamoe-vm`: Triton kernels on CPU tensors, descriptors, tuning, hooks, findings."""

from __future__ import annotations

import importlib.util
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from conformance import ROOT
from conformance.fakes.commands import python
from megamoe.export.findings import read_findings
from megamoe.records.provenance import installed_version

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed"
)

SOFTMAX = ROOT / "examples" / "tests" / "test_softmax.py"
HEAD = """
import pytest, torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptorIm2Col
import megamoe.triton
from megamoe.vm import KernelFault

@triton.jit
def copy(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n), mask=i < n)

@triton.jit
def unmasked(x, o, B: tl.constexpr):
    tl.store(o + tl.arange(0, B), tl.load(x + tl.arange(0, B)))
"""
SCRIPT = (
    HEAD
    + """
def test_tensors_of_the_cpu():
    driver = megamoe.triton.install("sm_100a")
    x, o = torch.randn(1000), torch.empty(1000)
    copy[(8,)](x, o, 1000, B=128)
    assert torch.equal(o, x)
    assert driver.machine.machine.counters["instructions_memory"] > 0

@triton.jit
def add_boxes(a, b, o, BM: tl.constexpr, BN: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    o.store([m, n], a.load([m, n]) + b.load([m, n]))

@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_descriptors_of_the_host(target):
    megamoe.triton.install(target, schedule="lazy")
    a, b, o = (torch.randn(96, 64).half() for _ in range(3))
    maps = [TensorDescriptor.from_tensor(t, [32, 32]) for t in (a, b, o)]
    add_boxes[(3, 2)](*maps, BM=32, BN=32)
    assert torch.equal(o, a + b)

@triton.jit
def scaled(x, o, n, BM: tl.constexpr, BN: tl.constexpr):
    of_x = tl.make_tensor_descriptor(x, [n, 64], [64, 1], [BM, BN])
    of_o = tl.make_tensor_descriptor(o, [n, 64], [64, 1], [BM, BN])
    of_o.store([tl.program_id(0) * BM, 0], of_x.load([tl.program_id(0) * BM, 0]) * 2)

def test_descriptors_of_the_device():
    megamoe.triton.install("sm_100a")
    x, o = torch.randn(64, 64), torch.empty(64, 64)
    scaled[(2,)](x, o, 64, BM=32, BN=64)
    assert torch.equal(o, 2 * x)

@triton.autotune([triton.Config({"B": size}) for size in (64, 128, 256)], key=["n"])
@triton.jit
def tuned(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) + B, mask=i < n)

@pytest.mark.parametrize("autotune, block", [(None, 64), ({"tuned": {"B": 128}}, 128), (lambda left: left[-1], 256)])
def test_one_configuration_runs(autotune, block):
    megamoe.triton.install("sm_100a", autotune=autotune)
    tuned.cache.clear()
    x, o = torch.zeros(300), torch.zeros(300)
    tuned[lambda meta: (triton.cdiv(300, meta["B"]),)](x, o, 300)
    assert o.tolist() == [block] * 300
    assert tuned.best_config.kwargs == {"B": block}

def test_an_unknown_configuration_is_said():
    from megamoe.contract.backend import UnsupportedError
    megamoe.triton.install("sm_100a", autotune={"tuned": {"B": 32}})
    tuned.cache.clear()
    with pytest.raises(UnsupportedError, match="no configuration of tuned has"):
        tuned[(1,)](torch.zeros(300), torch.zeros(300), 300)

def test_a_copy_of_a_kernel_is_compiled_anew():
    # Its line information names its own file.
    megamoe.triton.install("sm_90a")
    assert copy.cache_key.endswith(__file__)

def test_kernels_may_divide_by_their_registers():
    megamoe.triton.install("sm_90a")
    kernel = copy.warmup(torch.empty(4), torch.empty(4), 4, B=4, grid=(1,))
    kernel._init_handles()
    assert kernel.n_regs > 0
    assert kernel.asm["ptx"].lstrip().startswith("//"), "PTX is text, as with Triton's own driver"

def test_launch_hooks_are_called():
    megamoe.triton.install("sm_100a")
    seen = []
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    enter.add(lambda data: seen.append(("enter", data.get()["name"])))
    leave.add(lambda data: seen.append(("leave", data.get()["name"])))
    copy[(1,)](torch.zeros(8), torch.zeros(8), 8, B=16)
    enter.calls.clear()
    leave.calls.clear()
    assert seen == [("enter", "copy"), ("leave", "copy")]

def test_a_broken_rule_is_a_fault():
    megamoe.triton.install("sm_100a")
    with pytest.raises(KernelFault, match="out-of-bounds"):
        unmasked[(1,)](torch.zeros(100), torch.zeros(128), B=128)

@triton.jit
def through(table, B: tl.constexpr):
    at = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(at + tl.arange(0, B), tl.load(at + tl.arange(0, B)) + 1)

def test_tensors_behind_addresses_are_reached():
    megamoe.triton.install("sm_100a")
    hidden = torch.zeros(128)
    through[(1,)](torch.tensor([hidden.data_ptr()]), B=128)
    assert hidden.tolist() == [1] * 128

@triton.jit
def persistent(a, b, o, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SMS: tl.constexpr):
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), SMS, warp_specialize=True):
        m, n = tile // tl.cdiv(N, BN) * BM, tile % tl.cdiv(N, BN) * BN
        sums = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            sums = tl.dot(a.load([m, k]), b.load([n, k]).T, sums)
        o.store([m, n], sums.to(tl.float16))

def test_warp_specialisation():
    megamoe.triton.install("sm_100a", schedule="lazy")
    a, b, o = torch.randn(256, 128).half(), torch.randn(128, 128).half(), torch.empty(256, 128).half()
    maps = [TensorDescriptor.from_tensor(t, box) for t, box in ((a, [128, 64]), (b, [64, 64]), (o, [128, 64]))]
    persistent[(2,)](*maps, 256, 128, 128, BM=128, BN=64, BK=64, SMS=2)
    assert torch.allclose(o.float(), a.float() @ b.float().T, atol=0.05, rtol=0.01)

def test_clusters():
    megamoe.triton.install("sm_90a")
    x, o = torch.randn(1000), torch.empty(1000)
    copy[(2,)](x, o, 1000, B=512, num_ctas=2)
    assert torch.equal(o, x)

@triton.jit
def printing(x, B: tl.constexpr):
    tl.device_print("x: ", tl.load(x + tl.arange(0, B)))

def test_what_a_kernel_prints(capsys):
    megamoe.triton.install("sm_100a")
    printing[(1,)](torch.arange(128), B=128)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 128
    assert lines[100] == "pid (0, 0, 0) idx (100) x: 100"

@triton.jit
def producer(x, o, B: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(o + tl.arange(0, B), tl.load(x + tl.arange(0, B)) * 2)

@triton.jit
def consumer(x, o, WAITS: tl.constexpr, B: tl.constexpr):
    if WAITS:
        tl.extra.cuda.gdc_wait()
    tl.store(o + tl.arange(0, B), tl.load(x + tl.arange(0, B)))

@pytest.mark.parametrize("early, waits", [(True, False), (True, True), (False, False)])
def test_a_programmatic_dependent_launch(early, waits):
    machine = megamoe.triton.install("sm_100a", profile="lenient").machine
    x, y, z = torch.randn(64), torch.zeros(64), torch.zeros(64)
    producer[(1,)](x, y, B=64, num_warps=1)
    consumer[(1,)](y, z, waits, B=64, num_warps=1, launch_pdl=early)
    assert torch.equal(z, 2 * x)
    found = [one.rule for one in machine.findings]
    assert found == ["dependent-launch-not-awaited"] * (early and not waits), found

@gluon.jit
def one_box(desc, o, P: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    smem = gl.allocate_shared_memory(desc.dtype, [P, C], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, P * C * 2)
    tma.async_load_im2col(desc, [1, 0, -1, 0], [1, 1], bar, smem)
    mbarrier.wait(bar, 0)
    i, j = gl.arange(0, P, layout=gl.SliceLayout(1, layout)), gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    gl.store(o + i[:, None] * C + j[None, :], smem.load(layout))

def test_im2col_descriptors():
    # The middle tap of a 3x3 filter with a border of one: pixels in the image's own order, zeros behind the last.
    megamoe.triton.install("sm_90a")
    n, h, w, P, C = 2, 6, 5, 32, 16
    x, o = torch.randn(n, h, w, C).half(), torch.ones(P, C).half()
    smem = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    corners = dict(pixel_box_lower_corner=[-1, -1], pixel_box_upper_corner=[-1, -1])
    desc = TensorDescriptorIm2Col(x, list(x.shape), list(x.stride()), [P, C], smem, **corners)
    one_box[(1,)](desc, o, P, C, gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
    pixels = torch.cat([x.view(-1, C), torch.zeros(P, C).half()])
    of_the_box = h * w + w  # image 1, row 0 + 1, column -1 + 1: each at its coordinate and offset
    assert torch.equal(o, pixels[of_the_box : of_the_box + P])

def test_triton_gets_its_own_driver_back():
    from triton.backends import backends
    megamoe.triton.uninstall()
    assert backends["nvidia"].driver.__name__ == "CudaDriver"
"""
)
SUITE = (
    HEAD
    + """
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda(megamoe_vm):
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(1000, device="cuda", generator=generator)
    o = torch.empty_like(x, device=torch.device("cuda", 0))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
        begin.record()
        copy[(8,)](x, o, 1000, B=128)
        end.record()
    torch.cuda.synchronize()
    assert x.is_cuda
    assert torch.equal(o.cpu(), x.to("cpu"))
    assert torch.cuda.get_device_properties(0).multi_processor_count == 4
    assert torch.cuda.get_device_capability() == (10, 0)
    assert megamoe_vm.machine.target == "sm_100a"

def test_fault():
    unmasked[(1,)](torch.zeros(100, device="cuda"), torch.zeros(128).cuda(), B=128)

def test_swallowed_fault():
    with pytest.raises(Exception):
        unmasked[(1,)](torch.zeros(100, device="cuda"), torch.zeros(128).cuda(), B=128)
"""
)


def _pytest(folder: Path, text: str, *options: str) -> str:
    (folder / "test_kernels.py").write_text(textwrap.dedent(text))
    asked = ("-q", "-W", "ignore", "-p", "no:cacheprovider", *options, "test_kernels.py")
    return python("-m", "pytest", *asked, cwd=folder).stdout


def test_kernels_of_triton_run_on_cpu_tensors(tmp_path: Path) -> None:
    said = _pytest(tmp_path, SCRIPT)
    assert "21 passed" in said, said


def test_a_test_suite_runs_and_findings_fail_it(tmp_path: Path) -> None:
    suppress = tmp_path / "suppress.yaml"
    suppress.write_text("- {rule: race, kernel: no_such_kernel, reason: to be stale}\n")
    options = ("--megamoe-findings", "found.json", "--megamoe-suppress", "suppress.yaml", "--megamoe-profile", "strict")
    options += ("--megamoe-findings", "found.sarif")
    said = _pytest(tmp_path, SUITE, "--megamoe-vm", "sm_100a", *options)
    assert "2 failed, 1 passed" in said, said
    assert "FAILED test_kernels.py::test_fault" in said, said
    assert "the test passes, but a kernel broke a rule: [out-of-bounds]" in said, "a finding cannot be caught"
    assert "stale suppression: suppress.yaml, line 1: race at kernel no_such_kernel" in said, said
    assert "\ntest_kernels.py:" in said, "the traceback has the line of the test that calls the kernel"
    inner = [one for one in ("backends/vm", "megamoe/vm.py", "jit.py") if one in said]
    assert not inner, f"and ends there: {inner}"
    (one,) = read_findings(tmp_path / "found.json")
    lines = (tmp_path / "test_kernels.py").read_text().splitlines()
    assert Path(one.place.file).name == "test_kernels.py", "a finding of a Triton kernel names its Python file"
    assert "tl.load(x + tl.arange" in lines[one.place.line - 1], f"line {one.place} is not that of the access"
    assert one.times == 2, "two tests meet one fault"
    assert '"ruleId": "out-of-bounds"' in (tmp_path / "found.sarif").read_text(), "a second file is written, too"


def _as_it_says(folder: Path) -> str:
    """What the example of a test suite prints if it is run in `folder` as its comment says."""
    (command,) = re.findall("^# Without a GPU: pytest (.+)$", SOFTMAX.read_text("utf-8"), re.MULTILINE)
    assert f"\npytest {command}\n" in (ROOT / "docs" / "bring-your-kernel.md").read_text("utf-8")
    return python("-m", "pytest", "-p", "no:cacheprovider", *command.split(), cwd=folder).stdout


def test_the_example_of_a_test_suite_runs() -> None:
    said = _as_it_says(ROOT)
    assert "4 passed" in said, said
    assert "megamoe" not in SOFTMAX.read_text("utf-8").partition("\nimport ")[2], "it is a suite for a GPU, unchanged"


def test_the_example_of_a_test_suite_fails_without_the_mask_of_its_store(tmp_path: Path) -> None:
    copied = tmp_path / SOFTMAX.relative_to(ROOT)
    shutil.copytree(SOFTMAX.parent, copied.parent, ignore=shutil.ignore_patterns("__pycache__"))
    lines = SOFTMAX.read_text("utf-8").splitlines(keepends=True)
    (store,) = [at for at, line in enumerate(lines) if "tl.store" in line]
    lines[store] = lines[store].replace(", mask=inside", "")
    copied.write_text("".join(lines))
    said = _as_it_says(tmp_path)
    assert "2 failed, 2 passed" in said, said
    for rule in ("global-race", "out-of-bounds"):
        named = re.findall(rf"^error \[{rule}\] kernel softmax_kernel, \S+test_softmax.py:(\d+):", said, re.MULTILINE)
        assert set(named) == {str(store + 1)}, f"each [{rule}] names the line of the store: {said}"


def test_the_page_about_split_stores_tells_what_happens(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "found" / "triton-split-store.md").read_text("utf-8")
    version = installed_version("triton")
    if version is None or f"Triton {version} compiles it" not in page:
        pytest.skip(f"the page is about another Triton than {version}")
    (suite,) = re.findall("^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    options = ("--megamoe-vm", "sm_90a", "--megamoe-profile", "lenient", "-k", "128-True")
    said = _pytest(tmp_path, suite, *options).replace("test_kernels.py", "test_rows.py")
    assert "2 failed, 2 passed" in said, said
    told = re.findall("^(FAILED .*) - (.*)$", page, re.MULTILINE)
    assert [name for name, _ in told] == re.findall("^(FAILED .*) - ", said, re.MULTILINE), said
    assert {why for _, why in told} == set(re.findall("^E +(AssertionError: .*)$", said, re.MULTILINE)), said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--megamoe-vm", "sm_80"], "there is no machine for the target 'sm_80'"),
        (["--megamoe-timeout", "3"], "--megamoe-timeout does nothing without --megamoe-vm TARGET"),
        (["--megamoe-vm", "sm_90a", "--megamoe-timeout", "0"], "a time limit is a number of seconds above 0"),
        (["--megamoe-vm", "sm_90a", "--megamoe-step-budget", "0"], "step_budget is 0"),
        (
            ["--megamoe-vm", "sm_90a", "--megamoe-findings", "/dev/null/f.json"],
            "cannot write findings to /dev/null/f.json",
        ),
        (["--megamoe-vm", "sm_90a", "--megamoe-profile", "x"], "ERROR: --megamoe-profile: there is no profile 'x'"),
        (["--megamoe-vm", "sm_90a", "--megamoe-findings", "f.csv"], "ERROR: --megamoe-findings: f.csv: the name"),
        (["--megamoe-vm", "sm_90a", "--megamoe-suppress", "x.yaml"], "ERROR: --megamoe-suppress: x.yaml: there is"),
        (["--megamoe-vm", "sm_90a", "--megamoe-schedule", "x"], "ERROR: --megamoe-schedule: no schedule"),
        (["--megamoe-profile", "strict"], "--megamoe-profile does nothing without --megamoe-vm TARGET"),
    ],
)
def test_options_of_pytest_that_mean_nothing_are_said(options: list[str], sentence: str, tmp_path: Path) -> None:
    done = python("-m", "pytest", *options, "-p", "no:cacheprovider", cwd=tmp_path)
    assert sentence in done.stderr


@pytest.mark.parametrize("options", [{"sm_count": 0}, {"autotune": 3}, {"autotune": {"kernel": 3}}])
def test_options_of_the_door_that_mean_nothing_are_said(options: dict[str, Any]) -> None:
    module = pytest.importorskip("megamoe.triton")
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        module.install("sm_100a", **options)
