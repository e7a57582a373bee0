"""Settings to specs of the workers and the router before them (pure), and of the ways in which weights and turns on shared
GPUs reach them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from actors.generation.engines.records import ATTACHED
from actors.generation.spec import AgentSpec, GenerationSpec
from actors.router.actor import RouterSpec
from actors.runtime.child import ArgValue
from actors.runtime.lora import AdapterShape
from actors.runtime.transports.records import DISK
from actors.trainer.lora.peft import last_names
from actors.trainer.spec import CourierSpec, TurnSpec
from miles_async.launcher.place import Place
from miles_async.settings.colocate import engine_args, gives_back
from miles_async.settings.custom_config import custom_config
from miles_async.settings.flat import Flat
from miles_async.settings.groups.rollout import RolloutSettings
from miles_async.settings.run import RunSettings
from miles_async.settings.slots import AUTO_MAX_RUNNING

REPEATABLE: dict[str, ArgValue] = {"enable-deterministic-inference": True}
"""What deterministic_mode asks of engines."""
EXACT: dict[str, ArgValue] = {**REPEATABLE, "attention-backend": "fa3"}
"""What true_on_policy_mode asks of engines."""
EXPORTS = (0,)
"""GPUs whose memory holds the buckets of ipc: that of the trainer's first rank."""


def generation_spec(
    settings: RunSettings, place: Place, *, engine_url: str = "", gpus: Sequence[int] = (), shares: bool = False
) -> GenerationSpec:
    """One worker's settings; also what an elastic worker gets (all GPUs of its host). `shares`: the trainer's GPUs, in turns or
    when it lends them."""
    s = settings.sglang
    lent = shares and s.lend_trainer_gpus
    return GenerationSpec(
        model_path=place.model_dir,
        engine=ATTACHED.name if engine_url and not settings.flat.engine_kind.attached else s.engine,
        engine_url=engine_url,
        threads=settings.perf.engine_threads,
        max_running=s.sglang_server_concurrency or s.sglang_concurrency_max or AUTO_MAX_RUNNING,
        request_deadline_s=s.sglang_request_deadline_s,
        token_deadline_s=s.engine_token_deadline_s,
        boot_deadline_s=s.engine_boot_deadline_s,
        control_deadline_s=s.update_weight_deadline_s,
        hold_s=s.update_weight_deadline_s,
        mask_offpolicy=settings.rollout.mask_offpolicy_in_partial_rollout,
        context_length=settings.rollout.rollout_max_context_len or 0,
        router_url="" if lent else place.router_url,  # which would send requests to one that is leaving
        token=str(s.server_args.get("api-key") or place.engine_token),
        weights_token=place.weights_token,
        gpus=tuple(gpus),
        maps=EXPORTS if gpus and settings.flat.transport_kind.maps_gpu else (),
        transport=s.update_weight_transport,
        tp_size=s.rollout_num_gpus_per_engine,
        server_command=s.sglang_server_command,
        server_args=(engine_args(settings.flat) if shares else {})
        | (REPEATABLE if settings.launch.deterministic_mode else {})
        | (EXACT if settings.model.true_on_policy_mode else {})
        | s.server_args
        | ({"mem-fraction-static": s.lend_mem_fraction} if lent else {}),
        seed=settings.rollout.rollout_seed,
        draws=s.sglang_fused_sampling,
        check_equal=s.check_weight_update_equal,
        gives_back=gives_back(settings.flat) if shares else (),
        lent_s=s.lend_return_s if lent else 0.0,
        serves=settings.flat.launcher_kind.spreads,  # then others of this run are on other hosts
        nodes=s.sglang_nnodes,
        program=settings.rollout.custom_generate_function_path or "",
        program_deadline_s=settings.rollout.rollout_timeout_s,
        program_values=custom_config(settings.rollout.custom_config_path),
        takes_samples=not settings.flat.own_rollout_function,  # generation-0 does
        agent=_agent(settings.rollout),
        environments_s=settings.rollout.environment_timeout_s if settings.rollout.environment_path else 0.0,
        adapters=adapters_of(settings.flat),
        routed=settings.grpo.use_rollout_routing_replay,
    )


def adapters_of(s: Flat) -> AdapterShape | None:
    """What engines are told of a run whose versions are adapters."""
    if not s.lora_rank or s.lora_publish != "adapters":
        return None
    return AdapterShape(s.lora_rank, s.lora_alpha, last_names(s.target_modules or ""))


def _agent(r: RolloutSettings) -> AgentSpec | None:
    if not r.tools and not r.custom_agent_function_path:
        return None
    return AgentSpec(
        tools=r.tools,
        corpus=r.tool_corpus or "",
        max_turns=r.max_turns,
        parser=r.generate_tool_call_parser,
        function=r.custom_agent_function_path or "",
        idle_s=r.agent_idle_s,
        template_path=r.chat_template_path or "",
        template_kwargs=r.apply_chat_template_kwargs or "",
        allow_weak_sandbox=r.allow_weak_sandbox,
    )


def engine_specs(settings: RunSettings, place: Place) -> list[tuple[str, str, Any]]:
    """The workers, each with its engine and GPUs; before them the router, if it is ours."""
    s = settings.sglang
    rooms: list[tuple[str, str, Any]] = []
    if place.router_port:
        port = place.router_port
        router = RouterSpec(port=port, prometheus_port=port + 1, args=s.router_args, token=place.engine_token)
        rooms.append(("router", "router", router))
    each, on_gpus = s.rollout_num_gpus_per_engine, settings.flat.engine_kind.needs_gpu
    ray = settings.flat.launcher_kind.spreads
    told = on_gpus and ((s.colocate and s.sglang_nnodes == 1) or not ray)  # else it uses those that Ray gives it
    for i, url in enumerate(s.rollout_external_engine_addrs or [""] * settings.flat.most_workers):
        gpus = s.rollout_gpu_ids[i * each : (i + 1) * each] if told else ()
        spec = generation_spec(settings, place, engine_url=_url(url), gpus=gpus, shares=s.colocate)
        if i == 0:
            spec = replace(spec, rollout_function=settings.flat.own_rollout_function, takes_samples=True)
        rooms.append((f"generation-{i}", "generation", spec))
    for i, name in enumerate(settings.flat.lent_workers):
        gpus = tuple(range(i * each, (i + 1) * each)) if on_gpus else ()
        rooms.append((name, "generation", generation_spec(settings, place, gpus=gpus, shares=True)))
    return rooms


def courier_spec(settings: RunSettings, place: Place) -> CourierSpec:
    """How versions travel to the engines. Weights that never change, or that no engine takes, stay where they are."""
    s = settings.sglang
    changing = not (settings.launch.debug_rollout_only or settings.ckpt.load_debug_rollout_data)
    return CourierSpec(
        transport=s.update_weight_transport if changing else DISK.name,
        buffer_bytes=s.update_weight_buffer_size,
        deadline_s=s.update_weight_deadline_s,
        check_equal=s.check_weight_update_equal,
        copy=s.update_weight_copy,
        verbosity=settings.launch.debug_weight_sync,
        still="" if settings.flat.engine_kind.generates else place.model_dir,
        keep_copy=bool(s.offload_train and gives_back(settings.flat)) or settings.flat.update_weights_interval > 1,
    )


def turn_spec(settings: RunSettings) -> TurnSpec:
    """Whose engines give way to the trainer. An engine that boots is waited for: it cannot give what it is about to take."""
    s = settings.sglang
    names = tuple(f"generation-{i}" for i in range(s.num_generation_workers)) if gives_back(settings.flat) else ()
    return TurnSpec(
        workers=settings.flat.lent_workers or names,
        offload=s.offload_train or s.lend_trainer_gpus,  # where its memory goes then: backend_config
        deadline_s=s.engine_boot_deadline_s + 2 * s.update_weight_deadline_s,
        lends=s.lend_trainer_gpus,
        after_s=s.lend_after_s,
        return_s=s.lend_return_s,
    )


def _url(address: str) -> str:
    return address if not address or "://" in address else f"http://{address}"
