"""What the objective takes for one micro-batch, and the global numbers that make micro-batches add up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch: T response tokens of S samples, packed back to back, masked tokens included.

    Built by `PreparedBatch.micro_batch`; prompts and padding never appear. All float tensors share dtype and
    device. Log-probs are natural logs of the sampled token at the sampling temperature. Only `new_logp` and
    `entropy` carry gradient.
    """

    new_logp: Tensor
    """float [T], current policy, requires grad"""
    advantages: Tensor
    """float [T]; anything at masked tokens"""
    mask: Tensor
    """bool [T], trained tokens"""
    index: Tensor
    """int64 [T] in [0, S): sample of each token, ascending"""
    weights: Tensor
    """float [T] > 0: what a token counts in the reduced sum (`reductions.token_weights`)"""
    counts: Tensor
    """float [S]: trained tokens of each sample"""
    slots: Tensor
    """int64 [T] in [0, R): rollout of each token, numbered over the whole batch (for per-rollout metrics)"""
    old_logp: Tensor | None = None
    """float [T], denominator from the trainer's own pass (proximal=recompute)"""
    rollout_logp: Tensor | None = None
    """float [T], as the engine reported them"""
    ref_logp: Tensor | None = None
    entropy: Tensor | None = None
    """float [T], of the full distribution at each token"""
    staleness: Tensor | None = None
    """int64 [T], steps between the token's weights and the ones trained"""
    old_values: Tensor | None = None
    """float [T], critic before the step"""
    returns: Tensor | None = None
    """float [T], critic targets"""
    sample_ids: tuple[str, ...] = ()
    """[S], for messages"""
    lengths: tuple[int, ...] = ()
    """[S] response tokens"""
    mean_weights: Tensor | None = None
    """float [T]: what a token counts in metrics, which are means whatever the loss is; None: `weights`"""
    prompt_lengths: tuple[int, ...] = ()
    """[S] prompt tokens, 0 where unknown"""

    @property
    def metric_weights(self) -> Tensor:
        """float [T]"""
        return self.weights if self.mean_weights is None else self.mean_weights


@dataclass(frozen=True, slots=True)
class Norm:
    """Global numbers of one optimizer step, equal on every rank and for every micro-batch of the step."""

    divisor: float
    """what the undivided loss sum is divided by: rollouts (per_sample, constant) or trained tokens (per_token)"""
    rollouts: int
    """trajectories in the step, fully masked ones included"""
    trained_tokens: int
    rollout_tokens: Tensor
    """float [R]: trained tokens of each rollout of the batch that belongs to the step, 0 for the others"""
    weight_mean: float = 1.0
    """mean MIS weight of the step (`tis_batch_normalize`)"""
    scale: float = 1.0
    """extra factor on the loss for frameworks that average gradients over ranks (FSDP: the number of ranks)"""
