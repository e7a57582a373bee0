"""Policy versions, and which version made which token (pure).

`PolicyVersion.id` is monotonic for the whole run and never reused, also after a trainer crash. `step` is the training
step whose weights it holds; two ids may hold the same step when a step was done again after a crash. Staleness counts
steps, so that samples of a lost future keep a meaningful age.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class PolicyVersion(msgspec.Struct, frozen=True, order=True):
    """One set of published weights."""

    id: int
    step: int
    parent: int = 0


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """`n` consecutive response tokens made by version `version`, which holds step `step`. Both are -1 (`NOT_MADE`) for tokens
    that no policy made: what an environment said in the middle of a response."""

    version: int
    step: int
    n: int

    @property
    def made(self) -> bool:
        """Whether a policy made these tokens."""
        return self.version != NOT_MADE


NOT_MADE = -1


def extend_spans(spans: Sequence[VersionSpan], version: PolicyVersion, n: int) -> tuple[VersionSpan, ...]:
    """Spans after `n` more tokens under `version`; neighbours of one version are one span."""
    if n <= 0:
        return tuple(spans)
    if spans and spans[-1].version == version.id:
        last = spans[-1]
        return (*spans[:-1], VersionSpan(last.version, last.step, last.n + n))
    return (*spans, VersionSpan(version.id, version.step, n))


def spans_within(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans of tokens [start, end)."""
    found: list[VersionSpan] = []
    at = 0
    for span in spans:
        n = min(at + span.n, end) - max(at, start)
        if n > 0:
            found.append(VersionSpan(span.version, span.step, n))
        at += span.n
    return tuple(found)


def spans_cover(spans: Sequence[VersionSpan], n_tokens: int) -> bool:
    """Whether spans are positive and add up to exactly `n_tokens`."""
    return all(s.n > 0 for s in spans) and sum(s.n for s in spans) == n_tokens


def staleness(trained_step: int, made_step: int) -> int:
    """Steps between the weights that made a token and the weights being trained, at least 0.

    `trained_step` counts the updates already inside the weights that take the gradient. A token of a lost future
    (made_step > trained_step, after a trainer went back to a checkpoint) is as many steps away on the other side.
    """
    return abs(trained_step - made_step)
