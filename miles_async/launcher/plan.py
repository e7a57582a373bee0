"""Settings to process specs (pure): which actors run, under which names, with which start-up settings."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from actors.environments.actor import EnvironmentsSpec
from actors.evaluator.actor import EvaluatorSpec
from actors.evaluator.sets import EvalSet
from actors.filter.actor import FilterSpec
from actors.partial.actor import PartialSpec
from actors.publisher.actor import PublisherSpec
from actors.recorder.actor import RecorderSpec
from actors.recorder.exporter import ExporterSpec
from actors.recorder.tracker_kinds import TrackerSpec, installed
from actors.reward.spec import RewardSpec
from actors.runtime.context import ActorSpec
from actors.runtime.prompts import DataSpec
from actors.sampler.actor import SamplerSpec
from actors.trainer.backend import BackendConfig, TorchConfig
from actors.trainer.megatron_backend.config import MegatronConfig
from actors.trainer.objective_config import ObjectiveConfig, Proximal, Reduction
from actors.trainer.spec import TrainerSpec
from bus import BusConfig
from miles_async import __version__
from miles_async.launcher.engines import courier_spec, engine_specs, turn_spec
from miles_async.launcher.eval_sets import eval_sets
from miles_async.launcher.place import Place
from miles_async.launcher.resume import here, load_dir, same
from miles_async.settings.addresses import without_credentials
from miles_async.settings.catalog import catalog
from miles_async.settings.custom_config import custom_config
from miles_async.settings.flat import Flat
from miles_async.settings.live import initial_values
from miles_async.settings.run import RunSettings

T = TypeVar("T")
REDUCTIONS: dict[str, Reduction] = {
    "seq-mean-token-mean": "per_sample",
    "token-mean": "per_token",
    "seq-mean-token-sum-norm": "constant",
}


def told(kind: type[T], settings: Flat, **own: Any) -> T:
    """A room's struct: fields that have the name of a setting are that setting, the others are told in `own`. A text that is not
    set is empty in a field that is always text."""
    values = settings.values
    named = {f.name: f.type for f in msgspec.structs.fields(kind) if f.name in values and f.name not in own}  # type: ignore[arg-type]
    return kind(**{name: "" if values[name] is None and of is str else values[name] for name, of in named.items()} | own)


def _proximal(s: Flat) -> Proximal:
    return "rollout" if s.use_rollout_logprobs else "interpolate" if s.interpolate_proximal else "recompute"


def objective_config(settings: RunSettings) -> ObjectiveConfig:
    """The objective's settings from the GRPO group."""
    s = settings.flat
    chosen = s.off_policy_correction
    return told(
        ObjectiveConfig,
        s,
        diagnostics=not s.supervised,
        rewards_normalization=not (s.disable_rewards_normalization or s.supervised),
        grpo_std_normalization=not s.disable_grpo_std_normalization,
        proximal="current" if s.supervised else _proximal(s),
        correction="none" if chosen == "rollout_logprobs" else chosen,
        report_only=s.get_mismatch_metrics,
        tis_batch_normalize=s.tis_batch_normalize and s.use_mis,
        rs_upper_bound=s.rs_upper_bound if s.use_rs else None,
        rs_lower_bound=s.rs_lower_bound if s.use_rs else None,
        reduction=REDUCTIONS[s.loss_agg_mode],
        loss_constant=s.loss_scale_factor or 1.0,
    )


def backend_config(settings: RunSettings, place: Place) -> BackendConfig:
    """The training backend's settings."""
    s = settings.flat
    own: TorchConfig | MegatronConfig = told(TorchConfig, s)
    if s.on_megatron:
        own = told(MegatronConfig, s, megatron={**s.megatron, **({"deterministic_mode": True} if s.deterministic_mode else {})})
    return told(
        BackendConfig,
        s,
        hf_checkpoint=place.start_dir or place.reference_dir or place.model_dir,  # --load without a checkpoint: --ref-load
        ref_load=place.reference_dir or (place.model_dir if place.start_dir else ""),
        published_as=place.model_dir,
        objective=objective_config(settings),
        balance="none" if not s.balance_data else "flops" if s.balance_by_flops else "tokens",
        num_rollout=place.num_rollout,
        lr_warmup_iters=s.lr_warmup_iters or round((s.lr_warmup_fraction or 0.0) * place.num_rollout),
        critic_load=place.critic_dir,
        opd_teacher_load=place.teacher_dir,
        offload_dir=place.run_dir,
        save_debug_train_data=here(s.save_debug_train_data),
        offload_train_target="stay" if s.lend_trainer_gpus and not s.offload_train else s.offload_train_target,
        own=own,
    )


def data_spec(settings: RunSettings, model_dir: str, path: str, **keys: Any) -> DataSpec:
    """How to read one prompt file; `keys` where they are not those of training."""
    longest = settings.rollout.rollout_max_prompt_len or 0
    own = {"path": path, "tokenizer_dir": model_dir, "max_prompt_len": longest, "label_objects": settings.flat.reads_labels}
    return told(DataSpec, settings.flat, **own, **keys)


def training_data(settings: RunSettings, model_dir: str, stop_token_ids: tuple[int, ...] = ()) -> DataSpec:
    """How to read the training prompts. `stop_token_ids`: the first of them ends a given response."""
    r, supervised = settings.rollout, settings.flat.supervised
    longest = r.rollout_max_response_len if supervised else 0
    end = stop_token_ids[0] if stop_token_ids else -1
    return data_spec(settings, model_dir, r.prompt_data, supervised=supervised, max_response_len=longest, end_token=end)


def reward_spec(settings: RunSettings, model_dir: str) -> RewardSpec:
    """How samples are scored."""
    return told(
        RewardSpec,
        settings.flat,
        skip_special_tokens=settings.rollout.rollout_skip_special_tokens,
        max_retries=settings.rollout.reward_max_retries,
        tokenizer_dir=model_dir,
        hook_values=custom_config(settings.rollout.custom_config_path),
        teacher_urls=settings.grpo.opd_teacher_urls if settings.flat.distills else (),
    )


def recorder_spec(settings: RunSettings, place: Place) -> RecorderSpec:
    """What the recorder writes, and who else is told."""
    s, t = settings.flat, settings.trackers
    name = settings.launch.name
    wanted = installed("tensorboard") if t.use_tensorboard is None else t.use_tensorboard
    on = wanted or t.use_wandb or t.use_mlflow or t.use_trackio or bool(t.otel_endpoint)
    config = without_credentials({key: value for key, value in initial_values(settings).items() if value is not None})
    trackers = told(TrackerSpec, s, run=name, run_dir=place.run_dir, config=config, use_tensorboard=wanted) if on else None
    exporter = ExporterSpec(host=t.prometheus_host, port=t.prometheus_port, run=t.prometheus_run_name or name)
    return RecorderSpec(
        tokenizer_dir=place.model_dir,
        print_every=settings.launch.debug_rollout_print_every or 0,
        trackers=trackers,
        exporter=exporter if t.use_prometheus else None,
    )


FIXED_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""What deterministic_mode asks of libraries below torch, unless train_env_vars says otherwise."""


def _variables(settings: RunSettings) -> str:
    given = settings.perf.train_env_vars or ""
    if not settings.launch.deterministic_mode:
        return given
    return json.dumps(FIXED_ORDER | json.loads(given or "{}"))


def room_specs(settings: RunSettings, place: Place, *, evaluating: bool = False) -> list[tuple[str, str, Any]]:
    """(actor name, room, its spec) in the order of start. `evaluating`: an evaluation is under way; a run that is resumed without
    data sets has an evaluator of none then, who gives it up."""
    r, c = settings.rollout, settings.ckpt
    lookahead = r.staleness_lookahead if r.staleness_policy == "wait" else 0
    alone: dict[str, Any] = {}  # rooms with one actor, of their own name
    alone["trainer"] = told(
        TrainerSpec,
        settings.flat,
        backend=backend_config(settings, place),
        weights_dir=place.weights_dir,
        num_rollout=place.num_rollout,
        save="" if c.no_save or settings.launch.debug_rollout_only else here(c.save),
        save_hf=here(c.save_hf),
        save_trigger_sentinel=here(c.save_trigger_sentinel),
        load=here(load_dir(settings)),
        ckpt_step=None if c.finetune or same(c.load, c.save) else c.ckpt_step,  # there the tracker was moved
        fingerprint=place.fingerprint,
        courier=courier_spec(settings, place),
        turns=turn_spec(settings),
        lookahead=lookahead,
        backend_name="none" if settings.launch.debug_rollout_only else settings.flat.train_backend,
        ranks=1 if settings.launch.debug_rollout_only else settings.flat.train_ranks,
        record=here(c.save_debug_rollout_data),
        replay_from=here(c.load_debug_rollout_data),
        hook_values=custom_config(r.custom_config_path),
        train_env_vars=_variables(settings),
    )
    if c.load_debug_rollout_data:  # --debug-train-only: the trainer alone, fed from files
        return [(name, name, spec) for name, spec in alone.items()]
    alone["publisher"] = PublisherSpec(
        weights_dir=place.weights_dir,
        wave_fraction=settings.sglang.update_weight_wave_fraction,
        activation_deadline_s=settings.sglang.update_weight_deadline_s,
        serve_at=settings.bus.weights_address or "",
        weights_token=place.weights_token,
        lent=settings.flat.lent_workers,
        transport=settings.sglang.update_weight_transport,
    )
    alone["sampler"] = told(
        SamplerSpec,
        settings.flat,
        data=training_data(settings, place.model_dir, place.stop_token_ids),
        context=r.rollout_max_context_len or 0,
        num_rollout=place.num_rollout,
        shuffle=r.rollout_shuffle,
        stop_token_ids=place.stop_token_ids,
        top_k=r.rollout_top_k,
        lookahead=lookahead,
        keeps_checkpoints=not (c.no_save or settings.launch.debug_rollout_only),
    )
    alone["filter"] = FilterSpec(
        custom_filter=_custom(r.dynamic_sampling_filter_path),
        hook_values=custom_config(r.custom_config_path),
        shows_all_to=r.rollout_all_samples_process_path or "",
        hooks_within_s=r.batch_hook_timeout_s,
        model_dir=place.model_dir,
    )
    alone["partial"] = PartialSpec(
        buffer_filter=r.buffer_filter_path or "fifo",
        mask_offpolicy=r.mask_offpolicy_in_partial_rollout,
        hooks_within_s=r.batch_hook_timeout_s,
    )
    rooms = [(name, name, spec) for name, spec in alone.items()]
    reward = reward_spec(settings, place.model_dir)
    rooms += [(f"reward-{i}", "reward", reward) for i in range(r.num_reward_workers)]
    rooms += engine_specs(settings, place)
    if r.environment_path:
        rooms.append(("environments", "environments", told(EnvironmentsSpec, settings.flat)))
    if settings.flat.evaluates or evaluating:
        rooms.append(("evaluator", "evaluator", _evaluator(settings, place)))
    return rooms


def _evaluator(settings: RunSettings, place: Place) -> EvaluatorSpec:
    e = settings.eval
    sets = []
    for one in eval_sets(settings):
        keys = {name: getattr(one, name) or "" for name in ("input_key", "label_key", "tool_key", "metadata_key")}
        data = data_spec(settings, place.model_dir, one.path, data_source_path="", **keys)
        same = ("temperature", "top_p", "top_k", "max_response_len")
        own = {name: getattr(one, name) for name in same}
        n = one.n_samples_per_eval_prompt
        sets.append(EvalSet(name=one.name, data=data, samples_per_prompt=n, metadata=one.metadata, **own))
    return told(
        EvaluatorSpec,
        settings.flat,
        sets=tuple(sets),
        num_rollout=place.num_rollout,
        max_in_flight=e.eval_max_in_flight or 0,
        stop_token_ids=place.stop_token_ids,
        before_train=not e.skip_eval_before_train,
        context=settings.rollout.rollout_max_context_len or 0,
    )


def actor_spec(settings: RunSettings, place: Place, bus: BusConfig, name: str, role: str, room: Any) -> ActorSpec:
    """One process's whole spec."""
    own = {"name": name, "role": role, "bus": bus, "run_dir": place.run_dir, "room": msgspec.to_builtins(room)}
    return told(ActorSpec, settings.flat, run_seed=settings.rollout.rollout_seed, release=__version__, **own)


def _custom(path: str) -> str:
    """The user's own filter, or empty for a shipped one."""
    return "" if path in catalog()["dynamic_sampling_filter_path"].shipped else path
