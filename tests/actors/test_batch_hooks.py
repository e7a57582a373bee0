"""Functions written for Miles that see a whole batch: what they may change, what is refused, what a failure costs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from actors.filter.actor import FilterSpec
from actors.filter.actor import run as run_filter
from actors.runtime.context import Context
from actors.runtime.miles import judged
from actors.runtime.refusals import RunEnds
from actors.trainer.batch_hooks import BatchHooks, Unfit, settled, train_data
from actors.trainer.convert import to_samples
from actors.trainer.objective import prepare_batch
from actors.trainer.spec import TrainerSpec
from bus import Commit, Out
from bus.messages.groups import GroupKept
from bus.messages.policy import StepDone
from bus.messages.versions import PolicyVersion
from bus.topology import EVENTS, GROUPS, POLICY, SCORED
from miles_async.launcher.try_hooks import problem_of
from tests.actors.house import messages, open_bus, put, running, scored, until
from tests.actors.test_filter import issue
from tests.actors.test_trainer_trajectories import episode
from tests.declared import backend_of, objective_of, room_of
from tests.miles_async.test_try_hooks import SAMPLE, HookTrial

FILTER, CONVERT, POST = (
    "rollout_sample_filter_path", "custom_convert_samples_to_train_data_path", "rollout_data_postprocess_path",
)  # fmt: skip
CALLS: list[Any] = []


def leave_out_the_worst(args: Any, groups: list[list[Any]]) -> None:
    CALLS.append(args.rollout_batch_size)
    for group in groups:
        min(group, key=lambda s: s.reward).remove_sample = True


def convert(args: Any, samples: list[Any]) -> dict[str, list[Any]]:
    masks = [[0] * s.response_length if s.remove_sample else [*s.loss_mask[:-1], 0] for s in samples]
    return {"tokens": [s.tokens for s in samples], "rewards": np.float32([s.reward * 10 for s in samples]), "loss_masks": masks}


def first_token_only(args: Any, data: dict[str, list[Any]]) -> None:
    for mask in data["loss_masks"]:
        mask[1:] = [0] * (len(mask) - 1)


def args_alone(args: Any) -> None:
    CALLS.append("alone")


def stumbles(args: Any, groups: Any) -> None:
    CALLS.append("stumbled")
    if len(CALLS) < 3:
        raise ValueError("not today")


def raises(args: Any, groups: Any, *_: Any) -> None:
    raise KeyError("threshold")


def sleeps(args: Any, groups: Any) -> None:
    time.sleep(30)


def keeps(args: Any, groups: Any, data_source: Any) -> None:
    CALLS.append([(s.index, s.response_length, s.metadata["dropped"]) for group in groups for s in group])


def puts_back(args: Any, groups: Any, data_source: Any) -> None:
    data_source.add_samples(groups)


def hooks(context: Context, deadline_s: float = 5.0, **paths: Any) -> BatchHooks:
    named = {name: f"{__name__}.{hook.__name__}" for name, hook in paths.items()}
    rest = {"backend": backend_of(hf_checkpoint=""), "weights_dir": "", "num_rollout": 1, "hook_values": {"theirs": 1}}
    return BatchHooks(context, room_of(TrainerSpec, **rest, batch_hook_timeout_s=deadline_s, **named))


def batch() -> tuple[GroupKept, ...]:
    kept = [(scored(g, 0, 1.0), scored(g, 1, 3.0)) for g in (1, 2)]
    return tuple(GroupKept(group_id=f"g{g}", prompt_id=f"p{g}", samples=pair) for g, pair in enumerate(kept, 1))


async def on(redis_url: str, run_name: str, body: Any) -> list[Any]:
    """The events that a body with a context of the trainer told."""

    async def room(context: Context, spec: None) -> None:
        CALLS.clear()
        await body(context)

    async with open_bus(redis_url, run_name) as bus:
        async with running(bus, "trainer", room, None):
            pass
        return [m for m in await messages(bus, EVENTS) if getattr(m, "kind", "") == "batch hook failed"]


async def test_they_take_gradient_away_and_give_rewards(redis_url: str, run_name: str) -> None:
    async def body(context: Context) -> None:
        groups = batch()
        samples = to_samples(groups)
        both = hooks(context, **{FILTER: leave_out_the_worst, CONVERT: convert, POST: args_alone})
        assert await both.apply(groups, samples)
        assert [s.train.remove for s in samples] == [True, False] * 2
        assert [list(s.train.loss_mask) for s in samples] == [[0, 0, 0], [1, 1, 0]] * 2
        assert CALLS == [2, "alone"], "args has the settings"
        prepared = prepare_batch(objective_of(), [s.train for s in samples])
        assert list(prepared.rewards) == [10.0, 30.0] * 2, "not the group's baseline"
        assert prepared.mask.tolist() == [False, False, False, True, True, False] * 2

        samples = to_samples(groups)
        assert await hooks(context, **{POST: first_token_only}).apply(groups, samples)
        assert [list(s.train.loss_mask) for s in samples] == [[1, 0, 0]] * 4 and samples[0].train.processed is None

    assert await on(redis_url, run_name, body) == []


async def test_one_that_fails_is_asked_again_and_several_times_in_a_row_end_the_run(redis_url: str, run_name: str) -> None:
    async def body(context: Context) -> None:
        groups = batch()
        stumbling = hooks(context, **{FILTER: stumbles})
        assert [await stumbling.apply(groups, to_samples(groups)) for _ in range(3)] == [False, False, True]
        failing = hooks(context, **{FILTER: raises})
        assert not await failing.apply(groups, to_samples(groups))
        assert not await failing.apply(groups, to_samples(groups))
        with pytest.raises(RunEnds, match=r"raises.* failed 3 times in a row.* KeyError: 'threshold' at test_batch_hooks.py:\d+"):
            await failing.apply(groups, to_samples(groups))
        with pytest.raises(RunEnds, match=r"sleeps did not end within 0.2 s"):
            await hooks(context, 0.2, **{FILTER: sleeps}).apply(groups, to_samples(groups))

    events = await on(redis_url, run_name, body)
    assert events and "not today" in events[0].text and "test_batch_hooks.py:" in events[0].text


MADE = train_data(judged(episode(0, 1.0), str))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "not a dict of lists"),
        ({"rewards": [1.0, 2.0]}, "no list of 1 entries"),
        ({"rewards": [float("nan")]}, "no finite number"),
        ({"loss_masks": [[1] * 6]}, "trains what no model made"),
        ({"loss_masks": [[1] * 5]}, "5 entries for 6 tokens"),
        ({"tokens": [[*MADE["tokens"][0][:-1], 9]]}, "'tokens' that are not those of the samples"),
        ({"rollout_log_probs": [[0.0] * 6]}, "'rollout_log_probs' that are not"),
    ],
)
def test_what_they_may_not_give_is_refused(answer: Any, says: str) -> None:
    samples = judged(episode(0, 1.0), str)
    with pytest.raises(Unfit, match=says):
        settled(CONVERT, answer, samples, train_data(samples), [list(s.loss_mask) for s in samples])


def test_a_sample_filter_trains_nothing_either_that_no_model_made() -> None:
    samples = judged(episode(0, 1.0), str)
    before = [list(s.loss_mask) for s in samples]
    samples[0].loss_mask = [1] * len(before[0])
    with pytest.raises(Unfit, match="trains what no model made"):
        settled(FILTER, None, samples, train_data(samples), before)


def forgets(args: Any, groups: list[list[Any]]) -> None:
    del groups[0][0].remove_sample


def nothing_for_masks(args: Any, samples: list[Any]) -> dict[str, Any]:
    return {"loss_masks": [None] * len(samples)}


@pytest.mark.parametrize(("name", "hook"), [(FILTER, forgets), (CONVERT, nothing_for_masks)])
async def test_what_ours_cannot_even_look_at_is_that_functions_failure(redis_url: str, run_name: str, name: str, hook: Any) -> None:
    async def body(context: Context) -> None:
        groups, odd = batch(), hooks(context, **{name: hook})
        assert not await odd.apply(groups, to_samples(groups))
        assert not await odd.apply(groups, to_samples(groups))
        with pytest.raises(RunEnds, match=rf"{hook.__name__} failed 3 times in a row.* gave what cannot be used: \w+Error: "):
            await odd.apply(groups, to_samples(groups))

    [said] = await on(redis_url, run_name, body)
    assert hook.__name__ in said.text


async def test_all_samples_of_a_step_are_shown_with_what_became_of_them(redis_url: str, run_name: str) -> None:
    CALLS.clear()
    spec = FilterSpec(shows_all_to=f"{__name__}.keeps", hooks_within_s=5.0)
    at = PolicyVersion(id=2, step=1)
    step = StepDone(step=1, version=at, trained_on=at, groups=())

    async def called() -> bool:
        return bool(CALLS)

    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1, 2)
        async with running(bus, "filter", run_filter, spec):
            await put(bus, SCORED, scored(1, 0, 0.0), scored(1, 1, 1.0), scored(2, 0, 1.0), scored(2, 1, 1.0))
            await until(lambda: messages(bus, GROUPS))
            await bus.commit(Commit(append=[Out(POLICY, step)]))
            await until(called)
    assert sorted(CALLS[0], key=str) == [(0, 3, "zero_std_1"), (0, 3, None), (1, 3, "zero_std_1"), (1, 3, None)]


@pytest.mark.parametrize(
    ("field", "hook", "says"),
    [
        (FILTER, leave_out_the_worst, ""),
        (CONVERT, convert, ""),
        (POST, first_token_only, ""),
        (POST, args_alone, ""),
        (CONVERT, raises, "KeyError: 'threshold'"),
        (CONVERT, args_alone, "not a dict of lists"),
        ("rollout_all_samples_process_path", puts_back, "there is no buffer"),
    ],
)
def test_each_is_tried_on_a_made_up_batch_before_anything_starts(field: str, hook: Any, says: str) -> None:
    found = problem_of(field, f"{__name__}.{hook.__name__}", HookTrial(paths={}, sample=SAMPLE, values={"rollout_batch_size": 2}))
    assert (says in found) if says else found == ""


def test_a_text_is_made_when_it_is_asked_for() -> None:
    [one] = judged(scored(1, 0, 1.0), lambda ids: f"{ids}")
    assert one.response == "[4, 5, 6]" and one.status is one.Status.COMPLETED
    with pytest.raises(AttributeError, match="no 'train_metadata' here"):
        _ = one.train_metadata
