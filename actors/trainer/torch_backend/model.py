"""The policy's model out of a Hugging Face directory, and what lies beside weights that are published.

Nothing from a model directory is unpickled, and nothing of it executed unless it is trusted: safetensors only. A directory that
lacks a tensor of the model is refused, never filled with random numbers.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel

from actors.runtime.run import Refused
from actors.trainer.torch_backend import attention, fp8
from actors.trainer.torch_backend.implementations.kind import Implementation, first_line
from actors.trainer.torch_backend.implementations.records import AUTO, choose, read_config
from actors.trainer.torch_backend.policy import Policy
from actors.trainer.training.export import TOKENIZER_FILES

log = logging.getLogger(__name__)


def load_policy(
    path: str,
    *,
    trainable: bool,
    gradient_checkpointing: bool = False,
    implementation: str = AUTO,
    trusted: bool = False,
) -> Policy:
    """The model of a Hugging Face directory in float32 on the CPU. `trusted`: code in the directory may run. Raises Refused, in one
    line, when it cannot be trained."""
    config = read_config(path, trusted=trusted)
    kind = choose(path, config, implementation)
    return kind.policy(_load(path, config, kind, kind.loads, trainable, gradient_checkpointing))


def load_backbone(path: str, *, gradient_checkpointing: bool = False) -> Any:
    """The same model without a head over the vocabulary, trainable: hidden states out. Raises Refused."""
    config = read_config(path, trusted=False)
    kind = choose(path, config)
    if not kind.critic:
        raise Refused(f"{path}: {config.model_type!r} cannot be a critic here. Choose another estimator, or give --critic-load.")
    return _load(path, config, kind, AutoModel, True, gradient_checkpointing)


def _load(path: str, config: Any, implementation: Implementation, kind: Any, trainable: bool, gradient_checkpointing: bool) -> Any:
    attention.register()
    source: dict[str, Any] = {"pretrained_model_name_or_path": path}
    remote = config.model_type not in CONFIG_MAPPING  # read_config has let it through
    if (scheme := fp8.scheme_of(path)) is not None:
        log.warning("%s is FP8: the master weights begin as its values; --ref-load DIR gives finer ones", path)
        del config.quantization_config
        with torch.device("meta"):
            kind = type(kind.from_config(config))
        source = {"pretrained_model_name_or_path": None, "state_dict": fp8.dequantized(Path(path), scheme)}
    elif (quantized := getattr(config, "quantization_config", None)) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else type(quantized).__name__
        raise Refused(f"{path} is quantised ({method}), which is not trained from. Give a directory in bfloat16.")
    implementation.configured(config)
    options = {**implementation.attention, "use_safetensors": True, "output_loading_info": True}
    try:
        loaded: Any = kind.from_pretrained(**source, config=config, trust_remote_code=remote, **options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise Refused(f"the weights in {path} cannot be loaded: {first_line(error)} Give safetensors of this model.") from error
    hf, info = loaded
    lost = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if lost:
        raise Refused(f"{path} lacks {len(lost)} tensors of its model, first {lost[0]}. Give complete safetensors.")
    if left := sorted(info["unexpected_keys"]):
        log.warning(
            "%s: %d tensors are not of %s and stay as they are, unpublished: %s", path, len(left), type(hf).__name__, left[0]
        )
    hf = hf.to(torch.float32)
    implementation.prepared(hf)
    hf.get_input_embeddings().padding_idx = None  # or the embedding of the token that pads elsewhere would not be trained
    for p in hf.parameters():
        p.requires_grad_(trainable)
    hf.eval()
    if trainable and gradient_checkpointing:
        if not getattr(hf, "supports_gradient_checkpointing", False):
            raise Refused(f"{path}: {type(hf).__name__} of transformers has no gradient checkpointing. Leave it out.")
        implementation.recomputes(hf)
    return hf


def resolve_device(name: str) -> torch.device:
    """auto: cuda when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def export_files(path: str, hf: Any, dtype: torch.dtype, *, is_fp8: bool = False, with_tokenizer: bool = False) -> dict[str, bytes]:
    """What lies beside exported weights: config.json (with their type, and the source's quantisation where they have it) and,
    where the source has them, generation_config.json and, if asked for, tokenizer and chat template."""
    source = Path(path) / "config.json"
    config = json.loads(source.read_text()) if source.is_file() else hf.config.to_dict()
    name = str(dtype).removeprefix("torch.")
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = name
    if not is_fp8:
        config.pop("quantization_config", None)
    files = {"config.json": json.dumps(config, indent=2).encode()}
    for beside in ("generation_config.json", *(TOKENIZER_FILES if with_tokenizer else ())):
        if (extra := Path(path) / beside).is_file():
            files[beside] = extra.read_bytes()
    return files
