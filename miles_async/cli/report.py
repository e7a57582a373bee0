"""Write a run's report.html from what its recorder keeps in the run's folder: while it runs, when it has finished, after a kill."""

import argparse

from miles_async.cli.options import add_run_options, chosen_run
from miles_async.settings.errors import SettingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN and the shared options."""
    parser.add_argument("name", nargs="?", metavar="RUN", help="name of the run; as --run")
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print where it is."""
    args.run = args.run or args.name
    ref = chosen_run(args)
    if ref.run_dir is None:
        raise SettingsError(
            "a report is written from the run's folder", remedy="Run this on its host, with --runs-dir."
        )
    from miles_async.console.report import write_report

    print(f"report: {write_report(ref.run_dir)}")
    return 0
