"""Update sessions of an SGLang server: from 0.5.21 on it takes weights by `tensor` and `distributed` only between
/begin_weight_update and /end_weight_update (its managers/scheduler_components/weight_updater.py).

A session has no owner and no end of its own: one that a dead client left is open until somebody ends it. All buckets of a version
lie in one; a begin while one is open is refused (400), as is an end while none is. Files need none. A session neither pauses
nor flushes: unpaused, the server lets requests end before it begins one.
Always true: the server names a version only once its session has ended well, which is when quantised weights are whole. A server
that does not know the call (404) has no sessions and is never asked again; the version then travels with the last bucket.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from actors.generation.engine import RequestRefused
from actors.generation.engines.sglang.calls import Calls
from bus.errors import UNREADABLE

BEGIN, END, LABEL = "/begin_weight_update", "/end_weight_update", "/update_weight_version"
UNKNOWN = (404, 405)
log = logging.getLogger(__name__)


class Answered(msgspec.Struct):
    success: bool = True
    message: str = ""


class Sessions:
    """Of one server, as one client opens and ends them. The server is paused, or idle."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._has: bool | None = None  # None: not asked yet
        self._open = False  # by us
        self._clean = False  # nobody's is open

    async def push(self, path: str, body: dict[str, Any], version: str | None) -> None:
        """One bucket of a version; `version`: with the last, which the server states from then on. Raises RequestRefused and
        EngineUnavailable; the server may then hold parts of two."""
        try:
            if not await self._begun():
                await self._calls.post(path, body | {"weight_version": version})
                return
            await self._calls.post(path, body | {"weight_version": None})
            if version is not None:
                await self._end()
                await self.label(version)
        except BaseException:
            self._open = False  # the next begin, or the next files, finds out
            raise

    async def letter(self, path: str, body: dict[str, Any]) -> None:
        """A call that brings no weights and is refused outside of a session all the same."""
        if self._open or not await self._begun():
            await self._calls.post(path, body)
            return
        try:
            await self._calls.post(path, body)
            await self._end()
        except BaseException:
            self._open = False
            raise

    async def clear(self) -> None:
        """Before whole files: end what somebody left open, so that they are loaded as at a boot."""
        if self._clean or self._has is False:
            return
        status, text = await self._calls.call("POST", END, {})
        if status == 200 and _fault(text) is None:
            log.warning("%s had an update session open that nobody ended; it is ended", self._calls.base_url)
        elif status in UNKNOWN:
            self._has = False
        elif status not in (200, 400):
            self._calls.raise_status(status, text, END)
        self._open, self._clean = False, True

    async def label(self, version: str) -> None:
        """Name the weights now served; running requests go on."""
        await self._calls.post(LABEL, {"new_version": version, "abort_all_requests": False})

    async def _begun(self) -> bool:
        """Whether a session is open now; False: this server has none."""
        if self._open or self._has is False:
            return self._open
        self._clean = False
        refused = await self._ask_begin()
        if self._has and refused is not None:  # one is open already: of a client that died, or of ours that failed
            await self.clear()
            refused = await self._ask_begin()
        if refused is not None:
            raise RequestRefused(f"{self._calls.base_url} opened no update session: {refused}")
        self._open = bool(self._has)
        return self._open

    async def _ask_begin(self) -> str | None:
        """Why not; None: it is open, or the server knows no sessions (`_has`)."""
        status, text = await self._calls.call("POST", BEGIN, {"selector": "all"})
        if status in UNKNOWN and not self._has:
            self._has = False
            return None
        self._has = True
        if status not in (200, 400):
            self._calls.raise_status(status, text, BEGIN)
        return _fault(text) if status == 200 else text[:300]

    async def _end(self) -> None:
        text = await self._calls.ok("POST", END, {})
        if (fault := _fault(text)) is not None:
            raise RequestRefused(f"{self._calls.base_url} did not end its update session: {fault}")
        self._open, self._clean = False, True


def _fault(text: str) -> str | None:
    """What a good status hides; None: nothing."""
    try:
        answered = msgspec.json.decode(text, type=Answered)
    except UNREADABLE:
        return f"its answer cannot be read: {text[:200]}"
    return None if answered.success else answered.message or "it does not say why"
