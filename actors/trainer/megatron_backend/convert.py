"""Model directories between Hugging Face and Megatron's torch_dist format, in one process on the host, without a GPU.

    Megatron   TARGET/release/ with the shards, TARGET/latest_checkpointed_iteration.txt, config.json and tokenizer in TARGET
    HF         TARGET/model-00001-of-0000N.safetensors with their index, config.json, tokenizer

The model stands in memory once, and beside it one shard. Always true: a target without tracker or index is not complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from safetensors import safe_open
from safetensors.torch import save_file

from actors.runtime.run import Refused
from actors.trainer.megatron_backend import checkpoint, model, weights
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.megatron_backend.directory import index, read
from actors.trainer.megatron_backend.layout import Layout
from actors.trainer.megatron_backend.parallel import Groups
from actors.trainer.megatron_backend.torch_dist import RELEASE, TRACKER, check, iteration
from actors.trainer.training.export import bucketed

SHARD_BYTES = 4 << 30
BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model"),
)


def hf_to_megatron(source: Path, target: Path, say: Callable[[str], None]) -> None:
    """Raises Refused, before anything is allocated or written, for what can't be converted."""
    arch = read(source)
    files = index(source, arch)
    name = next(iter(arch.hf_names()))
    with safe_open(str(files[name]), framework="pt") as opened:
        dtype = opened.get_tensor(name).dtype
    _room(sum(path.stat().st_size for path in set(files.values())))
    _empty(target)
    with alone():
        chunks = model.build(arch, Layout(), dtype=dtype)
        weights.load_hf(chunks, arch, source)
        say(f"{len(files)} tensors of {arch.family} read, {str(dtype).removeprefix('torch.')}")
        (target / RELEASE).mkdir(parents=True)
        checkpoint.save_sharded(chunks, target / RELEASE, copied=False)()
    _copy(source, target)
    (target / TRACKER).write_text(RELEASE)


def megatron_to_hf(
    source: Path, target: Path, say: Callable[[str], None], *, hf: Path | None = None, step: int | None = None
) -> None:
    """`source`: a checkpoint's folder or the parent that holds it. `hf`: a Hugging Face directory of the same architecture, for
    config.json and tokenizer, where `source` has none. Raises as `hf_to_megatron`."""
    folder = iteration(source, step)
    beside = hf or next((path for path in (folder, folder.parent) if (path / "config.json").is_file()), None)
    if beside is None:
        raise Refused(
            f"{source} has no config.json beside its checkpoints; give --hf-checkpoint, a directory of the same architecture"
        )
    arch = read(beside)
    table = check(folder, arch)
    dtype = table["embedding.word_embeddings.weight"].properties.dtype
    _room(sum(path.stat().st_size for path in folder.glob("*.distcp")))
    _empty(target)
    with alone():
        chunks = model.build(arch, Layout(), dtype=dtype)
        checkpoint.load_sharded(chunks, arch, folder)
        target.mkdir(parents=True, exist_ok=True)
        n = _write(chunks, arch, target)
    _copy(beside, target)
    say(f"{n} tensors of {arch.family} written, {str(dtype).removeprefix('torch.')}")


def _write(chunks: list[Any], arch: Architecture, target: Path) -> int:
    """Shards, then their index; returns the number of tensors."""
    parts: list[list[str]] = []
    size = 0
    for bucket in bucketed(weights.export_hf(chunks, arch), SHARD_BYTES):
        save_file(
            {name: t.contiguous() for name, t in bucket}, target / f"{len(parts)}.part", metadata={"format": "pt"}
        )
        parts.append([name for name, _ in bucket])
        size += sum(t.numel() * t.element_size() for _, t in bucket)
    files = [f"model-{k + 1:05d}-of-{len(parts):05d}.safetensors" for k in range(len(parts))]
    for k, file in enumerate(files):
        (target / f"{k}.part").rename(target / file)
    listed = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    told = {"metadata": {"total_size": size}, "weight_map": dict(sorted(listed.items()))}
    (target / "model.safetensors.index.json").write_text(json.dumps(told, indent=2))
    return len(listed)


def _room(needed: int) -> None:
    if (free := psutil.virtual_memory().available) < needed * 1.1:
        raise Refused(
            f"the model's {needed / 1e9:.1f} GB don't fit into the {free / 1e9:.1f} GB of memory that are free on this host"
        )


def _empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Refused(f"{target} exists and isn't empty; give a new directory")


def _copy(source: Path, target: Path) -> None:
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


@contextmanager
def alone() -> Iterator[None]:
    """This process as the only rank."""
    groups = Groups(Layout(world=1))
    try:
        yield
    finally:
        groups.close()
