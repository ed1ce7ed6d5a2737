"""Runs programs of every lane-wise spelling on an H200: `python3 FOLDER/ask.py FOLDER OUT`; see every.py.

ask.py is this file: it needs only NumPy, torch, ptxas and the driver. OUT/every.npz has for each spelling the identity
of what ran, and then the checksums of its results. OUT/differing.npz has all results of a spelling whose checksums are
not the machine's.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np

BLOCK = 128
CHECKED = 512
"""Results that share a checksum."""


def checksums(results: Any) -> Any:
    """uint32 [n / CHECKED] of uint64 [n]."""
    return np.array([crc32(part.tobytes()) for part in results.reshape(-1, CHECKED)], np.uint32)


class Asked:
    """The device, the programs' operands on it, and one launch a program."""

    def __init__(self, operands: Any) -> None:
        import torch

        self.torch = torch
        self.driver = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device="cuda")
        self.sources = {
            name: [torch.from_numpy(row.view(np.int64).copy()).cuda() for row in operands[name] if row.size]
            for name in operands.files
        }

    def checked(self, code: int, doing: str) -> None:
        """Raises RuntimeError for an error of the driver."""
        if code:
            raise RuntimeError(f"{doing}: the driver returned {code}")

    def load(self, cubin: Path) -> ctypes.c_void_p:
        """Loads the module of a cubin."""
        module = ctypes.c_void_p()
        self.checked(self.driver.cuModuleLoadData(ctypes.byref(module), cubin.read_bytes()), f"loading {cubin.name}")
        return module

    def results(self, module: ctypes.c_void_p, entry: str, sources: str, count: int) -> Any:
        """uint64 [count]: what the entry makes of the operands `sources`."""
        function = ctypes.c_void_p()
        code = self.driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode())
        self.checked(code, f"looking up {entry}")
        result = self.torch.zeros(count, dtype=self.torch.int64, device="cuda")
        values = [ctypes.c_uint64(tensor.data_ptr()) for tensor in (*self.sources[sources], result)]
        params = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values])
        code = self.driver.cuLaunchKernel(function, count // BLOCK, 1, 1, BLOCK, 1, 1, 0, None, params, None)
        self.checked(code, f"launching {entry}")
        self.torch.cuda.synchronize()
        return result.cpu().numpy().view(np.uint64)


def _assembled(packed: Path, made: Path) -> Path:
    source, cubin = made / packed.stem, made / f"{packed.stem}.cubin"
    source.write_bytes(gzip.decompress(packed.read_bytes()))
    subprocess.run(["ptxas", "-arch=sm_90a", "-o", str(cubin), str(source)], check=True)
    return cubin


def ask(folder: Path, out: Path, device: Any) -> str:
    """Assembles and runs the programs on `device`, an Asked; returns a sentence on each that differs and on all."""
    parts, mine = json.loads((folder / "entries.json").read_text()), np.load(folder / "machine.npz")
    answers: dict[str, Any] = {}
    differing: dict[str, Any] = {}
    said: list[str] = []
    with TemporaryDirectory() as made, ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = [folder / f"part-{number}.ptx.gz" for number in range(len(parts))]
        for cubin, entries in zip(pool.map(lambda one: _assembled(one, Path(made)), sources), parts, strict=True):
            module = device.load(cubin)
            for entry, opcode, operands, count, identity in entries:
                results = device.results(module, entry, operands, count)
                checks = checksums(results)
                answers[opcode] = np.array([identity, *checks], np.uint32)
                unlike = int(np.count_nonzero(checks != mine[opcode]))
                if unlike:
                    differing[opcode] = results.astype(np.min_scalar_type(int(results.max())))
                    said.append(f"{opcode}: {unlike} of {len(mine[opcode])} parts differ from the machine's")
    np.savez_compressed(out / "every.npz", allow_pickle=False, **answers)
    np.savez_compressed(out / "differing.npz", allow_pickle=False, **differing)
    values = sum(row[3] for entries in parts for row in entries)
    return "\n".join([*said, f"{len(answers)} spellings, {values} values answered; {len(said)} spellings differ"])


if __name__ == "__main__":
    print(ask(Path(sys.argv[1]), Path(sys.argv[2]), Asked(np.load(Path(sys.argv[1], "operands.npz")))))
    print(subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-1])
