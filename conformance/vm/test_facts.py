"""facts.md and its citations: each citation names a section, and each section is cited and says how it is known."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from conformance import ROOT, SILICON

HERE = Path(__file__).parent
FACTS = (HERE / "facts.md").read_text("utf-8")
KNOWN_BY = ("ISA ", "golden ", "H200", "compiler", "library")


def sections(text: str) -> dict[str, str]:
    """The text below each numbered heading, by number."""
    parts = re.split(r"^#{2,3} (\d(?:\.\d)?) .*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def cited(text: str) -> set[str]:
    """Sections that a source text cites, such as `facts.md 1 and 2.3` or `facts.md 6.4, 7.2`."""
    found: set[str] = set()
    for run in re.findall(r"facts\.md (\d(?:\.\d)?(?:(?:, | and )\d(?:\.\d)?)*)", text):
        found.update(re.findall(r"\d(?:\.\d)?", run))
    return found


def citations() -> dict[str, set[str]]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout:
        pytest.skip("this is no git checkout, so its files cannot be listed")
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    texts = {name: (ROOT / name).read_text("utf-8") for name in files if not name.endswith("/test_facts.py")}
    return {name: found for name, text in texts.items() if (found := cited(text))}


def test_every_citation_has_its_section() -> None:
    known = sections(FACTS)
    dangling = {name: sorted(found - set(known)) for name, found in citations().items() if found - set(known)}
    assert not dangling, f"conformance/vm/facts.md has no such sections: {dangling}"


def test_every_section_is_cited() -> None:
    """A citation of a subsection also counts for its section."""
    used = set().union(*citations().values())
    idle = [
        number for number in sections(FACTS) if not any(one == number or one.startswith(f"{number}.") for one in used)
    ]
    assert not idle, f"no file cites sections {idle} of conformance/vm/facts.md: leave them out"


def test_every_section_says_how_it_is_known() -> None:
    silent = [
        number for number, text in sections(FACTS).items() if text.strip() and not any(way in text for way in KNOWN_BY)
    ]
    assert not silent, f"sections {silent} of conformance/vm/facts.md do not say how they are known"


def test_the_data_files_are_there() -> None:
    named = set(re.findall(r"(?:lanewise|movement|numerics|whole)/[\w.]+\.(?:npz|json)", FACTS))
    assert named, "facts.md names no data file"
    assert not [name for name in named if not (SILICON / name).is_file()]


def test_a_dangling_citation_would_be_noticed() -> None:
    assert cited("(facts.md 1 and 9.9; facts.md 6.4, 7.2). facts.md 3.") == {"1", "9.9", "6.4", "7.2", "3"}
    assert "9.9" not in sections(FACTS)
