"""Show where every issued sample and every generated token is: trained, dropped (by reason), or pending.

Looks for each pending sample on the streams. Exit status 1 when the accounts do not close, naming the ids.
"""

import argparse
from typing import TYPE_CHECKING, Any

from miles_async.cli.options import add_json_option, add_run_options, on_bus, print_json
from miles_async.settings.runs import RunRef

if TYPE_CHECKING:
    from bus import Bus
    from bus.ledger import LedgerCheck

KINDS = ("reason", "version", "worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--by, --check and the shared options."""
    parser.add_argument("--by", choices=KINDS, default="reason", help="rows of the table (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="print only whether the accounts close, and what is wrong")
    add_run_options(parser, positional=True)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """0 when the accounts close, else 1."""

    async def body(bus: "Bus", ref: RunRef) -> int:
        from bus.ledger import check

        found = await check(bus)
        if args.as_json:
            print_json(as_json(found, args.by))
        elif args.check:
            print(found.text())
        else:
            from miles_async.console.scene import OfLate

            uncommitted, _ = await OfLate().read(bus)
            print(as_text(found, args.by, len(uncommitted)))
        return 0 if found.closes else 1

    return on_bus(args, body)


def as_json(found: "LedgerCheck", by: Any) -> dict[str, Any]:
    """The document of --json."""
    a = found.accounts
    same = ("open_groups", "located", "missing", "extra", "doubled", "residual", "token_residual", "reissuing")
    return {
        "closes": found.closes,
        "samples": {name: getattr(a, name) for name in ("issued", "trained", "dropped", "pending")},
        "tokens": {name: getattr(a, f"tokens_{name}") for name in ("generated", "trained", "dropped", "pending")},
        **{name: getattr(found, name) for name in same},
        f"by_{by}": dict(a.rows(by)),
    }


def as_text(found: "LedgerCheck", by: Any, unsaved: int = 0) -> str:
    """The table, where the pending samples lie, and the equation. `unsaved`: samples trained since the last checkpoint."""
    from miles_async.console.text import table

    rows = found.accounts.rows(by)
    columns = list(rows[0][1]) if rows else []
    body = table([by, *columns], [[name, *(f"{cells[c]:,}" for c in columns)] for name, cells in rows], right=columns)
    places = ", ".join(f"{n:,} on {stream}" for stream, n in found.located.items() if n)
    where = f"pending samples in {found.open_groups:,} open groups: {places or 'none'}"
    if unsaved:
        where += f"\n{unsaved:,} of them are trained and count as trained once a checkpoint holds their step"
    return "\n".join([body if rows else f"no tokens by {by} yet", "", where, found.text()])
