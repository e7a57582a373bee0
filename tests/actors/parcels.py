"""Versions to fetch in tests, and fetches of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.runtime import fetch as fetch_module
from actors.runtime.depot import Depot
from actors.runtime.fetch import Fetch
from bus.messages.weights import Parcel

SIZE = 5 * fetch_module.LEAST_PIECE + 123
Serve = Callable[[Path], Depot]


def fetching(
    parcel: Parcel, folder: Path, *sources: str, token: str = "secret", deadline_s: float = 5.0
) -> tuple[Fetch, list[int]]:
    came: list[int] = []
    return Fetch(parcel, folder, sources, token=token, deadline_s=deadline_s, came=came.append), came


def same(one: Path, two: Path) -> bool:
    names = [p.name for p in sorted(one.iterdir()) if not p.name.startswith(".")]
    return all((one / n).read_bytes() == (two / n).read_bytes() for n in names) and not list(two.glob("*.part"))
