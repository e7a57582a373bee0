"""Texts that end a turn: looked for in what the tokens say, which the engine need not know.

Always true: a turn ends with the token that completes the first of its stops; tokens that came behind it in the same chunk are
thrown away and counted as discarded. What came before is not looked at again with each chunk: a turn costs linear time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from actors.generation.rollouts.session import Segment, Watch
from actors.runtime.miles import Decode

PENDING = 16  # tokens that may be a beginning of one character, which has four bytes at most


class Growing:
    """The text of tokens that become more, each decoded a few times only."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._text = ""
        self._from, self._done = 0, 0  # tokens before the second are in the text; decoding begins at the first

    def read(self, tokens: Sequence[int]) -> str:
        """All of it, without a character that is not complete."""
        known, more = self._decode(tokens[self._from : self._done]), self._decode(tokens[self._from :])
        whole = not more.endswith("\ufffd") or len(tokens) - self._done > PENDING
        if len(more) > len(known) and whole:
            self._text += more[len(known) :]
            self._from, self._done = self._done, len(tokens)
        return self._text


def watching(decode: Decode, stops: Sequence[str], also: Watch | None = None) -> Watch:
    """Ends a turn that has said one of `stops`, or where `also` ends it."""
    growing, longest = Growing(decode), max(map(len, stops))
    seen = 0  # characters that hold no stop

    def watch(tokens: Sequence[int]) -> bool:
        nonlocal seen
        text = growing.read(tokens)
        begin = max(0, seen - longest)
        found = any(text.find(stop, begin) >= 0 for stop in stops)
        seen = seen if found else len(text)
        return (also is not None and also(tokens)) or found

    return watch


def until(decode: Decode, segment: Segment, stops: Sequence[str]) -> Segment:
    """A turn as far as the token that completes a stop."""
    tokens = segment.tokens

    def says(n: int) -> bool:
        text = decode(tokens[:n])
        return any(stop in text for stop in stops)

    n = bisect_left(range(len(tokens)), True, key=says)  # more tokens say no less
    return segment.first(n) if n < len(tokens) else segment
