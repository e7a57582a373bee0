"""What a host and the Redis use, every PERIOD_S, as news on the bus; the recorder keeps it. One actor of a run on each host looks.

Which one: who holds a socket of the run's name in Linux's abstract namespace, which goes with its process. Elsewhere the recorder
alone looks, at its own host. Nobody waits for these numbers: what cannot be read is left out.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from hashlib import sha256

import psutil

from actors.runtime.context import Context
from actors.runtime.deadline import within
from actors.runtime.smi import of_gpus
from bus import Out
from bus.errors import BusRefused
from bus.messages.control import Event
from bus.messages.events import EventKind
from bus.topology import EVENTS

FIRST_S, PERIOD_S = 2.0, 10.0
GPUS_EVERY_S = 30.0  # nvidia-smi costs a process; in between, what it said last
GPU_DEADLINE_S = 5.0
GPU_QUERY = {
    "utilization.gpu": ("util_share", 0.01),
    "memory.used": ("memory_bytes", 2.0**20),
    "power.draw": ("power_w", 1.0),
}
REDIS = "Redis"


class HostUsage:
    """Each look gives what is, and rates since the look before."""

    def __init__(self, directory: str) -> None:
        """`directory`: on the disk whose free space is told."""
        self._directory = directory
        self._gpus: dict[str, float] = {}
        self._gpus_at = 0.0
        self._before, self._busy = self._counters(), self._processors()
        self._at = time.monotonic()

    def look(self) -> dict[str, float]:
        """Blocks for some milliseconds, with GPUs for up to GPU_DEADLINE_S."""
        memory, now = psutil.virtual_memory(), time.monotonic()
        counters, passed = self._counters(), max(1e-3, now - self._at)
        rates = {f"{name}_bytes_s": max(0.0, (n - self._before.get(name, n)) / passed) for name, n in counters.items()}
        busy, every = self._processors()
        share = (busy - self._busy[0]) / max(1e-3, every - self._busy[1])
        self._before, self._at, self._busy = counters, now, (busy, every)
        if now >= self._gpus_at:
            self._gpus, self._gpus_at = gpu_usage(), now + GPUS_EVERY_S
        return {
            "cpu_share": min(1.0, max(0.0, share)),
            "memory_bytes": float(memory.total - memory.available),
            "disk_free_bytes": float(shutil.disk_usage(self._directory).free),
            **rates,
            **self._gpus,
        }

    @staticmethod
    def _processors() -> tuple[float, float]:
        """Seconds in use, and all of them. psutil's own share is counted by thread, and looks come from any."""
        times = psutil.cpu_times()._asdict()
        every = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))  # user holds them
        return every - times["idle"] - times.get("iowait", 0.0), every

    @staticmethod
    def _counters() -> dict[str, int]:
        nics = [nic for name, nic in psutil.net_io_counters(pernic=True).items() if name != "lo"]
        found = {"net_in": sum(nic.bytes_recv for nic in nics), "net_out": sum(nic.bytes_sent for nic in nics)}
        disk = psutil.disk_io_counters()
        return found | ({"disk_read": disk.read_bytes, "disk_write": disk.write_bytes} if disk is not None else {})


def gpu_usage(command: str = "nvidia-smi") -> dict[str, float]:
    """Of all GPUs of this host, `gpu0_util_share` and so on; nothing where there is none."""
    found = {}
    for number, row in enumerate(of_gpus(*GPU_QUERY, units=False, command=command, within_s=GPU_DEADLINE_S)):
        for (name, scale), cell in zip(GPU_QUERY.values(), row, strict=False):
            try:
                found[f"gpu{number}_{name}"] = float(cell) * scale
            except ValueError:
                continue  # [N/A]: the GPU does not tell
    return found


class RedisUsage:
    """As HostUsage, from what INFO says."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def of(self, told: Mapping[str, str], now: float) -> dict[str, float]:
        """`now`: seconds of a clock that does not turn back."""
        commands = float(told.get("total_commands_processed", "nan"))
        found = {
            "redis_memory_bytes": float(told.get("used_memory", "nan")),
            "redis_clients": float(told.get("connected_clients", "nan")),
        }
        if self._before is not None and commands >= self._before[0]:
            found["redis_commands_s"] = (commands - self._before[0]) / max(1e-3, now - self._before[1])
        self._before = commands, now
        return {name: value for name, value in found.items() if value == value}


def chosen(run: str) -> socket.socket | None:
    """Makes this process the one of its host that looks, as long as the socket is open; None where another one is."""
    mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mine.bind(f"\0miles-async-usage-{sha256(run.encode()).hexdigest()}")
    except OSError:
        mine.close()
        return None
    return mine


async def tell_usage(context: Context, over: asyncio.Event, *, first_s: float = FIRST_S, period_s: float = PERIOD_S) -> None:
    """Until `over`. Woken by time or the end."""
    recorder = context.spec.role == "recorder"
    if not recorder and sys.platform != "linux":
        return
    held = usage = None
    redis, pause_s = RedisUsage(), first_s
    try:
        while not over.is_set():
            if usage is None and (sys.platform != "linux" or (held := chosen(f"{context.bus.keys.vitals}-{context.spec.run_dir}"))):
                usage = await asyncio.to_thread(HostUsage, context.spec.run_dir or "/")
            if await within(pause_s, over):
                return
            pause_s = period_s
            try:
                if usage is not None:
                    await _tell(context, socket.gethostname(), await asyncio.to_thread(usage.look))
            except (OSError, psutil.Error) as error:
                context.log.warning("usage of this host not read: %s", error)
            if recorder:
                try:
                    info = await context.bus.server_info()
                except BusRefused:
                    recorder = False  # a server that does not let this user ask
                else:
                    await _tell(context, REDIS, redis.of(info, context.clock.monotonic()))
    finally:
        if held is not None:
            held.close()


async def _tell(context: Context, source: str, values: Mapping[str, float]) -> None:
    data = {"source": source, "values": {name: float(f"{value:.4g}") for name, value in values.items()}}
    event = Event(actor=context.name, kind=EventKind.USAGE, text=source, wall=context.clock.wall(), data=data)
    await context.bus.append([Out(EVENTS, event)], repeatable=True)
