"""Weights from the trainer's flat buckets into SGLang's model, without SGLang's loop over tensors.

Runs inside the scheduler process of SGLang, as one of its --custom-weight-loader functions (never in a worker), or for
inside.py. The model's own `load_weights` runs once and is watched; from then on the copies it made are made again, all in
one call, and the mapping of the trainer's buffer stays open.
Always true: what is repeated are the copies that the engine's own loader made for the same names, shapes and buffer. Where
that did anything but views, plain copies and constants, or where a parameter has moved since, the engine's own loader runs instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actors.runtime.flat import size_of, views
from bus.messages.weights import TensorMeta

log = logging.getLogger(__name__)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where tensors lie in a flat bucket. `bucket`: its place among the buckets of a version."""

    bucket: int
    tensors: tuple[TensorMeta, ...]


@dataclass
class _Known:
    """What loads one bucket: copies into `targets`, parts of parameters at `addresses`, from `sources`, parts of `flat`;
    before them constants into `filled`."""

    text: str
    flat: Tensor
    addresses: tuple[int, ...]
    filled: list[tuple[Tensor, Any]]
    targets: list[Tensor]
    sources: list[Tensor]

    def load(self) -> None:
        """Do it."""
        with torch.no_grad():
            for target, value in self.filled:
                target.fill_(value)
            torch._foreach_copy_(self.targets, self.sources)


class QuickLoad:
    """What one process loads into one model. Owns the mappings of the trainer's buffers, one a bucket, and the buffer that
    takes what is broadcast, as large as the largest bucket."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._landing: Tensor | None = None

    def bucket(self, model: Any, text: str, flat: Tensor, *, mapped: bool) -> bool:
        """All tensors of one bucket into the model; whether that took the short way. `mapped`: the buffer is the trainer's
        own memory, so the same one comes again."""
        addresses = tuple(p.data_ptr() for p in model.parameters())
        for held in self._known.values():
            if held.text == text and held.flat.data_ptr() == flat.data_ptr() and held.addresses == addresses:
                held.load()
                return True
        layout = msgspec.json.decode(text, type=Layout)
        self._known.pop(layout.bucket, None)  # of a trainer that is gone: its memory goes back with it
        watch = _Copies(flat)
        with watch:
            model.load_weights(list(views(flat, layout.tensors)))
        if mapped and not watch.other:
            self._known[layout.bucket] = _Known(text, flat, addresses, watch.filled, watch.targets, watch.sources)
        else:
            level = logging.WARNING if watch.other else logging.INFO  # on an engine's further GPUs every bucket is a copy
            log.log(level, "bucket %d takes the long way: %s", layout.bucket, watch.other or "its memory is a copy")
        return False

    def receive(self, model: Any, layouts: Sequence[str], group: Any) -> None:
        """One version, bucket by bucket, from rank 0 of a group; on the GPU when this returns."""
        sizes = [size_of(msgspec.json.decode(text, type=Layout).tensors) for text in layouts]
        device = next(model.parameters()).device
        if self._landing is None or self._landing.numel() < max(sizes):
            self._known.clear()
            self._landing = None  # free before the larger one is taken
            self._landing = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        for text, size in zip(layouts, sizes, strict=True):
            flat = self._landing[:size]
            torch.distributed.broadcast(flat, src=0, group=group)
            self.bucket(model, text, flat, mapped=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


_process = QuickLoad()


def receive(model: Any, layouts: Sequence[str], group: Any) -> None:
    """QuickLoad.receive of this process."""
    _process.receive(model, layouts, group)


def load(model: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Called by SGLang with (layout as JSON, flat bucket) pairs."""
    for text, flat in named:
        _process.bucket(model, text, flat, mapped=_is_mapped(flat))


def _is_mapped(tensor: Tensor) -> bool:
    """Whether this is another process' memory; a copy of it (from another GPU) is not."""
    from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

    here = StorageWeakRef(tensor.untyped_storage()).cdata
    return any(ref.cdata == here for ref in shared_cache.values())


class _Copies(TorchDispatchMode):
    """Notes copies out of one buffer and constants written; `other` is set by anything else that is no view."""

    def __init__(self, flat: Tensor) -> None:
        super().__init__()
        self._source = flat.untyped_storage().data_ptr()
        self.filled: list[tuple[Tensor, Any]] = []
        self.targets: list[Tensor] = []
        self.sources: list[Tensor] = []
        self.other = ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if source.untyped_storage().data_ptr() == self._source:
                self.targets.append(target)
                self.sources.append(source)
                return out
        elif func is torch.ops.aten.fill_.Scalar:
            if args[0].numel():
                self.filled.append(args[:2])
            return out
        elif _is_view(func) and _same_memory(out, args[0]):
            return out
        self.other = self.other or str(func)
        return out


def _same_memory(one: Any, two: Any) -> bool:
    is_pair = isinstance(one, Tensor) and isinstance(two, Tensor)
    return is_pair and one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _is_view(func: Any) -> bool:
    """Whether an operation writes nothing and may hand out its first argument's memory."""
    written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    return not written and bool(func._schema.arguments) and func._schema.arguments[0].alias_info is not None
