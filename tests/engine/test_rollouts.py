"""Rollout programs on a real bus: what they return, and episodes that outlive the worker that began them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.generation import turns
from actors.generation.actor import Worker
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.rollouts import Session, live, programs
from actors.generation.spec import GenerationSpec
from actors.runtime import consume
from actors.runtime.context import Context
from actors.runtime.refusals import RunEnds
from bus import Bus, ledger
from bus.knobs.live import LiveKnobs
from bus.messages.base import unpack_floats, unpack_ints
from bus.messages.samples import Parked, PrefixResume, RolloutDone, RolloutLost, SampleTask
from bus.messages.versions import VersionSpan
from bus.topology import ACTIVE, DEAD, PARKED, PREFIXES, PROMPTS, ROLLOUTS
from scripts.bench.chat_tokenizer import make_chat
from tests.actors.house import messages, open_bus, put, running, until
from tests.declared import actor_of
from tests.engine.rollout_programs import ASKED, HERE, PLUS, STATE, Streamer, Talker, token_at
from tests.engine.scripted import sample
from tests.engine.workers import order, serve


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ASKED.clear()
    STATE.clear()
    yield


def task(name: str = "g", **fields: Any) -> SampleTask:
    return sample(name, 0, tokens=40, **fields)


@asynccontextmanager
async def house(
    redis_url: str, run_name: str, program: str, group: str = "g", **knobs: Any
) -> AsyncIterator[tuple[Bus, GenerationSpec]]:
    """A bus with a version served and one sample to generate."""
    path = f"{HERE}.{program}"
    spec = GenerationSpec(engine="external", engine_url="scripted", program=path, program_values={"plus": PLUS})
    async with open_bus(redis_url, run_name, groups=(group,), knobs={"partial_save_tokens": 2, **knobs}) as bus:
        await put(bus, PROMPTS, with_stop(task(group)))
        yield bus, spec


def with_stop(one: SampleTask) -> SampleTask:
    sampling = msgspec.structs.replace(one.sampling, stop_token_ids=(0,))
    return msgspec.structs.replace(one, sampling=sampling)


def body_on(engine: SGLangClient) -> Any:
    async def body(context: Context, spec: GenerationSpec) -> None:
        worker = STATE["worker"] = Worker(context, spec)
        await serve(worker, context, engine)

    return body


async def one_rollout(bus: Bus) -> RolloutDone | RolloutLost:
    async def there() -> bool:
        return await bus.length(ROLLOUTS) > 0

    await until(there)
    [found] = await messages(bus, ROLLOUTS)
    return found


async def played(redis_url: str, run_name: str, program: str, **knobs: Any) -> tuple[Any, ledger.Accounts, Any]:
    """The sample of one program: its rollout, the accounts, and dead letters."""
    async with house(redis_url, run_name, program, **knobs) as (bus, spec):
        async with running(bus, "w0", body_on(Talker()), spec):
            rollout = await one_rollout(bus)
        return rollout, await ledger.read_accounts(bus), await messages(bus, DEAD)


def expected() -> tuple[list[int], list[int], tuple[VersionSpan, ...]]:
    """Tokens, mask and spans of the calculator's episode."""
    tokens: list[int] = []
    mask: list[int] = []
    spans: list[VersionSpan] = []
    for turn in range(3):
        said: list[int] = []
        while not said or said[-1]:
            said.append(token_at(2 + len(tokens) + len(said)))
        tokens, mask, spans = tokens + said, mask + [1] * len(said), [*spans, VersionSpan(1, 1, len(said))]
        if turn < 2:
            tokens, mask, spans = [*tokens, PLUS, sum(said) % 30], [*mask, 0, 0], [*spans, VersionSpan(-1, -1, 2)]
    return tokens, mask, tuple(spans)


def agrees(rollout: Any) -> bool:
    tokens, mask, spans = expected()
    response = rollout.response
    assert unpack_ints(response.tokens) == tokens and list(response.loss_mask) == mask and response.spans == spans
    assert unpack_floats(response.logprobs) == [-t / 64 * m for t, m in zip(tokens, mask, strict=True)]
    return rollout.n_made == sum(mask)


async def test_a_tool_episode_has_the_models_tokens_with_gradient_and_the_tools_without(redis_url: str, run_name: str) -> None:
    rollout, accounts, _ = await played(redis_url, run_name, "calculator")
    assert agrees(rollout) and rollout.episode.turns == 3 and rollout.finish == "stop"
    assert accounts.tokens_generated == rollout.n_made and not accounts.tokens_dropped
    assert len(ASKED) == 2


async def test_a_text_ends_the_answer_with_the_token_that_completes_it(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """--rollout-stop. The engine knows nothing of it; what came behind in the same chunk is counted."""
    decode = make_chat(tmp_path).decode
    async with open_bus(redis_url, run_name, groups=("g",), knobs={"partial_save_tokens": 2}) as bus:
        asked = task()
        stop = ("never said", decode([15, 16]))
        await put(bus, PROMPTS, msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, stop=stop)))
        spec = GenerationSpec(engine="external", engine_url="scripted", model_path=str(tmp_path))
        async with running(bus, "w0", body_on(Streamer()), spec):
            rollout = await one_rollout(bus)
        accounts = await ledger.read_accounts(bus)
    assert isinstance(rollout, RolloutDone) and rollout.finish == "stop"
    assert unpack_ints(rollout.response.tokens) == [12, 13, 14, 15, 16]
    assert accounts.tokens_generated == 6 and accounts.tokens_dropped == {"discarded": 1}


class Killed(BaseException):
    """The process is gone."""


async def life(bus: Bus, name: str, spec: GenerationSpec) -> None:
    """A worker from its start until its sample is done or it is killed."""
    knobs = LiveKnobs(bus)
    await knobs.open()
    context = Context(actor_of(name=name, role=name, bus=bus.config, run_seed=7), bus, knobs)
    over = asyncio.Event()
    follow = asyncio.create_task(knobs.follow(over))
    work = asyncio.create_task(body_on(Talker())(context, spec))
    while not work.done() and not await bus.length(ROLLOUTS):  # noqa: ASYNC110 - as `until` does
        await asyncio.sleep(0.01)
    context.draining.set()
    over.set()
    await asyncio.wait_for(asyncio.gather(work, follow, return_exceptions=True), 30)
    if (error := work.exception()) is not None:
        assert killed(error), error


def killed(error: BaseException) -> bool:
    return isinstance(error, Killed) or (isinstance(error, BaseExceptionGroup) and all(map(killed, error.exceptions)))


@pytest.mark.timeout(90)
async def test_killed_at_any_point_an_episode_goes_on_from_its_last_turn(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing lost, none twice; what the environment was told once is what it is told again."""
    visits: dict[str, int] = {}
    killed_at: dict[str, str] = {}

    def point(actor: str, name: str) -> None:
        visits[actor] = visits.get(actor, 0) + 1
        if visits[actor] == int(actor[1:]) and actor not in killed_at:
            killed_at[actor] = name
            raise Killed(name)

    async def case(n: int) -> None:
        name, group = f"w{n}", f"g{n}"
        async with house(redis_url, f"{run_name}{n}", "calculator", group, partial_save_tokens=3) as (bus, spec):
            await life(bus, name, spec)
            if name in killed_at:
                await life(bus, name, spec)
            [rollout] = await messages(bus, ROLLOUTS)
            accounts = await ledger.read_accounts(bus)
        assert agrees(rollout), killed_at[name]
        assert (accounts.tokens_generated, accounts.tokens_dropped) == (rollout.n_made, {})
        asked = [one for one in ASKED if one[0] == f"{group}/0"]
        again = len(asked) - len(set(asked))
        assert again <= (killed_at.get(name) in ("after_tell", "before_save")) and {turn for _, turn, _ in asked} == {0, 1}

    for module in (turns, live, consume):
        monkeypatch.setattr(module, "fault_point", point)
    for module in (live, consume):
        monkeypatch.setattr(module, "contained", nullcontext)  # what kills is nothing that a program raised
    await asyncio.gather(*map(case, range(1, 22)))
    assert set(killed_at.values()) == {
        "before_save", "after_save", "before_tell", "after_tell", "before_commit", "after_commit"
    }  # fmt: skip
    assert 12 < len(killed_at) < 21, "the last ones ended unharmed"


async def test_draining_while_the_environment_is_asked_parks_the_turns_so_far(redis_url: str, run_name: str) -> None:
    held = asyncio.Event()

    async def hang(session: Session) -> None:
        held.set()
        await asyncio.sleep(3600)

    STATE["behind turn 1"] = hang
    async with house(redis_url, run_name, "calculator") as (bus, spec):
        async with running(bus, "w0", body_on(Talker()), spec):
            await asyncio.wait_for(held.wait(), 20)
        [parked] = await messages(bus, PARKED)
        assert isinstance(parked, Parked) and [call.no for call in parked.journal or ()] == [0, 1, 2, 3]
        await put(bus, PREFIXES, PrefixResume(task=parked.task, response=parked.response, journal=parked.journal))
        STATE.clear()
        async with running(bus, "w1", body_on(Talker()), spec):
            rollout = await one_rollout(bus)
        assert agrees(rollout) and rollout.resumed_tokens == parked.response.n_tokens and len(ASKED) == 2  # type: ignore[union-attr]
        accounts = await ledger.read_accounts(bus)
        assert accounts.tokens_generated == rollout.n_made  # type: ignore[union-attr]


async def test_weights_that_change_between_turns_are_told_turn_by_turn(redis_url: str, run_name: str) -> None:
    async def update(session: Session) -> None:
        await put(STATE["bus"], ACTIVE, order(2, Path("/nowhere")))
        worker = STATE["worker"]

        async def serves() -> bool:
            return worker._link.serving is not None and worker._link.serving.id == 2

        await until(serves)

    STATE["behind turn 0"] = update
    async with house(redis_url, run_name, "calculator") as (bus, spec):
        STATE["bus"] = bus
        async with running(bus, "w0", body_on(Talker()), spec):
            rollout = await one_rollout(bus)
    assert isinstance(rollout, RolloutDone)
    assert [span.version for span in rollout.response.spans] == [1, -1, 2, -1, 2]
    assert [span.version for span in rollout.made] == [1, 2, 2]


async def test_a_slice_ends_in_mid_episode_and_the_rest_follows(redis_url: str, run_name: str) -> None:
    async with house(redis_url, run_name, "calculator", max_tokens_per_slice=3) as (bus, spec):
        async with running(bus, "w0", body_on(Talker()), spec):

            async def moved() -> bool:  # the partial room, played by hand
                for entry in await bus.scan_all(PARKED):
                    parked = await bus.message(entry)
                    if entry.id not in STATE.setdefault("moved", set()):
                        STATE["moved"].add(entry.id)
                        assert parked.reason == "slice"
                        await put(bus, PREFIXES, PrefixResume(task=parked.task, response=parked.response, journal=parked.journal))
                return await bus.length(ROLLOUTS) > 0

            await until(moved)
        [rollout] = await messages(bus, ROLLOUTS)
        assert agrees(rollout) and len(STATE["moved"]) == (rollout.n_made - 1) // 3 and len(ASKED) == 2


async def test_a_program_that_asks_for_something_else_begins_again_and_is_counted(redis_url: str, run_name: str) -> None:
    rollout, accounts, dead = await played(redis_url, run_name, "capricious")
    assert STATE["runs"] == 3 and not dead, "it failed, was replayed, and began again"
    assert unpack_ints(rollout.response.tokens)[0] == 3 and rollout.made == rollout.response.made
    assert STATE["worker"]._context.counters["episodes_restarted"] == 1
    assert accounts.tokens_generated == rollout.n_made


async def test_an_environment_that_cannot_be_rebuilt_begins_anew(redis_url: str, run_name: str) -> None:
    rollout, accounts, dead = await played(redis_url, run_name, "forgetful")
    assert STATE["runs"] == 2 and not dead and [turn for _, turn, _ in ASKED] == [1, 2]
    assert (rollout.episode.reward, rollout.episode.metadata) == (0.5, {"told": 0})
    assert accounts.tokens_generated == rollout.n_made


async def test_histories_that_were_rewritten_are_trajectories_of_one_sample(redis_url: str, run_name: str) -> None:
    rollout, accounts, _ = await played(redis_url, run_name, "rewriting")
    first, second = rollout.strands
    assert unpack_ints(first.prompt_tokens) == [7, 12] and unpack_ints(second.prompt_tokens) == [7, 12, PLUS, token_at(2)]
    assert (first.response.n_tokens, second.response.n_tokens, rollout.n_made) == (2, 2, 4)
    assert accounts.tokens_generated == accounts.tokens_dropped["discarded"] + rollout.n_made


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("broken", f"{HERE}.broken on g/0 raised KeyError: 'no such tool' at rollout_programs.py:"),
        ("leaves", f"{HERE}.leaves on g/0 raised SystemExit: 0 at rollout_programs.py:"),
        ("cancels", f"{HERE}.cancels on g/0 raised CancelledError at rollout_programs.py:"),
        ("flooded", "flooded on g/0 raised ValueError: dump gave 100,000,005 bytes"),
        ("says", "the rollout program returned 'lease' for g/0, no list of trajectories"),
        ("twice", "is in two trajectories, or twice in one"),
        ("retokenised", "are not what the engine answered"),
        ("forgets_to_return", "g/0: the function returned None, not its sample or a list of samples"),
        ("cooler", "asks for temperature 0.5, its task has 1.0"),
        ("forgets_each_time", "g/0 has 300 trajectories, and each is trained with all it read: at most 256 are taken"),
        ("invented", "as the model's that no call of this session made"),
        ("carries_an_object", "gave g/0 metadata, a response or a reward that cannot travel with it: TypeError: Encoding objects"),
        ("answers_a_number", "that cannot travel with it: ValidationError: Expected `str`"),
    ],
)
async def test_a_program_that_is_wrong_costs_its_sample_and_says_where(
    redis_url: str, run_name: str, program: str, said: str
) -> None:
    rollout, _, [letter] = await played(redis_url, run_name, program)
    assert isinstance(rollout, RolloutLost) and said in letter.error


async def test_what_a_program_does_to_its_tasks_metadata_stays_its_own(redis_url: str, run_name: str) -> None:
    rollout, _, dead = await played(redis_url, run_name, "keeps_notes")
    assert not dead and rollout.task.metadata == {}


async def test_turns_side_by_side_are_told_apart_when_they_are_replayed(redis_url: str, run_name: str) -> None:
    rollout, accounts, dead = await played(redis_url, run_name, "side_by_side")
    assert not dead and STATE["runs"] == 2 and [turn for _, turn, _ in ASKED] == [0, 1]
    left, right = rollout.strands
    assert unpack_ints(left.prompt_tokens) == [7, 12, token_at(2), 0, 1] and rollout.episode.turns == 3
    assert unpack_ints(left.response.tokens) == [*map(token_at, (5, 6, 7))]
    assert unpack_ints(right.response.tokens) == [token_at(2), 0, 1, 1, *map(token_at, (6, 7))]
    assert accounts.tokens_generated == rollout.n_made == 7


@pytest.mark.parametrize("program", ["generate", "newer"])
async def test_a_generate_function_written_for_miles_is_a_program(redis_url: str, run_name: str, program: str) -> None:
    rollout, accounts, dead = await played(redis_url, run_name, program)
    assert not dead and [(span.made, span.n) for span in rollout.response.spans] == [(True, 2), (False, 1), (True, 3)]
    assert unpack_ints(rollout.response.tokens) == [token_at(2), 0, PLUS, *map(token_at, (5, 6, 7))]
    assert (rollout.episode.reward, rollout.episode.metadata) == ({"score": 1.0}, {"turns": 2})
    assert accounts.tokens_generated == rollout.n_made == 5


@pytest.mark.parametrize(("program", "says"), [("broken", "KeyError"), ("invented", "that no call of this session made")])
async def test_a_program_that_fails_for_every_sample_ends_the_run(redis_url: str, run_name: str, program: str, says: str) -> None:
    ended: list[BaseException] = []

    async def body(context: Context, spec: GenerationSpec) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await body_on(Talker())(context, spec)
        error: BaseException = caught.value
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        ended.append(error)

    async def over() -> bool:
        return bool(ended)

    async with house(redis_url, run_name, program) as (bus, spec):
        await put(bus, PROMPTS, *(with_stop(task(f"h{i}")) for i in range(30)))
        async with running(bus, "w0", body, spec):
            await until(over)
        assert isinstance(ended[0], RunEnds) and says in str(ended[0]) and await bus.length(DEAD) < 4


async def test_samples_that_alone_are_left_and_fail_are_given_up_and_the_run_goes_on(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of a batch never work: when all others were done, their own attempts in a row ended the run."""
    monkeypatch.setattr(programs, "SPARED_S", 0.3)
    bad = [f"h{i}" for i in range(5)]

    async def given_up() -> bool:
        return await bus.length(DEAD) == len(bad)

    async with open_bus(redis_url, run_name, groups=("g", *bad)) as bus:
        await put(bus, PROMPTS, *(with_stop(task(name)) for name in ("g", *bad)))
        spec = GenerationSpec(engine="external", engine_url="scripted", program=f"{HERE}.picky")
        async with running(bus, "w0", body_on(Talker()), spec):
            await until(given_up)
        assert all("attempt 4 was the last" in letter.error for letter in await messages(bus, DEAD))
        found = await messages(bus, ROLLOUTS)
    assert sorted(m.group_id for m in found if isinstance(m, RolloutLost)) == bad and len(found) == 6
