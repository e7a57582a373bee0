"""What a program returned, as the rollout that goes on (pure).

Always true: each token of the model is in one trajectory at most, exactly as the engine made it, with its log-prob, its version
and the mask of its turn. All else is the environment's: no log-prob, no version, no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from actors.generation.rollouts import Segment, Trajectory
from actors.generation.routing import Rows
from actors.generation.sample import Running, joined
from actors.runtime.arrays import tokens_fault
from actors.runtime.contained import named
from bus.errors import Poison
from bus.messages.base import pack_ints
from bus.messages.samples import Episode, Response, Routed, Strand
from bus.messages.versions import NOT_MADE, VersionSpan

MOST_STRANDS = 256  # trajectories of one sample


class Outcome:
    """`response`: the last trajectory's. `discarded`: tokens that were made and are in no trajectory."""

    def __init__(self, response: Response, finish: Literal["stop", "length"], episode: Episode | Any, discarded: int) -> None:
        self.response = response
        self.finish = finish
        self.episode = episode
        self.discarded = discarded


def outcome_of(found: Any, running: Running, vocabulary: int = 0) -> Outcome:
    """Trajectories with the journal that they must agree with. Raises Poison, which names what does not fit."""
    name = running.task.sample_id
    if not isinstance(found, list) or [t for t in found if not isinstance(t, Trajectory)]:
        raise Poison(f"the rollout program returned {found!r:.100} for {name}, which is no list of trajectories")
    if len(found) > MOST_STRANDS:
        raise Poison(
            f"{name} has {len(found):,} trajectories, and each is trained with all it read: at most {MOST_STRANDS} are taken. Its "
            "program or agent rewrites its history at each turn; let it append."
        )
    kept: dict[int, int] = {}
    strands = [_strand(trajectory, running, kept, vocabulary) for trajectory in found]
    discarded = running.n_tokens - sum(kept.values())
    if not strands:
        return Outcome(Response(), "length", UNSET, discarded)
    last, prompt = found[-1], strands[-1].prompt_tokens
    ends: Literal["stop", "length"] = ([s.finish for s in last.segments if s.kind == "model"] or ["stop"])[-1]
    own = prompt is running.task.prompt_tokens or prompt == running.task.prompt_tokens
    plain = own and len(found) == 1 == len(running.turns) and not (last.metadata or last.response or last.reward is not None)
    if plain:
        return Outcome(strands[-1].response, ends, UNSET, discarded)
    episode = Episode(
        prompt_tokens=UNSET if own else prompt,
        earlier=tuple(strands[:-1]),
        reward=_reward(last.reward, name),
        metadata=last.metadata,
        answer=UNSET if last.response is None else last.response,
        turns=len(running.turns),
    )
    _travels(episode, name)
    return Outcome(strands[-1].response, ends, episode, discarded)


def _travels(episode: Episode, name: str) -> None:
    """Poison: what the program says of its sample is in no form that a message takes."""
    try:
        encoded = msgspec.msgpack.encode(replace(episode, prompt_tokens=UNSET, earlier=()))
        msgspec.msgpack.decode(encoded, type=Episode)
    except Exception as error:
        what = "metadata, a response or a reward that cannot travel with it"
        raise Poison(f"the rollout program gave {name} {what}: {named(error)}") from error


def _reward(given: Any, name: str) -> float | dict[str, float] | UnsetType:
    """As it travels: a number, or the numbers of a table. Raises Poison."""
    if given is None:
        return UNSET
    parts = given if isinstance(given, Mapping) else {"": given}
    numbers = {str(key): float(value) for key, value in parts.items() if hasattr(value, "__float__")}
    if not numbers:
        raise Poison(f"the rollout program gave {name} the reward {given!r:.60}, which is no number and no table of numbers")
    return numbers if isinstance(given, Mapping) else numbers[""]


def _strand(trajectory: Trajectory, running: Running, kept: dict[int, int], vocabulary: int) -> Strand:
    response = joined([_made(s, running, kept) if s.kind == "model" else _env(s, vocabulary) for s in trajectory.segments])
    if [turn for turn in running.turns.values() if turn.experts.n]:
        response = replace(response, experts=_experts(trajectory, running))
    prompt = running.task.prompt_tokens
    if trajectory.prompt != running.prompt:
        if fault := tokens_fault(trajectory.prompt, vocabulary):
            raise Poison(f"the prompt of a trajectory of {running.task.sample_id}: {fault}")
        prompt = pack_ints(trajectory.prompt)
    return Strand(prompt, response)


def _experts(trajectory: Trajectory, running: Running) -> Routed | UnsetType:
    """Without those of a turn that read another history than is trained."""
    experts, sofar = Rows(), list(trajectory.prompt)
    for segment in trajectory.segments:
        turn = running.turns.get(segment.call) if segment.kind == "model" else None
        fits = turn is not None and turn.asked == sofar
        sofar += segment.tokens
        if turn is not None and fits and (found := turn.experts.routed()) is not UNSET:
            experts.add(found, 0, len(sofar) - 1)
    return experts.routed()


def _made(segment: Segment, running: Running, kept: dict[int, int]) -> Response:
    """A turn of the journal, or its beginning."""
    turn, n = running.turns.get(segment.call), len(segment)
    if turn is None or (segment.seen and turn.tokens[:n].tolist() != segment.tokens):
        raise Poison(
            f"a trajectory of {running.task.sample_id} holds {n} tokens as the model's that no call of this session made. "
            "Give what session.generate returned as it is, or as env."
        )
    if segment.call in kept:
        raise Poison(
            f"turn {segment.call} of {running.task.sample_id} is in two trajectories, or twice in one. Give it as env where it is "
            "read only."
        )
    kept[segment.call] = n
    return turn.part(0, n)


def _env(segment: Segment, vocabulary: int) -> Response:
    n = len(segment.tokens)
    if fault := tokens_fault(segment.tokens, vocabulary):
        raise Poison(f"an env segment: {fault}")
    spans = (VersionSpan(NOT_MADE, NOT_MADE, n),) if n else ()
    return Response(pack_ints(segment.tokens), memoryview(bytes(4 * n)), memoryview(bytes(n)), spans)
