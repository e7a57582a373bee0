"""Held-out data that changes under a run: what is under way is given up; what cannot be read costs evaluations of its set alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.evaluator.actor import EvaluatorSpec, run
from actors.evaluator.sets import EvalSet
from actors.runtime.context import Context
from actors.runtime.refusals import Refused
from bus import Bus, Commit, Reader
from bus.messages.active import PolicyActive
from bus.messages.policy import Finished, Restored
from bus.messages.samples import SampleTask
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.topology import ACTIVE, DEAD, EVAL_PROMPTS, EVAL_SCORED, EVENTS, POLICY
from miles_async.launcher.eval_sets import is_evaluating
from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.tokenizer import save_tokenizer
from tests.actors.house import messages, open_bus, put, running, until
from tests.actors.test_evaluator import LAST, active, answer, issued, lost, results
from tests.declared import data_of, room_of

SPAN = VersionSpan(1, 0, 2)


def write(folder: Path, name: str, n: int) -> None:
    rows = ({"input": f"{i}+", "label": "1"} for i in range(n))
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_of(folder: Path, *names: str) -> EvaluatorSpec:
    keys = {"input_key": "input", "label_key": "label", "tokenizer_dir": str(folder)}
    sets = tuple(EvalSet(name=name, data=data_of(path=f"{folder}/{name}.jsonl", **keys)) for name in names)
    return room_of(EvaluatorSpec, sets=sets, num_rollout=LAST)


@asynccontextmanager
async def opened(redis_url: str, run_name: str, folder: Path, **sets: int) -> AsyncIterator[Bus]:
    """A run of data sets with so many prompts each."""
    save_tokenizer(folder, ARITHMETIC)
    for name, n in sets.items():
        write(folder, name, n)
    async with open_bus(redis_url, run_name, knobs={"eval_interval": 1, "has_eval_data": True}) as bus:
        yield bus


async def idle(context: Context, spec: None) -> None:
    await context.draining.wait()


async def given_up(bus: Bus, context: Any, n: int) -> None:
    """Until all `n` samples are, and none of them is on the bus."""

    async def gone() -> bool:
        left = await bus.length(EVAL_SCORED) + await bus.length(EVAL_PROMPTS)
        return context.counters.get("evaluation_given_up") == n and not left

    await until(gone)
    assert not await bus.length(DEAD)
    assert "given up" in next(m.text for m in await messages(bus, EVENTS) if m.kind == "evaluation")


async def begun(bus: Bus, n: int) -> list[SampleTask]:
    """Prompts that a worker takes and answers."""
    reader = Reader(bus, [EVAL_PROMPTS], "generation", "w")
    await reader.open()
    entries = await reader.read(n, 5.0)
    await bus.commit(Commit(ack=entries))
    await reader.close()
    return [await bus.message(entry) for entry in entries]


async def test_an_evaluation_that_other_data_sets_began_is_given_up(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Resumed with other sets, its samples were counted as those of the sets that have their numbers now, and engines answered
    prompts for nobody."""
    async with opened(redis_url, run_name, tmp_path, old=6, new=4) as bus:
        async with running(bus, "evaluator", run, spec_of(tmp_path, "old"), run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(0))
            await issued(bus, 6)
            first, late, *rest = await begun(bus, 4)
        async with running(bus, "evaluator", run, spec_of(tmp_path, "new"), run_dir=str(tmp_path)) as context:
            await put(bus, EVAL_SCORED, lost(first), *(answer(t, 1.0, SPAN) for t in rest))
            await given_up(bus, context, 5)
            await put(bus, ACTIVE, active(1))
            tasks = await issued(bus, 4)
            await put(bus, EVAL_SCORED, answer(late, 1.0, SPAN), *(answer(t, 0.0, SPAN) for t in tasks))
            [done] = await results(bus)
            assert (done.name, done.asked, done.metrics["eval/new"], done.n_samples) == ("new", 1, 0.0, 4)
            assert context.counters["evaluation_given_up"] == 6 and not await bus.length(DEAD)


async def test_late_scores_of_one_that_was_given_up_long_ago_are_no_dead_letters(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    """The next one was issued, and the evaluator was started once more; then the step was done again."""
    async with opened(redis_url, run_name, tmp_path, old=4, new=4) as bus:
        async with running(bus, "evaluator", run, spec_of(tmp_path, "old"), run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(0))
            await issued(bus, 4)
            first, late, *_ = await begun(bus, 4)
        async with running(bus, "evaluator", run, spec_of(tmp_path, "new"), run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(1))
            await issued(bus, 4)
            tasks = await begun(bus, 4)
        async with running(bus, "evaluator", run, spec_of(tmp_path, "new"), run_dir=str(tmp_path)) as context:
            await put(bus, EVAL_SCORED, answer(late, 1.0, SPAN), lost(first), *(answer(t, 0.0, SPAN) for t in tasks))
            [done] = await results(bus)
            assert (done.asked, done.metrics["eval/new"], done.n_samples) == (1, 0.0, 4)
            await until(lambda: _counted(context, 2))
            assert not await bus.length(DEAD)
            await put(bus, POLICY, Restored(step=-1, version=PolicyVersion(9, -1)))
            await put(bus, ACTIVE, PolicyActive(version=PolicyVersion(10, 0), serving={"w": 10}))
            again = await issued(bus, 4)
            await put(bus, EVAL_SCORED, *(answer(t, 1.0, SPAN) for t in again))
            assert [done.asked for done in await results(bus, 2)] == [1, 0], "it counts now"
        assert await bus.state("eval.given_up") == ""


async def _counted(context: Context, n: int) -> bool:
    return context.counters.get("evaluation_given_up") == n


async def test_scores_that_wait_are_of_an_evaluation_that_is_given_up(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """They came while the evaluator was away, and are read as soon as it is back."""
    async with opened(redis_url, run_name, tmp_path, old=4, new=4) as bus:
        async with running(bus, "evaluator", run, spec_of(tmp_path, "old"), run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(0))
            await issued(bus, 4)
            tasks = await begun(bus, 4)
        await put(bus, EVAL_SCORED, *(answer(t, 1.0, SPAN) for t in tasks))
        async with running(bus, "evaluator", run, spec_of(tmp_path, "new"), run_dir=str(tmp_path)) as context:
            await given_up(bus, context, 4)


async def test_an_evaluation_that_is_over_is_not_gone_on_with_by_larger_sets(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Samples that only the new sets have would be issued under the old step, or waited for: a run never ended."""
    async with opened(redis_url, run_name, tmp_path, old=2, new=4) as bus:
        async with running(bus, "evaluator", run, spec_of(tmp_path, "old"), run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(0))
            await issued(bus, 2)
            await put(bus, EVAL_SCORED, *(answer(t, 1.0, SPAN) for t in await begun(bus, 2)))
            await results(bus, 1)
        more = msgspec.structs.replace(spec_of(tmp_path, "new"), max_in_flight=1)
        async with running(bus, "evaluator", run, more, run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(1))
            [task] = await issued(bus, 1)
            assert (task.group_id, task.n_samples) == ("e1", 4)


async def test_an_evaluation_is_given_up_by_a_run_that_has_no_more_data_sets(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Resumed without --eval-prompt-data, its samples lay on the bus for ever."""
    async with opened(redis_url, run_name, tmp_path, old=4) as bus:
        async with running(bus, "evaluator", run, spec_of(tmp_path, "old"), run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(0))
            await issued(bus, 4)
            first, second = await begun(bus, 2)
        assert await is_evaluating(bus)
        async with running(bus, "evaluator", run, spec_of(tmp_path), run_dir=str(tmp_path)) as context:
            await put(bus, EVAL_SCORED, lost(first), answer(second, 1.0, SPAN))
            await given_up(bus, context, 4)


@pytest.mark.parametrize("now", [None, "", "{", '{"input": "1", "label": [1, 2]}', '{"other": 1}', "\udcff", "a folder"])
async def test_a_data_set_that_cannot_be_read_any_more_costs_evaluations_of_it_alone(
    redis_url: str, run_name: str, tmp_path: Path, now: str | None
) -> None:
    """A file that went while the evaluator was away ended the run."""
    async with opened(redis_url, run_name, tmp_path, kept=2, gone=3) as bus:
        async with running(bus, "evaluator", run, spec_of(tmp_path, "kept", "gone"), run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(0))
            await issued(bus, 5)
        (tmp_path / "gone.jsonl").unlink()
        if now == "a folder":
            (tmp_path / "gone.jsonl").mkdir()
        elif now is not None:
            (tmp_path / "gone.jsonl").write_text(now, errors="surrogateescape")
        async with running(bus, "evaluator", run, spec_of(tmp_path, "kept", "gone"), run_dir=str(tmp_path)) as context:
            await given_up(bus, context, 5)
            assert context.counters["refused/held-out data"] == 1
            await put(bus, ACTIVE, active(1))
            await put(bus, EVAL_SCORED, *(answer(t, 1.0, SPAN) for t in await issued(bus, 2)))
            kept, gone = await results(bus, 2)
            assert (kept.name, kept.metrics["eval/kept"], kept.n_samples) == ("kept", 1.0, 2) and not kept.error
            assert (gone.name, gone.metrics, gone.n_samples, gone.asked) == ("gone", {}, 0, 1)
            assert "cannot be read any more" in str(gone.error) and "gone.jsonl" in str(gone.error)
            assert await bus.length(DEAD) == 0
            if now == "a folder":
                (tmp_path / "gone.jsonl").rmdir()
            write(tmp_path, "gone", 3)
            await put(bus, ACTIVE, active(2))
            tasks = (await issued(bus, 2 + 5))[2:]
            await put(bus, EVAL_SCORED, *(answer(t, 0.0, SPAN) for t in tasks))
            assert [done.n_samples for done in (await results(bus, 4))[2:]] == [2, 3], "it is back, and read again"


async def test_a_run_none_of_whose_data_sets_can_be_read_any_more_goes_on_to_its_end(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    async with opened(redis_url, run_name, tmp_path, held=2) as bus:
        async with running(bus, "evaluator", run, spec_of(tmp_path, "held"), run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(0))
            await put(bus, EVAL_SCORED, *(lost(t) for t in await issued(bus, 2)))
            await results(bus)
        (tmp_path / "held.jsonl").unlink()
        async with running(bus, "evaluator", run, spec_of(tmp_path, "held"), run_dir=str(tmp_path)) as context:
            await put(bus, ACTIVE, active(1))
            failed = (await results(bus, 2))[1]
            assert (failed.step, failed.version, failed.metrics) == (1, 2, {}) and "held.jsonl" in str(failed.error)
            await put(bus, ACTIVE, active(LAST))
            await put(bus, POLICY, Finished(step=LAST, version=PolicyVersion(LAST + 1, LAST)))
            await until(context.draining.wait)
        assert [done.asked for done in await results(bus, 3)] == [0, 1, LAST], "each once"


async def test_a_data_set_that_cannot_be_read_at_the_start_refuses_it(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with opened(redis_url, run_name, tmp_path, held=2, other=2) as bus:
        async with running(bus, "evaluator", run, spec_of(tmp_path, "held"), run_dir=str(tmp_path)):
            await put(bus, ACTIVE, active(0))
            await issued(bus, 2)
        (tmp_path / "other.jsonl").unlink()
        async with running(bus, "evaluator", idle, None, run_dir=str(tmp_path)) as context:
            with pytest.raises(Refused, match=r"other\.jsonl: no such file"):  # settings that were never read
                await asyncio.wait_for(run(context, spec_of(tmp_path, "held", "other")), 20.0)
