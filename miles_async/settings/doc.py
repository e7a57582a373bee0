"""`doc(...)`: what a settings field means, kept beside its type so that help, checks and knobs read one source.

Every group is a frozen, closed struct (unknown keys are typos and therefore errors). A field without a default is
either required or derived from others; a derived field says from what, and is always filled in a resolved RunSettings.
"""

from typing import Annotated, Any

import msgspec

# An optional field carries its bounds on the inner type: msgspec does not take bounds on a union.
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


# Value of a flag that another program gets: true is the bare flag, false leaves it out.
PassedOn = bool | int | float | str | tuple[str, ...]


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One TOML table and one section of the help text."""


def doc(
    text: str,
    *,
    unit: str = "",
    derived: str = "",
    live: str = "",
    follows: bool = False,
    shipped: tuple[str, ...] = (),
    secret: bool = False,
    ours: bool = False,
    aliases: tuple[str, ...] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    auto: int | None = None,
) -> msgspec.Meta:
    """Metadata of one field.

    text: what it is and when to change it.    unit: of the value, as shown in help.
    derived: the rule that fills it in when it is not given.
    live: it may be changed while the run goes on; where a change takes effect (and which actor sees to it).
    follows: of a live field: it is derived again after each change of others, and not changed itself.
    shipped: the names that it may have, beside dotted paths of the user's own.    secret: it stays off the bus.
    ours: Miles has no flag for it.
    aliases: other names it is accepted under.    ge, gt, le, lt: bounds, checked by msgspec.
    auto: the value that the word "auto" stands for.
    """
    extra: dict[str, Any] = {
        "unit": unit,
        "derived": derived,
        "live": live,
        "follows": follows,
        "shipped": shipped,
        "secret": secret,
        "ours": ours,
        "aliases": aliases,
        "auto": auto,
    }
    bounds: dict[str, Any] = {
        name: value for name, value in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if value is not None
    }
    return msgspec.Meta(description=text, extra=extra, **bounds)
