"""Places of a run on a Ray cluster: a placement group for each unit, in it an actor of Ray's for each bundle (ray_host.py).

All of it is named (namespace miles_async-RUN) and outlives the launcher; the next one finds it. Always true: a unit that is needed
and has no place takes that of a worker that is not (`_make_room`), a node that Ray drains is left before it is gone, and a launcher
that cannot begin takes back what it asked for and nothing else.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.runtime.deadline import within
from bus.errors import printable
from bus.messages.events import EventKind
from miles_async import __version__
from miles_async.launcher.place import Place
from miles_async.launcher.ray_cluster import draining_nodes, free_resources, living_nodes, nodes_of
from miles_async.launcher.ray_host import Host
from miles_async.launcher.ray_units import Unit, no_room
from miles_async.launcher.supervisor import AGAIN_S, RunFailed
from miles_async.settings.checks import folders_of
from miles_async.settings.errors import SettingsError
from miles_async.settings.run import RunSettings

LOOK_S = 1.0
ROOM_AFTER_S = 3.0  # without a place, before a worker that is not needed makes room
CLOSE_S = 10.0


@dataclass(slots=True)
class Seat:
    """A bundle's actor of Ray's, and where it is."""

    handle: Any
    facts: dict[str, Any]


@dataclass(slots=True)
class Group:
    """A unit and what is seated of it. `ours`: this launcher asked for its place, which nobody had. `waits`: bundle without a place
    -> since when on the loop's clock. `leaving`: why its actors are moved, else empty."""

    unit: Unit
    ours: bool = False
    seats: dict[int, Seat] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waits: dict[int, float] = field(default_factory=dict)
    leaving: str = ""


class Seats:
    """Of one run. `notes`: (kind, text) for the operator."""

    def __init__(self, settings: RunSettings, place: Place, notes: list[tuple[EventKind, str]]) -> None:
        self._settings, self._place, self._notes = settings, place, notes
        self._prefix = f"miles_async/{settings.launch.name}/"  # no name of a run has a slash
        self._groups: dict[str, Group] = {}
        self._of: dict[str, tuple[Group, int]] = {}  # actor -> its unit and bundle
        self._wanting = asyncio.Event()  # a needed unit has no place
        self._enough = asyncio.Event()
        self._enough.set()

    def of(self, actor: str) -> tuple[Group, int]:
        """Its unit, and its bundle in that."""
        return self._of[actor]

    async def open(self, units: Iterable[Unit]) -> None:
        """Seat what is needed, or find it seated by an earlier launcher. SettingsError when there is no room in ray_wait_s."""
        for unit in units:
            group = self._groups[unit.name] = Group(unit)
            for at, bundle in enumerate(unit.bundles):
                self._of |= dict.fromkeys(bundle.actors, (group, at))
        await asyncio.to_thread(self._retire)
        needed = [group for group in self._groups.values() if group.unit.needed]
        seats: dict[asyncio.Future[Seat], Group] = {}
        wait_s = self._settings.launch.ray_wait_s
        try:
            for group in needed:  # in this order: the largest has the choice
                await self._make(group, 0)
            seats = {asyncio.ensure_future(self._seat(g, at)): g for g in needed for at in range(len(g.unit.bundles))}
            done, late = await asyncio.wait(seats, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.gather(*done)
            if not late:
                return
            names = {seats[one].unit.name for one in late}
            without = await self._unplaced(names)
            units = [group.unit for group in needed if group.unit.name in without]
            what = f"Ray has places for {', '.join(sorted(names))}, and has not started its processes there"
            remedy = "Raise it, or look what Ray's logs on those nodes say (ray logs)."
            if units:
                what = no_room(units, await nodes_of(), await free_resources())
                remedy = "Add nodes or ask for less; raise it for a cluster that grows by demand."
        except BaseException as error:  # also an interrupt: a group that waits for room would wait for ever
            await _ended(seats)  # first: what it still made would be in a group that is removed, and keep its name for ever
            await self.withdraw()
            if isinstance(error, RunFailed):
                raise SettingsError(str(error), field="launcher", value="ray") from None
            raise
        finally:
            await _ended(seats)
        await self.withdraw()
        raise SettingsError(what, field="ray_wait_s", value=wait_s, remedy=remedy)

    async def withdraw(self) -> None:
        """Give back what this launcher asked for; what an earlier one had placed goes on."""
        for group in self._groups.values():
            if group.ours:
                await asyncio.to_thread(self._remove, group)

    def _retire(self) -> None:
        """Placement groups of this run whose unit is gone, or is another now."""
        for found in ray.util.placement_group_table().values():
            name = str(found["name"])
            if not name.startswith(self._prefix) or found["state"] == "REMOVED":
                continue
            unit = name.removeprefix(self._prefix)
            bundles = [dict(one) for _, one in sorted(found["bundles"].items())]
            if unit not in self._groups or bundles != [one.resources for one in self._groups[unit].unit.bundles]:
                self._notes.append((EventKind.RETIRED, f"{unit} is not in the settings any more"))
                _free(name, unit, len(bundles))

    async def take(self, actor: str) -> None:
        """Until there is a place for it, and for all parts of it; may be cancelled. RunFailed when there never will be."""
        group, _ = self._of[actor]
        await self._forget_the_gone(group)
        while True:
            if not group.unit.needed:
                await self._enough.wait()
            seating = asyncio.gather(*(self._seat(group, one) for one in group.unit.bundles_of(actor)))
            yielding = asyncio.ensure_future(self._wanting.wait())
            try:
                if group.unit.needed:
                    await seating
                await asyncio.wait((seating, yielding), return_when=asyncio.FIRST_COMPLETED)
                if seating.done():
                    seating.result()
                    return
            finally:
                seating.cancel()
                yielding.cancel()
                await asyncio.gather(seating, yielding, return_exceptions=True)
            await asyncio.to_thread(self._remove, group)

    async def names(self) -> set[str]:
        """Actors that run where this cluster has placed them, also at places that are not taken yet; those of a place that does not
        answer too."""
        found = set[str]()
        for group in self._groups.values():
            for at, bundle in enumerate(group.unit.bundles):
                seat = group.seats.get(at)
                try:
                    handle = seat.handle if seat else await asyncio.to_thread(ray.get_actor, f"{group.unit.name}.{at}")
                    found |= set(await asyncio.wait_for(handle.names.remote(), CLOSE_S))
                except ValueError:  # nothing was placed there
                    continue
                except (RayActorError, TimeoutError):
                    found |= set(bundle.actors)
        return found

    async def _forget_the_gone(self, group: Group) -> None:
        """A seat without a process gives itself back after a while (ray_host.IDLE_S), also while its actor pauses after crashes."""
        for at, seat in list(group.seats.items()):
            try:
                await asyncio.wait_for(seat.handle.names.remote(), CLOSE_S)
            except TimeoutError:  # it is there as far as Ray knows; what is started on it finds out
                continue
            except RayActorError:
                if group.seats.get(at) is seat:
                    del group.seats[at]

    async def _seat(self, group: Group, at: int) -> Seat:
        """The bundle's actor of Ray's, once there is room for it."""
        while at not in group.seats:
            async with group.lock:  # who leaves is not to be seated at the same place
                handle = await self._make(group, at)
            group.waits.setdefault(at, asyncio.get_running_loop().time())
            try:
                folders = list(folders_of(self._settings, group.unit.name).values())
                facts = await handle.hello.remote(self._place.run_dir, self._place.engine_token, folders)
            except RayActorError as error:
                if isinstance(error, ActorDiedError) and error.actor_init_failed:
                    raise RunFailed(f"{group.unit.name} cannot be placed: {_line(error)}", status=2) from None
                await asyncio.sleep(AGAIN_S)
                continue
            if at in group.seats:  # somebody else of this bundle was first
                break
            self._check(group.unit, facts)
            group.waits.pop(at, None)
            group.seats[at] = Seat(handle, facts)
            gpus = f", GPUs {','.join(facts['gpus'])}" if facts["gpus"] else ""
            who = ", ".join(group.unit.bundles[at].actors) or f"part {at} of {group.unit.name}"
            self._notes.append((EventKind.PLACED, f"{who} on {facts['address']} (node {facts['node'][:8]}{gpus})"))
        return group.seats[at]

    async def _make(self, group: Group, at: int) -> Any:
        """As `_made`, to its end also when cancelled: what it makes late would be in a group that was removed meanwhile, and be
        found there by the next who asks for that name."""
        making = asyncio.ensure_future(asyncio.to_thread(self._made, group, at))
        try:
            return await asyncio.shield(making)
        finally:
            await asyncio.wait([making])

    def _made(self, group: Group, at: int) -> Any:
        """The actor of Ray's in the unit's placement group; both may be there already."""
        unit, name, bundle = group.unit, self._prefix + group.unit.name, group.unit.bundles[at]
        try:
            where = ray.util.get_placement_group(name)
        except ValueError:
            group.ours = True
            wanted = [one.resources for one in unit.bundles]
            where = ray.util.placement_group(wanted, strategy=unit.strategy, name=name, lifetime="detached")
        options = {
            "name": f"{unit.name}.{at}",
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": bundle.resources.get("CPU", 0),
            "num_gpus": bundle.resources.get("GPU", 0),
            "max_concurrency": 1000,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(where, at),
        }
        return ray.remote(Host).options(**options).remote(os.getcwd())

    def _check(self, unit: Unit, facts: Mapping[str, Any]) -> None:
        if facts["release"] != __version__:
            raise RunFailed(
                f"node {facts['address']} has miles_async {facts['release']}, this host {__version__}. Install one release on all.",
                status=2,
            )
        if not facts["shared"] and unit.name in ("trainer", "rooms"):
            raise RunFailed(
                f"node {facts['address']} does not see the run's folder {self._place.run_dir}: a checkpoint written there would be "
                "lost with it. Put --runs-dir on a file system that all nodes share.",
                status=2,
            )
        for name, folder in folders_of(self._settings, unit.name).items():
            if why := facts["barred"].get(folder):
                setting = f"{name} = {self._settings.flat.values[name]!r}"
                raise RunFailed(f"node {facts['address']}, {setting}: {why}. Choose a folder that it may write.", status=2)

    def _remove(self, group: Group) -> None:
        """Give the unit's place back; what runs there ends."""
        group.seats.clear()
        group.waits.clear()
        _free(self._prefix + group.unit.name, group.unit.name, len(group.unit.bundles))

    async def lost(self, group: Group, seat: Seat | None) -> str:
        """Forget the seats that are gone, and `seat`, of which Ray said so. Why, where its node or we ended it, else empty."""
        alive = await living_nodes()
        for at, one in list(group.seats.items()):
            if one is seat or one.facts["node"] not in alive:
                del group.seats[at]
        if group.leaving or seat is None:
            return group.leaving or "its place was lost before it began"
        gone = seat.facts["node"] not in alive  # also where another actor of the seat was told before
        return f"node {seat.facts['address']} ({seat.facts['node'][:8]}) is gone" if gone else ""

    async def follow(self, stop: asyncio.Event) -> None:
        """Waits for nodes that leave and for needed units without a place; looks every LOOK_S, which Ray answers from memory."""
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                for node, why in (await draining_nodes()).items():
                    for group in self._groups.values():
                        if not group.leaving and any(seat.facts["node"] == node for seat in group.seats.values()):
                            self._leave(group, why, tasks)
                await self._make_room(tasks)
                await within(LOOK_S, stop)

    async def _make_room(self, tasks: asyncio.TaskGroup) -> None:
        """While something needed has no place, those that wait and are not needed stand back, and one that has a place leaves."""
        now = asyncio.get_running_loop().time()
        wants = [
            g.unit.name for g in self._groups.values() if g.unit.needed and g.waits and now - min(g.waits.values()) > ROOM_AFTER_S
        ]
        without = await self._unplaced(set(wants)) if wants else set()
        wants = [name for name in wants if name in without]
        if not wants:
            self._wanting.clear()
            self._enough.set()
            return
        self._enough.clear()
        self._wanting.set()
        spare = [g for g in self._groups.values() if g.seats and not g.unit.needed]
        if spare and not any(g.leaving for g in spare):
            self._leave(spare[-1], f"its space is needed for {wants[0]}", tasks)

    async def _unplaced(self, units: set[str]) -> set[str]:
        """Those of these units for which there is no room; the others wait only for a process of Ray's that starts."""
        table = await asyncio.to_thread(ray.util.placement_group_table)
        placed = {str(one["name"]) for one in table.values() if one["state"] == "CREATED"}
        return {name for name in units if self._prefix + name not in placed}

    def _leave(self, group: Group, why: str, tasks: asyncio.TaskGroup) -> None:
        """End the unit's actors politely, then give its place back."""
        group.leaving = why
        self._notes.append((EventKind.LEAVING, f"{group.unit.name}: {why}"))
        patience_s = self._settings.launch.drain_timeout_s

        async def leave() -> None:
            async with group.lock:
                names = [name for bundle in group.unit.bundles for name in bundle.actors]
                seats = [(group.seats.get(self._of[name][1]), name) for name in names]
                ends = [seat.handle.end.remote(name, patience_s) for seat, name in seats if seat is not None]
                await asyncio.gather(*ends, return_exceptions=True)
                await asyncio.to_thread(self._remove, group)
                await asyncio.sleep(AGAIN_S)  # for those who wait for its processes to hear why
            group.leaving = ""

        tasks.create_task(leave())

    async def close(self) -> None:
        """Give all places back, and the memory in which the trainer's node kept versions."""
        for group in self._groups.values():
            for seat in group.seats.values() if group.unit.name == "trainer" else ():
                try:
                    await asyncio.wait_for(seat.handle.clear.remote(self._place.weights_dir), CLOSE_S)
                except (RayActorError, TimeoutError):
                    continue
            await asyncio.to_thread(self._remove, group)


async def _ended(tasks: Collection[asyncio.Future[Seat]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _free(name: str, unit: str, bundles: int) -> None:
    """Remove a placement group and the actors in it: one that still waits for its place would wait for ever."""
    for at in range(bundles):
        try:
            ray.kill(ray.get_actor(f"{unit}.{at}"))
        except ValueError:
            continue
    try:
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
    except ValueError:
        return


def _line(error: BaseException) -> str:
    """The last line of what Ray says: the others are its frames."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return printable(lines[-1].strip()[:300]) if lines else type(error).__name__
