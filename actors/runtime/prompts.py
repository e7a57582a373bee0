"""Prompts from JSONL or parquet, as rows with token ids. Shared by the sampler and the evaluator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.run import Refused

_SLICE = re.compile(r"^(?P<path>.*?)(?:@\[(?P<start>-?\d*):(?P<stop>-?\d*)\])?$")


class DataSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to read and how to make token ids of it."""

    path: str
    input_key: str
    label_key: str
    metadata_key: str
    tokenizer_dir: str = ""
    apply_chat_template: bool
    max_prompt_len: int = 0  # tokens; longer prompts are left out; 0 = no limit


class Prompt(msgspec.Struct, frozen=True):
    """One row: `token_ids` int, `label` text, `index` its row number in the file."""

    index: int
    text: str
    token_ids: list[int]
    label: str
    metadata: dict[str, Any] = {}


def split_slice(path: str) -> tuple[Path, slice]:
    """`file.jsonl@[a:b]` to the path and the slice of rows."""
    match = _SLICE.match(path)
    if match is None:
        raise Refused(f"--prompt-data {path!r} is not a path with an optional @[start:stop]")
    start, stop = match["start"], match["stop"]
    return Path(match["path"]), slice(int(start) if start else None, int(stop) if stop else None)


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL or parquet file as dicts."""
    file, rows = split_slice(path)
    if file.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(file).to_pylist()[rows]
        return
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, line in enumerate(lines[rows], 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise Refused(f"{file} row {number} is not JSON: {error}. Each line must be one JSON object.") from error


def value_at(row: Any, key: str, flag: str) -> Any:
    """What lies in a row under a key, or under a path of keys with dots between. Refused, naming the flag, when nothing does."""
    if not isinstance(row, dict):
        raise Refused(f"it is {_kind(row)}, not an object with keys")
    found, rest = row, key
    while isinstance(found, dict):
        if rest in found:
            return found[rest]
        head, dot, rest = rest.partition(".")
        if not dot or head not in found:
            break
        found = found[head]
    raise Refused(f"it has no key {key!r} (it has {', '.join(map(str, row))}). Set {flag}.")


def _label(row: dict[str, Any], key: str) -> str:
    """The label as text; a row that has none is no fault, a label that no rule could read is."""
    try:
        label = value_at(row, key, "--label-key") if key else ""
    except Refused:
        if "." in key:
            raise
        return ""
    if isinstance(label, list | dict):
        raise Refused(
            f"the label under {key!r} is {_kind(label)}, not text. Name a part of it (--label-key reward_model.ground_truth), or "
            "keep it in the metadata and score with --custom-rm-path."
        )
    return "" if label is None else str(label)


def _metadata(row: dict[str, Any], key: str) -> dict[str, Any]:
    try:
        found = value_at(row, key, "--metadata-key") or {}
    except Refused:
        return {}
    if not isinstance(found, dict):
        raise Refused(f"the metadata under {key!r} is {_kind(found)}, not an object. Set --metadata-key.")
    try:
        msgspec.msgpack.encode(found)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(f"the metadata under {key!r} cannot be sent: {error}") from error
    return found


_REMEDY = "These are chat messages: set --apply-chat-template, or give the text that the model shall see."


def _kind(value: object) -> str:
    return f"a {type(value).__name__} ({str(value)[:60]!r})"


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) and "role" in m for m in prompt)


class Tokenizer:
    """Text to ids, through the fast tokenizer file; the chat template needs transformers."""

    def __init__(self, directory: str, *, apply_chat_template: bool = False) -> None:
        self._chat = None
        if apply_chat_template:
            from transformers import AutoTokenizer

            self._chat = AutoTokenizer.from_pretrained(directory)
        else:
            from tokenizers import Tokenizer as FastTokenizer

            self._fast = FastTokenizer.from_file(str(Path(directory) / "tokenizer.json"))

    def encode(self, prompt: Any) -> tuple[str, list[int]]:
        """(text, ids) of a string or, with the chat template, a list of chat messages. Refused for anything else."""
        if self._chat is None:
            if not isinstance(prompt, str):
                raise Refused(f"the prompt is {_kind(prompt)}, not text. {_REMEDY if _is_chat(prompt) else 'Set --input-key.'}")
            return prompt, self._fast.encode(prompt, add_special_tokens=True).ids
        if not isinstance(prompt, str) and not _is_chat(prompt):
            raise Refused(f"the prompt is {_kind(prompt)}, neither text nor chat messages (role, content). Set --input-key.")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            rendered: Any = self._chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes
            raise Refused(f"the chat template cannot take the prompt: {type(error).__name__}: {error}") from error
        text = str(rendered)
        return text, self._chat.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text, special tokens shown; ids that no token has are left out."""
        if self._chat is not None:
            return str(self._chat.decode(list(ids)))
        return str(self._fast.decode([i for i in ids if i >= 0], skip_special_tokens=False))


def vocabulary_of(model_dir: str) -> int:
    """Number of token ids of the model in a directory, by its config.json; 0 where that does not say."""
    try:
        config = json.loads((Path(model_dir) / "config.json").read_bytes())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
    except (OSError, ValueError, AttributeError):
        return 0
    return size if isinstance(size, int) and size > 0 else 0


def load_prompts(spec: DataSpec) -> tuple[list[Prompt], int]:
    """All usable prompts and how many were left out as too long. Refused names the first row that is not what it must be."""
    tokenizer = Tokenizer(spec.tokenizer_dir, apply_chat_template=spec.apply_chat_template)
    prompts: list[Prompt] = []
    too_long = 0
    for index, row in enumerate(read_rows(spec.path)):
        try:
            text, ids = tokenizer.encode(value_at(row, spec.input_key, "--input-key"))
            if spec.max_prompt_len and len(ids) > spec.max_prompt_len:
                too_long += 1
                continue
            prompts.append(Prompt(index, text, ids, _label(row, spec.label_key), _metadata(row, spec.metadata_key)))
        except Refused as error:
            raise Refused(f"{spec.path} row {index + 1}: {error}") from error
    if not prompts:
        raise Refused(
            f"{spec.path} holds no usable prompt ({too_long} longer than --rollout-max-prompt-len "
            f"{spec.max_prompt_len}). Check --prompt-data and the limit."
        )
    return prompts, too_long
