"""The Megatron backend on one GPU: speed against a bare megatron-core loop, losses against the torch backend, a resumed run.

    python -m scripts.bench gpu_megatron --out DIR [--cases tiny,speed-0.6b,...] [--models DIR] [--budget-s 340]

Each case is a process of its own and writes DIR/CASE.json as soon as it has a number; DIR/megatron.json holds all that are there.
Weights are random, of real shapes. Needs no network. Without a GPU `--cases tiny` rehearses it.

The picture of two losses: `--cases record,curve-megatron,curve-torch --curve-shape recorded` runs the quickstart for 50 steps with
`--save-debug-rollout-data` (on the CPU, two minutes) and trains both backends on those batches from the quickstart's own model.
DIR/curves.json holds both losses step by step and their differences. Batches of another run: `--batches PATTERN --curve-model DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.bench import REPO

CASES = ("tiny", "resume", "speed-0.6b", "curve-megatron", "curve-torch", "speed-4b")
"""`speed-0.6b-full` is the same with full recomputation; `export-0.6b` the memory of an export,
`paired-0.6b` the speed of both by turns."""
DEADLINE_S = {"speed-4b": 150, "record": 240}
PEAK_FLOPS = 989e12  # an H200's, bf16, dense
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
         "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": True}  # fmt: skip


def config(model: Path, *, megatron: bool, **settings: Any) -> Any:
    """Start-up settings of a backend."""
    import torch

    from scripts.bench.declared import backend_of, megatron_of, objective_of

    own = {"own": megatron_of(**settings.pop("own", {}))} if megatron else {}
    plain = {"lr": 1e-5, "model_dtype": "bfloat16" if torch.cuda.is_available() else "float32", "weight_decay": 0.1,
             "max_tokens_per_gpu": 8192, "log_probs_max_tokens_per_gpu": 8192, "trainer_threads": 4}  # fmt: skip
    objective = objective_of(correction="none", **settings.pop("objective", {}))
    return backend_of(hf_checkpoint=str(model), objective=objective, **plain | settings | own)


def batch(step: int, vocab: int, *, samples: int, tokens: int) -> Any:
    """`samples` of about `tokens` tokens, a prompt of 64 in each; the same for every backend."""
    import numpy as np

    from actors.trainer.backend import BatchSample, StepBatch
    from actors.trainer.objective import TrainSample

    rng = np.random.default_rng(step)
    made = []
    for k in range(samples):
        n = int(rng.integers(tokens // 2, tokens - 64)) if k % 2 else tokens - 64
        train = TrainSample(sample_id=f"g{k // 4}/{k % 4}", group=f"g{k // 4}", response_length=n, reward=float(rng.random()),
                            prompt_length=64, loss_mask=None, spans=[(step, n)],
                            rollout_logp=np.full(n, -float(np.log(vocab)), np.float32))  # fmt: skip
        draw = [rng.integers(0, vocab, size).astype(np.int32) for size in (64, n)]
        made.append(BatchSample(draw[0], draw[1], 1.0, train))
    return StepBatch(made, step=step, seed=step)


def core_of(model: Path, *, megatron: bool = True, **settings: Any) -> Any:
    from actors.trainer.training.ranked import core_of
    from actors.trainer.training.ranks import Ranks

    return core_of("megatron" if megatron else "torch")(config(model, megatron=megatron, **settings), Ranks())


def model_of(models: Path, shape: str) -> Path:
    from scripts.bench import gpu_parts as parts

    parts.SHAPES["small"] = SMALL
    return parts.make_model(models, shape, 0)


def timed(run: Callable[[], Any], *, warm: int, times: int) -> float:
    """Seconds of one call: the median of `times` after `warm`."""
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    seconds = []
    for k in range(warm + times):
        wait()
        began = time.monotonic()
        run()
        wait()
        if k >= warm:
            seconds.append(time.monotonic() - began)
    return sorted(seconds)[len(seconds) // 2]


def tiny(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Three steps of both backends."""
    from actors.trainer.training.step import train_batch

    model = model_of(args.models, "small")
    for megatron in (True, False):
        core = core_of(model, megatron=megatron)
        losses = [train_batch(core, batch(step, 1024, samples=8, tokens=256)).metrics for step in range(3)]
        yield {("megatron" if megatron else "torch"): [[m["train/loss"], m["train/grad_norm"]] for m in losses]}
        core.close()


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of megatron-core that --set names."""
    return {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in args.set)}


def resume(args: argparse.Namespace, model: Path, vocab: int) -> Iterator[dict[str, Any]]:
    """Four steps are two, saved, loaded, and two more; and are the same four again, or kernels do not repeat themselves."""
    from actors.trainer.training.ranked import RankedBackend

    backend = RankedBackend("megatron")

    def steps(*numbers: int) -> list[float]:
        return [backend.train_step(batch(s, vocab, samples=8, tokens=256)).metrics["train/loss"] for s in numbers]

    settings = {"lr": 1e-4, "own": {"megatron": given(args)}}
    backend.setup(config(model, megatron=True, **settings))
    first = steps(0, 1)
    directory = args.out / f"checkpoint-{os.getpid()}"
    directory.mkdir()
    began = time.monotonic()
    saved = backend.save(directory)
    copied = time.monotonic()
    saved.write()
    saved.finish()
    yield {"copy_s": copied - began, "write_s": time.monotonic() - copied}
    whole, end = first + steps(2, 3), backend.weights_hash()
    backend.setup(config(model, megatron=True, **settings))
    same = steps(0, 1, 2, 3) == whole, backend.weights_hash() == end
    yield {"repeated_from_the_start": dict(zip(("same_losses", "same_weights"), same, strict=True))}
    backend.setup(config(model, megatron=True, **settings))
    backend.load(directory)
    again, end_again = steps(2, 3), backend.weights_hash()
    yield {"losses": whole, "resumed": again, "same_losses": again == whole[2:], "same_weights": end == end_again}
    backend.sleep()
    backend.wake()
    yield {"same_after_sleep": backend.weights_hash() == end_again}


def export(args: argparse.Namespace, shape: str) -> Iterator[dict[str, Any]]:
    """The most that an export adds to the memory of the GPU, beside the weights that it sends and one bucket."""
    import torch

    from actors.trainer.transports.flat import bucketed

    core = core_of(model_of(args.models, shape))
    limit = 512 << 20
    for turn in ("first", "second"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        sent = 0
        for bucket in bucketed(core.export(), limit):
            sent += sum(t.numel() * t.element_size() for _, t in bucket)
            bucket.clear()
        added = torch.cuda.max_memory_allocated() - before
        yield {turn: {"weights_bytes": sent, "bucket_bytes": limit, "added_bytes": added,
                      "of_weights_and_bucket": (sent + added) / (sent + limit)}}  # fmt: skip
    core.close()


def record(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The quickstart's first steps, its batches kept as files."""
    words = ["train", str(REPO / "configs" / "quickstart.toml"), "--num-rollout", str(args.steps),
             "--runs-dir", str(args.out / "runs"), "--save-debug-rollout-data", args.batches,
             "--no-save", "--console", "none", "--no-report"]  # fmt: skip
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", "miles_async", *words], cwd=REPO, env=hidden, check=True)
    yield {"batches": args.batches, "steps": args.steps}


def curve(args: argparse.Namespace, *, megatron: bool) -> Iterator[dict[str, Any]]:
    """Losses of the same batches: random ones of 0.6B's shape, or a run's recorded ones."""
    from actors.trainer.record import path_of, read_record
    from actors.trainer.replay import batch_of
    from actors.trainer.training.step import train_batch

    recorded = args.curve_shape == "recorded"
    # Two updates a batch and an entropy term: on-policy losses alone are sums of advantages, 0 whatever the model says.
    settings = {"num_steps_per_rollout": 2, "objective": {"entropy_coef": 0.01}, **({"lr": 2e-4} if recorded else {})}
    core = core_of(args.curve_model if recorded else model_of(args.models, args.curve_shape), megatron=megatron, **settings)
    vocab = SMALL["vocab_size"] if args.curve_shape == "small" else 151936
    rows: list[list[float]] = []
    for step in range(args.steps):
        one = batch_of(read_record(path_of(args.batches, step + 1))) if recorded else batch(step, vocab, samples=16, tokens=512)
        m = train_batch(core, one).metrics
        rows.append([m["train/loss"], m["train/grad_norm"], m["train/entropy_loss"], m["train/step_s"]])
        if step % 5 == 4 or step + 1 == args.steps:
            yield {"loss_norm_entropy_seconds": rows}


def both_curves(out: Path) -> None:
    """Of two finished curves: their losses and gradient norms side by side, and how far they are apart."""
    try:
        found = {name: json.loads((out / f"curve-{name}.json").read_text()) for name in ("megatron", "torch")}
        rows = {name: one["loss_norm_entropy_seconds"] for name, one in found.items()}
    except (OSError, KeyError, ValueError):
        return
    said: dict[str, Any] = {}
    for column, name in enumerate(("loss", "grad_norm", "entropy")):
        both = {backend: [row[column] for row in of] for backend, of in rows.items()}
        apart = [abs(a - b) for a, b in zip(both["megatron"], both["torch"], strict=False)]
        scale = max(abs(x) for x in both["torch"])
        said[name] = {**both, "largest_difference": max(apart), "relative_to_the_largest": max(apart) / scale if scale else 0.0}
    (out / "curves.json").write_text(json.dumps(said, indent=1))


def speed(args: argparse.Namespace, shape: str, *, full: bool = False) -> Iterator[dict[str, Any]]:
    """Tokens/s, MFU and peak memory of a training step and of a forward pass: through the backend, and of a bare loop over the same
    micro-batches, chunks and optimizer with megatron-core's own loss over whole logits."""
    import torch

    from actors.trainer.training.step import _planned, train_batch

    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if full else {}
    core = core_of(model_of(args.models, shape), own={"megatron": recompute | given(args)})
    vocab = core.model.vocab
    one = batch(0, vocab, samples=64, tokens=512)
    lengths = [(len(s.prompt_tokens) + len(s.response_tokens), len(s.response_tokens)) for s in one.samples]
    tokens, work = sum(n for n, _ in lengths), sum(core.cost(n, r) for n, r in lengths)
    packed = core.pack(one.samples)
    _, planned = _planned(core, core.config, packed, [s.train.trajectory for s in one.samples])
    yield {"shape": shape, "tokens": tokens, "padded_tokens": sum(m.tokens for _, m in planned[0]),
           "micro_batches": len(planned[0]), "gpu": torch.cuda.get_device_name(), "full_recomputation": full}  # fmt: skip

    def numbers(seconds: float, passes: int) -> dict[str, float]:
        found = {"seconds": seconds, "tokens_per_s": tokens / seconds, "mfu": 2 * passes * work / seconds / PEAK_FLOPS,
                 "peak_gib": torch.cuda.max_memory_allocated() / 2**30}  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        return found

    phases: dict[str, float] = {}

    def step() -> None:
        phases.update({n: v for n, v in train_batch(core, one).metrics.items() if n.endswith("_s")})

    yield {"step": numbers(timed(step, warm=3, times=5), 3), "phases": phases}
    yield {"forward": numbers(timed(lambda: core.score("old_logp", packed, planned), warm=1, times=5), 1)}
    bare = Bare(core, planned[0])
    yield {"bare_step": numbers(timed(bare.step, warm=3, times=5), 3)}
    yield {"bare_forward": numbers(timed(bare.forward, warm=1, times=5), 1)}


def paired(args: argparse.Namespace, shape: str) -> Iterator[dict[str, Any]]:
    """Our step and a bare one by turns, ours and bare passes by turns, in one process: what the processors of a shared machine do
    meanwhile meets both. Needs room for two models."""
    from actors.trainer.training.step import _planned, train_batch

    ours, other = (core_of(model_of(args.models, shape), own={"megatron": given(args)}) for _ in range(2))
    one = batch(0, ours.model.vocab, samples=64, tokens=512)
    packed = ours.pack(one.samples)
    _, planned = _planned(ours, ours.config, packed, [s.train.trajectory for s in one.samples])
    bare = Bare(other, planned[0])
    runs = {"step": lambda: train_batch(ours, one), "bare_step": bare.step,
            "forward": lambda: ours.score("old_logp", packed, planned), "bare_forward": bare.forward}  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(12):
        for name, run in runs.items():
            took = timed(run, warm=0, times=1)
            if turn >= 3:
                seconds[name].append(took)
    for name in ("step", "forward"):
        shares = sorted(b / a for a, b in zip(seconds[name], seconds[f"bare_{name}"], strict=True))
        yield {f"{name}_of_bare": shares[len(shares) // 2], f"{name}_turns": shares}
    yield {"seconds": seconds}
    phases = [{n: v for n, v in train_batch(ours, one).metrics.items() if n.endswith("_s")} for _ in range(3)]
    yield {"phases": phases}


class Bare:
    """A loop as Megatron's users write it, over a core's chunks: labels in, losses of whole logits out."""

    def __init__(self, core: Any, work: Any) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.core, self.run = core, get_forward_backward_func()
        self.feed = []
        for _, micro in work:
            labels, mask = micro.input_ids.roll(-1, 1), micro.input_ids.new_zeros(micro.input_ids.shape).float()
            mask[0, micro.rows] = 1.0
            self.feed.append((micro, labels, mask))
        for chunk in core.model.bare:
            del chunk.output_layer.__dict__["forward"]  # the layer's own again
            chunk.config.finalize_model_grads_func = lambda model, n, **kw: finalize_model_grads(model, None, **kw)

    def _forward(self, feed: Any, chunk: Any) -> Any:
        micro, labels, mask = next(feed)
        out = chunk(input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=None, labels=labels,
                    packed_seq_params=micro.packed)  # fmt: skip
        return out, lambda losses, **_: ((losses.float() * mask).sum() / mask.sum(), mask.sum().int(), {})

    def _pass(self, *, forward_only: bool) -> None:
        self.run(forward_step_func=self._forward, data_iterator=[iter(self.feed)], model=self.core.model.chunks,
                 num_microbatches=len(self.feed), seq_length=8192, micro_batch_size=1, forward_only=forward_only)  # fmt: skip

    def step(self) -> None:
        update = self.core.update
        update.clear()
        self._pass(forward_only=False)
        update.optimizer.step()

    def forward(self) -> None:
        import torch

        with torch.no_grad():
            self._pass(forward_only=True)


def one_case(args: argparse.Namespace, case: str) -> None:
    """In this process; what it has found is in its file after each number."""
    kind, _, rest = case.partition("-")
    run: dict[str, Callable[[], Iterator[dict[str, Any]]]]
    run = {"tiny": lambda: tiny(args), "record": lambda: record(args),
           "resume": lambda: resume(args, model_of(args.models, "small"), SMALL["vocab_size"]),
           "paired": lambda: paired(args, rest),
           "export": lambda: export(args, rest),
           "curve": lambda: curve(args, megatron=rest == "megatron"),
           "speed": lambda: speed(args, rest.removesuffix("-full"), full=rest.endswith("-full"))}  # fmt: skip
    keep(args.out / f"{case}.json", case, run[kind]())


def keep(file: Path, case: str, values: Iterator[dict[str, Any]]) -> None:
    """Writes what a case has found after each number, and how it failed."""
    found: dict[str, Any] = {"case": case, "done": False}
    began = time.monotonic()
    try:
        for more in values:
            found |= more
            file.write_text(json.dumps(found, indent=1))
            print(case, json.dumps(more)[:700], flush=True)
        found["done"] = True
    except BaseException as error:
        found["too_large"] = type(error).__name__ in ("NoRoom", "OutOfMemoryError")
        found["error"] = traceback.format_exc()[-4000:]
        raise
    finally:
        found["case_s"] = time.monotonic() - began
        file.write_text(json.dumps(found, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/megatron-models"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case", default="")
    parser.add_argument("--set", action="append", default=[], help="of resume and speed: a field of megatron-core, as NAME=JSON")
    parser.add_argument("--curve-shape", default="0.6b", help="0.6b, small, or recorded")
    parser.add_argument("--batches", default="", help="recorded batches, with {rollout_id} (default: those of the case record)")
    parser.add_argument("--curve-model", type=Path, help="the model that made them (default: likewise)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--budget-s", type=float, default=340)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.batches = args.batches or str(args.out / "batches" / "{rollout_id}.msgpack")
    args.curve_model = args.curve_model or args.out / "runs" / ".models" / "arithmetic-seed1234"
    args.out.mkdir(parents=True, exist_ok=True)
    args.models.mkdir(parents=True, exist_ok=True)
    if args.case:
        one_case(args, args.case)
        return 0
    end, codes = time.monotonic() + args.budget_s, {}
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for case in args.cases.split(","):
        left = end - time.monotonic()
        if left < 20:
            print(f"{case}: left out, {left:.0f} s of the budget are left", flush=True)
            continue
        command = [sys.executable, "-m", "scripts.bench.gpu_megatron", "--case", case,
                   "--out", str(args.out), "--models", str(args.models),
                   "--steps", str(args.steps), "--batches", args.batches, "--curve-model", str(args.curve_model),
                   "--curve-shape", args.curve_shape, *(f"--set={pair}" for pair in args.set)]  # fmt: skip
        try:
            codes[case] = subprocess.run(command, timeout=min(left, DEADLINE_S.get(case, 100)), env=environment).returncode
        except subprocess.TimeoutExpired:
            codes[case] = "timeout"
        files = [args.out / f"{name}.json" for name in args.cases.split(",")]
        every = {f.stem: json.loads(f.read_text()) for f in files if f.exists()}
        (args.out / "megatron.json").write_text(json.dumps({"exit": codes, **every}, indent=1))
        both_curves(args.out)
    print(json.dumps(codes), flush=True)
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
