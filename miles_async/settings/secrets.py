"""A password inside a bus address goes into the environment, where `bus.client.connect` looks for it, here and in every process
that is started from here. So no settings hold one, whether they are printed, stored or sent on."""

import os
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
