"""The policy as one module: packed tokens in, log-probs of the response tokens out.

Owns nothing but the transformers model inside. Nothing from a model directory is executed or unpickled: safetensors only,
no remote code. A directory that lacks a tensor of the model is refused, never filled with random numbers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from actors.runtime.run import Refused
from actors.runtime.vision import FAMILIES as SIGHTED
from actors.runtime.vision import family_of
from actors.trainer.torch_backend import attention, experts, fp8
from actors.trainer.torch_backend.head import token_head
from actors.trainer.torch_backend.layout import MicroBatch
from actors.trainer.torch_backend.shards import TorchShards
from actors.trainer.training.export import TOKENIZER_FILES
from actors.trainer.training.state import MODEL, write_whole

log = logging.getLogger(__name__)
FAMILIES = ("llama", "qwen2", "qwen3", *experts.FAMILIES, *SIGHTED)
RECOMPUTED: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a layer is random


class Policy(nn.Module):
    """A causal language model that answers with log-probs. Parameters keep their Hugging Face names under `hf.`. What a policy with
    adapters does otherwise (trainer/lora) stands in the verbs below `named_weights`."""

    file = MODEL
    """of a checkpoint, with `named_weights`"""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, batch: MicroBatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the R response tokens, float32 [R]; entropies carry gradient only if asked to."""
        out = self._decoded(batch)
        # Only rows that predict a response token meet the vocabulary.
        hidden = out.last_hidden_state[0].index_select(0, batch.rows)
        weight = self.hf.lm_head.weight
        return token_head(hidden, weight, batch.targets, batch.temperature, entropy_gradient=entropy_gradient)

    def _decoded(self, batch: MicroBatch) -> Any:
        return self.hf.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, layout=batch.layout)

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return list(self.hf.model.layers)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """What is trained: parameters under their Hugging Face names, tied ones once."""
        return dict(self.hf.named_parameters())

    def served(self, shards: TorchShards, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | None]]:
        """The weights as engines serve them, whole and where they are; None on other ranks than 0. Every rank must take all."""
        for name, p in self.named_weights().items():
            yield name, shards.whole(p, dtype, live=True)

    def base(self) -> nn.Module | None:
        """The reference that these weights themselves are, if any."""
        return None

    def beside(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """Small files of a checkpoint, of those of its whole model."""
        return files

    def write_weights(self, directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """The whole model of a checkpoint's `tensors`, as Hugging Face has it. Raises OSError."""
        write_whole(directory, tensors, dtype)

    def other_adapters(self, directory: Path) -> str:
        """How a checkpoint's adapters differ in what shapes do not tell; empty: they do not."""
        return ""


class SightedPolicy(Policy):
    """One that reads pictures: a vision tower's outputs stand in for their tokens' embeddings."""

    def _decoded(self, batch: MicroBatch) -> Any:
        inner, sight = self.hf.model, batch.sight
        assert sight is not None
        x = inner.get_input_embeddings()(batch.input_ids)
        seen = inner.visual(sight.pixels.to(x.dtype), grid_thw=sight.grids).pooler_output
        # Without a picture one of nothing is looked at and not shown: each rank's gradients have the same parts.
        x = x + 0 * seen.sum() if sight.at is None else x.index_copy(1, sight.at, seen[sight.of].to(x.dtype)[None])
        return inner.language_model(inputs_embeds=x, position_ids=sight.positions, use_cache=False, layout=batch.layout)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.hf.model.language_model.layers)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """By the names of the families' published files, which engines know."""
        ours = {"model.language_model.": "model.", "model.visual.": "visual."}
        found = {}
        for name, p in self.hf.named_parameters():
            head = next((head for head in ours if name.startswith(head)), "")
            found[ours.get(head, "") + name.removeprefix(head)] = p
        return found


def load_policy(path: str, *, trainable: bool, gradient_checkpointing: bool = False) -> Policy:
    """The model of a Hugging Face directory in float32 on the CPU. Raises Refused, in one line, when it cannot be trained."""
    if family_of(path):
        return SightedPolicy(_load(path, AutoModelForImageTextToText, trainable, gradient_checkpointing))
    return Policy(_load(path, AutoModelForCausalLM, trainable, gradient_checkpointing))


def load_backbone(path: str, *, gradient_checkpointing: bool = False) -> Any:
    """The same model without a head over the vocabulary, trainable: hidden states out. Raises Refused."""
    return _load(path, AutoModel, True, gradient_checkpointing)


def _load(path: str, kind: Any, trainable: bool, gradient_checkpointing: bool) -> Any:
    attention.register()
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise Refused(f"{path} is not a model directory: {_first_line(error)} Give hf_checkpoint a local directory.") from error
    check_family(path, config)
    source: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if (scheme := fp8.scheme_of(path)) is not None:
        log.warning("%s is FP8: the master weights begin as its values; --ref-load DIR gives finer ones", path)
        del config.quantization_config
        with torch.device("meta"):
            kind = type(kind.from_config(config))
        source = {"pretrained_model_name_or_path": None, "state_dict": fp8.dequantized(Path(path), scheme)}
    kernel: Any = {"text_config": attention.PACKED, "vision_config": "sdpa"} if family_of(path) else attention.PACKED
    options = {"attn_implementation": kernel, "use_safetensors": True, "output_loading_info": True}
    try:
        loaded: Any = kind.from_pretrained(**source, config=config, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(f"the weights in {path} cannot be loaded: {_first_line(error)} Give safetensors of this model.") from error
    hf, info = loaded
    lost = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if lost:
        raise Refused(f"{path} lacks {len(lost)} tensors of its model, first {lost[0]}. Give complete safetensors.")
    hf = hf.to(torch.float32)
    experts.prepare(hf)
    hf.get_input_embeddings().padding_idx = None  # or the embedding of the token that pads elsewhere would not be trained
    for p in hf.parameters():
        p.requires_grad_(trainable)
    if trainable and gradient_checkpointing:
        hf.gradient_checkpointing_enable(RECOMPUTED)
        hf.train()
    else:
        hf.eval()
    return hf


def check_family(path: str, config: Any) -> None:
    """Refuse by name what the packed forward does not implement."""
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise Refused(f"{path}: model_type {family!r} is not trained here. Use one of {', '.join(FAMILIES)}.")
    if "sliding_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        raise Refused(f"{path}: sliding-window attention is not trained here. Set use_sliding_window=false in config.json.")


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


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text if text.endswith(".") else f"{text}."
