"""Talk to what a run has trained, or to a model's directory, on this host's CPU cores.

miles-async chat RUN [--step N]           # a dialogue; an empty line or Ctrl-D ends it
miles-async chat RUN --ask "7+8="         # one answer

For a larger model on a GPU: miles-async serve-model, and any client of OpenAI's interface.
"""

import argparse
import asyncio
import sys
from typing import Any

from miles_async.cli.serve_model import add_which
from miles_async.settings.errors import SettingsError, refusal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `chat`."""
    add_which(parser)
    parser.add_argument("--ask", metavar="TEXT", help="ask this alone, print the answer, and end")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: as the run's)")


def run(args: argparse.Namespace) -> int:
    """0 when it was ended; 2 when there is nothing to talk to."""
    if args.temperature < 0:
        raise refusal("--temperature", args.temperature, "below 0", "Give 0 or more.")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise refusal("--max-tokens", args.max_tokens, "below 1", "Leave it out, or give 1 or more.")
    return asyncio.run(_chat(args))


async def _chat(args: argparse.Namespace) -> int:
    from miles_async.serving.chosen import choose

    chosen = choose(args.run, args.runs_dir, args.step)
    import aiohttp

    from actors.runtime.chat import BadChat
    from actors.runtime.run import Refused
    from bus.errors import printable
    from miles_async.serving.answers import EngineFailed, Texts, answer, room
    from miles_async.serving.engine import engine_of

    said = list[dict[str, Any]]()
    if args.ask is None:
        where = f"step {chosen.step} of {chosen.name}" if chosen.step is not None else chosen.name
        print(f"{where}; loading. An empty line ends it.", file=sys.stderr, flush=True)
    try:
        texts = Texts(chosen)
        async with engine_of(chosen.directory, threads=args.threads) as url, aiohttp.ClientSession() as session:
            while (asked := args.ask if args.ask is not None else await asyncio.to_thread(_line)) is not None:
                said.append({"role": "user", "content": asked})
                prompt = texts.prompt(said)
                params = {"max_new_tokens": room(chosen, prompt, args.max_tokens), "temperature": args.temperature}
                text, _, finish = await answer(session, url, texts, prompt, params)
                print(printable(text), flush=True)
                if finish == "length":
                    print("(cut: no room is left for more)", file=sys.stderr)
                if args.ask is not None:
                    break
                said.append({"role": "assistant", "content": text})
    except (Refused, BadChat) as error:
        raise SettingsError(str(error)) from None
    except EngineFailed as error:
        raise SettingsError(str(error), remedy="Ask something shorter, or begin anew.") from None
    return 0


def _line() -> str | None:
    """What is typed next; None: nothing more."""
    try:
        return input("> " if sys.stdin.isatty() else "") or None
    except EOFError:
        return None
