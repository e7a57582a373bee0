"""Memory given back and taken again, as SGLang does under a memory saver: keys and values are dropped, weights go to a file.

Owns the file while weights are away. Always true: weights come back bit for bit, and no token is made while anything is away.
The file lies in the directory for temporary files and has no name, so that it never outlives the process.
"""

import tempfile
from collections.abc import Iterable
from typing import IO

import torch
from torch import Tensor

from actors.generation.engines.embedded.batch import Batch
from actors.generation.engines.embedded.decoders import Decodes
from actors.generation.engines.embedded.wire import BadRequest

KV_CACHE, WEIGHTS = "kv_cache", "weights"
TAGS = (KV_CACHE, WEIGHTS, "cuda_graph")
"""SGLang's names; there are no CUDA graphs here, giving them back gives nothing."""


PIECE = 1 << 24


class Occupation:
    """What one engine holds. The scheduler's thread owns it."""

    def __init__(self, decoder: Decodes, batch: Batch) -> None:
        self._decoder = decoder
        self._batch = batch
        self._file: IO[bytes] | None = None
        self._sizes: list[int] = []
        self.released: set[str] = set()

    def release(self, tags: Iterable[str]) -> None:
        """Give back what the tags name (none: everything). The caller has seen that no request is at work. BadRequest, with
        nothing given back, for an unknown tag, one that is away already, or a disk without room."""
        named = _checked(tags)
        if away := sorted(named & self.released):
            raise BadRequest(f"{away[0]} is released already.")
        if WEIGHTS in named:
            self._store()
        if KV_CACHE in named:
            self._batch.cache.shrink()
        self.released |= named

    def resume(self, tags: Iterable[str]) -> None:
        """Take back what the tags name (none: everything). BadRequest, with nothing changed, for what is not away."""
        named = _checked(tags)
        if held := sorted(named - self.released):
            raise BadRequest(f"{held[0]} is not released.")
        if WEIGHTS in named:
            self._fetch()
        self.released -= named

    def _store(self) -> None:
        storages = self._storages()
        file = tempfile.TemporaryFile()  # noqa: SIM115 - lives until the weights are back
        try:
            for piece in (piece for storage in storages for piece in _pieces(storage)):
                file.write(piece.clone().numpy().data)  # memory that numpy sees itself can never be given back
            file.flush()
        except OSError as error:
            file.close()
            raise BadRequest(
                f"weights are not released: no temporary file for them ({error.strerror}); set TMPDIR to a larger disk."
            ) from None
        self._sizes = [storage.nbytes() for storage in storages]
        self._file = file
        for storage in storages:
            storage.resize_(0)

    def _fetch(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        for storage, size in zip(self._storages(), self._sizes, strict=True):
            storage.resize_(size)
            for piece in _pieces(storage):
                piece.copy_(torch.frombuffer(bytearray(self._file.read(piece.numel())), dtype=torch.uint8))
        self._file.close()
        self._file = None

    def _storages(self) -> list[torch.UntypedStorage]:
        """Memory of all weights, each once though several tensors lie in it, in an order that stays."""
        tensors: list[Tensor] = [slot.view for slot in self._decoder.slots.values()]
        tensors += [part for parts in self._decoder.fp8_parts.values() for part in parts.values()]
        tensors += self._decoder.adapters.base.values() if self._decoder.adapters else ()
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        return list(found.values())


def _checked(tags: Iterable[str]) -> set[str]:
    named = set(tags) or set(TAGS)
    if unknown := sorted(named - set(TAGS)):
        raise BadRequest(f"tag {unknown[0]!r} is unknown; use {', '.join(TAGS)}.")
    return named


def _pieces(storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = torch.empty(0, dtype=torch.uint8).set_(storage).split(PIECE)
    return pieces
