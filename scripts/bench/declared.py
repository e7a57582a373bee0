"""Structs of rooms as scripts and tests want them: settings at their declared defaults, but for what is said."""

from __future__ import annotations

from typing import Any

from actors.runtime.context import ActorSpec
from actors.trainer.backend import BackendConfig, TorchConfig
from actors.trainer.megatron_backend.config import MegatronConfig
from actors.trainer.objective_config import ObjectiveConfig
from miles_async.launcher.place import Place
from miles_async.launcher.plan import told
from miles_async.settings.flat import Flat
from miles_async.settings.load import settings_from

PLAIN = settings_from(hf_checkpoint="builtin:arithmetic", prompt_data="x.jsonl", num_rollout=3, rm_type="math").flat.values
PLACE = Place(run_dir="r", model_dir="m", weights_dir="w", blob_dir="b", stop_token_ids=(), num_rollout=3, fingerprint="f")
# What the objective computes itself where it is not told, and MIS without its normalisation.
LEFT_OUT: dict[str, Any] = dict.fromkeys(
    ("normalize_advantages", "eps_clip_high", "tis_lower_bound", "rs_upper_bound", "rs_lower_bound", "rs_veto_threshold")
)


def objective_of(**own: Any) -> ObjectiveConfig:
    """The objective's settings."""
    estimator = own.get("advantage_estimator")
    loss = estimator if estimator in ("gspo", "cispo") else "ppo"
    values = {**PLAIN, **LEFT_OUT, "tis_batch_normalize": False, "policy_loss": loss}
    return told(ObjectiveConfig, Flat(values), **own)


def backend_of(**own: Any) -> BackendConfig:
    """The settings of a training backend in float32."""
    resolved: dict[str, Any] = {"ref_load": "", "critic_load": "", "opd_teacher_load": "", "num_rollout": 0, "balance": "flops"}
    follows = (("critic_lr", "lr"), ("log_probs_max_tokens_per_gpu", "max_tokens_per_gpu"))
    resolved |= {name: own[of] for name, of in follows if of in own}
    torch = told(TorchConfig, Flat(PLAIN), **{name: own.pop(name) for name in TorchConfig.__struct_fields__ if name in own})
    return told(BackendConfig, Flat(PLAIN), **({"objective": objective_of(), "own": torch} | resolved | own))


def megatron_of(**own: Any) -> MegatronConfig:
    """The Megatron backend's own settings: one rank."""
    return told(MegatronConfig, Flat(PLAIN), **own)


def actor_of(**own: Any) -> ActorSpec:
    """What every actor is told."""
    return told(ActorSpec, Flat({**PLAIN, "heartbeat_s": 1.0, "drain_timeout_s": 20.0, "loop_deadline_s": 0.0}), **own)
