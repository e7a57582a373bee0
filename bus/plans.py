"""Weight plans as files: the trainer writes one into the directory that a manifest names, workers read it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bus.messages.weights import WeightPlan

PLAN_FILE = "plan.json"


def write_plan(directory: Path, plan: WeightPlan) -> None:
    """Whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f".{PLAN_FILE}.part"
    part.write_bytes(msgspec.json.encode(plan))
    part.replace(directory / PLAN_FILE)


def read_plan(directory: Path) -> WeightPlan:
    """OSError when it is gone, msgspec.DecodeError when it is not one."""
    return msgspec.json.decode((directory / PLAN_FILE).read_bytes(), type=WeightPlan)


__all__ = ("PLAN_FILE", "read_plan", "write_plan")
