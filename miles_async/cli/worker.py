"""Add one generation worker to a running run, from any machine that reaches its bus. Ctrl-C drains it: what it holds is
parked and continues elsewhere."""

import argparse
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.cli.options import add_run_options, chosen_run

if TYPE_CHECKING:
    from actors.runtime.child import Child
    from actors.runtime.context import ActorSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `worker`."""
    add_run_options(parser)
    parser.add_argument("--name", default=None, help="Name of this worker. Default: worker-<host>-<pid>.")
    parser.add_argument(
        "--engine-url", default="", help="Base URL of a running SGLang server. Default: start one here."
    )
    parser.add_argument("--model-path", default="", help="Model directory on this host. Default: the run's own path.")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads of the embedded engine. Default: the run's."
    )


def run(args: argparse.Namespace) -> int:
    """Become the worker, in this process: a second interpreter would only delay its first sample."""
    import gc

    from actors.runtime.loop import run_loop

    gc.disable()  # until all is loaded
    return run_loop(_join(args))


async def _join(args: argparse.Namespace) -> int:
    """Waits for the run's identity, then runs the room. An engine loads its libraries meanwhile: most of a boot."""
    from actors.runtime.child import Child

    spare = Child()
    if not args.engine_url:
        await spare.start_spare((sys.executable, "-m", "actors.generation.embedded", "--spare"))
    try:
        spec = await _spec(args)
        if spec.room.get("engine") != "embedded":
            await spare.stop()
        return await _become(spec, spare)
    finally:
        await spare.stop()


async def _spec(args: argparse.Namespace) -> "ActorSpec":
    """What the run tells its workers, changed by the flags."""
    from actors.runtime.context import ActorSpec
    from bus import Bus, BusConfig
    from bus.errors import BusRefused
    from miles_async.launcher.identity import bus_of, read_identity

    ref = chosen_run(args)
    run_name = ref.run or await only_run(ref.bus_url)
    async with Bus(BusConfig(url=ref.bus_url, run=run_name, deadline_s=5.0)) as bus:
        known = await read_identity(bus)
    room = dict(known.worker)
    if args.engine_url:
        room |= {"engine": "external", "engine_url": args.engine_url}
    if args.model_path:
        room["model_path"] = args.model_path
    if args.threads:
        room["threads"] = args.threads
    if not room.get("engine_url") and not Path(str(room["model_path"])).exists():
        raise BusRefused(f"model directory {room['model_path']} is not on this host. Give --model-path.")
    return ActorSpec(
        name=args.name or f"worker-{socket.gethostname()}-{os.getpid()}",
        role="generation",
        bus=bus_of(known, ref.bus_url),
        run_seed=known.run_seed,
        heartbeat_s=known.heartbeat_s,
        drain_timeout_s=known.drain_timeout_s,
        run_dir=known.run_dir if Path(known.run_dir).exists() else tempfile.mkdtemp(prefix="miles_async-"),
        room=room,
    )


async def _become(spec: "ActorSpec", spare: "Child") -> int:
    import gc
    from functools import partial

    import msgspec

    from actors.generation.actor import GenerationSpec
    from actors.generation.actor import run as room
    from actors.runtime.run import log_to_stderr, run_actor
    from bus.errors import BusRefused

    try:
        told = msgspec.convert(spec.room, GenerationSpec)
    except msgspec.ValidationError as error:
        raise BusRefused(
            f"run {spec.bus.run} tells its workers what this release does not understand ({error}). Install the run's release "
            "here."
        ) from None
    file = Path(spec.run_dir) / "actors" / f"{spec.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(json.dumps(msgspec.to_builtins(spec), indent=2).encode())
    file.chmod(0o600)
    print(f"worker {spec.name} joins run {spec.bus.run}; Ctrl-C drains it", flush=True)
    os.environ.update(OMP_NUM_THREADS=str(spec.room.get("threads") or 1), TOKENIZERS_PARALLELISM="false")
    log_to_stderr()
    gc.enable()
    return await run_actor(spec, told, partial(room, spare=spare))


async def only_run(url: str) -> str:
    """The one run on a server; BusRefused when there is none or a choice."""
    from bus.errors import BusRefused
    from bus.server.checks import connect

    client = connect(url)
    try:
        keys = [key async for key in client.scan_iter(match="ma:*:identity")]
    finally:
        await client.aclose()
    names = sorted((k.decode() if isinstance(k, bytes) else k)[4:].partition("}")[0] for k in keys)
    if len(names) != 1:
        raise BusRefused(f"{url} holds {len(names)} runs ({', '.join(names) or 'none'}). Name one with --run.")
    return names[0]
