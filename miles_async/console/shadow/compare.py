"""The run's own reward or verdict and the shadow's, of one group at a time. What raises or is late is counted, and ends the shadow
when it does so for everything."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, Self

from actors.filter.judges import JUDGES, Judge, Member, judge
from actors.reward.sample import Sample, sample_of, settle
from actors.reward.scorer import Scorers
from actors.reward.spec import RewardSpec, scorers_of, text_by
from actors.runtime.hooks import load_hook
from actors.runtime.miles import judge_of
from actors.runtime.prompts import decoder_of
from actors.runtime.whole import called
from bus.errors import DeadlineExceeded, MilesAsyncError, Poison, Transient
from bus.messages.base import Packed
from bus.messages.samples import Scored
from miles_async.console.shadow.paired import Paired
from miles_async.console.shadow.units import ShadowUnit, step_back

MOST_FAILED = 16  # in a row
SHOWN = 8  # groups that differ; the file has all
Row = dict[str, Any]


class ShadowEnds(MilesAsyncError):
    """What the shadow was given does not work; the run knows nothing of it."""


class Comparer(Protocol):
    """Use as `async with`. `left_out`: what could not be compared, by reason."""

    paired: Paired
    left_out: Counter[str]
    at_once: int

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def compare(self, unit: Any) -> list[Row]:
        """Rows for the file. Raises ShadowEnds."""
        ...

    def more(self) -> dict[str, Any]:
        """What the summary says beside the pairs."""
        ...


class Failures:
    """Failures in a row."""

    def __init__(self, what: str) -> None:
        self._what, self._row = what, 0

    def failed(self, text: str) -> None:
        """Once more. Raises ShadowEnds when it never works."""
        self._row += 1
        if self._row >= MOST_FAILED:
            raise ShadowEnds(f"{self._what} failed {self._row} times in a row, last {' '.join(text.split())[:300]}. Mend it.")

    def worked(self) -> None:
        self._row = 0


class Rewards:
    """Another reward. Functions run in verifier processes, as the run's do."""

    at_once = 8  # groups; the pool bounds samples

    def __init__(self, spec: RewardSpec, timeout_s: float) -> None:
        self._spec, self._timeout_s = spec, timeout_s
        self._text: Callable[[Packed], str] | None = None
        self._stack = AsyncExitStack()
        self._failures = Failures(f"reward {spec.custom_rm_path or spec.rm_type}")
        self.paired = Paired()
        self.left_out: Counter[str] = Counter()
        self._equal = 0

    async def __aenter__(self) -> Self:
        self._scorers: Scorers = await self._stack.enter_async_context(scorers_of(self._spec, lambda name: None))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def compare(self, unit: ShadowUnit) -> list[Row]:
        scored = [member for member in unit.members if isinstance(member, Scored)]
        self.left_out["lost"] += len(unit.members) - len(scored)
        samples, rewards, types = unit.samples, unit.rewards, [""] * len(unit.samples)
        if scored:
            if self._text is None:
                self._text = text_by(self._spec.tokenizer_dir, skip_special_tokens=self._spec.skip_special_tokens)
            samples = tuple(sample_of(one.rollout, self._text) for one in scored)
            rewards, types = tuple(one.reward for one in scored), [one.rollout.task.rm_type for one in scored]
        if self._spec.group_rm:
            found = await self._group(samples) if samples else []
        else:
            found = await asyncio.gather(*map(self._one, samples, types))
        rows: list[Row] = []
        for sample, run, shadow in zip(samples, rewards, found, strict=True):
            if shadow is not None and math.isfinite(run) and math.isfinite(shadow):
                rows.append({"group": unit.group, "sample": sample.sample_id, "run": run, "shadow": shadow})
            elif shadow is not None:
                self.left_out["no finite number"] += 1
        if rows:
            self.paired.add([(row["run"], row["shadow"]) for row in rows])
            self._equal += sum(row["run"] == row["shadow"] for row in rows)
        return rows

    async def _one(self, sample: Sample, rm_type: str) -> float | None:
        try:
            scorer = self._scorers.named(rm_type)
            value = await scorer.score(sample, self._timeout_s)
            reward = settle(value, self._spec.reward_key or scorer.default_key, scorer.name).scalar
        except (Transient, Poison) as error:
            self._failed(error, 1)
            return None
        self._failures.worked()
        return reward

    async def _group(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        try:
            values = await self._scorers.score_group(samples, self._timeout_s)
            of = self._scorers.of_groups
            rewards = [settle(value, self._spec.reward_key or of.default_key, of.name).scalar for value in values]
        except (Transient, Poison) as error:
            self._failed(error, len(samples))
            return [None] * len(samples)
        self._failures.worked()
        return rewards

    def _failed(self, error: Exception, n: int) -> None:
        self.left_out["late" if isinstance(error, DeadlineExceeded) else "raised"] += n
        self._failures.failed(str(error))

    def more(self) -> dict[str, Any]:
        return {"equal": self._equal}


class ShadowFilter:
    """Another filter: a verdict is 1 for a kept group and 0 for a dropped one. It runs in a thread; one that does not come back
    ends the shadow."""

    at_once = 1

    def __init__(self, path: str, deadline_s: float, values: Mapping[str, Any] = {}, model_dir: str = "") -> None:
        self._path, self._deadline_s = path, deadline_s
        self._judge: Judge = JUDGES.get(path) or judge_of(load_hook(path), lambda: values, decoder_of(model_dir))
        self._failures = Failures(f"filter {path}")
        self.paired = Paired()
        self.left_out: Counter[str] = Counter()
        self._differ: list[str] = []
        self._kept = Counter({"by both": 0, "by the run alone": 0, "by the shadow alone": 0, "by neither": 0})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def compare(self, unit: ShadowUnit) -> list[Row]:
        if unit.part:  # the run judges it by rewards of samples that are no longer here
            self.left_out["left in parts"] += 1
            return []
        try:
            reason = await asyncio.wait_for(called(self._judged, (unit.members,)), self._deadline_s)
        except TimeoutError:
            late = f"filter {self._path} did not end within {self._deadline_s:g} s on group {unit.group}"
            raise ShadowEnds(f"{late}. Look for a loop or a wait in it.") from None
        except Exception as error:  # noqa: BLE001 - whatever a function of the user's raises
            self.left_out["raised"] += 1
            self._failures.failed(f"{type(error).__name__}: {error}")
            return []
        self._failures.worked()
        kept = reason is None
        if kept != unit.kept and len(self._differ) < SHOWN:
            self._differ.append(unit.group)
        self.paired.add([(float(unit.kept), float(kept))])
        both = {(True, True): "by both", (True, False): "by the run alone", (False, True): "by the shadow alone"}
        self._kept[both.get((unit.kept, kept), "by neither")] += 1
        return [
            {
                "group": unit.group,
                "run": unit.reason or "kept",
                "shadow": reason or "kept",
                "differs": unit.kept != kept,
            }
        ]

    def _judged(self, members: Sequence[Member]) -> str | None:
        step_back()
        return judge(members, self._judge)

    def more(self) -> dict[str, Any]:
        return {"kept": dict(self._kept), "differ": self._differ}
