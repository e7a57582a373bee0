"""What the doctor says of the staleness bound: how much is open of what it admits."""

import time

import msgspec
import pytest

from bus import Bus
from bus.inspect import Head
from bus.messages.groups import OpenGroup
from bus.messages.waits import Wait
from miles_async.console.explain import explain, open_text
from miles_async.console.places import EntryPlaces
from miles_async.console.scene import read_scene
from tests.miles_async.console_data import Story, config, timeless, vitals


@pytest.mark.parametrize(
    ("knobs", "most"),
    [
        ({"max_weight_staleness": 0, "over_sampling_batch_size": 24}, 24),
        ({"max_weight_staleness": 2, "over_sampling_batch_size": 24}, 12),
        ({"max_weight_staleness": 2, "update_weights_interval": 2}, 24),
        ({"max_weight_staleness": 2, "staleness_policy": "wait", "staleness_lookahead": 4}, 8),
        ({"max_weight_staleness": 2, "staleness_policy": "auto", "staleness_lookahead": 4}, 12),
    ],
)
async def test_as_many_groups_may_be_open_as_the_sampler_lets(redis_url, run_name, knobs, most):
    async with timeless(redis_url, run_name) as bus:
        await Story(bus).whole()
        scene = msgspec.structs.replace(await read_scene(bus), knobs={"rollout_batch_size": 4} | knobs)
    assert f" open of at most {most}" in open_text(scene)


async def test_groups_that_are_open_in_part_are_held_against_the_bound_by_their_samples(redis_url, run_name):
    """Two parts of one group, of which a step has trained a sample each: neither is a group more, nor a whole one."""
    async with timeless(redis_url, run_name) as bus:
        await Story(bus).whole()
        scene = await read_scene(bus)
    four = {"prompt_id": "p", "n_samples": 4}
    opened = {
        "g1": OpenGroup(group_id="g1", members=(0, 1), **four),
        "g1+2": OpenGroup(group_id="g1", members=(2, 3), **four),
        "g2": OpenGroup(group_id="g2", **four),
        "g3": OpenGroup(group_id="g3", **four),
    }
    places = EntryPlaces({"groups": [Head("groups", f"{n}-0", 0, {"id": key}) for n, key in enumerate(opened)]}, {}, opened)
    trained = frozenset(["g1/0", "g1/2", *opened["g3"].sample_ids])
    knobs = {"rollout_batch_size": 1, "max_weight_staleness": 1}
    scene = msgspec.structs.replace(scene, places=places, uncommitted=trained, knobs=knobs)
    wanted = "2 groups open (2 with the trainer), 6 of at most 8 samples, 1 trained and not yet in a checkpoint"
    assert open_text(scene) == wanted


async def test_groups_trained_since_the_checkpoint_hold_no_slot(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.issue("g1", "g2")
        await story.generate()
        await story.score()
        await story.judge("g1")
        await story.judge("g2")
        await story.train(1, "g1", durable=False)
        await story.alive(vitals("sampler", waits_for=Wait.CREDITS, waits_since=time.time()))
        scene = await read_scene(bus)
    assert scene.uncommitted == {"g1/0", "g1/1"}
    assert (
        ": 1 group open of at most 4 (1 with the trainer), 1 trained and not yet in a checkpoint" in dict(explain(scene))["sampler"]
    )
