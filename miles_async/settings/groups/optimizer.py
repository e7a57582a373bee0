"""OPTIMIZER: optimizer and learning-rate schedule, counted in rollouts."""

from typing import Annotated, Literal

import msgspec

from miles_async.settings.doc import Group, doc


class OptimizerSettings(Group, frozen=True, kw_only=True):
    """One optimizer step."""

    optimizer: Annotated[Literal["adam", "muon"], doc("adam is AdamW; muon for matrices, adam for the rest.")] = "adam"
    lr: Annotated[float, doc("Peak learning rate.", live="next step (trainer)", ge=0, le=1000)] = 1e-6
    min_lr: Annotated[float, doc("Learning rate at the end of a decay.", ge=0, ours=True)] = 0.0
    lr_decay_style: Annotated[Literal["constant", "linear", "cosine"], doc("Shape of the decay after warm-up.")] = "constant"
    lr_warmup_iters: Annotated[int, doc("Rollouts over which the rate rises from 0 to lr.", unit="rollouts", ge=0)] = 0
    lr_warmup_fraction: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1)] | None,
        doc("The same as a share of the run's rollouts, in place of lr_warmup_iters."),
    ] = None
    critic_lr: Annotated[float, doc("Peak learning rate of ppo's critic, on the policy's schedule.", derived="lr", ge=0, le=1000)]
    weight_decay: Annotated[float, doc("Decoupled weight decay.", ge=0)] = 0.01
    adam_beta1: Annotated[float, doc("Decay of the first moment.", ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, doc("Decay of the second moment.", ge=0, lt=1)] = 0.999
    adam_eps: Annotated[float, doc("Added to the denominator of the update.", gt=0)] = 1e-8
    clip_grad: Annotated[
        float,
        doc("Largest gradient norm; larger ones are scaled down. 0 turns it off.", live="next step (trainer)", ge=0),
    ] = 1.0
