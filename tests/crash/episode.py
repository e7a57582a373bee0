"""Rollout programs of whole runs that are disturbed: three short turns with an answer of an environment behind the first two."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from actors.generation.rollouts import Session, Task, Trajectory, env

EACH = 12  # tokens of a turn
SLOW_S = 0.5


def add(tokens: list[int]) -> int:
    """The environment: a digit's token id, by what the model said."""
    return 3 + sum(tokens) % 8


async def rollout(task: Task, session: Session) -> list[Trajectory]:
    return await in_turns(task, session, add)


async def in_turns(task: Task, session: Session, call: Callable[[list[int]], Any]) -> list[Trajectory]:
    sampling = msgspec.structs.replace(task.sampling, max_new_tokens=EACH)
    tokens, segments = list(task.prompt), []
    for turn in range(3):
        said = await session.generate(tokens, sampling)
        segments.append(said)
        if turn < 2:
            told = env([await session.tell("add", call, said.tokens)] * 2)
            segments.append(told)
            tokens = tokens + said.tokens + told.tokens
    return [Trajectory(task.prompt, segments)]


async def slow_add(tokens: list[int]) -> int:
    await asyncio.sleep(SLOW_S)
    return add(tokens)


async def slow(task: Task, session: Session) -> list[Trajectory]:
    """The same, waiting for its environment most of the time."""
    return await in_turns(task, session, slow_add)


async def idle(task: Task, session: Session) -> list[Trajectory]:
    """The same, waiting so long that minutes of a run cost little."""
    await asyncio.sleep(4 * SLOW_S)
    return await in_turns(task, session, slow_add)


async def rewritten(task: Task, session: Session) -> list[Trajectory]:
    """The same with a second history, and a turn that is thrown away."""
    [first] = await rollout(task, session)
    summary = [*task.prompt, *first.segments[-1].tokens[:4]]
    said = await session.generate(summary, msgspec.structs.replace(task.sampling, max_new_tokens=6))
    await session.generate(summary, msgspec.structs.replace(task.sampling, max_new_tokens=2))
    return [first, Trajectory(summary, [said])]


async def lost_world(task: Task, session: Session) -> list[Trajectory]:
    """One whose environment cannot be rebuilt."""
    return await rollout(task, session)


lost_world.resumable = False  # type: ignore[attr-defined]


def whole_groups(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Any]]:
    """A rollout function as it is written for Miles: two turns of each sample. In its third call it kills its worker, once."""
    groups = data_source.get_samples(args.rollout_batch_size)
    samples = [sample for group in groups for sample in group]
    struck = Path(args.runs_dir) / "struck"

    def made(sample: Any) -> None:
        prompt, mask = len(sample.tokens), list[int]()
        for turn in range(2):
            body = {"input_ids": sample.tokens, "sampling_params": {"max_new_tokens": EACH}}
            url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
            asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked) as answer:
                said = json.loads(answer.read())["output_ids"]
            heard = [3] * (1 - turn)
            sample.tokens, mask = sample.tokens + said + heard, mask + [1] * len(said) + [0] * len(heard)
        sample.response_length, sample.loss_mask = len(sample.tokens) - prompt, mask

    with ThreadPoolExecutor(len(samples)) as threads:
        for at, _ in enumerate(threads.map(made, samples)):
            if at == 3 and rollout_id >= 2 and not struck.exists():
                struck.touch()
                os.kill(os.getppid(), signal.SIGKILL)
    return groups


def holds(args: Any, groups: list[Any]) -> None:
    """A filter of the trainer's batches that takes its time with the third: a run is stopped meanwhile."""
    if len(_held) == 2:
        print(HELD, file=sys.stderr, flush=True)
        time.sleep(HOLD_S)
    _held.append(True)


HELD, HOLD_S = "the third batch is held", 12.0
_held: list[bool] = []


async def backtracks(task: Task, session: Session) -> list[Trajectory]:
    """One turn. One sample of the sixth group holds up its worker then, in C, with the interpreter's lock."""
    said = await session.generate(task.prompt)
    if task.sample_id == "g0000005/1":
        re.match(r"(a+)+$", "a" * 60 + "b")
    return [Trajectory(task.prompt, [said])]
