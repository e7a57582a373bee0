"""Messages in, an answer out: prompts as the model's run made them, tokens from an engine that speaks SGLang's /generate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from actors.runtime.chat import Chat
from actors.runtime.prompts import tokenizer_of
from miles_async.serving.chosen import Chosen
from miles_async.settings.checks import model_context

Message = Mapping[str, Any]
QUIET_S = 300.0  # between two pieces of an answer


class EngineFailed(Exception):
    """The engine refused or lost a request; the text is for who asked."""


class Texts:
    """Text to ids and back. Without a chat template a dialogue is its last message alone, as such a model's prompts were."""

    def __init__(self, chosen: Chosen) -> None:
        self.templated = bool(chosen.template_path) or _has_template(chosen.directory)
        self._fast = tokenizer_of(str(chosen.directory))
        self._chat: Chat | None = None
        if self.templated:
            self._chat = Chat(str(chosen.directory), template_path=chosen.template_path, kwargs=chosen.template_kwargs)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Ids of a dialogue whose next turn is the assistant's. Raises BadChat."""
        if self._chat is not None:
            return self._chat.encode(self._chat.text(messages, tools))
        return self.ids(str(messages[-1].get("content") or ""))

    def ids(self, text: str) -> list[int]:
        """Of a text as it is, with the marks that the tokenizer sets around it."""
        return [int(i) for i in self._fast.encode(text).ids]

    def text(self, tokens: Sequence[int]) -> str:
        """Without special tokens, such as the one that ends an answer."""
        return str(self._fast.decode(list(tokens), skip_special_tokens=True))


def room(chosen: Chosen, prompt: Sequence[int], asked: int | None) -> int:
    """Tokens that an answer may have: as many as are asked for, or as the run's had, in what the prompt leaves of the context.
    Raises EngineFailed where it leaves nothing."""
    config = json.loads((chosen.directory / "config.json").read_bytes())
    context = model_context(config if isinstance(config, dict) else {})
    left = context - len(prompt) if context else asked or chosen.most_new
    if left < 1:
        raise EngineFailed(f"{len(prompt)} tokens leave no space in a context of {context}")
    return min(asked or chosen.most_new, left)


def _has_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    try:
        found = json.loads((directory / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and bool(found.get("chat_template"))


async def generate(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The engine's chunks: `output_ids` so far, and `meta_info`, whose `finish_reason` ends it. Raises EngineFailed."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=QUIET_S)
    try:
        async with session.post(f"{url}/generate", json={**body, "stream": True}, timeout=timeout) as answer:
            if answer.status != 200:
                raise EngineFailed((await answer.text())[:500])
            async for line in answer.content:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    chunk: dict[str, Any] = json.loads(line[6:])
                    if "error" in chunk:
                        raise EngineFailed(str(chunk["error"])[:500])
                    yield chunk
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EngineFailed(f"the engine is lost: {type(error).__name__}") from error


async def answer(
    session: aiohttp.ClientSession,
    url: str,
    texts: Texts,
    prompt: Sequence[int],
    params: Mapping[str, Any],
    stops: Sequence[str] = (),
    hear: Callable[[str], None] = lambda text: None,
) -> tuple[str, int, str]:
    """(text, tokens, `stop` or `length`) of one answer; `hear` is told the text so far. Raises EngineFailed."""
    text, n, finish = "", 0, "length"
    async for chunk in generate(session, url, {"input_ids": list(prompt), "sampling_params": dict(params)}):
        ids = chunk.get("output_ids") or []
        text, n = texts.text(ids), len(ids)
        reason = chunk["meta_info"]["finish_reason"]
        if (cut := min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)) >= 0:
            return text[:cut], n, "stop"  # leaving ends the request
        hear(text.rstrip("\ufffd"))
        if reason is not None:
            finish = "stop" if reason.get("type") == "stop" else "length"
        await asyncio.sleep(0)
    return text, n, finish
