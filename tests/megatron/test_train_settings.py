"""Megatron's flags: a table of fields as the installed megatron-core has them, launch scripts that go through flag by flag."""

from __future__ import annotations

import dataclasses

import pytest

from miles_async.cli.flags import parse_flags
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import load
from miles_async.settings.megatron import HERE, NOT_YET
from miles_async.settings.megatron_fields import CHOICES, FIELDS
from miles_async.settings.run import RunSettings

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
    assert NOT_YET.keys() <= FIELDS.keys() and HERE.keys() <= FIELDS.keys()
    assert left_out <= {
        *("params_dtype", "pipeline_dtype", "autocast_dtype", "timers", "quant_recipe", "_cpu_offloading_context"),
        "mtp_standalone",
    }
    for name, kind in FIELDS.items():
        if kind in ("bool", "int", "float"):
            assert kind in fields[name], name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train-backend torch --sequence-parallel", "only Megatron has sequence_parallel"),
        ("--attention-dropout 0.1", "the policy that is trained must be the one that sampled"),
        ("--recompute-num-layers one", "must be a whole number"),
        ("--moe-aux-loss-coeff -0.01", "must be a number >= 0"),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01", "has no loss that it could weigh"),
        ("--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 0.01", "one coefficient, so one loss"),
        ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 3", r"2 x 1 x 1 = 2 does not divide 3 ranks\. Nearest: 2 or 4"),
        ("--fp16", "Write --model-dtype bfloat16 instead"),
        ("--average-in-collective", "gradients are sums"),
        ("--ddp-average-in-collective", "gradients are sums"),
        ("--num-distributed-optimizer-instances 2", "its state is cut over all data-parallel ranks"),
        ("--enable-cuda-graph", "lengths of packed samples change"),
        ("--cuda-graph-impl local", "lengths of packed samples change"),
        ("--tp-comm-overlap", "buffers"),
        ("--moe-expert-capacity-factor 1.5", "engines drop no tokens"),
        ("--moe-router-force-load-balancing", "the policy that is trained must be the one that sampled"),
        ("--check-for-nan-in-grad", "every step looks for gradients that are not finite"),
        ("--qk-clip", "adam"),
        ("--decoupled-lr 1e-5", "one rate for all weights"),
        ("--true-on-policy-mode --train-backend megatron --bf16", "true_on_policy_mode needs .torch."),
        ("--train-backend megatron --gradient-checkpointing --gradient-checkpointing-layers 4", "--recompute-num-layers 4"),
        ("--train-backend megatron --compile on", "only the torch backend has it"),
        ("--train-backend megatron --attn-implementation flash_attention_3", "Write --attention-backend"),
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
    s = settings_of(f"{LEAST} --recompute-modules mlp --window-size 7 0 --cuda-graph-impl none --no-average-in-collective")
    assert s.parallel.megatron["recompute-modules"] == ("mlp",) and s.parallel.megatron["window-size"] == ("7", "0")


def test_bf16_is_the_models_type() -> None:
    s = settings_of(f"{LEAST} --bf16")
    assert s.model.model_dtype == "bfloat16" and s.flat.train_backend == "torch", "it is not Megatron's alone"
    assert settings_of(f"{LEAST} --model-dtype float32").model.model_dtype == "float32"


def test_the_words_that_megatron_core_takes_are_its_own() -> None:
    from megatron.core.transformer.enums import AttnBackend

    from actors.trainer.megatron_backend.setup import TYPES

    assert set(CHOICES["attention_backend"]) == set(AttnBackend.__members__)
    assert all(set(words) == set(TYPES) for name, words in CHOICES.items() if name.endswith("dtype"))
    for name, words in CHOICES.items():
        assert FIELDS[name] == "str" and len(words) > 1, name
