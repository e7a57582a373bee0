"""Programs scored by their unit tests, run in the sandbox, which has limits, a deadline and no network.

Tests are the sample's `metadata.tests`, else its label: a text of assertions; a list of such; or pairs of standard input and
output, as `{"inputs": [...], "outputs": [...]}` or `[{"input": ..., "output": ...}]`, also as JSON text; with `"fn_name"` beside
them arguments and results of that function, or of that method of the program's class Solution. Always true: what is expected is
compared where the program is not, so that nothing it does to its own process earns anything (`examiner.py` says what is left).
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, Self

from actors.reward.blame import Told, untold
from actors.reward.sample import BadLabel, Sample, ScorerFailed, Value
from actors.runtime.sandbox import Sandbox, SandboxUnavailable

NAME = "unit_tests"
TEST_S = 6.0  # of one test
HARMLESS = "pass"
MOST_TESTS = 64
ROUNDING, ROUNDING_SHARE = 1e-6, 1e-9  # by which numbers with a decimal point may differ; the second: of the number
_NUMBER = re.compile(r"[+-]?[0-9]{1,300}(?:\.[0-9]{0,300})?(?:[eE][+-]?[0-9]{1,2})?")
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
Test = tuple[str, str | None]
"""(assertions, None), or (standard input, what it must print)."""


class CodeScorer:
    """Use as `async with`. The sandbox starts with the first sample. `told`: of programs that failed by their time, or by what they
    did to the sandbox."""

    name = NAME
    default_key = "score"

    def __init__(self, *, weak: bool = False, told: Told = untold) -> None:
        self._sandbox = Sandbox(weak=weak)
        self._told = told

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._sandbox.__aexit__(*exc)

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        """{"score": 1 when all tests passed, "passed": share before the first that did not}. Time that a program uses up, and a
        sandbox that it ends, are its failure. Raises BadLabel; ScorerFailed where no program could be tested."""
        tests = cases_of(sample)
        code = program_of(sample.response)
        spent_s = 0.0  # by the program: to wait for a place in the sandbox, behind others' loops, costs it nothing
        passed = 0
        for given, wanted in tests if code else ():
            left = deadline_s - spent_s
            limit_s = max(0.1, min(TEST_S, left))
            try:
                if wanted is None:
                    ran = await self._sandbox.examine(code, given, deadline_s=limit_s)
                else:
                    ran = await self._sandbox.run(code, stdin=given, deadline_s=limit_s)
            except SandboxUnavailable as error:
                raise ScorerFailed(f"{sample.sample_id} was not tested: {error}") from error
            spent_s += ran.seconds
            if left < TEST_S and ran.cause == "deadline":
                await self._told(
                    f"{NAME}/out_of_time",
                    f"{sample.sample_id} used up --reward-timeout-s ({deadline_s:g} s) in {passed + 1} of {len(tests)} tests and "
                    "has failed; if right programs need longer, raise it.",
                )
            if ran.cause == "killed":
                await self._told(f"{NAME}/killed_sandbox", f"{sample.sample_id} has failed: {ran.stderr}")
            if ran.cause == "lost":  # so does harmless code, as when memory is short: this says nothing about the program
                raise ScorerFailed(f"{sample.sample_id} was not tested: {ran.stderr}")
            if ran.cause == "unasked":
                raise BadLabel(f"the tests of {sample.sample_id} cannot be used: {ran.stderr.strip()}")
            if ran.cause != "ok" or (wanted is not None and not _agrees(ran.stdout, wanted)):
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
            found.append((_checked(test, sample.metadata.get("entry_point")), None))
        elif isinstance(test, dict) and "output" in test:
            found.append((_text(test.get("input", "")), _text(test["output"])))
    return found[:MOST_TESTS] or _none(sample, given)


def _none(sample: Sample, given: Any) -> NoReturn:
    raise BadLabel(f"neither metadata.tests nor the label of {sample.sample_id} holds tests: {str(given)[:60]!r}")


def _call(name: str, arguments: Any, wanted: Any) -> str:
    """Assertions of one call. JSON has lists for tuples, and texts for the numbers that are keys of a table; of one result such
    data sets keep a list around it."""
    given = ", ".join(repr(_with_numbers(one)) for one in (arguments if isinstance(arguments, list) else [arguments]))
    return (
        f"given = globals().__getitem__\ntry:\n    it = given({name!r})\nexcept KeyError:\n    it = Solution().{name}\n{_SAME}"
        f"found, wanted = it({given}), {wanted!r}\nassert same(found, wanted) or same([found], wanted)"
    )


_SAME = f"""\
def same(found, wanted):
    if type(wanted) is list and type(found) in (list, tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if type(wanted) is dict and type(found) is dict:
        found = {{str(key): one for key, one in found.items()}}
        wanted = {{str(key): one for key, one in wanted.items()}}
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if type(wanted) is float and type(found) is float:
        return found == wanted or abs(found - wanted) <= max({ROUNDING}, {ROUNDING_SHARE} * abs(wanted))
    return found == wanted
"""


def _with_numbers(value: Any) -> Any:
    """A table whose keys are all whole numbers has them as such: JSON has texts only."""
    if isinstance(value, dict) and value and all(re.fullmatch(r"-?[0-9]{1,18}", str(key)) for key in value):
        return {int(key): one for key, one in value.items()}
    return value


def _checked(text: str, entry: Any) -> str:
    """Such tests as HumanEval's define `check(candidate)` and name the function beside it."""
    if not isinstance(entry, str) or not entry.isidentifier() or "def check(" not in text:
        return text
    return text if re.search(r"^check\(", text, re.MULTILINE) else f"{text}\n\ncheck({entry})"


def _agrees(printed: str, wanted: str) -> bool:
    """Line by line, but for blanks at the end; numbers with a decimal point up to rounding."""
    ours, theirs = _lines(printed), _lines(wanted)
    return len(ours) == len(theirs) and all(map(_line_agrees, ours, theirs))


def _line_agrees(printed: str, wanted: str) -> bool:
    if printed == wanted:
        return True
    ours, theirs = printed.split(), wanted.split()
    return len(ours) == len(theirs) and all(map(_word_agrees, ours, theirs))


def _word_agrees(printed: str, wanted: str) -> bool:
    if printed == wanted:
        return True
    if "." not in wanted or not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(wanted)):
        return False
    number = float(wanted)
    return abs(float(printed) - number) <= max(ROUNDING, ROUNDING_SHARE * abs(number))


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
