"""Recorder: keeps a run's story on disk. It follows the bus and writes metrics.jsonl, so that launchers may come and go.

Reads  policy, trained, eval.results, knobs, events, verdicts, dead (logs), the newest of groups    Writes  events (texts)
Owns  metrics.jsonl, trained.jsonl, samples.jsonl
Started again it goes on behind the last line of each stream: no entry is written twice. A restore of the trainer is a
line of its own that names the lost steps; lines already written stay. While the disk is full it waits, and the run goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder import samples
from actors.recorder.exporter import Exporter, ExporterSpec
from actors.recorder.feed import Feed
from actors.recorder.file import MetricsFile, stream_records
from actors.recorder.history import History
from actors.recorder.records import RECORDED, Record, sample_event
from actors.recorder.tracker_kinds import TrackerSpec, opens, sources
from actors.recorder.trackers import Follower, follow_all
from actors.recorder.trained import LIVES, append_trained, last_trained
from actors.runtime.content import fault_of
from actors.runtime.context import Context
from actors.runtime.deadline import within
from actors.runtime.host import lives
from actors.runtime.prompts import Tokenizer
from actors.runtime.readable import readable
from actors.runtime.run import disk_text
from bus import Bus, Out
from bus.errors import BadMessage
from bus.messages.control import Event
from bus.messages.events import EventKind
from bus.messages.groups import GroupKept
from bus.messages.waits import Wait
from bus.topology import EVENTS, GROUPS, TRAINED

TRACKERS_END_S = 10.0  # for the last points and what a tracker does at its end
AFTER_THE_OTHERS_S = 2.0  # what is left of the drain when it gives up waiting for the others
FULL_S = 1.0  # between two looks whether a full disk has space again
LOOKED_AT = 256  # newest entries of groups, of which a few are kept as text
TEXTS_FROM_S, TEXTS_TO_S = 30.0, 600.0  # between two looks at texts, twice as long each time: a week leaves 10 MB of them


class RecorderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`tokenizer_dir`: turns tokens into the texts that are kept now and then; empty = no texts. `print_every`:
    steps between two texts that are said in any case; 0 = none. `trackers`, `exporter`: who else
    is told; None = nobody."""

    tokenizer_dir: str = ""
    print_every: int = 0
    trackers: TrackerSpec | None = None
    exporter: ExporterSpec | None = None


class Recorder:
    """One per run."""

    def __init__(
        self,
        bus: Bus,
        run_dir: Path,
        spec: RecorderSpec | None = None,
        *,
        unread: Callable[[str], None] = lambda _: None,
        opened: Callable[[History], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
        tell: Callable[[str], Awaitable[None]] = lambda _: asyncio.sleep(0),
        waiting: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`say`: for the log. `tell`, `waiting`: for the operator, that the disk is full.
        `opened`: told when the file is ours alone, with what it holds, which is folded further from then
        on."""
        self._bus = bus
        self._run_dir = run_dir
        self._unread, self._opened, self._log = unread, opened, say
        self._tell, self._waiting, self._stop = tell, waiting, asyncio.Event()
        self._print_every = spec.print_every if spec is not None else 0
        directory = spec.tokenizer_dir if spec is not None else ""
        self._tokenizer = Tokenizer(directory) if directory and (Path(directory) / "tokenizer.json").exists() else None
        self._next_text_s, self._text_pause_s = 0.0, TEXTS_FROM_S

    async def follow(self, stop: asyncio.Event, others_end: Callable[[], Awaitable[bool]] = lambda: asyncio.sleep(0, True)) -> None:
        """Until `stop`, and then until `others_end` and the logs have come to their end. Woken by the blocking read."""
        self._stop = stop
        file = await asyncio.to_thread(MetricsFile, self._run_dir)
        feed = await asyncio.to_thread(self._feed)
        self._opened(feed.history)
        try:
            while not stop.is_set():
                await self._write(file, feed, 0.5)
            while not await others_end():
                await self._write(file, feed, 0.1)
            while await self._write(file, feed, 0.0):
                continue
            await self._write_ledger(file, feed)
        finally:
            await feed.close()
            file.close()

    def _feed(self) -> Feed:
        """Behind what the files hold, which are read line by line: those of a week are larger than memory should hold."""
        past = chain(stream_records(self._run_dir), last_trained(self._run_dir))
        return Feed(self._bus, past, unread=self._unread, streams=(*RECORDED, TRAINED))

    async def _write(self, file: MetricsFile, feed: Feed, block_s: float) -> bool:
        read, more = await feed.read(block_s)
        if told := [record for record in read if record["kind"] in LIVES]:
            await self._on_disk(append_trained, self._run_dir, told)
        records = [record for record in read if record["kind"] not in LIVES]
        await self._on_disk(file.append, records)
        kinds = {record["kind"] for record in records}
        if kinds & {"checkpoint", "finished"}:
            await self._write_ledger(file, feed)
        now = self._bus.clock.monotonic()
        timed, every = now >= self._next_text_s, self._print_every
        asked = every > 0 and any(r["kind"] == "step" and r["step"] % every == 0 for r in records)
        if "step" in kinds and self._tokenizer is not None and (timed or asked):
            if timed:
                self._next_text_s = now + self._text_pause_s
                self._text_pause_s = min(TEXTS_TO_S, 2 * self._text_pause_s)
            trained = next((set(r["groups"]) for r in reversed(records) if r["kind"] == "step"), set())
            texts = await self._texts(self._tokenizer, feed.history.furthest, trained)
            await self._bus.append([Out(EVENTS, text) for text in texts], repeatable=True)
            for text in texts[:1] if asked else ():
                d = text.data
                said = f"step {d['step']} {text.text} reward {d['reward']}: {d['prompt']!r} -> {d['response']!r}"
                self._log(f"First rollout sample: {said}")
        return more

    async def _texts(self, tokenizer: Tokenizer, step: int, trained: set[str]) -> list[Event]:
        """A few groups go into the file of samples, whole. The first and the last member of the newest of them, what the policy
        writes now, are also news."""
        shown: list[Event] = []
        for entry in samples.chosen(await self._bus.last(GROUPS, LOOKED_AT), trained):
            try:
                message = await self._bus.message(entry)
            except BadMessage:
                continue  # the trainer, which reads the stream for work, reports it
            if not isinstance(message, GroupKept) or fault_of(message):
                continue
            kept = [{"step": step, **readable(s, tokenizer.decode, samples.TEXT_CHARS)} for s in message.samples]
            await self._on_disk(samples.append, self._run_dir, kept)
            if not shown:
                both = [message.samples[i] for i in dict.fromkeys((0, len(message.samples) - 1))]
                shown = [sample_event(scored, step, tokenizer.decode, self._bus.clock.wall()) for scored in both]
        return shown

    async def _write_ledger(self, file: MetricsFile, feed: Feed) -> None:
        small = await self._bus.snapshot()
        record: Record = {"kind": "ledger", "wall": self._bus.clock.wall(), "accounts": small.ledger}
        if small.ledger and small.ledger != feed.history.ledger:
            feed.history.fold(record)
            await self._on_disk(file.append, [record])

    async def _on_disk(self, write: Callable[..., None], *args: Any) -> None:
        """Write. While the disk is full it is tried again and again, and what the run tells meanwhile stays on the bus: a record is
        no reason to end. The end of the run does not wait for it."""
        try:
            return await asyncio.to_thread(write, *args)
        except OSError as error:
            full = disk_text(error, (str(self._run_dir),))
            if not full or self._stop.is_set():
                raise
        await self._tell(f"{full}. The run goes on, its record waits")
        with self._waiting(full):
            while True:
                await within(FULL_S, self._stop)
                try:
                    return await asyncio.to_thread(write, *args)
                except OSError as error:
                    if not disk_text(error, ()) or self._stop.is_set():
                        raise


async def run(context: Context, spec: RecorderSpec) -> None:
    """The recorder's process. When the run stops it is the last to go: what the others say at their end is on record too."""
    until = 0.0

    async def others_end() -> bool:
        nonlocal until
        now = context.clock.monotonic()
        until = until or now + max(0.0, context.spec.drain_timeout_s - AFTER_THE_OTHERS_S)
        return now > until or not await _living(context)

    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def say(text: str, *, well: bool = False) -> None:
        from_thread(loop, context.event(EventKind.TRACKER, text, level="info" if well else "warning"))

    followers: list[Follower] = []
    told: list[History] = []

    def opened(history: History) -> None:
        told.append(history)
        if spec.trackers is not None:
            followers.extend(follow_all(opens(spec.trackers), Path(context.spec.run_dir), say, sources(spec.trackers)))
        if spec.exporter is not None:
            tasks.add(asyncio.create_task(Exporter(context.bus, spec.exporter, lambda: history, say).serve()))

    log, run_dir = context.log, Path(context.spec.run_dir)
    recorder = Recorder(
        context.bus, run_dir, spec, unread=log.warning, opened=opened, say=log.info,
        tell=partial(context.event, EventKind.RECORD_WAITS),
        waiting=lambda why: context.waiting(Wait.RECORD_SPACE, first=True, why=why),
    )  # fmt: skip
    try:
        with context.waiting(Wait.NEWS):
            await recorder.follow(context.draining, others_end)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        finished = any(history.finished for history in told)
        await asyncio.to_thread(_end, followers, finished, context.log.warning)


def from_thread(loop: asyncio.AbstractEventLoop, telling: Coroutine[Any, Any, None]) -> None:
    """Have the loop of the actor tell something. Where that has ended there is nobody to tell: a tracker that was too late for the
    end of the run dies without a traceback."""
    try:
        asyncio.run_coroutine_threadsafe(telling, loop)
    except RuntimeError:
        telling.close()


def _end(followers: list[Follower], finished: bool, say: Callable[[str], None]) -> None:
    """Give all trackers one deadline to take the end of the record; what one misses it gets at the run's next start."""
    until = time.monotonic() + TRACKERS_END_S
    for follower in followers:
        follower.end(finished)
    for follower in followers:
        if not follower.join(max(0.0, until - time.monotonic())):
            say(f"{follower.name} did not take the end of the record in {TRACKERS_END_S:.0f} s; it gets it at the run's next start")


async def _living(context: Context) -> bool:
    """Whether any actor still works whose end is worth a line. Workers come and go, and say nothing that a line needs."""
    silences = await context.bus.silences()
    for other in (await context.bus.vitals()).values():
        if other.role in ("generation", "recorder", "launcher") or other.state in ("stopped", "failed"):
            continue
        seen = lives(other)
        if silences.get(other.actor, 0.0) < 5 * context.spec.heartbeat_s if seen is None else seen:
            return True
    return False
