"""Loads the functions that the objective's settings name, and tries each on a small synthetic batch before anything trains."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from actors.runtime.contained import named
from actors.runtime.hooks import load_hook
from actors.runtime.run import Refused
from actors.trainer.objective import PreparedBatch, TrainSample, policy_loss, prepare_batch
from actors.trainer.objective.custom import HOOKS, LOSS, NO_GRADIENT, REDUCER
from actors.trainer.objective_config import SIGNATURES, HookError, ObjectiveConfig, hooks_of

LENGTHS = (3, 5, 1, 4, 6, 2)  # of the synthetic responses, two to a prompt
TOLERANCE = 1e-4


def install(cfg: ObjectiveConfig) -> None:
    """Make every function of `cfg` known to the objective; HookError names the setting of one that cannot be loaded."""
    for field, path in hooks_of(cfg).items():
        if path in HOOKS:
            continue
        try:
            HOOKS[path] = load_hook(path)
        except Refused as error:
            raise HookError(field, path, f"cannot be loaded: {error.__cause__ or error}") from error
        except Exception as error:  # the user's module runs while it is imported
            raise HookError(field, path, f"cannot be loaded: {named(error)}") from error


def probe(cfg: ObjectiveConfig) -> None:
    """Install, then call each function alone on a synthetic batch. HookError unless what it returns has the right shapes,
    is finite, carries gradient where it must and nowhere else, and adds up over micro-batches."""
    install(cfg)
    for field, path in hooks_of(cfg).items():
        others = {name: "" for name in SIGNATURES if name != field}
        _probe_one(msgspec.structs.replace(cfg, **others), field, path)


def _probe_one(cfg: ObjectiveConfig, field: str, path: str) -> None:
    prepared = prepare_batch(cfg, synthetic_samples(), current_step=0)
    everything = list(range(len(LENGTHS)))
    whole, grad = _loss_and_gradient(cfg, prepared, everything, field, path)
    if not torch.isfinite(whole) or not torch.isfinite(grad).all():
        raise HookError(field, path, "gives a loss or gradient that is not finite on a synthetic batch")
    if field in (LOSS, REDUCER):
        if grad[~prepared.mask].any():
            raise HookError(field, path, "tokens that the mask leaves out reach the gradient; multiply by the mask")
        if not grad.any():
            raise HookError(field, path, "no token reaches the gradient of a synthetic batch")
        parts = [_loss_and_gradient(cfg, prepared, ids, field, path)[0] for ids in (everything[:3], everything[3:])]
        if not torch.allclose(sum(parts, torch.zeros(())), whole, rtol=TOLERANCE, atol=TOLERANCE):
            raise HookError(
                field,
                path,
                f"two micro-batches give {float(parts[0]):g} + {float(parts[1]):g}, the same samples in one give "
                f"{float(whole):g}: the result would depend on packing; return sums and leave dividing to the trainer",
            )


def _loss_and_gradient(
    cfg: ObjectiveConfig, prepared: PreparedBatch, ids: list[int], field: str, path: str
) -> tuple[Tensor, Tensor]:
    """Loss [] and gradient [T] of the synthetic samples `ids`."""
    at = [t for i in ids for t in range(prepared.offsets[i], prepared.offsets[i] + LENGTHS[i])]
    noise = torch.linspace(-0.01, 0.01, len(prepared.mask))
    new = (prepared.fields["old_logp"] + noise)[at].requires_grad_()
    micro = prepared.micro_batch(ids, new, entropy=torch.full((len(at),), 0.5).requires_grad_())
    value, _ = policy_loss(cfg, micro, prepared.norm())
    if not value.requires_grad:
        raise HookError(field, path, NO_GRADIENT)
    value.backward()
    return value.detach(), torch.zeros_like(new) if new.grad is None else new.grad


def synthetic_samples() -> list[TrainSample]:
    """Six short samples of three prompts with every field that a hook may read; two have masked tokens."""
    made = []
    for k, n in enumerate(LENGTHS):
        own = -1.0 - 0.1 * torch.arange(n, dtype=torch.float32) - 0.05 * k
        made.append(
            TrainSample(
                sample_id=f"probe{k // 2}/{k % 2}",
                group=f"probe{k // 2}",
                response_length=n,
                reward=float(k % 2),
                prompt_length=4,
                loss_mask=[1] * (n - 1) + [0] if k in (1, 4) else None,
                rollout_logp=own + 0.002 * (k - 2.5),
                old_logp=own,
                ref_logp=own - 0.01,
                teacher_logp=own + 0.1 * (k + 1),
                values=torch.full((n,), 0.3),
                spans=[(0, n)],
            )
        )
    return made
