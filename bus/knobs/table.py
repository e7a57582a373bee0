"""(pure) Every live knob: type, bounds, unit, who applies it and at which boundary; and the rules between them.

`KNOBS` may be patched while the run goes on. `FACTS` lie beside them in the initial values, because rules need them,
and are fixed for the run. A value is checked twice: by itself (`coerce`), then as part of the whole (`check_whole`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from bus.errors import KnobRejected
from bus.knobs.rules import RULES

Kind = Literal["int", "float", "str", "bool"]
Values = Mapping[str, Any]


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that is fixed at start. `low`/`high` are inclusive bounds unless `open_low`/`open_high` say otherwise;
    `unset` is what None, "none" or "unset" stand for, where a setting may be left unset; `auto` what "auto" stands for."""

    name: str
    kind: Kind
    help: str = ""
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    choices: tuple[str, ...] = ()
    unset: int | None = None
    auto: int | None = None

    @property
    def range_text(self) -> str:
        """The permitted values in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        low = "" if self.low is None else f"{'above' if self.open_low else 'at least'} {self.low:g}"
        high = "" if self.high is None else f"{'below' if self.open_high else 'at most'} {self.high:g}"
        text = " and ".join(part for part in (low, high) if part) or {"bool": "true or false"}.get(self.kind, "any")
        if self.auto is not None:
            return f"auto, or {text}"
        return f"{text}; none turns it off" if self.unset is not None else text


class Knob(Fact, frozen=True, kw_only=True):
    """A setting that may be patched. `applies` is the boundary, `actor` the room that keeps it; `setting` names the
    settings field where it differs. A knob that `follows` is computed from others and refuses to be patched."""

    unit: str = ""
    applies: str
    actor: str
    setting: str = ""
    follows: str = ""

    @property
    def settings_field(self) -> str:
        """Name of the settings field with its initial value."""
        return self.setting or self.name


ISSUE, SAMPLE, STEP, SCORE = "next group issued", "next sample started", "next step", "next sample scored"
LOOK = "next look at the engine"

# fmt: off
KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(name="rollout_batch_size", kind="int", low=1, unit="groups", applies=STEP, actor="trainer, sampler",
             help="prompt groups per training batch; global_batch_size follows"),
        Knob(name="global_batch_size", kind="int", low=1, unit="samples", applies=STEP, actor="trainer",
             follows="rollout_batch_size * n_samples_per_prompt / num_steps_per_rollout",
             help="samples per optimizer step"),
        Knob(name="over_sampling_batch_size", kind="int", low=0, unset=0, unit="groups", applies=ISSUE, actor="sampler",
             help="most prompt groups in generation, at least rollout_batch_size; 0 = what the bound admits"),
        Knob(name="max_weight_staleness", kind="int", low=0, high=1024, unit="policy versions",
             applies=f"{ISSUE}; {STEP}", actor="sampler, trainer",
             help="most versions between the weights that made a token and the weights being trained"),
        Knob(name="staleness_policy", kind="str", choices=("auto", "split", "whole", "member", "wait", "drop"),
             applies=f"{STEP}; next sample scored", actor="trainer, filter, sampler",
             help="what happens to a group that would cross the bound; auto = split, whole at bound 0"),
        Knob(name="rollout_temperature", kind="float", low=0, open_low=True, high=100, applies=ISSUE, actor="sampler",
             help="sampling temperature; the trainer divides its logits by each sample's own"),
        Knob(name="rollout_top_p", kind="float", low=0, open_low=True, high=1, applies=ISSUE, actor="sampler",
             help="nucleus sampling: smallest set with this mass"),
        Knob(name="rollout_max_response_len", kind="int", low=1, unit="tokens", applies=ISSUE, actor="sampler",
             help="most tokens generated per sample"),
        Knob(name="max_tokens_per_slice", kind="int", low=0, unset=0, unit="tokens", applies=SAMPLE,
             actor="generation", help="tokens after which a sample gives its slot back and resumes later; 0 = never"),
        Knob(name="partial_save_tokens", kind="int", low=1, unit="tokens", applies=SAMPLE, actor="generation",
             help="new tokens after which a running sample's prefix is saved"),
        Knob(name="sglang_server_concurrency", kind="int", low=1, auto=0, unit="samples", applies="next lease",
             actor="generation", help="most samples in generation on one engine; auto finds the number"),
        Knob(name="sglang_concurrency_min", kind="int", low=1, unit="samples", applies=LOOK, actor="generation",
             help="least that auto goes down to"),
        Knob(name="sglang_concurrency_max", kind="int", low=0, unset=0, unit="samples", applies=LOOK,
             actor="generation", help="most that auto goes up to; none: what the engine runs at once"),
        Knob(name="max_masked_fraction", kind="float", low=0, unset=0, high=1, open_high=True, unit="of the tokens",
             applies=LOOK, actor="generation", help="masked share that auto keeps below; none: not limited by it"),
        Knob(name="tail_slots", kind="int", low=0, unset=0, unit="samples", applies="next lease", actor="generation",
             help="samples at once kept for the tail, on as few workers as possible"),
        Knob(name="tail_after_tokens", kind="int", low=0, unset=0, unit="tokens", applies=SAMPLE, actor="generation",
             help="response tokens after which a sample goes on in the tail's slots"),
        Knob(name="pause_generation_mode", kind="str", choices=("retract", "in_place", "abort"),
             applies="next activation ordered", actor="publisher",
             help="what running samples do during a weight update"),
        Knob(name="reward_timeout_s", kind="float", low=0, open_low=True, unit="seconds", applies=SCORE,
             actor="reward", help="deadline for scoring one sample"),
        Knob(name="dynamic_sampling_filter", kind="str", setting="dynamic_sampling_filter_path",
             choices=("none", "nonzero_std", "check_reward_nonzero_std", "no_truncation"),
             applies="next group judged", actor="filter", help="which finished groups are trained"),
        Knob(name="max_waves", kind="int", low=0, unset=0, unit="waves", applies=ISSUE, actor="sampler",
             help="batches' worth of groups rejected in a row before the run stops as starved; 0 = never"),
        Knob(name="lr", kind="float", low=0, applies=STEP, actor="trainer", help="peak learning rate"),
        Knob(name="clip_grad", kind="float", low=0, applies=STEP, actor="trainer",
             help="largest gradient norm; 0 turns it off"),
        Knob(name="eps_clip", kind="float", low=0, open_low=True, high=1, open_high=True, applies=STEP,
             actor="trainer", help="clip range below 1"),
        Knob(name="eps_clip_high", kind="float", low=0, open_low=True, applies=STEP, actor="trainer",
             help="clip range above 1"),
        Knob(name="kl_loss_coef", kind="float", low=0, applies=STEP, actor="trainer",
             help="weight of the KL to the frozen reference"),
        Knob(name="entropy_coef", kind="float", low=0, applies=STEP, actor="trainer",
             help="weight of the entropy bonus"),
        Knob(name="tis_clip", kind="float", low=0, open_low=True, applies=STEP, actor="trainer",
             help="upper bound of the importance weight"),
        Knob(name="save_interval", kind="int", low=0, unset=0, unit="steps", applies=STEP, actor="trainer",
             help="steps between checkpoints; the last one is always saved; 0 = only then"),
        Knob(name="eval_interval", kind="int", low=0, unset=0, unit="steps", applies="next version active",
             actor="evaluator", help="steps between evaluations; the last one is always done; 0 = no evaluation"),
        Knob(name="eval_share", kind="float", low=0, open_low=True, high=1, applies="next lease", actor="generation",
             help="share of a worker's slots that evaluation may take while training prompts wait"),
    )
}
# fmt: on

FACTS: dict[str, Fact] = {
    fact.name: fact
    for fact in (
        Fact(name="n_samples_per_prompt", kind="int", low=1),
        Fact(name="num_steps_per_rollout", kind="int", low=1),
        Fact(name="update_weights_interval", kind="int", low=1),
        Fact(name="staleness_lookahead", kind="int", low=0, unset=0),
        Fact(name="correction", kind="str", help="the off-policy correction in force, or none"),
        Fact(name="no_correction", kind="bool"),
        Fact(name="use_kl_loss", kind="bool"),
        Fact(name="has_eval_data", kind="bool"),
        Fact(name="needs_whole_groups", kind="bool"),
        Fact(name="num_generation_workers", kind="int", low=0, help="workers of the start; 0 = none, more may join"),
        Fact(name="no_tail_lane", kind="str", help="why this run can keep no slots for the tail; empty = it can"),
        Fact(name="rollout_max_context_len", kind="int", low=0, unset=0),
    )
}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def find_knob(name: str) -> Knob:
    """A knob by name, also by its settings field or with dashes; KnobRejected names the nearest one."""
    plain = name.strip().removeprefix("--").replace("-", "_")
    for knob in KNOBS.values():
        if plain in (knob.name, knob.settings_field):
            return knob
    if plain in FACTS:
        raise KnobRejected(knob=plain, value="...", rule="fixed for the whole run", remedy="Set it for a new run.")
    near = difflib.get_close_matches(plain, KNOBS, n=1)
    remedy = f"Did you mean {near[0]}?" if near else f"Live knobs are {', '.join(KNOBS)}."
    raise KnobRejected(knob=name, value="...", rule="no live knob has this name", remedy=remedy)


def coerce(fact: Fact, value: object) -> Any:
    """The value in the type of the knob or fact; text from a command line is read. KnobRejected if it is not one."""
    plain = value.strip() if isinstance(value, str) else value
    if fact.unset is not None and (plain is None or (isinstance(plain, str) and plain.lower() in ("none", "unset"))):
        return fact.unset
    if fact.auto is not None and (plain == "auto" or (plain == fact.auto and not isinstance(plain, str | bool))):
        return fact.auto
    result: Any = None
    match fact.kind:
        case "bool" if isinstance(plain, bool):
            result = plain
        case "bool" if isinstance(plain, str) and plain.lower() in (*_TRUE, *_FALSE):
            result = plain.lower() in _TRUE
        case "str" if isinstance(plain, str):
            result = plain
        case "int" if isinstance(plain, int) and not isinstance(plain, bool):
            result = plain
        case "int" if isinstance(plain, str):
            result = _parse(int, plain)
        case "float" if isinstance(plain, int | float) and not isinstance(plain, bool):
            result = float(plain)
        case "float" if isinstance(plain, str):
            result = _parse(float, plain)
    kind = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}[fact.kind]
    if result is None or (isinstance(result, float) and not math.isfinite(result)):
        raise KnobRejected(knob=fact.name, value=value, rule=f"not {kind}", remedy=f"Give {kind}, {fact.range_text}.")
    if fact.choices and result not in fact.choices:
        raise KnobRejected(knob=fact.name, value=value, rule="not a choice", remedy=f"Give {fact.range_text}.")
    if not _within(fact, result):
        raise KnobRejected(knob=fact.name, value=value, rule="out of range", remedy=f"Give {kind}, {fact.range_text}.")
    return result


def _parse(kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except (ValueError, OverflowError):
        return None


def _within(fact: Fact, value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    if isinstance(value, int) and abs(value) >= 1 << 62:
        return False  # no bound of its own, but it must fit a message
    above = fact.low is None or value > fact.low or (value == fact.low and not fact.open_low)
    below = fact.high is None or value < fact.high or (value == fact.high and not fact.open_high)
    return above and below


def check_whole(values: Values, *, other_release: bool = False) -> dict[str, Any]:
    """All values coerced and complete, what follows filled in, every rule held; KnobRejected for the first that fails.

    `other_release`: names that this release does not know are kept as they are, and some that it knows may be missing
    (then no rule is asked); so that actors of two releases read one stream.
    """
    whole: dict[str, Any] = {}
    for name, value in values.items():
        known = KNOBS.get(name) or FACTS.get(name)
        if known is None and other_release:
            whole[name] = value
            continue
        fact = known or find_knob(name)
        whole[fact.name] = coerce(fact, value)
    missing = [name for name, knob in KNOBS.items() if name not in whole and not knob.follows]
    if missing and other_release:
        return whole
    if missing:
        raise KnobRejected(
            knob=missing[0], value=None, rule=f"no value given for {', '.join(missing)}", remedy="Give all of them."
        )
    for rule in RULES:
        rule(whole)
    samples = whole["rollout_batch_size"] * whole.get("n_samples_per_prompt", 1)
    whole["global_batch_size"] = samples // whole.get("num_steps_per_rollout", 1)
    return whole


def check_patch(values: Values, patch: Mapping[str, object]) -> dict[str, Any]:
    """What a patch really changes, followers included: name -> new value. KnobRejected when it may not be applied.

    `values` is the present whole; it is not changed. A patch that changes nothing returns an empty dict.
    """
    merged = dict(values)
    for name, value in patch.items():
        knob = find_knob(name)
        if knob.follows:
            raise KnobRejected(knob=knob.name, value=value, rule=f"it is {knob.follows}", remedy="Patch one of those.")
        merged[knob.name] = coerce(knob, value)
    whole = check_whole(merged)
    return {name: value for name, value in whole.items() if name not in values or values[name] != value}


def describe() -> str:
    """The table as text, one line a knob."""
    lines = [f"{'knob':26} {'unit':16} {'applies at':26} {'by':18} range · meaning"]
    lines += [f"{k.name:26} {k.unit:16} {k.applies:26} {k.actor:18} {k.range_text} · {k.help}" for k in KNOBS.values()]
    return "\n".join(lines)


__all__ = ("FACTS", "KNOBS", "Fact", "Knob", "check_patch", "check_whole", "coerce", "describe", "find_knob")
