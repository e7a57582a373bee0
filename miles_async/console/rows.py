"""What lies on a stream, as rows: one for each sample of an entry, or one for an entry without samples (pure).

The same rows are looked through by `bus tail --where`, and written by `bus export`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import msgspec

from actors.runtime.readable import readable
from bus.inspect import wall_of
from bus.messages.base import unpack_ints
from bus.messages.groups import GroupKept
from bus.messages.samples import Parked, PrefixResume, RolloutDone, SampleTask, Scored
from bus.streams.entry import Entry
from bus.topology import Stream

Row = dict[str, Any]
Decode = Callable[[Iterable[int]], str]
OF_ENTRIES = ("stream", "id", "wall", "bytes", "type")
OF_SAMPLES = (
    *("sample", "group", "prompt_id", "index", "n_samples", "rm_type", "label", "eval_name", "step", "prompt_tokens", "tokens"),
    *("turns", "versions", "oldest_version", "newest_version", "finish", "worker", "resumed_tokens", "generate_s", "reward"),
    *("rewards.", "scorer", "score_s", "reason", "prompt", "response"),
)
TEXTS = ("prompt", "response")
LONGEST_TEXT = 1 << 30
_SAMPLES = (SampleTask, RolloutDone, Scored, Parked, PrefixResume, GroupKept)


def known(stream: Stream) -> set[str]:
    """Names that a row of this stream can have; one that ends in a dot has names behind it."""
    kinds = get_args(stream.union) or (stream.union,)
    plain = {f.name for kind in kinds if kind not in _SAMPLES for f in msgspec.structs.fields(kind)}
    samples = set(OF_SAMPLES) if any(kind in _SAMPLES for kind in kinds) else set()
    return set(OF_ENTRIES) | plain | samples | {f"{name}." for name in plain}


def rows_of(entry: Entry, message: Any, decode: Decode | None = None) -> Iterator[Row]:
    """Rows of one entry. `decode` (tokens to text) adds prompts and responses in full."""
    head: Row = {"stream": entry.stream.name, "id": entry.id, "wall": wall_of(entry.id), "bytes": entry.size}
    head["type"] = str(message.__struct_config__.tag)
    if isinstance(message, GroupKept):
        for scored in message.samples:
            yield head | _sample(scored, decode)
    elif isinstance(message, _SAMPLES):
        yield head | _sample(message, decode)
    else:
        yield head | {f: v for f in message.__struct_fields__ if _shown(v := getattr(message, f))}


def _shown(value: Any) -> bool:
    return not isinstance(value, bytes | memoryview | msgspec.Struct | msgspec.UnsetType)


def _sample(message: Any, decode: Decode | None) -> Row:
    rollout = message.rollout if isinstance(message, Scored) else message
    task = rollout if isinstance(rollout, SampleTask) else rollout.task
    row: Row = {name: getattr(task, name) for name in ("prompt_id", "index", "n_samples", "rm_type", "label", "eval_name", "step")}
    row |= {"sample": task.sample_id, "group": task.group_id, "prompt_tokens": len(task.prompt_tokens) // 4}
    if not isinstance(rollout, SampleTask):
        made = rollout.made if isinstance(rollout, RolloutDone) else rollout.response.made
        versions = sorted({span.version for span in made})
        row |= {"tokens": sum(span.n for span in made), "versions": versions}
        row |= {"oldest_version": versions[0], "newest_version": versions[-1]} if versions else {}
    if isinstance(rollout, RolloutDone):
        row |= {name: getattr(rollout, name) for name in ("finish", "worker", "resumed_tokens", "generate_s")}
        row["turns"] = rollout.episode.turns if rollout.episode is not msgspec.UNSET else 1
    if isinstance(rollout, Parked):
        row |= {"reason": rollout.reason, "worker": rollout.worker}
    if isinstance(message, Scored):
        row |= {name: getattr(message, name) for name in ("reward", "rewards", "scorer", "score_s")}
    if decode is not None:
        row |= _texts(message, rollout, task, decode)
    return row


def _texts(message: Any, rollout: Any, task: SampleTask, decode: Decode) -> Row:
    if isinstance(rollout, RolloutDone):
        scored = message if isinstance(message, Scored) else Scored(rollout=rollout, reward=0.0)
        whole = readable(scored, decode, limit=LONGEST_TEXT)
        return {name: whole[name] for name in TEXTS} | ({"said": whole["turns"]} if "turns" in whole else {})
    prompt = task.prompt_text or decode(unpack_ints(task.prompt_tokens))
    made = {} if isinstance(rollout, SampleTask) else {"response": decode(unpack_ints(rollout.response.tokens))}
    return {"prompt": prompt, **made}


def flat(rows: Iterable[Row]) -> list[Row]:
    """For columns: tables become `name.key`, lists and tables within become JSON."""
    found = []
    for row in rows:
        out: Row = {}
        for name, value in row.items():
            if isinstance(value, dict) and all(isinstance(v, int | float | str) for v in value.values()):
                out |= {f"{name}.{key}": v for key, v in value.items()}
            elif isinstance(value, dict | list | tuple):
                out[name] = msgspec.json.encode(value, enc_hook=str).decode()
            else:
                out[name] = value
        found.append(out)
    return found
