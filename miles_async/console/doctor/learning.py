"""What the metrics of the steps say about learning (pure).

A trend compares the newest RECENT steps with the run's first ones, or with its best. A run that has made fewer than ENOUGH steps
shows none, and noise between steps is measured before a fall is called one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from actors.recorder.history import REWARD
from actors.trainer.selfcheck import checks_made, failures
from miles_async.console.doctor.finding import Finding, Level, Rule
from miles_async.console.scene import Scene

RECENT, ENOUGH = 5, 12


def _told(rule: Rule, text: str, level: Level = "warning") -> Finding:
    return Finding(level, rule, "trainer", text)


def first_step(scene: Scene) -> Iterator[Finding]:
    """What the run's first training step said about itself, where its record can be read."""
    found = failures(scene.first_step)
    for line in found:
        yield _told("self-check", f"step 1 failed its self-check: {line}")
    if not found and (made := checks_made(scene.first_step)):
        yield _told("self-check", f"step 1 passed the {made} checks of its self-check", "info")


def _values(scene: Scene, name: str) -> list[float]:
    return [s.metrics[name] for s in scene.steps if math.isfinite(s.metrics.get(name, math.nan))]


def _both(scene: Scene, name: str) -> tuple[float, float] | None:
    """Means over the first steps and over the newest; None while that is too early."""
    values = _values(scene, name)
    return (fmean(values[:RECENT]), fmean(values[-RECENT:])) if len(values) >= ENOUGH else None


def _rise(values: Sequence[float], before: float, after: float, n: int) -> float:
    """The difference of two means over `n` steps in units of what noise between steps would make it."""
    noise = 1.4826 * median(abs(b - a) for a, b in pairwise(values)) / math.sqrt(2)
    return (after - before) / max(noise * math.sqrt(2 / n), 1e-9)


def _learned(scene: Scene) -> bool:
    """Whether the reward is above what it was at the start, by more than noise."""
    values, both = _values(scene, REWARD), _both(scene, REWARD)
    return both is not None and _rise(values, *both, RECENT) > 3.0


def reward_falls(scene: Scene) -> Iterator[Finding]:
    """Lower than in the run's best time, by a third and far more than noise."""
    values = _values(scene, REWARD)
    n = max(RECENT, min(20, len(values) // 5))
    if len(values) < 2 * n + 2:
        return
    means = [fmean(values[i : i + n]) for i in range(len(values) - n + 1)]
    best, now = max(means[:-n]), means[-1]
    if best - now > 0.3 * abs(best) and -_rise(values, best, now, n) > 6.0:
        at = scene.steps[means.index(best)].step + n // 2
        remedy = "go back to a checkpoint of that time with a lower lr, and look at samples"
        yield _told("reward falls", f"the reward was {best:.3g} around step {at} and is {now:.3g}: {remedy}")


def entropy(scene: Scene) -> Iterator[Finding]:
    both = _both(scene, "train/entropy_loss")
    if both is None:
        return
    first, now = both
    course = f"from {first:.3g} to {now:.3g} nats a token"
    if now < 0.1 * first and _learned(scene):
        yield _told("entropy collapsed", f"the policy's entropy fell {course} while the reward rose", "info")
    elif now < 0.1 * first:
        why = "answers are all alike, and nothing is left to learn from"
        remedy = "Lower lr, raise temperature or entropy_coef, or add --use-kl-loss"
        yield _told("entropy collapsed", f"the policy's entropy fell {course}: {why}. {remedy}")
    elif now > max(3 * first, first + 1.0):
        yield _told("entropy grows", f"the policy's entropy rose {course}: it writes at random. Lower lr, and look at samples")


def ess_falls(scene: Scene) -> Iterator[Finding]:
    both = _both(scene, "train/ess_ratio")
    if both is not None and both[1] < 0.5:
        text = f"the effective sample size is {both[1]:.2f} of the tokens (it began at {both[0]:.2f}): the data is too old"
        yield _told("ESS falls", f"{text} for this learning rate. Lower max_weight_staleness or lr (both live)")


def gradient(scene: Scene) -> Iterator[Finding]:
    norms = [s.metrics.get("train/grad_norm", math.nan) for s in scene.steps]
    finite = [n for n in norms if math.isfinite(n)]
    skipped = sum(s.get("train/skipped_updates") > 0 for s in scene.steps[-RECENT:])
    if skipped:
        text = f"the gradient was not finite in {skipped} of the last {RECENT} steps, whose updates were left out"
        yield _told("gradient", f"{text}: look for NaN in rewards and log-probs")
    elif len(finite) >= ENOUGH and (now := median(finite[-3:])) > 10 * (usual := median(finite[-60:-3])):
        text = f"the gradient's norm is {now:.3g}, 10 times what is usual in this run ({usual:.3g}) or more"
        yield _told("gradient", f"{text}: lower lr, and look at the newest batches")


def answers(scene: Scene) -> Iterator[Finding]:
    """Lengths: at the cap, none at all, much shorter than they were, or chosen by what is trained."""
    cut, length, bias = (
        _both(scene, name) for name in ("rollout/truncated_ratio", "rollout/response_len/mean", "train/length_bias")
    )
    longest = _values(scene, "rollout/response_len/p90")[-RECENT:]
    if cut is not None and cut[1] > 0.5 > cut[0] + 0.2:
        text = f"{cut[1]:.0%} of the answers are cut at the length limit, at first {cut[0]:.0%}"
        yield _told("answers cut", f"{text}: raise rollout_max_response_len, or price length in the reward")
    if len(longest) == RECENT and max(longest) <= 1:
        text = "nine in ten answers have one token or none: look at samples, the chat template and stop tokens"
        yield _told("answers empty", text)
    elif length is not None and length[1] < 0.4 * length[0] and not _learned(scene):
        text = f"answers shrank from {length[0]:.0f} to {length[1]:.0f} tokens and the reward did not rise"
        yield _told("answers shrink", f"{text}: look at samples and at what the reward pays for")
    if bias is not None and abs(bias[1]) > 0.25:
        text = f"trained answers are {abs(bias[1]):.0%} {'short' if bias[1] < 0 else 'long'}er than sampled ones"
        yield _told("length bias", f"{text}: what is masked or dropped is of one length. See docs/bias.md")


def differing_logprobs(scene: Scene) -> Iterator[Finding]:
    both = _both(scene, "train/forward_logp_abs_diff")
    if both is not None and both[1] > 0.4:
        text = f"trainer and engine differ by {both[1]:.2f} nats a token (at first {both[0]:.2f})"
        why = "other weights, temperature or tokenization; about 0.8 is a chat template mismatch"
        yield _told("log-probs differ", f"{text}: {why}. Compare with --check-weight-update-equal")


def full_gpu(scene: Scene) -> Iterator[Finding]:
    retries = _values(scene, "train/gpu_retries")[-RECENT - 1 :]
    if len(retries) > 1 and (more := retries[-1] - retries[0]) > 0:
        text = f"the trainer's GPU memory ran out {more:.0f} times in the last {len(retries) - 1} steps"
        why = "was pieced together again: steps are slow, and the next larger batch may not fit"
        yield _told("GPU memory", f"{text} and {why}. Lower --max-tokens-per-gpu, or set --gradient-checkpointing")


TRENDS: tuple[Callable[[Scene], Iterator[Finding]], ...] = (
    full_gpu,
    differing_logprobs,
    gradient,
    reward_falls,
    entropy,
    ess_falls,
    answers,
)
