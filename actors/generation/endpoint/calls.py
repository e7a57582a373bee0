"""Tool calls in what a model wrote, by the formats that models are trained on (pure): text to calls with their places in it.

Always true: nothing is written anew. A call names the part of the text it was read from, and what cannot be read is a call with
an error for the model, never an exception. Time is linear in the text, whatever it repeats: no pattern here can be matched from two
places over the same characters. Arguments are plain JSON that every reader takes (plain_json.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, starmap
from typing import Any, NamedTuple

from actors.generation.endpoint import dialects
from actors.generation.endpoint.dialects import texts_of as _texts_of
from actors.generation.endpoint.plain_json import end_of, read

MOST_CALLS = 64  # of one answer that are read; a policy that repeats itself opens thousands
MOST_NAMED = 5  # of its faults that a call is told

Tool = Mapping[str, Any]
"""A tool as the OpenAI interface describes it: {"type": "function", "function": {"name", "description", "parameters"}}."""


class ToolCall(NamedTuple):
    """One call in text[start:end]. `error`: why it cannot be read, for the model; then name and arguments may be empty."""

    start: int
    end: int
    name: str = ""
    arguments: dict[str, Any] = {}
    error: str = ""


_HERMES = re.compile(r"<tool_call>(?P<body>.*?)(?:</tool_call>|\Z)", re.DOTALL)
_DEEPSEEK = re.compile("<｜tool▁call▁begin｜>(?P<body>.*?)(?:<｜tool▁call▁end｜>|\\Z)", re.DOTALL)
_DEEPSEEK_FRAME = re.compile("<｜tool▁calls▁(?:begin|end)｜>")
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_FENCE = "```"
_PYTHON_TAG = "<|python_tag|>"
_BLANKS = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*;\s*")


def _hermes(text: str, _tools: Sequence[Tool]) -> Iterator[ToolCall]:
    for found in _HERMES.finditer(text):
        yield _from_json(found["body"], found.start(), found.end(), "arguments")


def _glm(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    for found in _HERMES.finditer(text):
        name, mark, _ = found["body"].partition(_KEY)
        name = name.strip()
        texts = _texts_of(name, tools)
        pairs = list(_pairs(found["body"]))
        arguments = {key.strip(): value if key.strip() in texts else _value(value) for key, value in pairs}
        error = "" if re.fullmatch(r"[\w.-]+", name) and bool(mark) == bool(pairs) else f"not a call: {_short(found['body'])}"
        yield ToolCall(found.start(), found.end(), name, arguments, error)


def _deepseek(text: str, _tools: Sequence[Tool]) -> Iterator[ToolCall]:
    for found in _DEEPSEEK.finditer(text):
        head, mark, tail = found["body"].partition("<｜tool▁sep｜>")
        name = head.strip()
        if name == "function":  # V3: kind, name on the same line, then fenced JSON; V3.1: name, then JSON
            name, _, tail = tail.partition("\n")
        _, fenced, inside = tail.partition(_FENCE)
        body = (inside.removeprefix("json").partition(_FENCE)[0] if fenced else tail).strip()
        if not mark:
            yield ToolCall(found.start(), found.end(), error=f"no name before the arguments in {_short(found['body'])}")
        else:
            yield _with_arguments(name.strip(), body, found.start(), found.end())


def _llama3(text: str, _tools: Sequence[Tool]) -> Iterator[ToolCall]:
    at = text.find(_PYTHON_TAG)
    begin = at if at >= 0 else len(text) - len(text.lstrip())
    at = at + len(_PYTHON_TAG) if at >= 0 else begin
    tagged = at > begin
    if not tagged and not re.match(r'\{\s*"(name|type|function)"', text[at:]):
        return  # an answer that is no call
    while at < len(text):
        end = end_of(text, at)
        yield _from_json(text[at:end], begin, end, "parameters")
        rest = _SEPARATOR.match(text, end)
        if rest is None:
            return
        begin, at = end, rest.end()


FORMATS: Mapping[str, Callable[[str, Sequence[Tool]], Iterator[ToolCall]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "deepseek": _deepseek,
    "glm": _glm,
    "qwen3_coder": lambda text, tools: starmap(ToolCall, dialects.qwen3_coder(text, tools)),
    "gpt-oss": lambda text, tools: starmap(ToolCall, dialects.gpt_oss(text, tools)),
    "lfm2": lambda text, tools: starmap(ToolCall, dialects.lfm2(text, tools)),
}
"""By name. hermes is also what Qwen2.5 and Qwen3 write."""
OPENINGS = {"hermes": "<tool_call>", "glm": "<tool_call>", "llama3": _PYTHON_TAG, "deepseek": "<｜tool▁calls▁begin｜>"}
OPENINGS |= {"qwen3_coder": "<tool_call>", "gpt-oss": "<|start|>assistant to=", "lfm2": dialects.LISTED}
"""Where the text of an answer ends and its calls begin."""


def parse(text: str, kind: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
    """The calls in `text`, in order; behind MOST_CALLS of them one that says so. `tools`: those on offer; they tell texts from
    numbers where a format does not."""
    calls = list(islice(FORMATS[kind](text, tools), MOST_CALLS + 1))
    if len(calls) > MOST_CALLS:
        error = f"an answer has at most {MOST_CALLS} calls; the others were not made"
        calls[-1] = ToolCall(calls[-1].start, len(text), error=error)
    return calls


def without(text: str, calls: Sequence[ToolCall]) -> str:
    """What `text` says beside its calls, without blanks around it."""
    parts, at = [], 0
    for call in calls:
        parts.append(text[at : call.start])
        at = call.end
    return _DEEPSEEK_FRAME.sub("", "".join((*parts, text[at:]))).strip()


def fault(call: ToolCall, tools: Sequence[Tool]) -> str:
    """Why this call cannot be made, for the model; empty = it can."""
    names = [tool["function"]["name"] for tool in tools]
    if call.error:
        return f"error: the call cannot be read: {call.error}"
    if call.name not in names:
        return f"error: there is no tool {_short(call.name)}. Tools: {', '.join(names) or 'none'}."
    schema = next(tool["function"].get("parameters", {}) for tool in tools if tool["function"]["name"] == call.name)
    missing = [name for name in schema.get("required", ()) if name not in call.arguments]
    unknown = [name for name in call.arguments if name not in schema.get("properties", call.arguments)]
    if missing or unknown:
        said = [f"argument {name!r} is missing" for name in missing] + [f"there is no argument {_short(name)}" for name in unknown]
        more = [f"and {len(said) - MOST_NAMED} further faults"] if len(said) > MOST_NAMED else []
        return f"error: {call.name}: {', '.join(said[:MOST_NAMED] + more)}."
    return ""


def _from_json(body: str, start: int, end: int, key: str) -> ToolCall:
    try:
        value = read(body)
    except ValueError as error:
        return ToolCall(start, end, error=f"{error} in {_short(body)}")
    function = value.get("function") if isinstance(value, dict) else None
    value = function if isinstance(function, dict) else value
    if not isinstance(value, dict) or not isinstance(value.get("name", function), str):
        return ToolCall(start, end, error=f"no name in {_short(body)}")
    name = str(value.get("name", function))
    arguments = value.get(key, value.get("arguments", value.get("parameters", {})))
    if isinstance(arguments, str):
        return _with_arguments(name, arguments, start, end)
    if not isinstance(arguments, dict):
        return ToolCall(start, end, name, error=f"the arguments of {_short(name)} are no object: {_short(body)}")
    return ToolCall(start, end, name, arguments)


def _with_arguments(name: str, body: str, start: int, end: int) -> ToolCall:
    try:
        arguments = read(body or "{}")
    except ValueError as error:
        return ToolCall(start, end, name, error=f"{error} in {_short(body)}")
    if not isinstance(arguments, dict):
        return ToolCall(start, end, name, error=f"the arguments of {_short(name)} are no object: {_short(body)}")
    return ToolCall(start, end, name, arguments)


def _value(text: str) -> Any:
    try:
        return read(text)
    except ValueError:
        return text.strip()


def _pairs(body: str) -> Iterator[tuple[str, str]]:
    """Keys and values of a call of GLM's, as they stand; a key without a value is passed over."""
    at = body.find(_KEY)
    while at >= 0 and (key_end := body.find(_KEY_END, at)) >= 0:
        opened = _BLANKS.match(body, key_end + len(_KEY_END))
        value = opened.end() if opened is not None else key_end
        if not body.startswith(_VALUE, value):
            at = body.find(_KEY, key_end)
            continue
        if (value_end := body.find(_VALUE_END, value)) < 0:
            return
        yield body[at + len(_KEY) : key_end], body[value + len(_VALUE) : value_end]
        at = body.find(_KEY, value_end)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
