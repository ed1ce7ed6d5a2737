"""Asks an H200 what whole programs leave.

As the device machine has neither a network nor the virtual machine, there are three steps:
`python -m conformance.silicon.whole.on_device pack FOLDER` writes what travels; there,
`python3 FOLDER/ask.py FOLDER OUT whole` runs the program of every form and writes OUT/whole.npz, and
`python3 FOLDER/ask.py FOLDER OUT drawn FIRST COUNT [SECONDS]` draws, assembles and runs random programs and writes the
hashes of what they leave to OUT/hashes-FIRST.npz; with `--show` the outputs themselves;
`python -m conformance.silicon.whole.merge OUT` takes OUT's answers into answers.npz and drawn.npz.
ask.py is this file: it needs NumPy, ptxas and the driver alone. A program that fails or hangs ends its process, as the
driver has no way back from that; another process goes on behind it.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

MODULE = 24
WHOLE_BYTES = 65536
"""Of the output of a whole program."""
LEVELS = ("-O3", "-O0", "-O1", "-O0")
"""Of ptxas, a module of drawn programs after the other."""
DRAWN_MODULE = 250
PLACE = struct.pack("<Q", 0x7F4000000000)
"""The address that maps are encoded with; the device's own is put in its place."""


def pack(folder: Path) -> None:
    """PTX of the forms with what each is launched on, the inputs, the maps, and the drawer of programs."""
    from conformance.silicon.whole import drawn
    from conformance.silicon.whole.forms import answered, programs
    from conformance.silicon.whole.on_machine import drawn_map, encoded
    from conformance.silicon.whole.programs import given

    folder.mkdir(parents=True, exist_ok=True)
    every = [one for one in programs() if not answered(one)]
    parts = [every[at : at + MODULE] for at in range(0, len(every), MODULE)]
    base = struct.unpack("<Q", PLACE)[0]
    for number, part in enumerate(parts):
        (folder / f"part-{number}.ptx").write_text(drawn.HEAD + "\n".join(one.text for one in part))
    rows = [
        [
            {
                "entry": one.entry,
                "given": one.given,
                "threads": one.threads,
                "grid": one.grid,
                "map": encoded(one.tensor_map, base).hex(),
                "over_output": bool(one.tensor_map and one.tensor_map.over_output),
            }
            for one in part
        ]
        for part in parts
    ]
    (folder / "whole.json").write_text(json.dumps(rows))
    names = sorted({one.given for one in every} | {"bits"})
    np.savez_compressed(folder / "inputs.npz", allow_pickle=False, **{name: given(name) for name in names})
    maps = [encoded(drawn_map(number), base).hex() for number in range(len(drawn.MAPS))]
    (folder / "maps.json").write_text(json.dumps(maps))
    (folder / "drawn.py").write_text(Path(drawn.__file__).read_text("utf-8"))
    (folder / "ask.py").write_text(Path(__file__).read_text("utf-8"))


def hashed(output: Any) -> int:
    """Of a drawn program's output: the sum of its 64-bit words, word j times 2 j + 1, modulo 2^64."""
    words = output.view(np.uint64)
    weights = 2 * np.arange(words.size, dtype=np.uint64) + np.uint64(1)
    return int((words * weights).sum(dtype=np.uint64))


def drawer_of(file: Path) -> int:
    """What tells one drawer of programs from another: a number names a program of one of them alone."""
    return crc32(file.read_bytes())


def level_of(number: int) -> str:
    """The level that ptxas assembles program `number` of drawn ones with."""
    return LEVELS[number // DRAWN_MODULE % len(LEVELS)]


def _assemble(source: Path, cubin: Path, level: str = "-O3") -> str:
    done = subprocess.run(
        ["ptxas", level, "-arch=sm_90a", "-o", str(cubin), str(source)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"{source.name}: {done.stderr[:2000]}"


class Device:
    """The driver, through ctypes. A launch that does not end in PATIENCE seconds, a thousand times what any takes, counts as hung."""  # noqa: E501

    PATIENCE = 0.4

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.checked(self.driver.cuInit(0))
        self.checked(self.driver.cuDeviceGet(ctypes.byref(device), 0))
        self.checked(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self.checked(self.driver.cuCtxSetCurrent(context))

    def memory(self, size: int, data: Any = None) -> int:
        """The address of `size` bytes on the device."""
        place = ctypes.c_uint64()
        self.checked(self.driver.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(size)))
        if data is not None:
            self.checked(self.driver.cuMemcpyHtoD_v2(place, ctypes.c_char_p(data.tobytes()), ctypes.c_size_t(size)))
        return place.value

    def load(self, cubin: Path) -> ctypes.c_void_p:
        """The module of a cubin."""
        module = ctypes.c_void_p()
        self.checked(self.driver.cuModuleLoadData(ctypes.byref(module), cubin.read_bytes()))
        return module

    def left(
        self, module: ctypes.c_void_p, row: dict[str, Any], given: int, output: int, tensor_map: bytes, size: int
    ) -> Any:
        """What the program of `row` leaves in `size` zeroed bytes at `output`. RuntimeError if it fails or hangs."""
        function = ctypes.c_void_p()
        self.checked(self.driver.cuModuleGetFunction(ctypes.byref(function), module, row["entry"].encode()))
        self.checked(self.driver.cuMemsetD8_v2(ctypes.c_uint64(output), 0, ctypes.c_size_t(size)))
        values = [ctypes.c_uint64(given), ctypes.c_uint64(output), (ctypes.c_char * 128).from_buffer_copy(tensor_map)]
        params = (ctypes.c_void_p * 3)(*[ctypes.cast(ctypes.pointer(one), ctypes.c_void_p) for one in values])
        self.checked(
            self.driver.cuLaunchKernel(function, row.get("grid", 1), 1, 1, row["threads"], 1, 1, 0, None, params, None)
        )
        begun = time.monotonic()
        while (code := self.driver.cuStreamQuery(None)) == 600:
            if time.monotonic() - begun > self.PATIENCE:
                raise RuntimeError("it hangs")
        self.checked(code)
        found = np.empty(size, np.uint8)
        self.checked(
            self.driver.cuMemcpyDtoH_v2(
                ctypes.c_void_p(found.ctypes.data), ctypes.c_uint64(output), ctypes.c_size_t(size)
            )
        )
        return found

    def checked(self, code: int) -> None:
        """RuntimeError with the driver's name of an error."""
        if code:
            name = ctypes.c_char_p()
            self.driver.cuGetErrorName(code, ctypes.byref(name))
            raise RuntimeError((name.value or b"an unknown error").decode())


def _placed(tensor_map: str, address: int) -> bytes:
    raw = bytes.fromhex(tensor_map)
    return struct.pack("<Q", address) + raw[8:] if raw[:8] == PLACE else raw


def _until_done(command: list[str], failed: Path, seconds: float, most: int) -> None:
    """Run `command` again and again until it ends well: it ends at once after a program that failed, of which it writes
    a line to `failed`, and does not run that one again."""
    begun = time.monotonic()
    for _ in range(most):
        try:
            left = max(seconds - (time.monotonic() - begun), 1)
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            print("out of time", flush=True)
            return
        if done.returncode == 0:
            return
        if done.returncode != 3:
            print(done.stderr[-1500:], flush=True)
            return
    print(f"more than {most} programs failed: see {failed.name}", flush=True)


def _failing(failed: Path, entry: str, error: RuntimeError) -> None:
    with failed.open("a") as file:
        file.write(f"{entry}: {error}\n")
    print(f"{entry}: {error}", flush=True)
    os._exit(3)


def _skipped(failed: Path) -> set[str]:
    return {line.split(":")[0] for line in failed.read_text().splitlines()} if failed.exists() else set()


def _run_whole(folder: Path, out: Path) -> None:
    """Programs that have no file of results yet, one after the other; ends at the first that fails."""
    device, failed = Device(), out / "whole-failed.txt"
    inputs = {name: device.memory(array.size, array) for name, array in np.load(folder / "inputs.npz").items()}
    output, skipped = device.memory(WHOLE_BYTES), _skipped(failed)
    for number, part in enumerate(json.loads((folder / "whole.json").read_text())):
        module = None
        for row in part:
            done = out / "raw" / f"{row['entry']}.npy"
            if done.exists() or row["entry"] in skipped:
                continue
            over = output if row["over_output"] else inputs[row["given"]]
            try:
                module = module or device.load(out / f"part-{number}.cubin")
                np.save(
                    done, device.left(module, row, inputs[row["given"]], output, _placed(row["map"], over), WHOLE_BYTES)
                )
            except RuntimeError as error:
                _failing(failed, row["entry"], error)
    os._exit(0)


def ask_whole(folder: Path, out: Path) -> None:
    """Every form's program; OUT/whole.npz has the outputs by entry, whole-failed.txt those that failed."""
    (out / "raw").mkdir(exist_ok=True)
    parts = json.loads((folder / "whole.json").read_text())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = [(folder / f"part-{number}.ptx", out / f"part-{number}.cubin") for number in range(len(parts))]
        wrong = [said for said in pool.map(lambda task: _assemble(*task), tasks) if said]
    if wrong:
        raise RuntimeError("\n".join(wrong))
    _until_done([sys.executable, __file__, str(folder), str(out), "run-whole"], out / "whole-failed.txt", 60, 20)
    found = {file.stem: np.load(file) for file in (out / "raw").glob("*.npy")}
    np.savez_compressed(out / "whole.npz", allow_pickle=False, **found)
    for file in [*out.glob("part-*.cubin"), *(out / "raw").iterdir()]:
        file.unlink()
    (out / "raw").rmdir()
    print(f"{len(found)} of {sum(map(len, parts))} programs of forms answered")


def _assembled(folder: Path, out: Path, first: int, count: int) -> str:
    """A module of drawn programs, and what to launch, in OUT/raw; what ptxas had against it."""
    sys.path.insert(0, str(folder))
    import drawn  # type: ignore[import-not-found]

    every = [drawn.drawn(number) for number in range(first, first + count)]
    source, cubin = out / "raw" / f"{first}.ptx", out / "raw" / f"{first}.part"
    source.write_text("\n".join([drawn.HEAD + drawn.FUNCTIONS, *(one.text for one in every)]))
    said = _assemble(source, cubin, level_of(first))
    source.unlink()
    rows = [{"entry": one.entry, "threads": one.threads, "map": one.map_number} for one in every]
    (out / "raw" / f"{first}.json").write_text(json.dumps(rows))
    if not said:
        cubin.rename(out / "raw" / f"{first}.cubin")
    return said


def _run_drawn(folder: Path, out: Path, *, show: bool) -> None:
    """Modules as they are assembled, until OUT/raw/all is there and none is left."""
    sys.path.insert(0, str(folder))
    import drawn  # type: ignore[import-not-found]

    device, failed = Device(), out / "drawn-failed.txt"
    bits = np.load(folder / "inputs.npz")["bits"]
    given, output, skipped = device.memory(bits.size, bits), device.memory(drawn.OUTPUT_BYTES), _skipped(failed)
    maps = [_placed(one, given) for one in json.loads((folder / "maps.json").read_text())]
    while True:
        last = (out / "raw" / "all").exists()
        for cubin in sorted((out / "raw").glob("*.cubin")):
            module, hashes, shown = device.load(cubin), list[int](), dict[str, Any]()
            for row in json.loads(cubin.with_suffix(".json").read_text()):
                if row["entry"] in skipped:
                    hashes.append(0)
                    continue
                try:
                    found = device.left(module, row, given, output, maps[row["map"]], drawn.OUTPUT_BYTES)
                except RuntimeError as error:
                    _failing(failed, row["entry"], error)
                    return
                hashes.append(hashed(found))
                if show:
                    shown[row["entry"]] = found
            np.save(cubin.with_suffix(".npy"), np.array(hashes, np.uint64))
            if show:
                np.savez_compressed(out / f"shown-{cubin.stem}.npz", allow_pickle=False, **shown)
            device.driver.cuModuleUnload(module)
            cubin.unlink()
        if last:
            os._exit(0)
        time.sleep(0.05)


def ask_drawn(folder: Path, out: Path, first: int, count: int, seconds: float, *, show: bool) -> None:
    """`count` programs from number `first` on, a module at a time, for about `seconds`; OUT/hashes-FIRST.npz has the
    hashes by the number of the first program of a module, 0 for a program that failed, of drawn-failed.txt."""
    from concurrent.futures import ProcessPoolExecutor
    from threading import Thread

    begun = time.monotonic()
    raw = out / "raw"
    raw.mkdir(exist_ok=True)
    command = [sys.executable, __file__, str(folder), str(out), "run-drawn", *(["--show"] if show else [])]
    runner = Thread(target=_until_done, args=(command, out / "drawn-failed.txt", seconds + 12, 40))
    runner.start()
    step = min(DRAWN_MODULE, count)
    with ProcessPoolExecutor(max((os.cpu_count() or 2) - 1, 1)) as pool:
        waiting = [
            pool.submit(_assembled, folder, out, at, min(step, first + count - at))
            for at in range(first, first + count, step)
        ]
        for one in waiting:
            if time.monotonic() - begun > seconds:
                one.cancel()
            elif said := one.result():
                print(said, flush=True)
    (raw / "all").touch()
    runner.join()
    hashes = {file.stem: np.load(file) for file in sorted(raw.glob("*.npy"))}
    drawer = np.array(drawer_of(folder / "drawn.py"), np.uint32)
    np.savez_compressed(out / f"hashes-{first}.npz", allow_pickle=False, drawer=drawer, **hashes)
    for file in raw.iterdir():
        file.unlink()
    raw.rmdir()
    print(f"{sum(map(len, hashes.values()))} drawn programs ran in {time.monotonic() - begun:.0f} s")


def main(arguments: list[str]) -> None:
    """See above."""
    show = "--show" in arguments
    words = [one for one in arguments if one != "--show"]
    if words[0] == "pack":
        pack(Path(words[1]))
    elif words[2] == "run-whole":
        _run_whole(Path(words[0]), Path(words[1]))
    elif words[2] == "run-drawn":
        _run_drawn(Path(words[0]), Path(words[1]), show=show)
    elif words[2] == "whole":
        ask_whole(Path(words[0]), Path(words[1]))
    else:
        seconds = float(words[5]) if len(words) > 5 else 1e9
        ask_drawn(Path(words[0]), Path(words[1]), int(words[3]), int(words[4]), seconds, show=show)


if __name__ == "__main__":
    main(sys.argv[1:])
