"""Memory given back, the conformance suite against a real server, and FP8 served: steps of gpu_bench.py."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from actors.generation.engines.sglang.client import SGLangClient
from scripts.bench import REPO, gpu_exact, gpu_publish
from scripts.bench import gpu_judge as judge
from scripts.bench import gpu_parts as parts

SAVER: dict[str, Any] = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
SUITE = ("test_answers", "test_control", "test_memory", "test_teacher", "test_load")


def _client(url: str) -> SGLangClient:
    return SGLangClient(url, request_deadline_s=60, token_deadline_s=60, control_deadline_s=60)


def _changes(b: Any, changes: dict[str, Any]) -> dict[str, Any]:
    return {} if b.args.engine == "embedded" else changes


async def _answers(url: str, asked: list[list[int]], new_tokens: int) -> list[Any]:
    """Greedy tokens and log-probs, one request after the other and none with another's keys: nothing else decides them."""
    found = []
    client = _client(url)
    await client.flush()
    await client.close()
    sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        for ids in asked:
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
            async with http.post(f"{url}/generate", json=body) as answer:
                meta = (await answer.json())["meta_info"]
            found.append([pair[:2] for pair in meta["output_token_logprobs"]])
    return found


def _used_bytes() -> int:
    """Memory of the GPU that is not free, whoever holds it."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


async def memory(b: Any) -> None:
    """Release and return: bytes, seconds, the same answers afterwards; new weights in between; then the conformance suite."""
    models = [b.model(0), b.model(1)]
    asked = parts.prompts(4, b.args.prompt_tokens, b.vocab, 21)
    n = min(64, b.args.new_tokens)
    seconds: dict[str, float] = {}
    used: dict[str, int] = {}

    async def timed(name: str, call: Callable[[], Awaitable[Any]]) -> None:
        began = time.monotonic()
        await call()
        seconds[name], used[name] = round(time.monotonic() - began, 4), _used_bytes()

    async with b.server(models[0], "memory", **_changes(b, SAVER)) as (url, facts):
        client = _client(url)
        before, first = await _answers(url, asked, n), await gpu_publish.checksum(url)
        used["serving"] = _used_bytes()
        await timed("pause", lambda: client.pause("abort"))
        await timed("release", client.release_memory)
        await timed("resume", client.resume_memory)
        await client.resume()
        after, back = await _answers(url, asked, n), await gpu_publish.checksum(url)
        await client.pause("abort")
        await timed("release again", client.release_memory)
        await timed("resume weights", lambda: client.resume_memory(["weights"]))
        await timed("update from disk", lambda: client.update_weights_from_disk(str(models[1]), "2"))
        await timed("resume the rest", lambda: client.resume_memory(["kv_cache", "cuda_graph"]))
        await client.resume()
        second, new = await gpu_publish.checksum(url), await _answers(url, asked, n)
        await client.pause("retract")
        await client.update_weights_from_disk(str(models[1]), "3")
        await client.resume()
        plain, again = await gpu_publish.checksum(url), await _answers(url, asked, n)
        await client.close()
    found = {
        "seconds": seconds, "used_bytes": used, "tokens_compared": sum(map(len, before)),
        "answers_equal_after_return": before == after, "checksums_equal_after_return": first == back,
        "answers_equal_after_return_and_update": new == again, "checksums_equal_after_return_and_update": second == plain,
        "tensors": len(plain), "checksum_unavailable": first.get("unavailable", ""), "server": facts,
    }  # fmt: skip
    b.save("memory", found, done=True)


async def conformance(b: Any) -> None:
    """tests/engine against a server of a small model, with every exactness it can be given."""
    if not (REPO / "tests" / "engine").is_dir():
        raise FileNotFoundError(f"conformance runs tests/engine, and {REPO} has no such folder; take tests along")
    from tests.engine.models import make_model

    folder = b.scratch / "conformance-models"
    shape = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    for seed, name in enumerate(("first", "second")):
        make_model("qwen3", folder / name, seed=seed, **shape)
    flags = SAVER | {
        "enable_deterministic_inference": True, "dtype": "bfloat16", "incremental_streaming_output": False,
        "stream_interval": 1, "cuda_graph_max_bs": 64, "disable_radix_cache": True,
    }  # fmt: skip
    async with b.server(folder / "first", "conformance", **_changes(b, flags)) as (url, facts):
        client = _client(url)
        await client.set_version("default")
        await client.close()
        env = {
            **os.environ,
            "MILES_ASYNC_TEST_ENGINE_URL": url,
            "MILES_ASYNC_TEST_ENGINE_MODEL": str(folder / "first"),
            "MILES_ASYNC_TEST_ENGINE_OTHER": str(folder / "second"),
            "MILES_ASYNC_TEST_ENGINE_INSIDE": facts["inside"],
        }
        words = ["-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider", "-W", "default"]
        files = [f"tests/engine/{name}.py" for name in SUITE]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, *files, cwd=REPO, env=env,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said = (await process.communicate())[0].decode(errors="replace")
    (b.out / "conformance.txt").write_text(said)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", said.splitlines()[-1])}
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", said, re.M)
    b.save("conformance", {"counts": counts, "failed": failed, "files": SUITE, "server": facts}, done=bool(counts))


def _fp8_directory(b: Any, seed: int) -> Path:
    """The bench's model of a seed as the trainer publishes it for engines that serve FP8."""
    import torch
    from safetensors.torch import load_file

    from actors.trainer.torch_backend.fp8 import quantized, scheme_of
    from actors.trainer.transports.files import copied
    from actors.trainer.transports.flat import bucketed

    source: Path = b.model(seed)
    target = source.with_name(f"{source.name}-fp8")
    if target.exists():
        return target
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    beside = source.with_name(f".{source.name}-fp8-config")
    beside.mkdir(exist_ok=True)
    (beside / "config.json").write_text(json.dumps(config, indent=2))
    scheme = scheme_of(beside)
    assert scheme is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = quantized(load_file(source / "model.safetensors", device=device), scheme)
    copied(bucketed(tensors.items()), {"config.json": json.dumps(config).encode()}, target).finish()
    shutil.rmtree(beside)
    return target


async def fp8(b: Any) -> None:
    """Published FP8: booted, updated from disk and by ipc, checksums against a boot's; the price in log-probs and tokens/s."""
    directories = [await asyncio.to_thread(_fp8_directory, b, seed) for seed in (0, 1)]
    os.environ["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] = "false"  # minutes; kernels are made when first used
    ids = parts.prompts(min(64, b.args.concurrent), b.args.prompt_tokens, b.vocab, 31)
    changes = _changes(b, {"load_format": "auto"})
    async with b.server(directories[0], "fp8", **changes) as (url, facts):
        client = _client(url)
        booted = await gpu_publish.checksum(url)
        rollouts = await gpu_exact.sampled(b, url, "fp8", ids, model=directories[0])
        sums = [await gpu_publish.checksum(url)]
        for directory in (directories[1], directories[0]):
            await client.pause("retract")
            await client.update_weights_from_disk(str(directory), "x")
            await client.resume()
            sums.append(await gpu_publish.checksum(url))
        asked = parts.prompts(2 * b.args.concurrent, b.args.prompt_tokens, b.vocab, 33)
        speed = await parts.bare_loop(url, asked, new_tokens=b.args.new_tokens, concurrent=b.args.concurrent, stream=False)
        pushed = {} if b.args.engine == "embedded" else await _push(b, client, url, directories[1])
        await client.close()
    await b.stop_server()
    trainer = judge.logprobs(b.model(0), rollouts, judge.asked_of("lp", ids), dtype="auto")
    b.save(
        "fp8",
        {
            "n_bytes": parts.manifest(directories[0]).n_bytes, "tensors": len(booted),
            "checksums_equal_to_boot": sums[0] == booted and sums[2] == booted, "versions_differ": sums[1] != booted,
            "checksums_of_ipc_equal_to_disk": {way: value == sums[1] for way, value in pushed.items()},
            "checksum_unavailable": booted.get("unavailable", ""),
            "difference": gpu_exact.difference(gpu_exact.said(rollouts), trainer), "tokens_per_s": speed["tokens_per_s"],
            "server": facts,
        },
        done=True,
    )  # fmt: skip


async def _push(b: Any, client: SGLangClient, url: str, directory: Path) -> dict[str, Any]:
    """Checksums after an FP8 version came by ipc, by SGLang's own loader and by ours (which is asked twice)."""
    from safetensors.torch import load_file

    from actors.trainer.transports.flat import FlatBuffers, bucketed
    from actors.trainer.transports.ipc import IpcSender

    buffers = FlatBuffers()
    buffers.fill(bucketed(load_file(directory / "model.safetensors", device=f"cuda:{b.args.gpu}").items()))
    sender = IpcSender(buffers=buffers)
    plan = sender.plan()
    await client.info()
    found = {}
    for way, times in (("own loader", 1), ("our loader", 2)):
        for _ in range(times):
            await client.pause("retract")
            for bucket in plan.buckets:
                quick = bucket.quick if way == "our loader" else ()
                await client.update_weights_from_tensor(bucket.handles, None, quick)
            await client.resume()
        found[way] = await gpu_publish.checksum(url)
    sender.close()
    return found
