"""A policy of which adapters alone are trained; its base is frozen.

Owns the adapters: float32 until the core narrows the model, named as peft names them. Always true: B A of zeros changes no bit, and
inside `bare` the model computes as its base does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from actors.runtime.checkpoint_names import tensor_names
from actors.runtime.lora import PREFIX, merged
from actors.runtime.run import Refused
from actors.runtime.seeds import seed_for
from actors.trainer.lora import peft
from actors.trainer.lora.merge import written
from actors.trainer.lora.peft import ADAPTER, ADAPTER_CONFIG, Lora
from actors.trainer.torch_backend.fp8 import scheme_of
from actors.trainer.torch_backend.implementations.generic import GenericPolicy
from actors.trainer.torch_backend.layout import MicroBatch
from actors.trainer.torch_backend.policy import Policy
from actors.trainer.torch_backend.shards import TorchShards
from actors.trainer.training.export import Named

EQUAL = 2e-4
"""Largest difference of a log-prob between adapters and merged weights, in float32; `SHOWN`: least that adapters must make."""
SHOWN = 10 * EQUAL


class LoraLinear(nn.Linear):
    """A linear layer with an adapter beside its frozen weight: x [..., in] -> x W' + scale * x A' B' [..., out]."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    bare: bool

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        if self.bare:
            return out
        return out + F.linear(F.linear(input, self.lora_A), self.lora_B) * self.scale


def _adapt(linear: nn.Linear, scale: float, rank: int, seed: int) -> LoraLinear:
    """The same module, with an adapter: A uniform within 1 / sqrt(in), as peft has it, and B zero."""
    linear.__class__ = LoraLinear
    adapted: Any = linear
    random = torch.Generator().manual_seed(seed)
    a = (torch.rand(rank, linear.in_features, generator=random) * 2 - 1) * linear.in_features**-0.5
    adapted.lora_A, adapted.lora_B = nn.Parameter(a), nn.Parameter(torch.zeros(linear.out_features, rank))
    adapted.scale, adapted.bare = scale, False
    made: LoraLinear = adapted
    return made


def _asks_for_gradient(_: nn.Module, __: object, out: Tensor) -> Tensor:
    """What enters the first layer is like what enters the others: torch compiles one graph for all, and not one more."""
    return out.requires_grad_() if torch.is_grad_enabled() else out


class Adapted(Policy):
    """`hf` as `load_policy` gives it, in float32 on the CPU, is changed in place. `path`: its directory. Refused where the targets
    match nothing, or the adapter to start from is another base's. `alone`: engines have the base, and get adapters."""

    file = ADAPTER

    def __init__(self, hf: Any, lora: Lora, *, path: str, seed: int, alone: bool = False) -> None:
        super().__init__(hf)
        self.serves_adapters = alone
        self._lora, self._path = lora, path
        for p in hf.parameters():
            p.requires_grad_(False)
        hf.get_input_embeddings().register_forward_hook(_asks_for_gradient)
        linear = {name: m for name, m in hf.named_modules() if type(m) is nn.Linear}
        names = peft.chosen((name for name, _ in hf.named_parameters()), lora)
        if other := [name for name in names if name not in linear]:
            raise Refused(f"lora_rank={lora.rank}: {other[0]} is no plain linear layer of {type(hf).__name__}. Exclude it.")
        self._config = peft.config_text(lora, names, linear, path)
        start = self._start({name: tuple(linear[name].weight.shape) for name in names})
        self._adapted = {n: _adapt(linear[n], lora.scale, lora.rank, seed_for(seed, "lora", n)) for n in names}
        for name, p in self.named_weights().items() if start else ():
            p.data.copy_(start[name])

    def _start(self, matrices: peft.Shapes) -> dict[str, Tensor]:
        if not self._lora.path:
            return {}
        directory = Path(self._lora.path)
        peft.check_adapter(directory, self._lora, peft.shapes_of(matrices, self._lora.rank))
        try:
            return load_file(directory / ADAPTER)
        except (OSError, SafetensorError) as error:
            raise Refused(f"adapter {directory} cannot be read ({error}). Give a directory that peft wrote.") from None

    def named_weights(self) -> dict[str, nn.Parameter]:
        """The adapters under peft's names: all that is trained."""
        pairs = ((name, part, getattr(m, part)) for name, m in self._adapted.items() for part in ("lora_A", "lora_B"))
        return {f"{PREFIX}{name}.{part}.weight": p for name, part, p in pairs}

    def served(self, shards: TorchShards, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | None]]:
        """Adapters as this process computes with them, or W + scale * B A, rounded once."""
        if self.serves_adapters:
            yield from super().served(shards, dtype)
            return
        for name, p in self.hf.named_parameters():
            module = self._adapted.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            if module is not None:
                a, b = (shards.whole(x, torch.float32, live=True) for x in (module.lora_A, module.lora_B))
                w = shards.whole(p, torch.float32, live=True)
                yield name, None if w is None or a is None or b is None else merged(w, a, b, self._lora.scale, dtype)
            elif not name.endswith((".lora_A", ".lora_B")):
                yield name, shards.whole(p, dtype, live=True)

    def adapters(self) -> Mapping[str, LoraLinear]:
        """Layers with adapters, by the name of their matrix."""
        return self._adapted

    def base(self) -> BasePolicy:
        return BasePolicy(self)

    @contextmanager
    def bare(self) -> Iterator[None]:
        """The base alone computes while the body runs."""
        try:
            for m in self._adapted.values():
                m.bare = True
            yield
        finally:
            for m in self._adapted.values():
                m.bare = False

    def beside(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """A checkpoint is a PEFT directory."""
        return {name: data for name, data in files.items() if name != "config.json"} | {ADAPTER_CONFIG: self._config}

    def write_weights(self, directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        written(Path(self._path), tensors, self._lora.scale, directory, dtype=dtype)

    def other_adapters(self, directory: Path) -> str:
        found = peft.read_config(directory)
        here = (self._lora.rank, self._lora.alpha)
        return "" if found == here else f"its rank and alpha are {found[0]} and {found[1]:g}, this run's {here[0]} and {here[1]}"


class AdaptedPolicy(Adapted, Policy):
    """Of a family with code of our own."""


class AdaptedGeneric(Adapted, GenericPolicy):
    """Of a class of transformers. Always true: its matrices with adapters have their files' names, and what the class makes of
    adapters was found equal to what it makes of merged weights."""

    def __init__(self, hf: Any, lora: Lora, **told: Any) -> None:
        super().__init__(hf, lora, **told)
        there = tensor_names(Path(self._path))
        if lost := [n for n in self._adapted if f"{n}.weight" not in there]:
            raise Refused(
                f"lora_rank={lora.rank}: {type(hf).__name__} of transformers has {min(lost)}, which files of {self._path} "
                "have under another name. Exclude it (--exclude-modules), or leave LoRA out."
            )
        prove(self)

    def published(self, weights: Named) -> Named:
        return weights if self.serves_adapters else super().published(weights)


def adapted(policy: Policy, path: str, own: Any, *, seed: int) -> Policy:
    """`policy` of the directory `path`, with adapters beside its frozen weights where the backend's settings `own` ask for them.
    Refused for a base that adapters cannot be beside; what settings alone tell is refused before (settings/lora.py)."""
    if not own.lora_rank:
        return policy
    if scheme_of(path) is not None:
        raise Refused(f"lora_rank={own.lora_rank}: {path} is an FP8 base, with which LoRA is not carried. Leave it out.")
    kind = AdaptedGeneric if isinstance(policy, GenericPolicy) else AdaptedPolicy
    return kind(policy.hf, Lora.of(own), path=path, seed=seed, alone=own.lora_publish == "adapters")


@torch.no_grad()
def prove(policy: AdaptedGeneric) -> None:
    """With random adapters the class must compute as with merged weights: a layer that it goes round would have an adapter that
    does nothing. On the CPU, before the weights are cut. Refused."""
    hf, name = policy.hf, type(policy.hf).__name__
    ids = torch.arange(3, 12).remainder(int(hf.config.get_text_config().vocab_size))[None]

    def logp() -> Tensor:
        out: Tensor = torch.log_softmax(hf(input_ids=ids).logits.float(), -1)
        return out

    modules = policy.adapters()
    before = [m.lora_B.detach().clone() for m in modules.values()]
    with policy.bare():
        plain = logp()
    try:
        for i, m in enumerate(modules.values()):
            random = torch.randn(m.lora_B.shape, generator=torch.Generator().manual_seed(i))
            change = random @ m.lora_A * m.scale
            m.lora_B.copy_(random * (0.3 * m.weight.norm() / change.norm()))
        got = logp()
        with policy.bare(), _merged_into(modules.values()):
            want = logp()
        far, shown = float((got - want).abs().max()), float((want - plain).abs().max())
        if not far <= EQUAL * max(1.0, shown) or not shown >= SHOWN:
            raise Refused(
                f"{name} of transformers does not compute adapters as merged weights: log-probs differ by {far:.1e} "
                f"(allowed {EQUAL:.0e}). Exclude the matrices that it uses otherwise (--exclude-modules), or leave LoRA out."
            )
    finally:
        for m, b in zip(modules.values(), before, strict=True):
            m.lora_B.copy_(b)


@contextmanager
def _merged_into(modules: Iterable[LoraLinear]) -> Iterator[None]:
    """Their weights hold base and adapter while the body runs."""
    kept = [(m, m.weight.detach().clone()) for m in modules]
    try:
        for m, w in kept:
            m.weight.copy_(merged(w, m.lora_A, m.lora_B, m.scale, w.dtype))
        yield
    finally:
        for m, w in kept:
            m.weight.copy_(w)


class BasePolicy(nn.Module):
    """The reference of a policy with adapters: the same weights without them."""

    def __init__(self, policy: Adapted) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: MicroBatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        with self.policy.bare():
            out: tuple[Tensor, Tensor] = self.policy(batch, entropy_gradient)
            return out
