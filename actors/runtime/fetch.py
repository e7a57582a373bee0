"""A version's files from other hosts: from the first source that has them, piece by piece, each checked before it counts.

    <folder>/<name>.part     whole pieces, in order; its size is the progress, from which readers and a successor go on
    <folder>/<name>          complete

Always true: what lies in either was checked against the parcel's checksums. One process of a host fetches, the others wait.
A source that cannot be reached or does not have it is asked last from then on; when the last one named, the version's own host,
has it no more, nobody will, and the fetch ends at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from actors.runtime.checksum import checksum, checksum_of_version
from actors.runtime.depot import ID, NAME
from bus.errors import BadMessage, MilesAsyncError, Transient
from bus.messages.weights import Parcel, ParcelFile

PIECES, LEAST_PIECE, MOST_PIECE = 64, 64 << 10, 64 << 20  # a relay begins to serve after one piece
DIGEST = 16  # bytes
CONNECT_S = 2.0  # TCP asks after 0, 1 and 3 s: who asked in vain a second ago asks anew, or the next source
STALL_S = 6.0  # without a byte: longer than a source itself waits for its own
PAUSE_S = 0.25  # after no source had it
SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")  # of what an engine may read


class FetchFailed(Transient):
    """The files did not come in time, or nobody waits for them any more."""


class _Refused(Exception):
    """A source does not give it, or gives something else."""


class _Gone(_Refused):
    """The source answers that it does not have it."""


class _Away(_Refused):
    """The source is not reached, or says nothing."""


class Damaged(MilesAsyncError):
    """The files are not those that were written."""


def pack_parcel(folder: Path, written: str = "", suffixes: Sequence[str] = SUFFIXES) -> Parcel:
    """Names, sizes and checksums of the files in a folder. Raises OSError; Damaged where the weights have not the checksum
    `written` (empty = any). Reads all of it."""
    if written and checksum_of_version(folder) != written:
        raise Damaged(f"weights in {folder} do not match their checksum")
    paths = sorted(p for p in folder.iterdir() if p.suffix in suffixes and not p.name.startswith(".") and p.is_file())
    total = sum(path.stat().st_size for path in paths)
    piece = min(max(total // PIECES, LEAST_PIECE), MOST_PIECE)
    files = tuple(_describe(path, piece) for path in paths)
    name = checksum()
    for file in files:
        name.update(f"{file.name} {file.n_bytes} {piece}\n".encode() + file.pieces)
    return Parcel(id=name.hexdigest(), piece_bytes=piece, files=files)


def check_parcel(parcel: Parcel) -> None:
    """BadMessage for names that lead elsewhere, or sizes that do not go together: it came over the bus."""
    sound = re.fullmatch(ID, parcel.id) is not None and 0 < parcel.piece_bytes <= MOST_PIECE
    for file in parcel.files:
        n_pieces = -(-file.n_bytes // parcel.piece_bytes) if sound else 0
        sound = sound and re.fullmatch(NAME, file.name) is not None and len(file.pieces) == DIGEST * n_pieces
    if not sound:
        raise BadMessage(f"the parcel {parcel.id[:40]!r} does not describe files")


def _describe(path: Path, piece: int) -> ParcelFile:
    digests, size = [], 0
    with path.open("rb") as file:
        while data := file.read(piece):
            size += len(data)
            digests.append(checksum(data).digest())
    return ParcelFile(path.name, size, b"".join(digests))


class Fetch:
    """One parcel into `folder`, which is private to us. `run` blocks: for a thread. `deadline_s`: longest time without a piece.
    `came` hears the bytes of each piece; `pointless` is asked when no source has given any. `earlier`: folders of other versions,
    whose small files, where they are the same, need not come again. `first`: what may make files otherwise, while others wait.
    BadMessage for a parcel that is none."""

    def __init__(
        self,
        parcel: Parcel,
        folder: Path,
        sources: Sequence[str],
        *,
        token: str,
        deadline_s: float,
        came: Callable[[int], None],
        pointless: Callable[[], bool] = lambda: False,
        earlier: Iterable[Path] = (),
        first: Callable[[], None] = lambda: None,
    ) -> None:
        check_parcel(parcel)
        self._parcel, self._folder, self._earlier = parcel, folder, tuple(earlier)
        self._sources, self._origin = list(sources), sources[-1] if sources else ""
        self._token, self._deadline_s, self._came = token, deadline_s, came
        self._pointless, self._first = pointless, first
        self._halt = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._why = "no source was named"

    def stop(self) -> None:
        """Let `run` end soon with FetchFailed; what came stays."""
        self._halt.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(2)

    def run(self) -> None:
        """Until all files are here. Raises FetchFailed, and OSError when they cannot be written."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        os.utime(self._folder)
        with (self._folder / ".lock").open("w") as lock:
            self._take_turn(lock)
            self._first()
            self.bring()

    def bring(self) -> None:
        """As `run`, for who has the turn."""
        for file in self._parcel.files:
            self._bring(file)

    def _take_turn(self, lock: IO[str]) -> None:
        """Another worker of this host may be fetching it; one that dies lets go, one that stands still is waited for until the
        deadline."""
        until, seen = time.monotonic() + self._deadline_s, 0
        while not self._halt.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                self._halt.wait(0.05)
            if (here := _bytes_in(self._folder)) > seen:
                until, seen = time.monotonic() + self._deadline_s, here
            if time.monotonic() > until:
                raise FetchFailed(f"another worker of this host is fetching it, and has stood still for {self._deadline_s:g} s")
        raise FetchFailed("given up")

    def _bring(self, file: ParcelFile) -> None:
        whole, part = self._folder / file.name, self._folder / f"{file.name}.part"
        if whole.exists() or self._had(file, whole, part):
            return
        with part.open("ab") as out:
            size = min(out.tell(), file.n_bytes)
            if size < file.n_bytes:
                size -= size % self._parcel.piece_bytes  # a killed writer's last piece may be cut
            out.truncate(size)
            self._fill(file, out, size)
        part.rename(whole)

    def _had(self, file: ParcelFile, whole: Path, part: Path) -> bool:
        """Whether an earlier version's file of one piece is this one, as configurations and tokenizers are; it is then linked."""
        if len(file.pieces) != DIGEST:
            return False
        for folder in self._earlier:
            with contextlib.suppress(OSError):  # it may be taken away meanwhile
                was = folder / file.name
                if was.stat().st_size == file.n_bytes and checksum(was.read_bytes()).digest() == file.pieces:
                    whole.hardlink_to(was)
                    part.unlink(missing_ok=True)  # a killed writer's; sources would wait for its rest
                    return True
        return False

    def _fill(self, file: ParcelFile, out: IO[bytes], have: int) -> None:
        until = time.monotonic() + self._deadline_s
        while have < file.n_bytes:
            said: dict[str, type[_Refused]] = {}
            for source in list(self._sources):
                try:
                    for piece in self._pieces(source, file, have):
                        out.write(piece)
                        out.flush()  # whoever fetches from us reads it there
                        have += len(piece)
                        self._came(len(piece))
                        until = time.monotonic() + self._deadline_s
                    break
                except _Refused as error:
                    self._why, said[source] = f"{source}: {error}", type(error)
                if said.get(source) in (_Away, _Gone):  # it may have taken its time to say so
                    self._sources.remove(source)
                    self._sources.append(source)
                if self._halt.is_set():
                    raise FetchFailed("given up")
            else:
                gone = said.get(self._origin) is _Gone and {*said.values()} <= {_Gone, _Away}
                if not self._pointless():
                    self._halt.wait(PAUSE_S)
                if gone or time.monotonic() > until or self._pointless():
                    raise FetchFailed(f"{file.name} stopped at {have} of {file.n_bytes} bytes: {self._why}")

    def _pieces(self, source: str, file: ParcelFile, have: int) -> Iterator[memoryview]:
        """Checked pieces from `have` on, in one answer."""
        at = urlsplit(source)
        connection = http.client.HTTPConnection(at.hostname or "127.0.0.1", at.port, timeout=CONNECT_S)
        self._connection = connection
        try:
            connection.connect()
            connection.sock.settimeout(STALL_S)
            asked = {"Authorization": f"Bearer {self._token}", "Range": f"bytes={have}-{file.n_bytes - 1}"}
            connection.request("GET", f"/{self._parcel.id}/{file.name}", headers=asked)
            answer = connection.getresponse()
            if answer.status == 404:
                raise _Gone("it does not have it")
            if answer.status != 206:
                raise _Refused(_WORDS.get(answer.status, f"it answers {answer.status}"))
            buffer = memoryview(bytearray(min(self._parcel.piece_bytes, file.n_bytes - have)))
            while have < file.n_bytes:
                index = have // self._parcel.piece_bytes
                piece = buffer[: min(self._parcel.piece_bytes, file.n_bytes - have)]
                _read_all(answer, piece)
                if checksum(piece).digest() != file.pieces[index * DIGEST : (index + 1) * DIGEST]:
                    raise _Refused(f"piece {index} of {file.name} is damaged")
                yield piece
                have += len(piece)
        except (OSError, http.client.HTTPException) as error:
            raise _Away(str(error) or type(error).__name__) from error
        finally:
            self._connection = None
            connection.close()


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # it has its whole name by now
            total += file.stat().st_size
    return total


_WORDS = {401: "it refuses the run's token", 503: "it is busy"}


def _read_all(answer: http.client.HTTPResponse, into: memoryview) -> None:
    got = 0
    while got < len(into):
        n = answer.readinto(into[got:])
        if not n:
            raise _Refused("it broke off")
        got += n
