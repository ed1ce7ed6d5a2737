"""`megamoe export`: writes records in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megamoe.cli.options import Specs, console
from megamoe.records.files import read_records, write_folder
from megamoe.records.lines import RecordError
from megamoe.spec.load import load_specs

export = typer.Typer(no_args_is_help=True, help="Writes records in the formats of others.")


@export.callback()
def _formats() -> None:
    """Writes records in the formats of others."""


@export.command("flashinfer")
def export_flashinfer(
    records: Annotated[list[Path], typer.Argument(metavar="RECORDS", help="Record files.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the dataset.")],
    temperature: Annotated[
        Literal["cold", "hot"], typer.Option("--temperature", help="Of the L2, for the times.")
    ] = "cold",
    specs: Specs = None,
) -> None:
    """Writes a dataset of flashinfer-bench: definitions, workloads, solutions and traces.

    Only rows that passed have times. Exit status 2 if nothing can be exported; then nothing is written.
    """
    from megamoe.export.flashinfer.dataset import ExportError, dataset_of, files_of

    try:
        dataset = dataset_of([read_records(path) for path in records], load_specs(specs), temperature)
        write_folder(out, dict(files_of(dataset)), "the dataset")
    except ExportError as error:
        raise RecordError(str(error)) from error
    terminal = console()
    terminal.print(
        f"{out}: {len(dataset.definitions)} definitions, {len(dataset.workloads)} workloads, "
        f"{len(dataset.solutions)} solutions, {len(dataset.traces)} traces",
        markup=False,
    )
    for why, number in dataset.left_out.most_common():
        terminal.print(f"{number} rows have no trace: {why}", markup=False)
