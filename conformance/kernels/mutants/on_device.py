"""Runs mutants of sm_90a programs on an H200, alone and under compute-sanitizer.

`python -m conformance.kernels.mutants.carried FOLDER` writes what travels, including this file. On the device machine
`python3 FOLDER/on_device.py FOLDER OUT SECONDS [PROCESSES]` runs each mutant on the row that FOLDER names, RUNS times
alone and once under each of TOOLS, and writes OUT/mutants.json: a list of answers. If OUT has that file of an earlier
call, this one goes on where it ended. If FOLDER has `alone.json`, the answers of an earlier call, only its mutants run,
and not alone again. If it has texts (`carried --texts`), they are assembled, with FOLDER/ptxas or the one on the path,
and mutants that ptxas refuses do not run. It needs only the driver and compute-sanitizer. Entries are
called NAME_mNUMBER, so that a line of compute-sanitizer names its mutant. A mutant that hangs or faults ends its
process, because the driver cannot recover from that; another process goes on with the rest.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Thread
from typing import Any

DEADLOCK = "racecheck, deadlocks"
"""Racecheck with its option that looks for endless waits."""
TOOLS = {
    "memcheck": ("--tool", "memcheck"),
    "racecheck": ("--tool", "racecheck"),
    "synccheck": ("--tool", "synccheck"),
    "initcheck": ("--tool", "initcheck"),
    DEADLOCK: ("--tool", "racecheck", "--racecheck-deadlock-timeout", "1000"),
}
ALONE = "alone"
"""Stands for a tool: no tool."""
RUNS = 20
"""Launches of a mutant without a tool."""
PATIENCE = {ALONE: 1.0, "synccheck": 3.0, DEADLOCK: 4.0}
"""Seconds that a launch may take, by tool; a launch of these rows takes less than a millisecond."""
TOOL_PATIENCE = 5.0
START = 5.0
"""Additional seconds before a process must have written something."""
LAST_WORDS = 2.5
"""Seconds until a process is killed after it has reported a hanging launch; with a tool, it writes its reports
meanwhile."""
CHUNK = 8
"""Mutants that a process is given at once."""
SLICE = 256
"""Mutants that run alone and then under the tools before others do."""
GONE = "CUDA_ERROR_NO_DEVICE"
"""The driver has lost the device, and nothing brings it back: no further process starts."""
TOOL_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
REPORT_LENGTH = 700
TEXTS = "texts.json.xz"
"""Unchanged texts, and what each row changes in one of them."""


def numbered(ptx: str, entries: Sequence[str], number: int) -> str:
    """Names each entry after a row."""
    for entry in set(entries):
        ptx = re.sub(rf"(?<![\w$]){re.escape(entry)}(?![\w$])", f"{entry}_m{number:04d}", ptx)
    return ptx


def assemble(folder: Path, numbers: Sequence[int]) -> dict[int, str]:
    """Assembles these texts, if there are any, into code/NUMBER.cubin. Returns what ptxas said of those it refuses."""
    if not (folder / TEXTS).exists():
        return {}
    held = json.loads(lzma.decompress((folder / TEXTS).read_bytes()))
    rows, calls = (json.loads((folder / "rows.json").read_text())[name] for name in ("rows", "calls"))
    ptxas = str(folder / "ptxas") if (folder / "ptxas").exists() else "ptxas"

    def one(row: dict[str, Any]) -> str:
        if (folder / "code" / f"{row['number']}.cubin").exists():
            return ""
        name, begin, end, between = held["changes"][str(row["number"])]
        plain, entries = held["plain"][name], [launch["entry"] for launch in calls[row["call"]]["launches"]]
        source = folder / "code" / f"{row['number']}.ptx"
        source.write_text(numbered(plain[:begin] + between + plain[end:], entries, row["number"]))
        command = [
            ptxas,
            "-arch",
            "sm_90a",
            "-v",
            "--warning-as-error",
            "-o",
            str(source.with_suffix(".cubin")),
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        source.unlink()
        return "" if done.returncode == 0 else (done.stdout + done.stderr)[:500] or f"status {done.returncode}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = list(pool.map(one, [rows[number] for number in numbers]))
    return {number: words for number, words in zip(numbers, said, strict=True) if words}


class Fault(Exception):
    """An error that the driver returned from a call."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute (cuda.h): 72 bytes."""

    _fields_ = (("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig (cuda.h)."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


CLUSTER, SERIALIZATION = 4, 6
"""CUlaunchAttributeID: the size of a cluster; permission for a launch to begin before the previous one ends."""
MAX_DYNAMIC_SMEM, LARGE_CLUSTER = 8, 14
"""CUfunction_attribute."""
NOT_READY = 600


class Device:
    """The driver, through ctypes, inside one process of compute-sanitizer."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.checked(self.driver.cuInit(0))
        self.checked(self.driver.cuDeviceGet(ctypes.byref(device), 0))
        self.checked(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self.checked(self.driver.cuCtxSetCurrent(context))

    def checked(self, code: int) -> None:
        """Raises Fault with the driver's name of an error."""
        if code:
            name = ctypes.c_char_p()
            self.driver.cuGetErrorName(code, ctypes.byref(name))
            raise Fault((name.value or b"an unknown error").decode())

    def memory(self, size: int) -> int:
        """Allocates `size` bytes, uninitialised, and returns their address."""
        place = ctypes.c_uint64()
        self.checked(self.driver.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(max(size, 1))))
        return place.value

    def free(self, address: int) -> None:
        """Frees memory."""
        self.checked(self.driver.cuMemFree_v2(ctypes.c_uint64(address)))

    def put(self, address: int, data: bytes) -> None:
        """Copies `data` there."""
        self.checked(self.driver.cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))))

    def fill(self, address: int, size: int) -> None:
        """Fills it with 0xFF."""
        self.checked(self.driver.cuMemsetD8_v2(ctypes.c_uint64(address), 0xFF, ctypes.c_size_t(size)))

    def bits(self, address: int, size: int) -> bytes:
        """Reads the bytes there."""
        room = ctypes.create_string_buffer(max(size, 1))
        self.checked(self.driver.cuMemcpyDtoH_v2(room, ctypes.c_uint64(address), ctypes.c_size_t(size)))
        return room.raw[:size]

    def launch(self, module: ctypes.c_void_p, entry: str, launch: dict[str, Any], params: list[bytes]) -> None:
        """Enqueues one launch."""
        function = ctypes.c_void_p()
        self.checked(self.driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()))
        x, y, z = launch["cluster"]
        if launch["smem"]:
            self.checked(self.driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SMEM, launch["smem"]))
        if x * y * z > 8:
            self.checked(self.driver.cuFuncSetAttribute(function, LARGE_CLUSTER, 1))
        attributes = (_Attribute * 2)()
        count = 0
        for number, value in ((CLUSTER, (x, y, z)), (SERIALIZATION, (1, 0, 0))):
            if (x * y * z > 1) if number == CLUSTER else launch["dependent"]:
                attributes[count].id = number
                attributes[count].value[0:3] = value
                count += 1
        config = _Config(
            (ctypes.c_uint32 * 3)(*launch["grid"]),
            (ctypes.c_uint32 * 3)(*launch["block"]),
            launch["smem"],
            None,
            ctypes.cast(attributes, ctypes.c_void_p) if count else None,
            count,
        )
        held = [ctypes.create_string_buffer(one, len(one)) for one in params]
        pointers = (ctypes.c_void_p * max(len(held), 1))(*(ctypes.addressof(one) for one in held))
        self.checked(self.driver.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))

    def wait(self) -> bool:
        """Whether all launches end within the patience."""
        begun = time.monotonic()
        while (code := self.driver.cuStreamQuery(None)) == NOT_READY:
            if time.monotonic() - begun > self.patience:
                return False
            time.sleep(0.0005)
        self.checked(code)
        return True


def placed(launch: dict[str, Any], addresses: dict[str, int]) -> list[bytes]:
    """The parameters of a launch, with the device's addresses in them."""
    params = [bytearray.fromhex(one) for one in launch["params"]]
    for param, byte, name, offset in launch["places"]:
        params[param][byte : byte + 8] = (addresses[name] + offset).to_bytes(8, "little")
    return [bytes(one) for one in params]


class Told:
    """Output of a process about its mutants: one line when a mutant begins, one when it ends."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def begins(self, number: int) -> None:
        """Writes that a mutant begins."""
        self.file.write(f"{number}\n")

    def ends(self, number: int, status: str, **more: object) -> None:
        """Writes how a mutant ended."""
        self.file.write(json.dumps({"number": number, "status": status, **more}) + "\n")


def run(folder: Path, out: Path, tool: str, told: Told, numbers: list[int]) -> None:
    """Runs mutants one after the other, in this process, until one hangs or faults."""
    held = json.loads((folder / "rows.json").read_text())
    known = json.loads((out / "known.json").read_text()) if (out / "known.json").exists() else {}
    told.begins(numbers[0])
    device = Device(PATIENCE.get(tool, TOOL_PATIENCE))
    for number in numbers:
        row = held["rows"][number]
        told.begins(number)
        try:
            status, more = _one(device, folder, held["calls"][row["call"]], row, tool, known.get(row["base"]))
        except Fault as fault:
            told.ends(number, "fault", name=str(fault))
            os._exit(3)
        told.ends(number, status, **more)
        if status == "hang":
            os._exit(3)
    os._exit(0)


def _one(
    device: Device, folder: Path, call: dict[str, Any], row: dict[str, Any], tool: str, known: str | None
) -> tuple[str, dict[str, object]]:
    module = ctypes.c_void_p()
    device.checked(
        device.driver.cuModuleLoadData(ctypes.byref(module), (folder / "code" / f"{row['number']}.cubin").read_bytes())
    )
    addresses = {name: device.memory(size) for name, size, _ in call["buffers"]}
    sums: list[str] = []
    for _ in range(row["runs"] if tool == ALONE else 1):
        for name, size, file in call["buffers"]:
            # initcheck counts bytes written by the host as initialised.
            bare = tool == "initcheck" and (file is None or name in call["outputs"])
            if file is not None and not bare:
                device.put(addresses[name], (folder / "bytes" / file).read_bytes())
            elif not bare:
                device.fill(addresses[name], size)
        for launch in call["launches"]:
            device.launch(module, f"{launch['entry']}_m{row['number']:04d}", launch, placed(launch, addresses))
        if not device.wait():
            return "hang", {}
        left = (device.bits(addresses[name], size) for name, size, _ in call["buffers"] if name in call["outputs"])
        sums.append(hashlib.sha256(b"".join(left)).hexdigest()[:16])
    for address in addresses.values():
        device.free(address)
    device.checked(device.driver.cuModuleUnload(module))
    wanted = known or max(sums, key=sums.count)
    wrong = sum(one != wanted for one in sums)
    return "wrong" if wrong else "right", {"wrong": wrong, "of": len(sums), "sum": wanted}


Job = tuple[str, list[int]]
"""A tool, and the mutants that a process runs under it."""


class Stage:
    """Jobs, each a process, several in parallel, until none is left or time is up."""

    def __init__(self, folder: Path, out: Path, deadline: float, processes: int) -> None:
        self.folder, self.out, self.deadline, self.processes = folder, out, deadline, processes
        self.jobs: deque[Job] = deque()
        self.answers: dict[tuple[str, int], dict[str, Any]] = {}
        self.lock = Lock()
        self.count = 0

    def keep(self) -> None:
        """Writes the results so far: a machine that is taken back loses only the running jobs."""
        whole, part = self.out / "mutants.json", self.out / "mutants.part"
        part.write_text(json.dumps(list(self.answers.values())))
        part.replace(whole)

    def perform(self, processes: int | None = None) -> None:
        """Runs all jobs, in `processes` parallel processes if given."""
        threads = [Thread(target=self._work) for _ in range(processes or self.processes)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    def ask(self, jobs: Iterable[Job]) -> None:
        """Runs jobs, without mutants that have an answer."""
        left = ((tool, [one for one in some if (tool, one) not in self.answers]) for tool, some in jobs)
        self.jobs.extend(job for job in left if job[1])
        self.perform()

    def ask_alone(self, numbers: list[int]) -> None:
        """Repeats mutants that hung, one at a time: beside a launch that hangs, another may seem to."""
        for one in numbers:
            if self.answers.get((ALONE, one), {}).get("status") == "hang":
                del self.answers[ALONE, one]
                self.jobs.append((ALONE, [one]))
        self.perform(processes=1)

    def _work(self) -> None:
        while time.monotonic() < self.deadline:
            with self.lock:
                if not self.jobs:
                    return
                tool, numbers = self.jobs.popleft()
                self.count += 1
                job = self.count
            while numbers and time.monotonic() < self.deadline:
                done = self._process(f"{job}-{len(numbers)}", tool, numbers)
                numbers = [one for one in numbers if one not in done]

    def _process(self, name: str, tool: str, numbers: list[int]) -> set[int]:
        told, log = self.out / "raw" / f"{name}.told", self.out / "raw" / f"{name}.log"
        command = [sys.executable, "-S", "-E", str(self.folder / "on_device.py"), str(self.folder), str(self.out)]
        command += ["run", tool, str(told), ",".join(map(str, numbers))]
        if tool != ALONE:
            command = [*sanitizer(tool), *command]
        begun = time.monotonic()
        with log.open("wb") as sink:
            child = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
            last_words = LAST_WORDS if tool != ALONE else 0.0
            stalled = self._watched(child, told, PATIENCE.get(tool, TOOL_PATIENCE) + START, last_words)
        found = self._read(tool, told, log, stalled=stalled, seconds=round(time.monotonic() - begun, 2))
        # A process that never reports its first mutant would be restarted for ever.
        return found or {numbers[0]}

    def _watched(self, child: subprocess.Popen[bytes], told: Path, patience: float, last_words: float) -> bool:
        """Whether the process had to be killed: it wrote nothing for longer than a start and a launch take."""
        size, since, hung = -1, time.monotonic(), False
        while child.poll() is None:
            time.sleep(0.01)
            now = told.stat().st_size if told.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
                hung = size > 0 and '"status": "hang"' in told.read_text().splitlines()[-1]
            if time.monotonic() - since > (last_words if hung else patience) or time.monotonic() > self.deadline + 3:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return True
        return False

    def _read(self, tool: str, told: Path, log: Path, *, stalled: bool, seconds: float) -> set[int]:
        begun, found = list[int](), dict[int, dict[str, Any]]()
        for line in told.read_text().splitlines() if told.exists() else ():
            if line.startswith("{"):
                one = json.loads(line)
                found[one["number"]] = one
            else:
                begun.append(int(line))
        if begun and begun[-1] not in found and time.monotonic() < self.deadline:
            found[begun[-1]] = {"number": begun[-1], "status": "hang" if stalled else "died"}
        words = log.read_text(errors="replace")
        if GONE in words:
            print(f"the device is gone: {log.name}, {tool}", flush=True)
            self.deadline = 0.0
            return set()
        said = reports(words) if tool != ALONE else {}
        with self.lock:
            for number, one in found.items():
                heads, first = said.get(number, ({}, ""))
                self.answers[tool, number] = {**one, "tool": tool, "reports": heads, "first": first, "process": seconds}
            self.keep()
        if tool == ALONE and any(one["status"] == "died" for one in found.values()):
            print(words[-600:], flush=True)
        return set(found)


def reports(log: str) -> dict[int, tuple[dict[str, int], str]]:
    """Reports of compute-sanitizer by number of the mutant: how often each kind, and the first report in full."""
    found: dict[int, tuple[dict[str, int], str]] = {}
    for block in re.split(r"^========= (?=\S)", log, flags=re.MULTILINE)[1:]:
        number = re.search(r"_m(\d{4})\b", block)
        if number is None:
            continue
        head = kind_of(block.splitlines()[0])
        heads, _ = found.setdefault(int(number[1]), ({}, block[:REPORT_LENGTH]))
        heads[head] = heads.get(head, 0) + 1
    return found


def kind_of(head: str) -> str:
    """The first line of a report without the parts that differ from run to run: names, addresses, numbers."""
    text = re.sub(r"\bat [\w$:<>()~, *&]+?(?=\+0x| and| \[|$)", "at KERNEL", head)
    text = re.sub(r"0x[0-9a-f]+|\d+", "N", text)
    return text.strip()[:160]


def sanitizer(tool: str) -> list[str]:
    """The command prefix that runs a process under a tool."""
    places = [shutil.which("compute-sanitizer"), *(f"{folder}/compute-sanitizer" for folder in TOOL_FOLDERS)]
    found = next((one for one in places if one and Path(one).exists()), "compute-sanitizer")
    limits = ("--print-limit", "20000", "--show-backtrace", "no", "--target-processes", "application-only")
    return [found, *TOOLS[tool], *limits]


def main(folder: Path, out: Path, seconds: float, processes: int) -> None:
    """Runs the command line; see the module."""
    begun = time.monotonic()
    shutil.rmtree(out / "raw", ignore_errors=True)
    (out / "raw").mkdir(parents=True)
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    bases = [row["number"] for row in rows if not row["id"]]
    others = drawn(rows)
    stage = Stage(folder, out, begun + seconds, processes)
    before = folder / "alone.json"
    if (out / "mutants.json").exists():
        stage.answers = {(one["tool"], one["number"]): one for one in json.loads((out / "mutants.json").read_text())}
    if before.exists():
        stage.answers |= {(ALONE, one["number"]): one for one in json.loads(before.read_text()) if one["tool"] == ALONE}
        others = [one for one in others if (ALONE, one) in stage.answers]
    refused = assemble(folder, bases)
    bases = [one for one in bases if one not in refused]
    stage.ask((ALONE, [one]) for one in bases)
    known = {rows[one]["base"]: stage.answers.get((ALONE, one), {}).get("sum") for one in bases}
    (out / "known.json").write_text(json.dumps(known))
    print(f"programs as they are: {_counted(stage, ALONE, bases)}, {time.monotonic() - begun:.1f} s", flush=True)
    for of, some in parts(rows, others).items():
        if time.monotonic() > stage.deadline:
            break
        refused = assemble(folder, some)
        ran = [one for one in some if one not in refused]
        new = [one for one in ran if (ALONE, one) not in stage.answers]
        stage.ask((ALONE, one) for one in _chunks(new))
        stage.ask_alone(new)
        print(f"{of}, {len(refused)} refused, alone: {_counted(stage, ALONE, ran)}, {time.monotonic() - begun:.1f} s",
              flush=True)  # fmt: skip
        fates = {one: stage.answers.get((ALONE, one), {}).get("status") for one in ran}
        for name, jobs in under_tools(bases, ran, fates).items():
            stage.ask(jobs)
            print(f"{of}, {name}: answers: {len(stage.answers)}, {time.monotonic() - begun:.1f} s", flush=True)
    for tool in TOOLS:
        print(f"{tool}, as they are: {_counted(stage, tool, bases)}", flush=True)
        print(f"{tool}: {_counted(stage, tool, others)}", flush=True)


def drawn(rows: list[dict[str, Any]]) -> list[int]:
    """Orders mutants: synchronisation first, else at random. If time runs out, the part that ran is a sample of all."""
    lots = {row["number"]: lot(row["id"]) for row in rows if row["id"]}
    return sorted(lots, key=lambda one: (not rows[one]["orders"], lots[one]))


def parts(rows: list[dict[str, Any]], others: list[int]) -> dict[str, list[int]]:
    """Splits mutants into slices. Those that take seconds each come last: a launch that hangs holds the device."""
    ending = [one for one in others if not rows[one].get("stuck")]
    slices = [ending[at : at + SLICE] for at in range(0, len(ending), SLICE)]
    return {f"slice {number} of {len(slices)}": some for number, some in enumerate(slices, 1)} | {
        "what deadlocks in the VM": [one for one in others if rows[one].get("stuck")]
    }


def lot(name: str) -> str:
    """The random order of mutants, by their ids."""
    return hashlib.sha256(name.encode()).hexdigest()


def under_tools(
    bases: list[int], others: list[int], fates: dict[int, str | None]
) -> dict[str, list[tuple[str, list[int]]]]:
    """Jobs by stage. Mutants that do not end by themselves come last, because their processes take the longest."""
    asked = [tool for tool in TOOLS if tool != DEADLOCK]
    ending = [one for one in others if fates[one] in ("right", "wrong")]
    faulty = [one for one in others if fates[one] == "fault"]
    hanging = [one for one in others if fates[one] not in ("right", "wrong", "fault")]
    return {
        "programs as they are": [(tool, some) for some in _chunks(bases) for tool in (TOOLS if hanging else asked)],
        "mutants that end": [(tool, some) for some in _chunks(ending) for tool in asked],
        "mutants that fault": [(tool, [one]) for one in faulty for tool in asked[:3]],
        "mutants that hang": [(DEADLOCK, [one]) for one in hanging],
    }


def _chunks(numbers: list[int]) -> list[list[int]]:
    return [numbers[at : at + CHUNK] for at in range(0, len(numbers), CHUNK)]


def _counted(stage: Stage, tool: str, numbers: list[int]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in numbers:
        answer = stage.answers.get((tool, one))
        names = ["not run"] if answer is None else [answer["status"], *(["reported"] if answer["reports"] else [])]
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    return counts


if __name__ == "__main__":
    if sys.argv[3] == "run":
        run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4], Told(Path(sys.argv[5])),
            [int(one) for one in sys.argv[6].split(",")])  # fmt: skip
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 14)
