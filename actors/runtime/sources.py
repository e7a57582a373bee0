"""Miles' data source, a class with `get_samples`, as rows: asked for all prompts of the run before the first is issued.

It must give the same prompts each time, since the sampler keeps its place by number. Its `add_samples`, `save` and `load` are never
called: what was interrupted stays on the bus, and the place is part of the commit that issues a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from actors.runtime.hooks import load_hook
from actors.runtime.run import Refused

KEYS: dict[str, str | None] = {"input_key": "prompt", "label_key": "label", "metadata_key": "metadata", "tool_key": None}
AT_ONCE = 256
Rows = Callable[[str], Iterable[Any]]


def rows_function(path: str, keys: dict[str, str | None], values: Mapping[str, Any]) -> tuple[Rows, dict[str, str | None]]:
    """The function of the user's that gives rows, and the keys that lead into them. `values`: settings by name, for the `args` of a
    class of Miles'. Raises Refused."""
    found = load_hook(path)
    if not hasattr(found, "get_samples"):
        return found, keys

    def rows(data: str) -> Iterator[dict[str, Any]]:
        source = found(SimpleNamespace(**{**values, "prompt_data": data}))
        wanted, given = int(values["num_rollout"]) * int(values["rollout_batch_size"]), 0
        while given < wanted:
            groups = source.get_samples(min(AT_ONCE, wanted - given))
            if not groups:
                return
            for group in groups:
                sample = group[0] if isinstance(group, list) else group
                if not hasattr(sample, "prompt"):
                    raise Refused(f"{path}.get_samples gave {sample!r:.80} where a sample with a prompt belongs")
                given += 1
                label, metadata = getattr(sample, "label", None), getattr(sample, "metadata", None)
                yield {"prompt": sample.prompt, "label": label, "metadata": dict(metadata or {})}

    return rows, KEYS
