"""A rollout program from a function of the user's: of our own signature, or of Miles'.

    (task, session)                                own
    (args, sample, sampling_params[, evaluation])  Miles': returns the sample, or a list of samples that share its reward
    (input)                                        Miles' newer one: `input.args` and so on; returns an object with `samples`

Miles' functions ask the engine over HTTP; here `await args.post(url, payload)` is that call, whatever the url, and answers as
SGLang's `/generate` does. Tokens with mask 1 must be what it answered, id by id; all others are the environment's.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from actors.generation.rollouts import Program, Segment, Session, Task, Trajectory, env
from actors.runtime.contained import named
from actors.runtime.hooks import load_hook
from actors.runtime.miles import Decode, MilesSample, Status
from bus.errors import Poison
from bus.messages.samples import Sampling

SIGNATURE = "(task, session) -> list of Trajectory; or Miles' (args, sample, sampling_params) -> sample; async def"
FILLED = ("tokens", "response_length", "loss_mask", "metadata")
Values = Callable[[], Mapping[str, Any]]


def program_of(path: str, values: Values, decode: Decode) -> Program:
    """The program named by a dotted path. `values`: settings by name and those of --custom-config-path, for Miles' `args`; `decode`
    makes the text of an answer. Raises Refused when it cannot be loaded."""
    hook = load_hook(path)
    ours: Program = hook  # if its arguments are
    try:
        given = [p for p in inspect.signature(hook).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        return ours  # it tells no signature
    needed = sum(p.default is p.empty for p in given)
    if needed == 2 and given[0].name != "args":
        return ours

    async def program(task: Task, session: Session) -> list[Trajectory]:
        sample, turns = MilesSample.of(task, task.prompt), list[AnsweredCall]()

        async def post(url: str, payload: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
            """One call of the engine, as SGLang's /generate is called and answers."""
            asked = list(payload["input_ids"])
            turn = await session.generate(asked, sampling_of(session.task, payload))
            turns.append(AnsweredCall(asked, turn))
            return answer_of(turn, decode)

        args = SimpleNamespace(**{**values(), "post": post, "tell": session.tell})
        params = {
            "temperature": task.sampling.temperature,
            "top_p": task.sampling.top_p,
            "top_k": task.sampling.top_k,
            "max_new_tokens": task.sampling.max_new_tokens,
            "stop_token_ids": list(task.sampling.stop_token_ids),
            "stop": list(task.sampling.stop or ()),
        }
        if needed == 1:
            whole = SimpleNamespace(args=args, sample=sample, sampling_params=params, evaluation=bool(task.eval_name))
            found = (await hook(whole)).samples
        elif any(p.name == "evaluation" for p in given):
            found = await hook(args, sample, params, evaluation=bool(task.eval_name))
        else:
            found = await hook(args, sample, params)
        samples = found if isinstance(found, list) else [found]
        if strange := [one for one in samples if not hasattr(one, "status")]:
            raise Poison(f"{task.sample_id}: the function returned {strange[0]!r:.60}, not its sample or a list of samples")
        return [trajectory_of(one, task, turns) for one in samples if one.status not in (Status.ABORTED, "aborted")]

    program.resumable = getattr(hook, "resumable", True)  # type: ignore[attr-defined]
    return program


class AnsweredCall(NamedTuple):
    """A call of the engine that was answered. `asked`: the tokens before the answer; `owner`: whose session made it."""

    asked: list[int]
    turn: Segment
    owner: Any = None


def sampling_of(task: Task, payload: Mapping[str, Any]) -> Sampling:
    """How a call of /generate is to be drawn: as the task says, but for what its sampling_params say. Raises Poison."""
    params = payload.get("sampling_params") or {}
    known = {name: params[name] for name in Sampling.__struct_fields__ if params.get(name) is not None}
    if isinstance(known.get("stop"), str):
        known["stop"] = [known["stop"]]
    if unknown := sorted(set(params) & {"stop_regex", "min_p", "json_schema", "regex"}):
        raise Poison(f"sampling_params {', '.join(unknown)} have no counterpart; use stop or stop_token_ids")
    before = {name: value for name, value in msgspec.structs.asdict(task.sampling).items() if value is not msgspec.UNSET}
    return msgspec.convert(before | known, Sampling)


def answer_of(turn: Segment, decode: Decode) -> dict[str, Any]:
    """A turn of the model as SGLang's /generate answers."""
    finish = {"type": turn.finish, **({"length": len(turn.tokens)} if turn.finish == "length" else {})}
    pairs = [[logp, token, None] for logp, token in zip(turn.logprobs, turn.tokens, strict=True)]
    return {
        "text": decode(turn.tokens),
        "output_ids": list(turn.tokens),
        "meta_info": {
            "output_token_logprobs": pairs,
            "finish_reason": finish,
            "completion_tokens": len(turn.tokens),
            "weight_version": str(turn.spans[-1].version) if turn.spans else "",
        },
    }


def trajectory_of(
    sample: Any, task: Task, turns: list[AnsweredCall], own: Callable[[AnsweredCall], Segment] = lambda said: said.turn
) -> Trajectory:
    """A sample that a function of Miles' filled. Its tokens with mask 1 are found among `turns`, which they are taken out of; `own`
    makes a turn that was found one of this sample's session. Raises Poison."""
    try:
        n, tokens = operator.index(sample.response_length), list(sample.tokens)
        mask = [1] * n if sample.loss_mask is None else list(sample.loss_mask)
        metadata = _encodable(sample.metadata, task.metadata)
    except (TypeError, AttributeError) as error:
        given = ", ".join(f"{name} {getattr(sample, name, None)!r:.30}" for name in FILLED)
        raise Poison(f"{task.sample_id}: no sample is made of {given}: {named(error)}") from error
    response = tokens[len(tokens) - n :]
    if not 0 <= n <= len(tokens) or len(mask) != n:
        raise Poison(f"{task.sample_id}: {len(tokens)} tokens, response_length {n} and {len(mask)} of mask do not fit")
    segments: list[Segment] = []
    at, begin = 0, len(tokens) - n
    while at < n:
        end = at + 1
        while end < n and bool(mask[end]) == bool(mask[at]):
            end += 1
        if not mask[at] or sample.remove_sample:
            segments.append(env(response[at:end]))
            at = end
        while at < end:
            said = _found(tokens[: begin + at], response[at:end], turns)
            if said is None:
                raise Poison(
                    f"{task.sample_id}: {end - at} tokens with loss_mask 1 are not what the engine answered. Give its tokens as "
                    "they are (never tokenise its text again), and mask 0 to all others."
                )
            segments.append(own(said).first(end - at))
            at += min(end - at, len(said.turn))
    return Trajectory(tokens[:begin], segments, sample.reward, metadata)


def _found(before: list[int], run: list[int], turns: list[AnsweredCall]) -> AnsweredCall | None:
    """The turn that `run` begins with, or that begins with all of `run`, taken out: best one that answers just the tokens before,
    and the longest that is wholly there."""
    fitting = [s for s in turns if s.turn.tokens and s.turn.tokens[: len(run)] == run[: len(s.turn)]]
    best = max(fitting, key=lambda s: (s.asked == before, len(s.turn) <= len(run), len(s.turn)), default=None)
    if best is not None:
        turns.remove(best)
    return best


def _encodable(metadata: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What the function added to the sample's metadata."""
    return {key: value for key, value in metadata.items() if key not in before or before[key] != value}
