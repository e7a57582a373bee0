"""The contenders of bus_speed.py: our bus, redis-py by hand, faststream. Each moves one load and returns seconds."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from uuid import uuid4

from bus import Bus, BusConfig, Commit, Entry, Out, Reader, Stream
from bus.client import connect
from bus.messages.base import Message
from bus.messages.codec import Decoder, encode
from bus.messages.groups import GroupKept
from bus.messages.samples import Response, RolloutDone, RolloutLost, SampleTask, Scored
from bus.messages.versions import VersionSpan

IN_FLIGHT = 64  # calls under way at once in the one-by-one mode, and entries per pipeline in the batched one
PIPELINE_BYTES = 4 << 20
WINDOW_BYTES = 128 << 20  # a producer is never further ahead than this
DEADLINE_S = 120.0  # of one measurement
READERS = {"rollouts": "reward", "groups": "trainer"}


# -- messages --------------------------------------------------------------------------------------------------------


def control_message(text: str = "") -> RolloutLost:
    """About 200 bytes encoded."""
    return RolloutLost(
        sample_id="g0001234/5",
        group_id="g0001234",
        n_samples=8,
        reason="evicted",
        error=text.ljust(58, "."),
        prompt_id="p1234",
    )


def group_message(tokens: int, n_samples: int = 8) -> GroupKept:
    """A kept group of `n_samples` responses of `tokens` tokens each, 9 bytes a token."""
    response = Response(
        tokens=memoryview(os.urandom(4 * tokens)),
        logprobs=memoryview(os.urandom(4 * tokens)),
        loss_mask=memoryview(b"\x01" * tokens),
        spans=(VersionSpan(3, 3, tokens),),
    )
    samples = []
    for index in range(n_samples):
        task = SampleTask(
            sample_id=f"g0001234/{index}",
            group_id="g0001234",
            index=index,
            n_samples=n_samples,
            prompt_id="p1234",
            prompt_tokens=memoryview(os.urandom(256)),
            label="42",
        )
        samples.append(Scored(rollout=RolloutDone(task=task, response=response, finish="stop"), reward=1.0))
    return GroupKept(group_id="g0001234", prompt_id="p1234", samples=tuple(samples))


class Window:
    """Keeps the producer at most `limit` messages ahead of the consumer."""

    def __init__(self, limit: int) -> None:
        self._limit, self._ahead, self._moved = limit, 0, asyncio.Event()

    async def take(self, n: int) -> None:
        while self._ahead and self._ahead + n > self._limit:
            self._moved.clear()
            await self._moved.wait()
        self._ahead += n

    def give(self, n: int) -> None:
        self._ahead -= n
        self._moved.set()


class Load:
    """`n` times one message on one stream, moved `batch` at a time."""

    def __init__(self, message: Message, stream: Stream, n: int, *, batch: int) -> None:
        self.message, self.stream, self.n = message, stream, n
        self.size = len(encode(message))
        self.batch = max(1, min(batch, PIPELINE_BYTES // self.size))
        self.ahead = max(4 * self.batch, min(8192, WINDOW_BYTES // self.size))

    @property
    def readers(self) -> str:
        return READERS[self.stream.name]

    def chunks(self) -> Iterator[int]:
        for start in range(0, self.n, self.batch):
            yield min(self.batch, self.n - start)


Run = Callable[[str, str, Load], Awaitable[float]]


# -- contenders ------------------------------------------------------------------------------------------------------


def bus_batched(*, files: bool = True) -> Run:
    """Our bus: append and commit many entries at a time. `files`: large bodies in shared memory, else in Redis."""

    async def run(url: str, blobs: str, load: Load) -> float:
        blob_dir = blobs if files else ""
        async with Bus(BusConfig(url=url, run=f"b-{uuid4().hex[:8]}", blob_dir=blob_dir)) as bus:
            reader = Reader(bus, [load.stream], load.readers, "me")
            await reader.open()
            window = Window(load.ahead)

            async def produce() -> None:
                for n in load.chunks():
                    await window.take(n)
                    await bus.append([Out(stream=load.stream, message=load.message)] * n)

            async def consume() -> None:
                left = load.n
                while left:
                    entries = await reader.read(load.batch, 1.0)
                    await asyncio.gather(*map(bus.message, entries))  # as rooms do: a task for each entry
                    if entries:
                        await bus.commit(Commit(ack=entries))
                        reader.forget(entries)
                        window.give(len(entries))
                        left -= len(entries)

            seconds = await timed(produce, consume)
            await reader.close()
            return seconds

    return run


async def bus_one_by_one(url: str, blobs: str, load: Load) -> float:
    """Our bus as actors use it: a call per message to append, a handler and a commit per entry."""
    async with Bus(BusConfig(url=url, run=f"b-{uuid4().hex[:8]}", blob_dir=blobs)) as bus:
        reader = Reader(bus, [load.stream], load.readers, "me")
        await reader.open()
        window = Window(load.ahead)

        async def publish(_: int) -> None:
            await bus.append([Out(stream=load.stream, message=load.message)])

        async def handle(entry: Entry) -> None:
            await bus.message(entry)
            await bus.commit(Commit(ack=(entry,)))
            reader.forget((entry,))

        async def consume() -> None:
            left = load.n
            while left:
                entries = await reader.read(IN_FLIGHT, 1.0)
                await asyncio.gather(*map(handle, entries))
                window.give(len(entries))
                left -= len(entries)

        seconds = await timed(lambda: each(load, window, publish), consume)
        await reader.close()
        return seconds


async def hand_batched(url: str, blobs: str, load: Load) -> float:
    """The same work written out in redis-py: pipelined XADD, XREADGROUP, decode, XACK and XDEL in one pipeline."""
    key, group = f"b:{uuid4().hex}", "readers"
    decoder: Decoder[Any] = Decoder(load.stream.union, load.stream.name)
    async with connect(url) as writer, connect(url) as blocking, connect(url) as acker:
        await writer.xgroup_create(key, group, "0", mkstream=True)
        window = Window(load.ahead)

        async def produce() -> None:
            for n in load.chunks():
                await window.take(n)
                pipe = writer.pipeline(transaction=False)
                for _ in range(n):
                    pipe.xadd(key, {"body": encode(load.message)})
                await pipe.execute()

        async def consume() -> None:
            left = load.n
            while left:
                found: Any = await blocking.xreadgroup(group, "me", {key: ">"}, count=load.batch, block=1000)
                for _, entries in found:
                    for _, fields in entries:
                        decoder.decode(fields[b"body"])
                    ids = [entry_id for entry_id, _ in entries]
                    pipe = acker.pipeline(transaction=False)
                    pipe.xack(key, group, *ids)
                    pipe.xdel(key, *ids)
                    await pipe.execute()
                    window.give(len(ids))
                    left -= len(ids)

        seconds = await timed(produce, consume)
        await writer.delete(key)
        return seconds


def faststream(*, batch: bool) -> Run:
    """faststream's Redis streams with a consumer group; publishing through its pipeline in batches, else call by call."""

    async def run(url: str, blobs: str, load: Load) -> float:
        from faststream.redis import BinaryMessageFormatV1, RedisBroker, StreamSub

        key, decoder = f"b:{uuid4().hex}", Decoder[Any](load.stream.union, load.stream.name)
        broker = RedisBroker(url, logger=None, apply_types=False)
        window, finished, left = Window(load.ahead), asyncio.Event(), load.n
        max_records = load.batch if batch else IN_FLIGHT

        def count(n: int) -> None:
            nonlocal left
            left -= n
            window.give(n)
            if not left:
                finished.set()

        async def parse(message: Any, original: Callable[[Any], Awaitable[Any]]) -> Any:
            if not batch:
                return await original(message)
            parsed = await original({**message, "data": []})  # its own batch parser only takes JSON bodies
            parsed.raw_message = message
            parsed.body = [BinaryMessageFormatV1.parse(fields[b"__data__"])[0] for fields in message["data"]]
            return parsed

        async def as_it_is(message: Any) -> Any:
            return message.body

        async def handle(body: Any) -> None:
            for one in body if batch else (body,):
                decoder.decode(one)
            count(len(body) if batch else 1)

        sub = StreamSub(key, group="readers", consumer="me", batch=batch, max_records=max_records, polling_interval=1000)
        broker.subscriber(stream=sub, parser=parse, decoder=as_it_is)(handle)

        async with connect(url) as client:
            await client.xgroup_create(key, "readers", "0", mkstream=True)
            async with broker:
                await broker.start()

                async def publish_many() -> None:
                    for n in load.chunks():
                        await window.take(n)
                        pipe = client.pipeline(transaction=False)
                        for _ in range(n):
                            await broker.publish(encode(load.message), stream=key, pipeline=pipe)
                        await pipe.execute()

                async def publish_one(_: int) -> None:
                    await broker.publish(encode(load.message), stream=key)

                seconds = await timed(publish_many if batch else lambda: each(load, window, publish_one), finished.wait)
            await client.delete(key)
        return seconds

    return run


async def each(load: Load, window: Window, publish: Callable[[int], Awaitable[None]]) -> None:
    """`publish` for every message, IN_FLIGHT of them under way."""
    for start in range(0, load.n, IN_FLIGHT):
        n = min(IN_FLIGHT, load.n - start)
        await window.take(n)
        await asyncio.gather(*map(publish, range(n)))


async def timed(produce: Callable[[], Awaitable[Any]], consume: Callable[[], Awaitable[Any]]) -> float:
    start = time.perf_counter()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(produce(), consume())
    return time.perf_counter() - start
