"""Names, signatures and errors of the trainer's hooks; importable without torch."""

from __future__ import annotations

from actors.trainer.objective_config import ObjectiveConfig

SIGNATURES = {
    "custom_loss_function_path": "(args, batch, log_probs [T], reducer) -> (loss [], {name: sum []})",
    "custom_advantage_function_path": "(args, inputs) -> (advantages [T], returns [T])",
    "custom_tis_function_path": (
        "(*, args, pg_loss [T], train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, "
        "parallel_state, max_seq_lens) -> (pg_loss [T], loss_masks, {name: [T]})"
    ),
    "custom_pg_loss_reducer_function_path": (
        "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> function from [T] to []"
    ),
    "custom_reward_post_process_path": "(args, samples) -> (raw rewards, processed rewards)",
}
"""Setting -> what its function takes and returns. T: response tokens of a micro-batch, samples back to back."""


class HookError(ValueError):
    """A function of the user's that cannot be loaded, raised, or returned something else than its signature says."""

    def __init__(self, field: str, path: str | None, problem: str) -> None:
        self.field = field
        self.path = path or ""
        self.problem = " ".join(problem.split())[:400].rstrip(".")
        self.remedy = f"Its signature is {SIGNATURES[field]}; see docs/objective.md."
        super().__init__(f"{field} = {path!r}: {self.problem}. {self.remedy}")


def hooks_of(cfg: ObjectiveConfig) -> dict[str, str]:
    """Setting -> dotted path, of those that are set."""
    return {field: getattr(cfg, field) for field in SIGNATURES if getattr(cfg, field)}
