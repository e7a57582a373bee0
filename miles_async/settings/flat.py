"""(pure) All settings of a run by name, whatever table they stand in: what rules look at, at the start and at a patch alike.

What follows from several settings is told here once; `RunSettings` answers through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from actors.generation.engines.kind import EngineKind
from actors.runtime.transports.kind import TransportKind
from actors.trainer.objective_estimators import ESTIMATORS, Estimator
from miles_async.settings.derive import SUPERVISED, needs_whole_groups, solve_four_knobs
from miles_async.settings.errors import SettingsError
from miles_async.settings.kinds import engine_of, transport_of
from miles_async.settings.launchers import LAUNCHERS, LauncherKind

Correction = Literal["none", "tis", "icepop", "mis", "decoupled", "rollout_logprobs"]
HOOK_FIELDS = (
    "custom_loss_function_path",
    "custom_advantage_function_path",
    "custom_tis_function_path",
    "custom_pg_loss_reducer_function_path",
    "custom_reward_post_process_path",
)

BATCH = (
    *("rollout_sample_filter_path", "custom_convert_samples_to_train_data_path", "rollout_data_postprocess_path"),
    "rollout_all_samples_process_path",
)
"""Functions of the user's that see many samples at once, with Miles' signatures."""
READERS = (
    *("custom_rm_path", "custom_generate_function_path", "rollout_function_path", "custom_agent_function_path"),
    *("environment_path", "data_source_path"),
)
"""What of the user's may bring rewards or rows of its own, and reads labels as they are."""
PACKAGES = ("miles.rollout.", "slime.rollout.", "")
FULLY_ASYNC = ("fully_async_rollout",)
MILES_OWN = (
    *("sglang_rollout", "inference_rollout", "modular_rollout", "sft_rollout", "sglang_streaming_rollout"),
    *FULLY_ASYNC,
)
"""Modules of rollout functions that come with Miles and slime: what they do is what we do."""


def is_own(path: str, modules: Iterable[str], packages: Iterable[str] = PACKAGES) -> bool:
    """Whether a dotted path leads into one of these modules of Miles or slime."""
    return path.startswith(tuple(f"{package}{module}." for package in packages for module in modules))


class Flat:
    """`flat.lr` is the setting of that name; None where one stays off the bus."""

    __slots__ = ("values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"no setting is called {name}") from None

    def refusal(self, field: str, problem: str, remedy: str) -> SettingsError:
        """The error of a rule that a setting breaks, with its value."""
        return SettingsError(problem, field=field, value=self.values[field], remedy=remedy)

    def changed(self, patch: Mapping[str, Any]) -> Flat:
        """With a patch, and what follows from it. SettingsError when the four knobs disagree."""
        values = {**self.values, **patch}
        values["global_batch_size"], _ = solve_four_knobs(values, None, values["num_steps_per_rollout"])
        return Flat(values)

    @property
    def off_policy_correction(self) -> Correction:
        """The one correction in force; a rule refuses more than one."""
        chosen: tuple[tuple[bool, Correction], ...] = (
            (self.use_tis, "tis"),
            (self.use_icepop, "icepop"),
            (self.use_mis, "mis"),
            (self.use_decoupled_loss, "decoupled"),
            (self.use_rollout_logprobs, "rollout_logprobs"),
        )
        return next((name for on, name in chosen if on), "none")

    @property
    def hook_paths(self) -> dict[str, str]:
        """Setting -> dotted path, of the objective's hooks that are set."""
        return {name: self.values[name] for name in HOOK_FIELDS if self.values[name] is not None}

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen reference policy is loaded at all."""
        return bool(self.use_kl_loss or self.kl_coef)

    @property
    def estimator(self) -> Estimator:
        """The record of the advantage estimator."""
        return ESTIMATORS[self.advantage_estimator]

    @property
    def engine_kind(self) -> EngineKind:
        """The record of the engine."""
        return engine_of(self.engine)

    @property
    def transport_kind(self) -> TransportKind:
        """The record of the way of weights."""
        return transport_of(self.update_weight_transport)

    @property
    def launcher_kind(self) -> LauncherKind:
        """The record of the launcher."""
        return LAUNCHERS[self.launcher]

    @property
    def on_megatron(self) -> bool:
        """Whether Megatron trains, and not torch."""
        return bool(self.train_backend == "megatron")

    @property
    def distills(self) -> bool:
        """Whether a teacher is asked at all."""
        return bool(self.use_opd or self.estimator.teacher)

    @property
    def datasets(self) -> tuple[tuple[str, str], ...]:
        """(name, path) of each held-out data set, in the order given."""
        data = tuple(self.eval_prompt_data)
        return (("eval", data[0]),) if len(data) == 1 else tuple(zip(data[::2], data[1::2], strict=False))

    @property
    def supervised(self) -> bool:
        """Whether the data's own responses are learned."""
        return self.loss_type in SUPERVISED

    @property
    def reads_labels(self) -> bool:
        """Whether a function of the user's reads labels, which may be objects then."""
        return any(self.values[name] is not None for name in READERS)

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out data sets."""
        return bool(self.eval_prompt_data or self.eval_config)

    @property
    def own_rollout_function(self) -> str:
        """The rollout function that makes the samples; empty = none, or one of those that come with Miles, which do what we do."""
        path = self.rollout_function_path or ""
        return "" if is_own(path, MILES_OWN) else path

    @property
    def samples_per_rollout(self) -> int:
        """Samples in one rollout: rollout_batch_size * n_samples_per_prompt."""
        return int(self.rollout_batch_size * self.n_samples_per_prompt)

    @property
    def train_ranks(self) -> int:
        """Processes of the trainer: actor_num_nodes * actor_num_gpus_per_node."""
        return int(self.actor_num_nodes * self.actor_num_gpus_per_node)

    @property
    def most_workers(self) -> int:
        """Rollout workers that the run ever has of its own."""
        return int(self.max_workers or self.num_generation_workers)

    @property
    def lent_workers(self) -> tuple[str, ...]:
        """Workers whose engines have the trainer's GPUs while it lends them."""
        each = self.rollout_num_gpus_per_engine if self.engine_kind.needs_gpu else 1
        return tuple(f"lent-{i}" for i in range(self.actor_num_gpus_per_node // each)) if self.lend_trainer_gpus else ()

    @property
    def groups_per_version(self) -> int:
        """Prompt groups trained between two published policy versions: B of the admission bound."""
        return int(self.rollout_batch_size * self.update_weights_interval)

    @property
    def lookahead_versions(self) -> int:
        """Staleness that `wait` adds to what admission implies, in policy versions: ceil((W - 1) / B); else 0."""
        if self.staleness_policy != "wait":
            return 0
        return -(-(int(self.staleness_lookahead) - 1) // self.groups_per_version)

    @property
    def model_parallel_ranks(self) -> int:
        """Ranks of the trainer that share one copy of the model; with FSDP each has a part of every one."""
        return int(self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size)

    @property
    def data_ranks(self) -> int:
        """Ranks of the trainer with samples of their own."""
        return max(1, self.train_ranks // self.model_parallel_ranks)

    @property
    def needs_whole_groups(self) -> bool:
        """Whether groups cannot be trained in parts."""
        return needs_whole_groups(self.values)

    @property
    def max_open_groups(self) -> int:
        """Groups that may be issued and not yet trained, dropped or dead: (eta + 1 - lookahead) * B, at least B."""
        return (int(self.max_weight_staleness) + 1 - self.lookahead_versions) * self.groups_per_version
