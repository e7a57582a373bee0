"""RunSettings: all groups of one run, resolved. Every derived field is filled in and every rule has passed.

Build it with `load.load` (file and flags) or `load.settings_from` (keywords); both resolve and check.
"""

from pathlib import Path

import msgspec

from miles_async.settings.derive import needs_whole_groups
from miles_async.settings.groups import (
    BusSettings,
    CkptSettings,
    EvalSettings,
    GrpoSettings,
    LaunchSettings,
    ModelSettings,
    OptimizerSettings,
    PerfSettings,
    RolloutSettings,
    SglangSettings,
)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attribute per TOML table."""

    model: ModelSettings
    ckpt: CkptSettings
    rollout: RolloutSettings
    eval: EvalSettings
    perf: PerfSettings
    grpo: GrpoSettings
    optimizer: OptimizerSettings
    sglang: SglangSettings
    bus: BusSettings
    launch: LaunchSettings

    @property
    def run_dir(self) -> Path:
        """Folder of this run: settings, run.json, metrics, report, sockets, logs."""
        return Path(self.launch.runs_dir) / self.launch.name

    @property
    def samples_per_rollout(self) -> int:
        """Samples in one rollout: rollout_batch_size * n_samples_per_prompt."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def groups_per_version(self) -> int:
        """Prompt groups trained between two published policy versions: B of the admission bound."""
        return self.rollout.rollout_batch_size * self.rollout.update_weights_interval

    @property
    def lookahead_versions(self) -> int:
        """Staleness that `wait` adds to what admission implies, in policy versions: ceil((W - 1) / B); else 0."""
        if self.rollout.staleness_policy != "wait":
            return 0
        return -(-(self.rollout.staleness_lookahead - 1) // self.groups_per_version)

    @property
    def needs_whole_groups(self) -> bool:
        """Whether groups cannot be trained in parts."""
        hook, estimator = self.grpo.custom_reward_post_process_path, self.grpo.advantage_estimator
        return needs_whole_groups(reward_hook=hook, estimator=estimator)

    @property
    def max_open_groups(self) -> int:
        """Groups that may be issued and not yet trained, dropped or dead: (eta + 1 - lookahead) * B, at least B."""
        return (self.rollout.max_weight_staleness + 1 - self.lookahead_versions) * self.groups_per_version
