"""Rows of data sets, whatever holds them: JSONL, a JSON list, CSV, Parquet, a folder of these, a data set saved by `datasets`, a
generator of reasoning-gym, or a function of the user's.

`0.7*a.jsonl@[0:500], 0.3*b.parquet` names two sources with weights and a slice. Always true: the same text gives the same rows in
the same order, so that a number tells a row.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from actors.runtime.refusals import Refused

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
TABLES = (".parquet", ".arrow")  # whose rows all have the same keys
GYM = "reasoning_gym:"
MOST_ROWS = 20_000_000  # of a function; more is taken for a source without an end
_SOURCE = re.compile(r"(?:(?P<weight>\d+(?:\.\d+)?)\*)?(?P<path>.+?)(?:@\[(?P<start>-?\d*):(?P<stop>-?\d*)\])?")
Row = dict[str, Any]


class PlacedRow(NamedTuple):
    """A row and where it stands: `number`, from 1, of the line of JSONL or the row of another file `at`, or of the source `at`.
    `padded`: its tables have all keys that any row's have there, those that it lacks as None (Parquet, Arrow)."""

    at: str
    number: int
    row: Row
    padded: bool = False


class BadData(Refused):
    """A source that is none, or a row that cannot be read. One sentence each: what is wrong, what to do."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}. {remedy}".strip())
        self.problem, self.remedy = problem, remedy


class Source(msgspec.Struct, frozen=True):
    """One source and the rows of it, with Python's slice meaning. `weight`: its share of prompts, against the others'; 0 = none is
    given, and all rows of all sources are taken."""

    path: str
    start: int | None = None
    stop: int | None = None
    weight: float = 0.0


def sources_of(text: str) -> tuple[Source, ...]:
    """The sources that a --prompt-data names."""
    found = []
    for part in [text] if os.path.exists(text) else text.split(","):  # several may be longer than a path can be
        match = _SOURCE.fullmatch(part.strip())
        if match is None:
            raise BadData("an empty source", "Write PATH, or WEIGHT*PATH, WEIGHT*PATH.")
        start, stop, weight = (match[name] for name in ("start", "stop", "weight"))
        found.append(Source(match["path"], int(start) if start else None, int(stop) if stop else None, float(weight or 0)))
        if weight and not found[-1].weight:
            raise BadData(f"weight {weight} of {match['path']}", "A weight is above 0; leave the source out instead.")
    if len({bool(source.weight) for source in found}) > 1:
        raise BadData("some sources have a weight and some have none", "Give each one, as in 3*a.jsonl, 1*b.jsonl.")
    return tuple(found)


def read(source: Source, function: Callable[[str], Iterable[Any]] | None = None) -> Iterator[PlacedRow]:
    """The rows that a source selects. `function`: of the user's, gets the path. Raises BadData."""
    start, stop = source.start or 0, source.stop
    if start < 0 or (stop or 0) < 0:
        total = sum(1 for _ in _placed(source.path, function))
        start, stop, _ = slice(source.start, stop).indices(total)
    return islice(_placed(source.path, function), start, stop)


def count(source: Source) -> tuple[int, int]:
    """(rows selected, rows in all), without parsing them. Raises BadData."""
    if source.path.startswith(GYM):
        total = len(gym(source.path))
    else:
        total = sum(_count(file) for file in _files(source.path))
    return len(range(total)[source.start : source.stop]), total


def value_at(row: Any, key: str) -> Any:
    """What lies in a row under a key, or under a path of keys with dots between, where a number leads into a list and JSON text is
    what it holds. KeyError when nothing lies there.

    >>> value_at({"reward_model": {"ground_truth": '["12"]'}}, "reward_model.ground_truth.0")
    '12'
    """
    found, rest = row, key
    while isinstance(found := _opened(found), dict | list):
        if isinstance(found, dict) and rest in found:
            return found[rest]
        head, dot, rest = rest.partition(".")
        if isinstance(found, list):
            if not (head.isascii() and head.isdecimal() and int(head) < len(found)):
                break
            found = found[int(head)]
        elif dot and head in found:
            found = found[head]
        else:
            break
        if not dot:
            return found
    raise KeyError(key)


def _opened(value: Any) -> Any:
    """What a JSON text of a table or list holds; any other value as it is."""
    if not (isinstance(value, str) and value.lstrip()[:1] in ("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def unpadded(value: Any) -> Any:
    """Tables without their keys that hold None."""
    if isinstance(value, dict):
        return {key: unpadded(part) for key, part in value.items() if part is not None}
    return [unpadded(part) for part in value] if isinstance(value, list) else value


def image_key(multimodal_keys: str | None) -> str:
    """The column of --multimodal-keys, empty for none. Raises ValueError, in one line, for what is not carried."""
    try:
        keys = json.loads(multimodal_keys or "{}")
    except (ValueError, RecursionError):
        keys = None
    if not isinstance(keys, dict) or not all(isinstance(value, str) and value for value in keys.values()):
        raise ValueError("""not a JSON object of columns; write '{"image": "images"}'""")
    if odd := sorted(keys.keys() - {"image"}):
        raise ValueError(f"{odd[0]} reaches no engine here, only image does. Leave it out")
    return str(keys.get("image", ""))


def gym(text: str) -> Any:
    """The reasoning-gym data set `reasoning_gym:NAME?size=500&seed=1`, the same in every process. Raises BadData."""
    name, _, query = text.removeprefix(GYM).partition("?")
    try:
        reasoning_gym = import_module("reasoning_gym")
    except ImportError:
        raise BadData(f"{text} needs reasoning-gym", "pip install 'miles-async[gym]'.") from None
    options = {"seed": 0} | {key: _number(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    try:
        made = reasoning_gym.create_dataset(name, **options)
        len(made)  # its configurations look at some values only
        return made
    except Exception as error:  # its configurations raise what they like
        raise BadData(f"{text}: {type(error).__name__}: {error}", "Write reasoning_gym:NAME?size=500&seed=1.") from error


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _placed(path: str, function: Callable[[str], Iterable[Any]] | None) -> Iterator[PlacedRow]:
    if function is not None:
        for number, row in enumerate(function(path), 1):
            if number > MOST_ROWS:
                raise BadData(f"{path}: more than {MOST_ROWS} rows", "A data source ends: an epoch is its rows.")
            yield PlacedRow(path, number, row)
    elif path.startswith(GYM):
        made = gym(path)
        for index in range(len(made)):
            item = made[index]
            metadata = {"rm_type": "reasoning_gym", "source": path, "index": index}
            row = {"question": item["question"], "answer": str(item["answer"]), "metadata": metadata}
            yield PlacedRow(path, index + 1, row)
    else:
        for file in _files(path):
            padded = file.suffix in TABLES
            rows = enumerate(_table_rows(file), 1) if padded else _rows_of(file)
            yield from (PlacedRow(str(file), number, row, padded) for number, row in rows)


def _files(path: str) -> list[Path]:
    """The files of a source, in order."""
    place = Path(path)
    if not os.path.exists(path):
        if "@[" in path:
            raise BadData("not a slice", "Write path@[a:b] with whole numbers.")
        raise BadData(f"no such file (looked in {Path.cwd()})", "Give the path of a data set.")
    known = ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"
    if place.is_file():
        if place.suffix not in SUFFIXES:
            raise BadData(f"{place.suffix or 'no suffix'} is not a known data format", f"Give a {known} file.")
        return [place]
    if not place.is_dir():
        raise BadData(f"{path} is neither a file nor a folder", f"Give a {known} file, or a folder of such.")
    try:
        if (place / "dataset_dict.json").is_file():
            splits = json.loads((place / "dataset_dict.json").read_bytes())["splits"]
            raise BadData(f"the folder holds the splits {', '.join(splits)}", f"Give one, as in {place / splits[0]}.")
        if (place / "state.json").is_file():
            state = json.loads((place / "state.json").read_bytes())
            if state.get("_indices_data_files"):
                raise BadData("it was saved with an order beside its rows", "Call flatten_indices() before save_to_disk().")
            return [place / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise BadData(f"{place} is no saved data set: {error!r}", "Save it again with save_to_disk().") from error
    found = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if len({file.suffix for file in found}) != 1:
        raise BadData("a folder without files of one data format", f"Give a {known} file, or a folder of such.")
    return found


def _rows_of(file: Path) -> Iterator[tuple[int, Row]]:
    """Numbered rows of a text: a list of objects, an object a line, or CSV."""
    if file.suffix == ".csv":
        return _csv_rows(file)
    listed = _listed(file)
    return _lines_of(file) if listed is None else enumerate(listed, 1)


def _csv_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Rows by the names of the first line, every value a text; each with the line on which it ends."""
    remedy = (
        "Write a first line with the columns' names, then as many values in each, with quotes around those with commas or lines."
    )
    csv.field_size_limit(1 << 30)
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.reader(opened, strict=True)
            names = next(reader, [])
            if "" in names or len(set(names)) != len(names):
                raise BadData(f"{file}, line 1, does not name its columns: {', '.join(names)[:100]}", remedy)
            for values in reader:
                if values and len(values) != len(names):
                    why = f"has {len(values)} values for {len(names)} columns"
                    raise BadData(f"{file}, line {reader.line_num}, {why}", remedy)
                if values:
                    yield reader.line_num, dict(zip(names, values, strict=True))
    except UnicodeDecodeError:
        raise BadData(f"{file} is not UTF-8 text", "Save the file as UTF-8.") from None
    except csv.Error as error:
        raise BadData(f"{file}, line {reader.line_num}, is not CSV: {error}", remedy) from None
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}") from None


def _listed(file: Path) -> list[Row] | None:
    """The rows of a file that is one JSON list of objects; None: it has a row a line, as many a `.json` has. Read whole, once for
    its count and once for its rows: such files are small."""
    if file.suffix != ".json":
        return None
    try:
        with file.open("rb") as opened:
            beginning = opened.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not beginning.startswith(b"["):
            return None
        rows = json.loads(file.read_bytes())
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = f"{error.msg} in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "it is no JSON text"
        raise BadData(f"{file} is not a JSON list of rows: {why}", "Give one list of objects, or one object a line.") from None
    if odd := next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), 0):
        raise BadData(f"{file}, row {odd}, is not a JSON object", "Each row must be one.")
    return list(rows)


def _lines_of(file: Path) -> Iterator[tuple[int, Row]]:
    for number, line in _lines(file):
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            raise BadData(f"{file}, line {number}, is not UTF-8 text", "Save the file as UTF-8.") from None
        except (ValueError, RecursionError) as error:
            why = "is nested too deeply" if isinstance(error, RecursionError) else "is not JSON"
            raise BadData(f"{file}, line {number}, {why}", "Each line must be one JSON object.") from None
        if not isinstance(row, dict):
            raise BadData(f"{file}, line {number}, is not a JSON object", "Each line must be one.")
        yield number, row


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) without blank lines."""
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}") from None


def _table_rows(file: Path) -> Iterator[Row]:
    for batch in _batches(file):
        mapped = {field.name: field.type for field in batch.schema if "map<" in str(field.type)}
        for row in batch.to_pylist():
            yield row | {name: _mapped(row[name], kind) for name, kind in mapped.items()}


def _mapped(value: Any, kind: Any) -> Any:
    """A value of an Arrow type with its maps, which pyarrow gives as lists of pairs, as tables."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_map(kind):
        return {key: _mapped(part, kind.item_type) for key, part in value}
    if types.is_struct(kind):
        return {name: _mapped(part, kind.field(name).type) for name, part in value.items()}
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return [_mapped(part, kind.value_type) for part in value] if listed else value


def _batches(file: Path) -> Iterator[Any]:
    """Record batches of a Parquet or Arrow file, one in memory at a time."""
    import pyarrow

    try:
        if file.suffix == ".parquet":
            from pyarrow.parquet import ParquetFile

            with ParquetFile(file) as table:
                yield from table.iter_batches(batch_size=1000)
        else:
            with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                yield from stream
    except (pyarrow.ArrowInvalid, OSError) as error:
        kind = "a Parquet" if file.suffix == ".parquet" else "an Arrow stream"
        raise BadData(f"{file} is not {kind} file: {str(error)[:100]}") from None


def _count(file: Path) -> int:
    """Once for each state of a file: checks before a start come by more than once, and it may be large."""
    try:
        stat = file.stat()
    except OSError:  # told by who opens it
        return _counted(file, -1, 0)
    return _counted(file, stat.st_size, stat.st_mtime_ns)


@cache
def _counted(file: Path, size: int, mtime_ns: int) -> int:
    if file.suffix == ".csv":
        return sum(1 for _ in _csv_rows(file))
    if file.suffix not in TABLES:
        listed = _listed(file)
        return len(listed) if listed is not None else sum(1 for _ in _lines(file))
    if file.suffix == ".arrow":
        return sum(batch.num_rows for batch in _batches(file))
    import pyarrow
    from pyarrow.parquet import read_metadata

    try:
        return int(read_metadata(file).num_rows)
    except (pyarrow.ArrowInvalid, OSError):
        raise BadData(f"{file} is not a Parquet file", "Download or write it again.") from None
