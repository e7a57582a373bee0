"""One scored sample as a person reads it: what the recorder shows of training and the evaluator keeps of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from bus.messages.base import unpack_ints
from bus.messages.samples import Scored

TEXT_LIMIT = 2000


def readable(scored: Scored, decode: Callable[[Iterable[int]], str], limit: int = TEXT_LIMIT) -> dict[str, Any]:
    """Names and numbers of a sample, and its texts of at most `limit` characters, their middle left out."""
    rollout = scored.rollout
    task, response = rollout.task, rollout.response
    return {
        "sample": task.sample_id,
        "group": task.group_id,
        "version": rollout.header().version,
        "reward": scored.reward,
        "rewards": dict(scored.rewards),
        "scorer": scored.scorer,
        "label": bounded(task.label, limit),
        "tokens": response.n_tokens,
        "finish": rollout.finish,
        "prompt": bounded(task.prompt_text or decode(unpack_ints(rollout.prompt_tokens)), limit),
        "response": bounded(decode(unpack_ints(response.tokens)), limit),
        **({"turns": turns} if len(turns := turns_of(scored, decode, limit)) > 1 else {}),
    }


def turns_of(scored: Scored, decode: Callable[[Iterable[int]], str], limit: int) -> list[dict[str, str]]:
    """The response in runs of tokens that the model made (`model`) and that tools or users said (`environment`), each as text.
    Of a supervised sample, which no model made, the former are those that are learned."""
    rollout = scored.rollout
    response, tokens = rollout.response, unpack_ints(rollout.response.tokens)
    made = b"".join(bytes([span.made]) * span.n for span in response.spans)
    if rollout.task.given_tokens:
        made = bytes(response.loss_mask)
    found, at = [], 0
    for ours, run in groupby(made[: len(tokens)]):
        n = len(list(run))
        found.append({"by": "model" if ours else "environment", "text": bounded(decode(tokens[at : at + n]), limit)})
        at += n
    return found


def bounded(text: str, limit: int) -> str:
    """The text, without its middle where it is too long."""
    if len(text) <= limit:
        return text
    first, last = 2 * limit // 3, limit // 3 - 40
    return f"{text[:first]} [{len(text) - first - last} characters left out] {text[-last:]}"
