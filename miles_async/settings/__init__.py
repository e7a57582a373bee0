"""Settings: what a run is told before it starts. Standard library and msgspec only, so that help answers at once."""

from miles_async.settings.checks import Preflight, preflight
from miles_async.settings.dump import dry_run_text, dump_toml
from miles_async.settings.errors import SettingsError
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
from miles_async.settings.load import Loaded, load, settings_from
from miles_async.settings.run import RunSettings
from miles_async.settings.runs import RunRef, find_run, write_run_file

__all__ = (
    "BusSettings",
    "CkptSettings",
    "EvalSettings",
    "GrpoSettings",
    "LaunchSettings",
    "Loaded",
    "ModelSettings",
    "OptimizerSettings",
    "PerfSettings",
    "Preflight",
    "RolloutSettings",
    "RunRef",
    "RunSettings",
    "SettingsError",
    "SglangSettings",
    "dry_run_text",
    "dump_toml",
    "find_run",
    "load",
    "preflight",
    "settings_from",
    "write_run_file",
)
