"""Chat messages to token ids, through a model's chat template: for prompts, supervised samples and dialogues that go on.

Always true: what a model made is never tokenised again. A dialogue grows by `follow`, whose ids are put behind the ids that are
there; a template that renders earlier turns otherwise once later ones follow cannot do that, and is refused with the message
that it changed. Messages are tables with `role` and `content` (and `tool_calls`, ...), as the OpenAI interface writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.run import Refused

Message = Mapping[str, Any]
_MARK = "miles-async-mark"


class BadChat(Refused):
    """The template cannot take these messages. As an actor's start-up: refused; in a dialogue: of this dialogue."""


class NotAppendOnly(BadChat):
    """The rendering of more messages does not begin with that of the first ones. `index`: the message that is rendered anew."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index


class Piece(msgspec.Struct, frozen=True):
    """A run of token ids. `made`: the model's own (a body of a trained message with its end token), else context."""

    ids: list[int]
    made: bool


class Chat:
    """The template of the model in `directory`, or the one in the file `template_path`. `kwargs` go to the template."""

    def __init__(self, directory: str, *, template_path: str = "", kwargs: Mapping[str, Any] | None = None) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._kwargs = dict(kwargs or {})
        if template_path:
            try:
                self._tokenizer.chat_template = Path(template_path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadChat(f"--chat-template-path {template_path!r} cannot be read: {error}") from error
        if not self._tokenizer.chat_template:
            raise BadChat(f"the tokenizer in {directory} has no chat template. Give one with --chat-template-path FILE.")
        self._closing: list[int] | None = None

    @property
    def template(self) -> str:
        """The template's own text; of several, all."""
        return str(self._tokenizer.chat_template)

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, opened: bool = True) -> str:
        """The rendering. `opened`: with the opening of the assistant's next turn behind it. Raises BadChat."""
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=opened,
                **self._kwargs,
            )
        except Exception as error:  # a template raises what it likes
            raise BadChat(f"the chat template cannot take the messages: {type(error).__name__}: {error}") from error
        return str(rendered)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, opened: bool = True) -> list[int]:
        """The same as token ids, int. Raises BadChat."""
        return self.encode(self.text(messages, tools, opened=opened))

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; special tokens in it are tokens, none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens shown."""
        return str(self._tokenizer.decode(list(ids)))

    @property
    def closing(self) -> list[int]:
        """Ids that the template puts behind the content of an assistant's message: the end token, often a line break."""
        if self._closing is None:
            shown = self.text([{"role": "user", "content": "1"}, {"role": "assistant", "content": _MARK}], opened=False)
            self._closing = self.encode(shown.rpartition(_MARK)[2])
        return self._closing

    def follow(
        self, old: Sequence[Message], new: Sequence[Message], made: Sequence[int], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Ids to put behind `made`, the ids of the assistant's message that `old` ends with, so that the model answers `new`,
        which begins with `old`: what of the turn's closing `made` lacks, the new messages, the opening. Raises NotAppendOnly."""
        before, after = self.text(old, tools, opened=False), self.text(new, tools)
        if list(new[: len(old)]) != list(old) or not after.startswith(before):
            raise self._changed(old, new, tools)
        closing = self.closing
        here = next((n for n in range(min(len(closing), len(made)), 0, -1) if list(made[-n:]) == closing[:n]), 0)
        return closing[here:] + self.encode(after[len(before) :])

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, roles: Collection[str], last: bool = False
    ) -> list[Piece]:
        """A whole dialogue as pieces, up to its last message of `roles`, whose bodies are `made`. Each piece is tokenised by
        itself, as in generation. `last`: only the last such message is. Raises NotAppendOnly, BadChat."""
        found: list[Piece] = []
        chosen = [i for i, message in enumerate(messages) if message.get("role") in roles]
        at, seen = "", 0
        for i in chosen[-1:] if last else chosen:
            head = self.text(messages[:i], tools, opened=messages[i]["role"] == "assistant") if i else ""
            whole = self.text(messages[: i + 1], tools, opened=False)
            if not head.startswith(at):
                raise self._changed(messages[:seen], messages[:i], tools)
            if not whole.startswith(head):
                says = f"message {i + 1}, {_shown(messages[i])}, is not rendered behind the opening of a turn, {head[-40:]!r}"
                raise NotAppendOnly(i, f"the chat template is not append-only: {says}.")
            body = self.encode(whole[len(head) :])
            rest = len(self.closing) - 1  # behind the end token
            ended = rest > 0 and body[-rest - 1 :] == self.closing
            end = len(body) - rest if ended else len(body)
            found += [Piece(self.encode(head[len(at) :]), False), Piece(body[:end], True), Piece(body[end:], False)]
            at, seen = whole, i + 1
        return [piece for piece in found if piece.ids]

    def check(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
        """NotAppendOnly where a dialogue of these messages could not grow message by message behind its own ids."""
        self.pieces(messages, tools, roles=("assistant",))
        if messages and messages[-1].get("role") != "assistant":
            ends = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
            if ends:
                self.follow(messages[: ends[-1] + 1], messages, (), tools)

    def _changed(self, old: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] | None) -> NotAppendOnly:
        """Which message of `old` is another in `new`, or is rendered otherwise there."""
        for i, (one, other) in enumerate(zip(old, new, strict=False)):
            if one != other:
                return NotAppendOnly(i, f"message {i + 1} was rewritten: {_shown(one)} is now {_shown(other)}")
        if len(new) < len(old):
            return NotAppendOnly(len(new), f"message {len(new) + 1} was taken away: {_shown(old[len(new)])}")
        after = self.text(new, tools)
        before, index = "", max(0, len(old) - 1)
        for i in range(len(old)):
            try:
                before = self.text(old[: i + 1], tools, opened=False)
            except BadChat:
                continue  # a template that wants more than these
            if not after.startswith(before):
                index = i
                break
        same = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
        then = _shown(new[len(old)] if len(new) > len(old) else {})
        return NotAppendOnly(
            index,
            f"the chat template is not append-only: message {index + 1}, {_shown(old[index])}, is rendered as "
            f"{before[same : same + 60]!r}, and as {after[same : same + 60]!r} once {then} follows. Give a template that leaves "
            "earlier turns as they are (--chat-template-path FILE).",
        )


def _shown(message: Message) -> str:
    return f"{message.get('role', 'nothing')} {str(message.get('content'))[:60]!r}"
