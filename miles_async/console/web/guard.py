"""Who may talk to the web console: the holder of its token, from a page of its own, under a loopback name.

The token comes once in the address that is printed, then as a cookie that scripts cannot read, or as `Authorization: Bearer`. A
name in `Host` that is not loopback is refused, so that no site can reach the page by pointing its own name at 127.0.0.1; what
changes something must come from the console's own page (`Origin`), so that no other page can send it with the cookie.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from bus.private import kept_secret

FILE = "console.token"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def token_of(run_dir: Path | None) -> str:
    """The token of a run's console: made once and kept in its folder, for its owner alone, so that an open page outlives a restart
    of the console. Of a run on another host, a new one."""
    fresh = secrets.token_urlsafe(32)
    if run_dir is not None and run_dir.is_dir():
        with suppress(OSError):  # a folder that is not ours to write: a token for this time
            return kept_secret(run_dir / FILE, lambda: fresh)
    return fresh


class WebGuard:
    """The middleware. `read_only`: why nothing may be changed; empty = it may. `admitted`: called with each request that has shown
    the token."""

    def __init__(self, token: str, read_only: str = "") -> None:
        self._token = token.encode()
        self._read_only = read_only
        self.admitted: Callable[[web.Request], object] = lambda request: None

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Host, origin, token, right to change; then the handler."""
        host = request.host.lower()
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "80")
        if name not in LOOPBACK:
            return refusal(403, f"this console answers to loopback names only, not to {name[:80]}: open the printed address")
        if (origin := request.headers.get("Origin")) is not None and origin.lower() != f"http://{host}":
            return refusal(403, "this request comes from another page, and was refused")
        by_header = self._is(request.headers.get("Authorization", "").removeprefix("Bearer ").strip())
        changes = request.method not in ("GET", "HEAD")
        foreign = origin is None or request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin"
        if changes and foreign and not by_header:
            return refusal(403, "a change must come from the console's own page (header Origin)")
        cookie = f"miles_async_{port}"
        if request.path == "/" and (given := request.query.get("token")) is not None:
            if not self._is(given):
                return refusal(401, "wrong token: open the address that miles-async console printed")
            home = web.Response(status=303, headers={"Location": "/"})  # the address bar and the history forget the token
            home.set_cookie(cookie, given, httponly=True, samesite="Strict", path="/")
            self.admitted(request)
            return home
        if not by_header and not self._is(request.cookies.get(cookie, "")):
            return refusal(401, "no token or a wrong one: open the address that miles-async console printed")
        self.admitted(request)
        if changes and self._read_only:
            return refusal(403, f"{self._read_only}: nothing was changed")
        return await handler(request)

    def _is(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, streams too."""
    for name, value in HEADERS.items():
        response.headers[name] = value
    response.headers.setdefault("Cache-Control", "no-store")


def refusal(status: int, text: str) -> web.Response:
    """An error as the page and a person read it: one line."""
    return web.json_response({"error": text}, status=status)
