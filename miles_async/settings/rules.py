"""(pure) Rules between settings, one function each. A broken rule raises SettingsError: field, value, rule, remedy.

`check_rules` runs them all, when settings are loaded and when live ones are changed, and nobody else has rules of settings.
Facts that only deserve a hint are `notes`, shown by `--dry-run` and at the start of a run.
"""

import re
from collections.abc import Callable, Iterator

from actors.generation.engines.records import ATTACHED
from miles_async.settings import (
    checkpoints,
    colocate,
    functions,
    governor,
    lora,
    megatron,
    objective,
    prompts,
    second_models,
    serving,
    staleness,
    training,
)
from miles_async.settings.derive import KEEP_ALL, solve_four_knobs
from miles_async.settings.errors import Refusals, refusal
from miles_async.settings.flat import Flat
from miles_async.settings.runs import check_bus_url

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Rule = Callable[[Flat], None]


def four_knobs_agree(s: Flat) -> None:
    solve_four_knobs(s.values, s.global_batch_size, s.num_steps_per_rollout)


def run_length_is_known(s: Flat) -> None:
    if s.num_rollout is None and s.num_epoch is None:
        raise s.refusal("num_rollout", "the run has no end", "Set --num-rollout N or --num-epoch N.")


def filter_can_keep_something(s: Flat) -> None:
    name = s.dynamic_sampling_filter_path
    if s.n_samples_per_prompt == 1 and name.endswith("nonzero_std"):
        why = "drops every group when n_samples_per_prompt is 1, whose rewards never differ"
        remedy = f"Set it to {KEEP_ALL} or n_samples_per_prompt to 2 or more."
        raise s.refusal("dynamic_sampling_filter_path", why, remedy)


def context_holds_prompt_and_response(s: Flat) -> None:
    context = s.rollout_max_context_len
    prompt = s.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        why = f"leaves no space for a response in rollout_max_context_len = {context}"
        raise s.refusal("rollout_max_prompt_len", why, f"Set it below {context}.")


def top_k_is_a_count_or_all(s: Flat) -> None:
    if s.rollout_top_k == 0:
        raise s.refusal("rollout_top_k", "would leave no token to sample from", "Set it to -1 (all) or 1 and more.")


def evaluation_has_data(s: Flat) -> None:
    data = s.eval_prompt_data
    if data and s.eval_config is not None:
        raise s.refusal("eval_config", "eval_prompt_data is given too", "Keep one of the two.")
    if s.eval_interval is not None and not s.evaluates:
        raise s.refusal("eval_interval", "eval_prompt_data is empty", "Set --eval-prompt-data NAME PATH.")
    if len(data) > 1 and len(data) % 2:
        raise s.refusal("eval_prompt_data", "not pairs of name and path", "Write NAME PATH [NAME PATH ...].")
    names = [name for name, _ in s.datasets]
    if len(set(names)) < len(names):
        raise s.refusal("eval_prompt_data", "two data sets have one name", "Give each its own name.")


def learning_rate_decays_downwards(s: Flat) -> None:
    if s.min_lr > s.lr:
        raise s.refusal("min_lr", f"above lr = {s.lr}", "Set min_lr <= lr.")


def warm_up_is_said_once(s: Flat) -> None:
    if s.lr_warmup_fraction is not None and s.lr_warmup_iters:
        raise s.refusal("lr_warmup_fraction", f"lr_warmup_iters = {s.lr_warmup_iters} says it too", "Keep one of the two.")


def engine_addresses_match_the_engine(s: Flat) -> None:
    addrs = s.rollout_external_engine_addrs
    attached = s.engine_kind.attached
    if attached and not addrs:
        why = "no addresses of running engines"
        raise s.refusal("engine", why, "Set --rollout-external-engine-addrs HOST:PORT ...")
    if not attached and addrs:
        raise s.refusal("rollout_external_engine_addrs", f"engine is {s.engine!r}", f"Set --engine {ATTACHED.name}.")
    if attached and s.num_generation_workers != len(addrs):
        why = f"{len(addrs)} engine addresses are given, one worker drives one engine"
        raise s.refusal("num_generation_workers", why, "Leave it out.")
    if (s.sglang_router_ip is None) != (s.sglang_router_port is None):
        missing = "sglang_router_ip" if s.sglang_router_ip is None else "sglang_router_port"
        raise refusal(missing, None, "a router has both an address and a port", "Set both or none.")


def inner_deadlines_are_shorter(s: Flat) -> None:
    for inner, outer in (("heartbeat_s", "lease_s"), ("engine_token_deadline_s", "sglang_request_deadline_s")):
        if s.values[inner] >= s.values[outer]:
            raise s.refusal(inner, f"not below {outer} = {s.values[outer]}", f"Set {inner} < {outer}.")


def bus_url_is_understood(s: Flat) -> None:
    check_bus_url(s.bus_url)


def run_name_is_a_plain_name(s: Flat) -> None:
    if not RUN_NAME.fullmatch(s.name):
        remedy = "Use letters, digits, dot, dash and underscore, at most 64, beginning with a letter or digit."
        raise s.refusal("name", "a run's name is a folder and a part of Redis keys", remedy)


def debug_modes_exclude_each_other(s: Flat) -> None:
    if s.debug_rollout_only and (s.debug_train_only or s.load_debug_rollout_data):
        raise s.refusal("debug_rollout_only", "the trainer cannot be both off and alone", "Choose one debug mode.")
    if s.debug_train_only and not s.load_debug_rollout_data:
        raise s.refusal("debug_train_only", "it needs batches", "Give --load-debug-rollout-data PATH_{rollout_id}.")
    for field in ("save_hf", "save_debug_rollout_data", "load_debug_rollout_data"):
        pattern = getattr(s, field)
        if pattern is not None and "{rollout_id}" not in pattern:
            raise s.refusal(field, "every rollout would use one path", "Write {rollout_id} into the path.")
    train = s.save_debug_train_data
    if train is not None and not ("{rollout_id}" in train and "{rank}" in train):
        remedy = "Write {rollout_id} and {rank} into the path."
        raise s.refusal("save_debug_train_data", "every rollout and rank has a file of its own", remedy)


RULES: tuple[Rule, ...] = (
    debug_modes_exclude_each_other,
    run_name_is_a_plain_name,
    four_knobs_agree,
    run_length_is_known,
    *staleness.RULES,
    *objective.RULES,
    *second_models.RULES,
    filter_can_keep_something,
    context_holds_prompt_and_response,
    top_k_is_a_count_or_all,
    *functions.RULES,
    *prompts.RULES,
    *training.RULES,
    evaluation_has_data,
    learning_rate_decays_downwards,
    warm_up_is_said_once,
    engine_addresses_match_the_engine,
    inner_deadlines_are_shorter,
    bus_url_is_understood,
    *checkpoints.RULES,
    *serving.RULES,
    *governor.RULES,
    *colocate.RULES,
    *megatron.RULES,
    *lora.RULES,
)


def check_rules(settings: Flat, found: Refusals | None = None) -> None:
    """Raise SettingsError with all rules that do not hold, or leave them in `found`."""
    broken = Refusals() if found is None else found
    for rule in RULES:
        broken.attempt(rule, settings)
    if found is None:
        broken.raise_all()


def notes(s: Flat) -> Iterator[str]:
    """What is allowed but worth knowing before the run starts."""
    if s.num_rollout is not None and s.num_epoch is not None:
        yield f"num_epoch = {s.num_epoch} has no effect beside num_rollout = {s.num_rollout}"
    if s.rm_type is not None and s.custom_rm_path is not None:
        yield f"rm_type = {s.rm_type} has no effect: custom_rm_path replaces it"
    if s.max_weight_staleness == 0:
        yield "max_weight_staleness = 0 is strictly on-policy: generation waits for training"
    if s.max_weight_staleness > 0 and s.no_correction:
        yield f"max_weight_staleness = {s.max_weight_staleness} trains on off-policy data without a correction"
    if s.max_weight_staleness > 0 and s.over_sampling_batch_size > s.max_open_groups:
        yield (
            f"over_sampling_batch_size = {s.over_sampling_batch_size} is cut to {s.max_open_groups}, the open groups "
            f"that max_weight_staleness = {s.max_weight_staleness} admits"
        )
    for name in ("rollout_max_response_len", "eval_max_response_len"):
        if s.rollout_max_context_len is not None and s.values[name] >= s.rollout_max_context_len:
            whole = f"rollout_max_context_len = {s.rollout_max_context_len}"
            yield f"{name} = {s.values[name]} is cut to what a prompt leaves of {whole}"
    longest = s.rollout_max_context_len or s.rollout_max_response_len + (s.rollout_max_prompt_len or 0)
    if s.use_dynamic_batch_size and longest > s.max_tokens_per_gpu:
        yield (
            f"samples of up to {longest} tokens exceed max_tokens_per_gpu = {s.max_tokens_per_gpu}: such a sample "
            "gets a micro-batch of its own and needs more memory"
        )
    if s.rollout_function_path and not s.own_rollout_function:
        yield f"rollout_function_path = {s.rollout_function_path} is what is done here anyway, in our way; it is not called"
    yield from training.notes(s)
    yield from serving.notes(s)
