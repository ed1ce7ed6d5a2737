"""The page of bars matches the records, and a row that misses a bar is named."""

from __future__ import annotations

import pytest

from conformance.bench.bars import PAGE, attention_bars, layer_bars, page

ONE_SEQUENCE = "hd=512,t=1,s_k=32768,heads=64"


def test_the_published_page_is_what_the_records_say() -> None:
    assert PAGE.read_text("utf-8") == page(), "renew it: python -m conformance.bench.bars > results/bars.md"


@pytest.mark.parametrize(
    ("ours", "ptx", "peer", "bare", "missed"),
    [
        (26.0, 30.0, 27.0, 20.0, []),
        (26.0, 30.0, 25.0, 20.0, ["fa3"]),
        (26.0, 30.0, 27.0, 19.9, ["bare read 19.9 + 6"]),
        (20.0, 25.1, 27.0, 20.0, ["1.25 x CuTeDSL"]),
    ],
)
def test_each_bar_is_held(ours: float, ptx: float, peer: float, bare: float, missed: list[str]) -> None:
    line = {"us": {"ours": ours, "before": 1.0, "fa3": peer}, "variants": {"ptx": ptx}, "bare_read_us": bare}
    found = [bar.against for bar in attention_bars({ONE_SEQUENCE: line}) if not bar.met]
    assert found == missed, "a time over its bar is missed by it, and by no other; the kernel before is no peer"


LAYER = "nvfp4_moe:hidden=7168,intermediate=3072,num_experts=48,tokens=4096,topk=8,load=slice"
L2 = "nvfp4_moe:hidden=7168,intermediate=3072,num_experts=48,tokens=96,topk=8,stage=l2"


@pytest.mark.parametrize(
    ("case", "us", "missed"),
    [
        (L2, {"cutedsl": 167.0, "ptx": 208.0, "humming": 168.0}, []),
        (L2, {"cutedsl": 167.2, "ptx": 208.0, "humming": 168.0}, ["floor 142 / 0.85"]),
        (
            L2,
            {"cutedsl": 167.0, "ptx": 209.0, "humming": 166.0, "torch bf16 grouped mm": 165.0},
            ["torch bf16 grouped mm", "1.25 x CuTeDSL"],
        ),
        (LAYER, {"cutedsl": 1100.0, "ptx": 1100.0, "before": 1.0}, []),
        (LAYER, {"cutedsl": 1060.0, "ptx": 1326.0}, ["1.25 x CuTeDSL"]),
    ],
)
def test_each_bar_of_a_layer_is_held(case: str, us: dict[str, float], missed: list[str]) -> None:
    assert [bar.against for bar in layer_bars([_line(case, us)]) if not bar.met] == missed


@pytest.mark.parametrize(("gather", "met"), [(70.4, True), (70.6, False)])
def test_a_layer_is_held_against_its_gemms_within_one_profile(gather: float, met: bool) -> None:
    """4128 routes of 7168 numbers are read as NVFP4 and written as f16, then combined to 4096 tokens in bf16."""
    line = _line(LAYER, {"cutedsl": 1300.0 if met else 900.0, "ptx": 1000.0}, gather)
    (bar,) = (bar for bar in layer_bars([line]) if bar.against == "GEMMs 1000.0 + 25 + 45.6 of gather and combine")
    assert bar.met == met, f"{bar.us} us in the profile, where {bar.allowed:.1f} are asked"


def _line(case: str, us: dict[str, float], gather: float = 26.0) -> dict[str, object]:
    kernels = {"sm90_moe_gather_3": gather, "sm90_moe_swiglu_4": 700.0, "sm90_moe_rows_6": 300.0}
    return {
        "case": case, "routes_here": 4128 if case == LAYER else 768, "us": {name: [one] for name, one in us.items()},
        "kernels_us": {"cutedsl": kernels},
    }  # fmt: skip
