"""The report in a real browser: it loads nothing else, obeys keys, shows failures, and has a dark and a light theme.

Uses a headless Chromium, driven by selenium, with every service that reaches a network switched off.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from conformance import ROOT
from conformance.fakes.report_records import HOSTILE, NOW, SPECS, full_matrix, hostile_records, material_of, write_runs
from conformance.fakes.results import CASE, H200, figures, header, record, timing, write
from megamoe.cli.terminal import in_ci
from megamoe.diff.differ import compare_runs
from megamoe.diff.sides import read_side
from megamoe.records.lines import MAX_SENTENCE, AnyLine, shortened
from megamoe.report.evidence import read_coverage, read_foreign_kernels
from megamoe.report.material import Material, gather
from megamoe.report.page import Extras, page

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1500,950",
)  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def chromium_paths() -> tuple[str, str]:
    """Paths of the browser and its driver. If one is missing, skips the test; in CI the test fails."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    missing = "chromium" if not browser else "chromedriver"
    reason = f"{missing} is not installed (Debian: apt-get install chromium chromium-driver), so no page can be opened"
    if in_ci():
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[Chrome]:
    """A browser with an empty profile that logs its console and its requests."""
    browser, driver = chromium_paths()
    options = Options()
    options.binary_location = browser
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options.add_argument(f"--user-data-dir={profile}")
        opened = Chrome(options=options, service=Service(driver))
        try:
            yield opened
        finally:
            opened.quit()


OPENED = itertools.count()
"""Numbers for addresses: the browser would load nothing if only the fragment were another."""


def open_page(browser: Chrome, path: Path, address: str = "") -> None:
    """Loads the file anew, even if it is open, and clears the logs."""
    complaints(browser)
    requests(browser)
    browser.get(f"{path.as_uri()}?{next(OPENED)}{address}")
    # The page redraws a frame or two after loading, once it knows its size.
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))")


def complaints(browser: Chrome) -> list[str]:
    """Console messages since the last call."""
    return [entry["message"] for entry in cast("list[dict[str, Any]]", browser.get_log("browser"))]


def requests(browser: Chrome) -> list[str]:
    """Addresses requested since the last call, except the page itself and data: URLs."""
    found: list[str] = []
    for entry in cast("list[dict[str, Any]]", browser.get_log("performance")):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent" and event["params"].get("type") != "Document":
            found.append(event["params"]["request"]["url"])
    return [url for url in found if not url.startswith("data:")]


def nameless(browser: Chrome) -> list[str]:
    """Controls and regions without an accessible name, from the browser's accessibility tree."""
    tree = cast("dict[str, Any]", browser.execute_cdp_cmd("Accessibility.getFullAXTree", {}))
    browser.execute_cdp_cmd("Accessibility.disable", {})
    acting = {"button", "link", "tab", "searchbox", "textbox", "gridcell", "dialog", "complementary", "grid", "img"}
    found: list[str] = []
    for node in tree["nodes"]:
        role = node.get("role", {}).get("value")
        focusable = any(one["name"] == "focusable" for one in node.get("properties", []))
        counts = not node["ignored"] and role in acting and (focusable or role != "gridcell")
        if counts and not node.get("name", {}).get("value"):
            found.append(f"{role}: {json.dumps(node)[:200]}")
    return found


def shared_ids(browser: Chrome) -> list[str]:
    """The ids that two elements have."""
    ids = cast(
        "list[str]",
        browser.execute_script("return [...document.querySelectorAll('[id]')].map((node) => node.id)"),
    )
    assert ids, "the page has no id"
    return [name for name, times in Counter(ids).items() if times > 1]


VIEWS = ("matrix", "times", "comparison", "coverage", "runs")
FOCUSED = "return document.activeElement.getAttribute('aria-label') ?? ''"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("records")
    paths = write_runs(folder, list(full_matrix(runs=2, samples=16, one_in=8)))
    return gather([*paths, write(folder / "hostile.jsonl", header(), *hostile_records())])


@pytest.fixture(scope="module")
def full(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with content in every view."""
    paths = [file.path for file in material.files]
    comparison = compare_runs(read_side(str(paths[0])), read_side(str(paths[1])), SPECS)
    coverage = read_coverage(ROOT / "results/coverage.md")
    foreign = read_foreign_kernels(ROOT / "results/witness.jsonl")
    extras = Extras(SPECS, NOW, "abc", "0.1.0", comparison=comparison, coverage=coverage, foreign_kernels=foreign)
    path = tmp_path_factory.mktemp("pages") / "full.html"
    path.write_text(page(material, extras), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loaded page of records that look like markup, numbers and nothing."""
    return _page(tmp_path_factory.mktemp("hostile"), header(), *hostile_records())


def press(browser: Chrome, *keys: str) -> None:
    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def one(browser: Chrome, selector: str) -> WebElement:
    found = browser.find_elements(By.CSS_SELECTOR, selector)
    assert found, f"the page has no {selector}"
    return found[0]


def cell_of(browser: Chrome, label: str) -> WebElement:
    """The cell whose accessible name begins with `label`."""
    return one(browser, f'#main td[aria-label^="{label}"]')


def labels(browser: Chrome, selector: str) -> list[str]:
    """Accessible names of the elements."""
    script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.getAttribute('aria-label'))"
    return cast("list[str]", browser.execute_script(script, selector))


def click(browser: Chrome, label: str) -> None:
    """Clicks the first cell whose accessible name begins with `label`."""
    script = "for (const node of document.querySelectorAll('#main td[data-cell]'))"
    script += "if (node.getAttribute('aria-label').startsWith(arguments[0])) return node.click()"
    browser.execute_script(script, label)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_alone_and_without_a_complaint(browser: Chrome, full: Path, view: str) -> None:
    open_page(browser, full, f"#view={view}{'&filter=hd=64' if view == 'times' else ''}")
    assert one(browser, '[role="tab"][aria-selected="true"]').get_attribute("data-view") == view
    # The driver's own way to read an element's text takes a second for a whole table.
    shown = browser.execute_script("return document.querySelector('#main').innerText")
    assert len(shown) > 100, f"the view {view} is empty"
    assert not complaints(browser)
    assert not requests(browser), "a report must ask no network for anything"
    assert not nameless(browser)
    assert not shared_ids(browser)


def test_a_page_that_asks_a_network_or_complains_is_noticed(browser: Chrome, tmp_path: Path) -> None:
    planted = tmp_path / "planted.html"
    planted.write_text(
        '<img src="nowhere.png"><button id="a"></button><i id="a"></i><script>throw new Error("planted")</script>'
    )
    open_page(browser, planted)
    assert any("planted" in text for text in complaints(browser))
    assert any("nowhere.png" in url for url in requests(browser))
    assert any("button" in text for text in nameless(browser))
    assert shared_ids(browser) == ["a"]


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_browser_is_skipped_here_and_fails_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(outcome, match="chromium is not installed"):
        chromium_paths()


@pytest.mark.parametrize(
    "lines",
    [
        [header()],
        [record("failed")],
        [header(), record("unsupported"), record("crashed", backend="cutedsl")],
        [header(), timing([3.0, 4.0])],
        [header(device=None), timing([3.0], status="failed"), figures(80)],
        [header(), *hostile_records()],
    ],
    ids=["no record", "no header", "only failures", "only a time", "only a failed time", "hostile"],
)
def test_odd_records_make_a_page_that_works(browser: Chrome, lines: list[AnyLine], tmp_path: Path) -> None:
    path = tmp_path / "odd.html"
    path.write_text(page(gather([write(tmp_path / "lines.jsonl", *lines)]), Extras(SPECS, NOW)), encoding="utf-8")
    for view in VIEWS:
        open_page(browser, path, f"#view={view}")
        for label in labels(browser, "#main td[data-cell]"):
            click(browser, label)
            assert one(browser, "#detail h2").text
        assert not complaints(browser), f"in the view {view}"


def test_each_case_of_each_subject_has_its_cell(browser: Chrome, full: Path, material: Material) -> None:
    open_page(browser, full)
    # A subject without a result in a block is folded there.
    browser.execute_async_script(
        "for (const folded of document.querySelectorAll('#main details.folded')) folded.open = true;"
        "requestAnimationFrame(() => setTimeout(arguments[0]))"
    )
    lines = (*material.records, *material.timings)
    wanted = {f"{line.case} {line.backend} {line.target} {line.executor}" for line in lines}
    spoken = labels(browser, "#main td[data-cell]")
    found = {label.rpartition(": ")[0] for label in spoken}
    assert found == wanted
    worst = {f"{line.case} {line.backend} {line.target} {line.executor}: {line.status}" for line in material.latest}
    assert worst <= set(spoken), "a cell says the status of its newest record"


def test_arrows_move_enter_opens_escape_closes(browser: Chrome, full: Path) -> None:
    open_page(browser, full)
    press(browser, Keys.ARROW_DOWN)
    start = browser.execute_script(FOCUSED)
    assert start.startswith("fmha:hd=64,t=1,s_k=128 "), "the first arrow goes to the first cell"
    press(browser, Keys.ARROW_RIGHT)
    assert browser.execute_script(FOCUSED).startswith("fmha:hd=64,t=1,s_k=256 ")
    press(browser, Keys.ARROW_DOWN)
    assert browser.execute_script(FOCUSED).startswith("fmha:hd=128,t=1,s_k=256 ")
    press(browser, Keys.ARROW_LEFT, Keys.ARROW_UP)
    assert browser.execute_script(FOCUSED) == start
    press(browser, Keys.END)
    assert browser.execute_script(FOCUSED).startswith("fmha:hd=64,t=128,s_k=1024 ")
    press(browser, Keys.HOME, Keys.ENTER)
    aside = one(browser, "#detail")
    assert aside.is_displayed()
    assert "fmha:hd=64,t=1,s_k=128" in aside.text
    press(browser, Keys.ARROW_RIGHT)
    assert "fmha:hd=64,t=1,s_k=256" in aside.text, "while a row is open, arrows open the next"
    press(browser, Keys.ESCAPE)
    assert not aside.is_displayed()
    assert browser.execute_script(FOCUSED).startswith("fmha:hd=64,t=1,s_k=256 "), "the focus comes back to the cell"
    assert not complaints(browser)


def test_arrows_reach_every_cell_of_a_listing(browser: Chrome, full: Path) -> None:
    open_page(browser, full, "#op=nvfp4_moe&backend=ptx&target=sm_100a")
    count = len(browser.find_elements(By.CSS_SELECTOR, "#main td[data-cell]"))
    seen: set[str] = set()
    press(browser, Keys.ARROW_DOWN)
    for _ in range(count):
        press(browser, Keys.HOME)
        line = {browser.execute_script(FOCUSED)}
        while True:
            press(browser, Keys.ARROW_RIGHT)
            label = browser.execute_script(FOCUSED)
            if label in line:
                break
            line.add(label)
        press(browser, Keys.HOME, Keys.ARROW_DOWN)
        if line <= seen:
            break
        seen |= line
    assert len(seen) == count


def test_the_next_failure_is_one_key_away(browser: Chrome, full: Path, material: Material) -> None:
    open_page(browser, full)
    press(browser, "n")
    label = browser.execute_script(FOCUSED)
    assert not label.endswith(": passed")
    press(browser, "n")
    assert browser.execute_script(FOCUSED) != label
    press(browser, "N")
    assert browser.execute_script(FOCUSED) == label


def test_views_measures_and_help_have_keys(browser: Chrome, full: Path) -> None:
    open_page(browser, full)
    press(browser, "5")
    assert one(browser, '[role="tab"][aria-selected="true"]').text == "runs"
    press(browser, "1", "m")
    assert "measure=error" in browser.current_url
    assert one(browser, '[data-choice="show"] [aria-pressed="true"]').text == "error / bar"
    press(browser, "?")
    assert one(browser, "#keys").get_attribute("open") is not None
    assert not nameless(browser)
    press(browser, Keys.ESCAPE)
    assert one(browser, "#keys").get_attribute("open") is None


def test_a_row_shows_its_sentence_whole_and_as_text(browser: Chrome, hostile: Path) -> None:
    open_page(browser, hostile)
    for at, text in enumerate(HOSTILE, 1):
        click(browser, f"fmha:hd=64,t={at},s_k=128 ptx sm_100a vm")
        sentence = browser.execute_script("return document.querySelector('#detail .sentence').textContent")
        said = shortened(text.strip(), MAX_SENTENCE)
        assert sentence.rstrip(".") == said.rstrip("."), "the sentence of the record, without its rerun command"
        inside = "return document.querySelectorAll('#detail img, #detail script, #detail b').length"
        assert browser.execute_script(inside) == 0, "a sentence is text, never markup"
    assert not complaints(browser)


def test_the_command_that_is_shown_reruns_the_row(browser: Chrome, hostile: Path) -> None:
    open_page(browser, hostile)
    for record_ in hostile_records():
        row = record_.row
        click(browser, f"{row.case} {row.backend} {row.target} {row.executor}:")
        assert one(browser, "#detail .command code").text == row.rerun


def test_a_row_shows_its_errors_counters_figures_times_and_history(
    browser: Chrome, full: Path, material: Material
) -> None:
    open_page(browser, full)
    newest = material.latest
    timed = next(one for one in material.latest_timings if one.temperature == "cold" and one.status == "passed")
    click(browser, f"{timed.case} {timed.backend} {timed.target} {timed.executor}")
    dots = browser.find_elements(By.CSS_SELECTOR, "#detail circle.dot")
    assert len(dots) >= len(timed.samples_us), "every sample is a dot"
    shown = next(one for one in newest if one.executor == "vm" and one.status == "passed" and one.backend == "ptx")
    click(browser, f"{shown.case} {shown.backend} {shown.target} {shown.executor}")
    detail = one(browser, "#detail").text
    for name in ("o.rms", "o.max", "mma flops", "registers", "code bytes", "history", "megamoe explain"):
        assert name in detail, f"the drawer says nothing of {name}"
    assert f"{shown.counters['mma_flops']:,}".replace(",", "\u202f") in detail
    assert str(shown.program_sha256) in detail
    assert "the text of this digest" in detail, "it says what its evidence is about"
    assert not complaints(browser)
    assert not nameless(browser)


def test_the_address_keeps_what_is_shown(browser: Chrome, full: Path) -> None:
    open_page(browser, full)
    click(browser, "fmha:hd=256,t=4,s_k=512 ptx sm_100a vm")
    press(browser, "m")
    address = browser.current_url.partition("#")[2]
    open_page(browser, full, f"#{address}")
    assert "fmha:hd=256,t=4,s_k=512" in one(browser, "#detail").text
    assert "measure=error" in browser.current_url
    open_page(browser, full, "#view=nonsense&measure=<b>&row=nobody&filter=%00&backend=x")
    assert not complaints(browser), "an address that means nothing is not an error"


def clear(browser: Chrome) -> set[str]:
    """Names of the cells that pass the filter."""
    return set(labels(browser, "#main td[data-cell]:not(.faded)"))


def test_the_filter_leaves_what_matches(browser: Chrome, full: Path, material: Material) -> None:
    open_page(browser, full)
    everything = clear(browser)
    press(browser, "/", "hd=64 ptx -vm")
    expected = {
        f"{one.case} {one.backend} {one.target} {one.executor}"
        for one in material.latest
        if "hd=64" in one.case.replace(":", ",").split(",") and "ptx" in one.backend and one.executor != "vm"
    }
    assert expected
    assert {label.rpartition(": ")[0] for label in clear(browser)} == expected
    assert one(browser, "#matches").text.startswith(str(len(expected)))
    press(browser, Keys.ESCAPE, Keys.ESCAPE)
    assert clear(browser) == everything, "Escape clears it"
    press(browser, "/", "failed")
    assert {label.rpartition(" ")[2] for label in clear(browser)} <= {"failed", "passed", "unsupported"}
    assert any(label.endswith(": failed") for label in clear(browser))
    assert not any(label.endswith(": crashed") for label in clear(browser))


def brightness(browser: Chrome) -> float:
    colour = cast("str", browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor"))
    return sum(float(part) for part in colour.removeprefix("rgb(").rstrip(")").split(","))


def test_dark_and_light_follow_the_reader(browser: Chrome, full: Path) -> None:
    for preferred, lit in (("dark", False), ("light", True)):
        features = [{"name": "prefers-color-scheme", "value": preferred}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        open_page(browser, full)
        assert (brightness(browser) > 384) == lit, f"the page does not follow a preference for {preferred}"
    press(browser, "d")
    assert brightness(browser) < 384, "d: dark"
    press(browser, "d")
    assert brightness(browser) > 384, "d again: light"
    one(browser, "#theme").click()
    assert one(browser, "#theme").text == "theme: auto"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_paper_is_white_and_has_no_controls(browser: Chrome, full: Path) -> None:
    open_page(browser, full)
    press(browser, "d")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert brightness(browser) > 700
    assert not one(browser, ".controls").is_displayed()
    assert cell_of(browser, "fmha:hd=64,t=1,s_k=128 ptx").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_bars_and_compared_rows_open_their_row(browser: Chrome, full: Path) -> None:
    for view in ("times", "comparison"):
        open_page(browser, full, f"#view={view}")
        one(browser, "#main tr[data-cell]").send_keys(Keys.ENTER)
        assert one(browser, "#detail").is_displayed(), f"Enter on a line of {view}"
        press(browser, Keys.ESCAPE)
        assert not one(browser, "#detail").is_displayed()
    open_page(browser, full, "#view=times")
    assert len(browser.find_elements(By.CSS_SELECTOR, "svg path.mark[data-cell]")) > 50, "the roofline has its points"
    assert browser.find_elements(By.CSS_SELECTOR, "svg .roof")
    assert not complaints(browser)


SERIES = """
const looks = [...document.querySelectorAll('#main [data-cell]')].map((node) => {
  const [, subject] = node.dataset.cell.split('.');
  const bar = node.querySelector('.track span');
  const marks = node.matches('path') ? [node] : [...node.querySelectorAll('path.mark')];
  const colours = marks.map((mark) => getComputedStyle(mark).fill);
  return [subject, [...colours, ...(bar ? [getComputedStyle(bar).backgroundColor] : [])]];
});
const keys = [...document.querySelectorAll('#main .legend .key')].map((key) => {
  const mark = key.querySelector('path.mark');
  return [key.textContent, getComputedStyle(mark).fill, mark.getAttribute('d')];
});
return [looks, keys, DATA_SUBJECTS];
"""


def test_a_series_has_one_colour_in_legend_plot_and_bars(browser: Chrome, tmp_path: Path) -> None:
    """There are eight colours and eight markers; this page has twelve series."""
    backends = [f"backend{number}" for number in range(12)]
    work = record(counters={"useful_flops": 1 << 20, "minimum_bytes": 1 << 10})
    lines = [timing([4.0 + at] * 10, backend=backend) for at, backend in enumerate(backends)]
    path = tmp_path / "page.html"
    path.write_text(page(material_of(tmp_path, header(), work, *lines), Extras(SPECS, NOW)), encoding="utf-8")
    open_page(browser, path, "#view=times")
    script = SERIES.replace("DATA_SUBJECTS", "JSON.parse(document.getElementById('data').textContent).subjects")
    looks, keys, subjects = cast("list[list[Any]]", browser.execute_script(script))
    legend = {name: colour for name, colour, _ in keys}
    assert sorted(legend) == sorted(backends)
    assert len({(colour, shape) for _, colour, shape in keys}) == len(keys), "two series look alike"
    shown = {subjects[int(subject)][0]: set[str]() for subject, _ in looks}
    for subject, colours in looks:
        shown[subjects[int(subject)][0]].update(colours)
    assert shown == {name: {colour} for name, colour in legend.items()}


def test_the_newest_run_has_its_own_device_and_times_theirs(browser: Chrome, tmp_path: Path) -> None:
    on_the_vm = header("run-2", device=None).model_copy(update={"started": "2026-11-21T19:00:00+00:00"})
    path = tmp_path / "page.html"
    material = material_of(tmp_path, header(), timing([4.0] * 10), on_the_vm)
    path.write_text(page(material, Extras(SPECS, NOW)), encoding="utf-8")
    open_page(browser, path)
    said = one(browser, "#provenance").text
    assert "newest run 2026-11-21 19:00 UTC at revision abc · no device · Linux" in said
    assert said.endswith("times of: NVIDIA H200")


LOOK = """
const node = [...document.querySelectorAll('.legend .key')].find((key) => key.textContent === arguments[0]);
const mark = node.querySelector('path.mark');
return [mark.getAttribute('d'), getComputedStyle(mark).fill, getComputedStyle(mark).fillOpacity];
"""
TEXTS = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"


def _page(folder: Path, *lines: AnyLine) -> Path:
    path = folder / "page.html"
    path.write_text(page(material_of(folder, *lines), Extras(SPECS, NOW)), encoding="utf-8")
    return path


def _texts(browser: Chrome, selector: str) -> list[str]:
    return cast("list[str]", browser.execute_script(TEXTS, selector))


def test_a_marker_stays_with_its_backend_and_differs_from_all_others(browser: Chrome, tmp_path: Path) -> None:
    """Sixteen backends: with eight markers, torch-sdpa-flash would get fa3's."""
    names = [f"peer{number}" for number in range(1, 17)]
    times = [timing([4.0 + at] * 10, backend=name) for at, name in enumerate(names)]
    path = _page(tmp_path, header(), record(counters={"useful_flops": 1 << 20, "minimum_bytes": 1 << 10}), *times)
    open_page(browser, path, "#view=times")
    assert _texts(browser, ".legend .key") == names, "peer2 comes before peer10"
    looks = [tuple(cast("list[str]", browser.execute_script(LOOK, name))) for name in names]
    assert len({(shape, opacity) for shape, _, opacity in looks}) == 16, "two markers differ in their colour alone"
    open_page(browser, path, "#view=times&backend=peer11")
    assert tuple(cast("list[str]", browser.execute_script(LOOK, "peer11"))) == looks[10], "a filter changed its look"


def test_what_the_newest_run_has_comes_first_and_what_is_empty_is_folded(browser: Chrome, tmp_path: Path) -> None:
    later = header("run-2", device=None).model_copy(update={"started": "2026-11-21T19:00:00+00:00"})
    old = [record(backend=name) for name in ("A10", "A2")]
    new = [record(backend=name, run="run-2") for name in ("Z10", "Z9")]
    open_page(browser, _page(tmp_path, header(), *old, record("unsupported", backend="B"), later, *new))
    shown = [text.split()[0] for text in _texts(browser, ".heat th.subject, .heat th.upright")]
    assert shown == ["Z9", "Z10", "A2", "A10"]
    fold = one(browser, "details.folded")
    assert fold.text == "1 backend with no result here: B"
    fold.find_element(By.TAG_NAME, "summary").click()
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert "B" in _texts(browser, "details.folded .heat th.subject, details.folded .heat th.upright")[0]


def test_a_sentence_has_a_line_a_tensor_with_the_worst_place_in_bold(browser: Chrome, tmp_path: Path) -> None:
    said = (
        f"{CASE}: tensor o: rms error 0.5 is above 0.01; worst at t=0, hd=61: seen -0.75, expected -1.5; 63 of 64 "
        "elements are off; tensor lse: max error 2 is above 1; worst at t=3: seen 1, expected 3"
    )
    failed = record("failed").model_copy(update={"sentence": f"{said}. Rerun: megamoe run --case x"})
    open_page(browser, _page(tmp_path, header(), failed), f"#row={CASE} ptx sm_100a vm".replace(" ", "+"))
    lines = _texts(browser, ".sentence .said")
    assert [line[:11] for line in lines] == [f"{CASE}"[:11], "tensor o: r", "tensor lse:"]
    assert _texts(browser, ".sentence b") == ["worst at t=0, hd=61", "worst at t=3"]
    assert "Rerun" not in "".join(lines)


def test_a_row_is_held_to_a_floor_that_means_something(browser: Chrome, tmp_path: Path) -> None:
    floor = {"floor_us": 0.008, "floor_by": "bytes"}
    times = [timing([6.0] * 10, backend=name).model_copy(update=floor) for name in ("ptx", "cutedsl")]
    path = _page(tmp_path, header(), *times)
    open_page(browser, path, "#view=times")
    row = one(browser, ".bars tr[data-cell]").text
    assert "launch" in row, "0.008 us of bytes is no floor of a launch"
    assert "<.01" not in row
    known = H200.model_copy(update={"empty_kernel_us": {"cold": 3.0, "hot": 2.0}})
    path = _page(tmp_path, header(device=known), *times)
    open_page(browser, path, "#view=times")
    row = one(browser, ".bars tr[data-cell]").text
    assert "3.00 empty kernel" in row
    assert "0.50" in row


def test_a_row_shows_how_it_went_over_the_runs(browser: Chrome, tmp_path: Path) -> None:
    later = header("run-2").model_copy(update={"started": "2026-11-21T19:00:00+00:00"})
    lines = (timing([4.0] * 10), record(), later, timing([6.0] * 10, run="run-2"), record("failed", run="run-2"))
    path = _page(tmp_path, header(), *lines)
    open_page(browser, path, "#view=times")
    assert one(browser, ".bars .trend").text == "+50%"
    assert one(browser, ".bars .trend svg").get_attribute("aria-label") == "median over 2 runs"
    open_page(browser, path)
    assert "passed on 2026-11-21 18:00" in (one(browser, ".heat td.changed").get_attribute("title") or "")


@pytest.fixture
def narrow(browser: Chrome) -> Iterator[Chrome]:
    size = {"width": 420, "height": 860, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_narrow_page_begins_with_results_and_breaks_no_id(narrow: Chrome, full: Path) -> None:
    for view in VIEWS:
        open_page(narrow, full, f"#view={view}")
        assert narrow.execute_script("return document.documentElement.scrollWidth") <= 420, f"{view} scrolls sideways"
        thin = cast(
            "list[str]",
            narrow.execute_script(
                "return [...document.querySelectorAll('td.mono, th.mono, th.subject, td code')]"
                ".filter((node) => node.checkVisibility() && node.textContent.length > 12"
                " && node.getBoundingClientRect().height > 6 * 20 && node.getBoundingClientRect().width < 70)"
                ".map((node) => node.textContent)"
            ),
        )
        assert not thin, f"{view}: ids in lines of a few letters: {thin[:3]}"
    open_page(narrow, full)
    assert not narrow.find_element(By.CSS_SELECTOR, ".controls").is_displayed(), "filters fill the first screen"
    first = narrow.find_element(By.CSS_SELECTOR, ".heat td[data-cell]")
    assert first.rect["y"] < 600, "the first screen shows no result"
    beside = narrow.execute_script(
        "return [...document.querySelectorAll('.heat tbody tr')].map((row) => row.querySelector('td[data-cell]'))"
        ".filter((cell) => cell?.checkVisibility()).map((cell) => cell.getBoundingClientRect().right)"
    )
    assert len(beside) > 10
    assert max(beside) <= 420, "an id fills the line, and its results lie beyond the edge"
    one(narrow, ".folds summary").click()
    assert narrow.find_element(By.CSS_SELECTOR, ".controls").is_displayed()
    narrow.find_element(By.CSS_SELECTOR, "[data-choice=rows] [data-value=row]").click()
    assert narrow.find_element(By.CSS_SELECTOR, ".controls").is_displayed(), "a choice folded the filters again"


def test_the_roofline_is_as_wide_as_the_page(browser: Chrome, full: Path) -> None:
    open_page(browser, full, "#view=times")
    assert not shared_ids(browser)
    widths = browser.execute_script(
        "return [document.querySelector('figure svg').getBoundingClientRect().width,"
        " document.getElementById('main').clientWidth]"
    )
    assert widths[0] > 0.9 * widths[1], widths
