"""Episodes in the trainer: what an environment said has no gradient, age or account; trajectories of one sample count once."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from actors.trainer.accounts import Trained, booked, consumed_by
from actors.trainer.backend import StepResult
from actors.trainer.convert import batch_metrics, to_samples
from actors.trainer.cut import Part
from actors.trainer.objective import prepare_batch
from bus import Entry
from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import GroupKept
from bus.messages.samples import Episode, Response, Scored, Strand
from bus.messages.versions import VersionSpan
from bus.topology import GROUPS
from tests.actors.house import scored
from tests.declared import objective_of

MASK = (1, 1, 0, 0, 1, 1)


def told(at: int, version: int) -> Response:
    """Two turns of two tokens, of versions that follow each other, and two tokens of an environment between them."""
    return Response(
        tokens=pack_ints(range(at, at + 6)),
        logprobs=pack_floats([-0.5 * one for one in MASK]),
        loss_mask=memoryview(bytes(MASK)),
        spans=(VersionSpan(version, version, 2), VersionSpan(-1, -1, 2), VersionSpan(version + 1, version + 1, 2)),
    )


def episode(index: int, reward: float, *, version: int = 4, earlier: int = 0) -> Scored:
    plain = scored(1, index, reward)
    strands = tuple(Strand(pack_ints([3] * (k + 1)), told(10 * k, version)) for k in range(earlier))
    rollout = msgspec.structs.replace(
        plain.rollout, response=told(50, version), episode=Episode(earlier=strands, turns=2 * (earlier + 1))
    )
    return msgspec.structs.replace(plain, rollout=rollout)


def group(*samples: Scored) -> GroupKept:
    return GroupKept(group_id="g1", prompt_id="p1", samples=samples)


def test_what_nobody_made_has_no_gradient_and_never_counts_as_stale() -> None:
    """The first turn is over the bound, the second at it; the environment's tokens are neither."""
    [batch] = to_samples((group(episode(0, 1.0)),))
    assert batch.train.spans == [(4, 2), (4, 2), (5, 2)]
    batch.train.old_logp = batch.train.rollout_logp
    other = to_samples((group(episode(1, 0.0)),))[0]
    other.train.old_logp = other.train.rollout_logp
    prepared = prepare_batch(objective_of(correction="tis", max_staleness=1), [batch.train, other.train], current_step=6)
    assert prepared.mask.tolist() == [False, False, False, False, True, True] * 2
    assert prepared.trained_spans([batch.train, other.train]) == [(0, 0, 2)] * 2


def test_trajectories_of_one_sample_share_its_reward_and_count_once_in_their_group() -> None:
    """Rewards 1, 0, 0 have the mean 1/3, however many trajectories the first sample has."""
    samples = to_samples((group(episode(0, 1.0, earlier=2), episode(1, 0.0), episode(2, 0.0)),))
    assert [s.train.sample_id for s in samples] == ["g1/0#0", "g1/0#1", "g1/0#2", "g1/1", "g1/2"]
    assert [len(s.prompt_tokens) for s in samples[:2]] == [1, 2]
    for sample in samples:
        sample.train.old_logp = sample.train.rollout_logp
    cfg = objective_of(correction="tis", max_staleness=1, grpo_std_normalization=False)
    prepared = prepare_batch(cfg, [s.train for s in samples], current_step=5)
    by_sample = torch.split(prepared.advantages, prepared.lengths.tolist())
    for one, wanted in zip(by_sample, [2 / 3] * 3 + [-1 / 3] * 2, strict=True):
        assert np.allclose(one.numpy()[[0, 1, 4, 5]], wanted)
    assert prepared.rollouts == 3


def test_the_accounts_of_an_episode_are_those_of_what_was_made() -> None:
    both = group(episode(0, 1.0, earlier=1), episode(1, 0.0))
    part = Part.of(both, came=5)
    assert part.steps == ((4, 5), (4, 5)) and part.age(6, 0) == 2
    kept = [(2, 0, 2), (0, 0, 2), (0, 0, 0)]
    [item] = consumed_by([("g1", part, both)], StepResult({}, (), kept), step=5, bound=0)
    assert (item.samples, item.tokens, item.versions) == (1, 6, ((4, 2), (5, 4)))
    moves = booked([Trained(6, Entry("1-0", GROUPS, "trainer", {}, b"", 0), item)])
    made = sum(s.rollout.n_made for s in both.samples)
    accounts = ("tokens/trained", "tokens/dropped/masked", "tokens/dropped/outlasted")
    assert made == 12 == sum(moves.get(account, 0) for account in accounts)
    assert both.header().tokens == 12 and both.header().version == 4


def test_a_batchs_metrics_tell_turns_and_count_no_environment() -> None:
    found = batch_metrics((group(episode(0, 1.0, earlier=1), episode(1, 0.0)),), step=6, bound=1)
    assert (found["rollout/turns/mean"], found["rollout/trajectories"], found["rollout/tokens"]) == (3.0, 3.0, 12.0)
    assert found["rollout/fully_async/oldest_token"] == 2 and found["rollout/masked_fraction"] == 0.5
