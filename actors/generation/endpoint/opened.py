"""The program of several turns that a worker was told of, with what it needs: a chat template, tools, the endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from actors.generation.endpoint.agent import AgentProgram
from actors.generation.endpoint.rehearsal import format_of
from actors.generation.endpoint.server import Endpoint
from actors.generation.endpoint.toolloop import ToolLoop
from actors.generation.rollouts.session import Program
from actors.generation.spec import AgentSpec, GenerationSpec
from actors.runtime.chat import BadChat, Chat
from actors.runtime.context import Context
from actors.runtime.hooks import load_hook
from actors.runtime.prompts import context_of
from actors.runtime.tools import Toolbox


@asynccontextmanager
async def open_program(context: Context, spec: GenerationSpec) -> AsyncIterator[Program]:
    """Raises Refused for an agent, tools or a template that cannot be, SandboxUnavailable."""
    agent = spec.agent
    assert agent is not None
    kwargs = json.loads(agent.template_kwargs or "{}")
    chat = await asyncio.to_thread(Chat, spec.model_path, template_path=agent.template_path, kwargs=kwargs)
    kind = _format(chat, agent)
    longest = spec.context_length or context_of(spec.model_path)
    if agent.function:
        async with Endpoint(chat, kind, context.count, context=longest) as endpoint:
            yield AgentProgram(load_hook(agent.function), endpoint, idle_s=agent.idle_s)
        return
    async with Toolbox(agent.tools, corpus=agent.corpus, weak=agent.allow_weak_sandbox) as tools:
        yield ToolLoop(chat, kind, tools, max_turns=agent.max_turns, count=context.count, context=longest)


def _format(chat: Chat, agent: AgentSpec) -> str:
    """An agent may offer no tools, and tools of its own may be called in its own words: then nothing has to be read."""
    try:
        return format_of(chat, agent.parser)
    except BadChat:
        if agent.function:
            return "hermes"
        raise
