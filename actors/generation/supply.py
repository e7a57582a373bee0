"""Versions that come to this host over the network: fetched into its shared memory, and served to the next host.

Owns this host's folder of fetched versions, together with the run's other workers here, and this worker's depot.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from actors.runtime.context import Context
from actors.runtime.delta import XOR, apply_delta
from actors.runtime.depot import ID, Depot, depot_at
from actors.runtime.fetch import Damaged, Fetch, FetchFailed
from actors.runtime.host import SHARED, place
from actors.runtime.in_memory import NAME, delete_unused, sweep_left, use
from bus.messages.active import Activate
from bus.messages.weights import Parcel
from bus.private import private_directory

KEPT = 2  # versions: the one served, and the one before, which the next host may still be fetching
TOLD = 1_000  # parcels of the newest orders, as many as their log keeps


class Supply:
    """Nothing is opened before `open`. `serves`: other hosts may fetch from here, at `address` (HOST[:PORT], see `place`)."""

    def __init__(self, context: Context, *, token: str, serves: bool, address: str, deadline_s: float) -> None:
        self._context, self._token = context, token
        self._serves, self._address, self._deadline_s = serves, address, deadline_s
        own = f"{context.bus.config.run} {token}".encode()
        name = NAME.format(os.getuid(), f"{hashlib.blake2b(own, digest_size=6).hexdigest()}-fetched")
        roots = [root for root in (SHARED, Path(context.spec.run_dir or tempfile.gettempdir())) if root.is_dir()]
        self._homes = [root / name for root in roots]  # shared memory first
        self._depot: Depot | None = None
        self._fetches: tuple[Fetch, ...] = ()  # under way
        self.fetched: dict[str, Any] = {}  # bytes and seconds of the fetch that ended last
        self._used: dict[Path, int] = {}  # our folders, with a lock that says so
        self._at_hand: int | None = None  # the same of the version that comes or came last
        self._told: dict[str, int] = {}  # parcels of orders, whoever they are for, and their versions
        self._newest, self._coming = -1, ""  # version of an order; the parcel that is on its way here
        self._deltas: dict[str, str] = {}  # those of orders, and the parcels that they make
        self._taken: dict[str, None] = {}  # those that come or came here

    def open(self) -> None:
        """Serve, if we are to, and free what workers of other runs left here. BusRefused when the port is taken."""
        sweep_left(self._homes)
        self.serve()

    def serve(self) -> None:
        """Serve, if we are to, where others reach this host, which may have another address by now. BusRefused when the port is
        taken."""
        at = place(self._address, self._context.bus.link.local_address)
        if self._serves and at[0]:
            self._depot = depot_at(at, self._depot, self._find, self._token)
            self._context.depot = self._depot.url

    def know(self, order: Activate) -> None:
        """An order was heard, ours or a peer's: what is older than the newest will not come here any more."""
        self.serve()
        self._newest = max(self._newest, order.version.id)
        if order.parcel is not None:
            self._told.pop(order.parcel.id, None)
            self._told[order.parcel.id] = order.version.id
            if order.delta is not None:
                self._deltas[order.delta.id] = order.parcel.id
            for kept in (self._told, self._deltas, self._taken):
                for old in list(kept)[:-TOLD]:
                    del kept[old]

    def _find(self, parcel_id: str) -> Path | None:
        """Also of one that will be here soon. A host that comes back asks for what it was told before its link broke: it is to know
        at once that this is gone, since only then it looks at what is newer."""
        makes = self._deltas.get(parcel_id)
        if makes is not None and parcel_id not in self._taken and self._is_begun(makes):
            return None
        parcel_id = makes or parcel_id
        found = [home / parcel_id for home in self._homes if (home / parcel_id).is_dir()]
        if found:
            return found[0]
        is_past = parcel_id != self._coming and self._told.get(parcel_id, self._newest) < self._newest
        return None if is_past else self._homes[0] / parcel_id

    def _is_begun(self, parcel_id: str) -> bool:
        return any((home / parcel_id).is_dir() for home in self._homes)

    async def bring(self, order: Activate, given_up: Callable[[], bool] = lambda: False) -> Path:
        """The folder with an order's files. FetchFailed when nobody had them for the deadline, or now and it is given up (there
        is a newer order: while bytes come, this one goes on, or a slow link would never serve any), when we drain, or at `stop`;
        OSError when there is no room; BadMessage."""
        assert order.parcel is not None
        self.know(order)
        context = self._context

        parcel, note = order.parcel, context.note
        began, here = context.clock.monotonic(), 0

        def came(n_bytes: int) -> None:
            nonlocal here
            here += n_bytes
            context.received += n_bytes
            rate = here / max(1e-3, context.clock.monotonic() - began)
            context.note = f"has {here / 1e6:.0f} of {parcel.n_bytes / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s"

        self._let_go()
        folder = self._home(parcel.n_bytes) / parcel.id
        folder.mkdir(mode=0o700, exist_ok=True)
        self._at_hand = use(folder)
        earlier = [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]
        sources = [self._complete(source) for source in order.sources]
        fetching = partial(
            Fetch, folder=folder, sources=sources, token=self._token, deadline_s=self._deadline_s, came=came, pointless=given_up
        )
        base = folder.parent / (order.base if re.fullmatch(ID, order.base) else "none")
        changes = fetching(order.delta) if order.delta is not None and _is_whole(base, order.delta, parcel) else None

        loop = asyncio.get_running_loop()

        def by_changes() -> None:
            if changes is not None and order.delta is not None:
                self._taken[order.delta.id] = None
                try:
                    changes.bring()
                    apply_delta(base, folder, parcel, order.delta)
                except (FetchFailed, Damaged, OSError) as error:  # all of it comes instead
                    loop.call_soon_threadsafe(context.count, "deltas_failed")
                    context.log.warning("version %d is fetched whole: %s", order.version.id, error)

        fetch = fetching(parcel, earlier=earlier, first=by_changes)
        self._fetches = (fetch, changes) if changes is not None else (fetch,)
        self._coming, context.takes = parcel.id, order.version.id
        context.news.set()  # its files are kept for us
        try:
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(asyncio.to_thread(fetch.run))
                drain = tasks.create_task(context.draining.wait())
                await asyncio.wait((work, drain), return_when=asyncio.FIRST_COMPLETED)
                drain.cancel()
                if not work.done():
                    self.stop()
        except* FetchFailed as group:
            raise FetchFailed(str(group.exceptions[0])) from None
        except* OSError as group:
            raise group.exceptions[0] from None
        finally:
            self._fetches, self._coming, context.note, context.takes = (), "", note, -1
        self.fetched = {"fetched": here, "fetch_s": context.clock.monotonic() - began}
        return folder

    def _let_go(self) -> None:
        """The version that came last is loaded by now, or will not be."""
        if self._at_hand is not None:
            os.close(self._at_hand)
            self._at_hand = None

    def stop(self) -> None:
        """End the fetch under way, if any."""
        for fetch in self._fetches:
            fetch.stop()

    def _complete(self, source: str) -> str:
        """The address of a source that is on the bus's host, as we reach that."""
        at = urlsplit(source)
        if at.hostname:
            return source
        host = self._context.bus.link.peer_address or "127.0.0.1"
        return f"http://[{host}]:{at.port}" if ":" in host else f"http://{host}:{at.port}"

    def _home(self, n_bytes: int) -> Path:
        """Our folder, in shared memory where two versions have room, with old versions gone."""
        for home in self._homes:
            if home.is_dir():
                here = sorted((p for p in home.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
                for old in here[: 1 - KEPT]:
                    delete_unused(old)  # else another worker here is still at it
        roomy = [home for home in self._homes if shutil.disk_usage(home.parent).free > 1.1 * n_bytes]
        home = private_directory((roomy or self._homes)[0])
        if home not in self._used:
            self._used[home] = use(home)
        return home

    async def close(self) -> None:
        """Serve no more; the last worker of the run on this host takes the folder away."""
        if self._depot is not None:
            await asyncio.to_thread(self._depot.close)
        self._let_go()
        for home, handle in self._used.items():
            os.close(handle)
            delete_unused(home)
        self._used = {}


def _is_whole(base: Path, delta: Parcel, parcel: Parcel) -> bool:
    """Whether the large files of the version before are here."""
    sizes = {file.name: file.n_bytes for file in parcel.files}
    names = [file.name.removesuffix(XOR) for file in delta.files]
    with contextlib.suppress(OSError):
        return all((base / name).stat().st_size == sizes.get(name) for name in names)
    return False
