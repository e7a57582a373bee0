"""The shipped reward rules (pure): text in, number or table of numbers out.

Each is `rule(Sample) -> Value`. A response that earns nothing is 0, never an error; `BadLabel` means that the data set and the
rule do not fit each other. Work is linear in the response, which may have 100k tokens.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from actors.reward.instructions import instructions
from actors.reward.mathanswer import final_answer, last_boxed, reference_answer, same_answer, undecided
from actors.reward.sample import BadLabel, Sample, Value
from actors.runtime.seeds import rng_for

Rule = Callable[[Sample], Value]

_ARTICLES = frozenset({"a", "an", "the"})
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DAPO_TAIL_CHARS = 300
_DAPO_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_CHOICE_PHRASE = re.compile(
    r"(?i:\b(?:answer|option|choice)\b(?:\s++(?:is|would\s++be))?[\s:*]*+(?:option\s++|choice\s++)?[\s*$({\[]*+)([A-Z])(?![A-Za-z])"
)
_CHOICE_LINE = re.compile(r"^[^\w\n]*+([A-Z])(?:[).:*\]}]|[^\w\n]*+$)", re.MULTILINE)
_CHOICE_BRACKETS = re.compile(r"\(([A-Z])\)")


def exact_match(sample: Sample) -> Value:
    """1 when the response is the label, but for white space around them."""
    return float(sample.response.strip() == sample.label.strip())


def contains(sample: Sample) -> Value:
    """1 when the label occurs in the response."""
    return float(bool(sample.label.strip()) and sample.label.strip() in sample.response)


class MathRule(msgspec.Struct, frozen=True):
    """A rule that compares one answer with the label. `answer`: what a response answers, None or empty = nothing; `value`: what
    right and wrong earn. Called as every rule it judges alone; MathScorer asks further where `undecided` gives a pair."""

    answer: Callable[[Sample], str | None]
    value: Callable[[bool], Value] = float

    def __call__(self, sample: Sample) -> Value:
        return self.value(self.right(sample))

    def right(self, sample: Sample) -> bool:
        """Whether the answer is the label."""
        given = self.answer(sample)
        return bool(given) and same_answer(given or "", reference_answer(sample.label), sample.prompt)

    def undecided(self, sample: Sample) -> tuple[str, str] | None:
        """Answer and reference of a sample that is not right here and may still be."""
        given, wanted = self.answer(sample) or "", reference_answer(sample.label)
        return (given, wanted) if undecided(given, wanted, sample.prompt) else None


def _dapo_answer(sample: Sample) -> str | None:
    found = _DAPO_ANSWER.findall(sample.response[-_DAPO_TAIL_CHARS:])
    answer = found[-1].strip().strip("*").strip() if found else ""
    boxed = last_boxed(answer)
    return answer if boxed is None else boxed


def _dapo_value(right: bool) -> Value:
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def _box_after_thinking(sample: Sample) -> str | None:
    for mark in ("</think>", "###Response"):
        _, found, solution = sample.response.rpartition(mark)
        if found:
            return last_boxed(solution)
    return None


def _answer_after_thinking(sample: Sample) -> str | None:
    said = sample.response
    for mark in ("</think>", "<channel|>", "<unused95>"):  # the last two are Gemma's
        said = said.rpartition(mark)[2]
    return final_answer(said)


MATH_RULES: dict[str, MathRule] = {
    "math": MathRule(lambda sample: final_answer(sample.response)),
    "math_whole": MathRule(lambda sample: sample.response),
    "dapo": MathRule(_dapo_answer, _dapo_value),
    "deepscaler": MathRule(_box_after_thinking),
    "gemma_math": MathRule(_answer_after_thinking),
}
"""What equals the label: math: the final answer (last box, `answer is`, last number). math_whole: the whole response, `19` and
nothing around it. dapo: the last `Answer: ...` line in the last 300 characters; gives a table. deepscaler: the box after the
thinking (`</think>` or `###Response`). gemma_math: as math, of what follows the thinking, which may be Gemma's channel."""


def f1(sample: Sample) -> Value:
    """Overlap of words (SQuAD's F1): harmonic mean of precision and recall. A yes/no answer must match whole."""
    given, wanted = _words(sample.response), _words(sample.label)
    for words, others in ((given, wanted), (wanted, given)):
        if " ".join(words) in _CLOSED_ANSWERS and words != others:
            return 0.0
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2.0 * common / (len(given) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def gpqa(sample: Sample) -> Value:
    """1 when the letter chosen is the label's. `metadata.choices` allows labels and answers in words; `metadata.correct_letter`
    replaces the label; `metadata.valid_letters` limits the letters (default: as many as choices, else A to H)."""
    choices = sample.metadata.get("choices")
    choices = [str(c) for c in choices.values()] if isinstance(choices, dict) else choices
    choices = [str(c) for c in choices] if isinstance(choices, (list, tuple)) else []
    letters = sample.metadata.get("valid_letters") or string.ascii_uppercase[: len(choices) or 8]
    valid = {str(letter).strip().upper() for letter in letters}
    wanted = _wanted_letter(sample, choices, valid)
    solution = sample.response.rpartition("</think>")[2]
    letter = chosen_letter(solution, valid)
    if letter is None and choices:
        said = [
            string.ascii_uppercase[n]
            for n, text in enumerate(choices)
            if " ".join(_words(text)) == _last_words(solution)
        ]
        letter = said[0] if len(said) == 1 else None
    return float(letter == wanted)


def _wanted_letter(sample: Sample, choices: Sequence[str], valid: set[str]) -> str:
    label = str(sample.metadata.get("correct_letter") or sample.label).strip()
    bare = label.strip("()[]{}. ").upper()
    if bare in valid:
        return bare
    texts = [" ".join(_words(choice)) for choice in choices]
    if (said := " ".join(_words(label))) and texts.count(said) == 1:
        return string.ascii_uppercase[texts.index(said)]
    raise BadLabel(f"label {label[:40]!r} names none of the choices {', '.join(sorted(valid))}")


def _last_words(text: str) -> str:
    lines = text.strip().splitlines()
    return " ".join(_words(lines[-1])) if lines else ""


def chosen_letter(text: str, valid: set[str]) -> str | None:
    """The letter a response settles on: boxed, else after `answer is`, else alone at the start of a line, else in brackets;
    of each kind the last one. A letter that is only a word (`I`, `A cat`) is none."""
    tail = text[-2000:]
    if (boxed := last_boxed(tail)) is not None:
        inside = re.sub(r"\\[a-z]+\s*\{?", "", boxed).strip("(){}[]. ").upper()
        return inside if inside in valid else None
    for pattern in (_CHOICE_PHRASE, _CHOICE_LINE, _CHOICE_BRACKETS):
        if letters := [letter for letter in pattern.findall(tail) if letter in valid]:
            return letters[-1]
    return None


def length(sample: Sample) -> Value:
    """Closeness to the label's number of response tokens: 1 at the target, 0 at nothing or twice as many. For trials."""
    try:
        target = int(sample.label)
    except ValueError:
        target = 0
    if target <= 0:
        raise BadLabel(f"label {sample.label[:40]!r} is no number of tokens >= 1")
    return max(0.0, 1.0 - abs(sample.n_tokens - target) / target)


def random_bit(sample: Sample) -> Value:
    """0 or 1 from run seed, sample and response: noise that no policy can learn. For trials."""
    return float(rng_for(sample.run_seed, "reward", sample.sample_id, sample.response).getrandbits(1))


def deterministic_random(sample: Sample) -> Value:
    """0 or 1 from the sample id alone: the same in every run. For trials."""
    return float(rng_for(0, "reward", sample.sample_id).getrandbits(1))


def finished(sample: Sample) -> Value:
    """1 when the response ended by itself."""
    return float(sample.finish == "stop")


RULES: dict[str, Rule] = {
    **MATH_RULES,
    "contains": contains,
    "deterministic_random": deterministic_random,
    "exact_match": exact_match,
    "f1": f1,
    "finished": finished,
    "gpqa": gpqa,
    "ifbench": instructions,
    "length": length,
    "random": random_bit,
}
"""Every shipped rule by the name that `rm_type` gives it."""

BOXED_RULES: dict[str, Rule] = {**RULES, "math": MATH_RULES["math_whole"]}
"""What follows the prefix `boxed_`: the content of the box is all of the answer already."""

DEFAULT_KEYS: dict[str, str] = {"dapo": "score", "ifbench": "score"}
"""Which part of a rule's table is the reward when no reward_key is set."""
