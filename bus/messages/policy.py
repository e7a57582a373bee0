"""What the trainer tells everyone about the policy: versions, steps, checkpoints, whose turn it is. Stream `policy`."""

from __future__ import annotations

from typing import Literal

import msgspec

from bus.messages.base import Header, Message, Packed
from bus.messages.samples import Mark, Scored
from bus.messages.versions import PolicyVersion, VersionSpan


class WeightManifest(msgspec.Struct, frozen=True):
    """Where a version's weights lie and how to verify them. Transport nccl or ipc: its plan (bus.plans); without one the trainer
    on `host` holds the version and has not been asked to send it yet. network: files that are fetched, see active.Activate."""

    transport: str = "disk"
    path: str = ""  # disk: directory with safetensors files, for who sees the memory of the trainer's host
    checksum: str = ""  # hex digest over the bytes of model*.safetensors, by name; empty = not to be compared
    n_tensors: int = 0
    n_bytes: int = 0
    plan: str = ""  # nccl, ipc: the blob that holds the plan
    host: str = ""


class PolicyAnnounced(Message, frozen=True, kw_only=True, tag="policy.announced"):
    """A new version exists. trainer -> publisher, sampler, partial, evaluator."""

    version: PolicyVersion
    manifest: WeightManifest
    prepare_s: float = 0.0

    def header(self) -> Header:
        return Header(id=f"v{self.version.id}", version=self.version.id, note=f"step={self.version.step}")


class WeightsReady(Message, frozen=True, kw_only=True, tag="policy.on_disk"):
    """The answer to `Send`: workers may be told to load this version so. trainer -> publisher. `attempt`: that of the order."""

    version: PolicyVersion
    manifest: WeightManifest
    attempt: int = 0

    def header(self) -> Header:
        number = self.version.id
        return Header(id=f"v{number}", version=number, note=self.manifest.transport, plan=self.manifest.plan)


class SendFailed(Message, frozen=True, kw_only=True, tag="policy.send_failed"):
    """The answer to `Send` where it could not be done, or broke off. trainer -> publisher. `workers`: those that may be why; they
    take files before they are sent to again."""

    version: PolicyVersion
    workers: tuple[str, ...] = ()
    text: str = ""

    def header(self) -> Header:
        return Header(id=f"v{self.version.id}", version=self.version.id, note=f"workers={len(self.workers)}")


class Sending(Message, frozen=True, kw_only=True, tag="policy.sending"):
    """The trainer sends a version now, to workers that said they are ready. trainer -> generation. Until they reported, or a
    deadline passed, the bytes they read do not change."""

    version: PolicyVersion
    workers: tuple[str, ...]

    def header(self) -> Header:
        return Header(id=f"v{self.version.id}", version=self.version.id, note=f"workers={len(self.workers)}")


class Turn(Message, frozen=True, kw_only=True, tag="policy.turn"):
    """Whose GPU it is, where trainer and engines share one (--colocate, --lend-trainer-gpus). trainer -> generation.

    `number` counts the trainer's turns and never falls. A worker that hears "trainer" gives its engine's memory back and tells
    event `memory released` with that number; it takes the memory again at "engines". `boots`: the trainer holds nothing yet and
    waits, so engines that do not run are booted first.
    """

    holder: Literal["trainer", "engines"]
    number: int
    publishes: bool = False  # "engines": a version newer than theirs is announced, which they load before anything else
    boots: bool = False

    @property
    def mark(self) -> str:
        """The value of the state field `turn`, from which one that starts late reads whose turn it is."""
        return f"{self.number}:{'boots' if self.boots else self.holder}"

    @classmethod
    def of_mark(cls, mark: str) -> Turn:
        """Inverse of `mark`; what it published is not told any more."""
        number, _, holder = mark.partition(":")
        return cls(holder="engines" if holder == "engines" else "trainer", number=int(number), boots=holder == "boots")

    def header(self) -> Header:
        return Header(id=f"turn{self.number}", note=self.holder)


class SampleTrained(msgspec.Struct, frozen=True, array_like=True):
    """One trained sample, as it came to its step, or one that the filter dropped. Times in seconds; `judged`: when the filter
    let it go. `spans` of its last trajectory. `trained`: tokens with gradient; `share`: of the weights that the reduction gives the
    tokens of its optimizer step, before corrections, -1 = the backend does not tell."""

    sample_id: str
    marks: tuple[Mark, ...]
    spans: tuple[VersionSpan, ...]
    finish: str
    turns: int
    generate_s: float
    reward: float
    scorer: str
    score_s: float
    judged: float
    trained: int
    share: float


def life_of(scored: Scored, *, judged: float = 0.0, trained: int = 0, share: float = -1.0) -> SampleTrained:
    """What a scored sample has gone through so far, and what its step made of it."""
    rollout = scored.rollout
    return SampleTrained(
        sample_id=rollout.task.sample_id,
        marks=rollout.response.marks or (),
        spans=rollout.response.spans,
        finish=rollout.finish,
        turns=rollout.episode.turns if rollout.episode else 1,
        generate_s=round(rollout.generate_s, 3),
        reward=scored.reward,
        scorer=scored.scorer,
        score_s=round(scored.score_s, 3),
        judged=judged,
        trained=trained,
        share=share,
    )


class SamplesTrained(Message, frozen=True, kw_only=True, tag="policy.trained"):
    """How some of a step's samples came to be trained. trainer -> recorder."""

    step: int
    samples: tuple[SampleTrained, ...]

    def header(self) -> Header:
        return Header(id=f"step{self.step}", note=f"{len(self.samples)} samples")


class StepDone(Message, frozen=True, kw_only=True, tag="policy.step"):
    """One training step and its batch manifest: enough to train the same batch again.

    `step` is the number of the step just done (1-based): the weights now hold `step` updates. `samples` are in training
    order, `groups` and `prompts` are their groups by first appearance. `dropped` pairs group id and reason for groups the
    trainer gave up while cutting this batch. `lives`: int32 [n, 4], for each of the samples or a share of them the position of its
    group in `groups`, tokens made, milliseconds on engines, milliseconds of scoring; UNSET = not told.
    """

    step: int
    version: PolicyVersion
    trained_on: PolicyVersion
    groups: tuple[str, ...]
    prompts: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    packing: tuple[tuple[int, ...], ...] = ()  # sample positions of each micro-batch
    seed: int = 0
    knob_epoch: int = 0
    metrics: dict[str, float] = {}
    weights_hash: str = ""
    wall: float = 0.0
    dropped: tuple[tuple[str, str], ...] = ()
    lives: Packed | msgspec.UnsetType = msgspec.UNSET

    def header(self) -> Header:
        return Header(id=f"step{self.step}", version=self.version.id, knob=self.knob_epoch, note=f"groups={len(self.groups)}")


ALREADY_TRAINED = "already_trained"
"""Said of samples that came again, so that the sampler frees their credits; they count as trained."""


class GroupsGivenUp(Message, frozen=True, kw_only=True, tag="policy.given_up"):
    """Groups, or members of groups, that the trainer dropped outside a step. trainer -> sampler. `samples`: the ids that are
    given up, empty = all of each group. `reissue`: start `prompts` again."""

    groups: tuple[tuple[str, str], ...]  # (group id, reason)
    prompts: tuple[str, ...] = ()
    reissue: bool = False
    samples: tuple[str, ...] = ()

    def header(self) -> Header:
        return Header(id=f"{len(self.groups)} groups", note=self.groups[0][1] if self.groups else "")


class Restored(Message, frozen=True, kw_only=True, tag="policy.restored"):
    """The trainer (re)started from a checkpoint; steps after `step` are a lost future and their samples are open again.

    `samples`: open ones that are inside the checkpoint, although a bus that lost its last second may not say so. `groups`:
    the same by group, in logs of former releases.
    """

    step: int
    version: PolicyVersion
    checkpoint: str = ""
    groups: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()

    def header(self) -> Header:
        return Header(id=f"restored{self.step}", version=self.version.id)


class Checkpointed(Message, frozen=True, kw_only=True, tag="policy.checkpointed"):
    """A checkpoint is durable and its groups are acknowledged."""

    step: int
    path: str
    save_s: float = 0.0

    def header(self) -> Header:
        return Header(id=f"checkpoint{self.step}", note=self.path)


class Finished(Message, frozen=True, kw_only=True, tag="policy.finished"):
    """The trainer did its last step; nothing new should start."""

    step: int
    version: PolicyVersion

    def header(self) -> Header:
        return Header(id="finished", version=self.version.id)
