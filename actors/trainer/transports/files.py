"""A version as files: buckets in, model*.safetensors out, beside the training.

Always true: what lies in host memory is what was copied and is not written yet, so a slow disk never holds back the training and
a fast one needs little. The directory appears with all its files at once. They are not flushed to disk: after a power cut versions
are made again from the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from actors.runtime.checksum import checksum
from actors.trainer.training.files import FileEntry, write_bytes, write_tensors
from actors.trainer.training.state import MODEL
from actors.trainer.transports.flat import NamedTensors
from bus.messages.policy import WeightManifest

SHARD, INDEX = "model-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.json"


class VersionWriter:
    """Files under `directory`, which must not exist yet (or be empty); `beside`: small files. For one version."""

    def __init__(self, directory: Path, beside: Mapping[str, bytes]) -> None:
        self._directory = directory
        self._part = directory.with_name(f".{directory.name}.part")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="version")
        self._total = checksum()
        self._shards: list[Future[FileEntry]] = []
        self._names: list[list[str]] = []
        self._n_bytes = 0
        self._begun = self._thread.submit(self._begin, dict(beside))

    def put(self, bucket: NamedTensors) -> NamedTensors:
        """Copy a bucket to the host; it is written later. Returns the copy, which is let go of once it is written."""
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in bucket}
        self._n_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
        self._names.append(list(tensors))
        path = self._part / f"shard-{len(self._names):05d}"
        self._shards.append(self._thread.submit(write_tensors, path, tensors, durable=False, total=self._total))
        return list(tensors.items())

    def finish(self) -> WeightManifest:
        """Wait for all of it. Raises OSError."""
        try:
            self._begun.result()
            entries = [shard.result() for shard in self._shards]
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)
        n = len(entries)
        names = [MODEL] if n == 1 else [SHARD.format(i, n) for i in range(1, n + 1)]
        for i, name in enumerate(names, 1):
            os.rename(self._part / f"shard-{i:05d}", self._part / name)
        if n > 1:
            where = {tensor: name for name, held in zip(names, self._names, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self._n_bytes}, "weight_map": where}
            write_bytes(self._part / INDEX, json.dumps(index, indent=2).encode(), durable=False)
        os.rename(self._part, self._directory)
        return WeightManifest(
            path=str(self._directory),
            checksum=self._total.hexdigest(),
            n_tensors=sum(map(len, self._names)),
            n_bytes=sum(entry.n_bytes for entry in entries),
        )

    def _begin(self, beside: Mapping[str, bytes]) -> None:
        if self._part.exists():
            shutil.rmtree(self._part)  # what a killed writer left
        self._part.mkdir(parents=True)
        for name, data in beside.items():
            write_bytes(self._part / name, data, durable=False)


def copied(
    buckets: Iterable[NamedTensors], beside: Mapping[str, bytes], directory: Path, keep: list[NamedTensors] | None = None
) -> VersionWriter:
    """All of a version, copied: only `finish` is left. `keep`: gets the copies."""
    writer = VersionWriter(directory, beside)
    for bucket in buckets:
        copy = writer.put(bucket)
        if keep is not None:
            keep.append(copy)
    return writer
