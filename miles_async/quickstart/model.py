"""A task's model directory: a tiny Qwen3 in Hugging Face form, warm-started from a seed.

Writes one directory (config.json, generation_config.json, model.safetensors, the tokenizer files, quickstart.json);
owns it. Always true: the directory is there completely or not at all, and equal seeds and recipes give equal weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from actors.runtime.seeds import seed_for
from bus.errors import MilesAsyncError
from miles_async.quickstart.task import EOS_ID, PAD_ID, Task
from miles_async.quickstart.tasks import TASKS
from miles_async.quickstart.tokenizer import save_tokenizer
from miles_async.quickstart.warm_start import accuracy, warm_start

RECIPE = 1
"""Number of the recipe in code; raised when a change of code changes the weights."""

STAMP = "quickstart.json"


class ModelDirectoryTaken(MilesAsyncError, FileExistsError):
    """The directory holds something else than the model asked for; it is left as it is."""


def make_model(directory: Path, task: Task, *, seed: int) -> None:
    """Make the model directory of `task`, in float32, unless the same one is already there (then return at once).

    About 30 s on one core for arithmetic. quickstart.json records seed, recipe and the accuracy on development and held-out
    problems. Raises ModelDirectoryTaken when `directory` holds something else and WarmStartFailed when the recipe misses its
    target; both leave nothing behind.
    """
    made_from: dict[str, object] = {"task": task.name, "recipe": RECIPE, "seed": seed}
    made_from |= {"shape": asdict(task.shape), "lessons": json.loads(json.dumps(asdict(task.lessons)))}  # as a stamp has them
    if _is_made(directory, made_from):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        with _one_thread():
            _build(building, made_from, task, seed=seed)
        try:
            building.rename(directory)
        except OSError:
            # Another process finished first, or something else took the name: the stamp tells which.
            if not _is_made(directory, made_from):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build(directory: Path, made_from: dict[str, object], task: Task, *, seed: int) -> None:
    _, held_out = task.shipped()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "warm-start", "init"))
        model = Qwen3ForCausalLM(_config(task, use_cache=False))
    without = frozenset(problem.prompt for problem in held_out)
    development = warm_start(model, task, seed=seed, without=without)
    measured = {
        "development_accuracy": round(development, 4),
        "held_out_accuracy": round(accuracy(model, task, held_out), 4),
    }
    _config(task, use_cache=True).save_pretrained(directory)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": True, "max_length": task.max_tokens}
    GenerationConfig(**generation).save_pretrained(directory)
    weights = directory / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors and mkdtemp make private files; the model is for every user of the machine
    directory.chmod(0o755)
    save_tokenizer(directory, task)
    stamp = json.dumps({"made_from": made_from, **measured}, indent=2) + "\n"
    (directory / STAMP).write_text(stamp, encoding="utf-8")


def _config(task: Task, *, use_cache: bool) -> Qwen3Config:
    shape = task.shape
    return Qwen3Config(
        vocab_size=len(task.vocabulary),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden_size // shape.heads,
        max_position_embeddings=task.max_tokens,
        tie_word_embeddings=False,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        use_cache=use_cache,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )


def _is_made(directory: Path, made_from: dict[str, object]) -> bool:
    """True when this very model is there, False when nothing is. Raises ModelDirectoryTaken for anything else."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    try:
        stamp = json.loads((directory / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stamp = None
    if isinstance(stamp, dict) and stamp.get("made_from") == made_from:
        return True
    raise ModelDirectoryTaken(
        f"model directory {str(directory)!r} holds something else than this model of {made_from['task']} "
        f"(seed {made_from['seed']}, recipe {made_from['recipe']}). Remove it or name another directory."
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums split over another number of threads round differently; one thread gives equal weights on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """`python -m miles_async.quickstart.model DIRECTORY [--task NAME] [--seed S]`: make it and print its accuracy."""
    parser = argparse.ArgumentParser(description="Make and warm-start a task's tiny Qwen3.")
    parser.add_argument("directory", type=Path, help="where to write it; kept when it is already there")
    parser.add_argument("--task", choices=list(TASKS), default="arithmetic", help="what it learns (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="integer; equal seeds give equal weights (default 0)")
    arguments = parser.parse_args()
    try:
        make_model(arguments.directory, TASKS[arguments.task], seed=arguments.seed)
    except MilesAsyncError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    stamp = json.loads((arguments.directory / STAMP).read_text(encoding="utf-8"))
    print(f"{arguments.directory}: held-out accuracy {stamp['held_out_accuracy']:.1%}")


if __name__ == "__main__":
    main()
