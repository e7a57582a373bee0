"""`unit_tests` from the scorer's side: what solves is paid, in whatever form a data set asks; what does not is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from actors.reward.code import CodeScorer
from actors.reward.sample import BadLabel, Sample
from tests.actors.honest_programs import HONEST, UNUSABLE, WRONG

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer() -> AsyncIterator[CodeScorer]:
    async with CodeScorer() as one:
        yield one


def sample(program: str, metadata: dict[str, Any]) -> Sample:
    return Sample(sample_id="q/0", prompt="", response=f"```python\n{program}\n```", label="", metadata=metadata)


@pytest.mark.parametrize(("metadata", "program"), [case[1:] for case in HONEST], ids=[case[0] for case in HONEST])
async def test_a_program_that_solves_is_paid(scorer: CodeScorer, metadata: dict[str, Any], program: str) -> None:
    assert (await scorer.score(sample(program, metadata), 60.0))["score"] == 1.0


@pytest.mark.parametrize(("metadata", "program"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
async def test_a_program_that_does_not_solve_is_not_paid(scorer: CodeScorer, metadata: dict[str, Any], program: str) -> None:
    assert (await scorer.score(sample(program, metadata), 60.0))["score"] == 0.0


@pytest.mark.parametrize("tests", UNUSABLE)
async def test_tests_that_ask_nothing_pay_nobody(scorer: CodeScorer, tests: str) -> None:
    with pytest.raises(BadLabel, match="the tests of q/0 cannot be used"):
        await scorer.score(sample("def f(x): return 2", {"tests": tests}), 60.0)
