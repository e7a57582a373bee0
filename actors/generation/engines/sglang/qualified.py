"""Records of what releases of SGLang were tried for: shipped ones (releases/), and those that `miles-async qualify` wrote here.

Always true: a record whose digest does not fit its words is no record. It guards against a changed or cut file, not against who can
compute a digest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from functools import cache
from pathlib import Path

import msgspec

from bus.errors import UNREADABLE

SHIPPED = Path(__file__).parent / "releases"
INSIDE = "inside"
_SAFE = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}")
log = logging.getLogger(__name__)


class Capability(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One capability. `figure`: what was measured, in words; `why`: it is not there."""

    ok: bool
    figure: str = ""
    why: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Of one release, in the server's own words. `device`: what it computed on; `by`: what tried it."""

    release: str
    device: str
    by: str
    capabilities: dict[str, Capability]
    torch: str = ""
    digest: str = ""

    def sealed(self) -> Record:
        return msgspec.structs.replace(self, digest=_digest(self))

    def lacks(self) -> str:
        """What is not there and why, in one line; empty: nothing."""
        return "; ".join(f"{name} ({one.why or 'failed'})" for name, one in self.capabilities.items() if not one.ok)

    def failed(self, name: str) -> bool:
        return name in self.capabilities and not self.capabilities[name].ok


def _digest(record: Record) -> str:
    plain = msgspec.structs.replace(record, digest="")
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()


def own_folder() -> Path:
    """Of records written on this host: $XDG_CACHE_HOME/miles-async/engines, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "miles-async" / "engines"


def is_release(text: str) -> bool:
    """Whether it can name a file."""
    return _SAFE.fullmatch(text) is not None


def record_of(release: str) -> Record | None:
    """This host's own, else the shipped one; None: nobody here tried it. A file that does not hold is told and left out."""
    if not is_release(release):
        return None
    for folder in (own_folder(), SHIPPED):
        path = folder / f"{release}.json"
        try:
            return read(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("%s is not used: %s", path, error)
    return None


def read(path: Path) -> Record:
    """ValueError, one line, for what is no record."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except UNREADABLE as error:
        raise ValueError(f"it is no record of a qualification ({error})") from None
    if record.digest != _digest(record):
        raise ValueError("it was changed after it was written; run `miles-async qualify` again")
    if path.stem != record.release:
        raise ValueError(f"it is the record of {record.release}")
    return record


def write(record: Record, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(record.sealed())) + b"\n")
    part.replace(path)


@cache
def tested() -> tuple[str, ...]:
    """Releases whose scheduler our function inside SGLang was tried with: shipped records alone say so."""
    records = (read(path) for path in sorted(SHIPPED.glob("*.json")))
    return tuple(r.release for r in records if r.capabilities.get(INSIDE, Capability(ok=False)).ok)
