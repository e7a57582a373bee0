"""What changed from one version to the next, for hosts that have the one before: the exclusive or of their bytes, compressed.

    <folder>/<name>.xor     of each large file, for each of its pieces: 8 bytes of length, then so many of zstd

An optimizer step moves most weights by less than half of the last bit that 16 bits have, so most bytes are zeros here; of 32
bits all change, and nothing is made. Always true: what is put together is checked, piece by piece, as what is fetched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.runtime.checksum import checksum
from actors.runtime.fetch import DIGEST, LEAST_PIECE, Damaged, pack_parcel
from bus.messages.weights import Parcel, ParcelFile

XOR = ".xor"
LEVEL = 1
LEAST_BYTES = 16 << 20  # of a version: a smaller one comes soon enough, and what compares is slow to load
WORTH = 0.5  # of the bytes, and of the time of a whole fetch: above it nothing is made


def make_delta(base: Path, folder: Path, parcel: Parcel, *, fetch_s: float) -> Parcel | None:
    """Write the files beside those of `folder`, whose description `parcel` is; None, with nothing left, where that does not pay.
    `fetch_s`: what it takes to fetch the whole version. Raises OSError."""
    large = [f for f in parcel.files if f.n_bytes >= LEAST_PIECE and _size(base / f.name) == f.n_bytes]
    total, began, done, small = sum(f.n_bytes for f in large), time.monotonic(), 0, 0
    if total < LEAST_BYTES:
        return None
    for read, written in _changes(base, folder, parcel, large):
        done, small = done + read, small + written
        if small > WORTH * done or (time.monotonic() - began) * total > WORTH * fetch_s * done:
            break
    else:
        return pack_parcel(folder, suffixes=(XOR,))
    for file in large:
        _made(folder, file).unlink(missing_ok=True)
    return None


def _changes(base: Path, folder: Path, parcel: Parcel, files: list[ParcelFile]) -> Iterator[tuple[int, int]]:
    """Writes them, and tells of each piece its bytes and how few they became."""
    import pyarrow as pa  # here, as numpy below: it is large, and most runs have one host

    codec = pa.Codec("zstd", LEVEL)
    for file in files:
        with (base / file.name).open("rb") as old, (folder / file.name).open("rb") as new, _made(folder, file).open("wb") as out:
            for size in _pieces(parcel, file):
                packed = codec.compress(pa.py_buffer(_xor(old.read(size), new.read(size))))
                out.write(packed.size.to_bytes(8, "little"))
                out.write(packed)
                yield size, packed.size + 8


def apply_delta(base: Path, folder: Path, parcel: Parcel, delta: Parcel) -> None:
    """Put the large files of `parcel` together in `folder`, where those of `delta` are. Damaged; OSError."""
    import pyarrow as pa

    files = {file.name: file for file in parcel.files}
    codec = pa.Codec("zstd")
    for name in (made.name.removesuffix(XOR) for made in delta.files):
        whole, part = folder / name, folder / f"{name}.part"
        if name not in files or whole.exists():
            continue
        file, index = files[name], 0
        with (base / name).open("rb") as old, _made(folder, file).open("rb") as changes, part.open("wb", buffering=0) as out:
            for size in _pieces(parcel, file):
                packed = changes.read(int.from_bytes(changes.read(8), "little"))
                try:
                    piece = _xor(old.read(size), codec.decompress(packed, size))
                except (ValueError, OSError, pa.ArrowException) as error:
                    raise Damaged(f"{name}{XOR} does not fit: {error}") from error
                if checksum(piece).digest() != file.pieces[index * DIGEST : (index + 1) * DIGEST]:
                    raise Damaged(f"piece {index} of {name}, put together, is not that of the version")
                out.write(piece)
                index += 1
        part.rename(whole)


def _pieces(parcel: Parcel, file: ParcelFile) -> Iterator[int]:
    """Their sizes."""
    for at in range(0, file.n_bytes, parcel.piece_bytes):
        yield min(parcel.piece_bytes, file.n_bytes - at)


def _xor(one: Any, other: Any) -> memoryview:
    import numpy as np

    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)).data


def _made(folder: Path, file: ParcelFile) -> Path:
    return folder / f"{file.name}{XOR}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
