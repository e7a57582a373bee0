"""An environment and a reward that do what they are told: what a model could make one do that evaluates what it writes."""

from __future__ import annotations

import contextlib
import io
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_THREADS = ThreadPoolExecutor(1)  # made before the limits are: libraries do
_THREADS.submit(int).result()


def _do(code: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            exec(code, {})
        except BaseException:  # noqa: BLE001 - it is the answer
            traceback.print_exc(file=said)
    return said.getvalue().encode("utf-8", "backslashreplace").decode()[-4000:]


class Obeys:
    def reset(self, task: Any) -> str:
        return "begun"

    def step(self, action: str) -> str:
        return _do(action) + _THREADS.submit(_do, action).result()


def obeys(sample: dict[str, Any]) -> float:
    """What was said is raised: a reward is a number."""
    raise ValueError(_do(sample["response"]) + _THREADS.submit(_do, sample["response"]).result())
