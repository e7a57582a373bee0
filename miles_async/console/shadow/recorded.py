"""Groups of a run from its files: recorded batches where there are some, else the texts that the recorder kept.

Both hold kept groups only. Texts have no metadata and no tokens: a reward that reads metadata needs recorded batches
(--save-debug-rollout-data).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.samples import FILE, OLDER, TEXT_CHARS, read_samples
from actors.reward.sample import Sample
from actors.trainer.record import RecordedBatch, path_of, read_record
from bus.errors import UNREADABLE
from miles_async.console.shadow.units import ShadowUnit, chosen
from miles_async.settings.errors import SettingsError


def batches(pattern: str | None) -> list[int]:
    """Steps of which the batch is on file, counted from 1."""
    if not pattern:
        return []
    before, _, after = Path(pattern).name.partition("{rollout_id}")
    names = (f.name[len(before) : len(f.name) - len(after)] for f in path_of(pattern, 1).parent.glob(f"{before}*{after}"))
    return sorted(int(name) + 1 for name in names if name.isdecimal())


class RecordedFiles:
    """A run's files; `pattern`: of recorded batches, None without. SettingsError when there is nothing."""

    def __init__(self, run_dir: Path, pattern: str | None, *, share: float, tokens: bool, unseen: Collection[str] = ()) -> None:
        """`tokens`: texts alone do not do. `unseen`: words of special tokens, which texts have and rewards are not shown."""
        self._pattern, self._steps, self._share = pattern or "", batches(pattern), share
        self._texts = [file for file in (run_dir / OLDER, run_dir / FILE) if file.is_file()]
        self._unseen = re.compile("|".join(map(re.escape, unseen))) if unseen else None
        self.missed: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        if not self._steps and (tokens or not self._texts):
            what = "recorded batch" if tokens else "recorded batch and no samples.jsonl"
            why = f"{run_dir} has no {what}"
            raise SettingsError(why, remedy="Train with --save-debug-rollout-data FILE_{rollout_id}.")
        kept = "of what the run kept"
        self.told = f"{len(self._steps)} recorded batches {kept}" if self._steps else f"{FILE}, texts {kept}, without metadata"

    async def units(self) -> AsyncGenerator[ShadowUnit]:
        """In the order of training; one file at a time is in memory."""
        found = self._of_batches() if self._steps else self._of_texts()
        while (unit := await asyncio.to_thread(next, found, None)) is not None:
            yield unit

    def records(self) -> Iterator[RecordedBatch]:
        """The batches, in order. Raises CheckpointRefused for a damaged one."""
        for step in self._steps:
            yield read_record(path_of(self._pattern, step))

    def _of_batches(self) -> Iterator[ShadowUnit]:
        for record in self.records():
            for group in record.groups:
                if chosen(group.group_id, self._share):
                    yield ShadowUnit(group=group.group_id, members=group.samples, part=bool(group.part))

    def _of_texts(self) -> Iterator[ShadowUnit]:
        seen: set[str] = set()
        for group, rows in groupby(read_samples(self._texts), key=lambda row: str(row.get("group", ""))):
            fresh = [row for row in rows if row["sample"] not in seen]
            seen |= {row["sample"] for row in fresh}
            whole = [row for row in fresh if not any(_cut(row.get(name, "")) for name in ("prompt", "response"))]
            self.left_out["text cut on record"] += len(fresh) - len(whole)
            if whole and chosen(group, self._share):
                samples = tuple(map(self._sample, whole))
                yield ShadowUnit(group=group, samples=samples, rewards=tuple(float(row["reward"]) for row in whole))

    def _sample(self, row: dict[str, Any]) -> Sample:
        prompt, response = str(row.get("prompt", "")), str(row.get("response", ""))
        return Sample(
            sample_id=str(row["sample"]),
            prompt=prompt,
            response=self._unseen.sub("", response) if self._unseen else response,
            label=str(row.get("label", "")),
            n_tokens=int(row.get("tokens", 0)),
            finish=str(row.get("finish", "stop")),
        )


def _cut(text: str) -> bool:
    """Whether the recorder left its middle out."""
    return len(text) > TEXT_CHARS - 100 and "characters left out]" in text


def special_words(model_dir: Path) -> list[str]:
    """Words of the tokenizer's special tokens, longest first; none where it cannot be read."""
    try:
        found = msgspec.json.decode((model_dir / "tokenizer.json").read_bytes())["added_tokens"]
        words = [str(token["content"]) for token in found if token.get("special") and token["content"]]
    except (OSError, *UNREADABLE, KeyError, TypeError):
        return []
    return sorted(words, key=len, reverse=True)
