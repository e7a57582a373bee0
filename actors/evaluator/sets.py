"""The held-out data sets: what is asked of each, and their prompts. Those that could not be read are tried before each evaluation.

A set that cannot be read ends the run at its first reading: what the run was started with is at fault. Later a file that has gone
or was damaged costs evaluations of its set, and no more. State field `eval.read`: the digest of the settings that were read once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from actors.runtime.contained import named
from actors.runtime.context import Context
from actors.runtime.prompts import DataSpec, Prompt, Prompts, read_apart
from actors.runtime.refusals import Refused, RunEnds
from bus import Commit

READ = "eval.read"


class EvalSet(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out data set, and how it is measured. `metadata` is laid over that of each prompt."""

    name: str
    data: DataSpec
    samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    max_response_len: int = 128
    metadata: dict[str, Any] = {}


class Sets:
    """Those of a run. `samples` by number, those of a prompt together; `digest` of what decides which sample has which number, and
    how it is made; never 0. `unreadable`: what is wrong, by name of the set. `how`: of all sets, for the digest."""

    def __init__(self, context: Context, sets: Sequence[EvalSet], *how: object) -> None:
        self._context, self._sets, self._how = context, sets, how
        self.samples: list[tuple[EvalSet, Prompt]] = []
        self.digest = 0
        self.unreadable: dict[str, str] = {}

    async def read(self) -> bool:
        """All of them; False when the actor is to end meanwhile. Raises what is wrong with one where all is read the first time."""
        context = self._context
        settings = str(zlib.crc32(msgspec.json.encode([(data.name, data.data) for data in self._sets])))
        readable = await context.bus.state(READ) == settings
        samples: list[tuple[EvalSet, Prompt]] = []
        digest, unreadable = 0, {}
        for data in self._sets:
            prompts: Prompts | None = Prompts([], 0, [], [])
            try:
                prompts = await read_apart(context, data.data)
            except RunEnds:
                raise
            except Exception as error:  # whatever a file holds now, or a library says of it
                if not readable:
                    raise
                why = str(error) if isinstance(error, Refused) else named(error)
                unreadable[data.name] = f"its data cannot be read any more: {why}"
                await context.refusals.add("held-out data", f"{data.name}: {unreadable[data.name]}")
            if prompts is None:
                return False
            samples += [(data, prompt) for prompt in prompts.prompts for _ in range(data.samples_per_prompt)]
            sampling = (data.samples_per_prompt, data.temperature, data.top_p, data.top_k, data.max_response_len)
            own = (data.name, *sampling, data.metadata)
            digest = zlib.crc32(msgspec.json.encode((own, *self._how), enc_hook=str), digest)
            for prompt in prompts.prompts:
                digest = zlib.crc32(msgspec.json.encode((prompt.text, prompt.label, prompt.metadata), enc_hook=str), digest)
        self.samples, self.digest, self.unreadable = samples, digest or 1, unreadable
        if not readable:
            await context.bus.commit(Commit(state={READ: settings}))
        return True
