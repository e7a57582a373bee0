"""(pure) Rules on the samples that engines take at once."""

from miles_async.settings.flat import Flat

AUTO_MAX_RUNNING = 512
"""Requests that our engines run at once where neither a number nor a ceiling is set: SGLang's largest CUDA graph on 80 GB."""


def slots_have_room_to_move(s: Flat) -> None:
    fixed, low, high = s.sglang_server_concurrency, s.sglang_concurrency_min, s.sglang_concurrency_max
    if high is not None and low > high:
        raise s.refusal("sglang_concurrency_min", f"above sglang_concurrency_max = {high}", f"Set it to {high} or less.")
    if s.max_masked_fraction is not None and fixed:
        why = f"sglang_server_concurrency is fixed at {fixed}, so nothing would keep to it"
        raise s.refusal("max_masked_fraction", why, "Set --sglang-server-concurrency auto.")


def the_tail_has_a_lane(s: Flat) -> None:
    slots, after = s.tail_slots, s.tail_after_tokens
    if slots is None and after is None:
        return
    if after is None:
        raise s.refusal("tail_slots", "nothing says which samples are the tail", "Set --tail-after-tokens as well.")
    if slots is None:
        raise s.refusal("tail_after_tokens", "no slots are kept for the tail", "Set --tail-slots as well.")
    if s.use_router:
        remedy = "Set --no-use-router: workers share the load by what they lease."
        raise s.refusal("tail_slots", "use_router sends each request to any engine", remedy)
    longest = s.rollout_max_response_len
    if after >= longest:
        why = f"no sample outlives it with rollout_max_response_len = {longest}"
        raise s.refusal("tail_after_tokens", why, f"Set it below {longest}.")
    workers = s.num_generation_workers
    if workers == 1:
        why = "the run has one worker, whose batch would be no smaller for it"
        raise s.refusal("tail_slots", why, "Start two workers or more, or leave it out with tail_after_tokens.")
    each = s.sglang_server_concurrency or s.sglang_concurrency_max or 0
    most = (workers - 1) * each
    if workers and each and slots > most:
        why = f"{workers} workers of {each} slots must leave one worker for what is not the tail"
        raise s.refusal("tail_slots", why, f"Set it to {most} or less.")


def slices_go_on_from_a_prefix(s: Flat) -> None:
    for name in ("max_tokens_per_slice", "tail_slots"):
        if not s.partial_rollout and s.values[name] is not None:
            why = "samples that give their slot back resume from a prefix, and partial_rollout is off"
            raise s.refusal(name, why, "Leave one of the two out.")


RULES = (slots_have_room_to_move, the_tail_has_a_lane, slices_go_on_from_a_prefix)
