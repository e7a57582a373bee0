"""A rollout worker in this process, on a real bus, for tests with a real engine process; what they send and wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from actors.generation.actor import Worker
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.spec import GenerationSpec
from actors.runtime.context import Context
from bus import Bus
from bus.messages.active import Activate
from bus.messages.base import pack_ints
from bus.messages.control import Event
from bus.messages.policy import WeightManifest
from bus.messages.samples import RolloutDone, SampleTask, Sampling
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, EVENTS, ROLLOUTS
from tests.actors.house import messages, open_bus, put, running, until
from tests.engine.conftest import engine_process

PROMPT = [7, 12, 40, 3]
TOKENS = 1500


def sample(name: str, tokens: int = TOKENS) -> SampleTask:
    return SampleTask(
        sample_id=f"{name}/0",
        group_id=name,
        index=0,
        n_samples=1,
        prompt_id=name,
        prompt_tokens=pack_ints(PROMPT),
        sampling=Sampling(max_new_tokens=tokens, seed=3, top_k=63),
    )


def order(number: int, directory: Path, mode: str = "retract") -> Activate:
    manifest = WeightManifest(path=str(directory))
    return Activate(version=PolicyVersion(id=number, step=number), manifest=manifest, mode=mode)


@asynccontextmanager
async def at_work(
    redis_url: str,
    run_name: str,
    spec: GenerationSpec,
    *,
    process: Any = None,
    knobs: dict[str, Any] | None = None,
    groups: Sequence[str] = (),
    **spec_fields: Any,
) -> AsyncIterator[tuple[Bus, Worker]]:
    """A worker of `spec` whose samples are never cut into parts. `process`: stands for its engine's own."""
    made: list[Worker] = []

    async def body(context: Context, given: GenerationSpec) -> None:
        made.append(Worker(context, given))
        if process is not None:
            made[0]._link.process = process
        await made[0].run()

    async def started() -> bool:
        return bool(made)

    async with (
        open_bus(redis_url, run_name, knobs={"partial_save_tokens": 1 << 30, **(knobs or {})}, groups=groups) as bus,
        running(bus, "generation-0", body, spec, **spec_fields),
    ):
        await until(started)
        yield bus, made[0]


@asynccontextmanager
async def attached(redis_url: str, run_name: str, model: Path) -> AsyncIterator[tuple[Bus, Worker]]:
    """A worker on a running engine of `model`, before its first version."""
    with engine_process(model, "--stream-interval", "8") as (url, _):
        spec = GenerationSpec(engine="external", engine_url=url, model_path=str(model))
        async with at_work(redis_url, run_name, spec) as (bus, worker):
            await until(lambda: told(bus, "joined", 1))
            yield bus, worker


async def serve(worker: Worker, context: Context, engine: SGLangClient) -> None:
    """The worker at work on this engine, which is ordered its first version as soon as it has joined."""
    worker._link._connect = lambda url, inside: engine

    async def joined() -> bool:
        return worker._link.engine is not None

    async def publisher() -> None:
        await until(joined)
        await put(context.bus, ACTIVE, order(1, Path("/nowhere")))

    orders = asyncio.create_task(publisher())
    try:
        await worker.run()
    finally:
        orders.cancel()


async def events(bus: Bus, kind: str) -> list[Event]:
    return [m for m in await messages(bus, EVENTS) if isinstance(m, Event) and m.kind == kind]


async def told(bus: Bus, kind: str, n: int) -> bool:
    return len(await events(bus, kind)) == n


async def half_way(worker: Worker) -> bool:
    """Whether two samples run, both with some of their tokens."""
    return len(worker._running) == 2 and all(0 < r.n_tokens < TOKENS // 2 for r in worker._running.values())


async def rollouts_of(bus: Bus, n: int) -> list[RolloutDone]:
    """The `n` that are there when the last has come."""

    async def there() -> bool:
        return await bus.length(ROLLOUTS) == n

    await until(there, deadline_s=60)
    return [m for m in await messages(bus, ROLLOUTS) if isinstance(m, RolloutDone)]


def engines(run_dir: Path) -> list[psutil.Process]:
    """Those of this run, found by their words: a warm one is another process's child."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended while we looked
            if str(run_dir) in " ".join(process.cmdline()):
                found.append(process)
    return found
