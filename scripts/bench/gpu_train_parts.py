"""What the cases of gpu_train.py and gpu_numbers.py share: batches, a backend, the clock."""

from __future__ import annotations

import time
from typing import Any

TOKENS = 16_384
EQUAL, VARIED = "equal", "varied"


def batch_of(case: dict[str, Any], kind: str, seed: int, vocab: int, parts: int = 4) -> Any:
    """About `parts` micro-batches of samples: 64 prompt tokens each, 448 response tokens, or geometric ones of mean 650 cut at
    2,048."""
    import numpy as np

    from actors.trainer.backend import BatchSample, StepBatch
    from actors.trainer.objective.samples import TrainSample

    rng = np.random.default_rng(seed)
    scale = case["tokens"] / TOKENS
    prompt_n, mean, cut = max(2, int(64 * scale)), max(2, int(650 * scale)), max(4, int(2048 * scale))
    samples: list[Any] = []
    total = 0
    while total < parts * case["tokens"]:
        n = max(2, int(448 * scale)) if kind == EQUAL else int(min(cut, 1 + rng.geometric(1 / mean)))
        train = TrainSample(
            sample_id=f"{len(samples) // 8}/{len(samples) % 8}", group=len(samples) // 8, response_length=n,
            reward=float(rng.random()), prompt_length=prompt_n, loss_mask=np.ones(n, np.uint8),
            rollout_logp=np.full(n, -np.log(vocab), np.float32), spans=[(0, n)],
        )  # fmt: skip
        tokens = rng.integers(10, vocab, prompt_n + n).astype(np.int32)
        samples.append(BatchSample(tokens[:prompt_n], tokens[prompt_n:], 1.0, train))
        total += prompt_n + n
    if kind == VARIED:
        samples = samples[:-1]
    return StepBatch(samples, step=0, seed=seed)


def backend_for(case: dict[str, Any], **more: Any) -> Any:
    """A backend after setup, by the code that is on the path."""
    from actors.trainer import backend
    from actors.trainer.torch_backend import TorchBackend
    from scripts.bench.declared import backend_of, objective_of

    chosen = {
        "device": case["device"], "model_dtype": "bfloat16" if case["device"] == "cuda" else "float32",
        "compile": "auto", "attn_implementation": "auto", "max_tokens_per_gpu": case["tokens"], "lr": 1e-6, "seed": 1,
    } | case.get("settings", {}) | more  # fmt: skip
    known = {*backend.BackendConfig.__struct_fields__, *getattr(backend, "TorchConfig", backend.BackendConfig).__struct_fields__}
    config = backend_of(
        hf_checkpoint=case["model"],
        objective=objective_of(eps_clip_high=0.28, correction="tis"),
        **{name: value for name, value in chosen.items() if name in known},
    )
    made = TorchBackend()
    made.setup(config)
    return made


def clocked(device: str) -> float:
    """Seconds, when the device is done."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def planned(core: Any, batch: Any) -> tuple[Any, list[Any]]:
    """A batch as one step's micro-batches."""
    from actors.trainer.batch.plan import plan_steps

    packed = core.pack(batch.samples)
    plan = plan_steps(
        core.config, packed.total.tolist(), [s.train.trajectory for s in batch.samples], responses=packed.response.tolist(),
        ranks=1, cost=core.cost,
    )  # fmt: skip
    return packed, [(ids, packed.micro_batch(ids, core.device)) for step in plan.steps for ids in step.ranks[0]]
