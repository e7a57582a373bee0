"""Megatron's flags: a table of fields as the installed megatron-core has them, launch scripts that go through flag by flag."""

from __future__ import annotations

import dataclasses

import pytest

from actors.trainer.megatron_backend.config import MegatronConfig
from miles_async.cli.flags import parse_flags
from miles_async.launcher.plan import told
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import load
from miles_async.settings.megatron_fields import FIELDS
from miles_async.settings.run import RunSettings

MODEL = """--swiglu --group-query-attention --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm
--num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 --num-attention-heads 32 --num-query-groups 2 --rotary-base 10000"""
GLM = f"""{MODEL} --spec miles_plugins.models.glm4 get_glm_spec --add-qkv-bias --norm-epsilon 1e-5 --vocab-size 151552
--post-self-attn-layernorm --post-mlp-layernorm --rotary-interleaved --rotary-percent 0.5 --no-rope-fusion
--untie-embeddings-and-output-weights --hf-checkpoint MODELS/GLM --ref-load MODELS/GLM_torch_dist --load MODELS/GLM_miles
--save MODELS/GLM_miles --save-interval 20 --prompt-data MODELS/dapo.jsonl --input-key prompt --label-key label
--apply-chat-template --rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
--rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256 --balance-data --eval-interval 20
--eval-prompt-data aime MODELS/aime.jsonl --n-samples-per-eval-prompt 16 --eval-max-response-len 16384 --eval-top-p 1
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 2
--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 4608 --advantage-estimator grpo --use-kl-loss
--kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-6
--lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --rollout-num-gpus-per-engine 2
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
--attention-backend flash --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4"""
QWEN3 = f"""{MODEL} --kv-channels 128 --qk-layernorm --vocab-size 151936 --norm-epsilon 1e-6 --hf-checkpoint MODELS/Qwen3
--prompt-data p.jsonl --num-rollout 2 --rm-type math --tensor-model-parallel-size 2 --sequence-parallel
--pipeline-model-parallel-size 1 --context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216
--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer --attention-dropout 0.0 --hidden-dropout 0.0
--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash --actor-num-gpus-per-node 2 --colocate"""
LEAST = "--hf-checkpoint M --prompt-data p.jsonl --num-rollout 2 --rm-type math"


def settings_of(line: str) -> RunSettings:
    # Staleness and engines are not Megatron's; a script of Miles leaves the former out, and says the latter by other flags.
    words = f"{line} --engine sglang --max-weight-staleness 0".split()
    return load(None, parse_flags(words, frozenset()).values).settings


def test_the_table_is_the_installed_megatrons() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    kinds = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = {f.name: str(f.type) for kind in kinds for f in dataclasses.fields(kind)}
    assert FIELDS.keys() <= fields.keys()
    left_out = {name for name in fields.keys() - FIELDS.keys() if "Callable" not in fields[name]}
    assert left_out <= {
        *("params_dtype", "pipeline_dtype", "autocast_dtype", "timers", "quant_recipe", "_cpu_offloading_context"),
        "mtp_standalone",
    }
    for name, kind in FIELDS.items():
        if kind in ("bool", "int", "float"):
            assert kind in fields[name], name


@pytest.mark.parametrize("script", [GLM, QWEN3], ids=["glm4-9b", "qwen3"])
def test_a_launch_script_goes_through_flag_by_flag(script: str) -> None:
    s = settings_of(script).flat
    assert s.train_backend == "megatron" and s.tensor_model_parallel_size == 2 and s.sequence_parallel
    assert s.data_ranks == 1
    own = told(MegatronConfig, s)
    assert own.megatron["recompute-granularity"] == "full" and own.megatron["recompute-num-layers"] == 1
    assert own.megatron["attention-dropout"] == 0.0 and own.megatron["grad-reduce-in-fp32"] is True


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train-backend torch --sequence-parallel", "sequence_parallel is of Megatron"),
        ("--attention-dropout 0.1", "the policy that is trained must be the one that sampled"),
        ("--recompute-num-layers one", "must be of kind int"),
        ("--moe-aux-loss-coeff 0.01", "balancing losses of experts are not trained yet"),
        ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 3", r"2 x 1 x 1 = 2 does not divide 3 ranks\. Nearest: 2 or 4"),
        ("--bf16", "Write --model-dtype instead"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        settings_of(f"{LEAST} {flags}")


def test_flags_turn_fields_off_and_keep_their_kinds() -> None:
    s = settings_of(f"{LEAST} --no-bias-dropout-fusion --overlap-grad-reduce --ddp-bucket-size 1000 --moe-router-dtype fp32")
    assert s.parallel.megatron == {
        "bias-dropout-fusion": False, "overlap-grad-reduce": True, "bucket-size": 1000, "moe-router-dtype": "fp32",
    }  # fmt: skip
    assert s.flat.train_backend == "megatron"
    assert settings_of(LEAST).flat.train_backend == "torch"
