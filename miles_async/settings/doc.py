"""`doc(...)`: what a settings field means, kept beside its type so that help, checks and knobs read one source.

Every group is a frozen, closed struct (unknown keys are typos and therefore errors). A field without a default is
either required or derived from others; a derived field says from what, and is always filled in a resolved RunSettings.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

# An optional field carries its bounds on the inner type: msgspec does not take bounds on a union.
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


# Value of a flag that another program gets: true is the bare flag, false leaves it out.
PassedOn = bool | int | float | str | tuple[str, ...]


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One TOML table and one section of the help text."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is said of a field beside its type, its default and its meaning."""

    unit: str = ""
    """Of the value, as shown in help."""
    derived: str = ""
    """The rule that fills the field in when it is not given."""
    live: str = ""
    """It may be changed while the run goes on; where a change takes effect (and which actor sees to it)."""
    follows: bool = False
    """Of a live field: it is derived again after each change of others, and not changed itself."""
    shipped: tuple[str, ...] = ()
    """Names that it may have beside dotted paths of the user's own; empty: any text."""
    record: bool = False
    """Beside `shipped` it is the path of a record of the user's own."""
    secret: bool = False
    """It stays off the bus."""
    ours: bool = False
    """Miles has no flag for it."""
    aliases: tuple[str, ...] = ()
    """Other names it is accepted under."""
    auto: int | None = None
    """The value that the word "auto" stands for; None where it is no value."""


def doc(text: str, **more: Any) -> msgspec.Meta:
    """Metadata of one field. `text`: what it is and when to change it. `more`: its Facts, and bounds (ge, gt, le, lt), which
    msgspec checks."""
    bounds = {name: more.pop(name) for name in ("ge", "gt", "le", "lt") if name in more}
    return msgspec.Meta(description=text, extra=vars(Facts(**more)), **bounds)
