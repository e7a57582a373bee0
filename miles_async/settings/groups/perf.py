"""PERF: how a training batch is cut into micro-batches, and CPU threads."""

from typing import Annotated, Literal

from miles_async.settings.doc import Group, doc


class PerfSettings(Group, frozen=True, kw_only=True):
    """Cutting a batch into work."""

    use_dynamic_batch_size: Annotated[
        bool,
        doc("Pack samples into micro-batches up to max_tokens_per_gpu.", derived="true unless micro_batch_size is given"),
    ]
    max_tokens_per_gpu: Annotated[
        int, doc("Tokens, prompts included, in one packed micro-batch of the gradient pass.", unit="tokens", ge=1)
    ] = 8192
    micro_batch_size: Annotated[int, doc("Samples per micro-batch when use_dynamic_batch_size is off.", unit="samples", ge=1)] = 1
    gradient_checkpointing: Annotated[
        bool,
        doc(
            "Keep each layer's input alone for the backward pass and compute the rest again: a quarter more time for a fraction "
            "of the memory, with the same gradients. Megatron calls it full recomputation.",
            ours=True,
        ),
    ] = False
    gradient_checkpointing_layers: Annotated[
        int,
        doc(
            "gradient_checkpointing for the first so many layers only: as few as memory asks for cost the least time. 0: for all.",
            unit="layers",
            ge=0,
            ours=True,
        ),
    ] = 0
    fsdp_shard: Annotated[
        Literal["auto", "all", "optimizer"],
        doc(
            "What several ranks of the torch backend share among them. all: weights, gradients and the optimizer's state, gathered "
            "and reduced layer by layer for every micro-batch. optimizer: its state and the float32 weights; each GPU holds the "
            "computing weights and the gradients whole in a step (6 bytes a parameter), gathers once a pass and reduces once a "
            "step. auto: optimizer where that fits beside the activations, by estimate.",
            ours=True,
        ),
    ] = "auto"
    compile: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "Run the trainer's decoder layers through torch.compile: one graph for all layers and lengths, made in the first "
            "step (ten to thirty seconds). auto: where flash attention runs, for a model of 100M parameters or more. If "
            "compilation fails the layers run as they are, with a warning. Never with true_on_policy_mode.",
            ours=True,
        ),
    ] = "auto"
    attn_implementation: Annotated[
        Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3"],
        doc(
            "Kernel of the trainer's attention. flash_attention_2: torch's own. flash_attention_3: SGLang's forward for Hopper (it "
            "has no backward) with the backward of the former. sdpa: padded, the only one on a CPU and in float32. auto: the "
            "highest that is there. true_on_policy_mode takes SGLang's whatever stands here."
        ),
    ] = "auto"
    log_probs_max_tokens_per_gpu: Annotated[
        int,
        doc(
            "The same as max_tokens_per_gpu for passes without gradient.",
            unit="tokens",
            derived="max_tokens_per_gpu",
            ge=1,
        ),
    ]
    train_backend: Annotated[
        str,
        doc(
            "Library that trains: torch (transformers and FSDP2; fsdp is another name of it), megatron (megatron-core), or a "
            "dotted path of your own: (BackendConfig, Ranks) -> Core.",
            shipped=("torch", "fsdp", "megatron"),
            derived="megatron where a setting is given that it alone has, else torch",
        ),
    ]
    train_master: Annotated[
        str | None,
        doc(
            "HOST:PORT where the trainer's processes meet. Given: all but the first are yours to start, by torchrun, Slurm or Ray: "
            "python -m actors.trainer.follower, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Else the trainer starts them.",
            ours=True,
        ),
    ] = None
    train_env_vars: Annotated[
        str | None,
        doc("""JSON object of variables that the trainer's processes on this host get, such as '{"NCCL_DEBUG": "WARN"}'."""),
    ] = None
    actor_num_nodes: Annotated[
        int, doc("Hosts of the trainer; more than one needs launcher ray or train_master.", unit="hosts", ge=1)
    ] = 1
    actor_num_gpus_per_node: Annotated[
        int,
        doc(
            "Processes of the trainer on a host, over which weights and optimizer are sharded (FSDP2): one per GPU, or CPU "
            "processes where there is no GPU.",
            unit="processes",
            ge=1,
        ),
    ] = 1
    balance_data: Annotated[
        bool,
        doc(
            "Deal micro-batches to the trainer's processes so that all have as much work; off: in turn. Either way all have "
            "the same number of them, none over max_tokens_per_gpu, and what is learned is the same."
        ),
    ] = True
    balance_by_flops: Annotated[
        bool,
        doc(
            "For balance_data: measure work in FLOPs of the model, attention's quadratic part included; off: in tokens.",
            derived="balance_data",
        ),
    ]
    trainer_threads: Annotated[int, doc("CPU threads of the trainer process.", unit="threads", ge=1, ours=True)] = 1
    engine_threads: Annotated[int, doc("CPU threads of each embedded engine.", unit="threads", ge=1, ours=True)] = 1
