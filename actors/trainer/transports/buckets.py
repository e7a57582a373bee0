"""Which tensors travel together (pure): in order of arrival, one type to a bucket, up to a size."""

from __future__ import annotations

from collections.abc import Iterable

from bus.messages.weights import Bucket, TensorMeta

BUCKET_BYTES = 2 << 30
"""Engines handle buckets one after the other, each with a request's overhead: few large ones are fastest while
engines have twice their size to spare."""


def plan_buckets(tensors: Iterable[tuple[TensorMeta, int]], limit_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Buckets of (tensor, bytes) pairs. A tensor larger than the limit gets a bucket of its own."""
    buckets: list[Bucket] = []
    held: list[TensorMeta] = []
    size = 0
    for meta, n_bytes in tensors:
        if held and (size + n_bytes > limit_bytes or held[-1].dtype != meta.dtype):
            buckets.append(Bucket(tensors=tuple(held), n_bytes=size))
            held, size = [], 0
        held.append(meta)
        size += n_bytes
    if held:
        buckets.append(Bucket(tensors=tuple(held), n_bytes=size))
    return tuple(buckets)


__all__ = ("BUCKET_BYTES", "plan_buckets")
