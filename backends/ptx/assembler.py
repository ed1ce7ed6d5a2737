"""ptxas as a check: whether PTX assembles for its target, and what resources it uses.

The assembler comes from the pip package nvidia-cuda-nvcc (no CUDA toolkit needed) or from PATH.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
from pathlib import Path

from megamoe.contract import Target, UnsupportedError
from megamoe.contract.assembly import Assembly
from megamoe.contract.scratch import scratch_folder

MAX_PTXAS_SECONDS = 120
COMPLAINTS = ("warning", "Potential Performance Loss")
"""ptxas reports an ignored setmaxnreg or a serialised MMA only as information; treat both as warnings."""


class AssemblyError(Exception):
    """ptxas refused the PTX or warned about it. The message quotes ptxas."""


def find_ptxas() -> Path:
    """The assembler's path. Raises UnsupportedError if this machine has none."""
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
    """Assembles `ptx`; a warning is an error. Raises AssemblyError, or UnsupportedError without an assembler."""
    ptxas = find_ptxas()
    with scratch_folder("ptxas") as folder:
        source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
        source.write_text(ptx)
        command = [str(ptxas), "-arch", target, "-v", "--warning-as-error", "-o", str(cubin), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_PTXAS_SECONDS, check=False)
        except subprocess.TimeoutExpired as expired:
            raise AssemblyError(f"ptxas was still busy after {MAX_PTXAS_SECONDS} s") from expired
        said = (done.stdout + done.stderr).replace(f"{source}, ", "").strip()
        if done.returncode != 0:
            raise AssemblyError(f"ptxas exited with {done.returncode}: {said}")
        complaint = next((sign for sign in COMPLAINTS if sign in said), None)
        if complaint:
            raise AssemblyError(f"ptxas said {complaint!r}: {said}")
        return _read_report(said, cubin.read_bytes())


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")


def _read_report(said: str, cubin: bytes) -> Assembly:
    """Figures from the output of `ptxas -v`, one entry after the other."""
    code = _text_bytes(cubin)
    _, *reports = _ENTRY.split(said)
    if not reports:
        raise AssemblyError(f"ptxas reported no entry function; it said: {said}")
    entries = {name: _read_entry(name, said) for name, said in zip(reports[::2], reports[1::2], strict=True)}
    return Assembly(
        **{figure: max(entry[figure] for entry in entries.values()) for figure in _PATTERNS},
        code_size=sum(code.values()),
        cubin=cubin,
        kernels={
            name: {
                "registers": entry["registers"],
                "spill_bytes": entry["spill_stores"] + entry["spill_loads"],
                "stack_bytes": entry["stack"],
                "smem_bytes": entry["static_smem"],
                "code_bytes": code.get(name, 0),
            }
            for name, entry in sorted(entries.items())
        },
    )


_PATTERNS = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "static_smem": r"(\d+) bytes smem",
}
_ABSENT_IS_NONE = ("static_smem",)


def _read_entry(name: str, said: str) -> dict[str, int]:
    figures: dict[str, int] = {}
    for figure, pattern in _PATTERNS.items():
        found = re.search(pattern, said)
        if found is None and figure not in _ABSENT_IS_NONE:
            raise AssemblyError(f"ptxas did not report {pattern!r} of {name}; it said: {said}")
        figures[figure] = int(found.group(1)) if found else 0
    return figures


def _text_bytes(cubin: bytes) -> dict[str, int]:
    """Sizes of the `.text.NAME` sections of a 64-bit little-endian ELF file (System V gABI, section headers)."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * entry_size) for index in range(count)]
    names_offset = headers[names_index][4]
    sizes: dict[str, int] = {}
    for name, _kind, _flags, _address, _offset, size in headers:
        start = names_offset + name
        section = cubin[start : cubin.index(b"\0", start)].decode()
        if section.startswith(".text."):
            sizes[section.removeprefix(".text.")] = size
    return sizes
