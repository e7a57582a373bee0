"""(pure) Rules between settings that say who scores and who makes samples: rewards, tools, agents, functions of the user's."""

import re

from miles_async.settings.addresses import unreachable, without_credentials
from miles_async.settings.errors import refusal
from miles_async.settings.flat import BATCH, Flat
from miles_async.settings.megatron_fields import OF_MEGATRON

HOOK = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+|.+\.py:[A-Za-z_]\w*")
"""package.module.function or FILE.py:function."""
RECORD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*|.+\.py:[A-Za-z_]\w*")
"""package.module:RECORD too."""
FORMS = "Write package.module.function or file.py:function."  # what load_hook takes


SCORE = (
    "Name a rule (--rm-type math, exact_match, ...), a function of yours (--custom-rm-path FILE.py:NAME) or a service "
    "(--rm-type remote_rm --rm-url URL)."
)
"""What scores; docs/data.md has the rules."""
CALLED = (
    *("custom_rm_path", "dynamic_sampling_filter_path", "buffer_filter_path", "data_source_path"),
    *("rollout_function_path", "custom_generate_function_path", "custom_agent_function_path", "environment_path", *BATCH),
    *OF_MEGATRON,
)
"""Settings that name a function of the user's."""
PROGRAMS = ("custom_generate_function_path", "custom_agent_function_path", "environment_path")
"""What of the user's may give its samples their reward itself."""


def scores_itself(s: Flat) -> bool:
    """Whether something else than a rule scores, or may: a function or program of the user's; or nothing needs to be scored."""
    programs = bool(s.own_rollout_function) or any(s.values[name] is not None for name in PROGRAMS)
    return s.custom_rm_path is not None or programs or (s.supervised and not s.evaluates)


def rewards_have_a_source(s: Flat) -> None:
    if s.custom_rm_path is not None:
        return
    if s.rm_type is None and s.metadata_key is None and not scores_itself(s):
        raise s.refusal("rm_type", "nothing scores the samples", SCORE)
    if s.rm_type is not None and "." in s.rm_type:
        raise s.refusal("rm_type", "not the name of a shipped rule", "Give a function of your own as --custom-rm-path.")
    if s.rm_type in ("remote_rm", "boxed_remote_rm") and not s.rm_url:
        raise refusal("rm_url", None, f"rm_type {s.rm_type} asks a service", "Set --rm-url http://HOST:PORT/PATH.")
    if s.rm_type in ("judge", "boxed_judge") and s.judge_url is None:
        raise s.refusal("judge_url", f"rm_type {s.rm_type} asks a model", "Set --judge-url http://HOST:PORT/v1.")


def addresses_are_urls(s: Flat) -> None:
    for field, url in (*(("rm_url", url) for url in s.rm_url), ("judge_url", s.judge_url), ("otel_endpoint", s.otel_endpoint)):
        if url is not None and not url.startswith(("http://", "https://")):
            raise refusal(field, url, "not an http:// or https:// address", "Write the scheme too.")
        if url is not None and (why := unreachable(url)):
            raise refusal(field, without_credentials(url), why, "Write http://HOST:PORT/PATH, PORT from 1 to 65535.")
    if "@" in (s.otel_endpoint or ""):
        remedy = "Put it into the variable OTEL_EXPORTER_OTLP_HEADERS, as authorization=Basic%20BASE64."
        raise refusal("otel_endpoint", "(hidden)", "a login in an address is seen by all users of this host", remedy)


def retries_fit_the_deliveries(s: Flat) -> None:
    if s.reward_max_retries >= s.max_deliveries:
        why = f"an entry is a dead letter after {s.max_deliveries} deliveries (max_deliveries), the first attempt among them"
        remedy = f"Set at most {s.max_deliveries - 1}, or --max-deliveries {s.reward_max_retries + 1}."
        raise s.refusal("reward_max_retries", why, remedy)


def groups_are_scored_by_what_can(s: Flat) -> None:
    if not s.group_rm:
        return
    if s.custom_rm_path is None and s.rm_type != "remote_rm":
        why = f"rm_type {s.rm_type} scores one sample"
        raise s.refusal("group_rm", why, "Set --custom-rm-path or --rm-type remote_rm.")
    if s.num_reward_workers != 1:
        raise s.refusal("num_reward_workers", "group_rm needs a prompt's samples in one place", "Set it to 1.")


def a_rollout_function_has_all_it_asks_for(s: Flat) -> None:
    path = s.own_rollout_function
    if s.rollout_function_path and "sft_rollout." in s.rollout_function_path and not s.supervised:
        raise s.refusal("rollout_function_path", "it belongs to supervised training", "Set --loss-type sft.")
    if not path:
        return
    if s.supervised:
        raise s.refusal("rollout_function_path", "supervised training generates nothing", "Leave it out.")
    if s.multimodal_keys:
        raise s.refusal("rollout_function_path", "it is shown no pictures", "Use --custom-generate-function-path.")
    if s.pause_generation_mode == "abort":
        why = "rollout_function_path would begin all its groups anew with each version"
        raise s.refusal("pause_generation_mode", why, "Set retract.")
    if s.most_workers > 1 and not s.use_router:
        why = "rollout_function_path runs in one worker, which reaches the engines of others through a router"
        raise refusal("num_generation_workers", s.most_workers, why, "Set it to 1, or --use-router.")
    if s.sglang_server_concurrency < s.samples_per_rollout:
        why = f"rollout_function_path holds the {s.samples_per_rollout} samples of a rollout at once"
        raise s.refusal("sglang_server_concurrency", why, f"Set at least {s.samples_per_rollout}.")


def data_of_a_function_has_a_known_end(s: Flat) -> None:
    if s.data_source_path is not None and s.num_rollout is None:
        raise s.refusal("num_epoch", "data_source_path says only at work how many rows it has", "Set --num-rollout N.")


def function_paths_are_well_formed(s: Flat) -> None:
    names = ("custom_rm_path", "data_source_path", "custom_generate_function_path", "custom_agent_function_path",
             "rollout_function_path", "environment_path", *BATCH, *s.hook_paths)  # fmt: skip
    for name in names:
        if s.values[name] is not None and not HOOK.fullmatch(s.values[name]):
            raise s.refusal(name, "not the path of a function or class", FORMS)
    for name in ("dynamic_sampling_filter_path", "buffer_filter_path"):
        if not (s.values[name].isidentifier() or HOOK.fullmatch(s.values[name])):
            raise s.refusal(name, "neither a shipped name nor the path of a function", FORMS)


def tools_and_agents_have_what_they_need(s: Flat) -> None:
    if s.tools and s.custom_agent_function_path:
        raise s.refusal("tools", "an agent of your own brings its own tools", "Leave out one of the two.")
    own, whole = s.custom_generate_function_path, s.own_rollout_function
    if whole and (s.tools or s.custom_agent_function_path):
        why = "it makes all samples, and so do tools and an agent"
        raise s.refusal("rollout_function_path", why, "Keep one of them.")
    if own and (s.tools or s.custom_agent_function_path):
        why = "it is a rollout program, and so are tools and an agent"
        raise s.refusal("custom_generate_function_path", why, "Keep one of them.")
    if s.tools and not s.apply_chat_template:
        raise s.refusal("tools", "the chat template shows them to the model", "Add --apply-chat-template.")
    if ("search" in s.tools) != (s.tool_corpus is not None):
        raise s.refusal("tool_corpus", "the tool search looks into it", "Give both or neither.")


RULES = (
    rewards_have_a_source,
    addresses_are_urls,
    retries_fit_the_deliveries,
    tools_and_agents_have_what_they_need,
    groups_are_scored_by_what_can,
    data_of_a_function_has_a_known_end,
    a_rollout_function_has_all_it_asks_for,
    function_paths_are_well_formed,
)
