"""Does a staleness policy favour short or long answers? Gradients of each against those of an on-policy run, and learning curves.

    python scripts/study_bias.py --out docs/measurements/bias.json --picture docs/bias.png

Two tasks: right answers three times as long as wrong ones on average, and the other way round. A policy is a table: for each prompt class it
chooses among six answers, three right and three wrong, whose lengths are log-normal. The project's own parts decide what is
trained (bias_house.py) and what it is worth (normalize_group_rewards). A sample's gradient is its value, times its importance
weight cut at 2, times the share of its tokens that is within the bound: the loss summed over a constant, which itself has no
bias by length.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from actors.trainer.objective.rewards import BASELINES, normalize_group_rewards
from scripts.bias_house import House, N, Task, Trained

TICKS = 200.0  # of a training step: as long as the engines take for a batch of the first policy
SEEDS = (1, 2, 3)
TIS = 2.0
RATE = 0.8
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
COLORS = ("#1c2430", "#5c6675", "#14804f", "#8cc7a8", "#2563c9", "#a2c0ee", "#c05c10")


def gradient(task: Task, log_policy: np.ndarray, batch: Sequence[Trained], *, estimator: str, baseline: str, masks: bool) -> np.ndarray:
    """Mean over samples of value x weight x grad log-probability, by logit [P, K]. `baseline`: field of Trained."""
    values = normalize_group_rewards(
        [s.answer.reward for s in batch],
        [s.group for s in batch],
        list(range(len(batch))),
        estimator=estimator,
        known_rewards=[getattr(s, baseline) for s in batch],
    ).values
    out = np.zeros_like(log_policy)
    total = np.zeros(len(out))
    for sample, value in zip(batch, values, strict=True):
        a = sample.answer
        weight = value * min(TIS, math.exp(log_policy[a.prompt, a.choice] - a.logp)) * (sample.fresh if masks else 1.0)
        out[a.prompt, a.choice] += weight
        total[a.prompt] += weight
    return (out - total[:, None] * np.exp(log_policy)) / len(batch)


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
                value = 0.0 if min(group) == max(group) else BASELINES[estimator](group)[0]
                worth[-1] += math.comb(N - 1, k) * right**k * (1 - right) ** (N - 1 - k) * value
        q = worth[0] + task.rewards[prompt] * (worth[1] - worth[0])
        out[prompt] = shares * (q - shares @ q) / len(policy)
    return out


def directions(task: Task) -> dict[str, np.ndarray]:
    """Unit vectors towards longer answers [P, K]: among all, and among answers of equal reward, where the truth is 0."""
    log = np.log(task.lengths)
    among = {"all": log - log.mean(), "equal reward": np.concatenate([log[:3] - log[:3].mean(), log[3:] - log[3:].mean()])}
    return {name: np.tile(d, (4, 1)) / np.linalg.norm(np.tile(d, (4, 1))) for name, d in among.items()}


def frozen(args: tuple[str, int, Task, int, int]) -> list[dict[str, Any]]:
    """Bias of the gradient at the uniform policy, for all estimators and baselines of one schedule."""
    policy, bound, task, batches, seed = args
    house = House(task, policy=policy, bound=bound, train_ticks=TICKS, seed=seed, logits=np.zeros((4, 6)))
    baselines = ("known", "every") if policy in ("split", "member") else ("known",)
    variants = [(e, b, m) for e in ("rloo", "grpo") for b in baselines for m in (True, False)]
    found: dict[tuple[str, str, bool], list[np.ndarray]] = {v: [] for v in variants}
    for number, batch in zip(range(-BLOCK, batches), house.batches(), strict=False):
        for variant in variants if number >= 0 else ():
            estimator, baseline, masks = variant
            found[variant].append(
                gradient(task, house.log_policy, batch, estimator=estimator, baseline=baseline, masks=masks)
            )
    rows = []
    for (estimator, baseline, masks), draws in found.items():
        blocks = np.array(draws).reshape(-1, BLOCK, 24).mean(axis=1)
        truth = exact_gradient(task, house.log_policy, estimator).ravel()
        along = {name: d.ravel() for name, d in directions(task).items()}
        row: dict[str, Any] = {"task": task.name, "policy": policy, "bound": bound, "baseline": baseline, "estimator": estimator}
        row |= {"masks": masks, "split": house.parted / max(1, house.parted + house.left_whole)}
        row |= {"masked": house.masked_tokens / house.ended_tokens, "batches": batches}
        for name, d in along.items():
            scale = abs(truth @ along["all"])
            draws_of = (blocks - truth) @ d / scale
            row[name] = [float(draws_of.mean()), float(draws_of.std(ddof=1) / math.sqrt(len(draws_of)))]
        size = blocks @ truth / (truth @ truth)
        row["size"] = [float(size.mean()), float(size.std(ddof=1) / math.sqrt(len(size)))]
        rows.append(row)
    return rows


def curve(args: tuple[str, Task, int, int]) -> dict[str, Any]:
    """One run from a weak start: chance of a right answer and mean length after each step, and samples made until then."""
    name, task, steps, seed = args
    policy, bound, baseline = RULES[name]
    logits = np.zeros((4, 6))
    logits[:, 3:] = -1.5
    house = House(task, policy=policy, bound=bound, train_ticks=TICKS, seed=seed, logits=logits)
    out: dict[str, Any] = {"rule": name, "task": task.name, "seed": seed, "reward": [], "length": [], "samples": [], "ticks": []}
    for _, batch in zip(range(steps), house.batches(), strict=False):
        now = np.exp(house.log_policy)
        out["reward"].append(float((now * task.rewards).sum(axis=1).mean()))
        out["length"].append(float((now @ task.lengths).mean()))
        out["samples"].append(house.ended)
        out["ticks"].append(house.now)
        logits += RATE * 4 * gradient(task, house.log_policy, batch, estimator="grpo", baseline=baseline, masks=True)
    return out | {"masked": house.masked_tokens / house.ended_tokens}


def draw(found: dict[str, Any], file: Path) -> None:
    """Above: reward and length over steps; below: reward over samples, and the bias of the gradient."""
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
            for masks, offset in ((True, -0.14), (False, 0.14)):
                [hit] = [
                    r for r in found["gradient"]
                    if (r["task"], r["policy"], r["bound"], r["baseline"], r["estimator"], r["masks"])
                    == (task.name, policy, bound, baseline, "rloo", masks)
                ]  # fmt: skip
                mean, error = hit["all"]
                row[3].errorbar(
                    100 * mean, at + offset, xerr=200 * error, color=color[name], capsize=3,
                    marker="o" if masks else "s", mfc=color[name] if masks else "white",
                )  # fmt: skip
        row[3].axvline(0, color="#1c2430", lw=0.8)
        row[3].set_yticks(range(len(RULES)), list(RULES))
        row[3].invert_yaxis()
        row[3].set_xlabel("% of the true gradient, ± 2 SE; ← shorter, longer →; square: without masks")
        row[3].set_title(f"{task.name}: bias of the gradient (rloo)", fontsize=10)
        row[3].grid(alpha=0.25)
    axes[0][0].legend(fontsize=8)
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--batches", type=int, default=1000, help="for each gradient")
    parser.add_argument("--steps", type=int, default=100, help="of each curve")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=("gradient", "curves", "picture"), help="the rest is taken from --out")
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    schedules = dict.fromkeys((policy, bound) for policy, bound, _ in RULES.values())
    with ProcessPoolExecutor(args.jobs) as pool:
        if args.only in (None, "gradient"):
            work = [(*s, task, args.batches // BLOCK * BLOCK, 11) for s in schedules for task in TASKS]
            found["gradient"] = [row for rows in pool.map(frozen, work) for row in rows]
            args.out.write_text(json.dumps(found) + "\n")
        if args.only in (None, "curves"):
            runs = [(name, task, args.steps, seed) for name in RULES for task in TASKS for seed in SEEDS]
            found["curves"] = list(pool.map(curve, runs))
    args.out.write_text(json.dumps(rounded(found)) + "\n")
    for row in found["gradient"]:
        if row["masks"] or row["policy"] in ("split", "member"):
            figures = "  ".join(f"{k} {100 * row[k][0]:+.2f} ± {100 * row[k][1]:.2f} %" for k in ("all", "equal reward", "size"))
            what = f"{row['task']:15}{row['policy']:7}{row['bound']} {row['baseline']:6}{row['estimator']:5}"
            print(f"{what}{'masks ' if row['masks'] else 'no masks'}  {figures}  split {row['split']:.0%} masked {row['masked']:.1%}")
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
