"""Experiment trackers follow metrics.jsonl, each in a thread of its own: one that hangs or fails holds up nobody.

Reads  metrics.jsonl    Owns  trackers.json: how far each has come, so that a tracker that was away catches up
A point may be sent twice after a crash, never lost: the place is written after the tracker took it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from actors.recorder.file import FILE
from actors.recorder.points import Point, Points
from bus.errors import UNREADABLE
from bus.private import write_secret

PLACES = "trackers.json"
LOOK_S = 1.0
AGAIN_S, AGAIN_MOST_S = 5.0, 300.0  # between two tries of a tracker that fails, twice as long each time
AT_ONCE = 500  # points


class Tracker(Protocol):
    """One experiment tracker, open. Every method may raise anything and take its time."""

    def take(self, points: list[Point]) -> None:
        """Send them, in order; when it returns they are safe."""

    def close(self, finished: bool) -> None:
        """The end of the run, or of this process (`finished` is False): no more points."""


class Say(Protocol):
    """Tells the operator; any thread may call it."""

    def __call__(self, text: str, *, well: bool = False) -> None: ...


Open = Callable[[], Tracker]
"""Opens a tracker: imports its library, goes on with the run that it had before."""


class Place(msgspec.Struct):
    """Bytes of metrics.jsonl that a tracker has taken."""

    read: int = 0


class Places:
    """trackers.json, shared by the threads."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / PLACES
        self._lock = threading.Lock()
        try:
            self._places = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Place])
        except (FileNotFoundError, *UNREADABLE):
            self._places = {}  # from the start: a tracker gets points again rather than never

    def of(self, name: str, end: int) -> int:
        """Where a tracker goes on, in a file of `end` bytes."""
        place = self._places.get(name, Place()).read
        return place if 0 <= place <= end else 0

    def put(self, name: str, read: int) -> None:
        """It has come so far."""
        with self._lock:
            self._places[name] = Place(read)
            fresh = self._path.with_suffix(".new")
            write_secret(fresh, msgspec.json.encode(self._places).decode()).replace(self._path)


class Follower:
    """The thread of one tracker. `say`: told once for each new failure, and when it works again."""

    def __init__(self, name: str, open_it: Open, run_dir: Path, places: Places, say: Say) -> None:
        self.name = name
        self._open, self._file, self._places, self._say = open_it, run_dir / FILE, places, say
        self._tracker: Tracker | None = None
        self._looked = -1  # size of the file when all of it was taken
        self._ended = threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def end(self, finished: bool) -> None:
        """Take what is in the file by now, close, end. Returns at once; `join` waits."""
        self._finished = finished
        self._ended.set()

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        again_s, failed = AGAIN_S, ""
        while True:
            ended = self._ended.is_set()
            try:
                self._take_what_is_there()
                if ended:
                    if self._tracker is not None:
                        self._tracker.close(self._finished)
                    return
                if failed:
                    self._say(f"{self.name} takes metrics again", well=True)
                again_s, failed = AGAIN_S, ""
                self._ended.wait(LOOK_S)
            except Exception as error:  # noqa: BLE001 - a tracker is a library of others; the run goes on without it
                self._tracker, self._looked = None, -1
                text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                if text != failed:
                    self._say(f"{self.name} fails: {text}. The run goes on; it gets what it missed when it works again")
                failed = text
                if ended:
                    return
                self._ended.wait(again_s)
                again_s = min(2 * again_s, AGAIN_MOST_S)

    def _take_what_is_there(self) -> None:
        """The place moves with points only: what was dropped since the last step is counted again from there."""
        try:
            end = self._file.stat().st_size
        except FileNotFoundError:
            return
        if end == self._looked:
            return
        at, more = self._places.of(self.name, end), True
        while more:
            points, at, more = _read(self._file, at)
            if points:
                if self._tracker is None:
                    self._tracker = self._open()
                self._tracker.take(points)
                self._places.put(self.name, at)
        self._looked = end


def _read(path: Path, at: int) -> tuple[list[Point], int, bool]:
    """Points behind byte `at`, the byte behind the last of them, and whether there may be more."""
    points, counted, place = [], Points(), at
    with path.open("rb") as file:
        file.seek(at)
        for line in file:
            if not line.endswith(b"\n"):
                break
            at += len(line)
            point = _point(counted, line)
            if point is not None:
                points.append(point)
                place = at
            if len(points) == AT_ONCE:
                return points, place, True
    return points, place, False


def _point(counted: Points, line: bytes) -> Point | None:
    try:
        return counted.of(msgspec.json.decode(line))
    except (*UNREADABLE, KeyError, TypeError, ValueError):
        return None  # a line that was changed by hand; the recorder counts such lines


def follow_all(opens: Mapping[str, Open], run_dir: Path, say: Say) -> list[Follower]:
    """Start a follower for each tracker."""
    places = Places(run_dir)
    return [Follower(name, open_it, run_dir, places, say) for name, open_it in opens.items()]
