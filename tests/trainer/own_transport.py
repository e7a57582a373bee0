"""A transport of a user's own, whole: each version as one file, which every worker copies, verifies, and loads from its copy.

miles-async train --update-weight-transport tests/trainer/own_transport.py:KIND ...
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import msgspec

from actors.runtime.transports.kind import NotCounted, SendingTo, Takes, TransportBroken, TransportKind
from bus.messages.weights import WeightPlan


class Sender:
    """The trainer's side. A file for each version, until the next."""

    is_open = True

    def __init__(self, sending: SendingTo) -> None:
        self._sending, self._folder = sending, Path(mkdtemp(prefix="copied-"))

    def plan(self, *, whole: str = "") -> WeightPlan:
        from safetensors.torch import save_file

        buffers, file = self._sending.buffers, self._folder / "model.safetensors"
        save_file({name: tensor.cpu().contiguous() for bucket in buffers.held() for name, tensor in bucket}, file)
        first, *others = buffers.buckets
        handles = (str(file), digest_of(file))
        return WeightPlan(
            transport="copied",
            buckets=(msgspec.structs.replace(first, handles=handles), *others),
            workers=tuple(seat.worker for seat in self._sending.seats),
            deadline_s=self._sending.deadline_s,
            whole=whole,
        )

    def open(self) -> None:
        """Nobody is waited for."""

    def send(self) -> None:
        """Workers copy it themselves."""

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Copied(TransportKind, frozen=True, kw_only=True):
    """A worker's side."""

    async def load(self, engine: Takes, plan: WeightPlan, label: str, before: str | None = None) -> None:
        if before is not None:
            raise NotCounted
        path, digest = plan.buckets[0].handles
        with TemporaryDirectory(prefix="copy-") as folder:
            copy = Path(folder) / "model.safetensors"
            try:
                await asyncio.to_thread(shutil.copyfile, path, copy)
            except OSError as error:
                raise TransportBroken(f"{path} cannot be copied: {error.strerror}") from error
            if await asyncio.to_thread(digest_of, copy) != digest:
                raise TransportBroken(f"{path} came damaged")
            await engine.update_weights_from_disk(folder, label)


def digest_of(file: Path) -> str:
    """Of its bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


KIND = Copied(name="copied", told="a file that each worker copies", sender=f"{__file__}:Sender", on_host=True)
