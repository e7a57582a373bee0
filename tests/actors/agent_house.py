"""What tests of agents stand on: a chat model's tokenizer of bytes, and a session whose model says what a script tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.generation.rollouts.session import Segment, Task, Watch
from actors.generation.rollouts.stops import until, watching
from actors.runtime.chat import Chat
from bus.messages.samples import Sampling
from bus.messages.versions import VersionSpan

TEMPLATE = (
    "{% if tools %}<s>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<e>\n{% endif %}"
    "{% for m in messages %}<s>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
END = 1


def make_chat(folder: Path, template: str = TEMPLATE, *, words: int = 0, special: Sequence[str] = ()) -> Chat:
    """A byte-level tokenizer without merges: a character outside ASCII is several tokens. `words`: ids in all, the further ones
    words that it never makes itself. `special`: further special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ("<s>", "<e>", "<tool_call>", "</tool_call>")
    known = [*marks, *alphabet, *special]
    known += [f"w{i}" for i in range(len(known), words)]
    bare = Tokenizer(models.BPE({token: i for i, token in enumerate(known)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bare.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    bare.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*marks[:2], *special)])
    bare.add_tokens([AddedToken(token, special=False, normalized=False) for token in marks[2:]])
    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<e>")
    made.chat_template = template
    made.save_pretrained(str(folder))
    return Chat(str(folder))


def task(prompt: Sequence[int] = (), *, max_new_tokens: int = 4000, stops: Sequence[int] = (END,), **fields: Any) -> Task:
    sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=tuple(stops))
    return Task("g1/0", "g1", 0, 1, list(prompt), sampling=sampling, **fields)


class ScriptedSession:
    """`script`: what the model answers to the text it sees, with its stop token or, where that is END, without; chunks of `chunk`
    tokens reach `watch`."""

    replaying = False

    def __init__(self, chat: Chat, of: Task, script: Callable[[str], str], *, chunk: int = 3) -> None:
        self.task, self._chat, self._script, self._chunk = of, chat, script, chunk
        self.left = of.sampling.max_new_tokens
        self.seen: list[list[int]] = []
        self.made: list[Segment] = []
        self.asked: list[Sampling] = []
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling | None = None, *, watch: Watch | None = None
    ) -> Segment:
        sampling, call = sampling or self.task.sampling, len(self.seen)
        if sampling.stop:
            watch = watching(self._chat.decode, sampling.stop, watch)
        self.seen.append(list(tokens))
        self.asked.append(sampling)
        answer = self._chat.encode(self._script(self._chat.decode(tokens)))
        if answer[-1:] == [] or answer[-1] not in self.task.sampling.stop_token_ids:
            answer.append(END)
        most = min(self.left, sampling.max_new_tokens)
        ids, finish = answer[:most], "stop" if len(answer) <= most else "length"
        for n in range(self._chunk, len(ids) + self._chunk, self._chunk):
            await asyncio.sleep(0)
            if watch is not None and watch(ids[:n]):
                ids, finish = ids[:n], "stop"
                break
        self.left -= len(ids)
        spans = (VersionSpan(7, 7, len(ids)),)
        segment = Segment("model", ids, [-0.5 - i for i in range(len(ids))], spans, finish, call)  # type: ignore[arg-type]
        self.made.append(segment)
        return until(self._chat.decode, segment, sampling.stop) if sampling.stop else segment

    async def save(self) -> None: ...

    async def tell(
        self, name: str, call: Callable[..., Awaitable[Any] | Any], *args: Any, deadline_s: float = 60.0
    ) -> Any:
        self.told.append((name, args))
        return await call(*args)
