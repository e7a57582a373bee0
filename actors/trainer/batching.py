"""Which samples go into which optimizer step, rank and micro-batch. Pure: lengths in, a plan out.

Always true of a plan: every kept sample is in exactly one micro-batch; samples of one rollout share a step; all
ranks run the same number of micro-batches per step; no micro-batch exceeds the token cap unless it holds a single
sample that does by itself. Reference 1.4 (R1) and 1.6 (B2-B8).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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
    """Relative FLOPs of one sequence of n tokens: n * (1 + n * quadratic)."""

    quadratic: float = 0.0

    def __call__(self, tokens: int) -> float:
        return tokens * (1.0 + tokens * self.quadratic)

    @staticmethod
    def of_shape(*, hidden: int, layers: int, ffn: int, vocab: int, kv_ratio: float = 1.0) -> CostModel:
        """Dense transformer, gated FFN, causal attention. Per token: attention projections hidden^2 (2 + 2 kv_ratio),
        FFN 3 hidden ffn, per layer; vocabulary hidden vocab. Per pair of tokens: hidden per layer (half of 2)."""
        linear = layers * (hidden * hidden * (2 + 2 * kv_ratio) + 3 * hidden * ffn) + hidden * vocab
        return CostModel(quadratic=layers * hidden / linear)


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
    """`--use-dynamic-global-batch-size`: one step over all whole multiples of dp_size that arrived."""
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
    cost: Callable[[int], float] | None = None,
    names: Sequence[str] | None = None,
) -> BatchPlan:
    """Steps, ranks and micro-batches for samples of total_lengths tokens (prompt + response) and their trajectories.

    Dynamic: max_tokens_per_gpu * cp_size tokens per micro-batch. Static: micro_batch_size samples each, in order,
    dealt round-robin; the count must be a multiple of dp_size * mb_group (mb_group: micro-batches per group of an
    interleaved pipeline). balance="flops" evens out `cost` between micro-batches and ranks, the cap still holds.
    Raises BatchingError when there is no full step, or when a step has fewer samples than the ranks need micro-batches
    (possible with a handful of samples near the cap: a micro-batch is never empty and never exceeds the cap).
    """
    if (max_tokens_per_gpu is None) == (micro_batch_size is None):
        raise BatchingError("give exactly one of max_tokens_per_gpu (dynamic) and micro_batch_size (static).")
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
            plans.append(_static_step(step, rollouts, micro_batch_size, dp_size, align))
        else:
            price = cost or CostModel()
            plans.append(_dynamic_step(step, total_lengths, rollouts, cap, dp_size, align, balance, price))
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


def _static_step(step: Sequence[int], rollouts: Sequence[Hashable], size: int, dp_size: int, align: int) -> StepPlan:
    chunks = [tuple(step[k : k + size]) for k in range(0, len(step), size)]
    if len(chunks) % align:
        raise BatchingError(
            f"{len(step)} samples make {len(chunks)} micro-batches of {size}, not a multiple of {align} "
            "(data-parallel ranks times the pipeline's group). Change micro_batch_size or use dynamic batching."
        )
    ranks = tuple(tuple(chunks[r::dp_size]) for r in range(dp_size))
    return StepPlan(tuple(step), len({rollouts[i] for i in step}), ranks)


def _dynamic_step(
    step: Sequence[int],
    total_lengths: Sequence[int],
    rollouts: Sequence[Hashable],
    cap: int,
    dp_size: int,
    align: int,
    balance: Balance,
    cost: Callable[[int], float],
) -> StepPlan:
    lengths = [total_lengths[i] for i in step]
    bins = split_to_multiple(pack(lengths, cap, align), lengths, align)
    price = cost if balance == "flops" else float
    if balance != "none":
        bins = spread(lengths, len(bins), cap, price) or bins
    weights = [sum(price(lengths[i]) for i in b) for b in bins]
    dealt = deal(bins, weights, dp_size, even=balance != "none")
    ranks = tuple(tuple(tuple(step[i] for i in sorted(bins[b])) for b in rank) for rank in dealt)
    return StepPlan(tuple(step), len({rollouts[i] for i in step}), ranks)
