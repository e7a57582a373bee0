"""(pure) Rules of LoRA (`[lora]`)."""

from miles_async.settings.flat import Flat


def lora_has_what_it_needs(s: Flat) -> None:
    if not s.lora_rank:
        for name in ("target_modules", "exclude_modules", "lora_adapter_path"):
            if s.values[name] is not None:
                raise s.refusal(name, "lora_rank is 0: all weights are trained", "Set --lora-rank, or leave it out.")
        return
    if not (s.target_modules or "").strip(" ,"):
        raise s.refusal("lora_rank", "target_modules names no matrix that could have adapters", "Set --target-modules all-linear.")
    for field, wrong, why, remedy in (
        ("train_backend", s.on_megatron, "LoRA is of the torch backend", "Set it to torch."),
        ("optimizer", s.optimizer == "muon", "Muon is for whole matrices; adapters are trained by adam", "Set it to adam."),
        ("true_on_policy_mode", s.true_on_policy_mode, "adapters are added in another order than engines do", "Leave it out."),
        ("ref_update_interval", bool(s.ref_update_interval), "LoRA's reference is the frozen base", "Leave it out."),
    ):
        if wrong:
            raise s.refusal(field, f"{why} (lora_rank = {s.lora_rank})", f"{remedy} Or leave out --lora-rank.")


def adapters_have_engines(s: Flat) -> None:
    if s.lora_publish != "adapters":
        return
    remedy = "Set --lora-publish merged."
    if not s.lora_rank:
        raise s.refusal("lora_publish", "lora_rank is 0: there are no adapters", "Leave it out.")
    kind = s.engine_kind
    if kind.generates and not kind.takes_adapters:
        raise s.refusal("lora_publish", f"engines of kind {kind.name} are not given adapters alone", remedy)
    if s.use_router:
        raise s.refusal("lora_publish", "a router sends requests to engines that may not have their adapter yet", remedy)


RULES = (lora_has_what_it_needs, adapters_have_engines)
