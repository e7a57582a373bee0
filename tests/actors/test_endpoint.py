"""The OpenAI interface under the unmodified openai client: what it is told is what the model made, token by token."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from actors.generation.endpoint.agent import AgentHangs, AgentProgram
from actors.generation.endpoint.server import Endpoint, Episode
from actors.generation.rollouts.session import Task, Trajectory
from actors.runtime.chat import Chat
from actors.runtime.hooks import load_hook
from bus.errors import Poison
from scripts.bench.chat_tokenizer import TEMPLATE, make_chat
from tests.actors.agent_house import END, ScriptedSession, task

ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}  # fmt: skip
COUNTS = "{{ messages | length }}" + TEMPLATE  # what the model has read is another once more follows


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return make_chat(tmp_path_factory.mktemp("chat"))


class Served:
    """An episode behind a running endpoint, and a client of it."""

    def __init__(self, client: AsyncOpenAI, session: ScriptedSession, episode: Episode, counts: Counter[str]) -> None:
        self.client, self.session, self.episode, self.counts = client, session, episode, counts

    async def ask(self, messages: Any, **more: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=messages, **more)

    @property
    def found(self) -> list[Trajectory]:
        return self.episode.dialogues.trajectories()


@asynccontextmanager
async def serving(chat: Chat, script: Callable[[str], str], of: Task | None = None, *, context: int = 0) -> AsyncIterator[Served]:
    counts: Counter[str] = Counter()
    session = ScriptedSession(chat, of or task(), script)
    async with Endpoint(chat, "hermes", lambda name, by=1: counts.update({name: by}), context=context) as endpoint:
        async with endpoint.episode(session.task, session) as (episode, key):
            async with AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0) as client:
                yield Served(client, session, episode, counts)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def whole(trajectory: Trajectory) -> list[int]:
    return [*trajectory.prompt, *(token for segment in trajectory.segments for token in segment.tokens)]


def last_user(text: str) -> str:
    return text.rpartition("<s>user\n")[2].partition("<e>")[0]


async def test_a_dialogue_is_one_trajectory_of_the_tokens_that_were_made(chat: Chat) -> None:
    async with serving(chat, lambda text: f"  hé {last_user(text)}!\n") as served:
        messages: list[Any] = [{"role": "system", "content": "be brief"}, user("one")]
        for turn in range(4):
            answer = (await served.ask(messages)).choices[0].message
            messages += [answer, user(f"more {turn}")]  # the client's own object, with all its empty fields
        [found] = served.found
    assert found.prompt == chat.render(messages[:2])
    assert [s.kind for s in found.segments] == ["model", "env", "model", "env", "model", "env", "model"]
    assert [s for s in found.segments if s.kind == "model"] == served.session.made
    assert served.session.seen[3] + served.session.made[3].tokens == whole(found)
    assert whole(found) == chat.render([m if isinstance(m, dict) else m.model_dump() for m in messages[:-1]], opened=False)[:-1]
    assert found.response == "  hé more 2!\n"


async def test_calls_reach_the_client_and_their_results_the_model(chat: Chat) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    async with serving(chat, lambda text: "It is 3." if "answer 3" in text else f"I add.\n{call}") as served:
        first = await served.ask([user("1+2?")], tools=[ADD], tool_choice="required")
        message = first.choices[0].message
        [asked] = message.tool_calls
        assert (message.content, first.choices[0].finish_reason) == ("I add.", "tool_calls")
        assert (asked.function.name, json.loads(asked.function.arguments)) == ("add", {"a": 1, "b": 2})
        told = {"role": "tool", "tool_call_id": asked.id, "content": "answer 3"}
        second = await served.ask([user("1+2?"), message, told], tools=[ADD])
        assert second.choices[0].message.content == "It is 3."
        [found] = served.found
        # the same dialogue with nothing on offer is another one to the model
        await served.ask([user("1+2?"), message, told], tools=[ADD], tool_choice="none")
        assert len(served.found) == 2
    assert [s.kind for s in found.segments] == ["model", "env", "model"]
    assert chat.decode(found.segments[1].tokens) == "\n<s>user\nanswer 3<e>\n<s>assistant\n"
    assert served.counts["trajectories_opened/tools"] == 1 and "trajectories_opened/first" not in served.counts


async def test_a_call_that_cannot_be_read_stays_text(chat: Chat) -> None:
    async with serving(chat, lambda _: '<tool_call>{"name": </tool_call>') as served:
        choice = (await served.ask([user("?")], tools=[ADD])).choices[0]
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
        assert choice.message.content == '<tool_call>{"name": </tool_call>' and served.counts["calls_unreadable"] == 1


@pytest.mark.parametrize(
    ("template", "second", "why"),
    [
        (TEMPLATE, [user("one"), {"role": "assistant", "content": "something else"}, user("two")], "rewritten"),
        (TEMPLATE, [user("another dialogue")], "beside"),
        (COUNTS, [user("one"), {"role": "assistant", "content": "answer"}, user("two")], "template"),
    ],
)
async def test_a_history_that_does_not_go_on_opens_a_trajectory_with_its_reason(
    template: str, second: Any, why: str, tmp_path: Path
) -> None:
    chat = make_chat(tmp_path, template)
    async with serving(chat, lambda _: "answer") as served:
        await served.ask([user("one")])
        await served.ask(second)
        first, other = served.found
    assert served.counts == {"turns_served": 2, f"trajectories_opened/{why}": 1}
    assert [s.kind for s in (*first.segments, *other.segments)] == ["model", "model"]
    assert other.prompt == chat.render(second)


async def test_several_answers_are_branches_and_no_token_is_trained_twice(chat: Chat) -> None:
    said = iter(["first", "left", "right"])
    async with serving(chat, lambda _: next(said)) as served:
        first = (await served.ask([user("?")])).choices[0].message
        two = await served.ask([user("?"), first, user("go on")], n=2)
        assert [choice.message.content for choice in two.choices] == ["left", "right"]
        left, right = served.found
    assert [s.kind for s in left.segments] == ["model", "env", "model"]
    assert [s.kind for s in right.segments] == ["env", "env", "model"]
    assert whole(left)[:-5] == whole(right)[:-6] and served.counts["answers_beside_others"] == 1


async def test_a_stop_ends_the_text_and_its_tokens_stay(chat: Chat) -> None:
    async with serving(chat, lambda text: "two" if "then" in text else "one STOP and much more") as served:
        answer = (await served.ask([user("?")], stop=["STOP", "\n\n"])).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("one ", "stop")
        await served.ask([user("?"), answer.message, user("then")])
        [found] = served.found
    assert chat.decode(found.segments[0].tokens) == "one STOP"
    assert chat.decode(whole(found)).endswith("one STOP<e>\n<s>user\nthen<e>\n<s>assistant\ntwo<e>")


@pytest.mark.parametrize("stop", [None, "!"])
async def test_a_stream_tells_the_same_as_it_is_made(chat: Chat, stop: str | None) -> None:
    text = '\u00fcber\u00adall \u4f60\u597d <b> ! I call <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    async with serving(chat, lambda _: text) as served:
        stream = await served.ask([user("?")], stream=True, tools=[ADD], stop=stop, stream_options={"include_usage": True})
        parts: list[str] = []
        calls, finish, usage = [], None, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                calls += choice.delta.tool_calls or []
                finish = choice.finish_reason or finish
        content = "".join(parts)
        shown = {"role": "assistant", "content": content, "tool_calls": [c.model_dump(exclude={"index"}) for c in calls] or None}
        await served.ask([user("?"), shown, user("on")], tools=[ADD])
        [found] = served.found
    assert sum(map(bool, parts)) > 3 and usage is not None
    assert usage.completion_tokens == len(found.segments[0].tokens)
    if stop:
        assert (content, calls, finish) == (text.partition("!")[0], [], "stop")
    else:
        assert (content, finish) == (text.partition("<tool_call>")[0], "tool_calls") and calls[0].function.name == "add"
    assert [s.kind for s in found.segments] == ["model", "env", "model"]


async def test_log_probs_are_the_tokens_own_and_limits_hold(chat: Chat) -> None:
    async with serving(chat, lambda _: "abc", task(max_new_tokens=6)) as served:
        choice = (await served.ask([user("?")], logprobs=True, max_tokens=2)).choices[0]
        assert choice.finish_reason == "length"
        assert [(t.token, t.logprob) for t in choice.logprobs.content] == [("a", -0.5), ("b", -1.5)]
        await served.ask([user("?")], max_tokens=100)
        with pytest.raises(openai.BadRequestError, match="used up its 6 tokens"):
            await served.ask([user("?")])
        assert served.episode.spent
    async with serving(chat, lambda _: "abc", context=30) as served:
        used = (await served.ask([user("?")])).usage.prompt_tokens
        await served.ask([user("?" * (29 - used + 1))])
        assert served.session.asked[1].max_new_tokens == 1
        with pytest.raises(openai.BadRequestError, match="30 tokens leave no space in a context of 30"):
            await served.ask([user("?" * (30 - used + 1))])


async def test_training_draws_as_the_run_does_and_evaluation_as_asked(chat: Chat) -> None:
    async with serving(chat, lambda _: "a") as served:
        await served.ask([user("?")], temperature=0.1)
        assert served.session.asked[0].temperature == 1.0 and served.counts["sampling_overruled"] == 1
    async with serving(chat, lambda _: "a", task(eval_name="held_out")) as served:
        await served.ask([user("?")], temperature=0.1, top_p=0.5)
        assert (served.session.asked[0].temperature, served.session.asked[0].top_p) == (0.1, 0.5)
        assert "sampling_overruled" not in served.counts


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "x"}]}, "no table with a 'role'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "only text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls: KeyError"),
        ({"n": 99}, "n = 99"),
        ({"logit_bias": {"5": 1}}, "logit_bias not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format not supported"),
        ({"tools": [{"type": "function"}]}, "'tools' must be"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": "no"}}]}, "tool 'x' are no JSON schema"),
        ({"max_tokens": "many"}, "body cannot be read"),
        ({"max_tokens": -1}, "max_tokens = -1 is below 0"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(chat: Chat, more: dict[str, Any], says: str) -> None:
    async with serving(chat, lambda _: "a") as served:
        with pytest.raises(openai.BadRequestError, match=says):
            await served.ask(**({"messages": [user("?")]} | more))
        assert served.counts == {"calls_refused": 1} and served.session.seen == []


async def test_a_key_is_good_for_its_own_episode_and_no_longer(chat: Chat) -> None:
    async with serving(chat, lambda _: "a") as served:
        assert [m.id async for m in await served.client.models.list()] == ["policy"]
        with pytest.raises(openai.AuthenticationError):
            await served.client.with_options(api_key="sk-other").models.list()
        url = str(served.client.base_url)
        async with Endpoint(chat, "hermes", print) as endpoint:
            async with endpoint.episode(task(), served.session) as (_, key):
                pass
            async with AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0) as late:
                with pytest.raises(openai.AuthenticationError):
                    await late.models.list()
        assert url.startswith("http://127.0.0.1:")


# -- agents -------------------------------------------------------------------------------------------------------------


async def play(
    chat: Chat, agent: Any, script: Callable[[str], str], *, idle_s: float = 20.0, tokens: int = 4000, context: int = 0
) -> list[Trajectory]:
    session = ScriptedSession(chat, task(max_new_tokens=tokens, label="3"), script)
    async with Endpoint(chat, "hermes", lambda name, by=1: None, context=context) as endpoint:
        return await AgentProgram(agent, endpoint, idle_s=idle_s)(session.task, session)


async def test_plain_agents_are_as_many_at_once_as_there_are_samples(chat: Chat) -> None:
    """Each waits for all others: one that hangs takes no place from them."""
    met = threading.Barrier(48)

    def agent(task: Task, base_url: str, api_key: str) -> float:
        met.wait(30.0)
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="policy", messages=[user("1+2")])  # type: ignore[list-item]
        return 1.0

    found = await asyncio.gather(*(play(chat, agent, lambda _: "3", idle_s=40.0) for _ in range(met.parties)))
    assert all(trajectory.reward == 1.0 for [trajectory] in found)


async def test_an_agent_is_a_program(chat: Chat) -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            answer = await client.chat.completions.create(model="policy", messages=[user("1+2")])  # type: ignore[list-item]
        return float(answer.choices[0].message.content == task.label)

    [found] = await play(chat, agent, lambda _: "3")
    assert found.reward == 1.0 and found.segments[0].tokens[-1] == END


async def test_the_agent_of_the_documentation_runs_as_it_stands(chat: Chat, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    (tmp_path / "my_agent.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    agent = load_hook(f"{tmp_path}/my_agent.py:agent")
    async with agent.__globals__["HTTP"]:  # else its connections are still open when the test is over
        [found] = await play(chat, agent, lambda text: "it is 3" if "Look again" in text else "it is 2")
    assert found.reward == 1.0 and [s.kind for s in found.segments] == ["model", "env", "model"]


async def test_an_agent_that_asks_for_ever_ends_with_its_tokens(chat: Chat) -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            while True:
                await client.chat.completions.create(model="policy", messages=[user("on")])  # type: ignore[list-item]

    found = await play(chat, agent, lambda _: "abcd", tokens=20)
    assert len(found) == 4 and all(t.reward is None for t in found)


async def test_an_agent_that_hangs_raises_or_asks_nothing_is_named(chat: Chat) -> None:
    async def hangs(*_: Any) -> None:
        await asyncio.sleep(600)

    async def raises(*_: Any) -> None:
        raise KeyError("lost")

    async def silent(*_: Any) -> None: ...

    cases = ((hangs, AgentHangs, "neither called"), (raises, KeyError, "lost"), (silent, Poison, "without an answer"))
    for agent, error, says in cases:
        with pytest.raises(error, match=says):
            await play(chat, agent, lambda _: "a", idle_s=0.2)


def test_an_unmodified_smolagents_agent_solves_its_task_through_the_endpoint(chat: Chat) -> None:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: one of them
            b: the other
        """
        return a + b

    def agent(task: Task, base_url: str, api_key: str) -> float:
        model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
        solved = ToolCallingAgent([add], model, max_steps=4, verbosity_level=0).run("What is 1 + 2?")
        model.client.close()
        return float(str(solved) == task.label)

    def script(text: str) -> str:
        name, arguments = ("final_answer", {"answer": "3"}) if "Observation:\n3" in text else ("add", {"a": 1, "b": 2})
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    found = asyncio.run(play(chat, agent, script))
    assert found[-1].reward == 1.0
    assert sum(s.kind == "model" for t in found for s in t.segments) == 2
