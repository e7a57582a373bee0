"""Rules of a run whose processes are spread over hosts by Ray, and of what only that can do (pure)."""

from __future__ import annotations

from miles_async.settings.flat import Flat
from miles_async.settings.kinds import refused


def the_launcher_places_what_it_can(s: Flat) -> None:
    """What the launcher's record says."""
    for broken in s.launcher_kind.rules(s):
        raise refused(broken)


def elastic_workers_need_ray(s: Flat) -> None:
    for name in ("min_workers", "max_workers"):
        if getattr(s, name) is not None and not s.launcher_kind.spreads:
            remedy = "Set --num-generation-workers, or --launcher ray; miles-async worker adds workers from anywhere."
            raise s.refusal(name, "workers come and go with nodes of a Ray cluster only (launcher = local)", remedy)
    if s.min_workers is not None and s.min_workers > s.most_workers:
        raise s.refusal("min_workers", f"above max_workers = {s.most_workers}", f"Set it to {s.most_workers} or less.")
    if s.max_workers is not None and s.engine_kind.attached:
        raise s.refusal("max_workers", f"engine is {s.engine!r}: one worker for each address", "Leave it out.")


def hosts_of_an_engine_have_equal_parts(s: Flat) -> None:
    if s.sglang_nnodes == 1:
        return
    if not s.launcher_kind.spreads or not s.engine_kind.spans_hosts:
        raise s.refusal("sglang_nnodes", "needs SGLang engines of their own, placed by launcher = ray", "Set it to 1.")
    if s.rollout_num_gpus_per_engine % s.sglang_nnodes:
        why = f"rollout_num_gpus_per_engine = {s.rollout_num_gpus_per_engine} cannot be shared by so many hosts"
        raise s.refusal("sglang_nnodes", why, "Set it to a divisor.")


RULES = (the_launcher_places_what_it_can, elastic_workers_need_ray, hosts_of_an_engine_have_equal_parts)
