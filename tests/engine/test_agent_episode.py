"""An agent on a real worker and a real bus: an episode that is cut again and again goes on from what its client was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from openai import AsyncOpenAI

from actors.generation.actor import Worker
from actors.generation.endpoint.agent import AgentProgram
from actors.generation.endpoint.server import Endpoint
from actors.generation.engine import Chunk, GenerateRequest
from actors.generation.rollouts import Task
from actors.generation.sample import start
from actors.generation.spec import GenerationSpec
from actors.runtime.chat import Chat
from actors.runtime.context import Context
from bus import ledger
from bus.messages.base import pack_ints, unpack_ints
from bus.messages.samples import PrefixResume, SampleTask, Sampling
from bus.topology import ACTIVE, DEAD, PARKED, PREFIXES, PROMPTS, ROLLOUTS
from scripts.bench.chat_tokenizer import make_chat
from tests.actors.agent_house import END
from tests.actors.house import messages, open_bus, put, running, until
from tests.engine.scripted import ScriptedEngine
from tests.engine.workers import order

TURNS = 4


def made_at(place: int) -> int:
    """Bytes at random, most of them no text; some end the turn."""
    drawn = crc32(str(place).encode())
    return END if drawn % 9 == 0 else 4 + drawn % 256


class Babbler(ScriptedEngine):
    """A token follows from its place."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        for made in range(request.max_new_tokens):
            await asyncio.sleep(0)
            token = made_at(len(request.input_ids) + made)
            finish = "stop" if token == END else "length" if made + 1 == request.max_new_tokens else None
            yield Chunk([token], [-0.25], self.version, finish)  # type: ignore[arg-type]
            if finish:
                return


async def agent(task: Task, base_url: str, api_key: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        heard: list[Any] = [{"role": "user", "content": "begin"}]
        for turn in range(TURNS):
            answer = await client.chat.completions.create(model="policy", messages=heard, stop=["\x00\x00\x00"])
            heard += [answer.choices[0].message, {"role": "user", "content": f"turn {turn}"}]
    return 0.5


async def played(redis_url: str, run_name: str, chat: Chat, agent: Any = agent, **knobs: Any) -> tuple[Any, int, Any]:
    """The agent's rollout, how often its sample left a worker, and the accounts. An agent of the test's finds the bus."""

    async def body(context: Context, spec: GenerationSpec) -> None:
        async with Endpoint(chat, "hermes", context.count) as endpoint:
            worker = Worker(context, spec, None, AgentProgram(agent, endpoint, idle_s=30.0))
            worker._link._connect = lambda url, inside: Babbler()
            workers.append(worker)
            await worker.run()

    async def joined() -> bool:
        return bool(workers) and workers[0]._link.engine is not None

    async def over() -> bool:
        for entry in await bus.scan_all(PARKED):  # the partial room, played by hand
            parked = await bus.message(entry)
            if entry.id not in moved:
                moved.add(entry.id)
                await put(bus, PREFIXES, PrefixResume(task=parked.task, response=parked.response, journal=parked.journal))
        return await bus.length(ROLLOUTS) + await bus.length(DEAD) > 0

    workers: list[Worker] = []
    moved: set[str] = set()
    task = SampleTask(
        sample_id="g/0", group_id="g", index=0, n_samples=1, prompt_id="g", prompt_tokens=pack_ints([4]),
        sampling=Sampling(max_new_tokens=400, stop_token_ids=(END,)),
    )  # fmt: skip
    async with open_bus(redis_url, run_name, groups=("g",), knobs=knobs) as bus:
        agent.bus = bus
        await put(bus, PROMPTS, task)
        async with running(bus, "w0", body, GenerationSpec(engine="external", engine_url="scripted")):
            await until(joined)
            await put(bus, ACTIVE, order(1, Path("/nowhere")))
            await until(over)
        assert await messages(bus, DEAD) == []
        [rollout] = await messages(bus, ROLLOUTS)
        return rollout, len(moved), await ledger.read_accounts(bus)


@pytest.mark.timeout(60)
async def test_an_agent_whose_sample_leaves_in_mid_turn_ends_with_the_same_tokens(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    chat = make_chat(tmp_path)
    whole, left, _ = await played(redis_url, run_name, chat)
    assert left == 0 and whole.episode.turns == TURNS and whole.episode.reward == 0.5
    prompt, response = unpack_ints(whole.episode.prompt_tokens), unpack_ints(whole.response.tokens)
    mask = list(whole.response.loss_mask)
    assert prompt == chat.render([{"role": "user", "content": "begin"}])
    assert [t for t, m in zip(response, mask, strict=True) if m] == [made_at(len(prompt) + i) for i, m in enumerate(mask) if m]
    assert mask.count(0) > 0 and "\ufffd" in chat.decode(response), "it was no text, so tokenising it again would show"

    cut, left, accounts = await played(redis_url, f"{run_name}-cut", chat, max_tokens_per_slice=5)
    assert left >= 3, "it left in mid-turn"
    assert bytes(cut.response.tokens) == bytes(whole.response.tokens) and list(cut.response.loss_mask) == mask
    assert cut.episode == whole.episode and accounts.tokens_generated == sum(mask)


@pytest.mark.timeout(60)
async def test_what_an_agent_has_heard_is_saved_before_it_hears_it(redis_url: str, run_name: str, tmp_path: Path) -> None:
    saved, heard = [], []

    async def looks(task: Task, base_url: str, api_key: str) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for stream in (False, True):
                messages: Any = [{"role": "user", "content": f"stream {stream}"}]
                answer = await client.chat.completions.create(model="policy", messages=messages, stream=stream)
                if stream:
                    async for _ in answer:
                        pass
                left = SampleTask(sample_id=task.sample_id, group_id="g", index=0, n_samples=1, prompt_id="g", prompt_tokens=b"")
                pieces = await looks.bus.load_prefix(task.sample_id)  # type: ignore[attr-defined]
                saved.append(start(left, pieces, mask_prefix=False).n_tokens)
                heard.append(0 if stream else answer.usage.completion_tokens)
        return 0.5

    whole, *_ = await played(redis_url, run_name, make_chat(tmp_path), looks, partial_save_tokens=1 << 30)
    made = sum(bytes(whole.episode.earlier[0].response.loss_mask)), sum(bytes(whole.response.loss_mask))
    assert saved == [made[0], sum(made)] and heard[0] == made[0] > 0
