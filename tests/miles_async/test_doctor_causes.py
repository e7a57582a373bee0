"""Each planted cause is the first thing that the doctor says, by name and in words; healthy histories make it say nothing.

A plant is a story on a real server: messages, heartbeats and server settings as the real rooms and operators leave them. The same
causes in a real run are in tests/crash/test_doctor.py.
"""

from __future__ import annotations

import gzip
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.recorder.history import Step, history_of
from actors.runtime.host import room_left
from bus import Bus
from bus.identity import Identity, write_identity
from bus.messages.control import Event
from bus.messages.groups import GroupVerdict
from bus.messages.policy import Checkpointed
from bus.messages.waits import Wait
from bus.topology import EVAL_PROMPTS, EVENTS, POLICY, ROLLOUTS, SCORED, VERDICTS
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.doctor.finding import Finding
from miles_async.console.scene import Scene, read_scene
from tests.miles_async.console_data import Story, config, task, vitals

HEALTHY = Path(__file__).parent / "healthy"
Plant = Callable[[Story], Awaitable[None]]


def steps(**metrics: Callable[[int], float]) -> list[Step]:
    """60 steps of a run in good health, but for the metrics given by the last part of their names."""
    usual: dict[str, Callable[[int], float]] = {
        "rollout/raw_reward": lambda i: 0.4 + 0.006 * i + 0.02 * (-1) ** i,
        "train/entropy_loss": lambda i: 0.5 + 0.01 * (-1) ** i,
        "train/ess_ratio": lambda i: 0.98,
        "train/grad_norm": lambda i: 1.0 + 0.3 * (-1) ** i,
        "train/forward_logp_abs_diff": lambda i: 0.02,
        "train/length_bias": lambda i: 0.0,
        "train/skipped_updates": lambda i: 0.0,
        "train/gpu_retries": lambda i: 0.0,
        "rollout/response_len/mean": lambda i: 200.0 + i,
        "rollout/response_len/p90": lambda i: 400.0,
        "rollout/truncated_ratio": lambda i: 0.02,
        "rollout/generate_s/p99": lambda i: 3.0,
        "perf/wait_s": lambda i: 0.2,
        "perf/train_s": lambda i: 1.0,
    }
    usual |= {next(k for k in usual if k.endswith(name.replace("__", "/"))): f for name, f in metrics.items()}
    return [Step(i + 1, 1000.0 + i, {k: f(i) for k, f in usual.items()}, 4, gap_s=1.0) for i in range(60)]


def older(scene: Scene, seconds: float) -> Scene:
    """The same some time later, nothing having come in but heartbeats."""
    snapshot = scene.snapshot
    streams = {n: msgspec.structs.replace(s, newest_age_s=s.newest_age_s + seconds) for n, s in snapshot.streams.items()}
    actors = tuple(
        msgspec.structs.replace(a, vitals=msgspec.structs.replace(a.vitals, wall=a.vitals.wall + seconds)) for a in snapshot.actors
    )
    snapshot = msgspec.structs.replace(snapshot, streams=streams, actors=actors)
    return msgspec.structs.replace(scene, now=scene.now + seconds, snapshot=snapshot)


async def first(bus: Bus, late_s: float = 0.0, **changed: Any) -> Finding:
    """The gravest finding."""
    found = diagnose(msgspec.structs.replace(older(await read_scene(bus), late_s), **changed))
    assert found, "nothing is wrong"
    return found[0]


def event(actor: str, kind: str, text: str, **data: Any) -> Event:
    return Event(actor=actor, kind=kind, text=text, wall=time.time(), level="error", data=data)


async def again_and_again(story: Story) -> None:
    for _ in range(3):
        text = "reward-0 ended with status 70 after 1.2 s: ValueError: no such rule; restarting"
        await story.say(EVENTS, event("launcher", "restart", text))


async def taken_over_by_another_release(story: Story) -> None:
    await write_identity(story.bus, Identity(run=story.bus.config.run, release="0.2.1"))
    for name, role, release in (("trainer", "", "0.2.0"), ("filter", "", ""), ("generation-1", "generation", "0.1.9")):
        await story.alive(vitals(name, role or name, host="node7", version=2, release=release))


async def hang(story: Story) -> None:
    counters = {"engine/asked": 12.0, "engine/silent_s": 41.0}
    await story.alive(vitals("generation-0", "generation", version=2, in_flight=12, counters=counters))


async def hang_in_a_step(story: Story) -> None:
    counters, ranks = {"step_began": time.time() - 600}, "4243 4244 on h, 91 on h2"
    await story.alive(vitals("trainer", pid=1, host="h", processes="", counters=counters, ranks=ranks))


async def slow(story: Story) -> None:
    for name, rate in (("generation-0", 900.0), ("generation-1", 95.0), ("generation-2", 1000.0)):
        counters = {"engine/asked": 20.0, "engine/tokens_per_s": rate}
        await story.alive(vitals(name, "generation", version=2, in_flight=20, counters=counters))


async def hang_in_a_load(story: Story) -> None:
    wait = {"waits_for": "activation of version 1", "waits_since": time.time() - 45}
    await story.alive(vitals("generation-0", "generation", version=0, **wait))


async def crashes(story: Story) -> None:
    for _ in range(3):
        await story.say(EVENTS, event("generation-1", "engine stalled", "exit code -11: Segmentation fault"))
    await story.alive(vitals("generation-1", "generation", version=-1, waits_for="the engine to boot"))


async def refuse(story: Story, *names: str) -> None:
    for name in names:
        await story.say(EVENTS, event(name, "weights refused", "weights do not match their checksum", version=2, path="v2"))


async def all_refuse(story: Story) -> None:
    for name in ("generation-0", "generation-1"):
        await story.alive(vitals(name, "generation", version=1))
    await refuse(story, "generation-0", "generation-1")


async def one_refuses(story: Story) -> None:
    await story.alive(vitals("generation-0", "generation", version=2))
    await story.alive(vitals("generation-1", "generation", version=1))
    await refuse(story, "generation-0", "generation-1")  # the first has loaded it since


async def another_model(story: Story) -> None:
    await story.alive(vitals("generation-1", "generation", version=-1))
    await refuse(story, "generation-1")


async def late_weights(story: Story) -> None:
    for _ in range(4):
        await story.say(EVENTS, event("generation-0", "activated", "version 2", version=2, total_s=14.0))


async def full(story: Story, **counters: float) -> None:
    here = {name.replace("_", "/", 1): value for name, value in counters.items()}
    await story.alive(vitals("recorder", counters=room_left("/") | here))


async def unread(story: Story) -> None:
    wait = {"waits_for": "the prompts of x.jsonl to be read", "waits_since": time.time() - 120}
    await story.alive(vitals("sampler", note="my.rows gave 3 rows so far, none for 119 s", **wait))


async def unsaved(story: Story) -> None:
    await story.say(POLICY, Checkpointed(step=2, path="x", save_s=1.0))
    for step in (2, 4):
        text = f"checkpoint {step} not written to /ckpt: No space left on device. The former checkpoint is intact"
        await story.say(EVENTS, event("trainer", "checkpoint failed", text, step=step))


async def starve(story: Story) -> None:
    drops = [GroupVerdict(group_id=f"b{i}", prompt_id="p", kept=False, reason="zero_std_1") for i in range(6)]
    await story.say(VERDICTS, *drops)


async def broken_row(story: Story) -> None:
    for sample in ("g2/0", "g2/1"):
        await story.die(sample, SCORED if sample == "?" else ROLLOUTS, error="Poison: label 'n/a' is no number")


async def late_judge(story: Story) -> None:
    await story.generate()
    await story.alive(vitals("reward", counters={"score_s": 21.0, "scorer_failures": 3.0}))
    await story.alive(vitals("trainer", waits_for="2 of 2 groups of step 2 on groups", waits_since=time.time()))


async def evaluation(story: Story) -> None:
    await story.say(EVAL_PROMPTS, *(task(f"e2/{i}", eval_name="held_out") for i in range(3)))


async def held_back(story: Story) -> None:
    await story.alive(vitals("sampler", waits_for=Wait.CREDITS, waits_since=time.time()))
    await story.alive(vitals("trainer", waits_for="2 of 2 groups of step 2 on groups", waits_since=time.time()))
    for name in ("generation-0", "generation-1"):
        await story.alive(vitals(name, "generation", version=2, slots=64, in_flight=2))


async def delete_stream(story: Story) -> None:
    await story.bus.link.run("DEL", story.bus.keys.stream("rollouts"))


async def delete_group(story: Story) -> None:
    await story.bus.link.run("XGROUP", "DESTROY", story.bus.keys.stream("scored"), "filter")


async def delete_log(story: Story) -> None:
    await story.bus.link.run("DEL", story.bus.keys.stream("policy"))


# fmt: off
def after(step: int, value: float, before: Callable[[int], float]) -> Callable[[int], float]:
    """A metric that is another one from a step on."""
    return lambda i: value if i >= step else before(i)


def even(value: float) -> Callable[[int], float]:
    """With a little noise."""
    return lambda i: value + 0.02 * (-1) ** i


TRENDS: list[tuple[str, str, dict[str, Callable[[int], float]]]] = [
    ("reward falls", "was 0.[67].* and is 0.1", {"raw_reward": after(40, 0.1, lambda i: 0.4 + 0.01 * i)}),
    ("entropy collapsed", "from 0.41 to 0.00", {"entropy_loss": lambda i: 0.5 * 0.9**i, "raw_reward": even(0.5)}),
    ("entropy grows", "writes at random", {"entropy_loss": lambda i: 0.5 + 0.1 * i}),
    ("ESS falls", "effective sample size is 0.3", {"ess_ratio": lambda i: 1 - 0.012 * i}),
    ("gradient", "10 times what is usual", {"grad_norm": after(56, 40.0, even(1.0))}),
    ("gradient", "not finite in 2 of the last", {"skipped_updates": lambda i: i >= 58, "grad_norm": after(58, math.nan, even(1))}),
    ("GPU memory", "ran out 3 times in the last 5 steps", {"gpu_retries": lambda i: max(0.0, i - 56.0)}),
    ("answers cut", "100% of the answers are cut", {"truncated_ratio": lambda i: min(1.0, 0.02 * i)}),
    ("answers empty", "one token or none", {"response_len__p90": lambda i: 1.0}),
    ("answers shrink", "from 200 to 40 tokens", {"response_len__mean": after(50, 40.0, even(200)), "raw_reward": even(0.5)}),
    ("length bias", "40% shorter than sampled", {"length_bias": lambda i: -0.4}),
    ("log-probs differ", "differ by 0.80 nats.*chat template", {"forward_logp_abs_diff": lambda i: 0.8}),
]
PLANTS: list[tuple[Plant | None, str, str, dict[str, Any]]] = [
    (again_and_again, "crash loop", r"reward-0 has ended 3 times .*no such rule.*logs/reward-0.log", {}),
    (taken_over_by_another_release, "release", r"^generation-1 on node7 of release 0\.1\.9, the run is of 0\.2\.1:", {}),
    (hang, "engine silent", "generation-0 has given no token for 41 s to any of its 12 requests", {}),
    (hang_in_a_load, "stale worker", "activation of version 1, for 4. s: its engine hangs, or loads slowly", {}),
    (slow, "slow engine", "engine of generation-1 gives 95 tokens/s, its peers 950", {}),
    (crashes, "engine failing", "generation-1 failed 3 times .* engine stalled: exit code -11", {}),
    (all_refuse, "weights refused", "no worker could load version 2: weights do not match", {}),
    (one_refuses, "weights refused", "generation-1 could not load version 2: weights do not match their checksum$", {}),
    (another_model, "weights refused", "generation-1 could not load version 2.*is its --model-path the model of the run", {}),
    (late_weights, "slow weights", "a version takes 14 s to arrive, a step 1.0 s", {"steps": steps()}),
    (lambda s: full(s, free_disk=1.5e8), "disk", "has 150 MB left", {}),
    (lambda s: full(s, free_memory=4e8, free_memory_share=0.01), "host memory", "has 400 MB of memory left", {}),
    (unsaved, "checkpoint failed", "checkpoint 4 not written to /ckpt: No space left", {}),
    (unread, "long wait", "for the prompts of x.jsonl to be read: my.rows gave 3 rows so far, none for 119 s$", {}),
    (starve, "filter starving", "the last 7 groups were all dropped", {}),
    (broken_row, "dead letters", r"no number; 2 of the newest 2 are of prompt p-g2, row -g2", {}),
    (late_judge, "slow rewards", "wait to be scored, the oldest for 3. s.* a score takes 21 s, 3 attempts", {"late_s": 30}),
    (evaluation, "evaluation stuck", r"has not moved for 4. s \(3 on eval.prompts\)", {"late_s": 40}),
    (hang_in_a_step, "endless step",
     r"one step for 10:00; none .* 1\.0 s: .* -p 1 on h shows where \(of the other ranks: 4243 4244 on h, 91 on h2\); kill -9 1 ",
     {"steps": steps()}),
    (held_back, "idle trainer", "waited for 80% of the last 10 steps while 124", {"steps": steps(wait_s=lambda i: 4.0)}),
    (delete_stream, "stream gone", "rollouts has no readers reward any more", {}),
    (delete_group, "stream gone", "scored has no readers filter any more", {}),
    (delete_log, "stream gone", "policy is empty on Redis although workers serve version 1", {}),
    *((None, rule, said, {"steps": steps(**metrics)}) for rule, said, metrics in TRENDS),
]
# fmt: on


@pytest.mark.parametrize(
    ("plant", "rule", "said", "scene"), PLANTS, ids=[f"{n}-{rule}" for n, (_, rule, _, _) in enumerate(PLANTS)]
)
async def test_a_planted_cause_is_said_first(redis_url, run_name, plant, rule, said, scene):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        if plant is not None:
            await plant(story)
        found = await first(bus, **scene)
    assert (found.rule, found.level != "info") == (rule, True), found
    assert re.search(said, found.text), found.text


async def test_an_engine_of_a_worker_that_was_told_to_end_is_no_concern(redis_url, run_name):
    async with Bus(config(redis_url, run_name)) as bus:
        await crashes(story := Story(bus))
        assert "engine failing" in {f.rule for f in diagnose(await read_scene(bus))}
        await story.alive(vitals("generation-1", "generation", state="stopped"))
        assert "engine failing" not in {f.rule for f in diagnose(await read_scene(bus))}


async def test_a_stopped_process_and_a_killed_one_are_told_apart(redis_url, run_name):
    words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:  # noqa: ASYNC220
        assert child.stdout is not None and child.stdout.readline()
        async with Bus(config(redis_url, run_name)) as bus:
            story = Story(bus)
            await story.whole()
            await story.alive(vitals("filter", pid=child.pid, wall=time.time() - 30))
            child.send_signal(signal.SIGSTOP)
            stopped = await first(bus)
            child.kill()
            child.wait()
            killed = await first(bus)
    assert stopped.rule == "stopped process" and f"kill -CONT {child.pid}" in stopped.text, stopped
    assert killed.rule == "silent actor" and "its process is gone" in killed.text, killed


@pytest.mark.parametrize("name", ["quickstart", "long"])
async def test_no_look_at_a_recorded_healthy_run_finds_a_fault(redis_url, run_name, name):
    """After each of its steps, with what was known then."""
    recorded = history_of(msgspec.json.decode(gzip.decompress((HEALTHY / f"{name}.json.gz").read_bytes())))
    assert len(recorded.steps) >= 40
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        scene = await read_scene(bus)
    said = [
        finding
        for n in range(1, len(recorded.steps) + 1)
        for finding in diagnose(msgspec.structs.replace(scene, steps=recorded.steps[:n]))
        if finding.level != "info"
    ]
    assert said == []
