"""A private Redis server of one run: a child process on a unix socket in the run directory, with an append-only file.

Owns `<directory>/redis.sock` and `<directory>/redis/` (redis.conf, redis.log, redis.pid, lock, append-only file).
Invariant: at most one server per directory. The child holds a lock on `redis/lock` for as long as it lives, whoever
started it; so a later launcher knows without guessing whether to start one or to adopt the one that runs.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from bus.errors import BusRefused, BusUnreachable
from bus.private import is_private, private_directory
from bus.server.appendonly import DAMAGED, damage_in, shorten
from bus.server.binary import PATH_NAMES, ServerBinary, find_server

SOCKET_PATH_MAX_BYTES = 107  # sockaddr_un.sun_path, less its closing zero
START_DEADLINE_S = 120.0  # in which a server answers, or reads more of its append-only file
STOP_DEADLINE_S = 20.0
_ASK_DEADLINE_S = 2.0
_LOADING_DEADLINE_S = 20.0  # a server that reads its file answers between two parts of it
_PAUSE_S = 0.01


class EmbeddedRedis:
    """Starts, adopts, stops and kills the server of one directory. Calls block; from a loop use `asyncio.to_thread`.

    The server has its own session, so a Ctrl-C in the launcher's terminal does not reach it, and it outlives a launcher
    that is killed: the next `start()` in the same directory adopts it.
    """

    def __init__(self, directory: Path, *, binary: ServerBinary | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.home = self.directory / "redis"
        self.log_path = self.home / "redis.log"
        self._binary = binary
        self._child: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    @property
    def socket_path(self) -> Path:
        """Where clients connect: `<directory>/redis.sock`, or what that link names when the path itself is too long."""
        socket = self.directory / "redis.sock"
        if _fits(socket):
            return socket
        if socket.is_symlink():
            return socket.readlink()
        raise BusUnreachable(f"no server was started in {self.directory}. Start the run first.")

    @property
    def url(self) -> str:
        """The unix:// URL for clients."""
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None when stopped."""
        return self._pid

    @property
    def started_here(self) -> bool:
        """Whether this object started the running server; False for an adopted one."""
        return self._child is not None

    def start(self, *, deadline_s: float = START_DEADLINE_S) -> None:
        """Adopts the server that owns the directory or starts one, and returns when it answers.

        Raises BusRefused if the server exits, BusUnreachable if for `deadline_s` it neither answers nor reads more of its
        append-only file, which takes its time on a busy machine; the message ends with the last line of its log.
        """
        if self.is_alive():
            return
        private_directory(self.directory)
        private_directory(self.home)
        late = self._late(deadline_s)
        while True:
            lock = self._take_lock()
            if lock is not None:
                try:
                    self._spawn(lock, late)
                finally:
                    os.close(lock)  # the child keeps its own copy, and with it the lock
                return
            owner = self._ask_owner()
            if owner is not None:
                self._pid = owner
                return
            if late():
                raise BusUnreachable(
                    f"a server owns {self.directory} but did not answer on its socket within {deadline_s:g} s "
                    f"({self._last_log_line()}). Wait for it or end it, then start again."
                )
            time.sleep(_PAUSE_S)

    async def open(self) -> None:
        """`start`, in a thread. When this is cancelled, what it started is not left behind."""
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait((starting,))  # it has a deadline of its own
            if self.started_here:
                await asyncio.to_thread(self.stop)
            raise

    def adopt(self) -> bool:
        """Take over a server that owns the directory and answers; False when there is none. Starts nothing."""
        self._pid = self._ask_owner() if self._owned() else None
        return self._pid is not None

    def stop(self, *, deadline_s: float = STOP_DEADLINE_S) -> None:
        """Ends the server in order (its file is flushed), or by force when it does not obey. No-op when not running. One of this
        directory's that outlived its files, removed under it, ends too."""
        for pid in self._strays():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self._signal(signal.SIGTERM):
            return
        if not self._wait_until_gone(deadline_s):
            self._signal(signal.SIGKILL, confirmed=True)
            self._wait_until_gone(deadline_s)
        self._forget()
        self._remove_short_socket()

    def kill(self) -> None:
        """SIGKILL, as a crash would; what the append-only file holds comes back at the next `start()`."""
        if self._signal(signal.SIGKILL):
            self._wait_until_gone(STOP_DEADLINE_S)
        self._forget()

    def is_alive(self) -> bool:
        """Whether the server that this object started or adopted still runs."""
        if self._child is not None:
            return self._child.poll() is None
        if self._pid is None:
            return False
        return self._owned()

    # -- internals ---------------------------------------------------------------------------------------------------

    def _take_lock(self) -> int | None:
        """A file descriptor that holds the directory's lock, or None while a living server (or starter) holds it."""
        fd = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def _owned(self) -> bool:
        lock = self._take_lock()
        if lock is None:
            return True
        os.close(lock)
        return False

    def _late(self, deadline_s: float) -> Callable[[], bool]:
        """Whether `deadline_s` have gone by since now, or since a deadline at which it had read more than at the one before."""
        end, read = time.monotonic() + deadline_s, -1

        def late() -> bool:
            nonlocal end, read
            if time.monotonic() <= end:
                return False
            before, read = read, self._bytes_read()
            end = time.monotonic() + deadline_s
            return read <= before

        return late

    def _spawn(self, lock: int, late: Callable[[], bool]) -> None:
        binary = self._binary or find_server()
        shorten(self.home)
        socket = self._choose_socket()
        config = self.home / "redis.conf"
        config.write_text(self._config(socket), encoding="utf-8", errors="surrogateescape")
        with self.log_path.open("ab") as log:
            said_before = log.tell()
            self._child = subprocess.Popen(
                [str(binary.path), str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                umask=0o077,
                start_new_session=True,
                pass_fds=(lock,),
            )
        while self._ask_owner() != self._child.pid:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=_PAUSE_S)
            code = self._child.poll()
            if code is not None:
                self._forget()
                damage = damage_in(self.log_path, said_before)
                said, remedy = (damage, f" Its file is damaged. {DAMAGED}") if damage else (self._last_log_line(), "")
                raise BusRefused(f"{binary.path} exited with {code} in {self.directory}: {said}. Read {self.log_path}.{remedy}")
            if late():
                self._child.kill()
                self._child.wait(STOP_DEADLINE_S)
                self._forget()
                raise BusUnreachable(
                    f"{binary.path} in {self.directory} did not answer in time: {self._last_log_line()}. Read {self.log_path}."
                )
        self._pid = self._child.pid

    def _config(self, socket: Path) -> str:
        """The whole configuration; nothing is taken from a system-wide file."""
        settings = {
            "port": "0",
            "unixsocket": _quoted(socket),
            "unixsocketperm": "700",
            "dir": _quoted(self.home),
            "pidfile": _quoted(self.home / "redis.pid"),
            "daemonize": "no",
            "databases": "1",
            "maxmemory": "0",
            "maxmemory-policy": "noeviction",
            "save": '""',
            "stop-writes-on-bgsave-error": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            # Bodies pass through and are deleted, so the file grows while the data does not: rewrite less often.
            "auto-aof-rewrite-min-size": "256mb",
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())

    def _choose_socket(self) -> Path:
        """The path to bind. When it is too long: a private short directory, recorded by the link `redis.sock`."""
        socket = self.directory / "redis.sock"
        if not _fits(socket):
            link, known = socket, socket.is_symlink()
            socket = link.readlink() if known else link
            if not known or not is_private(socket.parent):
                socket = Path(tempfile.mkdtemp(prefix="miles-async-")) / "redis.sock"
                link.unlink(missing_ok=True)
                link.symlink_to(socket)
        socket.unlink(missing_ok=True)  # the lock says that nobody listens on it
        return socket

    def _remove_short_socket(self) -> None:
        link = self.directory / "redis.sock"
        if link.is_symlink() and is_private(link.readlink().parent):
            shutil.rmtree(link.readlink().parent)
            link.unlink()

    def _ask_owner(self) -> int | None:
        """Process id of the server on the socket, if it answers and works in this directory."""
        client = self._client(_ASK_DEADLINE_S)
        if client is None:
            return None
        with closing(client):
            try:
                client.ping()
                works_in = str(client.config_get("dir")["dir"])
                pid = int(client.info("server")["process_id"])
            except (RedisError, OSError):
                return None  # not there yet, still loading, or not ours
        return pid if os.path.realpath(works_in) == os.path.realpath(self.home) else None

    def _bytes_read(self) -> int:
        """Of its append-only file, by a server that starts; more than any file has once it is through, -1 if it does not answer."""
        client = self._client(_LOADING_DEADLINE_S)
        if client is None:
            return -1
        with closing(client):
            try:
                found = client.info("persistence")
                return int(found["loading_loaded_bytes"]) if found["loading"] else sys.maxsize
            except (RedisError, OSError, KeyError):
                return -1

    def _client(self, deadline_s: float) -> redis.Redis | None:
        link = self.directory / "redis.sock"
        if not _fits(link) and not link.is_symlink():
            return None
        return redis.Redis(
            unix_socket_path=str(self.socket_path),
            protocol=2,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            retry=Retry(NoBackoff(), 0),
            encoding_errors="surrogateescape",
            decode_responses=True,
        )

    def _signal(self, number: signal.Signals, *, confirmed: bool = False) -> bool:
        """Signals the server if it is certain which process that is: our unreaped child, or what the socket names.

        `confirmed`: the socket named it a moment ago and the directory's lock is still held, so it is the same one.
        """
        if self._child is not None:
            if self._child.poll() is None:
                self._child.send_signal(number)
                return True
            return False
        if self._pid is None or not self._owned():
            return False
        if not confirmed and self._ask_owner() != self._pid:
            raise BusUnreachable(
                f"server {self._pid} in {self.directory} does not confirm its identity, so it was not signalled. "
                "Check that process and end it by hand."
            )
        os.kill(self._pid, number)
        return True

    def _strays(self) -> list[int]:
        """Servers of ours whose directory had this one's name, and is no more (Linux)."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                gone = os.readlink(process / "cwd") == f"{self.home.resolve()} (deleted)"
                if gone and (process / "comm").read_text().strip() in PATH_NAMES:
                    found.append(int(process.name))
        return found

    def _wait_until_gone(self, deadline_s: float) -> bool:
        if self._child is not None:
            try:
                self._child.wait(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                return False
            return True
        end = time.monotonic() + deadline_s
        while self._owned():
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_S)
        return True

    def _forget(self) -> None:
        self._child = None
        self._pid = None

    def _last_log_line(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode("utf-8", "replace").split("\n")
        except OSError as error:
            return f"its log cannot be read: {error.strerror}"
        return next((line.strip().rstrip(".") for line in reversed(lines) if line.strip()), "its log is empty")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES


def _quoted(path: Path) -> str:
    """The path as a redis.conf string: bytes outside plain printable ASCII as \\xHH."""
    out = "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in os.fsencode(path))
    return f'"{out}"'
