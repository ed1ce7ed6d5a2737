"""How far measured rows are from their bars: python -m conformance.bench.bars > results/bars.md.

A bar compares microseconds of one session. All contenders of a row run by turns on the same buffers: a peer, a bare
read of its bytes, a floor, or the other backend. A layer is compared with its own GEMMs within one profile, because a
device at its power cap has other clocks by turns with other kernels than behind them. Records come from
`conformance.bench.turns record` and from `conformance.gpu.moe_rows`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conformance import ROOT
from conformance.bench.turns import OURS, PEERS
from megamoe.contract import Case
from megamoe.spec.load import load_specs

RECORDS: Final = ROOT / "results" / "records"
ATTENTION: Final = RECORDS / "h200-fmha-rows.json"
PAGE: Final = ROOT / "results" / "bars.md"
RAW_PTX_OVER_CUTEDSL: Final = 1.25
PRODUCT_FLOPS: Final = 775e12
"""Rate of a bf16 product of 8192 x 8192 x 8192 on an H200, in the session of issue 12's prefill rows."""


@dataclass(frozen=True, slots=True)
class Bar:
    """`us` may be at most `allowed`; `against` says where that limit comes from."""

    row: str
    backend: str
    us: float
    allowed: float
    against: str

    @property
    def met(self) -> bool:
        """Whether `us` is within the bar."""
        return self.us <= self.allowed

    @property
    def over(self) -> float:
        """The share of `allowed` by which the bar is missed; negative if it is met."""
        return self.us / self.allowed - 1


Times = Mapping[str, float]


def attention_bars(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Bar]:
    """Yields the bars of a record of attention."""
    spec = load_specs()["fmha"]
    for row, line in rows.items():
        case = spec.parse_case(f"fmha:{row}")
        times: Times = {**line["us"], **line.get("variants", {})}
        ours, bare = times[OURS], float(line["bare_read_us"])
        name, us = min(((name, times[name]) for name in PEERS if name in times), key=lambda one: one[1])
        yield Bar(row, "cutedsl", ours, us, name)
        read = _over_a_bare_read(case, bare)
        if read:
            yield Bar(row, "cutedsl", ours, *read)
        if case.int("t") <= 128 and "ptx" in times:
            yield Bar(row, "ptx", times["ptx"], RAW_PTX_OVER_CUTEDSL * ours, f"{RAW_PTX_OVER_CUTEDSL} x CuTeDSL")


def _over_a_bare_read(case: Case, bare: float) -> tuple[float, str] | None:
    """The microseconds that a row of many keys may take, and their derivation. None for a row without this bar."""
    hd, t, batch = (case.int(axis) for axis in ("hd", "t", "batch"))
    if case.int("s_k") < 8192:
        return None
    if t == 1 and batch == 1:
        more = 6 if hd == 512 else 4
        return bare + more, f"bare read {bare:.1f} + {more}"
    if t == 1 and batch == 32:
        factor = 1.10 if hd == 512 else 1.03
        return factor * bare, f"{factor:.2f} x bare read {bare:.1f}"
    if t == 128 and hd == 512:
        flops = 4 * batch * case.int("heads") * t * case.int("s_k") * hd
        product = 1e6 * flops / PRODUCT_FLOPS
        larger = f"bare read {bare:.1f}" if bare >= product else f"products {product:.1f}"
        return 1.25 * max(bare, product), f"1.25 x {larger}"
    if t == 128:
        factor = 1.17 if hd == 64 else 1.05
        return factor * bare, f"{factor:.2f} x bare read {bare:.1f}"
    return None


LAYERS: Final = RECORDS / "h200-moe-peers.json"
_ROWS_AN_EXPERT: Final = (1, 4, 16, 64, 256)
FLOORS: Final = {"l1": (277, 278, 281, 343, 1370), "l2": (139, 139, 142, 167, 670)}
"""Microseconds of 48 experts of 7168 / 3072 by _ROWS_AN_EXPERT: their bytes at 4.25 TB/s, or their products."""
SHARES: Final = (0.85, 0.85, 0.85, 0.70, 0.80)
"""The share of its floor that a GEMM has to reach, by _ROWS_AN_EXPERT."""
BESIDE_GEMMS_US: Final = 25
COPY_RATE: Final = 4.25e12
"""Bytes a second, read plus written, behind the floors of issue 13."""
_PEERS_OF_GEMMS: Final = ("humming", "torch bf16 grouped mm")
_GEMMS: Final = ("swiglu", "rows")
"""Parts of the names of a layer's GEMM kernels."""


def layer_bars(rows: Sequence[Mapping[str, Any]]) -> Iterator[Bar]:
    """Yields the bars of a record of NVFP4 layers and of their GEMMs."""
    spec = load_specs()["nvfp4_moe"]
    for line in rows:
        case = spec.parse_case(line["case"])
        row, ours = _short(case), _by_turns(line)
        times = {name: float(found[0]) for name, found in line["us"].items()}
        yield _asked_of_layer(case, line)
        for name, us in sorted(times.items(), key=lambda one: one[1]):
            if name in _PEERS_OF_GEMMS:
                yield Bar(row, "cutedsl", ours, us, name)
                break
        yield Bar(row, "ptx", times["ptx"], RAW_PTX_OVER_CUTEDSL * ours, f"{RAW_PTX_OVER_CUTEDSL} x CuTeDSL")


def _asked_of_layer(case: Case, line: Mapping[str, Any]) -> Bar:
    row, routes, hidden = _short(case), int(line["routes_here"]), case.int("hidden")
    if case["stage"] != "layer":
        at = _ROWS_AN_EXPERT.index(routes // case.int("num_experts"))
        floor = FLOORS[str(case["stage"])][at]
        return Bar(row, "cutedsl", _by_turns(line), floor / SHARES[at], f"floor {floor} / {SHARES[at]}")
    kernels: Times = line["kernels_us"]["cutedsl"]
    gemms = sum(us for name, us in kernels.items() if any(part in name for part in _GEMMS))
    gathered = routes * hidden * (9 / 16 + 2)
    combined = 2 * hidden * (routes + case.int("tokens"))
    moved = 1e6 * (gathered + combined) / COPY_RATE
    against = f"GEMMs {gemms:.1f} + {BESIDE_GEMMS_US} + {moved:.1f} of gather and combine"
    return Bar(row, "cutedsl", sum(kernels.values()), gemms + BESIDE_GEMMS_US + moved, against)


def _by_turns(line: Mapping[str, Any]) -> float:
    return float(line["us"]["cutedsl"][0])


def _short(case: Case) -> str:
    if case["stage"] == "layer":
        return f"layer, {case.int('tokens')} tokens"
    rows = case.int("tokens") * case.int("topk") // case.int("num_experts")
    return f"{case['stage']}, {rows} row{'s' if rows > 1 else ''} an expert"


def page() -> str:
    """Returns results/bars.md."""
    rows = json.loads(ATTENTION.read_text("utf-8"))
    layers = json.loads(LAYERS.read_text("utf-8"))["sessions"][-1]["rows"]
    parts = (*_attention(rows, list(attention_bars(rows))), "", *_layers(layers, list(layer_bars(layers))))
    return "\n".join([*_HEAD, "", *parts, ""])


_HEAD: Final = (
    "# Bars on an H200",
    "",
    "Made by `python -m conformance.bench.bars > results/bars.md` from the records that it names. Medians in",
    "microseconds with a cold L2, emptied by reading; all of a row by turns on the same buffers in one session. What",
    "was tried for the rows that miss: [attempts.md](attempts.md).",
)


def _attention(rows: Mapping[str, Mapping[str, Any]], bars: Sequence[Bar]) -> Iterator[str]:
    yield "## Attention"
    yield ""
    yield f"Record: [{ATTENTION.name}](records/{ATTENTION.name}). {_tally(bars)}"
    yield ""
    yield "CuTeDSL is held against the best peer; where a row says `at most`, against the bare read of its bytes too:"
    yield "one sequence may take 4 us more (hd 512: 6), batch 32 1.03 x (hd 512: 1.10 x), t 128 1.05 x (hd 64: 1.17 x;"
    yield f"hd 512: 1.25 x, or of the products). Raw PTX may take {RAW_PTX_OVER_CUTEDSL} x CuTeDSL for t up to 128."
    yield ""
    yield "| row | bare read | CuTeDSL | best peer | over a bare read | raw PTX / CuTeDSL |"
    yield "|---|---|---|---|---|---|"
    for row, line in rows.items():
        of_row = [bar for bar in bars if bar.row == row]
        peer, *others = of_row
        read = next((bar for bar in others if bar.backend == "cutedsl"), None)
        raw = next((bar for bar in others if bar.backend == "ptx"), None)
        yield (
            f"| `{row}` | {line['bare_read_us']:.1f} | {peer.us:.1f} | {peer.against} {peer.allowed:.1f}{_missed(peer)}"
            f" | {f'at most {read.allowed:.1f}{_missed(read)}' if read else ''}"
            f" | {f'{raw.us / peer.us:.2f}{_missed(raw)}' if raw else ''} |"
        )


def _layers(rows: Sequence[Mapping[str, Any]], bars: Sequence[Bar]) -> Iterator[str]:
    yield "## NVFP4 layer"
    yield ""
    yield f"48 experts of 7168 / 3072. Record: [{LAYERS.name}](records/{LAYERS.name}), its last session. {_tally(bars)}"
    yield ""
    yield "A GEMM is held by turns against its floor (bytes at 4.25 TB/s, or products). A layer is held by the times"
    yield "of its kernels in one profile, which leaves out the gaps between launches: against its GEMMs there, 25 us,"
    yield f"and the bytes of gather and combine. Raw PTX may take {RAW_PTX_OVER_CUTEDSL} x CuTeDSL."
    yield ""
    yield "| row | CuTeDSL | at most | best peer | raw PTX / CuTeDSL |"
    yield "|---|---|---|---|---|"
    spec = load_specs()["nvfp4_moe"]
    for line in rows:
        row, ours = _short(spec.parse_case(line["case"])), _by_turns(line)
        asked, *peers, raw = (bar for bar in bars if bar.row == row)
        profiled = f"; in its profile {asked.us:.1f}" if asked.us != ours else ""
        best = "".join(f"{peer.against} {peer.allowed:.1f}{_missed(peer)}" for peer in peers)
        yield (
            f"| {row} | {ours:.1f} | {asked.allowed:.1f}: {asked.against}{profiled}{_missed(asked)} | {best}"
            f" | {raw.us / ours:.2f}{_missed(raw)} |"
        )


def _tally(bars: Sequence[Bar]) -> str:
    missed = sorted((bar for bar in bars if not bar.met), key=lambda bar: -bar.over)
    told = [f"- `{bar.row}`: by {100 * bar.over:.1f} %, {bar.backend} against {bar.against}" for bar in missed]
    return "\n".join(
        [f"{len(bars) - len(missed)} of {len(bars)} bars are met." + (" Missed:\n" if missed else ""), *told]
    )


def _missed(bar: Bar) -> str:
    return "" if bar.met else f" **{100 * bar.over:+.1f} %**"


if __name__ == "__main__":
    print(page(), end="")
