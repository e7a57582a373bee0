"""Weight updates of gpu_bench.py: disk, CUDA IPC and NCCL, each through bus and worker, idle and under full load.

Pause is from the first call of an activation to the answer of the last one, as the worker measures it: what running samples
feel. Prepare is what the trainer does before, while engines go on.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from actors.generation.engines.sglang.client import SGLangClient
from bus import Out
from bus.messages.policy import Sending, WeightManifest
from bus.messages.versions import PolicyVersion
from bus.messages.weights import Bucket
from bus.plans import put_plan
from bus.topology import POLICY
from scripts.bench import gpu_judge as judge
from scripts.bench import gpu_parts as parts

Prepare = Callable[[int], Awaitable[WeightManifest]]


async def _measure(
    b: Any, house: parts.House, url: str, prepare: Prepare, name: str, *, first: int
) -> tuple[dict[str, Any], list[Any]]:
    """`updates` activations with nothing running, then as many under full load, in two ways to pause. `prepare(number)` makes the
    manifest. Also the samples that were running."""
    a = b.args
    number = first
    rows: dict[str, list[dict[str, float]]] = {load: [] for load in a.loads}
    told = len(await house.events("activated"))
    loaded: asyncio.Task[Any] | None = None
    rollouts: list[Any] = []
    n = len(_asked(b))
    for mode, times in rows.items():
        if mode != "idle":
            rollouts += [] if loaded is None else [rollout for _, rollout in await loaded]
            await house.feed(f"{name}-{mode}", _asked(b), a.new_tokens)
            loaded = asyncio.create_task(house.collect(n, 400))
            await asyncio.sleep(2.0)
        for _ in range(a.updates):
            began = time.monotonic()
            what = await prepare(number)
            prepared = time.monotonic() - began
            await house.order(number, what, "in_place" if mode == "in_place" else "retract")
            if what.transport != "disk":
                await _send(house, number)
            told += 1
            event = (await house.wait_for("activated", told, 120))[-1]
            times.append({"prepare_s": round(prepared, 5), **{key: event.data[key] for key in ("pause_s", "total_s", "requests")}})
            number += 1
            await asyncio.sleep(0.2 if mode == "idle" else 1.0)
    rollouts += [] if loaded is None else [rollout for _, rollout in await loaded]
    found = {
        "updates": rows,
        **{
            f"median_pause_{mode}_s": statistics.median(row["pause_s"] for row in times[1:] or times)
            for mode, times in rows.items()
        },
        "first_pause_s": rows["idle"][0]["pause_s"],
        "samples": len(rollouts),
        "samples_across_versions": sum(len(r.response.spans) > 1 for r in rollouts),
    }
    return found, rollouts


def _asked(b: Any) -> list[list[int]]:
    return parts.prompts(3 * b.args.concurrent, b.args.prompt_tokens, b.vocab, 5)


async def _send(house: parts.House, number: int) -> None:
    """The trainer's word, once the worker is ready: what Courier says."""
    async with asyncio.timeout(120):
        while all(e.data["version"] != number for e in await house.events("ready to receive")):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    version = PolicyVersion(id=number, step=number)
    await house.bus.append([Out(POLICY, Sending(version=version, workers=("generation-0",)))])


def _median(rows: list[dict[str, float]]) -> float:
    return statistics.median(row["pause_s"] for row in rows)


async def checksum(url: str) -> dict[str, Any]:
    """The engine's own checksums; empty where it has none."""
    client = SGLangClient(url, request_deadline_s=60, token_deadline_s=60, control_deadline_s=60)
    try:
        return dict(await client.weights_checksum())
    except Exception as error:  # noqa: BLE001 - an older engine has no such call; the result says so
        return {"unavailable": str(error)[:200]}
    finally:
        await client.close()


async def disk(b: Any) -> None:
    """Files in shared memory."""
    models = [b.model(0), b.model(1)]
    n_bytes = parts.manifest(models[0]).n_bytes
    write_s = await asyncio.to_thread(_write_time, models[0], Path(b.args.models) / "written")

    async def prepare(number: int) -> WeightManifest:
        return parts.manifest(models[number % 2])

    async with (
        b.server(models[0], "disk") as (url, facts),
        parts.house(b.scratch / "disk", concurrent=b.args.concurrent) as house,
    ):
        await _worker(house, url, models[0], facts)
        found, _ = await _measure(b, house, url, prepare, "disk", first=2)
    rate = round(n_bytes / found["median_pause_idle_s"])
    b.save("disk", {"n_bytes": n_bytes, "write_s": write_s, **found, "bytes_per_s": rate, "server": facts}, done=True)


async def _worker(house: parts.House, url: str, model: Path, facts: dict[str, Any]) -> None:
    await house.worker("generation-0", engine="external", engine_url=url, inside=facts["inside"])
    await house.wait_for("joined", 1, 60)
    await house.order(1, model)
    await house.wait_for("activated", 1, 60)


def _write_time(model: Path, target: Path) -> float:
    """Seconds to write the weights once, as the trainer does, with their checksum."""
    from safetensors.torch import load_file

    from actors.trainer.transports.files import copied
    from actors.trainer.transports.flat import bucketed

    tensors = load_file(model / "model.safetensors")
    shutil.rmtree(target, ignore_errors=True)
    began = time.monotonic()
    copied(bucketed(tensors.items()), {}, target).finish()
    seconds = time.monotonic() - began
    shutil.rmtree(target, ignore_errors=True)
    return round(seconds, 3)


def _copy_time(tensors: dict[str, Any], target: str) -> float:
    """Seconds of a plain copy of the same bytes to a device, the best of five."""
    import torch

    n_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    source = torch.empty(n_bytes, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    into = torch.empty(n_bytes, dtype=torch.uint8, device=target)
    best = 1e9
    for _ in range(5):
        torch.cuda.synchronize(source.device)
        began = time.monotonic()
        into.copy_(source)
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(into.device)
        best = min(best, time.monotonic() - began)
    return best


def _versions(b: Any, device: str) -> list[dict[str, Any]]:
    """Two versions of the weights on a device, as a trainer holds them."""
    from safetensors.torch import load_file

    return [load_file(b.model(seed) / "model.safetensors", device=device) for seed in (0, 1)]


async def ipc(b: Any) -> None:
    """CUDA IPC with trainer and engine on one GPU; then the engine's checksums against those after a load from disk."""
    from actors.trainer.transports.flat import FlatBuffers, bucketed
    from actors.trainer.transports.ipc import IpcSender

    device = "cpu" if b.args.engine == "embedded" else f"cuda:{b.args.gpu}"
    async with (
        b.server(b.model(0), "ipc") as (url, facts),
        parts.house(b.scratch / "ipc", concurrent=b.args.concurrent) as house,
    ):
        await _worker(house, url, b.model(0), facts)
        versions = await asyncio.to_thread(_versions, b, device)
        buffers = FlatBuffers(shared=b.scratch / "ipc-flat")
        sender = IpcSender(buffers=buffers)

        async def prepare(number: int) -> WeightManifest:
            await asyncio.to_thread(buffers.fill, bucketed(versions[number % 2].items(), b.args.bucket_mib << 20))
            return await put_plan(house.bus, await asyncio.to_thread(sender.plan))

        found, _ = await _measure(b, house, url, prepare, "ipc", first=2)
        last = 1 + len(b.args.loads) * b.args.updates
        found |= {"bucket_mib": b.args.bucket_mib, **await _verify(b, house, url, last)}
        n_bytes = parts.manifest(b.model(0)).n_bytes
        copy_s = _copy_time(versions[0], device) if device != "cpu" else None
        b.save("ipc", {"n_bytes": n_bytes, "plain_copy_s": copy_s, **found, "server": facts}, done=False)
        if "loaded" in b.args.loads:
            found["parts"] = await _parts_of_a_pause(b, url, sender.plan().buckets)
        sender.close()
    rate = round(n_bytes / found["median_pause_idle_s"])
    b.save(
        "ipc",
        {
            "n_bytes": n_bytes,
            "plain_copy_s": copy_s,
            **found,
            "bytes_per_s": rate,
            "server": facts,
        },
        done=True,
    )


async def _parts_of_a_pause(b: Any, url: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
    """Seconds of each call of a pause, medians: by SGLang's own loader and by ours, idle and with requests at work."""
    client = SGLangClient(url, request_deadline_s=60, token_deadline_s=60, control_deadline_s=60)
    await client.info()
    rows: dict[str, Any] = {"any_call": [], "own loader, idle": [], "our loader, idle": []}

    async def update(quick: bool) -> None:
        for bucket in buckets:
            await client.update_weights_from_tensor(bucket.handles, None, bucket.quick if quick else ())

    async def timed(**calls: Callable[[], Awaitable[Any]]) -> dict[str, float]:
        row = {}
        for name, call in calls.items():
            began = time.monotonic()
            await call()
            row[name] = time.monotonic() - began
        return row | {"all": sum(row.values())}

    async def retract() -> None:
        await client.pause("retract")

    async def in_place() -> None:
        await client.pause("in_place")

    for _ in range(7):
        rows["any_call"].append(await timed(call=lambda: client.set_version("parts")))
        for quick in (False, True):
            row = await timed(pause=retract, update=lambda quick=quick: update(quick), resume=client.resume)
            rows[f"{'our' if quick else 'own'} loader, idle"].append(row)
    n = b.args.concurrent
    for name, calls in {
        "loaded, retract and abort": {"pause": retract, "abort": client.abort_all},
        "loaded, in place": {"pause": in_place},
    }.items():
        rows[name] = []
        for _ in range(2):
            asked = parts.prompts(n, b.args.prompt_tokens, b.vocab, 3)
            load = asyncio.create_task(parts.bare_loop(url, asked, new_tokens=1024, concurrent=n, stream=True))
            await asyncio.sleep(1.5)
            rows[name].append(await timed(**calls, update=lambda: update(True), resume=client.resume))
            await client.abort_all()
            await load
    await client.close()
    return {name: {call: round(statistics.median(row[call] for row in of), 5) for call in of[0]} for name, of in rows.items()}


async def _verify(b: Any, house: parts.House, url: str, last: int) -> dict[str, Any]:
    """Whether the engine holds, tensor by tensor, what a load of the same version from disk gives."""
    pushed = await checksum(url)
    told = len(await house.events("activated"))
    await house.order(last + 1, b.model(last % 2))
    await house.wait_for("activated", told + 1, 120)
    loaded = await checksum(url)
    if "unavailable" in loaded:
        return {"not_compared": loaded["unavailable"]}
    return {"tensors_compared": len(loaded), "equal_to_disk": pushed == loaded}


def _judged(b: Any, rollouts: list[Any]) -> dict[str, Any]:
    """Samples that updates in place met: whether each token before the first one is of the version that its span names, and
    the next one is not. What follows has keys of several versions and fits none."""
    asked = judge.asked_of("nccl-in_place", _asked(b))
    met = [r for r in rollouts if r.task.sample_id in asked and len(r.response.spans) > 1][:64]
    if not met:
        return {"samples_across_versions": 0}
    versions = [r.response.spans[0].version for r in met]
    seeds = [0 if version == 1 else version % 2 for version in versions]  # the first one is loaded from files, see _worker
    each = [judge.logprobs(b.model(seed), met, asked, dtype="auto") for seed in (0, 1)]
    own, other = ([each[seed ^ flip][i] for i, seed in enumerate(seeds)] for flip in (0, 1))
    found = judge.boundaries(met, own, other)
    return {key: found[key] for key in ("samples_across_versions", "tokens", "old_part", "crossings_seen")}


async def nccl(b: Any) -> None:
    """NCCL from the trainer's GPU to the engine's, on one host; over gloo where there is none."""
    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # before torch makes its first communicator
    import torch

    from actors.trainer.transports.flat import FlatBuffers, bucketed
    from actors.trainer.transports.nccl import NcclSender

    on_cpu = not torch.cuda.is_available()
    device, other = ("cpu", "cpu") if on_cpu else (f"cuda:{b.args.gpu}", f"cuda:{b.args.gpu + 1}")
    async with (
        b.server(b.model(0), "nccl", gpus=() if on_cpu else (b.args.gpu + 1,)) as (url, facts),
        parts.house(b.scratch / "nccl", concurrent=b.args.concurrent) as house,
    ):
        await _worker(house, url, b.model(0), facts)
        versions = await asyncio.to_thread(_versions, b, device)
        buffers = FlatBuffers()
        backend = "gloo" if on_cpu else "nccl"
        sender = NcclSender({"generation-0": 1}, name="bench", backend=backend, buffers=buffers)
        sending: list[asyncio.Task[None]] = []
        is_open = False

        def send() -> None:
            nonlocal is_open
            if not on_cpu:
                torch.cuda.set_device(device)
            if not is_open:
                sender.open()
                is_open = True
            sender.send()

        async def prepare(number: int) -> WeightManifest:
            for task in sending:
                await task
            sending.clear()
            await asyncio.to_thread(buffers.fill, bucketed(versions[number % 2].items(), b.args.bucket_mib << 20))
            made = await put_plan(house.bus, sender.plan())
            sending.append(asyncio.create_task(asyncio.to_thread(send)))
            return made

        found, rollouts = await _measure(b, house, url, prepare, "nccl", first=2)
        for task in sending:
            await task
        found |= {
            "bucket_mib": b.args.bucket_mib,
            **await _verify(b, house, url, 1 + len(b.args.loads) * b.args.updates),
        }
        n_bytes = parts.manifest(b.model(0)).n_bytes
        copy_s = None if on_cpu else _copy_time(versions[0], other)
        sender.close()
    rate = round(n_bytes / found["median_pause_idle_s"])
    result = {"n_bytes": n_bytes, "plain_copy_s": copy_s, **found, "bytes_per_s": rate, "server": facts}
    judged = "in_place" in b.args.loads
    b.save("nccl", result, done=not judged)
    if judged:
        result["boundary"] = await asyncio.to_thread(_judged, b, rollouts)
        b.save("nccl", result, done=True)
