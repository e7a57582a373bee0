"""PERF: how a training batch is cut into micro-batches, and CPU threads."""

from typing import Annotated

from miles_async.settings.doc import Group, doc


class PerfSettings(Group, frozen=True, kw_only=True):
    """Cutting a batch into work."""

    use_dynamic_batch_size: Annotated[
        bool,
        doc(
            "Pack samples into micro-batches up to max_tokens_per_gpu.", derived="true unless micro_batch_size is given"
        ),
    ]
    max_tokens_per_gpu: Annotated[
        int, doc("Tokens, prompts included, in one packed micro-batch of the gradient pass.", unit="tokens", ge=1)
    ] = 8192
    micro_batch_size: Annotated[
        int, doc("Samples per micro-batch when use_dynamic_batch_size is off.", unit="samples", ge=1)
    ] = 1
    gradient_checkpointing: Annotated[
        bool,
        doc(
            "Keep each layer's input alone for the backward pass and compute the rest again: a quarter more time for a fraction "
            "of the memory, with the same gradients. Megatron calls it full recomputation."
        ),
    ] = False
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
        ),
    ] = "torch"
    actor_num_nodes: Annotated[int, doc("Hosts of the trainer; this launcher has one.", unit="hosts", ge=1)] = 1
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
    trainer_threads: Annotated[int, doc("CPU threads of the trainer process.", unit="threads", ge=1)] = 1
    engine_threads: Annotated[int, doc("CPU threads of each embedded engine.", unit="threads", ge=1)] = 1
