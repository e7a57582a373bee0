"""GRPO: the objective. Advantages, policy loss, KL terms and off-policy corrections."""

from typing import Annotated, Literal

import msgspec

from actors.trainer.objective_estimators import EstimatorName
from miles_async.settings.doc import Group, PositiveInt, doc

Level = Literal["token", "sequence", "geometric"]


class GrpoSettings(Group, frozen=True, kw_only=True):
    """The objective."""

    advantage_estimator: Annotated[EstimatorName, doc("How rewards become advantages, and which policy loss goes with them.")] = (
        "grpo"
    )
    policy_loss: Annotated[
        Literal["ppo", "gspo", "cispo", "dppo", "nll"],
        doc(
            "The policy loss. dppo leaves tokens out whose probability has moved by more than dppo_delta, in place of clipping the "
            "ratio; that bounds stale data too.",
            derived="nll with loss_type sft, gspo or cispo with the estimator of that name, else ppo",
            ours=True,
        ),
    ]
    dppo_divergence: Annotated[
        Literal["tv", "kl"], doc("For policy_loss dppo: how far a token has moved, in probability (tv) or nats (kl).", ours=True)
    ] = "tv"
    dppo_delta: Annotated[
        float, doc("For policy_loss dppo: how far a token may move; 0.05 is usual with dppo_divergence kl.", gt=0, ours=True)
    ] = 0.15
    dppo_cap: Annotated[
        float, doc("For policy_loss dppo: upper bound of the ratio, for tokens that move back from far.", ge=1, ours=True)
    ] = 20.0
    global_batch_size: Annotated[
        int,
        doc(
            "Samples per optimizer step; global_batch_size * num_steps_per_rollout = rollout_batch_size * n_samples_per_prompt.",
            unit="samples",
            derived="rollout_batch_size * n_samples_per_prompt / num_steps_per_rollout",
            live="next step (trainer)",
            follows=True,
            ge=1,
        ),
    ]
    num_steps_per_rollout: Annotated[
        int,
        doc(
            "Optimizer steps per rollout.",
            unit="steps",
            derived="rollout_batch_size * n_samples_per_prompt / global_batch_size, or 1",
            ge=1,
        ),
    ]
    use_dynamic_global_batch_size: Annotated[
        bool,
        doc(
            "One optimizer step over what a rollout batch really holds: its trajectories rounded down to a multiple of "
            "the trainer's processes; the youngest that are over are left out and reported as trimmed. Takes no other "
            "global_batch_size or num_steps_per_rollout than what this gives."
        ),
    ] = False
    eps_clip: Annotated[
        float, doc("PPO clip range below 1; 1 leaves no lower bound (CISPO's paper).", live="next step (trainer)", gt=0, le=1)
    ] = 0.2
    eps_clip_high: Annotated[
        float,
        doc(
            "PPO clip range above 1; larger than eps_clip is clip-higher.",
            derived="eps_clip",
            live="next step (trainer)",
            gt=0,
        ),
    ]
    eps_clip_c: Annotated[
        Annotated[float, msgspec.Meta(gt=1)] | None,
        doc("Dual clip: bound on the ratio for negative advantages, above 1. Unset: off."),
    ] = None

    use_kl_loss: Annotated[bool, doc("Add KL to the frozen reference to the loss; coefficient 0 only reports it.")] = False
    kl_loss_coef: Annotated[
        float, doc("For use_kl_loss: weight of the KL in the loss.", live="next step (trainer)", ge=0, le=1e6)
    ] = 0.0
    kl_loss_type: Annotated[Literal["k1", "k2", "k3", "low_var_kl"], doc("For use_kl_loss: how the KL is estimated.")] = "k1"
    use_unbiased_kl: Annotated[bool, doc("For use_kl_loss: multiply the KL by the importance ratio; makes it unbiased.")] = False
    kl_coef: Annotated[
        float, doc("For reinforce_plus_plus, its baseline form and ppo: weight of the KL taken off the reward.", ge=0)
    ] = 0.0
    entropy_coef: Annotated[float, doc("Weight of the entropy bonus.", live="next step (trainer)", ge=0, le=1e6)] = 0.0
    ref_update_interval: Annotated[
        PositiveInt | None,
        doc("Rollouts after which the reference takes the policy's weights. Unset: never.", unit="rollouts"),
    ] = None

    use_tis: Annotated[bool, doc("Truncated importance sampling: weight tokens by trainer over engine probability, clamped.")] = (
        False
    )
    tis_clip: Annotated[
        float,
        doc(
            "For use_tis and use_icepop: upper bound of the weight.",
            aliases=("tis_threshold",),
            live="next step (trainer)",
            gt=0,
            le=1e6,
        ),
    ] = 2.0
    tis_clip_low: Annotated[float, doc("For use_tis and use_icepop: lower bound of the weight.", ge=0)] = 0.0
    use_icepop: Annotated[bool, doc("Like use_tis, but tokens outside the bounds get weight 0.", ours=True)] = False
    use_mis: Annotated[bool, doc("Masked importance sampling, with the tis_* and rs_* options below.", ours=True)] = False
    tis_level: Annotated[Level, doc("For use_mis: what the weight is taken over.", ours=True)] = "token"
    tis_mode: Annotated[
        Literal["truncate", "clip", "mask"], doc("For use_mis: what happens to weights outside the bounds.", ours=True)
    ] = "truncate"
    tis_lower_bound: Annotated[
        float, doc("For use_mis: lower bound of the weight.", derived="1 / tis_upper_bound", ge=0, ours=True)
    ]
    tis_upper_bound: Annotated[float, doc("For use_mis: upper bound of the weight.", gt=0, ours=True)] = 2.0
    tis_batch_normalize: Annotated[bool, doc("For use_mis: divide weights by their mean over the batch.", ours=True)] = True
    use_rs: Annotated[bool, doc("For use_mis: also reject, that is mask, what lies outside the rs bounds.", ours=True)] = False
    rs_level: Annotated[Level, doc("For use_rs: what the ratio is taken over.", ours=True)] = "token"
    rs_lower_bound: Annotated[float, doc("For use_rs: lower bound of the ratio.", derived="tis_lower_bound", ge=0, ours=True)]
    rs_upper_bound: Annotated[float, doc("For use_rs: upper bound of the ratio.", derived="tis_upper_bound", gt=0, ours=True)]
    rs_veto_threshold: Annotated[
        float, doc("For use_rs: one token with a smaller ratio rejects the whole sequence; 0 never does.", ge=0, ours=True)
    ] = 1e-4
    use_decoupled_loss: Annotated[
        bool, doc("Decoupled PPO: clip around log-probs recomputed by the trainer, weight by them over the engine's.", ours=True)
    ] = False
    decoupled_cap: Annotated[float, doc("For use_decoupled_loss: upper bound of the weight.", gt=0, ours=True)] = 5.0
    get_mismatch_metrics: Annotated[bool, doc("Report what the chosen correction would do and do not apply it.")] = False
    keep_old_actor: Annotated[
        bool,
        doc(
            "Recompute log-probs with the very weights that made each token, kept for max_weight_staleness steps, and "
            "clip around those."
        ),
    ] = False
    interpolate_proximal: Annotated[
        bool,
        doc(
            "For several steps per rollout: stand in for the recomputed log-probs by those between the engine's and the "
            "present policy's, by the token's staleness. Saves the extra pass.",
            ours=True,
        ),
    ] = False
    use_rollout_logprobs: Annotated[
        bool, doc("Take the engine's log-probs as the old policy in the PPO ratio and skip recomputing them.")
    ] = False
    use_rollout_routing_replay: Annotated[
        bool,
        doc(
            "Mixture of experts (R3): for each token the trainer takes the experts that the engine chose, in log-prob passes and "
            "in training. Engines answer with them: layers x top-k bytes a token."
        ),
    ] = False
    use_routing_replay: Annotated[
        bool,
        doc(
            "Mixture of experts: the steps of a rollout take the experts that the trainer's own log-prob pass chose. Needs "
            "several steps per rollout."
        ),
    ] = False
    use_opsm: Annotated[
        bool, doc("Off-policy sequence mask: leave out negative-advantage sequences the policy has moved away from.")
    ] = False
    opsm_delta: Annotated[float, doc("For use_opsm: mean log-ratio from which a sequence is left out.", ge=0)] = 1e-4
    no_correction: Annotated[bool, doc("Allow max_weight_staleness above 0 without any off-policy correction.", ours=True)] = False

    disable_grpo_std_normalization: Annotated[
        bool, doc("Do not divide advantages by the group's standard deviation (Dr. GRPO, with loss_agg_mode).")
    ] = False
    disable_rewards_normalization: Annotated[bool, doc("Do not subtract the group's mean reward.")] = False
    normalize_advantages: Annotated[
        bool,
        doc("Whiten advantages over the batch.", derived="true for reinforce_plus_plus and its baseline form"),
    ]
    gamma: Annotated[float, doc("Discount of later rewards.", gt=0, le=1)] = 1.0
    lambd: Annotated[float, doc("GAE lambda of the ppo estimator.", ge=0, le=1)] = 1.0
    value_clip: Annotated[float, doc("For ppo: how far a value may move from the one before the rollout's steps.", gt=0)] = 0.2
    num_critic_only_steps: Annotated[
        int, doc("For ppo: first rollouts that train the critic and leave the policy as it is.", unit="rollouts", ge=0)
    ] = 0
    use_opd: Annotated[
        bool,
        doc("On-policy distillation beside any estimator: take opd_kl_coef * (policy - teacher log-prob) off the advantages."),
    ] = False
    opd_type: Annotated[
        Literal["megatron", "sglang"],
        doc(
            "Where the teacher runs: megatron is a second model in the trainer, whatever its backend (opd_teacher_load); "
            "sglang is a server asked by the reward room (opd_teacher_urls).",
            derived="sglang with opd_teacher_urls, else megatron",
        ),
    ]
    opd_teacher_urls: Annotated[
        tuple[str, ...],
        doc("SGLang-compatible servers of the teacher, http://HOST:PORT each; a sample asks one of them."),
    ] = ()
    opd_kl_coef: Annotated[float, doc("For use_opd: weight of the distance to the teacher.", ge=0)] = 1.0
    calculate_per_token_loss: Annotated[
        bool,
        doc(
            "Average over all tokens of a step; off: as loss_agg_mode says.",
            derived="true with loss_agg_mode token-mean",
        ),
    ]
    loss_agg_mode: Annotated[
        Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"],
        doc(
            "How the tokens of an optimizer step become its loss. seq-mean-token-mean: mean of each trajectory, then over "
            "trajectories. token-mean: mean over all tokens. seq-mean-token-sum-norm: sum of each trajectory over the "
            "constant loss_scale_factor, then mean over trajectories, so that long answers are not favoured (Dr. GRPO, "
            "with disable_grpo_std_normalization).",
            derived="token-mean with calculate_per_token_loss, else seq-mean-token-mean",
            ours=True,
        ),
    ]
    loss_scale_factor: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        doc(
            "For loss_agg_mode seq-mean-token-sum-norm: the constant that token sums are divided by; fixed for the run, "
            "also when rollout_max_response_len is patched.",
            unit="tokens",
            derived="rollout_max_response_len with seq-mean-token-sum-norm, else unset",
            ours=True,
        ),
    ]

    loss_type: Annotated[
        Literal["policy_loss", "custom_loss", "sft", "sft_loss"],
        doc(
            "The policy loss of the estimator, your own, or sft (sft_loss): the data's own responses are learned, none is made.",
            derived="custom_loss with custom_loss_function_path, else policy_loss",
        ),
    ]
    sft_loss_roles: Annotated[
        tuple[str, ...], doc("For loss_type sft: roles of the chat messages that are learned; the others are context.", ours=True)
    ] = ("assistant",)
    loss_mask_type: Annotated[
        Literal["all", "last", "qwen", "qwen3", "qwen3_5", "distill_qwen"],
        doc(
            "For loss_type sft: all messages of sft_loss_roles are learned (all, qwen, qwen3, qwen3_5) or the last (last, "
            "distill_qwen)."
        ),
    ] = "all"
    custom_loss_function_path: Annotated[
        str | None, doc("Dotted path of a function that replaces the whole loss. Signatures: docs/objective.md.")
    ] = None
    custom_advantage_function_path: Annotated[
        str | None, doc("Dotted path of a function that replaces the estimator's advantages.", ours=True)
    ] = None
    custom_tis_function_path: Annotated[
        str | None, doc("With use_tis: dotted path of a function that weighs and masks the policy loss instead.")
    ] = None
    custom_pg_loss_reducer_function_path: Annotated[
        str | None, doc("Dotted path of a function that makes the sum of the policy loss over tokens.")
    ] = None
    custom_reward_post_process_path: Annotated[
        str | None, doc("Dotted path of a function that replaces the normalisation of rewards within groups.")
    ] = None
