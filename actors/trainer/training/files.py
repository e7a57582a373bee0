"""Safetensors files written and checked byte by byte: one pass writes, hashes and flushes; nothing is pickled."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.runtime.checksum import PIECE, checksum, checksum_of
from actors.trainer.checkpoint import fsync
from bus.errors import UNREADABLE, CheckpointRefused

INDEX = "index.json"
COMPLETE = ".complete"
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


class FileEntry(msgspec.Struct, frozen=True):
    """Size and checksum of one file."""

    n_bytes: int
    xxh3: str


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which model a checkpoint holds."""

    model_type: str
    n_params: int
    fingerprint: str
    """blake2b-128 over names and shapes of the weights"""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """`index.json`, written last: without it the directory is no checkpoint."""

    schema: int = 1
    model_type: str
    n_params: int
    fingerprint: str
    files: dict[str, FileEntry]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """XXH3-128 over names, types, shapes and bytes of CPU tensors, by name."""
    total = checksum()
    for name in sorted(tensors):
        t = tensors[name]
        total.update(f"{name} {_CODES[t.dtype]} {list(t.shape)}\n".encode())
        total.update(tensor_bytes(t))
    return total.hexdigest()


def shape_fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """blake2b-128 over names and shapes."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(shapes):
        total.update(f"{name} {list(shapes[name])}\n".encode())
    return total.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces: length of the header, header, tensors in order of name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        t = tensors[name]
        begin, end = end, end + t.numel() * t.element_size()
        header[name] = {"dtype": _CODES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in sorted(tensors):
        view = tensor_bytes(tensors[name])
        for at in range(0, len(view), PIECE):
            yield view[at : at + PIECE]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, durable: bool, total: Any = None) -> FileEntry:
    """Write CPU tensors as one safetensors file; complete or absent under its name. `total`: a checksum to go on with."""
    return _write(path, _pieces(tensors), durable=durable, total=total)


def write_bytes(path: Path, data: bytes, *, durable: bool) -> FileEntry:
    """Write a small file; complete or absent under its name."""
    return _write(path, iter((data,)), durable=durable)


def _write(path: Path, pieces: Iterator[bytes | memoryview], *, durable: bool, total: Any = None) -> FileEntry:
    part, total, size = path.with_name(f".{path.name}.part"), total or checksum(), 0
    with part.open("wb") as file, ThreadPoolExecutor(1) as hasher:
        for piece in pieces:
            hashed = hasher.submit(total.update, piece)  # beside the write: both let go of the interpreter
            file.write(piece)
            hashed.result()
            size += len(piece)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.rename(part, path)
    return FileEntry(size, total.hexdigest())


def write_index(directory: Path, identity: ModelIdentity, files: dict[str, FileEntry]) -> None:
    """After all files: with this the directory is a checkpoint, durably. Raises OSError."""
    index = Index(files=files, **msgspec.structs.asdict(identity))
    write_bytes(directory / INDEX, msgspec.json.encode(index), durable=True)
    fsync(directory)
    fsync(directory.parent)


@contextmanager
def export_at(directory: Path) -> Iterator[Path]:
    """A folder, not there yet, to write a Hugging Face export into; after the body it stands at `directory`, at once and with
    `.complete` in it, in place of an earlier export. FileExistsError for any other directory."""
    if directory.exists() and not (directory / COMPLETE).is_file():
        raise FileExistsError(errno.EEXIST, "it exists and is no earlier export", str(directory))
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    yield part
    write_bytes(part / COMPLETE, b"", durable=True)
    shutil.rmtree(directory, ignore_errors=True)
    os.rename(part, directory)
    fsync(directory.parent)


def read_index(directory: Path) -> Index:
    """The index of a checkpoint directory, its files checked against it. CheckpointRefused, in one line, otherwise."""
    path = directory / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except OSError as error:
        raise _refused(directory, f"{INDEX} cannot be read ({error.strerror}): it was never finished") from error
    except UNREADABLE as error:
        raise _refused(directory, f"{INDEX} is damaged ({error})") from error
    for name, entry in index.files.items():
        if "/" in name or name in ("", ".", ".."):
            raise _refused(directory, f"{INDEX} names a file outside ({name!r})")
        _verify(directory, name, entry)
    return index


def of_megatron(index: Index) -> bool:
    """Whether it lists shards of torch_dist, which the Megatron backend writes, and not safetensors."""
    return any(name.endswith(".distcp") for name in index.files)


def _verify(directory: Path, name: str, entry: FileEntry) -> None:
    path = directory / name
    try:
        size = path.stat().st_size
        if size != entry.n_bytes:
            raise _refused(directory, f"{name} has {size} bytes instead of {entry.n_bytes}: it is cut or overwritten")
        same = checksum_of(path) == entry.xxh3
    except OSError as error:
        raise _refused(directory, f"{name} cannot be read ({error.strerror})") from error
    if not same:
        raise _refused(directory, f"{name} does not match its checksum: it is damaged")


def read_tensors(directory: Path, name: str) -> dict[str, Tensor]:
    """All tensors of a verified file, on the CPU."""
    try:
        with safe_open(directory / name, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise _refused(directory, f"{name} is not safetensors ({error})") from error


def _refused(directory: Path, what: str) -> CheckpointRefused:
    return CheckpointRefused(f"checkpoint {directory} refused: {what}. Nothing was changed. Load an older checkpoint.")
