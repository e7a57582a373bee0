"""What must hold after every case, read from the run's streams, recorded batches and checkpoints.

1 the ledger closes, sample by sample · 2 in the lineage that survived, every step is there once and no sample has
contributed twice · 3 no issued sample is missing: trained, dropped with a reason, or still on a stream · 4 no prompt of the
epoch was skipped · 5 no trained token is older than the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.staleness import bound_in_steps
from actors.sampler.actor import Position
from actors.sampler.order import permutation
from actors.trainer.checkpoint import latest
from actors.trainer.record import read_record
from bus import Bus, ledger
from bus.knobs.live import read_history, values_at
from bus.messages.control import KnobPatch
from bus.messages.groups import OpenGroup
from bus.messages.policy import ALREADY_TRAINED, Checkpointed, Finished, GroupsGivenUp, Restored, StepDone
from bus.messages.versions import staleness
from bus.topology import EVAL_RESULTS, POLICY, VERDICTS
from tests.crash.house import Run
from tests.crash.toy import N_PROMPTS

AGED = ("outlasted", "stale", "surplus")  # samples whose tokens were all over the bound, before their step or in it


class Facts(msgspec.Struct, kw_only=True):
    """What the bus held when everything had ended."""

    check: ledger.LedgerCheck
    policy: list[Any]
    verdicts: list[Any]
    open_samples: set[str]
    sampler: str
    results: list[Any]
    knobs: list[KnobPatch]


def lineage(policy: Sequence[Any]) -> dict[int, StepDone]:
    """The steps inside the last weights: a restart from a checkpoint cuts what came after it."""
    steps: dict[int, StepDone] = {}
    for message in policy:
        match message:
            case StepDone():
                assert message.step not in steps, f"step {message.step} done twice without a restart in between"
                steps[message.step] = message
            case Restored():
                steps = {step: done for step, done in steps.items() if step <= message.step}
    return steps


async def read_facts(bus: Bus) -> Facts:
    """Everything at once; nothing moves any more."""
    return Facts(
        check=await ledger.check(bus),
        policy=[await bus.message(e) for e in await bus.scan_all(POLICY)],
        verdicts=[await bus.message(e) for e in await bus.scan_all(VERDICTS)],
        open_samples={
            sample
            for raw in (await bus.hash_of(bus.keys.open_groups)).values()
            for sample in msgspec.msgpack.decode(raw, type=OpenGroup).sample_ids
        },
        sampler=await bus.state("sampler"),
        results=[await bus.message(e) for e in await bus.scan_all(EVAL_RESULTS)],
        knobs=await read_history(bus),
    )


def judge(
    run: Run, *, whole_policy: bool = True, steps: int | None = None, n_prompts: int = N_PROMPTS, tuned: bool = False
) -> Facts:
    """Assert all of it. `whole_policy` False: the bus was lost on the way, so that it knows the later part only. `tuned`: its
    settings were not always these, so each step is held to the bound of its knobs."""
    server = run.server()
    try:
        facts: Facts = run.ask(read_facts)
    finally:
        server.stop()
    wanted = run.steps if steps is None else steps
    assert facts.check.closes, facts.check.text()
    done = lineage(facts.policy)
    if whole_policy:
        assert sorted(done) == list(range(1, wanted + 1)), f"steps of the lineage: {sorted(done)}"
        last = next(m for m in reversed(facts.policy) if isinstance(m, Finished | StepDone | Restored))
        assert isinstance(last, Finished) or wanted < run.steps
    else:
        assert max(done) == wanted, f"last step of the lineage: {max(done)}"
    samples = [sample for step in sorted(done) for sample in done[step].samples]
    assert len(samples) == len(set(samples)), "a sample contributed twice"
    if whole_policy:
        _nothing_missing(facts, set(samples), int(run.setting("rollout", "n_samples_per_prompt")))
        _prompts_in_order(facts, done, n_prompts, seed=42, shuffle=bool(run.setting("rollout", "rollout_shuffle")))
    if wanted == run.steps:
        assert latest(run.checkpoints) == wanted
    bounds = {m.knob_epoch: int(run.setting("rollout", "max_weight_staleness")) for m in done.values()}
    for epoch in bounds if tuned else ():
        knobs = values_at(facts.knobs, epoch)
        bounds[epoch] = bound_in_steps(knobs.max_weight_staleness, knobs.update_weights_interval)
    _within_the_bound(run, done, bounds)
    _accounts_agree(facts, done, whole_policy)
    return facts


def _nothing_missing(facts: Facts, trained: set[str], n_samples: int) -> None:
    def ids(group: str, members: Sequence[int]) -> set[str]:
        return {f"{group}/{i}" for i in members or range(n_samples)}

    dropped: set[str] = set()
    for v in facts.verdicts:
        dropped |= set() if v.kept else ids(v.group_id, v.members)
    for m in _given_up(facts):
        dropped |= set(m.samples) or {s for group, _ in m.groups for s in ids(group, ())}
    n_issued = Position.parse(facts.sampler).cursor.group
    everywhere = trained | dropped | facts.open_samples
    missing = [s for n in range(1, n_issued + 1) for s in sorted(ids(f"g{n:07d}", ())) if s not in everywhere]
    assert not missing, f"{len(missing)} issued samples are nowhere: {missing[:5]}"
    assert not (trained & dropped), f"trained and dropped: {sorted(trained & dropped)[:5]}"


def _given_up(facts: Facts) -> list[GroupsGivenUp]:
    found = [m for m in facts.policy if isinstance(m, GroupsGivenUp)]
    return [m for m in found if any(why != ALREADY_TRAINED for _, why in m.groups)]


def _prompts_in_order(facts: Facts, done: dict[int, StepDone], n_prompts: int, *, seed: int, shuffle: bool) -> None:
    again = sum(len(m.prompts) for m in facts.policy if isinstance(m, GroupsGivenUp) and m.reissue)
    if again:
        return  # prompts that were issued again shift the order
    prompts = {g: p for step in done.values() for g, p in zip(step.groups, step.prompts, strict=True)}
    prompts |= {v.group_id: v.prompt_id for v in facts.verdicts if v.prompt_id}
    for group, prompt in prompts.items():
        epoch, position = divmod(int(group[1:]) - 1, n_prompts)
        row = permutation(parts=[(n_prompts, 0.0)], run_seed=seed, epoch=epoch, shuffle=shuffle)[position]
        assert prompt == f"p{row}", f"{group} should be of prompt p{row}, is of {prompt}"


def _within_the_bound(run: Run, done: dict[int, StepDone], bounds: Mapping[int, int]) -> None:
    """The trainer's own figure of the oldest token that had gradient, and the recorded batches beside it. `bounds` by epoch."""
    for step, message in done.items():
        bound = bounds[message.knob_epoch]
        assert message.metrics.get("train/staleness_max", 0.0) <= bound, f"step {step}: {message.metrics}"
        file = Path(str(run.setting("ckpt", "save_debug_rollout_data")).replace("{rollout_id}", str(step - 1)))
        record = read_record(file)
        assert record.done.samples == message.samples, f"step {step}: the record is of another batch"
        spans = [s for g in record.groups for m in g.samples for s in m.rollout.made]
        fresh = sum(s.n for s in spans if staleness(step - 1, s.step) <= bound)
        assert message.metrics["train/trained_tokens"] <= fresh


def _accounts_agree(facts: Facts, done: dict[int, StepDone], whole_policy: bool) -> None:
    saved = max((m.step for m in facts.policy if isinstance(m, Checkpointed | Restored)), default=0)
    if whole_policy:
        # An entry is booked as one: samples trained at the edge of a batch wait for the rest of their group.
        samples = [s for step, m in done.items() if step <= saved for s in m.samples]
        inside = sum(s not in facts.open_samples for s in samples)
        dropped = facts.check.accounts.dropped
        untrained = sum(dropped.get(reason, 0) for reason in ("masked", *AGED))
        before = sum(len(m.samples) for m in _given_up(facts) if m.groups[0][1] in AGED)
        assert facts.check.accounts.trained + untrained - before == inside, (
            f"the accounts know {facts.check.accounts.trained} + {untrained} - {before} samples, the lineage {inside}"
        )
