"""Write a run's report.html from what its recorder keeps in the run's folder: while it runs, when it has finished, after a kill.

With more runs, their curves lie over the first one's, in report-compared.html.
"""

import argparse
from pathlib import Path

from miles_async.cli.options import add_run_options, chosen_run
from miles_async.settings.errors import SettingsError
from miles_async.settings.runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, others to lie over it, and the shared options."""
    add_run_options(parser, positional=True)
    parser.add_argument("others", nargs="*", metavar="OTHER", help="runs to compare it with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there instead of into the run's folder")


def run(args: argparse.Namespace) -> int:
    """Print where it is."""
    ref = chosen_run(args)
    if ref.run_dir is None:
        why = "a report is written from the run's folder"
        raise SettingsError(why, remedy="Run this on its host, with --runs-dir.")
    others = [find_run(run=name, runs_dir=args.runs_dir, bus_url=None).run_dir for name in dict.fromkeys(args.others)]
    if args.output is not None and not args.output.parent.is_dir():
        raise SettingsError(f"{args.output.parent} is no directory", remedy="Give --output FILE in one that exists.")
    from miles_async.console.report import write_report

    print(f"report: {write_report(ref.run_dir, [one for one in others if one is not None and one != ref.run_dir], args.output)}")
    return 0
