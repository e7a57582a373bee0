"""(pure) Rules on the samples that engines take at once."""

from collections.abc import Iterator

from miles_async.settings.errors import SettingsError, refusal
from miles_async.settings.flat import Flat

AUTO_MAX_RUNNING = 512
"""Requests that our engines run at once where neither a number nor a ceiling is set: SGLang's largest CUDA graph on 80 GB."""


def slots_are_possible(s: Flat) -> None:
    for error in _broken(s):
        raise error


def _broken(s: Flat) -> Iterator[SettingsError]:
    fixed, low, high = s.sglang_server_concurrency, s.sglang_concurrency_min, s.sglang_concurrency_max
    if high is not None and low > high:
        yield refusal("sglang_concurrency_min", low, f"above sglang_concurrency_max = {high}", f"Set it to {high} or less.")
    if s.max_masked_fraction is not None and fixed:
        rule = f"sglang_server_concurrency is fixed at {fixed}, so nothing would keep to it"
        yield refusal("max_masked_fraction", s.max_masked_fraction, rule, "Set --sglang-server-concurrency auto.")
    slots, after = s.tail_slots, s.tail_after_tokens
    if slots is None and after is None:
        return
    if after is None:
        yield refusal("tail_slots", slots, "nothing says which samples are the tail", "Set --tail-after-tokens as well.")
    elif slots is None:
        yield refusal("tail_after_tokens", after, "no slots are kept for the tail", "Set --tail-slots as well.")
    else:
        yield from _lane(s, slots, after)


def _lane(s: Flat, slots: int, after: int) -> Iterator[SettingsError]:
    if s.use_router:
        why = "use_router sends each request to any engine"
        yield refusal("tail_slots", slots, why, "Set --no-use-router: workers share the load by what they lease.")
    longest = s.rollout_max_response_len
    if after >= longest:
        rule = f"no sample outlives it with rollout_max_response_len = {longest}"
        yield refusal("tail_after_tokens", after, rule, f"Set it below {longest}.")
    workers = s.num_generation_workers
    if workers == 1:
        rule = "the run has one worker, whose batch would be no smaller for it"
        yield refusal("tail_slots", slots, rule, "Start two workers or more, or leave it out with tail_after_tokens.")
    each = s.sglang_server_concurrency or s.sglang_concurrency_max or 0
    most = (workers - 1) * each
    if workers and each and slots > most:
        rule = f"{workers} workers of {each} slots must leave one worker for what is not the tail"
        yield refusal("tail_slots", slots, rule, f"Set it to {most} or less.")


def slices_go_on_from_a_prefix(s: Flat) -> None:
    for name in ("max_tokens_per_slice", "tail_slots"):
        if not s.partial_rollout and getattr(s, name) is not None:
            rule = "samples that give their slot back resume from a prefix, and partial_rollout is off"
            raise refusal(name, getattr(s, name), rule, "Leave one of the two out.")


RULES = (slots_are_possible, slices_go_on_from_a_prefix)
