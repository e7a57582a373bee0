"""What a task of this package is: problems from a seed, how a right and a careless answer are written, sizes and lessons.

Pure data and random draws, no torch; owns nothing. Always true: equal seeds give equal problems, and no prompt is drawn twice
into one data set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

SPECIAL = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
EOS = SPECIAL[EOS_ID]
"""Every vocabulary begins with these."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `prompt` ends with "="; `label` is the answer; `written` is the right response in full, which may work it
    out first."""

    prompt: str
    label: str
    written: str
    kind: str


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the tiny Qwen3; 77k parameters as they stand, with the arithmetic task's vocabulary."""

    hidden_size: int = 64
    intermediate_size: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The recipe. Changing any field changes the weights."""

    learn_steps: int = 1500
    """Batches of lesson 1."""
    careless_steps: int = 120
    """Batches of lesson 2."""
    batch_size: int = 64
    """Problems per batch, in both lessons."""
    parts: int = 1
    """Forward passes per batch, problems of like length together: less padding where lengths differ much."""
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


@dataclass(frozen=True, slots=True)
class Task:
    """A task as data. Its files are `configs/data/<name>_train.jsonl` and `<name>_held_out.jsonl`, its model is
    `builtin:<name>`."""

    name: str
    draw: Callable[[random.Random], Problem]
    """One problem as the task has them. Two draws may give the same text."""
    careless: Callable[[random.Random, Problem], str]
    """A response for lesson 2 of the warm start, mostly a wrong one."""
    vocabulary: tuple[str, ...]
    """Token of each id; SPECIAL first. One character each, but for a few marks of several that hold no other token's use."""
    max_tokens: int
    """Longest sequence (prompt and response) the model is configured for."""
    data_seed: int
    """Seed of the files shipped in `configs/data/`."""
    most: int
    """Most problems of one data set: well below the number of different ones."""
    draw_lesson: Callable[[random.Random, float], Problem] | None = None
    """One problem for lesson 1 of the warm start, the hard ones more often; the number is the share of the lesson that is
    done, 0 to 1, for tasks that begin with easy ones. None: as `draw` throughout."""
    train: int = 2400
    """Training problems in the shipped files."""
    held_out: int = 240
    """Held-out problems in the shipped files."""
    told: tuple[str, str] = ("", "")
    """Marks around what the environment says within `Problem.written`; empty = it says nothing."""
    template: str = ""
    """Chat template of the tokenizer, where the task is a dialogue."""
    shape: Shape = field(default_factory=Shape)
    lessons: WarmStart = field(default_factory=WarmStart)

    def stream(self, seed: int, *, without: frozenset[str] = frozenset()) -> Iterator[Problem]:
        """Endless problems from `seed`, none of whose prompts is in `without`."""
        rng = random.Random(seed)
        while True:
            problem = self.draw(rng)
            if problem.prompt not in without:
                yield problem

    def lesson(self, seed: int, count: int, *, without: frozenset[str] = frozenset()) -> Iterator[Problem]:
        """`count` problems of lesson 1 from `seed`, none of whose prompts is in `without`."""
        rng, given = random.Random(seed), 0
        while given < count:
            problem = self.draw_lesson(rng, given / count) if self.draw_lesson is not None else self.draw(rng)
            if problem.prompt not in without:
                given += 1
                yield problem

    def different(self, count: int, *, seed: int, without: frozenset[str] = frozenset()) -> list[Problem]:
        """`count` problems with different prompts, in the order drawn."""
        unique: dict[str, Problem] = {}
        source = self.stream(seed, without=without)
        while len(unique) < count:
            problem = next(source)
            unique.setdefault(problem.prompt, problem)
        return list(unique.values())

    def make_problems(self, seed: int, *, train: int, held_out: int) -> tuple[list[Problem], list[Problem]]:
        """`train` and `held_out` problems, all with different prompts, in random order.

        Raises ValueError when they are more than `most` together.
        """
        if train < 0 or held_out < 0 or train + held_out > self.most:
            raise ValueError(f"train={train} + held_out={held_out} refused: must be >= 0 and at most {self.most} together.")
        problems = self.different(train + held_out, seed=seed)
        random.Random(seed + 1).shuffle(problems)  # late draws are poor in the small kinds: mix before cutting
        return problems[held_out:], problems[:held_out]

    def shipped(self) -> tuple[list[Problem], list[Problem]]:
        """Training and held-out problems of the shipped files."""
        return self.make_problems(self.data_seed, train=self.train, held_out=self.held_out)

    def encode(self, text: str) -> list[int]:
        """Ids of a text of this vocabulary, as the tokenizer gives them. Raises KeyError for anything else."""
        ids = {token: index for index, token in enumerate(self.vocabulary)}
        return [ids[token] for token in _split(text, [t for t in self.vocabulary if len(t) > 1])]

    def made(self, ids: Sequence[int]) -> list[bool]:
        """Of the ids of a written response: which the model makes, and which the environment says."""
        found, within = [], False
        opening, closing = (self.vocabulary.index(mark) if mark else -1 for mark in self.told)
        for token in ids:
            within = within or token == opening
            found.append(not within)
            within = within and token != closing
        return found


def _split(text: str, marks: Sequence[str]) -> Iterator[str]:
    """Characters, but for the marks, which stay whole."""
    at = 0
    while at < len(text):
        token = next((mark for mark in marks if text.startswith(mark, at)), text[at])
        yield token
        at += len(token)
