"""A judge model behind an OpenAI-compatible endpoint: POST {url}/chat/completions with a template; its last "score: N" counts.

Always true: what the judge is shown is the template with prompt, response and label put in once, so that a response cannot name a
place of the template; an answer without a score is a failure, never a 0.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated

import msgspec

from actors.reward.sample import Sample, ScorerFailed, Value
from actors.reward.service import Service, shown
from actors.runtime.run import Refused
from bus.errors import Poison

KEY = "MILES_ASYNC_JUDGE_KEY"
"""Variable with the key that the endpoint asks for; it is none of the settings, so that no file or stream holds it."""
MAX_ANSWER_BYTES = 1 << 20
TEMPLATE = """Judge an answer to a task.

Task:
{prompt}

Reference answer (may be empty):
{label}

Answer to judge:
{response}

Say in a few words what is right and wrong about it. Then end with one line "Score: N", N from 0 (useless) to 10 (perfect)."""
_PLACE = re.compile(r"\{(prompt|response|label)\}")
_SCORE = re.compile(r"score\W{0,6}(-?\d+(?:\.\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?", re.IGNORECASE)
LARGEST = 10.0


class JudgeRefused(Poison):
    """The endpoint will never judge this sample."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class JudgeScorer(Service):
    """The model `model` at `url`. Use as `async with`. Refused when the template cannot be used."""

    name = "judge"
    default_key = ""

    def __init__(self, url: str, *, model: str, template_path: str = "", max_tokens: int = 1024) -> None:
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._max_tokens = max_tokens
        self._template = read_template(template_path) if template_path else TEMPLATE
        key = os.environ.get(KEY, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        super().__init__(JudgeRefused, limit_bytes=MAX_ANSWER_BYTES, role="judge", headers=headers)

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        """0 to 1. Raises DeadlineExceeded, ScorerFailed (may work later) or JudgeRefused."""
        asked = _PLACE.sub(lambda place: str(getattr(sample, place[1])), self._template)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": asked}],
            "max_tokens": self._max_tokens,
            "temperature": 0.0,
        }
        answer = await self.ask(self._url, body, sample.sample_id, deadline_s, what="judgement", kind=_Answer, gives="completion")
        said = answer.choices[0].message.content or ""
        number, of = (_SCORE.findall(said) or [("nan", "")])[-1]
        score = float(number) / (float(of or 0) or LARGEST)
        if not math.isfinite(score):
            raise ScorerFailed(f"judge {shown(self._url)} named no score for {sample.sample_id}: {said[-200:]!r}")
        return max(0.0, min(1.0, score))


def read_template(path: str) -> str:
    """A user's template. Raises Refused when it shows the judge no response."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--judge-template-path {path!r} cannot be read: {error}") from error
    if "{response}" not in text:
        raise Refused(f"--judge-template-path {path!r} shows no response: write {{response}}, and {{prompt}} or {{label}}.")
    return text
