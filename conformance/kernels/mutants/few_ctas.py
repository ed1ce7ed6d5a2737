"""A program on few persistent CTAs, each of which computes several tiles, or parts of tiles that it hands over.

A device has more SMs than a small case has tiles, so in rows of a matrix hardly any CTA of a grouped GEMM, or of
CuTeDSL's attention, has a second tile. The axis `sms` of a case sets the number of SMs to launch for; a backend that
does not read it has nothing here. Tests of the kernels run them so too: conformance/kernels/ptx/test_hopper_moe.py and
test_moe_layer.py, conformance/kernels/cutedsl/test_moe.py and test_sm90_moe.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from megamoe.contract import AxisValue, Case, HostProgram, Program
from megamoe.spec.spec import Spec

COUNTS = (1, 3)
"""Numbers of CTAs. One computes all tiles, and fills a ring several times. Three leave tiles over, which CTAs of the
CuTeDSL kernels share."""
SIZES = ((384, 384), (768, 384), (768, 768))
"""Values of hidden and intermediate, cheapest first: several tiles of an expert, and three steps or more along K."""
TOKENS = (20, 40, 72)
"""Tokens to try before the case's own: they choose the width of a tile, and so the text."""
_SHORT_L1, _SHORT_L2 = (128, 2816), (5632, 128)
SHORT = {"l1": (_SHORT_L1,), "l2": (_SHORT_L2,), "layer": (_SHORT_L1, _SHORT_L2)}
"""By stage with a grouped GEMM: hidden and intermediate for one step along K and 5632 weight rows. In a tile of several
steps, the stage before it covers for a ring stage that a warp gives back without the others. So each stage must be the
first of a tile, and be filled again: raw PTX has 5 stages for tiles of 256 weight rows and 9 for tiles of 128, CuTeDSL
11 for tiles of 256."""
ALONE = (3, 10, 20, 72)
"""Tokens to try for the one expert of SHORT, beside those that an expert of the case has."""
MANY = 128
"""Tokens from which on the first of SIZES has several tiles a CTA, and SHORT takes ten seconds and more."""
SEQUENCES, KEYS = 4, {64: 500, 128: 400, 256: 300, 512: 200}
"""Sequences and, by head dimension, their keys, with which CuTeDSL's attention on one CTA fills its rings twice."""
SHORT_SEQUENCES, SHORT_KEYS = 8, 100
"""Sequences of one key tile each. With longer ones, the producer's waits for stages of K and V cover for its wait for a
stage of Q."""
RAGGED_KV_HEADS = 6
"""Least number of KV heads for ragged sequences. Two sequences on one CTA are then twelve work items, which fill each
of the two stages of Q six times: an mbarrier that counts one of eight arrivals too few covers a whole warpgroup after
four."""

Sized = tuple[Case, Program | HostProgram]
Build = Callable[[Case], Program | HostProgram | None]
"""Builds a case for a backend and a target; None if the case has no program."""


def on_few_ctas(build: Build, spec: Spec, case: Case, text: str) -> dict[int, list[Sized]]:
    """Returns programs by number of CTAs, for cases like `case` that build `text`; empty if there is no such case.

    A grouped GEMM: skewed if that builds `text`, with the first of TOKENS and SIZES that do, and on one CTA also SHORT.
    Attention: SEQUENCES of KEYS and SHORT_SEQUENCES of SHORT_KEYS on one CTA, or the case's own sequences if they are
    ragged, with RAGGED_KV_HEADS or more.
    """
    if case.op == "fmha":
        return _attention(build, spec, case, text)
    stage = str(case["stage"]) if case.op == "nvfp4_moe" else ""
    if stage not in SHORT:
        return {}

    def of(size: tuple[int, int], load: AxisValue, tokens: int, count: int) -> Sized | None:
        sized = spec.vary(case, hidden=size[0], intermediate=size[1], load=load, tokens=tokens)
        return _on(build, spec, sized, count, text)

    own, experts = case.int("tokens"), case.int("num_experts")
    fewest = sorted({-(-own * case.int("topk") // experts), *ALONE, own})

    def shortest(size: tuple[int, int]) -> Sized | None:
        lone = (spec.vary(case, hidden=size[0], intermediate=size[1], num_experts=1, topk=1, tokens=tokens)
                for tokens in fewest)  # fmt: skip
        return next((one for case in lone if (one := _on(build, spec, case, 1, text)) is not None), None)

    def narrow(size: tuple[int, int], tokens: int) -> Sized | None:
        """One token an expert: the narrowest of the tiles that a text is made for, several of them on the CTA."""
        sized = spec.vary(
            case, hidden=size[0], intermediate=128, num_experts=2, topk=1, load="one_token", tokens=tokens
        )
        return _on(build, spec, sized, 1, text)

    fewer = (*(tokens for tokens in TOKENS if tokens < own), own)
    for load, tokens, size in product(dict.fromkeys(("skewed", case["load"])), fewer, SIZES):
        made = {count: one for count in COUNTS if (one := of(size, load, tokens, count)) is not None}
        if made:
            sizes = SHORT[stage] if tokens < MANY else ()
            short = [one for size in sizes if (one := shortest(size) or of(size, load, tokens, 1)) is not None]
            narrowest = next((one for tokens in TOKENS if (one := narrow(size, tokens)) is not None), None)
            short += [] if narrowest is None else [narrowest]
            return {count: [one, *(short if count == 1 else ())] for count, one in made.items()}
    return {}


def _attention(build: Build, spec: Spec, case: Case, text: str) -> dict[int, list[Sized]]:
    # Ragged sequences have as many keys as their totals say.
    if case["ragged"]:
        kv_heads = max(case.int("kv_heads"), RAGGED_KV_HEADS if case["kv"] == "apart" else 1)
        sizes = [spec.vary(case, heads=case.int("heads") // case.int("kv_heads") * kv_heads, kv_heads=kv_heads)]
    else:
        sizes = [
            spec.vary(case, s_k=KEYS[case.int("hd")], batch=SEQUENCES),
            spec.vary(case, s_k=SHORT_KEYS, batch=SHORT_SEQUENCES),
        ]
    made = [one for sized in sizes if (one := _on(build, spec, sized, 1, text)) is not None]
    return {1: made} if made else {}


def _on(build: Build, spec: Spec, case: Case, count: int, text: str) -> Sized | None:
    """`case` for `count` SMs; None if that builds another text, or the same program."""
    few = spec.vary(case, sms=count)
    program = build(few)
    if program is None or program.ptx != text or program == build(case):
        return None
    return few, program
