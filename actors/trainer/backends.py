"""The training libraries by name."""

from __future__ import annotations

from actors.runtime.run import Refused
from actors.trainer.backend import TrainBackend
from actors.trainer.null_backend import NullBackend


def open_backend(name: str) -> TrainBackend:
    """The training library by name, imported only when asked for."""
    if name == "torch":
        from actors.trainer.torch_backend import TorchBackend

        return TorchBackend()
    if name == "none":
        return NullBackend()
    raise Refused(f"train backend {name!r} is unknown. Choose torch or none.")
