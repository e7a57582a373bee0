"""What the optimizer moves: float32 weights, their gradients, and the optimizer's own state by parameter name.

Where the model computes in a narrower type than float32 and is not sharded, float32 masters live here: gradients of all
micro-batches add up in float32, and after a step the model gets the rounded masters. A bf16 weight cannot hold an update of
1e-6 of its size; its master can. A sharded model (FSDP) keeps float32 shards itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actors.runtime.run import Refused
from actors.trainer.backend import BackendConfig
from actors.trainer.torch_backend.muon import Muon


def decays(name: str, param: Tensor) -> bool:
    """Whether weight decay applies: matrices, not gains and biases."""
    return param.ndim >= 2 and not name.endswith("bias")


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Muon's share: matrices inside the decoder layers."""
    return param.ndim == 2 and ".layers." in name


class Weights:
    """The trainable parameters of a model by Hugging Face name, in float32."""

    def __init__(self, model: Mapping[str, nn.Parameter], *, masters: bool) -> None:
        self._model = dict(model)
        self.masters = masters
        self.params = self._model
        if masters:
            self.params = {n: nn.Parameter(p.detach().to(torch.float32)) for n, p in self._model.items()}
            for name, p in self._model.items():
                p.register_post_accumulate_grad_hook(self._collector(self.params[name]))

    @staticmethod
    def _collector(master: nn.Parameter):  # type: ignore[no-untyped-def]
        def collect(p: Tensor) -> None:
            grad = p.grad
            assert grad is not None
            master.grad = grad.to(torch.float32) if master.grad is None else master.grad.add_(grad)
            p.grad = None

        return collect

    def clear(self) -> None:
        """Forget all gradients."""
        for p in self.params.values():
            p.grad = None

    @torch.no_grad()
    def clip(self, limit: float) -> float:
        """Global gradient norm before clipping; gradients are scaled down to `limit` (0: never). Non-finite: untouched."""
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if 0 < limit < value < float("inf"):
            torch._foreach_mul_(grads, limit / value)
        return value

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the weights after a step."""
        if self.masters:
            torch._foreach_copy_(list(self._model.values()), list(self.params.values()))


class Optimizer:
    """AdamW, or Muon for the hidden matrices and AdamW for the rest. Rates come with each step."""

    def __init__(self, weights: Weights, config: BackendConfig) -> None:
        if config.optimizer not in ("adam", "muon"):
            raise Refused(f"optimizer={config.optimizer!r} is unknown. Choose adam or muon.")
        muon = {n: p for n, p in weights.params.items() if config.optimizer == "muon" and is_hidden_matrix(n, p)}
        rest = {n: p for n, p in weights.params.items() if n not in muon}
        groups = [
            {"params": [p for n, p in rest.items() if decays(n, p)], "weight_decay": config.weight_decay},
            {"params": [p for n, p in rest.items() if not decays(n, p)], "weight_decay": 0.0},
        ]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [g for g in groups if g["params"]],
                lr=config.lr,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_eps,
                fused=True,
            )
        ]
        if muon:
            self._parts.append(Muon(muon.values(), lr=config.lr, weight_decay=config.weight_decay))
        self.steps = 0
        names = {p: name for name, p in weights.params.items()}
        self._moments: dict[str, tuple[torch.optim.Optimizer, Tensor, str]] = {
            f"{kind}/{names[p]}": (part, p, kind)
            for part in self._parts
            for kind in (("momentum_buffer",) if isinstance(part, Muon) else ("exp_avg", "exp_avg_sq"))
            for group in part.param_groups
            for p in group["params"]
        }

    def step(self, lr: float) -> None:
        """One update at rate `lr`."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """`<state name>/<parameter name>` -> tensor shaped like the parameter; empty before the first step."""
        return {key: part.state[p][kind] for key, (part, p, kind) in self._moments.items() if kind in part.state.get(p, ())}

    def expected(self, steps: int) -> set[str]:
        """Names `state` has after `steps` steps."""
        return set(self._moments) if steps else set()

    def restore(self, steps: int, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave after `steps` steps; tensors are used as they are (device, sharding)."""
        self.steps = steps
        for part in self._parts:
            part.state.clear()
        for key, (part, p, kind) in self._moments.items() if steps else ():
            part.state[p][kind] = state[key]
            if not isinstance(part, Muon):
                part.state[p]["step"] = torch.tensor(float(steps), dtype=torch.float32, device=p.device)
