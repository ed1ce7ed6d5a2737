"""A cell of the report: its place, its measures, the files beside its records, and colours that everybody can read."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from math import comb, inf, nan
from pathlib import Path
from random import Random
from statistics import median

import pytest

from conformance import ROOT
from conformance.fakes.report_records import NOW, SPECS, full_matrix, material_of
from conformance.fakes.results import header, record, timing
from megamoe.contract import STATUSES, Row
from megamoe.explain import folder_of
from megamoe.records.keys import SEVERITY
from megamoe.records.lines import Evidence, Record, record_of
from megamoe.report.encoding import MAX_SAMPLES
from megamoe.report.evidence import bundles, read_coverage, read_foreign_kernels, traces
from megamoe.report.layout import Grid, axes_of, cases_of, lay_out, spans
from megamoe.report.measures import LEVELS, MEASURES, SIGNS, counter_ratios, error_ratio, spread
from megamoe.report.page import Extras, asset, page_data


@pytest.mark.parametrize("op", sorted(SPECS))
def test_every_case_stands_somewhere_once(op: str) -> None:
    spec = SPECS[op]
    known = list(dict.fromkeys(case.id for cases in spec.matrices.values() for case in cases))
    strays = [f"{op}:nobody=knows", f"{op}:"]
    for wanted in (known, known[::7], strays, [*known[:3], *strays], []):
        placed = [case for block in lay_out(spec, wanted) for case in cases_of(block)]
        assert len(placed) == len(set(placed)), "no case stands twice"
        assert set(wanted) <= set(placed)
        assert {case for block in lay_out(None, wanted) for case in cases_of(block)} == set(wanted)


def test_the_published_cells_are_one_grid() -> None:
    spec = SPECS["fmha"]
    published = [case.id for name in ("grid", "long") for case in spec.matrices[name]]
    (grid,) = lay_out(spec, published[:1])
    assert isinstance(grid, Grid)
    assert (grid.row_axis, grid.column_axes) == ("hd", ("t", "s_k"))
    assert sorted(cases_of(grid)) == sorted(published)
    assert grid.rows == ("64", "128", "256", "512"), "numbers stand in their order"
    for row, line in zip(grid.rows, grid.cells, strict=True):
        for column, case in zip(grid.columns, line, strict=True):
            assert case is not None
            axes = axes_of(spec, case)
            assert (axes["hd"], axes["t"], axes["s_k"]) == (row, *column)
    for level in range(2):
        assert sum(span for _, span in spans(grid.columns, level)) == len(grid.columns)


def test_grids_of_other_models_are_not_mixed() -> None:
    spec = SPECS["nvfp4_moe"]
    wanted = [case.id for name in ("real", "real_small") for case in spec.matrices[name]]
    grids = [block for block in lay_out(spec, wanted) if isinstance(block, Grid)]
    assert [grid.title for grid in grids] == ["real", "real_small"]
    assert [grid.fixed["hidden"] for grid in grids] == ["7168", "4096"]


# Measures


def test_scales_run_from_the_ideal_outwards() -> None:
    for measure in MEASURES:
        levels = [measure.level(value) for value in (0.0, 0.05, 0.3, 0.6, 0.8, 0.99, 1.0, 1.2, 3.0, 20.0)]
        assert levels == sorted(levels, reverse=measure.higher_is_better), f"{measure.name} is not monotonic"
        if measure.bounds:
            assert {min(levels), max(levels)} == {0, 6}, f"{measure.name} does not use its scale"
            assert measure.level(nan) == 6
    assert set(SIGNS) == set(SEVERITY)
    assert len(set(SIGNS.values())) == len(SIGNS), "no two statuses share a sign"


def test_errors_are_ratios_to_their_bars() -> None:
    assert error_ratio({}) is None
    assert error_ratio({"o.cosine": 1.0}) is None
    assert error_ratio({"o.rms": 1.0, "o.rms.bar": 4.0, "o.max": 3.0, "o.max.bar": 4.0}) == (0.75, "o.max")
    assert error_ratio({"o.rms": nan, "o.rms.bar": 4.0}) == (inf, "o.rms")
    assert error_ratio({"o.rms": 0.0, "o.rms.bar": 0.0}) == (0.0, "o.rms")
    assert error_ratio({"a2.wrong": 0.0, "a2.share.wrong": 0.0}) == (0.0, "a2.wrong")
    assert error_ratio({"a2.wrong": 1.0, "y.rms": 1.0, "y.rms.bar": 2.0}) == (inf, "a2.wrong")


def test_a_record_that_failed_by_its_error_is_above_its_bar() -> None:
    (lines,) = full_matrix(runs=1, samples=1)
    for one in (line for line in lines if isinstance(line, Record)):
        ratio = error_ratio(one.metrics)
        if ratio and not math.isnan(ratio[0]):
            assert (ratio[0] > 1) == (one.status == "failed"), f"{one.row}: {one.status} with a ratio of {ratio}"


def test_counters_are_ratios_to_what_is_needed() -> None:
    counters = {"mma_flops": 6, "useful_flops": 4, "tma_load_bytes": 3, "tma_store_bytes": 1, "minimum_bytes": 8}
    assert counter_ratios(counters) == {"mma_flops": 1.5, "tma_bytes": 0.5}
    assert counter_ratios({"smem_wavefronts": 4, "smem_bank_conflicts": 1}) == {"bank_conflicts": 0.25}
    assert counter_ratios({"mma_flops": 6, "useful_flops": 0, "minimum_bytes": 0, "smem_wavefronts": 0}) == {}


@pytest.mark.parametrize("count", [1, 2, 5, 6, 9, 30, 101, 999, 1001, 5000])
def test_the_interval_of_a_median_has_its_confidence_and_is_no_wider_than_it_must(count: int) -> None:
    random = Random(count)
    samples = [random.gauss(10, 1) for _ in range(count)]
    found = spread(samples)
    assert found is not None
    assert found.median == pytest.approx(median(samples))
    ordered = sorted(samples)
    below = ordered.index(found.low)
    assert found.high == ordered[count - 1 - below]

    def missed(rank: int) -> float:
        return 2 * sum(comb(count, k) for k in range(rank + 1)) / 2**count

    if count >= 6:
        assert missed(below) <= 0.05, f"{below} of {count} left out at either end misses the median too often"
        assert missed(below + 2) > 0.05, f"{below} of {count} left out could be more"
    else:
        assert below == 0


def test_samples_are_thinned_out_but_their_summary_is_not(tmp_path: Path) -> None:
    random = Random(1)
    samples = [random.uniform(5, 6) for _ in range(5000)]
    samples[2500] = 50.0
    material = material_of(tmp_path, header(), timing(samples))
    (line,) = page_data(material, Extras(SPECS, NOW))["timings"]  # type: ignore[misc]
    count, centre, *_ = line[7]
    low, high, letters = line[8]
    assert (count, centre) == (5000, pytest.approx(median(samples), rel=1e-4))
    assert len(letters) // 2 <= MAX_SAMPLES + 2
    assert (low, high) == (pytest.approx(min(samples), rel=1e-4), 50)


# Files beside the records


def test_evidence_is_linked_and_its_maps_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "failures" / "a row, 50% <off>"
    folder.mkdir(parents=True)
    (folder / "o.error.txt").write_text("o: |error|\n|.#|\n")
    (folder / "program.ptx").write_text("ret;")
    row = Row("fmha:hd=64,t=1,s_k=128", "ptx", "sm_100a", "vm", "eager")
    bundled = record_of("run-1", row, "failed", "wrong", Evidence(bundle=f"failures/{folder.name}"))
    gone = record_of("run-1", row._replace(schedule="lazy"), "failed", "wrong", Evidence(bundle="failures/gone"))
    found = bundles([bundled, gone], tmp_path / "pages" / "report.html", tmp_path)
    assert list(found) == [bundled.bundle], "a bundle that is not on this machine is not linked"
    one = found[str(bundled.bundle)]
    assert one.maps == {"o": "o: |error|\n|.#|\n"}
    assert one.links["program.ptx"] == "../failures/a%20row%2C%2050%25%20%3Coff%3E/program.ptx"


def test_a_trace_is_found_where_explain_leaves_it(tmp_path: Path) -> None:
    case = SPECS["fmha"].case(hd=64, t=1, s_k=128, causal=True)
    folder = tmp_path / folder_of(case.id, "ptx", "sm_100a")
    folder.mkdir(parents=True)
    (folder / "trace.perfetto.json").write_text("{}")
    (folder / "tmem.svg").write_text("<svg onload='alert(1)'/>")
    (found,) = traces([record(case=case.id)], tmp_path / "report.html", tmp_path).items()
    assert found[0] == f"{case.id} ptx sm_100a"
    assert list(found[1].links) == ["tmem.svg", "trace.perfetto.json"]
    assert found[1].pictures["tmem.svg"].startswith("data:image/svg+xml;base64,"), "a picture is a source, not markup"


def test_the_coverage_table_is_read_whole() -> None:
    forms = read_coverage(ROOT / "results/coverage.md")
    text = (ROOT / "results/coverage.md").read_text()
    counted = re.search(r"(\d+) forms in (\d+) families", text)
    assert counted
    assert (len(forms), len({one.family for one in forms})) == tuple(map(int, counted.groups()))
    rows = text.partition("\n## What ")[0].splitlines()
    kernels = sum(line.startswith("| `") and not line.endswith("|  |") for line in rows)
    assert sum(bool(one.kernels) for one in forms) == kernels
    assert {one.witness for one in forms} == {"hardware", "document"}
    passed = sum(one.status == "pass" for one in read_foreign_kernels(ROOT / "results/witness.jsonl"))
    assert f"{passed} of " in (ROOT / "results/witness.md").read_text()
    assert read_coverage(ROOT / "nowhere.md") == ()


PAIR = re.compile(r"--([\w-]+): light-dark\(#([0-9a-f]{6}), #([0-9a-f]{6})\)")
TEXT, GRAPHIC = 4.5, 3.0  # WCAG 2.2, success criteria 1.4.3 and 1.4.11


def colours(style: str) -> list[dict[str, str]]:
    """Name -> colour, for the light theme and for the dark one."""
    return [{name: pair[at] for name, *pair in PAIR.findall(style)} for at in (0, 1)]


def luminance(colour: str) -> float:
    """Relative luminance as in WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


LEVEL_NAMES = [f"level{at}" for at in range(LEVELS)]
TEXTS = [
    *((name, ground) for name in ("text", "muted", "link", "failed", "series0") for ground in ("page", "panel")),
    *((f"{name}-text", name) for name in (*LEVEL_NAMES, *STATUSES)),
    ("page", "text"),
]
GRAPHICS = [(f"series{at}", ground) for at in range(8) for ground in ("page", "panel")] + [
    ("strong-line", "page"),
    ("focus", "page"),
    ("bar-over", "page"),
]


def unreadable(style: str) -> list[str]:
    """A sentence for each pair with too little contrast."""
    found: list[str] = []
    for theme, known in zip(("light", "dark"), colours(style), strict=True):
        known["bar-over"] = known["failed"]
        for pairs, least in ((TEXTS, TEXT), (GRAPHICS, GRAPHIC)):
            for one, other in pairs:
                if contrast(known[one], known[other]) < least:
                    found.append(f"{theme}: {one} on {other} is {contrast(known[one], known[other]):.2f}, not {least}")
    return found


def test_text_and_graphics_can_be_read() -> None:
    assert not unreadable(asset("report.css"))


@pytest.mark.parametrize(("name", "colour"), [("muted", "#b0b0b0, #9aa4ae"), ("level4-text", "#1b1f24, #c08020")])
def test_a_pale_colour_is_noticed(name: str, colour: str) -> None:
    style = re.sub(rf"--{name}: light-dark\([^)]*\)", f"--{name}: light-dark({colour})", asset("report.css"))
    assert any(name in sentence for sentence in unreadable(style)), f"{name} of {colour} cannot be read"


def test_levels_are_steps_of_lightness() -> None:
    for known in colours(asset("report.css")):
        steps = [luminance(known[name]) for name in LEVEL_NAMES]
        assert steps in (sorted(steps), sorted(steps, reverse=True)), "who sees no colour sees the order"
        ratios = [max(one / other, other / one) for one, other in pairwise(steps)]
        assert min(ratios) > 1.05, "a level can hardly be told from the next"


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("000000", "ffffff") == pytest.approx(21)
    assert contrast("777777", "ffffff") == pytest.approx(4.48, abs=0.01)
