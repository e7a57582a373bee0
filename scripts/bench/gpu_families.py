"""Causal classes of the installed transformers on one GPU in bfloat16: their proof and two steps.

    python -m scripts.bench gpu_families --out DIR [--only FAMILY ...] [--budget-s 300]
    python -m scripts.bench gpu_families --out DIR --device cpu --wider 1 --deeper 1        a rehearsal

Random models with transformers' own initialisation, 8 layers, hidden size 512 (`--wider 16 --deeper 4`). DIR/families.json is
written after each: how it is fed, its head, the differences of every way that was tried, seconds, or why it was refused.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from scripts.bench.gpu_train_parts import EQUAL, backend_for, batch_of, clocked


def main() -> None:
    """One family after another, in one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--wider", type=int, default=16)
    parser.add_argument("--deeper", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--budget-s", type=float, default=300.0)
    a = parser.parse_args()
    import torch
    import transformers

    from scripts.bench.causal_classes import CLASSES

    a.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "families": {}}
    found["device"] = torch.cuda.get_device_name() if a.device == "cuda" else "cpu"
    for family in a.only or CLASSES:
        left = a.budget_s - (time.monotonic() - began)
        found["families"][family] = tried(family, a) if left > 0 else {"error": "no time left"}
        (a.out / "families.json").write_text(json.dumps(found, indent=1))
        print(family, json.dumps(found["families"][family])[:300], flush=True)
        gc.collect()
        if a.device == "cuda":
            torch.cuda.empty_cache()


def tried(family: str, a: argparse.Namespace) -> dict[str, Any]:
    """Proof and two steps of one family, or its error."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from actors.trainer.torch_backend.implementations import proof
    from scripts.bench.causal_classes import tiny_config

    if family not in CONFIG_MAPPING:
        return {"error": "not in this transformers"}
    row: dict[str, Any] = {"ways": []}
    against = proof.Proof._against

    def noted(self: Any, measure: Any, **how: Any) -> str:
        problem = against(self, measure, **how)
        last = getattr(self, "_last", None)
        row["ways"].append(
            [self.policy.feed.value, self.policy.head.value, *((last.logp, last.grads) if last else ()), problem[:200]]
        )
        return problem

    directory = Path(tempfile.mkdtemp(prefix="families-"))
    proof.Proof._against = noted  # type: ignore[method-assign]
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(tiny_config(family, a.wider, a.deeper))
            row["parameters_m"] = round(sum(p.numel() for p in model.parameters()) / 1e6, 1)
            model.save_pretrained(directory)
        vocab = model.config.vocab_size
        del model
        start = clocked(a.device)
        case = {
            "device": a.device,
            "model": str(directory),
            "tokens": 2048,
            "settings": {"model_implementation": "transformers", "model_dtype": a.dtype},
        }
        backend = backend_for(case)
        row |= {"setup_s": round(clocked(a.device) - start, 2)}
        row |= {"feed": backend.core.policy.feed.value, "head": backend.core.policy.head.value, "steps": []}
        for step in range(2):
            batch = batch_of(case, EQUAL, step, vocab, 2)
            start = clocked(a.device)
            metrics = backend.train_step(batch).metrics
            names = ("train/loss", "train/grad_norm", "train/tokens")
            row["steps"].append({n: metrics[n] for n in names if n in metrics} | {"s": round(clocked(a.device) - start, 3)})
        backend.close()
    except Exception as error:  # noqa: BLE001 - the result says why it is missing
        row["error"] = f"{type(error).__name__}: {error}"[:600]
        row["where"] = traceback.format_exc().replace(f"{Path.cwd()}/", "")[-600:]
    finally:
        proof.Proof._against = against  # type: ignore[method-assign]
        shutil.rmtree(directory)
    return row


if __name__ == "__main__":
    main()
