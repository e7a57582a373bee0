"""Tokens/s for gpu_bench.py: bus, worker and router against a bare loop, and the server's settings one by one."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

from actors.generation.engines.sglang.args import GATHER
from scripts.bench import gpu_parts as parts

KINDS = ("bare", "bare_stream", "bare_router", "worker", "router")
VARIANTS: dict[str, dict[str, Any]] = {
    "triton": {"attention-backend": "triton", "cuda-graph-max-bs": False},
    "fa3": {"cuda-graph-max-bs": False},
    "fa3-graphs-512": {},
    "ungathered": {"enable-prefill-delayer": False},
    "no-graphs": {"cuda-graph-max-bs": False, "disable-cuda-graph": True},
    "no-overlap": {"disable-overlap-schedule": True},
    "interval-1": {"stream-interval": 1},
    "interval-8": {"stream-interval": 8},
    "interval-64": {"stream-interval": 64},
    "mixed-chunk": {"enable-mixed-chunk": True},
    "delayer-250": GATHER | {"prefill-delayer-max-delay-ms": 250},
    "delayer-500": GATHER | {"prefill-delayer-max-delay-ms": 500},
    "delayer-1000": GATHER | {"prefill-delayer-max-delay-ms": 1000},
    "kv-fp8": {"kv-cache-dtype": "fp8_e4m3"},
    "kv-fp8-500": GATHER | {"prefill-delayer-max-delay-ms": 500, "kv-cache-dtype": "fp8_e4m3"},
    "as-shipped": {},
}
"""FA3, graphs to 512 and gathered prompts unless it says otherwise (docs/measurements/h200_tuning.json is from before prompts were
gathered by default; its `delayer` is today's default). A variant that names gathering itself gets no slots beyond
--max-running, so it is to be compared with others of its kind only."""


async def throughput(b: Any) -> None:
    """Tokens/s of the same requests: bare aiohttp, to the server or to the router; bus + worker; bus + worker + router.
    Interleaved, several times."""
    a = b.args
    runs: dict[str, list[float]] = {kind: [] for kind in a.kinds}
    async with b.server(b.model(), "throughput") as (url, facts):
        warm = parts.prompts(a.concurrent, 64, b.vocab, 1)
        await parts.bare_loop(url, warm, new_tokens=min(64, a.new_tokens), concurrent=a.concurrent, stream=True)
        for repeat in range(a.repeats):
            for name in runs:
                if b.left_s < 40 and a.engine == "sglang":
                    break
                asked = parts.prompts(a.requests, a.prompt_tokens, b.vocab, 100 * repeat + len(name))
                if name.startswith("bare"):
                    runs[name].append(await _bare(b, url, asked, name))
                else:
                    runs[name].append(await _through_worker(b, url, asked, f"{name}{repeat}", routed=name == "router"))
                print(name, runs[name][-1], flush=True)
            best = max(statistics.median(of) for n, of in runs.items() if of and n in ("bare", "bare_stream"))
            ratios = {n: round(statistics.median(of) / best, 4) for n, of in runs.items() if of}
            b.save(
                "throughput",
                {"tokens_per_s": runs, "ratio_to_best_bare": ratios, "requests": a.requests, "concurrent": a.concurrent,
                 "new_tokens": a.new_tokens, "prompt_tokens": a.prompt_tokens, "server": facts},
                done=all(len(r) == a.repeats for r in runs.values()),
            )  # fmt: skip


async def _bare(b: Any, url: str, asked: list[list[int]], name: str) -> float:
    load: dict[str, Any] = {"new_tokens": b.args.new_tokens, "concurrent": b.args.concurrent, "stream": name != "bare"}
    if name != "bare_router":
        return (await parts.bare_loop(url, asked, **load))["tokens_per_s"]
    async with parts.router(b.scratch, worker_urls=url) as (router_url, _):
        await parts.until(lambda: _routes(router_url), 60.0)
        return (await parts.bare_loop(router_url, asked, **load))["tokens_per_s"]


async def _routes(router_url: str) -> bool:
    """Whether the router has found its worker."""
    try:
        await parts.bare_loop(router_url, [[11, 12]], new_tokens=1, concurrent=1, stream=False)
    except RuntimeError:
        return False
    return True


async def _through_worker(b: Any, url: str, asked: list[list[int]], name: str, *, routed: bool) -> float:
    """Tokens/s from the first prompt on the bus to the last rollout on it."""
    a = b.args
    async with parts.house(b.scratch / f"t-{name}", concurrent=a.concurrent) as house:

        async def measure(router_url: str) -> float:
            await house.worker("generation-0", engine="external", engine_url=url, router_url=router_url)
            await house.wait_for("joined", 1, 60)
            await house.order(1, b.model())
            await house.wait_for("activated", 1, 60)
            began = time.monotonic()
            await house.feed(name, asked, a.new_tokens)
            found = await house.collect(len(asked), 300)
            tokens = sum(rollout.response.n_tokens for _, rollout in found)
            return round(tokens / (found[-1][0] - began), 1)

        if not routed:
            return await measure("")
        async with parts.router(b.scratch) as (router_url, _):
            return await measure(router_url)


async def tuning(b: Any) -> None:
    """Tokens/s of server settings, each with a server of its own: all of them up first, then one after the other at work.

    plain and stream: requests of one length, which end together. uneven: of many lengths, which end one by one, streamed."""
    a = b.args
    n, gpu = a.concurrent, a.engine == "sglang"
    await b.stop_server()
    rows: dict[str, dict[str, Any]] = {}
    room = max(160_000, int(1.2 * n * (a.prompt_tokens + a.new_tokens)))  # running samples are half done, and long ones more
    kept: dict[str, Any] = {"mem-fraction-static": 0.9, "max-total-tokens": room} if gpu else {}
    async with AsyncExitStack() as stack:

        async def boot(name: str, wait_s: float) -> str:
            await asyncio.sleep(wait_s)  # each measures what memory is free while it boots
            changes = kept | (VARIANTS[name] if gpu else {})
            try:
                url, facts = await stack.enter_async_context(
                    parts.server(
                        a.engine, b.model(), b.scratch / f"tuning-{name}", args=b.engine_args(**changes),
                        max_running=a.max_running, gpus=(a.gpu,) if gpu else (),
                    )
                )  # fmt: skip
            except Exception as error:  # noqa: BLE001 - a variant that does not start is a result
                rows[name] = {"failed": str(error)[:400]}
                return ""
            rows[name] = {"args": facts["args"], "boot_s": facts["boot_s"], "note": facts["note"]}
            return url

        urls = await asyncio.gather(*(boot(name, (12.0 if gpu else 0.0) * i) for i, name in enumerate(a.variants)))
        even, uneven = parts.prompts(n, a.prompt_tokens, b.vocab, 3), parts.prompts(3 * n, a.prompt_tokens, b.vocab, 4)
        for name, url in zip(a.variants, urls, strict=True):
            if not url or b.left_s < 30:
                continue
            loads: dict[str, tuple[list[list[int]], Any, bool]] = {
                "warm": (uneven[:n], parts.lengths(n, min(64, a.new_tokens), 5), True),
                "plain": (even, a.new_tokens, False),
                "stream": (even, a.new_tokens, True),
                "uneven": (uneven[: n if name == "no-graphs" else None], parts.lengths(3 * n, a.new_tokens, 6), True),
            }
            for kind, (asked, new_tokens, stream) in loads.items():
                new = new_tokens[: len(asked)] if isinstance(new_tokens, list) else new_tokens
                got = await parts.bare_loop(url, asked, new_tokens=new, concurrent=n, stream=stream)
                rows[name][kind] = got["tokens_per_s"]
            print(name, json.dumps(rows[name]), flush=True)
            b.save("tuning", {"variants": rows, "concurrent": n}, done=False)
    done = all("uneven" in row or "failed" in row for row in rows.values())
    b.save("tuning", {"variants": rows, "concurrent": n}, done=done and len(rows) == len(a.variants))
