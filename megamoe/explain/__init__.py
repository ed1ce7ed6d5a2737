"""What a kernel does, as pictures and tables, from its recorded run."""

from pathlib import Path

from megamoe.contract import file_name

FOLDER = Path("results/explain")


def folder_of(case: str, backend: str, target: str) -> Path:
    """The folder that `megamoe explain` writes and the report looks for."""
    return FOLDER / file_name(f"{case}-{backend}-{target}")
