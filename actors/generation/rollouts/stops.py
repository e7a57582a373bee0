"""Texts that end a turn: looked for in what the tokens say, which the engine need not know.

Always true: a turn ends with the token that completes the first of its stops; tokens that came behind it in the same chunk are
thrown away and counted as discarded.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.generation.rollouts.session import Segment, Watch
from actors.runtime.miles import Decode


class Growing:
    """The text of tokens that become more, each decoded a few times only."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._text = ""
        self._from, self._done = 0, 0  # tokens before the second are in the text; decoding begins at the first

    def read(self, tokens: Sequence[int]) -> str:
        """All of it, without a character that is not complete."""
        known, more = self._decode(tokens[self._from : self._done]), self._decode(tokens[self._from :])
        if len(more) > len(known) and not more.endswith("\ufffd"):
            self._text += more[len(known) :]
            self._from, self._done = self._done, len(tokens)
        return self._text


def watching(decode: Decode, stops: Sequence[str], also: Watch | None = None) -> Watch:
    """Ends a turn that has said one of `stops`, or where `also` ends it."""
    growing = Growing(decode)

    def watch(tokens: Sequence[int]) -> bool:
        text = growing.read(tokens)
        return (also is not None and also(tokens)) or any(stop in text for stop in stops)

    return watch


def until(decode: Decode, segment: Segment, stops: Sequence[str]) -> Segment:
    """A turn as far as the token that completes a stop."""
    n = len(segment)
    while n and any(stop in decode(segment.tokens[: n - 1]) for stop in stops):
        n -= 1
    return segment.first(n) if n < len(segment) else segment
