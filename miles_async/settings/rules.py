"""(pure) Rules between fields, one function each. A broken rule raises SettingsError: field, value, rule, remedy.

`check_rules(settings)` runs them all; live-knob patches are held to the same rules. Facts that only deserve a hint
are `notes`, shown by `--dry-run` and at the start of a run.
"""

import re
from collections.abc import Callable, Iterator

from miles_async.settings import colocate, second_models, serving, slots, staleness, training
from miles_async.settings.derive import KEEP_ALL, NONZERO_STD, WHITENED, solve_four_knobs
from miles_async.settings.errors import refusal
from miles_async.settings.run import RunSettings

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
BUS_SCHEMES = ("redis://", "rediss://", "unix://")

Rule = Callable[[RunSettings], None]


def four_knobs_agree(s: RunSettings) -> None:
    solve_four_knobs(
        rollout_batch_size=s.rollout.rollout_batch_size,
        n_samples_per_prompt=s.rollout.n_samples_per_prompt,
        global_batch_size=s.grpo.global_batch_size,
        num_steps_per_rollout=s.grpo.num_steps_per_rollout,
    )


def run_length_is_known(s: RunSettings) -> None:
    if s.rollout.num_rollout is None and s.rollout.num_epoch is None:
        raise refusal("num_rollout", None, "the run has no end", "Set --num-rollout N or --num-epoch N.")


def one_correction_at_most(s: RunSettings) -> None:
    g = s.grpo
    on = {
        "use_tis": g.use_tis,
        "use_icepop": g.use_icepop,
        "use_mis": g.use_mis,
        "use_decoupled_loss": g.use_decoupled_loss,
        "use_rollout_logprobs": g.use_rollout_logprobs,
        "no_correction": g.no_correction,
    }
    chosen = [name for name, is_on in on.items() if is_on]
    if chosen == ["use_mis", "use_decoupled_loss"]:  # the weights of the one, the clip of the other
        return
    if len(chosen) > 1:
        raise refusal(chosen[1], True, f"cannot go together with {chosen[0]}", f"Keep one of {', '.join(chosen)}.")


def old_logprobs_have_one_source(s: RunSettings) -> None:
    g = s.grpo
    for other in ("use_rollout_logprobs", "interpolate_proximal"):
        if g.keep_old_actor and getattr(g, other):
            raise refusal("keep_old_actor", True, f"cannot go together with {other}", "Keep one of them.")
    if g.interpolate_proximal and g.use_rollout_logprobs:
        raise refusal("interpolate_proximal", True, "cannot go together with use_rollout_logprobs", "Keep one of them.")
    if g.interpolate_proximal and g.use_mis and g.tis_batch_normalize:
        raise refusal(
            "interpolate_proximal",
            True,
            "leaves no log-probs before the step, which tis_batch_normalize needs",
            "Add --no-tis-batch-normalize.",
        )


def correction_bounds_are_ordered(s: RunSettings) -> None:
    g = s.grpo
    for low_name, low, high_name, high in (
        ("tis_clip_low", g.tis_clip_low, "tis_clip", g.tis_clip),
        ("tis_lower_bound", g.tis_lower_bound, "tis_upper_bound", g.tis_upper_bound),
        ("rs_lower_bound", g.rs_lower_bound, "rs_upper_bound", g.rs_upper_bound),
    ):
        if low > high:
            raise refusal(low_name, low, f"above {high_name} = {high}", f"Set {low_name} <= {high_name}.")


def rejection_belongs_to_mis(s: RunSettings) -> None:
    if s.grpo.use_rs and not s.grpo.use_mis:
        raise refusal("use_rs", True, "rejection is a part of use_mis, which is off", "Add --use-mis or leave it out.")
    if s.grpo.use_mis and s.grpo.tis_level == "geometric" and s.grpo.tis_batch_normalize:
        raise refusal(
            "tis_batch_normalize", True, "has no meaning with tis_level = 'geometric'", "Add --no-tis-batch-normalize."
        )


def one_kl_at_most(s: RunSettings) -> None:
    g = s.grpo
    if g.kl_coef and g.kl_loss_coef:
        raise refusal(
            "kl_coef",
            g.kl_coef,
            f"KL is also in the loss (kl_loss_coef = {g.kl_loss_coef})",
            "Set one of the two to 0.",
        )
    if g.kl_loss_coef and not g.use_kl_loss:
        raise refusal("kl_loss_coef", g.kl_loss_coef, "has no effect while use_kl_loss is off", "Add --use-kl-loss.")


def whitening_where_it_is_part_of_the_estimator(s: RunSettings) -> None:
    if s.grpo.advantage_estimator in WHITENED and not s.grpo.normalize_advantages:
        raise refusal(
            "normalize_advantages",
            False,
            f"{s.grpo.advantage_estimator} is defined with whitened advantages",
            "Leave out --no-normalize-advantages.",
        )


def filter_can_keep_something(s: RunSettings) -> None:
    name = s.rollout.dynamic_sampling_filter_path
    if s.rollout.n_samples_per_prompt == 1 and name.endswith(NONZERO_STD):
        raise refusal(
            "dynamic_sampling_filter_path",
            name,
            "drops every group when n_samples_per_prompt is 1, whose rewards never differ",
            f"Set it to {KEEP_ALL} or n_samples_per_prompt to 2 or more.",
        )


def context_holds_prompt_and_response(s: RunSettings) -> None:
    context = s.rollout.rollout_max_context_len
    for name, length in (
        ("rollout_max_response_len", s.rollout.rollout_max_response_len),
        ("eval_max_response_len", s.eval.eval_max_response_len),
    ):
        if context is not None and length >= context:
            raise refusal(
                name,
                length,
                f"leaves no room for a prompt in rollout_max_context_len = {context}",
                f"Set it below {context}.",
            )
    prompt = s.rollout.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        raise refusal(
            "rollout_max_prompt_len",
            prompt,
            f"leaves no room for a response in rollout_max_context_len = {context}",
            f"Set it below {context}.",
        )


def top_k_is_a_count_or_all(s: RunSettings) -> None:
    if s.rollout.rollout_top_k == 0:
        raise refusal("rollout_top_k", 0, "would leave no token to sample from", "Set it to -1 (all) or 1 and more.")


def rewards_have_a_source(s: RunSettings) -> None:
    r = s.rollout
    if r.rm_type is not None and r.custom_rm_path is not None:
        raise refusal(
            "rm_type", r.rm_type, f"custom_rm_path = {r.custom_rm_path!r} is given too", "Keep one of the two."
        )
    if r.rm_type is None and r.custom_rm_path is None and r.metadata_key is None:
        raise refusal("rm_type", None, "nothing scores the samples", "Set --rm-type NAME or --custom-rm-path PATH.")
    if r.rm_type == "remote_rm" and r.rm_url is None:
        raise refusal("rm_url", None, "rm_type remote_rm asks a service", "Set --rm-url http://HOST:PORT/PATH.")
    if r.rm_url is not None and not r.rm_url.startswith(("http://", "https://")):
        raise refusal("rm_url", r.rm_url, "not an http:// or https:// address", "Write the scheme too.")


def dotted_paths_are_well_formed(s: RunSettings) -> None:
    r = s.rollout
    own = {} if r.custom_rm_path is None else {"custom_rm_path": r.custom_rm_path}
    for name, path in (own | s.grpo.hook_paths).items():
        if not DOTTED.fullmatch(path):
            raise refusal(name, path, "not a dotted path", "Write package.module.function.")
    for name, path in (
        ("dynamic_sampling_filter_path", r.dynamic_sampling_filter_path),
        ("buffer_filter_path", r.buffer_filter_path),
    ):
        if not (path.isidentifier() or DOTTED.fullmatch(path)):
            raise refusal(name, path, "neither a shipped name nor a dotted path", "Write package.module.function.")


def evaluation_has_data(s: RunSettings) -> None:
    data = s.eval.eval_prompt_data
    if s.eval.eval_interval is not None and not data:
        raise refusal(
            "eval_interval", s.eval.eval_interval, "eval_prompt_data is empty", "Set --eval-prompt-data NAME PATH."
        )
    if len(data) > 1 and len(data) % 2:
        raise refusal("eval_prompt_data", data, "not pairs of name and path", "Write NAME PATH [NAME PATH ...].")
    names = [name for name, _ in s.eval.datasets]
    if len(set(names)) < len(names):
        raise refusal("eval_prompt_data", data, "two data sets have one name", "Give each its own name.")


def learning_rate_decays_downwards(s: RunSettings) -> None:
    if s.optimizer.min_lr > s.optimizer.lr:
        raise refusal("min_lr", s.optimizer.min_lr, f"above lr = {s.optimizer.lr}", "Set min_lr <= lr.")


def engine_addresses_match_the_engine(s: RunSettings) -> None:
    g = s.sglang
    addrs = g.rollout_external_engine_addrs
    if g.engine == "external" and not addrs:
        raise refusal(
            "engine", g.engine, "no addresses of running engines", "Set --rollout-external-engine-addrs HOST:PORT ..."
        )
    if g.engine != "external" and addrs:
        raise refusal("rollout_external_engine_addrs", addrs, f"engine is {g.engine!r}", "Set --engine external.")
    if g.engine == "external" and g.num_generation_workers != len(addrs):
        raise refusal(
            "num_generation_workers",
            g.num_generation_workers,
            f"{len(addrs)} engine addresses are given, one worker drives one engine",
            "Leave it out.",
        )
    if (g.sglang_router_ip is None) != (g.sglang_router_port is None):
        missing = "sglang_router_ip" if g.sglang_router_ip is None else "sglang_router_port"
        raise refusal(missing, None, "a router has both an address and a port", "Set both or none.")


def inner_deadlines_are_shorter(s: RunSettings) -> None:
    for inner, value, outer, limit in (
        ("heartbeat_s", s.launch.heartbeat_s, "lease_s", s.bus.lease_s),
        (
            "engine_token_deadline_s",
            s.sglang.engine_token_deadline_s,
            "sglang_request_deadline_s",
            s.sglang.sglang_request_deadline_s,
        ),
    ):
        if value >= limit:
            raise refusal(inner, value, f"not below {outer} = {limit}", f"Set {inner} < {outer}.")


def bus_url_is_understood(s: RunSettings) -> None:
    check_bus_url(s.bus.bus_url)


def check_bus_url(url: str | None) -> None:
    """Refuse an address of no known scheme; a password in it is not shown."""
    if url is not None and not url.startswith(BUS_SCHEMES):
        raise refusal(
            "bus_url",
            url.rpartition("@")[2],
            "not an address of a Redis",
            "Write redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix:///PATH.",
        )


def run_name_is_a_plain_name(s: RunSettings) -> None:
    check_run_name(s.launch.name)


def check_run_name(name: str) -> None:
    if not RUN_NAME.fullmatch(name):
        raise refusal(
            "name",
            name,
            "a run's name is a folder and a part of Redis keys",
            "Use letters, digits, dot, dash and underscore, at most 64, beginning with a letter or digit.",
        )


def checkpoint_options_agree(s: RunSettings) -> None:
    c = s.ckpt
    if c.no_save and c.save_trigger_sentinel is not None:
        raise refusal("save_trigger_sentinel", c.save_trigger_sentinel, "no_save is on", "Keep one of the two.")
    if c.no_save and c.save_hf is not None:
        raise refusal("save_hf", c.save_hf, "it is written with each checkpoint and no_save is on", "Keep one of the two.")
    for name, pattern in (
        ("save_hf", c.save_hf),
        ("save_debug_rollout_data", c.save_debug_rollout_data),
        ("load_debug_rollout_data", c.load_debug_rollout_data),
    ):
        if pattern is not None and "{rollout_id}" not in pattern:
            raise refusal(name, pattern, "every rollout would use one path", "Write {rollout_id} into the path.")


def debug_modes_exclude_each_other(s: RunSettings) -> None:
    if s.launch.debug_rollout_only and (s.launch.debug_train_only or s.ckpt.load_debug_rollout_data):
        raise refusal("debug_rollout_only", True, "the trainer cannot be both off and alone", "Choose one debug mode.")
    if s.launch.debug_train_only and not s.ckpt.load_debug_rollout_data:
        raise refusal("debug_train_only", True, "it needs batches", "Give --load-debug-rollout-data PATH_{rollout_id}.")
    for field in ("save_debug_rollout_data", "load_debug_rollout_data"):
        pattern = getattr(s.ckpt, field)
        if pattern is not None and "{rollout_id}" not in pattern:
            raise refusal(field, pattern, "one file per rollout", "Put {rollout_id} into the path.")


RULES: tuple[Rule, ...] = (
    debug_modes_exclude_each_other,
    run_name_is_a_plain_name,
    four_knobs_agree,
    run_length_is_known,
    *staleness.RULES,
    one_correction_at_most,
    correction_bounds_are_ordered,
    old_logprobs_have_one_source,
    rejection_belongs_to_mis,
    one_kl_at_most,
    whitening_where_it_is_part_of_the_estimator,
    *second_models.RULES,
    filter_can_keep_something,
    context_holds_prompt_and_response,
    top_k_is_a_count_or_all,
    rewards_have_a_source,
    dotted_paths_are_well_formed,
    *training.RULES,
    evaluation_has_data,
    learning_rate_decays_downwards,
    engine_addresses_match_the_engine,
    inner_deadlines_are_shorter,
    bus_url_is_understood,
    checkpoint_options_agree,
    *serving.RULES,
    *slots.RULES,
    *colocate.RULES,
)


def check_rules(settings: RunSettings) -> None:
    """Raise SettingsError for the first rule that does not hold."""
    for rule in RULES:
        rule(settings)


def notes(s: RunSettings) -> Iterator[str]:
    """What is allowed but worth knowing before the run starts."""
    r, g = s.rollout, s.grpo
    if r.num_rollout is not None and r.num_epoch is not None:
        yield f"num_epoch = {r.num_epoch} has no effect beside num_rollout = {r.num_rollout}"
    if r.max_weight_staleness == 0:
        yield "max_weight_staleness = 0 is strictly on-policy: generation waits for training"
    if r.max_weight_staleness > 0 and g.no_correction:
        yield f"max_weight_staleness = {r.max_weight_staleness} trains on off-policy data without a correction"
    if r.max_weight_staleness > 0 and r.over_sampling_batch_size > s.max_open_groups:
        yield (
            f"over_sampling_batch_size = {r.over_sampling_batch_size} is cut to {s.max_open_groups}, the open groups "
            f"that max_weight_staleness = {r.max_weight_staleness} admits"
        )
    longest = r.rollout_max_context_len or r.rollout_max_response_len + (r.rollout_max_prompt_len or 0)
    if s.perf.use_dynamic_batch_size and longest > s.perf.max_tokens_per_gpu:
        yield (
            f"samples of up to {longest} tokens exceed max_tokens_per_gpu = {s.perf.max_tokens_per_gpu}: such a sample "
            "gets a micro-batch of its own and needs more memory"
        )
    yield from training.notes(s)
    yield from serving.notes(s)
