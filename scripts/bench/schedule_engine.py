"""The stand-in engines of schedule.py: a sample takes the seconds its id draws and makes its tokens evenly meanwhile.

One process serves all engines of a run, at /0, /1, ..., each with its slots and a queue. They speak the part of SGLang's HTTP
interface that a generation worker uses. Weights load in no time, and no event mixes two versions. The log gets a line for
each sample that ended: [id, wall time of its first token, wall time of its last].
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

SIGMA, TAIL_SHARE, TAIL_TIMES, GEOMETRIC_MEAN, GEOMETRIC_CUT = 0.6, 0.02, 10.0, 1.2, 3.1
MOVES_S = 0.2  # of an engine that gives its memory back, or takes it again
LENGTHS = ("lognormal", "heavy", "geometric")


def seconds_of(kind: str, median_s: float, seed: str) -> float:
    """The draw of one sample: log-normal; the same with 2 % ten times as long; geometric with a mean of 1.2 medians, cut
    at 3.1 means."""
    draw = random.Random(seed)
    if kind == "geometric":
        mean = GEOMETRIC_MEAN * median_s
        return min(-mean * math.log(1 - draw.random()), GEOMETRIC_CUT * mean)
    value = median_s * math.exp(SIGMA * draw.gauss(0, 1))
    return value * (TAIL_TIMES if kind == "heavy" and draw.random() < TAIL_SHARE else 1)


def tokens_of(seconds: float, median_s: float, tokens: int) -> int:
    """Tokens of a sample that makes them at the pace of one with `tokens` in a mean sample's seconds."""
    return max(1, round(tokens * seconds / (GEOMETRIC_MEAN * median_s)))


def draws(kind: str, median_s: float, n: int) -> list[float]:
    """Many draws, the same ones every time."""
    return [seconds_of(kind, median_s, f"draw/{i}") for i in range(n)]


class Request:
    """One request on its slot."""

    def __init__(self, *, tokens: int, seconds: float, finish: str) -> None:
        self.began = time.monotonic()
        self.tokens = tokens
        self.seconds = seconds
        self.finish = finish
        self.until: list[tuple[str, int]] = []  # a version, and the tokens that were made when it went
        self.aborted = False
        self.wake = asyncio.Event()  # a version went, or an abort

    def made(self) -> int:
        """Tokens by now; the first comes at once."""
        part = (time.monotonic() - self.began) / max(1e-9, self.seconds)
        return self.tokens if part >= 1 else 1 + int((self.tokens - 1) * part)

    async def make(self, tokens: int) -> int:
        """Wait until so many are made, or for news; how many there are."""
        left_s = self.began + self.seconds * tokens / self.tokens - time.monotonic()
        try:
            await asyncio.wait_for(self.wake.wait(), max(0.0, left_s))
        except TimeoutError:
            return tokens
        self.wake.clear()
        return self.made()

    def events(self, sent: int, made: int, version: str) -> bytes:
        """Tokens [sent, made), an event per version."""
        out = []
        for name, until in (*self.until, (version, made)):
            end = min(until, made)
            if end > sent:
                out.append(event(name, sent, end, None))
                sent = end
        return b"".join(out)


class Engine:
    """`slots` requests at a time; more of them queue."""

    def __init__(self, house: House, slots: int) -> None:
        self._house = house
        self._slots = asyncio.Semaphore(slots)
        self._running: dict[str, Request] = {}
        self._changed = time.monotonic()
        self.area = 0.0  # requests running, integrated over seconds
        self.version = ""

    def routes(self, router: web.UrlDispatcher, root: str) -> None:
        """What SGLang answers."""
        router.add_post(f"{root}/generate", self.generate)
        router.add_post(f"{root}/abort_request", self.abort)
        for path in ("update_weights_from_disk", "update_weight_version"):
            router.add_post(f"{root}/{path}", self.change)
        for path in ("pause_generation", "continue_generation", "flush_cache"):
            router.add_post(f"{root}/{path}", _well)
        for path in ("release_memory_occupation", "resume_memory_occupation"):
            router.add_post(f"{root}/{path}", _moves)
        for path in ("health", "model_info", "server_info"):
            router.add_get(f"{root}/{path}", self.tell)

    def count(self) -> None:
        """Before the number of running requests changes, or is asked for."""
        now = time.monotonic()
        self.area += len(self._running) * (now - self._changed)
        self._changed = now

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Stream one request: what is made, every `chunk` tokens and when a version goes."""
        body = msgspec.json.decode(await http.read())
        rid, sample_id, house = body["rid"], body["rid"].split("-", 2)[2], self._house
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self._slots:
            self.count()
            wall = time.time()
            self._running[rid] = request = house.request(
                sample_id, len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
            )
            try:
                await response.prepare(http)
                sent, data = 0, b""
                while sent < request.tokens and not request.aborted:
                    made = await request.make(min(request.tokens, sent + (house.chunk or request.tokens)))
                    data, sent = request.events(sent, made, self.version), made
                    if data and sent < request.tokens and not request.aborted:
                        await response.write(data)
                finish = request.finish if sent >= request.tokens else "abort"
            finally:
                self.count()
                del self._running[rid]
        if finish == "stop":
            house.note(sample_id, wall)
        await response.write_eof(data + event(self.version, sent, sent, finish) + b"data: [DONE]\n\n")
        return response

    async def change(self, http: web.Request) -> web.Response:
        """From here on tokens are another version's."""
        body = msgspec.json.decode(await http.read())
        for request in self._running.values():
            request.until.append((self.version, request.made()))
            request.wake.set()
        self.version = body.get("new_version") or body["weight_version"]
        return await _well(http)

    async def abort(self, http: web.Request) -> web.Response:
        """Requests whose name begins so end with what they have."""
        body = msgspec.json.decode(await http.read())
        for rid, request in self._running.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                request.aborted = True
                request.wake.set()
        return await _well(http)

    async def tell(self, _: web.Request) -> web.Response:
        """One answer to all questions."""
        return web.json_response(
            {
                "weight_version": self.version, "model_path": "none", "version": "embedded",
                "internal_states": [{"num_running_reqs": len(self._running), "num_waiting_reqs": 0}],
            }
        )  # fmt: skip


class House:
    """All engines of a run, and the script they follow."""

    def __init__(self, script: dict[str, Any]) -> None:
        self.kind: str = script["lengths"]
        self.median_s: float = script["median_s"]
        self.tokens: int = script["tokens"]
        self.proportional: bool = script["proportional"]  # a sample's tokens follow its seconds
        self.chunk: int = script["chunk"]  # tokens per event, 0 = all at the end
        self.seed: str = script["seed"]
        self.engines = [Engine(self, script["slots"] // script["engines"]) for _ in range(script["engines"])]
        self._prompts: dict[str, int] = {}
        self._log = Path(script["log"]).open("w", buffering=1 << 16)  # noqa: SIM115 - as long as the process

    def request(self, sample_id: str, n_input: int, max_new: int) -> Request:
        """What is left of a sample, of which the input repeats what was made before."""
        seconds = seconds_of(self.kind, self.median_s, f"{self.seed}/{sample_id}")
        tokens = tokens_of(seconds, self.median_s, self.tokens) if self.proportional else self.tokens
        left = tokens - (n_input - self._prompts.setdefault(sample_id, n_input))
        now = max(1, min(left, max_new))
        return Request(tokens=now, seconds=seconds * now / tokens, finish="stop" if now >= left else "length")

    def note(self, sample_id: str, began: float) -> None:
        """A sample ended."""
        self._log.write(json.dumps([sample_id, began, time.time()]) + "\n")

    async def stats(self, _: web.Request) -> web.Response:
        """For the bench."""
        self._log.flush()
        for engine in self.engines:
            engine.count()
        return web.json_response({"area": sum(e.area for e in self.engines), "at": time.monotonic()})


@cache
def pairs(n: int) -> bytes:
    """`n` tokens with their log-probs."""
    return b",".join([b"[-0.5,7,null]"] * n)


def event(version: str, start: int, end: int, finish: str | None) -> bytes:
    """Tokens [start, end) of a request, as SGLang streams them."""
    meta = b'{"completion_tokens":%d,"weight_version":"%b","finish_reason":%b,"output_token_logprobs":[%b]}' % (
        end,
        version.encode(),
        b"null" if finish is None else json.dumps({"type": finish}).encode(),
        pairs(end - start),
    )
    return b'data: {"meta_info":%b}\n\n' % meta


async def _moves(http: web.Request) -> web.Response:
    """Memory comes and goes."""
    await asyncio.sleep(MOVES_S)
    return await _well(http)


async def _well(_: web.Request) -> web.Response:
    return web.json_response({"success": True})


def serve(port: int, script: dict[str, Any]) -> None:
    """The process, until it is ended."""

    async def app() -> web.Application:
        house, made = House(script), web.Application(client_max_size=64 << 20)
        for i, engine in enumerate(house.engines):
            engine.routes(made.router, f"/{i}")
        made.router.add_get("/stats", house.stats)
        return made

    web.run_app(app(), host="127.0.0.1", port=port, print=None, access_log=None)


__all__ = ("LENGTHS", "draws", "seconds_of", "serve", "tokens_of")
