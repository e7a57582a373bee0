"""The training libraries by name, and none."""

from __future__ import annotations

from actors.trainer.backend import TrainBackend


def open_backend(name: str) -> TrainBackend:
    """`none`, or a training library as `core_of` finds it, imported only when asked for. Refused when there is no such."""
    if name == "none":
        return TrainBackend()
    from actors.trainer.training.ranked import RankedBackend

    return RankedBackend(name)
