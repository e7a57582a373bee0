"""What a scorer gets and gives, and what a reward is (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from actors.runtime.labels import label_of
from bus.errors import Poison, Transient
from bus.messages.base import Packed
from bus.messages.samples import Episode, RolloutDone

Value = Any
"""What a scorer answers, before `settle`: a number, or a table with numbers in it. Anything else is refused there."""

MAX_PARTS = 64


class ScorerFailed(Transient):
    """The scorer raised, crashed, hung or gave no reward; another attempt may do."""


class BadLabel(Poison):
    """The rule cannot read this sample's label: data set and rm_type do not fit."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sample in text. `n_tokens` counts response tokens; `finish` is "stop" or "length"."""

    sample_id: str
    prompt: str
    response: str
    label: str
    metadata: dict[str, Any] = {}
    n_tokens: int = 0
    finish: str = "stop"
    run_seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """What a custom function gets: prompt, response, label (as the row has it), metadata, sample_id, n_tokens, finish."""
        fields = msgspec.structs.asdict(self) | {"label": label_of(self.label, self.metadata)}
        del fields["run_seed"]
        return fields


def sample_of(rollout: RolloutDone, text: Callable[[Packed], str], run_seed: int = 0) -> Sample:
    """A finished rollout as scorers see it; `text` turns token ids into text."""
    task, episode = rollout.task, rollout.episode or Episode()
    answer = episode.answer
    return Sample(
        sample_id=task.sample_id,
        prompt=task.prompt_text or text(task.prompt_tokens),
        response=text(rollout.response.tokens) if answer is msgspec.UNSET else answer,
        label=task.label,
        metadata=episode.metadata | task.metadata,
        n_tokens=rollout.response.n_tokens,
        finish=rollout.finish,
        run_seed=run_seed,
    )


class SampleGroup(msgspec.Struct, frozen=True):
    """All samples of a prompt, in index order; scored by one answer with a value for each."""

    samples: tuple[Sample, ...]

    @property
    def sample_id(self) -> str:
        """What errors call it."""
        return self.samples[0].sample_id.rpartition("/")[0]

    def as_dict(self) -> list[dict[str, Any]]:
        """What a custom function gets."""
        return [sample.as_dict() for sample in self.samples]


class Reward(msgspec.Struct, frozen=True):
    """The scalar that is trained on and every numeric part (empty when the scorer gave a plain number)."""

    scalar: float
    parts: dict[str, float] = {}


def settle(value: Value, key: str, scorer: str) -> Reward:
    """A scorer's answer to a reward. NaN stays NaN: it is a number's answer, and the filter drops its group with a reason.

    A plain number is the reward whatever `key` says, so that one run may mix scorers. Raises ScorerFailed.
    """
    if not isinstance(value, Mapping):
        number = _number(value)
        if number is None:
            raise ScorerFailed(f"scorer {scorer} gave {_shown(value)}, not a number; return a float or a table of floats.")
        return Reward(number)
    parts = {str(name): number for name, part in value.items() if (number := _number(part)) is not None}
    known = ", ".join(map(str, list(value)[:MAX_PARTS])) or "none"
    if not key:
        raise ScorerFailed(f"scorer {scorer} gave a table (keys: {known}); name the reward with --reward-key.")
    if key not in value:
        raise ScorerFailed(f"scorer {scorer} gave a table without reward_key {key!r} (keys: {known}).")
    if key not in parts:
        raise ScorerFailed(f"scorer {scorer} gave {_shown(value[key])} under {key!r}, not a number.")
    kept = dict(list(parts.items())[:MAX_PARTS])
    return Reward(parts[key], {**kept, key: parts[key]})


def _number(value: object) -> float | None:
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _shown(value: object) -> str:
    if isinstance(value, str) and value[:1] + value[-1:] == "<>":  # the type, as wire.py tells it
        return f"a value of type {value[1:-1]}"
    return "None" if value is None else f"{type(value).__name__} {str(value)[:80]!r}"
