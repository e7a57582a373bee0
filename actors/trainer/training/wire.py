"""What rank 0 tells the other ranks: msgpack, typed, never pickled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np
from torch import Tensor

from actors.trainer.backend import BackendConfig, BatchSample, StepBatch
from actors.trainer.objective import TrainSample
from bus.messages.samples import Picture


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    library: str
    config: BackendConfig


class StepOrder(msgspec.Struct, frozen=True, tag="step"):
    """A batch; its samples arrive as tables of their fields, arrays as they were (read-only). Pictures travel once, by blob."""

    samples: list[Any]
    step: int
    seed: int
    knobs: dict[str, Any]
    images: dict[str, bytes] = {}  # by blob

    @staticmethod
    def of(batch: StepBatch) -> StepOrder:
        bare = [replace(s, pictures=tuple((picture, b"") for picture, _ in s.pictures)) for s in batch.samples]
        return StepOrder(bare, batch.step, batch.seed, dict(batch.knobs), batch.images)

    def arrived(self) -> StepBatch:
        """The batch on the other side."""
        return StepBatch(list(map(self._sample, self.samples)), self.step, self.seed, self.knobs)

    def _sample(self, fields: dict[str, Any]) -> BatchSample:
        named = [msgspec.convert(picture, Picture) for picture, _ in fields["pictures"]]
        pictures = tuple((picture, self.images[picture.blob]) for picture in named)
        return BatchSample(**{**fields, "train": TrainSample(**fields["train"]), "pictures": pictures})


class LoadOrder(msgspec.Struct, frozen=True, tag="load"):
    """Take over a checkpoint that rank 0 found fit."""

    directory: str
    drops: tuple[str, ...] = ()


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Copy all state, and write this rank's part in a thread."""

    directory: str


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Take part in the export, in buckets of so many bytes."""

    limit_bytes: int


class Do(msgspec.Struct, frozen=True, tag="do"):
    """Enter a verb that needs nothing more."""

    verb: Literal["finish", "weights_hash", "sleep", "wake", "stop"]


Command = Setup | StepOrder | LoadOrder | Save | Export | Do
_ARRAY = 1  # msgpack's extension: type, shape, bytes


def _out(x: Any) -> Any:
    if isinstance(x, np.generic):
        return x.item()
    array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((array.dtype.str, array.shape, array.tobytes())))


def _in(code: int, data: memoryview) -> np.ndarray:
    kind, shape, body = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    return np.frombuffer(body, kind).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_out).encode
decode = msgspec.msgpack.Decoder(Command, ext_hook=_in).decode
"""msgspec.ValidationError for what is no command."""
