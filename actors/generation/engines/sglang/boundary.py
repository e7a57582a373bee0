"""Which version made a request's tokens, where its chunks cannot tell: an engine that is paused in place for new weights states
the new version for a chunk that may hold tokens of the one before (pure).

Always true: no token counts as made by a newer version than it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from actors.generation.engine import Chunk

BOUNDARY_CHUNKS = 2
"""Chunks that may hold tokens of the version before the one they state: one was on its way as the weights changed, the next brings
what had been made and not sent."""


class Boundaries:
    """Of the requests of one engine, by name."""

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[int, str]]] = {}  # request -> (tokens, version that made them or older), rising
        self._older: dict[str, tuple[str, int]] = {}  # request -> version before; chunks that may hold some of it

    def counted(self, counts: Mapping[str, int], names: Iterable[str], version: str) -> None:
        """Those of `names` have as many tokens by this version or before it."""
        for name in names:
            if name in counts:
                self._marks.setdefault(name, []).append((counts[name], version))

    def count_as_older(self, names: Iterable[str], version: str) -> None:
        """Nobody counted: the next chunks of `names` count as made by this version, whatever they state."""
        for name in names:
            self._older[name] = (self._older.get(name, (version, 0))[0], BOUNDARY_CHUNKS)

    def parted(self, name: str, chunk: Chunk, seen: int) -> Iterator[Chunk]:
        """A request's chunk as chunks of one version each; none where it brings nothing. `seen`: its tokens before."""
        if chunk.token_ids and name in self._older:
            self._mark_boundary(name, chunk, seen + len(chunk.token_ids))
        if name in self._marks:
            yield from split(chunk, seen, self._marks[name])
        elif chunk.token_ids or chunk.finish is not None:
            yield chunk

    def _mark_boundary(self, name: str, chunk: Chunk, end: int) -> None:
        """All of the request's tokens up to this chunk's `end` are the older version's, if the chunk states a newer one."""
        version, chunks = self._older[name]
        if chunk.weight_version == version:
            return
        self._marks[name] = [(end, version)]
        if chunks > 1:
            self._older[name] = (version, chunks - 1)
        else:
            del self._older[name]

    def forget(self, name: str) -> None:
        """It has ended."""
        self._marks.pop(name, None)
        self._older.pop(name, None)


def split(chunk: Chunk, seen: int, marks: Sequence[tuple[int, str]]) -> list[Chunk]:
    """A chunk as chunks of one version each, none of them empty but for one that only tells how the request ended. `seen`:
    tokens of the request before this chunk. `marks`: (tokens, version), rising: the first so many were made by that version
    or an older one; what lies behind the last mark is as the chunk states."""
    parts: list[Chunk] = []
    end, done = seen + len(chunk.token_ids), seen
    for limit, version in (*marks, (end, chunk.weight_version)):
        until = min(limit, end)
        if until > done:
            piece = slice(done - seen, until - seen)
            parts.append(Chunk(chunk.token_ids[piece], chunk.logprobs[piece], version))
            done = until
    if chunk.finish is None:
        return parts
    last = parts.pop() if parts else Chunk([], [], chunk.weight_version)
    return [*parts, Chunk(last.token_ids, last.logprobs, last.weight_version, chunk.finish, chunk.experts)]
