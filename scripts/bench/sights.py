"""A tiny model that reads pictures, its tokenizer and processor on disk, and coloured squares with the question which colour."""

from __future__ import annotations

import base64
import io
import json
import warnings
from pathlib import Path
from typing import Any

COLOURS = {"red": (230, 20, 20), "green": (20, 200, 40), "blue": (30, 40, 230), "white": (240, 240, 240)}
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = (*SPECIAL, *COLOURS, "user\n", "assistant\n", " which", " colour", " and", "?", "\n")
EOS, IMAGE = WORDS.index("<|im_end|>"), WORDS.index("<|image_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)


def make_model(path: Path, *, family: str = "qwen2_vl", seed: int = 0, weights: bool = True) -> None:
    """Save a random model of the family with all that belongs to it, or all but its weights."""
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # of 16: kernels of GPUs want as much
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 14, "temporal_patch_size": 2}
    vision |= {"spatial_merge_size": 2, "in_chans": 3}  # the last as published files have it, and SGLang asks for it
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48}
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    ids = {f"{kind}_token_id": WORDS.index(f"<|{kind}_pad|>") for kind in ("image", "video")}
    ids |= {f"vision_{end}_token_id": WORDS.index(f"<|vision_{end}|>") for end in ("start", "end")}
    if weights:
        _save_weights(path, family, seed, text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    else:
        (path / "config.json").write_text(json.dumps({"model_type": family, "text_config": text, "vision_config": vision, **ids}))
    _save_words(path)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16},
        **{name: vision[name] for name in ("patch_size", "temporal_patch_size")},
        "merge_size": 2,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))


def _save_weights(path: Path, family: str, seed: int, **shape: Any) -> None:
    import torch
    import transformers

    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**shape)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p)) if p.ndim == 1 else p.normal_(0.0, 0.15)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)


def _save_words(path: Path) -> None:
    """A tokenizer whose text gives the same ids again."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<pad>"}))


def square(colour: str, width: int = 56, height: int = 56) -> bytes:
    """A PNG."""
    from PIL import Image

    body = io.BytesIO()
    Image.new("RGB", (width, height), COLOURS[colour]).save(body, "PNG")
    return body.getvalue()


def data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def write_rows(path: Path, n: int = 16) -> None:
    """JSONL: a path, a data URL or base64 in turn."""
    lines = []
    for i in range(n):
        colour = list(COLOURS)[i % len(COLOURS)]
        picture = square(colour, 56 * (1 + i % 2), 56)
        (path.parent / f"{colour}{i}.png").write_bytes(picture)
        shown = (f"{colour}{i}.png", data_url(picture), [base64.b64encode(picture).decode()])[i % 3]
        lines.append(json.dumps({"input": "<image> which colour?", "images": shown, "label": colour}))
    path.write_text("\n".join(lines) + "\n")
