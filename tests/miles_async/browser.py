"""A visitor in a real browser: what is seen, pressed and complained about; contrast, names and width of a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
__all__ = ["FAINT", "IN_A_BROWSER", "WIDER", "Keys", "Visitor", "browser", "nameless"]
IN_A_BROWSER = [
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="no chromium and chromedriver on PATH"),
    pytest.mark.timeout(120),
]
NAMED = ("button", "textbox", "searchbox", "combobox", "link", "image", "region", "tab", "tabpanel", "progressbar")
# Text on the page whose contrast with what lies behind it is below AA: 4.5, or 3 for large text.
FAINT = """
const part = (c) => { const x = c / 255; return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; };
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
const behind = (node) => { for (; node; node = node.parentElement) {
  const c = numbers(getComputedStyle(node).backgroundColor); if (c.length < 4 || c[3] > 0.99) return c; } return [255, 255, 255]; };
const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let text; (text = walk.nextNode());) {
  const node = text.parentElement, style = getComputedStyle(node), box = node.getBoundingClientRect();
  if (!text.data.trim() || !box.width || !box.height || style.visibility === "hidden") continue;
  const drawn = node instanceof SVGElement, rect = drawn && node.parentElement.querySelector("rect");
  const back = rect ? numbers(getComputedStyle(rect).fill) : behind(drawn ? node.closest("svg").parentElement : node);
  const [a, b] = [light(numbers(drawn ? style.fill : style.color)), light(back)].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < (large ? 3 : 4.5)) found.push(`${text.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
}
return [found, window.hacked ?? null];
"""
# What makes the page wider than the window; empty when nothing does.
WIDER = """
if (document.documentElement.scrollWidth <= arguments[0]) return [];
return [...document.querySelectorAll("body *")].filter((node) => node.getBoundingClientRect().right > arguments[0] + 1)
  .map((node) => node.outerHTML.slice(0, 60));
"""


@pytest.fixture
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1440,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


class Visitor:
    """What somebody in front of the page does. Waits have a deadline."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def one(self, css: str) -> Any:
        return self.driver.find_element("css selector", css)

    def sees(self, css: str, text: str) -> None:
        def there(_: Any) -> bool:
            return text in self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", css)

        WebDriverWait(self.driver, 20, 0.1).until(there, f"{text!r} in {css}")

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def gone(self, css: str, text: str) -> None:
        def away(_: Any) -> bool:
            return text not in self.one(css).text

        WebDriverWait(self.driver, 20, 0.1).until(away, f"{text!r} still in {css}")

    def settles(self) -> None:
        """Until what was asked for has been drawn: two frames."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def press(self, *keys: str) -> Any:
        """Press keys where the focus is; what has the focus then."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)
        return self.driver.switch_to.active_element

    def window(self, width: int, *, dark: bool) -> None:
        send = self.driver.execute_cdp_cmd
        send(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        send("Emulation.setEmulatedMedia", {"features": [scheme]})

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def nameless(v: Visitor) -> list[str]:
    """Roles of things on the page that a screen reader could not name."""
    nodes = v.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    shown = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    found = [(role, name) for role, name in shown if role in NAMED]
    assert len(found) > 5, "it reads the tree"
    return [role for role, name in found if not name]
