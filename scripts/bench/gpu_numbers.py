"""Cases of gpu_train.py that are about numbers: log-probs, gradients, attention kernels and the vocabulary head against float32."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

from scripts.bench.gpu_train_parts import EQUAL, VARIED, backend_for, batch_of, clocked, planned


def logprobs(case: dict[str, Any], found: dict[str, Any]) -> None:
    """Distance of log-probs and gradients to float32, by way of computing in bf16."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    ways: dict[str, dict[str, Any]] = {
        "float32": {"model_dtype": "float32", "compile": "off", "attn_implementation": "sdpa"},
        "eager": {"compile": "off"},
        "compiled": {},
        "compiled_fa2": {"attn_implementation": "flash_attention_2"},
    }
    case["tokens"] //= 4
    want: dict[str, Any] = {}
    for name, settings in ways.items():
        try:
            backend = backend_for(case, **settings, lr=0.0, clip_grad=0.0, weight_decay=0.0)
            core = backend.core
            batch = batch_of(case, VARIED, 7, core.policy.hf.config.vocab_size, parts=2)
            packed, work = planned(core, batch)
            logp = core.score("old_logp", packed, [work]).double()
            again = core.score("old_logp", packed, [work]).double()
            backend.train_step(batch)
            grads = {n: p.grad.detach().float().clone() for n, p in core.weights.params.items()}
            if not want:
                want = {"logp": logp, "grads": grads}
                continue
            gap = (logp - want["logp"]).abs()
            apart = sum(float((g - want["grads"][n]).square().sum()) for n, g in grads.items()) ** 0.5
            size = sum(float(g.square().sum()) for g in want["grads"].values()) ** 0.5
            found[name] = {
                "logp_mean": float(gap.mean()), "logp_p99": float(gap.quantile(0.99)), "logp_max": float(gap.max()),
                "gradient": apart / size, "same_again": bool(torch.equal(logp, again)),
                "to_eager": None if name == "eager" else float((logp - want["eager"]).abs().mean()),
            }  # fmt: skip
            want.setdefault("eager", logp)
            backend.close()
            del backend, core, grads
            gc.collect()
        except Exception as error:  # noqa: BLE001 - the result says why it is missing
            found[name] = {"error": f"{type(error).__name__}: {error}"[:800]}


def attention(case: dict[str, Any], found: dict[str, Any]) -> None:
    """Each kernel against padded attention in float32: milliseconds and differences of values and gradients."""
    import torch

    from actors.trainer.torch_backend.layout import PackedBatch

    device = torch.device(case["device"])
    for kind in (EQUAL, VARIED):
        batch = batch_of(case, kind, 5, 500, parts=1)
        layout = PackedBatch(batch.samples).micro_batch(range(len(batch.samples)), device).layout
        found[kind] = {"tokens": int(layout.cu_seqlens[-1]), "samples": layout.samples, "longest": layout.longest}
        _kernels(case, layout, found[kind])


def _kernels(case: dict[str, Any], layout: Any, rows: dict[str, Any]) -> None:
    import torch

    from actors.trainer.torch_backend import attention as kernels

    device, (heads, kv_heads, size) = torch.device(case["device"]), (16, 8, 128) if case["shape"] != "tiny" else (4, 2, 16)
    half, t, scale = torch.bfloat16 if device.type == "cuda" else torch.float32, rows["tokens"], size**-0.5
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(t, h, size, device=device, dtype=half) for h in (heads, kv_heads, kv_heads, heads))

    def padded(*x: Any) -> Any:
        return kernels.padded_attention(*x, layout, scale)

    def flash(*x: Any, name: str) -> Any:
        return kernels.flash_attention(*x, layout.cu_seqlens, layout.longest, scale, name)[0]

    def made(compute: Any, *inputs: Any) -> tuple[Any, float, float]:
        held = [x.detach().requires_grad_() for x in inputs]
        for _ in range(3):
            a = clocked(case["device"])
            out = compute(*held)
            b = clocked(case["device"])
            grads = torch.autograd.grad(out, held, grad.to(out.dtype))
            c = clocked(case["device"])
        return [x.detach().double() for x in (out, *grads)], b - a, c - b

    want, *_ = made(padded, q.float(), k.float(), v.float())
    ways: dict[str, Any] = {"sdpa": padded}
    if device.type == "cuda":
        ways |= {name: partial(flash, name=name) for name in (kernels.FLASH_2, kernels.FLASH_3)}
    for name, compute in ways.items():
        try:
            got, forward_s, backward_s = made(compute, q, k, v)
        except Exception as error:  # noqa: BLE001 - a kernel that is missing is a result
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
            continue
        gaps = {n: (x - y).abs() for n, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True)}
        rows[name] = {"forward_ms": round(forward_s * 1e3, 3), "backward_ms": round(backward_s * 1e3, 3)} | {
            n: {"max": float(gap.max()), "mean": float(gap.mean())} for n, gap in gaps.items()
        }


def head(case: dict[str, Any], found: dict[str, Any]) -> None:
    """The vocabulary head by kernels and by torch: milliseconds, and distance to float64."""
    import torch

    from actors.trainer.torch_backend import head as heads

    device = torch.device(case["device"])
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, width, vocab = (case["tokens"], 1024, 151_936) if case["shape"] != "tiny" else (64, 32, 512)
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=device).to(half)
    weight = (torch.randn(vocab, width, device=device) * 0.05).to(half)
    targets = torch.randint(0, vocab, (rows,), device=device)
    warm, few = torch.linspace(0.7, 1.3, rows, device=device), min(rows, 256)
    pull = torch.randn(rows, device=device)
    z = (hidden[:few] @ weight.T).double() / warm[:few, None].double()  # logits as they are rounded
    log_p = torch.log_softmax(z, -1)
    want = log_p.gather(1, targets[:few, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
    d = (torch.nn.functional.one_hot(targets[:few], vocab) - log_p.exp()) * (pull[:few] / warm[:few])[:, None].double()
    want_hidden = d @ weight.double()
    ways = {"eager": lambda: None} | ({"fused": heads._kernels} if device.type == "cuda" else {})
    for name, kernels in ways.items():
        heads._kernels = kernels
        try:
            for entropy_gradient in (False, True):
                for _ in range(3):
                    h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
                    a = clocked(case["device"])
                    logp, entropy = heads.token_head(h, w, targets, warm, entropy_gradient=entropy_gradient)
                    b = clocked(case["device"])
                    (logp * pull).sum().backward() if not entropy_gradient else ((logp * pull).sum() + entropy.sum()).backward()
                    c = clocked(case["device"])
                row = {"forward_ms": (b - a) * 1e3, "backward_ms": (c - b) * 1e3}
                if not entropy_gradient:
                    row |= {
                        "logp_max": float((logp.detach()[:few].double() - want[0]).abs().max()),
                        "entropy_max": float((entropy.detach()[:few].double() - want[1]).abs().max()),
                        "grad_hidden": float((h.grad[:few].double() - want_hidden).norm() / want_hidden.norm()),
                        "grad_weight_norm": float(w.grad.double().norm()),
                    }
                found[name + ("_entropy" if entropy_gradient else "")] = row
        except Exception as error:  # noqa: BLE001 - the result says why it is missing
            found[name] = {"error": f"{type(error).__name__}: {error}"[:800]}
