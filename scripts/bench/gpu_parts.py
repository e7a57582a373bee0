"""What the steps of gpu_bench.py are made of: random models, a server, a bus with real actors, load, answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from actors.generation.engines.embedded.process import EngineProcess
from actors.generation.engines.sglang.server import SGLangServer
from actors.generation.spec import GenerationSpec
from actors.runtime.child import ArgValue, Child, free_port
from bus import Bus, BusConfig, Commit, Out, Reader
from bus.knobs.live import publish_initial
from bus.messages.active import Activate
from bus.messages.base import pack_ints
from bus.messages.control import Event
from bus.messages.policy import WeightManifest
from bus.messages.samples import RolloutDone, SampleTask, Sampling
from bus.messages.versions import PolicyVersion
from bus.server.embedded import EmbeddedRedis
from bus.topology import ACTIVE, EVENTS, PROMPTS, ROLLOUTS
from miles_async.launcher.prepare import live_kinds
from miles_async.settings.live import initial_values
from miles_async.settings.load import settings_from
from scripts.bench import REPO
from scripts.bench.declared import actor_of

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True, "torch_dtype": "float32",
        "max_position_embeddings": 4096,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "head_dim": 64, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip


def make_model(root: Path, shape: str, seed: int) -> Path:
    """A directory with random weights of a real shape, made once; nothing in it ends a sample early."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = root / f"{shape}-{seed}"
    if (directory / "model.safetensors").exists():
        return directory
    part = directory.with_name(f".{directory.name}-{os.getpid()}")
    part.mkdir(parents=True, exist_ok=True)
    (part / "config.json").write_text(json.dumps(QWEN3 | SHAPES[shape], indent=2))
    config = AutoConfig.from_pretrained(part)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if shape == "tiny" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(part, max_shard_size="100GB")
    (part / "config.json").write_text(json.dumps(QWEN3 | SHAPES[shape], indent=2))
    (part / "generation_config.json").unlink(missing_ok=True)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    try:
        part.rename(directory)
    except OSError:
        if not (directory / "model.safetensors").exists():
            raise
        shutil.rmtree(part)  # a bench beside us made the same
    return directory


def manifest(directory: Path) -> WeightManifest:
    """A directory as a published version, without a checksum (the bench made it itself)."""
    return WeightManifest(path=str(directory), n_bytes=(directory / "model.safetensors").stat().st_size)


# -- server --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def server(
    kind: str, model: Path, folder: Path, *, args: dict[str, ArgValue], max_running: int, gpus: Sequence[int] = ()
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """A ready server and facts about its start. kind: sglang or embedded (a rehearsal without a GPU)."""
    facts: dict[str, Any] = {"args": args, "events": []}

    async def report(kind: str, text: str, level: str = "info") -> None:
        print(f"{kind}: {text}", flush=True)
        facts["events"].append([kind, text])

    engine: SGLangServer | EngineProcess
    if kind == "embedded":
        engine = EngineProcess(GenerationSpec(model_path=str(model), max_running=max_running, boot_deadline_s=60.0), folder)
    else:
        spec = GenerationSpec(
            model_path=str(model), max_running=max_running, tp_size=max(1, len(gpus)), gpus=tuple(gpus), seed=1, server_args=args,
            boot_deadline_s=400.0,
        )  # fmt: skip
        engine = SGLangServer(spec, folder, report)
    began = time.monotonic()
    url = await engine.start()
    facts |= {"boot_s": round(time.monotonic() - began, 2), "note": engine.note, "pid": engine.pid}
    facts["inside"] = str(engine.inside or "")
    try:
        yield url, facts
    finally:
        await engine.stop()


# -- load without the bus ------------------------------------------------------------------------------------------


def lengths(n: int, mean: int, seed: int) -> list[int]:
    """New tokens of requests that end one by one, as real ones do: evenly from a quarter to seven quarters of the mean."""
    draw = random.Random(seed)
    return [draw.randint(max(1, mean // 4), mean * 7 // 4) for _ in range(n)]


def prompts(n: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, no two alike, so that no prefix is shared."""
    draw = random.Random(seed)
    return [[draw.randrange(10, vocab) for _ in range(length)] for _ in range(n)]


async def bare_loop(
    url: str,
    asked: list[list[int]],
    *,
    new_tokens: int | list[int],
    concurrent: int,
    stream: bool,
    headers: dict[str, str] | None = None,
) -> dict[str, float]:
    """The same requests by nothing but aiohttp. Tokens/s over all, from the first request to the last answer. `new_tokens`:
    of each request, or of all."""
    slots = asyncio.Semaphore(concurrent)
    lengths = new_tokens if isinstance(new_tokens, list) else [new_tokens] * len(asked)
    made = 0

    async def one(http: aiohttp.ClientSession, ids: list[int], length: int) -> None:
        nonlocal made
        sampling = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": stream}
        async with slots, http.post(f"{url}/generate", data=msgspec.json.encode(body)) as response:
            raw = await response.read()
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {raw[:300]!r}")
            if not stream:
                made += msgspec.json.decode(raw)["meta_info"]["completion_tokens"]
                return
            last = next(e for e in reversed(raw.split(b"\n\n")) if e.startswith(b"data: {"))
            made += msgspec.json.decode(last[6:])["meta_info"]["completion_tokens"]

    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    content = {"Content-Type": "application/json", **(headers or {})}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=content) as http:
        began = time.monotonic()
        await asyncio.gather(*(one(http, ids, length) for ids, length in zip(asked, lengths, strict=True)))
        seconds = time.monotonic() - began
    return {"tokens": made, "seconds": round(seconds, 3), "tokens_per_s": round(made / seconds, 1)}


# -- the house -----------------------------------------------------------------------------------------------------


@dataclass
class House:
    """A bus and the actors of one measurement."""

    bus: Bus
    folder: Path
    children: dict[str, Child] = field(default_factory=dict)
    _reader: Reader | None = None
    _seen: int = 0

    async def actor(self, name: str, role: str, room: Any) -> None:
        """Start a real actor process."""
        spec = actor_of(
            name=name,
            role=role,
            bus=self.bus.config,
            run_dir=str(self.folder),
            room=msgspec.to_builtins(room),
            heartbeat_s=0.5,
        )
        file = self.folder / f"{name}.json"
        file.write_bytes(msgspec.json.encode(spec))
        child = Child()
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
        }
        await child.start([sys.executable, "-m", f"actors.{role}", str(file)], self.folder / f"{name}.log", env)
        self.children[name] = child

    async def worker(self, name: str, **fields: Any) -> None:
        """A generation worker."""
        await self.actor(name, "generation", GenerationSpec(token_deadline_s=120.0, boot_deadline_s=400.0, **fields))

    async def order(self, number: int, directory: Path | WeightManifest, mode: str = "retract") -> None:
        """Tell all workers to serve a version."""
        what = directory if isinstance(directory, WeightManifest) else manifest(directory)
        await self.bus.append([Out(ACTIVE, Activate(version=PolicyVersion(id=number, step=number), manifest=what, mode=mode))])

    async def feed(self, name: str, asked: list[list[int]], new_tokens: int | Sampling, siblings: int = 1) -> None:
        """Samples for the workers, as the sampler appends them."""
        how = new_tokens if isinstance(new_tokens, Sampling) else Sampling(max_new_tokens=new_tokens)
        tasks = [
            SampleTask(
                sample_id=f"{name}.{i // siblings}/{i % siblings}", group_id=f"{name}.{i // siblings}", index=i % siblings,
                n_samples=siblings, prompt_id=f"{name}.{i // siblings}", prompt_tokens=pack_ints(ids),
                sampling=msgspec.structs.replace(how, seed=i),
            )
            for i, ids in enumerate(asked)
        ]  # fmt: skip
        for start in range(0, len(tasks), 128):
            await self.bus.append([Out(PROMPTS, task) for task in tasks[start : start + 128]])

    async def collect(self, n: int, deadline_s: float) -> list[tuple[float, RolloutDone]]:
        """The next `n` rollouts with the time each arrived, taken and acknowledged as the reward room does."""
        if self._reader is None:
            self._reader = Reader(self.bus, [ROLLOUTS], "reward", "bench")
            await self._reader.open()
        found: list[tuple[float, RolloutDone]] = []
        async with asyncio.timeout(deadline_s):
            while len(found) < n:
                entries = await self._reader.read(256, 0.5)
                now = time.monotonic()
                for entry in entries:
                    message = await self.bus.message(entry)
                    if not isinstance(message, RolloutDone):
                        raise RuntimeError(f"not a rollout: {message}")
                    found.append((now, message))
                if entries:
                    await self.bus.commit(Commit(ack=tuple(entries)))
                    self._reader.forget(entries)
                for name, child in self.children.items():
                    if not child.alive:
                        raise RuntimeError(f"{name} ended ({child.exit_code}): {(self.folder / f'{name}.log').read_text()[-800:]}")
        return found

    async def events(self, kind: str) -> list[Event]:
        """What was told so far."""
        entries = await self.bus.scan_all(EVENTS)
        found = [await self.bus.message(entry) for entry in entries]
        return [m for m in found if isinstance(m, Event) and m.kind == kind]

    async def wait_for(self, kind: str, n: int, deadline_s: float) -> list[Event]:
        """Until an event was told `n` times."""
        async with asyncio.timeout(deadline_s):
            while len(found := await self.events(kind)) < n:
                for name, child in self.children.items():
                    if not child.alive:
                        raise RuntimeError(f"{name} ended ({child.exit_code}): {(self.folder / f'{name}.log').read_text()[-800:]}")
                await asyncio.sleep(0.05)
        return found

    async def end(self) -> None:
        """End the actors, politely first."""
        if self._reader is not None:
            await self._reader.close()
        for child in self.children.values():
            if child.alive:
                os.kill(child.pid, signal.SIGTERM)
        for child in self.children.values():
            await child.stop(10.0)


@asynccontextmanager
async def house(folder: Path, *, concurrent: int, lease_s: float = 30.0, **knobs: Any) -> AsyncIterator[House]:
    """An embedded Redis, streams and knobs."""
    folder.mkdir(parents=True, exist_ok=True)
    redis = EmbeddedRedis(folder)
    await asyncio.to_thread(redis.start)
    try:
        settings = settings_from(
            hf_checkpoint="builtin:arithmetic", prompt_data="x.jsonl", num_rollout=1, rm_type="math",
            sglang_server_concurrency=concurrent,
        )  # fmt: skip
        async with Bus(BusConfig(url=redis.url, run=folder.name, lease_s=lease_s)) as bus:
            await bus.make_readers()
            await publish_initial(bus, initial_values(settings) | knobs, live_kinds())
            made = House(bus, folder)
            try:
                yield made
            finally:
                await made.end()
    finally:
        await asyncio.to_thread(redis.stop)


@asynccontextmanager
async def router(folder: Path, **flags: ArgValue) -> AsyncIterator[tuple[str, Child]]:
    """A sglang-router that takes requests."""
    from actors.router.launch import DEFAULTS, MODULE
    from actors.router.probe import answers
    from actors.runtime.child import command_line

    port = free_port(successors=1)
    child = Child()
    own: dict[str, ArgValue] = {n.replace("_", "-"): v for n, v in flags.items()}
    own |= {"host": "127.0.0.1", "port": port, "prometheus-port": port + 1}
    await child.start(command_line((sys.executable, "-m", MODULE), DEFAULTS | own), folder / "router.log")
    try:
        await until(lambda: answers("127.0.0.1", port), 30.0)
        yield f"http://127.0.0.1:{port}", child
    finally:
        await child.stop()


async def until(condition: Callable[[], Awaitable[Any]], deadline_s: float) -> Any:
    """The condition's first true value."""
    async with asyncio.timeout(deadline_s):
        while not (value := await condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return value


def facts_of_machine() -> dict[str, Any]:
    """Date, versions, GPU."""
    import datetime
    import platform

    from actors.generation.engines.sglang.boot_record import versions

    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: text for name, text in versions().items() if name not in ("executable", "kernel")},
    }
    try:
        import torch

        if torch.cuda.is_available():
            found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            found["cuda"] = torch.version.cuda
    except ImportError:
        pass
    return found | {"host_cpus": os.cpu_count(), "machine": platform.machine()}
