"""Runs whole programs on an H200 and records their outputs.

The device machine has neither a network nor the virtual machine, so there are three steps:
    python -m conformance.silicon.whole.on_device pack FOLDER    # here: writes what travels
    python3 FOLDER/ask.py FOLDER OUT whole                       # there: runs every form's program; OUT/whole.npz
    python3 FOLDER/ask.py FOLDER OUT drawn FIRST COUNT [SECONDS] # there: random programs; OUT/hashes.npz
    python -m conformance.silicon.whole.merge OUT                # here: takes both into answers.npz and drawn.npz

`.. drawn` draws, assembles and runs random programs without an answer and writes the hashes of their outputs. It is two
steps, which can be taken alone: `.. assemble FIRST COUNT SECONDS` needs no GPU, only cores, and `.. launch SECONDS`
runs what is assembled.

`.. tell SECONDS NUMBER ..` writes OUT/told/NUMBER.npz: the full outputs of random programs at each level of ptxas, and
the outputs of their cuts (cuts.py); parted.py reads it. `.. levels SECONDS NUMBER ..` leaves the cuts out: another
ptxas, first on the path, answers in seconds.

ask.py is this file: it needs only NumPy, ptxas and the driver. A program that fails or hangs ends its process, because
the driver cannot recover from that; another process goes on with the rest.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from inspect import getfile
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Thread
from typing import Any
from zlib import crc32

import numpy as np

MODULE = 24
WHOLE_BYTES = 65536
"""Bytes of the output of a whole program."""
LEVELS = ("-O3", "-O0", "-O1", "-O0")
"""Levels of ptxas, by turns for successive modules of drawn programs."""
DRAWN_MODULE = 250
LAUNCHERS = 3
"""Processes that launch random programs: while one waits for a hanging program or restarts, the others go on."""
PLACE = struct.pack("<Q", 0x7F4000000000)
"""The address that maps are encoded with; the device's own replaces it."""


def pack(folder: Path) -> None:
    """Writes the forms' PTX with the launch of each, the inputs, the maps, and the drawer of programs."""
    from conformance.silicon.whole import cuts, drawn, smallest
    from conformance.silicon.whole.forms import answered, programs
    from conformance.silicon.whole.merge import DRAWN, DrawnAnswers
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
    (folder / "held.json").write_text(json.dumps(sorted(DrawnAnswers.read(DRAWN).modules)))
    for module in (drawn, cuts, smallest):
        file = Path(getfile(module))
        (folder / file.name).write_text(file.read_text("utf-8"))
    (folder / "ask.py").write_text(Path(__file__).read_text("utf-8"))


@cache
def _weights(count: int) -> Any:
    """`count` odd 64-bit numbers, as splitmix64 draws them."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31) | np.uint64(1)


def hashed(output: Any) -> int:
    """Hash of a drawn program's output: the sum of its 32-bit words, each times a 64-bit number, modulo 2^64."""
    words = output.view(np.uint32).astype(np.uint64)
    return int((words * _weights(words.size)).sum(dtype=np.uint64))


def drawer_of(file: Path) -> int:
    """Identifies a version of drawn.py: a number names a program of one version only."""
    return crc32(file.read_bytes())


def level_of(number: int) -> str:
    """The level at which ptxas assembles drawn program `number`."""
    return LEVELS[number // DRAWN_MODULE % len(LEVELS)]


def _assemble(source: Path, cubin: Path, level: str = "-O3") -> str:
    done = subprocess.run(
        ["ptxas", level, "-arch=sm_90a", "-o", str(cubin), str(source)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"{source.name}: {done.stderr[:2000]}"


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_uint32), ("unused", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint32),
    )


CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""


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
        """Allocates `size` bytes on the device and returns their address."""
        place = ctypes.c_uint64()
        self.checked(self.driver.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(size)))
        if data is not None:
            self.write(place.value, data.tobytes())
        return place.value

    def write(self, address: int, data: bytes) -> None:
        """Copies `data` to the device."""
        size = ctypes.c_size_t(len(data))
        self.checked(self.driver.cuMemcpyHtoD_v2(ctypes.c_uint64(address), ctypes.c_char_p(data), size))

    def read(self, address: int, size: int) -> Any:
        """Returns the bytes at `address`: uint8 [size]."""
        found = np.empty(size, np.uint8)
        place = ctypes.c_void_p(found.ctypes.data)
        self.checked(self.driver.cuMemcpyDtoH_v2(place, ctypes.c_uint64(address), ctypes.c_size_t(size)))
        return found

    def load(self, cubin: Path) -> ctypes.c_void_p:
        """Loads the module of a cubin."""
        module = ctypes.c_void_p()
        self.checked(self.driver.cuModuleLoadData(ctypes.byref(module), cubin.read_bytes()))
        return module

    def compiled(self, source: str) -> tuple[ctypes.c_void_p, str]:
        """Loads the module of PTX. Returns it, and what ptxas says. RuntimeError if ptxas refuses."""
        with TemporaryDirectory() as folder:
            file, cubin = Path(folder, "source.ptx"), Path(folder, "source.cubin")
            file.write_text(source)
            command = ["ptxas", "-v", "-arch=sm_90a", "-o", str(cubin), str(file)]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise RuntimeError(made.stderr)
            return self.load(cubin), made.stdout + made.stderr

    def launch(
        self,
        module: ctypes.c_void_p,
        entry: str,
        ctas: int,
        threads: int,
        values: Iterable[Any],
        *,
        cluster: int | None = None,
    ) -> None:
        """Runs an entry to its end. `values`: its arguments as ctypes. `cluster`: CTAs of a cluster, as a launch
        attribute. RuntimeError if it fails or hangs."""
        function, config = ctypes.c_void_p(), LaunchConfig(grid=(ctas, 1, 1), block=(threads, 1, 1))
        self.checked(self.driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()))
        if cluster is not None:
            attribute = LaunchAttribute(CLUSTER_DIMENSION, 0, (cluster, 1, 1))
            config.attributes, config.attribute_count = ctypes.pointer(attribute), 1
        places = [ctypes.cast(ctypes.pointer(one), ctypes.c_void_p) for one in values]
        params = (ctypes.c_void_p * len(places))(*places)
        self.checked(self.driver.cuLaunchKernelEx(ctypes.byref(config), function, params, None))
        begun = time.monotonic()
        while (code := self.driver.cuStreamQuery(None)) == 600:
            if time.monotonic() - begun > self.PATIENCE:
                raise RuntimeError("it hangs")
        self.checked(code)

    def left(
        self, module: ctypes.c_void_p, row: dict[str, Any], given: int, output: int, tensor_map: bytes, size: int
    ) -> Any:
        """Returns the output of the program of `row` in `size` zeroed bytes at `output`. RuntimeError if it fails or
        hangs."""
        self.checked(self.driver.cuMemsetD8_v2(ctypes.c_uint64(output), 0, ctypes.c_size_t(size)))
        values = [ctypes.c_uint64(given), ctypes.c_uint64(output), (ctypes.c_char * 128).from_buffer_copy(tensor_map)]
        self.launch(module, row["entry"], row.get("grid", 1), row["threads"], values)
        return self.read(output, size)

    def checked(self, code: int) -> None:
        """Raises RuntimeError with the driver's name of an error."""
        if code:
            name = ctypes.c_char_p()
            self.driver.cuGetErrorName(code, ctypes.byref(name))
            raise RuntimeError((name.value or b"an unknown error").decode())


def ptxas_version() -> str:
    """The last line of what `ptxas --version` says."""
    said = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True).stdout
    return said.strip().splitlines()[-1]


def placed(tensor_map: str, address: int) -> bytes:
    """Returns an encoded map of a tensor at `address`."""
    raw = bytes.fromhex(tensor_map)
    return struct.pack("<Q", address) + raw[8:] if raw[:8] == PLACE else raw


def _until_done(command: list[str], failed: Path, seconds: float, most: int) -> None:
    """Runs `command` repeatedly until it succeeds. It exits right after a program that failed, with a line in `failed`,
    and then skips that program."""
    begun = time.monotonic()
    for _ in range(most):
        with TemporaryFile() as said:
            try:
                left = max(seconds - (time.monotonic() - begun), 1)
                done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=said, timeout=left, check=False)
            except subprocess.TimeoutExpired:
                print("out of time", flush=True)
                return
            if done.returncode == 0:
                return
            if done.returncode != 3:
                said.seek(0)
                print(said.read().decode(errors="replace")[-1500:], flush=True)
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
    """Runs programs without a file of results, one after the other; exits at the first that fails."""
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
                    done, device.left(module, row, inputs[row["given"]], output, placed(row["map"], over), WHOLE_BYTES)
                )
            except RuntimeError as error:
                _failing(failed, row["entry"], error)
    os._exit(0)


def ask_whole(folder: Path, out: Path) -> None:
    """Runs every form's program; OUT/whole.npz has the outputs by entry, whole-failed.txt the failed ones."""
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


def _cores() -> int:
    return max((os.cpu_count() or 2) - 1, 1)


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Not forked: threads of this process wait for launchers, and a fork would keep their locks and pipes."""
    return ProcessPoolExecutor(jobs, get_context("forkserver"))


def _assembled(folder: Path, raw: Path, name: str, every: Iterable[Any], level: str) -> str:
    """Writes module `name` of drawn programs, and its launches, to `raw`; returns ptxas's complaint."""
    sys.path.insert(0, str(folder))
    import drawn  # type: ignore[import-not-found]

    programs, source, cubin = list(every), raw / f"{name}.ptx", raw / f"{name}.part"
    source.write_text("\n".join([drawn.HEAD + drawn.FUNCTIONS, *(one.text for one in programs)]))
    said = _assemble(source, cubin, level)
    source.unlink()
    rows = [{"entry": one.entry, "threads": one.threads, "map": one.map_number} for one in programs]
    (raw / f"{name}.json").write_text(json.dumps(rows))
    if not said:
        cubin.rename(raw / f"{name}.cubin")
    return said


def _drawn_module(folder: Path, raw: Path, first: int, count: int) -> str:
    sys.path.insert(0, str(folder))
    import drawn  # type: ignore[import-not-found]

    if (raw / f"{first}.json").exists():
        return ""
    every = [drawn.drawn(number) for number in range(first, first + count)]
    return _assembled(folder, raw, str(first), every, level_of(first))


def _told_module(folder: Path, raw: Path, number: int, level: str, *, with_cuts: bool) -> str:
    """Assembles the program alone; at the level that it was drawn for, with its cuts before it."""
    sys.path.insert(0, str(folder))
    import cuts  # type: ignore[import-not-found]
    import drawn  # type: ignore[import-not-found]

    whole = drawn.drawn(number)
    every = [*cuts.every_cut(whole), whole] if with_cuts and level == level_of(number) else [whole]
    return _assembled(folder, raw, f"{number}{level}", every, level)


def _launch_all(folder: Path, out: Path, slot: int, *, show: bool) -> None:
    """Launches modules as they are assembled, until OUT/raw/all exists and none is left. Writes the hashes of each
    module's outputs, 0 for a failed program; with `show` the outputs themselves."""
    sys.path.insert(0, str(folder))
    import drawn  # type: ignore[import-not-found]

    raw, device, failed = out / "raw", Device(), out / "drawn-failed.txt"
    bits = np.load(folder / "inputs.npz")["bits"]
    given, output, skipped = device.memory(bits.size, bits), device.memory(drawn.OUTPUT_BYTES), _skipped(failed)
    maps = [placed(one, given) for one in json.loads((folder / "maps.json").read_text())]
    while True:
        last = (raw / "all").exists()
        for cubin in [*sorted(raw.glob(f"*.mine{slot}")), *sorted(raw.glob("*.cubin"))]:
            mine = cubin.with_suffix(f".mine{slot}")
            try:
                cubin.rename(mine)
            except FileNotFoundError:
                continue
            rows, module = json.loads(cubin.with_suffix(".json").read_text()), device.load(mine)
            left = np.zeros((len(rows), drawn.OUTPUT_BYTES), np.uint8)
            for at, row in enumerate(rows):
                try:
                    if row["entry"] not in skipped:
                        left[at] = device.left(module, row, given, output, maps[row["map"]], drawn.OUTPUT_BYTES)
                except RuntimeError as error:
                    _failing(failed, row["entry"], error)
            if show:
                np.save(raw / f"{cubin.stem}.part", left)
                (raw / f"{cubin.stem}.part.npy").rename(cubin.with_suffix(".npy"))
            else:
                gone = [row["entry"] in skipped for row in rows]
                hashes = [0 if lost else hashed(one) for one, lost in zip(left, gone, strict=True)]
                np.save(cubin.with_suffix(".npy"), np.array(hashes, np.uint64))
            device.driver.cuModuleUnload(module)
            mine.unlink()
        if last:
            os._exit(0)
        time.sleep(0.05)


@contextmanager
def _launching(folder: Path, out: Path, seconds: float, *, show: bool = False) -> Iterator[None]:
    """Runs launchers meanwhile, for `seconds` at most. At the end OUT/raw/all is written, and they run what is left."""
    every = out / "raw" / "all"
    every.unlink(missing_ok=True)
    threads: list[Thread] = []
    for slot in range(LAUNCHERS):
        command = [sys.executable, __file__, str(folder), str(out), "launch-all", str(slot), *["--show"][: int(show)]]
        threads.append(Thread(target=_until_done, args=(command, out / "drawn-failed.txt", seconds, 400)))
        threads[-1].start()
    yield
    every.touch()
    for one in threads:
        one.join()


def _until_assembled(waiting: list[Future[str]], seconds: float) -> None:
    begun = time.monotonic()
    for one in waiting:
        if time.monotonic() - begun > seconds:
            one.cancel()
        elif said := one.result():
            print(said, flush=True)


def assemble_drawn(folder: Path, out: Path, first: int, count: int, seconds: float, jobs: int) -> None:
    """Assembles modules of `count` programs from number `first` on, except answered ones, for about `seconds`."""
    raw = out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    done = {*json.loads((folder / "held.json").read_text()), *(int(one.stem) for one in raw.glob("*.json"))}
    with _pool(jobs) as pool:
        firsts = [at for at in range(first, first + count, DRAWN_MODULE) if at not in done]
        size = min(DRAWN_MODULE, count)
        _until_assembled([pool.submit(_drawn_module, folder, raw, at, size) for at in firsts], seconds)


def _gathered(folder: Path, out: Path) -> None:
    """Writes OUT/hashes.npz: by the number of a module's first program, the hashes, 0 for a program that failed."""
    hashes = {file.stem: np.load(file) for file in sorted((out / "raw").glob("*.npy"))}
    drawer = np.array(drawer_of(folder / "drawn.py"), np.uint32)
    np.savez_compressed(out / "hashes.npz", allow_pickle=False, drawer=drawer, **hashes)
    print(f"{sum(map(len, hashes.values()))} drawn programs have run", flush=True)


def launch_drawn(folder: Path, out: Path, seconds: float) -> None:
    """Launches all modules that are assembled now."""
    with _launching(folder, out, seconds):
        pass
    _gathered(folder, out)


def ask_drawn(folder: Path, out: Path, first: int, count: int, seconds: float) -> None:
    """Assembles for about `seconds`, and launches meanwhile."""
    (out / "raw").mkdir(exist_ok=True)
    with _launching(folder, out, seconds + 20):
        assemble_drawn(folder, out, first, count, seconds, _cores())
    _gathered(folder, out)


def _told(raw: Path, told: Path, number: int, *, with_cuts: bool) -> None:
    """Writes `-O0` and so on: uint8 [OUTPUT_BYTES], the program's output at a level; `cuts`: uint8 [cuts,
    OUTPUT_BYTES], its cuts' outputs, each but the first XOR the one before. Zeros if one failed."""
    arrays: dict[str, Any] = {}
    for level in sorted(set(LEVELS)):
        if (file := raw / f"{number}{level}.npy").exists():
            left = np.load(file)
            arrays[level] = left[-1].copy()
            if with_cuts and level == level_of(number):
                left[1:] ^= left[:-1].copy()
                arrays["cuts"] = left[:-1]
    if arrays:
        np.savez_compressed(told / f"{number}.npz", allow_pickle=False, **arrays)


def ask_told(folder: Path, out: Path, seconds: float, numbers: list[int], *, with_cuts: bool) -> None:
    """Runs each program of `numbers` and, if requested, its cuts, for about `seconds`."""
    raw, told = out / "raw", out / "told"
    raw.mkdir(parents=True, exist_ok=True)
    told.mkdir(exist_ok=True)
    with _pool(_cores()) as pool:
        with _launching(folder, out, seconds + 10, show=True):
            tasks = [(number, level) for level in sorted(set(LEVELS)) for number in numbers]
            tasks.sort(key=lambda task: level_of(task[0]) == task[1])
            _until_assembled(
                [pool.submit(_told_module, folder, raw, *task, with_cuts=with_cuts) for task in tasks], seconds
            )
        list(pool.map(partial(_told, raw, told, with_cuts=with_cuts), numbers))
    for file in raw.iterdir():
        file.unlink()
    raw.rmdir()
    print(f"{len(list(told.iterdir()))} programs told", flush=True)


def main(arguments: list[str]) -> None:
    """Runs the command line; see the module."""
    words = [one for one in arguments if one != "--show"]
    if words[0] == "pack":
        pack(Path(words[1]))
        return
    folder, out, step, given = Path(words[0]), Path(words[1]), words[2], words[3:]
    if step == "run-whole":
        _run_whole(folder, out)
    elif step == "launch-all":
        _launch_all(folder, out, int(given[0]), show="--show" in arguments)
    elif step == "whole":
        ask_whole(folder, out)
    elif step in ("tell", "levels"):
        ask_told(folder, out, float(given[0]), [int(one) for one in given[1:]], with_cuts=step == "tell")
    elif step == "launch":
        launch_drawn(folder, out, float(given[0]))
    elif step == "assemble":
        jobs = int(given[3]) if len(given) > 3 else _cores()
        assemble_drawn(folder, out, int(given[0]), int(given[1]), float(given[2]), jobs)
    else:
        ask_drawn(folder, out, int(given[0]), int(given[1]), float(given[2]) if len(given) > 2 else 1e9)


if __name__ == "__main__":
    main(sys.argv[1:])
