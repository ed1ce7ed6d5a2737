"""A headless Chromium for tests: found on this machine, driven by selenium, with nothing that reaches a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from megamoe.cli.options import in_ci

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1500,950",
)  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def chromium_paths() -> tuple[str, str]:
    """Paths of the browser and its driver. Without them the tests are skipped, but in CI they fail."""
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
    """A browser with an empty profile that keeps what its console says and what it asks a network for."""
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


def open_page(browser: Chrome, path: Path, address: str = "") -> None:
    """Opens the file afresh, also where another address of it is open, and forgets what was logged before."""
    browser.get("about:blank")
    complaints(browser)
    requests(browser)
    browser.get(f"{path.as_uri()}{address}")
    # What a page draws once it knows its size comes a frame or two after it has loaded.
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))")


def complaints(browser: Chrome) -> list[str]:
    """What the console has said since the last call."""
    return [entry["message"] for entry in cast("list[dict[str, Any]]", browser.get_log("browser"))]


def requests(browser: Chrome) -> list[str]:
    """The addresses that were asked for since the last call, without the page itself and data: URLs."""
    found: list[str] = []
    for entry in cast("list[dict[str, Any]]", browser.get_log("performance")):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent" and event["params"].get("type") != "Document":
            found.append(event["params"]["request"]["url"])
    return [url for url in found if not url.startswith("data:")]


def nameless(browser: Chrome) -> list[str]:
    """What a person can act on, or has to know, but a screen reader cannot say: from the browser's own tree."""
    tree = cast("dict[str, Any]", browser.execute_cdp_cmd("Accessibility.getFullAXTree", {}))
    acting = {"button", "link", "tab", "searchbox", "textbox", "gridcell", "dialog", "complementary", "grid", "img"}
    found: list[str] = []
    for node in tree["nodes"]:
        role = node.get("role", {}).get("value")
        focusable = any(one["name"] == "focusable" for one in node.get("properties", []))
        counts = not node["ignored"] and role in acting and (focusable or role != "gridcell")
        if counts and not node.get("name", {}).get("value"):
            found.append(f"{role}: {json.dumps(node)[:200]}")
    return found
