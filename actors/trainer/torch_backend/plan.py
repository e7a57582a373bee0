"""Which samples of a rollout batch go into which optimizer step, rank and micro-batch (pure)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from actors.trainer.backend import BackendConfig
from actors.trainer.batching import CostModel, StepPlan, plan_batches
from actors.trainer.packing import BatchingError


def plan_steps(
    config: BackendConfig,
    total_lengths: Sequence[int],
    trajectories: Sequence[Hashable],
    *,
    ranks: int = 1,
    cost: CostModel | None = None,
) -> tuple[list[StepPlan], list[int]]:
    """(steps over sample positions, samples longer than the token cap).

    Whole trajectories in order of first appearance, dealt evenly over `num_steps_per_rollout` steps: every sample is
    trained in exactly one, none is left over. Fewer trajectories than steps: one step each. Raises BatchingError.
    """
    members: dict[Hashable, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        members.setdefault(trajectory, []).append(i)
    groups = list(members.values())
    if not groups:
        raise BatchingError("the step's batch has no samples. Cut a batch only when groups are ready.")
    count = min(max(config.num_steps_per_rollout, 1), len(groups))
    dynamic = config.use_dynamic_batch_size
    steps, over = [], []
    for k in range(count):
        mine = groups[len(groups) * k // count : len(groups) * (k + 1) // count]
        at = sorted(i for group in mine for i in group)
        plan = plan_batches(
            [total_lengths[i] for i in at],
            [trajectories[i] for i in at],
            global_batch_size=len(mine),
            dp_size=ranks,
            max_tokens_per_gpu=config.max_tokens_per_gpu if dynamic else None,
            micro_batch_size=None if dynamic else config.micro_batch_size,
            balance="none" if ranks == 1 else "flops",
            cost=cost,
        )
        over += [at[i] for i in plan.over_cap]
        for step in plan.steps:
            dealt = tuple(tuple(tuple(at[i] for i in batch) for batch in rank) for rank in step.ranks)
            steps.append(StepPlan(tuple(at[i] for i in step.samples), step.num_rollouts, dealt))
    return steps, over


__all__ = ("plan_steps",)
