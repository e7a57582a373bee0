"""session.py on engines that really generate (SGLang, or the embedded one for a rehearsal), with worker processes that are
killed.

exact   agents, each with the unmodified openai client, on workers that share the bus. Between each worker and its engine stands
        a proxy that writes down what the engine was asked and what it said, so the judge does not depend on a line of ours:
        a trained token must be the one that an engine made behind just the tokens that stand before it, with its log-prob.
        Versions of the weights are taken and workers killed (-9) meanwhile
speed   a program of four turns with an environment in between, on bus and worker, against the same turns by bare aiohttp;
        alternating, the prefix cache on, which is emptied before each
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from actors.generation.engine import GenerateRequest
from actors.generation.engines.sglang.wire import body_of
from actors.generation.spec import AgentSpec
from actors.partial.actor import PartialSpec
from actors.runtime.prompts import vocabulary_of
from bus.messages.base import unpack_floats, unpack_ints
from bus.messages.samples import RolloutDone, Sampling
from bus.topology import DEAD, PARKED, PREFIXES, PROMPTS
from scripts.bench import gpu_parts as parts
from scripts.bench.chat_tokenizer import make_chat
from scripts.bench.session_programs import AGENT_TOKENS, AGENT_TURNS, SPEED_TURNS, heard

LEASE_S = 4.0
SERVER: dict[str, Any] = {  # boots without FlashAttention-3; a second server takes its share of what the first left
    "attention-backend": "triton", "sampling-backend": "pytorch", "mem-fraction-static": 0.6, "cuda-graph-max-bs": 256,
}  # fmt: skip
PROGRAMS = str(Path(__file__).with_name("session_programs.py"))


# -- the witness ---------------------------------------------------------------------------------------------------------


class Witness:
    """A proxy before one engine. `said`: input ids, packed -> (token ids, log-probs) of each answer to them, whole or not."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.said: dict[bytes, list[tuple[list[int], list[float]]]] = {}
        self.ended = self.tokens = 0
        self.url = ""

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Witness]:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as self._http:
            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", self._pass)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _pass(self, asked: web.Request) -> web.StreamResponse:
        body = await asked.read()
        headers = {k: v for k, v in asked.headers.items() if k.lower() in ("content-type", "authorization")}
        url = f"{self._target}{asked.rel_url}"
        async with self._http.request(asked.method, url, data=body, headers=headers) as answer:
            if asked.path != "/generate" or not answer.content_type.startswith("text/event-stream"):
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
            ids: list[int] = []
            logprobs: list[float] = []
            key = array("i", msgspec.json.decode(body)["input_ids"]).tobytes()
            self.said.setdefault(key, []).append((ids, logprobs))
            out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await out.prepare(asked)
            rest = b""
            async for data in answer.content.iter_any():
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    self._hear(event, ids, logprobs)  # before it goes on: whatever is trained is written down
                await out.write(data)
            await out.write_eof()
            return out

    def _hear(self, event: bytes, ids: list[int], logprobs: list[float]) -> None:
        if not event.startswith(b"data: {"):
            return
        meta = msgspec.json.decode(event[6:]).get("meta_info") or {}
        pairs = meta.get("output_token_logprobs") or []
        fresh = meta.get("completion_tokens", 0) - len(ids)
        for logprob, token, *_ in pairs[len(pairs) - fresh :] if fresh > 0 else []:
            ids.append(token)
            logprobs.append(logprob)
        self.tokens += max(0, fresh)
        self.ended += meta.get("finish_reason") is not None


def judge(rollouts: list[RolloutDone], witnesses: list[Witness], stops: tuple[int, ...]) -> dict[str, Any]:
    """Every trained token against what the engines were seen to say."""
    trained = wrong = off = trajectories = stopped = 0
    versions: set[int] = set()
    for rollout in rollouts:
        trajectories += len(rollout.strands)
        for strand in rollout.strands:
            response = strand.response
            whole = [*unpack_ints(strand.prompt_tokens), *unpack_ints(response.tokens)]
            packed, begin = array("i", whole).tobytes(), len(whole) - response.n_tokens
            mask, logprobs = bytes(response.loss_mask), unpack_floats(response.logprobs)
            versions |= {span.version for span in response.spans if span.step >= 0}
            made: dict[int, float] = {}
            for at in range(begin, len(whole)):
                if not mask[at - begin]:
                    continue
                for witness in witnesses:
                    for ids, own in witness.said.get(packed[: 4 * at], ()):
                        for i, (token, logprob) in enumerate(zip(ids, own, strict=True)):
                            if at + i >= len(whole) or not mask[at + i - begin] or whole[at + i] != token:
                                break
                            if abs(made.get(at + i, 1e9) - logprobs[at + i - begin]) > 1e-6:
                                made[at + i] = logprob
                trained += 1
                stopped += whole[at] in stops
                wrong += at not in made
                off += at in made and abs(made[at] - logprobs[at - begin]) > 1e-5
    names = [rollout.task.sample_id for rollout in rollouts]
    return {
        "sessions_ended": len(names), "sessions_twice": len(names) - len(set(names)), "tokens_trained": trained,
        "tokens_wrong": wrong, "logprobs_wrong": off, "trajectories": trajectories, "tokens_that_stop": stopped,
        "tokens_made": sum(w.tokens for w in witnesses), "versions": len(versions),
        "turns": sum(r.episode.turns for r in rollouts),
        "resumed": sum(r.resumed_tokens > 0 for r in rollouts),
    }  # fmt: skip


def fresh(args: Any, name: str) -> Path:
    """A folder for a bus that knows nothing yet."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=args.home))


# -- exact ---------------------------------------------------------------------------------------------------------------


async def exact(args: Any, urls: list[str], dirs: list[Path]) -> dict[str, Any]:
    """10,000 turns (or --turns) with new versions and killed workers in between."""
    sessions = -(-args.turns // AGENT_TURNS)
    stops = (1, *range(300, 300 + vocabulary_of(str(dirs[0])) // 600))  # so many that random weights say one now and then
    total = sessions * AGENT_TURNS
    spec = AgentSpec(
        tools=(), corpus="", max_turns=8, parser="hermes", function=f"{PROGRAMS}:agent", idle_s=300.0, template_path="",
        template_kwargs="", allow_weak_sandbox=False,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        seen = [await stack.enter_async_context(Witness(url).at_work()) for url in urls]
        each = max(1, args.at_once // len(urls))
        house = await stack.enter_async_context(parts.house(fresh(args, "exact"), concurrent=each, lease_s=LEASE_S))
        await house.actor("partial", "partial", PartialSpec())
        names = [f"generation-{i}" for i in range(len(urls))]

        async def start(i: int) -> None:
            fields = {"engine": "external", "engine_url": seen[i].url, "model_path": str(dirs[0]), "verify_checksum": False}
            await house.worker(names[i], **fields, agent=spec, context_length=0)

        for i in range(len(names)):
            await start(i)
        await house.wait_for("joined", len(names), 120)
        version, kills, joined = 1, 0, len(names)
        await house.order(1, dirs[0])
        await house.wait_for("activated", len(names), 120)
        began = time.monotonic()
        sampling = Sampling(max_new_tokens=AGENT_TURNS * AGENT_TOKENS, stop_token_ids=stops)
        await house.feed("s", [[2, 3]] * sessions, sampling)
        collected = asyncio.create_task(house.collect(sessions, args.deadline_s))
        while not collected.done():
            done = sum(w.ended for w in seen)
            if done >= version * total / args.versions:
                version += 1
                await house.order(version, dirs[version % len(dirs)], ("retract", "in_place")[version % 2])
            elif done >= (kills + 0.5) * total / max(1, args.kills) and kills < args.kills:
                victim = kills % len(names)
                kills += 1
                child = house.children.pop(names[victim])
                os.kill(child.pid, 9)
                await child.stop()
                await start(victim)
                joined += 1
                await house.wait_for("joined", joined, 120)
                await house.order(version, dirs[version % len(dirs)])
            await asyncio.wait([collected], timeout=0.1)
        rollouts = [rollout for _, rollout in collected.result()]
        wall = time.monotonic() - began
        left = {s.name: await house.bus.length(s) for s in (PROMPTS, PARKED, PREFIXES, DEAD)}
        found = judge(rollouts, seen, stops)
    whole = not (found["tokens_wrong"] or found["logprobs_wrong"] or found["sessions_twice"] or any(left.values()))
    return {
        "sessions": sessions, "at_once": args.at_once, "workers": len(urls), "workers_killed": kills,
        "versions_ordered": version, **found, "left_on_streams": left, "turns_per_s": round(total / wall, 1),
        "seconds": round(wall, 1), "held": whole and found["turns"] >= total and found["sessions_ended"] == sessions,
    }  # fmt: skip


# -- speed ---------------------------------------------------------------------------------------------------------------


async def by_hand(url: str, asked: list[list[int]], args: Any) -> dict[str, Any]:
    """The same turns with nothing but aiohttp: the same bodies, the same environment."""
    slots, made, cached = asyncio.Semaphore(args.at_once), 0, 0
    timeout, content = aiohttp.ClientTimeout(total=600), {"Content-Type": "application/json"}

    async def one(http: aiohttp.ClientSession, number: int, tokens: list[int]) -> None:
        nonlocal made, cached
        async with slots:
            for turn in range(SPEED_TURNS):
                request = GenerateRequest(rid="-", input_ids=tokens, max_new_tokens=args.new_tokens, sampling_seed=number)
                async with http.post(f"{url}/generate", data=body_of(request, f"hand-{number}-{turn}-{tokens[0]}")) as answer:
                    raw = await answer.read()
                    if answer.status != 200:
                        raise RuntimeError(f"HTTP {answer.status}: {raw[:300]!r}")
                ids: list[int] = []
                for event in raw.split(b"\n\n"):
                    if event.startswith(b"data: {"):
                        meta = msgspec.json.decode(event[6:])["meta_info"]
                        fresh = meta["completion_tokens"] - len(ids)
                        pairs = meta["output_token_logprobs"]
                        ids += [pair[1] for pair in pairs[len(pairs) - fresh :]] if fresh else []
                made, cached = made + len(ids), cached + meta.get("cached_tokens", 0)
                tokens = tokens + ids + heard(str(number), turn)

    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), headers=content) as http:
        began = time.monotonic()
        await asyncio.gather(*(one(http, i, ids) for i, ids in enumerate(asked)))
        seconds = time.monotonic() - began
    return {"tokens_per_s": round(made / seconds, 1), "cached_tokens": cached}


async def speed(args: Any, url: str, model: Path) -> dict[str, Any]:
    """Tokens/s by hand and by the program; the ratio of the medians."""
    vocab = vocabulary_of(str(model))
    hand: list[dict[str, Any]] = []
    ours: list[float] = []
    sampling = Sampling(max_new_tokens=SPEED_TURNS * args.new_tokens, seed=1)
    async with parts.house(fresh(args, "speed"), concurrent=args.at_once) as house:
        program = {"program": f"{PROGRAMS}:four_turns", "model_path": str(model)}
        await house.worker("generation-0", engine="external", engine_url=url, verify_checksum=False, **program)
        await house.wait_for("joined", 1, 120)
        await house.order(1, model)
        await house.wait_for("activated", 1, 120)

        async def program_leg(name: str, asked: list[list[int]]) -> float:
            began = time.monotonic()
            await house.feed(name, asked, sampling)
            found = await house.collect(len(asked), 600)
            return round(sum(r.n_made for _, r in found) / (found[-1][0] - began), 1)

        async def emptied() -> None:
            async with aiohttp.ClientSession() as http, http.post(f"{url}/flush_cache") as answer:
                await answer.read()

        warm = parts.prompts(args.at_once, args.prompt_tokens, vocab, 7)
        await by_hand(url, warm, args)
        await program_leg("warm", warm)
        for leg in range(2 * args.repeats):
            asked = parts.prompts(args.conversations, args.prompt_tokens, vocab, 100 + leg)
            await emptied()
            if leg % 4 in (0, 3):
                hand.append(await by_hand(url, asked, args))
            else:
                ours.append(await program_leg(f"leg{leg}", asked))
            print("speed", hand[-1:], ours[-1:], flush=True)
    ratio = statistics.median(ours) / statistics.median(one["tokens_per_s"] for one in hand)
    return {
        "by_hand": hand, "program_tokens_per_s": ours, "ratio": round(ratio, 4), "bar": 0.95, "held": ratio >= 0.95,
        "turns": SPEED_TURNS, "new_tokens": args.new_tokens, "prompt_tokens": args.prompt_tokens,
        "conversations": args.conversations, "at_once": args.at_once,
    }  # fmt: skip


async def bench(args: Any) -> dict[str, Any]:
    """Both, as --parts says; what was found is printed as soon as it is there."""
    home = Path(args.home)
    dirs = [parts.make_model(home, args.shape, seed) for seed in (1, 2)]
    for directory in dirs:  # bytes, then words: what random weights say is text that tokenising again would spoil
        make_chat(directory, words=vocabulary_of(str(directory)))
    found: dict[str, Any] = {"engine": args.engine, "shape": args.shape, "machine": parts.facts_of_machine()}
    async with AsyncExitStack() as stack:
        urls: list[str] = list(args.engine_url)
        for i in range(0 if urls else args.engines):
            flags = (SERVER if args.engine == "sglang" else {}) | args.server_args
            gpus = (0,) if args.engine == "sglang" else ()
            made = parts.server(args.engine, dirs[0], home / f"engine-{i}", args=flags, max_running=args.at_once, gpus=gpus)
            url, facts = await stack.enter_async_context(made)
            urls.append(url)
            found[f"server_{i}"] = facts
        for name in args.parts:
            found[name] = await (exact(args, urls, dirs) if name == "exact" else speed(args, urls[0], dirs[0]))
            print(name, msgspec.json.encode(found[name]).decode(), flush=True)
            if args.out:
                args.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    found["held"] = all(found[name]["held"] for name in args.parts)
    return found
