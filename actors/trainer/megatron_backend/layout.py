"""How ranks are cut into tensor, pipeline, context, expert and data parallel ones (pure).

Always true: a layout that `refusals` has nothing against divides GPUs, heads, layers and experts without rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from actors.trainer.megatron_backend.config import MegatronConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model a layout must divide."""

    heads: int
    groups: int
    """key-value heads"""
    layers: int
    ffn: int
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """width of the shared experts together; 0 without"""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Sizes by Megatron's names: `world` ranks of `tp` x `pp` x `cp` x `dp`; experts are cut over `etp` x `ep` of them. `vpp` model
    chunks on each pipeline stage. `first` and `last` stage may have their own number of layers."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """None: as `tp`, Megatron's default"""
    sequence_parallel: bool = False
    first: int | None = None
    last: int | None = None

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tp if self.etp is None else self.etp


def layout_of(own: MegatronConfig, world: int) -> RankLayout:
    """The layout that settings ask for, of `world` ranks."""
    return RankLayout(
        world=world,
        tp=own.tensor_model_parallel_size,
        pp=own.pipeline_model_parallel_size,
        vpp=own.virtual_pipeline_model_parallel_size or 1,
        cp=own.context_parallel_size,
        ep=own.expert_model_parallel_size,
        etp=own.expert_tensor_parallel_size,
        sequence_parallel=own.sequence_parallel and own.tensor_model_parallel_size > 1,  # as Megatron-LM takes it
        first=own.num_layers_in_first_pipeline_stage,
        last=own.num_layers_in_last_pipeline_stage,
    )


def refusals(layout: RankLayout, shape: ModelShape) -> list[str]:
    """One line per broken rule: setting, value, rule, nearest valid choice. Empty where the model can be built."""
    tp, pp, cp, ep, etp = layout.tp, layout.pp, layout.cp, layout.ep, layout.expert_tp
    sizes = {
        "tensor": tp,
        "pipeline": pp,
        "context": cp,
        "expert": ep,
        "expert_tensor": etp,
        "virtual_pipeline": layout.vpp,
    }
    if said := [f"{_NAMES[k]}={v}: sizes are at least 1; use 1" for k, v in sizes.items() if v < 1]:
        return said
    parts = {"attention heads": shape.heads, "key-value heads": shape.groups, "feed-forward columns": shape.ffn}
    if shape.shared_ffn:
        parts["columns of the shared experts"] = shape.shared_ffn
    fits = _divisors(gcd(*parts.values()))
    tensor = [line for what, whole in parts.items() for line in _cut("tensor", tp, whole, what, fits)][:1]
    said = [*tensor, *_stages(layout, shape), *_experts(layout, shape)]
    if layout.world % (block := tp * pp * cp):
        said.append(
            f"tensor x pipeline x context parallel size = {tp} x {pp} x {cp}: {layout.world} ranks can't be cut into blocks of "
            f"{block}; {nearest(block, _divisors(layout.world), 'a product of ')}"
        )
    return said


def _stages(layout: RankLayout, shape: ModelShape) -> list[str]:
    pp, vpp, layers = layout.pp, layout.vpp, shape.layers
    if vpp > 1 and pp == 1:
        return [f"{_NAMES['virtual_pipeline']}={vpp}: chunks need a pipeline; use 1, or {_NAMES['pipeline']} of 2 or more"]
    own = {f"num_layers_in_{which}_pipeline_stage": n for which, n in (("first", layout.first), ("last", layout.last)) if n}
    if not own and layers % pp == 0:
        return _cut("virtual_pipeline", vpp, layers // pp, "layers of a stage")
    if not own:
        return _cut("pipeline", pp, layers, "layers", [d for d in _divisors(layers) if layers // d % vpp == 0])
    middle, stages = layers - sum(own.values()), pp - len(own)
    given = ", ".join(f"{name}={n}" for name, n in own.items())
    if any(n % vpp for n in own.values()):
        return [f"{given}: each must be a multiple of {vpp}, the chunks of a stage"]
    if stages < 0 or middle < 0 or (middle % (stages * vpp) if stages else middle):
        return [
            f"{given}: the other {middle} of {layers} layers can't be cut into {stages} equal stages of {vpp} chunks; leave it out"
        ]
    return []


def _experts(layout: RankLayout, shape: ModelShape) -> list[str]:
    ep, etp, stage = layout.ep, layout.expert_tp, layout.world // layout.pp
    if not shape.experts:
        return [f"{_NAMES['expert']}={ep}: the model has no experts; use 1"] if ep > 1 else []
    blocks = stage // etp if layout.world % layout.pp == 0 and stage % etp == 0 else 0  # ranks without rest are another rule's
    fits = _divisors(gcd(blocks, shape.experts))
    said = _cut("expert", ep, shape.experts, "experts", fits) or _cut("expert", ep, blocks, "blocks of ranks of a stage", fits)
    if said and etp > 1 and shape.experts % ep == 0 and layout.world % (layout.pp * ep) == 0:  # whole experts on each rank do fit
        said = [f"{said[0]}, or expert_tensor_parallel_size of 1 (unset, it is tensor_model_parallel_size)"]
    ranks = stage if layout.world % layout.pp == 0 else 0
    fits = _divisors(gcd(ranks, shape.expert_ffn))
    said += _cut("expert_tensor", etp, shape.expert_ffn, "columns of an expert", fits) or _cut(
        "expert_tensor", etp, ranks, "ranks of a stage", fits
    )
    if layout.tp > 1 and not layout.sequence_parallel:
        said.append(f"{_NAMES['tensor']}={layout.tp} with {shape.experts} experts: needs sequence_parallel; add it")
    return said


_NAMES = {k: f"{k}_model_parallel_size" for k in ("tensor", "pipeline", "virtual_pipeline", "expert")} | {
    "context": "context_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}


def _cut(size: str, value: int, whole: int, what: str, valid: Iterable[int] | None = None) -> list[str]:
    """What is against cutting `whole` into `value` equal parts."""
    if whole % value == 0:
        return []
    rule = f"{whole} {what} can't be cut into {value} equal parts"
    return [f"{_NAMES[size]}={value}: {rule}; {nearest(value, _divisors(whole) if valid is None else valid)}"]


def nearest(value: int, valid: Iterable[int], what: str = "") -> str:
    """'nearest: 2 or 4': the valid choices on both sides of a value."""
    choices = sorted(valid)
    near = [c for c in choices if c < value][-1:] + [c for c in choices if c > value][:1]
    return f"nearest: {what}{' or '.join(map(str, near))}" if near else "no size fits"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
