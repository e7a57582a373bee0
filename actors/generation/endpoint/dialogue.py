"""An episode's dialogues as a client of messages sees them, kept as the tokens they are.

Always true: what the model made stays as it was made. A message that we returned is known again by what it says and who made it
call what, and stands for its recorded tokens; a call whose messages go on behind such a message appends to those tokens, any other
opens a new trajectory, counted with its reason. A token of the model is trained in one trajectory, and is context in others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from actors.generation.endpoint.plain_json import MOST_DEPTH, depth_of
from actors.generation.rollouts.session import Segment, Trajectory, env
from actors.runtime.chat import Chat, NotAppendOnly
from actors.runtime.template import as_table

Message = dict[str, Any]
Opened = Literal["first", "rewritten", "template", "tools", "beside"]
"""Why a trajectory was opened: it is the first · a message that we returned was changed or left out · the template renders the
prompt otherwise once more follows · the tools on offer are others · a dialogue of its own, as of a sub-agent."""

KEPT = ("role", "content", "tool_calls", "tool_call_id", "name")


class BadMessages(Exception):
    """What a client sent are no messages of the OpenAI interface."""


class DialogueTurn:
    """One answer of the model: `segment` behind `context`, the tokens behind `parent`'s (of a root: the whole prompt)."""

    def __init__(
        self, parent: DialogueTurn | None, context: list[int], segment: Segment, tools: str, messages: list[Message]
    ) -> None:
        self.parent, self.context, self.segment, self.tools, self.messages = parent, context, segment, tools, messages
        self.children = 0

    @property
    def path(self) -> list[DialogueTurn]:
        """From the root to here."""
        found = [self]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        """All to its end, put together anew: an episode of many turns would hold them as often as it has turns."""
        return [token for turn in self.path for part in (turn.context, turn.segment.tokens) for token in part]


class CallPlace:
    """Where the answer to a call goes. `tokens`: all that the model sees. `hashed`: of `messages`."""

    def __init__(self, parent: DialogueTurn | None, context: list[int], tools: str, messages: list[Message], hashed: int) -> None:
        self.parent, self.context, self.tools, self.messages, self.hashed = parent, context, tools, messages, hashed
        self.tokens = [*(parent.tokens if parent is not None else ()), *context]


class Dialogues:
    """All dialogues of one episode. `stops`: ids that end a turn."""

    def __init__(self, chat: Chat, stops: Collection[int] = ()) -> None:
        self._chat, self._stops = chat, stops
        self._turns: list[DialogueTurn] = []
        self._ended_by: dict[int, DialogueTurn] = {}  # hash of a dialogue that ends with our message -> the turn
        self.opened: Counter[Opened] = Counter()
        self.branches = 0
        """Answers beside another one to the same history: asked for (`n`), or asked for again."""

    def place(self, messages: Sequence[Message], tools: Sequence[Any]) -> CallPlace:
        """Where an answer to `messages` (as `plain` gives them) goes. Raises BadChat."""
        offered = json.dumps(list(tools), sort_keys=True) if tools else ""
        hashes = _hashes(messages)
        turn = self._known(messages, hashes)
        why: Opened = "first"
        if turn is not None and turn.tools == offered:
            said = [*turn.messages, *messages[len(turn.messages) :]]  # as we returned it: clients trim
            try:
                behind = self._chat.follow(turn.messages, said, turn.segment.tokens, tools, stops=self._stops)
                return CallPlace(turn, behind, offered, said, hashes[-1])
            except NotAppendOnly:
                why = "template"
        elif turn is not None:
            why = "tools"
        elif self._turns:
            why = "rewritten" if any(message["role"] == "assistant" for message in messages) else "beside"
        place = CallPlace(None, self._chat.render(messages, tools), offered, list(messages), hashes[-1])
        self.opened[why] += 1
        return place

    def take(self, place: CallPlace, segment: Segment, reply: Message) -> None:
        """The answer there: what the model made, and the message that the client gets for it."""
        said = plain([reply])[0]
        turn = DialogueTurn(place.parent, place.context, segment, place.tools, [*place.messages, said])
        if place.parent is not None:
            self.branches += place.parent.children > 0
            place.parent.children += 1
        self._turns.append(turn)
        self._ended_by[_hashes([said], place.hashed)[0]] = turn  # the dialogue may be long, and this is the loop

    def _known(self, messages: Sequence[Message], hashes: Sequence[int]) -> DialogueTurn | None:
        """The last of our turns that `messages` go on behind."""
        for index in range(len(messages) - 2, -1, -1):
            if messages[index]["role"] == "assistant" and (turn := self._ended_by.get(hashes[index])) is not None:
                return turn
        return None

    def trajectories(self) -> list[Trajectory]:
        """One for each dialogue, in the order of their last answers."""
        trained: set[int] = set()
        found = []
        for leaf in self._turns:
            if leaf.children:
                continue
            path = leaf.path
            segments: list[Segment] = []
            for turn in path:
                if turn.parent is not None:
                    segments.append(env(turn.context))
                segments.append(env(turn.segment.tokens) if id(turn) in trained else turn.segment)
                trained.add(id(turn))
            found.append(Trajectory(path[0].context, segments, response=leaf.messages[-1]["content"]))
        return found


def plain(messages: Any) -> list[Message]:
    """Messages in one form: text contents, the arguments of calls as tables where they are JSON, nothing that we do not render.
    Raises BadMessages."""
    if not isinstance(messages, list) or not messages:
        raise BadMessages("'messages' must be a list with at least one message")
    return [_plain(message, index) for index, message in enumerate(messages)]


def _plain(message: Any, index: int) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadMessages(f"messages[{index}] is no table with a 'role'")
    kept = {key: message[key] for key in KEPT if message.get(key) is not None}
    content = kept.get("content", "")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadMessages(f"messages[{index}] has content that is no text; only text can be rendered")
        content = "".join(parts)  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise BadMessages(f"messages[{index}].content is a {type(content).__name__}, not text")
    kept["content"] = content
    if calls := kept.pop("tool_calls", None):
        try:
            made = [
                {"id": call.get("id", ""), "type": "function", "function": {
                    "name": call["function"]["name"], "arguments": as_table(call["function"].get("arguments", "{}"))}}
                for call in calls
            ]  # fmt: skip
        except (TypeError, KeyError, AttributeError) as error:
            raise BadMessages(f"messages[{index}].tool_calls: {type(error).__name__}: {error}") from error
        kept["tool_calls"] = made
    if depth_of(kept) > MOST_DEPTH:  # templates and encoders walk it by recursion
        raise BadMessages(f"messages[{index}] has more than {MOST_DEPTH} tables and lists in each other")
    return kept


def _hashes(messages: Sequence[Message], before: int = 0) -> list[int]:
    """One for each beginning of the dialogue, which goes on behind what has the hash `before`."""
    found: list[int] = []
    for message in messages:
        said = dict(message, content=message["content"].strip())
        before = hash((before, json.dumps(said, sort_keys=True)))
        found.append(before)
    return found
