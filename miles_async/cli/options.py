"""What several commands share: options that say which run and how to reach its bus, one connection to it, one answer."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_async.settings.runs import RunRef, find_run

if TYPE_CHECKING:
    from bus import Bus

DEFAULT_RUNS_DIR = "runs"


def add_run_options(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """`--run NAME`, `--runs-dir DIR`, `--bus-url URL` (also `--bus URL`); with `positional` RUN as well."""
    if positional:
        parser.add_argument("positional_run", nargs="?", metavar="RUN", help="name of the run; as --run")
    group = parser.add_argument_group("which run")
    group.add_argument("--run", metavar="NAME", help="name of the run (default: the newest in --runs-dir)")
    group.add_argument(
        "--runs-dir",
        metavar="DIR",
        type=Path,
        default=Path(DEFAULT_RUNS_DIR),
        help="folder that holds the runs (default: %(default)s)",
    )
    group.add_argument(
        "--bus-url",
        "--bus",
        metavar="URL",
        dest="bus_url",
        help="redis://, rediss://, redis+sentinel:// or unix:// address of the run's bus (default: as the run's run.json says)",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """`--json`: one JSON document on stdout instead of text."""
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document instead of text")


def chosen_run(args: argparse.Namespace) -> RunRef:
    """The run that the shared options name. Raises SettingsError when there is none."""
    name = args.run or getattr(args, "positional_run", None)
    return find_run(run=name, runs_dir=args.runs_dir, bus_url=args.bus_url)


def on_bus(args: argparse.Namespace, body: Callable[["Bus", RunRef], Awaitable[int]], *, look: bool = True) -> int:
    """Run `body` on the bus of the chosen run and return its exit status. Raises what `attached` raises: status 2. `look`: it
    changes nothing, so a run that has ended can be asked too."""
    import asyncio

    from miles_async.console.attach import attached

    ref = chosen_run(args)

    async def go() -> int:
        async with attached(ref, look=look) as bus:
            return await body(bus, ref)

    return asyncio.run(go())


def print_json(value: Any) -> None:
    """One document on stdout; structs and their kind become plain values."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()
    sys.stdout.write(text + "\n")
