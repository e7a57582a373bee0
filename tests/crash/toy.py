"""The toy that the crash tests train: a tiny Qwen3 with random weights from a seed, and arithmetic prompts.

Its responses never stop by themselves, so that every sample has the full length and is under way long enough to be hit. The
one of the task `steps` has a chat template and an end token: it calls tools by chance, and its answers end where they like.
What makes it is loaded when it is made: who only trains it does without torch. `python -m tests.crash.toy DIRECTORY TASK` makes it.
"""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path

from tests.warm.launched import open_warm

SEED = 7
N_PROMPTS = 48


def make_toy(directory: Path, task: str = "arithmetic", *, hidden_size: int = 32) -> Path:
    """`<directory>/model` and `<directory>/prompts.jsonl`; equal on every machine with equal torch."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from miles_async.quickstart.task import EOS_ID, PAD_ID
    from miles_async.quickstart.tasks import TASKS
    from miles_async.quickstart.tokenizer import save_tokenizer

    model_dir, of = directory / "model", TASKS[task]
    model_dir.mkdir(parents=True)
    config = Qwen3Config(
        vocab_size=len(of.vocabulary),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(config)
        # transformers makes this row 0. Samples hold the token, and the norm behind a row of 0 multiplies its gradient by 1,000.
        torch.nn.init.normal_(model.get_input_embeddings().weight.data[PAD_ID], std=config.initializer_range)
    model.save_pretrained(model_dir)
    ends = EOS_ID if of.template else None
    GenerationConfig(pad_token_id=PAD_ID, eos_token_id=ends, do_sample=True, max_length=256).save_pretrained(model_dir)
    save_tokenizer(model_dir, of)
    problems, _ = of.make_problems(SEED, train=N_PROMPTS, held_out=1)
    lines = [json.dumps({"prompt": p.prompt, "label": p.label}) for p in problems]
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def shared_toy(warm: Path, task: str = "arithmetic") -> Path:
    """The toy of all processes that share a warm server, beside its socket: the first that asks has a process make it, forked from
    what loads torch for the trainers of runs, and the others wait."""
    folder = warm.parent
    toy = folder / f"toy-{task}"
    with (folder / "toy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not toy.exists():
            half = folder / "toy.new"
            with open_warm(warm, ["tests.crash.toy", str(half), task], folder / "toy.log") as maker:
                assert maker.wait(100) == 0
            half.rename(toy)
    return toy


if __name__ == "__main__":
    make_toy(Path(sys.argv[1]), sys.argv[2])
