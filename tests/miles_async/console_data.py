"""A run's messages, put on a bus through its public verbs: what the console, the doctor and the commands look at."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from actors.runtime.host import processes_name
from bus import Bus, BusConfig, Commit, Out, Reader
from bus.knobs.live import publish_initial
from bus.ledger import dropped, generated, issued, trained
from bus.messages.active import PolicyActive
from bus.messages.base import pack_floats, pack_ints
from bus.messages.control import DeadLetter, EvalDone, Event, Vitals
from bus.messages.groups import GroupKept, GroupVerdict, OpenGroup
from bus.messages.policy import Checkpointed, Finished, PolicyAnnounced, Restored, StepDone, WeightManifest
from bus.messages.samples import Response, RolloutDone, RolloutLost, SampleTask, Scored
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.topology import (
    ACTIVE,
    DEAD,
    EVAL_RESULTS,
    EVENTS,
    GROUPS,
    POLICY,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    VERDICTS,
    Stream,
)
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.scene import read_scene
from miles_async.launcher.prepare import live_kinds
from miles_async.settings.live import initial_values
from miles_async.settings.load import settings_from
from tests.bus.suite.clock import ManualClock

SETTINGS = settings_from(
    hf_checkpoint="builtin:arithmetic",
    prompt_data="x.jsonl",
    num_rollout=3,
    rm_type="math",
    use_tis=True,
    max_weight_staleness=1,
    rollout_batch_size=2,
    over_sampling_batch_size=2,
)
ROOMS = ("sampler", "reward", "filter", "partial", "trainer", "publisher", "recorder")
TOKENS = 4


def config(url: str, run: str, **more: Any) -> BusConfig:
    """Bus settings for tests: short deadlines."""
    return BusConfig(url=url, run=run, deadline_s=5.0, room_deadline_s=5.0, **more)


def vitals(actor: str, role: str | None = None, **more: Any) -> Vitals:
    """A living actor of this process, unless told otherwise."""
    fields = {"pid": os.getpid(), "host": socket.gethostname(), "processes": processes_name()}
    return Vitals(actor=actor, role=role or actor, **({**fields, "state": "running", "wall": time.time()} | more))


def task(sample_id: str, n_samples: int = 2, **more: Any) -> SampleTask:
    """One sample of a group; prompts are named after their group."""
    group, _, index = sample_id.rpartition("/")
    return SampleTask(
        sample_id=sample_id,
        group_id=group,
        index=int(index),
        n_samples=n_samples,
        prompt_id=f"p-{group}",
        prompt_tokens=pack_ints([1, 2, 3]),
        prompt_text="1+1=",
        label="2",
        **more,
    )


def rollout(sample_id: str, version: int = 1) -> RolloutDone:
    """A finished sample of TOKENS tokens."""
    response = Response(
        tokens=pack_ints(range(TOKENS)),
        logprobs=pack_floats([-0.5] * TOKENS),
        loss_mask=memoryview(b"\1" * TOKENS),
        spans=(VersionSpan(version, version - 1, TOKENS),),
    )
    return RolloutDone(task=task(sample_id), response=response, finish="stop", worker="generation-0")


def step_done(step: int, groups: Sequence[str] = (), **metrics: float) -> StepDone:
    """One step; metrics by their last name."""
    values = {
        "rollout/raw_reward": 0.5,
        "rollout/tokens": 800.0,
        "rollout/response_len/mean": 5.0,
        "rollout/response_len/max": 9.0,
        "rollout/fully_async/avg_staleness": 0.75,
        "rollout/fully_async/max_staleness": 2.0,
        "perf/wait_s": 0.2,
        "perf/train_s": 0.7,
        "perf/tokens_per_s": 900.0,
    }
    values |= {next(k for k in values if k.endswith(name)): value for name, value in metrics.items()}
    return StepDone(
        step=step,
        version=PolicyVersion(step + 1, step),
        trained_on=PolicyVersion(step, step - 1),
        groups=tuple(groups),
        samples=tuple(f"{g}/{i}" for g in groups for i in range(2)),
        metrics=values,
    )


class Story:
    """Moves samples through a run, accounts included."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def say(self, stream: Stream, *messages: Any) -> None:
        """Append news."""
        await self.bus.append([Out(stream, message) for message in messages])

    async def begin(self, *, workers: int = 2) -> None:
        """Knobs, readers, one version, and every room alive."""
        await self.bus.make_readers()
        await publish_initial(self.bus, initial_values(SETTINGS), live_kinds())
        await self.say(POLICY, Restored(step=0, version=PolicyVersion(1, 0)), self.announced(1))
        names = [f"generation-{i}" for i in range(workers)]
        await self.say(ACTIVE, PolicyActive(version=PolicyVersion(1, 0), serving=dict.fromkeys(names, 1)))
        for name in ROOMS:
            await self.alive(vitals(name))
        for name in names:
            await self.alive(vitals(name, "generation", version=1))

    def announced(self, version: int) -> PolicyAnnounced:
        return PolicyAnnounced(version=PolicyVersion(version, version - 1), manifest=WeightManifest(n_bytes=10))

    async def alive(self, message: Vitals) -> None:
        """A heartbeat."""
        await self.bus.set_vitals(message.actor, message)
        heard_ms = int(message.wall * 1000)  # as if it had come when it was said
        await self.bus.link.run("HSET", self.bus.keys.heard, message.actor, heard_ms)
        await self.say(EVENTS, message)

    async def issue(self, *groups: str, n_samples: int = 2) -> None:
        """Groups begin."""
        opened = {g: msgspec.msgpack.encode(OpenGroup(group_id=g, prompt_id=f"p-{g}", n_samples=n_samples)) for g in groups}
        outs = [Out(PROMPTS, task(f"{g}/{i}", n_samples)) for g in groups for i in range(n_samples)]
        await self.bus.commit(Commit(append=outs, open_groups=opened, ledger=issued(len(outs))))

    async def move(self, source: Stream, out: Any, *, who: str, wanted: str | None = None) -> None:
        """One hop of the entry whose id field is `wanted` (default: any); `out(message)` gives (stream, message, ledger)."""
        reader = Reader(self.bus, [source], source.readers[0], who)
        await reader.open()
        try:
            for entry in await reader.read(200, 0.0):
                if wanted is None or entry.fields["id"] == wanted:
                    stream, message, ledger = out(await self.bus.message(entry))
                    await self.bus.commit(Commit(ack=(entry,), append=(Out(stream, message),), ledger=ledger))
        finally:
            await reader.close()

    async def generate(self, who: str = "generation-0", wanted: str | None = None) -> None:
        """Prompts become rollouts; what is not `wanted` stays leased by `who`."""
        spans = (VersionSpan(1, 0, TOKENS),)
        await self.move(
            PROMPTS,
            lambda m: (ROLLOUTS, rollout(m.sample_id), generated(who, spans)),
            who=who,
            wanted=wanted,
        )

    async def score(self, wanted: str | None = None) -> None:
        """Rollouts become scored."""
        await self.move(
            ROLLOUTS,
            lambda m: (SCORED, m if isinstance(m, RolloutLost) else Scored(rollout=m, reward=1.0), {}),
            who="reward",
            wanted=wanted,
        )

    async def hold_scored(self) -> list[Any]:
        """The filter takes what is scored and keeps it."""
        reader = Reader(self.bus, [SCORED], "filter", "filter")
        await reader.open()
        try:
            return await reader.read(200, 0.0)
        finally:
            await reader.close()

    async def judge(self, group: str, reason: str = "") -> None:
        """The filter keeps a group, or drops it with a reason."""
        entries = [e for e in await self.hold_scored() if e.fields["group"] == group]
        members = tuple([await self.bus.message(e) for e in entries])
        verdict = GroupVerdict(
            group_id=group, prompt_id=f"p-{group}", kept=not reason, reason=reason, n_samples=len(entries), tokens=8
        )
        if reason:
            tokens = sum(int(e.fields.get("tokens", 0)) for e in entries)
            commit = Commit(
                ack=entries,
                append=(Out(VERDICTS, verdict),),
                close_groups=(group,),
                ledger=dropped(reason, len(entries), tokens),
            )
        else:
            kept = GroupKept(group_id=group, prompt_id=f"p-{group}", samples=members)
            commit = Commit(ack=entries, append=(Out(GROUPS, kept), Out(VERDICTS, verdict)))
        assert (await self.bus.commit(commit)).done

    async def train(self, step: int, *groups: str, durable: bool = True) -> None:
        """A step on kept groups, and the checkpoint that makes it final."""
        reader = Reader(self.bus, [GROUPS], "trainer", "trainer")
        await reader.open()
        try:
            entries = [e for e in await reader.read(200, 0.0) if e.fields["group"] in groups]
        finally:
            await reader.close()
        await self.say(POLICY, step_done(step, groups), self.announced(step + 1))
        if durable:
            spans = (VersionSpan(1, 0, TOKENS * 2 * len(groups)),)
            checkpoint = Checkpointed(step=step, path=f"ckpt/iter_{step:07d}", save_s=0.5)
            await self.bus.commit(
                Commit(
                    ack=entries,
                    close_groups=groups,
                    ledger=trained(2 * len(groups), spans),
                    append=(Out(POLICY, checkpoint),),
                )
            )

    async def whole(self) -> None:
        """g1 trained in step 1, g2 dropped, g3 incomplete (g3/1 leased by generation-1), g4 not begun."""
        await self.begin()
        await self.issue("g1", "g2")
        await self.generate()
        await self.score()
        await self.judge("g1")
        await self.judge("g2", "zero_std_0")
        await self.train(1, "g1")
        await self.issue("g3")
        await self.generate(who="generation-1", wanted="g3/0")
        await self.score()
        await self.hold_scored()
        await self.issue("g4")
        metrics = {"eval/held_out": 0.625}
        await self.say(EVAL_RESULTS, EvalDone(name="held_out", version=2, step=1, metrics=metrics, n_samples=8))
        data = {"version": 2, "step": 1, "pause_s": 0.012, "total_s": 0.09, "transport": "ipc", "requests": "kept", "compared": 7}
        await self.say(
            EVENTS,
            Event(actor="generation-0", kind="activated", text="version 2", wall=time.time(), data=data),
            Event(actor="reward", kind="retry", text="rollouts g2/1: slow", wall=time.time(), level="warning"),
        )

    async def die(self, sample: str, stream: Stream = ROLLOUTS, message: Any = None, error: str = "boom") -> None:
        """A dead letter as an actor leaves it."""
        from bus.messages.codec import encode

        body = encode(message if message is not None else rollout(sample))
        letter = DeadLetter(
            stream=stream.name,
            entry_id="1-0",
            actor="reward",
            error=error,
            traceback="Traceback: boom",
            deliveries=5,
            fields={"type": "rollout.done", "id": sample, "group": sample.rpartition("/")[0], "tokens": "4"},
            body=body,
            wall=time.time(),
            sample_id=sample,
            group_id=sample.rpartition("/")[0],
        )
        await self.say(DEAD, letter)

    async def finish(self, step: int) -> None:
        """The trainer's last word."""
        await self.say(POLICY, Finished(step=step, version=PolicyVersion(step + 1, step)))


async def faults(bus: Bus, **changed: Any) -> dict[str, str]:
    """rule -> text of all errors and warnings."""
    scene = msgspec.structs.replace(await read_scene(bus), **changed)
    return {f.rule: f.text for f in diagnose(scene) if f.level != "info"}


def timeless(redis_url: str, run_name: str) -> Bus:
    """A bus on whose clock no time passes."""
    return Bus(config(redis_url, run_name), ManualClock(time.time()))
