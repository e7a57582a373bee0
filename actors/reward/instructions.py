"""Whether a response follows instructions that a program can check (pure): those of IFEval, by their ids and arguments.

`metadata.instruction_id_list` names them, `metadata.kwargs` has a table of arguments for each. Sentences are counted by their ends,
words by letters and digits. An id that is not known here is no wrong answer: BadLabel names it. Time is linear in the response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from actors.reward.sample import BadLabel, Sample, Value

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_SENTENCE = re.compile(r"[^\s.!?][^.!?]*(?:[.!?]+|$)")
_BULLET = re.compile(r"^[^\S\n]*(?:\*(?!\*)|-)\s+\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,2})(?=\S)[^*\n]*\S\1(?!\*)|(?<!\*)\*[^\s*]\*(?!\*)")


def instructions(sample: Sample) -> Value:
    """{"score": 1 when all are followed, "followed": share of them}."""
    ids = sample.metadata.get("instruction_id_list")
    given = sample.metadata.get("kwargs") or [{}] * len(ids or ())
    if not isinstance(ids, list) or not ids or not isinstance(given, list) or len(given) != len(ids):
        raise BadLabel("the metadata has no instruction_id_list with as many kwargs")
    said = sample.response.rpartition("</think>")[2].strip()
    followed = 0
    for name, arguments in zip(ids, given, strict=True):
        check = CHECKS.get(str(name))
        if check is None:
            known = "those of IFEval but the language's"
            raise BadLabel(f"instruction {str(name)[:60]!r} is not known here ({known}); score it with --custom-rm-path")
        try:
            followed += bool(said) and check(said, arguments or {})
        except (KeyError, TypeError, ValueError) as error:
            raise BadLabel(f"arguments of {name}: {type(error).__name__}: {error}") from error
    return {"score": float(followed == len(ids)), "followed": followed / len(ids)}


def _related(n: int, relation: str, wanted: Any) -> bool:
    """`relation`: "at least", or "less than"."""
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation {relation!r}")
    return n >= int(wanted) if relation == "at least" else n < int(wanted)


def _has(text: str, word: str) -> int:
    """How often a word or phrase occurs, cases aside."""
    return len(re.findall(rf"(?<!\w){re.escape(word.lower())}(?!\w)", text.lower()))


def _paragraph(text: str, a: Arguments) -> bool:
    found = [part.strip() for part in text.split("\n\n") if part.strip()]
    n = int(a["nth_paragraph"])
    words = _WORD.findall(found[n - 1]) if 0 < n <= len(found) else []
    return len(found) == int(a["num_paragraphs"]) and bool(words) and words[0].lower() == str(a["first_word"]).lower()


def _json(text: str, a: Arguments) -> bool:
    first, _, rest = text.partition("\n")
    fenced = first.rstrip().lower() in ("```", "```json") and rest.endswith("```")
    try:
        json.loads(rest[:-3] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _two(text: str, a: Arguments) -> bool:
    found = [part.strip() for part in text.split("******")]
    return len(found) == 2 and all(found) and found[0] != found[1]


def _ends(text: str, phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(phrase.strip().lower())


def _paragraphs(text: str) -> int:
    return sum(1 for part in re.split(r"\s?\*\*\*\s?", text) if part.strip())


ANSWERS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
CHECKS: dict[str, Check] = {
    "keywords:existence": lambda t, a: all(_has(t, word) for word in a["keywords"]),
    "keywords:frequency": lambda t, a: _related(_has(t, a["keyword"]), a["relation"], a["frequency"]),
    "keywords:forbidden_words": lambda t, a: not any(_has(t, word) for word in a["forbidden_words"]),
    "keywords:letter_frequency": lambda t, a: _related(t.lower().count(a["letter"].lower()), a["let_relation"], a["let_frequency"]),
    "length_constraints:number_sentences": lambda t, a: _related(len(_SENTENCE.findall(t)), a["relation"], a["num_sentences"]),
    "length_constraints:number_paragraphs": lambda t, a: _paragraphs(t) == int(a["num_paragraphs"]),
    "length_constraints:number_words": lambda t, a: _related(len(_WORD.findall(t)), a["relation"], a["num_words"]),
    "length_constraints:nth_paragraph_first_word": _paragraph,
    "detectable_content:number_placeholders": lambda t, a: len(re.findall(r"\[[^\[\]\n]+\]", t)) >= int(a["num_placeholders"]),
    "detectable_content:postscript": lambda t, a: a["postscript_marker"].lower().replace(" ", "") in t.lower().replace(" ", ""),
    "detectable_format:number_bullet_lists": lambda t, a: len(_BULLET.findall(t)) == int(a["num_bullets"]),
    "detectable_format:constrained_response": lambda t, a: any(answer in t.lower() for answer in ANSWERS),
    "detectable_format:number_highlighted_sections": lambda t, a: len(_HIGHLIGHT.findall(t)) >= int(a["num_highlights"]),
    "detectable_format:multiple_sections": lambda t, a: (
        len(re.findall(rf"{re.escape(a['section_spliter'])}\s?\d+", t)) >= int(a["num_sections"])
    ),
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda t, a: bool(re.search(r"<<\s*[^<>\s][^<>\n]*>>", t)),
    "combination:two_responses": _two,
    "combination:repeat_prompt": lambda t, a: t.lower().startswith(a["prompt_to_repeat"].strip().lower()),
    "startend:end_checker": lambda t, a: _ends(t, a["end_phrase"]),
    "startend:quotation": lambda t, a: len(t) > 1 and t[0] == t[-1] == '"',
    "change_case:capital_word_frequency": lambda t, a: _related(
        sum(word.isupper() for word in _WORD.findall(t)), a["capital_relation"], a["capital_frequency"]
    ),
    "change_case:english_capital": lambda t, a: t.isupper(),
    "change_case:english_lowercase": lambda t, a: t.islower(),
    "punctuation:no_comma": lambda t, a: "," not in t,
}
"""By the ids of IFEval; arguments have its names too."""
