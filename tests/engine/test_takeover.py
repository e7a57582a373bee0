"""What a dead worker held is taken over by full workers too, and goes on before prompts that wait."""

from __future__ import annotations

import asyncio

from bus import Out, Reader
from bus.messages.active import Activate, PolicyActive
from bus.messages.policy import WeightManifest
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, PROMPTS, ROLLOUTS
from tests.actors.house import open_bus, until
from tests.engine.scripted import ScriptedEngine, sample, workers

VERSION = PolicyVersion(id=1, step=1)
SLOTS, LEASE_S = 8, 0.4


async def test_a_worker_that_is_always_full_takes_over_what_a_dead_one_held(redis_url: str, run_name: str) -> None:
    """Where prompts always wait, no slot is free at the moment of asking: those samples lay for as long as the run was busy."""
    engine = ScriptedEngine()
    async with open_bus(redis_url, run_name, lease_s=LEASE_S) as bus:
        dead = Reader(bus, [PROMPTS], "generation", "dead")
        await dead.open()
        await bus.append([Out(PROMPTS, sample(f"dead{i}", 1)) for i in range(3)])
        assert len(await dead.read(3, 0)) == 3
        await dead.close()
        async with workers(bus, [engine]) as (_, [context]):
            await bus.append([Out(ACTIVE, Activate(version=VERSION, manifest=WeightManifest()))])
            await bus.append([Out(ACTIVE, PolicyActive(version=VERSION, serving={"w0": 1}))])

            async def serves() -> bool:
                return context.version == 1

            await until(serves)
            await engine.pause("retract")
            await bus.append([Out(PROMPTS, sample(f"new{i}", 1)) for i in range(2 * SLOTS)])

            async def full() -> bool:
                return context.in_flight == SLOTS

            async def held_by_the_dead() -> int:
                key = bus.keys.stream(PROMPTS.name)
                return len(await bus.link.run("XPENDING", key, "generation", "-", "+", 100, "dead"))

            async def some_taken_over() -> bool:
                return await held_by_the_dead() < 3

            await until(full)
            await until(some_taken_over, deadline_s=20)
            await asyncio.sleep(LEASE_S)  # it is asked again and again
            assert context.in_flight == SLOTS and await held_by_the_dead() == 1, "as many as a quarter of its slots"
            await engine.resume()

            async def all_done() -> bool:
                return await bus.length(ROLLOUTS) == 3 + 2 * SLOTS

            await until(all_done, deadline_s=40)
        behind = {rid.partition("/")[0] for rid, _ in engine.starts[SLOTS : 2 * SLOTS]}
        assert len(behind & {"dead0", "dead1", "dead2"}) >= 2, "at the next free slots, beside prompts that waited longest"
