"""Which samples of a rollout batch go into which optimizer step, rank and micro-batch (pure)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.trainer.backend import BackendConfig
from actors.trainer.batch.batching import CostModel, StepPlan, dynamic_global_batch_size, plan_step


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Samples are positions in the batch; every one is in one step or in `trimmed`."""

    steps: tuple[StepPlan, ...]
    over_cap: tuple[int, ...]
    """samples longer than the token cap, each alone in its micro-batch"""
    trimmed: tuple[int, ...]
    """samples of the trajectories that `use_dynamic_global_batch_size` leaves out"""
    imbalance: float
    """work of the busiest rank over the mean of the ranks, FLOPs, the worst of the steps; 1 is perfect"""


def plan_steps(
    config: BackendConfig,
    total_lengths: Sequence[int],
    trajectories: Sequence[Hashable],
    *,
    responses: Sequence[int] | None = None,
    ranks: int = 1,
    cp_size: int = 1,
    mb_group: int = 1,
    cost: CostModel | None = None,
) -> RolloutPlan:
    """Plan for samples of `total_lengths` tokens (prompt and response), `responses` of them response, and their
    trajectories, over `ranks` data-parallel ranks of `cp_size` that share each sample; micro-batches of a rank in multiples of
    `mb_group`. Raises BatchingError.

    Whole trajectories in order of first appearance. They are dealt evenly over `num_steps_per_rollout` steps, one step
    each when there are fewer; or, with `use_dynamic_global_batch_size`, the largest multiple of `ranks` makes one step
    and the youngest up to ranks - 1 are left out.
    """
    members: dict[Hashable, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        members.setdefault(trajectory, []).append(i)
    groups = list(members.values())
    kept, count = len(groups), max(1, min(config.num_steps_per_rollout, len(groups)))
    if config.use_dynamic_global_batch_size:
        kept, count = dynamic_global_batch_size(len(groups), ranks), 1
    dynamic = config.use_dynamic_batch_size
    price = cost or CostModel()
    work = [price(n, r) for n, r in zip(total_lengths, responses or [0] * len(total_lengths), strict=True)]
    steps: list[StepPlan] = []
    over: list[int] = []
    for k in range(count):
        mine = groups[kept * k // count : kept * (k + 1) // count]
        at = sorted(i for group in mine for i in group)
        plan = plan_step(
            [total_lengths[i] for i in at],
            [trajectories[i] for i in at],
            dp_size=ranks,
            cp_size=cp_size,
            mb_group=mb_group,
            max_tokens_per_gpu=config.max_tokens_per_gpu if dynamic else None,
            micro_batch_size=None if dynamic else config.micro_batch_size,
            balance="none" if ranks == 1 else config.balance,
            costs=[work[i] for i in at],
        )
        over += [i for i in at if dynamic and total_lengths[i] > config.max_tokens_per_gpu * cp_size]
        dealt = tuple(tuple(tuple(at[i] for i in batch) for batch in rank) for rank in plan.ranks)
        steps.append(StepPlan(tuple(at), plan.num_rollouts, dealt))
    trimmed = tuple(sorted(i for group in groups[kept:] for i in group))
    return RolloutPlan(tuple(steps), tuple(over), trimmed, max(_imbalance(step, work) for step in steps))


def _imbalance(step: StepPlan, work: Sequence[float]) -> float:
    loads = [sum(work[i] for batch in rank for i in batch) for rank in step.ranks]
    return max(loads) * len(loads) / sum(loads) if sum(loads) > 0 else 1.0


def cost_of(config: Any) -> CostModel:
    """FLOPs of a model by its Hugging Face config; what a class names otherwise is estimated by the usual proportions."""
    hidden = _count(config, "hidden_size") or 1
    heads = _count(config, "num_attention_heads") or max(1, hidden // 64)
    return CostModel.of_shape(
        hidden=hidden,
        layers=_count(config, "num_hidden_layers") or 1,
        ffn=_ffn(config) or 4 * hidden,
        vocab=config.vocab_size,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads") or heads,
        head_dim=_count(config, "head_dim") or hidden // heads or 1,
    )


def _count(config: Any, name: str) -> int:
    try:
        value = getattr(config, name, None)
    except (AttributeError, ValueError, RuntimeError):  # some configs have no one value for all layers, and raise
        return 0
    return value if isinstance(value, int) else 0


def _ffn(config: Any) -> int:
    """Columns of the feed-forward blocks that a token meets, on average over the layers."""
    if (
        not all(hasattr(config, name) for name in ("num_experts", "mlp_only_layers", "decoder_sparse_step"))
        or not config.num_experts
    ):
        return _count(config, "intermediate_size")
    layers = config.num_hidden_layers
    sparse = sum(n not in config.mlp_only_layers and (n + 1) % config.decoder_sparse_step == 0 for n in range(layers))
    inside = config.num_experts_per_tok * config.moe_intermediate_size
    return int(sparse * inside + (layers - sparse) * config.intermediate_size) // layers
