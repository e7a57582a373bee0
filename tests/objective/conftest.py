"""Golden vectors: a test module with `ORACLE = (topics,)` and arguments (case, dtype) runs once per case and dtype."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

VECTORS = Path(__file__).parent / "vectors"
torch.set_num_threads(1)


def _numbers(x: Any) -> Any:
    if isinstance(x, list):
        return [_numbers(v) for v in x]
    if isinstance(x, dict):
        return {k: _numbers(v) for k, v in x.items()}
    return float(x) if x in ("nan", "inf", "-inf") else x


def cases(topic: str) -> list[dict[str, Any]]:
    loaded = json.loads((VECTORS / f"{topic}.json").read_text())["cases"]
    for case in loaded:
        for part in ("inputs", "expected", "defect_info"):
            case[part] = _numbers(case.get(part))
    return loaded


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    topics = getattr(metafunc.module, "ORACLE", ())
    if not topics or "case" not in metafunc.fixturenames:
        return
    chosen = [c for topic in topics for c in cases(topic)]
    metafunc.parametrize("case", chosen, ids=[c["id"] for c in chosen])
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])


def _flat(x: Any, masks: list[list[int]] | None) -> list[float]:
    if isinstance(x, torch.Tensor):
        x = x.detach().tolist()
    if not isinstance(x, list):
        return [float(x)]
    if x and isinstance(x[0], list):
        if masks is not None and [len(r) for r in x] == [len(m) for m in masks]:
            return [float(v) for row, m in zip(x, masks, strict=True) for v, keep in zip(row, m, strict=True) if keep]
        return [float(v) for row in x for v in _flat(row, None)]
    return [float(v) for v in x]


def _finite(x: Any) -> list[float]:
    """All finite numbers in nested lists."""
    if isinstance(x, list):
        return [v for part in x for v in _finite(part)]
    return [float(x)] if isinstance(x, int | float) and math.isfinite(x) else []


def _close(got: float, want: float, rtol: float, atol: float) -> bool:
    if math.isnan(want) or math.isinf(want) or math.isnan(got) or math.isinf(got):
        return (math.isnan(want) and math.isnan(got)) or want == got
    return abs(got - want) <= rtol * abs(want) + atol


def compare(case: dict[str, Any], got: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[str]:
    """Checks every must-match output in `got`, and the right values of a defect; returns the names checked."""
    info = case.get("defect_info") or {}
    right = info.get("right") or {}
    wanted = {k: (case["expected"][k], case.get("compare_where", "all")) for k in case["must_match"]}
    wanted |= {k: (v, info.get("compare_where", case.get("compare_where", "all"))) for k, v in right.items()}
    checked = []
    for name, (want, where) in wanted.items():
        if name not in got:
            continue
        masks = case["inputs"].get("loss_masks") if where == "mask" else None
        a, b = _flat(got[name], masks), _flat(want, masks)
        assert len(a) == len(b), f"{case['id']}: {name} has {len(a)} values, expected {len(b)}"
        if dtype == torch.float64:
            rtol, atol = 1e-6, 1e-9
        else:
            top = max((abs(v) for v in b if math.isfinite(v)), default=0.0)
            # A mean of terms that cancel is as exact as the terms: log-probs of 50 have a last place of 4e-6.
            said = _finite([case["inputs"].get(key, []) for key in ("new_logp", "old_logp")])
            lasts = max(map(abs, said), default=0.0) * torch.finfo(dtype).eps
            rtol, atol = 1e-5, max((case.get("tol_f32") or {}).get(name, 1e-5) * max(1e-3, top), lasts)
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert _close(x, y, rtol, atol), f"{case['id']}: {name}[{i}] = {x!r}, expected {y!r}"
        checked.append(name)
    return checked


@pytest.fixture
def agree() -> Any:
    return compare


@pytest.fixture
def ragged() -> Any:
    """Splits a packed tensor back into lists by response length."""

    def split(x: torch.Tensor, lengths: list[int]) -> list[list[float]]:
        return [part.tolist() for part in torch.split(x.detach(), lengths)]

    return split
