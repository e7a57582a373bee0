"""report.html: complete, offline, and made from whatever the run left."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from actors.recorder.actor import Recorder
from actors.recorder.file import read_records
from actors.recorder.history import history_of
from bus import Bus
from bus.topology import POLICY
from miles_async.console.report import package_versions, staleness_bounds, write_report
from miles_async.settings.dump import dump_toml
from miles_async.settings.load import settings_from
from tests.miles_async.console_data import Story, config, step_done


class Tags(HTMLParser):
    """Tags with attributes, and whether every opened one is closed."""

    VOID = ("meta", "br", "img", "link", "path", "use")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def lines(run_dir: Path, records) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def some_steps(n=30):
    records = [
        {"kind": "knob", "wall": 99.0, "epoch": 0, "values": {"max_weight_staleness": 2}, "author": "", "reason": ""}
    ]
    for number in range(1, n + 1):
        metrics = step_done(number, raw_reward=number / n).metrics
        records.append({"kind": "step", "wall": 100.0 + number, "step": number, "groups": [], "metrics": metrics})
    records.append(
        {"kind": "knob", "wall": 115.5, "epoch": 1, "values": {"max_weight_staleness": 3}, "reason": "why not"}
    )
    return records


async def test_the_report_of_a_run_has_every_part_and_needs_no_network(redis_url, run_name, tmp_path):
    import asyncio

    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        for number in range(2, 30):
            await story.say(POLICY, step_done(number))
        await story.die("g2/1", error="ValueError: <script>alert(1)</script>")
        stop = asyncio.Event()
        stop.set()
        await Recorder(bus, tmp_path).follow(stop)
    settings = settings_from(
        hf_checkpoint="m", prompt_data="d.jsonl", num_rollout=3, rm_type="math", bus_url="redis://u:hunter2@h:1/0"
    )
    (tmp_path / "settings.toml").write_text(dump_toml(settings))
    page = write_report(tmp_path).read_text("utf-8")
    for title in ("Learning", "Time of the trainer", "Throughput", "Staleness", "Response length", "Pauses of the engines",
                  "Dropped", "Ledger", "Events", "Settings", "Versions"):  # fmt: skip
        assert title in page
    assert page.count("<svg") == 7
    assert "62.5%" in page
    assert "prompt_data" in page
    assert "hunter2" not in page
    assert "<script" not in page
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    links = [v for _, attrs in tags.seen for k, v in attrs.items() if k in ("src", "href", "xlink:href") and v]
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"@import|url\((?!#)", page)


def test_pictures_take_their_colours_from_the_page_and_are_the_same_every_time(tmp_path):
    lines(tmp_path, some_steps())
    first = write_report(tmp_path).read_text("utf-8")
    svg = re.findall(r"<svg.*?</svg>", first, re.S)
    assert svg
    assert not any(re.search(r"#0101\d\d", picture) for picture in svg)
    assert all("var(--" in picture for picture in svg)
    assert "prefers-color-scheme: dark" in first
    second = write_report(tmp_path).read_text("utf-8")
    assert re.findall(r"<svg.*?</svg>", second, re.S) == svg


def test_the_bound_of_the_staleness_picture_follows_the_knob(tmp_path):
    history = history_of(some_steps())
    assert staleness_bounds(history, {"rollout": {"max_weight_staleness": 2}}) == [(0, 2), (16, 3)]
    assert staleness_bounds(history, {}) == [(0, 2), (16, 3)]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"kind": "fault", "wall": 5.0, "actor": "x", "event": "e", "text": "t", "level": "error"}],
        some_steps(1),
        [{"kind": "ledger", "wall": 1.0, "accounts": {"of another release": 3}}],
        [{"kind": "eval", "wall": 1.0, "step": 0, "name": "e", "metrics": {"eval/e": 0.5}}],
        [{"kind": "eval", "wall": 1.0, "step": 0, "name": "e", "metrics": {}, "error": "2 of 2 samples lost (2 poison)"}],
    ],
    ids=["nothing", "a fault", "one step", "foreign ledger", "an evaluation only", "one that failed"],
)
def test_a_run_that_ended_early_has_a_report_too(tmp_path, records):
    lines(tmp_path, records)
    page = write_report(tmp_path).read_text("utf-8")
    assert page.endswith("</html>\n")


def test_lost_steps_are_told(tmp_path):
    records = [
        *some_steps(10),
        {"kind": "restored", "wall": 120.0, "step": 0},
        {"kind": "restored", "wall": 121.0, "step": 4},
    ]
    lines(tmp_path, records)
    assert "10 steps lost with the trainer and done again" in write_report(tmp_path).read_text("utf-8")
    assert len(read_records(tmp_path)) == len(records)


def test_versions_name_what_decides_the_numbers():
    names = dict(package_versions())
    assert {"python", "platform", "numpy", "redis", "msgspec"} <= names.keys()


def test_texts_and_the_trainers_figures_are_shown_and_do_no_harm(tmp_path):
    sample = {"kind": "sample", "wall": 110.0, "step": 3, "sample": "g1/0", "group": "g1", "version": 2, "reward": 1.0}
    texts = {"label": "2", "tokens": 5, "finish": "stop", "prompt": "1+1=<script>", "response": "2\x1b[31m"}
    steps = some_steps()
    steps[1]["metrics"]["train/grad_norm"] = 0.25
    lines(tmp_path, [*steps, sample | texts])
    page = write_report(tmp_path).read_text()
    assert "1+1=&lt;script&gt;<b>2\\x1b[31m</b>" in page
    assert "<script>" not in page and "\x1b" not in page
    assert "grad norm" in page
