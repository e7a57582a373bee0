"""Versions that come to this host over the network: fetched into its shared memory, and served to the next host.

Owns this host's folder of fetched versions, together with the run's other workers here, and this worker's depot.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from actors.runtime.context import Context
from actors.runtime.depot import Depot
from actors.runtime.fetch import Fetch, FetchFailed
from actors.runtime.host import SHARED, place
from bus.messages.active import Activate
from bus.private import private_directory

KEPT = 2  # versions: the one served, and the one before, which the next host may still be fetching
TOLD = 1_000  # parcels of the newest orders, as many as their log keeps


class Supply:
    """Nothing is opened before `open`. `serves`: other hosts may fetch from here, at `address` (HOST[:PORT], see `place`)."""

    def __init__(self, context: Context, *, token: str, serves: bool, address: str, deadline_s: float) -> None:
        self._context, self._token = context, token
        self._serves, self._address, self._deadline_s = serves, address, deadline_s
        own = f"{context.bus.config.run} {token}".encode()
        name = f"miles_async-{os.getuid()}-{hashlib.blake2b(own, digest_size=6).hexdigest()}-fetched"
        roots = [root for root in (SHARED, Path(context.spec.run_dir or tempfile.gettempdir())) if root.is_dir()]
        self._homes = [root / name for root in roots]  # shared memory first
        self._depot: Depot | None = None
        self._fetch: Fetch | None = None
        self._used: dict[Path, int] = {}  # our folders, with a lock that says so
        self._told: dict[str, int] = {}  # parcels of orders, whoever they are for, and their versions
        self._newest, self._coming = -1, ""  # version of an order; the parcel that is on its way here

    def open(self) -> None:
        """Serve, if we are to. BusRefused when the port is taken."""
        if self._serves and self._depot is None:
            host, bind, port = place(self._address, self._context.bus.link.local_address)
            if host:
                self._depot = Depot(self._find, self._token, host=host, bind=bind, port=port)
                self._context.depot = self._depot.url

    def know(self, order: Activate) -> None:
        """An order was heard, ours or a peer's: what is older than the newest will not come here any more."""
        self._newest = max(self._newest, order.version.id)
        if order.parcel is not None:
            self._told.pop(order.parcel.id, None)
            self._told[order.parcel.id] = order.version.id
            for old in list(self._told)[:-TOLD]:
                del self._told[old]

    def _find(self, parcel_id: str) -> Path | None:
        """Also of one that will be here soon. A host that comes back asks for what it was told before its link broke: it is to know
        at once that this is gone, since only then it looks at what is newer."""
        found = [home / parcel_id for home in self._homes if (home / parcel_id).is_dir()]
        if found:
            return found[0]
        is_past = parcel_id != self._coming and self._told.get(parcel_id, self._newest) < self._newest
        return None if is_past else self._homes[0] / parcel_id

    async def bring(self, order: Activate, given_up: Callable[[], bool] = lambda: False) -> Path:
        """The folder with an order's files. FetchFailed when nobody had them for the deadline, or now and it is given up (there
        is a newer order: while bytes come, this one goes on, or a slow link would never serve any), when we drain, or at `stop`;
        OSError when there is no room; BadMessage."""
        assert order.parcel is not None
        context = self._context

        parcel, note = order.parcel, context.note
        began, here = context.clock.monotonic(), 0

        def came(n_bytes: int) -> None:
            nonlocal here
            here += n_bytes
            context.received += n_bytes
            rate = here / max(1e-3, context.clock.monotonic() - began)
            context.note = f"has {here / 1e6:.0f} of {parcel.n_bytes / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s"

        folder = self._home(parcel.n_bytes) / parcel.id
        sources = [self._complete(source) for source in order.sources]
        fetch = Fetch(
            parcel, folder, sources, token=self._token, deadline_s=self._deadline_s, came=came, pointless=given_up
        )
        self._fetch, self._coming = fetch, parcel.id
        try:
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(asyncio.to_thread(fetch.run))
                drain = tasks.create_task(context.draining.wait())
                await asyncio.wait((work, drain), return_when=asyncio.FIRST_COMPLETED)
                drain.cancel()
                if not work.done():
                    fetch.stop()
        except* FetchFailed as group:
            raise FetchFailed(str(group.exceptions[0])) from None
        except* OSError as group:
            raise group.exceptions[0] from None
        finally:
            self._fetch, self._coming, context.note = None, "", note
        return folder

    def stop(self) -> None:
        """End the fetch under way, if any."""
        if self._fetch is not None:
            self._fetch.stop()

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
                    shutil.rmtree(old, ignore_errors=True)
        roomy = [home for home in self._homes if shutil.disk_usage(home.parent).free > 1.1 * n_bytes]
        home = private_directory((roomy or self._homes)[0])
        if home not in self._used:
            handle = os.open(home / "users", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(handle, fcntl.LOCK_SH)
            self._used[home] = handle
        return home

    async def close(self) -> None:
        """Serve no more; the last worker of the run on this host takes the folder away."""
        if self._depot is not None:
            await asyncio.to_thread(self._depot.close)
        for home, handle in self._used.items():
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home, ignore_errors=True)
            except BlockingIOError:
                continue
            finally:
                os.close(handle)
        self._used = {}
