"""The evaluator: when it measures, what it says about a measurement that several versions made, or that failed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from actors.evaluator.actor import EvalSet, EvaluatorSpec, run
from actors.evaluator.estimates import at_k, interval, maj_at, majority, pass_at, powers
from actors.evaluator.kept import kept_files
from actors.evaluator.schedule import DONE, Issued, due, result
from actors.recorder.history import History, history_of
from actors.recorder.records import records_of
from bus import Bus, Commit
from bus.messages.active import PolicyActive
from bus.messages.base import pack_floats, pack_ints
from bus.messages.control import EvalDone
from bus.messages.policy import Finished, Restored
from bus.messages.samples import Response, RolloutDone, RolloutLost, SampleTask, Scored
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.topology import ACTIVE, DEAD, EVAL_PROMPTS, EVAL_RESULTS, EVAL_SCORED, EVENTS, POLICY
from miles_async.console.lines import plain_line
from miles_async.launcher.eval_sets import is_evaluating
from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.tokenizer import save_tokenizer
from tests.actors.house import messages, open_bus, put, running, until
from tests.declared import data_of, room_of

N = 4
LAST = 3


@asynccontextmanager
async def evaluating(
    redis_url: str, run_name: str, folder: Path, interval: int, of_set: Any = (), **more: Any
) -> AsyncIterator[tuple[Bus, Any]]:
    """An evaluator of four prompts in a run of three steps; the test is everyone else."""
    save_tokenizer(folder, ARITHMETIC)
    (folder / "held.jsonl").write_text("".join(json.dumps({"input": str(i), "label": "1"}) + "\n" for i in range(N)))
    data = data_of(path=str(folder / "held.jsonl"), input_key="input", label_key="label", tokenizer_dir=str(folder))
    spec = room_of(EvaluatorSpec, sets=(EvalSet(**{"name": "held", "data": data, **dict(of_set)}),), num_rollout=LAST, **more)
    async with open_bus(redis_url, run_name, knobs={"eval_interval": interval, "has_eval_data": True}) as bus:
        async with running(bus, "evaluator", run, spec, run_dir=str(folder)) as context:
            yield bus, context


def active(step: int) -> PolicyActive:
    return PolicyActive(version=PolicyVersion(step + 1, step), serving={"w": step + 1})


def answer(task: SampleTask, reward: float, *spans: VersionSpan) -> Scored:
    n = sum(span.n for span in spans)
    response = Response(tokens=pack_ints([5] * n), logprobs=pack_floats([-0.5] * n), loss_mask=memoryview(b"\x01" * n), spans=spans)
    return Scored(rollout=RolloutDone(task=task, response=response, finish="stop"), reward=reward)


def lost(task: SampleTask, error: str = "") -> RolloutLost:
    return RolloutLost(
        sample_id=task.sample_id, group_id=task.group_id, n_samples=N, reason="poison", error=error, eval_name="held"
    )


async def issued(bus: Bus, n: int) -> list[SampleTask]:
    async def there() -> bool:
        return await bus.length(EVAL_PROMPTS) == n

    await until(there)
    return await messages(bus, EVAL_PROMPTS)


async def results(bus: Bus, n: int = 1) -> list[EvalDone]:
    async def there() -> bool:
        return await bus.length(EVAL_RESULTS) == n

    await until(there)
    return await messages(bus, EVAL_RESULTS)


async def shown(bus: Bus) -> tuple[str, History]:
    """What the terminal says of the first result, and the history with it."""
    entry = (await bus.scan_all(EVAL_RESULTS))[0]
    [record] = records_of(entry, await bus.message(entry))
    history = history_of([record])
    return plain_line(record, history, total_steps=LAST), history


async def test_a_measurement_is_named_after_the_version_that_made_most_of_it(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with evaluating(redis_url, run_name, tmp_path, 1) as (bus, _):
        await put(bus, ACTIVE, active(0))
        tasks = await issued(bus, N)
        assert {(t.step, t.pinned) for t in tasks} == {(0, 1)}
        old, new = VersionSpan(1, 0, 2), VersionSpan(2, 1, 3)
        spans: list[tuple[VersionSpan, ...]] = [(old,), (old, new), (old, new), (new,)]
        await put(bus, EVAL_SCORED, *(answer(t, 1.0, *s) for t, s in zip(tasks, spans, strict=True)))
        [done] = await results(bus)
        assert (done.version, done.step, done.asked, done.versions) == (2, 1, 0, {1: 6, 2: 9})
        assert done.metrics["eval/held"] == 1.0 and done.metrics["eval/held/version_share"] == 0.6 and not done.error
        assert not await is_evaluating(bus)
        assert (await shown(bus))[0] == (
            "eval held at step 1: 100.0% of 4 samples, 60.0% of their tokens by it, the others by versions 1 to 2"
        )
        await put(bus, ACTIVE, active(1))  # step 1 is still to be measured: the one before was asked of step 0
        assert {t.step for t in await issued(bus, 2 * N)} == {0, 1}


async def test_a_measurement_that_failed_is_told_as_failed_with_the_reason(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with evaluating(redis_url, run_name, tmp_path, 1) as (bus, _):
        await put(bus, ACTIVE, active(0))
        tasks = await issued(bus, N)
        await put(bus, EVAL_SCORED, *(lost(t, "the prompt is too long") for t in tasks))
        [done] = await results(bus)
        line, history = await shown(bus)
    why = "4 of 4 samples lost (4 poison), the first: the prompt is too long"
    assert (done.error, done.metrics, done.n_samples) == (why, {"eval/held-lost_ratio": 1.0}, N)
    assert line == f"eval held at step 0 failed: {why}"
    assert not history.evals and history.failed_evals["held"]["error"] == why


async def test_samples_that_cannot_be_kept_cost_no_evaluation(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with evaluating(redis_url, run_name, tmp_path, 1) as (bus, _):
        await put(bus, ACTIVE, active(0))
        tasks = await issued(bus, N)
        (tmp_path / "tokenizer.json").write_text("{}")  # the model's folder is being replaced: no OSError is raised for it
        await put(bus, EVAL_SCORED, *(answer(t, 1.0, VersionSpan(1, 0, 2)) for t in tasks))
        [done] = await results(bus)
        said = [m.text for m in await messages(bus, EVENTS) if "kept samples" in getattr(m, "text", "")]
        assert done.metrics["eval/held"] == 1.0 and await messages(bus, DEAD) == []
        assert len(said) == 1 and "those of held at step 0 are lost: " in said[0]


@pytest.mark.parametrize("unusable", [float("nan"), 1e308])
async def test_samples_that_were_lost_count_as_wrong_and_are_told(
    redis_url: str, run_name: str, tmp_path: Path, unusable: float
) -> None:
    async with evaluating(redis_url, run_name, tmp_path, 1) as (bus, _):
        await put(bus, ACTIVE, active(0))
        first, *rest = await issued(bus, N)
        rewards = (1.0, 1.0, unusable)
        await put(bus, EVAL_SCORED, lost(first), *(answer(t, r, VersionSpan(1, 0, 2)) for t, r in zip(rest, rewards, strict=True)))
        [done] = await results(bus)
        line, _ = await shown(bus)
    assert done.metrics["eval/held"] == 0.5 and done.versions == {1: 6}
    assert line == "eval held at step 0: 50.0% of 4 samples; 2 of 4 samples lost (1 poison, 1 reward_not_finite)"


@pytest.mark.parametrize("interval", [0, 2])
async def test_nothing_is_measured_without_an_interval(redis_url: str, run_name: str, tmp_path: Path, interval: int) -> None:
    async with evaluating(redis_url, run_name, tmp_path, interval) as (bus, context):
        last = PolicyVersion(LAST + 1, LAST)
        if interval:
            await put(bus, ACTIVE, active(0))
            await put(bus, EVAL_SCORED, *(lost(t) for t in await issued(bus, N)))
            await put(bus, ACTIVE, active(LAST))
            await put(bus, POLICY, Finished(step=LAST, version=last))
            tasks = await issued(bus, 2 * N)
            await put(bus, EVAL_SCORED, *(lost(t) for t in tasks if t.step == LAST))
        else:
            await put(bus, ACTIVE, active(0))
            await put(bus, ACTIVE, active(LAST))
            await put(bus, POLICY, Finished(step=LAST, version=last))

        async def over() -> bool:
            return bool(context.draining.is_set())

        await until(over)
        assert await bus.length(EVAL_RESULTS) == interval and await bus.length(EVAL_PROMPTS) == interval * N


@pytest.mark.parametrize("final", [False, True])
def test_no_interval_is_never_due(final: bool) -> None:
    assert not any(due(active_step=s, last_step=-1, interval=0, before_train=True, final=final) for s in range(9))


@pytest.mark.parametrize(
    ("active_step", "last_step", "is_due"),
    [(0, -1, True), (1, 0, False), (3, 0, False), (4, 0, True), (5, 0, True), (5, 4, False), (9, 4, True), (4, 4, False)],
)
def test_a_version_is_measured_when_an_interval_has_passed(active_step: int, last_step: int, is_due: bool) -> None:
    assert due(active_step=active_step, last_step=last_step, interval=4, before_train=True, final=False) is is_due
    final = due(active_step=active_step, last_step=last_step, interval=4, before_train=False, final=True)
    assert final is (active_step > last_step), "the last version always is, once"


def test_the_first_weights_are_measured_only_if_asked_for() -> None:
    assert not due(active_step=0, last_step=-1, interval=4, before_train=False, final=False)


def test_of_versions_that_made_as_much_the_older_one_names_the_result() -> None:
    task = SampleTask(sample_id="e0/0", group_id="e0", index=0, n_samples=1, prompt_id="p", prompt_tokens=memoryview(b""))
    common: dict[str, Any] = {"issued": Issued(7, 8), "wall": 0.0, "duration_s": 0.0}
    done = result("held", [[answer(task, 1.0, VersionSpan(1, 0, 2), VersionSpan(2, 1, 2))]], **common)
    assert (done.version, done.step, done.asked) == (1, 0, 7)
    nothing = result("held", [], **common)
    assert (nothing.version, nothing.step) == (8, 7)


def test_what_was_issued_is_read_again_as_it_was_written() -> None:
    for one in (Issued(3, 4, 200, 77), Issued()):
        assert Issued.parse(one.text()) == one and one.text().endswith(f":{one.offset}")
    assert Issued.parse("") == Issued()


async def test_an_evaluation_is_under_way_until_the_run_says_that_it_is_done(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        assert not await is_evaluating(bus), "nothing was issued"
        await bus.commit(Commit(state={"eval": Issued(0, 0, 200, 77).text()}))
        assert await is_evaluating(bus)
        await bus.commit(Commit(state={DONE: "0"}))
        assert not await is_evaluating(bus)


async def test_a_second_score_of_a_sample_counts_once(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with evaluating(redis_url, run_name, tmp_path, 1) as (bus, _):
        await put(bus, ACTIVE, active(0))
        first, *rest = await issued(bus, N)
        span = VersionSpan(1, 0, 2)
        await put(bus, EVAL_SCORED, answer(first, 1.0, span), answer(first, 0.0, span), *(answer(t, 0.0, span) for t in rest))
        [done] = await results(bus)
    assert (done.metrics["eval/held"], done.n_samples) == (0.25, N)


async def test_steps_that_are_done_again_are_evaluated_again(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """After a crash the trainer went back; steps that it did again, the last one too, were not evaluated: they had been."""
    span = VersionSpan(1, 0, 2)
    async with evaluating(redis_url, run_name, tmp_path, 1) as (bus, _):
        for step in (0, LAST):
            await put(bus, ACTIVE, active(step))
            tasks = (await issued(bus, N if step == 0 else 2 * N))[-N:]
            await put(bus, EVAL_SCORED, *(answer(t, 0.0, span) for t in tasks))
            await results(bus, 1 if step == 0 else 2)
        await put(bus, POLICY, Restored(step=1, version=PolicyVersion(7, 1)))
        await put(bus, ACTIVE, active(LAST))  # what a worker still serves
        for version in (PolicyVersion(7, 1), PolicyVersion(9, LAST)):
            await put(bus, ACTIVE, PolicyActive(version=version, serving={"w": version.id}))
        again = (await issued(bus, 3 * N))[-N:]
        assert {(t.group_id, t.pinned) for t in again} == {(f"e{LAST}", 9)} and await is_evaluating(bus)
    async with evaluating(redis_url, run_name, tmp_path, 1) as (bus, context):  # started again in the middle of it
        await put(bus, EVAL_SCORED, *(answer(t, 1.0, span) for t in again))
        done = (await results(bus, 3))[-1]
        assert (done.asked, done.metrics["eval/held"]) == (LAST, 1.0) and not await bus.length(DEAD)
        await put(bus, POLICY, Finished(step=LAST, version=PolicyVersion(9, LAST)))
        await until(context.draining.wait)
        assert not await is_evaluating(bus) and await bus.length(EVAL_PROMPTS) == 3 * N


async def test_an_evaluation_that_is_under_way_is_not_overtaken(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with evaluating(redis_url, run_name, tmp_path, 1) as (bus, _):
        await put(bus, ACTIVE, active(0))
        tasks = await issued(bus, N)
        await put(bus, ACTIVE, active(1), active(2))
        await put(bus, EVAL_SCORED, *(answer(t, 1.0, VersionSpan(1, 0, 2)) for t in tasks))
        await results(bus)
        assert {t.step for t in (await issued(bus, 2 * N))[N:]} == {2}, "the newest then, and none between"


async def test_several_samples_a_prompt_a_few_at_a_time_and_all_kept(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Two samples of each of four prompts, three in flight: pass@k, an interval, and the worst sample first in the file."""
    of_set = {"samples_per_prompt": 2, "metadata": {"rm_type": "f1"}, "max_response_len": 5}
    async with evaluating(redis_url, run_name, tmp_path, 1, of_set=of_set, max_in_flight=3, keep=1) as (bus, _):
        for step in (0, 1):
            await put(bus, ACTIVE, active(step))
            done, before = set(), 2 * N * step
            while len(done) < 2 * N:
                found = [t for t in (await messages(bus, EVAL_PROMPTS))[before:] if t.sample_id not in done]
                assert len(found) <= 3
                await put(bus, EVAL_SCORED, *(answer(t, float(t.index in (0, 2, 3)), VersionSpan(1, 0, 2)) for t in found))
                done |= {t.sample_id for t in found}
                await until(partial(_more, bus, before + len(done), before + 2 * N))
            await results(bus, step + 1)
        [first, _] = await messages(bus, EVAL_RESULTS)
        task = (await messages(bus, EVAL_PROMPTS))[0]
    assert (task.rm_type, task.sampling.max_new_tokens) == ("f1", 5)
    assert first.metrics["eval/held"] == first.metrics["eval/held/pass@1"] == 3 / 8
    assert first.metrics["eval/held/pass@2"] == 0.5
    assert 0.0 <= first.metrics["eval/held/ci95_low"] < 3 / 8 < first.metrics["eval/held/ci95_high"] <= 1.0
    [kept] = (tmp_path / "eval_samples").iterdir()
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert kept.name == "held_0000001.jsonl" and [line["reward"] for line in lines] == [0.0] * 5 + [1.0] * 3


@pytest.mark.parametrize("name", ["math/aime", "../held", "a%2fb", "held_0000001", "数学", "two\nlines"])
async def test_samples_of_a_set_are_kept_under_any_name(redis_url: str, run_name: str, tmp_path: Path, name: str) -> None:
    """HuggingFace's names have a slash; such samples were lost at each evaluation, or lay outside of the folder."""
    async with evaluating(redis_url, run_name, tmp_path, 1, of_set={"name": name}, keep=1) as (bus, _):
        for step in (0, 1):
            await put(bus, ACTIVE, active(step))
            tasks = (await issued(bus, N * (step + 1)))[N * step :]
            await put(bus, EVAL_SCORED, *(answer(t, 1.0, VersionSpan(1, 0, 2)) for t in tasks))
            await results(bus, step + 1)
        assert not [m for m in await messages(bus, EVENTS) if getattr(m, "level", "") == "warning"]
    [kept] = (tmp_path / "eval_samples").iterdir()
    assert kept_files(tmp_path) == {name: [kept]} and len(kept.read_text().splitlines()) == N


async def _more(bus: Bus, answered: int, last: int) -> bool:
    """Whether the evaluator has issued more, if there is more."""
    return await bus.length(EVAL_PROMPTS) > answered or answered >= last


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for n in range(1, 7):
        for right in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations(range(n), k))
                share = sum(min(subset) < right for subset in subsets) / len(subsets)
                assert pass_at(k, n, right) == pytest.approx(share)


def test_the_majority_of_votes_and_its_estimate() -> None:
    assert majority(["right", "a", "right"], "right") == 1.0 and majority(["right", "a"], "right") == 0.5
    votes = ["right"] * 3 + ["a"] * 4 + ["b"]
    subsets = [majority([votes[i] for i in subset], "right") for subset in combinations(range(8), 4)]
    assert maj_at(4, votes, "right", "p") == pytest.approx(sum(subsets) / len(subsets), abs=0.1)
    found = at_k([[1.0, 0.0, 0.0, 0.0]] * 3, [["7", "8", "8", ""]] * 3)
    assert found == {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0, "maj@4": 0.0} and powers(6) == [1, 2, 4, 6]
    assert at_k([[1.0]], [["7"]]) == {}


def test_intervals_are_wilsons_for_single_answers_and_by_prompt_for_several() -> None:
    low, high = interval([[1.0]] * 8 + [[0.0]] * 2)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)  # Wilson's, 8 of 10
    assert interval([[1.0]] * 10)[1] == pytest.approx(1.0) and interval([[1.0]] * 10)[0] < 0.75
    alike, apart = interval([[1.0] * 4, [0.0] * 4] * 20), interval([[1.0, 0.0]] * 40)
    assert apart == (0.5, 0.5) and alike[0] < 0.4 < 0.6 < alike[1], "samples of a prompt are not independent"
