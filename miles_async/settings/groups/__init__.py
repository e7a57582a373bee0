"""The argument groups, one file each."""

from miles_async.settings.groups.architecture import ArchitectureSettings
from miles_async.settings.groups.bus import BusSettings
from miles_async.settings.groups.ckpt import CkptSettings
from miles_async.settings.groups.eval import EvalSettings
from miles_async.settings.groups.governor import GovernorSettings
from miles_async.settings.groups.grpo import GrpoSettings
from miles_async.settings.groups.launch import LaunchSettings
from miles_async.settings.groups.lora import LoraSettings
from miles_async.settings.groups.model import ModelSettings
from miles_async.settings.groups.optimizer import OptimizerSettings
from miles_async.settings.groups.parallel import ParallelSettings
from miles_async.settings.groups.perf import PerfSettings
from miles_async.settings.groups.rollout import RolloutSettings
from miles_async.settings.groups.sglang import SglangSettings
from miles_async.settings.groups.trackers import TrackersSettings

__all__ = ("ArchitectureSettings", "BusSettings", "CkptSettings", "EvalSettings", "GovernorSettings", "GrpoSettings",
           "LaunchSettings", "LoraSettings", "ModelSettings", "OptimizerSettings", "ParallelSettings", "PerfSettings",
           "RolloutSettings", "SglangSettings", "TrackersSettings")  # fmt: skip
