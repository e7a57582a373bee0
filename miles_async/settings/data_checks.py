"""Preflight of prompt data: the file is there, is JSONL or Parquet, has the keys, and its slice is not empty.

Every JSONL row is counted; the first CHECKED_ROWS of the slice are parsed. Nothing is kept in memory.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from miles_async.settings.errors import SettingsError, nearest

CHECKED_ROWS = 1000
SUFFIXES = (".jsonl", ".parquet")
_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


@dataclass(frozen=True, slots=True)
class DataSpec:
    """A data path and the rows it selects, with Python's slice meaning; None means open."""

    path: Path
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True)
class DataInfo:
    """What the check found: rows selected by the slice, and the first rows themselves for further checks."""

    spec: DataSpec
    rows: int
    head: tuple[dict[str, Any], ...]


def parse_data_spec(text: str) -> DataSpec:
    """`path` or `path@[a:b]`."""
    match = _SLICE.fullmatch(text)
    if match is None:
        return DataSpec(Path(text), None, None)
    start, stop = match["start"], match["stop"]
    return DataSpec(Path(match["path"]), int(start) if start else None, int(stop) if stop else None)


def check_prompt_data(text: str, *, field: str, keys: dict[str, str | None], chat: bool = True) -> DataInfo:
    """Check one data set. `keys`: settings field -> column that must be there (None: not asked for). `chat`: whether prompts may
    be chat messages."""
    spec = parse_data_spec(text)
    path = spec.path
    if "@" in text and not path.exists() and spec.start is None and spec.stop is None and "@[" in text:
        raise SettingsError("not a slice", field=field, value=text, remedy="Write path@[a:b] with whole numbers.")
    if not path.exists():
        raise SettingsError(
            f"no such file (looked in {Path.cwd()})", field=field, value=text, remedy="Give the path of a data set."
        )
    if not path.is_file():
        raise SettingsError("not a file", field=field, value=text, remedy=f"Give a {' or '.join(SUFFIXES)} file.")
    if path.suffix not in SUFFIXES:
        raise SettingsError(
            f"{path.suffix or 'no suffix'} is not a known data format",
            field=field,
            value=text,
            remedy=f"Give a {' or '.join(SUFFIXES)} file.",
        )
    try:
        total = _count_jsonl(path) if path.suffix == ".jsonl" else _count_parquet(path, field, text)
    except OSError as error:
        raise SettingsError(f"cannot be read: {error.strerror}", field=field, value=text) from None
    chosen = range(total)[slice(spec.start, spec.stop)]
    if not chosen:
        why = "holds no rows" if total == 0 else f"selects none of the {total} rows"
        raise SettingsError(why, field=field, value=text, remedy="A run needs at least one prompt.")
    wanted = islice(_numbered_rows(path, field), chosen.start, min(chosen.stop, chosen.start + CHECKED_ROWS))
    head = []
    for number, row in wanted:
        where = f"{field} {text}, row {number}"
        for setting, key in keys.items():
            if key is not None:
                _check_value(row, setting, key, where, chat=chat)
        head.append(row)
    return DataInfo(spec, len(chosen), tuple(head))


def value_at(row: Any, key: str) -> Any:
    """What lies in a row under a key, or under a path of keys with dots between, as the rooms read it. KeyError when nothing
    does."""
    while isinstance(row, dict):
        if key in row:
            return row[key]
        head, dot, key = key.partition(".")
        if not dot or head not in row:
            break
        row = row[head]
    raise KeyError(key)


def _check_value(row: dict[str, Any], setting: str, key: str, where: str, *, chat: bool) -> None:
    try:
        value = value_at(row, key)
    except KeyError:
        hint = nearest(key, row) or f"Columns are {', '.join(map(str, row))}."
        raise SettingsError(f"{where}, has no such column", field=setting, value=key, remedy=hint) from None
    if setting.endswith("label_key") and isinstance(value, list | dict):
        raise SettingsError(
            f"{where}: the label is a {type(value).__name__}, not text",
            field=setting,
            value=key,
            remedy="Name a part of it, as in reward_model.ground_truth, or score with --custom-rm-path.",
        )
    if setting == "metadata_key" and not isinstance(value, dict | None):
        raise SettingsError(f"{where}: the metadata is a {type(value).__name__}, not an object", field=setting, value=key)
    if setting.endswith("input_key") and not _is_prompt(value):
        raise SettingsError(
            f"{where}: the prompt must be a non-empty string or a list of chat messages", field=setting, value=key
        )
    if setting.endswith("input_key") and not chat and not isinstance(value, str):
        raise SettingsError(
            f"{where}: these are chat messages, and apply_chat_template = false",
            field=setting,
            value=key,
            remedy="Set --apply-chat-template, or give the text that the model shall see.",
        )


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    messages = list(value) if isinstance(value, list | tuple) else []
    return bool(messages) and all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) without blank lines."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _count_jsonl(path: Path) -> int:
    return sum(1 for _ in _lines(path))


def _count_parquet(path: Path, field: str, text: str) -> int:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            return int(file.metadata.num_rows)
    except ArrowInvalid:
        raise SettingsError("not a Parquet file", field=field, value=text) from None


def _numbered_rows(path: Path, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row or line number from 1, row)."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(path), 1)
        return
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except ValueError:  # JSONDecodeError and UnicodeDecodeError
            raise SettingsError(f"{path}, line {number}, is not JSON", field=field, value=str(path)) from None
        if not isinstance(row, dict):
            raise SettingsError(f"{path}, line {number}, is not a JSON object", field=field, value=str(path))
        yield number, row


def _parquet_rows(path: Path) -> Iterable[dict[str, Any]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=CHECKED_ROWS):
            yield from batch.to_pylist()
