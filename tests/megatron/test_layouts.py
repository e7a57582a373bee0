"""Layouts: what doesn't divide is refused with a choice that does, before a model exists."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.megatron_backend.layout import ModelShape, RankLayout, layout_of, nearest, refusals
from tests.declared import megatron_of

QWEN3_30B = ModelShape(heads=32, groups=4, layers=48, ffn=6144, experts=128, expert_ffn=768)
GLM4_9B = ModelShape(heads=32, groups=2, layers=40, ffn=13696)


@pytest.mark.parametrize(
    ("layout", "shape", "said"),
    [
        (
            RankLayout(8, tp=4),
            GLM4_9B,
            "tensor_model_parallel_size=4: 2 key-value heads can't be cut into 4 equal parts; nearest: 2",
        ),
        (
            RankLayout(6, tp=2, pp=3),
            GLM4_9B,
            "pipeline_model_parallel_size=3: 40 layers can't be cut into 3 equal parts; nearest: 2 or 4",
        ),
        (
            RankLayout(6, tp=2, cp=2),
            GLM4_9B,
            "tensor x pipeline x context parallel size = 2 x 1 x 2: 6 ranks can't be cut into blocks of 4; "
            "nearest: a product of 3 or 6",
        ),
        (
            RankLayout(8, pp=2, vpp=3),
            GLM4_9B,
            "virtual_pipeline_model_parallel_size=3: 20 layers of a stage can't be cut into 3 equal parts; nearest: 2 or 4",
        ),
        (
            RankLayout(8, vpp=2),
            GLM4_9B,
            "virtual_pipeline_model_parallel_size=2: chunks need a pipeline; use 1, or pipeline_model_parallel_size of 2 or more",
        ),
        (RankLayout(8, ep=2), GLM4_9B, "expert_model_parallel_size=2: the model has no experts; use 1"),
        (
            RankLayout(8, tp=2, etp=1),
            QWEN3_30B,
            "tensor_model_parallel_size=2 with 128 experts: needs sequence_parallel; add it",
        ),
        (
            RankLayout(8, ep=3),
            QWEN3_30B,
            "expert_model_parallel_size=3: 128 experts can't be cut into 3 equal parts; nearest: 2 or 4",
        ),
        (
            RankLayout(8, ep=16),
            QWEN3_30B,
            "expert_model_parallel_size=16: 8 blocks of ranks of a stage can't be cut into 16 equal parts; nearest: 8",
        ),
        (
            RankLayout(8, pp=4, first=8, last=7),
            GLM4_9B,
            "num_layers_in_first_pipeline_stage=8, num_layers_in_last_pipeline_stage=7: the other "
            "25 of 40 layers can't be cut into 2 equal stages of 1 chunks; leave it out",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_choice(layout: RankLayout, shape: ModelShape, said: str) -> None:
    assert refusals(layout, shape) == [said]


SIZES = st.integers(1, 9)
SHAPES = st.builds(
    lambda groups, per, layers, ffn, experts: ModelShape(groups * per, groups, layers, ffn * 4, experts, 24),
    SIZES, st.integers(1, 4), st.integers(1, 24), SIZES, st.sampled_from([0, 4, 6, 8]),
)  # fmt: skip
LAYOUTS = st.builds(
    RankLayout, world=st.integers(1, 48), tp=SIZES, pp=SIZES, vpp=st.integers(1, 3), cp=st.integers(1, 3), ep=st.integers(1, 6),
    etp=st.none() | st.integers(1, 3), sequence_parallel=st.booleans(),
)  # fmt: skip


@given(LAYOUTS, SHAPES)
def test_an_accepted_layout_divides_all_and_a_suggestion_removes_its_refusal(layout: RankLayout, shape: ModelShape) -> None:
    said = refusals(layout, shape)
    if not said:
        assert layout.tp * layout.pp * layout.cp * layout.dp == layout.world
        assert not (shape.heads % layout.tp or shape.groups % layout.tp or shape.ffn % layout.tp)
        assert not shape.layers % (layout.pp * layout.vpp)
        assert not shape.experts or not (shape.experts % layout.ep or layout.world // layout.pp % (layout.ep * layout.expert_tp))
    fields = {
        "tensor_model": "tp",
        "pipeline_model": "pp",
        "virtual_pipeline_model": "vpp",
        "expert_model": "ep",
        "expert_tensor": "etp",
    }
    for line in said:
        found = re.match(r"(\w+)_parallel_size=\d+: .*; nearest: (\d+)(?: or (\d+))?$", line)
        for choice in found.groups()[1:] if found and found[1] in fields else ():
            if choice:
                sizes = {
                    name: getattr(layout, name) for name in ("world", "tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel")
                }
                again = refusals(RankLayout(**{**sizes, fields[found[1]]: int(choice)}), shape)
                assert not any(other.startswith(f"{found[1]}_parallel_size={choice}: ") and "nearest" in other for other in again)


def test_sequence_parallel_with_one_rank_has_no_effect() -> None:
    """Scripts keep the flag when they go down to one GPU."""
    asked = [layout_of(megatron_of(sequence_parallel=True, tensor_model_parallel_size=tp), 2) for tp in (1, 2)]
    assert [layout.sequence_parallel for layout in asked] == [False, True] and not refusals(asked[0], GLM4_9B)


def test_the_nearest_choices_lie_on_both_sides() -> None:
    assert nearest(3, [1, 2, 4, 8]) == "nearest: 2 or 4"
    assert nearest(9, [1, 2]) == "nearest: 2"
    assert nearest(1, []) == "no size fits"
