"""Prompts of data sets, as rows with token ids. Sampler, evaluator and preflight read by the same rules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.runtime.chat import Chat
from actors.runtime.context import Context
from actors.runtime.parts import RowParts, parts_of, unseen
from actors.runtime.rows import BadData, PlacedRow, Source, image_key, read, sources_of
from actors.runtime.run import Refused, RunEnds
from actors.runtime.sources import Coming, rows_function
from actors.runtime.tools import SHIPPED
from actors.runtime.vision import BadImage, Shown, Vision, config_of
from actors.runtime.whole import called
from bus.messages.waits import Wait


class DataSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to read and how to make token ids of it."""

    path: str  # sources, as in --prompt-data
    input_key: str
    label_key: str
    metadata_key: str
    tool_key: str
    multimodal_keys: str  # JSON, as in --multimodal-keys; empty = prompts are text
    tokenizer_dir: str = ""
    apply_chat_template: bool
    apply_chat_template_kwargs: str  # JSON
    chat_template_path: str
    tools: tuple[str, ...]  # that ship; shown by the chat template to rows without tools of their own
    data_source_path: str  # function(path) -> rows, or a class of Miles' with get_samples, in place of reading the path
    max_prompt_len: int = 0  # tokens; longer prompts are left out; 0 = no limit
    label_objects: bool = False  # a label may be an object: functions of the user's read it
    supervised: bool = False  # the data holds responses too, which are trained
    sft_loss_roles: tuple[str, ...]
    loss_mask_type: str
    max_response_len: int = 0  # tokens of such a response; longer ones are left out; 0 = no limit
    end_token: int = -1  # behind a response that is a text; -1 = none


class Prompt(msgspec.Struct, frozen=True):
    """One row: `token_ids` int, `label` text, `index` its number among the rows of all sources."""

    index: int
    text: str
    token_ids: list[int]
    label: str
    metadata: dict[str, Any] = {}
    response: list[int] = []  # token ids that the data gives in answer
    mask: list[int] = []  # 1 = trained, of each of them
    pictures: list[Shown] = []


class Prompts(NamedTuple):
    """All usable prompts, how many were left out as too long, (usable prompts, weight) of each source, in their order, and what is
    wrong with the rows that were left out for their pictures."""

    prompts: list[Prompt]
    too_long: int
    parts: list[tuple[int, float]]
    unseen: list[str]


class Tokenizer:
    """Text to ids, through the fast tokenizer file; the chat template needs transformers."""

    def __init__(self, directory: str, *, chat: Chat | None = None, tools: Sequence[str] = ()) -> None:
        self._chat = chat
        self._tools = [SHIPPED[name].spec for name in tools]
        self._fast = tokenizer_of(directory)
        self._special = [token.content for token in self._fast.get_added_tokens_decoder().values() if token.special]

    @staticmethod
    def of(spec: DataSpec) -> Tokenizer:
        """As a data set asks for it. Raises BadChat."""
        if not spec.apply_chat_template:
            return Tokenizer(spec.tokenizer_dir)
        kwargs = json.loads(spec.apply_chat_template_kwargs or "{}")
        chat = Chat(spec.tokenizer_dir, template_path=spec.chat_template_path, kwargs=kwargs)
        return Tokenizer(spec.tokenizer_dir, chat=chat, tools=spec.tools)

    def encode(self, prompt: Any, tools: Sequence[Any] | None = None) -> tuple[str, list[int]]:
        """(text, ids) of a string or, with the chat template, of a string or chat messages. Refused where that cannot be right."""
        if self._chat is None:
            ids = list(self._fast.encode(prompt, add_special_tokens=True).ids)
            doubled = len(ids) > 1 and ids[0] == ids[1] and self._fast.id_to_token(ids[0]) in self._special
            return prompt, ids[doubled:]  # the text has its beginning token already
        if isinstance(prompt, str) and (own := next((t for t in self._special if prompt.lstrip().startswith(t)), "")):
            raise Refused(f"the prompt begins with {own!r} already, as after a chat template. Leave out --apply-chat-template.")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self._chat.text(messages, tools or self._tools)
        if problem := unseen(messages, text, self._chat.template):
            raise Refused(problem)
        return text, self._chat.encode(text)

    def supervised(self, row: RowParts, spec: DataSpec) -> tuple[str, list[int], list[int], list[int]]:
        """(text of the prompt, its ids, ids behind it, mask of these) of a whole dialogue, or of a text and its label. Refused
        where nothing would be trained."""
        if self._chat is None:
            ids = list(self._fast.encode(row.label, add_special_tokens=False).ids) + [spec.end_token] * (spec.end_token >= 0)
            return (*self.encode(row.prompt), ids, [1] * len(ids))
        messages = row.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}, {"role": "assistant", "content": row.label}]
        last = spec.loss_mask_type in ("last", "distill_qwen")
        pieces = self._chat.pieces(messages, row.tools, roles=spec.sft_loss_roles, last=last)
        if not any(piece.made for piece in pieces):
            roles = " or ".join(spec.sft_loss_roles)
            raise Refused(f"no message is of {roles}, so nothing would be trained. Set --sft-loss-roles.")
        context = list(takewhile(lambda piece: not piece.made, pieces))
        prompt = [i for piece in context for i in piece.ids]
        rest = pieces[len(context) :]
        mask = [int(piece.made) for piece in rest for _ in piece.ids]
        return self.decode(prompt), prompt, [i for piece in rest for i in piece.ids], mask

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text, special tokens shown; ids that no token has are left out."""
        return str(self._fast.decode([i for i in ids if i >= 0], skip_special_tokens=False))


def tokenizer_of(directory: str) -> Any:
    """The model's fast tokenizer, as the library `tokenizers` has it."""
    from tokenizers import Tokenizer as FastTokenizer

    file = Path(directory) / "tokenizer.json"
    try:
        return FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise Refused(f"{file} is no tokenizer ({str(error).splitlines()[0][:200]}). Download it again.") from error


def decoder_of(model_dir: str) -> Callable[[Sequence[int]], str]:
    """Token ids to text, by the model's tokenizer, which is loaded when it is first asked; no text where no model is known."""

    @cache
    def tokenizer() -> Tokenizer:
        return Tokenizer(model_dir)

    return lambda ids: tokenizer().decode(ids) if model_dir else ""


def vocabulary_of(model_dir: str) -> int:
    """Number of token ids of the model in a directory, by its config.json; 0 where that does not say."""
    return _configured(model_dir, "vocab_size")


def context_of(model_dir: str) -> int:
    """Most tokens of one sequence of the model in a directory, by its config.json; 0 where that does not say."""
    return _configured(model_dir, "max_position_embeddings")


def most_new_tokens(length: int, prompt_tokens: int, context: int) -> int:
    """Tokens that a response may have: `length`, or what the prompt leaves of `context` (0 = no such limit), at least 1."""
    return min(length, max(1, context - prompt_tokens)) if context else length


class RoutedShape(msgspec.Struct, frozen=True):
    """Of the experts that a model chooses for a token. `width`: numbers, layers x top-k; layers without experts count. `wide`:
    numbers take two bytes."""

    width: int
    wide: bool

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return self.width * (2 if self.wide else 1)


def routed_shape(model_dir: str) -> RoutedShape | None:
    """By its config.json; None: the model has no experts, or does not say."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = max(_configured(model_dir, name) for name in names)
    width = _configured(model_dir, "num_hidden_layers") * _configured(model_dir, "num_experts_per_tok")
    return RoutedShape(width, experts > 255) if experts and width else None


def _configured(model_dir: str, name: str) -> int:
    config = config_of(model_dir)
    text = config.get("text_config")
    size = config.get(name) or (text.get(name) if isinstance(text, dict) else 0)
    return size if isinstance(size, int) and size > 0 else 0


def load_prompts(spec: DataSpec, values: Mapping[str, Any] | None = None, coming: Coming | None = None) -> Prompts:
    """All usable prompts. `values`: settings by name, for a data source of the user's; `coming` looks at its rows. Refused names
    the first row that is not what it must be."""
    tokenizer = Tokenizer.of(spec)
    function = None
    keys = {name: getattr(spec, name) for name in ("input_key", "label_key", "metadata_key", "tool_key")}
    vision = Vision(spec.tokenizer_dir) if spec.multimodal_keys else None
    keys["multimodal_keys"] = image_key(spec.multimodal_keys)
    unseen: list[str] = []
    if spec.data_source_path:
        function, keys = rows_function(spec.data_source_path, keys, values or {})
        function = coming.of(function) if coming is not None else function
    prompts: list[Prompt] = []
    too_long, index = 0, -1
    parts: list[tuple[int, float]] = []
    for source in sources_of(spec.path):
        before, folder = len(prompts), _folder(source.path)
        for at, number, row, padded in _rows(source, function):
            index += 1
            try:
                how = {"chat": spec.apply_chat_template, "supervised": spec.supervised, "objects": spec.label_objects}
                found = parts_of(row, keys, padded=padded, **how)
                response: list[int] = []
                mask: list[int] = []
                if spec.supervised:
                    text, ids, response, mask = tokenizer.supervised(found, spec)
                else:
                    text, ids = tokenizer.encode(found.prompt, found.tools)
                pictures: list[Shown] = []
                if vision is not None and found.pictures:
                    ids, places = vision.laid_out(ids, [vision.grid(one, folder) for one in found.pictures])
                    pictures = [Shown(one, folder, where) for one, where in zip(found.pictures, places, strict=True)]
            except BadImage as error:
                unseen.append(f"{at} row {number}: {error}")
                continue
            except Refused as error:
                raise Refused(f"{at} row {number}: {error}") from error
            if 0 < spec.max_prompt_len < len(ids) or 0 < spec.max_response_len < len(response):
                too_long += 1
                continue
            prompts.append(Prompt(index, text, ids, found.label, found.metadata, response, mask, pictures))
        parts.append((len(prompts) - before, source.weight))
        if before == len(prompts):
            seen = f", {len(unseen)} without their pictures, the first: {unseen[0]}" if unseen else ""
            raise Refused(
                f"{source.path} holds no usable prompt ({too_long} longer than --rollout-max-prompt-len "
                f"{spec.max_prompt_len}{seen}). Check --prompt-data and the limit."
            )
    return Prompts(prompts, too_long, parts, unseen)


async def read_apart(
    context: Context, spec: DataSpec, values: Mapping[str, Any] | None = None, *, within_s: float | None = None
) -> Prompts | None:
    """`load_prompts` in a thread, so that the actor is heard of meanwhile, and says what it waits for. None: it is to end.
    `within_s`: deadline of a data source of the user's for each row; RunEnds when it is late, since no thread can be ended."""
    coming = Coming(context.clock.monotonic)
    reading = called(load_prompts, (spec, values, coming))
    ends = asyncio.ensure_future(context.draining.wait())
    if spec.data_source_path:
        context.noting = lambda: f"{spec.data_source_path} gave {coming.text()}"
    try:
        with context.waiting(Wait.READING, path=spec.path):
            while not (reading.done() or ends.done()):
                left_s = None if within_s is None else within_s - coming.late_s
                if left_s is not None and left_s <= 0:
                    late = f"--data-source-path {spec.data_source_path} gave no row within {within_s:g} s (--batch-hook-timeout-s)"
                    raise RunEnds(f"{late} behind row {coming.given}. Look for a wait in it, or raise that.")
                await asyncio.wait((reading, ends), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        context.noting = str
        ends.cancel()


def _rows(source: Source, function: Callable[[str], Iterable[Any]] | None) -> Iterator[PlacedRow]:
    """Rows of a source. Where it is none, the error says which: an actor that starts again may meet it days later."""
    try:
        yield from read(source, function)
    except BadData as error:
        if source.path in str(error):
            raise
        raise Refused(f"{source.path}: {error}") from error


def _folder(path: str) -> str:
    """Where the relative paths of a source's pictures begin."""
    at = Path(path)
    return str(at if at.is_dir() else at.parent)
