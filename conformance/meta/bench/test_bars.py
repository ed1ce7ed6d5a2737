"""The page of bars is what the records say, and a row that misses one is told."""

from __future__ import annotations

import pytest

from conformance.bench.bars import PAGE, attention_bars, page

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
