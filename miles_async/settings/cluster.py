"""Rules of a run whose processes are spread over hosts by Ray, and of what only that can do (pure)."""

from __future__ import annotations

from miles_async.settings.flat import Flat


def ray_places_what_it_can(s: Flat) -> None:
    if s.launcher != "ray":
        return
    if s.use_router and s.sglang_router_ip is None:
        why = "our router sees the engines of one host (launcher = ray)"
        raise s.refusal("use_router", why, "Leave it out: workers share the load.")
    if s.transport_kind.maps_gpu and s.engine_kind.needs_gpu and not s.colocate:
        why = "Ray hides the trainer's GPU, whose memory ipc maps, from engines (launcher = ray)"
        raise s.refusal("update_weight_transport", why, "Set it to nccl or disk.")
    if s.train_master is not None:
        raise s.refusal("train_master", "launcher = ray starts all processes of the trainer", "Leave it out.")
    if s.colocate and (s.actor_num_nodes > 1 or s.max_workers is not None):
        why = "engines on the trainer's GPUs are placed with it, on one node and all at once"
        raise s.refusal("colocate", why, "Leave it out.")


def elastic_workers_need_ray(s: Flat) -> None:
    for name in ("min_workers", "max_workers"):
        if getattr(s, name) is not None and s.launcher != "ray":
            remedy = "Set --num-generation-workers, or --launcher ray; miles-async worker adds workers from anywhere."
            raise s.refusal(name, "workers come and go with nodes of a Ray cluster only (launcher = local)", remedy)
    if s.min_workers is not None and s.min_workers > s.most_workers:
        raise s.refusal("min_workers", f"above max_workers = {s.most_workers}", f"Set it to {s.most_workers} or less.")
    if s.max_workers is not None and s.engine_kind.attached:
        raise s.refusal("max_workers", f"engine is {s.engine!r}: one worker for each address", "Leave it out.")


def hosts_of_an_engine_have_equal_parts(s: Flat) -> None:
    if s.sglang_nnodes == 1:
        return
    if s.launcher != "ray" or not s.engine_kind.spans_hosts or s.colocate:
        raise s.refusal("sglang_nnodes", "needs SGLang engines of their own, placed by launcher = ray", "Set it to 1.")
    if s.rollout_num_gpus_per_engine % s.sglang_nnodes:
        why = f"rollout_num_gpus_per_engine = {s.rollout_num_gpus_per_engine} cannot be shared by so many hosts"
        raise s.refusal("sglang_nnodes", why, "Set it to a divisor.")


RULES = (ray_places_what_it_can, elastic_workers_need_ray, hosts_of_an_engine_have_equal_parts)
