"""What must be true before any process starts: model directory, place on disk, bus, knobs, identity, restored state."""

from __future__ import annotations

import hashlib
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.child import PYTHON, free_port
from actors.runtime.faultpoints import fault_point
from actors.runtime.holding import has_ended, me, take_name
from actors.runtime.host import SHARED, processes_name
from actors.runtime.in_memory import let_go, named
from actors.runtime.prompts import Tokenizer, load_prompts
from actors.runtime.run import Refused
from actors.trainer.checkpoint import (
    BusState,
    acknowledged,
    begin_anew,
    fingerprint_of,
    go_back,
    holds_nothing,
    read_bus_state,
    restore_bus,
)
from bus import Bus, Commit
from bus.errors import KnobRejected, NameTaken
from bus.identity import Identity, read_identity, write_identity
from bus.knobs.live import leaves_plans, pending, publish_initial, read_history, values_at
from bus.messages.control import Kind, KnobPatch
from bus.private import kept_secret, private_directory
from bus.streams.hold import Who
from bus.streams.redis import LIFE
from miles_async import __version__
from miles_async.launcher.began import keep_began
from miles_async.launcher.engines import generation_spec
from miles_async.launcher.place import Place
from miles_async.launcher.plan import training_data
from miles_async.launcher.resume import (
    DATA,
    changed_since_last_start,
    is_over,
    keep_settings,
    move_tracker,
    other_data,
    resumes_from,
)
from miles_async.launcher.templates import stop_tokens
from miles_async.settings.catalog import kinds
from miles_async.settings.errors import SettingsError
from miles_async.settings.live import check_patch, initial_values, whole
from miles_async.settings.rules import check_rules
from miles_async.settings.run import RunSettings
from miles_async.settings.second_models import critic_dir, reference_dir, start_dir, teacher_dir

FILES_BESIDE_REQUESTS = 192  # libraries, logs, connections to the bus, pipes; seen: 61 in a trainer


def open_files_needed(settings: RunSettings) -> int:
    """Files that one process of the run may have open at once."""
    return FILES_BESIDE_REQUESTS + max(settings.sglang.sglang_server_concurrency, settings.sglang.sglang_concurrency_max or 0)


def check_host(settings: RunSettings) -> None:
    """Refuse a host on which the run could neither start nor end: too few open files, a folder that cannot be written, no Ray."""
    need = open_files_needed(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise SettingsError(
            f"a process may have {hard} files open here, and one of this run needs up to {need} (a connection per request)",
            remedy=f"Raise the limit first: ulimit -n {max(4096, need)}, or LimitNOFILE= of its service.",
        )
    if soft < need:  # what is started here inherits it
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    run_dir = settings.run_dir
    try:
        there = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
        with tempfile.TemporaryFile(dir=there) as probe:  # nothing is made for a start that is refused after this
            probe.write(b"\0")
    except OSError as error:
        why = f"cannot write to {run_dir.absolute()}: {(error.strerror or str(error)).lower()}"
        remedy = "Free space there, make it writable for this user, or choose another --runs-dir."
        raise settings.flat.refusal("runs_dir", why, remedy) from None
    import_module(settings.flat.launcher_kind.module).check_start(settings)


MODEL_S = 3600.0  # to make a builtin model: half a minute, or some on a busy host
ENGINE_TOKEN = "MILES_ASYNC_ENGINE_TOKEN"  # variable with the key of engines that are not ours


def model_dir(settings: RunSettings, run_dir: Path) -> Path:
    """The checkpoint directory; a builtin model is made once per seed and kept beside the runs. In a process of its own:
    torch would stay in this one as long as the run lasts, with 300 MB."""
    builtin = settings.model.builtin_name
    if builtin is None:
        return Path(settings.model.hf_checkpoint).resolve()
    directory, seed = run_dir.parent / ".models" / f"{builtin}-seed{settings.launch.seed}", str(settings.launch.seed)
    if not (directory / "model.safetensors").exists():
        if settings.launch.console != "none":
            print(f"making the model {settings.model.hf_checkpoint}, once; this takes half a minute or more", flush=True)
        make = [*PYTHON, "miles_async.quickstart.model", str(directory), "--task", builtin, "--seed", seed]
        try:
            subprocess.run(make, capture_output=True, text=True, check=True, timeout=MODEL_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = str(error.stderr or error).strip().splitlines()[-1]
            raise SettingsError(said, field="hf_checkpoint", value=settings.model.hf_checkpoint) from None
    return directory.resolve()


def weights_dir(run_dir: Path, model: Path) -> tuple[Path, str]:
    """Where versions of the weights are published, and a note when that is not shared memory though the host has it: two
    versions, in float32, lie there at once, and containers often have little."""
    shared = shared_memory(run_dir)
    need = 2 * 2 * sum(f.stat().st_size for f in model.glob("*.safetensors"))
    free = shutil.disk_usage(SHARED).free if shared != run_dir / "weights" else need
    if free >= need or shared.exists():
        return shared, ""
    text = f"/dev/shm has {free / 1e9:.1f} GB free and two versions of the weights may need {need / 1e9:.1f} GB: they are "
    text += f"published in {run_dir / 'weights'}, which is slower (docker run --shm-size= gives more)"
    return run_dir / "weights", text


def free_weights(directory: Path) -> None:
    """Published versions leave memory, and the run's folder there with them; one that holds more stays."""
    shutil.rmtree(directory, ignore_errors=True)
    let_go(directory.parent)


def shared_memory(run_dir: Path) -> Path:
    """Directory for published weights: shared memory where the host has it, else the run directory."""
    digest = hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=6).hexdigest()
    if SHARED.is_dir() and os.access(SHARED, os.W_OK):
        return named(digest) / "weights"
    return run_dir / "weights"


def place_of(settings: RunSettings) -> Place:
    """Resolve directories and derived facts; makes the builtin model if need be."""
    run_dir = settings.run_dir
    private_directory(run_dir)
    directory = model_dir(settings, run_dir)
    weights, note = weights_dir(run_dir, directory)
    if note:
        print(f"note: {note}", file=sys.stderr)
    for note in other_data(settings, run_dir):
        print(f"note: {note}", file=sys.stderr)
    identity = {name: getattr(settings.rollout, name) for name in DATA}
    if not identity["data_source_path"]:
        del identity["data_source_path"]
    return Place(
        run_dir=str(run_dir.resolve()),
        model_dir=str(directory),
        reference_dir=reference_dir(settings),
        start_dir=start_dir(settings),
        critic_dir=critic_dir(settings),
        teacher_dir=teacher_dir(settings, directory),
        weights_dir=str(weights),
        blob_dir=str((run_dir / "blobs").resolve()),
        stop_token_ids=stop_tokens(settings, directory),
        num_rollout=num_rollout(settings, directory),
        fingerprint=fingerprint_of(identity),
        engine_token=engine_token(run_dir),
        **router_of(settings, run_dir),
    )


def engine_token(run_dir: Path) -> str:
    """What the engines and the router of a run ask of their callers: the user's (for engines of his own), or one made once per run
    and kept, because engines outlive a launcher."""
    given = os.environ.get(ENGINE_TOKEN)
    # Hexadecimal: none that looks like a flag.
    return given or kept_secret(run_dir / "engine.token", lambda: secrets.token_hex(32))


def router_of(settings: RunSettings, run_dir: Path) -> dict[str, Any]:
    """Address of the router. Ours keeps its port in every launch of a run: workers that survived a launcher know it."""
    s = settings.sglang
    if not s.use_router:
        return {}
    if s.sglang_router_ip is not None:
        return {"router_url": f"http://{s.sglang_router_ip}:{s.sglang_router_port}"}
    file = run_dir / "router.port"
    try:
        port = int(file.read_text())
    except (OSError, ValueError):
        port = free_port(successors=1)
        file.write_text(f"{port}\n")
    return {"router_url": f"http://127.0.0.1:{port}", "router_port": port}


def num_rollout(settings: RunSettings, directory: Path) -> int:
    """Steps of the run: given, or epochs times prompts over batch size."""
    r = settings.rollout
    if r.num_rollout is not None:
        return int(r.num_rollout)
    prompts = load_prompts(training_data(settings, str(directory), stop_tokens(settings, directory))).prompts
    steps = int(r.num_epoch or 1) * len(prompts) // r.rollout_batch_size
    if steps < 1:
        why = f"{len(prompts)} prompts make no batch of {r.rollout_batch_size}"
        raise settings.flat.refusal("num_epoch", why, "Lower --rollout-batch-size or raise --num-epoch.")
    return steps


def token_counter(settings: RunSettings, directory: Path) -> Callable[[Any, Sequence[Any] | None], int]:
    """Tokens of one prompt value with its tools, for the length check. Refused as a SettingsError."""
    try:
        tokenizer = Tokenizer.of(training_data(settings, str(directory)))
    except Refused as error:
        named = ("apply_chat_template", True) if settings.rollout.apply_chat_template else ("hf_checkpoint", str(directory))
        raise SettingsError(str(error), field=named[0], value=named[1]) from None
    return lambda prompt, tools: len(tokenizer.encode(prompt, tools)[1])


async def prepare_bus(bus: Bus, settings: RunSettings, place: Place) -> list[str]:
    """Identity, streams, knobs, and what a checkpoint keeps of a bus that is gone. Returns notes for the operator.

    A live value that was tuned stays, unless the operator has given the setting another value since the last start.
    """
    notes: list[str] = []
    run_dir = Path(place.run_dir)
    saved = await acknowledged(bus)
    state: BusState | None = None
    if (begins := resumes_from(settings)) is not None:
        state = read_bus_state(*begins, fingerprint=place.fingerprint)
    await claim_identity(bus, settings, place)
    notes += move_tracker(settings)  # after all that may refuse this start: the next one would go back with it
    if state is not None and begins is not None and (why := await go_back(bus, begins[0], state, saved=saved)):
        notes.append(why)
        await claim_identity(bus, settings, place)
    if settings.ckpt.no_save and await is_over(bus, settings.launch.heartbeat_s):
        await begin_anew(bus)
        notes.append("what the run had trained is gone, since it keeps no checkpoints (--no-save): it begins again at step 0")
        await claim_identity(bus, settings, place)
    await bus.make_readers()
    values, live = initial_values(settings), live_kinds()
    wanted = {name: now for name, (_, now) in changed_since_last_start(settings, run_dir).items() if name in live}
    if state is not None and await holds_nothing(bus):
        # Knobs first: killed in between, the next start still finds the bus empty and does both again.
        kept = {name: value for name, value in state.knobs.items() if name in live}
        check_kept(values | kept | wanted)
        await publish_initial(bus, values | kept, live, epoch=state.knob_epoch)
        fault_point("launcher", "knobs_restored")
        await restore_bus(bus, state)
        fault_point("launcher", "restored")
        notes.append(
            f"the bus held nothing of this run: restored from checkpoint {state.step}, {len(state.open_groups)} groups are "
            "issued again"
        )
    if history := await read_history(bus):
        held = dict(values_at(history, history[-1].epoch).values)
        then = values | {name: held[name] for name in live if name in held} | wanted
        check_kept(then)
        check_plans(then, pending(history))
        for name in (n for n, value in wanted.items() if held.get(n, value) != value):
            notes.append(f"knob changed since the last start: {name} was {held[name]!r} and is {wanted[name]!r}")
    differences = await publish_initial(bus, values, live, changed=wanted.keys())
    notes += [f"knob kept from the run: {text}" for text in differences]
    keep_settings(settings, run_dir)
    keep_began(settings)
    return notes


def live_kinds() -> dict[str, Kind]:
    """What the values of live settings must be, as the bus says it to actors."""
    return {name: msgspec.convert(kind, Kind) for name, kind in kinds().items()}


def check_kept(values: Mapping[str, Any]) -> None:
    """SettingsError when live values that a run keeps do not go with the settings that it is started with."""
    try:
        check_rules(whole(values))
    except SettingsError as error:
        first = str(error).splitlines()[0]
        why = f"the run keeps live values that do not go with its settings now: {first}"
        remedy = "Start it with the settings it had, and change the live ones with miles-async tune."
        raise SettingsError(why, remedy=remedy) from None


def check_plans(values: Mapping[str, Any], plans: Sequence[KnobPatch]) -> None:
    """SettingsError when a planned patch could not hold any more. Who has not started the run yet cannot cancel the plan."""
    try:
        leaves_plans(values, plans, check_patch)
    except KnobRejected as error:
        why = f"the run keeps a plan that does not go with what changed since its last start: {error.__cause__}"
        remedy = "Start it with the settings it had, cancel the plan (miles-async tune --cancel), then change them."
        raise SettingsError(why, remedy=remedy) from None


async def claim_identity(bus: Bus, settings: RunSettings, place: Place) -> None:
    """Write what this run is, or refuse a bus that holds another run of the same name. From then on `bus`, and what is made
    from its settings, goes on with no server that comes back without this."""
    known = await read_identity(bus)
    if known is not None:
        check_same(settings, place, known.fingerprint, known.run_dir)
    bus.expect("")  # a run that was gone back or begun anew has no life until this gives it one
    await be_the_launcher(bus, settings, place)
    life = await bus.state(LIFE) or secrets.token_hex(8)
    await bus.commit(Commit(state={LIFE: life}))
    bus.expect(life)
    identity = Identity(
        run=settings.launch.name,
        fingerprint=place.fingerprint,
        worker=msgspec.to_builtins(generation_spec(settings, place)),
        bus=msgspec.to_builtins(msgspec.structs.replace(bus.config, url="")),
        run_seed=settings.rollout.rollout_seed,
        heartbeat_s=settings.launch.heartbeat_s,
        drain_timeout_s=settings.launch.drain_timeout_s,
        loop_deadline_s=settings.launch.loop_deadline_s,
        run_dir=place.run_dir,
        release=__version__,
    )
    await write_identity(bus, identity)


async def be_the_launcher(bus: Bus, settings: RunSettings, place: Place) -> None:
    """Have the name of the run's launcher; SettingsError when another keeps a run of this name. In one folder a lock keeps those of
    one host apart; of other folders and hosts only the bus tells. One that died elsewhere is silent soon."""

    def gone(who: Who) -> bool:
        return has_ended(who) or (who.processes == processes_name() and who.folder == place.run_dir)

    try:
        await take_name(bus, "launcher", settings.launch.heartbeat_s, who=me(place.run_dir), gone=gone)
    except NameTaken:
        other = await bus.names.holder_of("launcher")
        where = f"{other.who} has a run of this name on this Redis, in {other.who.folder}" if other else "it has just ended"
        raise SettingsError(
            f"another launcher keeps it: {where}; it is heard",
            field="name",
            value=settings.launch.name,
            remedy="Choose another --name, or stop that one (miles-async stop). Nothing was changed.",
        ) from None


def check_same(settings: RunSettings, place: Place, fingerprint: str, run_dir: str) -> None:
    """SettingsError when what is known of a run is of other data or group settings than these."""
    if fingerprint not in ("", place.fingerprint):
        why = f"there is a run of this name with other data or group settings, begun in {run_dir}"
        remedy = "Choose another --name, or rerun with the settings it began with. Nothing was changed."
        raise settings.flat.refusal("name", why, remedy)
