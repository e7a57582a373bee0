"""What sglang-router costs a request: its CPU time, and the client's, for streams of several shapes. No engine, no GPU.

    python -m scripts.bench router --out router.json

The stand-in for the engine answers what the router asks of a server and streams chunks as SGLang does with
--incremental-streaming-output; tokens are no one's. CPU seconds come from /proc, so that a shared machine does not change them
much. Exit status 1 when a stream came back incomplete.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from aiohttp import web

from actors.generation.engine import GenerateRequest
from actors.generation.engines.sglang.client import SGLangClient
from actors.router.launch import DEFAULTS, MODULE
from actors.router.probe import answers
from actors.runtime.child import ArgValue, Child, command_line, free_port

TOKENS = 512
SHAPES = {"1 chunk": 512, "8 chunks": 64, "16 chunks": 32, "64 chunks": 8}  # tokens a chunk
FLAGS: dict[str, dict[str, ArgValue]] = {
    "our flags": {},
    "no retries": {"disable-retries": True},
    "no circuit breaker": {"disable-circuit-breaker": True},
    "round robin": {"policy": "round_robin"},
}


def engine(port: int) -> None:
    """The stand-in, until it is killed."""
    draw = random.Random(0)
    pairs = [[-draw.random() * 10, draw.randrange(150_000), None] for _ in range(TOKENS)]

    async def generate(request: web.Request) -> web.StreamResponse:
        per_chunk = int((await request.json())["sampling_params"]["top_k"])  # the bench says it here
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for end in range(per_chunk, TOKENS + 1, per_chunk):
            part = pairs[end - per_chunk : end]
            event = {
                "output_ids": [pair[1] for pair in part],
                "meta_info": {
                    "id": "x", "weight_version": "1", "prompt_tokens": 64, "completion_tokens": end,
                    "finish_reason": {"type": "length", "length": TOKENS} if end == TOKENS else None,
                    "output_token_logprobs": part,
                },
            }  # fmt: skip
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.002)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def said(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "served_model_name": "m", "is_generation": True, "weight_version": "1"})

    app = web.Application()
    app.router.add_post("/generate", generate)
    for path in ("/health", "/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        app.router.add_get(path, said)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children."""
    found = 0.0
    for one in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


async def stream(url: str, n: int, per_chunk: int, concurrent: int) -> float:
    """Client CPU seconds of `n` samples."""
    client = SGLangClient(url, request_deadline_s=60, token_deadline_s=30, control_deadline_s=30)
    slots = asyncio.Semaphore(concurrent)

    async def one(number: int) -> None:
        request = GenerateRequest(
            rid=str(number),
            input_ids=list(range(64)),
            max_new_tokens=TOKENS,
            top_k=per_chunk,
            routing_key=str(number // 8),
        )
        async with slots:
            got = [len(chunk.token_ids) async for chunk in client.generate(request)]
        if sum(got) != TOKENS:
            raise RuntimeError(f"sample {number} came back with {sum(got)} of {TOKENS} tokens")

    began = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.gather(*map(one, range(n)))
    ended = resource.getrusage(resource.RUSAGE_SELF)
    await client.close()
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


async def measure(requests: int, concurrent: int) -> list[dict[str, Any]]:
    """A row per set of flags and shape."""
    folder = Path(mkdtemp(prefix="bench-router-"))
    server, engine_port = Child(), free_port()
    await server.start(
        [sys.executable, "-m", "scripts.bench.router", "--engine", str(engine_port)], folder / "engine.log", dict(os.environ)
    )
    rows = []
    try:
        for name, flags in FLAGS.items():
            port = free_port(successors=1)
            own: dict[str, ArgValue] = {
                "host": "127.0.0.1", "port": port, "prometheus-port": port + 1, "worker-urls": f"http://127.0.0.1:{engine_port}",
            }  # fmt: skip
            router = Child()
            await router.start(command_line((sys.executable, "-m", MODULE), DEFAULTS | own | flags), folder / f"{port}.log")
            try:
                async with asyncio.timeout(30):
                    while not await answers("127.0.0.1", port):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                for shape, per_chunk in SHAPES.items():
                    await stream(f"http://127.0.0.1:{port}", 32, per_chunk, concurrent)
                    before, began = cpu_s(router.pid), time.monotonic()
                    client_s = await stream(f"http://127.0.0.1:{port}", requests, per_chunk, concurrent)
                    wall_s = time.monotonic() - began
                    rows.append(
                        {"flags": name, "shape": shape, "router_ms": round(1e3 * (cpu_s(router.pid) - before) / requests, 3),
                         "client_ms": round(1e3 * client_s / requests, 3), "wall_s": round(wall_s, 2)}
                    )  # fmt: skip
                    print(rows[-1], flush=True)
            finally:
                await router.stop()
    finally:
        await server.stop()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.engine:
        engine(args.engine)
        return 0
    rows = asyncio.run(measure(args.requests, args.concurrent))
    facts = {
        "date": date.today().isoformat(), "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "sglang-router": version("sglang-router"), "requests": args.requests, "tokens": TOKENS,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
