"""How ranks are cut into tensor, pipeline, context, expert and data parallel ones (pure).

Always true: a layout that `refusals` has nothing against divides GPUs, heads, layers and experts without rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class Shape:
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
class Layout:
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


def refusals(layout: Layout, shape: Shape) -> list[str]:
    """One line per broken rule: setting, value, rule, nearest valid choice. Empty where the model can be built."""
    said: list[str] = []

    def divides(setting: str, value: int, whole: int, what: str) -> None:
        if whole % value:
            said.append(f"{setting}={value}: {whole} {what} can't be cut into {value} equal parts; {nearest(value, _divisors(whole))}")

    sizes = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp, "context_parallel_size": layout.cp,
             "expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.expert_tp,
             "virtual_pipeline_model_parallel_size": layout.vpp}  # fmt: skip
    said += [f"{name}={value}: sizes are at least 1; use 1" for name, value in sizes.items() if value < 1]
    if said:
        return said
    tp, pp, cp, ep, etp = layout.tp, layout.pp, layout.cp, layout.ep, layout.expert_tp
    together = gcd(shape.heads, gcd(shape.groups, shape.ffn))
    for whole, what in ((shape.heads, "attention heads"), (shape.groups, "key-value heads"), (shape.ffn, "feed-forward columns")):
        if whole % tp:
            said.append(f"tensor_model_parallel_size={tp}: {whole} {what} can't be cut into {tp} equal parts; "
                        f"{nearest(tp, _divisors(together))}")  # fmt: skip
            break
    if shape.shared_ffn:
        divides("tensor_model_parallel_size", tp, shape.shared_ffn, "columns of the shared experts")
    said += _stages(layout, shape)
    if layout.world % (tp * pp * cp):
        blocks = tp * pp * cp
        said.append(f"tensor x pipeline x context parallel = {tp} x {pp} x {cp} = {blocks}: {layout.world} ranks can't be cut into blocks "
                    f"of {blocks}; {nearest(blocks, _divisors(layout.world), 'a product of ')}")  # fmt: skip
    if layout.sequence_parallel and tp == 1:
        said.append("sequence_parallel with tensor_model_parallel_size=1: there is nothing to share a sequence with; leave it out")
    return said + _experts(layout, shape, ep, etp)


def _stages(layout: Layout, shape: Shape) -> list[str]:
    pp, vpp = layout.pp, layout.vpp
    if vpp > 1 and pp == 1:
        return [f"virtual_pipeline_model_parallel_size={vpp}: chunks need a pipeline; use 1, or pipeline_model_parallel_size of 2 or more"]
    own = [n for n in (layout.first, layout.last) if n is not None]
    if not own:
        if shape.layers % (pp * vpp) == 0:
            return []
        whole = f"{shape.layers} layers can't be cut into {pp} stages"
        if vpp > 1 and shape.layers % pp == 0:
            return [f"virtual_pipeline_model_parallel_size={vpp}: {shape.layers // pp} layers of a stage can't be cut into {vpp} equal "
                    f"chunks; {nearest(vpp, _divisors(shape.layers // pp))}"]  # fmt: skip
        return [f"pipeline_model_parallel_size={pp}: {whole}{f' of {vpp} chunks' if vpp > 1 else ''} of equal size; "
                f"{nearest(pp, (d for d in _divisors(shape.layers) if shape.layers // d % vpp == 0))}, or give "
                f"num_layers_in_first_pipeline_stage / num_layers_in_last_pipeline_stage"]  # fmt: skip
    middle, stages = shape.layers - sum(own), pp - len(own)
    if min(own) < 1 or middle < 0 or stages < 0 or (stages == 0) != (middle == 0) or (stages and middle % (stages * vpp)):
        return [f"num_layers_in_first_pipeline_stage={layout.first}, num_layers_in_last_pipeline_stage={layout.last}: the other "
                f"{middle} of {shape.layers} layers can't be cut into {stages} equal stages of {vpp} chunks; leave both out or make "
                "the rest divide"]  # fmt: skip
    return [f"num_layers_in_(first|last)_pipeline_stage={n}: can't be cut into {vpp} chunks; {nearest(n, range(vpp, shape.layers, vpp))}"
            for n in own if n % vpp]  # fmt: skip


def _experts(layout: Layout, shape: Shape, ep: int, etp: int) -> list[str]:
    if not shape.experts:
        return [f"expert_model_parallel_size={ep}: the model has no experts; use 1"] if ep > 1 else []
    said = []
    if shape.experts % ep:
        said.append(f"expert_model_parallel_size={ep}: {shape.experts} experts can't be cut into {ep} equal parts; "
                    f"{nearest(ep, _divisors(shape.experts))}")  # fmt: skip
    if shape.expert_ffn % etp:
        said.append(f"expert_tensor_parallel_size={etp}: {shape.expert_ffn} columns of an expert can't be cut into {etp} equal parts; "
                    f"{nearest(etp, _divisors(shape.expert_ffn))}")  # fmt: skip
    stage = layout.world // layout.pp
    if layout.world % (ep * etp * layout.pp):
        fits = (d for d in _divisors(stage) if stage % (d * etp) == 0 and shape.experts % d == 0)
        said.append(f"expert_model_parallel_size={ep}, expert_tensor_parallel_size={etp}: {stage} ranks of a pipeline stage can't be cut "
                    f"into blocks of {ep * etp}; {nearest(ep, fits, 'expert_model_parallel_size of ')}")  # fmt: skip
    if layout.tp > 1 and not layout.sequence_parallel:
        said.append(f"tensor_model_parallel_size={layout.tp} with {shape.experts} experts: needs sequence_parallel; add it")
    return said


def nearest(value: int, valid: Iterable[int], what: str = "") -> str:
    """'nearest: 2 or 4': the valid choices on both sides of a value."""
    choices = sorted(valid)
    below, above = [c for c in choices if c < value][-1:], [c for c in choices if c > value][:1]
    return f"nearest: {what}{' or '.join(map(str, below + above))}" if below + above else "no size fits"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
