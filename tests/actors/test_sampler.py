"""The sampler room: no prompt skipped, none issued twice, never more open than the bound allows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from zlib import crc32

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.runtime import prompts
from actors.runtime.prompts import DataSpec, load_prompts
from actors.runtime.run import RunEnds
from actors.sampler.actor import SamplerSpec, run
from actors.sampler.progress import SamplerProgress
from bus import Commit, Reader
from bus.ledger import check, read_accounts
from bus.messages.active import PolicyActive
from bus.messages.groups import GroupVerdict, OpenGroup
from bus.messages.policy import Checkpointed, GroupsGivenUp, StepDone
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait
from bus.topology import ACTIVE, EVENTS, POLICY, PROMPTS, VERDICTS
from tests.actors.house import messages, open_bus, put, running, until
from tests.declared import data_of, room_of

P3 = crc32(b"4:3+1=4\0")  # of the text and label of row 3 below


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    vocabulary = {"<unk>": 0} | {c: i + 1 for i, c in enumerate("0123456789+=")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) for i in range(10)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return data_of(path=str(tmp_path / "data.jsonl"), tokenizer_dir=str(tmp_path))


def spec(data: DataSpec, **more: object) -> SamplerSpec:
    return room_of(SamplerSpec, data=data, n_samples_per_prompt=2, num_rollout=100, **more)


async def activate(bus, step: int) -> None:
    await put(bus, ACTIVE, PolicyActive(version=PolicyVersion(step + 1, step), serving={"w": step + 1}))


async def test_nothing_starts_before_a_version_is_active(redis_url: str, run_name: str, data: DataSpec) -> None:
    async with open_bus(redis_url, run_name) as bus:
        async with running(bus, "sampler", run, spec(data)) as context:
            await until(lambda: _waits(context))
            assert await bus.length(PROMPTS) == 0
            await activate(bus, 0)
            await until(lambda: _length(bus, 6))  # over-sampling 3 groups of 2


async def test_admission_stops_at_the_bound_and_goes_on_when_a_version_is_active(
    redis_url: str, run_name: str, data: DataSpec
) -> None:
    async with open_bus(redis_url, run_name, knobs={"over_sampling_batch_size": 64}) as bus:
        async with running(bus, "sampler", run, spec(data)) as context:
            await activate(bus, 0)
            await until(lambda: _length(bus, 8))  # (1 + 1) * 2 groups of 2
            await until(lambda: _says(context, Wait.CREDITS))
            done = StepDone(
                step=1,
                version=PolicyVersion(2, 1),
                trained_on=PolicyVersion(1, 0),
                groups=("g0000001", "g0000002"),
                samples=("g0000001/0", "g0000001/1", "g0000002/0", "g0000002/1"),
            )
            await put(bus, POLICY, done)
            await activate(bus, 1)
            await until(lambda: _length(bus, 12))
            open_now = await bus.hash_of(bus.keys.open_groups)
            assert len(open_now) == 6, "trained groups stay listed until their checkpoint"


async def test_the_last_batch_is_filled_when_a_member_of_a_group_was_dropped(redis_url: str, run_name: str, data: DataSpec) -> None:
    async with open_bus(redis_url, run_name, knobs={"over_sampling_batch_size": 0}) as bus:
        await put(bus, POLICY, StepDone(step=99, version=PolicyVersion(100, 99), trained_on=PolicyVersion(99, 98), groups=()))
        await activate(bus, 99)  # one step is left: two groups of two
        async with running(bus, "sampler", run, spec(data)):
            await until(lambda: _length(bus, 4))
            for group, members, kept in (("g0000001", (), True), ("g0000002", (0,), True), ("g0000002", (1,), False)):
                verdict = GroupVerdict(group_id=group, prompt_id="p", kept=kept, reason="zero_std_0", members=members)
                await put(bus, VERDICTS, verdict)
            await until(lambda: _length(bus, 6))


async def test_what_is_trained_and_not_yet_served_does_not_stand_for_the_last_batch(
    redis_url: str, run_name: str, data: DataSpec
) -> None:
    """With an interval of 2 step 99 is served with step 100, for which a dropped member was missing: both waited for ever."""
    knobs = {"over_sampling_batch_size": 0, "update_weights_interval": 2}
    async with open_bus(redis_url, run_name, knobs=knobs) as bus:
        await put(bus, POLICY, StepDone(step=98, version=PolicyVersion(99, 98), trained_on=PolicyVersion(98, 97), groups=()))
        await activate(bus, 98)
        async with running(bus, "sampler", run, spec(data)):
            await until(lambda: _length(bus, 8))
            for group, members, kept in (
                *((f"g000000{n}", (), True) for n in (1, 2, 3)),
                ("g0000004", (0,), True),
                ("g0000004", (1,), False),
            ):
                verdict = GroupVerdict(group_id=group, prompt_id="p", kept=kept, reason="zero_std_0", members=members)
                await put(bus, VERDICTS, verdict)
            samples = tuple(f"g000000{n}/{i}" for n in (1, 2) for i in (0, 1))
            done = StepDone(step=99, version=PolicyVersion(100, 99), trained_on=PolicyVersion(99, 98), groups=(), samples=samples)
            await put(bus, POLICY, done)
            await until(lambda: _length(bus, 10))


async def test_a_restart_continues_the_epoch_without_gap_or_repetition(redis_url: str, run_name: str, data: DataSpec) -> None:
    async with open_bus(redis_url, run_name, knobs={"sglang_server_concurrency": 64}) as bus:
        await activate(bus, 0)
        async with running(bus, "sampler", run, spec(data, shuffle=True)):
            await until(lambda: _length(bus, 6))
        async with running(bus, "sampler", run, spec(data, shuffle=True)):
            for n in range(1, 8):
                group_id = f"g{n:07d}"
                await until(lambda group_id=group_id: _is_open(bus, group_id))
                await put(bus, VERDICTS, GroupVerdict(group_id=group_id, prompt_id="p", kept=False, reason="zero_std_0"))
                await bus.commit(Commit(close_groups=(group_id,)))
            await until(lambda: _length(bus, 20))
        tasks = await messages(bus, PROMPTS)
        first_epoch = [t.prompt_id for t in tasks if t.index == 0][:10]
        assert sorted(first_epoch) == sorted(f"p{i}" for i in range(10))
        assert len({t.sample_id for t in tasks}) == len(tasks)
        assert len({t.sampling.seed for t in tasks}) == len(tasks)


async def test_prompts_that_changed_since_the_last_start_are_told(redis_url: str, run_name: str, data: DataSpec) -> None:
    async def told() -> list[str]:
        return [e.text for e in await messages(bus, EVENTS) if getattr(e, "kind", "") == "prompts changed"]

    async with open_bus(redis_url, run_name) as bus:
        await activate(bus, 0)
        for _ in range(2):
            async with running(bus, "sampler", run, spec(data)):
                await until(lambda: _length(bus, 6))
        assert not await told()
        rows = Path(data.path).read_text().splitlines()
        Path(data.path).write_text("\n".join(rows[:4]))
        async with running(bus, "sampler", run, spec(data)):
            await until(told)
        async with running(bus, "sampler", run, spec(data)) as context:
            await until(lambda: _waits(context))
        [said] = await told()
        assert said == (
            f"{data.path} has 4 prompts, and not the 10 that the run had; it goes on at its place among them, and from group "
            "g0000004 on the id of a prompt means its row there"
        )
        Path(data.path).write_text("\n".join([*rows[:3], rows[9]]))
        async with running(bus, "sampler", run, spec(data)):
            await until(lambda: _many(told, 2))
        assert (await told())[1].startswith(f"{data.path} has 4 prompts, and others than the 4 that the run had; it goes on")


async def test_while_prompts_are_read_the_sampler_is_heard_of_and_says_what_it_waits_for(
    redis_url: str, run_name: str, data: DataSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data source of the user's may take long; one that never returns would make an actor that nobody has heard of."""
    goes_on = threading.Event()
    monkeypatch.setattr(prompts, "load_prompts", lambda *_: goes_on.wait(60) and load_prompts(data))
    async with open_bus(redis_url, run_name) as bus:
        await activate(bus, 0)
        async with running(bus, "sampler", run, spec(data)) as context:
            await until(lambda: _says(context, f"the prompts of {data.path} to be read"))
            goes_on.set()
            await until(lambda: _length(bus, 6))
        goes_on.clear()
        async with running(bus, "sampler", run, spec(data)) as context:
            await until(lambda: _says(context, f"the prompts of {data.path} to be read"))


def three_and_no_more(path: str) -> Iterator[dict[str, str]]:
    """A data source whose service does not answer any more."""
    yield from ({"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(3))
    threading.Event().wait(60)


async def test_a_data_source_that_gives_no_further_row_ends_the_run_with_its_name(
    redis_url: str, run_name: str, data: DataSpec
) -> None:
    """Meanwhile the room says how far it came. Rows that take long in all, and come, are waited for."""
    own = msgspec.structs.replace(data, data_source_path=f"{__name__}.three_and_no_more")
    caught: list[RunEnds] = []

    async def body(context, spec) -> None:
        with pytest.raises(RunEnds) as ends:
            await run(context, spec)
        caught.append(ends.value)

    async with open_bus(redis_url, run_name) as bus:
        async with running(bus, "sampler", body, spec(own, batch_hook_timeout_s=1.0)) as context:
            await until(lambda: _says(context, f"the prompts of {data.path} to be read"))
            await until(lambda: _notes(context, "3 rows so far"))
            await until(lambda: _n_of(caught))
    late = f"--data-source-path {__name__}.three_and_no_more gave no row within 1 s (--batch-hook-timeout-s) behind row 3."
    assert str(caught[0]).startswith(late)


async def test_given_up_prompts_start_again_once(redis_url: str, run_name: str, data: DataSpec) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await activate(bus, 0)
        async with running(bus, "sampler", run, spec(data)):
            await until(lambda: _length(bus, 6))
            await bus.commit(Commit(close_groups=("g0000001",)))
            await put(bus, POLICY, GroupsGivenUp(groups=(("g0000001", "stale"),), prompts=("p0",), reissue=True))
            await until(lambda: _length(bus, 8))
        again = [t for t in await messages(bus, PROMPTS) if t.prompt_id == "p0" and t.index == 0]
        assert [t.attempt for t in again] == [0, 1]
        async with running(bus, "sampler", run, spec(data)) as context:
            await until(lambda: _waits(context))
        assert await bus.length(PROMPTS) == 8
        await bus.commit(Commit(close_groups=("g0000002",)))  # a credit
        async with running(bus, "sampler", run, spec(data)):
            await until(lambda: _length(bus, 10))
        issued = [t.prompt_id for t in await messages(bus, PROMPTS) if t.index == 0]
        assert (len(issued), issued.count("p0"), len(set(issued))) == (5, 2, 4), "a restarted one issues nothing a second time"


async def test_open_groups_of_a_lost_bus_are_issued_again(redis_url: str, run_name: str, data: DataSpec) -> None:
    async with open_bus(redis_url, run_name) as bus:
        opened = OpenGroup(group_id="g0000004", prompt_id="p3", n_samples=2, attempt=1, source_index=3, prompt_crc=P3)
        await bus.commit(
            Commit(
                open_groups={"g0000004": msgspec.msgpack.encode(opened)},
                state={"sampler": "0:4:4@0-0", "reissue": "pending"},
            )
        )
        async with running(bus, "sampler", run, spec(data)) as context:
            await until(lambda: _waits(context))
        tasks = await messages(bus, PROMPTS)
        assert [(t.sample_id, t.attempt) for t in tasks] == [("g0000004/0", 1), ("g0000004/1", 1)]
        assert await bus.state("reissue") == "done"


async def test_an_open_group_whose_prompt_the_data_holds_no_more_is_dropped_and_counted(
    redis_url: str, run_name: str, data: DataSpec
) -> None:
    """Rows may be taken out of the data of a run; that the bus is lost afterwards must not make the old file necessary."""
    async with open_bus(redis_url, run_name) as bus:
        at = {"n_samples": 2, "attempt": 1, "prompt_crc": P3}
        opened = [OpenGroup(group_id=f"g000000{n}", prompt_id=prompt, **at) for n, prompt in ((3, "p777"), (4, "p3"))]
        await bus.commit(
            Commit(
                open_groups={one.group_id: msgspec.msgpack.encode(one) for one in opened},
                state={"sampler": "0:4:4@0-0", "reissue": "pending"},
                ledger={"issued": 4},
            )
        )
        async with running(bus, "sampler", run, spec(data)) as context:
            await until(lambda: _waits(context))
        assert [t.sample_id for t in await messages(bus, PROMPTS)] == ["g0000004/0", "g0000004/1"]
        assert (await read_accounts(bus)).dropped == {"prompt_gone": 2}
        assert (await check(bus)).closes
        [said] = [m for m in await messages(bus, EVENTS) if getattr(m, "kind", "") == "prompts gone"]
        assert said.text.startswith("1 open groups are of prompts that") and "the first p777" in said.text


async def test_no_sample_of_a_group_is_issued_again_with_another_prompt(redis_url: str, run_name: str, data: DataSpec) -> None:
    """A row is taken out of the middle: the ids of those behind it mean others, and siblings of the lost ones may be trained."""
    async with open_bus(redis_url, run_name) as bus:
        await activate(bus, 0)
        async with running(bus, "sampler", run, spec(data, shuffle=False)):
            await until(lambda: _length(bus, 6))
        rows = Path(data.path).read_text().splitlines()
        Path(data.path).write_text("\n".join(rows[:1] + rows[2:]))
        await bus.commit(Commit(state={"reissue": "pending"}))
        async with running(bus, "sampler", run, spec(data, shuffle=False)) as context:
            await until(lambda: _waits(context))
        texts: dict[str, set[str]] = {}
        for task in await messages(bus, PROMPTS):
            texts.setdefault(task.group_id, set()).add(task.prompt_text)
        assert [texts[f"g000000{n}"] for n in (1, 2, 3)] == [{"0+1="}, {"1+1="}, {"2+1="}]
        assert (await read_accounts(bus)).dropped == {"prompt_gone": 4}
        [said] = [m for m in await messages(bus, EVENTS) if getattr(m, "kind", "") == "prompts gone"]
        assert said.text.startswith("2 open groups are of prompts that") and "the first p1" in said.text


async def _many(told: Callable[[], Awaitable[list[str]]], n: int) -> bool:
    return len(await told()) == n


async def test_a_filter_that_rejects_everything_ends_with_a_clear_error(redis_url: str, run_name: str, data: DataSpec) -> None:
    async with open_bus(redis_url, run_name, knobs={"max_waves": 2}) as bus:
        refused = asyncio.Event()

        async def body(context, given) -> None:
            with pytest.raises(RunEnds, match=r"filter starving: 12 samples in a row were dropped, the last as .* \(2 waves of 3"):
                await run(context, given)
            refused.set()

        async with running(bus, "sampler", body, spec(data)):
            await activate(bus, 0)
            await until(lambda: _length(bus, 6))
            for n in range(1, 7):
                verdict = GroupVerdict(group_id=f"g{n:07d}", prompt_id="p", kept=False, reason="zero_std_0", n_samples=2)
                await put(bus, VERDICTS, verdict)
            await asyncio.wait_for(refused.wait(), 40.0)


async def test_prompts_are_issued_as_engine_slots_come_free(redis_url: str, run_name: str, data: DataSpec) -> None:
    knobs = {"over_sampling_batch_size": 0, "max_weight_staleness": 20, "sglang_server_concurrency": 4}
    async with open_bus(redis_url, run_name, knobs=knobs) as bus:
        async with running(bus, "sampler", run, spec(data)) as context:
            serving = PolicyActive(version=PolicyVersion(1, 0), serving={"a": 1, "b": 1, "c": -1}, slots={"b": 6})
            await put(bus, ACTIVE, serving)
            await until(lambda: _length(bus, 14))  # 4 + 6 slots, and two groups of 2 that lie ready
            await until(lambda: _says(context, Wait.ENGINE_SLOTS))
            assert await bus.length(PROMPTS) == 14, "84 samples may be open, but no engine could begin them"
            [first, second] = (await bus.scan_all(PROMPTS))[:2]
            reader = Reader(bus, [PROMPTS], "generation", "a")
            await reader.open()
            entries = await reader.read(2, 1.0)
            assert [e.id for e in entries] == [first.id, second.id]
            await bus.commit(Commit(ack=entries))
            await reader.close()
            await until(lambda: _is_open(bus, "g0000008"))
        tasks = await messages(bus, PROMPTS)
        assert {t.step for t in tasks} == {0}


async def test_what_is_left_of_a_group_is_issued_again_alone(redis_url: str, run_name: str, data: DataSpec) -> None:
    async with open_bus(redis_url, run_name) as bus:
        left = {"members": (0, 2), "rewards": {1: 0.5}}
        rest = OpenGroup(group_id="g0000004", prompt_id="p3", prompt_crc=P3, n_samples=3, attempt=1, **left)
        await bus.commit(
            Commit(
                open_groups={"g0000004": msgspec.msgpack.encode(rest)},
                state={"sampler": "0:4:4@0-0", "reissue": "pending"},
            )
        )
        async with running(bus, "sampler", run, spec(data)) as context:
            await until(lambda: _waits(context))
        tasks = await messages(bus, PROMPTS)
        assert [(t.sample_id, t.n_samples) for t in tasks] == [("g0000004/0", 3), ("g0000004/2", 3)]


async def _length(bus, n: int) -> bool:
    return await bus.length(PROMPTS) >= n


async def _is_open(bus, group_id: str) -> bool:
    return group_id in await bus.hash_of(bus.keys.open_groups)


async def _says(context, what: str) -> bool:
    return context.vitals().waits_for == what


async def _notes(context, what: str) -> bool:
    return what in context.vitals().note


async def _n_of(found: list[RunEnds]) -> int:
    return len(found)


async def _waits(context) -> bool:
    """In its loop: what it waits for while the prompts are read comes before."""
    return context.vitals().waits_for in (Wait.CREDITS, Wait.ENGINE_SLOTS)


@pytest.mark.parametrize("keeps", [True, False], ids=["checkpoints", "none"])
def test_what_is_remembered_does_not_grow_with_the_run(keeps: bool) -> None:
    progress, sizes = SamplerProgress(keeps=keeps), []
    progress.fold(PolicyActive(version=PolicyVersion(1, 0), serving={"w": 1}))
    for step in range(1, 400):
        groups = [OpenGroup(group_id=f"g{step}n{n}", prompt_id="p", n_samples=4) for n in range(8)]
        for group in groups:
            progress.issued(group)
            progress.fold(GroupVerdict(group_id=group.group_id, prompt_id="p", kept=True))
        version = PolicyVersion(step + 1, step)
        samples = tuple(sample for group in groups for sample in group.sample_ids)
        progress.fold(StepDone(step=step, version=version, trained_on=PolicyVersion(step, step - 1), groups=(), samples=samples))
        progress.fold(PolicyActive(version=version, serving={"w": version.id}))
        if keeps and step % 10 == 0:
            progress.fold(Checkpointed(step=step, path=""))
        sizes.append(progress.size)
    assert max(sizes[200:]) <= max(sizes[:20]) and progress.open_samples == 0
