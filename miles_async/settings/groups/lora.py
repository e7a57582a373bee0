"""LORA: narrow adapters that are trained in place of the whole weights."""

from typing import Annotated, Literal

from miles_async.settings.doc import Group, doc


class LoraSettings(Group, frozen=True, kw_only=True):
    """What is trained beside frozen weights; of the torch backend."""

    lora_rank: Annotated[
        int,
        doc("Train adapters of this rank beside the frozen weights, instead of the weights. 0: no adapters.", ge=0),
    ] = 0
    lora_alpha: Annotated[
        int, doc("Adapters are weighed by lora_alpha / lora_rank. Beside learning rates ten times those of whole weights.", ge=1)
    ] = 16
    lora_dropout: Annotated[
        float, doc("Must be 0: the policy that is trained must be the one that sampled, and engines drop nothing.", ge=0, le=0)
    ] = 0.0
    target_modules: Annotated[
        str | None,
        doc(
            "Matrices with adapters: all-linear (q, k, v, o, gate, up and down of every layer), or names and patterns with commas "
            "between them, such as q_proj,v_proj or layers.*.mlp.*."
        ),
    ] = None
    exclude_modules: Annotated[str | None, doc("Names and patterns of matrices without adapters, of those in target_modules.")] = (
        None
    )
    lora_adapter_path: Annotated[
        str | None,
        doc("PEFT directory of the same base, rank, alpha and targets to start from. Unset: adapters that do nothing yet."),
    ] = None
    lora_publish: Annotated[
        Literal["merged", "adapters"],
        doc(
            "What a version is: whole weights with the adapters in them, which any engine serves, or the adapters alone, for "
            "engines that load the base themselves: a version is then as small as what is trained.",
            ours=True,
        ),
    ] = "merged"
