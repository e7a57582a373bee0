"""Engines in this process that make tokens at a set pace and load weights as slowly as told, and workers on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from actors.generation.actor import Worker
from actors.generation.engine import Attached, Chunk, Engine, EngineLoad, GenerateRequest
from actors.generation.spec import GenerationSpec
from actors.runtime.context import Context
from bus import Bus
from bus.messages.base import pack_ints
from bus.messages.samples import SampleTask, Sampling
from bus.messages.weights import Bucket, TensorMeta
from tests.actors.house import running, until


class ScriptedEngine(Engine):
    """One token each `pace_s`, under the version loaded last. `load_s`: duration of a load; `gate`: it waits for this too."""

    def __init__(self, pace_s: float = 0.002, load_s: float = 0.0) -> None:
        self.pace_s, self.load_s = pace_s, load_s
        self.gate = asyncio.Event()
        self.gate.set()
        self.version = "default"
        self.starts: list[tuple[str, frozenset[str]]] = []  # each request, and those that ran beside it when it began
        self._goes = asyncio.Event()
        self._goes.set()
        self._ended: set[str] = set()
        self._flying: set[str] = set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.starts.append((request.rid, frozenset(self._flying)))
        self._flying.add(request.rid)
        try:
            for made in range(1, request.max_new_tokens + 1):
                await asyncio.sleep(self.pace_s)
                await self._goes.wait()
                if request.rid in self._ended:
                    yield Chunk([], [], self.version, "abort")
                    return
                yield Chunk([5], [-0.5], self.version, "length" if made == request.max_new_tokens else None)
        finally:
            self._flying.discard(request.rid)
            self._ended.discard(request.rid)

    async def abort(self, rid: str) -> None:
        self._ended |= {rid} & self._flying

    async def abort_all(self) -> None:
        self._ended |= self._flying

    async def end_running(self, patience_s: float) -> None:
        await self.abort_all()

    async def pause(self, mode: str) -> None:
        self._goes.clear()

    async def resume(self) -> None:
        self._goes.set()

    async def flush(self) -> bool:
        return True

    async def release_memory(self, tags: Sequence[str] = ()) -> None: ...

    async def resume_memory(self, tags: Sequence[str] = ()) -> None: ...

    async def update_weights_from_disk(self, path: str, version: str) -> None:
        await asyncio.sleep(self.load_s)
        await self.gate.wait()
        self.version = version

    async def update_weights_from_tensor(self, handles: Sequence[str], version: str | None, quick: Sequence[str] = ()) -> None: ...

    async def init_weights_update_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None: ...

    async def update_weights_from_distributed(self, tensors: Sequence[TensorMeta], group: str, version: str | None) -> None: ...

    async def receive(self, buckets: Sequence[Bucket], group: str, version: str, before: str | None = None) -> bool:
        return False

    async def destroy_weights_update_group(self, group: str) -> None: ...

    async def weights_checksum(self) -> Mapping[str, Any]:
        return {}

    async def set_version(self, version: str) -> None:
        self.version = version

    async def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._flying))

    async def look(self, *, own: bool, model_path: str, routed: bool) -> Attached:
        return Attached(exact=True, tp_size=1, exact_in_place=True)

    async def close(self) -> None: ...


@asynccontextmanager
async def workers(
    bus: Bus, engines: Sequence[ScriptedEngine], **spec_fields: Any
) -> AsyncIterator[tuple[list[Worker], list[Context]]]:
    """Workers w0, w1, ... each on its engine, which has joined."""
    made: dict[str, Worker] = {}
    contexts: list[Context] = []

    def body_of(engine: ScriptedEngine) -> Any:
        async def body(context: Context, spec: GenerationSpec) -> None:
            worker = made[context.name] = Worker(context, spec)

            def connect(url: str, inside: Path | None) -> ScriptedEngine:
                return engine

            worker._link._connect = connect
            await worker.run()

        return body

    async def joined() -> bool:
        return len(made) == len(engines) and all(w._link.engine is not None for w in made.values())

    async with AsyncExitStack() as stack:
        for i, engine in enumerate(engines):
            spec = GenerationSpec(engine="external", engine_url="scripted", **spec_fields)
            contexts.append(await stack.enter_async_context(running(bus, f"w{i}", body_of(engine), spec)))
        await until(joined)
        yield [made[c.name] for c in contexts], contexts


def sample(name: str, step: int, *, tokens: int = 8, **fields: Any) -> SampleTask:
    return SampleTask(
        sample_id=f"{name}/0",
        group_id=name,
        index=0,
        n_samples=1,
        prompt_id=name,
        prompt_tokens=pack_ints([7, 12]),
        sampling=Sampling(max_new_tokens=tokens, seed=3),
        step=step,
        **fields,
    )


__all__ = ("ScriptedEngine", "sample", "workers")
