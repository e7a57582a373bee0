"""(pure) Live settings: what the knob stream holds at the start, and whether a patch may be applied to it.

The values are all settings of the run under their own names. A patch is checked as the settings were at the start: each value
by its field, then the whole by the same rules.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from miles_async.settings.catalog import catalog, live_fields
from miles_async.settings.errors import Refusals, SettingsError, nearest, refusal
from miles_async.settings.flat import Flat
from miles_async.settings.load import coerce, find, value_of_text
from miles_async.settings.rules import check_rules
from miles_async.settings.run import RunSettings

UNCHANGED = "Nothing was changed."


def initial_values(settings: RunSettings) -> dict[str, Any]:
    """All settings by name, as actors read them from the bus: without secrets, lists for tuples."""
    values = settings.flat.values
    plain: dict[str, Any] = msgspec.to_builtins({n: v for n, v in values.items() if not catalog()[n].secret})
    return plain


def whole(values: Mapping[str, Any]) -> Flat:
    """The settings that a knob stream holds. What it lacks (secrets, settings of a newer release) is at its default."""
    found: dict[str, Any] = {}
    for name, spec in catalog().items():
        default = None if spec.secret or spec.derived else spec.default
        value = values.get(name, default)
        found[name] = value if value is None else coerce(spec, value, name)
    return Flat(found)


def check_patch(values: Mapping[str, Any], patch: Mapping[str, object]) -> dict[str, Any]:
    """What a patch changes in `values`, and what follows from it: name -> new value. Text is read as on a command line.
    SettingsError, with all that is wrong, when it may not be applied."""
    refused = Refusals()
    before = whole(values)
    wanted: dict[str, Any] = {}
    for name, value in patch.items():
        for spec_name, new in refused.attempt(_value, name, value, before) or ():
            wanted[spec_name] = new
    _raise(refused)
    after = refused.attempt(before.changed, wanted)
    if after is not None:
        check_rules(after, refused)
        for name in wanted:
            if catalog()[name].follows and after.values[name] != wanted[name]:
                rule = f"it follows from others ({catalog()[name].derived}) and is {after.values[name]}"
                refused.found.append(SettingsError(rule, field=name, value=wanted[name], remedy="Patch one of those."))
    _raise(refused)
    assert after is not None
    return {name: after.values[name] for name in live_fields() if after.values[name] != before.values[name]}


def _value(name: str, value: object, before: Flat) -> list[tuple[str, Any]]:
    try:
        spec = find(name.strip().removeprefix("--"), "tune")
    except SettingsError:
        close = nearest(name, live_fields()) or f"Live settings are {', '.join(live_fields())}."
        raise SettingsError("no live setting has this name", field=name, remedy=close) from None
    if not spec.live:
        raise SettingsError("fixed for the whole run", field=spec.name, value=value, remedy="Set it for a new run.")
    new = value_of_text(spec, value, spec.name) if isinstance(value, str) else None
    if not isinstance(value, str) and (value is not None or not spec.optional):
        new = coerce(spec, value, spec.name)
    if spec.shipped and new not in spec.shipped and new != before.values[spec.name]:
        # What runs code is named where the run is started, never over the bus.
        why = "a function of your own cannot be given to a running run"
        raise refusal(spec.name, value, why, f"Give one of {', '.join(spec.shipped)}, or start a run with it.")
    return [(spec.name, new)]


def _raise(refused: Refusals) -> None:
    if refused.found:
        refused.found[-1] = SettingsError(f"{refused.found[-1]} {UNCHANGED}", field="")
        refused.raise_all()
