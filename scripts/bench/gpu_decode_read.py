"""What gpu_decode.py reads: the kernels of a decode step from a profile of torch, and whether log-probs are right."""

from __future__ import annotations

import asyncio
import itertools
import re
import statistics
from collections import Counter, defaultdict
from typing import Any

import aiohttp
import numpy as np

from actors.generation.engine import GenerateRequest
from actors.generation.engines.sglang.client import SGLangClient

WAITS = re.compile(r"(Event|Stream|Device|Ctx)Synchronize")


def steps_of(trace: dict[str, Any]) -> dict[str, Any]:
    """Of a profile: what one decode step does, in ms, as means over the steps that no prefill interrupts.
    Without two steps of one CUDA graph: totals alone.

    A step reaches from the first kernel of its CUDA graph to that of the next one. `idle_ms`: nothing runs on the GPU; of that,
    `idle_before_graph_ms` ends with the graph's first kernel. `waits_ms`: the scheduler waits for the GPU; near zero where the
    CPU is the bound. `kernels`: [name, ms a step, launches a step, whether in the graph].
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    work = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])
    launched = {e["args"]["correlation"] for e in events if e["name"].startswith(("cudaGraphLaunch", "cuGraphLaunch"))}
    graphs: dict[int, list[Any]] = defaultdict(list)
    for e in work:
        if e["args"].get("correlation") in launched:
            graphs[e["args"]["correlation"]].append(e)
    totals: Counter[str] = Counter()
    for e in work:
        totals[e["name"][:150]] += e["dur"]
    raw = {
        "gpu_events": len(work),
        "graphs": len(graphs),
        "total_ms": [[n, round(us / 1000, 3)] for n, us in totals.most_common(25)],
    }
    if not graphs:
        return raw
    big = max(len(found) for found in graphs.values()) / 2  # a prefill is many small graphs, or none
    decodes = {number: found[0]["ts"] for number, found in graphs.items() if len(found) > big}
    starts = sorted(decodes.values())
    spans = list(itertools.pairwise(starts))
    foreign = sorted(found[0]["ts"] for number, found in graphs.items() if number not in decodes)
    typical = statistics.median(end - begin for begin, end in spans) if spans else 0.0
    plain = [(b, e) for b, e in spans if e - b < 1.6 * typical and not any(b <= at < e for at in foreign)]
    if not plain:
        return raw
    spent: Counter[tuple[str, bool]] = Counter()
    count: Counter[tuple[str, bool]] = Counter()
    busy = before = waits = 0.0
    for begin, end in plain:
        inside = [e for e in work if begin <= e["ts"] < end]
        until = begin
        for e in inside:
            key = (e["name"][:150], e["args"].get("correlation") in decodes)
            spent[key] += e["dur"]
            count[key] += 1
            busy += max(0.0, min(e["ts"] + e["dur"], end) - max(until, e["ts"]))
            until = max(until, e["ts"] + e["dur"])
        before += max(0.0, end - until)
        waits += sum(e["dur"] for e in events if begin <= e["ts"] < end and WAITS.search(e["name"]) and e.get("cat") != "kernel")
    operators: Counter[str] = Counter()
    for e in events:
        if e.get("cat") == "cpu_op" and any(b <= e["ts"] < end for b, end in plain):
            operators[e["name"]] += e["dur"]
    n, whole = len(plain), sum(end - begin for begin, end in plain)

    def ms(total: float) -> float:
        return round(total / n / 1000, 4)

    return {
        "steps": n, "steps_in_all": len(spans), "step_ms": ms(whole), "busy_ms": ms(busy), "idle_ms": ms(whole - busy),
        "idle_share": round(1 - busy / whole, 4), "idle_before_graph_ms": ms(before), "waits_ms": ms(waits),
        "graph_ms": ms(sum(us for (_, graph), us in spent.items() if graph)),
        "outside_graph_ms": ms(sum(us for (_, graph), us in spent.items() if not graph)),
        "kernels": [[name, ms(us), round(count[name, graph] / n, 2), graph] for (name, graph), us in spent.most_common(40)],
        "cpu_operators": [[name, ms(us)] for name, us in operators.most_common(25)],
    }  # fmt: skip


async def agreement(url: str, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Log-probs that come with sampled tokens beside those of the same tokens read as a prompt, which SGLang computes without its
    sampler: [mean, largest] difference. Their means tell of the distribution: that of drawn tokens is minus the entropy."""
    few = asyncio.Semaphore(4)  # each asks for the logits of a whole answer
    client = SGLangClient(url, request_deadline_s=120, token_deadline_s=60, control_deadline_s=60)

    async def sample(i: int, ids: list[int]) -> tuple[list[int], list[float]]:
        request = GenerateRequest(rid=f"agree-{i}", input_ids=ids, max_new_tokens=new_tokens, ignore_eos=True)
        chunks = [chunk async for chunk in client.generate(request)]
        return [t for chunk in chunks for t in chunk.token_ids], [p for chunk in chunks for p in chunk.logprobs]

    async def teach(http: aiohttp.ClientSession, ids: list[int], answer: list[int]) -> list[float]:
        body = {"input_ids": ids + answer, "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}, "return_logprob": True,
                "logprob_start_len": len(ids) - 1}  # fmt: skip
        async with few, http.post(f"{url}/generate", json=body) as response:
            pairs = (await response.json())["meta_info"]["input_token_logprobs"]
        return [pair[0] for pair in pairs[-len(answer) :]]

    try:
        answers = await asyncio.gather(*(sample(i, ids) for i, ids in enumerate(prompts)))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
            asked = zip(prompts, answers, strict=True)
            taught = await asyncio.gather(*(teach(http, ids, tokens) for ids, (tokens, _) in asked))
    finally:
        await client.close()
    said, known = (
        np.array([p for _, logprobs in answers for p in logprobs]),
        np.array([p for row in taught for p in row]),
    )
    apart, means = np.abs(said - known), np.array([np.mean(logprobs) for _, logprobs in answers])
    return {
        "tokens": len(said), "difference": [float(apart.mean()), float(apart.max())],
        "mean_logprob": float(said.mean()), "mean_taught": float(known.mean()),
        "deviation": float(means.std(ddof=1) / len(means) ** 0.5),
    }  # fmt: skip
