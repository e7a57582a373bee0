"""What a shadow is to do: its own small file, laid over the settings of the run that it looks at. Same names, rules and trials."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from miles_async.launcher.hooks import check_hooks
from miles_async.settings.catalog import FieldSpec, groups
from miles_async.settings.errors import SettingsError, listing, nearest, parsed
from miles_async.settings.load import UNSET_WORD, coerce, find, read_file, settings_from
from miles_async.settings.run import RunSettings

What = Literal["reward", "filter", "loss"]
REWARD = (
    *("custom_rm_path", "rm_type", "rm_url", "rm_batch_size", "judge_url", "judge_model", "judge_template_path"),
    *("reward_key", "reward_timeout_s"),
)
FILTER = ("dynamic_sampling_filter_path",)
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
GROUPS = 500


class ShadowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`own`: the settings in which it differs, by name. `share`: of the groups, by their ids. `groups`: it ends after so many, and
    with the run; 0 = only with the run."""

    what: What
    label: str
    share: float
    groups: int
    own: dict[str, Any]


def settings_of(what: str) -> tuple[str, ...]:
    """Settings in which such a shadow may differ."""
    objective = tuple(spec.name for spec in groups()["grpo"])
    return {"reward": REWARD, "filter": FILTER, "loss": objective}[what]


def read_plan(path: Path) -> ShadowPlan:
    """A file with the table [shadow]. SettingsError in one line."""
    try:
        document = parsed(tomllib.loads, path.read_text("utf-8"))
    except OSError as error:
        why = f"cannot read {path}: {(error.strerror or str(error)).lower()}"
        raise SettingsError(why, remedy="Check the path.") from None
    except ValueError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    table = document.get("shadow")
    if not isinstance(table, dict) or len(document) > 1:
        why = f"{path} must hold one table, [shadow]"
        raise SettingsError(why, remedy='Write [shadow] and what = "reward" in it.')
    what = table.pop("what", None)
    if what not in ("reward", "filter", "loss"):
        raise SettingsError("must be reward, filter or loss", field=f"{path} what", value=what)
    label, share, most = table.pop("label", path.stem), table.pop("share", 1.0), table.pop("groups", GROUPS)
    if not (isinstance(label, str) and LABEL.fullmatch(label)):
        raise SettingsError("must be 1 to 40 letters, digits, '_', '.', '-'", field=f"{path} label", value=label)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise SettingsError("must be above 0 and at most 1", field=f"{path} share", value=share)
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise SettingsError("must be a whole number, 0 for no end", field=f"{path} groups", value=most)
    own: dict[str, Any] = {}
    for name, value in table.items():
        spec = find(name, f"{path} [shadow]")
        if spec.name not in settings_of(what):
            known = settings_of(what)
            hint = nearest(spec.name, known) or f"It may set {listing(known[:12])}{' ...' if len(known) > 12 else ''}."
            raise SettingsError(f"{path} [shadow] {name} is nothing in which a shadow {what} can differ", remedy=hint)
        own[spec.name] = _value(spec, value, f"{path} [shadow] {name}")
    if not own:
        why = f"{path} sets nothing in which the shadow {what} differs from the run"
        raise SettingsError(why, remedy=f"Set one of {listing(settings_of(what)[:4])}.")
    return ShadowPlan(what=what, label=label, share=float(share), groups=most, own=own)


def _value(spec: FieldSpec, value: object, where: str) -> Any:
    return None if spec.optional and value == UNSET_WORD else coerce(spec, value, where)


def shadow_settings(plan: ShadowPlan, run_dir: Path) -> tuple[RunSettings, RunSettings]:
    """(the run's settings, the shadow's), by the rules of `train`; the shadow's own functions are tried as `train` tries them.
    Raises SettingsError."""
    file = run_dir / "settings.toml"
    if not file.exists():
        why = f"{file} is missing, and the shadow differs from what it says"
        raise SettingsError(why, remedy="Give --runs-dir of the run.")
    base = read_file(file)
    own = dict(plan.own)
    if own.get("custom_rm_path"):
        own.setdefault("rm_type", None)  # it replaces the rule
    elif own.get("rm_type"):
        own.setdefault("custom_rm_path", None)
    settings = settings_from(**{**base, **own})
    check_hooks(settings, only=plan.own.keys())
    return settings_from(**base), settings
