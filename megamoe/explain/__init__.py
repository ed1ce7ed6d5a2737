"""What a kernel does, as pictures and tables, from its recorded run."""

import re
from pathlib import Path

FOLDER = Path("results/explain")


def folder_of(case: str, backend: str, target: str) -> Path:
    """The folder that `megamoe explain` writes and the report looks for; characters that a file name lacks become _."""
    return FOLDER / re.sub(r"[^\w.=-]+", "_", f"{case}-{backend}-{target}")
