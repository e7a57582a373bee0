"""(pure) Settings as scripts of Miles and slime give them, in our words: functions that come with Miles, and what Miles ignores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.generation.engines.records import DEFAULT, ENGINES, NONE
from miles_async.settings.derive import SUPERVISED
from miles_async.settings.flat import PACKAGES, is_own

BY_NAME = {
    "custom_rm_path": (("rm_hub",), "what rm_type names scores"),
    "custom_generate_function_path": (
        ("sglang_rollout", "inference_rollout", "generate_hub.single_turn"), "samples are generated so without it"
    ),
    "data_source_path": (("data_source",), "prompt_data is read so without it"),
}  # fmt: skip
"""Setting -> modules of Miles' own that do what is done without the setting, and what is told."""
WHOLE = tuple(filter(None, PACKAGES))
OF_ENGINES = (
    *("colocate", "offload", "offload_train", "offload_rollout", "rollout_num_gpus", "rollout_num_gpus_per_engine", "server_args"),
    *("router_args", "eval_interval", "eval_prompt_data", "eval_config", "update_weight_transport"),
)
"""What is nothing where no engine runs."""
DISTILLATION = ("on_policy_distillation",)
NOTHING = "zero"  # the reward where the teacher's log-probs are all that is learned


def in_our_words(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(settings, what to tell of the changes) of settings by name, as they were given."""
    found, told = dict(given), list[str]()
    for name, (modules, why) in BY_NAME.items():
        if is_own(path := found.get(name) or "", modules, WHOLE):
            del found[name]
            told.append(f"{name} = {path} is not called: {why}")
    _distil(found, told)
    _teach(found, told)
    _supervise(found, told)
    shares = found.get("colocate") and ENGINES.get(found.get("engine", ""), DEFAULT).needs_gpu
    if shares and (gpus := found.pop("rollout_num_gpus", None)) is not None:
        told.append(f"rollout_num_gpus = {gpus} has no effect beside colocate: engines have the trainer's GPUs")
    return found, told


def _supervise(found: dict[str, Any], told: list[str]) -> None:
    """Miles' supervised training alone: batches come from the data, not from a recording, and there is no engine."""
    if not found.get("debug_train_only") or found.get("loss_type") not in SUPERVISED or found.get("load_debug_rollout_data"):
        return
    left = [name for name in ("debug_train_only", *OF_ENGINES) if name in found]
    for name in left:
        del found[name]
    found["engine"] = NONE.name
    told.append(
        f"debug_train_only with loss_type {found['loss_type']} is engine = {NONE.name}: no engines are started (without "
        f"effect: {', '.join(left[1:]) or 'nothing else'})"
    )


def _teach(found: dict[str, Any], told: list[str]) -> None:
    """Where a teacher speaks of every token, no reward is needed."""
    teacher = found.get("use_opd") or found.get("advantage_estimator") == "on_policy_distillation"
    scored = ("rm_type", "custom_rm_path", "metadata_key", "custom_generate_function_path", "custom_agent_function_path")
    if teacher and not any(map(found.get, scored)):
        found["rm_type"] = NOTHING
        told.append(f"rm_type is {NOTHING}: the teacher alone teaches")


def _distil(found: dict[str, Any], told: list[str]) -> None:
    """Miles asks a served teacher by a reward function; here the reward room asks it, beside any reward."""
    path = found.get("custom_rm_path") or ""
    if is_own(found.get("custom_reward_post_process_path") or "", DISTILLATION, WHOLE):
        told.append(f"custom_reward_post_process_path = {found.pop('custom_reward_post_process_path')} is not called")
    if not is_own(path, DISTILLATION, WHOLE):
        return
    del found["custom_rm_path"]
    if (urls := found.pop("rm_url", ())) and not found.get("opd_teacher_urls"):
        found["opd_teacher_urls"] = tuple(url.removesuffix("/").removesuffix("/generate") for url in urls)
    found.setdefault("rm_type", NOTHING)
    teachers = ", ".join(found.get("opd_teacher_urls", ())) or "none"
    asked = f"opd_teacher_urls ({teachers}) are asked, and rm_type is {found['rm_type']}"
    told.append(f"custom_rm_path = {path} is not called: {asked}")
