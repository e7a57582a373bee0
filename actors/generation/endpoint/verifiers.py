"""Environments of the package `verifiers` (0.4) as agents: their tasks are the prompts, their harness talks to our endpoint, their
rewards are the samples'.

    # my_env.py
    from actors.generation.endpoint.verifiers import Played

    played = Played("my_taskset", agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}})
    rows, agent = played.rows, played.agent

`--data-source-path my_env.rows --custom-agent-function-path my_env.agent --input-key prompt --metadata-key metadata`
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from actors.generation.rollouts.session import Task
from actors.runtime.run import Refused

MOST_TASKS = 100_000
INDEX = "verifiers_index"
_numbers = itertools.count()


class EpisodeFailed(Exception):
    """The environment says that this episode is no valid result."""


class Played:
    """The taskset of this id, as `verifiers` finds it. `config`: further settings of its environment, as its own TOML has them
    under [env]. Raises Refused where the package is missing."""

    def __init__(self, taskset: str, **config: Any) -> None:
        try:
            import verifiers.v1
        except ImportError as error:
            raise Refused(f"environments of verifiers need the package: {error}. pip install 'verifiers>=0.4,<0.5'.") from error
        self._vf = verifiers.v1
        self._config = config | {"taskset": {"id": taskset} | config.get("taskset", {})}

    def _environment(self) -> Any:
        from verifiers.v1.utils.loaders import resolve_env_config

        return self._vf.load_environment(resolve_env_config(self._config))

    @cached_property
    def _tasks(self) -> list[Any]:
        return list(itertools.islice(iter(self._environment().taskset), MOST_TASKS))

    def rows(self, path: str) -> Iterator[dict[str, Any]]:
        """One row a task; the metadata names it for `agent`."""
        for index, task in enumerate(self._tasks):
            yield {"prompt": task.data.prompt_text or "-", "metadata": {INDEX: index}}

    async def agent(self, task: Task, base_url: str, api_key: str) -> float:
        """One episode; its reward. An environment of its own each time: what it serves knows one key."""
        variable = f"MILES_ASYNC_EPISODE_{next(_numbers)}"  # verifiers takes keys from the environment only
        os.environ[variable] = api_key
        try:
            client = self._vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            environment = self._environment()
            async with environment.serving():
                context = self._vf.ModelContext(model="policy", client=client)
                episode = await environment.run_episode(self._tasks[task.metadata[INDEX]], context)
        except SystemExit as error:  # it would end programs that lack an account of its makers
            raise EpisodeFailed(str(error)) from error
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(trace.last_error for trace in episode.traces if trace.last_error is not None)]
            raise EpisodeFailed("; ".join(f"{e.type}: {e.message}"[:200] for e in errors) or "it is not ok")
        return float(sum(trace.reward for trace in episode.traces))
