"""Pictures of a request on their way to an engine: from the bus, as data URLs.

SGLang (0.5.12) turns token ids that come with pictures into text and tokenises that anew. So such a request is sent to it only if
its tokens survive this; the engine's count of prompt tokens is compared with ours besides (engines/sglang/client.py).
"""

from __future__ import annotations

from base64 import b64encode
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from actors.runtime.context import Context
from actors.runtime.prompts import tokenizer_of
from bus.errors import BadMessage, Poison
from bus.messages.base import unpack_ints
from bus.messages.events import EventKind
from bus.messages.samples import SampleTask, shown

KEPT_BYTES = 64 << 20  # of data URLs, for the siblings of a group


class Changed(Exception):
    """The engine would read other tokens than these."""


class Pictures:
    """One worker's. `tokenised_by`: directory of the tokenizer with which the engine makes text and back; empty: it reads ids."""

    def __init__(self, context: Context, tokenised_by: str = "") -> None:
        self._context = context
        self._tokenised_by = tokenised_by
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._bytes = 0
        self._tokenizer: Any = None
        self._warned: set[str] = set()

    async def of(self, task: SampleTask, tokens: Sequence[int]) -> tuple[str, ...]:
        """Those that `tokens` show, as data URLs. Poison: the prompt's placeholders without the prompt, or a picture that is gone;
        Changed: the engine would read other tokens."""
        if not task.pictures:
            return ()
        prompt = unpack_ints(task.prompt_tokens)
        found = shown(task.pictures, prompt, tokens)
        if not found and prompt[task.pictures[0].at] in tokens:
            raise Poison(
                f"a turn of {task.sample_id} has places for pictures, but does not begin with its prompt, which they belong to. "
                "Keep the prompt up to its last picture, or leave the pictures out."
            )
        if found and self._tokenised_by and not self._survives(tokens):
            raise Changed(f"the engine's tokenizer makes other tokens of the text of {task.sample_id}")
        return tuple([await self._url(picture.blob) for picture in found])

    async def warn(self, text: str) -> None:
        """Of an engine that is shown pictures; once."""
        if text and text not in self._warned:
            self._warned.add(text)
            await self._context.event(EventKind.OLD_SIGHT, text)

    async def _url(self, blob: str) -> str:
        if (known := self._kept.get(blob)) is not None:
            self._kept.move_to_end(blob)
            return known
        try:
            data = await self._context.bus.blobs.get(blob)
        except BadMessage as error:
            raise Poison(f"a picture is gone, as those of closed groups are: {error}") from error
        url = f"data:image/{_kind(data)};base64,{b64encode(data).decode()}"
        self._kept[blob] = url
        self._bytes += len(url)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])
        return url

    def _survives(self, tokens: Sequence[int]) -> bool:
        self._tokenizer = self._tokenizer or tokenizer_of(self._tokenised_by)
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) == list(tokens)


def _kind(data: bytes) -> str:
    """Of a media type; engines look into the bytes themselves."""
    return "jpeg" if data[:2] == b"\xff\xd8" else "webp" if data[8:12] == b"WEBP" else "png"
