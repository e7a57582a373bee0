"""GOVERNOR: a run that tunes its own asynchrony, inside bounds that the user gives."""

from typing import Annotated

from miles_async.settings.doc import Group, doc

LIVE = "next decision (governor)"


class GovernorSettings(Group, frozen=True, kw_only=True):
    """Moves live settings of asynchrony by what the run's own steps show (docs/scheduling.md), one at a time."""

    governor: Annotated[
        bool, doc("Let the run move the settings that have an envelope LOW:HIGH below, each within its own.", live=LIVE, ours=True)
    ] = False
    governor_staleness: Annotated[
        str | None,
        doc("Envelope of max_weight_staleness, as 1:6. Unset: it is left alone.", unit="policy versions", live=LIVE, ours=True),
    ] = None
    governor_oversampling: Annotated[
        str | None,
        doc("Envelope of over_sampling_batch_size, as 32:96. Unset: it is left alone.", unit="groups", live=LIVE, ours=True),
    ] = None
    governor_concurrency: Annotated[
        str | None,
        doc("Envelope of sglang_server_concurrency, as 64:256. Unset: it is left alone.", unit="samples", live=LIVE, ours=True),
    ] = None
    governor_interval: Annotated[
        int,
        doc(
            "Steps measured for one decision, after those that a change takes to settle.",
            unit="steps",
            live=LIVE,
            ge=4,
            ours=True,
        ),
    ] = 8
    governor_min_ess: Annotated[
        float,
        doc(
            "Effective sample size (train/ess_ratio) below which data are too old: the bound is lowered.",
            live=LIVE,
            ge=0,
            le=1,
            ours=True,
        ),
    ] = 0.5
    governor_max_lost: Annotated[
        float,
        doc(
            "Share of the tokens that may be masked or dropped as too old.", unit="of the tokens", live=LIVE, gt=0, lt=1, ours=True
        ),
    ] = 0.02
