"""Process of the embedded engine: flags, port, signals. Exit status 0 after SIGTERM or SIGINT, 2 for a refused start, 1
when the model's thread died. With the single flag --spare it loads its libraries first and then reads one JSON line
from stdin, {"log": path, "argv": flags}: its starter may not know the flags yet.

Shutdown: (1) refuse new requests, (2) end running ones with what they have (finish_reason abort), (3) send those
answers, (4) close.
"""

import argparse
import asyncio
import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path

from actors.runtime.listener import Listener, http_log
from actors.runtime.loop import runner
from actors.runtime.priority import COMPUTE_NICE, lower_to

SHUTDOWN_S = 5.0
DEFAULT_TOTAL_TOKENS = 1 << 18


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m actors.generation.engines.embedded",
        description="Small CPU inference server speaking SGLang's HTTP subset.",
    )
    parser.add_argument("--model-path", type=Path, required=True, help="directory with config.json and model*.safetensors")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 chooses a free port (default)")
    parser.add_argument("--port-file", type=Path, help="written with the real port once the engine answers")
    parser.add_argument("--api-key-file", type=Path, help="file with the key that every call but /health must show")
    parser.add_argument("--served-version", default="default", help="weight_version at start (default %(default)s)")
    parser.add_argument("--max-running-requests", type=int, default=256, help="rows of the batch (default %(default)s)")
    parser.add_argument("--max-total-tokens", type=int, help="rows x longest row kept in memory (default: by RAM)")
    parser.add_argument("--context-length", type=int, help="tokens per request, at most the model's own (default)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model (default %(default)s)")
    parser.add_argument(
        "--stream-interval", type=int, default=16, help="tokens between two chunks of a stream (default %(default)s)"
    )
    parser.add_argument(
        "--incremental-streaming-output", action="store_true", help="chunks hold only new tokens (default: all so far)"
    )
    parser.add_argument(
        "--enable-deterministic-inference",
        action="store_true",
        help="a sample's numbers do not depend on what else runs: each is computed alone, which is slower",
    )
    parser.add_argument("--lora-rank", type=int, help="versions are adapters of this rank, beside the weights of --model-path")
    parser.add_argument("--lora-alpha", type=int, default=16, help="weight of adapters, over their rank (default %(default)s)")
    args = parser.parse_args(argv)
    for name in ("max_running_requests", "max_total_tokens", "context_length", "threads", "stream_interval", "lora_rank"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    return args


def main() -> int:
    gc.disable()  # until all is loaded: collecting in the middle of torch's import costs a tenth of the boot
    args = parse(_order() if sys.argv[1:] == ["--spare"] else None)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read when torch is imported, hence the late imports
    from actors.generation.engines.embedded.config import ModelRefused

    try:
        listener = _listen(args.host, args.port)
    except OSError as error:
        return _refuse(f"cannot listen on {args.host}:{args.port} ({error.strerror}); choose another --port, or 0 for a free one.")
    try:
        with listener, runner() as loop:
            return loop.run(_serve(args, listener))
    except ModelRefused as error:
        return _refuse(str(error))


def _order() -> list[str]:
    """A spare's flags; it ends when its starter went away or has no use for it."""
    import actors.generation.engines.embedded.scheduler
    import actors.generation.engines.embedded.server  # noqa: F401  # with torch: the long part of a boot

    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    order = json.loads(line)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    return [str(word) for word in order["argv"]]


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _refuse(why: str) -> int:
    print(f"embedded engine: {why}", file=sys.stderr)
    return 2


async def _serve(args: argparse.Namespace, bound: socket.socket) -> int:
    import torch
    from aiohttp import web

    from actors.generation.engines.embedded.adapters import Adapters
    from actors.generation.engines.embedded.decoders import open_decoder
    from actors.generation.engines.embedded.scheduler import Posted, Scheduler
    from actors.generation.engines.embedded.server import EngineServer, Served
    from actors.generation.engines.embedded.weights import load_weights
    from actors.runtime.lora import AdapterShape

    torch.set_num_threads(args.threads)
    decoder = open_decoder(args.model_path, args.context_length, repeatable=args.enable_deterministic_inference)
    load_weights(decoder, args.model_path)
    if args.lora_rank:
        decoder.adapters = Adapters(AdapterShape(args.lora_rank, args.lora_alpha))
    with torch.inference_mode():
        decoder.settled()
    config, eyes = decoder.config, decoder.eyes

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    deaths: list[BaseException] = []

    def post(posted: Posted) -> None:
        loop.call_soon_threadsafe(server.deliver, posted)

    def died(error: BaseException) -> None:
        deaths.append(error)
        loop.call_soon_threadsafe(stop.set)

    served = Served(
        model_path=str(args.model_path),
        config=config,
        max_running=args.max_running_requests,
        max_total_tokens=args.max_total_tokens or _default_total_tokens(config.layers * config.kv_heads * config.head_dim * 8),
        stream_interval=args.stream_interval,
        incremental=args.incremental_streaming_output,
        eyes=eyes,
    )
    server = EngineServer(served, token=args.api_key_file.read_text().strip() if args.api_key_file else "")
    server.scheduler = Scheduler(
        decoder,
        version=args.served_version,
        max_running=served.max_running,
        max_total_tokens=served.max_total_tokens,
        stream_interval=served.stream_interval,
        post=post,
        on_death=died,
    )
    lower_to(COMPUTE_NICE)  # before the model's thread starts: threads inherit it
    server.scheduler.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    app, log = server.app(), http_log()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, logger=log)
    await runner.setup()
    listener = Listener(runner)
    server.admitted = listener.admit
    port = await listener.open(sock=bound, backlog=1024)
    if args.port_file is not None:
        _write_port(args.port_file, port)
    print(
        f"embedded engine: serving {args.model_path} at http://{args.host}:{port} with {args.threads} thread(s)",
        flush=True,
    )
    gc.collect()
    gc.enable()
    gc.freeze()  # the model and the libraries live as long as the process: keep them out of every collection

    await stop.wait()
    server.stop_accepting()
    await loop.run_in_executor(None, server.scheduler.close, SHUTDOWN_S)
    await listener.close()
    await runner.cleanup()
    if deaths:
        print(f"embedded engine: model thread died: {type(deaths[0]).__name__}: {deaths[0]}", file=sys.stderr)
    return 1 if deaths else 0


def _default_total_tokens(bytes_per_token: int) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(DEFAULT_TOTAL_TOKENS, memory // 8 // bytes_per_token))


def _write_port(path: Path, port: int) -> None:
    """Whole or not at all: a reader never sees half a number."""
    part = path.with_name(path.name + ".part")
    part.write_text(f"{port}\n")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
