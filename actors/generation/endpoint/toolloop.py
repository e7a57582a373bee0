"""The shipped program of several turns: the model writes, its tool calls are answered, until it answers without one.

What each tool said is behind the model's own tokens as the chat template renders it. A call that cannot be made is answered with
what is wrong with it, for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actors.generation.endpoint.calls import ToolCall, fault, parse
from actors.generation.rollouts.session import Segment, Session, Task, Trajectory, env
from actors.runtime.chat import BadChat, Chat
from actors.runtime.template import ASKED, as_text, call_id, calling
from actors.runtime.tools import TOLD_S, Toolbox
from bus.messages.samples import Sampling


class ToolLoop:
    """At most `max_turns` answers of the model. `kind`: the format of tool calls. `context`: most tokens of a sequence, 0 = any."""

    def __init__(
        self, chat: Chat, kind: str, toolbox: Toolbox, *, max_turns: int, count: Callable[..., object], context: int = 0
    ) -> None:
        self._chat, self._kind, self._toolbox, self._max_turns, self._count = chat, kind, toolbox, max_turns, count
        self._context = context

    def __str__(self) -> str:
        return "tool loop"

    async def __call__(self, task: Task, session: Session) -> list[Trajectory]:
        tokens, segments, text = list(task.prompt), [], ""
        for left in range(self._max_turns - 1, -1, -1):
            made = await session.generate(tokens, within(task.sampling, tokens, self._context))
            segments.append(made)
            text = self._text(made, task)
            calls = parse(text, self._kind, self._toolbox.specs)
            if not calls or not left or made.finish == "length" or session.left <= 0:
                break
            answers = [as_text(fault(call, self._toolbox.specs)) for call in calls]
            self._count("tool_calls", len(calls))
            self._count("tool_calls_faulty", sum(map(bool, answers)))
            for index, call in enumerate(calls):
                if not answers[index]:
                    made_for = (call.name, self._toolbox.call, call.name, call.arguments)
                    answers[index] = await session.tell(*made_for, deadline_s=TOLD_S)
            heard = self._heard(made, calls, answers, task)
            if 0 < self._context <= len(tokens) + len(made.tokens) + len(heard):
                self._count("context_used_up")
                break  # nothing could be answered behind it
            segments.append(env(heard))
            tokens += [*made.tokens, *heard]
        return [Trajectory(task.prompt, segments, response=text)]

    def _heard(self, made: Segment, calls: Sequence[ToolCall], answers: Sequence[Any], task: Task) -> list[int]:
        """What the template puts behind the model's own tokens, which are not rendered: calls of the same tools stand for them. A
        template that takes one call at a time is shown the first one."""
        known = [tool["function"]["name"] for tool in self._toolbox.specs]
        names = [call.name if call.name in known else known[0] for call in calls]
        said = [calling(name, {}, str(i)) for i, name in enumerate(names)]
        told = [
            {"role": "tool", "name": name, "tool_call_id": call_id(str(i)), "content": str(answer)}
            for i, (name, answer) in enumerate(zip(names, answers, strict=True))
        ]
        for many in sorted({len(calls), 1}, reverse=True):
            old = [ASKED, {**said[0], "tool_calls": [call for one in said[:many] for call in one["tool_calls"]]}]
            try:
                return self._chat.follow(old, [*old, *told], made.tokens, self._toolbox.specs, stops=task.sampling.stop_token_ids)
            except BadChat:
                if many == 1:
                    raise
        raise AssertionError("there is no call")

    def _text(self, made: Segment, task: Task) -> str:
        ended = bool(made.tokens) and made.tokens[-1] in task.sampling.stop_token_ids
        return self._chat.decode(made.tokens[:-1] if ended else made.tokens)


def within(sampling: Sampling, tokens: Sequence[int], context: int) -> Sampling:
    """As many new tokens at most as have room behind `tokens`, which leave some. `context`: 0 = any."""
    room = context - len(tokens)
    if not context or room >= sampling.max_new_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_new_tokens=room)
