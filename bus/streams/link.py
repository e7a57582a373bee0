"""Connections to the server: one for commands, shared and pipelined, and one for each blocking reader.

A lost connection is retried with jitter until a deadline, then BusUnreachable. Only commands that are safe to repeat go
through `run`: reads, and scripts that check before they write. redis-py's own retries stay off, because they would repeat
appends blindly.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from bus.client import PASSWORD, PASSWORD_FILE, without_secrets
from bus.clock import STALL_S, Awake, Clock
from bus.errors import BusFull, BusRefused, BusUnreachable, BusWentBack, Garbage, InvariantBroken
from bus.streams.keys import kind_of
from bus.streams.wire import Command, Wire

log = logging.getLogger("bus")
T = TypeVar("T")
Waiting = asyncio.Future[Any]
# UNBLOCKED: a blocking read whose server became a replica. NOREPLICAS: a primary that min-replicas-to-write holds.
_REFUSALS = ("OOM", "READONLY", "MISCONF", "UNBLOCKED", "NOREPLICAS", "MASTERDOWN")
_ELSEWHERE = ("READONLY", "UNBLOCKED", "MASTERDOWN")  # of a replica: the primary may be at the same address by now
_IN_SCRIPT = re.compile(r"Error running script \(call to \w+\): .*?: -(?=[A-Z]+ )")
_GARBAGE = re.compile(r"GARBAGE\|([^|]*)\|([^|]*)\|")  # said by commit.lua
SAY_S = 5.0  # of a server that does not answer, after which it is said that it is waited for
CLOSE_S = 3.0  # for what is queued to a server that does not answer, when nobody waits for it any more
BATCH = 128  # commands in one pipelined write
LOGIN = f"Put the user into --bus-url and the password into {PASSWORD} or a file named by {PASSWORD_FILE}."
JOB_BYTES = 256 * 1024  # bodies in one call of a script: the server serves nobody else meanwhile


class Script:
    """A Lua script known by its digest."""

    def __init__(self, name: str) -> None:
        self.source = (Path(__file__).parent / name).read_text()
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class Job:
    """Part of a call of a script that does several jobs at once; the replies come back one for each.

    Jobs of one `lane` may share a call. `fixed` keys come first and are the same in every job of a lane.
    """

    __slots__ = ("args", "fixed", "keys", "lane", "script", "size")

    def __init__(
        self, script: Script, lane: str, *, fixed: Sequence[str], keys: Sequence[str], args: Sequence[Any], size: int
    ) -> None:
        self.script, self.lane, self.size = script, lane, size
        self.fixed, self.keys, self.args = fixed, keys, args


def _said(error: Exception) -> str:
    """The server's words, its code first: Redis 6.2 puts others before those of an error inside a script."""
    text = str(error)
    found = _IN_SCRIPT.match(text)
    return text[found.end() :] if found else text


def refuses_writes(reply: object) -> bool:
    """Whether this reply says that the server takes no writes at present; the command has done nothing."""
    if not isinstance(reply, RedisError):
        return False
    return isinstance(reply, OutOfMemoryError | ReadOnlyError) or _said(reply).startswith(_REFUSALS)


def translate(error: RedisError, shown: str) -> Exception:
    """A server's refusal as an error of ours. `shown`: its address without secrets."""
    text = _said(error)
    if isinstance(error, AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return BusRefused(f"Redis at {shown} refuses us: {text.rstrip('.')}. {LOGIN}")
    if refuses_writes(error) and (isinstance(error, OutOfMemoryError) or text.startswith("OOM")):
        return BusFull(f"Redis at {shown} is out of memory and refuses writes. Raise its maxmemory; nothing acknowledged is lost.")
    if text.startswith("NOREPLICAS"):
        return BusFull(
            f"Redis at {shown} has fewer replicas than its min-replicas-to-write asks for and takes no writes. Start its "
            "replicas or lower that; nothing acknowledged is lost."
        )
    if text.startswith("MISCONF"):
        return BusFull(
            f"Redis at {shown} cannot write what it is told to its disk ({text[:80]}). Free its disk; nothing acknowledged is lost."
        )
    if refuses_writes(error):
        return BusFull(
            f"Redis at {shown} is read-only ({text[:80]}). Make it writable or point --bus-url to the primary; nothing "
            "acknowledged is lost."
        )
    if text.startswith("WRONGTYPE") or "-WRONGTYPE " in text:
        return InvariantBroken(
            f"Redis at {shown} holds something else under a key of this run ({text[:80]}). Another program writes there: remove "
            "the key that is not the run's, or start the run under another --name."
        )
    if found := _GARBAGE.search(text):
        return Garbage.of_hash(found[1], found[2], "no number")
    return InvariantBroken(f"Redis at {shown} answered {text!r} to a command of ours")


class Link:
    """The shared command connection. Callers queue commands; one task writes them in pipelines in order. `shown` is the server's
    address for messages: nothing else of it may be printed."""

    def __init__(self, url: str, clock: Clock, *, deadline_s: float, scripts: Sequence[Script]) -> None:
        self._url = url
        self.shown = without_secrets(url)
        self.clock = clock
        self.deadline_s = deadline_s
        self.server_restarts = 0  # also successors: replicas that were promoted
        self.life = ("", "", "")  # key, field, and what must stand there; see BusConfig
        self.name = ("", "")  # whose jobs these are, and its token (hold.py)
        self.local_address, self.peer_address = "", ""  # see Wire; of the last time that we had to dial
        self._scripts = {script.sha: script for script in scripts}
        self._server = ("", "")
        self._doubted = False  # a connection was lost: which server answers the next one is not known yet
        self._wait_told = False  # that the server is waited for
        self._wire = Wire(url)
        self._bulk, self._bulk_turn = Wire(url), asyncio.Lock()
        self._calls = 0
        self._queue: list[tuple[Command | Job, Waiting]] = []
        self._writer: asyncio.Task[None] | None = None

    async def run(self, *command: Any) -> Any:
        """One command, pipelined with whatever else is queued; safe-to-repeat commands only."""
        return await self._enqueue(command)

    def run_job(self, job: Job) -> Waiting:
        """One job of a script that knows its repetitions, sharing one call with the queued jobs of the same script."""
        return self._enqueue(job)

    def _enqueue(self, what: Command | Job) -> Waiting:
        future: Waiting = asyncio.get_running_loop().create_future()
        self._queue.append((what, future))
        if self._writer is None:
            # Owned by this object: it ends when the queue is empty, and close() waits for it.
            self._writer = asyncio.create_task(self._write_all(), name="bus-writer")
        return future

    async def run_many(self, commands: list[Command], *, repeatable: bool) -> None:
        """Commands in one pipeline of their own; a lost connection is waited out only when twice is harmless."""
        if repeatable:
            replies = await self.retry(lambda: self._send(commands))
        else:
            try:
                replies = await self._send(commands)
            except (ConnectionError, TimeoutError, OSError) as error:
                raise BusUnreachable(
                    f"connection to Redis at {self.shown} was lost while appending ({error}); whether it was stored is "
                    "unknown, so it is not repeated"
                ) from error
        for reply in replies:
            if isinstance(reply, RedisError):
                raise translate(reply, self.shown) from reply

    async def run_script(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """A call of a script that is safe to repeat."""
        self._scripts.setdefault(script.sha, script)
        return await self._enqueue(("EVALSHA", script.sha, len(keys), *keys, *args))

    async def _write_all(self) -> None:
        waiting: list[Waiting | list[Waiting]] = []
        try:
            while self._queue:
                commands, waiting = self._next_batch()
                try:
                    replies = await self.retry(lambda commands=commands: self._exchange(commands))  # type: ignore[misc]
                except Exception as error:  # noqa: BLE001 - every waiter gets it; none is left hanging
                    replies = [error] * len(commands)
                for at, (futures, reply) in enumerate(zip(waiting, replies, strict=True)):
                    if isinstance(reply, RedisError):
                        reply = await self.explained(reply, commands[at])
                    joined = isinstance(futures, list) and not isinstance(reply, Exception)
                    futures = futures if isinstance(futures, list) else [futures]
                    parts = reply if joined else [reply] * len(futures)
                    for future, part in zip(futures, parts, strict=True):
                        if future.done():  # its caller was cancelled
                            continue
                        if isinstance(part, Exception):
                            future.set_exception(part)
                        else:
                            future.set_result(part)
        except asyncio.CancelledError:  # closed meanwhile: none is left hanging
            for left in (*waiting, *(future for _, future in self._queue)):
                for future in left if isinstance(left, list) else [left]:
                    future.cancel()
            self._queue.clear()
            raise
        finally:
            self._writer = None

    def _next_batch(self) -> tuple[list[Command], list[Waiting | list[Waiting]]]:
        """Commands to write together, jobs of a lane joined into one, and who waits for the reply (or its parts) of each."""
        commands: list[Command] = []
        waiting: list[Waiting | list[Waiting]] = []
        jobs: dict[tuple[str, str], list[Job]] = {}
        waiting_jobs: dict[tuple[str, str], list[Waiting]] = {}
        room, taken = JOB_BYTES, 0
        for what, future in self._queue[:BATCH]:
            if isinstance(what, Job):
                if room <= 0:
                    break
                room -= what.size
                lane = (what.script.sha, what.lane)
                jobs.setdefault(lane, []).append(what)
                waiting_jobs.setdefault(lane, []).append(future)
            else:
                commands.append(what)
                waiting.append(future)
            taken += 1
        del self._queue[:taken]
        for (sha, lane_name), group in jobs.items():
            named = group[0].keys if len(group) == 1 else dict.fromkeys(key for job in group for key in job.keys)
            fixed = group[0].fixed
            self._calls += 1
            command = ["EVALSHA", sha, len(fixed) + len(named), *fixed, *named, lane_name, self._calls, len(group), *self.name]
            for job in group:
                command += job.args
            commands.append(tuple(command))
            waiting.append(waiting_jobs[sha, lane_name])
        return commands, waiting

    async def _accepted(self, wire: Wire, commands: list[Command]) -> list[Any]:
        """The replies. What a server refuses that takes no writes for now is sent again until the deadline, after the rest."""
        replies = await wire.exchange(commands)
        until, pause_s = self.clock.monotonic() + 0.9 * self.deadline_s, 0.0
        while refused := [n for n, reply in enumerate(replies) if refuses_writes(reply)]:
            if self.clock.monotonic() >= until:
                break
            pause_s = await self._wait_for_writes(replies[refused[0]], pause_s)
            if str(replies[refused[0]]).startswith(_ELSEWHERE):
                await wire.close()
                await self._note_restart()
            for n, reply in zip(refused, await wire.exchange([commands[n] for n in refused]), strict=True):
                replies[n] = reply
        return replies

    async def _wait_for_writes(self, refusal: RedisError, pause_s: float) -> float:
        """Pause before a refused command is sent again; 0 the first time, which is logged. Returns the next pause."""
        if pause_s == 0:
            log.warning("%s Trying again for %.0f s", translate(refusal, self.shown), self.deadline_s)
        await self.clock.sleep(max(pause_s, 0.05))
        return min(1.0, 2 * max(pause_s, 0.05))

    async def _exchange(self, commands: list[Command]) -> list[Any]:
        replies = await self._accepted(self._wire, commands)
        # A server that does not know a script (a restarted one) has done nothing; it gets the source.
        unknown = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            sources = [("EVAL", self._scripts[commands[n][1]].source, *commands[n][2:]) for n in unknown]
            for n, reply in zip(unknown, await self._wire.exchange(sources), strict=True):
                replies[n] = reply
        return replies

    async def _send(self, commands: list[Command]) -> list[Any]:
        """On a connection of their own: small commands do not queue behind large bodies."""
        async with self._bulk_turn:
            return await self._accepted(self._bulk, commands)

    async def bulk(self, commands: list[Command]) -> None:
        """One attempt of all of them in one write, on the connection for large bodies. Raises the first refusal."""
        async with self._bulk_turn:
            replies = await self._bulk.exchange(commands)
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply

    async def retry(self, attempt: Callable[[], Awaitable[T]], *, deadline_s: float | None = None) -> T:
        """Repeat `attempt` over lost connections until it answers or the deadline passes; also one attempt that hangs. While this
        process itself stood still (SIGSTOP, a frozen container) the server had no chance: the deadline begins anew."""
        allowed_s = self.deadline_s if deadline_s is None else deadline_s
        first = self.clock.monotonic()
        until = first + allowed_s
        pause_s, refused_s, awake = 0.02, 0.0, Awake()
        while True:
            began = self.clock.monotonic()
            try:
                async with asyncio.timeout(allowed_s), awake:  # a server that takes the command and never answers
                    if self._doubted:
                        await self._note_restart()
                    found = await attempt()
                    if self._wait_told:
                        self._wait_told = False
                        log.warning("Redis at %s answers again", self.shown)
                    return found
            except AuthenticationError as error:
                raise translate(error, self.shown) from error
            except (ConnectionError, TimeoutError, BusyLoadingError, OSError) as error:
                self._doubted = True
                now = self.clock.monotonic()
                if awake.stood or now - began > allowed_s + STALL_S:
                    until = now + allowed_s
                if now >= until:
                    why = str(error) or "it hangs"
                    raise BusUnreachable(
                        f"Redis at {self.shown} did not answer for {allowed_s:.0f} s ({why}). Start it or correct "
                        "--bus-url; unacknowledged work is still on the bus and goes on when it is back."
                    ) from error
                if now - first >= SAY_S and not self._wait_told:
                    self._wait_told = True
                    text = "Redis at %s has not answered for %.0f s (%s). Trying for %.0f s in all"
                    log.warning(text, self.shown, now - first, error, allowed_s)
                # Jitter only: decides nothing. An attempt that nobody answered was a pause itself.
                rest_s = max(0.02, pause_s * (0.5 + random.random()) - (now - began))
                await self.clock.sleep(rest_s)
                if (woke := self.clock.monotonic()) - now > rest_s + STALL_S:
                    until = woke + allowed_s
                pause_s = min(1.0, pause_s * 2)
            except ResponseError as error:
                if not refuses_writes(error) or self.clock.monotonic() >= until:
                    raise translate(error, self.shown) from error
                self._doubted = self._doubted or _said(error).startswith(_ELSEWHERE)
                refused_s = await self._wait_for_writes(error, refused_s)

    async def _note_restart(self) -> None:
        """Count a server that is another process or history than before: what it lost must be rebuilt. BusWentBack when it does
        not hold this run, or another life of it."""
        key, field, life = self.life
        facts = [("INFO", "server"), ("INFO", "replication"), ("HGET", key, field)]
        replies = await self._aside(facts if life else facts[:2])
        if life and replies[2] != life.encode():
            raise self.went_back("as it was before" if replies[2] else "without")
        named = dict(line.split(":", 1) for part in replies[:2] for line in part.decode().splitlines() if ":" in line)
        server = named.get("run_id", ""), named.get("master_replid", "")
        if self._server != ("", "") and server != self._server:
            self.server_restarts += 1
        self._server, self._doubted = server, False

    async def explained(self, error: RedisError, command: Command) -> Exception:
        """A refusal as an error of ours, which names the key that holds something of another kind."""
        if "WRONGTYPE" in str(error):
            keys = dict.fromkeys(word for word in command if isinstance(word, str) and word.startswith("ma:{"))
            try:
                kinds = await self._aside([("TYPE", key) for key in keys])
            except (RedisError, OSError):
                kinds = []
            for key, kind in zip(keys, kinds, strict=False):
                if kind.decode() not in ("none", kind_of(key)):
                    return Garbage.of_key(key, f"it is a {kind.decode()}, not a {kind_of(key)}")
        return translate(error, self.shown)

    def went_back(self, how: str = "as it was before") -> BusWentBack:
        """The server holds another life of this run, or none."""
        return BusWentBack(f"Redis at {self.shown} came back {how} this run, which is to be restored from its last checkpoint.")

    async def _aside(self, commands: Sequence[Command]) -> list[Any]:
        """On a connection of their own: the others may be waiting for a server that takes no writes. Raises a refusal."""
        wire = Wire(self._url)
        try:
            replies = await wire.exchange(commands)
            self.local_address, self.peer_address = wire.local_address, wire.peer_address
        finally:
            await wire.close()
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies

    async def open(self) -> None:
        """Connect, remember which server this is, load the scripts."""

        async def first() -> None:
            await self._note_restart()
            await self._aside([("SCRIPT", "LOAD", script.source) for script in self._scripts.values()])

        await self.retry(first)

    async def close(self) -> None:
        """Let queued commands finish, then close. Behind a connection that was lost they are not waited for until the deadline."""
        if (writer := self._writer) is not None:
            await asyncio.wait([writer], timeout=CLOSE_S if self._doubted else None)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        await self._wire.close()
        await self._bulk.close()
