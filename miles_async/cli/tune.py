"""Change live settings of a running run, or list them.

  miles-async tune                                   every knob: live value, permitted values, when a change takes effect
  miles-async tune lr=2e-6 max_weight_staleness=3    one patch: all of it is applied, or nothing
  miles-async tune --log                             the epochs so far
  miles-async tune --revert EPOCH                    back to the values of an epoch, as a new epoch
  miles-async tune --at-step 400 lr=1e-6             planned: the trainer's settings hold from exactly that step, those of other
                                                     actors from the moment in which it begins
  miles-async tune --cancel EPOCH                    end a plan before its step

A patch that fails its check changes nothing and ends with status 2.
"""

import argparse
import getpass
import socket
from typing import TYPE_CHECKING, Any

from miles_async.cli.options import add_json_option, add_run_options, on_bus, print_json
from miles_async.settings.catalog import FieldSpec, catalog, shown_value
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
    parser.add_argument("--at-step", type=int, metavar="STEP", help="let name=value hold from this training step on")
    parser.add_argument("--cancel", type=int, metavar="EPOCH", help="end the plan of this epoch")
    add_run_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Apply, plan, revert, cancel, log or list."""
    patch = parse_patch(args.patch)
    wishes = bool(patch) + (args.revert is not None) + (args.cancel is not None)
    if wishes + args.log > 1:
        raise SettingsError("name=value, --log, --revert and --cancel exclude each other", remedy="Give one of them.")
    if args.at_step is not None and not patch:
        raise SettingsError("nothing is planned", field="--at-step", value=args.at_step, remedy="Add name=value.")

    async def body(bus: "Bus", ref: RunRef) -> int:
        from bus.knobs.live import propose, read_history, revert, values_at
        from bus.knobs.plans import cancel, plan

        history = await read_history(bus)
        before = values_at(history, history[-1].epoch).values if history else {}
        if args.log:
            return _log(history, args.as_json)
        if not wishes:
            return await _list(bus, history, args.as_json)
        said: dict[str, Any] = {"author": author(), "reason": args.reason, "check": check_patch}
        if args.revert is not None:
            made = await revert(bus, args.revert, **said)
        elif args.cancel is not None:
            made = await cancel(bus, args.cancel, **said)
        elif args.at_step is not None:
            await _is_to_come(bus, args.at_step, before)
            made = await plan(bus, patch, at_step=args.at_step, **said)
        else:
            made = await propose(bus, patch, **said)
        if args.as_json:
            print_json(made)
        else:
            print(applied_text(made, before))
        return 0

    return on_bus(args, body, look=not wishes)


async def _is_to_come(bus: "Bus", step: int, values: Any) -> None:
    """SettingsError for a step that has begun, or never comes."""
    from actors.runtime.snapshot import read_snapshot

    done, last = (await read_snapshot(bus)).policy.step, values.get("num_rollout")
    if step <= done + 1:
        rule = f"{done} steps are done and step {done + 1} may be under way"
        raise SettingsError(rule, field="--at-step", value=step, remedy=f"Give {done + 2} or more, or leave it out.")
    if last is not None and step > last:
        raise SettingsError(f"the run ends at step {last}", field="--at-step", value=step, remedy=f"Give {last} or less.")


def parse_patch(words: list[str]) -> dict[str, object]:
    """`name=value` words to a patch; a name given twice is an error."""
    patch: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not name:
            remedy = "Write for example lr=2e-6, without spaces; a run is named by --run."
            raise SettingsError(f"{word!r} is not name=value", remedy=remedy)
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

    if made.plan:
        return f"epoch {made.epoch}\nthe plan of epoch {made.plan} is cancelled"
    rows = []
    for name, value in (made.planned or made.values).items():
        spec = catalog().get(name)
        when = "follows" if spec is None or spec.follows else spec.live
        if made.planned and spec is not None and spec.live:
            when = planned_when(spec, made.from_step)
        rows.append([name, f"{shown_value(before.get(name), spec)} -> {shown_value(value, spec)}", when])
    return f"epoch {made.epoch}\n" + table(["setting", "change", "takes effect at"], rows)


def planned_when(spec: FieldSpec, step: int) -> str:
    """Where a planned change takes effect: exactly at the step in the trainer, when it begins in other actors."""
    actors = spec.live.rpartition("(")[2].rstrip(")").split(", ")
    others = ", ".join(actor for actor in actors if actor != "trainer")
    exact = [f"step {step} exactly (trainer)"] if "trainer" in actors else []
    return ", ".join(exact + ([f"when step {step} begins ({others})"] if others else []))


def changes_text(patch: "KnobPatch") -> str:
    """What an entry of the log did, in one line."""
    shown = ", ".join(f"{k}={shown_value(v, catalog().get(k))}" for k, v in (patch.planned or patch.values).items())
    if patch.planned:
        return f"planned for step {patch.at_step}: {shown}"
    if patch.plan and not patch.at_step:
        return f"plan of epoch {patch.plan} ended"
    return f"{shown or 'nothing new'} (plan of epoch {patch.plan}, from step {patch.at_step})" if patch.plan else shown


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
        values = f"{len(patch.values)} initial values" if first else changes_text(patch)
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
    for waits in found["planned"]:
        values = ", ".join(f"{name}={shown_value(value, catalog().get(name))}" for name, value in waits["values"].items())
        why = f" ({waits['reason']})" if waits["reason"] else ""
        print(f"\nplanned for step {waits['at_step']} by {waits['author']}: {values}{why}; --cancel {waits['epoch']} ends it")
    print(f"\nepoch {found['epoch']}. Change with miles-async tune name=value, undo with --revert EPOCH.")
    return 0


def document(history: "list[KnobPatch]", run: str) -> dict[str, Any]:
    """Every knob: live value, permitted values, unit, where a change takes effect, the epoch that changed it; and the plans that
    wait."""
    from bus.knobs import range_text, values_at
    from bus.knobs.live import pending

    if not history:
        raise SettingsError(f"run {run} has no knobs yet", remedy="Its launcher writes them at start; try again.")
    live = values_at(history, history[-1].epoch)
    changed_at = {name: patch.epoch for patch in history[1:] for name in patch.values}
    return {
        "epoch": live.epoch,
        "planned": [
            {"epoch": p.epoch, "at_step": p.at_step, "values": p.planned, "author": p.author, "reason": p.reason}
            for p in pending(history)
        ],
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
