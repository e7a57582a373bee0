"""Weights on their way out, bucket after bucket: gathered, converted and freed again, so that nowhere a second model stands.

Every rank enters. A library yields tensors one by one (`Core.export`) on the ranks that hold them (`Core.exporters`, one for each
pipeline stage); here they become buckets, and rank 0 gets those of the others in turn. A holder whose turn has not come waits
with one bucket in hand.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

import msgspec
import torch
from torch import Tensor

from actors.runtime.vision import PROCESSOR
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.verbs import Core
from actors.trainer.transports.flat import NamedTensors, bucketed

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model", PROCESSOR),
)

Named = Iterable[tuple[str, Tensor]]


class Sent(msgspec.Struct, frozen=True):
    """What a bucket of another rank holds, in order: name and shape; none: it was the last."""

    dtype: str = ""
    tensors: list[tuple[str, list[int]]] = []


def gathered(core: Core, ranks: Ranks, limit_bytes: int) -> Generator[NamedTensors]:
    """On rank 0 all buckets of the model; on the others nothing, once theirs are sent. Left early, it still takes what the others
    send: they are in the middle of it."""
    mine = bucketed(core.export(), limit_bytes)
    if ranks.rank != 0:
        for bucket in mine:
            if ranks.rank in core.exporters:
                names = [(name, list(t.shape)) for name, t in bucket]
                parts = [t.contiguous().reshape(-1).view(torch.uint8) for _, t in bucket]  # views, no second bucket
                ranks.send(msgspec.msgpack.encode(Sent(str(bucket[0][1].dtype).removeprefix("torch."), names)), parts)
                del parts  # or they would hold it while the next one is gathered
        if ranks.rank in core.exporters:
            ranks.send(msgspec.msgpack.encode(Sent()))
        return
    every = (b for holder in core.exporters for b in (mine if holder == 0 else _received(ranks, holder, core.device)))
    try:
        for bucket in every:  # not `yield from`, which would end `every` too
            yield bucket
    finally:
        for _ in every if not ranks.alone else ():
            pass


def _received(ranks: Ranks, holder: int, device: torch.device) -> Iterator[NamedTensors]:
    while True:
        header, parts = ranks.receive(holder, device)
        if parts is None:
            return
        sent = msgspec.msgpack.decode(header, type=Sent)
        dtype: torch.dtype = getattr(torch, sent.dtype)
        bucket = [(name, part.view(dtype).view(shape)) for (name, shape), part in zip(sent.tensors, parts, strict=True)]
        del parts
        yield bucket
        bucket.clear()


def as_files(weights: Named) -> Named:
    """Our weights as Hugging Face directories have them."""
    return (part for name, tensor in weights for part in unfused(name, tensor))


def unfused(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor of ours as Hugging Face directories have it: of experts one matrix each."""
    if ".mlp.experts." not in name or tensor.ndim != 3:
        yield name, tensor
        return
    at, kind = name.rsplit(".", 1)
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    for e, matrix in enumerate(tensor):
        for part, piece in zip(names, matrix.chunk(len(names)), strict=True):
            yield f"{at}.{e}.{part}.weight", piece
