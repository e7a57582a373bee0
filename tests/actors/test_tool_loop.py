"""The shipped program of several turns: calls are answered behind the model's own tokens, and the model is told what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.generation.endpoint.agent import AgentProgram
from actors.generation.endpoint.opened import open_program
from actors.generation.endpoint.toolloop import ToolLoop
from actors.generation.rollouts.session import Trajectory
from actors.runtime.chat import Chat
from actors.runtime.tools import Toolbox
from miles_async.launcher.engines import generation_spec
from miles_async.launcher.place import Place
from miles_async.quickstart.steps import CALL, CALLED, STEPS
from miles_async.quickstart.task import EOS_ID
from miles_async.quickstart.tokenizer import save_tokenizer
from miles_async.settings.load import settings_from
from scripts.bench.chat_tokenizer import make_chat
from tests.actors.agent_house import ScriptedSession, task


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return make_chat(tmp_path_factory.mktemp("chat"))


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(
    chat: Chat,
    script: Callable[[str], str],
    *,
    max_turns: int = 4,
    tokens: int = 4000,
    context: int = 0,
    tools: tuple[str, ...] = ("calculator",),
) -> tuple[Trajectory, ScriptedSession, Counter[str]]:
    counts: Counter[str] = Counter()
    of = task(chat.render([{"role": "user", "content": "3*4?"}]), max_new_tokens=tokens)
    session = ScriptedSession(chat, of, script)
    async with Toolbox(tools) as toolbox:
        loop = ToolLoop(
            *(chat, "hermes", toolbox), max_turns=max_turns, context=context, count=lambda name, by=1: counts.update({name: by})
        )
        [found] = await loop(of, session)
    return found, session, counts


async def test_calls_are_answered_until_the_model_answers_without_one(chat: Chat) -> None:
    def script(text: str) -> str:
        calls = call("calculator", expression="3*4") + call("calculator", expression="1/0")
        return "It is 12." if "12<e>" in text else f"First {calls}"

    found, session, counts = await play(chat, script)
    assert [s.kind for s in found.segments] == ["model", "env", "model"] and found.response == "It is 12."
    assert chat.decode(found.segments[1].tokens) == "\n<s>user\n12<e>\n<s>user\nerror: division by zero<e>\n<s>assistant\n"
    assert session.seen[1] == [*found.prompt, *found.segments[0].tokens, *found.segments[1].tokens]
    assert [name for name, _ in session.told] == ["calculator", "calculator"] and counts["tool_calls"] == 2


HALF = "\ud800"  # of a pair of surrogates


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (call("python", code=f"print('{HALF}')"), "half of a character"),
        (call("python", code="print(chr(0xD800))"), "\\ud800"),
        (call("python", code="import os; os.write(1, bytes([65, 200]))"), "A\ufffd"),
        (call("calculator", expression=HALF), "error: "),
        (call("python", **{HALF: "1"}), "half of a character"),
        (call(HALF), "half of a character"),
        (call(HALF).replace("{}", "5"), "half of a character"),
        (call("python", code=[HALF]), "ud800"),
    ],
)
async def test_what_is_no_text_is_told_to_the_model_as_text(chat: Chat, said: str, heard: str) -> None:
    def script(text: str) -> str:
        return "sorry" if text.count("<s>user") > 1 else said

    found, _, _ = await play(chat, script, tools=("calculator", "python"))
    assert heard in chat.decode(found.segments[1].tokens) and found.response == "sorry"


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ('<tool_call>{"name": </tool_call>', "error: the call cannot be read"),
        (call("oracle", expression="1"), "error: there is no tool 'oracle'. Tools: calculator."),
        (call("calculator", code="1"), "argument 'expression' is missing, there is no argument 'code'"),
    ],
)
async def test_a_call_that_cannot_be_made_is_answered_with_why(chat: Chat, said: str, heard: str) -> None:
    found, session, counts = await play(chat, lambda text: "sorry" if "error:" in text else said)
    assert heard in chat.decode(found.segments[1].tokens) and found.response == "sorry"
    assert session.told == [] and counts["tool_calls_faulty"] == 1


async def test_a_model_that_calls_for_ever_is_stopped_by_turns_and_by_tokens(chat: Chat) -> None:
    again = call("calculator", expression="1+1")
    found, _, _ = await play(chat, lambda _: again, max_turns=3)
    assert [s.kind for s in found.segments] == ["model", "env", "model", "env", "model"]
    found, _, _ = await play(chat, lambda _: again, tokens=100)
    assert found.segments[-1].finish == "length" and found.segments[-1].kind == "model"


async def test_no_turn_is_asked_for_beyond_the_context(chat: Chat) -> None:
    ends = set()
    for context in range(100, 260, 5):
        found, session, counts = await play(chat, lambda _: call("calculator", expression="1+1"), max_turns=9, context=context)
        length = len(found.prompt) + sum(len(segment.tokens) for segment in found.segments)
        assert length <= context and found.segments[-1].kind == "model"
        assert all(len(seen) + asked.max_new_tokens <= context for seen, asked in zip(session.seen, session.asked, strict=True))
        assert all(asked.max_new_tokens > 0 for asked in session.asked)
        assert counts["context_used_up"] == (found.segments[-1].finish == "stop")
        ends.add(found.segments[-1].finish)
    assert ends == {"stop", "length"}


@pytest.mark.parametrize(("function", "kind"), [("", ToolLoop), ("scripts.bench.chat_tokenizer.make_chat", AgentProgram)])
async def test_a_worker_opens_the_program_that_its_settings_name(function: str, kind: type, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, STEPS)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 99}')
    place = Place(
        run_dir="", model_dir=str(tmp_path), weights_dir="", blob_dir="", stop_token_ids=(EOS_ID,), num_rollout=1, fingerprint=""
    )
    plain: dict[str, Any] = {"hf_checkpoint": str(tmp_path), "prompt_data": "x", "num_rollout": 1, "rm_type": "math"}
    tools = {"tools": ("calculator",), "apply_chat_template": True, "max_turns": 3}
    spec = generation_spec(settings_from(**plain, **({"custom_agent_function_path": function} if function else tools)), place)
    counts: Counter[str] = Counter()
    assert spec.agent is not None and generation_spec(settings_from(**plain), place).agent is None
    async with open_program(SimpleNamespace(count=counts.update), spec) as program:  # type: ignore[arg-type]
        assert isinstance(program, kind) and (program._max_turns == 3 if isinstance(program, ToolLoop) else program.resumable)


async def test_the_quickstart_s_right_answers_are_what_the_loop_plays(tmp_path: Path) -> None:
    """Token by token: the warm start teaches what generation will ask for, and the environment's part is what the tool says."""
    save_tokenizer(tmp_path, STEPS)
    chat = Chat(str(tmp_path))
    assert CALL.startswith("<tool_call>") and CALLED.endswith("</tool_call>")
    async with Toolbox(["calculator"]) as toolbox:
        loop = ToolLoop(chat, "hermes", toolbox, max_turns=5, count=lambda *_: None)
        for problem in STEPS.different(30, seed=3):
            written = STEPS.encode(problem.written)
            turns = problem.written.split("<eos>")
            said = iter([turn.rpartition("</tool_response>")[2] for turn in turns])
            prompt = chat.render([{"role": "user", "content": problem.prompt}])
            assert prompt == STEPS.encode(problem.prompt)
            of = task(prompt)
            session = ScriptedSession(chat, of, lambda _, said=said: next(said))  # type: ignore[misc]
            [found] = await loop(of, session)
            tokens = [token for segment in found.segments for token in segment.tokens]
            made = [segment.kind == "model" for segment in found.segments for _ in segment.tokens]
            assert tokens == [*written, EOS_ID] and made == STEPS.made(tokens)
            assert found.response == problem.label


async def test_the_journal_outlasts_a_tools_own_deadline(chat: Chat) -> None:
    """It gave up first, where many loops of other samples ran: the sample's program had failed, and not the model been told."""
    waits: list[float] = []

    class Patient(ScriptedSession):
        async def tell(self, name: str, call: Callable[..., Any], *args: Any, deadline_s: float = 60.0) -> Any:
            waits.append(deadline_s)
            return await super().tell(name, call, *args)

    session = Patient(chat, task(chat.render([{"role": "user", "content": "?"}])), lambda _: call("calculator", expression="1"))
    async with Toolbox(("calculator",)) as toolbox:
        await ToolLoop(chat, "hermes", toolbox, max_turns=2, count=lambda *_: None)(session.task, session)
        assert waits and min(waits) > toolbox.busy_s
