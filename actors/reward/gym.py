"""Answers to problems of reasoning-gym, scored by its own verifiers (`pip install 'miles-async[gym]'`), in a verifier process.

The metadata of a sample names the data set and the number of its problem, which is made again here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from actors.reward.mathanswer import last_boxed
from actors.runtime.rows import gym

HOOK = f"{__name__}.score"
_made = cache(gym)


def score(sample: dict[str, Any]) -> float:
    """The verifier's score, 0 to 1, of what stands in <answer>, else in the last box, else of all behind the thinking."""
    data = _made(str(sample["metadata"]["source"]))
    return float(data.score_answer(answer_of(sample["response"]), entry=data[int(sample["metadata"]["index"])]))


def answer_of(response: str) -> str:
    """What a response answers."""
    said = response.rpartition("</think>")[2]
    _, found, rest = said.rpartition("<answer>")
    if found:
        return rest.partition("</answer>")[0].strip()
    boxed = last_boxed(said)
    return said.strip() if boxed is None else boxed.strip()
