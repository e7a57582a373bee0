"""Change live settings of a running run, or list them.

  miles-async tune                                   every knob: live value, permitted values, when a change takes effect
  miles-async tune lr=2e-6 max_weight_staleness=3    one patch: all of it is applied, or nothing
  miles-async tune --log                             the epochs so far
  miles-async tune --revert EPOCH                    back to the values of an epoch, as a new epoch

A patch that fails its check changes nothing and ends with status 2.
"""

import argparse
import getpass
import socket
from typing import TYPE_CHECKING, Any

from miles_async.cli.inspection import on_bus, print_json
from miles_async.cli.options import add_json_option, add_run_options
from miles_async.settings.catalog import FieldSpec, catalog
from miles_async.settings.errors import SettingsError
from miles_async.settings.live import check_patch
from miles_async.settings.runs import RunRef

if TYPE_CHECKING:
    from bus import Bus
    from bus.messages.control import KnobPatch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """name=value words, --log, --revert, --reason and the shared options."""
    parser.add_argument("patch", nargs="*", metavar="name=value", help="new values, applied together")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, kept in the log")
    parser.add_argument("--log", action="store_true", help="list the epochs so far")
    parser.add_argument("--revert", type=int, metavar="EPOCH", help="go back to the values of this epoch")
    add_run_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Apply, revert, log or list."""
    patch = parse_patch(args.patch)
    if bool(patch) + args.log + (args.revert is not None) > 1:
        raise SettingsError("name=value, --log and --revert exclude each other", remedy="Give one of them.")

    async def body(bus: "Bus", ref: RunRef) -> int:
        from bus.knobs.live import propose, read_history, revert, values_at

        history = await read_history(bus)
        before = values_at(history, history[-1].epoch).values if history else {}
        if args.log:
            return _log(history, args.as_json)
        if patch or args.revert is not None:
            if args.revert is not None:
                made = await revert(bus, args.revert, author=author(), reason=args.reason, check=check_patch)
            else:
                made = await propose(bus, patch, author=author(), reason=args.reason, check=check_patch)
            if args.as_json:
                print_json(made)
            else:
                print(applied_text(made, before))
            return 0
        return await _list(bus, history, args.as_json)

    return on_bus(args, body, look=not patch and args.revert is None)


def parse_patch(words: list[str]) -> dict[str, object]:
    """`name=value` words to a patch; a name given twice is an error."""
    patch: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not name:
            raise SettingsError(f"{word!r} is not name=value", remedy="Write for example lr=2e-6, without spaces.")
        if name in patch:
            raise SettingsError(f"{name} is given twice", remedy="Keep one.")
        patch[name] = value.strip()
    return patch


def author() -> str:
    """user@host, for the log."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # an account without a name
        return f"?@{socket.gethostname()}"


def applied_text(made: "KnobPatch", before: Any) -> str:
    """What a patch changed, and when each change takes effect."""
    from miles_async.console.text import table

    rows = []
    for name, value in made.values.items():
        spec = catalog().get(name)
        when = "follows" if spec is None or spec.follows else spec.live
        rows.append([name, f"{shown_value(before.get(name), spec)} -> {shown_value(value, spec)}", when])
    return f"epoch {made.epoch}\n" + table(["setting", "change", "takes effect at"], rows)


def _log(history: "list[KnobPatch]", as_json: bool) -> int:
    from datetime import datetime

    from miles_async.console.text import table

    if as_json:
        print_json(history)
        return 0
    rows = []
    for patch in history:
        when = datetime.fromtimestamp(patch.wall).strftime("%Y-%m-%d %H:%M:%S") if patch.wall else "-"
        first = patch is history[0]
        values = (
            f"{len(patch.values)} initial values"
            if first
            else ", ".join(f"{k}={shown_value(v)}" for k, v in patch.values.items())
        )
        rows.append([str(patch.epoch), when, patch.author or "-", values, patch.reason])
    print(table(["epoch", "when", "who", "values", "why"], rows, right=("epoch",)))
    return 0


async def _list(bus: "Bus", history: "list[KnobPatch]", as_json: bool) -> int:
    from miles_async.console.text import table

    found = document(history, bus.config.run)
    if as_json:
        print_json(found)
        return 0
    knobs = found["knobs"]
    rows = []
    for name, knob in knobs.items():
        spec, follows = catalog()[name], knob["follows"]
        shown, when = ("follows", follows) if follows else (knob["range"], knob["applies"])
        rows.append([name, shown_value(knob["value"], spec), spec.unit or "-", shown, when, str(knob["changed_at"])])
    print(table(["setting", "live", "unit", "permitted", "takes effect at", "epoch"], rows, right=("live", "epoch")))
    print(f"\nepoch {found['epoch']}. Change with miles-async tune name=value, undo with --revert EPOCH.")
    return 0


def document(history: "list[KnobPatch]", run: str) -> dict[str, Any]:
    """Every knob: live value, permitted values, unit, where a change takes effect, the epoch that changed it."""
    from bus.knobs import range_text, values_at

    if not history:
        raise SettingsError(f"run {run} has no knobs yet", remedy="Its launcher writes them at start; try again.")
    live = values_at(history, history[-1].epoch)
    changed_at = {name: patch.epoch for patch in history[1:] for name in patch.values}
    return {
        "epoch": live.epoch,
        "knobs": {
            spec.name: {
                "value": live.values[spec.name],
                "range": ("auto or " if spec.auto is not None else "") + range_text(live.kinds[spec.name]),
                "unit": spec.unit,
                "applies": spec.live,
                "changed_at": changed_at.get(spec.name, history[0].epoch),
                "follows": spec.derived if spec.follows else None,
                "help": spec.text,
            }
            for spec in catalog().values()
            if spec.name in live.live
        },
    }


def shown_value(value: object, spec: FieldSpec | None = None) -> str:
    """A value as the user would write it."""
    if spec is not None and spec.auto is not None and value == spec.auto:
        return "auto"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
