"""One example of every message that schema 2 changed or added, with every field set to something that is not its default.

Schema 2: groups leave the filter in parts, workers tell their slots, samples and evaluations tell more of their origin.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from bus.messages.active import Activate, PolicyActive, Seat, Send
from bus.messages.base import Message, pack_floats, pack_ints
from bus.messages.control import EvalDone, Kind, KnobPatch, Vitals
from bus.messages.environments import EnvironmentAnswer, EnvironmentCall
from bus.messages.groups import GroupKept, GroupVerdict, Turned
from bus.messages.policy import (
    GroupsGivenUp,
    Restored,
    SamplesTrained,
    SampleTrained,
    SendFailed,
    StepDone,
    Turn,
    WeightManifest,
    WeightsReady,
)
from bus.messages.samples import (
    Call,
    Episode,
    Mark,
    Parked,
    Picture,
    PrefixResume,
    Response,
    RolloutDone,
    SampleTask,
    Sampling,
    Scored,
    Strand,
)
from bus.messages.versions import VersionSpan
from bus.messages.weights import Parcel, ParcelFile
from tests.wire.examples import EXAMPLES as SCHEMA_1
from tests.wire.examples import SCORED, VERSION

GOLDEN = Path(__file__).parent / "schema_2.txt"


def _once(kind: type[Message]) -> Message:
    """The example that schema 1 has of a message."""
    return next(example for example in SCHEMA_1 if type(example) is kind)


def _more(kind: type[Message], **fields: object) -> Message:
    return msgspec.structs.replace(_once(kind), **fields)


_TOLD = Response(  # two tokens that were made, and one that the environment said
    tokens=pack_ints([11, 7, 12]),
    logprobs=pack_floats([-0.5, 0.0, -0.25]),
    loss_mask=memoryview(bytes([1, 0, 1])),
    spans=(VersionSpan(6, 4, 1), VersionSpan(-1, -1, 1), VersionSpan(7, 5, 1)),
)
EPISODE = Episode(
    prompt_tokens=pack_ints([3, 4]),
    earlier=(Strand(pack_ints([1, 2]), _TOLD),),
    reward={"score": 0.5},
    metadata={"calls": 2},
    answer="42",
    turns=3,
)
JOURNAL = (Call(0, b"digest_0", 2, "stop"), Call(1, b"digest_1", answer=b"\x02"), Call(2, b"digest_2", 1))
LIFE = SampleTrained(
    sample_id="g0000042/1",
    marks=(Mark("issued", wall=1.5), Mark("parked: drain", "generation-1", 2, 2.5)),
    spans=(VersionSpan(7, 5, 2),),
    finish="stop",
    turns=2,
    generate_s=0.5,
    reward=1.0,
    scorer="math",
    score_s=0.25,
    judged=3.5,
    trained=2,
    share=0.125,
)
PICTURE = Picture(at=1, n=2, grid=(1, 2, 4), blob="file:ab12:300")
EXAMPLES: tuple[Message, ...] = (
    _more(
        SampleTask,
        pinned=7,
        given_tokens=pack_ints([5, 6]),
        given_mask=memoryview(b"\x00\x01"),
        inputs=(PICTURE,),
        sampling=Sampling(temperature=0.75, stop_token_ids=(2,), stop=("</a>",)),
    ),
    _more(RolloutDone, running=12, episode=EPISODE),
    _more(Parked, journal=JOURNAL),
    _more(PrefixResume, journal=JOURNAL),
    _more(Scored, teacher_logprobs=pack_floats([-0.5, -1.0]), answer="7", reward_version=2),
    GroupKept(group_id="g0000042", prompt_id="p17", samples=(SCORED,), knob_epoch=3, part="g0000042+1", known=(1.0, 0.25, -0.5)),
    Turned(step=5, version=7),
    _more(GroupVerdict, members=(1, 3), lives=(LIFE,)),
    GroupsGivenUp(groups=(("g0000039", "stale"),), prompts=("p2",), reissue=True, samples=("g0000039/0", "g0000039/1")),
    SamplesTrained(
        step=4,
        samples=(LIFE,),
    ),
    _more(Restored, samples=("g0000041/0",)),
    _more(Turn, boots=True),
    _more(StepDone, lives=pack_ints([0, 812, 4031, 12])),
    PolicyActive(version=VERSION, serving={"w1": 7, "w2": -1}, slots={"w1": 48}, masked_fraction=0.0625, masked_step=5),
    Send(version=VERSION, transport="nccl", seats=(Seat("w1", 2, "host-a", "1700000000000-0"),), attempt=2),
    SendFailed(version=VERSION, workers=("w1", "w2"), text="w2 left before it was sent"),
    _more(WeightsReady, manifest=WeightManifest(transport="nccl", n_tensors=3, n_bytes=46, plan="redis:ab:9", host="h"), attempt=1),
    _more(
        Vitals,
        slots=64,
        memory="8c070432-1d",
        depot="http://10.0.0.7:7070",
        received=1 << 20,
        processes="8c070432-f0",
        takes=8,
        release="0.1.0",
        ranks="4243 4244 on h, 91 on h2",
    ),
    _more(
        Activate,
        parcel=Parcel(id="0f" * 16, piece_bytes=65536, files=(ParcelFile("model.safetensors", 46, bytes(range(16))),)),
        sources=("http://10.0.0.6:7070", "http://:7071"),
        delta=Parcel(id="1e" * 16, piece_bytes=65536, files=(ParcelFile("model.safetensors.xor", 9, bytes(range(16))),)),
        base="2d" * 16,
    ),
    _more(
        KnobPatch,
        kinds={"lr": Kind(type="float", ge=0.0), "policy": Kind(type="str", choices=("wait", "drop"))},
        planned={"lr": 2e-06},
        at_step=40,
        plan=3,
    ),
    EnvironmentCall(
        asked="generation-0-1f2e-7",
        sample_id="g0000042/1",
        task=b"\x80",
        actions=(b"\x05", b"\xa2up"),
        told=b"digest_of_12",
        over=True,
    ),
    EnvironmentAnswer(asked="generation-0-1f2e-7", sample_id="g0000042/1", answer=b"\x05", error="it died", differs=True),
    _more(EvalDone, versions={7: 900, 8: 100}, asked=4, error="2 of 200 samples were lost: poison"),
)
