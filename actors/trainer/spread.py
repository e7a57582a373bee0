"""How lengths, seconds and ages of a batch's samples are spread (pure): what `miles_async/console/whatif` advises from.

Quantiles are named `<name>/p<percent>`, p0 being the least and p100 the most; shares of whole numbers `<name>/<number>`, the
last of them `<name>/8_up`. A share that is 0 and a spread without values are left out.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from bus.messages.base import Packed, pack_ints
from bus.messages.groups import GroupKept
from bus.messages.samples import RolloutDone
from bus.messages.versions import staleness

QUANTILES = (0, 25, 50, 75, 90, 99, 100)
LENGTH = "rollout/response_len"  # tokens of a sample
SECONDS = "rollout/generate_s"  # of a sample on its engine
BORN = "rollout/start_age"  # steps between the version of a sample's first token and the one that is trained
SPANNED = "rollout/versions_spanned"  # steps between the versions of its first and its last token
RUNNING = "rollout/running"  # requests of one worker with its engine at once: mean and variance over tokens
PACE = "rollout/token_s"  # seconds a token of one sample: mean over tokens, and how much one request more adds
STRAGGLER = "rollout/straggler"  # longest of a group's generation times over the mean of them
MOST = 8
MOST_LIVES = 256


def spread_metrics(groups: Sequence[GroupKept], *, step: int) -> dict[str, float]:
    """Spreads over the samples of a batch that is trained on weights of `step` updates."""
    rollouts = [[s.rollout for s in g.samples if s.rollout.made] for g in groups]
    flat = [rollout for group in rollouts for rollout in group]
    spans = [r.made for r in flat]
    seconds = [list(map(whole_seconds, group)) for group in rollouts]
    timed = [group for group in seconds if len(group) > 1 and sum(group) > 0]
    return {
        **_quantiles(LENGTH, [r.response.n_tokens for r in flat]),
        **_quantiles(SECONDS, [s for group in seconds for s in group if s > 0]),
        **pace_of(flat),
        **_quantiles(STRAGGLER, [max(group) * len(group) / sum(group) for group in timed]),
        **_shares(BORN, (staleness(step, s[0].step) for s in spans)),
        **_shares(SPANNED, (staleness(s[-1].step, s[0].step) for s in spans)),
    }


def lives_of(groups: Sequence[GroupKept]) -> Packed:
    """What the samples of a batch took, one by one, for `miles-async whatif`: int32 [n, 4]: which of the batch's groups (by first
    appearance), tokens made, milliseconds on engines, milliseconds of scoring. Of a batch above MOST_LIVES samples it is a share of
    the groups, by their ids, so that what is trained in parts is here wholly or not at all."""
    share = -(-sum(len(g.samples) for g in groups) // MOST_LIVES)
    found: list[int] = []
    for at, name in enumerate(dict.fromkeys(g.group_id for g in groups)):
        if zlib.crc32(name.encode()) % share:
            continue
        for scored in (s for g in groups if g.group_id == name for s in g.samples):
            rollout = scored.rollout
            found += (at, rollout.n_made, round(1e3 * whole_seconds(rollout)), round(1e3 * scored.score_s))
    return pack_ints(found)


def whole_seconds(rollout: RolloutDone) -> float:
    """Seconds on engines, the tokens taken over from a prefix at the pace of those made since; 0 where that is not known."""
    made = rollout.n_made - rollout.resumed_tokens
    return rollout.generate_s * rollout.n_made / made if made > 0 else 0.0


def pace_of(rollouts: Sequence[RolloutDone]) -> dict[str, float]:
    """How many ran beside these samples, and what a token took and one request more added; {} where they do not tell."""
    told = [
        (r.n_made - r.resumed_tokens, r.running, r.generate_s)
        for r in rollouts
        if r.running is not msgspec.UNSET and r.generate_s > 0 and r.n_made > r.resumed_tokens
    ]
    if not told:
        return {}
    made, running, seconds = np.array(told, dtype=np.float64).T
    pace = seconds / made
    mean_running, mean_pace = np.average(running, weights=made), np.average(pace, weights=made)
    variance = np.average((running - mean_running) ** 2, weights=made)
    shared = np.average((running - mean_running) * (pace - mean_pace), weights=made)
    return {
        f"{RUNNING}/mean": float(mean_running),
        f"{RUNNING}/variance": float(variance),
        f"{PACE}/mean": float(mean_pace),
        f"{PACE}/per_running": float(shared / variance) if variance else 0.0,
    }


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(np.asarray(values, dtype=np.float64), QUANTILES)
    return {f"{name}/p{q}": float(value) for q, value in zip(QUANTILES, found, strict=True)} | {
        f"{name}/mean": float(np.mean(values))
    }


def _shares(name: str, values: Iterable[int]) -> dict[str, float]:
    counts = Counter(min(value, MOST) for value in values)
    total = counts.total()
    return {f"{name}/{n if n < MOST else f'{n}_up'}": k / total for n, k in sorted(counts.items())}
