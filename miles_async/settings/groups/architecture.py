"""ARCHITECTURE: Megatron's flags for what config.json says. They are compared with it, and may all be left out."""

from typing import Annotated, Literal

from miles_async.settings.doc import Group, doc


class ArchitectureSettings(Group, frozen=True, kw_only=True):
    """Accepted so that launch scripts of Megatron run as they are; one that says otherwise than config.json is refused."""

    num_layers: Annotated[int | None, doc("Decoder layers of the model.")] = None
    hidden_size: Annotated[int | None, doc("Width of the residual stream.")] = None
    ffn_hidden_size: Annotated[int | None, doc("Width of the feed-forward block.")] = None
    num_attention_heads: Annotated[int | None, doc("Heads of queries.")] = None
    group_query_attention: Annotated[bool | None, doc("Several heads of queries share one of keys and values.")] = None
    num_query_groups: Annotated[int | None, doc("Heads of keys and values.")] = None
    kv_channels: Annotated[int | None, doc("Width of a head of keys and values.")] = None
    vocab_size: Annotated[int | None, doc("Rows of the embedding, without padding.")] = None
    normalization: Annotated[str | None, doc("Kind of norm, RMSNorm in all families.")] = None
    norm_epsilon: Annotated[float | None, doc("Added to variances in norms.", aliases=("layernorm_epsilon",))] = None
    swiglu: Annotated[bool | None, doc("The feed-forward block is gated by SiLU.")] = None
    disable_bias_linear: Annotated[bool | None, doc("Matrices have no bias.")] = None
    add_qkv_bias: Annotated[bool | None, doc("Queries, keys and values have a bias all the same.")] = None
    qk_layernorm: Annotated[bool | None, doc("Queries and keys are normed.")] = None
    post_self_attn_layernorm: Annotated[bool | None, doc("The output of attention is normed.")] = None
    post_mlp_layernorm: Annotated[bool | None, doc("The output of the feed-forward block is normed.")] = None
    untie_embeddings_and_output_weights: Annotated[bool | None, doc("Embedding and head are two matrices.")] = None
    position_embedding_type: Annotated[str | None, doc("Kind of positions, rope in all families.")] = None
    use_rotary_position_embeddings: Annotated[bool | None, doc("Positions are rotations.")] = None
    rotary_base: Annotated[float | None, doc("Longest period of the rotations.")] = None
    rotary_percent: Annotated[float | None, doc("Share of a head that is rotated.")] = None
    rotary_interleaved: Annotated[bool | None, doc("Neighbouring channels rotate together, instead of halves.")] = None
    multi_latent_attention: Annotated[bool | None, doc("Attention of DeepSeek, with latent keys and values.")] = None
    q_lora_rank: Annotated[int | None, doc("Width of the latent queries.")] = None
    kv_lora_rank: Annotated[int | None, doc("Width of the latent keys and values.")] = None
    qk_head_dim: Annotated[int | None, doc("Channels of a latent head that are not rotated.")] = None
    qk_pos_emb_head_dim: Annotated[int | None, doc("Channels of a latent head that are rotated.")] = None
    v_head_dim: Annotated[int | None, doc("Width of a head of values in latent attention.")] = None
    num_experts: Annotated[int | None, doc("Experts of a layer that has them.")] = None
    moe_ffn_hidden_size: Annotated[int | None, doc("Width of one expert.")] = None
    moe_shared_expert_intermediate_size: Annotated[int | None, doc("Width of all shared experts together.")] = None
    moe_layer_freq: Annotated[str | None, doc("Layers with experts: 2 for every second, or [0]*3+[1]*58.")] = None
    moe_router_topk: Annotated[int | None, doc("Experts that a token goes to.")] = None
    moe_router_score_function: Annotated[str | None, doc("How the router scores: softmax or sigmoid.")] = None
    moe_router_pre_softmax: Annotated[bool | None, doc("The softmax is over all experts, not the chosen ones.")] = None
    moe_router_enable_expert_bias: Annotated[bool | None, doc("A bias of each expert decides with the scores.")] = None
    moe_router_topk_scaling_factor: Annotated[float | None, doc("What scores are multiplied by.")] = None
    moe_router_num_groups: Annotated[int | None, doc("Groups that experts are chosen in.")] = None
    moe_router_group_topk: Annotated[int | None, doc("Groups that a token may choose from.")] = None
    model_name: Annotated[
        str | None, doc("Which converter Miles takes; here model_type in config.json says it, so this has no effect.")
    ] = None
    megatron_to_hf_mode: Annotated[
        Literal["raw", "bridge"] | None,
        doc("Which code of Miles converts weights; here there is one, so this has no effect."),
    ] = None
    spec: Annotated[
        tuple[str, ...],
        doc(
            "Module and function that make the layers of a model on the Megatron backend: (args, config, vp_stage) -> layer spec, "
            "as Megatron takes it. Those of Miles and Megatron are answered by our own record of the family in config.json."
        ),
    ] = ()
    custom_model_provider_path: Annotated[
        str | None,
        doc(
            "package.module.function that makes each chunk on the Megatron backend: (pre_process, post_process, vp_stage) -> "
            "model. It gets what it names of config (TransformerConfig), layers (the family's layer spec) and vocab_size (padded)."
        ),
    ] = None
    no_rope_fusion: Annotated[bool, doc("Rotate queries and keys without Transformer Engine's fused kernel.")] = False
    make_vocab_size_divisible_by: Annotated[
        int, doc("Embedding and head are padded to a multiple of it on each tensor-parallel rank.", ge=1)
    ] = 1
