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
from actors.reward.mathanswer import final_answer, last_boxed, readable_reference, reference_answer, verdict
from actors.reward.sample import BadLabel, Sample, Value
from actors.runtime.seeds import rng_for

Rule = Callable[[Sample], Value]

_ARTICLES = frozenset({"a", "an", "the"})
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DAPO_TAIL_CHARS = 300
_DAPO_ANSWER = re.compile(r"answer\**\s*:\s*([^\n]+)", re.IGNORECASE)
_CHOICE_PHRASE = re.compile(
    r"(?i:\b(?:answer|option|choice)\b(?:\s{1,4}(?:is|would\s{1,4}be))?[\s:*]{0,8}(?:option\s{1,4}|choice\s{1,4})?[\s*$({\[]{0,8})"
    r"([A-Z])(?![A-Za-z])"
)
_CHOICE_CORRECT = re.compile(
    r"(?<![A-Za-z])([A-Z])[)*\]]{0,3}\s{1,4}(?i:is\s{1,4}(?:the\s{1,4})?(?:correct|right|answer))(?![A-Za-z])"
)
_CHOICE_LINE = re.compile(r"^[^\w\n]{0,16}([A-Z])(?:[).:*\]}]|[^\w\n]{0,16}$)", re.MULTILINE)
_CHOICE_BRACKETS = re.compile(r"\(([A-Z])\)")
_CHOICE_WORDS = re.compile(r"\b(?:answer|option|choice)\s{1,4}(?:is|would\s{1,4}be)[\s:*]{1,8}([^\n]{1,400})", re.IGNORECASE)


def exact_match(sample: Sample) -> Value:
    """1 when the response is the label, but for white space around them."""
    return float(sample.response.strip() == sample.label.strip())


def contains(sample: Sample) -> Value:
    """1 when the label occurs in the response."""
    return float(bool(sample.label.strip()) and sample.label.strip() in sample.response)


class MathRule(msgspec.Struct, frozen=True):
    """A rule that compares one answer with the label. `answer`: what a response answers, None or empty = nothing; `value`: what
    right and wrong earn. Called as every rule it judges alone; MathScorer asks further where the verdict is open."""

    answer: Callable[[Sample], str | None]
    value: Callable[[bool], Value] = float

    def __call__(self, sample: Sample) -> Value:
        return self.value(self.verdict(sample) is True)

    def verdict(self, sample: Sample) -> bool | None:
        """Whether the answer is the label; None where one of them is mathematics that is not read here."""
        return verdict(self.answer(sample) or "", reference_answer(sample.label), sample.prompt)


def _dapo_answer(sample: Sample) -> str | None:
    found = _DAPO_ANSWER.findall(sample.response[-_DAPO_TAIL_CHARS:])
    answer = found[-1].strip("* \t\r").rstrip(".,* ") if found else ""
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


_FINAL = MathRule(lambda sample: final_answer(sample.response))
MATH_RULES: dict[str, MathRule] = {
    "math": _FINAL,
    "math_boxed": MathRule(lambda sample: last_boxed(sample.response)),
    "math_final": _FINAL,
    "math_whole": MathRule(lambda sample: sample.response),
    "dapo": MathRule(_dapo_answer, _dapo_value),
    "deepscaler": MathRule(_box_after_thinking),
    "gemma_math": MathRule(_answer_after_thinking),
}
"""What equals the label: math_final, also called math: the final answer (last box, `answer is`, last number). math_boxed: the last
box alone, as in Miles. math_whole: the whole response, `19` and nothing around it. dapo: the last `Answer: ...` line in the last
300 characters; gives a table. deepscaler: the box after the thinking (`</think>` or `###Response`). gemma_math: as math_final, of
what follows the thinking, which may be Gemma's channel."""


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
    replaces the label; `metadata.valid_letters` limits the letters (default: as many as choices, else A to H). A label 0, 1, ...
    that is none of the choices' words counts the letters."""
    choices = sample.metadata.get("choices")
    choices = [str(c) for c in choices.values()] if isinstance(choices, dict) else choices
    choices = [str(c) for c in choices] if isinstance(choices, (list, tuple)) else []
    letters = sample.metadata.get("valid_letters") or string.ascii_uppercase[: len(choices) or 8]
    valid = {str(letter).strip().upper() for letter in letters}
    wanted = _wanted_letter(sample, choices, valid)
    solution = sample.response.rpartition("</think>")[2]
    letter = chosen_letter(solution, valid)
    if letter is None and choices:
        texts = [" ".join(_words(text)) for text in choices]
        said = [string.ascii_uppercase[n] for n, text in enumerate(texts) if text in _said_in_words(solution)]
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
    if label.isdecimal() and len(label) < 3 and string.ascii_uppercase[int(label) : int(label) + 1] in valid:
        return string.ascii_uppercase[int(label)]
    raise BadLabel(f"label {label[:40]!r} names none of the choices {', '.join(sorted(valid))}")


def _said_in_words(text: str) -> set[str]:
    """What a response may name in words: its last line, and what follows its last `answer is`, up to the sentence's end."""
    end = text.rstrip()
    said = {end[end.rfind("\n") + 1 :][-1000:]}
    if phrases := _CHOICE_WORDS.findall(text):
        said |= {phrases[-1], re.split(r"[.;]\s", phrases[-1] + " ", maxsplit=1)[0]}
    return {" ".join(_words(one)) for one in said}


def chosen_letter(text: str, valid: set[str]) -> str | None:
    """The letter a response settles on: boxed, else after `answer is`, else before `is correct`, else alone at the start of a line,
    else in brackets; of each kind the last one. A letter that is only a word (`I`, `A cat`) is none."""
    if (boxed := last_boxed(text)) is not None:
        inside = re.sub(r"\\[a-z]+\s*\{?", "", boxed).strip("(){}[]. ").upper()
        return inside if inside in valid else None
    for pattern in (_CHOICE_PHRASE, _CHOICE_CORRECT, _CHOICE_LINE, _CHOICE_BRACKETS):
        if letters := [letter for letter in pattern.findall(text) if letter in valid]:
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


def zero(sample: Sample) -> Value:
    """0 for every response: where what is learned is a teacher's, whatever the answer."""
    return 0.0


def readable_label(rule: str, label: str) -> bool:
    """Whether a shipped rule can find an answer right by this label: False where label and rule do not belong together. True for
    rules that read no label, or a label and metadata, and for names that are no rule's. Takes well below a millisecond.

    >>> readable_label("math", "\\\\frac{1}{2}"), readable_label("math", '{"func_name": "validate_word"}')
    (True, False)
    """
    name = rule.removeprefix("boxed_")
    if name in MATH_RULES:
        return readable_reference(label)
    if name == "length":
        return label.strip().isdecimal() and int(label[:20]) > 0
    return name not in ("contains", "f1") or bool(label.strip())


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
    "zero": zero,
}
"""Every shipped rule by the name that `rm_type` gives it."""

BOXED_RULES: dict[str, Rule] = {**RULES, **dict.fromkeys(("math", "math_final", "math_boxed"), MATH_RULES["math_whole"])}
"""What follows the prefix `boxed_`: the content of the box is all of the answer already."""

DEFAULT_KEYS: dict[str, str] = {"dapo": "score", "ifbench": "score"}
"""Which part of a rule's table is the reward when no reward_key is set."""
