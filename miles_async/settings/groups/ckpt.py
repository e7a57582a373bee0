"""CKPT: where training state is written, how often, and what a run starts from."""

from typing import Annotated

from miles_async.settings.doc import Group, PositiveInt, doc


class CkptSettings(Group, frozen=True, kw_only=True):
    """Checkpoints written and read."""

    load: Annotated[
        str,
        doc(
            "Parent directory of the checkpoint to resume from; latest_checkpointed_iteration.txt in it selects the "
            "step. Empty or missing directory: start from ref_load. Equal to save, so the same command resumes; another one "
            "only as long as save holds none.",
            derived="save",
        ),
    ]
    ckpt_step: Annotated[
        PositiveInt | None,
        doc(
            "Which checkpoint in load to resume from. Unset: the one that the tracker names. Where load is save the run goes back "
            "to it, at each start of this command.",
            unit="rollouts",
        ),
    ] = None
    finetune: Annotated[
        bool,
        doc(
            "Of the checkpoint in load (a run's, Megatron's, or a model directory) take the weights alone: step 0, a new "
            "optimizer, the data from their beginning. The reference stays ref_load."
        ),
    ] = False
    no_load_optim: Annotated[bool, doc("Resume with a new optimizer.")] = False
    no_load_rng: Annotated[bool, doc("Resume with the random state of a new trainer.")] = False
    save: Annotated[
        str,
        doc("Parent directory of the checkpoints that this run writes.", derived="<runs_dir>/<name>/checkpoints"),
    ]
    no_save: Annotated[
        bool,
        doc("Write no checkpoints, resume from none: a run that is stopped starts again from the beginning.", ours=True),
    ] = False
    save_interval: Annotated[
        int,
        doc(
            "Rollouts between checkpoints; the last rollout is always saved.",
            unit="rollouts",
            live="next step (trainer)",
            ge=1,
        ),
    ] = 10
    keep_last: Annotated[
        int,
        doc(
            "Newest checkpoints kept on disk; older ones are removed. Of a run that went back, later ones stay until it has passed "
            "them.",
            unit="count",
            ge=1,
            ours=True,
        ),
    ] = 3
    save_retain_interval: Annotated[
        PositiveInt | None,
        doc("Checkpoints of steps that are multiples of it stay, beside the keep_last newest.", unit="rollouts"),
    ] = None
    no_save_optim: Annotated[
        bool,
        doc(
            "Checkpoints without the optimizer's state: a fraction of the size. A run that resumes from one, after a crash too, "
            "goes on with a new optimizer."
        ),
    ] = False
    async_save: Annotated[bool, doc("Write checkpoints beside training instead of between two steps.")] = True
    ref_load: Annotated[
        str,
        doc(
            "Checkpoint of the frozen reference policy, a directory or builtin name; read only when a KL term is on, "
            "and the starting point when load holds nothing; of a parent directory of checkpoints the newest. For the Megatron "
            "backend torch_dist as well.",
            derived="hf_checkpoint",
        ),
    ]
    ref_ckpt_step: Annotated[
        PositiveInt | None, doc("Which checkpoint in ref_load. Unset: the one that its tracker names.", unit="rollouts")
    ] = None
    critic_load: Annotated[
        str | None,
        doc(
            "Model directory that the critic of advantage_estimator ppo starts from; a score.weight in it is the value "
            "head, without one values begin at 0. Later the critic is a part of the checkpoints. Unset: hf_checkpoint."
        ),
    ] = None
    opd_teacher_load: Annotated[
        str | None,
        doc(
            "Teacher of on-policy distillation, loaded in the trainer: a model directory, or the parent directory of a "
            "run's checkpoints (the newest is taken)."
        ),
    ] = None
    opd_teacher_ckpt_step: Annotated[
        PositiveInt | None,
        doc("Which checkpoint in opd_teacher_load. Unset: the newest.", unit="rollouts"),
    ] = None
    save_trigger_sentinel: Annotated[
        str | None,
        doc("Path of a file; when it exists at the end of a step a checkpoint is saved and the file is removed."),
    ] = None
    save_hf: Annotated[
        str | None,
        doc(
            "Path pattern with {rollout_id}: beside each checkpoint the model is written there as a Hugging Face directory, in the "
            "type that it computes in, with tokenizer and chat template."
        ),
    ] = None
    dump_details: Annotated[
        str | None,
        doc(
            "Directory for every trained batch, as it came (save_debug_rollout_data) and as each rank trained it "
            "(save_debug_train_data); turns on debug_determinism and env_report too, which write into the run's folder."
        ),
    ] = None
    save_debug_rollout_data: Annotated[
        str | None,
        doc(
            "Path pattern with {rollout_id}: every consumed batch is written there as msgpack, for replay.",
            derived="<dump_details>/rollout_data/{rollout_id}.msgpack, unset without it",
        ),
    ]
    load_debug_rollout_data: Annotated[
        str | None,
        doc("Path pattern with {rollout_id}: the trainer takes recorded batches from there instead of rollouts."),
    ] = None
    save_debug_train_data: Annotated[
        str | None,
        doc(
            "Path pattern with {rollout_id} and {rank}: each training process writes there, on its own host, what it trained as "
            "the loss saw it: tokens, masks, advantages, log-probs. torch.load(FILE, weights_only=True) reads it.",
            derived="<dump_details>/train_data/{rollout_id}_{rank}.pt, unset without it",
        ),
    ]
