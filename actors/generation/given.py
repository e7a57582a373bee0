"""A sample whose response comes from the data (supervised training): nothing is generated (pure).

It travels like any other, under the version that is served when a worker takes it: so leases, credits, staleness, accounts and
resumption are those of every sample. What shall not be trained (other roles' messages) is the environment's.
"""

from __future__ import annotations

from itertools import groupby

from msgspec import UNSET

from bus.messages.base import Packed
from bus.messages.samples import Response, SampleTask
from bus.messages.versions import NOT_MADE, PolicyVersion, VersionSpan


def given_response(task: SampleTask, version: PolicyVersion) -> Response | None:
    """The response that the task brings with it; None when it is to be generated."""
    if task.given_tokens is UNSET or task.given_mask is UNSET:
        return None
    tokens: Packed = task.given_tokens
    mask: Packed = task.given_mask
    spans = []
    for trained, run in groupby(bytes(mask)):
        n = sum(1 for _ in run)
        spans.append(VersionSpan(version.id, version.step, n) if trained else VersionSpan(NOT_MADE, NOT_MADE, n))
    return Response(tokens, memoryview(bytes(len(tokens))), mask, tuple(spans))
