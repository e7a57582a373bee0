"""What actors wait for: a closed list. The text of a wait is made from its kind, and the kind is read back from the text.

Vitals carry the text, which operators see. Who decides by it (doctor, console, publisher, launcher) asks `Wait.of(text)` and
compares kinds. Invariant, held by a test: the text of each kind is read back as that kind and no other.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cache
from typing import Literal, Self

Length = Literal["idle", "turn", "short"]
"""How long a wait may be. `idle`: for ever without anything being wrong, the actor has done its work and others have not. `turn`:
as long as a step takes or longer, where engines share the trainer's GPUs. `short`: the doctor names one that lasts a minute."""


class Wait(StrEnum):
    """One kind of wait: its value is the text, with {names} that `text` fills in; `length`; `ends`: what ends it.

    Example:
        Wait.ACTIVATION.text(version=7)         # "activation of version 7"
        Wait.of("activation of version 7")      # Wait.ACTIVATION
    """

    length: Length
    ends: str

    def __new__(cls, value: str, length: Length, ends: str) -> Self:
        self = str.__new__(cls, value)
        self._value_, self.length, self.ends = value, length, ends
        return self

    # -- any actor
    ENTRY = "an entry of {streams}", "idle", "the room before it appends one"
    STREAM_SPACE = "room on stream {stream}", "short", "the stream's reader acknowledges entries"
    BLOB_SPACE = "space in {folder}", "short", "entries are acknowledged, or the disk is freed"
    READING = "the prompts of {path} to be read", "short", "the file or data source ends"
    REQUESTS = "requests", "idle", "engines and clients ask"
    # -- sampler
    CREDITS = (
        "credits: news of verdicts, policy or active",
        "idle",
        "a group is dropped, or trained and its version served: the staleness bound or the batch admits no more",
    )
    ENGINE_SLOTS = (
        "engine slots: news of verdicts, policy or active",
        "idle",
        "a slot of an engine comes free: groups may be issued, and no engine could begin one",
    )
    NEWS = "news", "idle", "anything new on the streams that it follows"
    # -- generation
    BOOTING = "the engine to boot", "short", "the engine answers; meanwhile no deadline of an activation runs"
    CURRENT_VERSION = "a current version", "short", "the trainer announces one and the publisher orders it"
    ACTIVATION = "activation of version {version}", "short", "the engine has loaded it"
    SLOT = "a free slot", "idle", "a sample ends or is parked"
    UNLENT = "the trainer to lend its GPUs", "turn", "the trainer waits long enough (--lend-trainer-gpus)"
    TURN = "the trainer's turn on the GPU to end", "turn", "its step is done (--colocate)"
    # -- trainer
    MODEL = "model and optimizer to load", "short", "they are in memory"
    CHECKPOINT_LOADED = "checkpoint {step} to load", "short", "it is in memory"
    GROUPS = "{missing} of step {step} on groups", "short", "the filter keeps more groups"
    GPU = "{workers} to give the GPU to the trainer", "short", "they have released their memory"
    TAKEN = "engines to take the version from the weights", "short", "they have it; then the weights may change"
    PUBLISHED = "the version to be published", "short", "it is written or sent"
    FORMER = "the former version to be published", "short", "it is written or sent"
    CHECKPOINT = "the checkpoint being written", "short", "it is durable; an end of the run waits for it"
    STEP_ENDS = "the step under way to end", "short", "it is done; an end of the run waits for it"
    # -- publisher, evaluator, recorder
    ANNOUNCEMENTS = "announcements and reports", "idle", "the trainer announces a version, or a worker reports"
    TO_MEASURE = (
        "a version to measure, or scores",
        "idle",
        "a version is served that is due, or a sample of it is scored",
    )
    RECORD_SPACE = "space for the record: {why}", "short", "the disk is freed"

    def text(self, **values: object) -> str:
        """The wait in words. KeyError where a {name} is left out."""
        return self.value.format(**values)

    @classmethod
    def of(cls, text: str) -> Wait | None:
        """The kind of a wait, from its text; None for an empty one, or one of another release."""
        return _kind(text)


@cache
def _patterns() -> list[tuple[Wait, re.Pattern[str]]]:
    found = []
    for wait in Wait:
        parts = re.split(r"\{\w+\}", wait.value)
        found.append((wait, re.compile(".*".join(map(re.escape, parts)), re.DOTALL)))
    return found


@cache
def _plain() -> dict[str, Wait]:
    return {wait.value: wait for wait in Wait if "{" not in wait.value}


def _kind(text: str) -> Wait | None:
    if not text:
        return None
    return _plain().get(text) or next((wait for wait, pattern in _patterns() if pattern.fullmatch(text)), None)
