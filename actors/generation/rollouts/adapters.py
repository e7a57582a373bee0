"""A rollout program from a function of the user's: of our own signature, or of Miles'.

    (task, session)                                own
    (args, sample, sampling_params[, evaluation])  Miles': returns the sample, or a list of samples that share its reward
    (input)                                        Miles' newer one: `input.args` and so on; returns an object with `samples`

Miles' functions ask the engine over HTTP; here `await args.post(url, payload)` is that call, whatever the url, and answers as
SGLang's `/generate` does. Tokens with mask 1 must be what it answered, id by id; all others are the environment's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from actors.generation.rollouts import Program, Segment, Session, Task, Trajectory, env
from actors.runtime.hooks import load_hook
from actors.runtime.miles import Decode, MilesSample, Status
from bus.errors import Poison
from bus.messages.samples import Sampling

SIGNATURE = "(task, session) -> list of Trajectory; or Miles' (args, sample, sampling_params) -> sample; async def"
Values = Callable[[], Mapping[str, Any]]


def program_of(path: str, values: Values, decode: Decode) -> Program:
    """The program named by a dotted path. `values`: settings by name and those of --custom-config-path, for Miles' `args`; `decode`
    makes the text of an answer. Raises Refused when it cannot be loaded."""
    hook = load_hook(path)
    try:
        given = [p for p in inspect.signature(hook).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        return hook  # it tells no signature
    needed = sum(p.default is p.empty for p in given)
    if needed == 2 and given[0].name != "args":
        return hook

    async def program(task: Task, session: Session) -> list[Trajectory]:
        sample, asked = MilesSample.of(task, task.prompt), _Asked(session, decode)
        args = SimpleNamespace(**{**values(), "post": asked.post, "tell": session.tell})
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
        return [asked.trajectory(one, task) for one in samples if one.status not in (Status.ABORTED, "aborted")]

    program.resumable = getattr(hook, "resumable", True)  # type: ignore[attr-defined]
    return program


class _Asked:
    """What one episode asked the engine, and what became of it."""

    def __init__(self, session: Session, decode: Decode) -> None:
        self._session = session
        self._decode = decode
        self._turns: list[Segment] = []

    async def post(self, url: str, payload: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        """One call of the engine, as SGLang's /generate is called and answers."""
        params = payload.get("sampling_params", {})
        known = {name: params[name] for name in Sampling.__struct_fields__ if name in params}
        if isinstance(known.get("stop"), str):
            known["stop"] = [known["stop"]]
        if unknown := sorted(set(params) & {"stop_regex", "min_p", "json_schema", "regex"}):
            raise Poison(f"sampling_params {', '.join(unknown)} have no counterpart; use stop or stop_token_ids")
        before = msgspec.structs.asdict(self._session.task.sampling)
        turn = await self._session.generate(payload["input_ids"], msgspec.convert(before | known, Sampling))
        self._turns.append(turn)
        finish = {"type": turn.finish, **({"length": len(turn.tokens)} if turn.finish == "length" else {})}
        pairs = [[logp, token, None] for logp, token in zip(turn.logprobs, turn.tokens, strict=True)]
        version = str(turn.spans[-1].version) if turn.spans else ""
        return {
            "text": self._decode(turn.tokens),
            "output_ids": list(turn.tokens),
            "meta_info": {
                "output_token_logprobs": pairs,
                "finish_reason": finish,
                "completion_tokens": len(turn.tokens),
                "weight_version": version,
            },
        }

    def trajectory(self, sample: Any, task: Task) -> Trajectory:
        """A filled sample with the turns that it is made of, found by their tokens in the order in which they were asked."""
        n = sample.response_length
        tokens, response = list(sample.tokens), list(sample.tokens[len(sample.tokens) - n :])
        mask = [1] * n if sample.loss_mask is None else list(sample.loss_mask)
        if not 0 <= n <= len(tokens) or len(mask) != n:
            raise Poison(f"{task.sample_id}: {len(tokens)} tokens, response_length {n} and {len(mask)} of mask do not fit")
        segments: list[Segment] = []
        at = 0
        while at < n:
            end = at + 1
            while end < n and bool(mask[end]) == bool(mask[at]):
                end += 1
            segments += self._made(response[at:end], task) if mask[at] and not sample.remove_sample else [env(response[at:end])]
            at = end
        reward = sample.reward
        return Trajectory(tokens[: len(tokens) - n], segments, reward, _encodable(sample.metadata, task.metadata))

    def _made(self, run: Sequence[int], task: Task) -> list[Segment]:
        """The turns that a run of tokens with mask 1 consists of."""
        found: list[Segment] = []
        rest = list(run)
        while rest:
            turn = next((t for t in self._turns if t.tokens and t.tokens[: len(rest)] == rest[: len(t.tokens)]), None)
            if turn is None:
                raise Poison(
                    f"{task.sample_id}: {len(rest)} tokens with loss_mask 1 are not what args.post answered. Give its tokens as "
                    "they are (never tokenise its text again), and mask 0 to all others."
                )
            self._turns.remove(turn)
            found.append(turn.first(len(rest)))
            rest = rest[len(turn.tokens) :]
        return found


def _encodable(metadata: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What the function added to the sample's metadata."""
    return {key: value for key, value in metadata.items() if key not in before or before[key] != value}


