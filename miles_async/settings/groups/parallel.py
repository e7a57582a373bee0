"""PARALLEL: how the Megatron backend cuts a model over its ranks, and megatron-core's own settings."""

from typing import Annotated, Literal

from miles_async.settings.doc import Group, PassedOn, PositiveInt, doc


class ParallelSettings(Group, frozen=True, kw_only=True):
    """The Megatron backend alone reads these. Ranks are those of actor_num_gpus_per_node."""

    tensor_model_parallel_size: Annotated[int, doc("Ranks that share each layer's matrices.", unit="ranks", ge=1)] = 1
    sequence_parallel: Annotated[
        bool,
        doc(
            "With several tensor-parallel ranks: what is between matrices is cut along the sequence; saves memory."
            " Without effect with one."
        ),
    ] = False
    pipeline_model_parallel_size: Annotated[int, doc("Stages that the layers are dealt to.", unit="ranks", ge=1)] = 1
    virtual_pipeline_model_parallel_size: Annotated[
        PositiveInt | None,
        doc(
            "Chunks of layers on each stage; more make the pipeline's idle time shorter.",
            aliases=("num_virtual_stages_per_pipeline_rank",),
        ),
    ] = None
    num_layers_in_first_pipeline_stage: Annotated[
        PositiveInt | None,
        doc("Layers of the first stage, if not as many as others.", aliases=("decoder_first_pipeline_num_layers",)),
    ] = None
    num_layers_in_last_pipeline_stage: Annotated[
        PositiveInt | None,
        doc("Layers of the last stage, if not as many as others.", aliases=("decoder_last_pipeline_num_layers",)),
    ] = None
    microbatch_group_size_per_vp_stage: Annotated[
        PositiveInt | None, doc("Micro-batches that a chunk takes in a row. Unset: as many as stages.")
    ] = None
    context_parallel_size: Annotated[
        int, doc("Ranks that share each sample; max_tokens_per_gpu is each one's.", unit="ranks", ge=1)
    ] = 1
    expert_model_parallel_size: Annotated[int, doc("Ranks that experts are dealt to.", unit="ranks", ge=1)] = 1
    expert_tensor_parallel_size: Annotated[
        PositiveInt | None, doc("Ranks that share an expert's matrices. Unset: as tensor_model_parallel_size.", unit="ranks")
    ] = None
    moe_expert_kernel: Annotated[
        Literal["torch", "te"],
        doc(
            "Who multiplies by experts on a GPU: torch, all experts of a layer at once; te, Transformer Engine, one by one. "
            "torch leaves to te what it cannot do (FP8, overlapped sending of gradients, no distributed optimizer).",
            ours=True,
        ),
    ] = "torch"
    data_pad_size_multiplier: Annotated[
        int, doc("A packed stream is padded to a multiple of it on each rank.", unit="tokens", ge=1)
    ] = 128
    megatron: Annotated[
        dict[str, PassedOn],
        doc(
            "Fields of megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig by their own names, as "
            "flags (--recompute-granularity full) or in this table."
        ),
    ] = {}
    custom_megatron_init_path: Annotated[
        str | None,
        doc(
            "package.module.function, called with the backend's core of each rank once it is built; one whose first parameter is "
            "args as Miles calls it: (args)."
        ),
    ] = None
    custom_megatron_before_log_prob_hook_path: Annotated[
        str | None,
        doc(
            "package.module.function, called with the core before each pass that computes log-probs, or as (args, model, "
            "store_prefix)."
        ),
    ] = None
    custom_megatron_before_train_step_hook_path: Annotated[
        str | None,
        doc(
            "package.module.function, called with the core before each optimizer step, or as (args, rollout_id, step_id, model, "
            "optimizer, scheduler); there is no scheduler object, so it is None."
        ),
    ] = None
