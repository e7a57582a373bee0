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


class Coming:
    """Rows of a function of the user's, as another thread sees them come. `given`: how many; what takes its time is the function
    only while it is asked for the next one."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._asked: float | None = None
        self.given = 0

    @property
    def late_s(self) -> float:
        """For how long the next row has been asked for."""
        asked = self._asked
        return 0.0 if asked is None else self._now() - asked

    def text(self) -> str:
        """How far it came."""
        late_s = self.late_s
        return f"{self.given} rows so far" + (f", none for {late_s:.0f} s" if late_s >= 1 else "")

    def of(self, function: Rows) -> Rows:
        """The same rows, looked at."""

        def rows(path: str) -> Iterator[Any]:
            self._asked = self._now()
            for row in function(path):
                self._asked, self.given = None, self.given + 1
                yield row
                self._asked = self._now()
            self._asked = None

        return rows


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
