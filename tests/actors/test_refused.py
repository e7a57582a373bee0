"""The trainer with a backend that refuses: what is at fault is given up with its reason, the rest trains, and it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.runtime.context import Context
from actors.runtime.refusals import RunEnds
from actors.trainer import actor
from actors.trainer.backend import BatchRefused, StepBatch, StepResult
from actors.trainer.backends import NoTraining
from actors.trainer.spec import TrainerSpec
from bus import Bus
from bus.errors import InvariantBroken
from bus.ledger import check, read_accounts
from bus.messages.groups import GroupKept
from bus.messages.policy import StepDone
from bus.topology import GROUPS, POLICY
from miles_async.launcher.plan import told
from miles_async.settings.flat import Flat
from tests.actors.garbage import list_open
from tests.actors.house import messages, open_bus, put, running, scored, until
from tests.declared import PLAIN, backend_of

BAD = 13.0  # the reward of a sample that this backend cannot take


class Picky(NoTraining):
    """Takes all but samples of one reward."""

    half_done = False
    takes_any_alone = False

    def train_step(self, batch: StepBatch) -> StepResult:
        if why := self._look(batch):
            raise BatchRefused(why, half_done=self.half_done)
        return super().train_step(batch)

    def refuses(self, batch: StepBatch) -> str:
        return "" if self.takes_any_alone else self._look(batch)

    def _look(self, batch: StepBatch) -> str:
        bad = [s.train.sample_id for s in batch.samples if s.train.reward == BAD]
        return f"IndexError: {bad[0]} is out of range" if bad else ""


def kept(group: int, bad: bool = False) -> GroupKept:
    return GroupKept(
        group_id=f"g{group}",
        prompt_id=f"p{group}",
        samples=(scored(group, 0, BAD if bad else 0.0), scored(group, 1, 1.0)),
    )


async def train(bus: Bus, backend: Picky, folder: Path, monkeypatch: pytest.MonkeyPatch, *groups: GroupKept) -> list[Any]:
    """A trainer of one step until it ends; why it ended, if it was not the step."""
    monkeypatch.setattr(actor, "open_backend", lambda name: backend)
    spec = told(
        TrainerSpec,
        Flat(PLAIN),
        save="",
        load="",
        backend=backend_of(hf_checkpoint=""),
        weights_dir=str(folder),
        num_rollout=1,
    )
    ended: list[Any] = []

    async def body(context: Context, given: TrainerSpec) -> None:
        try:
            await actor.run(context, given)
        except ExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            ended.append(error)
        else:
            ended.append(None)

    async def over() -> bool:
        return bool(ended)

    await list_open(bus, *(g.group_id for g in groups), generated=6 * len(groups))
    await put(bus, GROUPS, *groups)
    async with running(bus, "trainer", body, spec):
        await until(over)
    return ended


async def test_the_group_at_fault_is_given_up_and_the_rest_trains(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus(redis_url, run_name) as bus:
        assert await train(bus, Picky(), tmp_path, monkeypatch, kept(1), kept(2, bad=True), kept(3)) == [None]
        [step] = [m for m in await messages(bus, POLICY) if isinstance(m, StepDone)]
        assert set(step.groups) == {"g1", "g3"}
        assert (await read_accounts(bus)).dropped == {"refused": 2}
        found = await check(bus)
        assert found.closes, found.text()


async def test_a_step_that_is_half_done_begins_anew_from_the_checkpoint_without_them(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Picky()
    backend.half_done = True
    async with open_bus(redis_url, run_name) as bus:
        [error] = await train(bus, backend, tmp_path, monkeypatch, kept(1), kept(2, bad=True))
        assert isinstance(error, InvariantBroken) and "half done when it met g2" in str(error)
        assert (await read_accounts(bus)).dropped == {"refused": 2} and set(await bus.hash_of(bus.keys.open_groups)) == {"g1"}


@pytest.mark.parametrize("alone", [False, True])
async def test_where_it_is_not_the_groups_the_run_ends_and_all_stay(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """All are refused alone too, or none is."""
    backend = Picky()
    backend.takes_any_alone = alone
    async with open_bus(redis_url, run_name) as bus:
        [error] = await train(bus, backend, tmp_path, monkeypatch, kept(1, bad=True), kept(2, bad=True))
        assert isinstance(error, RunEnds) and "IndexError: g1/0 is out of range Its 2 groups stay pending" in str(error)
        assert await bus.length(GROUPS) == 2 and not (await read_accounts(bus)).dropped


async def test_batch_after_batch_of_bad_groups_ends_the_run_with_the_text(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus(redis_url, run_name, knobs={"rollout_batch_size": 1, "global_batch_size": 2}) as bus:
        [error] = await train(bus, Picky(), tmp_path, monkeypatch, *(kept(g, bad=True) for g in range(1, 12)))
        assert isinstance(error, RunEnds) and "8 times in a row" in str(error) and "IndexError" in str(error)
        assert await bus.length(GROUPS) == 3


class Overflows(Picky):
    """Never has a finite gradient."""

    def train_step(self, batch: StepBatch) -> StepResult:
        return replace(super().train_step(batch), skipped=True)


async def test_gradients_that_are_never_finite_end_the_run_before_they_use_up_the_prompts(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus(redis_url, run_name, knobs={"rollout_batch_size": 1, "global_batch_size": 2}) as bus:
        [error] = await train(bus, Overflows(), tmp_path, monkeypatch, *(kept(g) for g in range(1, 12)))
        assert isinstance(error, RunEnds) and "8 times in a row" in str(error) and "gradient was not finite" in str(error)
        assert (await read_accounts(bus)).dropped == {"nonfinite_gradient": 16}
