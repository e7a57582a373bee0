"""What the objective costs beside a training step of a 0.5B-shaped model, and how tightly lengths are packed.

    python -m scripts.bench objective                              scaled measurement, a small CPU is enough
    python -m scripts.bench objective --full --device cuda         the whole model, bfloat16, one micro-batch

Scaled: forward and backward of one and of two transformer layers of the Qwen2.5-0.5B shape give the cost per layer
(their difference), times 24; the vocabulary head with log-softmax is measured the same way, on 64 and 128 tokens.
Embedding, prompts, optimizer and gradient reduction are left out, so the model looks cheaper than it is and the
share printed is on the high side. It says nothing about other devices: there, use --full.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from transformers import Qwen2Config, Qwen2Model

from actors.trainer.batch.batching import plan_step
from actors.trainer.batch.packing import lower_bound
from actors.trainer.objective import (
    ObjectiveConfig,
    PreparedBatch,
    TrainSample,
    check,
    finish,
    merge,
    policy_loss,
    prepare_batch,
)
from miles_async.launcher.plan import objective_config
from miles_async.settings.load import settings_from
from tests.objective.reference import strong_lower_bound, token_logprobs

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCAB = 896, 24, 14, 2, 4864, 151_936
SEQUENCE = 512
HEAD_TOKENS = 64
VERSION = 3


def _objective(**fields: object) -> ObjectiveConfig:
    """The objective of a run with these settings, at max_weight_staleness 2."""
    base = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 1, "rm_type": "math"}
    cfg = objective_config(settings_from(**base, max_weight_staleness=2, **fields))
    return msgspec.structs.replace(cfg, max_staleness=2)


CONFIGS = {
    "grpo, clip-higher, TIS": _objective(eps_clip_high=0.28, use_tis=True),
    "gspo, KL loss, MIS + rejection + normalise": _objective(
        advantage_estimator="gspo",
        use_kl_loss=True,
        kl_loss_coef=0.01,
        kl_loss_type="low_var_kl",
        use_mis=True,
        use_rs=True,
    ),
    "reinforce++, KL reward, whitening, decoupled": _objective(
        advantage_estimator="reinforce_plus_plus", kl_coef=0.01, gamma=0.999, use_decoupled_loss=True
    ),
}


def median_s(work: Callable[[], object], repeat: int, device: str = "cpu") -> float:
    """Median wall seconds of `repeat` calls, after one to warm up; waits for the device."""

    def once() -> float:
        begin = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    once()
    return statistics.median(once() for _ in range(repeat))


def shaped_model(layers: int, vocab: int) -> Qwen2Model:
    return Qwen2Model(
        Qwen2Config(
            hidden_size=HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            intermediate_size=FFN,
            vocab_size=vocab,
        )
    )


def layers_s(count: int, repeat: int) -> float:
    """Forward and backward of `count` layers over one sequence of 512 tokens."""
    model = shaped_model(count, 128)
    tokens = torch.randint(0, 128, (1, SEQUENCE))

    def step() -> None:
        model(input_ids=tokens, use_cache=False).last_hidden_state.square().mean().backward()

    return median_s(step, repeat)


def head_s(tokens: int, repeat: int) -> float:
    """Vocabulary projection, log-probs and their backward."""
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCAB, (tokens,))
    return median_s(lambda: token_logprobs(hidden @ weight.T, targets)[0].sum().backward(), repeat)


def scaled_step_s(tokens: int, repeat: int) -> float:
    """Estimated seconds of forward and backward over `tokens` tokens, from the scaled measurement; prints its parts."""
    per_layer = (layers_s(2, repeat) - layers_s(1, repeat)) / SEQUENCE
    head = (head_s(2 * HEAD_TOKENS, repeat) - head_s(HEAD_TOKENS, repeat)) / HEAD_TOKENS
    print(f"model, scaled: {LAYERS} layers x {per_layer * 1e6:.0f} us/token (2 layers minus 1, {SEQUENCE} tokens)")
    print(f"  + head {head * 1e6:.0f} us/token ({2 * HEAD_TOKENS} minus {HEAD_TOKENS} tokens), float32, CPU")
    return tokens * (LAYERS * per_layer + head)


def full_step_s(tokens: int, micro_tokens: int, repeat: int, device: str) -> float:
    """Measured seconds of one micro-batch of the whole model, times the micro-batches `tokens` need."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: torch.nn.Module = shaped_model(LAYERS, VOCAB)
    model.to(device=device, dtype=dtype)
    rows = max(micro_tokens // SEQUENCE, 1)
    ids = torch.randint(0, VOCAB, (rows, SEQUENCE), device=device)
    head = next(p for name, p in model.named_parameters() if name.startswith("embed_tokens"))

    def step() -> None:
        hidden = model(input_ids=ids, use_cache=False).last_hidden_state
        token_logprobs(hidden.flatten(0, 1) @ head.T, ids.flatten())[0].mean().backward()

    seconds = median_s(step, repeat, device)
    print(f"model, measured: {LAYERS} layers and head, {rows * SEQUENCE} tokens in {seconds * 1e3:.1f} ms ({device})")
    return seconds * tokens / (rows * SEQUENCE)


def make_batch(samples: int, tokens: int) -> list[TrainSample]:
    """Groups of 8, log-normal response lengths with mean about `tokens`."""
    rng = np.random.default_rng(0)
    out = []
    for i in range(samples):
        n = int(np.clip(rng.lognormal(np.log(tokens) - 0.125, 0.5), 8, 8 * tokens))
        logp = rng.normal(-1.0, 0.5, n).astype(np.float32)
        near = [(logp + rng.normal(0, 0.02, n)).astype(np.float32) for _ in range(2)]
        spans = [(VERSION - 1, n // 2), (VERSION, n - n // 2)]
        out.append(
            TrainSample(
                sample_id=f"{i // 8}/{i % 8}",
                group=i // 8,
                response_length=n,
                reward=float(rng.integers(0, 2)),
                prompt_length=64,
                rollout_logp=logp,
                old_logp=near[0],
                ref_logp=near[1],
                spans=spans,
            )
        )
    return out


def objective_s(cfg: ObjectiveConfig, samples: list[TrainSample], micro_tokens: int, repeat: int, device: str) -> float:
    """A whole step: plan, prepare, loss and backward (to the log-probs) of every micro-batch, metrics."""
    lengths = [s.response_length + 64 for s in samples]
    new = [torch.as_tensor(s.old_logp) + 0.01 for s in samples]
    inputs: dict[tuple[int, ...], torch.Tensor] = {}

    def step() -> dict[str, float]:
        plan = plan_step(lengths, range(len(samples)), max_tokens_per_gpu=micro_tokens)
        prepared: PreparedBatch = prepare_batch(cfg, samples, current_step=VERSION)
        norm = prepared.norm()
        total: dict[str, torch.Tensor] = {}
        for ids in plan.ranks[0]:
            if ids not in inputs:  # the model's output: not the objective's cost
                inputs[ids] = torch.cat([new[i] for i in ids]).to(device).requires_grad_()
            loss, sums = policy_loss(cfg, prepared.micro_batch(ids, inputs[ids]), norm)
            loss.backward()
            merge(total, sums)
        return finish(total, norm)

    return median_s(step, repeat, device)


def packing_report() -> None:
    print("\npacking of 512 log-normal lengths, worst of 5 batches; bounds: Martello-Toth L2, and token sum with halves")
    names = ("mu", "sigma", "cap", "dp", "tokens/capacity", "of L2 bound", "of simple bound", "plan ms")
    print("".join(f"{name:>16}" for name in names))
    for mu, sigma, cap in ((6.0, 1.0, 2048), (6.5, 0.7, 4096), (7.0, 1.2, 8192), (7.0, 0.3, 16384), (7.0, 0.3, 2048)):
        for dp in (1, 8):
            use, strong, simple, spent = 1.0, 1.0, 1.0, 0.0
            for seed in range(5):
                rng = random.Random(seed)
                lengths = [min(max(1, int(rng.lognormvariate(mu, sigma))), cap) for _ in range(512)]
                begin = time.perf_counter()
                plan = plan_step(lengths, range(512), dp_size=dp, max_tokens_per_gpu=cap)
                spent = max(spent, time.perf_counter() - begin)
                count = sum(len(rank) for rank in plan.ranks)
                use = min(use, sum(lengths) / (count * cap))
                strong = min(strong, strong_lower_bound(lengths, cap, dp) / count)
                simple = min(simple, lower_bound(lengths, cap, dp) / count)
            row = (mu, sigma, cap, dp, f"{use:.3f}", f"{strong:.3f}", f"{simple:.3f}", f"{spent * 1e3:.1f}")
            print("".join(f"{value:>16}" for value in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="mean response length")
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="measure the whole model instead of scaling")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    samples = make_batch(args.samples, args.tokens)
    tokens = sum(s.response_length for s in samples)
    print(f"{args.samples} samples, {tokens} response tokens, {args.threads} thread(s)")
    if args.full:
        model = full_step_s(tokens, args.micro_tokens, args.repeat, args.device)
    else:
        model = scaled_step_s(tokens, args.repeat)
    print(f"  forward and backward of all response tokens: {model:.2f} s")
    for name, cfg in CONFIGS.items():
        cost = objective_s(check(cfg), samples, args.micro_tokens, args.repeat, args.device)
        print(f"objective ({name}): {cost * 1e3:.1f} ms = {100 * cost / model:.3f} % of that")
    packing_report()


if __name__ == "__main__":
    main()
