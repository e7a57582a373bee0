"""Serve what a run has trained, or a model's directory, as OpenAI's clients call it (POST /v1/chat/completions).

miles-async serve-model RUN [--step N] [--port 8000]
miles-async serve-model DIR

On a host with a GPU and SGLang that is SGLang's own server; else the embedded engine, on CPU cores, for small models. Ctrl-C
ends it.
"""

import argparse
import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from actors.runtime.child import PYTHON
from miles_async.settings.errors import SettingsError, refusal
from miles_async.settings.load import has_gpu

if TYPE_CHECKING:
    from miles_async.serving.chosen import Chosen

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_which(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which weights, shared with `chat`."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="name of a run, or a model's directory (default: the newest run)")
    parser.add_argument("--step", type=int, metavar="N", help="its checkpoint of step N (default: the last)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs lie (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="CPU threads (default: %(default)s)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `serve-model`."""
    add_which(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 chooses a free one (default: %(default)s)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the key that callers must show")
    parser.add_argument("--engine", choices=("auto", "cpu", "gpu"), default="auto", help="cpu: the embedded one; gpu: SGLang")


def run(args: argparse.Namespace) -> int:
    """0 when it was ended; 2 when nothing can be served."""
    from miles_async.serving.chosen import choose

    if not 0 <= args.port <= 65535:
        raise refusal("--port", args.port, "no port", "Give one from 0 (any free one) to 65535.")
    key = _key(args.api_key_file)
    if args.host not in LOOPBACK and not key:
        why = "others than this host's programs could ask, and no key is asked for"
        raise refusal("--host", args.host, why, "Add --api-key-file FILE, or leave --host out.")
    chosen = choose(args.run, args.runs_dir, args.step)
    if args.engine == "gpu" or (args.engine == "auto" and has_gpu() and find_spec("sglang")):
        return _sglang(args, chosen.directory, chosen.name, chosen.template_path)
    import asyncio

    return asyncio.run(_serve(args, chosen, key))


def _key(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        key = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise refusal("--api-key-file", str(file), f"cannot be read: {error}", "Give a file with one line.") from None
    if not key:
        raise refusal("--api-key-file", str(file), "is empty", "Write a key into it.")
    return key


def _sglang(args: argparse.Namespace, directory: Path, name: str, template: str) -> int:
    """SGLang's own server over links to the model's files: it would read the optimizer's beside them too."""
    if find_spec("sglang") is None:
        raise refusal(
            "--engine", args.engine, "SGLang is not installed here", "Leave it out, or pip install 'miles-async[sglang]'."
        )
    if args.api_key_file is not None:
        raise refusal("--api-key-file", str(args.api_key_file), "SGLang takes its key from a command line", "Serve on loopback.")
    from miles_async.serving.export import export

    port = args.port or 8000
    with TemporaryDirectory(prefix="miles-async-") as folder:
        export(directory, Path(folder) / "model", link=True)
        words = ["--model-path", f"{folder}/model", "--served-model-name", name, "--host", args.host, "--port", str(port)]
        words += ["--chat-template", template] if template else []
        print(f"SGLang serves {directory} at http://{args.host}:{port}/v1 as {name}", flush=True)
        with suppress(KeyboardInterrupt):
            return subprocess.call([*PYTHON, "sglang.launch_server", *words])
    return 0


async def _serve(args: argparse.Namespace, chosen: "Chosen", key: str) -> int:
    import asyncio
    import signal

    import aiohttp

    from actors.runtime.chat import BadChat
    from actors.runtime.run import Refused
    from miles_async.serving.answers import Texts
    from miles_async.serving.endpoint import ModelEndpoint, listening
    from miles_async.serving.engine import engine_of

    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    try:
        texts = Texts(chosen)
    except (Refused, BadChat) as error:
        raise SettingsError(str(error)) from None
    async with engine_of(chosen.directory, threads=args.threads) as url, aiohttp.ClientSession() as session:
        served = ModelEndpoint(chosen, texts, url, session, key)
        try:
            async with listening(served, args.host, args.port) as port:
                print(f"{chosen.directory} is served at http://{args.host}:{port}/v1 as {chosen.name}", flush=True)
                if not texts.templated:
                    print("note: it has no chat template: a dialogue's last message is its prompt, as it is", file=sys.stderr)
                await over.wait()
        except OSError as error:
            why = f"cannot listen on {args.host}: {(error.strerror or str(error)).lower()}"
            raise refusal("--port", args.port, why, "Give another, or 0 for any free one.") from None
    return 0
