"""Train a policy as a settings file says: settings from file and flags, then the launcher."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_async.cli.flags import flags_help, groups_help, parse_flags
from miles_async.cli.from_miles import take_script
from miles_async.settings.dump import dry_run_text
from miles_async.settings.errors import Refusals, SettingsError
from miles_async.settings.load import config_path, load, read_file
from miles_async.settings.meant import Said, ahead

HELP = ("-h", "--help")
EXPLAIN = "--explain"
DRY_RUN = "--dry-run"

USAGE = """\
usage: miles-async train [CONFIG] [--flag value ...]

Train a policy. CONFIG is a TOML file with the tables named below, or the name of one that ships, such as quickstart; every field
is also a flag, which wins over the file. The same file, or --name, again resumes. Relative paths start at the current folder.
"""
OPTIONS = """\
  --dry-run         Check all that can be checked, print the resolved settings with the origin of each value, and stop.
  --help GROUP      The flags of one table.            --help all      All of them.
  --help WORD       Flags with that word in their name or meaning, e.g. --help staleness.
  --explain FLAG    What a flag does, its range and default, whether it is live, which rules look at it, what it is in Miles.
  --from-miles FILE The flags of Miles' launch script (read, not run) or recipe (run in the sandbox). With arguments: 'FILE ARG ...'
  --help miles      Each flag of Miles: ours, or why not.

A list takes all words up to the next flag. A boolean also takes =true or =false. `none` unsets an optional value. Flags marked
live may be changed while the run goes on, with miles-async tune.
"""


def parse(words: list[str]) -> argparse.Namespace:
    """Namespace(explain, help, topic, dry_run, config, values, told, refused); with --explain that alone."""
    refused = Refusals()
    switches = frozenset((*HELP, DRY_RUN, EXPLAIN))
    if EXPLAIN in words:
        if not (asked := words[words.index(EXPLAIN) + 1 :]):
            raise SettingsError(f"{EXPLAIN} needs a value", remedy="It takes the name of a flag.")
        return argparse.Namespace(explain=asked)
    script = take_script(words, refused, switches)
    parsed = parse_flags(script.words, switches, refused)
    if len(parsed.positional) > 1:
        said = f"one settings file expected, got {' '.join(parsed.positional)}"
        refused.found.append(SettingsError(said, remedy="Put CONFIG before the flags."))
    config = config_path(parsed.positional[0]) if parsed.positional else None
    once = config is not None and config.exists() and not config.is_file()  # a pipe, which is read when the settings are
    runs_ahead = () if script.told or once else ahead(Said.of("", parsed.values, script.words).beside(_given(config)))
    return argparse.Namespace(
        explain=(),
        help=bool(parsed.switches.intersection(HELP)),
        topic=parsed.positional[0] if parsed.positional else "",
        dry_run=DRY_RUN in parsed.switches,
        config=config,
        values=(*script.values, *(one.value for one in runs_ahead), *parsed.values),
        told=script.told,
        notes=(*parsed.notes, *(one.text for one in runs_ahead)),
        refused=refused,
    )


def _given(config: Path | None) -> Mapping[str, Any]:
    """The settings of a file; nothing of one that cannot be read, which `load` tells."""
    try:
        return read_file(config) if config is not None else {}
    except SettingsError:
        return {}


def run(args: argparse.Namespace, usage: str = USAGE) -> int:
    """Print help or settings, or train and return the launcher's exit status."""
    if args.explain:
        from miles_async.cli.explain import explain

        print("\n\n".join(map(explain, args.explain)))
        return 0
    if args.help:
        print(flags_help(args.topic) if args.topic else f"{usage}\n{OPTIONS}\n{groups_help()}")
        return 0
    for line in args.told:
        print(f"# {line}" if args.dry_run else line)
    refused: Refusals = args.refused
    loaded = refused.attempt(load, args.config, args.values, refused)
    if loaded is None:
        refused.raise_all()
        raise AssertionError("a refusal without a reason")
    if args.dry_run:
        from miles_async.launcher.hooks import PROBES
        from miles_async.launcher.preflight import few_prompts, preflight

        found = refused.attempt(preflight, loaded.settings, probes=PROBES, dry_run=True)
        refused.raise_all()
        notes = (*found.notes, *few_prompts(loaded.settings, found)) if found else ()
        print(dry_run_text(loaded, (*args.notes, *notes)), end="")
        return 0
    from miles_async.launcher.preflight import check_quickly

    check_quickly(loaded.settings, refused)
    refused.raise_all()  # before anything is printed or made, and before libraries are loaded
    for note in args.notes:
        print(f"note: {note}", file=sys.stderr)
    from miles_async.launcher.fetch import with_models
    from miles_async.launcher.run import train

    return train(with_models(loaded.settings))
