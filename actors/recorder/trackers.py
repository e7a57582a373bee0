"""Experiment trackers follow a file of the record, each in a thread of its own: one that hangs or fails holds up nobody.

Reads  metrics.jsonl, trained.jsonl    Owns  trackers.json: how far each has come, so that a tracker that was away catches up
A point may be sent twice after a crash, never lost: the place is written after the tracker took it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from zlib import crc32

import msgspec

from actors.recorder.file import FILE
from actors.recorder.points import Points
from actors.recorder.records import Record
from bus.errors import UNREADABLE
from bus.private import write_secret

PLACES = "trackers.json"
LOOK_S = 1.0
AGAIN_S, AGAIN_MOST_S = 5.0, 300.0  # between two tries of a tracker that fails, twice as long each time
LATE_S = 20.0  # without an answer, after which a tracker is named: libraries try again for minutes before they say that they fail
AT_ONCE = 500  # points
NOTHING = (0, -1)


class Tracker(Protocol):
    """One experiment tracker, open. Every method may raise anything and take its time."""

    def take(self, points: list[Any]) -> str | None:
        """Send them, in order; when it returns they are safe. May return what an operator should know."""

    def close(self, finished: bool) -> None:
        """The end of the run, or of this process (`finished` is False): no more points."""


class Say(Protocol):
    """Tells the operator; any thread may call it."""

    def __call__(self, text: str, *, well: bool = False) -> None: ...


Open = Callable[[], Tracker]
"""Opens a tracker: imports its library, goes on with the run that it had before."""


@dataclass(frozen=True)
class FollowedFile:
    """What a tracker follows. `older`: the file's next name when it is full, empty = it is never full. `reads`: makes what turns
    each record, in order, into what the tracker takes, or None; with `sums` that also tells of the records since the last one."""

    file: str = FILE
    older: str = ""
    reads: Callable[[], Callable[[Record], Any]] = lambda: Points().of
    sums: bool = True


class TrackerPlace(msgspec.Struct):
    """Bytes of its file that a tracker has taken. `first`: checksum of that file's first line, where it has an older one."""

    read: int = 0
    first: int = 0


class Places:
    """trackers.json, shared by the threads."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / PLACES
        self._lock = threading.Lock()
        try:
            self._places = msgspec.json.decode(self._path.read_bytes(), type=dict[str, TrackerPlace])
        except (FileNotFoundError, *UNREADABLE):
            self._places = {}  # from the start: a tracker gets points again rather than never

    def of(self, name: str) -> TrackerPlace:
        """Where a tracker goes on."""
        return self._places.get(name, TrackerPlace())

    def put(self, name: str, place: TrackerPlace) -> None:
        """It has come so far."""
        with self._lock:
            self._places[name] = place
            fresh = self._path.with_suffix(".new")
            write_secret(fresh, msgspec.json.encode(self._places).decode()).replace(self._path)


class Follower:
    """The thread of one tracker. `say`: told once for each new failure, once that it does not answer, and when it works again."""

    def __init__(self, name: str, open_it: Open, run_dir: Path, places: Places, say: Say, source: FollowedFile) -> None:
        self.name = name
        self._open, self._run_dir, self._places, self._say, self._source = open_it, run_dir, places, say, source
        self._tracker: Tracker | None = None
        self._looked = NOTHING  # the newest file when all of it was taken, and its size
        self._ended = threading.Event()
        self._finished = False
        self._late = False  # it was named for that, and has taken nothing since
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
                if failed or self._late:
                    self._say(f"{self.name} takes metrics again", well=True)
                again_s, failed, self._late = AGAIN_S, "", False
                self._ended.wait(LOOK_S)
            except Exception as error:  # noqa: BLE001 - a tracker is a library of others; the run goes on without it
                self._tracker, self._looked = None, NOTHING
                text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                if text != failed:
                    self._say(f"{self.name} fails: {text}. The run goes on; it gets what it missed when it works again")
                failed = text
                if ended:
                    return
                self._ended.wait(again_s)
                again_s = min(2 * again_s, AGAIN_MOST_S)

    def _say_late(self) -> None:
        if not self._late and not self._ended.is_set():
            self._late = True
            text = f"{self.name} has not answered for {LATE_S:.0f} s. The run goes on; it gets what it missed when it works again"
            self._say(text)

    def _take_what_is_there(self) -> None:
        with ExitStack() as opened:
            for file, at, first in self._unread(opened):
                self._take(file, at, first)

    def _unread(self, opened: ExitStack) -> list[tuple[BinaryIO, int, int]]:
        """Files that hold more, the older one first, each with the byte to go on from and the checksum that names it."""
        found: dict[int, BinaryIO] = {}
        for name in filter(None, (self._source.file, self._source.older)):  # opened in this order: the one may become the other
            try:
                file: BinaryIO = opened.enter_context((self._run_dir / name).open("rb"))
            except FileNotFoundError:
                continue
            found.setdefault(crc32(file.readline()) if self._source.older else 0, file)
        ends = {first: one.seek(0, 2) for first, one in found.items()}
        newest = next(iter(ends.items()), self._looked)
        if newest == self._looked:
            return []
        self._looked = newest
        place = self._places.of(self.name)
        if place.first and place.first not in found:
            self._say(f"{self.name} was away for longer than {self._source.older} lasts: what it held is dropped")
        unread: list[tuple[BinaryIO, int, int]] = []
        for first, one in found.items():
            known = first == place.first and place.read <= ends[first]
            unread.insert(0, (one, place.read if known else 0, first))
            if known:
                break
        return unread

    def _take(self, file: BinaryIO, at: int, first: int) -> None:
        """With sums the place moves with points only: what was since the last one is counted again from there."""
        more = True
        while more:
            begun = at
            points, at, more = _read(file, at, self._source)
            if points:
                watch = threading.Timer(LATE_S, self._say_late)
                watch.daemon = True
                watch.start()
                try:
                    if self._tracker is None:
                        self._tracker = self._open()
                    note = self._tracker.take(points)
                finally:
                    watch.cancel()
                if note:
                    self._say(f"{self.name}: {note}")
            if at > begun:
                self._places.put(self.name, TrackerPlace(at, first))


def _read(file: BinaryIO, at: int, source: FollowedFile) -> tuple[list[Any], int, bool]:
    """What is for the tracker behind byte `at`, where to go on next time, and whether there may be more."""
    points, of, place = [], source.reads(), at
    file.seek(at)
    for line in file:
        if not line.endswith(b"\n"):
            break
        at += len(line)
        point = _point(of, line)
        if point is not None:
            points.append(point)
        if point is not None or not source.sums:
            place = at
        if len(points) == AT_ONCE:
            return points, place, True
    return points, place, False


def _point(of: Callable[[Record], Any], line: bytes) -> Any:
    try:
        return of(msgspec.json.decode(line))
    except (*UNREADABLE, KeyError, TypeError, ValueError):
        return None  # a line that was changed by hand; the recorder counts such lines


def follow_all(
    opens: Mapping[str, Open], run_dir: Path, say: Say, sources: Mapping[str, FollowedFile] | None = None
) -> list[Follower]:
    """Start a follower for each tracker. `sources`: of those that do not follow metrics.jsonl."""
    places, other = Places(run_dir), sources or {}
    return [Follower(name, open_it, run_dir, places, say, other.get(name, FollowedFile())) for name, open_it in opens.items()]
