"""Versions for workers that cannot read the files where they lie: which host fetches them from which.

Owns the depot of the trainer's host, opened when the first such worker comes. Hosts make a chain, so that each link carries a
version once: a host passes on what it has while the rest arrives (actors/runtime/fetch.py). Who comes later takes the first
that is free. Always true: nobody's source waits for himself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from actors.publisher.members import Member
from actors.runtime.context import Context
from actors.runtime.delta import make_delta
from actors.runtime.depot import Depot, depot_at
from actors.runtime.fetch import pack_parcel
from actors.runtime.host import place, shared_memory_name
from bus.messages.policy import WeightManifest
from bus.messages.weights import Parcel


class PackedFiles(NamedTuple):
    """What files are. `delta`: what makes them of the parcel `base`."""

    parcel: Parcel
    delta: Parcel | None = None
    base: str = ""


SOON_S = 0.2  # small files are read while the publisher waits, large ones beside it
KEPT = 4  # parcels of the newest files


def source_of(child: str, parents: Mapping[str, str], serving: Mapping[str, str], done: Collection[str]) -> str:
    """The host from which `child` is to fetch (pure). `parents`: host -> its source, empty = the trainer's host, for all that
    were told; `serving`: hosts that serve others, with their addresses; `done`: hosts that have all."""
    below = {child}
    for host in parents:  # also of those that were told before their source was told anew
        if child in _upwards(host, parents):
            below.add(host)
    free = ["", *(host for host in parents if host in serving and host not in below)]
    busy = [parent for host, parent in parents.items() if host not in done and host != child]
    return min(free, key=lambda host: (busy.count(host), free.index(host)))


def _upwards(host: str, parents: Mapping[str, str]) -> list[str]:
    """Its source, the source of that, and so on."""
    found: list[str] = []
    while (host := parents.get(host, "")) and host not in found:
        found.append(host)
    return found


class Elsewhere:
    """See above. `token`: what a source asks for; `address`: the setting; `ours`: where changes may be written beside a version."""

    def __init__(self, context: Context, *, token: str, address: str, ours: str = "") -> None:
        self._context, self._ours = context, ours
        self._token, self._address = token, address
        self._here = shared_memory_name()
        self._depot: Depot | None = None
        self._packing: dict[str, asyncio.Future[PackedFiles | None]] = {}  # each in a thread
        self._last: tuple[Parcel, Path] | None = None  # packed last
        self._bytes_s = math.inf  # at which a whole version came to a host last
        self._folders: dict[str, Path] = {}  # of parcels that were told
        self._version = -1
        self._parents: dict[str, str] = {}  # of that version
        if address:
            self._open()

    def _open(self) -> Depot:
        at = place(self._address, self._context.bus.link.local_address)
        self._depot = depot_at(at, self._depot, self._find, self._token)
        return self._depot

    def _find(self, parcel_id: str) -> Path | None:
        folder = self._folders.get(parcel_id)
        return folder if folder is not None and folder.is_dir() else None

    def withdraw(self, folder: Path) -> None:
        """It is deleted, and its memory needed: what is being sent of it ends, since open files would keep that."""
        for parcel_id, path in self._folders.items():
            if self._depot is not None and path.is_relative_to(folder):
                self._depot.withdraw(parcel_id)

    def among(self, names: Iterable[str], members: Mapping[str, Member]) -> list[str]:
        """Those that see another memory than the trainer's host."""
        return [name for name in names if members[name].memory not in ("", self._here)]

    def heard(self, n_bytes: int, seconds: float) -> None:
        """A version came to a host in so many bytes; those of changes alone tell little of the link."""
        if self._last is not None and seconds > 0 and n_bytes > self._last[0].n_bytes / 2:
            self._bytes_s = n_bytes / seconds

    async def parcel(self, files: WeightManifest) -> PackedFiles | None:
        """What these files are; None while they are being read, or when they are gone. Damaged when they are."""
        path = files.path
        packing = self._packing.get(path)
        if packing is None:
            base = self._last if self._is_ours(path) else None
            pack = partial(_pack, Path(path), files.checksum, base, self._bytes_s)
            packing = asyncio.get_running_loop().run_in_executor(None, pack)
            self._packing[path] = packing
            for old in [p for p, f in self._packing.items() if f.done()][:-KEPT]:
                del self._packing[old]
        await asyncio.wait({packing}, timeout=SOON_S)
        if not packing.done():
            return None
        packed = packing.result()
        if packed is None:
            del self._packing[path]
            return None
        self._folders = {told: folder for told, folder in self._folders.items() if folder.is_dir()}
        self._folders |= {parcel.id: Path(path) for parcel in (packed.parcel, packed.delta) if parcel is not None}
        self._last = packed.parcel, Path(path)
        return packed

    def _is_ours(self, path: str) -> bool:
        return bool(self._ours) and Path(path).resolve().is_relative_to(Path(self._ours).resolve())

    def sources(self, version: int, names: Sequence[str], members: Mapping[str, Member]) -> dict[tuple[str, ...], list[str]]:
        """Addresses in the order in which to try them -> the workers to be told so. Workers of one host have the same."""
        if version != self._version:
            self._version, self._parents = version, {}
        root = self._open().url
        serving = {m.memory: m.depot for _, m in sorted(members.items(), reverse=True) if m.depot}
        done = {m.memory for m in members.values() if m.serving >= version}
        told: dict[tuple[str, ...], list[str]] = {}
        for host in dict.fromkeys(members[name].memory for name in sorted(names)):
            source = source_of(host, self._parents, serving, done)
            self._parents.pop(host, None)  # told anew, it is the last again
            self._parents[host] = source
            way = [serving[h] for h in _upwards(host, self._parents) if h in serving]
            told.setdefault((*way, root), []).extend(n for n in names if members[n].memory == host)
        return told

    async def close(self) -> None:
        """Serve no more."""
        if self._depot is not None:
            await asyncio.to_thread(self._depot.close)


def _pack(folder: Path, written: str, base: tuple[Parcel, Path] | None, bytes_s: float) -> PackedFiles | None:
    try:
        parcel = pack_parcel(folder, written)
    except OSError:
        return None
    if base is not None and base[0].id != parcel.id:
        with contextlib.suppress(OSError):  # it is deleted meanwhile, or there is no room
            return PackedFiles(parcel, make_delta(base[1], folder, parcel, fetch_s=parcel.n_bytes / bytes_s), base[0].id)
    return PackedFiles(parcel)
