"""Other runs over this one's curves, in a real browser and by keyboard: up to six, each by its own letter and colour."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from selenium.webdriver.common.action_chains import ActionChains

from miles_async.settings.runs import write_run_file
from tests.miles_async.browser import FAINT, IN_A_BROWSER, WIDER, Keys, Visitor, browser, nameless
from tests.miles_async.console_data import step_done
from tests.miles_async.test_console_report import lines
from tests.miles_async.web_house import Page, console

__all__ = ["browser"]
pytestmark = IN_A_BROWSER
NAMES = ("bound-1", "bound-2", "bound-4", "colocated", "long-answers-with-a-name-that-is-rather-long", "lr-low", "seed-7")
LETTERS = "ABCDEF"
# Contrast with the card of what is no text: the colours that mean runs, and of the letters on them.
PALE = """
const part = (c) => { const x = c / 255; return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; };
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const card = light(getComputedStyle(document.querySelector("header")).backgroundColor);
return [...document.querySelectorAll("#overlays .key, #overlays .dot")].map((node) => {
  const [a, b] = [light(getComputedStyle(node).backgroundColor), card].sort((x, y) => y - x);
  return [getComputedStyle(node).backgroundColor, (a + 0.05) / (b + 0.05)]; });
"""
# Of the runs to choose from and of the charts' values: what reaches over its place or the window.
CUT = """
const out = ({ left, right }) => right - left && (left < 0 || right > arguments[0]);
const found = [...document.querySelectorAll("#runs, #runs *, #overlays *")].filter((node) => out(node.getBoundingClientRect()));
const cut = [...document.querySelectorAll(".values")].filter((node) => node.scrollHeight > node.clientHeight + 1);
return [...found, ...cut].map((node) => node.outerHTML.slice(0, 80));
"""


def ran(runs_dir: Path, name: str, n: int, level: float) -> None:
    """Another run of `n` steps, two a step apart, whose reward is `level` at the end; with an evaluation, if it has steps."""
    write_run_file(runs_dir / name, run=name, bus_url="redis://localhost:1/0")
    steps = [
        {"kind": "step", "wall": 1.0 + s, "step": 2 * s, "groups": [],
         "metrics": step_done(2 * s, raw_reward=level * s / n).metrics | {"train/loss": 0.5}}
        for s in range(1, n + 1)
    ]  # fmt: skip
    evals = [{"kind": "eval", "wall": 2.0, "step": 2, "name": "held", "metrics": {"eval/held": level}}]
    lines(runs_dir / name, [*steps, *evals] if n else [])


async def test_up_to_six_runs_lie_over_this_one(redis_url: str, run_name: str, tmp_path: Path, browser: Any) -> None:
    for i, name in enumerate(NAMES):
        ran(tmp_path, name, 10 + i, 0.2 + i / 10)
    ran(tmp_path, "without-steps", 0, 0.0)
    async with console(redis_url, run_name, tmp_path) as page:
        await asyncio.to_thread(visit, Visitor(browser), page, tmp_path)


def tick(v: Visitor, name: str) -> None:
    box = v.one(f'#runs input[value="{name}"]')
    box.send_keys(Keys.SPACE)


def visit(v: Visitor, page: Page, pictures: Path) -> None:
    v.window(1440, dark=False)
    v.driver.get(page.address)
    v.sees("#standing", "step 1 of 3")
    assert not v.one("#overlays").is_displayed()
    # all by keyboard: open, find, choose
    v.one("#compare").send_keys(Keys.ENTER)
    v.sees("#runs", "0 of at most 6 runs")
    v.press("BOUND-2")
    assert [box.get_attribute("value") for box in v.all("#runs input[type=checkbox]")] == ["bound-2"]
    v.press(Keys.TAB, Keys.SPACE)
    v.sees("#overlays", "bound-2 to step 22")
    assert v.press().get_attribute("value") == "bound-2", "the focus stays where it was"
    v.press(Keys.ESCAPE)
    assert not v.one("#runs").is_displayed() and v.press().get_attribute("id") == "compare"
    v.one("#compare").send_keys(Keys.ENTER)
    v.press(*[Keys.BACKSPACE] * 7)
    for i, name in enumerate(("bound-1", *NAMES[2:6])):
        tick(v, name)
        v.sees("#runs [role=status]", f"{i + 2} of at most 6")
    # one more, one without steps: said in words, and nothing changes
    tick(v, "seed-7")
    v.sees("#runs [role=status].error", "6 runs are shown over this one, as many as can be told apart")
    assert not v.one('#runs input[value="seed-7"]').is_selected()
    tick(v, "colocated")
    v.sees("#runs [role=status]", "5 of at most 6")
    tick(v, "without-steps")
    v.sees("#runs [role=status].error", "without-steps is not shown: it has no step on record yet")
    # who is freed gives its letter and colour to the next; the others keep theirs
    tick(v, "seed-7")
    v.sees("#runs [role=status]", "6 of at most 6")
    keys = [(key.text, key.find_element("xpath", "following-sibling::*[1]").text) for key in v.all("#overlays .key")]
    assert keys == list(zip(LETTERS, ("bound-2", "bound-1", "bound-4", "seed-7", NAMES[4], "lr-low"), strict=True))
    v.driver.save_screenshot(str(pictures / "choosing.png"))
    v.press(Keys.ESCAPE)
    # each chart names them: the newest value of each, and what each was where the cursor is
    reward = ".chart:first-child .values"
    v.sees(reward, "A0.3 · 0.3 B0.2 · 0.2 C0.4 · 0.4 D0.8 · 0.8 E0.6 · 0.6 F0.7 · 0.7")
    assert "bound-2: training 0.3" in v.one(".chart:first-child .plot").get_attribute("aria-label")
    over = v.one(".chart:first-child .u-over")
    ActionChains(v.driver).move_to_element_with_offset(over, -over.size["width"] // 2 + 1, 0).perform()
    v.sees(reward, "step 1: ")
    v.sees(reward, "A– ")
    ActionChains(v.driver).move_to_element(v.one("#name")).perform()
    for width, dark in ((1440, False), (1440, True), (400, False), (400, True)):
        v.window(width, dark=dark)
        v.settles()
        for chosen in (True, False):
            if v.one("#runs").is_displayed() is not chosen:
                v.one("#compare").send_keys(Keys.ENTER)
            faint, _ = v.driver.execute_script(FAINT)
            assert faint == [], f"{width}, dark {dark}"
            assert nameless(v) == [] and v.driver.execute_script(WIDER, width) == [], f"{width}, dark {dark}"
            assert v.driver.execute_script(CUT, width) == [], f"{width}, dark {dark}"
            seen = "header" if chosen else "#overlays"
            v.driver.execute_script("document.querySelector(arguments[0]).scrollIntoView()", seen)
            v.driver.save_screenshot(str(pictures / f"{width}-{dark}-{chosen}.png"))
        told = v.driver.execute_script(PALE)
        assert len({hue for hue, _ in told}) == 7, "this run and six more: each its own colour"
        assert min(ratio for _, ratio in told) >= 4.5
    v.window(1440, dark=False)
    assert v.driver.execute_script("return document.documentElement.scrollHeight") <= 900, "the cockpit is one screen"
    # taken out again from the legend
    for left in (5, 4, 3, 2, 1, 0):
        v.one("#overlays button").send_keys(Keys.ENTER)
        v.sees("#runs [role=status]", f"{left} of at most 6")
    assert not v.one("#overlays").is_displayed() and v.press().get_attribute("id") == "compare"
    v.gone(reward, "A")
    assert v.complaints() == []
