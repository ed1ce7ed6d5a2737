"""The pages agree with results/records/h200-programs.json about silicon and compute-sanitizer."""

from __future__ import annotations

import re

from conformance import ROOT
from conformance.meta.docs.on_device import report
from conformance.meta.docs.programs_record import TABLE, paragraphs, recorded, sanitizer_page

AGAIN = "`python -m conformance.meta.docs.programs_record` renews it"


def test_the_table_is_the_record() -> None:
    assert TABLE.read_text("utf-8") == sanitizer_page(), AGAIN
    targets = re.findall(r"\]\(([\w./-]+)\)", TABLE.read_text("utf-8"))
    assert not [one for one in targets if not (TABLE.parent / one).exists()]


def test_each_found_page_says_what_its_programs_did() -> None:
    own = {stem for stem, _ in report()}
    told = {page: said for page, said in paragraphs(recorded()).items() if page.startswith("found/")}
    assert len(told) > 10, "the record has few pages"
    for page, said in told.items():
        text = " ".join((ROOT / "docs" / f"{page}.md").read_text("utf-8").split())
        if page.removeprefix("found/") not in own:
            assert said in text, f"{page}: {AGAIN}"


def test_a_control_shows_that_faults_are_seen() -> None:
    controls = {name: one for name, one in recorded().items() if name.startswith("control/")}
    assert len(controls) == 2
    for name, one in controls.items():
        assert one["error"].startswith("CUDA_ERROR"), f"{name} did not fault on the device"
        assert one["sanitizer"]["memcheck"]["errors"] > 0, f"{name} is no finding of memcheck"
