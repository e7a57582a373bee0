"""Functions of the user's that see the batch before it is trained: Miles' three, with Miles' signatures.

    rollout_sample_filter_path (args, groups)                   sets `remove_sample` of samples that shall not be trained
    custom_convert_samples_to_train_data_path (args, samples)   gives a dict of lists, of which count: `rewards` (in place of the
                                                                group's baseline) and `loss_masks`; the rest must be as made
    rollout_data_postprocess_path (args[, data])                changes `loss_masks` of such a dict

Always true: they take gradient away and give none. Tokens and log-probs stay what the engines made. Torch is not needed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from actors.runtime.contained import named
from actors.runtime.context import Context
from actors.runtime.miles import MilesSample, judged
from actors.runtime.numbers import number_of
from actors.runtime.prompts import decoder_of
from actors.runtime.whole import Whole, WholeFailed
from actors.trainer.spec import TrainerSpec
from bus.messages.events import EventKind
from bus.messages.groups import GroupKept

FILTER, CONVERT, POSTPROCESS = SETTINGS = (
    "rollout_sample_filter_path",
    "custom_convert_samples_to_train_data_path",
    "rollout_data_postprocess_path",
)
AGAIN_S = 1.0
AS_MADE = ("tokens", "response_lengths", "total_lengths", "rollout_log_probs")


class Fate(NamedTuple):
    """What becomes of one trajectory. `mask`: 0/1 for each response token. `processed`: its reward in place of the group's
    baseline, None = that."""

    remove: bool
    mask: list[int]
    processed: float | None = None


class Unfit(Exception):
    """What a function gave cannot be used."""


class BatchHooks:
    """Those that are set."""

    def __init__(self, context: Context, spec: TrainerSpec) -> None:
        self._context, self._values = context, spec.hook_values
        self._decode = decoder_of(spec.backend.hf_checkpoint)
        paths = {name: path for name in SETTINGS if (path := getattr(spec, name))}
        self._hooks = {name: Whole(context, name, path, spec.batch_hook_timeout_s) for name, path in paths.items()}

    async def apply(self, groups: Sequence[GroupKept], samples: Sequence[Any]) -> bool:
        """Ask them about a batch, and change its training samples (in the order of `groups`) as they say. False: one failed, and
        the batch is to be asked about again. Raises RunEnds after several failures in a row."""
        if not self._hooks:
            return True
        args = SimpleNamespace(**{**self._context.knobs.values, **self._values})
        shown = [[one for scored in group.samples for one in judged(scored, self._decode)] for group in groups]
        try:
            fates = await self._asked(args, shown)
        except WholeFailed as error:
            await self._context.refusals.add("batch hook", str(error), kind=EventKind.BATCH_HOOK_FAILED)
            await self._context.clock.sleep(AGAIN_S)
            return False
        for sample, fate in zip(samples, fates, strict=True):
            sample.train.remove, sample.train.loss_mask, sample.train.processed = fate.remove, fate.mask, fate.processed
        if removed := sum(fate.remove for fate in fates):
            self._context.count("samples_removed", removed)
        return True

    async def _asked(self, args: SimpleNamespace, groups: list[list[MilesSample]]) -> list[Fate]:
        flat = [sample for group in groups for sample in group]
        before = [list(sample.loss_mask) for sample in flat]
        found = train_data(flat)
        for name, hook in self._hooks.items():
            given = groups if name == FILTER else flat if name == CONVERT else found
            answer = await hook(args, given)
            try:
                found = settled(name, answer, flat, found, before)
            except Unfit as error:
                hook.refused(str(error))
            except Exception as error:  # noqa: BLE001 - what it gave, or put into a sample, does as it likes
                hook.refused(f"gave what cannot be used: {named(error)}")
            hook.worked()
        rewards = found.get("rewards", [None] * len(flat))
        return [Fate(bool(s.remove_sample), m, r) for s, m, r in zip(flat, found["loss_masks"], rewards, strict=True)]


def train_data(samples: Sequence[MilesSample]) -> dict[str, list[Any]]:
    """Samples as the dict of lists that is trained, by Miles' names. Without rewards: those follow from the group."""
    return {
        "tokens": [list(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "loss_masks": [[0] * s.response_length if s.remove_sample else list(s.loss_mask) for s in samples],
        "rollout_log_probs": [list(s.rollout_log_probs) for s in samples],
        "raw_reward": [s.reward for s in samples],
        "sample_indices": [s.index for s in samples],
        "truncated": [int(s.status is s.Status.TRUNCATED) for s in samples],
    }


def settled(
    name: str, answer: Any, samples: Sequence[MilesSample], found: dict[str, list[Any]], before: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    """The dict that is trained, after function `name` gave `answer`. `before`: masks as they were made. Raises Unfit."""
    if name == CONVERT and not isinstance(answer, dict):
        raise Unfit(f"gave a {type(answer).__name__}, not a dict of lists")
    made = train_data(samples)
    new = found | {"loss_masks": made["loss_masks"]} if name == FILTER else answer if isinstance(answer, dict) else found
    n = len(samples)
    for key, values in new.items():
        if not hasattr(values, "__len__") or len(values) != n:
            raise Unfit(f"gave under {key!r} no list of {n} entries, one a sample")
    for key in AS_MADE:
        if key in new and not all(_same(a, b) for a, b in zip(new[key], made[key], strict=True)):
            raise Unfit(f"gave {key!r} that are not those of the samples; change loss_masks to train less of one")
    masks = [[int(bool(x)) for x in mask] for mask in new.get("loss_masks", made["loss_masks"])]
    for sample, mask, own in zip(samples, masks, before, strict=True):
        if len(mask) != len(own) or any(m > o for m, o in zip(mask, own, strict=True)):
            raise Unfit(
                f"gave a loss mask of sample {sample.group_index}/{sample.index} that "
                + (f"has {len(mask)} entries for {len(own)} tokens" if len(mask) != len(own) else "trains what no model made")
            )
    rewards = [(given, number_of(given)) for given in new.get("rewards", [None] * n)]
    for given, number in rewards:
        if given is not None and (number is None or not math.isfinite(number)):
            raise Unfit(f"gave {given!r:.60} as a reward, which is no finite number")
    return {**made, "loss_masks": masks, "rewards": [number for _, number in rewards]}


def _same(a: Any, b: Any) -> bool:
    return list(a) == list(b) if hasattr(b, "__len__") else bool(a == b)
