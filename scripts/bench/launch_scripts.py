"""Flags of launch scripts that users of Miles bring, with the values they give: names and numbers are facts, the paths are ours."""

from __future__ import annotations

MODEL_4B = """--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
--rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm"""
MODEL_GLM = """--spec miles_plugins.models.glm4 get_glm_spec --swiglu --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696
--num-attention-heads 32 --group-query-attention --num-query-groups 2 --use-rotary-position-embeddings --disable-bias-linear
--add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-5 --rotary-base 10000 --vocab-size 151552 --post-self-attn-layernorm
--post-mlp-layernorm --rotary-interleaved --rotary-percent 0.5 --no-rope-fusion --untie-embeddings-and-output-weights"""
MODEL_30B = """--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32 --num-query-groups 4
--kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --normalization RMSNorm --position-embedding-type rope
--norm-epsilon 1e-6 --rotary-percent 1.0 --swiglu --untie-embeddings-and-output-weights --vocab-size 151936 --rotary-base 1000000
--moe-ffn-hidden-size 768 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-router-topk 8
--moe-layer-freq [1]*48 --num-experts 128 --moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32
--moe-permute-fusion --moe-aux-loss-coeff 0"""
CKPT = "--ref-load MODEL_torch_dist --load MODEL_miles --save MODEL_miles --save-interval 20"
ROLLOUT = """--prompt-data DATA --input-key prompt --label-key label --apply-chat-template --rollout-shuffle --rm-type deepscaler
--num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-temperature 1
--global-batch-size 256 --balance-data"""
EVAL = """--eval-interval 20 --eval-prompt-data aime DATA --n-samples-per-eval-prompt 16 --eval-max-response-len 16384
--eval-top-p 1"""
PERF = """--pipeline-model-parallel-size 1 --sequence-parallel --expert-tensor-parallel-size 1 --recompute-granularity full
--recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size"""
GRPO = """--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 --eps-clip 0.2
--eps-clip-high 0.28"""
OPTIMIZER = "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98"
ON_HOST = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
MISC = """--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
--attention-backend flash"""
GROUPS = " ".join((CKPT, ROLLOUT, EVAL, PERF, GRPO, OPTIMIZER, MISC))
SCRIPTS = {
    "glm4-9b": f"""{MODEL_GLM} {GROUPS} --tensor-model-parallel-size 2 --context-parallel-size 2 --expert-model-parallel-size 1
--max-tokens-per-gpu 4608 --rollout-num-gpus-per-engine 2 --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4""",
    "qwen3-4b": f"""{MODEL_4B} {GROUPS} {ON_HOST} --model-name qwen3-4B --tensor-model-parallel-size 2 --context-parallel-size 1
--expert-model-parallel-size 1 --max-tokens-per-gpu 9216 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
--sglang-cuda-graph-bs 1 2 4 8 16 --colocate --actor-num-nodes 1 --actor-num-gpus-per-node 2 --use-miles-dashboard
--dump-details DETAILS""",
    "qwen3-30b-a3b": f"""{MODEL_30B} {GROUPS} {ON_HOST} --tensor-model-parallel-size 4 --context-parallel-size 1
--expert-model-parallel-size 8 --max-tokens-per-gpu 20480 --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7
--colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8""",
    "qwen3-0.6b-fsdp": f"""--ref-load MODEL {ROLLOUT} {EVAL} {GRPO} {OPTIMIZER} --kl-coef 0.00 --use-wandb --wandb-project p
--wandb-group g --wandb-key KEY --rollout-num-gpus-per-engine 1 --sglang-decode-log-interval 1000 --sglang-mem-fraction-static 0.75
--sglang-attention-backend fa3 --sglang-chunked-prefill-size 4096 --train-backend fsdp --update-weight-buffer-size 536870912
--gradient-checkpointing --attn-implementation flash_attention_3 --use-dynamic-batch-size --max-tokens-per-gpu 9216
--actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate --use-fault-tolerance --train-env-vars {{"PYTORCH_ALLOC_CONF":"x:1"}}""",
}  # fmt: skip
OF_RECIPES = "--num-gpus-per-node 8 --cuda-visible-devices 0 --enable-eval --output-dir O --model-dir M --data-dir D --local-dir L"
"""What the Python recipes read themselves, before they start train.py."""

UNTIED = {"hidden_act": "silu", "tie_word_embeddings": False}
CONFIGS = {
    "glm4-9b": {"model_type": "glm4", "num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 13696,
                "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0, "vocab_size": 151552, "partial_rotary_factor": 0.5, **UNTIED},
    "qwen3-4b": {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
                 "vocab_size": 151936, "hidden_act": "silu", "tie_word_embeddings": True},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6,
                      "rope_theta": 1000000, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
                      **UNTIED},
    "qwen3-0.6b-fsdp": {"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
                        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
                        "rope_theta": 1000000, "vocab_size": 151936, "hidden_act": "silu", "tie_word_embeddings": True},
}  # fmt: skip
