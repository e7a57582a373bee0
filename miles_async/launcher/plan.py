"""Settings to process specs (pure): which actors run, under which names, with which start-up settings."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.evaluator.actor import EvalSet, EvaluatorSpec
from actors.filter.actor import FilterSpec
from actors.partial.actor import PartialSpec
from actors.publisher.actor import PublisherSpec
from actors.reward.actor import RewardSpec
from actors.runtime.context import ActorSpec
from actors.runtime.prompts import DataSpec
from actors.sampler.actor import SamplerSpec
from actors.trainer.backend import BackendConfig
from actors.trainer.objective_config import ObjectiveConfig, Reduction
from actors.trainer.spec import TrainerSpec
from bus import BusConfig
from miles_async.launcher.engines import courier_spec, engine_specs, turn_spec
from miles_async.settings.groups.grpo import LossAggMode
from miles_async.settings.run import RunSettings
from miles_async.settings.slots import no_tail_lane

NEVER = 1 << 40  # tokens: more than any sample has
REDUCTIONS: dict[LossAggMode, Reduction] = {
    "seq-mean-token-mean": "per_sample",
    "token-mean": "per_token",
    "seq-mean-token-sum-norm": "constant",
}
FILTERS = {None: "none", "check_reward_nonzero_std": "nonzero_std"}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run lies on this host: resolved directories, and facts read from the model directory."""

    run_dir: str
    model_dir: str
    weights_dir: str
    blob_dir: str
    stop_token_ids: tuple[int, ...]
    num_rollout: int
    fingerprint: str
    reference_dir: str = ""
    critic_dir: str = ""  # empty: the critic starts from the policy's model
    teacher_dir: str = ""
    router_url: str = ""  # empty: no router
    router_port: int = 0  # of a router of ours; 0 when it is somebody else's
    engine_token: str = ""  # what engines and router ask of their callers


def bus_config(settings: RunSettings, url: str, place: Place) -> BusConfig:
    """How this run's actors reach the bus. Large bodies go to files only where all actors share the directory."""
    return BusConfig(
        url=url,
        run=settings.launch.name,
        blob_dir=place.blob_dir if settings.bus.bus_url is None else "",
        lease_s=settings.bus.lease_s,
        deadline_s=settings.bus.bus_deadline_s,
        max_deliveries=settings.bus.max_deliveries,
        inline_limit_bytes=settings.bus.inline_limit_bytes,
        stream_max_bytes=settings.bus.stream_max_bytes,
    )


def objective_config(settings: RunSettings) -> ObjectiveConfig:
    """The objective's settings from the GRPO group."""
    g = settings.grpo
    correction = {"rollout_logprobs": "none"}.get(g.off_policy_correction, g.off_policy_correction)
    proximal = "rollout" if g.use_rollout_logprobs else "interpolate" if g.interpolate_proximal else "recompute"
    return ObjectiveConfig(
        advantage_estimator=g.advantage_estimator,
        rewards_normalization=not g.disable_rewards_normalization,
        grpo_std_normalization=not g.disable_grpo_std_normalization,
        normalize_advantages=g.normalize_advantages,
        gamma=g.gamma,
        lambd=g.lambd,
        value_clip=g.value_clip,
        use_opd=g.use_opd,
        opd_kl_coef=g.opd_kl_coef,
        kl_coef=g.kl_coef,
        eps_clip=g.eps_clip,
        eps_clip_high=g.eps_clip_high,
        eps_clip_c=g.eps_clip_c,
        use_kl_loss=g.use_kl_loss,
        kl_loss_coef=g.kl_loss_coef,
        kl_loss_type=g.kl_loss_type,
        use_unbiased_kl=g.use_unbiased_kl,
        entropy_coef=g.entropy_coef,
        proximal=proximal,  # type: ignore[arg-type]
        keep_old_actor=g.keep_old_actor,
        correction=correction,
        allow_no_correction=g.no_correction,
        tis_clip=g.tis_clip,
        tis_clip_low=g.tis_clip_low,
        tis_level=g.tis_level,
        tis_mode=g.tis_mode,
        tis_upper_bound=g.tis_upper_bound,
        tis_lower_bound=g.tis_lower_bound,
        tis_batch_normalize=g.tis_batch_normalize if g.use_mis else False,
        use_rs=g.use_rs,
        rs_level=g.rs_level,
        rs_upper_bound=g.rs_upper_bound if g.use_rs else None,
        rs_lower_bound=g.rs_lower_bound if g.use_rs else None,
        rs_veto_threshold=g.rs_veto_threshold,
        use_opsm=g.use_opsm,
        opsm_delta=g.opsm_delta,
        reduction=REDUCTIONS[g.loss_agg_mode],
        loss_constant=1.0 if g.loss_scale_factor is None else g.loss_scale_factor,
        custom_loss_function_path=g.custom_loss_function_path or "",
        custom_advantage_function_path=g.custom_advantage_function_path or "",
        custom_tis_function_path=g.custom_tis_function_path or "",
        custom_pg_loss_reducer_function_path=g.custom_pg_loss_reducer_function_path or "",
        custom_reward_post_process_path=g.custom_reward_post_process_path or "",
    )


def backend_config(settings: RunSettings, place: Place) -> BackendConfig:
    """The training backend's settings."""
    o, p = settings.optimizer, settings.perf
    return BackendConfig(
        hf_checkpoint=place.reference_dir or place.model_dir,  # --load without a checkpoint falls back to --ref-load
        ref_load=place.reference_dir,
        published_as=place.model_dir,
        dtype=settings.model.model_dtype,
        threads=p.trainer_threads,
        seed=settings.launch.seed,
        objective=objective_config(settings),
        max_tokens_per_gpu=p.max_tokens_per_gpu,
        use_dynamic_batch_size=p.use_dynamic_batch_size,
        micro_batch_size=p.micro_batch_size or 1,
        num_steps_per_rollout=settings.grpo.num_steps_per_rollout,
        use_dynamic_global_batch_size=settings.grpo.use_dynamic_global_batch_size,
        balance="none" if not p.balance_data else "flops" if p.balance_by_flops else "tokens",
        optimizer=o.optimizer,
        lr=o.lr,
        min_lr=o.min_lr,
        lr_decay_style=o.lr_decay_style,
        lr_warmup_iters=o.lr_warmup_iters,
        num_rollout=place.num_rollout,
        weight_decay=o.weight_decay,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        clip_grad=o.clip_grad,
        gradient_checkpointing=p.gradient_checkpointing,
        ref_update_interval=settings.grpo.ref_update_interval or 0,
        critic_load=place.critic_dir,
        critic_lr=o.critic_lr,
        num_critic_only_steps=settings.grpo.num_critic_only_steps,
        opd_teacher_load=place.teacher_dir,
        logprob_tolerance=settings.launch.selfcheck_logprob_tolerance,
        offload_target=settings.sglang.offload_train_target,
        offload_dir=place.run_dir,
        true_on_policy=settings.model.true_on_policy_mode,
    )


def data_spec(settings: RunSettings, place: Place, *, path: str, input_key: str, label_key: str | None) -> DataSpec:
    """How to read one prompt file."""
    r = settings.rollout
    return DataSpec(
        path=path,
        input_key=input_key,
        label_key=label_key or "",
        metadata_key=r.metadata_key or "",
        tokenizer_dir=place.model_dir,
        apply_chat_template=r.apply_chat_template,
        max_prompt_len=r.rollout_max_prompt_len or 0,
    )


def room_specs(settings: RunSettings, place: Place) -> list[tuple[str, str, Any]]:
    """(actor name, room, its spec) in the order of start."""
    r, c = settings.rollout, settings.ckpt
    lookahead = r.staleness_lookahead if r.staleness_policy == "wait" else 0
    interval = r.update_weights_interval
    rooms: list[tuple[str, str, Any]] = [
        (
            "trainer",
            "trainer",
            TrainerSpec(
                backend=backend_config(settings, place),
                weights_dir=place.weights_dir,
                num_rollout=place.num_rollout,
                save="" if c.no_save or settings.launch.debug_rollout_only else str(c.save),
                save_hf=c.save_hf or "",
                load="" if c.no_save or settings.launch.debug_rollout_only else str(c.load or ""),
                fingerprint=place.fingerprint,
                keep_last=c.keep_last,
                save_trigger_sentinel=c.save_trigger_sentinel or "",
                update_weights_interval=interval,
                courier=courier_spec(settings),
                turns=turn_spec(settings),
                lookahead=lookahead,
                async_save=c.async_save,
                backend_name="none" if settings.launch.debug_rollout_only else "torch",
                ranks=1 if settings.launch.debug_rollout_only else settings.perf.actor_num_gpus_per_node,
                ci_test=settings.launch.ci_test,
                record=c.save_debug_rollout_data or "",
                replay_from=c.load_debug_rollout_data or "",
            ),
        ),
        (
            "publisher",
            "publisher",
            PublisherSpec(
                weights_dir=place.weights_dir,
                wave_fraction=settings.sglang.update_weight_wave_fraction,
                activation_deadline_s=settings.sglang.update_weight_deadline_s,
            ),
        ),
        (
            "sampler",
            "sampler",
            SamplerSpec(
                data=data_spec(settings, place, path=r.prompt_data, input_key=r.input_key, label_key=r.label_key),
                n_samples_per_prompt=r.n_samples_per_prompt,
                num_rollout=place.num_rollout,
                shuffle=r.rollout_shuffle,
                stop_token_ids=place.stop_token_ids,
                rm_type=r.rm_type or "",
                top_k=r.rollout_top_k,
                lookahead=lookahead,
                update_weights_interval=interval,
                keeps_checkpoints=not (c.no_save or settings.launch.debug_rollout_only),
            ),
        ),
        (
            "filter",
            "filter",
            FilterSpec(
                custom_filter=_custom(r.dynamic_sampling_filter_path, FILTERS), update_weights_interval=interval
            ),
        ),
        (
            "partial",
            "partial",
            PartialSpec(
                buffer_filter=r.buffer_filter_path or "fifo", mask_offpolicy=r.mask_offpolicy_in_partial_rollout
            ),
        ),
    ]
    reward = RewardSpec(
        rm_type=r.rm_type or "",
        custom_rm_path=r.custom_rm_path or "",
        rm_url=r.rm_url or "",
        reward_key=r.reward_key or "",
        eval_reward_key=settings.eval.eval_reward_key or "",
        skip_special_tokens=r.rollout_skip_special_tokens,
        max_retries=r.reward_max_retries,
        tokenizer_dir=place.model_dir,
        teacher_urls=settings.grpo.opd_teacher_urls if settings.grpo.distills else (),
    )
    rooms += [(f"reward-{i}", "reward", reward) for i in range(r.num_reward_workers)]
    rooms += engine_specs(settings, place)
    if c.load_debug_rollout_data:
        return rooms[:1]  # --debug-train-only: the trainer alone, fed from files
    if settings.eval.datasets:
        rooms.append(("evaluator", "evaluator", _evaluator(settings, place)))
    return rooms


def _evaluator(settings: RunSettings, place: Place) -> EvaluatorSpec:
    e = settings.eval
    return EvaluatorSpec(
        sets=tuple(
            EvalSet(
                name=name,
                data=data_spec(settings, place, path=path, input_key=e.eval_input_key, label_key=e.eval_label_key),
            )
            for name, path in dict(e.datasets).items()
        ),
        num_rollout=place.num_rollout,
        n_samples_per_prompt=e.n_samples_per_eval_prompt,
        temperature=e.eval_temperature,
        top_p=e.eval_top_p,
        max_response_len=e.eval_max_response_len,
        stop_token_ids=place.stop_token_ids,
        rm_type=settings.rollout.rm_type or "",
        before_train=not e.skip_eval_before_train,
    )


def actor_spec(settings: RunSettings, place: Place, bus: BusConfig, name: str, role: str, room: Any) -> ActorSpec:
    """One process's whole spec."""
    return ActorSpec(
        name=name,
        role=role,
        bus=bus,
        run_seed=settings.rollout.rollout_seed,
        heartbeat_s=settings.launch.heartbeat_s,
        drain_timeout_s=settings.launch.drain_timeout_s,
        run_dir=place.run_dir,
        room=msgspec.to_builtins(room),
    )


def initial_knobs(settings: RunSettings) -> dict[str, Any]:
    """Live values at epoch 0."""
    r, g, o = settings.rollout, settings.grpo, settings.optimizer
    return {
        "rollout_batch_size": r.rollout_batch_size,
        "over_sampling_batch_size": r.over_sampling_batch_size,
        "max_weight_staleness": r.max_weight_staleness,
        "staleness_policy": r.staleness_policy,
        "rollout_temperature": r.rollout_temperature,
        "rollout_top_p": r.rollout_top_p,
        "rollout_max_response_len": r.rollout_max_response_len,
        "partial_save_tokens": r.partial_save_tokens if r.partial_rollout else NEVER,
        "max_tokens_per_slice": r.max_tokens_per_slice or 0,
        "reward_timeout_s": r.reward_timeout_s,
        "max_waves": r.max_waves or 0,
        "dynamic_sampling_filter": FILTERS.get(r.dynamic_sampling_filter_path, r.dynamic_sampling_filter_path)
        if r.dynamic_sampling_filter_path is None or "." not in r.dynamic_sampling_filter_path
        else "none",
        "lr": o.lr,
        "clip_grad": o.clip_grad,
        "eps_clip": g.eps_clip,
        "eps_clip_high": g.eps_clip if g.eps_clip_high is None else g.eps_clip_high,
        "kl_loss_coef": g.kl_loss_coef,
        "entropy_coef": g.entropy_coef,
        "tis_clip": g.tis_clip,
        "pause_generation_mode": settings.sglang.pause_generation_mode,
        "save_interval": settings.ckpt.save_interval or 0,
        "eval_interval": settings.eval.eval_interval or 0,
        "eval_share": settings.eval.eval_share,
        "global_batch_size": g.global_batch_size,
        "n_samples_per_prompt": r.n_samples_per_prompt,
        "num_steps_per_rollout": g.num_steps_per_rollout,
        "update_weights_interval": r.update_weights_interval,
        "staleness_lookahead": r.staleness_lookahead or 0,
        "needs_whole_groups": settings.needs_whole_groups,
        "correction": g.off_policy_correction,
        "no_correction": g.no_correction,
        "use_kl_loss": g.use_kl_loss,
        "has_eval_data": bool(settings.eval.datasets),
        "rollout_max_context_len": r.rollout_max_context_len or 0,
        **_slots(settings),
    }


def _slots(settings: RunSettings) -> dict[str, Any]:
    """Samples that engines take at once."""
    g = settings.sglang
    return {
        "sglang_server_concurrency": g.sglang_server_concurrency,
        "sglang_concurrency_min": g.sglang_concurrency_min,
        "sglang_concurrency_max": g.sglang_concurrency_max or 0,
        "max_masked_fraction": g.max_masked_fraction or 0.0,
        "tail_slots": g.tail_slots or 0,
        "tail_after_tokens": g.tail_after_tokens or 0,
        "num_generation_workers": g.num_generation_workers,
        "no_tail_lane": no_tail_lane(settings),
    }


def _custom(path: str | None, builtin: dict[str | None, str]) -> str:
    return path if path is not None and "." in path and path not in builtin else ""


__all__ = ("Place", "actor_spec", "bus_config", "initial_knobs", "room_specs")
