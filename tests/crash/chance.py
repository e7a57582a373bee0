"""Settings and patches of random runs, each from a seed: what the rules refuse is drawn again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.crash.house import Tables, evaluating, merged

Patch = list[str]
MOODS = "tests.crash.moods"


class Kept(NamedTuple):
    """What a run keeps from its beginning: no other data, model or size of a group is taken up, nor samples made or scored in
    another way."""

    toy: Path
    talks: bool  # the toy with a chat template
    n_samples: int
    shuffle: bool
    made: dict[str, Any] | None = None
    """How samples are made and scored; None: not drawn yet."""

    def begun(self, drawn: Tables) -> Kept:
        """After a start with these settings."""
        return self._replace(made={name: value for name, value in drawn["rollout"].items() if name in MADE})

    def tables(self) -> Tables:
        data = {"prompt_data": str(self.toy / "prompts.jsonl"), "apply_chat_template": self.talks}
        data |= {"n_samples_per_prompt": self.n_samples, "rollout_shuffle": self.shuffle}
        return {"model": {"hf_checkpoint": str(self.toy / "model")}, "rollout": data}


PROGRAMS: dict[str, dict[str, Any]] = {
    "none": {},
    "turns": {"custom_generate_function_path": "tests.crash.episode.rollout"},
    "rewritten": {"custom_generate_function_path": "tests.crash.episode.rewritten"},
    "lost world": {"custom_generate_function_path": "tests.crash.episode.lost_world"},
    "wander": {"custom_generate_function_path": f"{MOODS}.wander"},
    "moody": {"custom_generate_function_path": f"{MOODS}.moody"},
    "game": {
        "custom_generate_function_path": f"{MOODS}.guesses",
        "environment_path": "actors.environments.guess.Guess",
        "environment_slots": 6,
    },
    "whole groups": {"rollout_function_path": "tests.crash.episode.whole_groups"},
    "tools": {"tools": ["calculator"], "max_turns": 4},
    "agent": {"custom_agent_function_path": f"{MOODS}.agent"},
}
TALKS = ("tools", "agent")  # through a chat template
REWARDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"num_reward_workers": 2},
    {"rm_type": "random"},
    {"custom_rm_path": f"{MOODS}.reward", "reward_timeout_s": 1.0},
    {"custom_rm_path": f"{MOODS}.reward", "reward_timeout_s": 1.0, "reward_max_retries": 1},
    {"custom_rm_path": f"{MOODS}.rewards", "reward_timeout_s": 1.0, "group_rm": True},
)
MADE = {name for made in (*PROGRAMS.values(), *REWARDS) for name in made}


def settings_of(chance: Random, kept: Kept) -> Tables:
    """Tables of one start."""
    bound = chance.choice([0, 1, 2, 2, 3, 4])
    batch = chance.choice([2, 3, 4, 6])
    over = chance.choice([None, batch, batch + 2, 3 * batch])
    rules = ["auto", "split", "whole", "member", "wait", "drop"] if bound else ["auto", "whole"]
    tables: Tables = {
        "rollout": {
            "max_weight_staleness": bound,
            "rollout_batch_size": batch,
            "over_sampling_batch_size": over,
            "staleness_policy": chance.choice(rules),
            "partial_rollout": chance.random() < 0.7,
            "buffer_filter_path": chance.choice(["fifo", "fifo", "freshness_first", "restart_stale"]),
            "mask_offpolicy_in_partial_rollout": chance.random() < 0.1,
            "rollout_max_response_len": chance.choice([24, 48, 64]),
            "max_tokens_per_slice": chance.choice([None, None, None, 12]),
            "update_weights_interval": chance.choice([1, 1, 1, 2, 3]),
            "dynamic_sampling_filter_path": chance.choice(["none", "check_reward_nonzero_std", f"{MOODS}.picky"]),
            **({**program(chance, kept), **chance.choice(REWARDS)} if kept.made is None else kept.made),
        },
        "sglang": engines(chance),
        "ckpt": {"save_interval": chance.choice([1, 2, 3])},
        "bus": {"inline_limit_bytes": chance.choice([128 << 10, 128 << 10, 1024])},
        "grpo": {
            "advantage_estimator": chance.choice(["grpo", "grpo", "gspo", "reinforce_plus_plus_baseline"]),
            "num_steps_per_rollout": chance.choice([1, 1, 2]),
            "use_dynamic_global_batch_size": chance.random() < 0.1,
        },
    }
    if chance.random() < 0.2:
        tables["governor"] = governor(chance, tables)
    if chance.random() < 0.4:
        more = {
            "eval_interval": chance.choice([1, 2, 3]),
            "eval_share": chance.choice([0.05, 0.25, 1.0]),
            "eval_max_in_flight": chance.choice([None, 3]),
            "n_samples_per_eval_prompt": chance.choice([1, 1, 2]),
            "skip_eval_before_train": chance.random() < 0.5,
        }
        tables = merged(tables, merged(evaluating(kept.toy), {"eval": more}))
    return merged(tables, kept.tables())


def program(chance: Random, kept: Kept) -> dict[str, Any]:
    """How samples are made: in one turn half of the time."""
    names = [name for name in PROGRAMS if name != "none" and (kept.talks or name not in TALKS)]
    return PROGRAMS["none" if chance.random() < 0.4 else chance.choice(names + [n for n in names if n in TALKS] * 2)]


def engines(chance: Random) -> dict[str, Any]:
    """Workers, what one takes at once, how weights reach them, and whether they are on the trainer's GPUs (seats on the CPU)."""
    found: dict[str, Any] = {
        "num_generation_workers": chance.choice([0, 1, 1, 1, 2, 2, 3]),
        "sglang_server_concurrency": chance.choice([4, 8, 16, 40, "auto"]),
        "sglang_concurrency_min": 2,
        "sglang_concurrency_max": chance.choice([None, 12]),
        "pause_generation_mode": chance.choice(["retract", "retract", "in_place", "abort"]),
        "update_weight_transport": chance.choice([None, None, "disk", "ipc", "nccl"]),
        "update_weight_deadline_s": 20.0,
    }
    if chance.random() < 0.3:
        found |= {"tail_slots": chance.choice([1, 2]), "tail_after_tokens": chance.choice([8, 20])}
    if chance.random() < 0.1:
        found |= {"update_weight_wave_fraction": 0.5}
    shared = chance.choice(["", "", "", "", "colocate", "lend_trainer_gpus"])
    if shared:
        found |= {shared: True, **({"offload_train_target": "disk"} if shared == "colocate" else {"lend_after_s": 0.1})}
    return found


def governor(chance: Random, tables: Tables) -> dict[str, Any]:
    """Envelopes around what is set."""
    rollout, slots = tables["rollout"], tables["sglang"]["sglang_server_concurrency"]
    batch, over = rollout["rollout_batch_size"], rollout["over_sampling_batch_size"]
    found = {"governor": True, "governor_interval": 4, "governor_staleness": f"{min(1, rollout['max_weight_staleness'])}:5"}
    if over is not None and chance.random() < 0.5:
        found["governor_oversampling"] = f"{batch}:{4 * batch}"
    if slots != "auto" and chance.random() < 0.5:
        found["governor_concurrency"] = "4:48"
    return found


PATCHES: dict[str, Callable[[Random], Any]] = {
    "max_weight_staleness": lambda chance: chance.choice([0, 1, 2, 3, 4, 6]),
    "staleness_policy": lambda chance: chance.choice(["auto", "split", "whole", "member", "wait", "drop"]),
    "rollout_batch_size": lambda chance: chance.choice([2, 3, 4, 6]),
    "over_sampling_batch_size": lambda chance: chance.choice([0, 2, 4, 6, 12]),
    "global_batch_size": lambda chance: chance.choice([4, 8, 12, 16, 24]),
    "save_interval": lambda chance: chance.choice([1, 2, 3, 7]),
    "rollout_max_response_len": lambda chance: chance.choice([8, 24, 48, 64]),
    "partial_save_tokens": lambda chance: chance.choice([1, 8, 32]),
    "max_tokens_per_slice": lambda chance: chance.choice([5, 12, 40, "none"]),
    "eval_interval": lambda chance: chance.choice([1, 2, 3]),
    "eval_share": lambda chance: chance.choice([0.05, 0.5, 1]),
    "sglang_server_concurrency": lambda chance: chance.choice([1, 2, 4, 8, 16, "auto"]),
    "tail_slots": lambda chance: chance.choice([1, 2]),
    "tail_after_tokens": lambda chance: chance.choice([8, 30]),
    "pause_generation_mode": lambda chance: chance.choice(["retract", "in_place", "abort"]),
    "lr": lambda chance: chance.choice([0, 1e-3, 1e-2]),
    "clip_grad": lambda chance: chance.choice([0, 1]),
    "dynamic_sampling_filter_path": lambda chance: chance.choice(["none", "check_reward_nonzero_std"]),
    "reward_version": lambda chance: chance.choice([1, 2, 3, 4]),
    "max_masked_fraction": lambda chance: chance.choice([0.01, 0.5]),
    "governor": lambda chance: chance.choice(["true", "false"]),
    "governor_staleness": lambda chance: chance.choice(["0:2", "1:4", "2:6"]),
}


def patch_of(chance: Random) -> Patch:
    """One to three live settings, as `miles-async tune` takes them."""
    return [f"{name}={PATCHES[name](chance)}" for name in chance.sample(sorted(PATCHES), chance.choice([1, 1, 2, 3]))]
