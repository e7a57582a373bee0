"""How many samples may start now (pure).

A sample is open from its issue until it is dropped, dead, or trained *and* the version that holds it is served. With
batches of S samples and a bound of N, at most (N + 1) * S samples are open. So when version v is served, at most (v +
1 + N) * S samples have been issued, and of those whose tokens may be of version v or older at most S are untrained
once N more steps are done: what is on its last turn fits into the next batch, unless the trainer trained younger ones
instead (actors.trainer.cut prevents that). A slot is freed when the version is served, not when it is announced:
otherwise samples would be stale from their first token.
"""

from __future__ import annotations


def open_limit(*, per_version: int, max_staleness: int, over_sampling: int = 0, lookahead: int = 0) -> int:
    """Most samples that may be open. `per_version`: samples trained between two published versions.

    At bound 0 there is one wave a version: the batch, or `over_sampling` samples where that is more, of which the surplus
    is dropped. `lookahead` W > 0 (staleness policy `wait`) lets the trainer pass over up to W samples, which may age a sample
    by ceil((W - 1) / per_version) more steps; admission gives up as many steps, but never below one batch.
    """
    if max_staleness == 0:
        return max(per_version, over_sampling)
    allowed = max_staleness
    if lookahead > 0:
        allowed -= -(-(lookahead - 1) // per_version)
    return (max(0, allowed) + 1) * per_version


def free_samples(
    *, open_samples: int, untrained: int, unjudged: int, limit: int, over_sampling: int, still_needed: int, engine_room: int
) -> int:
    """Samples that may be issued now, >= 0.

    `untrained`: open ones that no step has trained; the others wait for their version to be served. `unjudged`: issued and not yet
    judged; `over_sampling`: how many of those are wanted at most, 0 = as many as may be open. `still_needed`: untrained ones that
    the rest of the run can use, so that few are left over at its end. `engine_room`: samples that engines can take beyond those
    that wait for them: a prompt is issued when it can start, with the settings of that moment.
    """
    wanted = over_sampling - unjudged if over_sampling else limit
    return max(0, min(limit - open_samples, wanted, still_needed - untrained, engine_room))


def whole_groups(free: int, *, untrained: int, coming: int, unjudged: int, needed: int, group: int) -> int:
    """Groups to issue where `free` samples may start: as many as fit. It is one where none fits, nothing is under way, and what is
    untrained cannot fill a batch of `needed` samples, nor with the `coming` credits of a version that is about to be served:
    members of a group are dropped one by one, so what is missing may be less than a group, and trainer and sampler would wait for
    each other. Then at most group - 1 samples are open too many."""
    if free < group and unjudged == 0 and untrained + coming < needed:
        return 1
    return free // group


def engine_room(*, slots: int, under_way: int, group: int) -> int:
    """Samples to issue so that no slot waits for a prompt. `slots`: of all workers that serve a version; `under_way`: samples
    that are with them or wait for them; `group`: samples of a group. Beyond the slots, two groups or a quarter of the slots are
    kept waiting, because the sampler learns of a free slot later than the engine."""
    return slots + max(2 * group, slots // 4) - under_way


def group_credits(
    *,
    bound: int,
    interval: int,
    batch: int,
    over: int,
    group: int,
    lookahead: int,
    open_samples: int,
    untrained: int,
    coming: int,
    unjudged: int,
    steps_left: int,
) -> int:
    """Whole groups that may be issued now, whatever room engines have. `batch`, `over` and `lookahead` (0 = none) in groups,
    `interval` in steps from one published version to the next, `steps_left` to the end of the run."""
    limit = open_limit(
        per_version=batch * group * interval,
        max_staleness=bound,
        over_sampling=over * group,
        lookahead=lookahead * group,
    )
    free = free_samples(
        open_samples=open_samples,
        untrained=untrained,
        unjudged=unjudged,
        limit=limit,
        over_sampling=over * group,
        still_needed=steps_left * batch * group + max(0, over - batch) * group,
        engine_room=limit,  # none of its own: who asks takes the less of this and what engines have
    )
    needed = min(steps_left, 1) * batch * group
    return whole_groups(free, untrained=untrained, coming=coming, unjudged=unjudged, needed=needed, group=group)
