"""What the trainer hands over per sample, and how it becomes packed tensors. Bad data is masked and named."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.trainer.objective.staleness import token_steps

ArrayLike = Any
"""Tensor, numpy array, memoryview with a format, or sequence of numbers; one entry per response token."""

UNKNOWN_STEP = -(2**62)
FLOAT_FIELDS = ("rollout_logp", "old_logp", "ref_logp", "teacher_logp", "values")


@dataclass(slots=True)
class TrainSample:
    """One training sample. n = response_length; arrays have n entries, None where not available.

    `rollout` is the trajectory of its group that it belongs to (None: its own), `group` the prompt group. Mutable on purpose: the
    trainer fills old_logp, ref_logp and values from its own passes before `prepare_batch`.
    """

    sample_id: str
    group: Hashable
    response_length: int
    reward: float | None
    rollout: Hashable | None = None
    prompt_length: int | None = None
    loss_mask: ArrayLike | None = None
    """0/1; None: every response token trains"""
    remove: bool = False
    """keep the sample's place in the batch, train none of it"""
    rollout_logp: ArrayLike | None = None
    old_logp: ArrayLike | None = None
    ref_logp: ArrayLike | None = None
    teacher_logp: ArrayLike | None = None
    values: ArrayLike | None = None
    spans: Sequence[tuple[int, int]] | None = None
    """[(policy version, tokens), ...] covering the response; None: of unknown age, so stale if a bound is set"""
    known_rewards: Sequence[float] = ()
    """rewards to take the baseline over, this sample's among them, where not all of its group is in the batch; empty: those in
    the batch"""

    processed: float | None = None
    """what a function of the user's made of its reward, in place of the group's baseline"""

    @property
    def trajectory(self) -> Hashable:
        """Key of the trajectory: a `rollout` names it within its group only."""
        return self.sample_id if self.rollout is None else (self.group, self.rollout)

    @property
    def group_index(self) -> Hashable:
        """The group, by Miles' name."""
        return self.group

    def get_reward_value(self, args: Any) -> float | None:
        """The reward, as functions written for Miles ask for it: --reward-key has chosen it already."""
        return self.reward


class Flags:
    """Reasons -> sample ids, in order of discovery: the counted events of a batch."""

    def __init__(self) -> None:
        self.by_reason: dict[str, list[str]] = {}

    def add(self, reason: str, sample_ids: Sequence[str]) -> None:
        if sample_ids:
            self.by_reason.setdefault(reason, []).extend(sample_ids)


def as_vector(x: ArrayLike) -> np.ndarray:
    """1-D numpy view or copy of any array-like; tensors may lie on a device or carry gradient."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        x = x.float() if x.dtype == torch.bfloat16 else x
    return np.asarray(x).reshape(-1)


def pack_floats(samples: Sequence[TrainSample], name: str, dtype: torch.dtype, flags: Flags) -> Tensor | None:
    """One field of all samples as [T], NaN for samples that lack it or have the wrong length. None if nobody has it.

    No samples at all (a rank with nothing to do): empty, not None.
    """
    if samples and all(getattr(s, name) is None for s in samples):
        return None
    kind = np.float64 if dtype == torch.float64 else np.float32
    out = np.empty(sum(s.response_length for s in samples), dtype=kind)
    at = 0
    for s in samples:
        x = getattr(s, name)
        values = None if x is None else as_vector(x)
        if values is None or values.size != s.response_length:
            flags.add(f"missing_{name}" if values is None else f"wrong_length_{name}", [s.sample_id])
            values = np.full(s.response_length, np.nan)
        out[at : at + s.response_length] = values
        at += s.response_length
    return torch.from_numpy(out).to(dtype)


def pack_masks(samples: Sequence[TrainSample], flags: Flags) -> Tensor:
    """Loss masks of all samples as bool [T], before staleness and data checks."""
    out = np.ones(sum(s.response_length for s in samples), dtype=np.bool_)
    at = 0
    for s in samples:
        n = s.response_length
        part = out[at : at + n]
        at += n
        if s.loss_mask is not None:
            given = as_vector(s.loss_mask)
            if given.size == n:
                part[:] = given != 0
            else:
                flags.add("wrong_length_loss_mask", [s.sample_id])
                part[:] = False
        if s.remove:
            part[:] = False
        elif s.prompt_length == 0 and n > 0 and part[0]:
            flags.add("empty_prompt", [s.sample_id])
            part[0] = False
    flags.add("removed", [s.sample_id for s in samples if s.remove])
    flags.add("empty_response", [s.sample_id for s in samples if s.response_length == 0])
    return torch.from_numpy(out)


def pack_steps(samples: Sequence[TrainSample], flags: Flags) -> Tensor | None:
    """Step of the weights that made each token, int64 [T]; UNKNOWN_STEP where unknown. None if no sample has spans."""
    if samples and all(s.spans is None for s in samples):
        return None
    spans: list[tuple[int, int]] = []
    for s in samples:
        own = list(s.spans) if s.spans is not None else []
        if sum(n for _, n in own) != s.response_length or any(n < 0 for _, n in own):
            if s.spans is not None:
                flags.add("wrong_length_spans", [s.sample_id])
            own = [(UNKNOWN_STEP, s.response_length)]
        spans += own
    return token_steps(spans, sum(s.response_length for s in samples))
