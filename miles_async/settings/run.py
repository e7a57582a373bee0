"""RunSettings: all groups of one run, resolved. Every derived field is filled in and every rule has passed.

Build it with `load.load` (file and flags) or `load.settings_from` (keywords); both resolve and check.
"""

from pathlib import Path

import msgspec

from miles_async.settings.flat import Flat
from miles_async.settings.groups import (
    ArchitectureSettings,
    BusSettings,
    CkptSettings,
    EvalSettings,
    GovernorSettings,
    GrpoSettings,
    LaunchSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    PerfSettings,
    RolloutSettings,
    SglangSettings,
    TrackersSettings,
)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attribute per TOML table."""

    model: ModelSettings
    ckpt: CkptSettings
    rollout: RolloutSettings
    eval: EvalSettings
    perf: PerfSettings
    parallel: ParallelSettings
    grpo: GrpoSettings
    optimizer: OptimizerSettings
    lora: LoraSettings
    sglang: SglangSettings
    bus: BusSettings
    launch: LaunchSettings
    trackers: TrackersSettings
    governor: GovernorSettings
    architecture: ArchitectureSettings

    @property
    def run_dir(self) -> Path:
        """Folder of this run: settings, run.json, metrics, report, sockets, logs."""
        return Path(self.launch.runs_dir) / self.launch.name

    @property
    def flat(self) -> Flat:
        """All settings by name, and what follows from several."""
        tables = [getattr(self, name) for name in self.__struct_fields__]
        return Flat({name: getattr(table, name) for table in tables for name in table.__struct_fields__})
