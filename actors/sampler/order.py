"""Which prompt comes next (pure): epochs over the data set, each with its own permutation from (run seed, epoch)."""

from __future__ import annotations

import msgspec

from actors.runtime.seeds import rng_for


class Cursor(msgspec.Struct, frozen=True):
    """Position in the data set. `position` counts prompts issued in this epoch, `group` all groups ever issued."""

    epoch: int = 0
    position: int = 0
    group: int = 0

    def text(self) -> str:
        """The text that the bus and checkpoints hold."""
        return f"{self.epoch}:{self.position}:{self.group}"

    @staticmethod
    def parse(text: str) -> Cursor:
        """Inverse of text(); the empty text is the beginning."""
        if not text:
            return Cursor()
        epoch, position, group = (int(part) for part in text.split(":"))
        return Cursor(epoch, position, group)


def permutation(*, n_prompts: int, run_seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Order of rows in one epoch."""
    rows = list(range(n_prompts))
    if shuffle:
        rng_for(run_seed, "epoch", epoch).shuffle(rows)
    return rows


class Order:
    """The endless sequence of rows; keeps the permutation of the current epoch."""

    def __init__(self, *, n_prompts: int, run_seed: int, shuffle: bool) -> None:
        self._n = n_prompts
        self._seed = run_seed
        self._shuffle = shuffle
        self._epoch = -1
        self._rows: list[int] = []

    def take(self, cursor: Cursor) -> tuple[int, Cursor]:
        """(row, cursor after it)."""
        epoch, position = cursor.epoch, cursor.position
        if position >= self._n:
            epoch, position = epoch + 1, 0
        if epoch != self._epoch:
            self._rows = permutation(n_prompts=self._n, run_seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._epoch = epoch
        return self._rows[position], Cursor(epoch, position + 1, cursor.group + 1)
