"""A program and its tests in two processes: what holds in one holds here, and what a program does to its own earns nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from actors.runtime.sandbox import Sandbox
from tests.actors.examined_programs import EARNS_NOTHING, HOLDS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(width=4, deadline_s=15.0) as sandbox:
        yield sandbox


@pytest.mark.parametrize(("program", "tests"), HOLDS)
async def test_what_holds_in_one_namespace_holds(box: Sandbox, program: str, tests: str) -> None:
    ran = await box.examine(program, tests)
    assert ran.cause == "ok", ran.stderr


@pytest.mark.parametrize(("program", "tests"), EARNS_NOTHING)
async def test_what_a_program_does_to_its_own_process_earns_nothing(box: Sandbox, program: str, tests: str) -> None:
    assert (await box.examine(program, tests, deadline_s=4.0)).cause != "ok"


async def test_a_wrong_answer_is_told_by_the_line_that_found_it(box: Sandbox) -> None:
    ran = await box.examine("def f(x): return x", "assert f(1) == 1\nassert f(2) == 3")
    assert ran.cause == "raised" and "assert f(2) == 3" in ran.stderr


async def test_what_a_program_is_not_told_it_cannot_tell(box: Sandbox) -> None:
    """What a test expects is in no byte that the program can reach; what it is called with is."""
    program = """
import gc
def f(x):
    word = "".join(reversed("gnissorcarbez"))
    return any(isinstance(one, (list, dict, tuple)) and word in repr(one) for one in gc.get_objects())
"""
    assert (await box.examine(program, "assert not f(1)\nexpected = ['zebracrossing']\nassert not f(2)")).cause == "ok"
