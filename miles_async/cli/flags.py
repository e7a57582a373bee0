"""Settings as flags: `--rollout-batch-size 32`, `--use-tis`, `--no-use-tis`, `--eval-prompt-data name path`.

`--sglang-NAME` and `--router-NAME` that are no settings of ours go to those programs as they are.

Forms: `--flag value` and `--flag=value`; a boolean is `--flag`, `--no-flag` or `--flag=true|false`; a list takes every
word up to the next flag; the last of repeated flags counts. Generated from the catalog, no abbreviations.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from miles_async.settings.catalog import FieldSpec, catalog, groups, names, passed_on
from miles_async.settings.dump import toml_value
from miles_async.settings.errors import Refusals, SettingsError, listing, nearest
from miles_async.settings.load import FlagValue
from miles_async.settings.miles import (
    IMPLIES,
    NEEDLESS,
    NEEDLESS_VALUES,
    NO_SUCH_VALUE,
    NOT_HERE,
    SHORT,
    SPELT,
    fate,
    table,
    why_not,
)

WIDTH, INDENT = 110, 42
SAYS_WHETHER = ("true", "false", "yes", "no", "on", "off", "1", "0")
ALIKE = 0.75  # of a misspelt flag and the one that is meant; less names flags of another thing
PEERS = {
    "--lr": "learning-rate actor-lr",
    "--num-rollout": "max-steps total-training-steps",
    "--num-epoch": "num-train-epochs total-epochs epochs",
    "--micro-batch-size": "per-device-train-batch-size",
    "--rollout-batch-size": "train-batch-size batch-size",
    "--global-batch-size": "gradient-accumulation-steps ppo-mini-batch-size",
    "--n-samples-per-prompt": "num-generations n-samples group-size",
    "--hf-checkpoint": "model model-path model-name-or-path pretrain",
    "--prompt-data": "data dataset dataset-name train-files",
    "--eval-prompt-data": "val-files eval-dataset",
    "--rollout-max-response-len": "max-completion-length max-response-length max-new-tokens max-tokens",
    "--rollout-max-prompt-len": "max-prompt-length",
    "--rollout-temperature": "temperature",
    "--kl-loss-coef": "beta",
    "--eps-clip": "epsilon clip-ratio",
    "--custom-rm-path": "reward-funcs reward reward-fn",
    "--save": "output-dir default-local-dir",
    "--save-interval": "save-steps save-freq",
    "--eval-interval": "eval-steps test-freq",
    "--lr-warmup-fraction": "warmup-ratio",
    "--lr-warmup-iters": "warmup-steps",
    "--clip-grad": "max-grad-norm",
    "--lora-rank": "lora-r use-peft",
    "--name": "run-name experiment-name",
    "--use-wandb": "report-to logger",
    "--max-weight-staleness": "max-async-level staleness",
    "--advantage-estimator": "algorithm adv-estimator",
}
"""Flag -> what TRL, verl and their kind call it: no other names of it, but what is meant."""
METAVARS = {"int": "INT", "float": "NUMBER", "str": "TEXT"}


@dataclass(frozen=True, slots=True)
class Parsed:
    """Words that are no flags, settings flags in order, and which of the extra switches were given."""

    positional: tuple[str, ...]
    values: tuple[FlagValue, ...]
    switches: frozenset[str]
    notes: tuple[str, ...] = ()
    """What was taken and has no effect."""


@cache
def _flags() -> dict[str, tuple[FieldSpec, bool]]:
    """Flag -> (field, value it stands for when it is a bare boolean)."""
    found: dict[str, tuple[FieldSpec, bool]] = {}
    for name, spec in names().items():
        if spec.kind == "table":
            continue
        found["--" + name.replace("_", "-")] = (spec, True)
        if spec.negative_flag is not None and name == spec.name:
            found[spec.negative_flag] = (spec, False)
    return found


def known_flags() -> dict[str, FieldSpec]:
    """Every flag of a setting, other names and negations included."""
    return {flag: spec for flag, (spec, _) in _flags().items()}


def parse_flags(words: list[str], switches: frozenset[str], found: Refusals | None = None) -> Parsed:
    """Split a command line. `switches` are bare flags that are not settings, such as --dry-run. SettingsError with all that is
    wrong, or it is left in `found`."""
    positional: list[str] = []
    values: list[FlagValue] = []
    given: set[str] = set()
    notes: list[str] = []
    refused = Refusals() if found is None else found
    rest = _Words(words)
    last = ""  # the flag that the next word stands behind, which takes none
    missing: dict[str, list[str]] = {}  # why -> the flags of Miles that are not here for it
    for word in rest:
        behind, last = last, word if word.startswith("--") else ""
        if word in switches:
            given.add(word)
            last = ""
        elif word in NEEDLESS:
            notes.append(f"{word} has no effect here: {NEEDLESS[word]}")
        elif word in IMPLIES:
            notes.append(f"{word} {IMPLIES[word]}")
        elif (flag := word.partition("=")[0]) in NEEDLESS_VALUES:
            if flag == word and rest.value_follows():
                next(rest)
            notes.append(f"{flag} has no effect here: {NEEDLESS_VALUES[flag]}")
        elif not word.startswith("--"):
            if word.startswith("-") and len(word) > 1:
                close = nearest(f"-{word}", _flags()) if len(word) > 2 else ""
                refused.found.append(SettingsError(f"{word} is not a flag", remedy=close or "Flags begin with two dashes."))
                list(_all_words(rest))
            elif behind and (problem := _stray(word, behind)):
                refused.found.append(problem)
            else:
                positional.append(word)
        else:
            try:
                values.append(_flag_value(word, rest, switches))
            except SettingsError as error:
                if why := _why_missing(flag):
                    missing.setdefault(why, []).append(flag)
                else:
                    refused.found.append(error)
                list(_all_words(rest))  # its values
    refused.found += [_missing(flags, why) for why, flags in missing.items()]
    if found is None:
        refused.raise_all()
    return Parsed(tuple(positional), tuple(values), frozenset(given), tuple(notes))


def _why_missing(flag: str) -> str:
    """Why a flag of Miles is none here; empty for any other flag."""
    known = flag in (*_flags(), *SPELT) or passed_on(flag) is not None
    return "" if known else why_not(flag)


def _missing(flags: Sequence[str], why: str) -> SettingsError:
    """One line for what one thing asks for, however many flags it has."""
    one = len(flags) == 1
    said = f"{flags[0]} is not a flag" if one else f"{', '.join(flags[:-1])} and {flags[-1]} are not flags"
    return SettingsError(said, remedy=f"Miles has {'it' if one else 'them'}. {why}")


def _stray(word: str, flag: str) -> SettingsError | None:
    """What is wrong with a word behind a flag that takes no word, or has one already; None where it may be a settings file."""
    name, equals, value = flag.partition("=")
    if equals and not value:
        return SettingsError(f"{word!r} stands behind {flag} and a space", remedy=f"Write {flag}{word}.")
    if not equals and word.lower() in SAYS_WHETHER and name in (*_flags(), *SHORT, *NEEDLESS, *IMPLIES):
        remedy = f"Write {name}={word}." if name in _flags() else f"Write {name} alone."
        return SettingsError(f"{name} takes no word behind a space", remedy=remedy)
    return None


class _Words(Iterator[str]):
    """The command line with a look ahead."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._next = 0

    def __next__(self) -> str:
        if self._next >= len(self._words):
            raise StopIteration
        self._next += 1
        return self._words[self._next - 1]

    def value_follows(self) -> bool:
        return self._next < len(self._words) and not self._words[self._next].startswith("--")


def _flag_value(word: str, rest: Iterator[str], switches: frozenset[str]) -> FlagValue:
    assert isinstance(rest, _Words)
    flag, equals, inline = word.partition("=")
    if equals and flag in (*switches, *SHORT, *NEEDLESS, *IMPLIES):
        raise SettingsError(f"{flag} takes no value", remedy=f"Write {flag} alone.")
    if word in SHORT:
        name, value = SHORT[word]
        return FlagValue(names()[name], (value,), flag)
    if flag in SPELT:
        return _spelt(flag, inline if equals else next(rest) if rest.value_follows() else "")
    passed = passed_on(flag)
    if flag not in _flags() and passed is not None:
        words = (inline,) if equals else tuple(_all_words(rest))
        return FlagValue(names()[passed[0]], words, flag)
    if flag not in _flags():
        peer = next((f"Did you mean {ours}?" for ours, words in PEERS.items() if flag[2:].replace("_", "-") in words.split()), "")
        close = peer or nearest(flag, [*_flags(), *switches], cutoff=ALIKE) or "See train --help."
        raise SettingsError(f"{flag} is not a flag", remedy=close)
    spec, positive = _flags()[flag]
    if spec.kind == "bool":
        if equals and not positive:
            raise SettingsError(f"{flag} takes no value", remedy=f"Write {spec.flag}={inline}.")
        return FlagValue(spec, (inline if equals else str(positive).lower(),), flag)
    if spec.kind == "list":
        collected = [inline] if equals else []
        while not equals and rest.value_follows():
            collected.append(next(rest))
        return FlagValue(spec, tuple(collected), flag)
    if equals:
        return FlagValue(spec, (inline,), flag)
    if not rest.value_follows():
        raise SettingsError(f"{flag} needs a value", remedy=f"It takes {spec.expected}.")
    return FlagValue(spec, (next(rest),), flag)


def _spelt(flag: str, word: str) -> FlagValue:
    """A flag of Miles whose values have other words here."""
    name, words = SPELT[flag]
    if word not in words:
        why = NO_SUCH_VALUE.get(word, f"it takes {listing(words)}")
        remedy = f"Set {names()[name].flag} {listing(sorted(set(words.values())))}, or leave it out."
        raise SettingsError(why, field=flag, value=word, remedy=remedy)
    return FlagValue(names()[name], (words[word],), flag)


def _all_words(rest: _Words) -> Iterator[str]:
    while rest.value_follows():
        yield next(rest)


def flags_help(topic: str) -> str:
    """Flags of a topic, each with its meaning, unit and default: a group, `all`, `miles` for a table of Miles' flags, or any
    word that stands in a name or a meaning."""
    if topic == "all":
        return "\n\n".join(_group_help(name, specs) for name, specs in groups().items())
    if topic == "miles":
        return "\n".join(f"{flag:<46} {text}" for flag, text in table())
    if topic in groups():
        return _group_help(topic, groups()[topic])
    word = topic.removeprefix("--").replace("-", "_").lower()
    found = [spec for spec in catalog().values() if word in spec.name or topic.lower() in spec.text.lower()]
    flag = "--" + word.replace("_", "-")
    if not found and (said := fate(flag)) != f"refused: {NOT_HERE}":
        return f"{flag}: {said}"
    if not found:
        close = nearest(word, (*groups(), *names()))
        raise SettingsError(f"nothing is called {topic!r}", remedy=close or f"Groups: {', '.join(groups())}.")
    return "\n".join(_field_help(spec) for spec in found)


def groups_help() -> str:
    """The groups, one line each."""
    return "\n".join(f"  {name:<12}{len(specs):>4} flags: {_few(specs)}" for name, specs in groups().items())


def _few(specs: tuple[FieldSpec, ...]) -> str:
    flags = [spec.flag for spec in sorted(specs, key=lambda spec: not spec.required)]
    return textwrap.shorten(", ".join(flags), WIDTH - 24, placeholder=" ...")


def _group_help(name: str, specs: tuple[FieldSpec, ...]) -> str:
    return "\n".join([f"{name.upper()}, table [{name}]:", *(_field_help(spec) for spec in specs)])


def _field_help(spec: FieldSpec) -> str:
    head = f"  {usage(spec)}"
    body = textwrap.wrap(f"{spec.text} {_facts(spec)}", WIDTH - INDENT)
    if len(head) > INDENT - 2:
        return "\n".join([head, *(" " * INDENT + line for line in body)])
    return "\n".join([f"{head:<{INDENT}}{body[0]}", *(" " * INDENT + line for line in body[1:])])


def usage(spec: FieldSpec) -> str:
    """A flag with what it takes."""
    metavar = METAVARS.get(spec.kind, "")
    if spec.kind == "bool":
        return spec.flag + (f", {spec.negative_flag}" if spec.negative_flag else "")
    if spec.kind == "table":
        return f"{spec.prefix}NAME [VALUE ...]"
    if spec.kind == "choice":
        metavar = "{" + ",".join(spec.choices) + "}"
    if spec.kind == "list":
        metavar = f"{METAVARS[spec.item]} ..."
    return f"{spec.flag} {metavar}"


def default_text(spec: FieldSpec) -> str:
    """The default, or what it follows from."""
    if spec.required or spec.derived or spec.default is None:
        return "required" if spec.required else spec.derived or "unset"
    return spec.default if isinstance(spec.default, str) else toml_value(spec.default)


def _facts(spec: FieldSpec) -> str:
    facts = [f"unit: {spec.unit}"] if spec.unit else []
    facts.append(default_text(spec) if spec.required else f"default: {default_text(spec)}")
    if spec.aliases:
        facts.append("also " + ", ".join("--" + alias.replace("_", "-") for alias in spec.aliases))
    if spec.live:
        facts.append(f"live: {spec.live}")
    return f"({'; '.join(facts)})"
