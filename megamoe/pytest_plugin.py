"""`pytest --megamoe-vm sm_100a`: runs a test suite of Triton or CuTeDSL kernels on the machine, with no GPU.

Tensors on "cuda" lie on the host (megamoe.torch_cuda), and kernels run on the machine. A kernel that breaks a rule
fails the test that launched it, even if the test catches the exception. `--megamoe-findings FILE` writes the findings
as text, JSON, SARIF or JUnit XML, depending on the file name.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from errno import EACCES, EISDIR
from os import W_OK, access, strerror
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from megamoe.vm import Device

_DEVICE = pytest.StashKey["Device"]()
_FAULTS = pytest.StashKey[list[Exception]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the --megamoe options."""
    group = parser.getgroup("megamoe", "kernels on a machine without a GPU")
    group.addoption("--megamoe-vm", metavar="TARGET", help="run kernels on a machine of this target: sm_90a, sm_100a")
    group.addoption("--megamoe-schedule", metavar="NAME", default="eager", help="eager, lazy or random:SEED")
    group.addoption("--megamoe-profile", metavar="NAME", default="default", help="strict, default or lenient")
    group.addoption("--megamoe-suppress", metavar="FILE", help="YAML of findings that do not count")
    group.addoption(
        "--megamoe-findings",
        metavar="FILE",
        action="append",
        default=[],
        help="write findings: .txt, .json, .sarif or .xml (JUnit); may be given several times",
    )
    group.addoption("--megamoe-timeout", metavar="SECONDS", type=float, help="host seconds after which a launch fails")
    group.addoption(
        "--megamoe-step-budget", metavar="N", type=int, default=200_000_000, help="steps after which a launch has hung"
    )
    group.addoption("--megamoe-sm-count", metavar="N", type=int, default=4, help="what persistent kernels are told")


def pytest_configure(config: pytest.Config) -> None:
    """Opens the doors before a test module is imported, because modules check for a GPU at import."""
    target = config.getoption("--megamoe-vm")
    if target is None:
        idle = [name for name in ("suppress", "findings", "timeout") if config.getoption(f"--megamoe-{name}")]
        if config.getoption("--megamoe-profile") != "default":
            idle.append("profile")
        if idle:
            raise pytest.UsageError(f"--megamoe-{idle[0]} does nothing without --megamoe-vm TARGET")
        return
    from megamoe import vm
    from megamoe.findings import Ledger

    sm_count = int(str(config.getoption("--megamoe-sm-count")))
    opened = ExitStack()
    schedule = str(config.getoption("--megamoe-schedule"))
    step_budget = int(str(config.getoption("--megamoe-step-budget")))
    profile, suppress = str(config.getoption("--megamoe-profile")), config.getoption("--megamoe-suppress")
    with _refusing("vm"):
        device = vm.Device(target)
    with _refusing("schedule"):
        vm.Device(target, schedule=schedule)
    with _refusing("step-budget"):
        device = vm.Device(target, schedule=schedule, step_budget=step_budget, sm_count=sm_count)
    with _refusing("profile"):
        device.ledger = Ledger.of(profile, None)
    with _refusing("suppress"):
        device.ledger = Ledger.of(profile, suppress, device.machine.rules)
    with _refusing("timeout"):
        device.timeout = _timeout(config)
    with _refusing("findings"):
        _check_files(_files(config))
    from megamoe.runner.child import collect_seldom

    # Torch takes seconds to import, so the options are checked first.
    opened.callback(gc.set_threshold, *gc.get_threshold())
    collect_seldom()
    from megamoe import torch_cuda

    opened.enter_context(torch_cuda.on_host(target, sm_count))
    for name in ("triton", "cutlass"):
        if importlib.util.find_spec(name) is not None:
            _open(name, device, sm_count, opened)
    faults = config.stash[_FAULTS] = list[Exception]()
    vm.ON_FAULT.append(faults.append)
    opened.callback(vm.ON_FAULT.remove, faults.append)
    config.stash[_DEVICE] = device
    config.add_cleanup(opened.close)


@contextmanager
def _refusing(option: str) -> Iterator[None]:
    """Names the option whose value cannot be used."""
    from megamoe.contract.backend import UnsupportedError

    try:
        yield
    except (UnsupportedError, ValueError) as refused:
        raise pytest.UsageError(f"--megamoe-{option}: {refused}") from None


def _files(config: pytest.Config) -> list[Path]:
    return [Path(str(one)) for one in config.getoption("--megamoe-findings") or ()]


def _timeout(config: pytest.Config) -> float | None:
    given = config.getoption("--megamoe-timeout")
    if given is None:
        return None
    if not 0 < (seconds := float(str(given))) < float("inf"):
        raise ValueError(f"{given}: a time limit is a number of seconds above 0")
    return seconds


def _check_files(files: list[Path]) -> None:
    """ValueError for a file that no findings can be written to, or in no format."""
    if files:
        from megamoe.export.findings import form_of

        for file in files:
            form_of(file)
            _check_writable(file)


def _check_writable(file: Path) -> None:
    """Makes the folder of `file`. ValueError, before any test runs, if nothing can be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(EISDIR, strerror(EISDIR))
        if not access(file if file.exists() else file.parent, W_OK):
            raise PermissionError(EACCES, strerror(EACCES))
    except OSError as problem:
        raise ValueError(f"cannot write findings to {file}: {problem.strerror}") from None


def _open(name: str, device: Device, sm_count: int, opened: ExitStack) -> None:
    if name == "triton":
        from megamoe import triton

        triton.install(device, sm_count=sm_count)
        opened.callback(triton.uninstall)
    else:
        from megamoe import cutedsl

        cutedsl.install(device)
        opened.callback(cutedsl.uninstall)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Names the machine's target."""
    device = config.stash.get(_DEVICE, None)
    return f"megamoe: kernels run on a machine of {device.machine.target}" if device else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the findings that count, the remarks about suppressions, and the tally."""
    device = config.stash.get(_DEVICE, None)
    if device is None or not (device.findings or device.ledger.remarks):
        return
    ledger = device.ledger
    terminalreporter.section("megamoe findings")
    for one in ledger.failing:
        terminalreporter.write_line(ledger.text_of(one))
    for remark in ledger.remarks:
        terminalreporter.write_line(remark)
    terminalreporter.write_line(ledger.tally)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the findings of this process."""
    config = session.config
    device, files = config.stash.get(_DEVICE, None), _files(config)
    if device is None or not files:
        return
    from megamoe.export.findings import CheckedRun, form_of, rendered

    for path in files:
        # Each pytest-xdist worker runs kernels of its own, so it gets a file of its own.
        if (worker := getattr(config, "workerinput", {}).get("workerid")) is not None:
            path = path.with_name(f"{path.stem}.{worker}{path.suffix}")
        path.write_text(rendered(CheckedRun(device.ledger), form_of(path)), "utf-8")


_BELOW_A_LAUNCH = frozenset({"megamoe", "backends", "contextlib", "triton", "cutlass"})


def end_at_the_launch(fault: Exception) -> None:
    """Cuts the traceback of `fault` where the test calls a kernel: machine frames say nothing about the kernel."""
    fault.__cause__, fault.__suppress_context__ = None, True
    last = step = fault.__traceback__
    while step is not None:
        package, _, _ = step.tb_frame.f_globals.get("__name__", "").partition(".")
        if package not in _BELOW_A_LAUNCH:
            last = step
        step = step.tb_next
    if last is not None:
        last.tb_next = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A finding that counts fails the test, even if the test catches the exception."""
    faults = item.config.stash.get(_FAULTS, None)
    if faults is None:
        return (yield)
    from megamoe.contract.machine import KernelFault

    faults.clear()
    try:
        result = yield
    except KernelFault as fault:
        if item.config.getoption("fulltrace", False):
            # The machine's own frames are those of the exception that the door has hidden.
            fault.__suppress_context__ = False
        else:
            end_at_the_launch(fault)
        raise
    if faults:
        pytest.fail(f"the test passes, but a kernel broke a rule: {faults[0]}", pytrace=False)
    return result


@pytest.fixture(scope="session")
def megamoe_vm(request: pytest.FixtureRequest) -> Device:
    """The machine that kernels run on. Its `machine.counters` belong to the last launch."""
    device = request.config.stash.get(_DEVICE, None)
    if device is None:
        pytest.skip("needs --megamoe-vm TARGET")
    return device
