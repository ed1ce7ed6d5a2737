"""The commands that only show something: `megamoe list`, `doctor`, `schema` and `explain`."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, files
from io import StringIO
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megamoe import CHECKOUT, cuda_source
from megamoe.cli.options import Ops, Specs, Wheres, bounded, find_modules_of_the_user
from megamoe.cli.terminal import Terminal, console
from megamoe.contract import (
    TARGETS,
    Case,
    Row,
    UnsupportedError,
    backend_names,
    executor_names,
    spell,
)
from megamoe.contract.counted import counted
from megamoe.explain import FOLDER, folder_of
from megamoe.records.files import write_file
from megamoe.records.lines import SCHEMA_VERSION, RecordError
from megamoe.records.provenance import git_revision, installed_version
from megamoe.runner.capabilities import ASKED, machine_of, offer_of
from megamoe.runner.process import RunnerDiedError, RunnerFaultError, nursery, printable
from megamoe.runner.wire import Frame
from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import (
    DEFAULT_EXECUTOR,
    SelectionError,
    checked_targets,
    expand_schedules,
    known_cases,
    matching,
    parse_where,
    selected_specs,
    spec_of,
    with_name,
)
from megamoe.spec.spec import Spec

# What there is to run


def list_cases(
    op: Ops = None,
    matrix: Annotated[
        list[str] | None, typer.Option("--matrix", metavar="NAME", help="Only this matrix; may be repeated.")
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", metavar="NAME", help="Only this profile.")] = None,
    where: Wheres = None,
    specs: Specs = None,
    axes: Annotated[bool, typer.Option("--axes", help="One column per axis that varies, defaults included.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON array instead of a table.")] = False,
) -> None:
    """Lists the cases of the matrices, as a table or as JSON."""
    known = with_name(selected_specs(load_specs(specs), op or []), "matrices", matrix or ())
    known = with_name(known, "profiles", () if profile is None else (profile,))
    rows = [row for spec in known for row in _rows(spec, matrix, profile)]
    kept = {case.id for case in matching((case for case, *_ in rows), parse_where(where or []))}
    rows = [row for row in rows if row[0].id in kept]
    if not rows:
        raise SelectionError("no case matches: loosen --op, --matrix, --profile or --where")
    if as_json:
        print(json.dumps([_as_json(*row) for row in rows], indent=1))
    else:
        _print_table(rows, axes)


_Row = tuple[Case, list[str], list[str], bool]


def _rows(spec: Spec, matrix: list[str] | None, profile: str | None) -> list[_Row]:
    """The cases of a spec with their matrices, profiles and whether they are published."""
    matrices = {name: {case.id for case in cases} for name, cases in spec.matrices.items()}
    profiles = {name: {case.id for case in one.cases} for name, one in spec.profiles.items()}
    rows: list[_Row] = []
    for case in known_cases(spec).values():
        in_matrices = [name for name, ids in matrices.items() if case.id in ids]
        in_profiles = [name for name, ids in profiles.items() if case.id in ids]
        if (not matrix or set(matrix) & set(in_matrices)) and (profile is None or profile in in_profiles):
            rows.append((case, in_matrices, in_profiles, spec.published(case)))
    return rows


def _as_json(case: Case, matrices: list[str], profiles: list[str], published: bool) -> dict[str, object]:
    return {
        "case": case.id,
        "op": case.op,
        "axes": dict(case.axes),
        "inputs": case.inputs,
        "seed": case.seed,
        "matrices": matrices,
        "profiles": profiles,
        "published": published,
    }


def _print_table(rows: list[_Row], with_axes: bool) -> None:
    """One line per case. The id omits axes at their default; `with_axes` adds a column for each axis that varies."""
    axes = dict.fromkeys(name for case, *_ in rows for name, _ in case.axes) if with_axes else ()
    varying = [name for name in axes if len({dict(case.axes).get(name) for case, *_ in rows}) > 1]
    table = Table(box=None, header_style="bold")
    table.add_column("case", no_wrap=True, overflow="fold")
    for name in varying:
        table.add_column(name, justify="right")
    for name in ("matrix", "profiles", "published"):
        table.add_column(name, no_wrap=True)
    for case, matrices, profiles, published in rows:
        values = dict(case.axes)
        cells = [spell(values[name]) if name in values else "" for name in varying]
        table.add_row(case.id, *cells, " ".join(matrices), " ".join(profiles), "yes" if published else "")
    out = console()
    out.print(table)
    out.print(f"{counted(len(rows), 'case')}, {sum(published for *_, published in rows)} of them published")


# What can run here


def doctor(
    specs: Specs = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON array instead of a table.")] = False,
) -> None:
    """Says what can run here, what cannot, and why not."""
    found = list(capabilities(specs))
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    table = Table(box=None, show_header=False)
    for one in found:
        mark = "[green]yes[/]" if one.works else "[yellow]no[/]"
        table.add_row(mark, escape(one.subject), escape(one.detail))
    console().print(table)


@dataclass(frozen=True, slots=True)
class Capability:
    """What this machine can or cannot do. `detail`: what was found, or what is missing and what that costs."""

    subject: str
    works: bool
    detail: str


def capabilities(specs: Path | None = None) -> Iterator[Capability]:
    """Checks the machine, cheap checks first. Raises nothing: a broken component is a Capability that does not work."""
    yield Capability("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Capability("megamoe", True, f"{installed_version('megamoe')}, revision {git_revision(CHECKOUT)}")
    for name in ("torch", "numpy"):
        found = installed_version(name)
        yield Capability(name, found is not None, found or f"not installed: pip install {name}")
    try:
        ops = tuple(load_specs(specs))
        yield Capability("specs", True, f"ops: {', '.join(ops)}")
    except SpecError as error:
        ops = ()
        yield Capability("specs", False, str(error))
    for name in backend_names():
        yield from _backend_capabilities(name, ops)
    for name in executor_names():
        yield from _executor_capabilities(name)
    yield _gpu()
    yield _assembler()
    compilers = cuda_source.available()
    yield Capability("CUDA C++", bool(compilers), ", ".join(compilers) or cuda_source.NONE_HERE)


def _backend_capabilities(name: str, ops: tuple[str, ...]) -> Iterator[Capability]:
    try:
        offered = {op: offer_of(name, op) for op in ops}
    except UnsupportedError as error:
        yield Capability(f"backend {name}", False, " ".join(str(error).split()))
        return
    offers = {op: offer.targets for op, offer in offered.items()}
    if any(offer.borrowed for offer in offered.values()):
        absent = next((offer.missing for offer in offered.values()), None)
        has = [f"{op} for {', '.join(targets)}" for op, targets in offers.items() if targets]
        yield Capability(f"backend {name}", absent is None, absent or f"{'; '.join(has)}; on a device only")
        return
    for op, targets in offers.items():
        missing = [target for target in TARGETS if target not in targets]
        detail = f"for {', '.join(targets)}" if targets else "no kernel"
        yield Capability(
            f"backend {name}, {op}",
            bool(targets),
            detail + (f"; not for {', '.join(missing)}" * bool(targets and missing)),
        )


def _executor_capabilities(name: str) -> Iterator[Capability]:
    try:
        reasons = machine_of(name).unavailable
    except UnsupportedError as error:
        yield Capability(f"executor {name}", False, " ".join(str(error).split()))
        return
    for target, reason in reasons.items():
        yield Capability(f"executor {name}, {target}", reason is None, reason or "runs here")


def _gpu() -> Capability:
    try:
        import torch

        if torch.cuda.is_available():
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            detail = (
                f"{device.name}, compute capability {device.major}.{device.minor}, "
                f"{counted(device.multi_processor_count, 'multiprocessor')}, "
                f"{device.total_memory / 2**30:.0f} GiB, L2 of {device.L2_cache_size >> 20} MiB; "
                f"torch for CUDA {torch.version.cuda}"
            )
            return Capability("GPU", True, detail)
        built_for = torch.version.cuda
    except Exception as error:
        return Capability("GPU", False, f"torch cannot say: {_one_line(error)}")
    why = "no device or driver is visible" if built_for else "this torch is built without CUDA"
    return Capability(
        "GPU", False, f"none: {why}; the vm executor needs none, and rows on gpu are owed only if asked for"
    )


def _assembler() -> Capability:
    """The ptxas of the nvidia-cuda-nvcc wheel, or else of the search path."""
    path = _packaged_ptxas() or shutil.which("ptxas")
    if path is None:
        return Capability("ptxas", False, "not found: pip install nvidia-cuda-nvcc; assembling is then `unsupported`")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Capability("ptxas", False, f"does not run: {_one_line(error)}")
    release = [line for line in done.stdout.splitlines() if "release" in line]
    return Capability("ptxas", True, release[0].strip() if release else "of unknown release")


def _packaged_ptxas() -> str | None:
    try:
        found = [file for file in files("nvidia-cuda-nvcc") or () if file.name in ("ptxas", "ptxas.exe")]
    except PackageNotFoundError:
        return None
    return str(found[0].locate()) if found else None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# What a line of a record file looks like


def schema(
    version: Annotated[
        int, typer.Option("--version", parser=bounded(int, 0, 10**6), metavar="N", help="Version of the schema.")
    ] = SCHEMA_VERSION,
) -> None:
    """Prints the JSON Schema of a line of a record file. results/schema holds the output."""
    from megamoe.records.lines import VERSIONS, record_schema

    if version not in VERSIONS:
        raise RecordError(f"there is no version {version} of records; versions: {', '.join(map(str, VERSIONS))}")
    print(json.dumps(record_schema(version), indent=1))


# What to look at in a kernel before profiling it


EXPLAIN = "megamoe.cli.show:explained"
MAX_EXPLAINED_S = 600.0
REPORT_WIDTH = 180
STYLES = frozenset({"bold", "dim", "none", "red", "green", "yellow", "blue", "magenta", "cyan"})
"""Style words that a page from a runner may use: no links, nothing that hides text."""


def explain_case(
    case: Annotated[str, typer.Argument(metavar="CASE", help="Case id, as `megamoe list` prints it.")],
    backend: Annotated[str, typer.Option("--backend", metavar="NAME", help="Registered, or package.module:ATTRIBUTE.")],
    target: Annotated[str, typer.Option("--target", metavar="NAME", help="sm_90a or sm_100a.")] = "sm_100a",
    executor: Annotated[str, typer.Option("--executor", metavar="NAME", help="As for --backend.")] = DEFAULT_EXECUTOR,
    schedule: Annotated[str, typer.Option("--schedule", metavar="NAME", help="eager, lazy, random:SEED.")] = "lazy",
    output: Annotated[Path | None, typer.Option("--output", help=f"Folder; a new one in {FOLDER}.")] = None,
    specs: Specs = None,
) -> None:
    """Shows geometry, memory maps, warp roles, pipeline and counters of one case; writes pictures and a trace."""
    find_modules_of_the_user([backend, executor])
    known = load_specs(specs)
    spec = spec_of(known, case)
    names = expand_schedules([schedule])
    if len(names) != 1:
        raise SelectionError(f"one schedule is explained at a time, not {schedule!r}")
    row = Row(spec.parse_case(case).id, backend, checked_targets([target])[0], executor, names[0])
    folder = output or folder_of(row.case, row.backend, row.target)
    told = {"specs": None if specs is None else str(specs), "row": list(row), "folder": str(folder)}
    try:
        with nursery(torch=True).runner(f"{backend} on {executor}", ASKED) as runner:
            found = runner.ask(EXPLAIN, {**told, "width": REPORT_WIDTH}, MAX_EXPLAINED_S).told
    except UnsupportedError as error:
        raise SelectionError(str(error)) from error
    except (RunnerDiedError, RunnerFaultError) as error:
        # A backend may be the user's own code and fail in any way.
        raise SelectionError(f"{case} on {backend} cannot be explained: {error}") from error
    if "refused" in found:
        raise SelectionError(printable(str(found["refused"])))
    report = styled(found["report"])
    write_file(folder / "report.txt", report.plain, "the report")
    out = console()
    out.print(report)
    for file in [folder / "report.txt", *(folder / Path(name).name for name in found["files"])]:
        note = ": open it in ui.perfetto.dev" if file.suffix == ".json" else ""
        out.print(f"{file}{note}", markup=False)
    if found["broken"]:
        raise typer.Exit(1)


def styled(pieces: object) -> Text:
    """Text from the styled pieces that `explained` returns. They are untrusted: only STYLES count as styles, and
    control characters are escaped. SelectionError for anything else."""
    text = Text()
    try:
        for piece, style in cast("list[tuple[str, str]]", pieces):
            text.append(printable(piece, len(piece)), style if STYLES.issuperset(style.split()) else "")
    except (TypeError, ValueError, AttributeError) as error:
        raise SelectionError(f"the process that explains answered no report: {error}") from None
    return text


def explained(request: Frame) -> Frame:
    """Explains a row in a runner: `specs` (a folder or None), `row`, `folder`, `width` -> `files`, `broken`, and
    `report`, pieces of text with their styles.

    Returns only `refused`, a sentence, if the row cannot be explained.
    """
    # Imported here because they import torch, which would slow down every other command.
    from megamoe.explain.explain import ExplainError, explain, write_files
    from megamoe.explain.tables import report

    told = request.told
    row, folder = Row(*told["row"]), Path(told["folder"])
    try:
        found = explain(load_specs(told["specs"])[row.op], row)
        files = write_files(found, folder)
    except (ExplainError, RecordError) as error:
        return Frame({"refused": str(error)})
    page = Terminal(file=StringIO(), width=told["width"], highlight=False)
    pieces = [(one.text, str(one.style or "")) for one in page.render(report(found), page.options)]
    return Frame({"files": list(map(str, files)), "report": pieces, "broken": bool(found.violation)})
