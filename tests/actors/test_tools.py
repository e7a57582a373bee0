"""Tools that ship: every call gets a text, and what is wrong with it is told there."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.calculator import calculate
from actors.runtime.run import Refused
from actors.runtime.tools import ANSWER_CHARS, Toolbox, ToolProcess
from actors.runtime.tools_child import Passages, read_passages


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("12*(3+4)", "84"), ("7/2", "3.5"), ("6/3", "2"), ("2^10", "1024"), ("-3--4", "1"), ("sqrt(16)+max(1,2)", "6"),
        ("17%5", "2"),
        ("1/0", "error: division by zero"),
        ("9**9**9", "error: the number is too large"),
        ("factorial(10**6)", "error: the number is too large"),
        ("round(5,-10**9)", "error: round keeps at most 1000 digits"),
        ("round(5, 10**9)", "error: round keeps at most 1000 digits"),
        ("round(1234.5678, 2)", "1234.57"), ("round(1250, -2)", "1200"), ("round(2.5)", "2"),
        ("1**10**9 + 0**999 + (-1)**(10**6+1)", "0"), ("2**-(10**9)", "error: the number is too large"),
        ("1e999", "error: the number is too large"), ("1e999-1e999", "error: the number is too large"),
        ("((((2**64)**64)**64)**64)**64", "error: the number is too large"), ("9" * 480 + "*9", str(int("9" * 480) * 9)),
        ("gcd(2**2000, 6**900)", str(2**900)), ("1<<9**9", "error: cannot calculate '1 << 9 ** 9'"),
        ("(-8)**0.5", "error: the result is not a real number"),
        ("__import__('os').system('true')", "error: cannot calculate \"__import__('os').system('true')\""),
        ("'a'*9", "error: cannot calculate \"'a'\""),
        ("1+", "error: invalid syntax (<unknown>, line 1)"),
        ("(" * 400 + "1" + ")" * 99, "error: "),
        ("1+" * 300 + "1", "error: the expression is longer than 500 characters"),
    ],
)  # fmt: skip
def test_the_calculator_knows_numbers_and_nothing_else(expression: str, answer: str) -> None:
    assert calculate(expression) == answer or (answer == "error: " and calculate(expression).startswith(answer))


@given(st.text(st.sampled_from("0123456789+-*/%^(). ,eabsqrtlog\n"), max_size=60))
def test_no_expression_breaks_the_calculator(expression: str) -> None:
    assert calculate(expression)


def test_search_finds_the_passage_with_the_rare_word(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    texts = ["the cat sat on the mat", "the dog sat", "a heron stands in the river", "the the the"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    passages = Passages(read_passages(str(path)))
    assert passages.best("Where is the heron?")[0] == texts[2]
    assert passages.best("zebra") == []
    (tmp_path / "corpus.txt").write_text("one\ntwo\n\nthree\n")
    assert read_passages(str(tmp_path / "corpus.txt")) == ["one\ntwo", "three"]


async def test_each_tool_answers_in_text_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("a passage")
    async with Toolbox(["calculator", "search", "python"], corpus=str(tmp_path / "c.txt")) as tools:
        assert [spec["function"]["name"] for spec in tools.specs] == ["calculator", "search", "python"]
        assert await tools.call("calculator", {"expression": 7}) == "7"
        assert await tools.call("search", {"query": "passage"}) == "a passage"
        answers = await asyncio.gather(
            *(tools.call("python", {"code": code}) for code in ("2 + 2", "1/0", "print('x' * 9999)", "while 1: print()", "None"))
        )
    assert answers[0] == "4" and answers[1].endswith("ZeroDivisionError: division by zero")
    assert len(answers[2]) < ANSWER_CHARS + 30 and answers[3] == "ended: output" and answers[4] == "(no output)"


async def test_a_tool_that_never_returns_costs_its_call_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As int.__round__ did not for the calculator of before: in C, with the interpreter's lock."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nimport actors.runtime.calculator as c\nc._FUNCTIONS = dict(c._FUNCTIONS, round=round, exp=os._exit)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    async with ToolProcess(None, call_s=2.0) as process:
        held = asyncio.create_task(process.call("calculator", "round(5,-10**9)"))
        turns = 0
        while not held.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert held.result() == "error: calculator did not answer within 2 s" and turns > 20
        assert await process.call("calculator", "exp(3)") == "error: calculator ended without an answer"
        assert await process.call("calculator", "1+1") == "2"
        asked = asyncio.create_task(process.call("calculator", "2+2"))
        await asyncio.sleep(0)
        asked.cancel()  # its answer is nobody's
        assert await process.call("calculator", "3+3") == "6"


async def test_a_query_with_half_a_character_is_answered(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("a passage")
    async with Toolbox(["calculator", "search"], corpus=str(tmp_path / "c.txt")) as tools:
        assert await tools.call("search", {"query": "\ud800 passage"}) == "a passage"
        assert (await tools.call("calculator", {"expression": "\ud800"})).startswith("error: ")


@pytest.mark.parametrize(("names", "corpus", "says"), [(["oracle"], "", "no such"), (["search"], "gone.txt", "cannot be read")])
async def test_tools_that_cannot_be_are_refused(names: list[str], corpus: str, says: str) -> None:
    with pytest.raises(Refused, match=says):
        async with Toolbox(names, corpus=corpus):
            raise AssertionError


async def test_a_call_that_finds_no_place_behind_others_is_answered_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the loops that other samples wrote it was a TimeoutError of the program, and enough of them ended the run."""
    (tmp_path / "c.txt").write_text("a passage")
    monkeypatch.setattr(Toolbox, "busy_s", 0.5)
    async with Toolbox(["python", "search"], corpus=str(tmp_path / "c.txt"), python_deadline_s=30.0) as tools:
        loops = [tools.call("python", {"code": "while 1: pass"}) for _ in range(3 * (os.cpu_count() or 1))]
        said = await asyncio.gather(*loops)
        assert await tools.call("search", {"query": "passage"}) == "a passage"
    assert set(said) == {"error: python was busy for 0.5 s; this call was not made"}


async def test_what_a_tool_is_asked_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("\n\n".join(f"w{i}" for i in range(400)))
    async with Toolbox(["calculator", "search"], corpus=str(tmp_path / "c.txt")) as tools:
        assert (await tools.call("search", {"query": "x" * 20_001})).startswith("error: search takes at most 20000 characters")
        assert (await tools.call("calculator", {"expression": "1" * 20_001})).startswith("error: calculator takes at most 20000")
        asked = [f"w{i}" for i in range(399, -1, -1)]
        assert await tools.call("search", {"query": " ".join(asked[:1] * 300 + asked)}) == "w200\n\nw201\n\nw202", "the first words"
