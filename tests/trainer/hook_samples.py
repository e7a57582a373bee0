"""Functions a user might write, good and bad, named by the hook tests."""

from __future__ import annotations

import numpy as np
import torch


def reinforce(args, batch, log_probs, reducer):
    """-A log pi, with one metric."""
    return reducer(-batch.advantages * log_probs), {"advantage_sum": reducer(batch.advantages)}


def twice_the_mean(args, inputs):
    a = 2.0 * inputs.rewards[inputs.index]
    return a, a


def halved(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **more):
    """Half the loss; the first token of every sample rejected."""
    assert [len(x) for x in train_log_probs] == response_lengths == [len(x) for x in rollout_log_probs]
    assert all(total > n for total, n in zip(total_lengths, response_lengths, strict=True))
    kept = [torch.cat([torch.zeros(1), m[1:]]) for m in loss_masks]
    return 0.5 * pg_loss, kept, {"halved": torch.full_like(pg_loss, 0.5).detach()}


def squared_tis(*, pg_loss, loss_masks, **more):
    return pg_loss.square(), loss_masks, {}


def dr_grpo(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    mask = torch.cat(loss_masks)
    return lambda x: (x * mask).sum() / 1000


def plus_one(args, samples):
    raw = [s.reward for s in samples]
    return raw, [r + 1.0 for r in raw]


def plus_one_of_numpy(args, samples):
    rewards = np.array([s.get_reward_value(args) for s in samples], dtype=np.float32)
    return rewards, list(rewards + 1)


def picky(args, batch, log_probs, reducer):
    """Meets a sample that it has no answer for."""
    if 13 in batch.lengths:
        raise ValueError("13 tokens are too many")
    return reinforce(args, batch, log_probs, reducer)


def meddling(args, batch, log_probs, reducer):
    """The same; and it changes all that it can reach."""
    found = reinforce(args, batch, log_probs, reducer)
    with torch.no_grad():
        for given in (log_probs, batch.mask, batch.weights, batch.rollout_logp):
            given.zero_()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return found


def lopsided(args, batch, log_probs, reducer):
    """One metric more where it meets a certain sample."""
    loss, metrics = reinforce(args, batch, log_probs, reducer)
    return loss, metrics | ({"thirteen": reducer(torch.ones_like(log_probs))} if 13 in batch.lengths else {})


# -- wrong ones


def walks_itself(args, batch, log_probs, reducer):
    found = reinforce(args, batch, log_probs, reducer)
    found[0].backward()
    return found


def breaks_later(args, batch, log_probs, reducer):
    loss, metrics = reinforce(args, batch, log_probs, reducer)
    loss.register_hook(lambda gradient: 1 / 0)
    return loss, metrics


def three_arguments(args, batch, log_probs):
    return log_probs.sum(), {}


def not_scalar(args, batch, log_probs, reducer):
    return -batch.advantages * log_probs, {}


def detached(args, batch, log_probs, reducer):
    return reducer(-batch.advantages * log_probs.detach()), {}


def unmasked(args, batch, log_probs, reducer):
    return -(batch.advantages + 1.0) @ log_probs, {}


def mean_of_micro_batch(args, batch, log_probs, reducer):
    return reducer(-(batch.advantages + 1.0) * log_probs) / len(batch.lengths), {}


def not_a_number(args, batch, log_probs, reducer):
    return reducer(-batch.advantages * log_probs) * float("nan"), {}


def per_sample_advantages(args, inputs):
    return inputs.rewards, inputs.rewards


def on_another_device(args, inputs):
    a = inputs.rewards[inputs.index].to("meta")
    return a, a


def breaks_later_tis(*, pg_loss, loss_masks, **more):
    weighted = 0.5 * pg_loss
    weighted.register_hook(lambda gradient: 1 / 0)
    return weighted, loss_masks, {}


def detached_tis(*, pg_loss, loss_masks, **more):
    return pg_loss.detach(), loss_masks, {}


def too_few_rewards(args, samples):
    return [0.0], [0.0]


def no_metrics(*, pg_loss, loss_masks, **more):
    return pg_loss, loss_masks


def integer_masks_lost(*, pg_loss, loss_masks, **more):
    return pg_loss, torch.cat(loss_masks), {}


def mean_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: x.mean()


NOT_CALLABLE = 3


def narrow_only(args, inputs):
    """Has a rule of its own about a live setting."""
    if args.eps_clip > 0.5:
        raise ValueError(f"eps_clip = {args.eps_clip} is not for this run")
    return twice_the_mean(args, inputs)
