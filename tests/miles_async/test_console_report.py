"""report.html: complete, offline, and made from whatever the run left."""

import base64
import errno
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from actors.recorder.actor import Recorder
from actors.recorder.file import read_records
from actors.recorder.history import history_of
from bus import Bus
from bus.topology import POLICY
from miles_async.cli.app import main
from miles_async.console.report import package_versions, write_report
from miles_async.console.report_data import SAMPLES_BYTES, read_run, staleness_bounds, thinned
from miles_async.console.report_samples import samples_of
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


SAMPLE = {"kind": "sample", "wall": 110.0, "step": 3, "sample": "g1/0", "group": "g1", "version": 2, "reward": 1.0,
          "label": "2", "tokens": 5, "finish": "stop", "prompt": "1+1=", "response": "2"}  # fmt: skip


def lines(run_dir: Path, records) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def some_steps(n=30):
    records = [{"kind": "knob", "wall": 99.0, "epoch": 0, "values": {"max_weight_staleness": 2}, "author": "", "reason": ""}]
    for number in range(1, n + 1):
        metrics = step_done(number, raw_reward=number / n).metrics
        records.append({"kind": "step", "wall": 100.0 + number, "step": number, "groups": [], "metrics": metrics})
    records.append({"kind": "knob", "wall": 115.5, "epoch": 1, "values": {"max_weight_staleness": 3}, "reason": "why not"})
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
    for title in ("Samples", "Evaluations", "Scheduling", "Dropped", "Ledger", "Events", "Settings", "Versions"):
        assert title in page
    assert "62.5%" in page
    assert "prompt_data" in page
    assert "hunter2" not in page
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    links = [v for _, attrs in tags.seen for k, v in attrs.items() if k in ("src", "href", "xlink:href") and v]
    assert links == []
    assert not re.search(r"@import|url\((?!#)", page)
    [data] = data_in(page)
    assert data["curves"]["x"]["step"] == [1, *range(2, 30)]
    assert data["evals"][0]["columns"]["score"] and data["events"] and data["pauses"]["columns"]


def data_in(page: str):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_nothing_runs_on_the_page_but_its_own_scripts(tmp_path):
    lines(tmp_path, [*some_steps(3), SAMPLE | {"response": "</script><script>window.hacked = 1</script>"}])
    page = write_report(tmp_path).read_text("utf-8")
    allowed = re.search(r"default-src 'none'; style-src 'unsafe-inline'; script-src ([^\"]*)", page)[1]
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", page, re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert allowed.split() == [f"'sha256-{digest}'" for digest in digests]
    assert len(digests) == 2 and not re.search(r"^(import|export) ", scripts[1], re.M)
    assert data_in(page)[0]["samples"][0]["response"] == "</script><script>window.hacked = 1</script>"


def test_a_long_run_keeps_what_stands_out_and_not_every_step(tmp_path):
    n = 100_000
    rows = (
        {"step": float(i), "x": 1.0 + (i == 54_321) * 49, "dropped/stale": 1.0} if i % 4 else {"step": float(i), "x": math.nan}
        for i in range(n)
    )
    table = thinned(rows, n, ("step",), 1500)
    assert len(table["x"]["step"]) == len(table["columns"]["x"]) <= 1500 and table["x"]["step"][-1] == n - 1
    assert max(table["high"]["x"]) == 50.0 and min(table["low"]["x"]) == 1.0
    assert max(table["columns"]["x"]) == pytest.approx(1 + 49 / 50, rel=0.02), "the mean of what is a number"
    assert table["columns"]["dropped/stale"][0] == pytest.approx(0.75, rel=0.01), "a step without a drop counts"
    assert thinned(iter(()), 0, ("step",), 10) == {"x": {"step": []}, "columns": {}, "low": {}, "high": {}}


def test_the_page_of_a_week_is_bounded(tmp_path):
    """Tables of many metrics, hosts and texts together."""
    names = [f"train/m{i}" for i in range(100)]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number in range(1, 3001):
            file.write(
                json.dumps(
                    {
                        "kind": "step",
                        "wall": 100.0 + number,
                        "step": number,
                        "metrics": dict.fromkeys(names, number / 7),
                    }
                )
                + "\n"
            )
            gpus = {f"gpu{i}_util_share": number / 9999 for i in range(8)}
            file.write(json.dumps({"kind": "system", "wall": 100.5 + number, "source": f"h{number % 20}", "values": gpus}) + "\n")
    with (tmp_path / "samples.jsonl").open("w") as file:
        for number in range(1000):
            file.write(json.dumps(SAMPLE | {"step": number, "response": "long " * 4000, "sample": f"g{number}/0"}) + "\n")
    kept = samples_of(tmp_path, read_run(tmp_path).history.samples, SAMPLES_BYTES)
    assert len(json.dumps(kept)) < 1.2 * SAMPLES_BYTES
    assert kept[0]["step"] == 999 and kept[-1]["step"] < 100, "from all over the run, the newest among them"
    assert 1_000_000 < write_report(tmp_path).stat().st_size < 10_000_000


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
        [
            {
                "kind": "eval",
                "wall": 1.0,
                "step": 0,
                "name": "e",
                "metrics": {},
                "error": "2 of 2 samples lost (2 poison)",
            }
        ],
    ],
    ids=["nothing", "a fault", "one step", "foreign ledger", "an evaluation only", "one that failed"],
)
def test_a_run_that_ended_early_has_a_report_too(tmp_path, records):
    lines(tmp_path, records)
    page = write_report(tmp_path).read_text("utf-8")
    assert page.endswith("</html>\n")


BENT = [  # one field of each is missing, or of another type
    {k: v for k, v in record.items() if k != left} | ({left: ["?"]} if bent else {})
    for record in (
        {"kind": "fault", "wall": 5.0, "actor": "x", "event": "e", "text": "t", "level": "error"},
        {"kind": "dead", "wall": 5.0, "stream": "s", "error": "e"},
        {"kind": "knob", "wall": 5.0, "epoch": 1, "values": {"lr": 1}},
        {"kind": "activated", "wall": 5.0, "step": 1, "actor": "x", "pause_s": 0.1, "total_s": 0.2},
        {"kind": "checkpoint", "wall": 5.0, "step": 1},
        {"kind": "restored", "wall": 5.0, "step": 0},
        {"kind": "drop", "wall": 5.0, "reason": "r"},
        {"kind": "step", "wall": 5.0, "step": 2, "metrics": {"x": 1}},
        {"kind": "eval", "wall": 5.0, "step": 0, "name": "e", "metrics": {"eval/e": 0.5}},
        {"kind": "ledger", "wall": 5.0, "accounts": {"issued": 1}},
        {"kind": "system", "wall": 5.0, "source": "h", "values": {"cpu_share": 0.1}},
        SAMPLE,
    )
    for left in record
    for bent in (False, True)
    if left != "kind"
]


def test_a_damaged_record_has_a_report_too(tmp_path):
    lines(tmp_path, [*some_steps(3), *BENT])
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in BENT))
    page = write_report(tmp_path).read_text("utf-8")
    assert data_in(page)[0]["curves"]["x"]["step"][:3] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["here", "away"], "away"), (["here", "--output", "no/such/folder/x.html"], "no/such/folder is no directory")],
)
def test_what_cannot_be_reported_is_refused_in_one_line(tmp_path, capsys, arguments, said):
    (tmp_path / "here").mkdir()
    lines(tmp_path / "here", some_steps(2))
    (tmp_path / "here" / "run.json").write_text(json.dumps({"run": "here", "bus_url": "redis://localhost:1/0"}))
    assert main(["report", *arguments, "--runs-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert not (tmp_path / "here" / "report.html").exists()


def test_a_report_that_a_full_disk_does_not_take_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    lines(tmp_path / "here", some_steps(2))
    (tmp_path / "here" / "run.json").write_text(json.dumps({"run": "here", "bus_url": "redis://localhost:1/0"}))

    def full(self, text, encoding):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["report", "here", "--runs-dir", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("miles-async report: no space left for ") and "MB free" in line
    assert not list((tmp_path / "here").glob("report*"))


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


def test_the_hosts_and_the_trainers_figures_are_in_tables_too(tmp_path):
    steps = some_steps()
    steps[1]["metrics"]["train/grad_norm"] = 0.25
    lines(
        tmp_path,
        [
            *steps,
            {"kind": "system", "wall": 110.0, "source": "vm<1>", "values": {"cpu_share": 0.5}},
            {"kind": "system"},
        ],
    )
    page = write_report(tmp_path).read_text()
    assert "grad norm" in page
    assert '<td>vm&lt;1&gt;</td><td>cpu_share</td><td class="n">50.0%</td>' in page
