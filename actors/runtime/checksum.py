"""Checksum of files and tensors: XXH3 with 128 bits, as fast as memory is read. It finds damage, not intent."""

from __future__ import annotations

from pathlib import Path

import xxhash

PIECE = 1 << 24


checksum = xxhash.xxh3_128
"""Of bytes, or an empty one to `update` with them: `digest`, `hexdigest`."""


def checksum_of(*paths: Path) -> str:
    """Hex digest over the bytes of files, one after the other. Raises OSError."""
    total = checksum()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                total.update(piece)
    return total.hexdigest()


def checksum_of_version(directory: Path) -> str:
    """Over the weight files of a version, model*.safetensors by name: what its manifest says. Raises OSError."""
    whole = directory / "model.safetensors"
    return checksum_of(*(sorted(directory.glob("model*.safetensors")) or [whole]))
