"""Small real messages to send around."""

from __future__ import annotations

import msgspec

from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import GroupKept, OpenGroup
from bus.messages.samples import Response, RolloutDone, SampleTask, Scored
from bus.messages.versions import PolicyVersion, VersionSpan, extend_spans


def a_task(index: int = 0, group: str = "g0000001", *, n_samples: int = 1, prompt_tokens: int = 4) -> SampleTask:
    """One sample of a group."""
    return SampleTask(
        sample_id=f"{group}/{index}",
        group_id=group,
        index=index,
        n_samples=n_samples,
        prompt_id=f"p-{group}",
        prompt_tokens=pack_ints(range(prompt_tokens)),
    )


def a_response(n_tokens: int, *, version: int = 1, step: int = 0, start: int = 0) -> Response:
    """`n_tokens` tokens under one version, numbered from `start`."""
    spans = (VersionSpan(version, step, n_tokens),) if n_tokens else ()
    return Response(
        tokens=pack_ints(range(start, start + n_tokens)),
        logprobs=pack_floats([-0.5] * n_tokens),
        loss_mask=memoryview(b"\x01" * n_tokens),
        spans=spans,
    )


def more(response: Response, n_tokens: int, version: PolicyVersion) -> Response:
    """The response with `n_tokens` further ones under a version."""
    added = a_response(n_tokens, version=version.id, step=version.step, start=response.n_tokens)
    return Response(
        tokens=memoryview(bytes(response.tokens) + bytes(added.tokens)),
        logprobs=memoryview(bytes(response.logprobs) + bytes(added.logprobs)),
        loss_mask=memoryview(bytes(response.loss_mask) + bytes(added.loss_mask)),
        spans=extend_spans(response.spans, version, n_tokens),
    )


def a_rollout(task: SampleTask, n_tokens: int = 3, *, version: int = 1, step: int = 0) -> RolloutDone:
    """The task done."""
    response = a_response(n_tokens, version=version, step=step)
    return RolloutDone(task=task, response=response, finish="stop", worker="w0")


def a_group(group: str = "g0000001", n_samples: int = 2, n_tokens: int = 3) -> GroupKept:
    """A complete group; rewards are the sample indices."""
    tasks = [a_task(index, group, n_samples=n_samples) for index in range(n_samples)]
    samples = tuple(Scored(rollout=a_rollout(t, n_tokens), reward=float(t.index)) for t in tasks)
    return GroupKept(group_id=group, prompt_id=f"p-{group}", samples=samples)


def an_open_group(group: str = "g0000001", n_samples: int = 1) -> bytes:
    """What lies in the open hash for a group."""
    return msgspec.msgpack.encode(OpenGroup(group_id=group, prompt_id=f"p-{group}", n_samples=n_samples))


__all__ = ("a_group", "a_response", "a_rollout", "a_task", "an_open_group", "more")
