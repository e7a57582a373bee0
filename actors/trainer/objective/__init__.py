"""The objective: pure functions from tensors to tensors. Used by every training backend.

Read in this order: config, samples, prepare, prepared (once per rollout batch), inputs, loss (per micro-batch),
metrics.
The trainer's loop is

    prepared = prepare_batch(cfg, samples, current_step=n)
    norm = prepared.norm(step)                                   # per optimizer step
    for ids in micro_batches:
        loss, sums = policy_loss(cfg, prepared.micro_batch(ids, new_logp), norm)
        loss.backward()                                          # gradients of the step simply add up
        merge(total, sums)
    report = finish(total, norm)
"""

from actors.trainer.objective.advantages import MissingInputError
from actors.trainer.objective.inputs import LossInputs
from actors.trainer.objective.loss import policy_loss, value_loss
from actors.trainer.objective.metrics import finish, flatten, merge, unflatten
from actors.trainer.objective.prepare import prepare_batch
from actors.trainer.objective.prepared import PreparedBatch, filled
from actors.trainer.objective.rules import ObjectiveConfigError, check
from actors.trainer.objective.samples import TrainSample
from actors.trainer.objective.schedules import learning_rate
from actors.trainer.objective_config import ObjectiveConfig

__all__ = ("LossInputs", "MissingInputError", "ObjectiveConfig", "ObjectiveConfigError", "PreparedBatch", "TrainSample", "check",
           "filled", "finish", "flatten", "learning_rate", "merge", "policy_loss", "prepare_batch", "unflatten",
           "value_loss")  # fmt: skip
