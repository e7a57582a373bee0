"""KL estimators against the golden vectors, values and gradients."""

from __future__ import annotations

import pytest
import torch

from actors.trainer.objective.kl import approx_kl

ORACLE = ("kl_estimators",)


def test_kl_estimates_and_gradients_match_the_oracle(case, dtype, agree):
    p, x = case["params"], case["inputs"]
    if case["id"].endswith("k3_float32_overflow") and dtype == torch.float32:
        pytest.skip("e^119 has no float32; the loss filters such tokens, see test_oracle_policy")
    new = torch.tensor(x["new_logp"], dtype=dtype, requires_grad=True)
    base = torch.tensor(x["base_logp"], dtype=dtype)
    old = torch.tensor(x["old_logp"], dtype=dtype) if p["unbiased"] else None
    if "raises" in case["expected"]:
        with pytest.raises(ValueError, match="unknown"):
            approx_kl(p["kl_type"], new, base, old)
        return
    kl = approx_kl(p["kl_type"], new, base, old)
    kl.sum().backward()
    checked = agree(case, {"kl": kl, "grad_new_logp": new.grad}, dtype)
    assert set(checked) >= set(case["must_match"])
