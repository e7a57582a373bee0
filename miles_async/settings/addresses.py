"""Addresses in settings: their passwords, and whether anything can be reached at them.

A password inside a bus address goes into the environment, where `bus.client.connect` looks for it, here and in every process
that is started from here. So no settings hold one, whether they are printed, stored or sent on. Other addresses keep what they
were given with, in the run's own folder only."""

import os
import re
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

PASSWORD = "MILES_ASYNC_BUS_PASSWORD"  # as bus/client.py reads it


def take_password(url: str) -> str:
    """The URL without its password. What is no URL is returned as it is: its reader refuses it."""
    try:
        parts = urlsplit(url)
        login, options = (parts.username, parts.password), dict(parse_qsl(parts.query))
    except ValueError:
        return url
    password = login[1] or options.pop("password", "")
    user = login[0] or options.pop("username", "") or "default"
    if not password:
        return url
    os.environ[PASSWORD] = unquote(password)
    place = f"{quote(unquote(user), safe='')}@{parts.netloc.rpartition('@')[2]}"
    options = {name: value for name, value in options.items() if name not in ("username", "password")}
    return urlunsplit((parts.scheme, place, parts.path, urlencode(options), ""))


def without_credentials(value: Any) -> Any:
    """Settings as they are shown to others, in a report or by a tracker: addresses in them without user, password and query."""
    if isinstance(value, dict):
        return {name: without_credentials(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(part) for part in value]
    if not isinstance(value, str) or not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        return value
    try:
        parts = urlsplit(value)
    except ValueError:
        return value.partition("://")[0] + "://?"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def unreachable(url: str) -> str:
    """Why nothing is ever reached at an address of this form; empty if something may be."""
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            return "it names no host"
        return "nothing listens on port 0" if parts.port == 0 else ""
    except ValueError as error:
        return f"not an address: {error}"
