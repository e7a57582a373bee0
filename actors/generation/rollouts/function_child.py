"""`python -m actors.generation.rollouts.function_child PATH URL`: a rollout function written for Miles, in a process of its own.

    generate_rollout(args, rollout_id, data_source, evaluation=False)      returns groups, or an object with `samples`
    class Rollout: __init__(input); __call__(input)                        Miles' newer one; `def` or `async def`

The key that its worker asks for is the first line of stdin. It is called again each time it has returned; when it raises, the place
is told and the process ends. What it prints goes to the worker's log.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import urllib.request
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from actors.runtime.contained import lose_prints, named
from actors.runtime.hooks import awaited, load_hook
from actors.runtime.miles import MilesSample, Status
from actors.runtime.whole import said

SENT = ("tokens", "response_length", "loss_mask", "reward", "metadata", "status", "remove_sample", "response", "group_index")
"""Of a sample that the function gives back, what its worker reads."""


class WrongReturn(Exception):
    """What the function returned cannot be used."""


class WorkerCalls:
    """The worker, as the function's process calls it."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    def __call__(self, verb: str, **told: Any) -> Any:
        """Waits for the answer, however long that takes: the worker watches the time."""
        key = {"Authorization": f"Bearer {self._key}"}
        asked = urllib.request.Request(f"{self._url}/function/{verb}", msgspec.msgpack.encode(told), key)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as answer:
            return msgspec.msgpack.decode(answer.read())


class FunctionSource:
    """Miles' data source. Groups are lists of samples; `get_samples` waits until there are as many as asked for, or no more
    come."""

    def __init__(self, call: WorkerCalls) -> None:
        self._call = call

    def get_samples(self, num_samples: int) -> list[list[MilesSample]]:
        if num_samples < 1:
            return []
        return [[_sample(fields) for fields in group] for group in self._call("get", n=num_samples)]

    def add_samples(self, samples: list[Any]) -> None:
        """Given back, as far as they are: they come again."""
        self._call("add", groups=msgspec.Raw(encoded(sent(samples))))

    def get_buffer_length(self) -> int:
        return 0

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int | None = None) -> None: ...


def _sample(fields: dict[str, Any]) -> MilesSample:
    return MilesSample(**{**fields, "status": Status(fields["status"])})


def encoded(groups: Any) -> bytes:
    """As msgpack: an enumeration by its value, arrays and their numbers as lists and numbers. Raises Wrong."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if hasattr(value, "tolist"):
            return value.tolist()
        raise WrongReturn(f"a sample with {type(value).__name__} {str(value)[:60]!r}, which cannot be sent")

    try:
        return msgspec.msgpack.encode(groups, enc_hook=plain)
    except (ValueError, OverflowError, RecursionError, TypeError) as error:  # no Unicode, too large, too deep
        raise WrongReturn(f"samples that cannot be sent: {named(error)}") from error


def sent(groups: Any) -> list[list[list[dict[str, Any]]]]:
    """Groups of samples, each one as a list of its trajectories. Raises Wrong."""
    if not isinstance(groups, list | tuple):
        raise WrongReturn(f"{type(groups).__name__} where a list of groups belongs, each a list of samples")
    found = []
    for group in groups:
        if not isinstance(group, list | tuple) or not group:
            raise WrongReturn(f"{type(group).__name__} {str(group)[:60]!r} where a group belongs, a list of samples")
        parts = [list(one) if isinstance(one, list | tuple) else [one] for one in group]
        found.append([[_fields(sample) for sample in part] for part in parts])
    return found


def _fields(sample: Any) -> dict[str, Any]:
    if missing := [name for name in ("tokens", "response_length", "group_index") if not hasattr(sample, name)]:
        raise WrongReturn(f"{type(sample).__name__} {str(sample)[:60]!r} without {', '.join(missing)} where a sample belongs")
    given = {name: getattr(sample, name, None) for name in SENT}
    return given | {"metadata": given["metadata"] or {}, "response": given["response"] or ""}


def main() -> None:
    """Until the function raises, or the worker ends."""
    lose_prints()
    path, url = sys.argv[1:]
    call, loop = WorkerCalls(url, sys.stdin.readline().strip()), asyncio.new_event_loop()
    source, address = FunctionSource(call), urlsplit(url)
    hook: Any = None
    function: Any = None
    result: dict[str, Any] = {}
    while True:
        order = call("next", **result)
        try:
            engine = {"sglang_router_ip": address.hostname, "sglang_router_port": address.port}
            args = SimpleNamespace(**{**order["values"], **engine})
            hook = hook or load_hook(path)
            if inspect.isclass(hook):
                function = function or cast(Any, hook)(SimpleNamespace(args=args, data_source=source))
                found = function(SimpleNamespace(rollout_id=order["rollout_id"], evaluation=False))
            else:
                found = hook(args, order["rollout_id"], source, evaluation=False)
            if inspect.isawaitable(found):
                found = loop.run_until_complete(awaited(found))
            result = {"groups": msgspec.Raw(encoded(sent(getattr(found, "samples", found))))}
        except BaseException as error:  # noqa: BLE001 - it is told to the worker
            call("next", error=f"returned {error}" if isinstance(error, WrongReturn) else said(error))
            return


if __name__ == "__main__":
    main()
