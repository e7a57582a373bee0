"""Structs of rooms as tests want them: settings at their declared defaults, but for what the test says."""

from __future__ import annotations

from typing import Any, TypeVar

from actors.runtime.prompts import DataSpec
from miles_async.launcher.plan import told
from miles_async.settings.flat import Flat
from scripts.bench.declared import PLACE, PLAIN, actor_of, backend_of, megatron_of, objective_of

__all__ = ["PLACE", "PLAIN", "actor_of", "backend_of", "data_of", "megatron_of", "objective_of", "room_of"]
T = TypeVar("T")


def room_of(kind: type[T], **own: Any) -> T:
    """A struct of any room; no scorer is set."""
    return told(kind, Flat({**PLAIN, "rm_type": None}), **own)


def data_of(**own: Any) -> DataSpec:
    """How to read a file of tests: its columns are prompt, label and metadata."""
    return room_of(DataSpec, **({"input_key": "prompt", "label_key": "label", "metadata_key": "metadata"} | own))
