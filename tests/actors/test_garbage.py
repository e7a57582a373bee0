"""Each room, fed with garbage on every stream that it reads, between good messages and by chance from a seed: it does its good
work, the ledger closes, nothing is left pending, and every piece of garbage is a dead letter or is counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from actors.evaluator.actor import EvalSet, EvaluatorSpec
from actors.evaluator.actor import run as evaluator
from actors.filter.actor import FilterSpec
from actors.filter.actor import run as filter_
from actors.partial.actor import PartialSpec
from actors.partial.actor import run as partial
from actors.publisher.actor import PublisherSpec
from actors.publisher.actor import run as publisher
from actors.reward.actor import run as reward
from actors.reward.spec import RewardSpec
from actors.runtime.context import Context
from actors.runtime.logs import LETTERS
from actors.sampler.actor import SamplerSpec
from actors.sampler.actor import run as sampler
from actors.trainer.actor import run as trainer
from actors.trainer.spec import TrainerSpec
from bus import Bus, Stream
from bus.errors import BadMessage
from bus.ledger import check
from bus.messages.active import Activate, PolicyActive
from bus.messages.base import Message
from bus.messages.groups import GroupKept, GroupVerdict
from bus.messages.policy import PolicyAnnounced, StepDone, WeightManifest
from bus.messages.samples import Parked, PrefixDropped, RolloutLost
from bus.messages.versions import PolicyVersion
from bus.topology import (
    ACTIVE,
    BY_NAME,
    DEAD,
    EVAL_PROMPTS,
    EVAL_RESULTS,
    EVAL_ROLLOUTS,
    EVAL_SCORED,
    EVENTS,
    GROUPS,
    PARKED,
    POLICY,
    PREFIXES,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    TAIL,
    VERDICTS,
)
from miles_async.launcher.plan import told
from miles_async.settings.flat import Flat
from tests.actors.garbage import fields_of, garbage, list_open
from tests.actors.house import messages, open_bus, put, rollout, running, scored, task, until
from tests.actors.test_publisher import says
from tests.declared import PLAIN, backend_of, data_of, room_of
from tests.engine.scripted import ScriptedEngine, workers

SEEDS = range(2)
GROUPS_ = ("g1", "g2", "g3", "g4")
MEMBERS = [(g, i) for g in (1, 2, 3, 4) for i in (0, 1)]
DAMAGED = 5  # position of the good message whose body is damaged


class Mixed:
    """Good messages and garbage, put on the streams in an order of chance; what became of the garbage."""

    def __init__(self, bus: Bus, seed: int) -> None:
        self._bus = bus
        self.rng = random.Random(seed)
        self.garbage: set[tuple[str, str]] = set()

    async def put(self, stream: Stream, good: Sequence[Message], *others: Stream, damaged: int = -1) -> None:
        """The good ones keep their order; the body of one is `damaged`."""
        todo: list[tuple[Stream, list[Any], bool]] = [
            (stream, fields_of(m, b"\xc1" if i == damaged else None), i == damaged) for i, m in enumerate(good)
        ]
        for other in (stream, *others):
            for fields in garbage(other, self.rng):
                todo.insert(self.rng.randrange(len(todo) + 1), (other, fields, True))
        for where, fields, bad in todo:
            entry_id = await self._bus.link.run("XADD", self._bus.keys.stream(where.name), "*", *fields)
            if bad:
                self.garbage.add((where.name, entry_id.decode()))

    async def bad(self, stream: Stream, message: Message) -> None:
        """One more piece."""
        entry_id = await self._bus.link.run("XADD", self._bus.keys.stream(stream.name), "*", *fields_of(message))
        self.garbage.add((stream.name, entry_id.decode()))

    async def accounted(self, context: Context) -> None:
        """Each piece has a dead letter; on logs whose letters another room writes, such were counted."""
        others = {n for n, _ in self.garbage if not BY_NAME[n].is_data and LETTERS[n] != context.spec.role}

        async def all_of_it() -> bool:
            buried = {(m.stream, m.entry_id) for m in await messages(self._bus, DEAD)}
            return {name for name, _ in self.garbage - buried} <= others

        await until(all_of_it)
        for name in {name for name, _ in self.garbage} - others:
            counted = sum(n for what, n in context.counters.items() if what.startswith((f"refused/log/{name}", f"refused/{name}/")))
            assert counted >= sum(n == name for n, _ in self.garbage), f"{name}: {counted} counted"
        for stream in {BY_NAME[name] for name, _ in self.garbage if BY_NAME[name].is_data}:
            assert await self._bus.length(stream) == 0, f"{stream.name} holds entries for ever"
        told = [m for m in await readable(self._bus, EVENTS) if getattr(m, "kind", "") in ("dead letter", "unreadable")]
        assert told


async def readable(bus: Bus, stream: Stream) -> list[Any]:
    """Everything on a stream that is a message."""
    found: list[Any] = []
    for entry in await bus.scan_all(stream):
        with suppress(BadMessage):
            found.append(await bus.message(entry))
    return found


async def closes(bus: Bus) -> None:
    found = await check(bus)
    assert found.closes, found.text()


async def length_is(bus: Bus, stream: Stream, n: int) -> bool:
    return await bus.length(stream) == n


@pytest.mark.parametrize("seed", SEEDS)
async def test_reward(redis_url: str, run_name: str, tokenizer_dir: str, seed: int) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await list_open(bus, *GROUPS_, generated=3 * len(MEMBERS))
        mixed = Mixed(bus, seed)
        async with running(bus, "reward", reward, room_of(RewardSpec, tokenizer_dir=tokenizer_dir, rm_type="math")) as context:
            await mixed.put(ROLLOUTS, [rollout(g, i) for g, i in MEMBERS], EVAL_ROLLOUTS, damaged=DAMAGED)
            await until(lambda: length_is(bus, SCORED, len(MEMBERS)))
            await mixed.accounted(context)
        assert sum(isinstance(m, RolloutLost) for m in await messages(bus, SCORED)) == 1
        await closes(bus)


@pytest.mark.parametrize("seed", SEEDS)
async def test_filter(redis_url: str, run_name: str, seed: int) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await list_open(bus, *GROUPS_, generated=3 * len(MEMBERS))
        mixed = Mixed(bus, seed)
        async with running(bus, "filter", filter_, FilterSpec()) as context:
            await mixed.put(SCORED, [scored(g, i, float(i)) for g, i in MEMBERS], POLICY, damaged=DAMAGED)
            step = StepDone(step=5, version=PolicyVersion(6, 5), trained_on=PolicyVersion(5, 4), groups=())
            await put(bus, POLICY, step)
            await until(lambda: length_is(bus, VERDICTS, len(GROUPS_)))
            await until(lambda: _turned(bus, 5))
            await mixed.accounted(context)
        verdicts = {v.group_id: v.reason for v in await messages(bus, VERDICTS)}
        assert sorted(verdicts.values()) == ["", "", "", "lost_malformed"]
        await closes(bus)


async def _turned(bus: Bus, step: int) -> bool:
    return any(getattr(m, "step", -1) == step for m in await messages(bus, GROUPS))


@pytest.mark.parametrize("seed", SEEDS)
async def test_partial(redis_url: str, run_name: str, seed: int) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await list_open(bus, *GROUPS_, generated=3 * len(MEMBERS))
        mixed = Mixed(bus, seed)
        async with running(bus, "partial", partial, PartialSpec(buffer_filter="freshness_first")) as context:
            parked = [Parked(task=task(g, i), response=rollout(g, i).response, reason="drain") for g, i in MEMBERS]
            await mixed.put(PARKED, parked, POLICY, damaged=DAMAGED)
            await until(lambda: length_is(bus, PREFIXES, len(MEMBERS)))
            await mixed.accounted(context)
        assert sum(isinstance(m, PrefixDropped) for m in await messages(bus, PREFIXES)) == 1
        await closes(bus)


@pytest.mark.parametrize("seed", SEEDS)
async def test_generation(redis_url: str, run_name: str, tokenizer_dir: str, seed: int) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await list_open(bus, *GROUPS_)
        mixed = Mixed(bus, seed)
        async with workers(bus, [ScriptedEngine()], model_path=tokenizer_dir) as (_, [context]):
            order = Activate(version=PolicyVersion(1, 0), manifest=WeightManifest(path=tokenizer_dir))
            await mixed.put(ACTIVE, [order], POLICY)
            others = (EVAL_PROMPTS, PREFIXES, TAIL)
            await mixed.put(PROMPTS, [task(g, i) for g, i in MEMBERS], *others, damaged=DAMAGED)
            await until(lambda: length_is(bus, ROLLOUTS, len(MEMBERS)))
            await mixed.accounted(context)
        found = await messages(bus, ROLLOUTS)
        assert sum(isinstance(m, RolloutLost) for m in found) == 1
        assert all(m.response.n_tokens == 8 for m in found if not isinstance(m, RolloutLost))
        await closes(bus)


@pytest.mark.parametrize("seed", SEEDS)
async def test_evaluator(redis_url: str, run_name: str, tokenizer_dir: str, seed: int) -> None:
    data = data_of(path=f"{tokenizer_dir}/data.jsonl", tokenizer_dir=tokenizer_dir)
    spec = room_of(EvaluatorSpec, sets=(EvalSet(name="held", data=data, samples_per_prompt=2),), num_rollout=3)
    async with open_bus(redis_url, run_name, knobs={"eval_interval": 1, "has_eval_data": True}) as bus:
        mixed = Mixed(bus, seed)
        async with running(bus, "evaluator", evaluator, spec, run_dir=tokenizer_dir) as context:
            await mixed.put(ACTIVE, [PolicyActive(version=PolicyVersion(1, 0), serving={"w": 1})], POLICY)
            await until(lambda: length_is(bus, EVAL_PROMPTS, len(MEMBERS)))
            tasks = await messages(bus, EVAL_PROMPTS)
            await mixed.bad(EVAL_SCORED, RolloutLost(sample_id="e0/8", group_id="e0", n_samples=9, reason="poison"))
            answers = [msgspec.structs.replace(scored(1, 0, 1.0), rollout=_done(t)) for t in tasks]
            await mixed.put(EVAL_SCORED, answers, damaged=DAMAGED)

            async def measured() -> bool:
                return any(e.fields.get("type") == "eval.done" for e in await bus.scan_all(EVAL_RESULTS))

            await until(measured)
            await mixed.accounted(context)
        [done] = [await bus.message(e) for e in await bus.scan_all(EVAL_RESULTS) if e.fields.get("type") == "eval.done"]
        assert done.n_samples == len(MEMBERS) and done.metrics["eval/held"] == 7 / 8 and "1 malformed" in done.error


def _done(task_: Any) -> Any:
    return msgspec.structs.replace(rollout(1, 0), task=task_)


@pytest.mark.parametrize("seed", SEEDS)
async def test_trainer(redis_url: str, run_name: str, tokenizer_dir: str, seed: int) -> None:
    spec = told(
        TrainerSpec,
        Flat(PLAIN),
        save="",
        load="",
        backend=backend_of(hf_checkpoint=tokenizer_dir),
        backend_name="none",
        weights_dir=tokenizer_dir,
        num_rollout=1,
    )
    async with open_bus(redis_url, run_name) as bus:
        await list_open(bus, *GROUPS_, generated=3 * len(MEMBERS))
        mixed = Mixed(bus, seed)
        kept = [GroupKept(group_id=f"g{g}", prompt_id="p", samples=(scored(g, 0, 0.0), scored(g, 1, 1.0))) for g in (1, 2, 3)]
        await mixed.put(GROUPS, kept, damaged=0)
        async with running(bus, "trainer", trainer, spec) as context:

            async def reads() -> bool:
                return any(isinstance(m, PolicyAnnounced) for m in await readable(bus, POLICY))

            await until(reads)  # the trainer reads events from its first version on
            await mixed.put(EVENTS, [])

            async def trained() -> Any:
                return [m for m in await readable(bus, POLICY) if isinstance(m, StepDone)]

            [step] = await until(trained)
            assert set(step.groups) == {"g2", "g3"}
            await until(lambda: _counted(context, "refused/log/events"))
        mixed.garbage = {(name, entry) for name, entry in mixed.garbage if name == "groups"}
        await mixed.accounted(context)
        assert set(await bus.hash_of(bus.keys.open_groups)) == {"g4"}, "the damaged one is given up"
        found = await check(bus)
        assert (found.residual, found.token_residual, found.missing) == (0, 6, ("g4/0", "g4/1")), found.text()


async def _counted(context: Context, name: str) -> bool:
    return context.counters.get(name, 0) > 0


@pytest.mark.parametrize("seed", SEEDS)
async def test_sampler(redis_url: str, run_name: str, tokenizer_dir: str, seed: int) -> None:
    data = data_of(path=f"{tokenizer_dir}/data.jsonl", tokenizer_dir=tokenizer_dir)
    spec = room_of(SamplerSpec, data=data, n_samples_per_prompt=2, num_rollout=100)
    async with open_bus(redis_url, run_name) as bus:
        mixed = Mixed(bus, seed)
        async with running(bus, "sampler", sampler, spec) as context:
            await mixed.put(ACTIVE, [PolicyActive(version=PolicyVersion(1, 0), serving={"w": 1})], POLICY)
            await until(lambda: length_is(bus, PROMPTS, 6))
            verdict = GroupVerdict(group_id="g0000001", prompt_id="p", kept=False, reason="x", n_samples=2)
            await mixed.put(VERDICTS, [verdict])
            await until(lambda: length_is(bus, PROMPTS, 8))
            await mixed.accounted(context)
            before = await bus.length(DEAD)
        async with running(bus, "sampler", sampler, spec) as context:
            await until(lambda: _counted(context, "refused/log/policy"))
        assert await bus.length(DEAD) == before, "a sampler that begins anew writes no letter again"


@pytest.mark.parametrize("seed", SEEDS)
async def test_publisher(redis_url: str, run_name: str, tokenizer_dir: str, seed: int) -> None:
    async with open_bus(redis_url, run_name) as bus:
        mixed = Mixed(bus, seed)
        await bus.link.run("HSET", bus.keys.vitals, "garbage", b"\xc1")
        async with running(bus, "publisher", publisher, PublisherSpec(worker_timeout_s=600.0)) as context:
            await until(lambda: _waits(context))
            await mixed.put(EVENTS, [says("w0")], POLICY)
            manifest = WeightManifest(path=tokenizer_dir)
            await put(bus, POLICY, PolicyAnnounced(version=PolicyVersion(2, 1), manifest=manifest))
            await until(lambda: _ordered(bus))
            await mixed.accounted(context)


async def _waits(context: Context) -> bool:
    return bool(context.vitals().waits_for)


async def _ordered(bus: Bus) -> bool:
    return any(isinstance(m, Activate) and m.version.id == 2 for m in await readable(bus, ACTIVE))


async def test_what_is_met_again_and_again_is_said_once_and_counted(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        async with running(bus, "partial", partial, PartialSpec()) as context:
            for stream in [PARKED] * 150 + [POLICY] * 30:
                fields = ["type", "policy.announced", "id", "g9/0", "group", "g9", "body", b"\xc1"]
                await bus.link.run("XADD", bus.keys.stream(stream.name), "*", *fields)
            await until(lambda: length_is(bus, DEAD, 150))
            await until(lambda: _counted(context, "refused/log/policy"))
        assert context.counters["refused/parked/malformed"] == 150 and context.counters["refused/log/policy"] == 30
        told = [m.text for m in await messages(bus, EVENTS) if getattr(m, "kind", "") in ("dead letter", "unreadable")]
        assert len(told) == 3 and "(100 times so far)" in " ".join(told)
