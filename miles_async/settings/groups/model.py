"""MODEL: what is trained. Architecture and vocabulary come from the checkpoint, never from flags."""

from typing import Annotated, Literal

from miles_async.settings.doc import Group, doc

BUILTIN_PREFIX = "builtin:"


def is_made_here(checkpoint: str) -> bool:
    """Whether it names a model that this package makes itself, and trains in float32."""
    from miles_async.quickstart.fetched import FETCHED

    return checkpoint.startswith(BUILTIN_PREFIX) and checkpoint.removeprefix(BUILTIN_PREFIX) not in FETCHED


class ModelSettings(Group, frozen=True, kw_only=True):
    """What is trained, and from where."""

    hf_checkpoint: Annotated[
        str,
        doc(
            "Hugging Face directory with config.json, tokenizer.json and weights, or builtin:arithmetic (builtin:columns) for "
            "the small model that this package makes and warm-starts itself, or builtin:smollm2 for SmolLM2-135M-Instruct, fetched "
            "once (miles-async get). Gives architecture, tokenizer and first weights. A "
            "block-scaled FP8 directory makes engines serve FP8: weights are quantised like it whenever they are "
            "published; training starts from ref_load, or from the FP8 values themselves."
        ),
    ]
    model_dtype: Annotated[
        Literal["float32", "bfloat16"],
        doc(
            "Type of the policy's weights and activations.",
            derived="bfloat16 where this host has a GPU and the model is none that is made here, else float32",
            ours=True,
        ),
    ]

    model_implementation: Annotated[
        Literal["auto", "own", "transformers"],
        doc(
            "Code that runs the policy on the torch backend. own: ours, for the families that have it. transformers: the class of "
            "the installed transformers, any causal one, used as far as it gives the log-probs and gradients of single samples, "
            "which is measured before the first step. auto: own where there is any.",
            ours=True,
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool,
        doc("Run code that lies in the model's directory (auto_map in config.json) on the torch backend, with this user's rights."),
    ] = False
    true_on_policy_mode: Annotated[
        bool,
        doc(
            "Log-probs of trainer and engine equal to the last bit: engines run SGLang's deterministic mode with "
            "FlashAttention-3, and the trainer computes with the same kernels in the same order. For dense Qwen3 models in "
            "bfloat16 on Hopper, one GPU for the trainer and one for each engine; SGLang must be installed beside the trainer. "
            "Both get slower."
        ),
    ] = False

    @property
    def builtin_name(self) -> str | None:
        """Name of the builtin model, or None for a directory."""
        named = self.hf_checkpoint.startswith(BUILTIN_PREFIX)
        return self.hf_checkpoint.removeprefix(BUILTIN_PREFIX) if named else None
