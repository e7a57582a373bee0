"""Does a staleness policy favour short or long answers? Gradients of each against those of an on-policy run, and learning curves.

    python -m scripts.bench study_bias --out docs/measurements/bias.json --picture docs/bias.png

Two tasks: right answers three times as long as wrong ones on average, and the other way round. A policy is a table: for each
prompt class it chooses among six answers, three right and three wrong, whose lengths are log-normal. The project's own parts
decide what is trained (bias_house.py) and what it is worth (normalize_group_rewards). A sample's gradient is its value, times
its importance weight cut at 2, times the share of its tokens that is within the bound: the loss summed over a constant, which
itself has no bias by length.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.trainer.objective.rewards import baseline_of, normalize_group_rewards
from scripts.bench.bias_house import House, N, Task, Trained

TICKS = 200.0  # of a training step: as long as the engines take for a batch of the first policy
SEEDS = (1, 2, 3)
TIS = 2.0
RATE = 0.4
WEAK, STRONG = -1.5, 1.5  # logit of right answers: 18 and 82 % of the answers are right ones
ESTIMATORS = ("rloo", "grpo")
BLOCK = 20  # batches whose mean is one draw for the standard error; a group's parts are rarely further apart
SHORT, LONG = (25.0, 50.0, 75.0), (75.0, 150.0, 225.0)
WRONG, RIGHT = np.full(4, 0.05), np.array([0.95, 0.85, 0.75, 0.65])  # chance of reward 1, by prompt class


def task_of(name: str) -> Task:
    """Answers 0 to 2 are wrong, 3 to 5 right."""
    lengths = SHORT + LONG if name == "right is long" else LONG + SHORT
    return Task(name, np.array(lengths), np.concatenate([np.tile(WRONG[:, None], 3), np.tile(RIGHT[:, None], 3)], axis=1))


TASKS = tuple(map(task_of, ("right is long", "right is short")))
RULES: dict[str, tuple[str, int, str]] = {  # policy, bound, baseline of parts
    "on-policy": ("auto", 0, "known"),
    "whole, bound 6": ("whole", 6, "known"),
    "split": ("split", 2, "known"),
    "split, late see all": ("split", 2, "every"),
    "member": ("member", 2, "known"),
    "member, late see all": ("member", 2, "every"),
    "drop": ("drop", 2, "known"),
}
LABEL = "% of the true gradient, ± 2 SE: ← shorter, longer →"
COLORS = ("#1c2430", "#5c6675", "#14804f", "#8cc7a8", "#2563c9", "#a2c0ee", "#c05c10")


def values_of(rewards: Sequence[float], groups: Sequence[str], known: Sequence[Sequence[float]], estimator: str) -> list[float]:
    """Advantages of samples, as the trainer takes them."""
    return normalize_group_rewards(rewards, groups, range(len(rewards)), estimator=estimator, known_rewards=known).values


def batch_values(batch: Sequence[Trained], *, estimator: str, baseline: str) -> list[float]:
    """The same for a batch. `baseline`: field of Trained."""
    return values_of([s.answer.reward for s in batch], [s.group for s in batch], [getattr(s, baseline) for s in batch], estimator)


def gradient(log_policy: np.ndarray, batch: Sequence[Trained], values: Sequence[float]) -> np.ndarray:
    """Mean over samples of value x weight x grad log-probability, by logit [P, K]."""
    out = np.zeros_like(log_policy)
    for sample, value in zip(batch, values, strict=True):
        a = sample.answer
        out[a.prompt, a.choice] += value * min(TIS, math.exp(log_policy[a.prompt, a.choice] - a.logp)) * sample.fresh
    return (out - out.sum(axis=1, keepdims=True) * np.exp(log_policy)) / len(batch)


def exact_gradient(task: Task, log_policy: np.ndarray, estimator: str) -> np.ndarray:
    """Expectation of the same for whole groups on policy, by summing over how many siblings are right."""
    policy = np.exp(log_policy)
    out = np.zeros_like(policy)
    for prompt, shares in enumerate(policy):
        right = float(shares @ task.rewards[prompt])
        worth = []
        for own in (0.0, 1.0):
            worth.append(0.0)
            for k in range(N):
                group = [own] + [1.0] * k + [0.0] * (N - 1 - k)
                value = 0.0 if min(group) == max(group) else (baseline_of(estimator) or list)(group)[0]
                worth[-1] += math.comb(N - 1, k) * right**k * (1 - right) ** (N - 1 - k) * value
        q = worth[0] + task.rewards[prompt] * (worth[1] - worth[0])
        out[prompt] = shares * (q - shares @ q) / len(policy)
    return out


def direction(task: Task, *, equal: bool = False) -> np.ndarray:
    """Unit vector towards longer answers [P, K]; `equal`: among answers of equal reward, where the true gradient has nothing."""
    log = np.log(task.lengths)
    d = np.concatenate([log[:3] - log[:3].mean(), log[3:] - log[3:].mean()]) if equal else log - log.mean()
    tiled = np.tile(d, (4, 1))
    return tiled / np.linalg.norm(tiled)


def logits_at(start: float) -> np.ndarray:
    """A policy that differs between right and wrong answers only [P, K]."""
    logits = np.zeros((4, 6))
    logits[:, 3:] = start
    return logits


def frozen(args: tuple[str, int, Task, float, int, int]) -> list[dict[str, Any]]:
    """Bias of the gradient at a fixed policy, for all estimators and baselines of one schedule, as shares of the true gradient's
    component along length: `total` of what is trained, against the exact expectation; `baseline` of the values alone, against
    the values that the same samples had if their group were whole (much less noise: most of it cancels)."""
    policy, bound, task, start, batches, seed = args
    house = House(task, policy=policy, bound=bound, train_ticks=TICKS, seed=seed, logits=logits_at(start))
    baselines = ("known", "every") if policy in ("split", "member") else ("known",)
    variants = [(e, b) for e in ESTIMATORS for b in baselines]
    total: dict[tuple[str, str], list[np.ndarray]] = {v: [] for v in variants}
    paired: dict[tuple[str, str], list[np.ndarray]] = {v: [] for v in variants}
    halves: dict[str, list[tuple[Trained, tuple[float, ...]]]] = {}
    for number, batch in zip(range(-BLOCK, batches), house.batches(), strict=False):
        if number < 0:
            continue
        values = [batch_values(batch, estimator=e, baseline=b) for e, b in variants]
        for variant, found in zip(variants, values, strict=True):
            total[variant].append(gradient(house.log_policy, batch, found))
        for sample, worth in zip(batch, zip(*values, strict=True), strict=True):
            half = halves.setdefault(sample.group, [])
            half.append((sample, worth))
            if len(half) < N:
                continue
            del halves[sample.group]
            members = [replace(s, fresh=1.0) for s, _ in half]
            for at, (estimator, baseline) in enumerate(variants):
                whole = values_of([s.answer.reward for s in members], [""] * N, [()] * N, estimator)
                change = [w[at] - v for (_, w), v in zip(half, whole, strict=True)]
                paired[estimator, baseline].append(gradient(house.log_policy, members, change))
    rows = []
    for estimator, baseline in variants:
        truth = exact_gradient(task, house.log_policy, estimator)
        row: dict[str, Any] = {"task": task.name, "start": start, "policy": policy, "bound": bound, "late": baseline}
        row |= {"estimator": estimator, "split": house.parted / max(1, house.parted + house.left_whole)}
        row |= {"masked": house.masked_tokens / house.ended_tokens, "batches": batches, "groups": len(paired[estimator, baseline])}
        unit = abs(float((truth * direction(task)).sum()))
        for name, d, scale in (
            ("length", direction(task), unit),
            ("size", truth, float((truth * truth).sum())),
            ("equal reward", direction(task, equal=True), unit),
        ):
            row[f"total, {name}"] = estimate([float(((g - truth) * d).sum()) / scale for g in total[estimator, baseline]])
            row[f"baseline, {name}"] = estimate([float((g * d).sum()) / scale for g in paired[estimator, baseline]])
        rows.append(row)
    return rows


def estimate(draws: Sequence[float]) -> list[float]:
    """Mean and its standard error, from means of blocks."""
    whole = len(draws) // BLOCK * BLOCK
    blocks = np.array(draws[:whole]).reshape(-1, BLOCK).mean(axis=1)
    return [float(blocks.mean()), float(blocks.std(ddof=1) / math.sqrt(len(blocks)))]


def curve(args: tuple[str, Task, int, int]) -> dict[str, Any]:
    """One run from a weak start: chance of a right answer and mean length after each step, and samples made until then."""
    name, task, steps, seed = args
    policy, bound, baseline = RULES[name]
    logits = logits_at(WEAK)
    house = House(task, policy=policy, bound=bound, train_ticks=TICKS, seed=seed, logits=logits)
    out: dict[str, Any] = {"rule": name, "task": task.name, "seed": seed, "reward": [], "length": [], "samples": [], "ticks": []}
    for _, batch in zip(range(steps), house.batches(), strict=False):
        now = np.exp(house.log_policy)
        out["reward"].append(float((now * task.rewards).sum(axis=1).mean()))
        out["length"].append(float((now @ task.lengths).mean()))
        out["samples"].append(house.ended)
        out["ticks"].append(house.now)
        logits += RATE * 4 * gradient(house.log_policy, batch, batch_values(batch, estimator="grpo", baseline=baseline))
    return out | {"masked": house.masked_tokens / house.ended_tokens}


def draw(found: dict[str, Any], file: Path) -> None:
    """A row for each task: reward over steps and over samples, length over steps, bias of the gradient."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(17, 7.6), layout="constrained")
    color = dict(zip(RULES, COLORS, strict=True))
    for row, task in zip(axes, TASKS, strict=True):
        for axis, (x, y) in zip(row, (("step", "reward"), ("samples", "reward"), ("step", "length")), strict=False):
            for name in RULES:
                runs = [r for r in found["curves"] if r["rule"] == name and r["task"] == task.name]
                ys = np.array([r[y] for r in runs])
                xs = np.arange(ys.shape[1]) if x == "step" else np.mean([r["samples"] for r in runs], axis=0)
                axis.plot(xs, ys.mean(axis=0), color=color[name], label=name, lw=1.4, ls="--" if "all" in name else "-")
                axis.fill_between(xs, ys.min(axis=0), ys.max(axis=0), color=color[name], alpha=0.12, lw=0)
            axis.set_xlabel("step" if x == "step" else "samples generated")
            axis.set_title(f"{task.name}: " + ("expected reward" if y == "reward" else "mean length, tokens"), fontsize=10)
            axis.grid(alpha=0.25)
        for at, name in enumerate(RULES):
            policy, bound, baseline = RULES[name]
            for start, offset in ((WEAK, -0.16), (STRONG, 0.16)):
                [hit] = [
                    r for r in found["gradient"]
                    if (r["task"], r["start"], r["policy"], r["bound"], r["late"], r["estimator"])
                    == (task.name, start, policy, bound, baseline, "rloo")
                ]  # fmt: skip
                for kind, marker in (("total", "o"), ("baseline", "|")):
                    mean, error = hit[f"{kind}, length"]
                    row[3].errorbar(
                        100 * mean, at + offset, xerr=200 * error if kind == "total" else None, color=color[name], capsize=3,
                        marker=marker, ms=6 if kind == "total" else 12, mfc=color[name] if start == WEAK else "white",
                    )  # fmt: skip
        row[3].axvline(0, color="#1c2430", lw=0.8)
        row[3].set_yticks(range(len(RULES)), list(RULES))
        row[3].invert_yaxis()
        row[3].set_xlabel(LABEL)
        row[3].set_title(f"{task.name}: bias of the gradient (rloo)", fontsize=10)
        row[3].grid(alpha=0.25)
    axes[0][0].legend(fontsize=8)
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--batches", type=int, default=800, help="for each gradient")
    parser.add_argument("--steps", type=int, default=120, help="of each curve")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=("gradient", "curves", "picture"), help="the rest is taken from --out")
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    schedules = dict.fromkeys([*((policy, bound) for policy, bound, _ in RULES.values()), ("split", 1)])
    with ProcessPoolExecutor(args.jobs) as pool:
        if args.only in (None, "gradient"):
            work = [(*s, t, start, args.batches, 11) for s in schedules for t in TASKS for start in (WEAK, STRONG)]
            found["gradient"] = [row for rows in pool.map(frozen, work) for row in rows]
            args.out.write_text(json.dumps(found) + "\n")
        if args.only in (None, "curves"):
            runs = [(name, task, args.steps, seed) for name in RULES for task in TASKS for seed in SEEDS]
            found["curves"] = list(pool.map(curve, runs))
    args.out.write_text(json.dumps(rounded(found)) + "\n")
    for row in found["gradient"]:
        what = f"{row['task']:14} {row['start']:+} {row['policy']:6} {row['bound']} {row['late']:5} {row['estimator']} "
        names = [k for k in row if ", " in k]
        figures = "  ".join(f"{k} {100 * row[k][0]:+.2f}±{100 * row[k][1]:.2f}" for k in names)
        print(f"{what} {figures}  split {row['split']:.0%} masked {row['masked']:.1%}")
    if args.picture:
        draw(found, args.picture)


def rounded(found: Any) -> Any:
    """Numbers with five significant digits."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [rounded(value) for value in found]
    return float(f"{found:.5g}") if isinstance(found, float) else found


if __name__ == "__main__":
    main()
