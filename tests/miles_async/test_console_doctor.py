"""The doctor names what is wrong, who waits for which entry of which stream, since when, and why."""

import asyncio
import re
import time

import msgspec
import pytest

from bus import Bus, Commit, Reader
from bus.messages.control import Event
from bus.messages.groups import GroupVerdict
from bus.messages.reasons import DropReason
from bus.messages.waits import Wait
from bus.server.checks import ServerFacts
from bus.topology import EVENTS, PROMPTS, VERDICTS
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.explain import explain
from miles_async.console.scene import read_scene
from miles_async.console.watchdog import watch
from tests.miles_async.console_data import Story, config, faults, timeless, vitals

DEADLINE_S = 20.0


async def later(bus, seconds):
    """The scene as it is so long after the first sample came to the filter."""
    scene = await read_scene(bus)
    since = min(group.since for group in scene.places.incomplete())
    return msgspec.structs.replace(scene, now=since + seconds)


async def test_nothing_is_wrong_with_a_run_in_its_stride(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        assert await faults(bus) == {}


async def test_an_empty_bus_is_told_as_such(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        assert "no actor has ever sent a heartbeat" in (await faults(bus))["nobody there"]


async def test_a_room_without_a_living_actor_is_named_with_what_waits_for_it(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        for name in ("generation-0", "generation-1"):
            await story.alive(vitals(name, "generation", state="stopped"))
        found = await faults(bus)
    assert found["no actor"].startswith("no living rollout worker; generation-0 stopped")
    assert "3 entries on prompts" in found["no actor"]
    assert "miles-async worker" in found["no actor"]


async def test_rooms_that_ended_while_the_trainer_writes_its_last_checkpoint_are_not_missed(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        for role in ("sampler", "filter", "reward"):
            await story.alive(vitals(f"{role}-0" if role == "reward" else role, role, state="stopped"))
        assert "no actor" in await faults(bus)
        await story.alive(vitals("trainer", "trainer", state="draining", waits_for="the checkpoint being written"))
        assert "no actor" not in await faults(bus)


async def test_nobody_is_missed_while_the_launcher_starts_them(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.alive(vitals("trainer", state="stopped"))
        await story.alive(vitals("launcher", counters={"up_s": 3.0}))
        assert await faults(bus) == {}
        await story.alive(vitals("launcher", counters={"up_s": 90.0}))
        assert set(await faults(bus)) == {"no actor"}


async def test_a_finished_run_misses_nobody(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        await story.finish(1)
        for name in ("generation-0", "generation-1", "trainer"):
            await story.alive(vitals(name, "generation", state="stopped"))
        assert await faults(bus) == {}


async def test_an_incomplete_group_names_the_sample_and_its_holder(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        entry = next(e for e in await bus.scan_all(PROMPTS) if e.fields["id"] == "g3/1").id
        quiet = [f for f in diagnose(await read_scene(bus)) if f.rule == "incomplete group"]
        [info] = [f for f in diagnose(await later(bus, 30)) if f.rule == "incomplete group"]
        [warning] = [f for f in diagnose(await later(bus, 300)) if f.rule == "incomplete group"]
    assert quiet == []
    assert (info.level, warning.level) == ("info", "warning")
    assert info.text.startswith("group g3 has had 1 of 2 samples at the filter for 30 s; missing: g3/1 held by generation-1 on")
    assert entry in info.text


async def test_a_sample_in_no_stream_is_an_error_and_opens_the_ledger(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        lost = next(e for e in await bus.scan_all(PROMPTS) if e.fields["id"] == "g3/1")
        await bus.link.run("XDEL", bus.keys.stream("prompts"), lost.id)
        found = {f.rule: f for f in diagnose(await later(bus, 30)) if f.level == "error"}
    assert "g3/1" in found["ledger"].text
    assert "g3/1 is in no stream" in found["incomplete group"].text


async def test_a_starving_filter_is_named_with_its_reasons(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.say(VERDICTS, GroupVerdict(group_id="a", prompt_id="p", kept=True))
        drops = [GroupVerdict(group_id=f"b{i}", prompt_id="p", kept=False, reason="zero_std_1") for i in range(6)]
        await story.say(VERDICTS, *drops)
        found = await faults(bus)
        await story.say(VERDICTS, GroupVerdict(group_id="c", prompt_id="p", kept=True))
        after = await faults(bus)
    assert "the last 6 groups were all dropped (6 × zero_std_1): 3.0 waves of 2" in found["filter starving"]
    assert found["filter starving"].endswith(f"Remedy: {DropReason.ZERO_STD.remedy}")
    assert "filter starving" not in after


async def test_an_entry_that_nobody_renews_or_claims_is_named(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        entry = next(e for e in await bus.scan_all(PROMPTS) if e.fields["id"] == "g3/1").id
        key = bus.keys.stream("prompts")
        await bus.link.run("XCLAIM", key, "generation", "generation-1", 0, entry, "IDLE", 90_000, "JUSTID")
        found = await faults(bus)
    assert (
        f"entry {entry} of prompts (sample g3/1) is held by generation-1, which has not renewed its lease"
        in (found["abandoned entry"])
    )
    assert re.search(r"for 1:3\d", found["abandoned entry"])


async def test_a_full_stream_is_named_with_who_waits(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        await story.alive(vitals("sampler", waits_for="room on stream ma:x:prompts", waits_since=time.time()))
        found = await faults(bus, stream_max_bytes=100)
    text = found["full stream"]
    assert "prompts holds 870 B of at most 100 B; sampler wait" in text or "scored holds" in text


async def test_long_waits_are_told_and_idle_ones_are_not(redis_url, run_name):
    async with timeless(redis_url, run_name) as bus:
        story = Story(bus)
        await story.whole()
        ago = bus.clock.wall() - 300
        await story.alive(
            vitals("generation-0", "generation", version=2, waits_for="the engine to boot", waits_since=ago, note="SGLang compiles")
        )
        await story.alive(vitals("reward", waits_for="an entry of rollouts", waits_since=ago))
        await story.alive(vitals("router", waits_for="requests", waits_since=ago))
        found = [f for f in diagnose(await read_scene(bus)) if f.rule == "long wait"]
    assert [f.about for f in found] == ["generation-0"]
    # by the server's clock, which goes on
    assert re.fullmatch(r"generation-0 has waited 5:\d\d for the engine to boot: SGLang compiles", found[0].text)


async def test_dead_letters_are_told(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        await story.die("g2/1")
        found = await faults(bus)
    assert found["dead letters"].startswith("1 dead letter, the newest g2/1 on rollouts: boom")


async def test_each_waiting_actor_gets_a_sentence_with_its_reason(redis_url, run_name):
    async with timeless(redis_url, run_name) as bus:
        story = Story(bus)
        await story.whole()
        now = bus.clock.wall()
        await story.alive(vitals("trainer", waits_for="2 of 2 groups of step 2 on groups", waits_since=now - 40, version=2))
        await story.alive(vitals("sampler", waits_for=Wait.CREDITS, waits_since=now))
        await story.alive(vitals("generation-1", "generation", version=2, in_flight=3, waits_for="a free slot"))
        said = dict(explain(await later(bus, 30)))
    waits = r"has waited 4\d s for 2 of 2 groups of step 2 on groups: generation holds it up, 2 workers make"
    assert re.match(waits, said["trainer"]), said["trainer"]
    assert ". 2 groups open of at most 4" in said["trainer"]
    assert "g3/1 held by generation-1 on prompts" in said["trainer"]
    assert "a slot comes free when a group is dropped" in said["sampler"]
    assert said["generation-1"] == "works on 3 entries"


@pytest.mark.parametrize(
    ("busy", "open_groups", "sampler", "because"),
    [
        (8, 2, "news", "generation holds it up, all 8 slots of 2 workers are taken and 4 samples wait for one"),
        (3, 2, "news", "generation holds it up, 3 of 8 slots make the samples of 2 groups"),
        (3, 4, Wait.CREDITS, "the staleness bound holds prompts back, 4 of at most 4 groups are open and 5 of 8 slots are free"),
    ],
    ids=["full engines", "the last ones", "the bound"],
)
async def test_the_trainers_sentence_begins_with_the_cause(redis_url, run_name, busy, open_groups, sampler, because):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.issue(*(f"g{i}" for i in range(open_groups)))
        if busy < 8:
            reader = Reader(bus, [PROMPTS], "generation", "generation-0")
            await reader.open()
            await reader.read(200, 0.0)
            await reader.close()
        await story.alive(vitals("sampler", waits_for=sampler, waits_since=time.time()))
        await story.alive(vitals("trainer", waits_for="2 of 2 groups of step 2 on groups", waits_since=time.time()))
        for name, taken in (("generation-0", min(busy, 4)), ("generation-1", max(0, busy - 4))):
            await story.alive(vitals(name, "generation", version=1, slots=4, in_flight=taken))
        drops = [GroupVerdict(group_id=f"b{i}", prompt_id="p", kept=i < 3, reason="zero_std_1" * (i > 2)) for i in range(12)]
        await story.say(VERDICTS, *drops)
        said = dict(explain(await read_scene(bus)))["trainer"]
    assert f"on groups: {because}; the filter dropped 75% of the newest 12 groups (mostly zero_std_1). " in said


@pytest.mark.parametrize(("stage", "because"), [(1, "reward holds it up, 4 samples wait for their score"), (2, "the filter")])
async def test_a_slow_room_behind_the_engines_is_the_cause(redis_url, run_name, stage, because):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.issue("g1", "g2")
        await story.generate()
        if stage == 2:
            await story.score()
        await story.alive(vitals("trainer", waits_for="2 of 2 groups of step 2 on groups", waits_since=time.time()))
        said = dict(explain(await read_scene(bus)))["trainer"]
    assert f"on groups: {because}" in said


async def test_a_sampler_that_waits_through_a_long_step_is_no_fault(redis_url, run_name):
    async with timeless(redis_url, run_name) as bus:
        story = Story(bus)
        await story.whole()
        for waits_for in (Wait.CREDITS, Wait.ENGINE_SLOTS):
            await story.alive(vitals("sampler", waits_for=waits_for, waits_since=bus.clock.wall() - 600))
            assert await faults(bus) == {}


async def test_a_sampler_that_waits_for_engines_is_not_said_to_wait_for_credits(redis_url, run_name):
    async with timeless(redis_url, run_name) as bus:
        story = Story(bus)
        await story.whole()
        await story.alive(vitals("sampler", waits_for=Wait.ENGINE_SLOTS, waits_since=bus.clock.wall()))
        await story.alive(vitals("generation-1", "generation", version=2, in_flight=3, slots=4))
        said = dict(explain(await read_scene(bus)))
    assert "3 of 4 slots are taken; prompts are issued as they come free" in said["sampler"]


@pytest.mark.parametrize(
    ("change", "rule", "said"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "eviction", "allkeys-lru"),
        ({"role": "slave"}, "role", "takes no writes"),
        ({"aof_enabled": "0"}, "persistence", "appendonly yes"),
        ({"aof_last_write_status": "err"}, "append-only file", "free its disk"),
        ({"used_memory": "990", "maxmemory": "1000"}, "memory", "990 B of maxmemory 1 kB"),
    ],
)
async def test_an_unfit_redis_is_told(redis_url, run_name, change, rule, said):
    info = {"redis_version": "7.0.15", "role": "master", "aof_enabled": "1", "maxmemory_policy": "noeviction"} | change
    server = ServerFacts.of(info)
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        found = await faults(bus, server=server)
    assert said in found[rule]


async def test_the_watchdog_says_a_stall_once_until_it_has_gone(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        stop = asyncio.Event()

        async def stalls():
            events = [await bus.message(e) for e in await bus.scan_all(EVENTS)]
            return [e for e in events if isinstance(e, Event) and e.kind == "stall"]

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(bus, stop, every_s=0.02, persist_s=0.1))
            await story.alive(vitals("filter", state="failed", note="KeyError: 'x'"))
            deadline = time.monotonic() + DEADLINE_S
            while not await stalls():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            before = len(await stalls())
            await story.alive(vitals("filter"))
            await asyncio.sleep(0.3)
            stop.set()
        said = await stalls()
    assert before == len(said) or {e.data["rule"] for e in said} == {"actor failed", "no actor"}
    assert len({(e.data["rule"], e.data["about"]) for e in said}) == len(said)
    assert "filter failed: KeyError: 'x'" in {e.text for e in said}


async def test_a_dead_group_of_the_bus_leaves_the_doctor_standing(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        await bus.link.run("HSET", bus.keys.vitals, "odd", b"\xc1not vitals")
        await bus.commit(Commit(close_groups=("g4",)))
        found = await faults(bus)
    assert "g4/0" in found["ledger"]


async def test_the_first_steps_self_check_is_shown(redis_url, run_name):
    value, limit = "train/selfcheck/", "train/selfcheck_limit/"
    passed = {value + "ppo_kl": 0.0, limit + "ppo_kl": 1e-9}
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        assert await faults(bus, first_step=passed) == {}
        scene = msgspec.structs.replace(await read_scene(bus), first_step=passed)
        [said] = [f.text for f in diagnose(scene) if f.rule == "self-check"]
        failed = await faults(bus, first_step=passed | {value + "ppo_kl": 0.25})
    assert "passed the 1 checks" in said
    assert failed["self-check"].startswith("step 1 failed its self-check: ppo_kl = 0.25") and "dropout" in failed["self-check"]


async def test_the_first_step_is_read_from_the_runs_folder(redis_url, run_name, tmp_path):
    lines = [
        {"kind": "step", "step": 1, "metrics": {"train/loss": 1.0}},
        {"kind": "step", "step": 1, "metrics": {"train/loss": 2.0}},
        {"kind": "step", "step": 2, "metrics": {"train/loss": 3.0}},
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        assert (await read_scene(bus, tmp_path)).first_step == {"train/loss": 2.0}
        assert (await read_scene(bus, tmp_path / "nowhere")).first_step == {}
        more = [{"kind": "step", "step": n, "metrics": {"train/loss": 3.0}} for n in range(3, 4000)]
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (*lines, *more)))
        scene = await read_scene(bus, tmp_path)
        assert scene.first_step == {"train/loss": 2.0} and scene.steps[-1].step == 3999
        assert scene.record is not None and len(scene.record.steps) < 2500, "a record of 50,000 steps took two gigabytes"


async def test_a_launcher_that_is_gone_is_named_with_what_goes_on_without_it(redis_url, run_name):
    async with timeless(redis_url, run_name) as bus:
        story = Story(bus)
        await story.whole()
        silent = bus.clock.wall() - 30
        launcher = vitals("launcher", pid=2**22 + 1, wall=silent)
        await story.alive(launcher)
        found = await faults(bus)
        assert set(found) == {"no launcher"}
        assert "9 actors work on and the record is kept, but nobody starts again what dies" in found["no launcher"]
        await story.finish(1)
        assert "9 actors still wait: miles-async stop ends them" in (await faults(bus))["no launcher"]
        await story.alive(msgspec.structs.replace(launcher, state="stopped"))
        assert await faults(bus) == {}
