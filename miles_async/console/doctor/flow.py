"""Samples on their way to a step and past it (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bus.messages.control import STEP_BEGAN
from bus.messages.events import EventKind
from bus.messages.reasons import declared
from bus.messages.waits import Wait
from miles_async.console.doctor.finding import PATIENCE_S, Finding
from miles_async.console.explain import open_text, taken_slots
from miles_async.console.scene import Scene
from miles_async.console.text import duration, plural, shorten

UNSCORED_S = 10.0  # a sample may wait for its score for so long while the trainer waits
IDLE_STEPS, IDLE_SHARE, IDLE_SLOTS = 10, 0.7, 0.25  # the trainer waited for this part of so many steps, and so few slots work
STEP_S, STEP_TIMES = 300.0, 20  # a step may take so long, since a first one compiles, and so many times the longest of late
FIRST_STEP_S = 1800.0  # where there was none before


def dead_letters(scene: Scene) -> Iterator[Finding]:
    """Entries that failed for good."""
    if not scene.dead:
        return
    newest = scene.dead[-1]
    n = plural(scene.snapshot.streams["dead"].length, "dead letter")
    text = f"{n}, the newest {newest.sample} on {shorten(newest.fields.get('note', ''), 120)}"
    of_one, times = max(Counter(scene.rows).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        text += f"; {times} of the newest {len(scene.dead)} are of prompt {of_one}, row {of_one.removeprefix('p')} of the data"
    age = max(0.0, scene.now - newest.wall)
    yield Finding("warning", "dead letters", "dead", f"{text}. See miles-async bus dead list", age)


def starving_filter(scene: Scene) -> Iterator[Finding]:
    """Groups rejected one after the other."""
    notes = [head.fields.get("note", "") for head in scene.verdicts]
    kept = max((i for i, note in enumerate(notes) if not note.startswith("dropped")), default=-1)
    reasons = Counter(note.removeprefix("dropped: ") for note in notes[kept + 1 :])
    streak = reasons.total()
    wave = max(1, *(int(scene.knobs.get(name, 0)) for name in ("over_sampling_batch_size", "rollout_batch_size")))
    if streak < 2 * wave:
        return
    most = int(scene.knobs.get("max_waves") or 0)
    why = ", ".join(f"{n} × {reason}" for reason, n in reasons.most_common(3))
    limit = f"; the run ends at max_waves = {most}" if most else ""
    known = declared(reasons.most_common(1)[0][0])
    remedy = known.remedy if known is not None and known.remedy else "other prompts, or change your filter"
    text = f"the last {streak} groups were all dropped ({why}): {streak / wave:.1f} waves of {wave}{limit}. Remedy: {remedy}"
    yield Finding("error" if most and streak >= most * wave else "warning", "filter starving", "filter", text)


def failed_checkpoints(scene: Scene) -> Iterator[Finding]:
    """A save that failed, until a later one is durable."""
    durable = scene.snapshot.policy.checkpoint_step
    if failed := [e for e in scene.news if e.kind == EventKind.CHECKPOINT_FAILED and int(e.data.get("step", 0)) > durable]:
        newest = failed[-1]
        text = f"{newest.text} ({plural(len(failed), 'save')} in a row failed)" if len(failed) > 1 else newest.text
        yield Finding("error", "checkpoint failed", "trainer", text, scene.now - failed[0].wall)


def _waits_for_groups(scene: Scene) -> bool:
    return any(a.vitals.wait is Wait.GROUPS for a in scene.snapshot.living("trainer"))


def slow_rewards(scene: Scene) -> Iterator[Finding]:
    """Samples that wait for their score while the trainer waits for them."""
    heads = scene.places.heads.get("rollouts", [])
    scorers = scene.snapshot.living("reward")
    if not heads or not scorers or scene.over or not _waits_for_groups(scene):
        return
    oldest = scene.now - min(head.wall for head in heads)
    stages = scene.places.stages()
    if oldest < UNSCORED_S or stages["reward"] * 2 < sum(stages.values()) - stages["kept"]:
        return
    each = max(a.vitals.counters.get("score_s", 0.0) for a in scorers)
    retries = sum(a.vitals.counters.get("scorer_failures", 0.0) for a in scorers)
    text = (
        f"{plural(len(heads), 'sample')} wait to be scored, the oldest for {duration(oldest)}, and the trainer waits for them: a "
        f"score takes {duration(each)}, {retries:.0f} attempts failed or came late. Look at the judge, remote service or "
        "function; raise --num-reward-workers"
    )
    yield Finding("warning", "slow rewards", "reward", text, oldest)


def stuck_evaluation(scene: Scene) -> Iterator[Finding]:
    """An evaluation of which no sample has moved for long, by the run's own measure of long."""
    facts = [scene.snapshot.streams[name] for name in ("eval.prompts", "eval.rollouts", "eval.scored")]
    here = sum(f.length for f in facts)
    usual_s = max((s.get("rollout/generate_s/p99") for s in scene.steps[-5:]), default=0.0)
    still_s = min((f.newest_age_s for f in facts if f.newest_id), default=0.0)
    if here and still_s > max(PATIENCE_S / 2, 10 * usual_s) and not scene.over:
        where = ", ".join(f"{f.length} on {f.name}" for f in facts if f.length)
        text = (
            f"the evaluation under way has not moved for {duration(still_s)} ({where}): no later one begins before it ends. A "
            "missing sample is found with miles-async trace; a lost one ends with miles-async bus dead list"
        )
        yield Finding("warning", "evaluation stuck", "evaluator", text, still_s)


def governor_at_its_edge(scene: Scene) -> Iterator[Finding]:
    """What would serve lies outside of what the user allows, or is left to hands."""
    for note in scene.governor.notes if scene.governor is not None and scene.knobs.get("governor") else ():
        yield Finding("info", "governor", "governor", f"the governor is held up: {note.text}")


def endless_step(scene: Scene) -> Iterator[Finding]:
    """A step that does not end."""
    trainer = next((a.vitals for a in scene.snapshot.living("trainer")), None)
    began = trainer.counters.get(STEP_BEGAN, 0.0) if trainer is not None else 0.0
    if trainer is None or not began or scene.over:
        return
    worked = max((s.get("perf/train_s") for s in [s for s in scene.steps if not s.resumed][-IDLE_STEPS:]), default=0.0)
    since = trainer.wall - began
    if since <= (max(STEP_S, STEP_TIMES * worked) if worked else FIRST_STEP_S):
        return
    others = f" (of the other ranks: {shorten(trainer.ranks, 200)})" if trainer.ranks else ""
    usual = f"; none of the last ones took more than {duration(worked)}" if worked else ""
    text = (
        f"the trainer has been in one step for {duration(since)}{usual}: a function of yours in the loss may not return, or a rank "
        f"waits for another. py-spy dump -p {trainer.pid} on {trainer.host} shows where{others}; kill -9 {trainer.pid} starts it "
        "again from its checkpoint"
    )
    yield Finding("error", "endless step", trainer.actor, text, since)


def idle_trainer(scene: Scene) -> Iterator[Finding]:
    """A bound that holds back what the engines have room for while the trainer waits."""
    steps = [s for s in scene.steps if not s.resumed][-IDLE_STEPS:]
    waited, worked = (sum(s.get(f"perf/{name}_s") for s in steps) for name in ("wait", "train"))
    held = any(a.vitals.wait is Wait.CREDITS for a in scene.snapshot.living("sampler"))
    busy, slots = taken_slots(scene)
    if len(steps) < IDLE_STEPS or waited < IDLE_SHARE * (waited + worked) or busy > IDLE_SLOTS * slots or scene.over:
        return
    if not (held and _waits_for_groups(scene)):
        return
    bound = int(scene.knobs.get("max_weight_staleness", 0))
    text = (
        f"the trainer waited for {waited / (waited + worked):.0%} of the last {IDLE_STEPS} steps while {slots - busy} of {slots} "
        f"slots were free: {open_text(scene)}. Bound {bound} holds prompts back: raise max_weight_staleness or the batch "
        "(miles-async tune)"
    )
    yield Finding("warning" if bound else "info", "idle trainer", "trainer", text)
