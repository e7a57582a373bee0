"""Rules and checks of the models beside the policy: ppo's critic and the teacher of on-policy distillation."""

import json
from collections.abc import Callable
from pathlib import Path

from miles_async.settings.checkpoints import is_torch_dist, model_in
from miles_async.settings.derive import SERVED
from miles_async.settings.errors import refusal
from miles_async.settings.flat import Flat
from miles_async.settings.run import RunSettings


def critic_belongs_to_ppo(s: Flat) -> None:
    if not s.estimator.critic:
        for name in ("critic_load", "num_critic_only_steps"):
            if s.values[name]:
                why = f"advantage_estimator = {s.advantage_estimator!r} has no critic"
                raise s.refusal(name, why, "Leave it out, or set --advantage-estimator ppo.")
    rollouts = s.num_rollout
    if rollouts is not None and s.num_critic_only_steps >= rollouts:
        why = f"the policy would never be trained in num_rollout = {rollouts}"
        raise s.refusal("num_critic_only_steps", why, "Set it below num_rollout.")


def distillation_has_one_teacher(s: Flat) -> None:
    if s.use_opd and s.estimator.teacher:
        why = f"advantage_estimator = {s.advantage_estimator!r} counts the teacher already"
        raise s.refusal("use_opd", why, "Keep one of the two.")
    served = s.opd_type == SERVED
    if s.distills and not (s.opd_teacher_urls if served else s.opd_teacher_load):
        why = f"distillation without a teacher (opd_type = {s.opd_type!r})"
        remedy = "Set --opd-teacher-load DIR of the teacher, or --opd-teacher-urls http://HOST:PORT of its server."
        raise refusal("opd_teacher_urls" if served else "opd_teacher_load", None, why, remedy)
    unasked = "opd_teacher_load" if served else "opd_teacher_urls"
    if s.distills and s.values[unasked]:
        raise s.refusal(unasked, f"with opd_type = {s.opd_type!r} this teacher is not asked", "Keep one teacher.")
    if s.distills and served and s.rollout_temperature != 1.0:
        remedy = "Set it to 1.0, or load the teacher in the trainer with --opd-teacher-load."
        raise s.refusal("rollout_temperature", "a served teacher's log-probs are those of temperature 1", remedy)
    for url in s.opd_teacher_urls:
        if not url.startswith(("http://", "https://")):
            raise refusal("opd_teacher_urls", url, "not an http:// or https:// address", "Write the scheme too.")
    for name in ("opd_teacher_load", "opd_teacher_urls"):
        if s.values[name] and not s.distills:
            remedy = "Add --use-opd or --advantage-estimator on_policy_distillation, or leave it out."
            raise s.refusal(name, "nothing is distilled", remedy)
    if s.opd_teacher_ckpt_step is not None and s.opd_teacher_load is None:
        raise s.refusal("opd_teacher_ckpt_step", "there is no opd_teacher_load", "Set it or leave this out.")


RULES: tuple[Callable[[Flat], None], ...] = (critic_belongs_to_ppo, distillation_has_one_teacher)


def teacher_dir(settings: RunSettings, model_dir: Path | None = None) -> str:
    """The teacher's model directory, "" without one. A parent directory of checkpoints stands for the checkpoint that its
    tracker or opd_teacher_ckpt_step names. SettingsError when it is no model directory or, where the policy's model_dir is
    known, when their vocabularies differ."""
    given, step = settings.ckpt.opd_teacher_load, settings.ckpt.opd_teacher_ckpt_step
    if given is None or not settings.flat.distills:
        return ""
    path = model_in(given, step, "opd_teacher_load", "opd_teacher_ckpt_step")
    if settings.flat.on_megatron and is_torch_dist(path):
        return str(path.resolve())  # it says nothing of its vocabulary; the trainer compares shapes as it loads
    size = _vocabulary(path, "opd_teacher_load", given)
    if model_dir is not None:
        own = _vocabulary(model_dir, "hf_checkpoint", settings.model.hf_checkpoint)
        if size != own:
            why = f"its vocabulary has {size} tokens, the policy's {own}: their log-probs cannot be compared"
            raise settings.flat.refusal("opd_teacher_load", why, "Choose a teacher with the policy's tokenizer.")
    return str(path.resolve())


def reference_dir(settings: RunSettings) -> str:
    """Directory of the frozen reference where it is another than the model itself, else empty."""
    given, step = settings.ckpt.ref_load, settings.ckpt.ref_ckpt_step
    if given == settings.model.hf_checkpoint and step is None:
        return ""
    return str(model_in(given, step, "ref_load", "ref_ckpt_step").resolve())


def start_dir(settings: RunSettings) -> str:
    """Directory whose weights alone the run starts from (--finetune), else empty."""
    c = settings.ckpt
    return str(model_in(c.load, c.ckpt_step, "load", "ckpt_step").resolve()) if c.finetune else ""


def critic_dir(settings: RunSettings) -> str:
    """The directory the critic starts from, "" for the policy's own; SettingsError when it is no model directory."""
    given = settings.ckpt.critic_load
    if given is None:
        return ""
    _vocabulary(Path(given), "critic_load", given)
    return str(Path(given).resolve())


def check_second_models(settings: RunSettings) -> None:
    """Both are model directories and, unless the policy is a builtin that is still to be made, fit it."""
    builtin = settings.model.builtin_name is not None
    teacher_dir(settings, None if builtin else Path(settings.model.hf_checkpoint))
    critic_dir(settings)


def _vocabulary(directory: Path, field: str, value: str) -> object:
    """vocab_size of a model directory."""
    file = directory / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        why = f"{file}: {error.strerror}"
        raise refusal(field, value, why, "Give a Hugging Face directory, or a directory of checkpoints.") from None
    except ValueError as error:
        raise refusal(field, value, f"{file} cannot be read: {error}", "Give a Hugging Face directory.") from None
    return config.get("vocab_size") if isinstance(config, dict) else None
