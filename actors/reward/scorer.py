"""Scorers by name: shipped rules, the remote service, the custom function; one protocol for all.

A custom function replaces the table. Else `rm_type` of the sample, or the default, names a scorer; the prefix `boxed_` hands it
the content of the last \\boxed{} (nothing without one).
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Protocol, Self

import msgspec

from actors.reward.mathanswer import last_boxed
from actors.reward.pool import VerifierPool
from actors.reward.remote import RemoteScorer
from actors.reward.rules import BOXED_RULES, DEFAULT_KEYS, RULES, Rule
from actors.reward.sample import Sample, Value
from actors.runtime.run import Refused
from bus.errors import Poison

BOXED = "boxed_"
REMOTE = "remote_rm"
RM_TYPES: tuple[str, ...] = tuple(sorted((*RULES, REMOTE, *(f"{BOXED}{name}" for name in (*RULES, REMOTE)))))
"""Every name that `rm_type` may have."""


class Scorer(Protocol):
    """Something that scores one sample."""

    @property
    def name(self) -> str:
        """Kept with every score."""
        ...

    @property
    def default_key(self) -> str:
        """Which part of a table is the reward when no reward_key is set; empty = none."""
        ...

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        """A number or a table of numbers. Raises a Transient (try again) or a Poison (never) of bus.errors; ends within
        `deadline_s` of being at work on the sample, waiting for a place not counted."""
        ...


class UnknownScorer(Poison):
    """A sample names a scorer that does not exist."""


class RuleScorer:
    """A shipped rule. Rules are linear in the text and run where they are called."""

    def __init__(self, name: str, rule: Rule) -> None:
        self.name = name
        self.default_key = DEFAULT_KEYS.get(name, "")
        self._rule = rule

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        return self._rule(sample)


class BoxedScorer:
    """Another scorer on the content of the last box."""

    def __init__(self, inner: Scorer) -> None:
        self.name = f"{BOXED}{inner.name}"
        self.default_key = inner.default_key
        self._inner = inner

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        inside = msgspec.structs.replace(sample, response=last_boxed(sample.response) or "")
        return await self._inner.score(inside, deadline_s)


class Scorers:
    """What one reward process can score with. Use as `async with`; Refused when the default cannot work."""

    def __init__(
        self,
        *,
        rm_type: str,
        custom_rm_path: str = "",
        rm_url: str = "",
        n_workers: int = 1,
        boot_deadline_s: float = 60.0,
    ) -> None:
        self._default = rm_type
        self._custom = (
            VerifierPool(custom_rm_path, n_workers=n_workers, boot_deadline_s=boot_deadline_s)
            if custom_rm_path
            else None
        )
        self._remote = RemoteScorer(rm_url) if rm_url else None
        self._stack = AsyncExitStack()
        self._table: dict[str, Scorer] = {name: RuleScorer(name, rule) for name, rule in RULES.items()}
        self._table |= {BOXED + name: BoxedScorer(RuleScorer(name, rule)) for name, rule in BOXED_RULES.items()}
        if self._remote is not None:
            self._table |= {REMOTE: self._remote, BOXED + REMOTE: BoxedScorer(self._remote)}

    async def __aenter__(self) -> Self:
        if self._default and self._custom is None:
            try:
                self.named(self._default)
            except UnknownScorer as error:
                raise Refused(str(error)) from error
        async with AsyncExitStack() as stack:
            for part in (self._custom, self._remote):
                if part is not None:
                    await stack.enter_async_context(part)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def capacity(self) -> int | None:
        """Samples that can be at work at once; None = no bound of its own."""
        return self._custom.capacity if self._custom is not None else None

    def named(self, rm_type: str) -> Scorer:
        """The scorer of a sample that asks for `rm_type` (empty = the default). Raises UnknownScorer."""
        if self._custom is not None:
            return self._custom
        name = (rm_type or self._default).strip()
        if not name:
            raise UnknownScorer(
                "the sample names no rm_type and there is no default; set --rm-type or metadata rm_type."
            )
        if name in self._table:
            return self._table[name]
        if name.removeprefix(BOXED) == REMOTE:
            raise UnknownScorer(f"rm_type {name} asks a service and none is given; set --rm-url http://HOST:PORT/PATH.")
        raise UnknownScorer(
            f"no rm_type {name[:60]!r}; known are {', '.join(sorted(RULES))}, {REMOTE}, and {BOXED}NAME."
        )


__all__ = ("RM_TYPES", "BoxedScorer", "RuleScorer", "Scorer", "Scorers", "UnknownScorer")
