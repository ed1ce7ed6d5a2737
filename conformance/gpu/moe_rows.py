"""NVFP4 MoE rows beside peers on a device: python -m conformance.gpu.moe_rows FILE [--programs FILE ...].

Everything in a row runs by turns on the same operands: our backends, peers' GEMMs, a kernel that only reads the row's
bytes. Cold: the L2 is emptied by reading. Our time of a stage includes all its kernels, with routing and expansion. A
peer has only its GEMM; in l1, SwiGLU and requantisation (peer_swiglu.py) are timed with it as one. Its tokens are
gathered and expanded beforehand, untimed.

CuTeDSL's compiler need not be on a device machine: `FILE --pack MODULE:ATTRIBUTE` writes the programs of a backend,
compiled where the compiler is, and `--programs FILE` times them under the name of the file. `--dry-run` needs no
device: it prints what would run, and what the files lack.

Operands are drawn on the device: N(0, 1) tokens and N(0, 1 / K) weights, quantised.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from backends.gpu.driver import clocks
from backends.gpu.executor import EXECUTOR
from backends.gpu.stopwatch import DeviceStopwatch
from backends.peers.grouped_gemm import humming_gemm, humming_layer
from megamoe.codec.nvfp4 import dequantise, global_scale, quantise, swizzle_scales, unswizzle_scales
from megamoe.codec.routing import Routing, expert_rows, routing
from megamoe.contract import AnyProgram, Case, PreparedCall, RunOptions
from megamoe.ops.nvfp4_moe.inputs import draw_topk_ids
from megamoe.spec.load import load_specs

TARGET: Final = "sm_90a"
HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 7168, 3072, 48, 8
BANDWIDTH, FLOPS = 4.25e12, 797e12
"""Rates behind the floors of issue 13: what a copy and a bf16 product reach on an H200 (results/records/README.md)."""
ROUNDS, SAMPLES = 6, 6
_SHAPE: Final = f"hidden={HIDDEN},intermediate={INTERMEDIATE},num_experts={EXPERTS},topk={TOPK}"
ROWS: Final = (
    *(
        f"nvfp4_moe:{_SHAPE},tokens={tokens},stage={stage}"
        for stage in ("l2", "l1")
        for tokens in (6, 24, 96, 384, 1536)
    ),
    *(f"nvfp4_moe:{_SHAPE},tokens={tokens},load=slice" for tokens in (8, 64, 512, 4096)),
)
Tensors = dict[str, torch.Tensor]


def cases_of(rows: Sequence[str]) -> list[Case]:
    """Returns the cases of `rows`, with axes in any order. KeyError for a row that the spec does not have."""
    spec = load_specs()["nvfp4_moe"]
    by_axes = {
        frozenset(case.id.partition(":")[2].split(",")): case for matrix in spec.matrices.values() for case in matrix
    }
    return [by_axes[frozenset(row.partition(":")[2].split(","))] for row in rows]


class Operands:
    """Weights and tokens of all rows, drawn once. `tensors(case)` returns a case's, with poisoned outputs."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._made: Tensors = {}

    def _weights(self, name: str, shape: tuple[int, int, int]) -> None:
        if f"{name}_codes" in self._made:
            return
        experts, rows, k = shape
        codes = torch.empty(experts, rows, k // 2, dtype=torch.uint8, device=self.device)
        sf = torch.empty(experts, rows, k // 16, dtype=torch.uint8, device=self.device)
        gs = torch.empty(experts, device=self.device)
        for expert in range(experts):
            values = torch.randn(rows, k, device=self.device) / k**0.5
            gs[expert] = global_scale(values)
            codes[expert], sf[expert] = quantise(values, gs[expert], check=False)
        self._made |= {f"{name}_codes": codes, f"{name}_sf": swizzle_scales(sf), f"{name}_gs": gs}

    def _rows(self, name: str, rows: int, k: int, deviation: float) -> Tensors:
        values = torch.randn(rows, k, device=self.device) * deviation
        gs = global_scale(values, per=1)
        codes, sf = quantise(values, gs, check=False)
        return {f"{name}_codes": codes, f"{name}_sf": swizzle_scales(sf), f"{name}_gs": gs}

    def tensors(self, case: Case) -> Tensors:
        """Returns the tensors that the stage of `case` reads and writes."""
        stage, tokens = str(case["stage"]), case.int("tokens")
        hidden, inter, experts = case.int("hidden"), case.int("intermediate"), case.int("num_experts")
        rows = expert_rows(case)
        found: Tensors = {"topk_ids": draw_topk_ids(case).to(self.device)}
        weights = torch.rand(found["topk_ids"].shape, device=self.device).softmax(1)
        found |= {"topk_weights": weights, "a2_gs": torch.full((experts,), 8.0 / (6 * 448), device=self.device)}
        if stage in ("l1", "layer"):
            self._weights("w1", (experts, 2 * inter, hidden))
            found |= {name: tensor for name, tensor in self._made.items() if name.startswith("w1_")}
            found |= self._rows("x", tokens, hidden, 1.0)
        if stage in ("l2", "layer"):
            self._weights("w2", (experts, hidden, inter))
            found |= {name: tensor for name, tensor in self._made.items() if name.startswith("w2_")}
        if stage == "l2":
            found |= {name: tensor for name, tensor in self._rows("a2", rows, inter, 1.0).items() if name != "a2_gs"}
            found["rows"] = torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16, device=self.device)
        if stage == "l1":
            found["a2_codes"] = torch.zeros(rows, inter // 2, dtype=torch.uint8, device=self.device)
            found["a2_sf"] = torch.zeros(rows // 128, inter // 64, 512, dtype=torch.uint8, device=self.device)
        if stage == "layer":
            found["y"] = torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16, device=self.device)
        return found


@dataclass(frozen=True)
class Product:
    """The GEMM of a stage: `rows` by `k` weights an expert. `w` and `a` are prefixes of its operands' names."""

    w: str
    a: str
    rows: int
    k: int

    @classmethod
    def of(cls, case: Case) -> Product:
        """The GEMM of l1 or l2."""
        hidden, inter = case.int("hidden"), case.int("intermediate")
        return cls("w2", "a2", hidden, inter) if case["stage"] == "l2" else cls("w1", "x", 2 * inter, hidden)


def floor_us(case: Case, routes: int) -> float | None:
    """Microseconds that a GEMM's bytes or FLOPs need at least; None for a layer."""
    if case["stage"] == "layer":
        return None
    product, inter = Product.of(case), case.int("intermediate")
    weights = case.int("num_experts") * product.rows * product.k * 9 / 16
    outputs = routes * product.rows * 2 if case["stage"] == "l2" else routes * inter * 9 / 16
    read = weights + routes * product.k * 9 / 16
    return 1e6 * max((read + outputs) / BANDWIDTH, 2 * routes * product.rows * product.k / FLOPS)


def read_bytes(case: Case, routes: int) -> int:
    """Bytes of NVFP4 weights of the experts that `case` visits."""
    stages = {"l1": 2, "l2": 1, "layer": 3}[str(case["stage"])]
    return stages * min(case.int("num_experts"), routes) * case.int("hidden") * case.int("intermediate") * 9 // 16


# --- peers -----------------------------------------------------------------------------------------------------------


@dataclass
class PeerCall:
    """A peer's kernels, ready. `launch()`: bf16 [routes, hidden] of l2, None if it writes the row's own tensors."""

    launch: Callable[[], torch.Tensor | None]

    def enqueue(self) -> None:
        """Launches on torch's current stream."""
        self.launch()

    def collect(self) -> None:
        """Does nothing: results stay where they are."""


def accumulator_scale(product: Product, tensors: Tensors) -> torch.Tensor:
    """f32 [experts]: the factor of a GEMM's sums. The tokens' factor is applied after l1."""
    return tensors["w1_gs"] if product.w == "w1" else tensors["a2_gs"] * tensors["w2_gs"]


def _weights(product: Product, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [experts, rows, k / 2] and uint8 [experts, rows, k / 16]: codes and block scales, row after row."""
    sf = unswizzle_scales(tensors[f"{product.w}_sf"], product.rows, product.k // 16)
    return tensors[f"{product.w}_codes"], sf


def _ends(case: Case, routes: Routing) -> torch.Tensor:
    """int64 [experts]: the number of routes up to and including each expert's."""
    return routes.expert.bincount(minlength=case.int("num_experts")).cumsum(0)


class Peers:
    """Peers' GEMMs on the operands of a case. Weights in a peer's layout are kept from row to row."""

    def __init__(self) -> None:
        self._layers: dict[str, torch.nn.Module] = {}
        self._dense: dict[str, torch.Tensor] = {}

    def _activations(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, Routing]:
        routes, product = routing(case, tensors["topk_ids"]), Product.of(case)
        index = routes.row if product.a == "a2" else routes.token
        codes = tensors[f"{product.a}_codes"]
        sf = unswizzle_scales(tensors[f"{product.a}_sf"], len(codes), product.k // 16)
        return dequantise(codes[index], sf[index], dtype=torch.bfloat16), routes

    def _ended(self, case: Case, tensors: Tensors, routes: Routing, gemm: Callable[[], torch.Tensor]) -> PeerCall:
        """Wraps the GEMM; in l1 SwiGLU and requantisation follow it."""
        if case["stage"] == "l2":
            return PeerCall(gemm)
        from conformance.gpu.peer_swiglu import SwigluRequantise

        clamp = float("inf") if case["clamp"] is None else float(str(case["clamp"]))
        end = SwigluRequantise(
            (routes.row, routes.token, routes.expert), (tensors["x_gs"], tensors["a2_gs"]),
            (tensors["a2_codes"], tensors["a2_sf"]), case.int("interleave"), clamp,
        )  # fmt: skip
        return PeerCall(lambda: end(gemm()))

    def humming(self, case: Case, tensors: Tensors) -> PeerCall:
        """Calls HummingLayer (modelopt, nvfp4), grouped_contiguous, in its heuristic configuration."""
        (a, routes), product = self._activations(case, tensors), Product.of(case)
        if product.w not in self._layers:
            scale = accumulator_scale(product, tensors)
            self._layers[product.w] = humming_layer(*_weights(product, tensors), scale)
        gemm = humming_gemm(self._layers[product.w], a, _ends(case, routes), product.rows)
        return self._ended(case, tensors, routes, gemm)

    def torch_bf16(self, case: Case, tensors: Tensors) -> PeerCall:
        """Calls torch._grouped_mm on weights dequantised to bf16."""
        (a, routes), product = self._activations(case, tensors), Product.of(case)
        if product.w not in self._dense:
            self._dense.clear()
            self._dense[product.w] = dequantise(*_weights(product, tensors), dtype=torch.bfloat16)
        w = self._dense[product.w].transpose(-2, -1)
        a = (a.float() * accumulator_scale(product, tensors)[routes.expert][:, None]).bfloat16()
        ends = _ends(case, routes).int()
        return self._ended(case, tensors, routes, lambda: torch.ops.aten._grouped_mm(a, w, ends))


# --- a row -----------------------------------------------------------------------------------------------------------


def error_of(case: Case, tensors: Tensors, found: torch.Tensor | None = None) -> float:
    """Relative error of three experts' rows against float64. l2: of `found`, bf16 [routes, hidden], or tensors["rows"].
    l1: of a2 against the activations before their requantisation."""
    routes, product = routing(case, tensors["topk_ids"]), Product.of(case)
    wrong = right = 0.0
    experts = [*dict.fromkeys(routes.expert.tolist())]
    for expert in {experts[0], experts[len(experts) // 2], experts[-1]}:
        mine = (routes.expert == expert).nonzero().flatten()
        row, token = routes.row[mine], routes.token[mine]
        w = _numbers(tensors, product.w, product, expert) * tensors[f"{product.w}_gs"][expert].double()
        a = _numbers(tensors, product.a, product)
        if product.a == "a2":
            wanted = a[row] @ w.T * tensors["a2_gs"][expert].double()
            got = (tensors["rows"][row] if found is None else found[mine]).double()
        else:
            x = a[token] * tensors["x_gs"][token].double()[:, None]
            h = (x @ w.T).view(len(mine), -1, 2, case.int("interleave"))
            gate, up = h[:, :, 0].flatten(1), h[:, :, 1].flatten(1)
            wanted = gate * gate.sigmoid() * up
            after = Product("w2", "a2", 0, case.int("intermediate"))
            got = _numbers(tensors, "a2", after)[row] * tensors["a2_gs"][expert].double()
        wrong += float((got - wanted).square().sum())
        right += float(wanted.square().sum())
    return (wrong / right) ** 0.5


def _numbers(tensors: Tensors, name: str, product: Product, expert: int | None = None) -> torch.Tensor:
    """f64: codes times block scales of an operand; for weights, of one expert."""
    codes, sf = (tensors[f"{name}_{part}"] for part in ("codes", "sf"))
    if expert is not None:
        codes, sf = codes[expert], sf[expert]
    return dequantise(codes, unswizzle_scales(sf, len(codes), product.k // 16)).double()


def spoil(case: Case, tensors: Tensors) -> None:
    """Poisons the outputs."""
    for name in {"l1": ("a2_codes", "a2_sf"), "l2": ("rows",), "layer": ("y",)}[str(case["stage"])]:
        tensors[name].fill_(0 if tensors[name].dtype == torch.uint8 else float("nan"))


@dataclass
class Watched:
    """One way to run a row, with its stopwatch and its samples in microseconds."""

    name: str
    watch: DeviceStopwatch
    samples: list[float]
    mhz: list[int | None]

    def summary(self) -> list[float]:
        """Median, 10th and 90th percentile."""
        ordered = sorted(self.samples)
        return [
            round(value, 1)
            for value in (
                statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10],
            )
        ]  # fmt: skip


def kernel_times(call: PreparedCall, replays: int = ROUNDS * SAMPLES) -> dict[str, float]:
    """Cold median microseconds by kernel: from the end of the previous one (the first: from its own start) to its own
    end."""
    from torch.profiler import ProfilerActivity, profile

    from backends.gpu.stopwatch import flushing

    empty = flushing("clean")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.enqueue()
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        for _ in range(replays):
            empty()
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    events = sorted(
        ((event.time_range.start, event.time_range.end, event.name) for event in session.events() or []),
        key=lambda one: one[0],
    )
    last: float | None = None
    for start, end, name in events:
        if "moe" not in name:
            last = None
            continue
        found.setdefault(name, []).append(end - (start if last is None else last))
        last = end
    return {name: round(statistics.median(times), 1) for name, times in found.items()}


Way = Callable[[Case, Tensors], AnyProgram | PeerCall]
Ways = Mapping[str, Way]
Held = Mapping[str, Mapping[str, AnyProgram]]
"""Programs by file name and by case."""
PEERS: Final = ("humming", "torch bf16 grouped mm")


def bound(way: Way, case: Case, tensors: Tensors, stack: ExitStack) -> PreparedCall:
    """Binds `way` to `tensors` until `stack` is closed."""
    made = way(case, tensors)
    return made if isinstance(made, PeerCall) else stack.enter_context(EXECUTOR.bind(made, tensors, RunOptions()))


def launched(call: PreparedCall) -> torch.Tensor | None:
    """Launches once and waits. Returns what a peer returns."""
    found = None
    if isinstance(call, PeerCall):
        found = call.launch()
    else:
        call.enqueue()
    torch.cuda.synchronize()
    return found


def measured(case: Case, operands: Operands, ways: Ways, *, profiled: bool = True) -> dict[str, Any]:
    """Measures one row: every way by turns, its error, the floor."""
    tensors = operands.tensors(case)
    routes = int((tensors["topk_ids"] >= 0).sum())
    floor = floor_us(case, routes)
    report: dict[str, Any] = {"case": case.id, "routes_here": routes, "floor_us": floor and round(floor, 1)}
    errors: dict[str, object] = {}
    kernels: dict[str, dict[str, float]] = {}
    calls: dict[str, PreparedCall] = {}
    first: torch.Tensor | None = None
    watched: list[Watched] = []
    with ExitStack() as stack:
        for name, way in ways.items():
            try:
                call = bound(way, case, tensors, stack)
                spoil(case, tensors)
                found = launched(call)
                if case["stage"] == "layer":
                    y = tensors["y"].double()
                    first = y if first is None else first
                    errors[name] = f"{float((y - first).norm() / first.norm()):.1e} from the first"
                else:
                    errors[name] = f"{error_of(case, tensors, found):.1e}"
                watched.append(Watched(name, DeviceStopwatch(call, cold_by_graph=True), [], []))
                calls[name] = call
            except Exception as error:
                traceback.print_exc()
                report.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:300]
        for turn in range(ROUNDS):
            at = turn % max(len(watched), 1)
            for one in (*watched[at:], *watched[:at]):
                one.samples += one.watch.samples("cold", 1, SAMPLES)
                one.mhz.append(clocks().sm_mhz)
        # After the rounds: a device at its power cap then runs at other clocks than an idle one.
        if profiled:
            kernels = {name: kernel_times(call) for name, call in calls.items() if not isinstance(call, PeerCall)}
    report["us"] = {one.name: one.summary() for one in watched}
    report["sm_mhz"] = {one.name: one.mhz for one in watched}
    report["throttled"] = EXECUTOR.throttled()
    report["bare_read_us"] = round(EXECUTOR.bare_read_us(read_bytes(case, routes)) or 0.0, 1)
    report["error"], report["kernels_us"] = errors, kernels
    if floor:
        report["share_of_floor"] = {one.name: round(floor / statistics.median(one.samples), 3) for one in watched}
    return report


def run_once(case: Case, operands: Operands, ways: Ways) -> None:
    """Runs every way once."""
    tensors = operands.tensors(case)
    for way in ways.values():
        with ExitStack() as stack:
            launched(bound(way, case, tensors, stack))


def packed(backend: str, rows: Sequence[str]) -> dict[str, AnyProgram]:
    """Builds the programs of MODULE:ATTRIBUTE for `rows`, by case."""
    module, _, attribute = backend.partition(":")
    return {case.id: getattr(import_module(module), attribute).build(case, TARGET) for case in cases_of(rows)}


def ways_of(held: Held, peers: bool) -> dict[str, Way]:
    """Returns every way to run a row, by name."""
    found: dict[str, Way] = {name: lambda case, _, ours=ours: ours[case.id] for name, ours in held.items()}
    if peers:
        them = Peers()
        found |= dict(zip(PEERS, (them.humming, them.torch_bf16), strict=True))
    return found


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields a short table of a row."""
    shares = report.get("share_of_floor", {})
    row = report["case"].partition(f"num_experts={EXPERTS},")[2]
    yield f"{row}: floor {report['floor_us']}, read {report['bare_read_us']}"
    yield "   " + "; ".join(
        f"{name} {times[0]}" + (f" ({shares[name]})" if name in shares else "") + f" e{report['error'].get(name)}"
        for name, times in report["us"].items()
    )
    for name, reason in report.get("failed", {}).items():
        yield f"   {name} FAILED: {reason[:150]}"


def ways_for(case: Case, ways: Ways) -> dict[str, Way]:
    """Keeps the `ways` that a row has: peers have no whole layer."""
    return {name: way for name, way in ways.items() if case["stage"] != "layer" or name not in PEERS}


def dry_run(rows: Sequence[str], held: Held, peers: bool) -> int:
    """Prints the ways of each row; returns how many programs the files lack."""
    ways, missing = ways_of(held, peers), 0
    for case in cases_of(rows):
        lacking = [name for name, ours in held.items() if case.id not in ours]
        missing += len(lacking)
        print(f"{case.id}: {', '.join(ways_for(case, ways))}" + (f"; not in {', '.join(lacking)}" if lacking else ""))
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Packs or measures the rows. Returns the number of ways that failed or, in a dry run, are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="takes the report, or with --pack the programs")
    parser.add_argument("--pack", metavar="MODULE:ATTRIBUTE", help="write the programs of this backend instead")
    parser.add_argument("--programs", type=Path, nargs="*", default=[], help="files that --pack made")
    parser.add_argument("--rows", nargs="*", help="ids of rows; those of issue 13 if none is given")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument(
        "--dry-run", action="store_true", help="only say which ways a row has; the status: what is missing"
    )
    parser.add_argument("--once", action="store_true", help="only run each way once, as for a profiler")
    parser.add_argument("--seconds", type=float, default=1e9, help="no row is begun after that time")
    given = parser.parse_args(arguments)
    rows = given.rows or ROWS
    if given.pack:
        given.file.write_bytes(pickle.dumps(packed(given.pack, rows)))
        return 0
    held: Held = {path.stem: pickle.loads(path.read_bytes()) for path in given.programs}
    if given.dry_run:
        return dry_run(rows, held, not given.without_peers)
    began = time.monotonic()
    torch.manual_seed(0)
    operands, ways = Operands(), ways_of(held, not given.without_peers)
    reports: list[dict[str, Any]] = []
    if given.once:
        for case in cases_of(rows):
            run_once(case, operands, ways)
        return 0
    for case in cases_of(rows):
        if time.monotonic() - began > given.seconds:
            print(f"{case.id}: no time left")
            continue
        report = measured(case, operands, ways_for(case, ways))
        reports.append(report)
        print("\n".join(lines(report)), f"[{time.monotonic() - began:.0f} s]", flush=True)
        document = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "unit": __doc__,
            "rows": reports,
        }
        given.file.write_text(json.dumps(document, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    return sum(len(report.get("failed", {})) for report in reports)


if __name__ == "__main__":
    sys.exit(main())
