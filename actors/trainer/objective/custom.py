"""Calls of the user's own functions, named by dotted path in the settings: what each is given, what it must return.

A function is looked up in HOOKS, which `actors.trainer.hooks.install` fills before settings are checked. Always true: what
leaves this file has the shapes that the rest of the objective relies on, and anything else is a HookError that names the
setting; a function sees copies, and what it switches in torch is switched back. Of a loss, and of one that was weighed, the
gradient is taken here: what it is made of is the function's own, and fails under its name. Values lie on the device of the step.
Signatures: `objective_config.SIGNATURES`; they follow reference section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from actors.trainer.objective.advantages import AdvantageInputs
from actors.trainer.objective.inputs import LossInputs
from actors.trainer.objective.reductions import reduce_sum
from actors.trainer.objective.samples import TrainSample
from actors.trainer.objective.segments import keep
from actors.trainer.objective_config import HookError, ObjectiveConfig

HOOKS: dict[str, Callable[..., Any]] = {}
"""dotted path -> function."""

LOSS = "custom_loss_function_path"
ADVANTAGE = "custom_advantage_function_path"
TIS = "custom_tis_function_path"
REDUCER = "custom_pg_loss_reducer_function_path"
REWARDS = "custom_reward_post_process_path"
NO_GRADIENT = "its result carries no gradient; do not detach what it is given"


def _call(field: str, cfg: ObjectiveConfig, *args: Any, **named: Any) -> Any:
    dtype = torch.get_default_dtype()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # as it is; and so it is again afterwards
            return HOOKS[getattr(cfg, field)](*args, **named)
    except BaseException as error:  # the user's code may raise anything, and sys.exit would end the trainer as if it were done
        raise HookError.of(error, field, getattr(cfg, field)) from error
    finally:
        torch.set_default_dtype(dtype)


def _copied(x: Any) -> Any:
    """A struct with tensors of its own; gradient flows through them."""
    own = {f.name: v.clone() for f in fields(x) if isinstance(v := getattr(x, f.name), Tensor)}
    return replace(x, **own)


def _wrong(field: str, cfg: ObjectiveConfig, problem: str) -> HookError:
    return HookError(field, getattr(cfg, field), problem)


def _tensor(x: Any, what: str, shape: tuple[int, ...], field: str, cfg: ObjectiveConfig, like: Tensor | None = None) -> Tensor:
    """`x`, if it is a floating tensor of that shape, on the device of `like`."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or tuple(x.shape) != shape:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise _wrong(field, cfg, f"{what} is {got}, expected a float tensor {list(shape)}")
    if like is not None and x.device != like.device:
        raise _wrong(field, cfg, f"{what} lies on {x.device}, what it was given on {like.device}")
    return x


def _pair(x: Any, what: str, n: int, field: str, cfg: ObjectiveConfig) -> Sequence[Any]:
    if not isinstance(x, tuple) or len(x) != n:
        raise _wrong(field, cfg, f"returned {type(x).__name__}, expected a tuple {what}")
    return x


def _metrics(x: Any, shape: tuple[int, ...], field: str, cfg: ObjectiveConfig) -> dict[str, Tensor]:
    if not isinstance(x, dict) or not all(isinstance(name, str) and name.isprintable() for name in x):
        raise _wrong(field, cfg, f"metrics are {type(x).__name__}, expected a dict of tensors by printable names")
    return {name: _tensor(v, f"metric {name!r}", shape, field, cfg).detach() for name, v in x.items()}


def post_processed_rewards(
    cfg: ObjectiveConfig,
    samples: Sequence[TrainSample],
    rewards: Sequence[float | None],
    missing: Collection[int],
) -> tuple[list[float | None], list[float | None]]:
    """(raw, processed) rewards [S] in place of the group baseline. Samples at `missing` have no reward and are not shown;
    they and those whose processed reward is not finite get None."""
    shown = [i for i in range(len(samples)) if i not in missing]
    given = [replace(_copied(samples[i]), reward=rewards[i]) for i in shown]
    result = _pair(_call(REWARDS, cfg, cfg, given), "(raw, processed)", 2, REWARDS, cfg)
    columns: list[list[float | None]] = []
    for what, column in zip(("raw", "processed"), result, strict=True):
        values = _plain(column)
        if not isinstance(values, list | tuple) or len(values) != len(shown):
            raise _wrong(REWARDS, cfg, f"{what} rewards are not {len(shown)} numbers in a list")
        known = {i: _finite(v, what, cfg) for i, v in zip(shown, values, strict=True)}
        columns.append([known.get(i) for i in range(len(samples))])
    return columns[0], columns[1]


def _finite(x: Any, what: str, cfg: ObjectiveConfig) -> float | None:
    value = _plain(x)
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if value is not None and not isinstance(value, int | float):
        raise _wrong(REWARDS, cfg, f"a {what} reward is {type(x).__name__}, expected a number")
    return float(value) if value is not None and math.isfinite(value) else None


def _plain(x: Any) -> Any:
    """A tensor, an array or a number of theirs as Python's own."""
    return x.tolist() if hasattr(x, "tolist") else x


def advantages(cfg: ObjectiveConfig, x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """(advantages, returns), float64 [T], 0 at masked tokens, finite."""
    shape = (x.mask.numel(),)
    parts = _pair(_call(ADVANTAGE, cfg, cfg, _copied(x)), "(advantages, returns)", 2, ADVANTAGE, cfg)
    named = zip(("advantages", "returns"), parts, strict=True)
    found = [keep(x.mask, _tensor(v, name, shape, ADVANTAGE, cfg, x.mask).detach().double()) for name, v in named]
    if not torch.isfinite(torch.stack(found)).all():
        raise _wrong(ADVANTAGE, cfg, "a trained token's value is not finite")
    return found[0], found[1]


def _rows(x: Tensor, mb: LossInputs) -> list[Tensor]:
    """[T] -> one tensor per sample."""
    return list(torch.split(x, list(mb.lengths)))


def _total_lengths(mb: LossInputs) -> list[int]:
    return [p + n for p, n in zip(mb.prompt_lengths, mb.lengths, strict=True)]


def corrected(
    cfg: ObjectiveConfig, mb: LossInputs, loss: Tensor, old_logp: Tensor, rollout_logp: Tensor, known: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(`loss` with its weights [T], for `reduced`; tokens that still count bool [T]; metrics [T]). `loss` is a leaf; `known` [T]:
    tokens where both log-probs are numbers; the others are given as 0 and masked."""
    masks = known.to(loss.dtype)
    with torch.enable_grad():
        result = _call(
            TIS,
            cfg,
            args=cfg,
            pg_loss=loss.clone(),
            train_log_probs=_rows(keep(known, old_logp), mb),
            rollout_log_probs=_rows(keep(known, rollout_logp), mb),
            loss_masks=_rows(masks, mb),
            total_lengths=_total_lengths(mb),
            response_lengths=list(mb.lengths),
            parallel_state=None,
            max_seq_lens=None,
        )
    weighted, kept, metrics = _pair(result, "(pg_loss, loss_masks, metrics)", 3, TIS, cfg)
    if not isinstance(kept, list | tuple) or len(kept) != len(mb.lengths):
        raise _wrong(TIS, cfg, f"loss_masks are not a list of {len(mb.lengths)} tensors")
    for n, mask in zip(mb.lengths, kept, strict=True):
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (n,):
            raise _wrong(TIS, cfg, f"a loss mask is not a tensor [{n}] like the one given")
    shape = (loss.numel(),)
    still = torch.cat([m != 0 for m in kept]) & known if kept else known
    weighted = _tensor(weighted, "pg_loss", shape, TIS, cfg, loss)
    if not weighted.requires_grad:
        raise _wrong(TIS, cfg, NO_GRADIENT)
    return weighted, still, _metrics(metrics, shape, TIS, cfg)


def reducer(cfg: ObjectiveConfig, mb: LossInputs, mask: Tensor) -> Callable[[Tensor], Tensor]:
    """x [T] -> [] sum over the micro-batch, undivided: the user's where one is set, else the one of the settings."""
    if not cfg.custom_pg_loss_reducer_function_path:
        return lambda x: reduce_sum(x, mask, mb.weights)
    masks = _rows(mask.to(mb.advantages.dtype), mb)
    per_token = cfg.calculate_per_token_loss
    own = _call(REDUCER, cfg, _total_lengths(mb), list(mb.lengths), masks, per_token)
    if not callable(own):
        raise _wrong(REDUCER, cfg, f"returned {type(own).__name__}, expected a function from a tensor [T] to one []")

    def reduce(x: Tensor) -> Tensor:
        with torch.enable_grad():
            kept = keep(mask, x)
            leaf = kept.detach().clone().requires_grad_()
            try:
                value = own(leaf)
            except BaseException as error:
                raise HookError.of(error, REDUCER, getattr(cfg, REDUCER), "its reducer") from error
            return _done(_tensor(value, "the reduced loss", (), REDUCER, cfg), [(kept, leaf)], mask, REDUCER, cfg)

    return reduce


def reduced(cfg: ObjectiveConfig, mb: LossInputs, mask: Tensor, x: Tensor, leaf_of: tuple[Tensor, Tensor] | None) -> Tensor:
    """x [T] -> []; `leaf_of`: what x was made of where the user's function weighed it, and the leaf that stood for that."""
    if leaf_of is None:
        return reducer(cfg, mb, mask)(x)
    with torch.enable_grad():
        return _done(reducer(cfg, mb, mask)(x), [leaf_of], mask, TIS, cfg)


def loss(cfg: ObjectiveConfig, mb: LossInputs, usable: Tensor, old_logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss [], undivided, with gradient; detached sums []) of the user's loss, in place of everything in `loss.py`."""
    batch = _copied(replace(mb, mask=usable, old_logp=old_logp))
    given = [x for x in (mb.new_logp, mb.entropy) if x is not None]
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in given]
        batch = replace(batch, new_logp=leaves[0], entropy=leaves[1] if leaves[1:] else None)
        result = _call(LOSS, cfg, cfg, batch, leaves[0], reducer(cfg, mb, usable))
        value, metrics = _pair(result, "(loss, metrics)", 2, LOSS, cfg)
        value, metrics = _tensor(value, "the loss", (), LOSS, cfg), _metrics(metrics, (), LOSS, cfg)
        return _done(value, list(zip(given, leaves, strict=True)), usable, LOSS, cfg), metrics


def _done(value: Tensor, inputs: Sequence[tuple[Tensor, Tensor]], mask: Tensor, field: str, cfg: ObjectiveConfig) -> Tensor:
    """What a function of the user's made of copies ([T], the second of each pair), with its gradient by what they are copies of."""
    found: Sequence[Tensor | None] = (None,) * len(inputs)
    if value.requires_grad:
        try:
            found = torch.autograd.grad(value, [leaf for _, leaf in inputs], allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except BaseException as error:
            raise HookError.of(error, field, getattr(cfg, field), "its gradient") from error
    if all(g is None for g in found) and mask.any():
        raise _wrong(field, cfg, NO_GRADIENT)
    total = value.detach()
    for (x, _), g in zip(inputs, found, strict=True):
        if g is not None:
            total = total + _Known.apply(x, g)
    return total


class _Known(torch.autograd.Function):
    """0, with a gradient by `x` that is known already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return upstream[0] * gradient, None
