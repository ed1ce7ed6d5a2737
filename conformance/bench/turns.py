"""Attention kernels by turns on the same buffers, on a device whose time is scarce.

    python3 -m conformance.bench.turns pack FILE [paged]         # where CuTeDSL compiles: no device is needed
    python3 -m conformance.bench.turns time FILE OUT.json [SECONDS]    # on the device
    python3 -m conformance.bench.turns record OUT.json RECORD.json     # times as results/records holds them

FILE has the programs of some rows, by row and by name. `pack` stores both backends' programs for the decode and prefill
rows of specs/fmha.yaml and some small ones; with `paged`, CuTeDSL's programs of a few rows in each layout of the keys.
Another script may write such a file of other plans with `packed`. A name that ends in a layout belongs to a program
that takes the row's numbers in that layout: "ours page 64".

`time` compares each result with float64 and, over the whole output, with the first kernel of its row. Then it takes
medians of ROUNDS x SAMPLES samples, each kernel at every place of the order, after a flush that reads. A peer that
refuses a row, or is not installed, is left out; `bad` in OUT says what failed.
"""

from __future__ import annotations

import gc
import json
import lzma
import math
import pickle
import re
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megamoe.contract import Case, DeviceLostError, HostProgram, Program, PythonProgram, RunOptions, UnsupportedError
from megamoe.spec.load import load_specs

Packed = dict[str, dict[str, "Program | HostProgram"]]
ROUNDS, SAMPLES = 6, 5
SECONDS = 120.0
MAX_ERROR, MAX_LSE_ERROR, MAX_APART = 6e-3, 1e-3, 8e-3
"""Limits: relative error of o, absolute error of lse, relative distance of o from the first kernel's."""
CHECKED_HEADS = 4
"""Query heads of the first sequence that are compared with float64."""
CHECKED_SCORES = 1 << 26
SMALL = (
    *(f"hd={hd},t={t},s_k={s_k}" for hd in (64, 128) for t in (1, 128) for s_k in (128, 512)),
    "hd=64,t=128,s_k=128,causal=true",
)
PAGED = {
    "hd=128,t=1,s_k=8192,batch=32,heads=64,kv_heads=8": ("ragged", "page 16", "page 64"),
    "hd=64,t=1,s_k=8192,batch=32,heads=64,kv_heads=8": ("ragged", "page 64"),
    "hd=512,t=1,s_k=4096,batch=64,heads=128,kv=latent": ("ragged", "page 64"),
    "hd=128,t=512,s_k=4096,batch=8,heads=32,kv_heads=8,causal=true": ("ragged", "page 64"),
}
"""Rows timed in other key layouts too: packed sequences, and pages of so many keys in a random order."""
FORM = re.compile(r" (ragged|page \d+)$")
OURS, PTX, BEFORE = "ours", "ptx", "before"
PEERS = ("cudnn", "cudnn folded", "sdpa flash", "fa3", "fa4", "cudnn-frontend")


def rows() -> list[str]:
    """Rows of `pack`: small ones, decode, prefill."""
    spec = load_specs()["fmha"]
    small = [spec.parse_case(f"fmha:{row}") for row in SMALL]
    return [case.id.removeprefix("fmha:") for case in (*small, *spec.matrices["decode"], *spec.matrices["prefill"])]


def packed(programs: Packed, path: Path) -> None:
    """Writes `programs`: by row, a program for each name."""
    path.write_bytes(lzma.compress(pickle.dumps(programs), preset=3))


def pack(path: Path) -> None:
    """Packs both backends' programs of `rows`."""
    from backends.cutedsl import BACKEND as CUTEDSL
    from backends.ptx import BACKEND as RAW_PTX

    spec, programs = load_specs()["fmha"], Packed()
    for row in rows():
        case = spec.parse_case(f"fmha:{row}")
        programs[row] = {OURS: CUTEDSL.build(case, "sm_90a"), PTX: RAW_PTX.build(case, "sm_90a")}
        print(row, flush=True)
    packed(programs, path)


def pack_paged(path: Path) -> None:
    """Packs CuTeDSL's programs of PAGED."""
    from backends.cutedsl import BACKEND as CUTEDSL

    spec, programs = load_specs()["fmha"], Packed()
    for row, forms in PAGED.items():
        case = spec.parse_case(f"fmha:{row}")
        found = programs[row] = {OURS: CUTEDSL.build(case, "sm_90a")}
        for form in forms:
            found[f"{OURS} {form}"] = CUTEDSL.build(spec.parse_case(f"fmha:{in_form(case, form)}"), "sm_90a")
        print(row, flush=True)
    packed(programs, path)


def in_form(case: Case, form: str) -> str:
    """The axes of a row in a layout of PAGED; all its sequences have `t` queries and `s_k` keys."""
    batch, t, s_k = (case.int(name) for name in ("batch", "t", "s_k"))
    axes = f"{case.id.removeprefix('fmha:')},ragged=true,total_q={batch * t},total_k={batch * s_k}"
    return axes if form == "ragged" else f"{axes},page_size={form.removeprefix('page ')}"


def peers(case: Case) -> dict[str, PythonProgram]:
    """The installed peers that take `case`, by their names in records."""
    from backends.peers import attention

    torch_kernels = (attention.CUDNN, attention.CUDNN_FOLDED, attention.FLASH)
    wheels = (attention.FA3, attention.FLASH_ATTN_4, attention.CUDNN_FRONTEND)
    known = dict(zip(PEERS, (*torch_kernels, *wheels), strict=True))
    if case["heads"] == case["kv_heads"]:
        del known["cudnn folded"]
    found: dict[str, PythonProgram] = {}
    for name, peer in known.items():
        try:
            found[name] = peer.build(case, "sm_90a")
        except UnsupportedError:
            continue
    return found


Tensors = dict[str, torch.Tensor]


def tensors_of(case: Case) -> Tensors:
    """Random inputs, and outputs."""
    batch, heads, kv_heads, t, s_k, hd = (case.int(name) for name in ("batch", "heads", "kv_heads", "t", "s_k", "hd"))
    random = torch.Generator(device="cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device="cuda", dtype=torch.bfloat16)

    tensors = {"q": normal(batch, heads, t, hd), "k": normal(batch, kv_heads, s_k, hd)}
    if case["kv"] == "apart":
        tensors["v"] = normal(batch, kv_heads, s_k, hd)
    tensors["o"] = torch.empty(batch, heads, t, hd, device="cuda", dtype=torch.bfloat16)
    tensors["lse"] = torch.empty(batch, heads, t, device="cuda")
    return tensors


def formed(case: Case, tensors: Tensors, form: str) -> Tensors:
    """Returns `tensors` in a layout of PAGED."""
    batch, t, s_k = (case.int(axis) for axis in ("batch", "t", "s_k"))
    page_size = 0 if form == "ragged" else int(form.removeprefix("page "))

    def by_token(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).flatten(0, 1).contiguous()

    keys = torch.arange(batch * s_k, device="cuda")
    of_form: Tensors = {"cu_seqlens_q": t * torch.arange(batch + 1, device="cuda", dtype=torch.int32)}
    if page_size:
        shuffled = torch.randperm(batch * s_k // page_size, generator=torch.Generator().manual_seed(1)).cuda()
        of_form["block_table"] = shuffled.reshape(batch, -1).int()
        of_form["seqused_k"] = torch.full((batch,), s_k, device="cuda", dtype=torch.int32)
        keys = shuffled.argsort()[keys // page_size] * page_size + keys % page_size
    else:
        of_form["cu_seqlens_k"] = s_k * torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    of_form |= {axis: by_token(tensors[axis])[keys] for axis in ("k", "v") if axis in tensors}
    return of_form | {axis: by_token(tensors[axis]) for axis in ("q", "o", "lse")}


def oracle(case: Case, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes o and lse of the first heads of the first sequence in float64."""
    t, s_k, hd = (case.int(name) for name in ("t", "s_k", "hd"))
    most = max(1, min(CHECKED_HEADS, CHECKED_SCORES // (t * s_k)))
    group = case.int("heads") // case.int("kv_heads")
    q = tensors["q"][0, :most].double()
    of_head = torch.arange(len(q), device="cuda") // group
    k, v = (tensors[name][0, of_head].double() for name in ("k", "v" if "v" in tensors else "k"))
    scores = q @ k.transpose(-1, -2) / math.sqrt(hd)
    if case["causal"]:
        last = torch.arange(t, device="cuda")[:, None] + s_k - t
        scores = scores.masked_fill(torch.arange(s_k, device="cuda") > last, -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def time_row(case: Case, programs: Mapping[str, Program | HostProgram]) -> dict[str, Any]:
    """Errors and samples of each kernel of a row, and times of a bare read of its keys and values."""
    from backends.gpu.bare_read import bare_read_us
    from backends.gpu.executor import EXECUTOR
    from backends.gpu.stopwatch import DeviceStopwatch

    tensors = tensors_of(case)
    o, lse = oracle(case, tensors)
    first: torch.Tensor | None = None
    forms = {"": tensors}
    errors, bad, watches = dict[str, tuple[float, float, float]](), dict[str, Any](), dict[str, DeviceStopwatch]()
    with ExitStack() as stack:
        for name, program in {**programs, **peers(case)}.items():
            ending = FORM.search(name)
            form_name = ending[1] if ending else ""
            if form_name not in forms:
                forms[form_name] = formed(case, tensors, form_name)
            form = forms[form_name]
            form["o"].fill_(math.nan)
            form["lse"].fill_(math.nan)
            try:
                call = stack.enter_context(EXECUTOR.bind(program, form, RunOptions()))
                call.enqueue()
                call.collect()
                torch.cuda.synchronize()
                watches[name] = DeviceStopwatch(call, cold_by_graph=True)
            except DeviceLostError:
                raise
            except Exception as error:
                bad[name] = repr(error)[:200]
                continue
            seen, seen_lse = form["o"].float(), form["lse"]
            if form is not tensors:
                seen, seen_lse = (x.unflatten(0, (case.int("batch"), -1)).transpose(1, 2) for x in (seen, seen_lse))
            first = seen if first is None else first
            heads = len(o)
            found = (
                ((seen[0, :heads].double() - o).norm() / o.norm()).item(),
                (seen_lse[0, :heads].double() - lse).abs().max().item(),
                ((seen - first).norm() / first.norm()).item(),
            )
            errors[name] = found
            if not all(error < most for error, most in zip(found, (MAX_ERROR, MAX_LSE_ERROR, MAX_APART), strict=True)):
                bad[name] = found
        names = list(watches)
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(ROUNDS):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                samples[name] += watches[name].samples("cold", 1, SAMPLES)
    bytes_read = case.int("batch") * case.int("kv_heads") * case.int("s_k") * case.int("hd") * 2
    bytes_read *= 2 if "v" in tensors else 1
    bare_us = bare_read_us(EXECUTOR, "sm_90a", bytes_read, "clean")
    return {
        "us": {name: round(statistics.median(times), 2) for name, times in samples.items()},
        "bare_read_us": round(bare_us or 0.0, 2),
        "bytes": bytes_read,
        "errors": errors,
        "bad": bad,
        "samples": samples,
    }


def time_rows(path: Path, out: Path, seconds: float) -> int:
    """Times the rows of a file until the seconds are over. Returns how many rows have something bad or were not
    timed."""
    programs: Packed = pickle.loads(lzma.decompress(path.read_bytes()))
    began, spec = time.monotonic(), load_specs()["fmha"]
    found: dict[str, Any] = {}
    wrong = 0
    for row, kernels in programs.items():
        if time.monotonic() - began > seconds:
            print(f"out of time at {row}")
            return wrong + len(programs) - len(found)
        case = spec.parse_case(f"fmha:{row}")
        try:
            one = time_row(case, kernels)
        except DeviceLostError:
            traceback.print_exc(limit=3)
            return wrong + len(programs) - len(found)
        except Exception:
            traceback.print_exc(limit=3)
            one = {"us": {}, "bare_read_us": 0.0, "bad": {"row": "no result"}}
        found[row] = one
        wrong += bool(one["bad"])
        times = ", ".join(f"{name} {us:.2f}" for name, us in one["us"].items())
        print(
            f"{row} bare {one['bare_read_us']:.1f} | {times}" + (f" | BAD {one['bad']}" if one["bad"] else ""),
            flush=True,
        )
        out.write_text(json.dumps(found))
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s")
    return wrong


def record(out: Path, target: Path) -> None:
    """Writes times and errors without the samples. `us`: OURS, the kernel BEFORE it where there is one, and the
    peers."""
    found = json.loads(out.read_text("utf-8"))
    spec = load_specs()["fmha"]
    lines: dict[str, Any] = {}
    for row, one in found.items():
        case = spec.parse_case(f"fmha:{row}")
        compared = {name: us for name, us in one["us"].items() if name in (OURS, BEFORE, *PEERS)}
        line: dict[str, Any] = {"us": compared}
        variants = {name: us for name, us in one["us"].items() if name not in compared}
        line |= {"variants": variants} if variants else {}
        line |= {key: one[key] for key in ("bare_read_us", "bytes", "errors", "bad") if one.get(key)}
        if case.int("t") > 16:
            tera = _tera_flops(case)
            line["tflops"] = {name: round(tera / (us * 1e-6), 1) for name, us in compared.items()}
        lines[row] = line
    text = ",\n".join(f" {json.dumps(row)}: {json.dumps(line)}" for row, line in lines.items())
    target.write_text(f"{{\n{text}\n}}\n", "utf-8")


def _tera_flops(case: Case) -> float:
    """Products of a row, without the pairs that a causal mask hides."""
    t, s_k = case.int("t"), case.int("s_k")
    pairs = sum(max(s_k - t + i + 1, 0) for i in range(t)) if case["causal"] else t * s_k
    return 4.0 * case.int("batch") * case.int("heads") * case.int("hd") * pairs / 1e12


def main(words: list[str]) -> int:
    """Runs the command line. The exit status is 1 if a row has something bad or was not timed, 2 for unusable words."""
    match words:
        case ["pack", path]:
            pack(Path(path))
        case ["pack", path, "paged"]:
            pack_paged(Path(path))
        case ["time", path, out]:
            return min(time_rows(Path(path), Path(out), SECONDS), 1)
        case ["time", path, out, seconds]:
            return min(time_rows(Path(path), Path(out), float(seconds)), 1)
        case ["record", out, target]:
            record(Path(out), Path(target))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
