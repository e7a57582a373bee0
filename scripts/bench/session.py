"""Turns of agents through the OpenAI interface: is every trained token the generated one, and what does a turn cost?

    python -m scripts.bench session --turns 10000 --at-once 256 --out session.json
    python -m scripts.bench session --engine sglang --out sglang.json       (one GPU; session_engine.py says what is measured)

Of the first: the worker, its endpoint and the bus (a redis-server of its own) are real; the engine is a stand-in in the worker's
process that says bytes at random, so that most answers are no text at all, and takes a new version now and then. Agents are the
unmodified openai client in processes of their own. A token of the engine follows from its sample and its place, so each can
be judged by itself: a trained token must be the one that was made there, everything the model saw must stand in the
trajectory as it was seen. CPU is the worker process's, with the stand-in's share, from first to last turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from zlib import crc32

BAR_MS = 3.0
FIRST, END, TURN_TOKENS = 4, 1, 12  # ids of bytes begin at the first; an answer ends at a place that follows from its sample


def made_at(sample: str, place: int) -> int:
    """The token that the engine makes for a sample at a place of its sequence."""
    drawn = crc32(f"{sample}@{place}".encode())
    return END if drawn % TURN_TOKENS == 0 else FIRST + drawn % 256


# -- agents: processes of their own --------------------------------------------------------------------------------------


async def agents(url: str, turns: int) -> None:
    """Each line of stdin is a key; its dialogue is led for `turns` answers, then the key is printed."""
    from openai import AsyncOpenAI

    async def one(key: str) -> None:
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=600) as client:
            messages: list[Any] = [{"role": "user", "content": "begin"}]
            for turn in range(turns):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": f"heard; turn {turn}"}]
        print(key, flush=True)

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            tasks.create_task(one(line.decode().strip()))


class Agents:
    """The worker's side of such processes."""

    def __init__(self, n: int, turns: int) -> None:
        self._n, self._turns = n, turns
        self._processes: list[asyncio.subprocess.Process] = []
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._next = 0

    async def start(self, url: str) -> None:
        for _ in range(self._n):
            words = (sys.executable, "-m", "scripts.bench.session", "--agents", url, "--turns-each", str(self._turns))
            process = await asyncio.create_subprocess_exec(*words, stdin=-1, stdout=-1)
            self._processes.append(process)
            self._readers.append(asyncio.create_task(self._read(process)))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._waiting.pop(line.decode().strip()).set_result(None)
        for left in self._waiting.values():
            if not left.done():
                left.set_exception(RuntimeError("a process of agents ended"))

    async def __call__(self, task: Any, base_url: str, api_key: str) -> float:
        done = self._waiting[api_key] = asyncio.get_running_loop().create_future()
        self._next += 1
        stdin = self._processes[self._next % self._n].stdin
        assert stdin is not None
        stdin.write(f"{api_key}\n".encode())
        await done
        return 1.0

    async def end(self) -> None:
        for process in self._processes:
            process.kill()
            await process.wait()
        await asyncio.gather(*self._readers)


# -- the worker ----------------------------------------------------------------------------------------------------------


async def bench(args: argparse.Namespace) -> dict[str, Any]:
    from actors.generation.actor import Worker
    from actors.generation.endpoint.agent import AgentProgram
    from actors.generation.endpoint.server import Endpoint
    from actors.generation.engine import Chunk, GenerateRequest
    from actors.generation.spec import GenerationSpec
    from actors.runtime.context import Context
    from bus.messages.active import Activate
    from bus.messages.base import pack_ints, unpack_ints
    from bus.messages.policy import WeightManifest
    from bus.messages.samples import RolloutDone, SampleTask, Sampling
    from bus.messages.versions import PolicyVersion
    from bus.server import EmbeddedRedis
    from bus.topology import ACTIVE, PROMPTS, ROLLOUTS
    from scripts.bench.chat_tokenizer import make_chat
    from tests.actors.house import messages, open_bus, put, running, until
    from tests.engine.scripted import ScriptedEngine

    seen: dict[str, list[int]] = {}  # the longest that the model saw of each sample

    class Engine(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            sample, place = "/".join(request.rid.split("/")[:2]), len(request.input_ids)
            if place > len(seen.get(sample, ())):
                seen[sample] = list(request.input_ids)
            await asyncio.sleep(self.pace_s)
            await self._goes.wait()
            ids: list[int] = []
            while not ids or ids[-1] != END:
                ids.append(made_at(sample, place + len(ids)))
            yield Chunk(ids, [-0.5] * len(ids), self.version, "stop")

    n, workers = -(-args.turns // args.turns_each), []
    home = Path(args.home)
    chat, engine, program = make_chat(home / "chat"), Engine(pace_s=0.01), Agents(args.processes, args.turns_each)
    redis = EmbeddedRedis(home / "redis")
    redis.start()
    found: dict[str, Any] = {"turns": n * args.turns_each, "sessions": n, "at_once": args.at_once}
    try:
        async with open_bus(redis.url, "bench", knobs={"sglang_server_concurrency": args.at_once}) as bus:

            async def body(context: Context, spec: GenerationSpec) -> None:
                async with Endpoint(chat, "hermes", context.count) as endpoint:
                    await program.start(endpoint.url)
                    worker = Worker(context, spec, None, AgentProgram(program, endpoint, idle_s=300.0))
                    worker._link._connect = lambda url, inside: engine  # type: ignore[assignment]
                    workers.append(worker)
                    await worker.run()

            async def joined() -> bool:
                return bool(workers) and workers[0]._link.engine is not None

            async with running(bus, "generation-0", body, GenerationSpec(engine="external", engine_url="scripted")) as context:
                served = lambda: context.counters.get("turns_served", 0.0)  # noqa: E731
                sampling = Sampling(max_new_tokens=1 << 20, stop_token_ids=(END,))
                tasks = [
                    SampleTask(sample_id=f"g{i}/0", group_id=f"g{i}", index=0, n_samples=1, prompt_id=f"p{i}",
                               prompt_tokens=pack_ints([FIRST]), sampling=sampling)
                    for i in range(n)
                ]  # fmt: skip
                await until(joined)
                await put(bus, PROMPTS, *tasks)
                version, cpu, wall = 0, time.process_time(), time.monotonic()
                while (done := served()) < found["turns"]:
                    if done >= version * found["turns"] / args.versions:
                        version += 1
                        manifest = WeightManifest(path="/nowhere")
                        order = Activate(version=PolicyVersion(id=version, step=version), manifest=manifest, mode="in_place")
                        await put(bus, ACTIVE, order)
                        await asyncio.sleep(0.5)
                    await asyncio.sleep(0.05)
                    if time.monotonic() - wall > args.deadline_s:
                        raise TimeoutError(f"{done:.0f} of {found['turns']} turns within {args.deadline_s} s")
                found["cpu_ms_per_turn"] = (time.process_time() - cpu) / found["turns"] * 1e3
                found["turns_per_s"] = found["turns"] / (time.monotonic() - wall)

                async def all_there() -> bool:
                    return context.counters.get("samples", 0) >= n

                await until(all_there)
                rollouts: list[RolloutDone] = await messages(bus, ROLLOUTS)
                kept = ("turns", "traj", "calls", "answers")
                found["counters"] = {k: v for k, v in context.counters.items() if k.startswith(kept)}
        judge(rollouts, seen, found, unpack_ints)
    finally:
        await program.end()
        redis.stop()
    return found


def judge(rollouts: list[Any], seen: dict[str, list[int]], found: dict[str, Any], unpack: Any) -> None:
    """Every token of every trajectory."""
    trained = wrong = unseen = 0
    versions: set[int] = set()
    for rollout in rollouts:
        name = rollout.task.sample_id
        prompt, response = unpack(rollout.episode.prompt_tokens), unpack(rollout.response.tokens)
        mask = bytes(rollout.response.loss_mask)
        for index, (token, counts) in enumerate(zip(response, mask, strict=True)):
            trained += counts
            wrong += bool(counts) and token != made_at(name, len(prompt) + index)
        unseen += [*prompt, *response][: len(seen[name])] != seen[name]
        versions |= {span.version for span in rollout.response.spans if span.step >= 0}
    exact = not wrong and not unseen and len(rollouts) == found["sessions"]
    found |= {
        "sessions_ended": len(rollouts), "sessions_twice": len(rollouts) - len({r.task.sample_id for r in rollouts}),
        "tokens_trained": trained, "tokens_wrong": wrong, "histories_wrong": unseen, "versions": len(versions),
        "turns_per_session": statistics.mean(r.episode.turns for r in rollouts),
        "bar_ms": BAR_MS, "held": exact and found["cpu_ms_per_turn"] < BAR_MS,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10_000, help="answers of the model in all (default %(default)s)")
    parser.add_argument("--turns-each", type=int, default=5, help="of one session (default %(default)s)")
    parser.add_argument("--at-once", type=int, default=256, help="sessions at once (default %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="of agents (default %(default)s)")
    parser.add_argument("--versions", type=int, default=8, help="of the weights, in the course of the run (default %(default)s)")
    parser.add_argument("--deadline-s", type=float, default=1800.0)
    parser.add_argument("--engine", choices=("scripted", "embedded", "sglang"), default="scripted")
    parser.add_argument("--engine-url", nargs="*", default=[], help="running servers of the model under HOME/SHAPE-1 instead")
    parser.add_argument("--engines", type=int, default=2, help="with --engine: servers, each with a worker (default %(default)s)")
    parser.add_argument("--shape", default="0.6b", help="of the random model; tiny for a rehearsal (default %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=("exact", "speed"), default=["exact", "speed"])
    parser.add_argument("--kills", type=int, default=4, help="of workers (default %(default)s)")
    parser.add_argument("--server-args", type=json.loads, default={}, help="more flags of SGLang, a JSON object without dashes")
    parser.add_argument("--new-tokens", type=int, default=256, help="of a turn, where speed is measured (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--conversations", type=int, default=512, help="of one leg (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="legs of each kind (default %(default)s)")
    parser.add_argument("--home", help="folder for models and logs, kept (default: one that is removed)")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--agents", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agents:
        asyncio.run(agents(args.agents, args.turns_each))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        from actors.runtime.loop import run_loop

        args.home = args.home or scratch
        if args.engine == "scripted":
            found = run_loop(bench(args))
        else:
            from scripts.bench import session_engine

            found = run_loop(session_engine.bench(args))
    text = json.dumps(found | {"cores": os.cpu_count()}, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0 if found["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
