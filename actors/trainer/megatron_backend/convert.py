"""Model directories between Hugging Face and Megatron's torch_dist format, in one process on the host, without a GPU.

    Megatron   TARGET/release/ with the shards, TARGET/latest_checkpointed_iteration.txt, config.json and tokenizer in TARGET;
               hf_types.json where tensors were narrower than Megatron keeps them
    HF         TARGET/model-00001-of-0000N.safetensors with their index, config.json, tokenizer

The model stands in memory once, and beside it one shard. Always true: a target without tracker or index is not complete; no number
is rounded: a tensor that is wider than the others stays so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from actors.runtime.run import Refused
from actors.trainer.megatron_backend import checkpoint, model, weights
from actors.trainer.megatron_backend.directory import index, read
from actors.trainer.megatron_backend.layout import RankLayout
from actors.trainer.megatron_backend.parallel import Groups
from actors.trainer.megatron_backend.torch_dist import RELEASE, TRACKER, check, iteration, plain
from actors.trainer.training.export import TOKENIZER_FILES
from actors.trainer.transports.flat import bucketed

SHARD_BYTES = 4 << 30
TYPES = "hf_types.json"


def hf_to_megatron(source: Path, target: Path, say: Callable[[str], None]) -> None:
    """Raises Refused, before anything is allocated or written, for what can't be converted."""
    arch = read(source)
    files = index(source, arch)
    types = _types(files)
    dtype = types[next(iter(arch.hf_names()))]
    _room(sum(path.stat().st_size for path in set(files.values())))
    _empty(target)
    with alone():
        chunks = model.build(arch, RankLayout(), dtype=dtype)
        every = [(rule, rule.names(layer, expert), weight) for rule, layer, expert, weight in weights.weights(chunks, arch)]
        wide: dict[str, torch.dtype] = {}  # by rule: layers lie in one tensor
        for rule, names, weight in every:
            for kept in (weight.dtype, *(types[name] for name in names)):
                wide[rule.megatron] = torch.promote_types(wide.get(rule.megatron, kept), kept)
        for rule, _, weight in every:
            weight.data = weight.data.to(wide[rule.megatron])
        narrow = {name: str(types[name]) for rule, names, _ in every for name in names if types[name] != wide[rule.megatron]}
        weights.load_hf(chunks, arch, source)
        say(f"{len(files)} tensors of {arch.family} read, {str(dtype).removeprefix('torch.')}")
        (target / RELEASE).mkdir(parents=True)
        checkpoint.save_sharded(chunks, target / RELEASE, copied=False)()
    _copy(source, target)
    if narrow:
        (target / TYPES).write_text(json.dumps(narrow))
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
    kept = {plain(key): entry.properties.dtype for key, entry in check(folder, arch).items() if hasattr(entry, "properties")}
    dtype = kept["embedding.word_embeddings.weight"]
    narrow = json.loads((beside / TYPES).read_bytes()) if (beside / TYPES).is_file() else {}
    _room(sum(path.stat().st_size for path in folder.glob("*.distcp")))
    _empty(target)
    with alone():
        chunks = model.build(arch, RankLayout(), dtype=dtype)
        for rule, _, _, weight in weights.weights(chunks, arch):
            weight.data = weight.data.to(kept.get(rule.megatron, dtype))
        checkpoint.load_sharded(chunks, arch, folder)
        target.mkdir(parents=True, exist_ok=True)
        n = _write(((name, _narrowed(t, narrow.get(name))) for name, t in weights.export_hf(chunks, arch)), target)
    _copy(beside, target)
    say(f"{n} tensors of {arch.family} written, {str(dtype).removeprefix('torch.')}")


def _types(files: Mapping[str, Path]) -> dict[str, torch.dtype]:
    """Of tensors, by name; headers are read."""
    found = {}
    for path in sorted(set(files.values())):
        with safe_open(str(path), framework="pt") as opened:
            for name in (name for name, file in files.items() if file == path):
                found[name] = opened.get_slice(name)[:0].dtype
    return found


def _narrowed(tensor: Tensor, dtype: str | None) -> Tensor:
    """As it was in the directory that was converted, where that holds it."""
    if dtype is None:
        return tensor
    narrow = tensor.to(getattr(torch, dtype.removeprefix("torch.")))
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def _write(tensors: Iterable[tuple[str, Tensor]], target: Path) -> int:
    """Shards, then their index; returns the number of tensors."""
    parts: list[list[str]] = []
    size = 0
    for bucket in bucketed(tensors, SHARD_BYTES):
        save_file({name: t.contiguous() for name, t in bucket}, target / f"{len(parts)}.part", metadata={"format": "pt"})
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
    for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


@contextmanager
def alone() -> Iterator[None]:
    """This process as the only rank."""
    groups = Groups(RankLayout(world=1))
    try:
        yield
    finally:
        groups.close()
