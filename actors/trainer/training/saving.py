"""A checkpoint of all ranks on its way to files: copied in the training's thread, written beside it, complete with its index.

    save       every rank, training's thread     state copied to the host
    write      every rank, a thread of its own    files of this rank; rank 0 waits for what the others say of theirs
    finish     training's thread where a library's ranks meet for it, else any: the last files
    index      rank 0                             sizes and checksums of all files: with it the directory is a checkpoint

Cut short anywhere before the index there is no checkpoint, and the former one stands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from actors.trainer.training.files import FileEntry, write_index
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.verbs import Core, Saving


class RankSaved(msgspec.Struct, frozen=True):
    """What one rank says when it has written. `error`: why it could not."""

    files: dict[str, FileEntry] = {}
    error: str = ""


class RankedCheckpoint:
    """Rank 0's hold on one. `finish`: tells the other ranks to."""

    def __init__(self, core: Core, saving: Saving, ranks: Ranks, directory: Path, *, finish: Callable[[], None]) -> None:
        self._identity = core.identity()
        self.saving = saving
        self._ranks = ranks
        self._directory = directory
        self._tell_finish = finish
        self._files: dict[str, FileEntry] = {}
        self.meets = saving.meets

    def write(self) -> None:
        """In a thread: all files of all ranks, but the last. Raises OSError, also for another rank's."""
        parts = _written(self.saving, self._ranks)
        self._files = {name: entry for part in parts for name, entry in part.files.items()}
        if bad := [f"rank {rank}: {part.error}" for rank, part in enumerate(parts) if part.error]:
            raise OSError("; ".join(bad) if len(parts) > 1 else parts[0].error)

    def finish(self) -> None:
        """After `write`, in the training's thread where it `meets`: complete. Raises OSError."""
        if self.meets:
            self._tell_finish()
        write_index(self._directory, self._identity, self._files | self.saving.finish())

    def write_hf(self, directory: Path) -> None:
        """In a thread, after `write`."""
        self.saving.write_hf(directory)


def write_apart(saving: Saving, ranks: Ranks) -> None:
    """A follower's part, in a thread: it is written when rank 0 says `finish`."""
    threading.Thread(target=_written, args=(saving, ranks), name="checkpoint", daemon=True).start()


def _written(saving: Saving, ranks: Ranks) -> list[RankSaved]:
    """Write this rank's part, and wait for all."""
    part = RankSaved(error="it broke off; its log says why")
    try:
        part = RankSaved(files=saving.write())
    except OSError as error:
        part = RankSaved(error=error.strerror or str(error))
    finally:  # or the others would wait
        said = ranks.gather_written(msgspec.msgpack.encode(part))
    return [msgspec.msgpack.decode(one, type=RankSaved) for one in said]
