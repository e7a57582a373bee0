"""The load of gpu_decode.py: so many requests at every moment, streamed as a worker streams them."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from actors.generation.engine import GenerateRequest
from actors.generation.engines.sglang.wire import body_of, decode_event, load_of
from scripts.bench import gpu_parts as parts

GROUP = 8  # requests of one prompt
STEPS = 30  # of a profile


class Load:
    """`running` requests at every moment against one server, until closed. `made`: tokens that came, by all of them."""

    def __init__(self, url: str, running: int, vocab: int, stops: list[int], *, prompt_tokens: int, new_tokens: int) -> None:
        self._url, self._running, self._vocab = url, running, vocab
        self._prompt_tokens, self._new_tokens = prompt_tokens, new_tokens
        self._stops, self._ends = stops, len(stops) / vocab
        self._draw = random.Random(running)
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._streaming: set[int] = set()
        self.made = self.ended = 0

    async def __aenter__(self) -> Load:
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600, sock_read=60))
        self._tasks = [asyncio.create_task(self._slot(i)) for i in range(self._running)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(aiohttp.ClientError):  # whatever ended the server is told elsewhere
            await self._http.post(f"{self._url}/abort_request", json={"abort_all": True})
        await self._http.close()

    def check(self) -> None:
        """Raises what ended a slot."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def full(self, deadline_s: float) -> None:
        """Until every slot has had a token."""
        async with asyncio.timeout(deadline_s):
            while len(self._streaming) < self._running:
                self.check()
                await asyncio.sleep(0.1)

    async def tokens_per_s(self, seconds: float) -> dict[str, float]:
        made, ended, began = self.made, self.ended, time.monotonic()
        await asyncio.sleep(seconds)
        self.check()
        span = time.monotonic() - began
        return {"tokens_per_s": round((self.made - made) / span, 1), "ended_per_s": round((self.ended - ended) / span, 2),
                "seconds": round(span, 2)}  # fmt: skip

    async def profile(self, folder: Path, activities: Sequence[str]) -> dict[str, Any]:
        """What /start_profile writes of the next steps."""
        body = {
            "output_dir": str(folder),
            "num_steps": STEPS + 2,
            "activities": activities,
            "with_stack": False,
            "record_shapes": False,
        }
        async with self._http.post(f"{self._url}/start_profile", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"/start_profile: HTTP {response.status}: {(await response.text())[:300]}")

        async def whole() -> Any:
            self.check()
            try:
                return [json.loads(gzip.decompress(file.read_bytes())) for file in folder.glob("*.trace.json.gz")]
            except (OSError, EOFError, ValueError, zlib.error):  # it is being written
                return None

        [trace] = await parts.until(whole, 45.0)
        return trace

    async def _slot(self, i: int) -> None:
        age = self._new_tokens
        while age >= self._new_tokens:  # how old a request under way is, seen at a random moment
            age = int(self._draw.expovariate(self._ends))
        await self._one(i, self._prompt(self._prompt_tokens + age), self._new_tokens - age)
        shared: list[int] = []
        for turn in itertools.count(i):
            if turn % GROUP == 0 or not shared:
                shared = self._prompt(self._prompt_tokens)
            await self._one(i, shared, self._new_tokens)

    def _prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(10, self._vocab // 8) for _ in range(length)]

    async def _one(self, i: int, prompt: list[int], most: int) -> None:
        name = f"decode-{next(self._numbers)}"
        request = GenerateRequest(
            rid=name, input_ids=prompt, max_new_tokens=most, stop_token_ids=tuple(self._stops), temperature=1.0
        )
        seen = 0
        async with self._http.post(
            f"{self._url}/generate", data=body_of(request, name), headers={"Content-Type": "application/json"}
        ) as got:
            if got.status != 200:
                raise RuntimeError(f"HTTP {got.status}: {(await got.text())[:300]}")
            async for line in got.content:
                if line.startswith(b"data: {"):
                    event = decode_event(line[6:])
                    if event.error is not None:
                        raise RuntimeError(event.error.message)
                    self.made += event.meta_info.completion_tokens - seen
                    seen = event.meta_info.completion_tokens
                    self._streaming.add(i)
        self.ended += 1


async def idle(url: str) -> None:
    """Until nothing runs on a server."""

    async def nothing() -> bool:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/loads") as response:
            load = load_of(await response.text())
        return not load.running and not load.waiting

    await parts.until(nothing, 20.0)
