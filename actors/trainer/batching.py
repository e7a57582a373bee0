"""Which samples go into which optimizer step, rank and micro-batch. Pure: lengths in, a plan out.

Always true of a plan: every kept sample is in exactly one micro-batch; samples of one rollout share a step; all
ranks run the same number of micro-batches per step; no micro-batch exceeds the token cap unless it holds a single
sample that does by itself. Reference 1.4 (R1) and 1.6 (B2-B8).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.trainer.packing import BatchingError, deal, pack, split_to_multiple, spread

Balance = Literal["none", "tokens", "flops"]
MicroBatch = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step. ranks[r][k] is the k-th micro-batch of data-parallel rank r, as sample positions."""

    samples: tuple[int, ...]
    num_rollouts: int
    """the step's loss normaliser: what it holds, also for a partial last step"""
    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def micro_batches_per_rank(self) -> int:
        return len(self.ranks[0])


@dataclass(frozen=True, slots=True)
class BatchPlan:
    steps: tuple[StepPlan, ...]
    dropped: tuple[int, ...]
    """samples of trailing rollouts that fill no step; the caller keeps them for the next batch or says so"""
    over_cap: tuple[int, ...]
    """samples longer than the cap, each alone in its micro-batch"""
    warnings: tuple[str, ...] = ()


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
    def of_shape(
        *, hidden: int, layers: int, ffn: int, vocab: int, heads: int, kv_heads: int, head_dim: int
    ) -> CostModel:
        """Dense decoder with a gated feed-forward and causal attention. Per token and layer: queries and output
        2 hidden heads head_dim, keys and values 2 hidden kv_heads head_dim, feed-forward 3 hidden ffn. Per pair of
        tokens and layer, half of the pairs masked: heads head_dim. Per response token: hidden vocab."""
        inner = heads * head_dim
        linear = layers * hidden * (2 * inner + 2 * kv_heads * head_dim + 3 * ffn)
        return CostModel(linear=linear, quadratic=layers * inner, head=hidden * vocab)


def resolve_global_batch_size(
    *,
    rollout_batch_size: int,
    n_samples_per_prompt: int,
    num_steps_per_rollout: int | None = None,
    global_batch_size: int | None = None,
) -> int:
    """Four-knob rule: rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout.

    All count trajectories. Only steps given: the rest is divided, rounding down. Both given: they must agree.
    Neither: one step takes everything.
    """
    total = rollout_batch_size * n_samples_per_prompt
    if num_steps_per_rollout is None:
        size = total if global_batch_size is None else global_batch_size
    else:
        if num_steps_per_rollout < 1:
            raise BatchingError(f"num_steps_per_rollout={num_steps_per_rollout} must be at least 1.")
        size = total // num_steps_per_rollout
        if global_batch_size is not None and global_batch_size != size:
            raise BatchingError(
                f"global_batch_size={global_batch_size}, but rollout_batch_size={rollout_batch_size} * "
                f"n_samples_per_prompt={n_samples_per_prompt} / steps={num_steps_per_rollout} is {size}. "
                "Drop one of the two settings."
            )
    if not 1 <= size <= total:
        raise BatchingError(f"global_batch_size={size} is outside 1..{total} (trajectories per rollout batch).")
    return size


def dynamic_global_batch_size(rollouts: int, dp_size: int) -> int:
    """`--use-dynamic-global-batch-size`: trajectories of the one step, the largest multiple of dp_size that arrived.
    BatchingError when fewer than dp_size did."""
    size = rollouts // dp_size * dp_size
    if size == 0:
        raise BatchingError(f"{rollouts} trajectories cannot feed dp_size={dp_size} ranks. Use fewer ranks.")
    return size


def cut_steps(
    rollouts: Sequence[Hashable], global_batch_size: int, *, allow_partial: bool = False, minimum: int = 1
) -> tuple[list[list[int]], list[int]]:
    """Whole rollouts in order of first appearance, global_batch_size per step -> (samples per step, dropped samples).

    The rest makes a partial last step if allowed and it holds at least `minimum` samples, else it is dropped.
    """
    members: dict[Hashable, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        members.setdefault(rollout, []).append(i)
    groups = list(members.values())
    whole = len(groups) // global_batch_size * global_batch_size
    steps = [groups[k : k + global_batch_size] for k in range(0, whole, global_batch_size)]
    rest = groups[whole:]
    if rest and allow_partial and sum(len(g) for g in rest) >= minimum:
        steps.append(rest)
        rest = []
    return [sorted(i for g in step for i in g) for step in steps], sorted(i for g in rest for i in g)


def plan_batches(
    total_lengths: Sequence[int],
    rollouts: Sequence[Hashable],
    *,
    global_batch_size: int,
    dp_size: int = 1,
    cp_size: int = 1,
    max_tokens_per_gpu: int | None = None,
    micro_batch_size: int | None = None,
    mb_group: int = 1,
    allow_partial: bool = False,
    balance: Balance = "none",
    costs: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
) -> BatchPlan:
    """Steps, ranks and micro-batches for samples of total_lengths tokens (prompt + response) and their trajectories.

    Dynamic: max_tokens_per_gpu * cp_size tokens per micro-batch. Static: micro_batch_size samples each, in order;
    the count must be a multiple of dp_size * mb_group (mb_group: micro-batches per group of an interleaved pipeline).

    balance: "none" deals micro-batches to ranks in turn. "tokens" and "flops" even out tokens, or `costs` (work of each
    sample, any unit), between ranks, and dynamic micro-batches are repacked to be alike. The cap and the equal count of
    micro-batches per rank hold whatever is chosen.

    Raises BatchingError when there is no full step, or when a step has fewer samples than the ranks need micro-batches
    (possible with a handful of samples near the cap: a micro-batch is never empty and never exceeds the cap).
    """
    if (max_tokens_per_gpu is None) == (micro_batch_size is None):
        raise BatchingError("give exactly one of max_tokens_per_gpu (dynamic) and micro_batch_size (static).")
    if balance == "flops" and costs is None:
        raise BatchingError("balance=flops needs the cost of every sample. Give costs, or use balance=tokens.")
    work = costs if balance == "flops" and costs is not None else total_lengths
    dynamic = max_tokens_per_gpu is not None
    align = dp_size * mb_group
    steps, dropped = cut_steps(rollouts, global_batch_size, allow_partial=allow_partial and dynamic, minimum=dp_size)
    if not steps:
        raise BatchingError(
            f"{len(set(rollouts))} trajectories do not fill one step of global_batch_size={global_batch_size}. "
            "Lower global_batch_size, or allow partial steps."
        )
    cap = 0 if max_tokens_per_gpu is None else max_tokens_per_gpu * cp_size
    over = [i for step in steps for i in step if dynamic and total_lengths[i] > cap]
    plans = []
    for step in steps:
        if micro_batch_size is not None:
            plans.append(_static_step(step, rollouts, micro_batch_size, dp_size, align, balance, work))
        else:
            plans.append(_dynamic_step(step, total_lengths, rollouts, cap, dp_size, align, balance, work))
    return BatchPlan(
        tuple(plans),
        tuple(dropped),
        tuple(over),
        tuple(
            f"sample {names[i] if names else i}: {total_lengths[i]} tokens exceed the micro-batch cap of {cap}; it is"
            " alone in its micro-batch and may not fit in memory. Raise max_tokens_per_gpu or lower the length limits."
            for i in over
        ),
    )


def _static_step(
    step: Sequence[int],
    rollouts: Sequence[Hashable],
    size: int,
    dp_size: int,
    align: int,
    balance: Balance,
    work: Sequence[float],
) -> StepPlan:
    chunks = [tuple(step[k : k + size]) for k in range(0, len(step), size)]
    if len(chunks) % align:
        raise BatchingError(
            f"{len(step)} samples make {len(chunks)} micro-batches of {size}, not a multiple of {align} "
            "(data-parallel ranks times the pipeline's group). Change micro_batch_size or use dynamic batching."
        )
    if balance == "none":
        ranks = tuple(tuple(chunks[r::dp_size]) for r in range(dp_size))
    else:
        dealt = deal(chunks, [sum(work[i] for i in chunk) for chunk in chunks], dp_size, even=True)
        ranks = tuple(tuple(chunks[b] for b in rank) for rank in dealt)
    return StepPlan(tuple(step), len({rollouts[i] for i in step}), ranks)


def _dynamic_step(
    step: Sequence[int],
    total_lengths: Sequence[int],
    rollouts: Sequence[Hashable],
    cap: int,
    dp_size: int,
    align: int,
    balance: Balance,
    work: Sequence[float],
) -> StepPlan:
    lengths, mine = [total_lengths[i] for i in step], [work[i] for i in step]
    bins = split_to_multiple(pack(lengths, cap, align), lengths, align)
    if balance != "none":
        bins = spread(lengths, len(bins), cap, mine) or bins
    weights = [sum(mine[i] for i in b) for b in bins]
    dealt = deal(bins, weights, dp_size, even=balance != "none")
    ranks = tuple(tuple(tuple(step[i] for i in sorted(bins[b])) for b in rank) for rank in dealt)
    return StepPlan(tuple(step), len({rollouts[i] for i in step}), ranks)
