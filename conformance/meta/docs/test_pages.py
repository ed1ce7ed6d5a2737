"""Every program of docs/rules, docs/notes and docs/found runs: it prints the finding shown, and each cure is clean."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import pytest

from backends.vm.rules import FAMILIES
from backends.vm.rules import RULES as MACHINE_RULES
from conformance import ROOT
from conformance.meta.docs.on_device import report
from conformance.meta.docs.pages import SCHEDULES, outcome, pages, patched, trials

PAGES = pages()
RULES = [path for path in PAGES if path.parent.name == "rules"]
FINDINGS = [path for path in PAGES if any(trial.said for trial in trials(path))]


def _named(path: Path) -> set[str]:
    """The rules named at the head of a page."""
    return set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)*)`", path.read_text("utf-8").split("\n## ", 1)[0]))


def _sentence(said: str) -> str:
    """A finding without its quoted instructions, so that it does not matter how much of a long one is shown."""
    return re.sub(r"`[^`]*`", "``", said)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_says_what_happens(path: Path, tmp_path: Path) -> None:
    for number, trial in enumerate(trials(path), 1):
        if trial.said:
            found = outcome(trial, tmp_path)
            assert _sentence(found) == _sentence(trial.said), (
                f"run {number}; `python -m conformance.meta.docs.pages {path.stem}` renews the page"
            )
            continue
        for schedule in SCHEDULES:
            found = outcome(trial, tmp_path, schedule)
            assert not found, f"run {number} is to be clean under {schedule}: {found}"


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_a_rule_s_page_shows_its_rules(path: Path) -> None:
    """Each page has a kernel that breaks one of its named rules, and a cure."""
    named = _named(path)
    shown = {trial.rule for trial in trials(path) if trial.said}
    assert shown, "no finding is shown"
    assert shown <= named, f"these rules are shown and not named at the top: {sorted(shown - named)}"
    assert any(not trial.said for trial in trials(path)), "no cure is shown"
    headings = re.findall(r"^## (.*)$", path.read_text("utf-8"), re.MULTILINE)
    assert {"What goes wrong", "How to mend it", "Public bugs"} <= set(headings)


def test_a_finding_names_the_page_that_names_its_rule() -> None:
    """Or the table of all rules, if no page does, or several do and none fits whatever is found."""
    assert {f"docs/rules/{page}.md" for page in FAMILIES} == {str(path.relative_to(ROOT)) for path in RULES}
    for rule in MACHINE_RULES.values():
        named = [path for path in RULES if rule.slug in _named(path)]
        led = ROOT / rule.page
        assert led in named or (led.name == "README.md" and len(named) != 1), (
            f"{rule.slug} leads to {led}, not to {named}"
        )


def test_the_table_leads_to_every_page_and_has_every_rule_of_them() -> None:
    table = (ROOT / "docs" / "rules" / "README.md").read_text("utf-8")
    assert sorted(re.findall(r"^- \[[\w-]+\]\(([\w-]+)\.md\)", table, re.MULTILINE)) == [path.stem for path in RULES]
    slugs = set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE))
    for path in RULES:
        unknown = _named(path) - slugs
        assert not unknown, f"{path.name} names {sorted(unknown)}, which are no rules"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    targets = [name for name in re.findall(r"\]\(([\w./-]+)\)", path.read_text("utf-8")) if "//" not in name]
    missing = [name for name in targets if not (path.parent / name).exists()]
    assert not missing, f"{path.relative_to(ROOT)} links to {missing}"


UNKNOWN = ("Not run", "Not known", "not known here", "not measured")
"""Words by which a page says that something has not been measured."""


def unbacked(page: str) -> list[str]:
    """Paragraphs and list items about silicon or an H200 that cite no record and do not say that the answer is
    unknown."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    said = [" ".join(one.split()) for one in re.split(r"\n\n|\n(?=- )", prose)]
    backed = ("results/records/", "](../found/", *UNKNOWN)
    told = [one for one in said if re.search(r"[Ss]ilicon|H200", one) and not one.startswith(("#", ">"))]
    return [one for one in told if not any(word in one for word in backed)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_silicon_does_is_a_record_or_said_to_be_unknown(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not unbacked(text), f"{path.stem}: no record shows this"
    if path.parent.name == "found":
        _, _, does = text.partition("\n## What silicon does\n")
        section = does.partition("\n## ")[0]
        known = "results/records/" in section
        assert known != any(one in section for one in UNKNOWN), f"{path.stem}: a record, or that nobody has looked"


def test_a_claim_about_silicon_is_noticed() -> None:
    claim = "On silicon this is a hang.\n"
    assert unbacked(f"# Page\n\nFirst.\n\n{claim}") == [claim.strip()]
    assert unbacked(f"- One.\n- {claim}") == [f"- {claim.strip()}"], "in an item of a list, too"
    assert not unbacked(f"{claim.strip()} Whether it is was not measured.\n")
    assert not unbacked("```ptx\n// silicon\n```\n\n# What silicon does\n")


def test_a_sentence_that_is_no_longer_said_is_noticed(tmp_path: Path) -> None:
    path = next(path for path in RULES if path.stem == "async-proxy")
    trial = next(trial for trial in trials(path) if trial.said)
    assert outcome(trial, tmp_path) == trial.said
    fenced = trial.kernel.replace("bar.sync 0;", "fence.proxy.async; bar.sync 0;")
    assert outcome(replace(trial, kernel=fenced), tmp_path) == "", "a kernel without the defect has the finding"


def test_an_assertion_of_a_page_counts(tmp_path: Path) -> None:
    path = next(path for path in PAGES if path.stem == "the-half-scale")
    right = list(trials(path))[-1]
    with pytest.raises(AssertionError):
        outcome(replace(right, python=right.python.replace("32).all()", "31).all()")), tmp_path)


def test_a_diff_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="occur 0 times"):
        patched("ret;\n", " bar.sync 0;\n+ret;\n", "page")


def test_the_copy_of_p_is_that_of_the_kernel() -> None:
    page = (ROOT / "docs" / "notes" / "p-into-swizzled-smem.md").read_text("utf-8")
    (shown,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    kernel = (ROOT / "backends" / "cutedsl" / "sm100_fmha" / "softmax.py").read_text("utf-8")
    assert indent(shown, "    ") in kernel, "store_p_smem has changed: the page shows what it was"


def test_what_silicon_did_is_the_record() -> None:
    """The sentences about the H200 match results/records/h200-found.json."""
    said = {path.stem: " ".join(path.read_text("utf-8").split()) for path in PAGES}
    for stem, sentence in report():
        assert sentence in said[stem], f"docs/.../{stem}.md does not say: {sentence}"


def test_mends_have_the_words_of_cuda_cpp_beside_those_of_ptx() -> None:
    words = {"bar.sync": "__syncthreads()", "bar.warp.sync": "__syncwarp()", "barrier.cluster.arrive": "cluster.sync()",
             "griddepcontrol.wait": "cudaGridDependencySynchronize()"}  # fmt: skip
    said = [text for rule in MACHINE_RULES.values() for text in (rule.mend, rule.missing)]
    for word, other in words.items():
        advised = [text for text in said if word in text]
        assert advised, f"no mend says {word}"
        assert all(other in text for text in advised), f"for CUDA C++, {other} stands beside {word}: {advised}"
