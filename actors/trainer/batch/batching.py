"""Which samples go into which optimizer step, rank and micro-batch. Pure: lengths in, a plan out.

Always true of a plan: every kept sample is in exactly one micro-batch; samples of one rollout share a step; all
ranks run the same number of micro-batches per step; no micro-batch exceeds the token cap unless it holds a single
sample that does by itself. Reference 1.4 (R1) and 1.6 (B2-B8).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.trainer.batch.packing import BatchingError, deal, pack, split_to_multiple, spread

Balance = Literal["none", "tokens", "flops"]
MicroBatch = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step. ranks[r][k] is the k-th micro-batch of data-parallel rank r, as sample positions."""

    samples: tuple[int, ...]
    num_rollouts: int
    """the step's loss normaliser: what it holds, also for a partial last step"""
    ranks: tuple[tuple[MicroBatch, ...], ...]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Multiply-adds of one forward pass over a sequence; the backward pass takes twice as many of every term, so ratios
    between samples hold for the whole step. The defaults count tokens."""

    linear: float = 1.0
    """per token: projections and feed-forward of all layers"""
    quadratic: float = 0.0
    """per squared token: attention scores and their weighted sum"""
    head: float = 0.0
    """per response token: the vocabulary, which prompt tokens do not meet"""

    def __call__(self, tokens: int, responses: int = 0) -> float:
        """Work of a sample of `tokens` tokens, `responses` of them response."""
        return tokens * (self.linear + tokens * self.quadratic) + responses * self.head

    @staticmethod
    def of_shape(*, hidden: int, layers: int, ffn: int, vocab: int, heads: int, kv_heads: int, head_dim: int) -> CostModel:
        """Dense decoder with a gated feed-forward and causal attention. Per token and layer: queries and output
        2 hidden heads head_dim, keys and values 2 hidden kv_heads head_dim, feed-forward 3 hidden ffn. Per pair of
        tokens and layer, half of the pairs masked: heads head_dim. Per response token: hidden vocab."""
        inner = heads * head_dim
        linear = layers * hidden * (2 * inner + 2 * kv_heads * head_dim + 3 * ffn)
        return CostModel(linear=linear, quadratic=layers * inner, head=hidden * vocab)


def dynamic_global_batch_size(rollouts: int, dp_size: int) -> int:
    """`--use-dynamic-global-batch-size`: trajectories of the one step, the largest multiple of dp_size that arrived.
    BatchingError when fewer than dp_size did."""
    size = rollouts // dp_size * dp_size
    if size == 0:
        raise BatchingError(f"{rollouts} trajectories cannot feed dp_size={dp_size} ranks. Use fewer ranks.")
    return size


def plan_step(
    total_lengths: Sequence[int],
    rollouts: Sequence[Hashable],
    *,
    dp_size: int = 1,
    cp_size: int = 1,
    max_tokens_per_gpu: int | None = None,
    micro_batch_size: int | None = None,
    mb_group: int = 1,
    balance: Balance = "none",
    costs: Sequence[float] | None = None,
) -> StepPlan:
    """Ranks and micro-batches of one step for samples of total_lengths tokens (prompt + response) and their trajectories.

    Dynamic: max_tokens_per_gpu * cp_size tokens per micro-batch. Static: micro_batch_size samples each, in order;
    the count must be a multiple of dp_size * mb_group (mb_group: micro-batches per group of an interleaved pipeline).

    balance: "none" deals micro-batches to ranks in turn. "tokens" and "flops" even out tokens, or `costs` (work of each
    sample, any unit), between ranks, and dynamic micro-batches are repacked to be alike. The cap and the equal count of
    micro-batches per rank hold whatever is chosen.

    Raises BatchingError when the step has none or fewer samples than the ranks need micro-batches (possible with a handful of
    samples near the cap: a micro-batch is never empty and never exceeds the cap).
    """
    if not total_lengths:
        raise BatchingError("the step's batch has no samples. Cut a batch only when groups are ready.")
    if (max_tokens_per_gpu is None) == (micro_batch_size is None):
        raise BatchingError("give exactly one of max_tokens_per_gpu (dynamic) and micro_batch_size (static).")
    if balance == "flops" and costs is None:
        raise BatchingError("balance=flops needs the cost of every sample. Give costs, or use balance=tokens.")
    work = costs if balance == "flops" and costs is not None else total_lengths
    align = dp_size * mb_group
    if micro_batch_size is not None:
        ranks = _static(len(total_lengths), micro_batch_size, dp_size, align, balance, work)
    else:
        ranks = _dynamic(total_lengths, (max_tokens_per_gpu or 0) * cp_size, dp_size, align, balance, work)
    return StepPlan(tuple(range(len(total_lengths))), len(set(rollouts)), ranks)


Dealt = tuple[tuple[MicroBatch, ...], ...]


def _static(samples: int, size: int, dp_size: int, align: int, balance: Balance, work: Sequence[float]) -> Dealt:
    chunks = [tuple(range(k, min(k + size, samples))) for k in range(0, samples, size)]
    if len(chunks) % align:
        raise BatchingError(
            f"{samples} samples make {len(chunks)} micro-batches of {size}, not a multiple of {align} "
            "(data-parallel ranks times the pipeline's group). Change micro_batch_size or use dynamic batching."
        )
    if balance == "none":
        return tuple(tuple(chunks[r::dp_size]) for r in range(dp_size))
    dealt = deal(chunks, [sum(work[i] for i in chunk) for chunk in chunks], dp_size, even=True)
    return tuple(tuple(chunks[b] for b in rank) for rank in dealt)


def _dynamic(lengths: Sequence[int], cap: int, dp_size: int, align: int, balance: Balance, work: Sequence[float]) -> Dealt:
    bins = split_to_multiple(pack(lengths, cap, align), lengths, align)
    if balance != "none":
        bins = spread(lengths, len(bins), cap, work) or bins
    dealt = deal(bins, [sum(work[i] for i in b) for b in bins], dp_size, even=balance != "none")
    return tuple(tuple(tuple(sorted(bins[b])) for b in rank) for rank in dealt)
