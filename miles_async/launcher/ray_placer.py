"""The placer of a Ray cluster: the run's actors are children of actors of Ray's (ray_host.py), which have seats (ray_seats.py).

Ray places and watches, nothing else: orders and exit statuses go through it, no data of the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

import msgspec
from ray.exceptions import ActorDiedError, RayActorError

from actors.runtime.context import ActorSpec
from actors.runtime.run import EXIT_DONE, EXIT_DRAINED
from bus.messages.events import EventKind
from miles_async.launcher.place import Place
from miles_async.launcher.ray_cluster import has_gpus
from miles_async.launcher.ray_seats import CLOSE_S, Group, Seat, Seats
from miles_async.launcher.ray_units import parts_of, units_of
from miles_async.launcher.supervisor import AGAIN_S, End, Process, environment_of
from miles_async.settings.errors import SettingsError
from miles_async.settings.run import RunSettings

PART_NOTICE_S = 5.0  # from the end of one part of an actor to its own
LOST = "Ray ended what kept it on its node (its memory monitor does so; ray list actors --detail says why)"
Alone = Callable[[Collection[str], Collection[str]], Awaitable[None]]
LEFT_ALONE_S = 5.0  # a worker that somebody asked to end: its node may be about to go
PASSED = ("MILES_ASYNC_", "PYTHONPATH", "WANDB_", "MLFLOW_", "OTEL_")  # variables of the launcher that actors need


class RayProcess:
    """Parts of one actor at their seats; the first is the actor itself. `failed`: the seat at which it could not start. See
    supervisor.Process."""

    def __init__(self, group: Group, parts: list[tuple[Seat, str]], failed: Seat | None = None) -> None:
        self.group, self.parts, self.failed = group, parts, failed
        self.alive = bool(parts)

    def ask_to_end(self) -> None:
        for seat, name in self.parts[:1]:
            seat.handle.end.remote(name, -1.0)

    async def stop(self, patience_s: float) -> bool:
        obeyed = True
        for at, (seat, name) in enumerate(self.parts):  # the first sends the others home
            wait_s = 0.0 if at else patience_s
            try:
                obeyed &= await asyncio.wait_for(seat.handle.end.remote(name, wait_s), wait_s + CLOSE_S) or at > 0
            except RayActorError:
                continue
            except TimeoutError:  # its node does not answer, and Ray has not noticed yet
                obeyed = False
        return obeyed


class RayPlacer:
    """See supervisor.Placer. The driver is connected (ray_cluster.connect). `threads`: CPU threads by role. `alone`: refuses where
    actors of these names live that are not among those kept here (ray_strangers.py)."""

    def __init__(self, settings: RunSettings, place: Place, threads: Mapping[str, int], alone: Alone) -> None:
        self._alone = alone
        self._settings, self._run_dir, self._threads = settings, Path(place.run_dir), threads
        self._memory = str(Path(place.weights_dir).parent)
        self._specs: dict[str, ActorSpec] = {}
        self.notes: list[tuple[EventKind, str]] = []
        self._seats = Seats(settings, place, self.notes)

    def add(self, spec: ActorSpec) -> None:
        self._specs[spec.name] = spec

    async def open(self) -> None:
        actors = [(spec.name, spec.role) for spec in self._specs.values()]
        await self._seats.open(units_of(self._settings, actors, gpus=await has_gpus()))
        try:
            await self._alone(self._specs, await self._seats.names())
        except SettingsError:
            await self._seats.withdraw()
            raise

    async def follow(self, stop: asyncio.Event) -> None:
        await self._seats.follow(stop)

    async def close(self) -> None:
        await self._seats.close()

    async def place(self, spec: ActorSpec) -> None:
        await self._seats.take(spec.name)

    async def start(self, spec: ActorSpec) -> Process:
        group, at = self._seats.of(spec.name)
        file = str(self._run_dir / "actors" / f"{spec.name}.json")
        mark = hashlib.blake2b(msgspec.json.encode(spec), digest_size=16).hexdigest()
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        environment = environment_of(spec.role, self._threads) | passed
        folders = [self._memory] if spec.role == "trainer" else []
        words: tuple[str, ...] = (f"actors.{spec.role}", file)
        parts = [(at, spec.name, words, environment)]
        seats: list[tuple[Seat, str]] = []
        seat: Seat | None = None
        try:
            seat = group.seats[at]
            if len(bundles := group.unit.bundles_of(spec.name)) > 1:
                meeting = f"{seat.facts['address']}:{await seat.handle.port.remote()}"
                told, others = parts_of(self._settings, spec.name, spec.role, meeting, bundles)
                spec = msgspec.structs.replace(spec, room=spec.room | told)
                parts += [(p.bundle, p.name, (p.module, file, *p.words), environment | p.variables) for p in others]
            files = {file: msgspec.json.format(msgspec.json.encode(spec), indent=2).decode()}
            for one, name, words, own in parts:
                seat = None  # of one that is gone already there is nothing to tell
                seat = group.seats[one]
                call = seat.handle.start.remote(name, mark, words, files, folders, own, spec.drain_timeout_s + 5.0)
                how, pid = await call
                seats.append((seat, name))
                if how != "started":
                    why = "still runs" if how == "adopted" else "ran with other settings or of another release"
                    self.notes.append((EventKind[how.upper()], f"{name} (pid {pid} on {seat.facts['address']}) {why}"))
        except (RayActorError, KeyError):  # a seat is lost: the end of this process, which is near, says so
            await RayProcess(group, seats).stop(0.0)
            return RayProcess(group, [], failed=seat)
        return RayProcess(group, seats)

    async def end_of(self, spec: ActorSpec, process: Process) -> End:
        assert isinstance(process, RayProcess)
        group, log = process.group, str(self._run_dir / "logs" / f"{spec.name}.log")
        if not process.parts:
            return End(None, [LOST], log, await self._seats.lost(group, process.failed))
        waits = [asyncio.ensure_future(_wait(seat, name)) for seat, name in process.parts]
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if waits[0] not in done:  # one of the others: the actor itself hears of it by a connection
            await asyncio.wait(waits[:1], timeout=PART_NOTICE_S)
        process.alive = False
        first = min(waits.index(one) for one in done)
        for wait, (seat, name) in zip(waits, process.parts, strict=True):
            if not wait.done():
                await RayProcess(group, [(seat, name)]).stop(0.0)
        await asyncio.wait(waits)
        seat, name = process.parts[first]
        found = waits[first].result()
        if found is None:
            return End(None, [LOST], log, await self._seats.lost(group, seat))
        code, lines = found
        if group.leaving:
            return End(code, lines, log, group.leaving)
        if first and code in (0, EXIT_DONE, EXIT_DRAINED):
            code = None  # a part that left while it was needed
        if code == EXIT_DRAINED and spec.role == "generation":
            await asyncio.sleep(LEFT_ALONE_S)
            return End(code, lines, log, "somebody asked it to end")
        return End(code, lines, log)


async def _wait(seat: Seat, name: str) -> tuple[int | None, list[str]] | None:
    """Exit status and last lines; None when the seat is lost."""
    while True:
        try:
            code, lines = await seat.handle.wait.remote(name)
            return code, lines
        except ActorDiedError:
            return None
        except RayActorError:  # its node does not answer: Ray will know whether it is gone
            await asyncio.sleep(AGAIN_S)
