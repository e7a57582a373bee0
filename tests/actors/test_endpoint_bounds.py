"""The endpoint at its bounds: the model's context is full, a body is large, a client does not read."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai import AsyncOpenAI

from actors.generation.endpoint import dialogue
from actors.generation.endpoint.request import ChatBody
from actors.generation.endpoint.server import INLINE_BYTES, Endpoint
from actors.generation.endpoint.stream import AnswerStream
from actors.generation.rollouts.session import Task
from actors.runtime.chat import Chat
from bus.errors import Poison
from scripts.bench.chat_tokenizer import make_chat
from tests.actors.agent_house import ScriptedSession, task
from tests.actors.test_endpoint import play, serving, user


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return make_chat(tmp_path_factory.mktemp("chat"))


async def test_an_agent_whose_history_fills_the_context_has_ended_and_one_that_fails_later_has_failed(chat: Chat) -> None:
    """It was tried again three times, then a dead letter: no long dialogue was ever trained."""

    async def agent(task: Task, base_url: str, api_key: str, then: int = 0) -> None:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for text in ("on", "x" * 300)[then:]:
                await client.chat.completions.create(model="policy", messages=[user(text)])  # type: ignore[list-item]

    async def recovers(task: Task, base_url: str, api_key: str) -> None:
        with pytest.raises(openai.BadRequestError):
            await agent(task, base_url, api_key)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="policy", messages=[user("short")])  # type: ignore[list-item]
        raise KeyError("a fault of its own")

    [found] = await play(chat, agent, lambda _: "abcd", context=200)
    assert found.reward is None and len(found.segments) == 1
    with pytest.raises(KeyError, match="a fault of its own"):
        await play(chat, recovers, lambda _: "abcd", context=200)
    refused = r"without an answer of the model on g1/0; its last call was refused: .* leave no space in a context of 200"
    with pytest.raises(Poison, match=refused):
        await play(chat, partial(agent, then=1), lambda _: "abcd", context=200)


async def test_a_large_body_does_not_hold_up_its_worker(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 MB of text were tokenised in the event loop for more than 30 s, which ends a worker."""
    threads: list[int] = []
    render = chat.render

    def seen(*args: Any, **more: Any) -> list[int]:
        threads.append(threading.get_ident())
        return render(*args, **more)

    monkeypatch.setattr(chat, "render", seen)
    async with serving(chat, lambda _: "a", context=100) as served:
        await served.ask([user("small")])
        with pytest.raises(openai.BadRequestError, match="leave no space in a context of 100"):
            await served.ask([user("x" * (INLINE_BYTES + 1))])
    assert threads[0] == threading.get_ident() != threads[1]


async def test_a_stream_that_nobody_reads_ends_with_its_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(self: AnswerStream, event: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(AnswerStream, "_write", full)
    stream, said = AnswerStream(None, "policy", 0, ChatBody(messages=[]), ()), asyncio.Event()  # type: ignore[arg-type]

    async def answer() -> None:
        async with stream.telling():
            stream.hear(0, "abc", "")
            await asyncio.sleep(0)  # its teller is writing
            said.set()
            await asyncio.Event().wait()

    answering = asyncio.create_task(answer())
    await said.wait()
    answering.cancel()
    await asyncio.wait([answering], timeout=10.0)
    assert answering.cancelled()


async def test_a_call_that_is_never_sent_to_its_end_does_not_hold_up_the_end_of_a_worker(chat: Chat) -> None:
    """It was waited for 60 s, twice as long as a drain may take."""
    session = ScriptedSession(chat, task(), lambda _: "a")
    endpoint = Endpoint(chat, "hermes", lambda name, by=1: None)
    async with endpoint:
        async with endpoint.episode(session.task, session) as (_, key):
            address = urlsplit(endpoint.url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nExpect: 100-continue\r\n"
            writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
            assert b"100" in await reader.readline(), "it waits for the rest"
        leaving = asyncio.create_task(endpoint.__aexit__())
        await asyncio.wait([leaving], timeout=10.0)
        assert leaving.done()
    writer.close()


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def called(arguments: str) -> list[Any]:
    """A dialogue whose call has these arguments, as JSON text."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [user("?"), {"role": "assistant", "content": "", "tool_calls": [call]}, user("and?")]


LARGE = "9" * 9000  # an integer that Python writes as no text
HOSTILE = {
    "deep names": [{"role": "user", "content": "?", "name": json.loads(nested(200))}],
    "deep arguments": called(f'{{"a": {nested(300)}}}'),
    "many stops": ([user("?")], {"stop": [f"s{i}" for i in range(65)]}),
    "a long stop": ([user("?")], {"stop": "a" * 501, "stream": True}),
    "deep tools": ([user("?")], {"tools": [{"type": "function", "function": {"name": "f", "x": json.loads(nested(200))}}]}),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_what_no_template_or_engine_should_walk_is_refused_and_the_episode_goes_on(chat: Chat, what: str) -> None:
    """Each cost the worker its loop: minutes for a million stops, a tenth of a second and more for a few brackets."""
    found = HOSTILE[what]
    messages, more = found if isinstance(found, tuple) else (found, {})
    async with serving(chat, lambda _: "ok") as served:
        with pytest.raises(openai.BadRequestError, match=r"at most 64 texts|more than 64 tables and lists"):
            await served.ask(messages, **more)
        assert (await served.ask([user("?")], stop=["s"] * 64)).choices[0].message.content == "ok"


@pytest.mark.parametrize("arguments", ['{"k": "\\ud800"}', f'{{"k": {LARGE}}}', '{"k": NaN}', '{"k": 1e999}', nested(100_000)])
async def test_arguments_that_are_no_text_or_no_number_are_the_clients_affair(chat: Chat, arguments: str) -> None:
    """Half a character in a text within a text ended in 500, and so the sample's program, and with enough of them the run."""
    async with serving(chat, lambda _: "ok") as served:
        try:
            answer = await served.ask(called(arguments))
        except openai.BadRequestError:
            return
        assert answer.choices[0].message.content == "ok"


async def test_whatever_a_tokenizer_or_a_template_fails_at_is_a_refused_call(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> list[int]:
        raise ZeroDivisionError("of a tokenizer")

    async with serving(chat, lambda _: "ok") as served:
        with monkeypatch.context() as patched:
            patched.setattr(chat, "encode", broken)
            with pytest.raises(openai.BadRequestError, match="cannot be used: ZeroDivisionError"):
                await served.ask([user("?")])
        assert (await served.ask([user("?")])).choices[0].message.content == "ok"
        assert served.counts["calls_refused"] == 1


async def test_a_body_for_which_no_context_has_room_is_not_read(chat: Chat) -> None:
    """60 MB of brackets held the interpreter for 8 s to a minute; a loop that stands for 30 s ends its worker."""
    async with serving(chat, lambda _: "ok", context=100) as served:
        with pytest.raises(openai.BadRequestError, match="a body of more than 1,048,576 bytes"):
            await served.ask([user("x" * (1 << 20))])
        assert served.episode.spent, "an agent that ends by it has ended as it likes"
        with pytest.raises(openai.BadRequestError, match="leave no space in a context of 100"):
            await served.ask([user("x" * 900_000)])


@pytest.mark.parametrize(("context", "most"), [(0, 16 << 20), (1000, 1 << 20), (100_000, 3_200_000), (10_000_000, 16 << 20)])
def test_the_largest_body_follows_from_the_context(chat: Chat, context: int, most: int) -> None:
    assert Endpoint(chat, "hermes", lambda *_: None, context=context)._most_bytes == most


async def test_a_stream_that_nobody_reads_is_given_up_and_the_answer_stays(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is under way is no idle agent: the episode had no end."""
    monkeypatch.setattr(AnswerStream, "unread_s", 0.2)
    long = "word " * 4000
    body = json.dumps({"model": "policy", "stream": True, "logprobs": True, "n": 6, "messages": [user("?")]}).encode()
    session = ScriptedSession(chat, task(max_new_tokens=200_000), lambda _: long, chunk=10_000)
    async with Endpoint(chat, "hermes", lambda *_: None) as endpoint:
        async with endpoint.episode(session.task, session) as (episode, key):
            with socket.socket() as unread:
                unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                unread.setblocking(False)
                address = urlsplit(endpoint.url)
                await asyncio.get_running_loop().sock_connect(unread, (address.hostname, address.port))
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
                whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
                await asyncio.get_running_loop().sock_sendall(unread, whole)
                async with asyncio.timeout(15):
                    while not (len(session.made) == 6 and not episode.handlers):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
            found = episode.dialogues.trajectories()
    assert [one.response for one in found] == [long] * 6


async def test_a_dialogue_is_hashed_once_for_each_call_and_not_by_the_loop(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    dumped: list[int] = []
    hashes = dialogue._hashes
    monkeypatch.setattr(dialogue, "_hashes", lambda said, before=0: dumped.append(len(said)) or hashes(said, before))  # type: ignore[func-returns-value]
    async with serving(chat, lambda _: " ok ") as served:
        messages: list[Any] = [user("one")] * 50
        answer = (await served.ask(messages)).choices[0].message
        await served.ask([*messages, answer, user("two")])
        assert dumped == [50, 1, 52, 1] and len(served.found) == 1
