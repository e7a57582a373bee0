"""(pure) Rules of engines and router: GPUs that add up, flags that may be passed on."""

import re
from collections.abc import Iterator

from actors.runtime.transports.records import TRANSPORTS
from miles_async.settings import cluster
from miles_async.settings.catalog import PREFIXES, names
from miles_async.settings.errors import listing, nearest, refusal
from miles_async.settings.flat import Flat
from miles_async.settings.kinds import refused

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9.]+)*")
# Flag -> the setting of ours that decides it.
SERVER_OWNED: dict[str, str] = {
    "model-path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "host": "the launcher: engines listen on this host only",
    "port": "the launcher: a free port is chosen",
    "nccl-port": "the launcher",
    "dist-init-addr": "the launcher",
    "nnodes": "--sglang-nnodes",
    "node-rank": "the launcher",
    "base-gpu-id": "--rollout-gpu-ids",
    "gpu-id-step": "--rollout-gpu-ids",
    "tp-size": "--rollout-num-gpus-per-engine",
    "tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "skip-tokenizer-init": "the launcher: only token ids are exchanged",
    "random-seed": "--seed",
    "weight-version": "the policy version that is served",
    "enable-memory-saver": "--colocate and --offload-rollout",
    "enable-weights-cpu-backup": "--offload-rollout-level",
    "api-key": "the launcher: engines listen on this host only",
    "admin-api-key": "the launcher: engines listen on this host only",
    "tokenizer-worker-num": "the launcher: one keeps version boundaries exact",
}
ROUTER_OWNED: dict[str, str] = {
    "host": "the launcher: --sglang-router-ip names a router of yours",
    "port": "the launcher: --sglang-router-port names a router of yours",
    "prometheus-port": "the launcher: the port after the router's own",
    "worker-urls": "the engines, which register themselves",
    "pd-disaggregation": "the launcher: engines do both prefill and decode",
    "mini-lb": "the launcher: engines do both prefill and decode",
    "prefill": "the launcher: engines do both prefill and decode",
    "decode": "the launcher: engines do both prefill and decode",
    "service-discovery": "the engines, which register themselves",
}


def engines_match_the_gpus(s: Flat) -> None:
    """rollout_num_gpus = engines * GPUs per engine, and as many ids, each once."""
    kind = s.engine_kind
    if not kind.takes_flags:
        for field in ("rollout_num_gpus", "server_args", "sglang_server_command", "sglang_fused_sampling"):
            if s.values[field] and not (field == "rollout_num_gpus" and kind.needs_gpu):
                why = f"it is for SGLang engines, and engine is {s.engine!r}"
                raise refusal(_flag_of(field, s.values[field]), _word_of(s.values[field]), why, _without_sglang(s.values[field]))
    if not kind.needs_gpu:
        return
    wanted = s.num_generation_workers * s.rollout_num_gpus_per_engine
    if s.rollout_num_gpus != wanted:
        raise s.refusal(
            "rollout_num_gpus",
            f"{s.num_generation_workers} engines of rollout_num_gpus_per_engine = {s.rollout_num_gpus_per_engine} take {wanted}",
            "Set a multiple of the GPUs per engine and leave out num_generation_workers.",
        )
    if len(s.rollout_gpu_ids) != wanted:
        why = f"{len(s.rollout_gpu_ids)} ids for {wanted} GPUs"
        raise s.refusal("rollout_gpu_ids", why, "Name each GPU once, or leave it out.")
    if len(set(s.rollout_gpu_ids)) < wanted and s.rollout_num_gpus_per_engine > 1 and not s.colocate:
        raise s.refusal("rollout_gpu_ids", "one engine needs different GPUs", "Name each GPU once.")


def _flag_of(field: str, value: object) -> str:
    """A setting as its user wrote it: of a table that is passed on, its first flag."""
    return f"{PREFIXES[field][0]}{next(iter(value))}" if isinstance(value, dict) else field


def _word_of(value: object) -> object:
    return next(iter(value.values())) if isinstance(value, dict) else value


def _without_sglang(value: object) -> str:
    """What to do with a setting of SGLang's for another engine."""
    remedy = "Set --engine sglang, or leave it out."
    for name in value if isinstance(value, dict) else ():  # perhaps a misspelt setting of ours
        remedy = nearest(f"sglang_{name}".replace("-", "_"), names(), cutoff=0.85) or remedy
    return remedy


def engines_can_do_what_is_asked(s: Flat) -> None:
    """What the engine's record says."""
    kind = s.engine_kind
    if s.pause_generation_mode not in kind.pauses:
        raise s.refusal("pause_generation_mode", f"engine {s.engine} cannot pause so", f"Set it to {listing(kind.pauses)}.")
    if s.transport_kind.asks not in kind.ways and kind.generates:
        can = listing(name for name, way in TRANSPORTS.items() if way.asks in kind.ways)
        raise s.refusal("update_weight_transport", f"engine {s.engine} takes no weights so", f"Set it to {can}.")
    for broken in kind.rules(s):
        raise refused(broken)


def passed_flags_are_not_ours(s: Flat) -> None:
    """What follows from other settings cannot be passed on; names look like flags."""
    for table, owned in (("server_args", SERVER_OWNED), ("router_args", ROUTER_OWNED)):
        for name, value in s.values[table].items():
            flag = f"{PREFIXES[table][0]}{name}"
            if (table, name) == ("server_args", "config"):
                why = "engine groups of Miles (prefill and decode apart, engines of several kinds or models) are not here"
                raise refusal(flag, value, why, "Leave it out: all engines are alike; give their flags as --sglang-NAME.")
            if name in owned:
                raise refusal(flag, value, f"decided by {owned[name]}", "Leave it out.")
            if table == "server_args" and name.startswith("router-"):
                own = name.removeprefix("router-")
                raise refusal(flag, value, "a flag of the router", f"Write --router-{own}.")
            if not NAME.fullmatch(name):
                raise refusal(flag, value, "not the name of a flag", "Write it as the program does.")


def router_settings_agree(s: Flat) -> None:
    if not s.use_router and s.sglang_router_ip is not None:
        why = f"sglang_router_ip = {s.sglang_router_ip!r} is given"
        raise s.refusal("use_router", why, "Leave one of the two out.")
    if s.router_args and (not s.use_router or s.sglang_router_ip is not None):
        why = "no router is started here (use_router is off)"
        if s.use_router:
            why = f"the router at sglang_router_ip = {s.sglang_router_ip} is running already, with its own flags"
        remedy = "Leave it out." if s.use_router else "Leave it out, or add --use-router."
        raise refusal(_flag_of("router_args", s.router_args), _word_of(s.router_args), why, remedy)


def ways_fit_the_transport(s: Flat) -> None:
    way, kind, fraction = s.update_weight_transport, s.transport_kind, s.update_weight_wave_fraction
    for broken in kind.rules(s):
        raise refused(broken)
    if fraction < 1 and not kind.whole:
        why = f"update_weight_transport is {way!r}, which reaches all engines at once"
        raise s.refusal("update_weight_wave_fraction", why, "Leave it out, or set --update-weight-transport disk.")
    if not s.update_weight_copy and not kind.passes:
        why = f"update_weight_transport is {way!r}, which cannot send from the weights themselves"
        raise s.refusal("update_weight_copy", why, "Leave it out, or set --update-weight-transport nccl.")


def engines_are_different(s: Flat) -> None:
    """Two workers on one engine would activate versions under each other's requests."""
    known: dict[str, str] = {}
    for address in s.rollout_external_engine_addrs:
        bare = address.rpartition("://")[2].rstrip("/").replace("localhost:", "127.0.0.1:")
        if bare in known:
            remedy = "Give each engine a port of its own, and each address once."
            raise s.refusal("rollout_external_engine_addrs", f"{known[bare]} and {address} are one engine", remedy)
        known[bare] = address


RULES = (
    engines_are_different,
    ways_fit_the_transport,
    engines_match_the_gpus,
    engines_can_do_what_is_asked,
    passed_flags_are_not_ours,
    router_settings_agree,
    *cluster.RULES,
)


def notes(s: Flat) -> Iterator[str]:
    """What could not be verified here, and what is allowed but surprising."""
    if not s.partial_rollout and s.pause_generation_mode != "abort":
        yield (
            f"partial_rollout is off, but pause_generation_mode {s.pause_generation_mode} interrupts no sample: those under way at "
            "a weight update go on with the new weights; --pause-generation-mode abort generates them anew"
        )
    if s.server_args and s.sglang_server_command:
        yield "names of --sglang-* flags are not verified: sglang_server_command runs another Python"
    among_others = s.use_router or s.sglang_router_ip is not None
    elsewhere = bool(s.sglang_server_command or s.rollout_external_engine_addrs)
    kind = s.engine_kind
    if not kind.exact and s.pause_generation_mode == "in_place" and among_others:
        yield (
            "pause_generation_mode in_place acts like retract behind a router: tokens cannot be counted there at the moment of a "
            "weight update, and a chunk of several could mix two versions"
        )
    elif not kind.exact and s.pause_generation_mode == "in_place" and elsewhere:
        yield (
            "pause_generation_mode in_place cannot count tokens in an SGLang that this run does not start with its own Python: two "
            "chunks of each running sample count as the older version's at a weight update"
        )
    if kind.needs_gpu and len(set(s.rollout_gpu_ids)) < len(s.rollout_gpu_ids):
        yield f"several engines share a GPU (rollout_gpu_ids = {list(s.rollout_gpu_ids)}): give each a part of its memory"
    if s.rollout_num_gpus_per_engine > 1 and "enable-prefill-delayer" in s.server_args:
        yield (
            "--sglang-enable-prefill-delayer with several GPUs per engine can stop it for good: ranks of SGLang 0.5.12 decide by "
            "their own clocks when a wait is over"
        )
    shared = sorted(set(s.rollout_gpu_ids) & set(range(s.actor_num_gpus_per_node)))
    if kind.needs_gpu and shared and not (s.colocate or s.debug_rollout_only):
        yield (
            f"engines share GPUs {shared} with the trainer and both work at once (rollout_gpu_ids = {list(s.rollout_gpu_ids)}): "
            "give each a part of the memory (--sglang-mem-fraction-static), or let them take turns with --colocate"
        )
    yield from kind.notes(s)
