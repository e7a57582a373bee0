"""One sample on its way: task, rollout, score, prefix.

sampler -SampleTask-> generation -RolloutDone|RolloutLost-> reward -Scored|RolloutLost-> filter, and the detour
generation -Parked-> partial -PrefixResume|PrefixDropped-> generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from bus.messages.base import EMPTY, Header, Message, Packed
from bus.messages.versions import NOT_MADE, VersionSpan

LostReason = Literal["poison", "evicted", "cancelled", "malformed"]
ParkReason = Literal["drain", "abort", "slice", "engine", "stop", "behind", "tail"]


class Sampling(msgspec.Struct, frozen=True):
    """How to draw tokens. `max_new_tokens` counts the whole response, a resumed prefix included."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stop: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET  # texts that end a turn too, with the token that completes one


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """A picture of a prompt: tokens [at, at + n) of it stand for its `grid` (time, height, width) of patches. `blob`: its bytes, as
    the data has them, which all samples of its group share and the sampler deletes when the group is closed."""

    at: int
    n: int
    grid: tuple[int, int, int]
    blob: str = ""


class SampleTask(Message, frozen=True, kw_only=True, tag="sample.task"):
    """One sample of one prompt group to generate. `sample_id` is "<group_id>/<index>", stable across retries."""

    sample_id: str
    group_id: str
    index: int
    n_samples: int
    prompt_id: str
    prompt_tokens: Packed  # int32 [prompt_len]
    label: str = ""
    prompt_text: str = ""
    rm_type: str = ""
    metadata: dict[str, Any] = {}
    sampling: Sampling = Sampling()
    attempt: int = 0
    knob_epoch: int = 0
    step: int = 0  # that of the newest version served when it was issued: no token of it is made by an older one
    eval_name: str = ""  # data set of an evaluation sample; empty for training
    pinned: int | msgspec.UnsetType = msgspec.UNSET  # version id that an evaluation was issued for
    # Supervised training: the response as the data has it, int32 [n], and what of it is trained, uint8 [n]. UNSET = generate one.
    given_tokens: Packed | msgspec.UnsetType = msgspec.UNSET
    given_mask: Packed | msgspec.UnsetType = msgspec.UNSET
    inputs: tuple[Picture, ...] | msgspec.UnsetType = msgspec.UNSET  # of the prompt, in order; UNSET = none

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Of its prompt, in order."""
        return () if self.inputs is msgspec.UNSET else self.inputs

    def header(self) -> Header:
        blobs = " ".join(picture.blob for picture in self.pictures)
        return Header(id=self.sample_id, group=self.group_id, version=self.step, knob=self.knob_epoch, inputs=blobs)


def shown(pictures: Sequence[Picture], prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Picture, ...]:
    """The pictures that `tokens` show: those of `prompt`, if it begins them up to its last picture's end; else none."""
    end = pictures[-1].at + pictures[-1].n if pictures else 0
    return tuple(pictures) if end and list(tokens[:end]) == list(prompt[:end]) else ()


class Routed(msgspec.Struct, frozen=True):
    """Experts that the engine chose for the first `n` tokens of prompt and response. `data`: uint8 (int16 if `wide`)
    [n, layers, top_k], layers without experts included."""

    data: Packed
    n: int
    wide: bool = False
    ref: str | msgspec.UnsetType = msgspec.UNSET  # the blob that `data` lies in, which is empty here (bus/asides.py)


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a sample before it was scored, told by `who` at `wall` (seconds), when it had `tokens`. `what`: issued,
    begun, resumed, delivered again, `parked: REASON`, ended."""

    what: str
    who: str = ""
    tokens: int = 0
    wall: float = 0.0


class Response(msgspec.Struct, frozen=True):
    """What follows a prompt: generated tokens, and between them those of an environment, which have a span of their own, mask
    0 and log-prob 0. Invariant: spans cover [0, n_tokens) in order; all arrays have n_tokens entries."""

    tokens: Packed = EMPTY  # int32 [n_tokens]
    logprobs: Packed = EMPTY  # float32 [n_tokens], under the temperature, each from its own version
    loss_mask: Packed = EMPTY  # uint8 [n_tokens]; 1 = may be trained
    spans: tuple[VersionSpan, ...] = ()
    experts: Routed | msgspec.UnsetType = msgspec.UNSET  # UNSET = not asked for, or not known
    marks: tuple[Mark, ...] | msgspec.UnsetType = msgspec.UNSET  # oldest first; decides nothing

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def aside(self) -> str:
        """The blob that its experts lie in; empty = none."""
        return "" if self.experts is msgspec.UNSET else self.experts.ref or ""

    @property
    def made(self) -> tuple[VersionSpan, ...]:
        """Spans of the generated tokens: what the accounts and the staleness bound are about."""
        for span in self.spans:
            if span.version == NOT_MADE:
                return tuple(span for span in self.spans if span.version != NOT_MADE)
        return self.spans


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of a rollout program that was answered, wholly or in part. `no`: its number in the order in which the program
    began its calls. Of a turn of the model `n` tokens are in the response, after those of the calls before; `finish` is empty
    while more may come. Of a question to the environment `answer` is what it said, as msgpack."""

    no: int
    digest: bytes = b""  # of what was asked; empty = not known
    n: int = 0
    finish: str = ""
    answer: bytes | None = None


class Strand(msgspec.Struct, frozen=True):
    """A trajectory of a sample beside its last one: a history that the program rewrote."""

    prompt_tokens: Packed  # int32 [prompt_len]
    response: Response


class Episode(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rollout program says of its sample beyond one response to the task's prompt."""

    prompt_tokens: Packed | msgspec.UnsetType = msgspec.UNSET  # int32 [n], before the response; UNSET = the task's
    earlier: tuple[Strand, ...] = ()  # trajectories before the last, which is the rollout's `response`; they share its reward
    reward: float | dict[str, float] | msgspec.UnsetType = msgspec.UNSET  # UNSET = it is still to be scored
    metadata: dict[str, Any] = {}  # for the reward, under the task's own
    answer: str | msgspec.UnsetType = msgspec.UNSET  # the text to score; UNSET = that of the response
    turns: int = 1  # calls of the model


class RolloutDone(Message, frozen=True, kw_only=True, tag="rollout.done"):
    """A sample that ended. generation -> reward."""

    task: SampleTask
    response: Response
    finish: Literal["stop", "length"]
    worker: str = ""
    resumed_tokens: int = 0  # taken over from a prefix, not made by this worker
    generate_s: float = 0.0
    running: float | msgspec.UnsetType = msgspec.UNSET
    """requests of this worker that its engine had, this sample's included: mean over the tokens made here"""
    episode: Episode | msgspec.UnsetType = msgspec.UNSET  # UNSET = one turn, in answer to the task's prompt

    @property
    def strands(self) -> tuple[Strand, ...]:
        """All its trajectories, the last one last."""
        if self.episode is msgspec.UNSET:
            return (Strand(self.task.prompt_tokens, self.response),)
        prompt = self.episode.prompt_tokens
        own = self.task.prompt_tokens if prompt is msgspec.UNSET else prompt
        return (*self.episode.earlier, Strand(own, self.response))

    @property
    def several(self) -> bool:
        """Whether it has more than one trajectory."""
        return self.episode is not msgspec.UNSET and bool(self.episode.earlier)

    @property
    def prompt_tokens(self) -> Packed:
        """What its `response` follows."""
        return self.strands[-1].prompt_tokens

    @property
    def routed(self) -> tuple[Routed, ...]:
        """Experts of its trajectories, of those where they are known."""
        if self.episode is msgspec.UNSET:
            return () if self.response.experts is msgspec.UNSET else (self.response.experts,)
        return tuple(s.response.experts for s in self.strands if s.response.experts is not msgspec.UNSET)

    @property
    def made(self) -> tuple[VersionSpan, ...]:
        """Spans of the generated tokens of all its trajectories."""
        if self.episode is msgspec.UNSET:
            return self.response.made
        return tuple(span for strand in self.strands for span in strand.response.made)

    @property
    def n_made(self) -> int:
        """Generated tokens of all its trajectories: what the accounts know of it."""
        return sum(span.n for span in self.made)

    def header(self) -> Header:
        made = self.made
        return Header(
            id=self.task.sample_id,
            group=self.task.group_id,
            version=made[-1].version if made else -1,
            tokens=sum([span.n for span in made]),
            knob=self.task.knob_epoch,
            asides=" ".join([one.ref for one in self.routed if one.ref]),
        )


class RolloutLost(Message, frozen=True, kw_only=True, tag="rollout.lost"):
    """A sample that will never finish, and why. On the same streams, so that its group still closes."""

    sample_id: str
    group_id: str
    n_samples: int
    reason: LostReason
    error: str = ""
    prompt_id: str = ""
    tokens_made: int = 0
    eval_name: str = ""

    def header(self) -> Header:
        return Header(id=self.sample_id, group=self.group_id, tokens=self.tokens_made, note=self.reason)


class Scored(Message, frozen=True, kw_only=True, tag="rollout.scored"):
    """A rollout with its reward. reward -> filter."""

    rollout: RolloutDone
    reward: float
    rewards: dict[str, float] = {}  # all parts when the reward is a dict
    scorer: str = ""
    score_s: float = 0.0
    # float32 [n_tokens], the teacher's for the response; UNSET (not on the wire) = no teacher was asked
    teacher_logprobs: Packed | msgspec.UnsetType = msgspec.UNSET
    reward_version: int | msgspec.UnsetType = msgspec.UNSET  # of the function or service that scored it; UNSET = 0
    answer: str | msgspec.UnsetType = msgspec.UNSET  # of an evaluation sample: what it answers, as votes are counted

    @property
    def sample_id(self) -> str:
        return self.rollout.task.sample_id

    @property
    def group_id(self) -> str:
        return self.rollout.task.group_id

    def header(self) -> Header:
        head = self.rollout.header()
        return msgspec.structs.replace(head, note=f"reward={self.reward:.4g}")


class Parked(Message, frozen=True, kw_only=True, tag="sample.parked"):
    """A sample that stopped before its end; the tokens made so far, turn after turn. generation -> partial."""

    task: SampleTask
    response: Response
    reason: ParkReason
    worker: str = ""
    journal: tuple[Call, ...] | msgspec.UnsetType = msgspec.UNSET  # UNSET = one turn under way, in answer to the task's prompt

    def header(self) -> Header:
        task, response = self.task, self.response
        return Header(id=task.sample_id, group=task.group_id, tokens=response.n_tokens, note=self.reason, asides=response.aside)


class PrefixResume(Message, frozen=True, kw_only=True, tag="prefix.resume"):
    """Go on from this prefix (empty = start again). partial -> generation, ahead of fresh prompts. On `tail`: where few run."""

    task: SampleTask
    response: Response
    journal: tuple[Call, ...] | msgspec.UnsetType = msgspec.UNSET  # as parked

    def header(self) -> Header:
        task, response = self.task, self.response
        return Header(id=task.sample_id, group=task.group_id, tokens=response.n_tokens, asides=response.aside)


class PrefixDropped(Message, frozen=True, kw_only=True, tag="prefix.dropped"):
    """A prefix that the buffer policy gave up; generation reports the sample as lost."""

    task: SampleTask
    tokens_made: int
    reason: LostReason = "evicted"

    def header(self) -> Header:
        return Header(id=self.task.sample_id, group=self.task.group_id, tokens=self.tokens_made, note=self.reason)
