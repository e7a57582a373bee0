"""Which prompt comes next (pure): epochs over the data set, each with its own permutation from (run seed, epoch)."""

from __future__ import annotations

from collections.abc import Sequence

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


Parts = Sequence[tuple[int, float]]
"""(prompts, weight) of each source; weights are all 0, or all above."""


def permutation(*, parts: Parts, run_seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Order of rows in one epoch, which has as many as all sources together. With weights each source has its share of them, and
    goes on in the next epoch where it stopped in this one, beginning anew, in another order, when all of it was seen."""
    total = sum(size for size, _ in parts)
    if not any(weight for _, weight in parts):
        rows = list(range(total))
    else:
        placed: list[tuple[float, int]] = []
        base = 0
        for source, ((size, _), quota) in enumerate(zip(parts, quotas(parts), strict=True)):
            for k in range(quota):
                again, at = divmod(epoch * quota + k, size)
                if k == 0 or at == 0:
                    own = list(range(size))
                    if shuffle:
                        rng_for(run_seed, "source", source, again).shuffle(own)
                placed.append(((k + 0.5) / quota, base + own[at]))
            base += size
        rows = [row for _, row in sorted(placed, key=lambda pair: pair[0])]
    if shuffle:
        rng_for(run_seed, "epoch", epoch).shuffle(rows)
    return rows


def quotas(parts: Parts) -> list[int]:
    """Prompts of each source in an epoch: its share by weight, at least 1, the largest remainders rounded up."""
    total, weights = sum(size for size, _ in parts), sum(weight for _, weight in parts)
    shares = [total * weight / weights for _, weight in parts]
    found = [max(1, int(share)) for share in shares]
    for i in sorted(range(len(parts)), key=lambda i: int(shares[i]) - shares[i])[: max(0, total - sum(found))]:
        found[i] += 1
    return found


class RowOrder:
    """The endless sequence of rows; keeps the permutation of the current epoch."""

    def __init__(self, *, parts: Parts, run_seed: int, shuffle: bool) -> None:
        self._parts = parts
        self._seed = run_seed
        self._shuffle = shuffle
        self._epoch = -1
        self._rows: list[int] = []

    def take(self, cursor: Cursor) -> tuple[int, Cursor]:
        """(row, cursor after it)."""
        epoch, position = cursor.epoch, cursor.position
        if position >= len(self._of(epoch)):
            epoch, position = epoch + 1, 0
        return self._of(epoch)[position], Cursor(epoch, position + 1, cursor.group + 1)

    def _of(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            self._rows = permutation(parts=self._parts, run_seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._epoch = epoch
        return self._rows
