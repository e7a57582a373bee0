"""`python -m miles_async.launcher.try_hooks < PATHS.json`: call functions of the user's once, before any actor starts.

The objective's are tried by `actors.trainer.dry_run`, which loads torch; these are of reward, filter and partial buffer. Prints
one JSON list of refusals on stdout, `[]` when all are sound. What hooks print goes to stderr.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import msgspec

from actors.filter.all_samples import NoBuffer
from actors.generation.rollouts.adapters import SIGNATURE, program_of
from actors.generation.rollouts.probe import function_problem
from actors.generation.rollouts.probe import problem_of as rollout_problem
from actors.partial.decide import Plan, Waiting
from actors.reward.sample import Sample, settle
from actors.reward.wire import plain
from actors.runtime.contained import named, text_of
from actors.runtime.hooks import load_hook, own_stdout
from actors.runtime.miles import MilesSample, judge_of, judged, reward_of
from actors.runtime.parts import parts_of
from actors.runtime.prompts import DataSpec
from actors.runtime.rows import BadData, sources_of
from actors.runtime.run import Refused
from actors.runtime.sources import rows_function
from actors.runtime.whole import fitting
from actors.trainer.batch_hooks import CONVERT, FILTER, POSTPROCESS, settled, train_data
from bus.errors import printable
from bus.messages.base import pack_floats, pack_ints
from bus.messages.samples import Parked, Response, RolloutDone, SampleTask, Sampling, Scored
from bus.messages.versions import VersionSpan
from miles_async.settings.flat import BATCH
from miles_async.settings.megatron_fields import OF_MEGATRON

SIGNATURES = {
    "custom_rm_path": "(sample: dict) or (args, sample) -> number or table, may be async; with group_rm lists of them; "
    "TRL's and verl's too",
    "dynamic_sampling_filter_path": "(samples of a group) -> reason to drop it, or None; or (args, group) -> whether to keep it",
    "data_source_path": "(path) -> rows, each a dict with the columns that are named; or Miles' class with get_samples(n)",
    "custom_generate_function_path": SIGNATURE,
    "rollout_function_path": "(args, rollout_id, data_source, evaluation) -> groups of samples, or Miles' newer class",
    "environment_path": "a class with reset(task: dict) -> observation and step(action) -> answer, each may be async",
    "custom_agent_function_path": "(task, base_url, api_key) -> reward, table or None, may be async",
    "rollout_sample_filter_path": "(args, groups: list of lists of samples); sets remove_sample",
    "custom_convert_samples_to_train_data_path": "(args, samples) -> dict of lists",
    "rollout_data_postprocess_path": "(args[, data: dict of lists]); changes data['loss_masks']",
    "rollout_all_samples_process_path": "(args, groups, data_source)",
    "buffer_filter_path": "(step, waiting samples) -> list of actors.partial.decide.Plan",
    "custom_model_provider_path": "(pre_process, post_process, vp_stage) -> module",
    "custom_megatron_init_path": "(core) or (args)",
    "custom_megatron_before_log_prob_hook_path": "(core) or (args, model, store_prefix)",
    "custom_megatron_before_train_step_hook_path": "(core) or (args, rollout_id, step_id, model, optimizer, scheduler)",
}
FIRST_ROWS, GROUP = 100, 2
OUTSIDE = ("aiohttp", "httpx", "requests", "urllib3")
"""Libraries whose errors say that a service does not answer, which it may by the time the run asks."""


class HookTrial(msgspec.Struct):
    """`paths`: setting -> dotted path. `sample`: what a reward function is given. `deadline_s`: for one call of a reward,
    `rollout_s`: for a rollout."""

    paths: dict[str, str]
    sample: Sample
    reward_key: str = ""
    deadline_s: float = 30.0
    rollout_s: float = 30.0
    data: DataSpec | None = None
    group_rm: bool = False
    values: dict[str, Any] = {}


def problem_of(field: str, path: str, ask: HookTrial) -> str:
    """What is wrong with a hook; empty when nothing is."""
    try:
        hook = load_hook(path)
    except BaseException as error:  # noqa: BLE001 - the user's module runs while it is imported
        lacks = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if field in OF_MEGATRON and lacks and not f"{path}.".startswith(f"{lacks}."):
            return ""  # what this host lacks the trainer's may have
        said = str(error).removeprefix(f"hook {path!r} not loaded: ") if isinstance(error, Refused) else named(error)
        return f"cannot be loaded: {said}"
    if field in OF_MEGATRON:
        return ""  # what it needs is a model
    if field == "custom_generate_function_path":
        return _rollout_problem(path, ask)
    if field == "custom_rm_path":
        hook = reward_of(hook, ask.values)
    if field == "dynamic_sampling_filter_path":
        hook = judge_of(hook, lambda: ask.values, lambda ids: " ".join(map(str, ids)))
    if field == "rollout_function_path":
        return asyncio.run(function_problem(path, ask.values, _task(ask), deadline_s=ask.rollout_s))
    if field == "environment_path":
        kind = hook
        hook = lambda task: kind().reset(task)  # noqa: E731
    if field == "data_source_path":
        hook, _ = rows_function(path, {}, {**ask.values, "num_rollout": ask.values.get("num_rollout") or 1})
    given = fitting(hook, _given(field, ask)) if field in BATCH else _given(field, ask)
    try:
        inspect.signature(hook).bind(*given)
    except TypeError as error:
        return f"cannot be called as it will be: {error}"
    except ValueError:
        pass  # a builtin that tells no signature
    if field == "custom_agent_function_path":
        return ""  # what it needs is a model that answers
    try:
        answer = _answer(hook, given, ask.deadline_s)
    except (OSError, TimeoutError):
        return ""
    except BaseException as error:  # noqa: BLE001 - whatever the user's function raises
        outside = type(error).__module__.partition(".")[0] in OUTSIDE
        return "" if outside else f"raised {named(error)}"
    try:
        return _judged(field, answer, ask, given)
    except BaseException as error:  # noqa: BLE001 - whatever the user's function raises
        return text_of(error)


def _rollout_problem(path: str, ask: HookTrial) -> str:
    """A program is run on an engine that says two tokens a turn."""
    program = program_of(path, lambda: ask.values, lambda ids: " ".join(map(str, ids)))
    world = ask.paths.get("environment_path", "")
    return asyncio.run(rollout_problem(program, _task(ask), deadline_s=ask.rollout_s, world=world))


def _task(ask: HookTrial) -> SampleTask:
    """The first prompt, in made-up token ids."""
    s = ask.sample
    return SampleTask(
        sample_id="try/0", group_id="try", index=0, n_samples=1, prompt_id="try", prompt_tokens=pack_ints([1]), label=s.label,
        prompt_text=s.prompt, metadata=s.metadata, sampling=Sampling(max_new_tokens=64),
    )  # fmt: skip


def _given(field: str, ask: HookTrial) -> tuple[Any, ...]:
    if field == "custom_rm_path":
        return ([ask.sample.as_dict()] * GROUP if ask.group_rm else ask.sample.as_dict(),)
    if field == "environment_path":
        s = ask.sample
        return ({"sample_id": "try/0", "prompt": s.prompt, "label": s.label, "metadata": s.metadata},)
    if field == "custom_agent_function_path":
        return None, "http://127.0.0.1/v1", "sk"
    if field == "data_source_path":
        assert ask.data is not None
        return (sources_of(ask.data.path)[0].path,)
    args = SimpleNamespace(**ask.values)
    if field in BATCH:
        groups = _groups()
        flat = [one for group in groups for one in group]
        shown: Any = flat if field == CONVERT else train_data(flat) if field == POSTPROCESS else groups
        return args, shown, NoBuffer()
    scored = [Scored(rollout=_rollout(i), reward=float(i)) for i in range(2)]
    if field == "dynamic_sampling_filter_path":
        return (scored,)
    parked = [Parked(task=s.rollout.task, response=s.rollout.response, reason="engine") for s in scored]
    return 5, [Waiting(i, one) for i, one in enumerate(parked)]


def _groups() -> list[list[MilesSample]]:
    """Two groups of two samples."""
    scored = [Scored(rollout=_rollout(i), reward=float(i)) for i in range(GROUP)]
    return [[one for s in scored for one in judged(s, lambda ids: " ".join(map(str, ids)))] for _ in range(2)]


def _rollout(index: int) -> RolloutDone:
    task = SampleTask(
        sample_id=f"try/{index}", group_id="try", index=index, n_samples=2, prompt_id="try", prompt_tokens=pack_ints([1])
    )
    response = Response(
        tokens=pack_ints([1, 2]),
        logprobs=pack_floats([-0.5, -0.5]),
        loss_mask=memoryview(bytes([1, 1])),
        spans=(VersionSpan(1, 4, 2),),
    )
    return RolloutDone(task=task, response=response, finish="stop")


def _answer(hook: Callable[..., Any], given: tuple[Any, ...], deadline_s: float) -> Any:
    async def waited(value: Any) -> Any:
        return await asyncio.wait_for(value, deadline_s)

    value = hook(*given)  # as at work: in no loop, since a plain function may run one of its own
    return asyncio.run(waited(value)) if inspect.isawaitable(value) else value


def _judged(field: str, answer: Any, ask: HookTrial, given: tuple[Any, ...]) -> str:
    if field in BATCH:
        samples = [one for group in _groups() for one in group]
        shown = given[1] if len(given) > 1 else None
        if field == FILTER and shown is not None:
            samples = [one for group in shown for one in group]
        if field != "rollout_all_samples_process_path":
            found = shown if isinstance(shown, dict) else train_data(samples)
            settled(field, answer, samples, found, [list(one.loss_mask) for one in samples])
        return ""
    if field == "environment_path":
        msgspec.msgpack.encode(answer)
    elif field == "custom_rm_path":
        answer = plain(answer)
        if ask.group_rm and not (isinstance(answer, list) and len(answer) == GROUP):
            return f"answered {GROUP} samples of a group (group_rm) with {answer!r:.100}, not with a list of as many rewards"
        for value in answer if ask.group_rm else [answer]:
            settle(value, ask.reward_key, "it")
    elif field == "dynamic_sampling_filter_path":
        if answer is not None and not isinstance(answer, str):
            return f"answered with {answer!r}, which is neither a reason nor None"
    elif field == "data_source_path":
        assert ask.data is not None
        own = {name: getattr(ask.data, name) for name in ("input_key", "label_key", "metadata_key", "tool_key")}
        _, keys = rows_function(ask.paths[field], own, ask.values) if field in ask.paths else (None, own)
        for number, row in enumerate(islice(answer, FIRST_ROWS), 1):
            try:
                parts_of(row, keys, chat=ask.data.apply_chat_template, strict=True, objects=True)
            except BadData as error:
                return f"row {number}: {error}"
    elif not (isinstance(answer, list) and all(isinstance(plan, Plan) for plan in answer)):
        return f"answered with {answer!r:.100}, which is no list of plans"
    return ""


def main() -> int:
    """Read, try, answer."""
    ask = msgspec.json.decode(sys.stdin.buffer.read(), type=HookTrial)
    with own_stdout() as answers:
        found = [
            {"field": field, "path": path, "problem": printable(" ".join(problem.split()))[:300], "remedy": SIGNATURES[field]}
            for field, path in ask.paths.items()
            if (problem := problem_of(field, path, ask))
        ]
        answers.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    os._exit(main())  # no thread that a hook began is waited for
