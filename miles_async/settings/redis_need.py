"""(pure) What a run needs of the memory of a Redis of the user's, where bodies of samples lie in it (with --bus-url).

An upper bound: all samples that may be open have their full length, and so has what is trained and waits for its checkpoint, whose
entries are kept until then. A run on its own Redis has bodies in files and needs little.
"""

from __future__ import annotations

import msgspec

from miles_async.settings.flat import Flat

TOKEN_BYTES = 4 + 4 + 1  # id, log-prob, mask
SAMPLE_BYTES = 1_500  # of a sample beside its tokens: fields, text of the prompt, stream and blob entry
LOG_BYTES = 32 << 20  # events, verdicts and orders, at their caps
VERDICTS_KEPT, LIVES_TOLD, LIFE_BYTES = 10_000, 32, 200  # on their log; of a dropped group; of one sample
STEP_BYTES = 1_000  # of a step on the policy log, and SAMPLE_ID_BYTES for each of its samples
SAMPLE_ID_BYTES = 24
SLACK = 1.25  # the allocator's rounding and fragments
UNKNOWN_PROMPT = 2_048  # tokens, where nothing bounds them
UNKNOWN_RESPONSE = 8_192


class Share(msgspec.Struct, frozen=True):
    """One part: `n` of `what`, at most `each` bytes."""

    what: str
    n: int
    each: int

    @property
    def n_bytes(self) -> int:
        return self.n * self.each


class RedisNeed(msgspec.Struct, frozen=True):
    """Most bytes that a run has in Redis at once. While Redis rewrites its append-only file, its host needs up to twice that."""

    shares: tuple[Share, ...]

    @property
    def n_bytes(self) -> int:
        return int(SLACK * sum(share.n_bytes for share in self.shares))

    def text(self) -> str:
        """One line."""
        parts = ", ".join(f"{share.n_bytes / 1e6:,.0f} MB for {share.n:,} {share.what}" for share in self.shares if share.n)
        return f"this run may have up to {self.n_bytes / 1e9:.2f} GB in Redis: {parts}"


def redis_need(s: Flat, *, expert_bytes: int = 0) -> RedisNeed:
    """What these settings may need. `expert_bytes`: of the experts that a sample brings for each token."""
    prompt = s.rollout_max_prompt_len or UNKNOWN_PROMPT
    response = s.rollout_max_response_len or UNKNOWN_RESPONSE
    if s.rollout_max_context_len:
        response = max(response, s.rollout_max_context_len - prompt)  # tool calls and further turns
    token = TOKEN_BYTES + (4 if s.use_opd else 0)
    each = SAMPLE_BYTES + 4 * prompt + token * response + expert_bytes * (prompt + response)
    group, batch = s.n_samples_per_prompt, s.rollout_batch_size * s.n_samples_per_prompt
    in_files = s.bus_url is None
    open_samples = max(s.max_open_groups, s.over_sampling_batch_size or 0) * group
    steps = 0 if s.no_save else s.save_interval or s.num_rollout or 0
    held = [
        Share("open samples", open_samples, SAMPLE_BYTES if in_files else each),
        Share("samples that are trained and not in a checkpoint yet", steps * batch, SAMPLE_BYTES if in_files else each),
        Share("steps on the policy log", (s.keep_last + 1) * steps, STEP_BYTES + SAMPLE_ID_BYTES * batch),
        Share("entries of logs", 1, LOG_BYTES),
        Share("dropped samples, how they went", VERDICTS_KEPT * min(group, LIVES_TOLD), LIFE_BYTES),
    ]
    return RedisNeed(tuple(held))


def memory_note(need: RedisNeed, max_memory_bytes: int, where: str) -> str:
    """What to tell who gave Redis less; empty when it is enough, or no limit."""
    if not 0 < max_memory_bytes < need.n_bytes:
        return ""
    return (
        f"bus at {where} has maxmemory {max_memory_bytes / 1e9:.2f} GB; {need.text()}. When it is full producers wait, and the run "
        "may stand still: raise maxmemory, save checkpoints more often (--save-interval), or lower what may be open "
        "(--max-weight-staleness, --over-sampling-batch-size)."
    )
