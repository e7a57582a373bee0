"""A sample in Miles' words: what functions written for it read and fill.

Always true: its tokens, log-probs and versions are copies, so that whatever such a function does, what the model made stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

from actors.runtime.foreign_rewards import foreign
from actors.runtime.labels import label_of
from bus.messages.base import unpack_floats, unpack_ints
from bus.messages.samples import SampleTask, Scored

Decode = Callable[[Sequence[int]], str]


class Status(Enum):
    """How a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class MilesSample(SimpleNamespace):
    """Fields by Miles' names. `response`, the text, is made when it is first asked for."""

    Status = Status

    @staticmethod
    def of(task: Any, prompt: Sequence[int], **fields: Any) -> MilesSample:
        """A sample before it is generated, of a task of either kind (a message's, a program's)."""
        begun: dict[str, Any] = {
            "index": task.index,
            "group_index": task.group_id,
            "prompt": task.prompt_text,
            "tokens": list(prompt),
            "prompt_tokens": tuple(prompt),
            "response": "",
            "response_length": 0,
            "label": label_of(task.label, task.metadata),
            "metadata": dict(task.metadata),
            "loss_mask": None,
            "rollout_log_probs": None,
            "weight_versions": [],
            "reward": None,
            "status": Status.PENDING,
            "remove_sample": False,
        }
        return MilesSample(**(begun | fields))

    def get_reward_value(self, args: Any) -> Any:
        """The number among the rewards that --reward-key names."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) and args.reward_key else self.reward

    def __getattr__(self, name: str) -> Any:
        if name != "response" or "decode" not in self.__dict__:
            raise AttributeError(f"a sample has no {name!r} here")
        self.response = self.decode(self.tokens[len(self.tokens) - self.response_length :])
        return self.response


def judged(scored: Scored, decode: Decode) -> list[MilesSample]:
    """A scored rollout: one sample for each of its trajectories, which share the reward."""
    task: SampleTask = scored.rollout.task
    found = []
    for strand in scored.rollout.strands:
        prompt, response = unpack_ints(strand.prompt_tokens), strand.response
        sample = MilesSample.of(
            task,
            prompt,
            tokens=prompt + unpack_ints(response.tokens),
            response_length=response.n_tokens,
            loss_mask=list(bytes(response.loss_mask)),
            rollout_log_probs=unpack_floats(response.logprobs),
            weight_versions=[str(span.version) for span in response.made],
            reward=scored.rewards or scored.reward,
            status=Status.COMPLETED if scored.rollout.finish == "stop" else Status.TRUNCATED,
            decode=decode,
        )
        del sample.response
        found.append(sample)
    return found


def takes_args(hook: Any) -> bool:
    """Whether a function has Miles' signature: `(args, sample)`, `(args, samples)`."""
    try:
        given = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    return len(needed) == 2 and needed[0] == "args"


def reward_of(hook: Any, values: Mapping[str, Any]) -> Any:
    """A reward function of the user's, for one table or a list of them; Miles' `(args, sample)` and `(args, samples)` are taken
    too, and those of TRL and verl. `values`: what is on `args`."""
    if not takes_args(hook):
        return foreign(hook, values) or hook

    def shown(sample: Mapping[str, Any]) -> MilesSample:
        status = Status.COMPLETED if sample["finish"] == "stop" else Status.TRUNCATED
        group, _, index = str(sample["sample_id"]).rpartition("/")
        return MilesSample(
            **sample, response_length=sample["n_tokens"], status=status, reward=None, group_index=group, index=int(index or 0)
        )

    def plain(sample: Any) -> Any:
        args = SimpleNamespace(**values)
        return hook(args, [shown(one) for one in sample] if isinstance(sample, list) else shown(sample))

    async def waited(sample: Any) -> Any:
        return await plain(sample)

    return waited if inspect.iscoroutinefunction(hook) else plain


def judge_of(hook: Any, values: Callable[[], Mapping[str, Any]], decode: Decode) -> Any:
    """A filter of the user's; Miles' `(args, group)` is taken too, which answers with a boolean, or an object with `keep` and
    `reason`."""
    if not takes_args(hook):
        return hook

    def judge(samples: Sequence[Scored]) -> str | None:
        found = hook(SimpleNamespace(**values()), [judged(one, decode)[-1] for one in samples])
        reason = getattr(found, "reason", None) or getattr(hook, "__name__", "filter")
        return None if getattr(found, "keep", found) else str(reason)

    return judge
