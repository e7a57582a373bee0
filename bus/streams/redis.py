"""The bus on Redis: append, commit, save, and the facts about streams. Readers are in reader.py.

What always holds: inside the bus a message moves. Acknowledgement of the input, appending of the output, and the accounts
change in one script on the server, and only if the input was still pending.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from bus.blobs.api import BlobStore
from bus.blobs.files import FileBlobs
from bus.blobs.redis import RedisBlobs
from bus.clock import Clock, SystemClock
from bus.errors import UNREADABLE, DeadlineExceeded, Garbage, InvariantBroken
from bus.messages.base import Message
from bus.messages.codec import Decoder, encode
from bus.messages.control import DeadLetter, Vitals
from bus.messages.groups import OpenGroup
from bus.streams.entry import Commit, CommitResult, Entry, Out, RunSnapshot
from bus.streams.hold import BEAT, TAKE, Names
from bus.streams.hop import Placed, hop_args, make_entry, table_of, text_of
from bus.streams.keys import Keys, StreamKeys
from bus.streams.link import BATCH, Job, Link, Script
from bus.topology import STREAMS, Stream

COMMIT, PREFIX = Script("commit.lua"), Script("prefix.lua")
SNAPSHOT = Script("snapshot.lua")
T = TypeVar("T")
LIFE = "life"  # state field; given anew whenever the bus held nothing of the run
_BARE = Commit(bounded=True)  # an append without condition


class BusConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one run's bus, and its limits."""

    url: str
    run: str
    blob_dir: str = ""  # shared directory for large bodies; empty = bodies in Redis
    lease_s: float = 6.0  # an entry idle longer may be claimed by a peer
    max_deliveries: int = 5
    inline_limit_bytes: int = 128 * 1024  # larger bodies become blobs when appended without a condition
    hop_limit_bytes: int = 16 * 1024  # larger bodies do not pass through the commit script
    stream_max_bytes: int = 2 << 30  # bound of unacknowledged bytes per data stream; 0 = none
    deadline_s: float = 60.0  # how long to wait for a server that does not answer
    room_deadline_s: float = 3600.0  # how long to wait for room on a full stream
    life: str = ""  # state field "life" of the run; a server with another one, or none, is not gone on with. Empty = not looked at


class Bus:
    """One process's view of one run's streams. Use as `async with Bus(config) as bus`."""

    def __init__(self, config: BusConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.clock: Clock = clock or SystemClock()
        self.keys = Keys(config.run)
        self.link = Link(config.url, self.clock, deadline_s=config.deadline_s, scripts=(COMMIT, PREFIX, SNAPSHOT, BEAT, TAKE))
        self.expect(config.life)
        self.blobs: BlobStore = (
            FileBlobs(Path(config.blob_dir), self.clock, deadline_s=0.9 * config.deadline_s)
            if config.blob_dir
            else RedisBlobs(self.link, self.keys)
        )
        self._stream_keys = StreamKeys(self.keys)
        self._sender = uuid.uuid4().hex[:16]  # names this process's marks; decides nothing
        self._sent = 0
        self._fixed_keys = [self.keys.state, self.keys.ledger, self.keys.open_groups, self.keys.in_flight_bytes]
        self._fixed_keys += [self.keys.marks(self._sender), self.keys.names]
        self.names = Names(self.link, self.keys)
        self._decoders: dict[str, Decoder[Any]] = {s.name: Decoder(s.union, s.name) for s in STREAMS}
        self.waiting_for_room: str = ""

    def expect(self, life: str) -> None:
        """From now on: see BusConfig.life."""
        self.config = msgspec.structs.replace(self.config, life=life)
        self.link.life = (self.keys.state, LIFE, life)

    async def __aenter__(self) -> Self:
        await self.link.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.link.close()

    # -- writing ------------------------------------------------------------------------------------------------

    async def append(self, outs: Sequence[Out], *, repeatable: bool = False) -> None:
        """Append without condition, in order, in one pipeline. News and tools use it; hops use `commit`.

        `repeatable`: twice is harmless, as for all mere news, so a lost connection is waited out. Otherwise it is an
        error, because an outcome that is unknown must not be doubled.

        Example:
            await bus.append([Out(KNOBS, patch)])
        """
        placed = await self._placed(outs, self.config.inline_limit_bytes)
        if max((len(one.body) for one in placed), default=0) <= min(self.config.hop_limit_bytes, self.config.inline_limit_bytes):
            # The commit script keeps the byte bound exactly and knows a repetition: this is safe in any case.
            for start in range(0, len(placed), BATCH):
                await self._hop(_BARE, placed[start : start + BATCH])
            return
        commands: list[tuple[Any, ...]] = []
        added: dict[str, int] = {}
        for one in placed:
            out = one.out
            key = self._stream_keys[out.stream.name]
            fields = one.fields()
            if out.stream.cap:
                commands.append(("XADD", key, "MAXLEN", "~", out.stream.cap, "*", *fields))
            else:
                commands.append(("XADD", key, "*", *fields))
            if out.stream.is_data:
                added[key] = added.get(key, 0) + one.size(fields)
        for key, total in added.items():
            if self.config.stream_max_bytes:
                await self._wait_for_room(key, total)
            commands.append(("HINCRBY", self.keys.in_flight_bytes, key, total))
        await self.link.run_many(commands, repeatable=repeatable or all(out.stream.cap for out in outs))

    async def commit(self, commit: Commit) -> CommitResult:
        """One atomic step, safe to repeat: it takes effect once, or not at all.

        `done` False with `moved` names acknowledgements that were no longer pending: somebody else finished that entry. Bodies
        written for a commit that had no effect are left to `sweep_orphans`: after a lost reply only that can tell.

        Example:
            done = await bus.commit(Commit(ack=(entry,), append=(Out(SCORED, scored),), ledger=ledger.dropped("stale", 0, 31)))
        """
        outcome, rest = await self._hop(commit, await self._placed(commit.append, self.config.hop_limit_bytes))
        if outcome == b"moved":
            return CommitResult(done=False, moved=tuple(map(text_of, rest)))
        if read := [ref for e in commit.ack for ref in (e.blob, *e.asides) if ref]:
            kept = {ref for out in commit.append for ref in _kept(out.message)}
            await self.blobs.delete([ref for ref in read if ref not in kept])
        return CommitResult(done=True, entry_ids=tuple(map(text_of, rest)))

    def _mark(self) -> tuple[int, int]:
        """(slot, mark) of the next conditional write. Taken right before sending: of at most BATCH commands of this
        process the outcome is unknown at a time, so twice as many slots suffice."""
        self._sent += 1
        return self._sent % (2 * BATCH), self._sent

    async def _hop(self, commit: Commit, placed: Sequence[Placed]) -> tuple[bytes, list[bytes]]:
        bound = self.config.stream_max_bytes if commit.bounded else 0
        named, args = hop_args(commit, placed, keys=self.keys, stream_keys=self._stream_keys, bound=bound)
        size = sum(len(one.body) for one in placed if not one.ref)
        # Apart, because a server out of memory takes what begins with an acknowledgement and refuses the rest.
        lane = "hop" if commit.ack else "append"
        job = Job(COMMIT, lane, fixed=self._fixed_keys, keys=named, args=args, size=size)
        until, pause_s = 0.0, 0.01
        while True:
            outcome, *rest = await self.link.run_job(job)
            match outcome:
                case b"ok" | b"done" | b"again" | b"moved":
                    self.waiting_for_room = ""
                    return outcome, rest
                case b"full":
                    self.waiting_for_room = text_of(rest[0])
                    until = until or self.clock.monotonic() + self.config.room_deadline_s
                    if self.clock.monotonic() > until:
                        raise DeadlineExceeded(self._full_text(self.waiting_for_room))
                    await self.clock.sleep(pause_s)
                    pause_s = min(0.2, pause_s * 2)
                case b"nameless":
                    await self.names.again(rest[0])
                case b"stale":
                    raise InvariantBroken(
                        f"state moved under us in run {self.config.run}: found {text_of(rest[0])!r}. Another process holds "
                        "this role; stop one of them."
                    )
                case _:
                    raise InvariantBroken(
                        f"commit refused: {text_of(outcome)} {text_of(rest[0])}; the body of the message is missing"
                    )

    async def _wait_for_room(self, key: str, size: int) -> None:
        until = self.clock.monotonic() + self.config.room_deadline_s
        pause_s = 0.01
        while True:
            used = int(await self.link.run("HGET", self.keys.in_flight_bytes, key) or 0)
            if used <= 0 or used + size <= self.config.stream_max_bytes:
                self.waiting_for_room = ""
                return
            self.waiting_for_room = key
            if self.clock.monotonic() > until:
                raise DeadlineExceeded(self._full_text(key))
            await self.clock.sleep(pause_s)
            pause_s = min(0.2, pause_s * 2)

    def _full_text(self, key: str) -> str:
        return (
            f"stream {key} stayed over its bound of {self.config.stream_max_bytes} bytes for "
            f"{self.config.room_deadline_s:.0f} s. Its reader is slow or gone (miles-async doctor), or raise "
            "--stream-max-bytes; nothing was lost."
        )

    async def _placed(self, outs: Sequence[Out], limit: int) -> list[Placed]:
        """Messages with their bodies, of which those above the limit are put aside, all at once."""
        placed = [Placed(out, encode(out.message)) for out in outs]
        if large := [n for n, one in enumerate(placed) if len(one.body) > limit]:
            refs = await asyncio.gather(*(self.blobs.put(placed[n].body) for n in large))
            for n, ref in zip(large, refs, strict=True):
                placed[n] = Placed(placed[n].out, placed[n].body, ref)
        return placed

    async def save_prefix(self, entry: Entry, consumer: str, sample_id: str, chunk: bytes) -> bool:
        """Append to the saved prefix of a running sample and renew its lease; False = the lease is lost."""
        keys = [self.keys.stream(entry.stream.name), self.keys.prefix(sample_id), self.keys.marks(self._sender), self.keys.names]
        args = [entry.readers, consumer, entry.id, chunk, *self._mark(), *self.link.name]
        return bool(await self.link.run_script(PREFIX, keys, args))

    async def load_prefix(self, sample_id: str) -> list[bytes]:
        """Saved pieces in order; empty when nothing was saved."""
        return list(await self.link.run("LRANGE", self.keys.prefix(sample_id), 0, -1))

    async def forget_run(self) -> int:
        """Delete every key of this run, and of no other; returns how many there were. This process's name goes too."""
        self.names.drop()
        removed, cursor = 0, b"0"
        while True:
            cursor, keys = await self.link.run("SCAN", cursor, "MATCH", self.keys.stream("*"), "COUNT", 1000)
            if keys:
                removed += int(await self.link.run("DEL", *keys))
            if int(cursor) == 0:
                return removed

    async def trim_log(self, stream: Stream, below_id: str) -> int:
        """Delete entries of a log below an id."""
        return int(await self.link.run("XTRIM", self.keys.stream(stream.name), "MINID", below_id))

    # -- reading facts ------------------------------------------------------------------------------------------

    async def message(self, entry: Entry) -> Any:
        """The entry's message, its body fetched if it lies elsewhere; BadMessage when it is none of the stream's."""
        body = entry.body or (await self.blobs.get(entry.blob) if entry.blob else b"")
        return self._decoders[entry.stream.name].decode(body)

    async def make_readers(self) -> None:
        """Create every consumer group at id 0 (existing ones stay as they are)."""
        for stream in STREAMS:
            for readers in stream.readers:
                await self.ensure_readers(stream, readers)

    async def ensure_readers(self, stream: Stream, readers: str) -> None:
        """Create one consumer group at id 0 unless it exists."""
        try:
            await self.link.run("XGROUP", "CREATE", self.keys.stream(stream.name), readers, "0", "MKSTREAM")
        except InvariantBroken as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def length(self, stream: Stream) -> int:
        """Entries on a stream."""
        return int(await self.link.run("XLEN", self.keys.stream(stream.name)))

    async def scan(self, stream: Stream, *, start: str = "-", count: int = 500) -> list[Entry]:
        """Entries of a stream from an id, without taking them."""
        reply = await self.link.run("XRANGE", self.keys.stream(stream.name), start, "+", "COUNT", count)
        return [make_entry(stream, "", raw) for raw in reply]

    async def scan_all(self, stream: Stream) -> list[Entry]:
        """All entries of a stream, in pages."""
        found: list[Entry] = []
        start = "-"
        while page := await self.scan(stream, start=start):
            found += page
            start = f"({page[-1].id}"
        return found

    async def last(self, stream: Stream, count: int = 1) -> list[Entry]:
        """The newest entries of a stream, newest first.

        Example:
            [newest] = await bus.last(POLICY) or [None]
        """
        reply = await self.link.run("XREVRANGE", self.keys.stream(stream.name), "+", "-", "COUNT", count)
        return [make_entry(stream, "", raw) for raw in reply]

    async def state(self, field: str) -> str:
        """One field of the run's small state; empty when unset."""
        return text_of(await self.link.run("HGET", self.keys.state, field) or b"")

    async def next_number(self, field: str, at_least: int = 1) -> int:
        """A number never given before in this run."""
        try:
            number = int(await self.link.run("HINCRBY", self.keys.state, field, 1))
        except InvariantBroken as error:
            if "not an integer" not in str(error):
                raise
            raise Garbage.of_hash(self.keys.state, field, "no number") from error
        if number < at_least:
            number = int(await self.link.run("HINCRBY", self.keys.state, field, at_least - number))
        return number

    async def server_time(self) -> float:
        """The server's clock, seconds: the one by which entry ids are made."""
        seconds, micros = await self.link.run("TIME")
        return int(seconds) + int(micros) / 1e6

    async def server_info(self) -> dict[str, str]:
        """The server's own account of itself, by name."""
        lines = text_of(await self.link.run("INFO")).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))

    async def state_as(self, field: str, read: Callable[[str], T]) -> T:
        """A field of the run's small state as what `read` makes of its text, which is empty when unset; Garbage where that cannot.

        Example:
            version = await bus.state_as("version", lambda text: int(text or 0))
        """
        text = await self.state(field)
        try:
            return read(text)
        except ValueError as error:
            raise Garbage.of_hash(self.keys.state, field, error) from error

    async def open_group(self, key: str) -> OpenGroup | None:
        """What stands in the list of open groups under this group, or part of one (`g0000042`, `g0000042+3`); None when it is
        closed. Garbage where somebody else wrote there."""
        raw = await self.link.run("HGET", self.keys.open_groups, key)
        return self.group_of(key, raw) if raw else None

    async def open_groups(self) -> dict[str, OpenGroup]:
        """The whole list, in the order of its keys."""
        return {key: self.group_of(key, raw) for key, raw in sorted((await self.hash_of(self.keys.open_groups)).items())}

    def group_of(self, key: str, raw: bytes) -> OpenGroup:
        """What stands there, read; Garbage for what is no group."""
        try:
            return msgspec.msgpack.decode(raw, type=OpenGroup)
        except UNREADABLE as error:
            raise Garbage.of_hash(self.keys.open_groups, key, error) from error

    async def numbers(self, key: str) -> dict[str, int]:
        """A whole hash of numbers."""
        return self.counts_of(key, await self.hash_of(key))

    def counts_of(self, key: str, table: Mapping[str, bytes]) -> dict[str, int]:
        """The same of what was read there; Garbage for what is no number."""
        found: dict[str, int] = {}
        for name, raw in table.items():
            try:
                found[name] = int(raw)
            except ValueError as error:
                raise Garbage.of_hash(key, name, error) from error
        return found

    async def hash_of(self, key: str) -> dict[str, bytes]:
        """A whole hash with text keys."""
        return table_of(await self.link.run("HGETALL", key))

    async def snapshot(self) -> RunSnapshot:
        """State, accounts and open groups at one instant: what a checkpoint keeps of the bus."""
        keys = [self.keys.state, self.keys.ledger, self.keys.open_groups]
        state, ledger, groups = map(table_of, await self.link.run_script(SNAPSHOT, keys, []))
        for key, raw in groups.items():  # a checkpoint with garbage in it could not be gone on from
            self.group_of(key, raw)
        return RunSnapshot(
            state={name: text_of(value) for name, value in state.items()},
            ledger=self.counts_of(self.keys.ledger, ledger),
            open_groups=groups,
        )

    async def vitals(self) -> dict[str, Vitals]:
        """Every actor's last vitals, by name; those of a release that speaks otherwise are left out."""
        found: dict[str, Vitals] = {}
        for name, raw in (await self.hash_of(self.keys.vitals)).items():
            with suppress(*UNREADABLE):
                found[name] = msgspec.msgpack.decode(raw, type=Vitals)
        return found

    async def set_vitals(self, actor: str, message: Message, *, leaves: bool = False) -> bool:
        """Replace an actor's last vitals, and renew its name where it is this process's; see Names.beat."""
        return await self.names.beat(actor, encode(message), leaves=leaves)

    async def silences(self) -> dict[str, float]:
        """Seconds since each actor's last vitals, by the server's clock alone. A stamp in its future is of before it was set
        back: who lives beats again at once, and counts as silent for as long until then."""
        heard, now = await self.numbers(self.keys.heard), await self.server_time()
        return {name: abs(now - at / 1000) for name, at in heard.items()}


def _kept(message: Message) -> list[str]:
    """References that go on with a message."""
    if isinstance(message, DeadLetter):
        return message.kept
    return message.header().asides.split()
