"""ptxas as a check: does this PTX assemble for its target, and what does it cost.

The assembler comes from the pip package nvidia-cuda-nvcc (no CUDA toolkit needed) or from PATH.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megamoe.backend import Target, UnsupportedError

PTXAS_SECONDS = 120
COMPLAINTS = ("warning", "Potential Performance Loss")
"""ptxas reports an ignored setmaxnreg or a serialised MMA as mere information; to us it is a warning."""


class AssemblyError(Exception):
    """ptxas refused the PTX, or warned; the text is what it said."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """What ptxas made of one module with one entry. `spill_*`, `stack`, `static_smem` and `code_size` in bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    code_size: int
    cubin: bytes


def find_ptxas() -> Path:
    """The assembler's path. Raises UnsupportedError when this machine has none."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / "bin" / "ptxas"
        if candidate.is_file():
            return candidate
    on_path = shutil.which("ptxas")
    if on_path is None:
        raise UnsupportedError("there is no ptxas here: install megamoe[assembler] or put a CUDA toolkit's bin on PATH")
    return Path(on_path)


def assemble(ptx: str, target: Target) -> Assembly:
    """Assembles `ptx`, warnings being errors. Raises AssemblyError, or UnsupportedError without an assembler."""
    ptxas = find_ptxas()
    with tempfile.TemporaryDirectory(prefix="megamoe-ptxas-") as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(ptxas), "-arch", target, "-v", "--warning-as-error", "-o", str(cubin), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PTXAS_SECONDS, check=False)
        except subprocess.TimeoutExpired as expired:
            raise AssemblyError(f"ptxas was still busy after {PTXAS_SECONDS} s") from expired
        said = (done.stdout + done.stderr).replace(f"{source}, ", "").strip()
        if done.returncode != 0:
            raise AssemblyError(f"ptxas exited with {done.returncode}: {said}")
        complaint = next((sign for sign in COMPLAINTS if sign in said), None)
        if complaint:
            raise AssemblyError(f"ptxas said {complaint!r}: {said}")
        return _read_report(said, cubin.read_bytes())


def _read_report(said: str, cubin: bytes) -> Assembly:
    def number(pattern: str, absent: int | None = None) -> int:
        found = re.search(pattern, said)
        if found is None and absent is None:
            raise AssemblyError(f"ptxas did not report {pattern!r}; it said: {said}")
        return int(found.group(1)) if found else absent or 0

    return Assembly(
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        static_smem=number(r"(\d+) bytes smem", absent=0),
        code_size=_text_bytes(cubin),
        cubin=cubin,
    )


def _text_bytes(cubin: bytes) -> int:
    """Total size of the `.text.*` sections of a 64-bit little-endian ELF file (System V gABI, section headers)."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * entry_size) for index in range(count)]
    names_offset = headers[names_index][4]
    total = 0
    for name, _kind, _flags, _address, _offset, size in headers:
        start = names_offset + name
        if cubin[start : cubin.index(b"\0", start)].startswith(b".text."):
            total += size
    return total
