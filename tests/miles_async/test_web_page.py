"""The web console's page in a real browser: what a stranger sees, does and is refused; contrast, names and keyboard."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bus import Bus
from bus.knobs.live import read_history
from bus.topology import DEAD, POLICY, PROMPTS
from tests.miles_async.console_data import config, step_done, task
from tests.miles_async.web_house import HOSTILE, Page, console

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="no chromium and chromedriver on PATH"),
    pytest.mark.timeout(120),
]
NAMED = ("button", "textbox", "searchbox", "combobox", "link", "image", "region", "tab", "tabpanel", "progressbar")
PANELS = ("cockpit", "samples", "knobs", "events", "drops", "dead")
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
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1440,900"):
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

    def opens(self, panel: str) -> None:
        self.one(f"#tab-{panel}").send_keys(Keys.ENTER)
        assert self.one(f"#panel-{panel}").is_displayed(), panel

    def press(self, *keys: str) -> Any:
        """Press keys where the focus is; what has the focus then."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)
        return self.driver.switch_to.active_element

    def window(self, width: int, *, dark: bool) -> None:
        send = self.driver.execute_cdp_cmd
        send("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        send("Emulation.setEmulatedMedia", {"features": [scheme]})

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


async def test_a_stranger_reads_steers_and_cannot_be_hacked(redis_url: str, run_name: str, tmp_path: Path, browser: Any) -> None:
    async with console(redis_url, run_name, tmp_path) as page:
        await page.story.die("g4/0", PROMPTS, task("g4/0"), error="no room <b>here</b>")
        visitor = Visitor(browser)
        loop = asyncio.get_running_loop()

        def say(step: int) -> None:
            asyncio.run_coroutine_threadsafe(page.story.say(POLICY, step_done(step, raw_reward=0.75)), loop).result(20)

        await asyncio.to_thread(visit, visitor, page, say)
    async with Bus(config(redis_url, run_name)) as bus:
        assert [(p.epoch, p.values.get("max_weight_staleness")) for p in await read_history(bus)][1:] == [(1, 2)]
        assert await bus.scan_all(DEAD) == []


def visit(v: Visitor, page: Page, say: Callable[[int], None]) -> None:
    v.window(1440, dark=False)
    v.driver.get(page.address)
    assert "token" not in v.driver.current_url
    # why the trainer waits, the flow, the curves; live
    v.sees("#why-text", "The trainer ")
    v.sees("#flow svg", "prompts 3")
    v.sees("#standing", "step 1 of 3")
    say(2)
    v.sees("#standing", "step 2 of 3")
    v.sees("#charts", "training 0.75")
    assert v.driver.execute_script("return document.documentElement.scrollHeight") <= 900, "the cockpit is one screen"
    # by keyboard: skip link first, then the tabs by arrows
    v.driver.execute_script("document.activeElement.blur(); getSelection().collapse(document.body, 0)")
    assert v.press(Keys.TAB).text == "Skip to the content"
    v.one("#tab-cockpit").send_keys(Keys.ARROW_RIGHT)
    assert v.press().get_attribute("id") == "tab-samples"
    # the worst sample, as text
    v.sees("#panel-samples article:first-child", HOSTILE)
    assert "g1/0" in v.one("#panel-samples article:first-child h3").text
    # why a sample was dropped
    v.opens("drops")
    v.one("#trace-id").send_keys("g2/1", Keys.ENTER)
    v.sees("#panel-drops .life", "group dropped: zero_std_0")
    # the staleness bound: refused in place, then turned
    v.opens("knobs")
    v.sees("#panel-knobs", "max_weight_staleness")
    v.one("#knob-search").send_keys("weight stal")
    field = v.one("#knob-max_weight_staleness")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("-1", Keys.ENTER)
    v.sees("#knob-max_weight_staleness-error", "Nothing was changed")
    assert v.press().get_attribute("aria-invalid") == "true"
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("2", Keys.ENTER)
    v.sees("#panel-knobs .log", "max_weight_staleness = 2")
    v.sees("#panel-knobs [role=status]", "epoch 1: max_weight_staleness = 2, at: next")
    v.opens("dead")
    v.sees("#panel-dead article", "no room <b>here</b>")
    v.one("#panel-dead [aria-label='retry g4/0']").send_keys(Keys.ENTER)
    v.sees("#panel-dead", "g4/0 is back on prompts")
    for width, dark in ((1440, False), (1440, True), (400, False)):
        v.window(width, dark=dark)
        for panel in PANELS:
            v.opens(panel)
            faint, hacked = v.driver.execute_script(FAINT)
            assert (faint, hacked) == ([], None), f"{panel} at {width}, dark {dark}"
            assert nameless(v) == [], panel
            assert v.driver.execute_script(WIDER, width) == [], f"{panel} at {width}"
    v.opens("cockpit")
    assert v.one("#flow table").is_displayed() and not v.one("#flow svg").is_displayed(), "narrow: the flow as a table"
    assert [text for text in v.complaints() if "422" not in text] == [], "but for the patch that was refused"


def nameless(v: Visitor) -> list[str]:
    """Roles of things on the open panel that a screen reader could not name."""
    nodes = v.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    shown = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    found = [(role, name) for role, name in shown if role in NAMED]
    assert len(found) > len(PANELS), "it reads the tree"
    return [role for role, name in found if not name]
