"""What a dialogue of several turns asks of a chat template, tried by rendering one: before a run starts, and to know how the model
writes its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.generation.endpoint.calls import FORMATS, Tool, parse
from actors.runtime.chat import BadChat, Chat
from actors.runtime.template import ASKED, call_id, calling, told

AUTO = "auto"
NAME, ARGUMENTS = "look_up", {"words": "two words", "count": 3}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Finds a passage.",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "string", "description": "What to find."}, "count": {"type": "integer"}},
            "required": ["words"],
        },
    },
}
WORDS = {"<|tool_list_start|>": "lfm2", "python_tag": "llama3", '"parameters": ': "llama3"}
"""What tells the format in a template that shows tools but renders no calls."""


def format_of(chat: Chat, parser: str = AUTO) -> str:
    """The format of calls: `parser`, or the one in which the template's own rendering of a call is read back. Where it renders
    none, what its words tell; hermes where they tell nothing. BadChat: no format reads what it renders."""
    if parser != AUTO:
        return parser
    text = _written(chat)
    if not text:
        return next((kind for words, kind in WORDS.items() if words in chat.template), "hermes")
    found = next((kind for kind in FORMATS if _reads(text, kind)), "")
    if not found:
        raise BadChat(f"the chat template writes a call as {text[:160]!r}, which is read here in no format ({', '.join(FORMATS)})")
    return found


def _written(chat: Chat) -> str:
    """A call as the template has it, with the end of the turn; empty where it renders none."""
    if not chat.traits.calls_shown:
        return ""
    pieces = chat.pieces([ASKED, calling(NAME, ARGUMENTS)], [TOOL], roles=("assistant",))
    return "".join(chat.decode(piece.ids) for piece in pieces if piece.made)


def _reads(text: str, kind: str) -> bool:
    return [(call.name, call.arguments, call.error) for call in parse(text, kind, [TOOL])] == [(NAME, ARGUMENTS, "")]


def rehearse_tools(chat: Chat, parser: str, tools: Sequence[Any]) -> list[str]:
    """One call, its answer, the next call and its answer are rendered, and the call is read back. Returns what is worth knowing.
    Raises BadChat."""
    asked = {"role": "user", "content": "What is 3*4?"}
    said, heard = calling(NAME, ARGUMENTS), told("12", NAME)
    again, other = calling(NAME, ARGUMENTS, "1"), {**told("13", NAME), "tool_call_id": call_id("1")}
    ended = chat.encode("x") + [id for id in [chat.traits.ending("text").stop] if id >= 0]
    chat.follow([asked, said], [asked, said, heard], ended, tools, stops=ended)
    chat.follow([asked, said, heard, again], [asked, said, heard, again, other], ended, tools, stops=ended)
    notes = []
    if (kind := format_of(chat, parser)) != AUTO and (text := _written(chat)) and not _reads(text, kind):
        raise BadChat(f"the chat template writes a call as {text[:160]!r}, which --generate-tool-call-parser {kind} does not read")
    if not chat.traits.calls_shown:
        notes.append(f"the chat template renders no calls, so their format cannot be told from it: they are read as {kind}")
    if chat.text([asked], tools) == chat.text([asked]):
        notes.append("the chat template does not show the model its tools: prompts must say which there are, and how to call them")
    return notes


def rehearse_dialogue(chat: Chat) -> list[str]:
    """A dialogue of two turns is rendered, as an agent leads one. Returns what is worth knowing. Raises BadChat."""
    asked, said = {"role": "user", "content": "What is 3*4?"}, {"role": "assistant", "content": "12"}
    chat.follow([asked, said], [asked, said, asked], chat.encode("12"))
    if chat.traits.tools_heard:
        return []
    return ["the chat template has no tool role: an agent's call that brings what a tool answered is refused"]
