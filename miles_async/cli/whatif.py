"""Simulate a run under other settings, from its record: `miles-async whatif RUN --max-weight-staleness 4`. The rooms' own code
decides what is issued, trained and dropped; times and lengths are those of the run. Settings that can be asked for: {asked}."""

import argparse
import textwrap
from collections import deque
from pathlib import Path
from typing import Any

from miles_async.cli.options import add_json_option, add_run_options, chosen_run
from miles_async.settings.errors import SettingsError

SEEDS = 5
KEPT = 2000  # newest steps; a simulation looks at a tenth of so many


def parse(argv: list[str]) -> argparse.Namespace:
    """Our own options; every other flag is a setting."""
    from miles_async.cli.app import OneLineParser
    from miles_async.cli.flags import parse_flags
    from miles_async.console.whatif import ASKED
    from miles_async.settings.catalog import names
    from miles_async.settings.load import value_of_words

    parser = OneLineParser(
        prog="miles-async whatif",
        usage="miles-async whatif [RUN] [--SETTING VALUE ...] [--seeds N] [--json] [--run NAME] [--runs-dir DIR]",
        description="\n".join(textwrap.wrap((__doc__ or "").format(asked=", ".join(ASKED)), 110)),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="simulations of each (default: %(default)s)")
    add_run_options(parser)
    add_json_option(parser)
    args, rest = parser.parse_known_args(argv)
    if not 1 <= args.seeds <= 100:
        raise SettingsError("must be 1 to 100", field="--seeds", value=args.seeds)
    for word in rest:
        flag = word.partition("=")[0]
        spec = names().get(flag.removeprefix("--no-").removeprefix("--").replace("-", "_"))
        if flag.startswith("--") and (spec is None or spec.name not in ASKED):
            raise SettingsError("not known to the simulation", field=flag, remedy=f"It knows {', '.join(ASKED)}.")
    parsed = parse_flags(rest, frozenset())
    if len(parsed.positional) > 1:
        raise SettingsError(f"one run expected, got {' '.join(parsed.positional)}", remedy="Put RUN before the flags.")
    args.run = args.run or next(iter(parsed.positional), None)
    args.patch = {value.spec.name: value_of_words(value) for value in parsed.values}
    return args


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    import msgspec

    from miles_async.cli.options import print_json
    from miles_async.console.whatif import compare, recorded, sound, text

    ref = chosen_run(args)
    if ref.run_dir is None:
        raise SettingsError("the record lies in the run's folder", remedy="Run this on its host, with --runs-dir.")
    records, damaged = _read(ref.run_dir)
    whole = sound(records)
    found = compare(recorded(whole), args.patch, seeds=args.seeds)
    damaged += len(records) - len(whole)
    if args.as_json:
        print_json({"run": ref.run, "damaged_lines": damaged, **msgspec.structs.asdict(found)})
        return 0
    if damaged:
        print(f"Note: {damaged} lines of the record are damaged, and were left out")
    print(text(found))
    return 0


def _read(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """The run's records since its last KEPT steps, all changes of knobs, and how many of its lines are no records. The record of a
    week is larger than memory should hold."""
    from actors.recorder.file import FILE, stream_records

    file = run_dir / FILE
    if not file.is_file():
        remedy = "Its recorder begins it soon after the start: ask again then, or give another --runs-dir."
        raise SettingsError(f"the run has no record: {file} is missing", remedy=remedy)
    knobs: list[dict[str, Any]] = []
    newest: deque[dict[str, Any]] = deque()
    read = steps = 0
    for record in stream_records(run_dir):
        read += 1
        newest.append(record)
        steps += record["kind"] == "step"
        while steps > KEPT:
            left = newest.popleft()
            steps -= left["kind"] == "step"
            knobs += [left] if left["kind"] == "knob" else []
    with file.open("rb") as opened:
        return [*knobs, *newest], max(0, sum(line.endswith(b"\n") for line in opened) - read)
