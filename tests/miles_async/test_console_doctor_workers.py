"""What the doctor says of rollout workers: those that are gone, silent, behind, or on a wrong clock."""

import asyncio
import re
import time

import msgspec
import pytest

from actors.runtime.context import Context
from actors.runtime.run import _heartbeat
from bus import Bus
from bus.knobs.live import LiveKnobs
from bus.messages.waits import Wait
from miles_async.cli.status import as_text
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.explain import explain
from miles_async.console.scene import read_scene
from tests.actors.house import until
from tests.bus.suite.clock import ManualClock
from tests.bus.suite.proxy import LossyProxy
from tests.declared import actor_of
from tests.miles_async.console_data import Story, config, faults, timeless, vitals


async def test_a_dead_worker_is_named_with_what_it_holds(redis_url, run_name):
    async with timeless(redis_url, run_name) as bus:
        story = Story(bus)
        await story.whole()
        silent = bus.clock.wall() - 30
        await story.alive(vitals("generation-1", "generation", pid=2**22 + 1, wall=silent, version=2))
        found = await faults(bus)
    # Silence is counted by the server's clock, which goes on.
    said = r"generation-1 \(generation, pid 4194305\) has been silent for 3\d s; its process is gone"
    assert re.search(said, found["silent actor"])
    assert "it holds 1 entry" in found["silent actor"]


@pytest.mark.parametrize(("silent_s", "named"), [(12, False), (40, True)])
async def test_a_silent_actor_whose_process_is_there_may_be_one_of_a_busy_machine(redis_url, run_name, silent_s, named):
    async with timeless(redis_url, run_name) as bus:
        story = Story(bus)
        await story.whole()
        for name in ("launcher", "filter"):
            await story.alive(vitals(name, wall=bus.clock.wall() - silent_s))
        found = await faults(bus)
    assert ({"no launcher", "silent actor", "no actor"} <= found.keys()) == named
    assert named or found == {}


@pytest.mark.parametrize(("skew_s", "word"), [(90, "ahead of"), (-90, "behind"), (2, "")])
async def test_a_host_with_a_wrong_clock_is_named(redis_url, run_name, skew_s, word):
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        await bus.set_vitals("far", vitals("far", "generation", host="node7", processes="b", wall=time.time() + skew_s, version=2))
        found = await faults(bus)
    assert bool(word) == ("clock" in found)
    assert not word or re.match(f"the clock of node7 is 1:[23][0-9] {word} Redis's", found["clock"]), found


@pytest.mark.parametrize(
    ("late_s", "usual_s", "named"),
    [(2.25, 0.004, True), (0.3, 0.004, True), (0.04, 0.0004, False), (2.25, 1.9, False), (2.25, None, False)],
)
async def test_a_host_that_the_bus_answers_much_later_than_others_has_a_slow_link(redis_url, run_name, late_s, usual_s, named):
    async with timeless(redis_url, run_name) as bus:
        story = Story(bus)
        await story.whole()
        near = {} if usual_s is None else {"bus_answer_s": usual_s}
        await story.alive(vitals("trainer", version=2, counters=near))
        slow = vitals("far", "generation", host="node7", version=2, counters={"bus_answer_s": late_s})
        fetching = msgspec.structs.replace(slow, note="has 3 of 8 MB, 0.0 MB/s", waits_for="activation of version 3")
        await bus.set_vitals("far", fetching)
        found = await faults(bus)
        for silent_s in (30, 90):
            await story.alive(msgspec.structs.replace(fetching, wall=bus.clock.wall() - silent_s))
            silent = await faults(bus)
            assert ("slow link" in silent) == (named and silent_s < 60), "who has been gone for long tells nothing"
    assert ("slow link" in found) == named
    if named:
        said = f"the bus answers far on node7 after {late_s:.1f} s, other hosts after 0.004 s: the link of"
        assert found["slow link"].startswith(said)
        assert "overloaded (far has 3 of 8 MB, 0.0 MB/s)" in found["slow link"]


async def test_a_slow_link_is_named_where_there_is_news_at_each_heartbeat(redis_url, run_name, tmp_path):
    """There a beat takes as long as a small version."""
    clock, over, late_s = ManualClock(), asyncio.Event(), 0.0
    async with (
        timeless(redis_url, run_name) as here,
        LossyProxy(redis_url, tmp_path) as proxy,
        Bus(config(proxy.url, run_name)) as there,
    ):
        story = Story(here)
        await story.whole()
        await story.alive(vitals("trainer", host="node7", version=2, counters={"bus_answer_s": 0.001}))
        spec = msgspec.structs.replace(actor_of(name="far", role="generation", bus=there.config), heartbeat_s=3600.0)
        context = Context(spec, there, LiveKnobs(there))
        context.clock, context.state, context.version = clock, "running", 2
        proxy.before_reply = lambda: clock.advance(late_s)

        async def found(*, link: bool) -> bool:
            context.news.set()
            own = (await here.vitals()).get("far")
            return own is not None and "bus_answer_s" in own.counters and ("slow link" in await faults(here)) == link

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_heartbeat(context, over, context.draining.set))
            await until(lambda: found(link=False), deadline_s=8.0)
            late_s = 0.4
            await until(lambda: found(link=True), deadline_s=8.0)
            over.set()
            context.news.set()


async def test_a_worker_that_fetches_says_how_far_it_is(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        note = "has 120 of 800 MB, 3.1 MB/s"
        await story.alive(vitals("generation-1", "generation", version=1, note=note, waits_for="activation of version 2"))
        scene = await read_scene(bus)
        late = msgspec.structs.replace(scene.snapshot.policy, announced=3, announced_ages={2: 40.0, 3: 35.0})
        told = await faults(bus, snapshot=msgspec.structs.replace(scene.snapshot, policy=late))
    assert told["stale worker"].endswith("it waits for activation of version 2 (has 120 of 800 MB, 3.1 MB/s)")


async def test_a_worker_that_is_gone_for_good_is_only_history(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        await story.alive(vitals("visitor", "generation", pid=2**22 + 1, wall=time.time() - 30))
        scene = await read_scene(bus)
        found = {f.about: f for f in diagnose(scene) if f.rule == "gone"}
    assert found["visitor"].level == "info"
    assert "holds nothing" in found["visitor"].text


async def test_a_worker_on_an_old_version_is_named_although_newer_ones_keep_coming(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.alive(vitals("generation-1", "generation", version=2, waits_for="activation of version 3"))
        scene = await read_scene(bus)
        policy = msgspec.structs.replace(scene.snapshot.policy, announced=9, announced_ages={3: 50.0, 9: 0.1}, announced_age_s=0.1)
        scene = msgspec.structs.replace(scene, snapshot=msgspec.structs.replace(scene.snapshot, policy=policy))
        found = {f.about: f for f in diagnose(scene) if f.rule == "stale worker"}
    assert found["generation-1"].level == "warning"
    assert "serves version 2, newer ones have been announced for 50 s (now 9); it waits for activation of version 3" in (
        found["generation-1"].text
    )


async def test_an_engine_that_boots_is_behind_since_it_boots(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.alive(vitals("generation-1", "generation", version=-1, waits_for=Wait.BOOTING, waits_since=time.time() - 3))
        scene = await read_scene(bus)
        policy = msgspec.structs.replace(scene.snapshot.policy, announced=2, announced_ages={2: 500.0}, announced_age_s=500.0)
        scene = msgspec.structs.replace(scene, snapshot=msgspec.structs.replace(scene.snapshot, policy=policy))
        found = {f.about: f for f in diagnose(scene) if f.rule == "stale worker"}
    assert found["generation-1"].since_s < 30 and found["generation-1"].level == "info"


async def test_a_worker_that_waits_for_a_gpu_to_be_lent_is_well_and_the_status_says_what_was_lent(redis_url, run_name):
    async with timeless(redis_url, run_name) as bus:
        story = Story(bus)
        await story.whole()
        ago = bus.clock.wall() - 300
        await story.alive(vitals("lent-0", "generation", version=0, state="waiting", waits_for=Wait.UNLENT, waits_since=ago))
        counters = {"lend/times": 3.0, "lend/s": 65.0, "lend/tokens": 1234.0, "lend/waited_s": 0.25}
        await story.alive(vitals("trainer", version=2, counters=counters))
        scene = await read_scene(bus)
    assert not [f for f in diagnose(scene) if f.about == "lent-0"]
    assert dict(explain(scene))["lent-0"].endswith(f"for {Wait.UNLENT}: it needs them, or no wait of its is long enough")
    said = "the trainer's GPUs: lent 3 times, 1:05 in all, 1234 tokens were made on them, the trainer waited 0.2 s for them"
    assert said in as_text(scene.snapshot)
