"""Random interleavings of everything that can happen to a run, on a real server; after each step the books must close.

The machine plays sampler, workers, scorer, filter, partial buffer and trainer, kills and pauses them, lets peers claim,
lets zombies wake up and act, takes checkpoints that are cut short, goes back to them, and sweeps. At the end it lets the
house run dry: then every group issued was trained once in the surviving lineage, or dropped, and nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeVar
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from bus import Bus, BusConfig, ledger
from bus.errors import InvariantBroken
from bus.messages.versions import PolicyVersion
from bus.sweep import sweep_orphans
from bus.topology import STREAMS
from tests.bus.house import BOUND, N_SAMPLES, PER_STEP, READS, Consumer, Sampler, Saved, Trainer, restored

T = TypeVar("T")
ROOM = st.sampled_from(sorted(READS))
NAME = st.sampled_from(["a", "b"])
SEED = st.integers(0, (1 << 32) - 1)
THEN = ["finish"] * 20 + ["save", "save", "park", "go on", "lose", "bury"]


class Work(NamedTuple):
    """One piece of work: `pick` chooses among what a consumer holds."""

    room: str
    name: str
    pick: int
    n_tokens: int
    then: str
    reward: int


def work_from(rng: Random, n: int) -> list[Work]:
    """`n` pieces of work. Hypothesis draws one seed for many, because drawing each would cost more than doing it."""
    rooms, names = sorted(READS), "ab"
    return [
        Work(rng.choice(rooms), rng.choice(names), rng.randrange(8), rng.randrange(4), rng.choice(THEN), rng.randrange(2))
        for _ in range(n)
    ]


class HouseMachine(RuleBasedStateMachine):
    """See the module's docstring. `url` is set by the test."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        config = BusConfig(url=self.url, run=f"model-{uuid4().hex[:12]}", hop_limit_bytes=200, deadline_s=10)
        self.bus, self.elsewhere = Bus(config), Bus(config)  # zombies are other processes: they have their own bus
        self.living: dict[tuple[str, str], Consumer] = {}
        self.zombies: list[Consumer] = []
        self.names = self.bursts = 0
        self.active = PolicyVersion(1, 0)
        self.saved = Saved()
        self.went_back = False
        self.dropped: list[str] = []

    def run(self, steps: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(steps, 30))

    @initialize()
    def begin(self) -> None:
        async def start() -> None:
            await self.bus.make_readers()
            for room in READS:
                for name in ("a",) if room == "filter" else ("a", "b"):
                    self.living[room, name] = Consumer(self.bus, room, name)
            self.sampler = Sampler(self.bus)
            await self.sampler.tail.open()
            await self.sampler.activate(self.active)
            self.trainer: Trainer = await restored(self.bus, self.saved)

        self.run(start())
        self.run(self.sampler.issue())

    def worker(self, room: str, name: str) -> Consumer:
        return self.living[room, "a" if room == "filter" else name]

    def some_work(self, seed: int, n: int) -> list[Work]:
        """Different work at each rule of one sequence, also where the drawn seed is the same."""
        self.bursts += 1
        return work_from(Random(seed * 1000 + self.bursts), n)

    # -- work -------------------------------------------------------------------------------------------------------

    @rule(seed=SEED)
    def carry_on(self, seed: int) -> None:
        """Many small pieces of work; then steps while batches are ready, whose weights may reach the engines; then new
        groups as far as the bound admits them. Every misfortune comes after some of this."""
        self.run(self.do(self.some_work(seed, 40)))
        while self.run(self.trainer.train()):
            continue
        if seed % 3:
            self.active = PolicyVersion(self.active.id + 1, self.trainer.step)
            self.run(self.sampler.activate(self.active))
        self.run(self.sampler.issue())

    async def do(self, pieces: list[Work]) -> None:
        for n, work in enumerate(pieces):
            consumer = self.worker(work.room, work.name)
            if not consumer.held or n % 3 == 0:
                await consumer.take(await consumer.reader.read(1 + work.pick, 0))
            await self.act(consumer, work)

    async def act(self, consumer: Consumer, work: Work) -> None:
        """One piece of work on something that this consumer holds."""
        if consumer.room == "filter":
            while consumer.complete:
                group, _ = consumer.complete.popitem()
                reason, done = await consumer.judge(group)
                self.dropped += [group] if reason and done else []
            return
        if not consumer.held:
            return
        entry = list(consumer.held.values())[work.pick % len(consumer.held)]
        if await consumer.finished_elsewhere(entry):
            return
        if consumer.room == "generation":
            await consumer.generate(entry, work.n_tokens, self.active, work.then)
        elif consumer.room == "reward":
            await consumer.score(entry, work.reward)
        else:
            await consumer.place(entry, self.active.step)

    # -- misfortune -------------------------------------------------------------------------------------------------

    @rule(room=ROOM, name=NAME, same_name=st.booleans(), then=st.sampled_from(["", "claim", "claim and wake"]), seed=SEED)
    def die(self, room: str, name: str, same_name: bool, then: str, seed: int) -> None:
        """A process stops. It may only have been paused: it is kept to act later, or wakes at once, when a peer has just
        claimed what it held."""
        self.carry_on(seed)
        old = self.worker(room, name)
        old.bus = old.reader._bus = self.elsewhere
        self.zombies = [*self.zombies[-5:], old]
        self.names += 1
        me = old.name if same_name else f"{name}{self.names}"
        self.living[room, "a" if room == "filter" else name] = Consumer(self.bus, room, me)
        self.run(old.reader.close())
        if then:
            self.run(self.claim_now(self.worker(room, "b" if name == "a" else "a")))
        if then == "claim and wake":
            for work in self.some_work(seed, 4):
                self.run(self.act(old, work))

    @rule(seed=SEED)
    def zombies_act(self, seed: int) -> None:
        """Those that were paused go on with what they believe to hold, if only for a moment."""
        self.carry_on(seed)
        for n, work in enumerate(self.some_work(seed, 10)):
            if self.zombies:
                self.run(self.act(self.zombies[n % len(self.zombies)], work))

    @rule(room=ROOM, name=NAME, seed=SEED)
    def claim(self, room: str, name: str, seed: int) -> None:
        """Every lease of this room has run out, also those of the living: slow ones become zombies without knowing."""
        self.carry_on(seed)
        self.run(self.claim_now(self.worker(room, name)))

    async def claim_now(self, consumer: Consumer) -> None:
        await consumer.take(await consumer.reader.claim(0))

    @rule(cut_short=st.sampled_from(["", "", "", "before it is durable", "before the acknowledgement"]), seed=SEED)
    def checkpoint(self, cut_short: str, seed: int) -> None:
        self.carry_on(seed)

        async def steps() -> None:
            state = self.trainer.save()
            if cut_short != "before it is durable":
                self.saved = state
            if cut_short:
                await self.restore_now()
            else:
                await self.trainer.acknowledge(state)

        self.run(steps())

    @rule(what=st.sampled_from(["trainer dies", "sampler repeats itself", "sweep"]), seed=SEED)
    def seldom(self, what: str, seed: int) -> None:
        self.carry_on(seed)
        if what == "trainer dies":
            self.run(self.restore_now())
        elif what == "sweep":
            self.run(sweep_orphans(self.bus, older_s=0))
        elif self.sampler.last is not None:
            # A second sampler, or one killed after its commit: the same groups cannot be issued again.
            try:
                result = self.run(self.elsewhere.commit(self.sampler.last))
            except InvariantBroken:
                return
            assert result.done and not result.entry_ids

    async def restore_now(self) -> None:
        self.went_back |= self.trainer.step > self.saved.step
        await self.trainer.reader.close()
        self.trainer = await restored(self.bus, self.saved)

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def the_books_close(self) -> None:
        seen = self.run(ledger.check(self.bus))
        assert seen.closes, seen.text()

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        if hasattr(self, "trainer"):
            trained = [group for step in self.trainer.lineage for group in step]
            assert len(trained) == len(set(trained)) and not set(trained) & set(self.dropped)
            assert len(self.trainer.lineage) == self.trainer.step

    @invariant()
    def no_more_groups_are_open_than_the_bound_admits(self) -> None:
        if hasattr(self, "trainer") and not self.went_back:
            served = {g for step in self.trainer.lineage[: self.active.step] for g in step}
            groups = self.run(self.bus.hash_of(self.bus.keys.open_groups))
            assert len(set(groups) - served) <= (BOUND + 1) * PER_STEP

    # -- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if hasattr(self, "trainer"):
                self.run(self.run_dry())
        finally:
            self.run(self.close())
            self.loop.close()

    async def run_dry(self) -> None:
        for turn in range(60):
            for consumer in self.living.values():
                await consumer.take(await consumer.reader.claim(0))
                await consumer.take(await consumer.reader.read(64, 0))
                for _ in range(len(consumer.held) + 1):
                    await self.act(consumer, Work(consumer.room, "a", 0, 1, "finish", 0))
            await self.trainer.train(per_step=1)
            if turn % 7 == 3:
                self.saved = self.trainer.save()
                await self.trainer.acknowledge(self.saved)
            if turn % 7 == 3 and not await self.bus.hash_of(self.bus.keys.open_groups):
                break
        accounts = await ledger.read_accounts(self.bus)
        issued = int(await self.bus.state("cursor") or 0)
        trained = [group for step in self.trainer.lineage for group in step]
        assert sorted(trained + self.dropped) == [f"g{n:07d}" for n in range(issued)]
        assert accounts.pending == accounts.tokens_pending == 0 and accounts.trained == len(trained) * N_SAMPLES
        assert accounts.issued == issued * N_SAMPLES
        assert all([await self.bus.length(stream) == 0 for stream in STREAMS if stream.is_data])
        named = {e.blob.split(":")[1] for stream in STREAMS for e in await self.bus.scan_all(stream) if e.blob}
        await sweep_orphans(self.bus, older_s=0)
        assert {ref.split(":")[1] for ref, _ in await self.bus.blobs.list_ids()} == named, "a body without an entry"
        in_flight = await self.bus.hash_of(self.bus.keys.in_flight_bytes)
        assert {int(n) for n in in_flight.values()} <= {0}

    async def close(self) -> None:
        for consumer in self.living.values():
            await consumer.reader.close()
        if hasattr(self, "trainer"):
            await self.trainer.reader.close()
            await self.sampler.tail.close()
        await self.bus.link.close()
        await self.elsewhere.link.close()


@pytest.mark.timeout(400)  # a few seconds; finding the shortest failing sequence takes longer
def test_nothing_is_lost_and_nothing_is_trained_twice(redis_url: str) -> None:
    class Machine(HouseMachine):
        url = redis_url

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=16,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            print_blob=True,
        ),
    )
