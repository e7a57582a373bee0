"""What a soak has seen, in files of its home, so that pieces go on with one another and the last one judges all.

soak.jsonl      a line for each piece, disturbance, check of the ledger, measurement and fault
policy.jsonl    every message of the policy log; verdicts.jsonl  every verdict, by group
The bus trims both logs. Files are only appended to; a line that was cut short by a kill is removed when they are opened again.
"""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.runtime.content import fault_of
from bus import Bus, Entry
from bus.errors import BadMessage
from bus.inspect import wall_of
from bus.messages.codec import Decoder, encode
from bus.streams.hop import id_key
from bus.topology import POLICY, VERDICTS

Line = dict[str, Any]


class Verdict(NamedTuple):
    """What the filter said of a group, or of a part of it. `wall`: when, seconds."""

    group: str
    kept: bool
    wall: float


class Lines:
    """One file of JSON lines, one writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b")
        self._file.seek(0)
        data = self._file.read()
        self._file.truncate(data.rfind(b"\n") + 1)

    def append(self, *lines: Line) -> None:
        """Hand whole lines to the operating system."""
        self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self._file.flush()

    def __iter__(self) -> Iterator[Line]:
        with self.path.open("rb") as file:
            for line in file:
                yield msgspec.json.decode(line)

    def close(self) -> None:
        """No more lines."""
        self._file.close()


class Home:
    """The folder `soak` of a home. `last`: id of the newest entry that is kept, by stream."""

    def __init__(self, directory: Path) -> None:
        folder = directory / "soak"
        folder.mkdir(parents=True, exist_ok=True)
        self.seen = Lines(folder / "soak.jsonl")
        self._files = {POLICY: Lines(folder / "policy.jsonl"), VERDICTS: Lines(folder / "verdicts.jsonl")}
        self.last = {stream.name: "0" for stream in self._files}
        for stream, lines in self._files.items():
            for line in lines:
                self.last[stream.name] = line["id"]
        self.piece = 1 + max((line["piece"] for line in self.lines("began")), default=0)
        self.done = sum(1 for line in self._files[POLICY] if line.get("type") == "policy.step")

    def close(self) -> None:
        """No more of this piece."""
        for lines in (self.seen, *self._files.values()):
            lines.close()

    def lines(self, *kinds: str) -> list[Line]:
        """Lines of soak.jsonl of these kinds, of all pieces."""
        return [line for line in self.seen if line["kind"] in kinds]

    def put(self, kind: str, **fields: Any) -> None:
        """A line of soak.jsonl."""
        self.seen.append({"kind": kind, "piece": self.piece, **fields})

    async def keep(self, bus: Bus, entry: Entry) -> None:
        """An entry of one of the two logs, if it is a message and not known yet."""
        if id_key(entry.id) <= id_key(self.last[entry.stream.name]):
            return
        try:
            message = await bus.message(entry)
        except BadMessage:
            return
        if fault_of(message):
            return
        self.last[entry.stream.name] = entry.id
        if entry.stream is VERDICTS:
            self._files[VERDICTS].append({"id": entry.id, "group": message.group_id, "kept": message.kept})
            return
        type_ = entry.fields.get("type", "")
        self.done += type_ == "policy.step"
        body = base64.b64encode(encode(message)).decode()
        self._files[POLICY].append({"id": entry.id, "type": type_, "body": body})

    async def settle(self, bus: Bus) -> None:
        """When all is quiet: what came last, and what a killed server forgot (the bus is right about what it still holds)."""
        for stream in self._files:
            entries = await bus.scan_all(stream)
            if entries:
                self._files[stream].append({"id": entries[0].id, "cut": True})
                self.last[stream.name] = "0"
            for entry in entries:
                await self.keep(bus, entry)

    def policy(self) -> list[Any]:
        """Every message of the policy log, in order."""
        decoder = Decoder[Any](POLICY.union, POLICY.name)
        return [decoder.decode(base64.b64decode(line["body"])) for line in _uncut(self._files[POLICY])]

    def verdicts(self) -> list[Verdict]:
        """Every verdict, in order."""
        return [Verdict(line["group"], line["kept"], wall_of(line["id"])) for line in _uncut(self._files[VERDICTS])]


def _uncut(lines: Lines) -> list[Line]:
    """Behind a cut stand all entries from its id on, once more."""
    found: list[Line] = []
    for line in lines:
        if line.get("cut"):
            while found and id_key(found[-1]["id"]) >= id_key(line["id"]):
                found.pop()
        else:
            found.append(line)
    return found


def commit_of(checkout: Path) -> str:
    """What code a piece runs; `+` after it: with changes that are in no commit."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
