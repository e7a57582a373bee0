"""Chat messages to token ids, through a model's chat template: for prompts, supervised samples and dialogues that go on.

Always true: what a model made is never rendered again. A dialogue grows by `follow`, whose ids are put behind the ids that are
there: what stands behind the assistant's message in the rendering of the longer dialogue, however the template writes that
message by then. Messages are tables with `role` and `content` (and `tool_calls`, ...), as the OpenAI interface writes them; the
arguments of calls may be a table or its JSON text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.template import AnswerEnding, BadChat, Message, Shape, Template, as_text, same, shown

__all__ = ["BadChat", "Chat", "Message", "NotAppendOnly", "Piece"]


class BadTokenizer(BadChat):
    """A model's tokenizer cannot be loaded."""


class NotAppendOnly(BadChat):
    """A dialogue that does not go on behind its own tokens. `index`: the message that is another, or is rendered anew."""

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

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # files of others, which transformers looks into as it goes: KeyError, ImportError, ...
            says = " ".join(str(error).split())[:300]
            raise BadTokenizer(f"the tokenizer in {directory} cannot be loaded: {type(error).__name__}: {says}") from error
        self._kwargs = dict(kwargs or {})
        if template_path:
            try:
                self._tokenizer.chat_template = Path(template_path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadChat(f"--chat-template-path {template_path!r} cannot be read: {error}") from error
        if not self._tokenizer.chat_template:
            raise BadChat(f"the tokenizer in {directory} has no chat template. Give one with --chat-template-path FILE.")
        added = self._tokenizer.added_tokens_decoder
        special = {*(id for id, token in added.items() if token.special), *self._tokenizer.all_special_ids}
        marks = {id: token.content for id, token in added.items()}
        self.traits = Template(self._rendered, self._split, marks, special)

    @property
    def template(self) -> str:
        """The template's own text; of several, all."""
        return str(self._tokenizer.chat_template)

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, opened: bool = True) -> str:
        """The rendering. `opened`: with the opening of the assistant's next turn behind it. Raises BadChat."""
        if not self.traits.calls_shown:
            at = next((i for i, message in enumerate(messages) if message.get("tool_calls")), None)
            if at is not None:
                raise BadChat(f"the chat template does not render the calls of message {at + 1}, {shown(messages[at])}")
        return self.traits.text(messages, tools, opened)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None, opened: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=opened,
                **self._kwargs,
            )
        except Exception as error:  # a template raises what it likes
            says = " ".join(str(error).split())
            raise BadChat(f"the chat template cannot take the messages: {type(error).__name__}: {says}") from error
        return as_text(str(rendered))

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, opened: bool = True) -> list[int]:
        """The same as token ids, int. Raises BadChat."""
        return self.encode(self.text(messages, tools, opened=opened))

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; special tokens in it are tokens, none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _split(self, text: str) -> list[tuple[int, int, int]]:
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(id, begin, end) for id, (begin, end) in zip(found["input_ids"], found["offset_mapping"], strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens shown."""
        return str(self._tokenizer.decode(list(ids)))

    def follow(
        self,
        old: Sequence[Message],
        new: Sequence[Message],
        made: Sequence[int],
        tools: Sequence[Any] | None = None,
        *,
        stops: Collection[int] = (),
    ) -> list[int]:
        """Ids to put behind `made`, the ids of the assistant's message that `old` ends with, so that the model answers `new`,
        which begins with `old`: what of the turn's closing `made` lacks, the new messages, the opening. `stops`: ids that end
        a turn; such a one stands for the template's own end token. Raises NotAppendOnly, BadChat."""
        if list(new[: len(old)]) != list(old):
            raise _rewritten(old, new)
        shape = self.traits.shape(old[-1])
        before, behind = self.traits.around(new, len(old) - 1, tools, True)
        self._prompt_stays(old, new, before, tools)
        tail = self.encode(behind)
        return tail[_made_of(tail, list(made), shape, self.traits.ending(shape), self.traits.marks, stops) :]

    def _prompt_stays(self, old: Sequence[Message], new: Sequence[Message], after: str, tools: Sequence[Any] | None) -> None:
        """NotAppendOnly where what stands before the first answer is rendered otherwise in `after`, as more follows."""
        first = next(i for i, message in enumerate(old) if message.get("role") == "assistant")
        if not first or after.startswith(bare := self._bare(old[:first], tools)):
            return
        at = same(bare, after)
        index = next((i for i in range(1, first + 1) if not after.startswith(self._bare(old[:i], tools))), first) - 1
        raise NotAppendOnly(
            index,
            f"the chat template is not append-only: message {index + 1}, {shown(old[index])}, is rendered as "
            f"{bare[at : at + 60]!r}, and as {after[at : at + 60]!r} once {shown(new[-1])} follows. Give a template that leaves "
            "earlier turns as they are (--chat-template-path FILE).",
        )

    def _bare(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        """Without the opening of the next turn; nothing of what the template cannot take by itself."""
        try:
            return self.traits.text(messages, tools, True).removesuffix(self.traits.opening())
        except BadChat:
            return ""

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, roles: Collection[str], last: bool = False
    ) -> list[Piece]:
        """A whole dialogue as pieces, up to its last message of `roles`, whose bodies are `made`: the rendering of them all
        together, cut where these begin and end. Each piece is tokenised by itself, as in generation. `last`: only the last
        such message is. Raises BadChat."""
        chosen = [i for i, message in enumerate(messages) if message.get("role") in roles]
        if not chosen:
            return []
        messages = messages[: chosen[-1] + 1]
        whole = self.traits.text(messages, tools, False)
        found: list[Piece] = []
        at = 0
        for i in chosen[-1:] if last else chosen:
            begin, end, more = self.traits.span(messages, i, whole, tools, at)
            found += [Piece(self.encode(whole[at:begin]), False), Piece(self.encode(whole[begin:end] + more), True)]
            at = end
        found.append(Piece(self.encode(whole[at:]), False))
        return [piece for piece in found if piece.ids]


def _made_of(
    tail: list[int], made: list[int], shape: Shape, ending: AnswerEnding, marks: Collection[int], stops: Collection[int]
) -> int:
    """How many of the ids of `tail`, which stand behind the body of a message, `made` has already: a turn's end is not doubled, and
    what the template writes in another way in its place is not put behind it."""
    common = same(list(ending.alone), tail)
    end = ending.end if ending.end <= common else -1
    begin = 0 if shape == "text" else end if end >= 0 else common  # what closes a call is the model's
    for n in range(min(common - begin, len(made)), 0, -1):
        if made[-n:] == tail[begin : begin + n]:
            return begin + n
    last = made[-1] if made else -1
    if last in marks:
        if last in tail[:common]:
            return common - tail[:common][::-1].index(last)
        if last in tail[common : common + 1]:
            return common + 1
        if last in stops and 0 <= end < len(tail) and tail[end] in marks:
            return end + 1
    return begin


def _rewritten(old: Sequence[Message], new: Sequence[Message]) -> NotAppendOnly:
    """Which message of `old` is another in `new`, or is not there."""
    for i, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            return NotAppendOnly(i, f"message {i + 1} was rewritten: {shown(one)} is now {shown(other)}")
    return NotAppendOnly(len(new), f"message {len(new) + 1} was taken away: {shown(old[len(new)])}")
