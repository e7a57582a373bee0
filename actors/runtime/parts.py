"""The parts of a row (pure): prompt, label, metadata, tools and pictures, by the settings that name their columns.

Data sets write the same thing in several ways: messages as a list or as its JSON text, with `role` and `content` or, as ShareGPT
has them, `from` and `value`; a label as text, number, bytes or a list of one. Always true: a value is either read as what it
means or refused with its row; none is turned into the text of a Python object.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from actors.runtime.labels import LABEL_IS_JSON
from actors.runtime.rows import BadData, unpadded, value_at
from actors.runtime.vision import place

Message = dict[str, Any]
KNOWN = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
ROLES = dict(zip(KNOWN, KNOWN, strict=True)) | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
}
"""Roles as data sets write them, and as chat templates know them."""
WHOLE = 1 << 53  # up to here a float holds every whole number


class BadRow(BadData):
    """A row that would be read as something else than it is. `setting` and `key`: what led to the value."""

    def __init__(self, setting: str, key: str, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy or f"Set --{setting.replace('_', '-')}.")
        self.setting, self.key = setting, key


class RowParts(NamedTuple):
    """A row's parts, none of them tokenised. `tools`: descriptions for the template, None without a column of them."""

    prompt: Any
    label: str
    metadata: dict[str, Any]
    tools: list[Any] | None
    pictures: Sequence[Any] = ()  # as the data has them


class _Odd(Exception):
    """A value that is not what it must be: the setting that led to it, the problem, and the remedy where it is not another column.
    KEY stands for the column."""

    def __init__(self, setting: str, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.setting, self.problem, self.remedy = setting, problem, remedy


_CHAT = "These are chat messages: set --apply-chat-template, or give the text that the model shall see."
_LABEL = "Name a part of it (--label-key reward_model.ground_truth), or keep it in the metadata and score with --custom-rm-path."
_MEND = "Mend the row, or leave it out."
_WHAT = {"input_key": "prompt", "label_key": "label", "metadata_key": "metadata"}
_NO_PICTURES = object()


MAY_LACK = {"metadata_key": "metadata", "tool_key": "tools"}
"""Columns that a row may lack though they are named: Miles names these where nothing is said."""


def parts_of(
    row: Any,
    keys: Mapping[str, str | None],
    *,
    chat: bool,
    strict: bool = False,
    supervised: bool = False,
    padded: bool = False,
    objects: bool = False,
) -> RowParts:
    """The parts of a row by the settings that name them. `strict`: a named column must be there, but for `MAY_LACK`; else only that
    of the prompt, and one with a dot. `supervised`: the prompt is a whole dialogue, or a text whose label is its response.
    `padded`: as `Placed` has it; the model shall not be shown other tools' arguments as null. `objects`: a label may be an object
    or a list, and travels as JSON. Raises BadRow.

    >>> parts_of({"prompt": "1+1=", "label": 2.0}, {"input_key": "prompt", "label_key": "label"}, chat=False).label
    '2'
    """
    found: dict[str, Any] = {}
    for setting, key in keys.items():
        try:
            found[setting] = value_at(row, key) if key else None
        except KeyError:
            required = strict and MAY_LACK.get(setting) != key
            if required or setting == "input_key" or (setting == "label_key" and "." in (key or "")):
                has = f"(it has {', '.join(map(str, row))})" if isinstance(row, dict) else f", it is {kind_of(row)}"
                raise BadRow(setting, str(key), f"it has no key {key!r} {has}") from None
            found[setting] = None
    try:
        shown = found.get("multimodal_keys") if keys.get("multimodal_keys") else _NO_PICTURES
        prompt, pictures = _prompt(found["input_key"], shown, chat=chat, supervised=supervised, padded=padded)
        given, known = found.get("label_key"), {}
        if objects and isinstance(given, list | dict):
            label, known = _label_as_json(given), {LABEL_IS_JSON: True}
        else:
            label = _label(given)
        if supervised and isinstance(prompt, str) and not label:
            raise _Odd("label_key", "supervised training needs a response: there is no label", "Set --label-key.")
        metadata = _table(found.get("metadata_key"))
        tools = _tools(found.get("tool_key"), chat=chat, padded=padded)
        metadata |= ({"tools": tools} if tools else {}) | known
        for setting, part in (("input_key", prompt), ("label_key", label), ("metadata_key", metadata)):
            try:
                msgspec.msgpack.encode(part)
            except (
                TypeError,
                ValueError,
                OverflowError,
                RecursionError,
            ) as error:  # half of a surrogate pair is no text
                raise _Odd(setting, f"the {_WHAT[setting]} KEY cannot be sent: {error}", _MEND) from error
    except _Odd as odd:
        key = str(keys.get(odd.setting) or "")
        raise BadRow(odd.setting, key, odd.problem.replace("KEY", f"under {key!r}"), odd.remedy) from odd
    return RowParts(prompt, label, metadata, tools, pictures)


def kind_of(value: object) -> str:
    """What a value is, for a message to a person."""
    return "null" if value is None else f"a {type(value).__name__} ({str(value)[:60]!r})"


def has_text(content: Any) -> bool:
    """Whether a message's content says anything: a text, or parts of which one is a text or a picture."""
    if isinstance(content, list):
        return any(isinstance(p, dict) and (p.get("type") == "image" or str(p.get("text") or "").strip()) for p in content)
    return isinstance(content, str) and bool(content.strip())


def unseen(messages: Sequence[Mapping[str, Any]], rendered: str, template: str) -> str:
    """What is wrong with a rendering of messages: a role that the template does not know, or a text that is not in it; empty where
    all that is said is shown. The thinking of earlier turns may be left out, and results of tools written otherwise."""
    close = ""
    for number, message in enumerate(messages, 1):
        role, content = str(message["role"]), message.get("content")
        if role not in KNOWN and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
            why = f"message {number} has the role {role!r}, which the chat template does not know"
            return f"{why}. Write one of {', '.join(KNOWN)}."
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        for part in parts if role not in ("tool", "function", "ipython") else ():
            text = str(part.get("text") or "") if part.get("type") == "text" else ""
            said = (text.rpartition("</think>")[2] if role == "assistant" else text).strip()
            if said in rendered or json.dumps(said, ensure_ascii=False)[1:-1] in rendered or json.dumps(said)[1:-1] in rendered:
                continue
            close = close or " ".join(rendered.split())  # a template may lay out a text's lines anew
            if " ".join(said.split()) not in close:
                what = f"message {number}, of {role}, is not in what the chat template made of it: {said[:60]!r}"
                return f"{what}. Mend the row, or give a template that shows it (--chat-template-path)."
    return ""


def _prompt(given: Any, column: Any, *, chat: bool, supervised: bool, padded: bool) -> tuple[Any, Sequence[Any]]:
    """A text, or messages with `role` and `content`; and the pictures that they show, by the `column` of these."""
    prompt, pictures = _text(given, "input_key", "prompt"), list[Any]()
    messages = _messages(prompt)
    if messages is not None and padded:
        messages = [_unpadded(message) for message in messages]
    if column is not _NO_PICTURES:
        shown = messages
        if shown is None and isinstance(prompt, str) and prompt.strip():
            shown = [{"role": "user", "content": prompt}]
        if shown is not None:
            shown, pictures = place(shown, column)
            messages = shown if pictures else messages
    if messages is None:
        if isinstance(prompt, str) and prompt.strip():
            return prompt, pictures
        raise _Odd("input_key", f"the prompt is {kind_of(prompt)}, not a non-empty string or chat messages (role, content)")
    if not chat:
        raise _Odd("input_key", f"the prompt is {kind_of(given)}, not text", _CHAT)
    for number, message in enumerate(messages, 1):
        _check(message, number, ("text", "image") if pictures else ("text",))
    if messages[-1]["role"] == "assistant" and not supervised:
        raise _Odd("input_key", "the last message is the assistant's, so there is nothing to answer", "Leave it out.")
    return messages, pictures


def _messages(prompt: Any) -> list[Message] | None:
    """Chat messages, of their JSON text or of ShareGPT's form too; None where the prompt is none of these."""
    if isinstance(prompt, str) and prompt.lstrip().startswith("[") and ('"role"' in prompt or '"from"' in prompt):
        try:
            prompt = json.loads(prompt)
        except (ValueError, RecursionError):
            return None
    if not (isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)):
        return None
    if all("role" in message for message in prompt):
        return [message | {"role": _role(message["role"])} for message in prompt]
    if all({"from", "value"} <= message.keys() for message in prompt):
        return [{"role": _role(message["from"]), "content": message["value"]} for message in prompt]
    return None


def _role(role: Any) -> Any:
    return ROLES.get(role, role) if isinstance(role, str) else role


def _unpadded(message: Message) -> Message:
    """A message without the keys that only others have; what it says stays, be it null."""
    said = {key: value for key, value in message.items() if value is not None or key == "content"}
    return said | {"tool_calls": unpadded(said["tool_calls"])} if "tool_calls" in said else said


def _check(message: Message, number: int, kinds: Sequence[str]) -> None:
    """Raises _Odd for a message of which the model would not be shown what it says."""
    role, content = message["role"], message.get("content")
    if not (isinstance(role, str) and role):
        raise _Odd("input_key", f"message {number} has the role {kind_of(role)}", f"Write one of {', '.join(KNOWN)}.")
    for part in content if isinstance(content, list) else ():
        if not (isinstance(part, dict) and part.get("type") in kinds):
            remedy = """Name the pictures' column: --multimodal-keys '{"image": "images"}'."""
            raise _Odd("input_key", f"a message holds {kind_of(part)}; prompts are text, without pictures or sound", remedy)
    if not isinstance(content, str | list | None):
        raise _Odd("input_key", f"message {number}, of {role}, has the content {kind_of(content)}, not text", _MEND)
    if role == "user" and not has_text(content):
        said = kind_of(content) if "content" in message else f"none (it has {', '.join(message)})"
        raise _Odd("input_key", f"message {number}, of {role}, has no text: its content is {said}", _MEND)


def _label(given: Any) -> str:
    """A label as text: a whole number that a table of numbers made a float is written as one, what is missing is empty."""
    label: Any = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
    if isinstance(label, list | tuple | dict):
        raise _Odd("label_key", f"the label KEY is {kind_of(label)}, not text", _LABEL)
    label = _text(label, "label_key", "label KEY")
    if isinstance(label, float | Decimal):
        if math.isnan(label):
            return ""
        if not math.isfinite(label):
            raise _Odd("label_key", f"the label KEY is {label}, which no answer equals", _MEND)
        if abs(float(label)) < WHOLE and label == int(label):
            return str(int(label))
        return format(label.normalize(), "f") if isinstance(label, Decimal) else str(label)
    return "" if label is None else str(label)


def _label_as_json(given: Any) -> str:
    """A label that a function of the user's reads as the row has it."""
    try:
        return json.dumps(given, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Odd("label_key", f"the label KEY is no JSON: {error}", "Keep plain values in it.") from error


def _table(given: Any) -> dict[str, Any]:
    """Metadata: a table, or its JSON text."""
    table = _json(_text(given, "metadata_key", "metadata KEY"), "{")
    if not isinstance(table, dict | None):
        raise _Odd("metadata_key", f"the metadata KEY is {kind_of(table)}, not an object")
    return dict(table or {})


def _tools(given: Any, *, chat: bool, padded: bool) -> list[Any] | None:
    """Descriptions of tools: a list, or its JSON text."""
    tools = _json(_text(given, "tool_key", "tools KEY"), "[")
    if padded and not isinstance(given, str | bytes):
        tools = unpadded(tools)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _Odd("tool_key", f"the tools KEY are {kind_of(tools)}, not a list of objects")
    if tools and not chat:
        raise _Odd("tool_key", "tools are shown by a chat template", "Set --apply-chat-template.")
    return tools


def _json(given: Any, opening: str) -> Any:
    """The value that a JSON text holds, if it begins so; else what was given, and None for an empty text."""
    if not isinstance(given, str):
        return given
    if not given.strip():
        return None
    if not given.lstrip().startswith(opening):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given


def _text(given: Any, setting: str, what: str) -> Any:
    """Bytes, as Spark and DuckDB write text into Parquet, as the text that they are."""
    if not isinstance(given, bytes):
        return given
    try:
        return given.decode()
    except UnicodeDecodeError:
        raise _Odd(setting, f"the {what} is {kind_of(given)}, bytes that are no UTF-8 text", "Save the column as text.") from None
