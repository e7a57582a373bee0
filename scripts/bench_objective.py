"""What the objective costs beside a training step of a 0.5B-shaped model, and how tightly lengths are packed.

    python scripts/bench_objective.py [--samples 128] [--tokens 256] [--threads 1]

The model step is measured scaled down, because 24 layers do not fit a small machine's patience: forward and
backward of one and of two transformer layers of the Qwen2.5-0.5B shape give the cost per layer (their difference),
times 24; the vocabulary head with log-softmax is measured on 64 tokens and scaled; embedding, optimizer and
gradient reduction are left out. All of that makes the model look cheaper, so the share printed is an upper bound.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2Model

from actors.trainer.batching import plan_batches
from actors.trainer.objective import (
    ObjectiveConfig,
    PreparedBatch,
    TrainSample,
    check,
    finish,
    merge,
    policy_loss,
    prepare_batch,
    token_logprobs,
)
from actors.trainer.packing import lower_bound, strong_lower_bound

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCAB = 896, 24, 14, 2, 4864, 151_936
SEQUENCE = 512
HEAD_TOKENS = 64
VERSION = 3

CONFIGS = {
    "grpo, clip-higher, TIS": ObjectiveConfig(eps_clip_high=0.28, correction="tis", max_staleness=2),
    "gspo, KL loss, MIS + rejection + normalise": ObjectiveConfig(
        advantage_estimator="gspo",
        use_kl_loss=True,
        kl_loss_coef=0.01,
        kl_loss_type="low_var_kl",
        correction="mis",
        use_rs=True,
        rs_veto_threshold=1e-4,
        tis_batch_normalize=True,
        max_staleness=2,
    ),
    "reinforce++, KL reward, whitening, decoupled": ObjectiveConfig(
        advantage_estimator="reinforce_plus_plus", kl_coef=0.01, gamma=0.999, correction="decoupled", max_staleness=2
    ),
}


def median_s(work: Callable[[], object], repeat: int) -> float:
    """Median wall seconds of `repeat` calls, after one to warm up."""
    work()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def layers_s(count: int, repeat: int) -> float:
    """Forward and backward of `count` layers over one sequence of 512 tokens."""
    config = Qwen2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=count,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=FFN,
        vocab_size=128,
    )
    model = Qwen2Model(config)
    tokens = torch.randint(0, 128, (1, SEQUENCE))

    def step() -> None:
        model(input_ids=tokens, use_cache=False).last_hidden_state.square().mean().backward()

    return median_s(step, repeat)


def head_s(repeat: int) -> float:
    """Vocabulary projection, log-probs and their backward over 64 tokens."""
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    hidden = torch.randn(HEAD_TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCAB, (HEAD_TOKENS,))
    return median_s(lambda: token_logprobs(hidden @ weight.T, targets)[0].sum().backward(), repeat)


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


def objective_s(cfg: ObjectiveConfig, samples: list[TrainSample], micro_tokens: int, repeat: int) -> float:
    """A whole step: plan, prepare, loss and backward (to the log-probs) of every micro-batch, metrics."""
    lengths = [s.response_length + 64 for s in samples]
    new = [torch.as_tensor(s.old_logp) + 0.01 for s in samples]
    inputs: dict[tuple[int, ...], torch.Tensor] = {}

    def step() -> dict[str, float]:
        plan = plan_batches(
            lengths, range(len(samples)), global_batch_size=len(samples), max_tokens_per_gpu=micro_tokens
        )
        prepared: PreparedBatch = prepare_batch(cfg, samples, current_version=VERSION)
        norm = prepared.norm()
        total: dict[str, torch.Tensor] = {}
        for ids in plan.steps[0].ranks[0]:
            if ids not in inputs:  # the model's output: not the objective's cost
                inputs[ids] = torch.cat([new[i] for i in ids]).requires_grad_()
            loss, sums = policy_loss(cfg, prepared.micro_batch(ids, inputs[ids]), norm)
            loss.backward()
            merge(total, sums)
        return finish(total, norm)

    return median_s(step, repeat)


def packing_report() -> None:
    print(
        "\npacking, 512 log-normal lengths, worst of 5 batches (bound: Martello-Toth L2; simple: token sum and halves)"
    )
    print(
        f"{'mu':>5} {'sigma':>5} {'cap':>6} {'dp':>3} {'tokens/capacity':>16} {'of bound':>9} {'of simple':>10} {'plan ms':>8}"
    )
    for mu, sigma, cap in ((6.0, 1.0, 2048), (6.5, 0.7, 4096), (7.0, 1.2, 8192), (7.0, 0.3, 16384), (7.0, 0.3, 2048)):
        for dp in (1, 8):
            use, strong, simple, spent = 1.0, 1.0, 1.0, 0.0
            for seed in range(5):
                rng = random.Random(seed)
                lengths = [min(max(1, int(rng.lognormvariate(mu, sigma))), cap) for _ in range(512)]
                begin = time.perf_counter()
                plan = plan_batches(lengths, range(512), global_batch_size=512, dp_size=dp, max_tokens_per_gpu=cap)
                spent = max(spent, time.perf_counter() - begin)
                count = sum(len(rank) for rank in plan.steps[0].ranks)
                use = min(use, sum(lengths) / (count * cap))
                strong = min(strong, strong_lower_bound(lengths, cap, dp) / count)
                simple = min(simple, lower_bound(lengths, cap, dp) / count)
            print(f"{mu:5} {sigma:5} {cap:6} {dp:3} {use:16.3f} {strong:9.3f} {simple:10.3f} {spent * 1e3:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="mean response length")
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    samples = make_batch(args.samples, args.tokens)
    tokens = sum(s.response_length for s in samples)
    one, two = layers_s(1, args.repeat), layers_s(2, args.repeat)
    per_layer = (two - one) / SEQUENCE
    head = head_s(args.repeat) / HEAD_TOKENS
    model = tokens * (LAYERS * per_layer + head)
    print(
        f"model step of 0.5B shape, scaled: {LAYERS} layers x {per_layer * 1e6:.0f} us/token/layer (measured: 2 layers"
    )
    print(
        f"minus 1, {SEQUENCE} tokens) + head {head * 1e6:.0f} us/token (measured on {HEAD_TOKENS} tokens), {args.threads} thread(s),"
    )
    print(f"float32 CPU; no embedding, optimizer or prompts: {model:.1f} s for {tokens} response tokens")
    for name, cfg in CONFIGS.items():
        cost = objective_s(check(cfg), samples, args.micro_tokens, args.repeat)
        print(f"objective ({name}): {cost * 1e3:.1f} ms = {100 * cost / model:.3f} % of the scaled model step")
    packing_report()


if __name__ == "__main__":
    main()
