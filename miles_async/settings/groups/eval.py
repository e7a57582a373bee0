"""EVAL: held-out problems, answered by the serving engines while training goes on."""

from typing import Annotated

from miles_async.settings.doc import Group, PositiveInt, doc


class EvalSettings(Group, frozen=True, kw_only=True):
    """Evaluation during the run."""

    eval_interval: Annotated[
        PositiveInt | None,
        doc(
            "Rollouts between evaluations; the last rollout is always evaluated. Unset: no evaluation.",
            unit="rollouts",
            live="next version active (evaluator)",
        ),
    ] = None
    eval_share: Annotated[
        float,
        doc(
            "Share of each engine's slots that evaluation may take while training prompts wait; slots that they leave idle it may "
            "take too. 1 puts evaluation first, and training waits for it.",
            live="next lease (generation)",
            gt=0,
            le=1,
            ours=True,
        ),
    ] = 0.25
    eval_prompt_data: Annotated[
        tuple[str, ...],
        doc("Held-out prompts: pairs of name and path, space separated, or one path (named eval)."),
    ] = ()
    eval_config: Annotated[
        str | None,
        doc(
            "File (TOML or YAML) with held-out sets in place of eval_prompt_data: eval.datasets, a list of tables with name, path "
            "and what differs (rm_type, n_samples_per_eval_prompt, temperature, max_response_len, ...), and eval.defaults."
        ),
    ] = None
    eval_max_in_flight: Annotated[
        PositiveInt | None, doc("Most held-out samples on the bus at once. Unset: all of an evaluation.", unit="samples")
    ] = None
    eval_input_key: Annotated[str, doc("Column with the prompt in eval_prompt_data.", derived="input_key")]
    eval_label_key: Annotated[str | None, doc("Column with the answer in eval_prompt_data.", derived="label_key")]
    eval_tool_key: Annotated[str | None, doc("Column with tools in eval_prompt_data.", derived="tool_key")]
    n_samples_per_eval_prompt: Annotated[int, doc("Samples per held-out prompt.", unit="samples", ge=1)] = 1
    eval_temperature: Annotated[
        float, doc("Sampling temperature in evaluation; 0 is greedy.", derived="rollout_temperature", ge=0, le=100)
    ]
    eval_top_p: Annotated[float, doc("Nucleus mass in evaluation.", derived="rollout_top_p", gt=0, le=1)]
    eval_top_k: Annotated[
        int, doc("Sample from the k likeliest tokens in evaluation; -1 means all.", derived="rollout_top_k", ge=-1)
    ]
    eval_max_response_len: Annotated[
        int, doc("Most tokens per evaluated sample.", unit="tokens", derived="rollout_max_response_len", ge=1)
    ]
    eval_reward_key: Annotated[str | None, doc("The same as reward_key, for evaluation.", derived="reward_key")]
    skip_eval_before_train: Annotated[bool, doc("Leave out the evaluation before the first rollout.")] = False
