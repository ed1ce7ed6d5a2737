"""A headless Chromium for tests, driven by selenium, with every service that reaches a network switched off."""

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
    """Paths of the browser and its driver. If one is missing the test is skipped, in CI it fails."""
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


def open_page(browser: Chrome, path: Path, address: str = "") -> None:
    """Loads the file anew, even if it is open at another address, and clears the logs."""
    browser.get("about:blank")
    complaints(browser)
    requests(browser)
    browser.get(f"{path.as_uri()}{address}")
    # The page draws again a frame or two after it has loaded, once it knows its size.
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))")


def complaints(browser: Chrome) -> list[str]:
    """The messages of the console since the last call."""
    return [entry["message"] for entry in cast("list[dict[str, Any]]", browser.get_log("browser"))]


def requests(browser: Chrome) -> list[str]:
    """The addresses requested since the last call, without the page itself and data: URLs."""
    found: list[str] = []
    for entry in cast("list[dict[str, Any]]", browser.get_log("performance")):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent" and event["params"].get("type") != "Document":
            found.append(event["params"]["request"]["url"])
    return [url for url in found if not url.startswith("data:")]


def nameless(browser: Chrome) -> list[str]:
    """Controls and regions without a name for a screen reader, from the accessibility tree of the browser."""
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
