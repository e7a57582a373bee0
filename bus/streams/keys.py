"""Every Redis key of a run. The braces keep one run in one cluster slot; two runs on one server never meet."""

from __future__ import annotations

import re

import msgspec

from bus.errors import MilesAsyncError

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Keys(msgspec.Struct, frozen=True):
    """Key names of one run."""

    run: str

    def __post_init__(self) -> None:
        if not _RUN_NAME.fullmatch(self.run):
            raise MilesAsyncError(
                f"run name {self.run!r} refused: 1 to 64 letters, digits, '_', '.', '-', beginning with a letter or "
                "digit. Choose another --name."
            )

    def _key(self, rest: str) -> str:
        return f"ma:{{{self.run}}}:{rest}"

    def stream(self, name: str) -> str:
        """One stream."""
        return self._key(name)

    def blob(self, blob_id: str) -> str:
        """One body kept in Redis."""
        return self._key(f"blob:{blob_id}")

    def prefix(self, sample_id: str) -> str:
        """List of saved prefix chunks of one sample under way."""
        return self._key(f"prefix:{sample_id}")

    def marks(self, sender: str) -> str:
        """Hash of the last commits of one process, to know a repetition after a lost reply; it expires."""
        return self._key(f"marks:{sender}")

    @property
    def ledger(self) -> str:
        """Hash account -> samples or tokens."""
        return self._key("ledger")

    @property
    def open_groups(self) -> str:
        """Hash group id -> what is needed to issue it again; a group leaves when its last sample is accounted."""
        return self._key("open")

    @property
    def in_flight_bytes(self) -> str:
        """Hash stream -> bytes of entries not yet acknowledged."""
        return self._key("bytes")

    @property
    def state(self) -> str:
        """Hash of small state that moves inside commits (sampler cursor, trainer step, version counter)."""
        return self._key("state")

    @property
    def vitals(self) -> str:
        """Hash actor -> its last Vitals message."""
        return self._key("vitals")

    @property
    def heard(self) -> str:
        """Hash actor -> when its last vitals came, in milliseconds of the server's clock."""
        return self._key("heard")

    @property
    def names(self) -> str:
        """Hash actor -> `generation:token:who` of the process that has this name (hold.py)."""
        return self._key("names")

    @property
    def deaths(self) -> str:
        """Hash of work that has ended the process it was in: how often, and why (absent.py)."""
        return self._key("deaths")

    @property
    def identity(self) -> str:
        """What run this is: JSON of the settings that must not differ when it is joined again."""
        return self._key("identity")


def kind_of(key: str) -> str:
    """What a key of a run must be, in the server's words."""
    name = key.partition("}:")[2].partition(":")[0]
    kinds = {"identity": "string", "blob": "string", "prefix": "list"}
    hashes = ("state", "ledger", "open", "bytes", "marks", "names", "vitals", "heard")
    return kinds.get(name) or ("hash" if name in hashes else "stream")


class StreamKeys(dict[str, str]):
    """Stream name -> key, each made once."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def __missing__(self, name: str) -> str:
        key = self[name] = self._keys.stream(name)
        return key
