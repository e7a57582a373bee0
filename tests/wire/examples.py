"""One example of every message as schema 1 has it, with every field set to something that is not its default.

Never change an example that has golden bytes. A new schema number gets a module of its own beside this one. These bytes were
written when the schema number was 1; `python -m tests.wire.golden` adds bytes of the newest schema for examples that have none.
"""

from __future__ import annotations

from pathlib import Path

from bus.messages.active import Activate, PolicyActive
from bus.messages.base import Message, pack_floats, pack_ints
from bus.messages.control import DeadLetter, EvalDone, Event, KnobPatch, Vitals
from bus.messages.groups import GroupKept, GroupVerdict
from bus.messages.policy import (
    Checkpointed,
    Finished,
    GroupsGivenUp,
    PolicyAnnounced,
    Restored,
    Sending,
    StepDone,
    Turn,
    WeightManifest,
    WeightsReady,
)
from bus.messages.samples import (
    Parked,
    PrefixDropped,
    PrefixResume,
    Response,
    RolloutDone,
    RolloutLost,
    SampleTask,
    Sampling,
    Scored,
)
from bus.messages.versions import PolicyVersion, VersionSpan

GOLDEN = Path(__file__).parent / "schema_1.txt"

VERSION = PolicyVersion(id=7, step=5, parent=6)
MANIFEST = WeightManifest(transport="disk", path="weights/v00000007", checksum="ab12", n_tensors=3, n_bytes=4096)
TASK = SampleTask(
    sample_id="g0000042/1",
    group_id="g0000042",
    index=1,
    n_samples=2,
    prompt_id="p17",
    prompt_tokens=pack_ints([1, 70000, -1]),
    label="42",
    prompt_text="6 × 7 =",
    rm_type="math",
    metadata={"level": 3, "tags": ["a", None, True], "share": 0.5},
    sampling=Sampling(temperature=0.75, top_p=0.5, top_k=20, max_new_tokens=64, stop_token_ids=(2, 151645), seed=2147483647),
    attempt=1,
    knob_epoch=3,
    step=5,
    eval_name="held-out",
)
RESPONSE = Response(
    tokens=pack_ints([5, 6, 7]),
    logprobs=pack_floats([-0.5, -0.25, -1.5]),
    loss_mask=memoryview(b"\x01\x00\x01"),
    spans=(VersionSpan(6, 4, 1), VersionSpan(7, 5, 2)),
)
ROLLOUT = RolloutDone(task=TASK, response=RESPONSE, finish="length", worker="w1", resumed_tokens=1, generate_s=0.5)
SCORED = Scored(rollout=ROLLOUT, reward=-0.5, rewards={"match": 0.0, "form": -0.5}, scorer="math@1", score_s=0.25)

EXAMPLES: tuple[Message, ...] = (
    TASK,
    ROLLOUT,
    RolloutLost(
        sample_id="g0000042/0",
        group_id="g0000042",
        n_samples=2,
        reason="poison",
        error="ValueError: no",
        prompt_id="p17",
        tokens_made=9,
        eval_name="held-out",
    ),
    SCORED,
    Parked(task=TASK, response=RESPONSE, reason="abort", worker="w1"),
    PrefixResume(task=TASK, response=RESPONSE),
    PrefixDropped(task=TASK, tokens_made=3, reason="cancelled"),
    GroupKept(group_id="g0000042", prompt_id="p17", samples=(SCORED, SCORED), knob_epoch=3),
    GroupVerdict(
        group_id="g0000042",
        prompt_id="p17",
        kept=False,
        reason="zero_std_1",
        n_samples=2,
        tokens=6,
        mean_reward=1.0,
    ),
    PolicyAnnounced(version=VERSION, manifest=MANIFEST, prepare_s=0.125),
    StepDone(
        step=5,
        version=VERSION,
        trained_on=PolicyVersion(id=6, step=4, parent=2),
        groups=("g0000042", "g0000040"),
        prompts=("p17", "p3"),
        samples=("g0000042/0", "g0000042/1"),
        packing=((0, 1), ()),
        seed=9007199254740993,
        knob_epoch=3,
        metrics={"loss": -0.0625, "grad_norm": 1.5},
        weights_hash="00ff",
        wall=1700000000.25,
        dropped=(("g0000039", "stale"),),
    ),
    GroupsGivenUp(groups=(("g0000039", "stale"),), prompts=("p2",), reissue=True),
    Restored(step=4, version=VERSION, checkpoint="iter_0000004", groups=("g0000041",)),
    Checkpointed(step=5, path="iter_0000005", save_s=2.5),
    Finished(step=5, version=VERSION),
    WeightsReady(version=VERSION, manifest=MANIFEST),
    Sending(version=VERSION, workers=("w1", "w2")),
    Turn(holder="engines", number=7, publishes=True),
    Activate(version=VERSION, manifest=MANIFEST, mode="in_place", workers=("w1", "w2")),
    PolicyActive(version=VERSION, serving={"w1": 7, "w2": -1}),
    KnobPatch(epoch=4, values={"lr": 1e-06, "max_waves": 3}, author="me", reason="why", wall=1700000000.5),
    Vitals(
        actor="w1",
        role="generation",
        pid=4242,
        host="here",
        state="waiting",
        wall=1700000001.0,
        version=7,
        waits_for="prompts",
        waits_since=1700000000.0,
        in_flight=2,
        counters={"tokens": 12.0},
        note="fine",
    ),
    Event(actor="w1", kind="joined", text="hello", wall=1700000002.0, level="warning", data={"pid": 4242}),
    DeadLetter(
        stream="prompts",
        entry_id="1700000000000-1",
        actor="w1",
        error="Poison: x",
        traceback="line",
        deliveries=6,
        fields={"id": "g0000042/1"},
        body=b"\x93\x01",
        wall=1700000003.0,
        sample_id="g0000042/1",
        group_id="g0000042",
    ),
    EvalDone(
        name="held-out",
        version=7,
        step=5,
        metrics={"eval/held-out": 0.875},
        n_samples=200,
        wall=1700000004.0,
        duration_s=3.5,
    ),
)


def tag_of(message: Message) -> str:
    """The message's name on the wire."""
    return str(message.__struct_config__.tag)


def read_golden(path: Path = GOLDEN) -> dict[str, bytes]:
    """Tag -> body, from lines of tag and hexadecimal bytes."""
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {tag: bytes.fromhex(body) for tag, body in lines}
