"""(pure) Fields that follow from others. Each function sees the values given so far and returns the missing one.

Nothing here looks at the outside. Order matters only where a derivation reads a derived field.
"""

from collections.abc import Callable, Mapping
from typing import Any

from actors.runtime.transports.records import DISK, IPC
from actors.trainer.objective_estimators import ESTIMATORS
from miles_async.settings.errors import refusal
from miles_async.settings.groups.model import is_made_here
from miles_async.settings.kinds import engine_of
from miles_async.settings.launchers import LAUNCHERS
from miles_async.settings.megatron_fields import asked_for

Values = dict[str, Any]
TOKEN_MEAN, CONSTANT_SUM = "token-mean", "seq-mean-token-sum-norm"
SUPERVISED = ("sft", "sft_loss")
SERVED = "sglang"  # Miles' word for a teacher that a server answers for
KEEP_ALL, NONZERO_STD = "none", "check_reward_nonzero_std"


def solve_four_knobs(values: Mapping[str, Any], batch: int | None, steps: int | None) -> tuple[int, int]:
    """(global_batch_size, num_steps_per_rollout) such that rbs * n = gbs * steps, or SettingsError. `values`: of the settings,
    of which rollout_batch_size and n_samples_per_prompt count; `batch`, `steps`: the other two as given, or None.

    Neither given: one step over all samples. One given: the other follows, and must be whole.
    """
    prompts, n = values["rollout_batch_size"], values["n_samples_per_prompt"]
    total = prompts * n
    product = f"rollout_batch_size * n_samples_per_prompt = {prompts} * {n} = {total}"
    if batch is None:
        steps = steps or 1
        if total % steps:
            remedy = f"Set num_steps_per_rollout to a divisor of {total}, e.g. {_divisor(total, steps)}."
            raise refusal("num_steps_per_rollout", steps, f"{product} does not divide into {steps} steps", remedy)
        return total // steps, steps
    if steps is None:
        if total % batch:
            remedy = f"Set global_batch_size to a divisor of {total}, e.g. {_divisor(total, batch)}."
            raise refusal("global_batch_size", batch, f"{product} is not a multiple of it", remedy)
        return batch, total // batch
    if batch * steps != total:
        made = f"global_batch_size * num_steps_per_rollout = {batch} * {steps} = {batch * steps}"
        remedy = "Leave out global_batch_size or num_steps_per_rollout, and it follows."
        raise refusal("global_batch_size", batch, f"{made}, but {product}", remedy)
    return batch, steps


def one_step_per_rollout(values: Values, given: Values) -> None:
    """use_dynamic_global_batch_size makes one step of a rollout's trajectories; SettingsError for a static knob that was `given`
    and says otherwise."""
    total = values["rollout_batch_size"] * values["n_samples_per_prompt"]
    for field, implied in (("global_batch_size", total), ("num_steps_per_rollout", 1)):
        if (value := given.get(field)) not in (None, implied):
            most = f"rollout_batch_size * n_samples_per_prompt = {total}"
            why = f"use_dynamic_global_batch_size = true makes one step of what arrives, up to {most}"
            raise refusal(field, value, why, f"Leave out {field} or use_dynamic_global_batch_size.")


def _divisor(total: int, near: int) -> int:
    """The largest divisor of `total` not above `near`."""
    return next(d for d in range(min(near, total), 0, -1) if total % d == 0)


def _gpu_ids(v: Values) -> tuple[int, ...]:
    """The trainer's GPUs come first, if it has its own."""
    ours, found = int(v["actor_num_gpus_per_node"]), range(v["rollout_num_gpus"])
    if v["colocate"]:
        return tuple(i % ours for i in found)  # of each of its nodes
    return tuple(found if v["debug_rollout_only"] else (ours + i for i in found))


def _hosts(v: Values) -> int:
    """Of one engine: on the trainer's GPUs as many of its nodes as hold it."""
    shares = v["colocate"] and LAUNCHERS[v["launcher"]].spreads and engine_of(v["engine"]).spans_hosts
    return max(1, v["rollout_num_gpus_per_engine"] // v["actor_num_gpus_per_node"]) if shares else 1


def _transport(v: Values) -> str:
    over_nodes = v["actor_num_nodes"] > 1 and LAUNCHERS[v["launcher"]].spreads
    return IPC.name if v["colocate"] and not over_nodes else DISK.name


def _router(v: Values) -> bool:
    alike = engine_of(v["engine"]).behind_router
    several = alike and v["num_generation_workers"] > 1 and not LAUNCHERS[v["launcher"]].spreads  # engines of one host
    # Paused in place, engines need to be without one, and workers share the load anyway.
    wanted = several and (v["pause_generation_mode"] != "in_place" or bool(v["router_args"]))
    wanted = wanted and v["tail_slots"] is None  # which are of one worker
    wanted = wanted and v["lora_publish"] != "adapters"  # which each engine has on its own
    return wanted or v["sglang_router_ip"] is not None


def reward_hook(values: Mapping[str, Any]) -> str | None:
    """A function of the user's that is given all rewards of a group."""
    path: str | None = values["custom_reward_post_process_path"] or values["custom_convert_samples_to_train_data_path"]
    return path


def needs_whole_groups(values: Mapping[str, Any]) -> bool:
    """Whether the rewards of a group mean something only together, so that it cannot be trained in parts: a hook that is given
    all of them, all scored at once, or MaxRL's division by the group's success rate."""
    whole = ESTIMATORS[values["advantage_estimator"]].whole_groups
    return bool(reward_hook(values)) or values["group_rm"] or whole


def _lookahead(v: Values) -> int:
    return int(v["rollout_batch_size"]) if v["max_weight_staleness"] > 0 else 1


def _tolerance(v: Values) -> float:
    """Of log-probs under equal weights."""
    return 1e-9 if v["true_on_policy_mode"] else engine_of(v["engine"]).tolerance(v)


def _under(folder: str | None, rest: str) -> str | None:
    return None if folder is None else f"{folder.rstrip('/')}/{rest}"


def _filter(v: Values) -> str:
    """Groups of equal rewards teach nothing, unless there is but one sample or a teacher speaks of every token."""
    single = v["n_samples_per_prompt"] == 1
    return KEEP_ALL if single or v["use_opd"] or ESTIMATORS[v["advantage_estimator"]].teacher else NONZERO_STD


def _policy_loss(v: Values) -> str:
    return "nll" if v["loss_type"] in SUPERVISED else ESTIMATORS[v["advantage_estimator"]].policy_loss


# field -> how it follows. Read by `fill` in this order.
DERIVATIONS: tuple[tuple[str, Callable[[Values], Any]], ...] = (
    ("train_backend", lambda v: "megatron" if asked_for(v) else "torch"),
    ("save", lambda v: f"{v['runs_dir'].rstrip('/')}/{v['name']}/checkpoints"),
    ("load", lambda v: v["save"]),
    ("ref_load", lambda v: v["hf_checkpoint"]),
    ("save_debug_rollout_data", lambda v: _under(v["dump_details"], "rollout_data/{rollout_id}.msgpack")),
    ("save_debug_train_data", lambda v: _under(v["dump_details"], "train_data/{rollout_id}_{rank}.pt")),
    ("debug_determinism", lambda v: v["dump_details"] is not None),
    ("env_report", lambda v: v["dump_details"] is not None),
    ("dynamic_sampling_filter_path", _filter),
    ("staleness_policy", lambda v: "whole" if needs_whole_groups(v) else "auto"),
    ("staleness_lookahead", _lookahead),
    ("eval_input_key", lambda v: v["input_key"]),
    ("eval_label_key", lambda v: v["label_key"]),
    ("eval_tool_key", lambda v: v["tool_key"]),
    ("eval_reward_key", lambda v: v["reward_key"]),
    ("eval_temperature", lambda v: v["rollout_temperature"]),
    ("eval_top_p", lambda v: v["rollout_top_p"]),
    ("eval_top_k", lambda v: v["rollout_top_k"]),
    ("eval_max_response_len", lambda v: v["rollout_max_response_len"]),
    ("log_probs_max_tokens_per_gpu", lambda v: v["max_tokens_per_gpu"]),
    ("eps_clip_high", lambda v: v["eps_clip"]),
    ("tis_lower_bound", lambda v: 1.0 / v["tis_upper_bound"]),
    ("rs_lower_bound", lambda v: v["tis_lower_bound"]),
    ("rs_upper_bound", lambda v: v["tis_upper_bound"]),
    ("calculate_per_token_loss", lambda v: v.get("loss_agg_mode") == TOKEN_MEAN),
    ("loss_agg_mode", lambda v: TOKEN_MEAN if v["calculate_per_token_loss"] else "seq-mean-token-mean"),
    ("loss_scale_factor", lambda v: v["rollout_max_response_len"] if v["loss_agg_mode"] == CONSTANT_SUM else None),
    ("balance_by_flops", lambda v: v["balance_data"]),
    ("selfcheck_logprob_tolerance", _tolerance),
    ("loss_type", lambda v: "custom_loss" if v["custom_loss_function_path"] else "policy_loss"),
    ("policy_loss", _policy_loss),
    ("normalize_advantages", lambda v: ESTIMATORS[v["advantage_estimator"]].whitens),
    ("critic_lr", lambda v: v["lr"]),
    ("opd_type", lambda v: SERVED if v["opd_teacher_urls"] else "megatron"),
    ("offload", lambda v: v["colocate"]),
    ("offload_train", lambda v: v["offload"]),
    ("offload_rollout", lambda v: v["offload"]),
    ("lend_mem_fraction", lambda v: 0.7 if v["offload_train"] else 0.4),
    ("update_weight_transport", _transport),
    ("sglang_nnodes", _hosts),
    ("num_generation_workers", lambda v: engine_of(v["engine"]).workers(v)),
    ("rollout_num_gpus", lambda v: engine_of(v["engine"]).gpus(v)),
    ("rollout_gpu_ids", _gpu_ids),
    ("use_router", _router),
)


def fill(given: Values, defaults: Values, *, run_name: str, gpu: bool) -> Values:
    """All fields: `given` over `defaults` over derivations. `gpu`: whether this host has one. Raises SettingsError when the four
    knobs disagree."""
    values = {**defaults, **given}
    values.setdefault("model_dtype", "bfloat16" if gpu and not is_made_here(values["hf_checkpoint"]) else "float32")
    values.setdefault("name", run_name)
    values.setdefault("use_dynamic_batch_size", "micro_batch_size" not in given)
    if values["use_dynamic_global_batch_size"]:
        one_step_per_rollout(values, given)
    found = solve_four_knobs(values, given.get("global_batch_size"), given.get("num_steps_per_rollout"))
    values["global_batch_size"], values["num_steps_per_rollout"] = found
    for name, derive in DERIVATIONS:
        if name not in values:
            values[name] = derive(values)
    return values
