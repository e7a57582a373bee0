"""Device memory of training state, moved to the host while engines use the GPU, and back (--offload-train).

Owns the copies. What moves is the memory under the tensors, not the tensors: parameters, optimizer state and shards keep
their identity, views and all, and hold nothing in between. Always true: the memory comes back bit for bit.
"""

from __future__ import annotations

import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bus.errors import MilesAsyncError

ROOM_S = 30.0  # a killed engine's memory is free only when the driver has cleaned up after it


class NoRoom(MilesAsyncError):
    """The device has not the memory that training needs."""


class Offload:
    """`target`: cpu for (pinned) host memory, disk for a file without a name in `directory`; stay: nothing moves, and only what
    lies unused is given to others."""

    def __init__(self, target: str, directory: str = "") -> None:
        self._target = target
        self._directory = directory
        self._host = torch.empty(0, dtype=torch.uint8)
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def away(self) -> bool:
        """Whether anything is moved out."""
        return bool(self._away)

    @torch.no_grad()
    def store(self, tensors: Iterable[Tensor]) -> int:
        """Move the memory of `tensors` out, each piece once though several lie in it; bytes moved. Host memory of a trainer
        on a CPU stays where it is, unless it goes to disk."""
        if self._target == "stay":
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            return 0
        found = [s for s in storages(tensors) if s.device.type != "cpu" or self._on_disk(s)]
        sizes = [(s, s.nbytes()) for s in found if s.nbytes()]
        total = sum(n for _, n in sizes)
        if self._host.numel() != total:
            self._host = self._allocate(total, pinned=any(s.device.type == "cuda" for s, _ in sizes))
        for (storage, n), host in zip(sizes, self._pieces(sizes), strict=True):
            host.copy_(_bytes(storage), non_blocking=True)
            self._away.append((storage, n))
        _settle(sizes)
        for storage, _ in sizes:
            storage.resize_(0)
        if any(s.device.type == "cuda" for s, _ in sizes):
            torch.cuda.empty_cache()
        return total

    @torch.no_grad()
    def fetch(self) -> None:
        """Bring everything back. NoRoom, with nothing changed, when the device has no room for it within ROOM_S."""
        sizes = self._away
        self._wait_for_room(sizes)
        for (storage, n), host in zip(sizes, self._pieces(sizes), strict=True):
            storage.resize_(n)
            _bytes(storage).copy_(host, non_blocking=True)
        _settle(sizes)
        self._away = []

    def _on_disk(self, storage: torch.UntypedStorage) -> bool:
        return self._target == "disk" and storage.resizable()  # what safetensors read into host memory stays there

    def _pieces(self, sizes: list[tuple[torch.UntypedStorage, int]]) -> tuple[Tensor, ...]:
        return self._host.split([n for _, n in sizes]) if sizes else ()

    def _allocate(self, n_bytes: int, *, pinned: bool) -> Tensor:
        self._host = torch.empty(0, dtype=torch.uint8)  # the old one first: both may not fit
        if self._target != "disk" or n_bytes == 0:
            return host_memory(n_bytes, pinned=pinned)
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix="offload.") as file:  # gone by name, not by content
            return torch.from_file(file.name, shared=True, size=n_bytes, dtype=torch.uint8)

    def _wait_for_room(self, sizes: list[tuple[torch.UntypedStorage, int]]) -> None:
        cuda = [s.device for s, _ in sizes if s.device.type == "cuda"]
        if not cuda:
            return
        wanted, end = sum(n for _, n in sizes), time.monotonic() + ROOM_S
        while (free := torch.cuda.mem_get_info(cuda[0])[0]) < wanted:
            if time.monotonic() > end:
                raise NoRoom(
                    f"the trainer needs {wanted / 2**30:.1f} GiB of {cuda[0]} for its turn and {free / 2**30:.1f} GiB are free: "
                    "something else holds its memory. See nvidia-smi; engines share it by --offload-rollout-level."
                )
            time.sleep(0.1)  # the driver tells nobody when it has cleaned up; we are in the training's own thread


def host_memory(n_bytes: int, *, pinned: bool) -> Tensor:
    """uint8 [n_bytes] on the host; `pinned`: page-locked as it stands, while this very tensor lives. torch's own pinned memory is
    rounded up to a power of two: 65 GiB would take 128."""
    made = torch.empty(n_bytes, dtype=torch.uint8)
    if pinned and n_bytes:
        cuda: Any = torch.cuda.cudart()
        if int(cuda.cudaHostRegister(made.data_ptr(), n_bytes, 0)) == 0:  # else copies are slower, and right
            weakref.finalize(made, cuda.cudaHostUnregister, made.data_ptr())
    return made


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The pieces of memory that `tensors` lie in, each once; of a sharded tensor this rank's."""
    found = ((x.to_local() if isinstance(x, DTensor) else x).untyped_storage() for x in tensors)
    return list({s._cdata: s for s in found}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _settle(sizes: list[tuple[torch.UntypedStorage, int]]) -> None:
    for device in {s.device for s, _ in sizes if s.device.type == "cuda"}:
        torch.cuda.synchronize(device)
