"""metrics.jsonl: everything once, whole lines, also after crashes."""

import asyncio
import time

import msgspec
import pytest

from actors.recorder import samples, trained
from actors.recorder.actor import Recorder, RecorderSpec, _living
from actors.recorder.file import FILE, MetricsBusy, MetricsFile, newest_entries, read_records
from actors.recorder.history import history_of
from actors.recorder.points import Points
from actors.recorder.records import records_of
from actors.recorder.samples import read_samples
from actors.recorder.trained import append_trained, last_trained, pages_with
from actors.runtime.context import Context
from actors.runtime.readable import TEXT_LIMIT, bounded
from bus import Bus, Entry, Out
from bus.knobs.live import LiveKnobs
from bus.messages.base import pack_ints
from bus.messages.control import Event
from bus.messages.policy import ALREADY_TRAINED, GroupsGivenUp, Restored, StepDone
from bus.messages.versions import PolicyVersion
from bus.topology import EVENTS, POLICY
from miles_async.console.lines import plain_line
from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.tokenizer import save_tokenizer
from tests.declared import actor_of
from tests.miles_async.console_data import Story, config, step_done, vitals

DEADLINE_S = 20.0
VERSION = PolicyVersion(1, 0)


async def record(bus, run_dir, *, until):
    """Follow until the file satisfies `until`, then stop as the launcher does."""
    stop = asyncio.Event()
    recorder = Recorder(bus, run_dir)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(recorder.follow(stop))
        deadline = time.monotonic() + DEADLINE_S
        while not until(read_records(run_dir)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        stop.set()
    return recorder


def kinds(records):
    return [r["kind"] for r in records]


async def test_a_run_becomes_lines_and_the_ledger_comes_last(redis_url, run_name, tmp_path):
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        await record(bus, tmp_path, until=lambda r: "fault" in kinds(r) and "eval" in kinds(r))
    lines = read_records(tmp_path)
    assert {
        "knob",
        "restored",
        "announced",
        "step",
        "checkpoint",
        "eval",
        "activated",
        "fault",
        "drop",
        "ledger",
    } == set(kinds(lines))
    trained = next(r for r in lines if r["kind"] == "step")
    assert (trained["step"], trained["groups"], trained["metrics"]["rollout/raw_reward"]) == (1, ["g1"], 0.5)
    assert next(r for r in lines if r["kind"] == "drop")["reason"] == "zero_std_0"
    active = next(r for r in lines if r["kind"] == "activated")
    assert (active["transport"], active["requests"], active["compared"]) == ("ipc", "kept", 7)
    assert lines[-1]["accounts"]["issued"] == 8
    assert all(r["wall"] > 0 for r in lines)


async def test_a_restarted_recorder_writes_nothing_twice_and_misses_nothing(redis_url, run_name, tmp_path):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        for number in (1, 2, 3):
            await story.say(POLICY, step_done(number))
        await record(bus, tmp_path, until=lambda r: len(r) == 3)
        for number in (4, 5):
            await story.say(POLICY, step_done(number))
        with (tmp_path / FILE).open("ab") as file:
            file.write(b'{"kind":"step","st')  # killed in the middle of a line
        await record(bus, tmp_path, until=lambda r: len(r) == 5)
    lines = read_records(tmp_path)
    assert [r["step"] for r in lines] == [1, 2, 3, 4, 5]
    assert len({r["entry"] for r in lines}) == 5
    assert all(msgspec.json.decode(line) for line in (tmp_path / FILE).read_bytes().splitlines())


async def test_a_restore_names_the_lost_steps_and_leaves_their_lines(redis_url, run_name, tmp_path):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        for number in (1, 2, 3):
            await story.say(POLICY, step_done(number))
        await story.say(POLICY, Restored(step=1, version=PolicyVersion(9, 1), checkpoint="iter_1"), step_done(2))
        await record(bus, tmp_path, until=lambda r: len(r) == 5)
    lines = read_records(tmp_path)
    assert [r.get("step") for r in lines if r["kind"] == "step"] == [1, 2, 3, 2]
    assert next(r for r in lines if r["kind"] == "restored")["lost"] == [2, 3]
    assert [s.step for s in history_of(lines).steps] == [1, 2]


async def test_what_is_on_the_streams_at_the_end_is_still_written(redis_url, run_name, tmp_path):
    async with Bus(config(redis_url, run_name)) as bus:
        for number in range(1, 601):
            await Story(bus).say(POLICY, step_done(number))
        stop = asyncio.Event()
        stop.set()
        await Recorder(bus, tmp_path).follow(stop)
    assert [r["step"] for r in read_records(tmp_path)] == list(range(1, 601))


def test_a_step_tells_its_samples_one_by_one_and_what_is_cut_short_is_left_out():
    entry = Entry(id="1700000000000-0", stream=POLICY, readers="", fields={}, body=b"", size=0)
    done = StepDone(step=1, version=VERSION, trained_on=VERSION, groups=("g1",), lives=pack_ints([0, 812, 4031, 12, 0, 9]))
    assert records_of(entry, done)[0]["lives"] == [[0, 812, 4031, 12]]
    assert "lives" not in records_of(entry, msgspec.structs.replace(done, lives=msgspec.UNSET))[0]


def test_a_second_writer_is_refused_in_one_line(tmp_path):
    first = MetricsFile(tmp_path)
    try:
        with pytest.raises(MetricsBusy, match=r"metrics\.jsonl is written by another process"):
            MetricsFile(tmp_path)
    finally:
        first.close()
    MetricsFile(tmp_path).close()


def test_lines_that_are_no_records_are_left_out(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"kind":"step","step":1}\nnot json\n[1]\n{"step":2}\n{"kind":"step","step":3}')
    assert [r["step"] for r in read_records(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("activated", {"pause_s": "soon"}),
        ("slots", {"slots": {}}),
        ("sample", {"text": msgspec.msgpack.Ext(7, b"x")}),
    ],
)
async def test_an_event_that_cannot_be_written_is_left_out_and_said(redis_url, run_name, tmp_path, kind, data):
    said = []
    async with Bus(config(redis_url, run_name)) as bus:
        await bus.append([Out(EVENTS, Event(actor="w", kind=kind, text="", wall=0.0, data=data))])
        await Story(bus).say(POLICY, StepDone(step=1, version=VERSION, trained_on=VERSION, groups=(), samples=("g1/99999999999",)))
        await Story(bus).say(POLICY, step_done(1))
        stop = asyncio.Event()
        stop.set()
        await Recorder(bus, tmp_path, unread=said.append).follow(stop)
    assert kinds(read_records(tmp_path)) == ["step"]
    assert any("sample number 99999999999" in text for text in said)
    assert any(text.startswith("events ") for text in said)


def test_a_line_of_the_file_that_lacks_something_is_left_out():
    bent = [{"kind": "step"}, {"kind": "step", "step": "x"}, {"kind": "ledger", "accounts": 3}, {"kind": "drop", "wall": []}]
    history = history_of([*bent, {"kind": "step", "step": 4}])
    assert [s.step for s in history.steps] == [4] and history.left_out == 4


def test_a_group_that_is_dropped_in_parts_is_one_dropped_group_wherever_groups_are_counted():
    drops = [{"kind": "drop", "group": "g1", "reason": "zero_std_1", "members": [n], "samples": 1, "tokens": 3} for n in range(8)]
    drops += [{**drops[0], "reason": "stale"}, {"kind": "drop", "group": "g2", "reason": "zero_std_1", "samples": 8, "tokens": 24}]
    lines = [{"wall": 0.0, **line} for line in (*drops, {"kind": "step", "step": 1, "metrics": {}})]
    history, points = history_of(lines), Points()
    assert history.drops == history.steps[0].dropped == {"zero_std_1": 2, "stale": 1} and history.steps[0].thrown == (17, 51)
    [point] = [point for line in lines if (point := points.of(line)) is not None]
    assert point.values["rollout/dropped/zero_std_1"] == 2.0 and point.values["rollout/dropped/stale"] == 1.0


def test_already_trained_is_no_drop():
    entry = Entry(id="1700000000000-0", stream=POLICY, readers="", fields={}, body=b"", size=0)
    twice = GroupsGivenUp(groups=(("g1", ALREADY_TRAINED), ("g2", "stale")), samples=("g1/0", "g2/0"))
    assert [(r["kind"], r["group"], r["reason"]) for r in records_of(entry, twice)] == [("drop", "g2", "stale")]


def test_a_number_that_json_does_not_have_costs_its_evaluation_nothing_else():
    line = {"kind": "eval", "step": 4, "wall": 1.0, "name": "held", "metrics": {"eval/held": 0.5, "eval/held/ci95_low": None}}
    history = history_of([line])
    assert [(e.score, dict(e.metrics)) for e in history.evals] == [(0.5, {"eval/held": 0.5})] and history.left_out == 0


async def test_what_the_policy_writes_is_kept_in_words(redis_url, run_name, tmp_path):
    (tmp_path / "model").mkdir()
    save_tokenizer(tmp_path / "model", ARITHMETIC)
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.issue("g1")
        await story.generate()
        await story.score()
        await story.judge("g1")
        await story.say(POLICY, step_done(1))
        stop = asyncio.Event()
        recorder = Recorder(bus, tmp_path, RecorderSpec(tokenizer_dir=str(tmp_path / "model")))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(recorder.follow(stop))
            deadline = time.monotonic() + DEADLINE_S
            while kinds(read_records(tmp_path)).count("sample") < 2:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            stop.set()
    first, last = [r for r in read_records(tmp_path) if r["kind"] == "sample"]
    assert (first["sample"], last["sample"]) == ("g1/0", "g1/1")
    assert first["prompt"] == "1+1=" and len(first["response"]) > 0
    with (tmp_path / samples.FILE).open("ab") as file:
        file.write(b'{"sample":"\xff","step":1,"reward":1}\n')
    [*lines] = read_samples([tmp_path / samples.FILE])
    assert [line["sample"] for line in lines] == ["g1/0", "g1/1"] and lines[0]["step"] == 1
    history = history_of([first])
    line = plain_line(first, history, total_steps=3)
    assert line.startswith("sample g1/0, reward") and "1+1=" in line
    assert first["entry"].startswith("events@"), "so a recorder that is started again does not write it twice"


def test_a_long_text_keeps_its_ends():
    text = "a" * 5000 + "z" * 5000
    shown = bounded(text, TEXT_LIMIT)
    assert len(shown) <= TEXT_LIMIT and shown[0] == "a" and shown[-1] == "z"


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
@pytest.mark.parametrize(("silent_s", "lives"), [(0, True), (3600, False)])
async def test_whom_the_recorder_waits_for_at_the_end_does_not_hang_on_another_hosts_clock(
    redis_url, run_name, skew_s, silent_s, lives
):
    async with Bus(config(redis_url, run_name)) as bus:
        context = Context(actor_of(name="recorder", role="recorder", bus=bus.config), bus, LiveKnobs(bus))
        await bus.set_vitals("filter", vitals("filter", processes="another of this name", wall=bus.clock.wall() + skew_s))
        await bus.link.run("HINCRBY", bus.keys.heard, "filter", -1000 * silent_s)
        assert await _living(context) == lives


def test_lines_of_trained_samples_are_found_by_what_they_hold_and_a_cut_one_spoils_no_other(tmp_path, monkeypatch):
    def line(n):
        return {"kind": "trained", "entry": f"trained@{n}-0", "sample": f"g{n:07d}/0", "wall": float(n)}

    def found(file, asked, **how):
        return [record for page in pages_with(tmp_path / file, asked, **how) for record in page]

    assert last_trained(tmp_path) == [] and found(trained.FILE, [b"g"]) == []
    append_trained(tmp_path, map(line, range(5)))
    with (tmp_path / trained.FILE).open("ab") as file:
        file.write(b'{"kind":"trained","text":"\xff"}\n')  # no UTF-8
    assert last_trained(tmp_path) == [line(4)] and found(trained.FILE, [b"\xff"]) == []
    with (tmp_path / trained.FILE).open("ab") as file:
        file.write(b'{"kind":"trained","entry":"trained@5-0"}\n{"kind":"trained","sample":"g0000009/0","wa')  # a crash
    assert [one["entry"] for one in last_trained(tmp_path)] == ["trained@5-0"]
    append_trained(tmp_path, [line(7)])
    asked = [b'"g0000003/0"', b'"g0000007/0"', b'"g0000009/0"', b"@7-0"]
    for block in (1, 50, 1 << 20):  # a line may reach over several blocks
        monkeypatch.setattr(trained, "BLOCK", block)
        assert found(trained.FILE, asked) == [line(3), line(7)], block
        pages = [page for page in pages_with(tmp_path / trained.FILE, [b'","sample":"g000000'], newest_first=True) if page]
        assert [one for page in reversed(pages) for one in page] == [*map(line, range(5)), line(7)], block
        assert (pages[0] == [line(7)]) == (block < 1 << 20), block  # no more is read than is asked for
    assert newest_entries(tmp_path / trained.FILE) == {"trained": "7-0"} and newest_entries(tmp_path / "none") == {}
    with (tmp_path / trained.FILE).open("ab") as file:
        file.write(b'{"kind":"drop","entry":"verdicts@9-1"}\n{"kind":"trained","entry":"trained@11-0"')  # a line that is not whole
    assert newest_entries(tmp_path / trained.FILE) == {"trained": "7-0", "verdicts": "9-1"}
    assert last_trained(tmp_path) == [line(7)]
    monkeypatch.setattr(trained, "MOST_BYTES", 100)
    append_trained(tmp_path, [line(8)])
    assert found(trained.OLDER, asked) == [line(3), line(7)]
    assert last_trained(tmp_path) == [line(8)]
