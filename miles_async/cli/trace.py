"""Tell one sample's whole life: its prompt, where it is now, who holds it, the verdict on its group, the step that
trained it, dead letters. SAMPLE_ID is "<group>/<index>", as shown by bus tail; a group id tells the group's life.

What was trained or dropped is told from the run's files, while it goes on and after its end; only of a sample under way
the bus is asked.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.cli.options import add_json_option, add_run_options, chosen_run, print_json
from miles_async.settings.runs import RunRef

if TYPE_CHECKING:
    from miles_async.console.trace import Trace

FOLLOWED_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """SAMPLE_ID and the shared options."""
    parser.add_argument("sample_id", metavar="SAMPLE_ID", help="for example g0000012/3")
    add_run_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """0 when something is on record, 2 when nothing is."""
    ref = chosen_run(args)
    found = told_of(ref, args.sample_id)
    from miles_async.console.trace import known

    if args.as_json:
        print_json(found)
        known(found)
    else:
        print(as_text(known(found)))
    return 0


def told_of(ref: RunRef, sample_id: str) -> "Trace":
    """The sample's life: from files alone where they tell its end, else from the run's streams too."""
    return _by_files(ref, sample_id) or _by_streams(ref, sample_id)


def _by_files(ref: RunRef, sample_id: str) -> "Trace | None":
    """Where they tell what became of it, or its end while the run's own Redis is gone: no stream has anything to add."""
    from miles_async.console.trace import settled, trace_file

    if ref.run_dir is None:
        return None
    if settled(ref.run_dir, sample_id, followed=_followed(ref.run_dir)):
        return trace_file(ref.run_dir, sample_id)
    socket = Path(ref.bus_url.partition("?")[0].removeprefix("unix://"))
    if not ref.bus_url.startswith("unix://") or socket.exists():
        return None
    told = trace_file(ref.run_dir, sample_id)
    return told if {"checkpoint", "dropped"} & {moment.what for moment in told.moments} else None


def _followed(run_dir: Path) -> bool:
    """Whether a recorder has written lately: at least what the host uses, every ten seconds."""
    try:
        return time.time() - (run_dir / "metrics.jsonl").stat().st_mtime < FOLLOWED_S
    except OSError:
        return False


def _by_streams(ref: RunRef, sample_id: str) -> "Trace":
    import asyncio

    from bus.errors import BusUnreachable
    from miles_async.console.attach import attached
    from miles_async.console.trace import trace_file
    from miles_async.console.trace_live import trace

    async def follow() -> "Trace":
        async with attached(ref, look=True) as bus:
            return await trace(bus, sample_id, ref.run_dir)

    try:
        return asyncio.run(follow())
    except BusUnreachable:
        if ref.run_dir is None or not (ref.run_dir / "metrics.jsonl").exists():
            raise
        return trace_file(ref.run_dir, sample_id)


def as_text(found: "Trace") -> str:
    """State, moments in order, then what is known of its content."""
    from datetime import datetime

    from miles_async.console.show import outline

    lines = [f"{found.sample}: {found.state}"]
    if found.moments:
        lines.append("")
    for moment in found.moments:
        when = datetime.fromtimestamp(moment.wall).strftime("%Y-%m-%d %H:%M:%S") if moment.wall else " " * 19
        lines.append(f"{when}  " + moment.text.replace("\n", "\n" + " " * 21))
    if found.task:
        lines += ["", *outline(found.task, "content")]
    return "\n".join(lines)
