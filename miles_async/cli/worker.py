"""Add one rollout worker to a running run, from any machine that reaches its bus. Ctrl-C drains it: what it holds is
parked and continues elsewhere. A worker that lost the bus joins again once it answers, and one whose run was started again with
other settings for workers takes those: no launcher watches over it."""

import argparse
import json
import os
import re
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async import __version__
from miles_async.cli.options import add_run_options, chosen_run

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # it names files and a consumer on the bus
OTHERS = ("launcher", "watchdog", "console")  # who speaks on the bus and is no room

if TYPE_CHECKING:
    from actors.runtime.child import Child
    from actors.runtime.context import ActorSpec, Context
    from miles_async.cli.staying import Stay

REJOIN_S = 600.0  # how long a bus that was lost is tried again
ANEW = -1  # the run tells its workers something else by now


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `worker`."""
    add_run_options(parser)
    parser.add_argument("--name", default=None, help="Name of this worker. Default: worker-<host>-<pid>.")
    parser.add_argument("--engine-url", default="", help="Base URL of a running SGLang server. Default: start one here.")
    parser.add_argument("--model-path", default="", help="Model directory on this host. Default: the run's own path.")
    parser.add_argument(
        "--custom-generate-function-path", default="", help="The run's rollout program, where it has one; found on this host."
    )
    parser.add_argument("--custom-agent-function-path", default="", help="The run's agent, where it has one; found on this host.")
    parser.add_argument(
        "--weights-address",
        default="",
        metavar="HOST[:PORT]",
        help="Where the next host fetches weights from this one. Default: this host's address on the bus, any port.",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the embedded engine. Default: the run's.")


def run(args: argparse.Namespace) -> int:
    """Become the worker, in this process: a second interpreter would only delay its first sample."""
    import gc

    from actors.runtime.loop import run_loop
    from actors.runtime.run import EXIT_BUS_BACK, EXIT_BUS_GONE, EXIT_DONE, EXIT_DRAINED
    from bus.errors import BusUnreachable
    from miles_async.settings.errors import SettingsError

    gc.disable()  # until all is loaded
    code = run_loop(_join(args))
    lost_at = time.monotonic()
    while code in (EXIT_BUS_GONE, EXIT_BUS_BACK, ANEW) and time.monotonic() - lost_at < REJOIN_S:
        if code != ANEW:
            print(f"the bus is away; this worker tries for {REJOIN_S:g} s to join again, Ctrl-C ends it", file=sys.stderr)
        time.sleep(1.0)
        try:
            code = run_loop(_join(args))
        except (BusUnreachable, SettingsError):  # it is away, or came back empty and is not restored yet
            continue
        lost_at = time.monotonic()
    return 0 if code in (EXIT_DONE, EXIT_DRAINED) else code


async def _join(args: argparse.Namespace) -> int:
    """Waits for the run's identity, then runs the room. An engine loads its libraries meanwhile: most of a boot."""
    from actors.generation.engines.records import DEFAULT
    from actors.runtime.child import PYTHON, Child

    spare, likely = Child(), DEFAULT
    if not args.engine_url:
        await spare.start_spare((*PYTHON, *likely.spare))
    try:
        spec, stay = await _spec(args)
        if spec.room.get("engine") != likely.name:
            await spare.stop()
        return await _become(spec, stay, spare)
    finally:
        await spare.stop()


async def _spec(args: argparse.Namespace) -> tuple["ActorSpec", "Stay"]:
    """What the run tells its workers, changed by the flags; and whether that holds. From then on the name is ours."""
    from msgspec import structs

    from actors.generation.engines.records import ATTACHED
    from actors.runtime.context import STOP_WISH, ActorSpec
    from actors.runtime.host import processes_name
    from bus import Bus, BusConfig
    from bus.errors import BusRefused, BusUnreachable
    from bus.identity import are_alike, read_identity
    from bus.private import is_private
    from bus.topology import ROLES
    from miles_async.cli.staying import Stay, take_worker_name
    from miles_async.console.attach import run_named

    ref = chosen_run(args)
    run_name = await run_named(ref)
    async with Bus(BusConfig(url=ref.bus_url, run=run_name, deadline_s=5.0)) as bus:
        known, launcher = await read_identity(bus), (await bus.vitals()).get("launcher")
        stopped = await bus.state(STOP_WISH)
    if known is None:
        raise BusUnreachable(f"run {run_name!r} at {bus.link.shown} does not say what it is. Start it with `miles-async train`.")
    if not are_alike(known.release, __version__):
        raise BusRefused(
            f"run {run_name!r} is of release {known.release}, this worker of {__version__}: they may mean different things by the "
            f"same message. Install miles_async {known.release} here."
        )
    if stopped:
        raise BusRefused(f"run {run_name!r} has finished or was stopped. Start it with `miles-async train`, then its workers.")
    here = re.sub("[^A-Za-z0-9_.-]", "-", socket.gethostname())[:40]
    name = f"worker-{here}-{os.getpid()}" if args.name is None else args.name
    if not _NAME.fullmatch(name) or name.startswith(("generation-", "lent-")) or name in (*ROLES, *OTHERS):
        raise BusRefused(
            f"worker name {name!r} refused: it must be 1 to 64 letters, digits, '_', '.', '-', and not the name of one of the "
            "run's own actors. Choose another --name."
        )
    room = dict(known.worker) | {"serves": True, "serve_at": args.weights_address}
    if args.engine_url:
        room |= {"engine": ATTACHED.name, "engine_url": args.engine_url}
        room["token"] = os.environ.get("MILES_ASYNC_ENGINE_TOKEN") or room.get("token", "")
    if launcher is None or launcher.processes != processes_name():
        room["router_url"] = ""  # it and the engines that it knows are at addresses of one host
        if not room.get("takes_samples", True):
            raise BusRefused(
                f"run {run_name!r} has a rollout function, which reaches engines through a router on its own host: a worker "
                "elsewhere would serve nobody. Start it on that host."
            )
    agent = str((room.get("agent") or {}).get("function") or "")
    for flag, path, given in (
        ("--custom-generate-function-path", str(room.get("program") or ""), args.custom_generate_function_path),
        ("--custom-agent-function-path", agent, args.custom_agent_function_path),
    ):
        if path != given:  # code is named where it runs, never by the bus
            remedy = f"Give {flag} {path}" if path else f"Leave {flag} out"
            raise BusRefused(f"run {run_name!r} makes its samples by {path or 'what ships'}. {remedy}.")
    if args.model_path:
        room["model_path"] = args.model_path
    if args.threads:
        room["threads"] = args.threads
    if not room.get("engine_url") and not Path(str(room["model_path"])).exists():
        raise BusRefused(f"model directory {room['model_path']} is not on this host. Give --model-path.")
    async with Bus(BusConfig(url=ref.bus_url, run=run_name, deadline_s=5.0)) as bus:
        await take_worker_name(bus, name, known.heartbeat_s)
    spec = ActorSpec(
        name=name,
        role="generation",
        # Nobody starts it again at once, and a boot takes long: it waits for the bus with its engine.
        bus=structs.replace(known.bus_at(ref.bus_url), deadline_s=max(REJOIN_S, float(known.bus.get("deadline_s", 0)))),
        run_seed=known.run_seed,
        heartbeat_s=known.heartbeat_s,
        drain_timeout_s=known.drain_timeout_s,
        loop_deadline_s=known.loop_deadline_s,
        release=__version__,
        run_dir=known.run_dir if is_private(Path(known.run_dir)) else tempfile.mkdtemp(prefix="miles_async-"),
        room=room,
    )
    return spec, Stay(known)


async def _become(spec: "ActorSpec", stay: "Stay", spare: "Child") -> int:
    import gc

    import msgspec

    from actors.generation.actor import run as room
    from actors.generation.spec import GenerationSpec
    from actors.runtime.deadline import beside
    from actors.runtime.run import EXIT_DONE, EXIT_NAME_TAKEN, log_to_stderr, run_process
    from bus.errors import BusRefused

    try:
        told = msgspec.convert(spec.room, GenerationSpec)
    except msgspec.ValidationError as error:
        raise BusRefused(
            f"run {spec.bus.run} tells its workers what this release does not understand ({error}). Install the run's release here."
        ) from None
    file = Path(spec.run_dir) / "actors" / f"{spec.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(json.dumps(msgspec.to_builtins(spec), indent=2).encode())
    file.chmod(0o600)
    print(f"worker {spec.name} joins run {spec.bus.run}; Ctrl-C drains it", flush=True)
    os.environ.update(OMP_NUM_THREADS=str(spec.room.get("threads") or 1), TOKENIZERS_PARALLELISM="false")
    log_to_stderr()
    gc.enable()

    async def body(context: "Context", told: GenerationSpec) -> None:
        async with beside(stay.watch(context)):
            await room(context, told, spare)

    code = await run_process(spec, told, body)
    if code == EXIT_NAME_TAKEN:
        raise BusRefused(
            f"worker {spec.name} has ended: another process took its name while this one was not heard. Give each worker a --name "
            "of its own, or none."
        )
    if code == EXIT_DONE and stay.changed:
        print(f"worker {spec.name} joins anew: {stay.why()}", flush=True)
        return ANEW
    return code
