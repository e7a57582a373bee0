"""The live screen, plain lines and the console's modes, on a real bus."""

import asyncio
import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from actors.recorder.feed import Feed
from actors.recorder.file import read_records
from actors.runtime.snapshot import policy_facts, read_snapshot
from bus import Bus, Out
from bus.inspect import Head
from bus.messages.control import EvalDone, Event
from bus.topology import ACTIVE, EVAL_RESULTS, EVENTS, POLICY, STREAMS
from miles_async.cli import app
from miles_async.console.lines import banner, starting
from miles_async.console.live import run_console
from miles_async.console.top.page import Page
from miles_async.console.web.hub import Hub
from miles_async.settings.load import settings_from
from tests.actors.house import until
from tests.miles_async.console_data import SETTINGS, TOKENS, Story, config, rollout, step_done, vitals

DEADLINE_S = 20.0


async def test_a_snapshot_tells_streams_actors_accounts_and_versions(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        seen = await read_snapshot(bus)
    prompts, scored = seen.streams["prompts"], seen.streams["scored"]
    assert (prompts.length, prompts.pending, prompts.lag) == (3, 1, 2)
    assert prompts.n_bytes > 0
    [held] = scored.readers
    assert (held.pending, held.lag, held.oldest_owner, held.oldest_deliveries) == (1, 0, "filter", 1)
    assert held.oldest_id == scored.newest_id
    assert set(seen.streams) == {s.name for s in STREAMS}
    assert [a.vitals.role for a in seen.actors][:3] == ["sampler", "generation", "generation"]
    assert {a.life for a in seen.actors} == {"alive"}
    assert (seen.policy.step, seen.policy.announced, seen.policy.active, seen.policy.checkpoint_step) == (1, 2, 1, 1)
    assert seen.policy.serving == {"generation-0": 1, "generation-1": 1}
    assert (seen.open_groups, seen.open_samples, seen.ledger["issued"]) == (2, 4, 8)
    assert seen.evals["held_out"].metrics["eval/held_out"] == 0.625
    assert seen.knob_epoch == 0


async def test_an_evaluation_of_a_lost_future_is_not_shown(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        lost = EvalDone(name="held_out", version=12, step=9, metrics={"eval/held_out": 1.0}, n_samples=8)
        await story.say(EVAL_RESULTS, lost)
        assert (await read_snapshot(bus)).evals["held_out"].step == 1


async def test_a_snapshot_of_nothing_is_empty_and_creates_nothing(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        seen = await read_snapshot(bus)
        keys = await bus.link.run("KEYS", f"ma:{{{run_name}}}:*")
    assert (keys, seen.actors, seen.policy.step, seen.knob_epoch) == ([], (), 0, -1)


async def test_what_waits_for_delivery_follows_from_lengths_where_the_server_does_not_say_it(redis_url, run_name):
    """Redis 6.2 has no lag field; 7 says null when entries were deleted behind the last delivered one."""
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.issue("g1", "g2")
        await story.generate(wanted="g1/0")
        newest = (await bus.last(STREAMS[0]))[0].id
        before = (await read_snapshot(bus)).streams["prompts"]
        await bus.link.run("XDEL", bus.keys.stream("prompts"), newest)
        after = (await read_snapshot(bus)).streams["prompts"]
    assert (before.pending, before.lag) == (3, 0)
    assert after.lag == 0


async def test_a_heartbeat_that_stopped_shows_as_silent_or_dead(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        old = time.time() - 60
        for name, more in {
            "here": {"pid": 2**22 + 1},
            "elsewhere": {"host": "another-host"},
            "gone": {"state": "stopped"},
        }.items():
            await Story(bus).alive(vitals(name, "generation", wall=old, **more))
        life = {a.vitals.actor: a.life for a in (await read_snapshot(bus)).actors}
    assert life == {"here": "dead", "elsewhere": "late", "gone": "ended"}


def test_the_policy_follows_the_newest_restore():
    def head(ms, kind, name, **fields):
        return Head("policy", f"{ms}-0", 0, {"type": f"policy.{kind}", "id": name, **fields})

    facts = policy_facts(
        [
            head(1000, "step", "step3", version="4"),
            head(2000, "finished", "finished"),
            head(3000, "restored", "restored2", version="5"),
            head(4000, "announced", "v5", note="step=2"),
            head(4500, "announced", "v6", note="step=3"),
        ],
        None,
        10.0,
    )
    assert (facts.step, facts.finished, facts.announced, facts.announced_step) == (2, False, 6, 3)
    assert (facts.behind_s(4), facts.behind_s(5), facts.behind_s(6)) == (6.0, 5.5, 0.0)


async def drawn(bus, width, height, *, total_steps=100):
    """What a terminal shows of a run in the first look."""
    feed = Feed(bus)
    while (await feed.read(0.0))[1]:
        continue
    hub, out = Hub(bus, feed, None, total_steps=total_steps), io.StringIO()
    with Page(hub) as page:
        await hub.look()
        await page.follow(0.0)
        Console(file=out, width=width, height=height).print(page.whole(width, height))
    await feed.close()
    return out.getvalue()


@pytest.mark.parametrize("width", [200, 130, 100, 72, 50, 30])
async def test_the_screen_fits_any_terminal(redis_url, run_name, width):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        for number in range(2, 40):
            await story.say(POLICY, step_done(number, raw_reward=number / 40))
        await story.die("g2/1")
        text = await drawn(bus, width, 60)
    assert max(map(len, text.splitlines())) <= width
    words = ("step 39", "reward", "prompts", "groups", "zero_std_0", "trainer", "generation-0")
    for word in words if width >= 72 else words[:5]:
        assert word in text
    if width >= 100:
        assert "issued 8 = trained 2 + dropped 2 + pending 4" in text
        assert "62.5%" in text
        assert "retry: rollouts g2/1: slow" in text


async def test_a_run_without_steps_has_a_screen_too(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        text = await drawn(bus, 100, 50, total_steps=0)
    assert "no step yet" in text


async def show(bus, run_dir, mode, out, *, until):
    stop = asyncio.Event()
    feed = Feed(bus, read_records(run_dir))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_console(bus, feed, mode=mode, total_steps=10, stop=stop, out=out))
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        stop.set()
    await feed.close()


@pytest.mark.parametrize("mode", ["plain", "live"])  # live without a terminal is plain
async def test_plain_output_is_a_line_per_step(redis_url, run_name, tmp_path, mode):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        out = io.StringIO()
        await show(bus, tmp_path, mode, out, until=lambda: "warning:" in out.getvalue())
    lines = out.getvalue().splitlines()
    [line] = [line for line in lines if line.startswith("step ")]
    assert line.startswith("step 1/10  reward 0.500")
    assert "staleness 0.75/2" in line
    assert "eval held_out at step 1: 62.5% of 8 samples" in lines
    assert "warning: reward: retry: rollouts g2/1: slow" in lines
    assert not [line for line in lines if "\x1b" in line]


async def test_before_the_first_step_plain_output_says_what_is_waited_for(redis_url, run_name, tmp_path, monkeypatch):
    monkeypatch.setattr("miles_async.console.live.WAIT_SAID_S", 0.05)
    async with Bus(config(redis_url, run_name)) as bus:
        story, out = Story(bus), io.StringIO()
        await story.begin()
        boots = {"waits_for": "the engine to boot", "note": "SGLang compiles"}
        await story.alive(vitals("generation-0", "generation", state="starting", **boots))
        reads = {"waits_for": "the prompts of x.jsonl to be read", "note": "my.rows gave 3 rows so far"}
        await story.alive(vitals("sampler", state="waiting", waits_since=time.time(), **reads))
        await show(bus, tmp_path, "plain", out, until=lambda: "no step yet" in out.getvalue())
        said = next(line for line in out.getvalue().splitlines() if line.startswith("no step yet after"))
        assert "sampler waiting the prompts of x.jsonl to be read (my.rows gave 3 rows so far); generation-0 starting" in said
        assert "generation-0 starting the engine to boot (SGLang compiles); generation-1 running; trainer running" in said

        async def while_one_comes(of):
            found = await read_snapshot(of)
            await story.say(POLICY, step_done(1))
            while "step 1/10" not in out.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return found

        monkeypatch.setattr("miles_async.console.live.read_snapshot", while_one_comes)
        await show(bus, tmp_path, "plain", out, until=lambda: "step 1/10" in out.getvalue())
        assert out.getvalue().rstrip().splitlines()[-1].startswith("step 1/10"), "and no more once there is one"


async def test_a_run_without_workers_says_that_it_waits_for_one(redis_url, run_name, tmp_path, monkeypatch):
    monkeypatch.setattr("miles_async.console.live.WAIT_SAID_S", 0.05)
    async with Bus(config(redis_url, run_name)) as bus:
        await bus.make_readers()
        await Story(bus).alive(vitals("trainer", waits_for="128 of 128 samples of step 1 on groups"))
        await Story(bus).alive(vitals("guest", "generation", state="stopped"))
        out = io.StringIO()
        await show(bus, tmp_path, "plain", out, until=lambda: "no step yet" in out.getvalue())
    assert "samples of step 1 on groups; no rollout worker is there yet" in " ".join(out.getvalue().split()), out.getvalue()


def test_a_run_says_at_once_what_it_is_and_what_it_starts(tmp_path, capsys):
    config_file = str(Path(__file__).parents[2] / "configs" / "quickstart.toml")
    assert app.main(["train", config_file, "--prompt-data", "/nowhere.jsonl", "--runs-dir", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1, "what costs nothing to check is checked before anything is said"
    lines = banner(SETTINGS).splitlines()
    assert lines[0] == f"run {SETTINGS.launch.name}" and lines[-1].startswith("checking model and data")
    said = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:-1]}
    assert said["model"] == "builtin:arithmetic" and said["data"] == "x.jsonl, rewards by math"
    assert said["plan"] == "3 steps of 2 prompts × 8 answers, staleness at most 1"
    assert said["workers"] == "2 rollout workers, embedded engines" and said["trainer"] == "torch, 1 rank"
    assert said["folder"] == str(SETTINGS.run_dir) and said["bus"].startswith("a Redis of its own")
    supervised = {"loss_type": "sft", "n_samples_per_prompt": 1, "engine": "none"}
    alone = settings_from(hf_checkpoint="builtin:arithmetic", prompt_data="x.jsonl", num_rollout=3, **supervised)
    said = {line.split()[0]: line.split(maxsplit=1)[1] for line in banner(alone).splitlines()[1:-1]}
    assert said["workers"] == "1 rollout worker, no engines" and said["data"] == "x.jsonl, its responses are learned"
    text = starting(["trainer", "generation"], alone)
    assert text == "starting trainer, generation; the first step waits for 32 groups"
    text = starting(["trainer", "generation", "generation"], SETTINGS)
    assert text == "starting trainer, generation ×2; the first step waits for engines with the weights, then for 2 scored groups"


class Terminal(io.StringIO):
    """What rich takes for a terminal."""

    def isatty(self) -> bool:
        return True


async def test_the_live_view_follows_the_run_and_leaves_its_last_frame(redis_url, run_name, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        out, told = Terminal(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(show(bus, tmp_path, "live", out, until=told.is_set))

            async def drawn_once():
                return "step 1/10" in out.getvalue()

            await until(drawn_once)
            await story.say(POLICY, step_done(2))
            told.set()
    last = out.getvalue()[out.getvalue().rindex("step 2/10") :]
    assert "generation 2" in last and "prompts" in last


async def test_no_console_says_nothing(redis_url, run_name, tmp_path):
    async with Bus(config(redis_url, run_name)) as bus:
        out = io.StringIO()
        await Story(bus).say(POLICY, step_done(1))
        stop = asyncio.Event()
        stop.set()
        feed = Feed(bus, read_records(tmp_path))
        await run_console(bus, feed, mode="none", total_steps=1, stop=stop, out=out)
        await feed.close()
        assert feed.history.furthest == 1, "the launcher asks the feed, also without a view"
    assert out.getvalue() == ""


async def test_unreadable_entries_do_not_end_the_console(redis_url, run_name, tmp_path):
    async with Bus(config(redis_url, run_name)) as bus:
        for stream in (POLICY, ACTIVE, EVENTS):
            await bus.link.run("XADD", bus.keys.stream(stream.name), "*", "type", "policy.step", "body", b"\xc1garbage")
        await bus.append([Out(EVENTS, Event(actor="a", kind="k", text="after", wall=time.time(), level="error"))])
        out = io.StringIO()
        await show(bus, tmp_path, "plain", out, until=lambda: "after" in out.getvalue())
        await read_snapshot(bus)
    assert rollout("g1/0").response.n_tokens == TOKENS


async def test_on_a_small_terminal_every_room_and_the_worst_alarm_is_there(redis_url, run_name):
    long = "the engine ended with status 1: " + " ".join(f"word{i}" for i in range(10)) + " END"
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        await story.alive(vitals("filter", state="failed", note="KeyError"))
        now = time.time()
        await story.say(EVENTS, Event(actor="launcher", kind="restart", text=long, wall=now, level="error"))
        for i in range(20):
            await story.say(EVENTS, Event(actor=f"w{i}", kind="retry", text="later", wall=now, level="warning"))
        text = await drawn(bus, 80, 24)
    seen = " ".join(" ".join(text.splitlines()[:23]).split())
    assert "launcher: restart: the engine ended" in seen and "END" in seen, "newer and lesser news do not push it out"
    assert "1 more" in seen
    for room in ("sampler 1", "generation 2", "filter 0 1 WRONG", "trainer 1", "issued 8 = trained 2"):
        assert room in seen


@pytest.mark.parametrize("skew_s", [-3600.0, 30.0])
async def test_an_actor_is_alive_whatever_its_hosts_clock_says(redis_url: str, run_name: str, skew_s: float) -> None:
    async with Bus(config(redis_url, run_name)) as bus:
        wall = bus.clock.wall() + skew_s
        await bus.set_vitals("generation-9", vitals("generation-9", wall=wall, waits_for="an entry", waits_since=wall - 5))
        seen = await read_snapshot(bus)
    [actor] = seen.actors
    assert actor.life == "alive" and actor.age_s < 5.0 <= actor.waited_s < 10.0
