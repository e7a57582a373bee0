"""Programs scored by their unit tests, run in the sandbox, which has limits, a deadline and no network.

Tests are the sample's `metadata.tests`, else its label: a text of assertions; a list of such; or pairs of standard input and
output, as `{"inputs": [...], "outputs": [...]}` or `[{"input": ..., "output": ...}]`, also as JSON text; with `"fn_name"` beside
them arguments and results of that function, or of that method of the program's class Solution. Always true: what is expected is
compared where the program is not, so that nothing it does to its own process earns anything (`examiner.py` says what is left).
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn, Self

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
            limit_s = min(TEST_S, left)
            try:
                if wanted is None:
                    ran = await self._sandbox.examine(code, given, deadline_s=limit_s)
                else:
                    ran = await self._sandbox.run(code, stdin=given, deadline_s=limit_s)
            except SandboxUnavailable as error:
                raise ScorerFailed(f"{sample.sample_id} was not tested: {error}") from error
            if left < TEST_S and ran.cause == "deadline":
                raise ScorerFailed(f"{len(tests)} tests of {sample.sample_id} take longer than {deadline_s:g} s; raise "
                                   "--reward-timeout-s.")  # fmt: skip
            if ran.cause == "lost":  # ended from outside, as when memory is short: this says nothing about the program
                raise ScorerFailed(f"{sample.sample_id} was not tested: {ran.stderr}")
            if ran.cause == "unasked":
                raise BadLabel(f"the tests of {sample.sample_id} cannot be used: {ran.stderr.strip()}")
            if ran.cause != "ok" or (wanted is not None and _lines(ran.stdout) != _lines(wanted)):
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
    if isinstance(given, dict) and isinstance(given.get("fn_name"), str) and given["fn_name"].isidentifier():
        calls = zip(given.get("inputs", ()), given.get("outputs", ()), strict=False)
        given = [_call(given["fn_name"], one, other) for one, other in calls]
    elif isinstance(given, dict):
        pairs = zip(given.get("inputs", ()), given.get("outputs", ()), strict=False)
        given = [{"input": one, "output": other} for one, other in pairs]
    found: list[Test] = []
    for test in [given] if isinstance(given, str) else given if isinstance(given, list) else ():
        if isinstance(test, str) and test.strip():
            found.append((test, None))
        elif isinstance(test, dict) and "output" in test:
            found.append((_text(test.get("input", "")), _text(test["output"])))
    return found[:MOST_TESTS] or _none(sample, given)


def _none(sample: Sample, given: Any) -> NoReturn:
    raise BadLabel(f"neither metadata.tests nor the label of {sample.sample_id} holds tests: {str(given)[:60]!r}")


def _call(name: str, arguments: Any, wanted: Any) -> str:
    """Assertions of one call. Of a tuple such data sets keep a list, and of one result a list around it."""
    given = ", ".join(map(repr, arguments if isinstance(arguments, list) else [arguments]))
    return (
        f"given = globals().__getitem__\ntry:\n    it = given({name!r})\nexcept KeyError:\n    it = Solution().{name}\n"
        f"found, wanted = it({given}), {wanted!r}\nfound = list(found) if isinstance(found, tuple) else found\n"
        "assert found == wanted or [found] == wanted"
    )


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
