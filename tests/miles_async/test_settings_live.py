"""Fields marked live in the settings are exactly the knobs that can be patched."""

from bus.knobs.table import KNOBS
from miles_async.settings.catalog import live_fields


def test_live_fields_are_the_knobs() -> None:
    live = {field if isinstance(field, str) else field.name for field in live_fields()}
    assert live == {knob.settings_field for knob in KNOBS.values()}
