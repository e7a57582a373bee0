"""Records of kinds as settings ask them: by the name or dotted path that a setting gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from actors.generation.engines.kind import EngineKind
from actors.generation.engines.records import engine_kind
from actors.kinds import KindRecord, RuleBroken, UnknownKind
from actors.runtime.transports.kind import TransportKind
from actors.runtime.transports.records import transport_kind
from miles_async.settings.errors import SettingsError, refusal

K = TypeVar("K", bound=KindRecord)
FORMS = "Write my.module:RECORD."


def engine_of(name: str) -> EngineKind:
    """Of `engine`; SettingsError where a record of the user's own cannot be had."""
    return _record(engine_kind, "engine", name)


def transport_of(name: str) -> TransportKind:
    """Of `update_weight_transport`; SettingsError as `engine_of`."""
    return _record(transport_kind, "update_weight_transport", name)


def _record(find: Callable[[str], K], field: str, name: str) -> K:
    try:
        return find(name)
    except UnknownKind as error:
        raise SettingsError(str(error), field=field, value=name, remedy=FORMS) from None


def refused(broken: RuleBroken) -> SettingsError:
    """The error of a record's rule."""
    return refusal(broken.field, broken.value, broken.why, broken.remedy)
