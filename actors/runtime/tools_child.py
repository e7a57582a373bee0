"""`python -m actors.runtime.tools_child [CORPUS]`: answers calls of the calculator and the search, one after the other.

On stdin frames (a length, then msgpack) of [tool, argument]; on stdout one text each. The first is empty, or says why it cannot
begin. Who asks keeps the time, and ends this process when an answer is late (tools.py).
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from actors.runtime.calculator import calculate
from actors.runtime.hooks import framed, own_pipes, read_frame
from actors.runtime.refusals import Refused

MOST_WORDS = 200  # of a query that are looked for: each may stand in all of a large corpus


def read_passages(path: str) -> list[str]:
    """JSONL with a column `text`, or any text file, cut at blank lines. Refused when there is nothing to read."""
    try:
        content = Path(path).read_text(encoding="utf-8")
        if path.endswith(".jsonl"):
            found = [str(json.loads(line)["text"]) for line in content.splitlines() if line.strip()]
        else:
            found = [part.strip() for part in re.split(r"\n\s*\n", content) if part.strip()]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"--tool-corpus {path!r} cannot be read: {type(error).__name__}: {error}. Give a text file, or JSONL with a column "
            "'text'."
        ) from error
    if not found:
        raise Refused(f"--tool-corpus {path!r} holds no passage.")
    return found


class Passages:
    """Passages ranked by Okapi BM25 (Robertson and Zaragoza 2009, k1 = 1.5, b = 0.75)."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = passages
        counted = [Counter(_words(passage)) for passage in passages]
        self._mean = sum(map(Counter.total, counted)) / len(counted) or 1.0
        self._lengths = [words.total() for words in counted]
        self._holding: dict[str, list[tuple[int, int]]] = {}  # word -> (passage, how often)
        for index, words in enumerate(counted):
            for word, n in words.items():
                self._holding.setdefault(word, []).append((index, n))

    def best(self, query: str, most: int = 3) -> list[str]:
        """The passages that fit best, best first; equal ones in their order."""
        scores: Counter[int] = Counter()
        for word in [*dict.fromkeys(_words(query))][:MOST_WORDS]:
            holding = self._holding.get(word, [])
            weight = math.log(1 + (len(self._passages) - len(holding) + 0.5) / (len(holding) + 0.5))
            for index, n in holding:
                scores[index] += weight * n * 2.5 / (n + 1.5 * (0.25 + 0.75 * self._lengths[index] / self._mean))  # type: ignore[assignment]
        ranked = sorted(scores, key=lambda index: (-scores[index], index))
        return [self._passages[index] for index in ranked[:most]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def main(corpus: str | None = None) -> None:
    """Until stdin ends."""
    warnings.simplefilter("ignore")  # of what the parser thinks of an expression
    asks, answers = own_pipes()
    tools: dict[str, Callable[[str], str]] = {"calculator": calculate}
    said = ""
    try:
        if corpus is not None:
            passages = Passages(read_passages(corpus))
            tools["search"] = lambda query: "\n\n".join(passages.best(query)) or "nothing found"
    except Refused as error:
        said = str(error)
    answers.write(framed(msgspec.msgpack.encode(said)))
    answers.flush()
    while (body := read_frame(asks)) is not None:
        name, argument = msgspec.msgpack.decode(body, type=tuple[str, str])
        answers.write(framed(msgspec.msgpack.encode(tools[name](argument))))
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
