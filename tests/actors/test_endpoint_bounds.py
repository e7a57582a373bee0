"""The endpoint at its bounds: the model's context is full, a body is large, a client does not read."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai import AsyncOpenAI

from actors.generation.endpoint.request import ChatBody
from actors.generation.endpoint.server import INLINE_BYTES, Endpoint
from actors.generation.endpoint.stream import Stream
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
    async def full(self: Stream, event: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Stream, "_write", full)
    stream, said = Stream(None, "policy", 0, ChatBody(messages=[]), ()), asyncio.Event()  # type: ignore[arg-type]

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
