"""Train a policy as a settings file says: settings from file and flags, then the launcher."""

import argparse
from pathlib import Path

from miles_async.cli.flags import flags_help, parse_flags
from miles_async.settings.dump import dry_run_text
from miles_async.settings.checks import preflight
from miles_async.settings.errors import Refusals, SettingsError
from miles_async.settings.load import load

HELP = ("-h", "--help")
DRY_RUN = "--dry-run"

USAGE = """\
usage: miles-async train [CONFIG] [--flag value ...]

Train a policy. CONFIG is a TOML file with the tables named below; every field is also a flag, and a flag wins
over the file. The same command again resumes from the last checkpoint. Relative paths start at the current folder.

  --dry-run                               Print the resolved settings as TOML, with the origin of each value, and stop.
  -h, --help                              Print this text.

A list takes all words up to the next flag. A boolean also takes =true or =false. `none` unsets an optional value.
Fields marked live may be changed while the run goes on.
"""


def parse(words: list[str]) -> argparse.Namespace:
    """Namespace(help, dry_run, config, values)."""
    parsed = parse_flags(words, frozenset((*HELP, DRY_RUN)))
    if len(parsed.positional) > 1:
        raise SettingsError(
            f"one settings file expected, got {' '.join(parsed.positional)}", remedy="Put CONFIG before the flags."
        )
    return argparse.Namespace(
        help=bool(parsed.switches.intersection(HELP)),
        dry_run=DRY_RUN in parsed.switches,
        config=Path(parsed.positional[0]) if parsed.positional else None,
        values=parsed.values,
    )


def run(args: argparse.Namespace) -> int:
    """Print help or settings, or train and return the launcher's exit status."""
    if args.help:
        print(f"{USAGE}\n{flags_help()}")
        return 0
    refused = Refusals()
    loaded = load(args.config, args.values, refused)
    if args.dry_run or refused.found:
        from miles_async.launcher.hooks import PROBES

        found = refused.attempt(preflight, loaded.settings, probes=PROBES)
        refused.raise_all()
        print(dry_run_text(loaded, found.notes if found else ()), end="")
        return 0
    from miles_async.launcher.run import train

    return train(loaded.settings)
