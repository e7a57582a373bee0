"""Programs scored by their unit tests, run in the sandbox, which has limits, a deadline and no network.

Tests are the sample's `metadata.tests`, else its label: a text of assertions; a list of such; or pairs of standard input and
output, as `{"inputs": [...], "outputs": [...]}` or `[{"input": ..., "output": ...}]`, also as JSON text.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from typing import Any, Self

from actors.reward.sample import BadLabel, Sample, ScorerFailed, Value
from actors.runtime.sandbox import Sandbox, SandboxUnavailable

NAME = "unit_tests"
TEST_S = 6.0  # of one test
MOST_TESTS = 64
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
Test = tuple[str, str | None]
"""(assertions, None), or (standard input, what it must print)."""


class CodeScorer:
    """Use as `async with`. The sandbox starts with the first sample."""

    name = NAME
    default_key = "score"

    def __init__(self, *, weak: bool = False) -> None:
        self._sandbox = Sandbox(weak=weak)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._sandbox.__aexit__(*exc)

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        """{"score": 1 when all tests passed, "passed": share before the first that did not}. Raises BadLabel, ScorerFailed."""
        tests = cases_of(sample)
        code = program_of(sample.response)
        until = asyncio.get_running_loop().time() + deadline_s
        passed = 0
        for given, wanted in tests if code else ():
            left = until - asyncio.get_running_loop().time()
            # A program that ends before its assertions are reached passed none of them: the last line tells.
            word = "" if wanted is not None else secrets.token_hex(8)
            try:
                ran = await self._sandbox.run(
                    f"{code}\n\n{given}\n\nprint({word!r})" if word else code,
                    stdin=given if wanted is not None else "",
                    deadline_s=min(TEST_S, left),
                )
            except SandboxUnavailable as error:
                raise ScorerFailed(f"{sample.sample_id} was not tested: {error}") from error
            if left < TEST_S and ran.cause == "deadline":
                raise ScorerFailed(f"{len(tests)} tests of {sample.sample_id} take longer than {deadline_s:g} s; raise "
                                   "--reward-timeout-s.")  # fmt: skip
            said = _lines(ran.stdout)
            if ran.cause != "ok" or (said[-1:] != [word] if word else said != _lines(wanted or "")):
                break
            passed += 1
        return {"score": float(passed == len(tests)), "passed": passed / len(tests)}


def program_of(response: str) -> str:
    """The last fenced block behind the thinking; without one all of it."""
    said = response.rpartition("</think>")[2]
    blocks = _FENCED.findall(said)
    return str(blocks[-1] if blocks else said).strip()


def cases_of(sample: Sample) -> list[Test]:
    """The first MOST_TESTS tests of a sample. Raises BadLabel when there is none."""
    given: Any = sample.metadata.get("tests", sample.label)
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        try:
            given = json.loads(given)
        except ValueError:
            pass  # assertions that begin with a bracket
    if isinstance(given, dict):
        pairs = zip(given.get("inputs", ()), given.get("outputs", ()), strict=False)
        given = [{"input": one, "output": other} for one, other in pairs]
    found: list[Test] = []
    for test in [given] if isinstance(given, str) else given if isinstance(given, list) else ():
        if isinstance(test, str) and test.strip():
            found.append((test, None))
        elif isinstance(test, dict) and "output" in test:
            found.append((_text(test.get("input", "")), _text(test["output"])))
    if not found:
        raise BadLabel(f"neither metadata.tests nor the label of {sample.sample_id} holds tests: {str(given)[:60]!r}")
    return found[:MOST_TESTS]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
