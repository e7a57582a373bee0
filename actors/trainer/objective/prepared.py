"""The prepared batch: packed tensors, masks and counts of a rollout batch, and how steps and micro-batches are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from actors.trainer.objective.advantages import needed
from actors.trainer.objective.corrections import CorrectionInputs
from actors.trainer.objective.inputs import LossInputs, Norm
from actors.trainer.objective.mis import norm_factor, norm_sums
from actors.trainer.objective.reductions import divisor, token_weights
from actors.trainer.objective.samples import TrainSample
from actors.trainer.objective.segments import RAW_LIMIT, safe_log_ratio, sample_index, segment_sum, starts
from actors.trainer.objective_config import ObjectiveConfig


def filled(staged: LossInputs, new_logp: Tensor, entropy: Tensor | None = None) -> LossInputs:
    """What `PreparedBatch.stage` made, with the log-probs of its T tokens. Raises ValueError if there are not T of them."""
    if new_logp.numel() != staged.mask.numel():
        raise ValueError(
            f"new_logp has {new_logp.numel()} tokens, the samples {list(staged.sample_ids[:8])} have {staged.mask.numel()}."
        )
    return replace(staged, new_logp=new_logp, entropy=entropy)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """The batch after preparation. S samples in the order given; N packed response tokens."""

    cfg: ObjectiveConfig
    sample_ids: tuple[str, ...]
    lengths: Tensor
    """int64 [S]"""
    rollout_of: Tensor
    """int64 [S] in [0, R): trajectory of each sample, numbered by first appearance"""
    counts: Tensor
    """int64 [S]: trained tokens per sample, after every mask"""
    rewards: tuple[float, ...]
    """[S]: group-normalised rewards"""
    mask: Tensor
    """bool [N]"""
    advantages: Tensor
    """float [N]"""
    returns: Tensor
    """float [N], critic targets; never whitened, without the OPD penalty"""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """float [N] per available field of `samples.FLOAT_FIELDS`"""
    staleness: Tensor | None = None
    """int64 [N]"""
    flags: dict[str, list[str]] = field(default_factory=dict)
    """reason -> ids of samples it happened to; every entry is worth a counted event"""
    metrics: dict[str, float] = field(default_factory=dict)
    prompt_lengths: tuple[int, ...] = ()
    """[S], 0 where unknown"""
    offsets: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [S]: first token of each sample in the packed tensors"""

    @property
    def rollouts(self) -> int:
        return int(self.rollout_of.max()) + 1 if self.rollout_of.numel() else 0

    def norm(self, step: Sequence[int] | None = None, *, scale: float = 1.0) -> Norm:
        """Global divisors of the step that trains samples `step` (positions in [0, S); None: all); a partial last step is
        normalised by what it holds."""
        chosen = torch.arange(len(self.sample_ids)) if step is None else torch.tensor(list(step), dtype=torch.int64)
        rollouts = self.rollout_of[chosen]
        tokens = segment_sum(self.counts[chosen], rollouts, self.rollouts).to(self.advantages.dtype)
        count, trained = int(torch.unique(rollouts).numel()), int(self.counts[chosen].sum())
        mean = 1.0
        if self.cfg.tis_batch_normalize and self.cfg.correction == "mis" and not self.cfg.report_only:
            mean = norm_factor(norm_sums(self.cfg, self._weights_inputs(chosen.tolist())))
        size = divisor(self.cfg.reduction, count, trained)
        return Norm(size, count, trained, tokens.to(self.advantages.device), mean, scale)

    def shares(self, steps: Sequence[Sequence[int]]) -> list[float]:
        """Of the weights that the reduction gives the tokens of its optimizer step, each sample's part, [S]; 0 = not trained."""
        found = torch.zeros(len(self.sample_ids), dtype=torch.float64)
        for step in steps:
            chosen = torch.tensor(list(step), dtype=torch.int64)
            own, rollouts = self.counts[chosen].double(), self.rollout_of[chosen]
            totals = segment_sum(own, rollouts, self.rollouts)[rollouts]
            weights = own * token_weights(self.cfg.reduction, totals, torch.arange(len(chosen)), self.cfg.loss_constant)
            found[chosen] = weights / weights.sum().clamp(min=1e-30)
        return [float(share) for share in found]

    def trained_spans(self, samples: Sequence[TrainSample]) -> list[tuple[int, ...]]:
        """Trained tokens of each version span of the samples prepared from. A mask may sit anywhere."""
        found = []
        for sample, first, length in zip(samples, self.offsets.tolist(), self.lengths.tolist(), strict=True):
            sums = np.append(0, np.cumsum(self.mask[first : first + length].numpy()))
            ends = np.cumsum([0, *(n for _, n in (((0, length),) if sample.spans is None else sample.spans))]).clip(0, length)
            found.append(tuple(np.diff(sums[ends]).tolist()))
        return found

    def _weights_inputs(self, samples: Sequence[int]) -> CorrectionInputs:
        own = list(samples)
        at = self._tokens(own)
        index = sample_index(self.lengths[own]).to(at.device)
        why = f"correction={self.cfg.correction}"
        old, rollout = (needed(self.fields.get(name), name, why)[at] for name in ("old_logp", "rollout_logp"))
        gap, usable = safe_log_ratio(self.mask[at], old, rollout, RAW_LIMIT)
        return CorrectionInputs(gap, usable, index, self.counts[own].to(old))

    def _tokens(self, samples: Sequence[int]) -> Tensor:
        """Positions of the samples' tokens in the packed tensors, int64."""
        lengths = self.lengths[list(samples)]
        shift = self.offsets[list(samples)] - starts(lengths)
        at = torch.repeat_interleave(shift, lengths) + torch.arange(int(lengths.sum()))
        return at.to(self.mask.device)

    def micro_batch(self, samples: Sequence[int], new_logp: Tensor, *, entropy: Tensor | None = None) -> LossInputs:
        """Inputs of the loss for the given samples (positions in [0, S)), in the given order.

        new_logp (and entropy) float [T]: response tokens of these samples back to back, T = sum of their
        lengths; moved tensors follow its dtype and device. Raises ValueError if T does not fit.
        """
        return filled(self.stage(samples, new_logp.detach()), new_logp, entropy)

    def stage(self, samples: Sequence[int], like: Tensor) -> LossInputs:
        """The same before log-probs are there, with the dtype and device of `like`: to be `filled`."""
        at = self._tokens(samples)
        chosen = list(samples)
        index = sample_index(self.lengths[chosen]).to(like.device)
        rollouts = self.rollout_of[chosen]
        totals = segment_sum(self.counts, self.rollout_of, self.rollouts)[rollouts].to(like)
        pick = {name: x[at].to(like) for name, x in self.fields.items()}
        return LossInputs(
            new_logp=like,
            advantages=self.advantages[at].to(like),
            mask=self.mask[at].to(like.device),
            index=index,
            weights=token_weights(self.cfg.reduction, totals, index, self.cfg.loss_constant),
            counts=self.counts[chosen].to(like),
            slots=rollouts.to(like.device)[index],
            old_logp=pick.get("old_logp"),
            rollout_logp=pick.get("rollout_logp"),
            ref_logp=pick.get("ref_logp"),
            staleness=None if self.staleness is None else self.staleness[at].to(like.device),
            old_values=pick.get("values"),
            returns=self.returns[at].to(like),
            mean_weights=self._mean_weights(totals, index),
            sample_ids=tuple(self.sample_ids[i] for i in chosen),
            lengths=tuple(self.lengths[chosen].tolist()),
            prompt_lengths=tuple(self.prompt_lengths[i] for i in chosen),
        )

    def _mean_weights(self, totals: Tensor, index: Tensor) -> Tensor | None:
        """A sum over a constant is no mean: a ratio of 1 would read as mean length over the constant."""
        return token_weights("per_sample", totals, index) if self.cfg.reduction == "constant" else None
