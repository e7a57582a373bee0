"""The web console's page in a real browser: what a stranger sees, does and is refused; contrast, names and keyboard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bus import Bus
from bus.knobs.live import read_history
from bus.topology import DEAD, POLICY, PROMPTS
from tests.miles_async.browser import FAINT, IN_A_BROWSER, WIDER, Keys, Visitor, browser, nameless
from tests.miles_async.console_data import config, step_done, task
from tests.miles_async.web_house import HOSTILE, Page, console

__all__ = ["browser"]
pytestmark = IN_A_BROWSER
PANELS = ("cockpit", "samples", "knobs", "events", "drops", "dead")


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


def opens(v: Visitor, panel: str) -> None:
    v.one(f"#tab-{panel}").send_keys(Keys.ENTER)
    assert v.one(f"#panel-{panel}").is_displayed(), panel


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
    opens(v, "drops")
    v.one("#trace-id").send_keys("g2/1", Keys.ENTER)
    v.sees("#panel-drops .life", "group dropped by the filter: zero_std_0")
    # the staleness bound: refused in place, then turned
    opens(v, "knobs")
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
    opens(v, "dead")
    v.sees("#panel-dead article", "no room <b>here</b>")
    v.one("#panel-dead [aria-label='retry g4/0']").send_keys(Keys.ENTER)
    v.sees("#panel-dead", "g4/0 is back on prompts")
    for width, dark in ((1440, False), (1440, True), (400, False)):
        v.window(width, dark=dark)
        for panel in PANELS:
            opens(v, panel)
            faint, hacked = v.driver.execute_script(FAINT)
            assert (faint, hacked) == ([], None), f"{panel} at {width}, dark {dark}"
            assert nameless(v) == [], panel
            assert v.driver.execute_script(WIDER, width) == [], f"{panel} at {width}"
    opens(v, "cockpit")
    assert v.one("#flow table").is_displayed() and not v.one("#flow svg").is_displayed(), "narrow: the flow as a table"
    assert [text for text in v.complaints() if "422" not in text] == [], "but for the patch that was refused"
