"""Tool calls in formats that are no JSON in tags (pure): each call as (start, end, name, arguments, error), as `calls.Call` has it.

One pass over the text each: what a model writes is long and may be anything.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.generation.endpoint.plain_json import read

Found = tuple[int, int, str, dict[str, Any], str]
OPENS, CLOSES = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_BLANKS = re.compile(r"\s*")
_NEXT = re.compile(r"<tool_call>|<function=")
_MESSAGE = "<|message|>"
_BEHIND_MESSAGE = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
LISTED, LISTED_END = "<|tool_call_start|>", "<|tool_call_end|>"
MOST_LISTED = 10_000  # characters of a list of calls, which Python's parser reads by recursion
_NAMES = {"true": True, "false": False, "null": None}


def qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    """<function=f> <parameter=x> value </parameter> </function>, in <tool_call> tags or without: Qwen3.5's and Nemotron 3's too."""
    at, last = 0, text.rfind(_PARAMETER_END)
    while (found := _NEXT.search(text, at)) is not None:
        start, at = found.start(), _skipped(text, found.end() if found[0] == OPENS else found.start())
        if not text.startswith(_FUNCTION, at):
            end = text.find(CLOSES, at)
            at = len(text) if end < 0 else end + len(CLOSES)
            yield start, at, "", {}, f"no {_FUNCTION}name> in {_short(text[start:at])}"
            continue
        head = text.find(">", at)
        name = text[at + len(_FUNCTION) : head].strip() if head >= 0 else ""
        at, arguments, error = _parameters(text, head + 1 if head >= 0 else len(text), last, texts_of(name, tools))
        after = _skipped(text, at)
        at = after + len(CLOSES) if text.startswith(CLOSES, after) else at
        if not re.fullmatch(r"[\w.-]+", name):
            error = f"no name in {_short(text[start:at])}"
        yield start, at, name if not error else "", arguments, error


def _parameters(text: str, at: int, last: int, texts: set[str]) -> tuple[int, dict[str, Any], str]:
    """The end of a function's body that begins at `at`, its arguments, and what is wrong with it. `last`: where the last parameter
    of the text ends; behind it none is looked for."""
    arguments: dict[str, Any] = {}
    while True:
        at = _skipped(text, at)
        if text.startswith(_FUNCTION_END, at):
            return at + len(_FUNCTION_END), arguments, ""
        head = text.find(">", at)
        end = text.find(_PARAMETER_END, head) if 0 <= head < last else -1
        if not text.startswith(_PARAMETER, at) or end < 0:
            closing = text.find(_FUNCTION_END, at)
            error = f"no {_PARAMETER}name> or {_FUNCTION_END} at {_short(text[at : at + 90])}"
            return len(text) if closing < 0 else closing + len(_FUNCTION_END), arguments, error
        name, value = text[at + len(_PARAMETER) : head].strip(), text[head + 1 : end]
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[name] = value if name in texts else _value(value)
        at = end + len(_PARAMETER_END)


def gpt_oss(text: str, _tools: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    """A message to=functions.f whose text is the arguments as JSON."""
    at = 0
    while (mark := text.find(_MESSAGE, at)) >= 0:
        recipient = _RECIPIENT.search(text, at, mark)
        behind = _BEHIND_MESSAGE.search(text, mark)
        end = behind.start() if behind is not None else len(text)
        if recipient is not None:
            body = text[mark + len(_MESSAGE) : end].strip()
            yield (at, behind.end() if behind is not None else end, recipient[1], *_table(body, recipient[1]))
        at = behind.end() if behind is not None else end


def lfm2(text: str, _tools: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    """[f(x="1"), g()] as Python writes calls, between tags of its own. The text is parsed, nothing is executed."""
    at = 0
    while (start := text.find(LISTED, at)) >= 0:
        end = text.find(LISTED_END, start)
        body, at = (text[start + len(LISTED) :], len(text)) if end < 0 else (text[start + len(LISTED) : end], end + len(LISTED_END))
        for name, arguments, error in _listed(body):
            yield start, at, name, arguments, error


def _listed(body: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    try:
        if len(body) > MOST_LISTED:
            raise ValueError(f"more than {MOST_LISTED} characters")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Python thinks of "\d": a line of the log for each
            written = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield "", {}, f"{' '.join(str(error).split())} in {_short(body)}"
        return
    for call in written.elts if isinstance(written, ast.List) else [written]:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            yield "", {}, f"not a call with named arguments: {_short(body)}"
            continue
        try:
            name = ast.unparse(call.func)
            yield name, {str(word.arg): _literal(word.value) for word in call.keywords}, ""
        except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError) as error:
            yield "", {}, f"{' '.join(str(error).split())} in {_short(body)}"


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    return read(json.dumps(ast.literal_eval(node), allow_nan=False))  # what is no JSON, sets or bytes, is refused


def _table(body: str, name: str) -> tuple[dict[str, Any], str]:
    try:
        value = read(body or "{}")
    except ValueError as error:
        return {}, f"{error} in {_short(body)}"
    return (value, "") if isinstance(value, dict) else ({}, f"the arguments of {name} are no object: {_short(body)}")


def texts_of(name: str, tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Arguments of a tool that are texts by its description."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties") or {}
            return {key for key, schema in properties.items() if isinstance(schema, dict) and schema.get("type") == "string"}
    return set()


def _value(text: str) -> Any:
    try:
        return read(text)
    except ValueError:
        return text


def _skipped(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found is not None else at


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
