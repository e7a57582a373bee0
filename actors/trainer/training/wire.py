"""What rank 0 tells the other ranks: msgpack, typed, never pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from actors.trainer.backend import BackendConfig, BatchSample, StepBatch
from actors.trainer.objective import TrainSample
from actors.trainer.objective.samples import FLOAT_FIELDS
from bus.messages.samples import Picture


class WireSample(msgspec.Struct, frozen=True, array_like=True):
    """One sample: arrays as little-endian bytes (int32 tokens, uint8 mask, float32 values)."""

    prompt: bytes
    response: bytes
    temperature: float
    sample_id: str
    group: str | int
    reward: float | None
    rollout: str | int | None
    prompt_length: int | None
    loss_mask: bytes | None
    remove: bool
    floats: dict[str, bytes]
    spans: list[tuple[int, int]] | None
    known_rewards: tuple[float, ...] = ()
    processed: float | None = None
    experts: tuple[str, int, bytes] | None = None  # type, tokens, and all numbers
    pictures: tuple[Picture, ...] = ()


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    library: str
    config: BackendConfig


class Step(msgspec.Struct, frozen=True, tag="step"):
    samples: list[WireSample]
    step: int
    seed: int
    knobs: dict[str, Any]
    images: dict[str, bytes] = {}  # by blob


class Load(msgspec.Struct, frozen=True, tag="load"):
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


Command = Setup | Step | Load | Save | Export | Do
_decoder = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    """Msgpack bytes of a command."""
    return msgspec.msgpack.encode(command)


def decode(data: bytes) -> Command:
    """Inverse of `encode`; msgspec.ValidationError for anything else."""
    return _decoder.decode(data)


def pack_step(batch: StepBatch) -> Step:
    """A step's batch as a command. Own log-probs and values are left out: each rank computes them."""
    images = {picture.blob: data for s in batch.samples for picture, data in s.pictures}
    return Step([_pack(s) for s in batch.samples], batch.step, batch.seed, dict(batch.knobs), images)


def unpack_step(step: Step) -> StepBatch:
    """Inverse of `pack_step`."""
    return StepBatch([_unpack(s, step.images) for s in step.samples], step.step, step.seed, step.knobs)


def _bytes(x: Sequence[float] | np.ndarray, dtype: type) -> bytes:
    return np.asarray(x, dtype=dtype).tobytes()


def _pack(s: BatchSample) -> WireSample:
    t = s.train
    given = {name: getattr(t, name) for name in FLOAT_FIELDS if name not in ("old_logp", "ref_logp", "values")}
    group, rollout = t.group, t.rollout
    return WireSample(
        prompt=_bytes(s.prompt_tokens, np.int32),
        response=_bytes(s.response_tokens, np.int32),
        temperature=s.temperature,
        sample_id=t.sample_id,
        group=group if isinstance(group, (str, int)) else str(group),
        reward=t.reward,
        rollout=rollout if rollout is None or isinstance(rollout, (str, int)) else str(rollout),
        prompt_length=t.prompt_length,
        loss_mask=None if t.loss_mask is None else _bytes(t.loss_mask, np.uint8),
        remove=t.remove,
        floats={name: _bytes(x, np.float32) for name, x in given.items() if x is not None},
        spans=None if t.spans is None else [(int(v), int(n)) for v, n in t.spans],
        known_rewards=tuple(t.known_rewards),
        processed=t.processed,
        experts=None if s.experts is None else (s.experts.dtype.str, len(s.experts), s.experts.tobytes()),
        pictures=tuple(picture for picture, _ in s.pictures),
    )


def _unpack(w: WireSample, images: dict[str, bytes]) -> BatchSample:
    response = np.frombuffer(w.response, dtype=np.int32)
    return BatchSample(
        prompt_tokens=np.frombuffer(w.prompt, dtype=np.int32),
        response_tokens=response,
        temperature=w.temperature,
        train=TrainSample(
            sample_id=w.sample_id,
            group=w.group,
            response_length=len(response),
            reward=w.reward,
            rollout=w.rollout,
            prompt_length=w.prompt_length,
            loss_mask=None if w.loss_mask is None else np.frombuffer(w.loss_mask, dtype=np.uint8),
            remove=w.remove,
            spans=w.spans,
            known_rewards=w.known_rewards,
            processed=w.processed,
            **{name: np.frombuffer(x, dtype=np.float32) for name, x in w.floats.items()},
        ),
        experts=_experts(*w.experts) if w.experts else None,
        pictures=tuple((picture, images[picture.blob]) for picture in w.pictures),
    )


def _experts(kind: str, tokens: int, data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=kind).reshape(tokens, -1) if tokens else np.zeros((0, 0), dtype=kind)
