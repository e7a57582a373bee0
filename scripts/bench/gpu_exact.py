"""Log-probs of gpu_bench.py, engine against trainer: across an update, in normal service, and in SGLang's deterministic mode
against the trainer's matched forward."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from scripts.bench import gpu_judge as judge
from scripts.bench import gpu_parts as parts


async def boundary(b: Any) -> None:
    """Updates in mid-sample, judged by the weights themselves: each token's log-prob fits the version its span names. Paused in
    place, what comes after the update has keys of both versions, so there only the old version's part is compared."""
    a = b.args
    models = [b.model(0), b.model(1)]
    n = min(64, a.concurrent)
    ids = parts.prompts(n, a.prompt_tokens, b.vocab, 7)
    async with (
        b.server(models[0], "boundary") as (url, facts),
        parts.house(b.scratch / "boundary", concurrent=n) as house,
    ):
        await house.worker("generation-0", engine="external", engine_url=url, inside=facts["inside"])
        await house.wait_for("joined", 1, 60)
        made: dict[str, list[Any]] = {}
        for number, mode in ((1, "retract"), (3, "in_place")):
            await house.order(number, models[0])
            await house.wait_for("activated", number, 60)
            await house.feed(mode, ids, a.new_tokens)
            await asyncio.sleep(a.settle_s)
            await house.order(number + 1, models[1], mode)
            made[mode] = [rollout for _, rollout in await house.collect(n, 300)]
        pauses = [event.data for event in await house.events("activated")]
    await b.stop_server()
    verdicts = {}
    for mode, rollouts in made.items():
        asked = judge.asked_of(mode, ids)
        first, second = (judge.logprobs(m, rollouts, asked, dtype="auto") for m in models)
        verdicts[mode] = judge.boundaries(rollouts, first, second)
    b.save("boundary", {"samples": n, **verdicts, "activations": pauses, "server": facts}, done=True)


async def sampled(b: Any, url: str, name: str, ids: list[list[int]], model: Path | None = None) -> list[Any]:
    """Rollouts of these prompts through bus and worker."""
    async with parts.house(b.scratch / name, concurrent=len(ids)) as house:
        await house.worker("generation-0", engine="external", engine_url=url)
        await house.wait_for("joined", 1, 60)
        await house.order(1, model or b.model())
        await house.wait_for("activated", 1, 60)
        await house.feed("lp", ids, b.args.new_tokens)
        return [rollout for _, rollout in await house.collect(len(ids), 300)]


def said(rollouts: list[Any]) -> list[np.ndarray]:
    """The engine's log-probs, sample by sample."""
    return [np.frombuffer(r.response.logprobs, np.float32) for r in rollouts]


def difference(engine: list[np.ndarray], trainer: list[np.ndarray]) -> dict[str, Any]:
    """How far two sets of log-probs are apart; where the first tokens that differ are."""
    gap = np.abs(np.concatenate(engine) - np.concatenate(trainer))
    first = [int((e != t).argmax()) if (e != t).any() else -1 for e, t in zip(engine, trainer, strict=True)]
    return {
        "mean": float(gap.mean()), "max": float(gap.max()), "p99": float(np.quantile(gap, 0.99)),
        "exactly_equal": float((gap == 0).mean()), "samples_equal_throughout": first.count(-1),
        "first_difference_at": sorted({f for f in first if f >= 0})[:12],
        "mean_logprob": float(np.concatenate(engine).mean()), "tokens": len(gap),
    }  # fmt: skip


async def logprobs(b: Any) -> None:
    """Engine against trainer on sampled tokens: mean and largest difference of log-probs."""
    ids = parts.prompts(min(64, b.args.concurrent), b.args.prompt_tokens, b.vocab, 11)
    async with b.server(b.model(), "logprobs") as (url, facts):
        rollouts = await sampled(b, url, "logprobs", ids)
    asked = judge.asked_of("lp", ids)
    rows = {
        dtype: difference(said(rollouts), judge.logprobs(b.model(), rollouts, asked, dtype=dtype)) for dtype in ("auto", "float32")
    }
    b.save("logprobs", {"difference": rows, "server": facts}, done=True)


async def deterministic(b: Any) -> None:
    """The same with SGLang's batch-invariant kernels, and with the trainer's forward that repeats them."""
    changes = {} if b.args.engine == "embedded" else {"enable_deterministic_inference": True}
    ids = parts.prompts(min(64, b.args.concurrent), b.args.prompt_tokens, b.vocab, 11)
    asked = judge.asked_of("lp", ids)
    async with b.server(b.model(), "deterministic", **changes) as (url, facts):
        rollouts = await sampled(b, url, "deterministic", ids)
        company = parts.prompts(len(ids), 2 * b.args.prompt_tokens, b.vocab, 12)
        again = await sampled(b, url, "deterministic-2", ids + company)
        scored = await _scored(url, [asked[r.task.sample_id] for r in rollouts[:8]], rollouts[:8])
    await b.stop_server()
    other = {r.task.sample_id: r.response for r in again}
    pairs = [(r.response, other[r.task.sample_id]) for r in rollouts]
    found: dict[str, Any] = {
        "same_tokens_in_company": sum(one.tokens == two.tokens for one, two in pairs),
        "same_logprobs_in_company": sum(one.logprobs == two.logprobs for one, two in pairs),
        "plain trainer": difference(said(rollouts), judge.logprobs(b.model(), rollouts, asked, dtype="auto")),
    }
    b.save("deterministic", {"samples": len(rollouts), **found, "server": facts}, done=False)
    matched = judge.logprobs(b.model(), rollouts, asked, dtype="auto", matched=True)
    found["matched trainer"] = difference(said(rollouts), matched)
    if scored:
        found["engine's decode and prefill"] = difference(said(rollouts[:8]), scored)
        found["matched trainer and engine's prefill"] = difference(scored, matched[:8])
    b.save("deterministic", {"samples": len(rollouts), **found, "server": facts}, done=False)
    found["gradient"] = judge.gradients(b.model(), rollouts[:4], asked)
    b.save("deterministic", {"samples": len(rollouts), **found, "server": facts}, done=True)


async def _scored(url: str, prompts: list[list[int]], rollouts: list[Any]) -> list[np.ndarray]:
    """The engine's log-probs of responses that it is given as prompts, in one prefill each."""
    found = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        for prompt, rollout in zip(prompts, rollouts, strict=True):
            response = np.frombuffer(rollout.response.tokens, np.int32).tolist()
            body = {
                "input_ids": prompt + response, "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True, "logprob_start_len": 0,
            }  # fmt: skip
            async with http.post(f"{url}/generate", json=body) as answer:
                pairs = (await answer.json())["meta_info"]["input_token_logprobs"]
            found.append(np.array([pair[0] for pair in pairs[-len(response) :]], np.float32))
    return found
