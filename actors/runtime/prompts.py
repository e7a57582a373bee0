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
    input_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str = "metadata"
    tokenizer_dir: str = ""
    apply_chat_template: bool = False
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
        """(text, ids) of a string or, with the chat template, a list of chat messages."""
        if self._chat is None:
            text = str(prompt)
            return text, self._fast.encode(text, add_special_tokens=True).ids
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        rendered: Any = self._chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = str(rendered)
        return text, self._chat.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text, special tokens shown; ids that no token has are left out."""
        if self._chat is not None:
            return str(self._chat.decode(list(ids)))
        return str(self._fast.decode([i for i in ids if i >= 0], skip_special_tokens=False))


def load_prompts(spec: DataSpec) -> tuple[list[Prompt], int]:
    """All usable prompts and how many were left out as too long."""
    tokenizer = Tokenizer(spec.tokenizer_dir, apply_chat_template=spec.apply_chat_template)
    prompts: list[Prompt] = []
    too_long = 0
    for index, row in enumerate(read_rows(spec.path)):
        if spec.input_key not in row:
            raise Refused(
                f"{spec.path} row {index + 1} has no key {spec.input_key!r} (it has {', '.join(map(str, row))}). "
                "Set --input-key."
            )
        text, ids = tokenizer.encode(row[spec.input_key])
        if spec.max_prompt_len and len(ids) > spec.max_prompt_len:
            too_long += 1
            continue
        label = row.get(spec.label_key, "")
        metadata = row.get(spec.metadata_key) or {}
        prompts.append(Prompt(index, text, ids, "" if label is None else str(label), metadata))
    if not prompts:
        raise Refused(
            f"{spec.path} holds no usable prompt ({too_long} longer than --rollout-max-prompt-len "
            f"{spec.max_prompt_len}). Check --prompt-data and the limit."
        )
    return prompts, too_long


__all__ = ("DataSpec", "Prompt", "Tokenizer", "load_prompts", "read_rows", "split_slice")
