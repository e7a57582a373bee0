"""What a torch_dist checkpoint says it holds, read before anything is allocated and without running what it may carry.

The format keeps its table of contents, small states and objects as pickles. Here a table is read by a reader that knows only the
classes of such tables, and everything else by torch's that makes plain values and tensors; a pickle that asks for more is refused.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.megatron_backend.mapping import canonical

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
CONTENTS = ".metadata"
OPTIMIZER, REFERENCE = "optimizer.", "reference."
"""What keys of an optimizer's state, and of the weights of a reference that moves, begin with"""
_CHECKPOINT = "torch.distributed.checkpoint"
_KNOWN = {
    module: set(names.split())
    for module, names in {
        f"{_CHECKPOINT}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex "
        "TensorProperties StorageMeta _MEM_FORMAT_ENCODING",
        f"{_CHECKPOINT}.filesystem": "_StorageInfo _StoragePrefix",
        f"{_CHECKPOINT}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
        "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
        "torch": "Size float8 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bfloat16 bool "
        "float8_e4m3fn float8_e5m2",
        "torch.serialization": "_get_layout",
        "collections": "OrderedDict defaultdict",
        "builtins": "set frozenset list dict",
        "pathlib": "PosixPath",
    }.items()
}

NotPlain = pickle.UnpicklingError
"""What torch raises for a pickle that holds more than plain values and tensors."""


class _Contents(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise Refused(f"asks for {module}.{name}, which no table of contents needs")


class _Stand:
    """Of an object of torch's, where torch is not loaded: the state that it was given."""

    def __init__(self, *_: Any) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {}

    def __getattr__(self, name: str) -> Any:
        if name == "state" or name not in self.state:
            raise AttributeError(name)
        return self.state[name]


class _WithoutTorch(_Contents):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("torch", "megatron") and name in _KNOWN.get(module, ()):
            return _Stand
        return super().find_class(module, name)


def iteration(parent: str | Path, step: int | None = None) -> Path:
    """The folder of a checkpoint in `parent`: that of `step`, or the one that the tracker names; `parent` itself where it is such a
    folder. Raises Refused with what is there where the tracker is wrong."""
    parent = Path(parent)
    tracker = parent / TRACKER
    if step is None and not tracker.is_file() and (parent / CONTENTS).is_file():
        return parent
    if step is not None:
        chosen = f"iter_{step:07d}"
    else:
        try:
            said = tracker.read_text().strip()
        except OSError as err:
            raise Refused(f"{parent} is no parent of checkpoints: {TRACKER} can't be read ({err.strerror})") from None
        if said != RELEASE and not said.isdecimal():
            raise Refused(f"{tracker} says {said[:40]!r}; it must name a step or say {RELEASE}")
        chosen = said if said == RELEASE else f"iter_{int(said):07d}"
    if not (parent / chosen / CONTENTS).is_file():
        there = sorted(path.parent.name for path in parent.glob(f"*/{CONTENTS}"))
        raise Refused(
            f"{parent / chosen} is no torch_dist checkpoint: no {CONTENTS}; in {parent} there are {', '.join(there) or 'none'}"
        )
    return parent / chosen


def contents(directory: Path) -> dict[str, Any]:
    """Key -> what the table of contents says of it (`size` for tensors). Raises Refused where it can't be trusted, or files that it
    names are missing or short."""
    return _read(directory, _Contents)


def check_whole(directory: Path) -> None:
    """The same Refused, for who has not loaded torch: the table can be read, and the files that it names are there in full size."""
    _read(directory, _WithoutTorch)


def _read(directory: Path, reader: type[_Contents]) -> dict[str, Any]:
    path = directory / CONTENTS
    try:
        table = reader(io.BytesIO(path.read_bytes())).load()
        keys, places = table.state_dict_metadata, table.storage_data
    except Refused as err:
        raise Refused(f"{path} {err}; it isn't opened") from None
    except (OSError, NotPlain, EOFError, AttributeError, ImportError, TypeError, ValueError, IndexError) as err:
        raise Refused(f"{path} is no table of contents of a torch_dist checkpoint ({type(err).__name__}: {err})") from None
    needed: dict[str, int] = defaultdict(int)
    for place in places.values():
        needed[place.relative_path] = max(needed[place.relative_path], place.offset + place.length)
    for name, size in sorted(needed.items()):
        shard = directory / name
        if Path(name).name != name or not shard.is_file():
            raise Refused(f"{directory} is not whole: shard {name} of {len(needed)} is missing")
        if (held := shard.stat().st_size) < size:
            raise Refused(f"{directory} is not whole: shard {name} has {held} bytes, its tensors end at {size}")
    return dict(keys)


def plain(key: str) -> str:
    """The name of a rule for a key of a table, which numbers the layers or holds them all in one tensor."""
    numbered = re.match(r"decoder\.layers\.\d+\.", key)
    return canonical(key if numbered else key.replace("decoder.layers.", "decoder.layers.0."))[0]


def check(directory: Path, arch: Architecture) -> dict[str, Any]:
    """`contents`, of a model of this architecture. Raises Refused where it is of another one."""
    table = contents(directory)
    found: dict[str, int] = defaultdict(int)
    layers = set()
    for key, entry in table.items():
        if key.startswith((OPTIMIZER, REFERENCE)) or "_extra_state" in key or not hasattr(entry, "size"):
            continue
        spread = re.match(r"decoder\.layers\.(\d+)\.", key)
        layers |= {int(spread[1])} if spread else set()
        found[plain(key)] += entry.size.numel()
        if not spread and key.startswith("decoder.layers."):
            layers |= set(range(entry.size[0]))
    wanted = {rule.megatron for rule in arch.rules} - ({"output_layer.weight"} if arch.tied else set())
    what = f"{directory} holds another architecture than {arch.family} with {arch.layers} layers"
    if odd := sorted(wanted ^ set(found)):
        raise Refused(f"{what}: {', '.join(('without ' if name in wanted else 'with ') + name for name in odd[:3])}")
    if len(layers) != arch.layers:
        raise Refused(f"{what}: it has {len(layers)}")
    hidden = arch.transformer["hidden_size"]
    if (rows := found["embedding.word_embeddings.weight"] / hidden) < arch.vocab or rows != int(rows):
        raise Refused(f"{what}: its embedding isn't {arch.vocab} x {hidden}")
    for name, size in arch.elements().items():
        if found[name] != size:
            raise Refused(f"{what}: {name} has {found[name]} elements in all, config.json makes {size}")
    return table
