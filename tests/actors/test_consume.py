"""What all rooms do with entries that they cannot use: trials after crashes, and the end of the run when it is not the entries."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from actors.partial.actor import PartialSpec
from actors.partial.actor import run as partial
from actors.reward.actor import run as reward
from actors.reward.spec import RewardSpec
from actors.runtime import consume
from actors.runtime.consume import Consumer, as_lost
from actors.runtime.context import Context
from actors.runtime.refusals import RunEnds, Streak
from actors.runtime.retry import NotItsFault
from bus import Bus, Commit, Out
from bus.clock import SystemClock
from bus.errors import BusFull, Transient
from bus.knobs.live import LiveKnobs
from bus.messages.samples import Parked, RolloutLost
from bus.topology import DEAD, EVENTS, PARKED, PREFIXES, PROMPTS, ROLLOUTS, SCORED
from tests.actors.garbage import list_open
from tests.actors.house import messages, open_bus, put, rollout, running, task, until
from tests.declared import actor_of, room_of

N = 24
SLOTS = 16


def consumer_of(bus: Bus, name: str, context: Context | None = None, **more: Any) -> Consumer:
    def lost(entry: Any, lost: RolloutLost) -> Commit:
        return Commit(append=(Out(ROLLOUTS, lost),))

    context = context or Context(actor_of(name=name, role="generation", bus=bus.config), bus, LiveKnobs(bus))
    return Consumer(context, [PROMPTS], "generation", on_dead=as_lost(context, lost), **more)


@pytest.mark.parametrize("poisons", [("g3/0",), ("g3/0", "g17/0"), ()])
@pytest.mark.parametrize("late", [False, True])
async def test_what_kills_its_process_is_buried_and_those_that_died_beside_it_are_not(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch, poisons: tuple[str, ...], late: bool
) -> None:
    """Each life begins with what it takes; one that begins with a poison dies, at once or after the harmless ones ended."""
    monkeypatch.setattr(consume, "contained", nullcontext)  # what kills is nothing that a handler raised
    async with open_bus(redis_url, run_name) as bus:
        await list_open(bus, *(f"g{i}" for i in range(N)), n=1)
        await put(bus, PROMPTS, *(task(i, 0, n=1) for i in range(N)))
        done: set[str] = set()

        async def handle(entry: Any, message: Any) -> Commit:
            if message.sample_id in poisons:
                raise SystemExit
            done.add(message.sample_id)
            return Commit(ack=(entry,), append=(Out(ROLLOUTS, rollout(message.index, 0)),))

        lives = 0
        while await bus.length(PROMPTS):
            lives += 1
            assert lives < 40
            consumer = consumer_of(bus, "w0")
            await consumer.reader.open()
            try:
                while begun := await consumer.take(SLOTS, 0.05):
                    order = sorted(begun, key=lambda e: (e.fields["id"] in poisons) is late)
                    for entry in order:
                        await consumer.one(entry, handle)
            except SystemExit:
                continue
            finally:
                await consumer.reader.close()
        letters = await messages(bus, DEAD)
        assert {m.sample_id for m in letters} == set(poisons)
        assert len(done) == N - len(poisons)
        assert sorted(m.sample_id for m in await messages(bus, ROLLOUTS) if isinstance(m, RolloutLost)) == sorted(poisons)


async def test_a_peer_that_takes_over_from_the_dead_counts_on(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, lease_s=0.2) as bus:
        await list_open(bus, "g1", n=1)
        await put(bus, PROMPTS, task(1, 0, n=1))
        for life in range(bus.config.max_deliveries):
            consumer = consumer_of(bus, f"w{life}")
            await consumer.reader.open()
            consumer.reader.offer(await consumer.reader.claim(0.0))
            [entry] = await consumer.take(1, 0.5)
            assert entry.deliveries == life + 1
            await consumer.reader.close()
        last = consumer_of(bus, "last")
        await last.reader.open()
        last.reader.offer(await last.reader.claim(0.0))
        [entry] = await last.take(1, 0.5)
        assert await last.readable(entry) is None
        await last.reader.close()
        [letter] = await messages(bus, DEAD)
        assert "delivered 6 times" in letter.error and await bus.length(PROMPTS) == 0


async def test_a_full_disk_that_ends_one_process_after_the_other_costs_no_entry(redis_url: str, run_name: str) -> None:
    """Six lives without space for a body buried what was under way in them."""
    async with open_bus(redis_url, run_name, lease_s=0.2) as bus:
        await list_open(bus, "g1", "g2", n=1)
        await put(bus, PROMPTS, task(1, 0, n=1), task(2, 0, n=1))
        both = asyncio.Event()
        begun: list[str] = []

        async def full(entry: Any, message: Any) -> Commit:
            begun.append(message.sample_id)
            if len(begun) % 2:
                await both.wait()
            raise BusFull("a body was not written: No space left on device")

        for _ in range(bus.config.max_deliveries + 2):
            with pytest.raises(ExceptionGroup):
                await asyncio.wait_for(consumer_of(bus, "w", concurrency=2).run(full), 10.0)
        assert {*begun} == {"g1/0", "g2/0"}

        async def done(entry: Any, message: Any) -> Commit:
            return Commit(ack=(entry,))

        async def none_left() -> bool:
            return await bus.length(PROMPTS) == 0

        context = Context(actor_of(name="w", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer_of(bus, "w", context, concurrency=2).run(done))
            await until(none_left)
            context.draining.set()
        assert not await bus.length(DEAD)


class Held(SystemClock):
    """Who sleeps does so until told."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        await self.over.wait()


async def test_what_is_to_be_tried_again_leaves_its_slot_to_others_meanwhile(redis_url: str, run_name: str) -> None:
    """A broken set of an evaluation, which is read first, held up the training for as long as its samples were tried."""
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="w", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        context.clock = clock = Held()
        await list_open(bus, *(f"g{i}" for i in range(6)), n=1)
        await put(bus, PROMPTS, *(task(i, 0, n=1) for i in range(6)))
        tried: list[str] = []

        async def handle(entry: Any, message: Any) -> Commit:
            tried.append(message.sample_id)
            if message.sample_id < "g4" and not clock.over.is_set():
                raise Transient("away")
            return Commit(ack=(entry,))

        async def left(n: int) -> bool:
            return await bus.length(PROMPTS) == n

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer_of(bus, "w", context, concurrency=2).run(handle))
            await until(lambda: left(4))
            assert context.in_flight == 4 and sorted(tried) == [f"g{i}/0" for i in range(6)]
            clock.over.set()
            await until(lambda: left(0))
            context.draining.set()
        assert context.in_flight == 0 and not await bus.length(DEAD)


async def test_what_fails_by_itself_after_deaths_has_all_its_attempts(redis_url: str, run_name: str) -> None:
    """The fourth death made it an entry that is tried alone: it has its further attempts there, and only failures count."""
    async with open_bus(redis_url, run_name, lease_s=0.2) as bus:
        await list_open(bus, "g1", n=1)
        await put(bus, PROMPTS, task(1, 0, n=1))
        for life in range(bus.config.max_deliveries - 1):
            consumer = consumer_of(bus, f"w{life}")
            await consumer.reader.open()
            consumer.reader.offer(await consumer.reader.claim(0.0))
            assert len(await consumer.take(1, 0.5)) == 1
            await consumer.reader.close()
        last, attempts = consumer_of(bus, "last"), []

        async def handle(entry: Any, message: Any) -> Commit:
            attempts.append(last.attempt(entry))
            if len(attempts) < 4:
                raise NotItsFault("all fails") if len(attempts) == 2 else Transient("away")
            return Commit(ack=(entry,))

        await last.reader.open()
        last.reader.offer(await last.reader.claim(0.0))
        for _ in range(4):
            [entry] = await last.take(1, 0.5)
            await last.one(entry, handle)
        await last.reader.close()
        assert attempts == [1, 2, 2, 3]
        assert await bus.length(PROMPTS) == 0 and not await bus.length(DEAD)


def test_a_row_ends_the_run_with_its_text_when_it_is_long_wide_and_old_enough() -> None:
    now = [0.0]
    row = Streak(lambda: now[0], "scoring", "Mend it.", most=4, of=2, patience_s=10.0)
    for i in range(9):
        row.failed("a", f"TypeError {i}")
    assert not row.for_all, "one group alone may be at fault itself"
    row.failed("b", "TypeError")
    assert row.for_all
    row.worked()
    assert not row.for_all and row.n == 0
    for group in ("a", "b", "a"):
        row.failed(group, "TypeError")
    row.failed("b", "TypeError")
    now[0] = 10.0
    with pytest.raises(RunEnds, match=r"scoring failed 5 times in a row, for 2 groups, last TypeError: no 'x'\. Mend it\."):
        row.failed("b", "TypeError: no 'x'")


async def test_a_reward_function_that_always_raises_burns_no_prompt_and_ends_the_run_with_its_text(
    redis_url: str, run_name: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    (tmp_path / "hook.py").write_text("def hook(sample):\n    return sample['no such key'] + 1\n")
    spec = room_of(
        RewardSpec,
        tokenizer_dir=tokenizer_dir,
        custom_rm_path=f"{tmp_path}/hook.py:hook",
        n_workers=2,
        max_retries=1,
        patience_s=1.0,
    )
    ended: list[str] = []
    async with open_bus(redis_url, run_name, groups=[f"g{i}" for i in range(40)]) as bus:

        async def body(context: Context, given: RewardSpec) -> None:
            with pytest.raises(ExceptionGroup) as caught:
                await reward(context, given)
            error: BaseException = caught.value
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            assert isinstance(error, RunEnds)
            ended.append(str(error))

        async with running(bus, "reward", body, spec):
            await put(bus, ROLLOUTS, *(rollout(i, 0) for i in range(40)))
            await until(lambda: _there(ended))
        assert "KeyError: 'no such key' at hook.py:2" in ended[0] and "the same command resumes" in ended[0]
        buried = await bus.length(DEAD)
        assert buried <= 4 and await bus.length(ROLLOUTS) == 40 - buried, "what is not done stays pending"
        assert await bus.length(SCORED) == buried
        told = [m for m in await messages(bus, EVENTS) if getattr(m, "kind", "") == "tried again"]
        assert len(told) == 1


async def test_samples_that_alone_are_left_and_cannot_be_scored_are_given_up_and_the_run_goes_on(
    redis_url: str, run_name: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    """Five of a batch: when all others were scored, the attempts at them in a row ended the run."""
    (tmp_path / "hook.py").write_text("def hook(sample):\n    return 1 / (int(sample['sample_id'][1]) > 4)\n")
    spec = room_of(
        RewardSpec,
        tokenizer_dir=tokenizer_dir,
        custom_rm_path=f"{tmp_path}/hook.py:hook",
        n_workers=2,
        max_retries=1,
        patience_s=0.5,
    )
    async with open_bus(redis_url, run_name, groups=[f"g{i}" for i in range(9)]) as bus:

        async def all_done() -> bool:
            return await bus.length(SCORED) == 9

        async with running(bus, "reward", reward, spec):
            await put(bus, ROLLOUTS, *(rollout(i, 0) for i in range(9)))
            await until(all_done)
        assert sum(isinstance(m, RolloutLost) for m in await messages(bus, SCORED)) == 5 == await bus.length(DEAD)


def test_a_sample_that_fails_again_is_no_further_one_and_none_is_spared_for_ever() -> None:
    now = [0.0]
    row = Streak(lambda: now[0], "scoring", "Mend it.", most=4, of=2, spares_s=10.0)
    for again in range(20):
        row.failed(f"g{again % 3}", "KeyError", f"g{again % 3}/0")
    assert row.n == 3 and row.for_all
    now[0] = 10.0
    assert not row.for_all
    row.worked()
    for again in range(20):
        row.failed(f"g{again % 4}", "KeyError", f"g{again % 4}/0")
    assert row.n == 1 and row.groups == {"g3"}, "of the others it was known"


async def _there(found: list[Any]) -> bool:
    return bool(found)


def stumbling(step: int, waiting: Any) -> Any:
    """A buffer's policy of a user's that raises for one sample, and answers nonsense for another."""
    names = {w.parked.task.sample_id for w in waiting}
    if "g1/0" in names:
        raise ZeroDivisionError("no order for g1")
    if "g4/0" in names:
        raise asyncio.CancelledError
    return [waiting[0], waiting[0]] if "g2/0" in names else []


async def test_a_buffer_policy_that_raises_costs_no_sample(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        spec = PartialSpec(buffer_filter=f"{__name__}.stumbling", hooks_within_s=20.0)
        async with running(bus, "partial", partial, spec) as context:
            for group in (1, 2, 3, 4):
                await put(bus, PARKED, Parked(task=task(group, 0), response=rollout(group, 0).response, reason="drain"))
                await until(lambda group=group: _length(bus, group))  # type: ignore[misc]
        assert context.counters["refused/buffer_filter"] == 3
        texts = [m.text for m in await messages(bus, EVENTS) if getattr(m, "kind", "") == "policy raised"]
        assert "ZeroDivisionError: no order for g1" in texts[0]


async def _length(bus: Bus, n: int) -> bool:
    await asyncio.sleep(0)
    return await bus.length(PREFIXES) == n
