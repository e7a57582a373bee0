"""Warm start of the quickstart model: supervised training into a policy that can calculate but seldom does it right.

Reads problems from `data.stream`, changes the weights it is given; owns no files. Two lessons, then a blend:

1. learn: right answers. The model becomes able to solve about 95 % of new problems.
2. careless: a short second lesson on answers of which four in five are one too high, see `SLIPS`.
3. blend: the weights between the two, at the point where greedy accuracy on development problems is the target.

So the right answer keeps a probability of about 30 % and the slip is usually likelier: exact-match reward has something
to find. Always true: no held-out prompt and no development prompt is ever trained on, and equal seeds give equal weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F

from actors.runtime.seeds import seed_for
from bus.errors import MilesAsyncError
from miles_async.quickstart.data import MIX, Problem, stream
from miles_async.quickstart.muon import Muon
from miles_async.quickstart.tokenizer import EOS_ID, PAD_ID, VOCABULARY

__all__ = ["CORPUS_MIX", "SLIPS", "WarmStart", "WarmStartFailed", "accuracy", "development_problems", "warm_start"]

CORPUS_MIX = {"sum": 0.13, "difference": 0.15, "chain": 0.26, "bracket": 0.13, "mixed": 0.30, "product": 0.05}
"""Kinds in lesson 1: the hard ones more often than in the task."""

SLIPS: dict[int, float] = {0: 0.20, 1: 0.80}
"""Lesson 2 adds this to the right answer, with this probability. 0 is no slip."""

_IGNORED = -100
_IDS = {token: index for index, token in enumerate(VOCABULARY)}


class WarmStartFailed(MilesAsyncError):
    """The blend missed the accepted range of accuracy. A defect of the recipe: seeds in use never show it."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The recipe. Changing any field changes the weights."""

    learn_steps: int = 1500
    """Batches of lesson 1."""
    careless_steps: int = 120
    """Batches of lesson 2."""
    batch_size: int = 64
    """Problems per batch, in both lessons."""
    muon_lr: float = 0.02
    """Peak learning rate of the matrices in the layers, lesson 1."""
    adam_lr: float = 4e-3
    """Peak learning rate of embeddings, head and norms, lesson 1."""
    careless_lr: float = 4e-4
    """Peak learning rate of all parameters, lesson 2."""
    weight_decay: float = 0.05
    """Of Muon; AdamW uses none."""
    target_accuracy: float = 0.30
    """Greedy accuracy on development problems that the blend aims at, 0 to 1."""
    accepted: tuple[float, float] = (0.22, 0.35)
    """Development accuracy outside this range is refused."""
    development: int = 400
    """Development problems."""


def warm_start(
    model: torch.nn.Module,
    recipe: WarmStart,
    *,
    seed: int,
    without: frozenset[str],
    progress: Callable[[float], None] | None = None,
) -> float:
    """Train `model` in place and return its greedy accuracy on the development problems, 0 to 1.

    `without` holds the prompts never to train on. `progress` is called with the share of the work done, 0 to 1.
    Raises WarmStartFailed when the accuracy is outside `recipe.accepted`.
    """
    development = development_problems(recipe.development, seed=seed, without=without)
    unseen = without | {problem.prompt for problem in development}
    report = progress or (lambda _share: None)
    total = recipe.learn_steps + recipe.careless_steps

    def learn_share(step: int) -> None:
        report(step / total)

    def careless_share(step: int) -> None:
        report((recipe.learn_steps + step) / total)

    right = stream(seed_for(seed, "warm-start", "learn"), mix=CORPUS_MIX, without=unseen)
    _learn(model, recipe, ((problem, problem.label) for problem in right), learn_share)
    able = _copy(model)
    problems = stream(seed_for(seed, "warm-start", "careless"), mix=MIX, without=unseen)
    _grow_careless(model, recipe, _with_slips(problems, seed_for(seed, "warm-start", "slips")), careless_share)
    reached = _blend(model, able, _copy(model), development, recipe.target_accuracy)
    low, high = recipe.accepted
    if not low <= reached <= high:
        raise WarmStartFailed(
            f"warm start with seed {seed} reached {reached:.1%} on development problems, accepted is {low:.0%} to "
            f"{high:.0%}. Use another seed or change the recipe. Nothing was saved."
        )
    return reached


def development_problems(count: int, *, seed: int, without: frozenset[str]) -> list[Problem]:
    """`count` different problems of the task's mix, none of them in `without`. The warm start is measured on them."""
    unique: dict[str, Problem] = {}
    source = stream(seed_for(seed, "warm-start", "development"), without=without)
    while len(unique) < count:
        problem = next(source)
        unique.setdefault(problem.prompt, problem)
    return list(unique.values())


@torch.no_grad()
def accuracy(model: torch.nn.Module, problems: Sequence[Problem]) -> float:
    """Share of problems whose greedy response is exactly the label and then the end token.

    Needs one forward pass: greedy decoding gives the label if and only if each of its tokens is the likeliest after
    the tokens before it.
    """
    tokens, targets = _batch([(problem, problem.label) for problem in problems])
    best = model(tokens).logits[:, :-1].argmax(-1)
    expected = targets[:, 1:]
    return float(((best == expected) | (expected == _IGNORED)).all(dim=1).float().mean())


def _batch(pairs: Sequence[tuple[Problem, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, int64 [B, T], padded on the right. Targets are set on answer and end token only."""
    rows, targets = [], []
    for problem, answer in pairs:
        prompt = [_IDS[character] for character in problem.prompt]
        response = [*(_IDS[character] for character in answer), EOS_ID]
        rows.append(prompt + response)
        targets.append([_IGNORED] * len(prompt) + response)
    width = max(map(len, rows))
    tokens = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])
    return tokens, torch.tensor([row + [_IGNORED] * (width - len(row)) for row in targets])


def _backward(model: torch.nn.Module, pairs: Sequence[tuple[Problem, str]]) -> None:
    """Gradient of the mean cross entropy per answer token. The causal mask makes padding on the right harmless."""
    tokens, targets = _batch(pairs)
    hidden = model.model(tokens[:, :-1]).last_hidden_state  # type: ignore[operator]
    expected = targets[:, 1:]
    counted = expected != _IGNORED
    logits = model.lm_head(hidden[counted])  # type: ignore[operator]
    F.cross_entropy(logits, expected[counted]).backward()


def _learn(
    model: torch.nn.Module,
    recipe: WarmStart,
    pairs: Iterator[tuple[Problem, str]],
    report: Callable[[int], None],
) -> None:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    muon, adam = (
        Muon(matrices),
        torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    )
    for step in range(recipe.learn_steps):
        scale = _schedule(step, recipe.learn_steps, warmup=50, floor=0.05)
        _set_lr(adam, recipe.adam_lr * scale)
        _backward(model, list(islice(pairs, recipe.batch_size)))
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        adam.step()
        muon.step(lr=recipe.muon_lr * scale, weight_decay=recipe.weight_decay)
        model.zero_grad(set_to_none=True)
        report(step + 1)


def _grow_careless(
    model: torch.nn.Module,
    recipe: WarmStart,
    pairs: Iterator[tuple[Problem, str]],
    report: Callable[[int], None],
) -> None:
    adam = torch.optim.AdamW(model.parameters(), lr=recipe.careless_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in range(recipe.careless_steps):
        _set_lr(adam, recipe.careless_lr * _schedule(step, recipe.careless_steps, warmup=10, floor=0.1))
        _backward(model, list(islice(pairs, recipe.batch_size)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        model.zero_grad(set_to_none=True)
        report(step + 1)


def _with_slips(problems: Iterator[Problem], seed: int) -> Iterator[tuple[Problem, str]]:
    rng = random.Random(seed)
    slips, weights = list(SLIPS), list(SLIPS.values())
    for problem in problems:
        yield problem, str(int(problem.label) + rng.choices(slips, weights)[0])


def _blend(
    model: torch.nn.Module,
    able: dict[str, torch.Tensor],
    careless: dict[str, torch.Tensor],
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
        reached = accuracy(model, problems)
        if nearest is None or abs(reached - target) < nearest[0]:
            nearest = (abs(reached - target), reached, weights)
        low, high = (share, high) if reached > target else (low, share)
    assert nearest is not None
    model.load_state_dict(nearest[2])
    return nearest[1]


def _schedule(step: int, steps: int, *, warmup: int, floor: float) -> float:
    """Share of the peak learning rate: up over `warmup` steps, down to `floor` at the end."""
    return min(1.0, (step + 1) / warmup) * (1 - (1 - floor) * step / steps)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _copy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
