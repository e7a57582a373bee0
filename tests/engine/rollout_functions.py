"""Rollout functions as they are written for Miles, which tests name by their path. They run in a process of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Groups = list[list[Any]]


def post(args: Any, path: str, body: Any) -> Any:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}{path}"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        return json.loads(answer.read())


async def answer(args: Any, sample: Any, turns: int = 2) -> Any:
    """Two answers of the engine with a tool's between them."""
    mask: list[int] = []
    prompt = len(sample.tokens)
    for turn in range(turns):
        payload = {"input_ids": sample.tokens, "sampling_params": {"temperature": 1.0}, "return_logprob": True}
        output = await asyncio.to_thread(post, args, "/generate", payload)
        said = [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]
        sample.tokens, mask = sample.tokens + said, mask + [1] * len(said)
        if turn < turns - 1:
            sample.tokens, mask = [*sample.tokens, args.plus], [*mask, 0]
    sample.response_length, sample.loss_mask, sample.reward = len(sample.tokens) - prompt, mask, float(sample.index)
    sample.status = sample.Status.COMPLETED
    return sample


def made(args: Any, groups: Groups) -> Groups:
    async def all_of() -> Groups:
        return [list(await asyncio.gather(*(answer(args, one) for one in group))) for group in groups]

    return asyncio.run(all_of())


def first_time(args: Any, what: str) -> bool:
    """Whether this was never asked, in any life of the process."""
    try:
        (Path(args.folder) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def returns_all(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    assert rollout_id >= 0 and not evaluation and data_source.get_samples(0) == []
    return made(args, data_source.get_samples(2))


class Newer:
    """The newer signature."""

    def __init__(self, given: Any) -> None:
        self.args, self.source = given.args, given.data_source

    async def __call__(self, given: Any) -> Any:
        groups = await asyncio.to_thread(self.source.get_samples, 2)
        return SimpleNamespace(samples=[[await answer(self.args, one) for one in group] for group in groups], metrics={"n": 1})


def gives_back(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    """The second group goes back with one turn done, and comes again so."""
    first, *rest = data_source.get_samples(2)
    if rest and first_time(args, "gave back"):
        sample = rest[0][0]
        output = post(args, "/generate", {"input_ids": sample.tokens, "sampling_params": {}})
        sample.tokens += output["output_ids"]
        sample.response_length = len(output["output_ids"])
        data_source.add_samples(rest)
        return made(args, [first])
    (Path(args.folder) / "came again with").write_text(str(first[0].response_length))
    for one in first:
        one.tokens = one.tokens[: len(one.tokens) - one.response_length]
    return made(args, [first])


def leaves_out(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    return made(args, data_source.get_samples(2))[:1]


def raises_once(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    groups = made(args, data_source.get_samples(2))
    if first_time(args, "raised"):
        raise ValueError("the judge was away")
    return groups


def raises(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    raise ValueError(f"no such tool for {len(data_source.get_samples(2))} groups")


def hangs_once(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    groups = data_source.get_samples(2)
    if first_time(args, "hung"):
        time.sleep(3600)
    return made(args, groups)


def dies_once(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    groups = made(args, data_source.get_samples(2))
    if first_time(args, "died"):
        os.kill(os.getpid(), signal.SIGKILL)
    return groups


def foreign(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    groups = made(args, data_source.get_samples(2))
    for one in groups[0]:
        one.group_index = "g77"
    return groups


def flat(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return [one for group in made(args, data_source.get_samples(2)) for one in group]


def cut(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    return [group[:1] for group in made(args, data_source.get_samples(2))]


def retokenised(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    groups = made(args, data_source.get_samples(2))
    groups[0][0].tokens[-1] += 1
    return groups


def of_text(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    groups = made(args, data_source.get_samples(2))
    groups[0][0].response_length = "3"
    return groups


def unsendable(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    groups = made(args, data_source.get_samples(2))
    groups[0][0].metadata = {"said": "\udcff"}
    return groups


@dataclass(frozen=True)
class Key:
    name: str = "a"


def unreadable(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    groups = made(args, data_source.get_samples(2))
    groups[0][0].metadata = {Key(): 3}
    return groups


def idle(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    return []


def aborts(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Groups:
    """As Miles' own does with what is not needed any more: turns end with what they have, and are trained so."""
    groups = data_source.get_samples(2)

    async def all_of() -> None:
        asked = [asyncio.ensure_future(answer(args, one, 1)) for group in groups for one in group]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(post, args, "/abort_request", {"abort_all": True})
        await asyncio.gather(*asked)

    asyncio.run(all_of())
    return groups
