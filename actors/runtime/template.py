"""What a chat template does, found by rendering small dialogues with it: no template is known here by its name or its text.

Always true: a message of the assistant is located by what changes in the rendering when a stand-in takes the place of its text,
so that nothing depends on how the template writes the message itself.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from actors.runtime.run import Refused

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Any] | None, bool], str]
"""(messages, tools, opened) -> text. Raises BadChat."""
Split = Callable[[str], list[tuple[int, int, int]]]
"""Text to its tokens: (id, begin, end) with places in the text."""
Shape = Literal["text", "calls"]
"""Of an assistant's message: whether it makes calls, where the template renders calls at all."""

ASKED = {"role": "user", "content": "?"}
_NONCE = secrets.token_hex(8)  # no message can hold it; it is never part of what is given out
MARK, OTHER = f"\ue000{_NONCE}\ue000", f"\ue001{_NONCE}\ue001"
FIXED = ("role", "content", "tool_calls", "tool_call_id", "name")


class BadChat(Refused):
    """The template cannot take these messages. As an actor's start-up: refused; in a dialogue: of this dialogue."""


class AnswerEnding(NamedTuple):
    """What a template puts behind the body of an assistant's message; of calls, behind their last argument."""

    alone: tuple[int, ...]  # ids of it where the message is the last one
    common: int  # how many of them stand there in any case
    text: str  # of those
    end: int  # place of the end-of-turn token among the ids of a longer dialogue; -1: there is none
    within: int  # characters of `text` up to the end of that token
    stop: int  # id that a model trained on this template ends the turn with; -1: that is no token of its own
    next: str  # the token right behind `text` once others follow: without an end token the next role; "": it is none of its own


class Template:
    """`marks`: ids of the tokenizer's added tokens, each with its text; `special`: those of them that are special."""

    def __init__(self, render: Render, split: Split, marks: Mapping[int, str], special: Collection[int]) -> None:
        self._render, self.split, self.marks, self.special = render, split, marks, special
        self._endings: dict[Shape, AnswerEnding] = {}
        self._openings: dict[bool, str] = {}
        self._cuts: dict[bool, list[int]] = {}

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None, opened: bool) -> str:
        """The rendering, with each call's arguments in the form that the template wants. Raises BadChat."""
        if not self.tools_heard and any(message.get("role") == "tool" for message in messages):
            raise BadChat("the chat template has no tool role: it does not render what a tool answers")
        return self._render([self._put(message) for message in messages], tools, opened)

    def _put(self, message: Message) -> Message:
        """Calls as the OpenAI interface may write them, in the one form that the template takes: data sets pad their columns with
        nulls, and give arguments as a table or as its JSON text."""
        if "tool_calls" not in message:
            return self._said(message)
        rest = self._said({key: value for key, value in message.items() if key != "tool_calls"})
        if not (calls := message["tool_calls"]):
            return rest
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise BadChat(f"tool_calls of a message are no list of tables: {str(calls)[:60]!r}")
        return {**rest, "content": rest.get("content") or "", "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        value: Any = as_table(function["arguments"])
        if self.arguments == "text" and not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False)
        return {"type": "function", **call, "function": {**function, "arguments": value}}

    def _said(self, message: Message) -> Message:
        """With its content in the form that the template takes: a text, or a list of parts."""
        content = message.get("content")
        if isinstance(content, str) and self.contents == "parts":
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and self.contents == "text":
            texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
            if all(isinstance(text, str) for text in texts):
                return {**message, "content": "".join(map(str, texts))}
        return message

    @cached_property
    def contents(self) -> Literal["text", "parts", "both"]:
        """The forms of a message's content that this template renders as they are."""
        forms: tuple[Any, ...] = (MARK, [{"type": "text", "text": MARK}])
        right = []
        for form in forms:
            try:
                found = self._render([{"role": role, "content": form} for role in ("user", "assistant")], None, False)
            except BadChat:
                found = ""
            right.append(found.count(MARK) > 1 and "'text': " not in found)
        return "both" if all(right) else "parts" if right[1] else "text"

    @cached_property
    def arguments(self) -> Literal["table", "text"]:
        """The form of a call's arguments that this template renders as they are. A table, where both are right or none is shown."""
        forms: tuple[Any, ...] = ({"k": MARK}, json.dumps({"k": MARK}, ensure_ascii=False))
        table, text = (self._attempt([ASKED, calling("f", form)]) for form in forms)
        if text is None or MARK not in text:
            return "table"
        return "text" if table is None or MARK not in table or f"'k': '{MARK}'" in table else "table"

    @cached_property
    def calls_shown(self) -> bool:
        """Whether calls in `tool_calls` are rendered at all."""
        return MARK in (self._attempt([ASKED, self._put(calling("f", {"k": MARK}))]) or "")

    @cached_property
    def tools_heard(self) -> bool:
        """Whether what a tool answers is rendered."""
        return MARK in (self._attempt([ASKED, self._put(calling("f", {"k": "!"})), told(MARK)]) or "")

    def _attempt(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render([self._said(message) for message in messages], None, False)
        except BadChat:
            return None

    def shape(self, message: Message) -> Shape:
        return "calls" if message.get("tool_calls") and self.calls_shown else "text"

    def behind(self, messages: Sequence[Message], at: int, tools: Sequence[Any] | None, opened: bool) -> str:
        """The rendering behind the body of message `at`. Raises BadChat, also where the body is not rendered at all."""
        return self.around(messages, at, tools, opened)[1]

    def around(self, messages: Sequence[Message], at: int, tools: Sequence[Any] | None, opened: bool) -> tuple[str, str]:
        """The rendering before and behind the body of message `at`. What is before may end with what the model makes itself."""
        one = self._with(messages, at, MARK, tools, opened)
        if MARK in one:
            before, _, after = one.rpartition(MARK)
            return before, after
        other = self._with(messages, at, OTHER, tools, opened)
        if one == other:
            raise BadChat(f"the chat template does not render what message {at + 1}, {shown(messages[at])}, says")
        return one[: same(one, other)], one[len(one) - same(one[::-1], other[::-1]) :]

    def _with(self, messages: Sequence[Message], at: int, mark: str, tools: Sequence[Any] | None, opened: bool) -> str:
        stand_in = self._stand_in(messages[at], mark)
        return self.text([*messages[:at], stand_in, *messages[at + 1 :]], tools, opened)

    def _stand_in(self, message: Message, mark: str) -> Message:
        """The same kind of message with `mark` for all that it says."""
        calls = message.get("tool_calls") if self.shape(message) == "calls" else None
        content = message.get("content")
        found = {key: mark if key not in FIXED and value and isinstance(value, str) else value for key, value in message.items()}
        if content or not calls:
            found["content"] = [{"type": "text", "text": mark}] if isinstance(content, list) else mark
        found.pop("tool_calls", None)
        if calls:
            found["tool_calls"] = [_renamed(call, {"k": mark}) for call in calls]
        return found

    def ending(self, shape: Shape) -> AnswerEnding:
        """Raises BadChat."""
        if shape not in self._endings:
            self._endings[shape] = self._ending(shape)
        return self._endings[shape]

    def _ending(self, shape: Shape) -> AnswerEnding:
        said = [ASKED, {"role": "assistant", "content": "!"} if shape == "text" else calling("f", {"k": "!"})]
        alone = self.behind(said, 1, None, False)
        heard = [told("!")] if shape == "calls" else [ASKED]
        ids, then = self.split(alone), self._ids_behind([*said, *heard]) or self._ids_behind([*said, ASKED])
        n = same([one[0] for one in ids], then) if then else len(ids)
        if shape == "text":
            ends = [i for i, one in enumerate(ids[:n]) if one[0] in self.marks]
        else:
            known = self.special if (stop := self.ending("text").stop) < 0 else {*self.special, stop}
            ends = [i for i, one in enumerate(ids[:n]) if one[0] in known]
        text = alone[: ids[n - 1][2]] if n else ""
        end = ends[-1] if ends else -1
        after = next((one for one in then[n : n + 1] if one in self.marks), -1)
        own = next((one[0] for one in ids[n : n + 1] if one[0] in self.marks), -1)  # in its place where the message is the last one
        stop = ids[end][0] if ends else own if own >= 0 else after
        if not ends and after >= 0 and self._ids_behind(said)[n : n + 1] == [after] and after != self._begins:
            end = n  # a token that closes a turn only once others follow, whoever that is
        within = ids[end][2] if ends else len(text)
        if stop < 0 and n:  # a closing in plain words: its first token is taught as the end
            closing = self.ending("text").text if shape == "calls" else text
            at = len(text) - len(closing) if text.endswith(closing) else 0
            end, within = next(((i, one[2]) for i, one in enumerate(ids[:n]) if one[1] >= at), (-1, len(text)))
        return AnswerEnding(tuple(one[0] for one in ids), n, text, end, within, stop, self.marks.get(after, ""))

    def _ids_behind(self, messages: Sequence[Message]) -> list[int]:
        """Ids behind the assistant's message, the second, where the next turn is opened; none where that cannot be rendered."""
        try:
            return [one[0] for one in self.split(self.behind(messages, 1, None, True))]
        except BadChat:
            return []

    @property
    def _begins(self) -> int:
        """The token that a turn begins with, where it is one of its own."""
        return next((one[0] for one in self.split(self.opening())[:1]), -1)

    def opening(self, *, told_before: bool = False) -> str:
        """What the template puts at the end for the assistant's next turn, behind a user or (`told_before`) a tool."""
        if told_before not in self._openings:
            self._openings[told_before] = self._opening([ASKED, calling("f", {"k": "!"}), told("!")] if told_before else [ASKED])
        return self._openings[told_before]

    def _opening(self, messages: Sequence[Message]) -> str:
        try:
            opened, bare = self.text(messages, None, True), self.text(messages, None, False)
        except BadChat:
            return "" if len(messages) == 1 else self.opening()
        if opened.startswith(bare):
            return opened[len(bare) :]
        ids, others = self.split(opened), self.split(bare)
        n = same([one[0] for one in ids], [one[0] for one in others])
        return opened[ids[n][1] :] if n < len(ids) else ""

    def _written(self, told_before: bool) -> list[int]:
        """How many characters of the opening are written in front of an assistant's message, where it is the last one and where
        others follow: the rest of the opening, as the beginning of a thought, is left out there."""
        if told_before not in self._cuts:
            before = [ASKED, calling("f", {"k": "!"}), told(MARK)] if told_before else [{"role": "user", "content": MARK}]
            said = {"role": "assistant", "content": OTHER}
            opening, found = self.opening(told_before=told_before), set[int]()
            parts = self.split(opening)
            for messages, opened in (([*before, said], False), ([*before, said, ASKED], True)):
                try:
                    closing = self.text(before, None, True).rpartition(MARK)[2].removesuffix(opening)
                    lead = self.text(messages, None, opened).partition(OTHER)[0].rpartition(MARK)[2].removeprefix(closing)
                except BadChat:
                    continue
                n = same([one[0] for one in parts], [one[0] for one in self.split(lead)])
                found |= {parts[n - 1][2]} if n else set()
            self._cuts[told_before] = sorted(found)
        return self._cuts[told_before]

    def span(self, messages: Sequence[Message], at: int, whole: str, tools: Sequence[Any] | None, low: int) -> tuple[int, int, str]:
        """Where in `whole`, the rendering of `messages`, the trained part of message `at` begins and ends, and the text of a token
        that ends it and is not there. `low`: where it begins at the earliest. Raises BadChat."""
        message, ending = messages[at], self.ending(self.shape(messages[at]))
        one = self._with(messages, at, MARK, tools, False)
        if whole == one or (message.get("tool_calls") and not self.calls_shown):
            what = "the calls of" if message.get("tool_calls") else "what is said in"
            raise BadChat(f"the chat template does not render {what} message {at + 1}, {shown(message)}, so it cannot be learned")
        changes = same(whole, one)
        body = max(changes, len(whole) - same(whole[::-1], one[::-1]))
        begin = changes
        if message.get("role") == "assistant":
            begin = self._begin(messages, at, whole, tools, low, changes)
        cut = next((n for n in range(len(ending.text), 0, -1) if whole.startswith(ending.text[-n:], body)), 0)
        if 0 <= ending.end < ending.common:
            return begin, body + max(0, cut - (len(ending.text) - ending.within)), ""
        stop = body + cut
        if stop == len(whole):
            return begin, stop, ending.next if message.get("role") == "assistant" else ""
        following = max((text for text in self.marks.values() if whole.startswith(text, stop)), key=len, default="")
        return begin, stop + len(following), ""

    def _begin(self, messages: Sequence[Message], at: int, whole: str, tools: Sequence[Any] | None, low: int, changes: int) -> int:
        """Where the model's part of message `at` begins: behind as much of the opening as is written in history too. `changes`: the
        first place that depends on what it says."""
        behind_tool = at > 0 and messages[at - 1].get("role") == "tool"
        opening, cuts = self.opening(told_before=behind_tool), self._written(behind_tool)
        found = [place + cut for cut in cuts if (place := whole.rfind(opening[:cut], low, changes)) >= 0]
        if found:  # the nearest one: a text may quote an opening
            return max(found)
        if not messages[at].get("tool_calls"):
            return changes
        said = [*messages[:at], {"role": "assistant", "content": MARK}, *messages[at + 1 :]]  # what opens the calls is its own too
        return max(low, same(whole, self.text(said, tools, False)))


def as_text(said: str) -> str:
    """Without halves of surrogate pairs, which JSON can say and no text can hold: they are spelled."""
    return said.encode("utf-8", "backslashreplace").decode()


def as_table(arguments: Any) -> Any:
    """Arguments of a call as a table, where they are its JSON text; else what they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def calling(name: str, arguments: Any, number: str = "") -> Message:
    """An assistant's message that makes one call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": call_id(number), "type": "function", "function": function}]}


def call_id(number: str = "") -> str:
    """Of nine letters and digits, as some templates want it."""
    return f"call{number:0>5}"


def told(content: str, name: str = "f") -> Message:
    """An answer to the one call of `calling`."""
    return {"role": "tool", "name": name, "tool_call_id": call_id(), "content": content}


def _renamed(call: Mapping[str, Any], arguments: Any) -> Mapping[str, Any]:
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": {**function, "arguments": arguments}}
    return {**call, "arguments": arguments}


def shown(message: Message) -> str:
    """For an error."""
    return f"{message.get('role', 'nothing')} {str(message.get('content'))[:60]!r}"


def same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two of one type both begin with. By halves: texts are long, and slices are compared at once."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
