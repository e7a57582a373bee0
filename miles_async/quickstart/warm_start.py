"""Warm start of a task's model: supervised training of a policy that can calculate but rarely answers right.

Reads problems from `Task.stream`, changes the weights it is given; owns no files. Two lessons, then a blend:

1. learn: right answers. The model becomes able to solve about 95 % of new problems.
2. careless: a short second lesson on answers with the task's slips, see `Task.careless`.
3. blend: the weights between the two, at the point where greedy accuracy on development problems is the target.

So the right answer keeps a probability of about 30 % and the slip is usually likelier: there is something for
reinforcement learning to improve. Always true: no held-out prompt and no development prompt is ever trained on, and
equal seeds give equal weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import torch
import torch.nn.functional as F

from actors.runtime.seeds import seed_for
from actors.trainer.torch_backend.muon import Muon, like_jordan
from bus.errors import MilesAsyncError
from miles_async.quickstart.task import EOS_ID, PAD_ID, Problem, Task, WarmStart

_IGNORED = -100

PROBLEMS_AT_ONCE = 400
"""Of one forward pass of `accuracy`."""

Pair = tuple[list[int], list[int], list[int]]
"""Token ids of a prompt, of a response with its end token, and the response's targets: _IGNORED where the environment speaks."""


class WarmStartFailed(MilesAsyncError):
    """The blend missed the accepted range of accuracy. A defect of the recipe; the seeds in use do not have it."""


def warm_start(model: torch.nn.Module, task: Task, *, seed: int, without: frozenset[str]) -> float:
    """Train `model` in place and return its greedy accuracy on the development problems, 0 to 1.

    `without` holds the prompts never to train on. Raises WarmStartFailed when the accuracy is outside the recipe's `accepted`.
    """
    recipe = task.lessons
    development = development_problems(task, recipe.development, seed=seed, without=without)
    unseen = without | {problem.prompt for problem in development}
    problems = recipe.learn_steps * recipe.batch_size
    right = task.lesson(seed_for(seed, "warm-start", "learn"), problems, without=unseen)
    _learn(model, recipe, (_pair(task, problem, problem.written) for problem in right))
    able = _copy(model)
    again = task.stream(seed_for(seed, "warm-start", "careless"), without=unseen)
    slips = random.Random(seed_for(seed, "warm-start", "slips"))
    answers = (_pair(task, problem, task.careless(slips, problem)) for problem in again)
    _steps(model, recipe, answers, recipe.careless_steps, [*model.parameters()], recipe.careless_lr, warmup=10, floor=0.1)
    reached = _blend(model, able, _copy(model), task, development, recipe.target_accuracy)
    low, high = recipe.accepted
    if not low <= reached <= high:
        raise WarmStartFailed(
            f"warm start with seed {seed} reached {reached:.1%} on development problems, accepted is {low:.0%} to "
            f"{high:.0%}. Use another seed or change the recipe. Nothing was saved."
        )
    return reached


def development_problems(task: Task, count: int, *, seed: int, without: frozenset[str]) -> list[Problem]:
    """`count` different problems of the task's mix, none of them in `without`. The warm start is measured on them."""
    return task.different(count, seed=seed_for(seed, "warm-start", "development"), without=without)


@torch.no_grad()
def accuracy(model: torch.nn.Module, task: Task, problems: Sequence[Problem]) -> float:
    """Share of problems whose greedy response is exactly the written one and then the end token.

    Needs one forward pass: greedy decoding gives that response if and only if each of its tokens is the likeliest after
    the tokens before it. A response with two slips that even out counts as wrong here, and as right to the reward.
    """
    right = 0
    pairs = [_pair(task, problem, problem.written) for problem in problems]
    for part in _parts(pairs, -(-len(pairs) // PROBLEMS_AT_ONCE)):
        tokens, targets = _batch(part)
        best = model(tokens).logits[:, :-1].argmax(-1)
        expected = targets[:, 1:]
        right += int(((best == expected) | (expected == _IGNORED)).all(dim=1).sum())
    return right / len(problems)


def _pair(task: Task, problem: Problem, response: str) -> Pair:
    ids = [*task.encode(response), EOS_ID]
    targets = [token if made else _IGNORED for token, made in zip(ids, task.made(ids), strict=True)]
    return task.encode(problem.prompt), ids, targets


def _parts(pairs: Sequence[Pair], parts: int) -> list[Sequence[Pair]]:
    """`pairs` in `parts` of nearly equal numbers, those of like length together."""
    if parts == 1:
        return [pairs]
    ordered = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    cuts = [len(ordered) * i // parts for i in range(parts + 1)]
    return [ordered[a:b] for a, b in pairwise(cuts) if a < b]


def _batch(pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, int64 [B, T], padded on the right. Targets are set on answer and end token only."""
    rows = [prompt + response for prompt, response, _ in pairs]
    targets = [[_IGNORED] * len(prompt) + wanted for prompt, _, wanted in pairs]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])
    return tokens, torch.tensor([row + [_IGNORED] * (width - len(row)) for row in targets])


def _counted(pairs: Sequence[Pair]) -> int:
    """Tokens that are learnt."""
    return sum(target != _IGNORED for _, _, targets in pairs for target in targets)


def _backward(model: torch.nn.Module, recipe: WarmStart, pairs: Sequence[Pair]) -> None:
    """Gradient of the mean cross entropy per answer token. The causal mask makes padding on the right harmless."""
    total = _counted(pairs)
    for part in _parts(pairs, recipe.parts):
        tokens, targets = _batch(part)
        hidden = model.model(tokens[:, :-1]).last_hidden_state  # type: ignore[operator]
        expected = targets[:, 1:]
        counted = expected != _IGNORED
        logits = model.lm_head(hidden[counted])  # type: ignore[operator]
        share = _counted(part) / total
        (F.cross_entropy(logits, expected[counted]) * share).backward()


def _learn(model: torch.nn.Module, recipe: WarmStart, pairs: Iterator[Pair]) -> None:
    """Lesson 1: the matrices inside the layers by Muon."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    muon = Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, scale=like_jordan)
    _steps(model, recipe, pairs, recipe.learn_steps, rest, recipe.adam_lr, warmup=50, floor=0.05, muon=muon)


def _steps(
    model: torch.nn.Module,
    recipe: WarmStart,
    pairs: Iterator[Pair],
    steps: int,
    parameters: list[torch.nn.Parameter],
    lr: float,
    *,
    warmup: int,
    floor: float,
    muon: Muon | None = None,
) -> None:
    """So many batches: `parameters` by AdamW with the peak rate `lr`, others by `muon`."""
    adam = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in range(steps):
        scale = min(1.0, (step + 1) / warmup) * (1 - (1 - floor) * step / steps)  # up, then down to `floor`
        for group in adam.param_groups:
            group["lr"] = lr * scale
        _backward(model, recipe, list(islice(pairs, recipe.batch_size)))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        if muon is not None:
            muon.param_groups[0]["lr"] = recipe.muon_lr * scale
            muon.step()
        model.zero_grad(set_to_none=True)


def _blend(
    model: torch.nn.Module,
    able: dict[str, torch.Tensor],
    careless: dict[str, torch.Tensor],
    task: Task,
    problems: Sequence[Problem],
    target: float,
) -> float:
    """Load the weights between `able` and `careless` that come nearest to `target`, by bisection; their accuracy."""
    nearest: tuple[float, float, dict[str, torch.Tensor]] | None = None
    low, high = 0.0, 1.0
    for _ in range(8):
        share = (low + high) / 2
        weights = {name: torch.lerp(able[name], careless[name], share) for name in able}
        model.load_state_dict(weights)
        reached = accuracy(model, task, problems)
        if nearest is None or abs(reached - target) < nearest[0]:
            nearest = (abs(reached - target), reached, weights)
        low, high = (share, high) if reached > target else (low, share)
    assert nearest is not None
    model.load_state_dict(nearest[2])
    return nearest[1]


def _copy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
