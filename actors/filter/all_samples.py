"""A function of the user's that is shown all samples of a step, those of dropped groups too: Miles' (args, groups, data_source).

It only looks: groups have gone on by then. Those that were judged before this actor died are not shown; that is all a crash costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from actors.runtime.context import Context
from actors.runtime.miles import Status, judged
from actors.runtime.prompts import decoder_of
from actors.runtime.whole import Whole, WholeFailed
from bus.messages.events import EventKind
from bus.messages.samples import Scored


class NoBuffer:
    """Stands for Miles' data source, in which samples could be put back."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"data_source.{name}: there is no buffer to put samples into; the bus keeps what was interrupted")


class AllSamples:
    """`judged`: what left the filter since it was told last, with the reason of a drop. `values`: on the function's `args`, beside
    the settings."""

    def __init__(self, context: Context, path: str, deadline_s: float, *, values: Mapping[str, Any], model_dir: str) -> None:
        self._context, self._values = context, values
        self._decode = decoder_of(model_dir)
        self._call = Whole(context, "rollout_all_samples_process_path", path, deadline_s)
        self.judged: list[tuple[Sequence[Scored], str | None]] = []

    async def tell(self) -> None:
        """Show what there is. A failure is told; several in a row end the run."""
        shown, self.judged = self.judged, []
        groups = [[one for scored in samples for one in judged(scored, self._decode)] for samples, _ in shown]
        for group, (_, reason) in zip(groups, shown, strict=True):
            for sample in group:
                sample.metadata["dropped"] = reason
                sample.status = sample.status if reason is None else Status.ABORTED
        if not groups:
            return
        try:
            await self._call(SimpleNamespace(**{**self._context.knobs.values, **self._values}), groups, NoBuffer())
        except WholeFailed as error:
            await self._context.refusals.add("batch hook", str(error), kind=EventKind.BATCH_HOOK_FAILED)
        else:
            self._call.worked()
