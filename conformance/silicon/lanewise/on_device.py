"""Runs every kept program without an answer on an H200, and writes the answers.

The device machine has neither a network nor the virtual machine, so there are three steps:
    python -m conformance.silicon.lanewise.on_device pack FOLDER    # here: writes PTX and operands
    python3 FOLDER/ask.py FOLDER OUT                                # there: assembles, launches; OUT/answers.npz
    python -m conformance.silicon.lanewise.on_device merge OUT      # here: adds those answers to the ones here

ask.py is this file: it needs only NumPy, torch and the driver.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BLOCK = 128
PROGRAMS_A_MODULE = 32
ANSWERS = Path(__file__).parent / "answers.npz"


def pack(folder: Path) -> None:
    """Writes PTX modules, their entries by module, and the operands of each."""
    from conformance.silicon.lanewise.programs import HEAD, kept, kernel, operands

    folder.mkdir(parents=True, exist_ok=True)
    answered = set(np.load(ANSWERS).files) if ANSWERS.exists() else set()
    programs = [program for program in kept() if program.opcode not in answered]
    arrays = {program.entry: np.stack([*operands(program)] or [np.zeros(0, np.uint64)]) for program in programs}
    np.savez_compressed(folder / "operands.npz", allow_pickle=False, **arrays)
    parts = [programs[at : at + PROGRAMS_A_MODULE] for at in range(0, len(programs), PROGRAMS_A_MODULE)]
    for number, part in enumerate(parts):
        (folder / f"part-{number}.ptx").write_text(HEAD + "\n".join(map(kernel, part)))
    entries = [[[program.entry, program.opcode] for program in part] for part in parts]
    (folder / "entries.json").write_text(json.dumps(entries))
    (folder / "ask.py").write_text(Path(__file__).read_text("utf-8"))


def merge(out: Path) -> None:
    """Adds the answers of OUT to the ones here, and lists their opcodes as witnessed."""
    from backends.vm.coverage import MEASURED

    answers = {**dict(np.load(ANSWERS)), **dict(np.load(out / "answers.npz"))}
    np.savez_compressed(ANSWERS, allow_pickle=False, **answers)
    listed = json.loads(MEASURED.read_text("utf-8"))
    listed["lanewise/answers.npz"] = sorted(answers)
    MEASURED.write_text(json.dumps(listed, indent=1) + "\n", "utf-8")


def narrowed(result: np.ndarray) -> np.ndarray:
    """Casts to the narrowest unsigned type that holds every value."""
    return result.astype(np.min_scalar_type(int(result.max())))


def ask(folder: Path, out: Path) -> None:
    """Runs the programs on a machine with a device: one launch a program, 512 threads."""
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    torch.zeros(1, device="cuda")

    def assemble(number: int) -> Path:
        cubin = out / f"part-{number}.cubin"
        subprocess.run(["ptxas", "-arch=sm_90a", "-o", str(cubin), str(folder / f"part-{number}.ptx")], check=True)
        return cubin

    def checked(code: int, doing: str) -> None:
        if code:
            raise RuntimeError(f"{doing}: the driver returned {code}")

    parts = json.loads((folder / "entries.json").read_text())
    operands = np.load(folder / "operands.npz")
    answers: dict[str, np.ndarray] = {}
    with ThreadPoolExecutor(16) as pool:
        cubins = list(pool.map(assemble, range(len(parts))))
    for cubin, entries in zip(cubins, parts, strict=True):
        module = ctypes.c_void_p()
        checked(driver.cuModuleLoadData(ctypes.byref(module), cubin.read_bytes()), f"loading {cubin.name}")
        for entry, opcode in entries:
            function = ctypes.c_void_p()
            checked(driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"looking up {entry}")
            sources = [torch.from_numpy(row.view(np.int64).copy()).cuda() for row in operands[entry] if row.size]
            result = torch.zeros(512, dtype=torch.int64, device="cuda")
            values = [ctypes.c_uint64(tensor.data_ptr()) for tensor in (*sources, result)]
            params = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values])
            grid = result.numel() // BLOCK
            code = driver.cuLaunchKernel(function, grid, 1, 1, BLOCK, 1, 1, 0, None, params, None)
            checked(code, f"launching {entry}")
            torch.cuda.synchronize()
            answers[opcode] = narrowed(result.cpu().numpy().view(np.uint64))
        cubin.unlink()
    np.savez_compressed(out / "answers.npz", allow_pickle=False, **answers)
    said = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True).stdout.split()
    print(f"{len(answers)} programs answered by {torch.cuda.get_device_name()}, ptxas {said[-1]}")


if __name__ == "__main__":
    if sys.argv[1] == "pack":
        pack(Path(sys.argv[2]))
    elif sys.argv[1] == "merge":
        merge(Path(sys.argv[2]))
    else:
        ask(Path(sys.argv[1]), Path(sys.argv[2]))
