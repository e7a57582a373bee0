"""Who activates next, and which way (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from actors.runtime.transports.records import DISK
from bus.messages.active import PolicyActive, Seat
from bus.messages.policy import WeightManifest, WeightsReady
from bus.messages.versions import PolicyVersion

TRIES = 3  # files that are written anew for one version
ROOM = 2  # versions that the trainer may write before the publisher looks again
SLOTS_TOLD = 0.1  # change of a worker's slots, since they were said, that is worth saying


class Target:
    """The newest version, and the ways in which it can be had.

    `seats`: engines that the trainer was asked to send it to; None = not asked yet, empty = by files alone. `sent`: the way they
    take, once the trainer is ready. `files`: whole ones, of their writing number `attempt`; None = there are none to load.
    """

    def __init__(self, version: PolicyVersion, manifest: WeightManifest) -> None:
        self.version = version
        self.transport, self.host = manifest.transport, manifest.host
        self.files = manifest if manifest.transport == DISK.name else None
        self.attempt = 0
        self.asked_at: float | None = None  # when files were asked for that are not there yet
        self.seats: dict[str, Seat] | None = None if self.files is None else {}
        self.sent: WeightManifest | None = None

    def take(self, ready: WeightsReady) -> None:
        """The trainer's answer to an order."""
        if ready.manifest.transport != DISK.name:
            self.sent = ready.manifest
            self.seats = self.seats or {}  # of a publisher before us: nobody knows for whom it was
        elif ready.attempt >= self.attempt:
            self.files, self.attempt, self.asked_at = ready.manifest, ready.attempt, None

    def only_files(self) -> None:
        """It is not sent, or not any more."""
        self.seats, self.sent = {}, None

    def spoiled(self, path: str) -> bool:
        """These files are not to be loaded: they are to be written anew, unless that was done TRIES times. Whether it is so;
        False also for files that are not the newest writing."""
        if self.files is None or self.files.path != path or self.attempt >= TRIES:
            return False
        self.files, self.asked_at = None, None
        self.attempt += 1
        return True


class Ways(NamedTuple):
    """Workers to order now: by what the trainer sends, and by files; and those that files must still be written for."""

    sent: list[str]
    files: list[str]
    lacking: list[str]


def choose_ways(wave: Sequence[str], target: Target, able: Mapping[str, Seat]) -> Ways:
    """The way of each worker of a wave. One that is asked for in `target.seats` waits there until the trainer is ready."""
    seats = target.seats or {}
    seated = [name for name in wave if name in seats and able.get(name) == seats[name]]
    rest = [name for name in wave if name not in seated]
    ready = seated if target.sent is not None else []
    return Ways(ready, rest, []) if target.files is not None else Ways(ready, [], rest)


def next_wave(
    *, serving: Mapping[str, int], target: int, fraction: float, in_progress: Collection[str], late: Collection[str] = ()
) -> list[str]:
    """Workers to order to `target` now.

    `fraction` 1.0 = all at once; 1/k = rolling: at most that share of those that serve a version (`serving` >= 0), but one at
    least, is away at any time. Who serves nothing is missed by nobody and goes at once. Workers already there or on their way are
    left alone. By name, so that the choice does not depend on arrival; the `late` ones last, so that they hold nobody back.
    """
    behind = sorted(name for name, version in serving.items() if version < target and name not in in_progress)
    if fraction >= 1.0:
        return behind
    idle = [name for name in behind if serving[name] < 0]
    at_work = sorted((name for name in behind if serving[name] >= 0), key=lambda name: name in late)
    away = sum(serving.get(name, -1) >= 0 for name in in_progress)
    allowed = max(1, int(sum(version >= 0 for version in serving.values()) * fraction))
    return idle + at_work[: max(0, allowed - away)]


def in_the_way(held: Collection[int], wanted: Collection[int], *, free: int, each: int) -> list[int]:
    """Of the versions `held` in files those to delete, whoever wants them, so that the trainer, which ends where it cannot write,
    has room for ROOM more. `free`, `each`: bytes there, and of one version.

    The newest stays. First go those that nobody wants, the oldest first, then those that were begun last: the others are nearer to
    their end.
    """
    short = ROOM * each - free
    if short <= 0:
        return []
    old = sorted(held)[:-1]
    order = [v for v in old if v not in wanted] + [v for v in reversed(old) if v in wanted]
    return order[: -(-short // each)]


def worth_saying(new: PolicyActive, said: PolicyActive | None) -> bool:
    """Whether `new` differs from what was said last by more than a little in somebody's slots, which may move every second."""
    if said is None or msgspec.structs.replace(new, slots=said.slots) != said or new.slots.keys() != said.slots.keys():
        return True
    return any(abs(slots - said.slots[name]) > SLOTS_TOLD * said.slots[name] for name, slots in new.slots.items())
