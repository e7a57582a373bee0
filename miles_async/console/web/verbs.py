"""The verbs of a console as JSON over HTTP.

Reads, writes  what miles_async/console/verbs.py says
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from bus.errors import UNREADABLE, MilesAsyncError
from miles_async.console.verbs import Verbs
from miles_async.console.web.guard import refusal
from miles_async.settings.errors import SettingsError

Answer = Callable[[web.Request], Awaitable[Any]]


class KnobChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New values of knobs as text, or the epoch to go back to."""

    values: dict[str, str] = {}
    revert: int | None = None
    reason: str = ""


class Burial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do with a dead letter: `retry` or `drop`."""

    id: str
    act: str


def routes(verbs: Verbs) -> list[web.RouteDef]:
    """What the page asks, and what it changes."""

    async def samples(request: web.Request) -> Any:
        asked = request.query
        step = int(asked["step"]) if asked.get("step", "").isdecimal() else None
        return await verbs.samples(asked.get("set") or None, step, asked.get("order", "worst"))

    async def tune(request: web.Request) -> Any:
        change = msgspec.json.decode(await request.read(), type=KnobChange)
        return await verbs.tune(change.values, change.reason, back_to=change.revert)

    async def bury(request: web.Request) -> Any:
        asked = msgspec.json.decode(await request.read(), type=Burial)
        return {"text": await verbs.bury(asked.id, asked.act)}

    asked: dict[str, Answer] = {
        "samples": samples,
        "knobs": lambda _: verbs.knobs(),
        "dead": lambda _: verbs.letters(),
        "trace": lambda request: verbs.trace(request.query.get("id", "").strip()),
        "runs": lambda _: verbs.runs(),
        "curves": lambda request: verbs.curves(request.query.get("run", "")),
    }
    told: dict[str, Answer] = {"knobs": tune, "dead": bury}
    gets = [web.get(f"/api/{name}", answering(verb)) for name, verb in asked.items()]
    return gets + [web.post(f"/api/{name}", answering(verb)) for name, verb in told.items()]


def answering(verb: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that turns what a command refuses into one line and status 422."""

    async def handler(request: web.Request) -> web.Response:
        try:
            body = msgspec.json.encode(await verb(request), enc_hook=str)
        except SettingsError as error:
            return web.json_response(
                {"error": str(error), "each": [{"field": e.field, "text": str(e)} for e in error.each]}, status=422
            )
        except (MilesAsyncError, *UNREADABLE) as error:
            return refusal(422, str(error))
        return web.Response(body=body, content_type="application/json")

    return handler
