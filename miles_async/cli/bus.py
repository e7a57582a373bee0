"""Look into the streams of a running run.

ls                      every stream: entries, who writes, who reads, bytes in flight
tail STREAM             the newest entries and then each new one, as readable fields
tail STREAM --where W   of these the samples that meet a condition: --where "tokens > 2000 and reward == 0"
show [STREAM] ID        one entry in full, with texts; ID is an entry id or the id field, for example a sample id
export STREAM --out F   all that lies on a stream as rows: .parquet or .jsonl; --where and --text as well
lag                     every reader: what it holds, what it has not seen, how old that is
dead list|retry|drop    entries that failed for good
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_async.cli.options import add_json_option, add_run_options, on_bus
from miles_async.settings.errors import SettingsError, nearest
from miles_async.settings.runs import RunRef

if TYPE_CHECKING:
    from bus import Bus, Stream
    from miles_async.console.rows import Decode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand each; all take the shared options."""
    verbs = parser.add_subparsers(dest="verb", metavar="ls|tail|show|export|lag|dead", required=True)

    def verb(name: str, summary: str, **more: Any) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False, **more)

    ls = verb("ls", "List the streams.")
    tail = verb("tail", "Print the newest entries of a stream, then follow it until Ctrl-C.")
    tail.add_argument("stream", metavar="STREAM")
    tail.add_argument("-n", type=int, default=10, metavar="N", help="entries to begin with (default: %(default)s)")
    ends = tail.add_mutually_exclusive_group()
    ends.add_argument("-f", "--follow", action="store_true", help="follow it, which is the default")
    ends.add_argument("--no-follow", action="store_true", help="stop after the newest entries")
    show = verb("show", "Print one entry in full.")
    show.add_argument("stream", metavar="STREAM", nargs="?", help="unset: the last one of the flow that has it")
    show.add_argument("id", metavar="ID", help="entry id, or the id field (the newest entry with it)")
    export = verb("export", "Write what lies on a stream into a file. The stream stays as it is.")
    export.add_argument("stream", metavar="STREAM")
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .parquet or .jsonl")
    export.add_argument("--text", action="store_true", help="prompts and responses as text as well")
    for one in (tail, export):
        one.add_argument("--where", metavar="CONDITION", help='for example "tokens > 2000 and reward == 0"; by sample')
    lag = verb("lag", "Print what each reader holds and has not seen.")
    dead = verb("dead", "Entries that failed for good.")
    acts = dead.add_subparsers(dest="act", metavar="list|retry|drop", required=True)
    listing = acts.add_parser("list", help="print them", allow_abbrev=False)
    retry = acts.add_parser("retry", help="give one another chance", allow_abbrev=False)
    drop = acts.add_parser("drop", help="forget one", allow_abbrev=False)
    for chosen in (retry, drop):
        chosen.add_argument("id", metavar="ID", help="id of the letter, of its entry, or of its sample")
    for chosen in (ls, tail, show, export, lag, listing, retry, drop):
        add_run_options(chosen)
        add_json_option(chosen)


def run(args: argparse.Namespace) -> int:
    """Hand over to the verb."""
    stream = stream_named(args.stream) if getattr(args, "stream", None) else None  # a typo is reported before connecting
    where = None
    if getattr(args, "where", None) is not None and stream is not None:
        from miles_async.console.rows import known
        from miles_async.console.where import Where

        where = Where(args.where, known(stream))
    if args.verb == "export" and args.out.suffix not in (".parquet", ".jsonl"):
        raise SettingsError("is of no known form", field="--out", value=str(args.out), remedy="End it in .parquet or .jsonl.")

    async def body(bus: "Bus", ref: RunRef) -> int:
        from miles_async.cli import bus_verbs as verbs

        match args.verb:
            case "ls":
                return await verbs.ls(bus, as_json=args.as_json)
            case "tail" if stream is not None:
                lives = bus.config.url == ref.bus_url  # nothing will come to the copy of one that has ended
                how = {"n": args.n, "follow": lives and not args.no_follow, "as_json": args.as_json}
                return await verbs.tail(bus, stream, where=where, **how)
            case "show":
                return await verbs.show(bus, stream, args.id, as_json=args.as_json, decode=decoder(ref))
            case "export" if stream is not None:
                return await verbs.export(bus, stream, args.out, where=where, decode=decoder(ref) if args.text else None)
            case "lag":
                return await verbs.lag(bus, as_json=args.as_json)
        from miles_async.cli.bus_dead import dead

        return await dead(bus, args.act, getattr(args, "id", ""), as_json=args.as_json)

    try:
        return on_bus(args, body, look=args.verb != "dead" or args.act == "list")
    except KeyboardInterrupt:
        if args.verb == "tail":
            return 0  # the way to end it
        raise


def stream_named(name: str) -> "Stream":
    """A stream by name; SettingsError names the nearest one."""
    from bus import BY_NAME

    if name not in BY_NAME:
        remedy = nearest(name, BY_NAME) or f"Streams: {', '.join(BY_NAME)}."
        raise SettingsError(f"no stream {name!r}", remedy=remedy)
    return BY_NAME[name]


def decoder(ref: RunRef) -> "Decode | None":
    """Tokens to text as the run's recorder does it; None where the run's folder or the model's tokenizer is not on this host."""
    if ref.run_dir is None:
        return None
    import json

    from actors.runtime.prompts import Tokenizer

    try:
        spec = json.loads((ref.run_dir / "actors" / "recorder.json").read_text())
        return Tokenizer(spec["room"]["tokenizer_dir"]).decode
    except (OSError, ValueError, KeyError, TypeError):
        return None
