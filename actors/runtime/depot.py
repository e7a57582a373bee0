"""Serves the files of versions to other hosts: by range, to who shows the run's token, and while they still arrive here.

One thread a connection and none of the actor's own: the kernel copies from the file to the socket, so neither training nor
requests wait for it. Nothing is served but files that lie directly in a folder that `find` gives for an id.
"""

from __future__ import annotations

import hmac
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, BinaryIO

from bus.errors import BusRefused

AT_ONCE = 4  # files on their way; who comes then is to try another source
CONNECTIONS = 64
WITHOUT_TOKEN = 32  # of these: who comes then ends the oldest of them
GRACE_S, TOKEN_S = 2.0, 10.0  # from a connection to a whole request that shows the token: usually, and at most
PATIENCE_S = 5.0  # for bytes that are not here yet
IDLE_S = 10.0  # for a peer that takes or says nothing
LOOK_S = 0.005  # another process may write the file: only its size tells
MOST = 1 << 20  # bytes of one call

ID, NAME = r"[0-9a-f]{32}", r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
_PATH = re.compile(f"/({ID})/({NAME})")
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")

Find = Callable[[str], Path | None]


class Depot:
    """Listens from its making until `close`. `host` as it is to be said to others; `bind`, `port`: where to listen, 0 = a free
    one. BusRefused when that cannot be had."""

    def __init__(self, find: Find, token: str, *, host: str = "", bind: str = "", port: int = 0) -> None:
        self.at = host, bind, port
        try:
            self._server = _Server((bind, port), find, f"Bearer {token}".encode())
        except OSError as error:
            raise BusRefused(
                f"cannot serve weights at {bind or '*'}:{port}: {error.strerror or error}. Correct --weights-address."
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="depot", daemon=True).start()

    def withdraw(self, parcel_id: str) -> None:
        """Send no more of this one, which is deleted: a file that is open stays in memory."""
        self._server.withdrawn.add(parcel_id)

    def close(self) -> None:
        """Listen no more; what is on its way ends with the process."""
        self._server.shutdown()
        self._server.server_close()


def depot_at(at: tuple[str, str, int], old: Depot | None, find: Find, token: str) -> Depot:
    """The depot at this place (see `place`): the `old` one where it is there, else a new one, and the old one ends: the host has
    another address. One that cannot be had yet leaves the old one; BusRefused when there is none."""
    if old is not None and old.at == at:
        return old
    host, bind, port = at
    try:
        made = Depot(find, token, host=host, bind=bind, port=port)
    except BusRefused:
        if old is None:
            raise
        return old
    if old is not None:
        threading.Thread(target=old.close, name="depot", daemon=True).start()  # which waits for it
    return made


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(self, address: tuple[str, int], find: Find, bearer: bytes) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.find, self.bearer = find, bearer
        self.withdrawn: set[str] = set()
        self.files = threading.BoundedSemaphore(AT_ONCE)
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # connections without a token, the oldest first: when they began
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._end_strangers(WITHOUT_TOKEN - 1)
            self._strangers[request] = time.monotonic()
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.admit(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.admit(request)
            self._room.release()

    def service_actions(self) -> None:
        """Each half second, by socketserver: those that are late."""
        with self._lock:
            self._end_strangers(CONNECTIONS)

    def admit(self, request: socket.socket) -> bool:
        """It has shown the token, or ended; whether it was still waited for."""
        with self._lock:
            return self._strangers.pop(request, None) is not None

    def _end_strangers(self, most: int) -> None:
        """Those that are late, and the oldest beyond `most`: their thread reads the end of the connection."""
        now = time.monotonic()
        for request, since in list(self._strangers.items()):
            if now - since < (TOKEN_S if len(self._strangers) <= most else GRACE_S):
                return
            del self._strangers[request]
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that hung up: it comes again, or goes elsewhere."""


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE_S
    server: _Server

    def do_GET(self) -> None:
        """`/<id>/<name>` with `Range: bytes=FIRST-LAST`, both included."""
        shown = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(shown, self.server.bearer):
            self._answer(401)
            return
        self.server.admit(self.connection)
        named, asked = _PATH.fullmatch(self.path), _RANGE.fullmatch(self.headers.get("Range", ""))
        if named is None or asked is None or int(asked[1]) > int(asked[2]):
            self._answer(400)
            return
        if not self.server.files.acquire(blocking=False):
            self._answer(503)
            return
        try:
            file = self._open(named[1], named[2])
            if file is None:
                self._answer(404)
                return
            with file:
                self._send(named[1], file, int(asked[1]), int(asked[2]) + 1)
        finally:
            self.server.files.release()

    def _open(self, version: str, name: str) -> BinaryIO | None:
        """The file, or what is here of it; waits for one that a peer is about to get."""
        until = time.monotonic() + PATIENCE_S
        while (folder := self.server.find(version)) is not None:
            for path in (folder / f"{name}.part", folder / name):  # in this order: the first becomes the second
                try:
                    return path.open("rb")
                except FileNotFoundError:
                    continue
            if time.monotonic() > until:
                break
            time.sleep(LOOK_S)
        return None

    def _send(self, version: str, file: BinaryIO, at: int, end: int) -> None:
        self._answer(206, end - at)
        until = time.monotonic() + PATIENCE_S
        while at < end and version not in self.server.withdrawn:
            here = min(os.fstat(file.fileno()).st_size, end) - at
            if here > 0:
                at += self.connection.sendfile(file, at, min(here, MOST))
                until = time.monotonic() + PATIENCE_S
            elif time.monotonic() > until:
                return  # the reader sees that it is cut
            else:
                time.sleep(LOOK_S)

    def _answer(self, status: int, size: int = 0) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(size))
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Not to stderr, line by line."""
