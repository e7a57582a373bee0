"""Rollout programs that tests name by their path, the environment that they ask, and an engine whose tokens follow from their
position."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import msgspec

from actors.generation.engine import Chunk, GenerateRequest
from actors.generation.rollouts import Session, Task, Trajectory, env
from tests.engine.scripted import ScriptedEngine

ASKED: list[tuple[Any, ...]] = []  # what the environment was asked, in all lives of a worker
STATE: dict[str, Any] = {}
PLUS = 40
HERE = __name__


class Talker(ScriptedEngine):
    """Each token follows from its position; every fourth one ends the turn."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.starts.append((request.rid, frozenset()))
        for made in range(1, request.max_new_tokens + 1):
            await asyncio.sleep(0)
            await self._goes.wait()
            token = token_at(len(request.input_ids) + made - 1)
            finish = "stop" if token == 0 else "length" if made == request.max_new_tokens else None
            yield Chunk([token], [-token / 64], self.version, finish)  # type: ignore[arg-type]
            if finish:
                return


class Streamer(ScriptedEngine):
    """Chunks of three tokens, which follow from their position; none ends the turn."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        for at in range(0, request.max_new_tokens, 3):
            await asyncio.sleep(0)
            tokens = [10 + (len(request.input_ids) + at + i) % 50 for i in range(min(3, request.max_new_tokens - at))]
            finish = "length" if at + 3 >= request.max_new_tokens else None
            yield Chunk(tokens, [-t / 64 for t in tokens], self.version, finish)  # type: ignore[arg-type]


def token_at(position: int) -> int:
    return 0 if position % 4 == 3 else 10 + position % 50


def add(sample_id: str, turn: int, tokens: list[int]) -> int:
    """The environment: plain and slow enough to run in a thread."""
    ASKED.append((sample_id, turn, tuple(tokens)))
    return sum(tokens) % 30


async def calculator(task: Task, session: Session) -> list[Trajectory]:
    """Three turns of the model with an answer of a tool between two of them."""
    ids, segments = list(task.prompt), []
    for turn in range(3):
        said = await session.generate(ids)
        segments.append(said)
        if turn < 2:
            told = env([PLUS, await session.tell("add", add, task.sample_id, turn, said.tokens)])
            segments.append(told)
            ids += said.tokens + told.tokens
        if gate := STATE.get(f"behind turn {turn}"):
            await gate(session)
    return [Trajectory(task.prompt, segments)]


async def capricious(task: Task, session: Session) -> list[Trajectory]:
    """Asks for something else each time it is run."""
    STATE["runs"] = STATE.get("runs", 0) + 1
    said = await session.generate([*task.prompt, STATE["runs"]])
    await session.tell("once", add, task.sample_id, 0, [])
    if STATE["runs"] == 1:
        raise RuntimeError("the network was away")
    return [Trajectory(task.prompt, [env([STATE["runs"]]), said])]


async def forgetful(task: Task, session: Session) -> list[Trajectory]:
    """Its environment is gone with the process."""
    STATE["runs"] = STATE.get("runs", 0) + 1
    said = await session.generate(task.prompt)
    told = await session.tell("once", add, task.sample_id, STATE["runs"], [])
    if STATE["runs"] == 1:
        raise RuntimeError("the browser died")
    again = await session.generate([*task.prompt, *said.tokens, told])
    return [Trajectory(task.prompt, [said, env([told]), again], reward=0.5, metadata={"told": told})]


forgetful.resumable = False  # type: ignore[attr-defined]


async def hanging(task: Task, session: Session) -> list[Trajectory]:
    await asyncio.sleep(60)
    return []


async def flooded(task: Task, session: Session) -> list[Trajectory]:
    """A tool that answers with everything it has."""
    await session.tell("dump", str.ljust, "", 100_000_000)
    return []


async def leaves(task: Task, session: Session) -> list[Trajectory]:
    raise SystemExit(0)


async def cancels(task: Task, session: Session) -> list[Trajectory]:
    """As libraries do whose own timeouts went wrong."""
    raise asyncio.CancelledError


async def picky(task: Task, session: Session) -> list[Trajectory]:
    """Never works for samples of groups h0, h1 and so on."""
    said = await session.generate(task.prompt)
    if task.group_id.startswith("h"):
        raise KeyError("no such file")
    return [Trajectory(task.prompt, [said])]


async def says(task: Task, session: Session) -> Any:
    """A text, which is also the name of a reason for which samples leave."""
    await session.generate(task.prompt)
    return "lease"


async def broken(task: Task, session: Session) -> list[Trajectory]:
    raise KeyError("no such tool")


async def rewriting(task: Task, session: Session) -> list[Trajectory]:
    """Two histories, and a turn that is thrown away."""
    first = await session.generate(task.prompt)
    await session.generate([9, 9])
    prompt = [*task.prompt, PLUS, *first.tokens[:1]]
    second = await session.generate(prompt)
    return [Trajectory(task.prompt, [first]), Trajectory(prompt, [second.first(2)])]


async def twice(task: Task, session: Session) -> list[Trajectory]:
    said = await session.generate(task.prompt)
    return [Trajectory(task.prompt, [said, said])]


async def cooler(task: Task, session: Session) -> list[Trajectory]:
    sampling = msgspec.structs.replace(task.sampling, temperature=0.5)
    return [Trajectory(task.prompt, [await session.generate(task.prompt, sampling)])]


async def invented(task: Task, session: Session) -> list[Trajectory]:
    said = await session.generate(task.prompt)
    return [Trajectory(task.prompt, [type(said)("model", [1, 2, 3], [-1.0] * 3, said.spans, call=said.call)])]


async def forgets_each_time(task: Task, session: Session) -> list[Trajectory]:
    """A new history at each turn, as of an agent that summarises all the time."""
    prompts = [[*task.prompt, turn % 50] for turn in range(300)]
    one = msgspec.structs.replace(task.sampling, max_new_tokens=1)
    return [Trajectory(prompt, [await session.generate(prompt, one)]) for prompt in prompts]


def hangs(turn: int) -> None:
    """A plain tool that does not come back while the test goes on."""
    STATE["over"].wait()


async def patient(task: Task, session: Session) -> list[Trajectory]:
    """Its first tool hangs, which it takes for an answer; the second one works."""
    first = await session.generate(task.prompt)
    try:
        await session.tell("hangs", hangs, 0, deadline_s=0.2)
    except TimeoutError:
        STATE["late"] = STATE.get("late", 0) + 1
    told = env([await session.tell("add", add, task.sample_id, 1, first.tokens, deadline_s=20.0)])
    return [Trajectory(task.prompt, [first, told, await session.generate(task.prompt + first.tokens + told.tokens)])]


async def talks_long(task: Task, session: Session) -> list[Trajectory]:
    """Three hundred turns, each behind 200 further tokens."""
    tokens, segments = list(task.prompt), []
    for _ in range(300):
        said, heard = await session.generate(tokens), env([7] * 200)
        segments += [said, heard]
        tokens += said.tokens + heard.tokens
    return [Trajectory(task.prompt, segments)]


async def judged_so(task: Task, session: Session) -> list[Trajectory]:
    """Its reward is what `label` says, as Python."""
    said = await session.generate(task.prompt)
    return [Trajectory(task.prompt, [said], reward=eval(task.label))]  # noqa: S307 - the test's own


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """As written for Miles, but for `args.post`: two answers of the engine with a tool's between them."""
    response: list[int] = []
    mask: list[int] = []
    for turn in range(2):
        payload = {"input_ids": sample.tokens + response, "sampling_params": sampling_params, "return_logprob": True}
        output = await args.post("http://router/generate", payload)
        said = [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]
        response, mask = response + said, mask + [1] * len(said)
        if turn == 0:
            response, mask = [*response, args.plus], [*mask, 0]
    sample.tokens, sample.response_length, sample.loss_mask = sample.tokens + response, len(response), mask
    sample.reward = {"score": 1.0}
    sample.metadata["turns"] = 2
    sample.status = sample.Status.COMPLETED
    return sample


async def newer(given: Any) -> Any:
    """The newer signature."""
    return SimpleNamespace(samples=await generate(given.args, given.sample, given.sampling_params))


async def retokenised(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    done = await generate(args, sample, sampling_params)
    done.tokens[-1] += 1
    return done


async def forgets_to_return(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    await generate(args, sample, sampling_params)


async def side_by_side(task: Task, session: Session) -> list[Trajectory]:
    """Two turns at once behind a first one; what fails once is asked again from the journal."""
    first = await session.generate(task.prompt)
    told = await session.tell("once", add, task.sample_id, 0, [1])
    ids = task.prompt + first.tokens
    left, right = await asyncio.gather(session.generate([*ids, told]), session.generate([*ids, told, told]))
    await session.tell("later", add, task.sample_id, 1, left.tokens + right.tokens)
    STATE["runs"] = STATE.get("runs", 0) + 1
    if STATE["runs"] == 1:
        raise RuntimeError("once")
    return [Trajectory([*ids, told], [left]), Trajectory(task.prompt, [first, env([told, told]), right])]


async def carries_an_object(task: Task, session: Session) -> list[Trajectory]:
    return [Trajectory(task.prompt, [await session.generate(task.prompt)], metadata={"mine": object()})]


async def answers_a_number(task: Task, session: Session) -> list[Trajectory]:
    return [Trajectory(task.prompt, [await session.generate(task.prompt)], response=7)]  # type: ignore[arg-type]


async def keeps_notes(task: Task, session: Session) -> list[Trajectory]:
    task.metadata["mine"] = object()
    return [Trajectory(task.prompt, [await session.generate(task.prompt)])]
