"""report.html in a real browser, from disk and without network: what is shown, filtered, zoomed, compared.

Nothing that a sample says is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_async.cli.app import main
from tests.miles_async.browser import FAINT, IN_A_BROWSER, WIDER, Keys, Visitor, browser, nameless
from tests.miles_async.test_console_report import lines, some_steps
from tests.miles_async.web_house import HOSTILE

__all__ = ["browser"]
pytestmark = IN_A_BROWSER


def folder(runs_dir: Path, name: str, n: int) -> Path:
    """A run of `n` steps with everything on record that the page shows."""
    run_dir = runs_dir / name
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps({"run": name, "bus_url": "redis://localhost:1/0"}))
    (run_dir / "settings.toml").write_text(f"[rollout]\nmax_weight_staleness = 2\nrollout_batch_size = {n}\n")
    steps = list(some_steps(n))
    for r in steps:
        if r["kind"] == "step":
            r["metrics"] |= {
                "train/loss": 0.1 * r["step"],
                "rollout/start_age/0": 0.25,
                "rollout/start_age/8_up": 0.75,
                "rollout/samples": 16.0,
            }
            r["dropped"] = [["g9", "stale"]]
    hosts = [
        {"kind": "system", "wall": 101.0 + i, "source": "vm", "values": {"cpu_share": 0.5, "gpu0_power_w": 300.0}} for i in range(n)
    ]
    more = [
        {"kind": "eval", "wall": 101.5, "step": 1, "name": "held", "metrics": {"eval/held": 0.5}},
        {
            "kind": "fault",
            "wall": 110.0,
            "actor": "generation-0",
            "event": "engine",
            "text": "it <b>stood</b>",
            "level": "warning",
        },
        {"kind": "restored", "wall": 131.0, "step": n},
    ]
    lines(run_dir, [{"kind": "restored", "wall": 99.0, "step": 0}, *steps, *hosts, *more])
    turns = [
        {"by": "model", "text": "call calc"},
        {"by": "environment", "text": "4"},
        {"by": "model", "text": HOSTILE + "</script><script>window.hacked = 2</script>"},
    ]
    kept = {"group": "g1", "version": 1, "finish": "stop", "prompt": "2+2", "label": "4"}
    found = [
        kept | {"step": s, "sample": f"g1/{s}", "reward": s / 10, "tokens": 10 * s, "response": f"answer {s}"} for s in range(1, 13)
    ]
    found[4]["turns"] = turns
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in found))
    return run_dir


def test_a_reader_looks_into_a_run_without_network(tmp_path: Path, browser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path, "first", 30)
    folder(tmp_path, "other", 20)
    assert main(["report", "first", "other", "--runs-dir", str(tmp_path)]) == 0
    path = tmp_path / "first" / "report-compared.html"
    assert str(path) in capsys.readouterr().out
    v = Visitor(browser)
    v.window(1440, dark=False)
    v.driver.execute_cdp_cmd("Network.enable", {})
    v.driver.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    v.driver.get(path.as_uri())
    # curves of both runs, the hosts, the events
    v.sees("#charts", "first: loss 3")
    v.sees("#charts", "other: loss 2")
    v.sees("#charts", "vm gpu0 300")
    v.sees("#charts", "first: 8 and more 75 %")
    v.sees("#charts", "first: stale 1")
    assert len([c for c in v.all(".chart canvas") if c.is_displayed()]) >= 10
    v.sees("main", "rollout_batch_size")
    # a run and a line are switched off
    v.one("#controls [role=group] button:nth-child(2)").send_keys(Keys.ENTER)
    v.gone("#charts", "other: loss")
    key = v.one(".chart:nth-child(2) .key")
    key.send_keys(Keys.ENTER)
    assert v.press().get_attribute("aria-pressed") == "false", "the focus stays where it was"
    # the x axis, and values by keyboard
    for value, said in (("samples", "samples 480"), ("wall", "31 s"), ("step", "step 30")):
        v.driver.execute_script(
            "const x = document.querySelector('#x'); x.value = arguments[0]; x.dispatchEvent(new Event('change'))",
            value,
        )
        plot = v.one(".chart:first-child .plot")
        v.settles()
        plot.send_keys(Keys.END)
        v.sees("#spoken", said)
    v.sees("#spoken", "training 1")
    plot.send_keys(Keys.ARROW_LEFT)
    v.sees("#spoken", "step 29")
    assert not v.one("#whole").is_enabled()
    plot.send_keys("+")
    assert v.one("#whole").is_enabled()
    plot.send_keys("0")
    assert not v.one("#whole").is_enabled()
    v.driver.execute_script("const s = document.querySelector('#smooth'); s.value = 0.9; s.dispatchEvent(new Event('input'))")
    # a metric that has no chart of its own
    v.driver.execute_script(
        "const a = document.querySelector('#another'); a.value = 'rollout/tokens'; a.dispatchEvent(new Event('change'))"
    )
    v.sees("#charts", "rollout/tokens remove")
    # samples by words, turns, reward and length
    v.sees("#found", "12 of 12 samples, 8 shown")
    v.one("#text").send_keys("CALL CALC")
    v.sees("#found", "1 of 12 samples")
    v.sees("#list article .turn:last-child", HOSTILE)
    assert "reward 0.5" in v.one("#list article h3").text
    v.one("#text").clear()
    v.one("#reward-least").send_keys("0.3")
    v.one("#tokens-most").send_keys("60")
    v.sees("#found", "4 of 12 samples")
    v.one("#step-most").send_keys("4")
    v.sees("#found", "2 of 12 samples")
    for width, dark in ((1440, False), (1440, True), (400, False)):
        v.window(width, dark=dark)
        v.settles()
        faint, hacked = v.driver.execute_script(FAINT)
        assert (faint, hacked) == ([], None), f"{width}, dark {dark}"
        assert nameless(v) == []
        assert v.driver.execute_script(WIDER, width) == []
    assert v.complaints() == []


def test_without_scripts_the_tables_are_there(tmp_path: Path, browser: Any) -> None:
    run_dir = folder(tmp_path, "first", 30)
    assert main(["report", "first", "--runs-dir", str(tmp_path)]) == 0
    v = Visitor(browser)
    v.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    v.driver.get((run_dir / "report.html").as_uri())
    shown = v.driver.find_element("css selector", "main").text
    for words in ("need a browser that runs scripts", "cpu_share", "50.0%", "held", "it <b>stood</b>", "loss", "stale"):
        assert words in shown
