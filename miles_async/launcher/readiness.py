"""What a host has of what a run needs: one finding each, with what its absence costs and what to do.

    miles-async doctor --preflight CONFIG [FLAGS]

Reads versions of installed packages, files and limits, asks nvidia-smi and the addresses that the settings name. Loads neither
torch nor a model, starts nothing, and leaves nothing behind but a probe key in a Redis of yours, which expires.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from actors.generation.engines.records import DEFAULT
from actors.kinds import HostFacts
from actors.runtime.smi import of_gpus
from bus.client import connect
from bus.errors import BusRefused, BusUnreachable
from bus.server.binary import find_server
from bus.server.checks import ServerFacts, check_server
from miles_async.console.text import human_bytes
from miles_async.launcher.hooks import PROBES
from miles_async.launcher.memory import parameters
from miles_async.launcher.preflight import preflight
from miles_async.launcher.prepare import open_files_needed
from miles_async.settings.errors import SettingsError
from miles_async.settings.redis_need import redis_need
from miles_async.settings.run import RunSettings

Level = Literal["ok", "note", "wrong"]
MEGATRON, ENGINE_FOR_TORCH = "0.16.1", ("2.11", "2.12")
ANSWER_S = 3.0


class Finding(NamedTuple):
    """`text`: the fact; where something is amiss also what it costs, and the remedy."""

    level: str
    what: str
    text: str


def look(s: RunSettings) -> list[Finding]:
    """All findings, in the order of a start."""
    return [one for check in CHECKS for one in check(s)]


def settings(s: RunSettings) -> Iterator[Finding]:
    """Model directory, data, layout, memory: what a start checks itself."""
    try:
        found = preflight(s, probes=PROBES, dry_run=True)
    except SettingsError as error:
        yield from (Finding("wrong", "settings", str(one)) for one in error.each)
        return
    yield Finding("ok", "settings", f"{found.prompts.rows} prompts")
    yield from (Finding("note", "settings", note) for note in found.notes)


def gpus(s: RunSettings) -> Iterator[Finding]:
    there, kind = gpu_names(), s.flat.engine_kind
    engines = kind.needs_gpu
    trains = not s.launch.debug_rollout_only
    own = set(range(s.perf.actor_num_gpus_per_node)) if trains else set()
    need = len(own | set(s.sglang.rollout_gpu_ids)) if engines else len(own)
    if len(there) >= need and there:
        yield Finding("ok", "gpus", f"{len(there)} ({', '.join(sorted(set(there)))}), {need} needed")
    elif engines:
        remedy = f"use fewer (--rollout-num-gpus, --actor-num-gpus-per-node, --colocate), or --engine {DEFAULT.name} on a CPU"
        yield Finding("wrong", "gpus", f"{len(there)} here, {need} needed: {kind.title or kind.name} does not start; {remedy}")
    elif there:
        yield Finding("wrong", "gpus", f"{len(there)} here, {need} needed: ranks do not start; lower --actor-num-gpus-per-node")
    else:
        yield Finding("note", "gpus", "none: everything runs on the CPU, which is for small models")


def kernels(s: RunSettings) -> Iterator[Finding]:
    """torch and what its trainer, Megatron and SGLang compute with."""
    torch, cuda = version("torch"), _cuda_of_torch()
    on_gpu = bool(gpu_names())
    if on_gpu and not cuda:
        yield Finding("wrong", "torch", f"{torch} is built for CPUs: no GPU is used; install torch's CUDA build")
    else:
        yield Finding("ok", "torch", f"{torch}{f', CUDA {cuda}' if cuda else ''}")
    if s.flat.on_megatron:
        yield from _megatron(s, torch, on_gpu)
    elif on_gpu and s.flat.train_backend in ("torch", "fsdp"):
        if util.find_spec("sgl_kernel") is not None:
            yield Finding("ok", "attention", f"FlashAttention 3 of sgl-kernel {version('sgl-kernel')}, torch's own backward")
        else:
            yield Finding("note", "attention", "no sgl-kernel, so torch's FlashAttention 2: a step takes about 8 % longer at 0.6B "
                          "on an H200; install miles-async[sglang] beside. The flash-attn package would add nothing")  # fmt: skip
    yield from (Finding(*lack) for lack in s.flat.engine_kind.findings(s.flat, HostFacts(version, human_bytes, len(gpu_names()))))
    if on_gpu and (s.flat.train_ranks > 1 or s.flat.transport_kind.broadcasts):
        nccl = next((found for n in (13, 12) if (found := version(f"nvidia-nccl-cu{n}"))), "")
        other = "the system's: versions must be alike on all hosts"
        yield Finding("ok" if nccl else "note", "nccl", nccl or f"no nvidia-nccl package beside torch, so {other}")


def _megatron(s: RunSettings, torch: str, on_gpu: bool) -> Iterator[Finding]:
    core = version("megatron-core")
    if core != MEGATRON:
        said = f"{core} is installed" if core else "not installed"
        yield Finding("wrong", "megatron-core", f"{said}: the trainer does not start; pip install 'megatron-core=={MEGATRON}'")
    else:
        yield Finding("ok", "megatron-core", core)
    if not on_gpu:
        return
    engine = version("transformer-engine-torch") or version("transformer-engine")
    if not engine:
        level: Level = "wrong" if s.parallel.context_parallel_size > 1 else "note"
        yield Finding(level, "transformer-engine", "not installed: layers run as plain torch, unfused; no context parallelism, "
                      "grouped experts, fused rotations or precision-aware optimizer; "
                      "install transformer-engine[pytorch,core_cu13]==2.12.0 for torch 2.11")  # fmt: skip
    elif torch.startswith(ENGINE_FOR_TORCH[0]) and not engine.startswith(ENGINE_FOR_TORCH[1]):
        text = f"{engine} with torch {torch}: 2.14 to 2.17 want newer cuBLAS or cuDNN than it brings; 2.12.0 was tried"
        yield Finding("note", "transformer-engine", text)
    else:
        yield Finding("ok", "transformer-engine", engine)


def memory(s: RunSettings) -> Iterator[Finding]:
    """Host memory, shared memory, disk: bytes of a run at its largest."""
    weights = 2 * parameters(_model(s)).total
    shm = Path("/dev/shm")
    if weights and shm.is_dir() and s.flat.transport_kind.whole:
        yield _room("shared memory", shutil.disk_usage(shm).free, 4 * weights, "two versions of the weights, in float32",
                    "versions are published on the disk, which is slower; docker run --shm-size=", "note")  # fmt: skip
    if weights and not s.ckpt.no_save:
        each = weights // 2 * (4 if s.ckpt.no_save_optim else 14 if s.flat.on_megatron else 12)
        target = _existing(Path(s.ckpt.save))
        free = shutil.disk_usage(target).free
        tight = free < 2 * each
        what = f"{s.ckpt.keep_last} checkpoints and the one under way in {target}"
        cost = "the first saves fail" if tight else "later saves fail"
        yield _room("disk", free, (s.ckpt.keep_last + 1) * each, what, f"{cost}; lower --keep-last, add --no-save-optim, or choose "
                    "another --save", "wrong" if tight else "note")  # fmt: skip
    wants = redis_need(s.flat).n_bytes
    what = f"the bus with {s.flat.max_open_groups} open groups and those since a checkpoint, every answer at its longest"
    if s.bus.bus_url is None:
        yield _room("bus memory", psutil.virtual_memory().available, wants, what, "the server is killed or waits; lower "
                    "--max-weight-staleness or --save-interval", "note")  # fmt: skip


def bus(s: RunSettings) -> Iterator[Finding]:
    if s.bus.bus_url is None:
        try:
            server = find_server()
        except BusRefused as error:
            yield Finding("wrong", "bus", str(error))
        else:
            yield Finding("ok", "bus", f"{server.path} {'.'.join(map(str, server.version))}, started with the run")
        return
    try:
        facts, warnings = asyncio.run(_ask(s.bus.bus_url))
    except (BusRefused, BusUnreachable) as error:
        yield Finding("wrong", "bus", str(error))
        return
    yield from (Finding("note", "bus", warning) for warning in warnings)
    if facts.max_memory:
        wants = redis_need(s.flat).n_bytes
        yield _room("bus memory", facts.max_memory, wants, "every answer at its longest", "writers wait for space; "
                    "raise its maxmemory, or lower --max-weight-staleness or --save-interval", "note")  # fmt: skip
    else:
        yield Finding("ok", "bus", f"{facts.software} {'.'.join(map(str, facts.number))} answers, no maxmemory")


def limits(s: RunSettings) -> Iterator[Finding]:
    need, (_, hard) = open_files_needed(s), resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        text = f"{hard} a process, {need} needed (a connection per request): ulimit -n {max(4096, need)}"
        yield Finding("wrong", "open files", text)
    else:
        yield Finding("ok", "open files", f"{need} needed, {'no limit' if hard == resource.RLIM_INFINITY else hard} allowed")


def addresses(s: RunSettings) -> Iterator[Finding]:
    """Ports to be bound here, and servers of others that must answer."""
    for flag, value in (("train_master", s.perf.train_master), ("weights_address", s.bus.weights_address)):
        host, _, port = (value or "").rpartition(":")
        if not port.isdecimal():
            continue
        try:
            with socket.create_server((host, int(port))):
                yield Finding("ok", "port", f"{flag} {value} is free here")
        except OSError as error:
            why = f"{flag} {value} cannot be bound: {error.strerror or error}"
            yield Finding("wrong", "port", f"{why}; it must be an address of this host, at a free port")
    urls = (*s.sglang.rollout_external_engine_addrs, *s.rollout.rm_url, *filter(None, (s.rollout.judge_url,)))
    for url in urls:
        host, _, port = url.partition("://")[-1 if "://" in url else 0].partition("/")[0].rpartition(":")
        if not port.isdecimal():
            host, port = host or port, "443" if url.startswith("https") else "80"
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S):
                yield Finding("ok", "address", f"{url} answers")
        except OSError as error:
            yield Finding("wrong", "address", f"{url} does not answer: {error.strerror or error}; start it, or correct the address")


CHECKS: tuple[Callable[[RunSettings], Iterator[Finding]], ...] = (settings, gpus, kernels, memory, bus, limits, addresses)


def version(package: str) -> str:
    """Of an installed package, empty without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def gpu_names() -> list[str]:
    """Of the GPUs that a process started here sees."""
    names = [name for name, *_ in of_gpus("name")]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if chosen is None else names[: sum(word.strip() not in ("", "-1") for word in chosen.split(","))]


def _cuda_of_torch() -> str:
    """CUDA that torch is built for, read without loading it."""
    spec = util.find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else Path()
    said = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", file.read_text(), re.M) if file.is_file() else None
    return said[1] if said else ""


def _room(what: str, free: int, need: int, holds: str, otherwise: str, level: Level) -> Finding:
    text = f"{human_bytes(free)} free, {human_bytes(need)} for {holds}"
    return Finding("ok", what, text) if free >= need else Finding(level, what, f"{text}: {otherwise}")


def _model(s: RunSettings) -> Path:
    return Path(s.model.hf_checkpoint)


def _existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.is_dir())


async def _ask(url: str) -> tuple[ServerFacts, tuple[str, ...]]:
    async with connect(url) as client:
        return await check_server(client, url=url, deadline_s=ANSWER_S)
