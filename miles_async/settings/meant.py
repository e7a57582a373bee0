"""(pure) What a launch script of Miles or slime means by the flags that it leaves out, where our own defaults say something else.

`MEANT` is what `--from-miles` sets and tells; `UNLIKE` says of each other default that differs why a script means the same without
it. Always true: of a flag that Miles has too, the default is the same, or it stands in one of the two (a test).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from actors.generation.engines.records import DEFAULT, ENGINES, OF_MILES
from miles_async.settings.catalog import catalog
from miles_async.settings.derive import SUPERVISED
from miles_async.settings.flat import FULLY_ASYNC, is_own
from miles_async.settings.load import FlagValue
from miles_async.settings.staleness import CORRECTION_FLAGS


class Said(NamedTuple):
    """What a script, and what stands behind it, gives. `values`: field -> its words; `flags`: every flag as it is written."""

    program: str
    values: Mapping[str, Sequence[str]]
    flags: frozenset[str]

    @staticmethod
    def of(program: str, values: Sequence[FlagValue], flags: Sequence[str]) -> Said:
        """The last of repeated flags counts."""
        return Said(program, {value.spec.name: value.words for value in values}, frozenset(flags))

    def beside(self, file: Mapping[str, Any]) -> Said:
        """With the settings of a file, over which flags count."""
        told = {name: (str(value).lower() if isinstance(value, bool) else str(value),) for name, value in file.items()}
        return self._replace(values={**told, **self.values})

    def one(self, field: str, other: str = "") -> str:
        """The first word of a field, or `other` where it is left out."""
        words = self.values.get(field, ())
        return words[0] if words else other

    def on(self, field: str) -> bool:
        """Whether a boolean is given and true."""
        return self.one(field).lower() == "true"

    @property
    def supervised(self) -> bool:
        return self.one("loss_type") in SUPERVISED

    @property
    def backend(self) -> str:
        """Library that trains: Megatron, as in Miles, unless the script says otherwise."""
        return self.one("train_backend", "megatron")

    @property
    def saves(self) -> bool:
        """Whether anything says that checkpoints are written: an interval, a file that asks for one, or our own flag."""
        return any(name in self.values for name in ("save_interval", "save_trigger_sentinel", "no_save"))

    @property
    def runs_ahead(self) -> str:
        """What says that generation runs ahead of training; empty: nothing."""
        if "--fully-async" in self.flags:
            return "--fully-async"
        if is_own(path := self.one("rollout_function_path"), FULLY_ASYNC):
            return f"--rollout-function-path {path}"
        return "train_async.py" if self.program == "train_async.py" else ""

    @property
    def on_gpus(self) -> bool:
        """Whether its engines are what Miles has them to be."""
        return ENGINES.get(self.one("engine", OF_MILES.name), DEFAULT).needs_gpu

    @property
    def corrects(self) -> bool:
        """Whether a correction of stale data is chosen, or none is needed."""
        chosen = [flag[2:].replace("-", "_") for flag in (*CORRECTION_FLAGS, "--no-correction")]
        return self.supervised or self.one("policy_loss") == "dppo" or any(map(self.on, chosen))


class Meant(NamedTuple):
    """`words` of a field that is left out; none: nothing is set, the reason alone is told."""

    field: str
    words: tuple[str, ...]
    why: str
    when: Callable[[Said], bool] = lambda said: True

    @property
    def value(self) -> FlagValue:
        """As a flag would give it."""
        spec = catalog()[self.field]
        return FlagValue(spec, self.words, (spec.negative_flag if self.words == ("false",) else None) or spec.flag)

    @property
    def text(self) -> str:
        """The flag with its value, and why."""
        words = () if catalog()[self.field].kind == "bool" else self.words
        return f"{' '.join((self.value.typed, *words))}: {self.why}"


NODE = 8
"""GPUs of a node, where a script says nothing."""


def _hosts(said: Said) -> int:
    """Nodes of an engine that has its own."""
    each = said.one("rollout_num_gpus_per_engine", "1")
    return int(each) // NODE if each.isdecimal() and not said.on("colocate") and said.on_gpus else 1


def _several_nodes(said: Said) -> bool:
    return (said.one("actor_num_nodes", "1") != "1" or _hosts(said) > 1) and "train_master" not in said.values


def _bound(said: Said) -> tuple[Meant, ...]:
    """The bound that generation ahead of training means, and its correction."""
    if not (ahead := said.runs_ahead) or "max_weight_staleness" in said.values:
        return ()
    why = f"{ahead} generates while it trains; {'its data is one step old' if ahead == 'train_async.py' else 'no bound is given'}"
    found = [Meant("max_weight_staleness", ("1",), why)]
    if not said.corrects and "custom_loss_function_path" in said.values:
        found.append(Meant("no_correction", ("true",), "a loss of one's own corrects for old data itself"))
    elif not said.corrects:
        found.append(Meant("use_tis", ("true",), "data from older weights is corrected"))
    return tuple(found)


MEANT: tuple[Meant, ...] = (
    Meant("engine", (OF_MILES.name,), f"Miles has no other; --engine {DEFAULT.name} is for a CPU"),
    Meant("train_backend", ("megatron",), "Miles' default", lambda said: said.on_gpus),
    Meant("model_dtype", ("bfloat16",), "Miles trains in no other", lambda said: said.on_gpus),
    Meant("launcher", ("ray",), "trainer or engines are on several nodes, which Ray joins in Miles", _several_nodes),
    Meant("actor_num_gpus_per_node", (str(NODE),), "Miles' default"),
    Meant("dynamic_sampling_filter_path", ("none",), "Miles filters no group unless told to"),
    Meant("n_samples_per_prompt", ("1",), "Miles' default"),
    Meant("metadata_key", ("metadata",), "Miles' default, where rows have it"),
    Meant("tool_key", ("tools",), "Miles' default, where rows have it",
          lambda said: said.one("apply_chat_template", "true" if said.supervised else "").lower() == "true"),
    Meant("apply_chat_template", ("true",), "supervised dialogues are rendered by it in Miles", lambda said: said.supervised),
    Meant("rollout_skip_special_tokens", ("false",), "Miles leaves them in the text that is scored"),
    Meant("math_rule", ("math_boxed",), "in Miles the reward math counts the last \\boxed alone",
          lambda said: not said.supervised and "custom_rm_path" not in said.values),
    Meant("no_save", ("true",), "no interval is given, so Miles writes no checkpoint",
          lambda said: not said.saves and not {"load", "save_hf", "finetune"} & said.values.keys()),
    Meant("save_interval", (), "left out, Miles writes no checkpoint; here, with --load or --save-hf, one every 10 rollouts",
          lambda said: not said.saves and bool({"load", "save_hf", "finetune"} & said.values.keys())),
    Meant("lr_decay_style", ("linear",), "Megatron's default", lambda said: said.backend == "megatron"),
    Meant("adam_beta2", ("0.95",), "the default of Miles' FSDP backend", lambda said: said.backend == "fsdp"),
    Meant("weight_decay", ("0.0",), "the default of Miles' FSDP backend", lambda said: said.backend == "fsdp"),
)  # fmt: skip
"""What is set where a script says nothing, in this order; some of it is not a flag of Miles, and names what Miles always does."""

UNLIKE: Mapping[str, str] = {
    "apply_chat_template_kwargs": "an empty object says nothing",
    "async_save": "when a checkpoint is written, not what",
    "attn_implementation": "kernels of one result",
    "balance_by_flops": "how work is dealt out, not what is learned",
    "balance_data": "how work is dealt out, not what is learned",
    "buffer_filter_path": "the oldest first in both",
    "calculate_per_token_loss": "off in both",
    "critic_lr": "lr in both",
    "data_source_path": "Miles' own class reads what prompt_data names",
    "debug_determinism": "looks on",
    "disable_grpo_std_normalization": "off in both, but for one sample a prompt, where it divides by nothing",
    "disable_rewards_normalization": "off in both",
    "env_report": "looks on",
    "eps_clip_high": "eps_clip in both",
    "eval_input_key": "as in training in both",
    "eval_label_key": "as in training in both",
    "eval_max_in_flight": "samples here, evaluations in Miles",
    "eval_max_response_len": "as in training in both",
    "eval_reward_key": "as in training in both",
    "eval_temperature": "as in training in both",
    "eval_tool_key": "as in training in both",
    "eval_top_k": "as in training in both",
    "eval_top_p": "as in training in both",
    "generate_tool_call_parser": "the one that the chat template teaches; Miles needs it named",
    "global_batch_size": "all samples of a rollout in both",
    "hf_checkpoint": "required in both",
    "load": "the same command resumes here; without checkpoints there is nothing to resume",
    "log_probs_max_tokens_per_gpu": "max_tokens_per_gpu in both",
    "loss_mask_type": "qwen learns all messages of the assistant",
    "loss_type": "policy_loss in both",
    "max_tokens_per_gpu": "how a batch is cut, not what is learned",
    "max_weight_staleness": "0 is a run of train.py; what generates ahead has a bound here (_bound)",
    "mlflow_experiment_name": "where numbers go",
    "normalize_advantages": "Miles refuses the estimators that whiten without it",
    "num_steps_per_rollout": "1 in both",
    "offload": "colocate implies it in both",
    "offload_rollout": "colocate implies it in both",
    "offload_train": "colocate implies it in both",
    "opd_type": "follows from the teacher that is given",
    "over_sampling_batch_size": "a rollout batch in both, at the bound of train.py",
    "partial_rollout": "without an interruption there is nothing to continue",
    "prompt_data": "required in both",
    "ref_load": "Miles refuses a KL term without it",
    "rollout_batch_size": "required in Miles",
    "rollout_max_response_len": "required here to be a number; a script that trains says one",
    "rollout_num_gpus": "follows from the engines in both",
    "save": "without an interval nothing is written",
    "save_debug_rollout_data": "off in both",
    "save_debug_train_data": "off in both",
    "train_env_vars": "an empty object says nothing",
    "train_memory_margin_bytes": "a check before the start",
    "use_dynamic_batch_size": "how a batch is cut, not what is learned",
    "use_tensorboard": "off in both",
}
"""Field whose default differs in form -> why a script that leaves it out means the same here."""


def meant(said: Said) -> tuple[Meant, ...]:
    """All that a script means and does not say."""
    found = [one for one in MEANT if one.field not in said.values and one.when(said)]
    if (hosts := _hosts(said)) > 1 and "sglang_nnodes" not in said.values:
        found.append(Meant("sglang_nnodes", (str(hosts),), f"Miles' nodes have {NODE} GPUs"))
    return (*found, *_bound(said))


def ahead(said: Said) -> tuple[Meant, ...]:
    """What a command line of ours means that asks for generation ahead of training in Miles' words."""
    return _bound(said)
