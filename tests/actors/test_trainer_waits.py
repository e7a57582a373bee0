"""What the trainer waits for before it cuts a batch, for how long, and what it says when the bound is not kept."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.runtime.run import RunEnds
from actors.trainer.batches import PATIENCE_S, Batches
from bus.knobs.live import propose
from bus.messages.groups import GroupKept, OpenGroup
from bus.messages.policy import GroupsGivenUp
from bus.messages.versions import VersionSpan
from bus.topology import EVENTS, GROUPS, POLICY
from tests.actors.house import messages, open_bus
from tests.actors.test_trainer_parts import SPLIT, N, Trainer, arrive, kept, trainer_of
from tests.bus.suite.clock import ManualClock


def elsewhere(*groups: int, step: int = 0) -> dict[str, OpenGroup]:
    """Groups under way."""
    return {f"g{g}": OpenGroup(group_id=f"g{g}", prompt_id=f"p{g}", n_samples=N, step=step) for g in groups}


def with_batches(trainer: Trainer, **changes: Any) -> None:
    settings = {"interval": 1, "lookahead": 0, "ci_test": False} | changes
    trainer.batches = Batches(trainer.context, trainer.intake, **settings)


async def told(bus, kind: str) -> list[str]:
    return [m.text for m in await messages(bus, EVENTS) if m.kind == kind]


async def test_under_wait_no_straggler_is_passed_by_more_than_the_lookahead(redis_url: str, run_name: str) -> None:
    async with (
        open_bus(redis_url, run_name, knobs=SPLIT | {"staleness_policy": "wait"}) as bus,
        trainer_of(bus) as trainer,
    ):
        with_batches(trainer, lookahead=2)
        await arrive(bus, kept(3, 0, 1, 2), open_elsewhere=elsewhere(1, 2))
        with pytest.raises(TimeoutError):
            await trainer.next()
        await arrive(bus, kept(1, 0, 1, 2))
        assert await trainer.train() == ("g1/0", "g1/1", "g1/2")
        assert await trainer.train() == ("g3/0", "g3/1", "g3/2"), "a trained group is no straggler, though still listed"


async def test_wait_goes_on_with_what_a_rule_before_it_has_left_of_groups(redis_url: str, run_name: str) -> None:
    async with (
        open_bus(redis_url, run_name, knobs=SPLIT | {"staleness_policy": "wait"}) as bus,
        trainer_of(bus) as trainer,
    ):
        with_batches(trainer, lookahead=1)
        late = kept(1, 2, known=(0.0, 1.0))  # its siblings were trained by `split`
        await arrive(bus, late, kept(2, 0, 1, 2), kept(3, 0, 1, 2), kept(4, 0, 1, 2))
        assert await trainer.train() == ("g1/2", "g2/0", "g2/1")
        assert await trainer.train() == ("g2/2", "g3/0", "g3/1"), "what is left at the edge of a batch is passed by nobody"


async def test_what_is_under_way_is_waited_for_as_long_as_anything_comes(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        trainer.step, waits = 1, []
        clock = trainer.context.clock = ManualClock()
        await arrive(bus, kept(3, 0, 1, 2, step=1), turned=1, open_elsewhere=elsewhere(1, 2))

        async def check() -> None:
            return None

        async def idle() -> None:
            waits.append(clock.monotonic())
            assert len(waits) <= 2, "the trainer waits for ever"
            if len(waits) == 1:
                await arrive(bus, kept(9, 0, step=1, known=(0.0, 1.0)))
            await clock.advance(PATIENCE_S - 1 if len(waits) == 1 else PATIENCE_S)

        batch = await trainer.batches.next(trainer.version, check=check, idle=idle)
        assert batch is not None and batch.keys == ("g3",)
        assert len(waits) == 2, "an entry came in the first wait: it is waited for anew"


async def test_a_trainer_that_looks_again_in_vain_says_all_along_what_it_waits_for(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        said: list[str] = []

        async def check() -> None:
            said.append(trainer.context.vitals().waits_for)
            if len(said) == 3:
                await arrive(bus, kept(1, 0, 1, 2), turned=0)

        async def idle() -> None:
            said.append(trainer.context.vitals().waits_for)

        assert await trainer.batches.next(trainer.version, check=check, idle=idle) is not None
        assert said[:2] == ["", ""], "the first look"
        assert {what.partition(" of step")[2] for what in said[2:]} == {" 1 on groups"}, said
        assert trainer.context.vitals().waits_for == "", "it has its batch"


@pytest.mark.parametrize("first", [True, False], ids=["behind a restored checkpoint", "in a running one"])
async def test_finished_samples_that_wait_past_the_bound_are_told(redis_url: str, run_name: str, first: bool) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        if not first:
            await arrive(bus, kept(1, 0, 1, 2), turned=0)
            await trainer.train()
        trainer.step = 3
        await arrive(bus, kept(2, 0, 1, 2, step=1), kept(3, 0, 1, 2, step=1), turned=3)
        assert await trainer.train() == ("g2/0", "g2/1", "g2/2")
        said = await told(bus, "bound not kept")
        text = "step 4: 3 finished samples are on their last turn and not in the batch; their oldest tokens will be masked"
        assert said == ([] if first else [text])
        assert trainer.context.counters.get("left_behind", 0) == (0 if first else 3)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ({"rollout_batch_size": 2}, {"rollout_batch_size": 1}, "batch lowered"),
        ({"staleness_policy": "whole"}, {"staleness_policy": "split"}, "rule changed"),
    ],
    ids=["a smaller batch", "another rule"],
)
async def test_what_changed_settings_explain_is_not_told_as_a_fault(
    redis_url: str, run_name: str, before: dict[str, Any], after: dict[str, Any], kind: str
) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT | before) as bus, trainer_of(bus) as trainer:
        with_batches(trainer, ci_test=True)
        await arrive(bus, kept(1, 0, 1, 2), kept(2, 0, 1, 2), turned=0)
        await trainer.train()
        made = await propose(bus, after, author="me", reason="test")
        await trainer.context.live_knobs.reach(made.epoch)
        trainer.step = 3
        await arrive(bus, kept(3, 0, 1, 2, step=1), kept(4, 0, 1, 2, step=1), turned=3)
        assert len(await trainer.train()) == 3
        assert await told(bus, "bound not kept") == [] and len(await told(bus, kind)) == 1


async def test_a_test_run_ends_when_the_bound_is_not_kept(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        with_batches(trainer, ci_test=True)
        await arrive(bus, kept(1, 0, 1, 2), turned=0)
        await trainer.train()
        trainer.step = 3
        await arrive(bus, kept(2, 0, 1, 2, step=1), kept(3, 0, 1, 2, step=1), turned=3)
        with pytest.raises(RunEnds, match="3 finished samples are on their last turn"):
            await trainer.train()


@pytest.mark.parametrize("policy", ["drop", "split"])
async def test_only_the_rule_drop_starts_prompts_again(redis_url: str, run_name: str, policy: str) -> None:
    async with (
        open_bus(redis_url, run_name, knobs=SPLIT | {"staleness_policy": policy}) as bus,
        trainer_of(bus) as trainer,
    ):
        trainer.step = 5
        await arrive(bus, kept(1, 0, 1, 2, step=0), kept(2, 0, 1, 2, step=5), turned=5)
        assert await trainer.train() == ("g2/0", "g2/1", "g2/2")
        [given_up] = [m for m in await messages(bus, POLICY) if isinstance(m, GroupsGivenUp)]
        assert given_up.samples == ("g1/0", "g1/1", "g1/2") and given_up.groups == (("g1", "outlasted"),)
        assert (given_up.prompts, given_up.reissue) == ((("p1",), True) if policy == "drop" else ((), False))


async def test_the_checkpoint_before_a_step_acknowledges_nothing_of_it(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT | {"max_weight_staleness": 0, "staleness_policy": "whole"}) as bus:
        async with trainer_of(bus) as trainer:
            await arrive(bus, kept(1, 0, 1, 2))
            await trainer.train()
            await trainer.intake.acknowledge(0, None)
            assert await bus.length(GROUPS) == 1
            await trainer.intake.acknowledge(1, None)
            assert await bus.length(GROUPS) == 0


async def test_the_filters_word_about_the_version_before_does_not_do(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        trainer.step = 1
        await arrive(bus, kept(1, 0, 1, 2, step=1), turned=0)
        with pytest.raises(TimeoutError):
            await trainer.next()
        await arrive(bus, turned=1)
        assert await trainer.train() == ("g1/0", "g1/1", "g1/2")


def begun_early(group: int, step: int) -> GroupKept:
    """A group whose samples have one token of step 0 and one of `step`."""
    whole = kept(group, 0, 1, 2)
    spans = (VersionSpan(1, 0, 1), VersionSpan(step + 1, step, 1))
    samples = []
    for one in whole.samples:
        response = msgspec.structs.replace(one.rollout.response, spans=spans)
        samples.append(msgspec.structs.replace(one, rollout=msgspec.structs.replace(one.rollout, response=response)))
    return msgspec.structs.replace(whole, samples=tuple(samples))


async def test_a_lowered_bound_explains_what_waits_until_the_last_of_it_can_have_been_trained(
    redis_url: str, run_name: str
) -> None:
    """Bound 4 to 1 at step 1, batches of 3: of 15 open samples 9 are too many, three batches; and the bound of 1 after those."""
    async with open_bus(redis_url, run_name, knobs=SPLIT | {"max_weight_staleness": 4}) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 1, 2), turned=0)
        await trainer.train()
        made = await propose(bus, {"max_weight_staleness": 1}, author="me", reason="test")
        await trainer.context.live_knobs.reach(made.epoch)
        late = iter(range(2, 8))
        for step in range(1, 6):
            assert await told(bus, "bound reached") == []
            await arrive(bus, *(begun_early(next(late), step) for _ in range(2 if step == 1 else 1)), turned=step)
            await trainer.train()  # one group is always left behind
        assert len(await told(bus, "bound reached")) == 1 and await told(bus, "bound not kept") == []
